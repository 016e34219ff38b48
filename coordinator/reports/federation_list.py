"""The list of all federations, for the first page, from one query."""

from __future__ import annotations

from sqlalchemy import case, func, select

from sparrow.protocol.messages import FederationStatus
from sparrow.protocol.overview import FederationSummary

from ..clock import iso
from ..storage.store import Store
from ..storage.tables import Device, Federation

MOST = 1000


class FederationList:
    """Summaries of all federations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def only(self) -> str | None:
        """Return the name of the only federation; None if there is none or several."""
        with self._store.reading() as db:
            names = db.scalars(select(Federation.name).limit(2)).all()
        return names[0] if len(names) == 1 else None

    def list(self, only: str | None = None) -> list[FederationSummary]:
        """Return the newest federations, or only the one of this name."""
        left = Device.present.is_(False) & Device.paused.is_(None)
        devices = (
            select(
                Device.federation_id,
                func.count().label("devices"),
                func.count(Device.failure).label("failed"),
                func.sum(case((left, 1), else_=0)).label("away"),
                func.count(Device.paused).label("paused"),
                func.avg(Device.accuracy).label("accuracy"),
                func.max(Device.seen_at).label("heard_at"),
            )
            .where(Device.status != "revoked")
            .group_by(Device.federation_id)
            .subquery()
        )
        rounds = Federation.settings["rounds"].as_integer()
        rows = select(Federation, rounds, devices).outerjoin(devices, devices.c.federation_id == Federation.id)
        if only is not None:
            rows = rows.where(Federation.name == only)
        with self._store.reading() as db:
            return [
                FederationSummary(
                    name=each.name,
                    method=each.method,
                    task=each.task,
                    status=FederationStatus(each.status),
                    round=each.round,
                    rounds=most or 0,
                    reason=each.reason,
                    created_at=iso(each.created_at),
                    devices=count or 0,
                    failed=failed or 0,
                    away=away or 0,
                    paused=paused or 0,
                    accuracy=accuracy,
                    heard_at=None if heard is None else iso(heard),
                    warning=each.warning,
                )
                for each, most, _, count, failed, away, paused, accuracy, heard in db.execute(
                    rows.order_by(Federation.id.desc()).limit(MOST)
                )
            ]
