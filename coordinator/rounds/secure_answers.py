"""Work for devices in a secure round, and checks of their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind
from sparrow.protocol.secure.groups import neighbourhoods
from sparrow.protocol.secure.messages import Agree, Keys, Peer, SecureWork, Shares, Statement, Unmask

from ..errors import BadContent
from ..models.global_models import settings_of
from ..storage.tables import Assignment, Device, Federation
from .secure_state import SecureState, scale_of, state_for

ANSWERS: Mapping[str, type[BaseModel]] = {
    Kind.keys.value: Keys,
    Kind.shares.value: Shares,
    Kind.agree.value: Agree,
    Kind.unmask.value: Unmask,
}
"""Phases answered in JSON, with the type of the answer."""


def secure_work(db: Session, federation: Federation, assignment: Assignment, name: str) -> SecureWork | None:
    """Return the secure part of a device's assignment; None if its round is not secure."""
    state = state_for(db, federation, assignment)
    if state is None:
        return None
    work = _outline(federation, assignment, name, state)
    number = assignment.round
    received: dict[str, Any] = {}
    match assignment.kind:
        case Kind.shares.value:
            wanted = {*work.neighbours, *work.cell} - {name}
            point = {other: place for place, other in enumerate(sorted(state.cohort), start=1)}
            received["peers"] = tuple(
                Peer(name=other, identity=state.cohort[other], keys=Keys.model_validate(keys), point=point[other])
                for other, keys in _answers(db, federation, number, Kind.keys, wanted)
            )
            received["cohort"] = state.cohort
        case Kind.train.value:
            shared = _answers(db, federation, number, Kind.shares, work.neighbours)
            received["sealed"] = {other: report["sealed"][name] for other, report in shared if name in report["sealed"]}
        case Kind.agree.value:
            trained = _answers(db, federation, number, Kind.train, state.left)
            received["statements"] = {other: Statement.model_validate(report["secure"]) for other, report in trained}
        case Kind.unmask.value:
            agreed = _answers(db, federation, number, Kind.agree, state.left)
            received["signatures"] = {other: report["signature"] for other, report in agreed}
    return work.model_copy(update=received)


def _outline(federation: Federation, assignment: Assignment, name: str, state: SecureState) -> SecureWork:
    """Return the secure part of an assignment without the answers of other devices."""
    settings = settings_of(federation)
    work: dict[str, Any] = {"context": state.context, "colluders": settings.secure_colluders}
    if assignment.kind == Kind.keys.value:
        return SecureWork.model_validate(work)
    cell = state.cell_of(name)
    around = neighbourhoods(tuple(state.cohort), state.neighbours, f"graph {state.seed}".encode())[name]
    scale = scale_of(settings, cell.names, state.weights)
    work |= {
        "threshold": state.threshold,
        "neighbours": around,
        "cell": cell.names,
        "bits": scale.bits,
        "value_range": scale.value_range,
        "largest_weight": scale.largest_weight,
        "weight": state.weights[name],
    }
    if assignment.kind == Kind.train.value:
        work["left"] = sorted(set(state.shared) & set(cell.names))
    elif assignment.kind != Kind.shares.value:
        work["left"] = state.left
        work["gone"] = sorted(set(state.shared) - set(state.left))
        work["cells"] = [each.names for each in state.cells]
    return SecureWork.model_validate(work)


def _answers(
    db: Session, federation: Federation, number: int, kind: Kind, names: Collection[str]
) -> list[tuple[str, dict[str, Any]]]:
    rows = db.execute(
        select(Device.name, Assignment.report)
        .join(Device, Device.id == Assignment.device_id)
        .where(
            Assignment.federation_id == federation.id,
            Assignment.round == number,
            Assignment.kind == kind.value,
            Assignment.status == "done",
            Device.name.in_(list(names)),
        )
        .order_by(Device.name)
    )
    return [(name, report or {}) for name, report in rows]


def check_answer(
    db: Session, federation: Federation, assignment: Assignment, device: Device, answer: BaseModel
) -> None:
    """Check the signature of an answer and the devices that it names. Raises BadContent."""
    # Needs cryptography, an optional dependency.
    from sparrow.protocol.secure.device import check_agreement, check_keys, story, whole_of
    from sparrow.protocol.secure.pads import BadSecret

    state = state_for(db, federation, assignment)
    if state is None:
        raise BadContent("the round is over or not secure; ask for the next assignment")
    work = _outline(federation, assignment, device.name, state)
    if isinstance(answer, Keys):
        if device.identity_key is None:
            raise BadContent("this device sent no identity key; enrol again with an SDK that has the extra secure")
        try:
            check_keys(answer, device.identity_key, work.context, device.name)
        except BadSecret as error:
            raise BadContent(str(error)) from None
    elif isinstance(answer, Agree):
        signed = story(work.context, whole_of(state.cohort, work.colluders), work)
        try:
            check_agreement(answer, device.identity_key or "", work.context, signed, device.name)
        except BadSecret as error:
            raise BadContent(str(error)) from None
    elif isinstance(answer, Shares) and answer.sealed.keys() != set(work.neighbours):
        raise BadContent("shares: sealed for others than the neighbours of this device; fetch the assignment again")
    elif isinstance(answer, Unmask):
        named = {*answer.seeds, *answer.pads}
        if not named <= set(work.neighbours) or answer.seeds.keys() & answer.pads.keys():
            raise BadContent(
                "unmask: reports devices that are not neighbours of this one, or both kinds for one device"
            )
        if not answer.seeds.keys() <= set(work.left) or not answer.pads.keys() <= set(work.gone):
            raise BadContent("unmask: has self-masks of devices that dropped out, or pads of remaining devices")


def check_statement_of(
    db: Session, federation: Federation, assignment: Assignment, device: Device, stated: Statement | None
) -> None:
    """Check an update's signed statement against the work that was sent. Raises BadContent."""
    # Needs cryptography, an optional dependency.
    from sparrow.protocol.secure.device import check_statement, present_of, whole_of
    from sparrow.protocol.secure.pads import BadSecret

    state = state_for(db, federation, assignment)
    if stated is None or state is None:
        raise BadContent("report: secure, the signed statement about the work, is missing; update this SDK")
    work = _outline(federation, assignment, device.name, state)
    try:
        check_statement(stated, device.identity_key or "", work.context, device.name)
    except BadSecret as error:
        raise BadContent(str(error)) from None
    if stated.present != present_of(work.left, whole_of(state.cohort, work.colluders)):
        raise BadContent("report: secure names other devices than the work of this device; fetch the assignment again")
