"""Local training, server half: rounds without exchange, as a baseline for federated learning.

Every device starts from the federation's initial weights and trains by itself. Only reports and evaluations are sent;
the global model stays.
"""

from __future__ import annotations

from sparrow.protocol.messages import Kind

from . import Aggregation, CoordinatorMethod, Schedule, Situation, Work


def work(situation: Situation) -> Work:
    """Return the work of every round: each device of the cohort trains its own model and reports."""
    return Work(Kind.personalise)


LOCAL = CoordinatorMethod(
    usable_global_model=False,
    personal_models=True,
    pages=True,
    why_not_secure=lambda settings: "devices send no model",
    schedule=Schedule(work=work),
    aggregation=Aggregation(why_mean_only="devices send no model"),
)
