"""Selections of devices as SQL, and their tags in the records."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, func, true

from sparrow.protocol.tags import Condition, Selection

from .tables import Device


def selected(selection: Selection) -> ColumnElement[bool]:
    """Return SQL that is true for the devices that a selection selects."""
    return and_(true(), *map(_met, selection.conditions))


def retag(device: Device, *, own: dict[str, str] | None = None, changes: dict[str, str | None] | None = None) -> bool:
    """Change a device's tags; return whether they differ.

    own: the device's tags. changes: an administrator's, key -> value; None removes the tag.
    """
    before = device.tags
    if own is not None:
        device.own_tags = own
    if changes is not None:
        kept = {**device.set_tags, **changes}
        device.set_tags = {key: value for key, value in kept.items() if value is not None}
    # New objects: SQLAlchemy does not notice changes within one.
    device.tags = {**device.own_tags, **device.set_tags}
    return device.tags != before


def _met(condition: Condition) -> ColumnElement[bool]:
    # No value is empty. NULL would make the whole expression NULL, also negated.
    value = func.coalesce(Device.tags[condition.key].as_string(), "")
    return value.not_in(condition.values) if condition.negated else value.in_(condition.values)
