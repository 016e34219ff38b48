"""Reading options in ``--data PATH,key=value,...``; other entries belong to ``edge_sdk.tasks.dealing``.

label=NAME         column of the labels            drop=NAME+NAME        columns to leave out
target=class       labels: class, number           categories=NAME+NAME  columns of names
missing=drop       rows without a value: drop, mean
decimal=comma      decimal sign: point, comma      delimiter=semicolon   comma, semicolon, tab, pipe, space
encoding=cp1252    of a text                       skip=1                lines left out below the header
axes=NHWC          axes of an npz file's samples
rate=16000         samples per second that sounds and recordings are resampled to
window=2.56s       windows of a recording: s, ms, or a number of samples
step=1.28s         from window to window; by default half of it
time=NAME          column of a recording's times
unreadable=skip    leave out unreadable pictures and sounds
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..protocol.preparation import Preparation, Targets
from .errors import BadOption

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "space": " "}
DECIMALS = {"point": ".", "comma": ","}
# Samples, channels, height, width, time, features.
AXES = "NCHWTF"
HIGHEST_RATE = 1_000_000
# Longest window, in seconds and in samples.
LONGEST = 86_400
MOST_SAMPLES = 10_000_000


@dataclass(frozen=True)
class ReadOptions:
    """The options above. Raises BadOption for an invalid value."""

    label: str | None = None
    target: Literal["class", "number"] | None = None
    drop: tuple[str, ...] = ()
    missing: Literal["drop", "mean"] | None = None
    # The characters; a space matches any run of blanks.
    decimal: Literal[".", ","] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    # N first.
    axes: str | None = None
    skip: int = 0
    # Columns of names that look like numbers, or are many.
    categories: tuple[str, ...] = ()
    rate: float | None = None
    # Seconds as float, samples as int.
    window: float | None = None
    step: float | None = None
    time: str | None = None
    unreadable: Literal["skip"] | None = None

    def __post_init__(self) -> None:
        _choice("target", self.target, ("class", "number"))
        _choice("missing", self.missing, ("drop", "mean"))
        _choice("decimal", self.decimal, DECIMALS.values())
        _choice("delimiter", self.delimiter, DELIMITERS.values())
        _choice("unreadable", self.unreadable, ("skip",))
        if self.rate is not None and not 0 < self.rate <= HIGHEST_RATE:
            raise BadOption(f"--data: rate={self.rate:g}; use samples per second, above 0 and up to {HIGHEST_RATE:,}")
        for key, length in (("window", self.window), ("step", self.step)):
            if length is not None and not 0 < length <= (LONGEST if isinstance(length, float) else MOST_SAMPLES):
                raise BadOption(
                    f"--data: {key}={length}; use seconds above 0 and up to {LONGEST:,}, as in {key}=2.56s, or a "
                    f"number of samples up to {MOST_SAMPLES:,}"
                )
        if self.delimiter == self.decimal == ",":
            raise BadOption("--data: delimiter=comma,decimal=comma; a comma cannot be both, leave one of them out")
        if self.skip < 0:
            raise BadOption(f"--data: skip={self.skip}; give the number of lines to leave out below the header")
        if self.encoding is not None:
            _check_encoding(self.encoding)
        if self.axes is not None:
            _check_axes(self.axes)
        for key, names in (("drop", self.drop), ("categories", self.categories)):
            if not all(names):
                raise BadOption(f"--data: {key}={'+'.join(names)}; name columns, separated by +, as in {key}=id+time")
        both = [name for name in self.drop if name in (*self.categories, self.label, self.time)]
        if both:
            raise BadOption(f"--data: drop={both[0]} leaves out a column that another option uses; name it once")

    def refuse(self, source: str, reason: str, *keys: str) -> None:
        """Raise BadOption if one of these options is given."""
        for key in keys:
            if getattr(self, key) not in (None, (), 0):
                raise BadOption(f"{source}: {reason}, so {key}= has no effect; leave it out")


@dataclass(frozen=True)
class Wanted:
    """Requested samples; the fields are arguments of ``read_file``."""

    preparation: Preparation | None = None
    targets: Targets | None = None
    shape: tuple[int, ...] | None = None
    labelled: bool = True


def _choice(key: str, value: str | None, choices: Any) -> None:
    if value is not None and value not in choices:
        raise BadOption(f"--data: {key}={value!r}; choose {' or '.join(repr(choice) for choice in choices)}")


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise BadOption(
            f"--data: encoding={encoding} is unknown; give a name such as utf-8, utf-16, cp1252 or cp1251"
        ) from None


def _check_axes(axes: str) -> None:
    if not axes.startswith("N") or not 2 <= len(axes) == len(set(axes)) or not set(axes) <= set(AXES):
        raise BadOption(
            f"--data: axes={axes}; write N (samples) first, then each axis once: C channels, H height, "
            "W width, T time, F features, as in axes=NHWC"
        )


_KEY = re.compile(r"\s*[A-Za-z_]+\s*=")


def read_options(data: str) -> tuple[str, ReadOptions, str]:
    """Split ``PATH,key=value,...`` into path ("" if missing), reading options and the other entries in order.

    A path cannot contain a comma. Raises BadOption for an invalid value or a repeated key.
    """
    entries = data.split(",")
    path = "" if _KEY.match(entries[0]) else entries.pop(0).strip()
    given: dict[str, object] = {}
    rest = []
    for entry in entries:
        key, equals, text = (word.strip() for word in entry.partition("="))
        if key not in _READERS:
            rest.append(entry)
            continue
        read, example = _READERS[key]
        if key in given:
            raise BadOption(f"--data: {key} is set twice; set it once")
        if not equals or not text:
            raise BadOption(f"--data: {key} has no value; write {key}={example}, or leave it out")
        given[key] = read(key, text)
    return path, ReadOptions(**given), ",".join(rest)  # type: ignore[arg-type]


def _text(key: str, text: str) -> str:
    return text


def _names(key: str, text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split("+"))


def _axes(key: str, text: str) -> str:
    return text.upper()


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadOption(f"--data: {key}={text}; give the number of lines to leave out below the header, as in {key}=1")
    return int(text)


def _rate(key: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,9})?", text):
        raise BadOption(f"--data: {key}={text}; use samples per second, as in {key}=16000")
    return float(text)


def _length(key: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|ms)|([0-9]{1,9})", text.lower())
    if found is None:
        raise BadOption(
            f"--data: {key}={text}; use seconds, as in {key}=2.56s or {key}=2560ms, or a number of samples, as in "
            f"{key}=128"
        )
    if found[3]:
        return int(found[3])
    return float(found[1]) if found[2] == "s" else float(found[1]) / 1_000


def _one_of(choices: Mapping[str, str]) -> Callable[[str, str], str]:
    def read(key: str, text: str) -> str:
        if text.lower() not in choices:
            named = f"; to name the column with the labels: label={text}" if key == "target" else ""
            raise BadOption(f"--data: {key}={text}; choose {', '.join(choices)}{named}")
        return choices[text.lower()]

    return read


# Key -> parser of its text, and an example.
_READERS: Mapping[str, tuple[Callable[[str, str], Any], str]] = {
    "label": (_text, "activity"),
    "target": (_one_of({"class": "class", "number": "number"}), "number"),
    "drop": (_names, "id+time"),
    "missing": (_one_of({"drop": "drop", "mean": "mean"}), "drop"),
    "decimal": (_one_of(DECIMALS), "comma"),
    "delimiter": (_one_of(DELIMITERS), "semicolon"),
    "encoding": (_text, "cp1252"),
    "axes": (_axes, "NHWC"),
    "skip": (_count, "1"),
    "categories": (_names, "city"),
    "rate": (_rate, "16000"),
    "window": (_length, "2.56s"),
    "step": (_length, "1.28s"),
    "time": (_text, "timestamp"),
    "unreadable": (_one_of({"skip": "skip"}), "skip"),
}
