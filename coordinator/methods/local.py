"""Local training alone, server half: rounds without exchange, the baseline that federated learning has to beat.

Every device starts from the federation's initial weights and trains by itself; nothing of a model goes up, and the
global model stays what it was. Reports and evaluations are collected as for any other method.
"""

from __future__ import annotations

from sparrow.protocol.messages import Kind

from . import Aggregation, CoordinatorMethod, Schedule, Situation, Work


def work(situation: Situation) -> Work:
    """Return the same work for every round: each device of the cohort trains its own model and reports."""
    return Work(Kind.personalise)


LOCAL = CoordinatorMethod(
    usable_global_model=False,
    personal_models=True,
    pages=True,
    why_not_secure=lambda settings: "nothing of a model goes up",
    schedule=Schedule(work=work),
    aggregation=Aggregation(why_mean_only="nothing of a model goes up"),
)
