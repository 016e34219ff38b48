"""Ranges of settings, signed by a model's author or demanded by a device's owner.

A range is written ``NAME>=NUMBER``, ``NAME<=NUMBER`` or ``NAME=VALUE,VALUE``, for example ``cohort>=10``. Only settings
that affect the content of an update have ranges: ``BINDING``, and the method's own settings as
``method_settings.NAME``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from pydantic import Field, ValidationError, model_validator

from .errors import ProtocolError
from .fields import Record
from .settings import FederationSettings

Value = bool | int | float | str | None

BINDING = (
    "method",
    "optimizer",
    "learning_rate",
    "learning_rate_decay",
    "logit_adjustment",
    "logit_adjustment_from",
    "momentum",
    "weight_decay",
    "batch_size",
    "local_epochs",
    "local_steps",
    "clip",
    "update_clip",
    "noise_multiplier",
    "privacy_adjacency",
    "secure",
    "secure_bits",
    "secure_range",
    "secure_colluders",
    "secure_metrics",
    "precision",
    "seed",
    "draws",
    "cohort",
    "finetune_epochs",
    "finetune_learning_rate",
)
"""Settings that affect the content of an update, or the number of updates that hide it."""

LEAST = ("batch_size", "local_epochs", "local_steps", "noise_multiplier", "secure_colluders")
"""Settings whose larger values reveal less; a signed value is the minimum."""

MOST = ("clip", "update_clip")
"""Settings whose smaller values reveal less; a signed value is the maximum."""

OPERATORS = ("cohort",)
"""Binding settings that an operator may change in a running federation; devices check only the signed range."""

OWN = "method_settings."

_RANGE = re.compile(r"^\s*([A-Za-z_.][A-Za-z0-9_.]*)\s*(>=|<=|=)\s*(\S.*?)\s*$")


class Range(Record):
    """Allowed values of one setting: from ``least`` to ``most``, or one of ``only``."""

    least: float | None = None
    most: float | None = None
    only: tuple[Value, ...] | None = Field(default=None, max_length=100)

    @model_validator(mode="after")
    def _check(self) -> Range:
        bounded = self.least is not None or self.most is not None
        if bounded == (self.only is not None):
            raise ValueError("a range has bounds (least, most) or a list of values (only)")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"the range from {self.least:g} to {self.most:g} is empty")
        return self

    def holds(self, value: Value) -> bool:
        """Return whether a value is in the range. An unset value is in no range with bounds."""
        if self.only is not None:
            # True is not 1 here.
            return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.only)
        if value is None or isinstance(value, str | bool):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def joined(self, other: Range) -> Range:
        """Return the range with the bounds of both. Raises ValueError if it is empty, or if either is a list."""
        if self.only is not None or other.only is not None:
            raise ValueError("give one list of values for a setting, or bounds")
        least = [bound for bound in (self.least, other.least) if bound is not None]
        most = [bound for bound in (self.most, other.most) if bound is not None]
        return Range(least=max(least) if least else None, most=min(most) if most else None)

    def text(self, name: str) -> str:
        """Return the range as text: ``cohort>=10``."""
        if self.only is not None:
            return f"{name}={','.join(map(shown, self.only))}"
        bounds = ((">=", self.least), ("<=", self.most))
        return " and ".join(f"{name}{sign}{bound:g}" for sign, bound in bounds if bound is not None)


Ranges = Mapping[str, Range]


def shown(value: Value) -> str:
    """Return a value as text."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def binding(settings: FederationSettings) -> dict[str, Value]:
    """Return the binding settings by name, including the method's own."""
    found: dict[str, Value] = {name: getattr(settings, name) for name in BINDING}
    found["secure_metrics"] = settings.masks_metrics
    return found | {f"{OWN}{name}": value for name, value in sorted(settings.method_settings.items())}


def faults(ranges: Ranges, settings: FederationSettings) -> list[str]:
    """Return a sentence for each setting outside its range."""
    has = binding(settings)
    return [
        f"{name} is {shown(has.get(name))}, allowed is {allowed.text(name)}"
        for name, allowed in ranges.items()
        if not _within(name, allowed, has)
    ]


def _within(name: str, allowed: Range, has: Mapping[str, Value]) -> bool:
    # The number of steps depends on the data; the device checks it before it trains.
    if name == "local_steps" and has.get(name) is None and allowed.only is None:
        return True
    return allowed.holds(has.get(name))


def least_of(ranges: Ranges, name: str) -> int:
    """Return the lower bound of a setting, ``local_steps`` or ``cohort``; 0 without one."""
    allowed = ranges.get(name)
    return 0 if allowed is None or allowed.least is None else int(allowed.least)


def default_ranges(settings: FederationSettings) -> dict[str, Range]:
    """Return the ranges that a publication signs by default: each binding setting keeps its value, or may become more
    private. A cohort may shrink to ``min_devices``."""
    found = dict[str, Range]()
    for name, value in binding(settings).items():
        if name == "cohort":
            found[name] = Range(least=min(settings.cohort, settings.min_devices))
        elif name in LEAST and value is not None:
            found[name] = Range(least=float(str(value)))
        elif name in MOST and value is not None:
            found[name] = Range(most=float(str(value)))
        elif name in ("secure", "secure_metrics") and not value:
            found[name] = Range(only=(False, True))
        elif name == "noise_multiplier":
            # More noise always reveals less.
            continue
        else:
            found[name] = Range(only=(value,))
    return found


def read_ranges(texts: Iterable[str]) -> dict[str, Range]:
    """Return ranges by setting, from texts such as ``cohort>=10``.

    Raises ProtocolError for a text that is no range, or a setting without one.
    """
    found = dict[str, Range]()
    for text in texts:
        match = _RANGE.match(text)
        if match is None:
            raise ProtocolError(f"{text!r} is not a range; write NAME>=NUMBER, NAME<=NUMBER or NAME=VALUE,VALUE")
        name, sign, rest = match.groups()
        if name not in BINDING and not name.startswith(OWN):
            raise ProtocolError(f"{text!r}: {name} has no range; settings that have one are {', '.join(BINDING)}")
        try:
            new = _read(sign, rest)
            _check_values(name, new)
            found[name] = found[name].joined(new) if name in found else new
        except ValueError as error:
            reason = str(error).partition("Value error, ")[2].partition(" [")[0] or str(error)
            raise ProtocolError(f"{text!r}: {reason}") from None
    return found


def _read(sign: str, text: str) -> Range:
    if sign == "=":
        return Range(only=tuple(_value(each.strip()) for each in text.split(",")))
    try:
        bound = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    return Range(least=bound) if sign == ">=" else Range(most=bound)


def _check_values(name: str, allowed: Range) -> None:
    """Raise ValueError for a listed value that the setting cannot have."""
    for value in allowed.only or ():
        try:
            FederationSettings.model_validate({name: value} if name in BINDING else {})
        except ValidationError as error:
            # Other errors are conflicts between settings.
            if any(each["loc"] == (name,) for each in error.errors()):
                raise ValueError(f"{shown(value)} is not a valid value of {name}") from None


def _value(text: str) -> Value:
    """Parse a number, true, false, none, or text."""
    if text.lower() in ("none", "null"):
        return None
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text
