"""Evaluations after a round: devices evaluate models on their own data.

Devices evaluate their personal models every ``evaluation_interval`` rounds. The global model must be downloaded for
this, so only a sample of ``global_evaluation_devices`` evaluates it, every ``global_evaluation_interval`` rounds and at
the end. Without personal models, the sample evaluates at both intervals.

With ``personal_model=fleet`` the end has two steps. Devices first ``compare`` their candidates with the finished model
and report moments; the evaluation then carries the mean moments (``protocol.evidence``). In secure rounds the last
cohort reports them under its masks. With fewer than ``FEWEST_DEVICES`` devices, each chooses by its own data.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.evidence import Pool, pool_of
from sparrow.protocol.messages import Kind, Receipt
from sparrow.protocol.settings import FederationSettings

from ..draws import Candidate, choose
from ..errors import read_stored
from ..methods import load_method, sends_values
from ..models.global_models import settings_of
from ..storage.tables import Assignment, Device, Federation, Round
from ..sums.private import noisy_means
from .assignments import assign
from .candidates import ENROLLED, devices_of, why_over
from .failing import rests
from .skew import adjustment


def ask_for_evaluation(
    db: Session, federation: Federation, now: float, *, with_global: bool = False, last: bool = False
) -> bool:
    """Request evaluations from present devices that do not rest; return True if there are any.

    with_global: a sample also evaluates the global model. last: no round follows; implies ``with_global``, or requests
    the comparison if that comes first.
    """
    method = load_method(federation.method)
    settings = settings_of(federation)
    there = devices_of(db, federation, ENROLLED)
    present = sorted((each for each in there if each.present and not rests(each, now)), key=_name)
    mixes = last and method.mixes_global and settings.keeps_best
    kind, plan = _work(db, federation, settings, mixes=mixes)
    sample = _who_judges_global(federation, settings, present, always=mixes, wanted=with_global or last)
    asked = [device for device in present if device.name in sample or (method.personal_models and device.holds_model)]
    for position, device in enumerate(asked):
        whole = device.name in sample
        assignment = assign(federation, device, kind, federation.round, position, now, whole=whole)
        assignment.plan = plan or None
        db.add(assignment)
    return bool(asked)


def evaluate_in_between(db: Session, federation: Federation, before: int, now: float) -> None:
    """Request the evaluations due after a round."""
    settings = settings_of(federation)
    number = federation.round

    def is_due(interval: int) -> bool:
        return interval > 0 and number // interval > before // interval

    with_global = is_due(settings.global_evaluation_interval)
    if with_global or is_due(settings.evaluation_interval):
        last = why_over(db, federation) is not None
        ask_for_evaluation(db, federation, now, with_global=with_global, last=last)


def _work(
    db: Session, federation: Federation, settings: FederationSettings, *, mixes: bool
) -> tuple[Kind, dict[str, Any]]:
    """Return the work and its plan. mixes: the personal model may become a mixture with the finished one."""
    plan: dict[str, Any] = adjustment(db, federation)
    if not mixes:
        return Kind.evaluate, plan
    plan |= {"finished": True}
    if settings.personal_model != "fleet":
        return Kind.evaluate, plan
    compared = _compared(db, federation)
    if not compared and not settings.secure:
        return Kind.compare, plan
    pool = _pool(db, federation, settings, compared)
    return Kind.evaluate, plan if pool is None else plan | pool.as_plan()


def _who_judges_global(
    federation: Federation, settings: FederationSettings, present: list[Device], *, always: bool, wanted: bool
) -> set[str]:
    """Return the names of the devices that evaluate the global model: all if ``always``, a sample if ``wanted``."""
    method = load_method(federation.method)
    if not sends_values(method, Kind.evaluate, holds_model=True):
        return set()
    # A personal model that is not usable by itself must be combined with the newest global model.
    if always or not method.usable_global_model:
        return {device.name for device in present}
    if not (wanted or not method.personal_models):
        return set()
    chosen = choose(
        [Candidate(device.name) for device in present],
        settings.global_evaluation_devices,
        secret=federation.secret,
        round_number=federation.round,
        purpose="evaluation",
    )
    return set(chosen)


def _compared(db: Session, federation: Federation) -> list[Assignment]:
    of_last = select(Assignment).where(
        Assignment.federation_id == federation.id,
        Assignment.round == federation.round,
        Assignment.kind == Kind.compare.value,
    )
    return list(db.scalars(of_last))


def _pool(db: Session, federation: Federation, settings: FederationSettings, compared: list[Assignment]) -> Pool | None:
    """Return the mean moments; None if too few devices reported them, or with noise in secure rounds."""
    if settings.secure:
        return _pool_of_round(db, federation) if settings.noise_multiplier is None else None
    receipts = [read_stored(Receipt, each.report) for each in compared if each.status == "done"]
    reported = [each.evidence for each in receipts if each is not None and each.evidence is not None]
    if settings.noise_multiplier is None:
        return pool_of(reported)
    means = noisy_means(reported, len(compared), settings, federation.noise_key, federation.round)
    return Pool.of(len(compared), means)


def _pool_of_round(db: Session, federation: Federation) -> Pool | None:
    last = db.scalar(select(Round).where(Round.federation_id == federation.id, Round.number == federation.round))
    notes = last.notes if last is not None and isinstance(last.notes, dict) else {}
    means = notes.get("metrics", {})
    return Pool.of(int(notes.get("secure_unmask_asked", 0)), means)


def _name(device: Device) -> str:
    return device.name
