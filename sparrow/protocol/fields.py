"""Field types of messages and settings, with their bounds, and the base classes of both.

Every number of a request has an upper bound beyond any honest device, chosen so that the coordinator's sums over a
million devices and a million rounds stay finite, and integers over a million devices fit 64 bits. Text may not contain
NUL, which PostgreSQL does not store, or half surrogate pairs, which are not valid UTF-8.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
FederationName = Annotated[str, Field(pattern=NAME_PATTERN)]
DeviceName = FederationName
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
MOST_SECONDS = 1e9
"""Upper bound of durations: thirty years."""
MOST_JOULES = 1e12
"""Upper bound of energies: a kilowatt for thirty years."""
CELSIUS = (-273.15, 1000.0)
MOST_COUNT = 2**43
"""Upper bound of one device's count in one round: 8.8e12, as bytes 8 TiB. The sum of a million fits 64 bits."""
MOST_FLOPS = 10**21
"""Upper bound of FLOPs: a quarter of an hour of the largest computer today. Records store no sums of them."""
LARGEST_SCORE = 3.4028234663852886e38
"""The largest float32."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Joules = Annotated[float, Field(ge=0, le=MOST_JOULES)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Flops = Annotated[int, Field(ge=0, le=MOST_FLOPS)]
Total = Annotated[int, Field(ge=0, le=2**53)]
"""A device's count over its lifetime."""
Score = Annotated[float, Field(ge=-LARGEST_SCORE, le=LARGEST_SCORE)]
Limit = Annotated[float, Field(gt=0, le=1e12)]
OwnSetting = bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | Annotated[str, Field(max_length=200)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Secret = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
"""A token, sent in a header."""
LONGEST_LINK = 1000
"""Largest number of characters after a link's scheme; phones cannot read QR codes with many more."""


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
Size = Annotated[int, Field(ge=1, le=2**31)]


class Record(BaseModel):
    """Base of descriptions; refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Request(Record):
    """Base of requests and settings; refuses unknown fields and text that cannot be stored."""

    @model_validator(mode="after")
    def _storable(self) -> Request:
        for name, value in self.__dict__.items():
            check_text(name, value)
        return self


def bounded(loss: float) -> float:
    """Return a finite loss limited to float32, for reports."""
    return max(-LARGEST_SCORE, min(LARGEST_SCORE, loss))


def check_text(name: str, value: object) -> None:
    """Raise ValueError if text, also in a collection, has NUL or half a surrogate pair. Nested models check
    themselves."""
    if isinstance(value, str):
        if "\0" in value or not (value.isascii() or _is_unicode(value)):
            raise ValueError(f"{name}: text with a NUL character or half a surrogate pair cannot be stored; remove it")
    elif isinstance(value, tuple | list):
        for each in value:
            check_text(name, each)
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            check_text(name, each)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Answer(BaseModel):
    """Base of the coordinator's answers."""

    model_config = ConfigDict(frozen=True, extra="ignore")
