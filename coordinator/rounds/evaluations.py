"""Evaluations after a round: each device that is asked evaluates models on its own data.

A device judges the personal model that it keeps, for which nothing goes down but the request. The global model travels
to be judged, so a sample of the devices that are there judges it, seldom: ``global_evaluation_devices`` of them, every
``global_evaluation_interval`` rounds and at the end. Where devices keep no personal model there is nothing else to
judge, and the sample does so every ``evaluation_interval`` rounds. At the end, where a mixture with the global model
may be the better personal model, every device is sent the finished one.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from edge_sdk.protocol.messages import Kind
from sparrow.coordinator.methods import load_method
from sparrow.coordinator.models.global_models import settings_of
from sparrow.coordinator.rounds.assignments import assign, rests
from sparrow.coordinator.rounds.candidates import devices_of
from sparrow.coordinator.rounds.draws import Candidate, choose
from sparrow.coordinator.storage.tables import Device, Federation


def ask_for_evaluation(
    db: Session, federation: Federation, now: float, *, with_global: bool = False, last: bool = False
) -> bool:
    """Ask the devices that are present, stopped or not, to evaluate models; return False if nobody is asked.

    Those that rest because their updates were refused are not asked.

    with_global: a sample of them also judges the global model. last: so it does, for no round follows.
    """
    method, settings = load_method(federation.method), settings_of(federation)
    there = devices_of(db, federation, ("active", "stopped"))
    present = sorted((each for each in there if each.present and not rests(each, now)), key=_name)
    sends = method.sends_values(Kind.evaluate, holds_model=True)
    sample: set[str] = set()
    mixes = last and method.mixes_global and settings.personal_model == "best"
    if sends and (mixes or not method.usable_global_model):  # which means nothing without the newest global model
        sample = {device.name for device in present}
    elif sends and (with_global or last or not method.personal_models):
        sample = set(
            choose(
                [Candidate(device.name) for device in present],
                settings.global_evaluation_devices,
                secret=federation.secret,
                round_number=federation.round,
                purpose="evaluation",
            )
        )
    asked = [device for device in present if device.name in sample or (method.personal_models and device.holds_model)]
    for position, device in enumerate(asked):
        whole = device.name in sample
        assignment = assign(federation, device, Kind.evaluate, federation.round, position, now, whole=whole)
        assignment.plan = {"finished": True} if mixes else None
        db.add(assignment)
    return bool(asked)


def _name(device: Device) -> str:
    return device.name
