"""The records of a federation that has grown large, written straight into a store: ten thousand devices, a thousand
rounds."""

from __future__ import annotations

import json

from sqlalchemy import insert, update

from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.reports.summary import summarise
from sparrow.coordinator.storage.tables import Assignment, Device, Federation, Round

BEGAN = 1_700_000_000.0


def grow(store, *, devices, rounds, cohort, name="f"):
    """Give federation ``name``, which has neither yet, so many devices and closed rounds, and one open round.

    Every fifth round was judged, with accuracy number / 2000. Every tenth device has stopped, every eleventh is away.
    """
    with store.writing() as db:
        federation = find(db, name)
        db.execute(
            insert(Device),
            [
                {
                    "id": f"{federation.id:08x}{index:024x}",
                    "federation_id": federation.id,
                    "name": f"device-{index:05d}",
                    "token_sha256": (federation.id * 2**32 + index).to_bytes(32, "big"),
                    "token_issued_at": BEGAN,
                    "enrolment_key_sha256": bytes(32),
                    "profile": {"board": f"Raspberry Pi {3 + index % 3}", "sensors": ["hwmon"] * (index % 3)},
                    "budget": 0.2 * (1 + index % 5),
                    "status": "active" if index % 10 else "stopped",
                    "stopped_round": None if index % 10 else 1 + index % max(1, rounds),
                    "present": bool(index % 11),
                    "holds_model": True,
                    "enrolled_at": BEGAN,
                    "seen_at": BEGAN + index,
                }
                for index in range(devices)
            ],
        )
        db.execute(insert(Round), [_closed(federation.id, number, cohort) for number in range(1, rounds + 1)])
        opened = BEGAN + 60 * rounds
        times = {"federation_id": federation.id, "opened_at": opened, "deadline_at": opened + 300}
        db.add(Round(number=rounds + 1, status="open", target=cohort, **times))
        work = {"federation_id": federation.id, "round": rounds + 1, "kind": "train", "model_version": 0, "full": False}
        asked = [index for index in range(devices) if index % 10 and index % 11][:cohort]
        db.execute(
            insert(Assignment),
            [
                {
                    **work,
                    "id": f"{federation.id:08x}{index:024x}",
                    "device_id": f"{federation.id:08x}{index:024x}",
                    "position": position,
                    "status": "open" if position % 2 else "returned",
                    "created_at": opened,
                    "deadline_at": opened + 300,
                }
                for position, index in enumerate(asked)
            ],
        )
        settings = {**federation.settings, "rounds": rounds + 10}
        db.execute(
            update(Federation)
            .where(Federation.id == federation.id)
            .values(status="running", round=rounds, settings=settings)
        )


def _closed(federation_id, number, cohort):
    opened = BEGAN + 60 * number
    item = {
        "federation_id": federation_id,
        "number": number,
        "status": "closed",
        "opened_at": opened,
        "deadline_at": opened + 300,
        "closed_at": opened + 30,
        "target": cohort,
        "extensions": 0,
        "undone": False,
        "stale": False,
    }
    record = summarise(Round(**item), [])
    phase = {"seconds": 2.0 * cohort, "joules_measured": 0.0, "joules_estimated": 3.0 * cohort}
    known = {
        "cohort": tuple(f"device-{index:05d}" for index in range(cohort)),
        "updates": cohort,
        "bytes_up": 1000 * cohort,
        "bytes_down": 2000 * cohort,
        "evaluation_bytes_down": 10,
        "train_loss": 1 / number,
        "train": record.train.model_copy(update=phase),
    }
    if number % 5 == 0:
        known |= {"accuracy_personal": number / 2000, "accuracy_personal_decile": number / 4000}
    return {**item, "summary": json.loads(record.model_copy(update=known).model_dump_json())}
