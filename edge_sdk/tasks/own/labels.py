"""Convert the labels of a user's own files to targets, with the published class names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from sparrow.command_line.nearest import nearest
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading import Raw, class_order
from sparrow.reading.errors import BadOption, DataError

# Classes, columns and people that a message names.
NAMED = 12


@dataclass(frozen=True)
class Publishing:
    """A publisher's options for its file."""

    # Names in the order of the outputs; (): those of the file.
    classes: tuple[str, ...] = ()
    # Outputs for names that only some devices know.
    spare: int = 0
    # Each device standardises by its own statistics.
    own: bool = False
    # Side of the square that pictures are resized to; None: their own size if it is common and at most
    # ``LARGEST_OWN``, otherwise ``USUAL``.
    size: int | None = None


PLAIN = Publishing()


@dataclass(frozen=True)
class Known:
    """A federation's properties for reading a file; all None when publishing."""

    task: str | None = None
    shape: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None
    preparation: Preparation | None = None
    targets: Targets | None = None

    @property
    def steps(self) -> tuple[str, ...]:
        """Describe the steps of the preparation."""
        return () if self.preparation is None else self.preparation.steps

    @property
    def as_taken(self) -> tuple[int, ...] | None:
        """The shape of samples without a preparation, else None."""
        return self.shape if self.preparation is None else None

    @classmethod
    def of(cls, manifest: Manifest | None) -> Known:
        """Return the properties of a manifest; all None without one."""
        if manifest is None:
            return cls()
        return cls(manifest.task, manifest.input_shape, manifest.output_shape, manifest.preparation, manifest.targets)


def check_as_taken(raw: Raw, known: Known) -> None:
    """Raise DataError for samples that need a preparation if the federation has none."""
    if known.as_taken is None:
        return
    named = next((column.name for column in raw.columns if column.categories), None)
    if named is not None:
        raise DataError(
            f"{raw.source}: the column {named} holds names, and the federation has no preparation to turn them into "
            "numbers; leave it out with drop=, or provide numbers"
        )
    if raw.inputs.dtype == np.uint8 and raw.inputs.ndim > 2:
        raise DataError(
            f"{raw.source}: samples are bytes, and the federation has no preparation to scale them; store them as "
            "float32 values that its model takes"
        )


def check_alike(path: str, parts: Sequence[Raw]) -> None:
    """Raise DataError unless all parts of a file have samples with the same shape and type."""
    if len({(each.inputs.shape[1:], each.inputs.dtype, each.kind) for each in parts}) > 1:
        raise DataError(f"{path}: its parts hold different kinds of samples; make them alike")


@dataclass(frozen=True)
class Labelled:
    """The labels of a file, as output numbers or as numeric targets."""

    kind: str
    targets: Targets
    class_names: tuple[str, ...]
    numbers_of: Mapping[str, int]

    @classmethod
    def of(cls, path: str, parts: Sequence[Raw], known: Known, publishing: Publishing) -> Labelled:
        """Return the mapping of labels to targets. Raises DataError for a label without an output."""
        first = parts[0]
        if first.kind == "numbers":
            return cls("numbers", _number_targets(path, parts, known, publishing), (), {})
        found = class_order(str(label) for each in parts for label in np.unique(labels_of(each)))
        if known.outputs is None:
            targets = _class_targets(path, first, found, publishing)
            advice = "add it to --classes, or publish with --spare-classes"
        else:
            targets = known.targets or Targets()
            advice = (
                "correct the label, or ask the federation's operator to publish with it in --classes, or with "
                "--spare-classes"
            )
        if not targets.names:
            return cls("classes", targets, (), _positions(path, found, known))
        if targets.numbered and set(found).isdisjoint(targets.names) and _are_positions(found, targets):
            return cls("classes", targets, targets.names + ("",) * targets.spare, {name: int(name) for name in found})
        try:
            names = targets.with_own(found)
        except ValueError as unknown:
            alike = nearest(str(unknown), targets.names)
            raise DataError(
                f"{path}: has the class {str(unknown)!r}{alike}; the federation's are {some(targets.names)}: {advice}"
            ) from None
        return cls("classes", targets, names, {name: place for place, name in enumerate(names) if name})

    def targets_of(self, raw: Raw) -> Array:
        """Return int64 [N] of classes, or float32 [N, 1] of numbers."""
        labels = labels_of(raw)
        if self.kind == "numbers":
            return labels.astype(np.float32)[:, None]
        names, places = np.unique(labels, return_inverse=True)
        numbers = np.array([self.numbers_of[str(name)] for name in names], np.int64)
        return numbers[places.reshape(-1)]


def labels_of(raw: Raw) -> Array:
    """Return the labels, which must have been read."""
    assert raw.labels is not None, "read with labels"
    return raw.labels


def _class_targets(path: str, first: Raw, found: tuple[str, ...], publishing: Publishing) -> Targets:
    names = publishing.classes or first.classes or found
    if len(names) + publishing.spare < 2:
        met = f"--classes names only {some(names)}" if publishing.classes else f"all labels are {some(names)}"
        raise DataError(f"{path}: {met}; a task needs at least 2 classes: list all of them in --classes")
    return _described(path, column=first.label, names=names, spare=publishing.spare)


def _number_targets(path: str, parts: Sequence[Raw], known: Known, publishing: Publishing) -> Targets:
    column = parts[0].label
    if publishing.classes or publishing.spare:
        raise BadOption(
            f"{path}: {column or 'y'} holds numbers, which have no classes; leave --classes and --spare-classes out, "
            "or add target=class"
        )
    if known.targets is not None:
        return known.targets
    if known.outputs is not None:
        return Targets(kind="numbers", column=column)
    values = np.concatenate([labels_of(each) for each in parts]).astype(np.float64)
    deviation = float(values.std())
    scale = deviation if deviation > 0 else 1.0
    return _described(path, kind="numbers", column=column, mean=float(values.mean()), deviation=scale)


def _described(path: str, **fields: Any) -> Targets:
    try:
        return Targets(**fields)
    except ValidationError as error:
        fault = error.errors()[0]
        place = " ".join(map(str, fault["loc"]))
        message = f"{path}: labels cannot be published ({place} {fault['msg']}); correct them, or --classes"
        raise DataError(message) from None


def _are_positions(found: Sequence[str], targets: Targets) -> bool:
    """Return True if labels are the numbers of classes with non-numeric names."""
    count = len(targets.names) + targets.spare
    if any(name.isdecimal() for name in targets.names):
        return False
    return all(name.isdecimal() and int(name) < count for name in found)


def _positions(path: str, found: Sequence[str], known: Known) -> dict[str, int]:
    """Return class numbers for a federation without class names. Raises DataError for other labels."""
    count = known.outputs[0] if known.outputs else 0
    wrong = next((name for name in found if not name.isdecimal() or int(name) >= count), None)
    if wrong is not None:
        raise DataError(
            f"{path}: has the class {wrong!r}; the federation names no classes, its labels are the numbers 0 to "
            f"{count - 1}"
        )
    return {name: int(name) for name in found}


def some(names: Sequence[str]) -> str:
    """Format the first ``NAMED`` names for a message, and the number of all."""
    return ", ".join(names[:NAMED]) + (f", ... ({len(names)} in all)" if len(names) > NAMED else "")
