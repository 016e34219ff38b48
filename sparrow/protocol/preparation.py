"""Descriptions of a model's preparation and targets: how raw samples become inputs, and the meaning of outputs.

A *raw sample* is one row of a table as float32, with categories by index, or one sample of an npz file in its own type.
The preparation is an ONNX graph from a batch of raw samples to a batch of inputs, published with the skeleton. These
records are part of the manifest: devices need them to read files, and people to understand an exported model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from .fields import Name, Record, Size

MOST_COLUMNS = 10_000
MOST_CATEGORIES = 1_000
"""Largest number of categories per column."""
MOST_CLASSES = 10_000

RawType = Literal["float32", "uint8", "int8", "uint16", "int16", "int32", "int64"]
"""Accepted types of raw samples."""

RAW_TYPES: tuple[str, ...] = get_args(RawType)

OWN_MEAN, OWN_DEVIATION = "own:mean", "own:deviation"
"""Initialisers of a graph that each device fills with its own statistics."""

Reader = Literal["rows", "arrays", "images", "audio", "recordings"]
"""Source of raw samples: table rows, arrays of an npz file, pictures, sounds, or windows of recordings."""

UNKNOWN = -1
"""Index of an unknown category, which becomes zeros."""


class Column(Record):
    """A column of a table. A raw row has its number, or the index of its category, -1 for an unknown one."""

    name: Name
    categories: tuple[Name, ...] = Field(default=(), max_length=MOST_CATEGORIES)

    @model_validator(mode="after")
    def _check(self) -> Column:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError(f"the column {self.name!r} names a category twice")
        return self


class Preparation(Record):
    """Description of a preparation."""

    reader: Reader = "arrays"
    # Shape of one raw sample; axes in ``free`` may be shorter.
    dtype: RawType = "float32"
    shape: tuple[Size, ...] = Field(max_length=7)
    free: tuple[Annotated[int, Field(ge=0, le=6)], ...] = Field(default=(), max_length=7)
    # Samples per second along the time axis.
    rate: float | None = Field(default=None, gt=0, le=1e6)
    # Seconds between two windows of a recording.
    step: float | None = Field(default=None, gt=0, le=86_400)
    # The graph's operations, for people.
    steps: tuple[Name, ...] = Field(default=(), max_length=32)
    # Letters of the raw axes, such as HWC.
    axes: str = Field(default="", max_length=7, pattern=r"^[A-Z]*$")
    # Columns of a table, in the order of a raw row.
    columns: tuple[Column, ...] = Field(default=(), max_length=MOST_COLUMNS)
    # A recording's columns, in the order of the raw axis ``channel``.
    channels: tuple[Name, ...] = Field(default=(), max_length=MOST_COLUMNS)
    # Statistics of the publisher's raw training samples, by column or channel, so that devices can detect other units.
    mean: tuple[float, ...] = Field(default=(), max_length=MOST_COLUMNS)
    deviation: tuple[Annotated[float, Field(gt=0)], ...] = Field(default=(), max_length=MOST_COLUMNS)
    channel: int = Field(default=0, ge=0, le=6)
    # Use each device's own statistics, which never leave it.
    own: bool = False
    # NaN is a missing number, replaced by the mean.
    missing: bool = False

    @model_validator(mode="after")
    def _check(self) -> Preparation:
        if self.columns and (self.shape != (len(self.columns),) or self.dtype != "float32"):
            raise ValueError(f"{len(self.columns)} columns make float32 rows of that length, not {self.shape}")
        if len({column.name for column in self.columns}) < len(self.columns):
            raise ValueError("a column stands twice")
        if self.channels and self.shape[self.channel : self.channel + 1] != (len(set(self.channels)),):
            raise ValueError(f"{len(self.channels)} channels do not fit axis {self.channel} of {self.shape}")
        if len(self.mean) != len(self.deviation):
            raise ValueError(f"there are {len(self.mean)} means but {len(self.deviation)} deviations")
        if self.mean and (self.channel >= len(self.shape) or self.shape[self.channel] != len(self.mean)):
            raise ValueError(f"{len(self.mean)} means do not fit axis {self.channel} of {self.shape}")
        if any(axis >= len(self.shape) for axis in self.free) or len(set(self.free)) < len(self.free):
            raise ValueError(f"the free axes {self.free} do not fit {self.shape}")
        if self.own and self.mean:
            raise ValueError("statistics are each device's own, and published; leave one of them out")
        return self


class Targets(Record):
    """The meaning of a model's outputs."""

    kind: Literal["classes", "numbers"] = "classes"
    # Column of labels.
    column: Name | None = None
    # Names of the classes, in the order of the outputs.
    names: tuple[Name, ...] = Field(default=(), max_length=MOST_CLASSES)
    # Further outputs, for classes that only some devices have.
    spare: int = Field(default=0, ge=0, le=1_000)
    # Statistics of a regression's published targets, which scale its loss.
    mean: float = 0.0
    deviation: float = Field(default=1.0, gt=0)
    # A label that the loss leaves out.
    ignored: int | None = None
    # Labels may also be output numbers.
    numbered: bool = False

    @model_validator(mode="after")
    def _check(self) -> Targets:
        if len(set(self.names)) < len(self.names):
            raise ValueError("a class is named twice")
        if self.kind == "numbers" and (self.names or self.spare):
            raise ValueError("numbers have no classes; leave names and spare out")
        return self

    def with_own(self, found: Sequence[str]) -> tuple[str, ...]:
        """Return the names of all outputs on a device with the classes ``found``; "" for an unused spare one.

        An unknown name takes the spare output given by its SHA-256, or the next free one, so that devices agree. Raises
        ValueError, naming the first, if there are too few spare outputs.
        """
        unknown = sorted(set(found) - set(self.names))
        if len(unknown) > self.spare:
            raise ValueError(unknown[0])
        spare = [""] * self.spare
        for name in unknown:
            place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % self.spare
            while spare[place]:
                place = (place + 1) % self.spare
            spare[place] = name
        return (*self.names, *spare)
