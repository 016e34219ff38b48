"""The recorded state of a secure round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind
from sparrow.protocol.parts import Plan
from sparrow.protocol.secure.numbers import Scale
from sparrow.protocol.settings import FederationSettings

from ..models.global_models import settings_of
from ..storage.tables import Assignment, Federation, Round

PHASES = (Kind.keys.value, Kind.shares.value, Kind.train.value, Kind.agree.value, Kind.unmask.value)


class CellState(BaseModel):
    """Devices whose updates are summed together."""

    model_config = ConfigDict(frozen=True)

    names: tuple[str, ...]
    ratio: float | None
    # Seed of their neurons, drawn at this active ratio.
    key: str


class SecureState(BaseModel):
    """The state of a secure round in ``Round.secure``; results of later phases are empty."""

    model_config = ConfigDict(frozen=True)

    phase: Kind
    context: str
    # Plan of the training.
    plan: Plan
    # Seed of the neighbours' draw.
    seed: str = ""
    # The devices that sent keys -> identity key.
    cohort: Mapping[str, str] = {}
    neighbours: int = 0
    threshold: int = 0
    cells: tuple[CellState, ...] = ()
    # Weights of the updates.
    weights: Mapping[str, int] = {}
    # Devices that shared secrets.
    shared: tuple[str, ...] = ()
    # Devices that sent a masked update.
    left: tuple[str, ...] = ()

    def cell_of(self, name: str) -> CellState:
        """Return the cell of a device."""
        return next(cell for cell in self.cells if name in cell.names)


def state_of(current: Round) -> SecureState:
    """Return the state of a secure round."""
    return SecureState.model_validate(current.secure)


def state_for(db: Session, federation: Federation, assignment: Assignment) -> SecureState | None:
    """Return the state of an assignment's round; None if the round is not secure."""
    if not settings_of(federation).secure or assignment.kind not in PHASES:
        return None
    found = db.scalar(
        select(Round.secure).where(Round.federation_id == federation.id, Round.number == assignment.round)
    )
    return None if found is None else SecureState.model_validate(found)


def scale_of(settings: FederationSettings, names: Sequence[str], weights: Mapping[str, int]) -> Scale:
    """Return the scale of a cell's numbers."""
    return Scale(settings.secure_bits, len(names), settings.secure_range, max(weights[name] for name in names))
