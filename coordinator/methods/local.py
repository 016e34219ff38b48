"""Local training alone, server half: rounds without exchange, the baseline that federated learning has to beat.

Every device starts from the federation's initial weights and trains by itself; nothing of a model goes up, and the
global model stays what it was. Reports and evaluations are collected as for any other method.
"""

from __future__ import annotations

from edge_sdk.protocol.messages import FederationSettings, Kind
from sparrow.coordinator.methods import CoordinatorMethod, Situation, Work


class Local(CoordinatorMethod):
    """Server half of local training: it only calls the rounds."""

    usable_global_model = False
    personal_models = True

    def smallest_budget(self, settings: FederationSettings) -> float:
        """The whole model."""
        return 1.0

    def why_mean_only(self, settings: FederationSettings) -> str | None:
        """There is none."""
        return "nothing of a model goes up"

    def work(self, situation: Situation) -> Work:
        """Everybody drawn trains, and reports."""
        return Work(Kind.personalise)
