"""Tags of devices, and selections of devices by their tags.

A device has at most one value for each key. A selection is a list of conditions that all must hold:

    board=orin and site in (lab, field) and power!=battery

A device without a value for a key meets ``!=``, and meets neither ``=`` nor ``in``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from .errors import ProtocolError

MOST_KEYS = 10
MOST_VALUES = 50
LONGEST_SELECTION = 500

KEY = r"[a-z][a-z0-9_]{0,31}"
VALUE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
TagKey = Annotated[str, Field(pattern=rf"^{KEY}$")]
TagValue = Annotated[str, Field(pattern=rf"^{VALUE}$")]
Tags = Annotated[dict[TagKey, TagValue], Field(max_length=MOST_KEYS)]

_CONDITION = re.compile(
    r"\s*(?P<key>[^\s=!(),]+)\s*(?:(?P<sign>!?=)\s*(?P<value>[^\s=!(),]+)|in\s*\((?P<values>[^()]*)\))\s*"
)


class BadSelection(ProtocolError):
    """A selection that cannot be parsed, or that names a key or value that the federation does not list."""


@dataclass(frozen=True)
class Condition:
    """A condition on one key: its value is one of ``values``, or, with ``negated``, none of them."""

    key: str
    values: tuple[str, ...]
    negated: bool = False

    def holds(self, tags: Mapping[str, str]) -> bool:
        """Return whether a device with these tags meets the condition."""
        return (tags.get(self.key) in self.values) != self.negated


@dataclass(frozen=True)
class Selection:
    """A selection of devices. Without conditions it selects all."""

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Return the selection that ``text`` describes; empty text selects all devices.

        Raises BadSelection if it does not follow the grammar.
        """
        if len(text) > LONGEST_SELECTION:
            raise BadSelection(f"the selection has {len(text)} characters; use at most {LONGEST_SELECTION}")
        found: list[Condition] = []
        rest = text.strip()
        while rest:
            match = _CONDITION.match(rest)
            if match is None:
                raise BadSelection(
                    f"{rest!r}: give KEY=VALUE, KEY!=VALUE or KEY in (VALUE, VALUE), and join conditions with 'and'"
                )
            found.append(_condition(match))
            rest = rest[match.end() :]
            if not rest:
                break
            joined = re.match(r"and\s+(?=\S)", rest)
            if joined is None:
                raise BadSelection(f"{rest!r}: join conditions with 'and', such as board=orin and site=lab")
            rest = rest[joined.end() :]
        return cls(tuple(found))

    def matches(self, tags: Mapping[str, str]) -> bool:
        """Return whether a device with these tags is selected."""
        return all(condition.holds(tags) for condition in self.conditions)

    @property
    def given(self) -> dict[str, str]:
        """The tags of all selected devices: those of conditions with ``=``."""
        return {each.key: each.values[0] for each in self.conditions if len(each.values) == 1 and not each.negated}

    def check(self, allowed: Mapping[str, tuple[str, ...]]) -> None:
        """Raise BadSelection for a key or value that the federation does not list."""
        for condition in self.conditions:
            for value in condition.values:
                check_tags({condition.key: value}, allowed)


def _condition(match: re.Match[str]) -> Condition:
    if match["values"] is None:
        return Condition(match["key"], (match["value"],), match["sign"] == "!=")
    values = tuple(value.strip() for value in match["values"].split(","))
    if not all(values):
        raise BadSelection(f"{match[0].strip()!r}: an empty value; use values such as (lab, field)")
    return Condition(match["key"], values)


def check_tags(tags: Mapping[str, str], allowed: Mapping[str, tuple[str, ...]]) -> None:
    """Raise BadSelection for tags that the federation does not list."""
    for key, value in tags.items():
        if key not in allowed:
            listed = f"this federation lists {', '.join(allowed)}" if allowed else "this federation lists no tags"
            raise BadSelection(f"tag {key!r} is unknown: {listed}")
        if value not in allowed[key]:
            raise BadSelection(f"tag {key}={value}: this federation lists {', '.join(allowed[key])} for {key}")


def check_form(tags: Mapping[str, str]) -> None:
    """Raise BadSelection for more than ``MOST_KEYS`` tags, or a key or value that no federation can list."""
    if len(tags) > MOST_KEYS:
        raise BadSelection(f"{len(tags)} tags; give at most {MOST_KEYS}")
    for key, value in tags.items():
        if not re.fullmatch(KEY, key) or not re.fullmatch(VALUE, value):
            raise BadSelection(
                f"tag {key}={value} is invalid; use up to 32 of a-z, 0-9 and _ for the key, and up to 64 letters, "
                f"digits, dots, dashes and underscores for the value"
            )


def read_allowed(text: object) -> object:
    """Return ``board=orin,pi site=lab`` as a dictionary; anything but text is returned as it is."""
    if not isinstance(text, str):
        return text
    found: dict[str, tuple[str, ...]] = {}
    for word in text.split():
        key, equals, values = word.partition("=")
        if not equals or key in found:
            raise ValueError(f"{word!r}: give each key once with its values, such as board=orin,pi site=lab")
        found[key] = tuple(values.split(","))
    return found


def _check_selection(text: str) -> str:
    Selection.parse(text)
    return text


AllowedTags = Annotated[
    dict[TagKey, Annotated[tuple[TagValue, ...], Field(min_length=1, max_length=MOST_VALUES)]],
    Field(max_length=MOST_KEYS),
    BeforeValidator(read_allowed),
]
"""The keys and values that a federation allows, also as text."""

Where = Annotated[str, Field(max_length=LONGEST_SELECTION), AfterValidator(_check_selection)]
"""A selection as text."""
