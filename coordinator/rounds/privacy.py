"""The privacy cost of a federation's models (``sums.private``)."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sparrow.protocol.accounting import SENSITIVITY, gaussian_epsilon
from sparrow.protocol.errors import MissingPart
from sparrow.protocol.messages import Kind, PrivacySpent
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from ..storage.tables import Assignment, Device


def epsilon(settings: FederationSettings, times: int) -> float:
    """Return epsilon at ``privacy_delta`` after a device was drawn ``times`` times.

    Raises BadContent if the accountant is not installed.
    """
    assert settings.noise_multiplier is not None, "the federation promises something"
    noise = settings.noise_multiplier / SENSITIVITY[settings.privacy_adjacency]
    try:
        return gaussian_epsilon(settings.privacy_delta, (noise, times))
    except MissingPart as error:
        raise BadContent(f"noise_multiplier: at the coordinator {error}") from None


def spent(db: Session, federation_id: int, number: int, settings: FederationSettings) -> PrivacySpent | None:
    """Return the privacy cost of the models up to round ``number``; None without noise."""
    if settings.noise_multiplier is None:
        return None
    draws = (
        select(func.count())
        .select_from(Assignment)
        .join(Device, Device.id == Assignment.device_id)
        .where(
            Assignment.federation_id == federation_id,
            Assignment.kind.in_((Kind.keys.value if settings.secure else Kind.train.value, Kind.compare.value)),
            Assignment.round <= number,
        )
        .group_by(Device.name)
        .subquery()
    )
    times = db.scalar(select(func.max(draws.c[0]))) or 0
    return PrivacySpent(
        epsilon=epsilon(settings, times),
        delta=settings.privacy_delta,
        adjacency=settings.privacy_adjacency,
        most_draws=times,
    )
