"""The files of a device's personal model, written by ``edge_sdk.device.state`` and read by ``export``.

``model.safetensors`` has the personal model by name, the method's arrays (``own:NAME``) and rounding residuals
(``feedback:NAME``). Its note is JSON: the manifest's digest, whether there is a personal model, the device's progress,
and the digest of the reference model if it stores a difference. ``best.safetensors`` is the personal model to use, if
it is not the last: the same file after an earlier round, or with a mixture. ``progress.json`` is the progress since the
model was written. Each contains its own SHA-256, computed with zeros in that place (``sign``); damaged files raise
BundleError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from . import checkpoint
from .errors import BundleError
from .manifest import Array, GraphName, Tensors, Values
from .messages import FederationInfo

MODEL, BEST, PROGRESS, MEMBERSHIP = "model.safetensors", "best.safetensors", "progress.json", "federation.json"
MANIFEST = "manifest.json"
OWN = "own.json"
"""The device's own statistics for standardisation, and the names of its spare outputs. They never leave the device."""

UNSIGNED = "0" * 64
"""Placeholder for a file's digest."""

_FEEDBACK, _OWN = "feedback:", "own:"


def graph_file(name: GraphName) -> str:
    """Return the name of the file of an ONNX graph."""
    return f"{name}.onnx"


def values_file(which: Values) -> str:
    """Return the name of a file of values."""
    return f"{which}.values"


def sign(body: bytes) -> bytes:
    """Replace a file's first ``UNSIGNED`` by the file's digest."""
    return body.replace(UNSIGNED.encode(), hashlib.sha256(body).hexdigest().encode(), 1)


def check_signed(body: bytes, digest: object) -> None:
    """Raise BundleError unless ``digest``, which the file contains, is the one set by ``sign``."""
    unsigned = body.replace(str(digest).encode(), UNSIGNED.encode(), 1)
    if hashlib.sha256(unsigned).hexdigest() != digest:
        raise BundleError("its content has changed since it was written: its digest differs")


class Membership(BaseModel):
    """A device's last known membership: its name and budget, and the federation."""

    model_config = ConfigDict(frozen=True)

    device: str
    budget: float
    federation: FederationInfo


@dataclass(frozen=True)
class Saved:
    """The content of ``model.safetensors``."""

    # The model, or its difference from ``reference``, by name.
    stored: Tensors
    own: Tensors
    feedback: Tensors
    manifest: str
    save: int
    model: bool
    reference: str | None
    progress: Mapping[str, Any]
    # Whether it was the best so far.
    best: bool = False


def write(saved: Saved) -> bytes:
    """Return the bytes of the file."""
    note = {
        "sha256": UNSIGNED,
        "manifest": saved.manifest,
        "save": saved.save,
        "model": saved.model,
        "reference": saved.reference,
        "progress": saved.progress,
        "best": saved.best,
    }
    beside = {_OWN + name: array for name, array in saved.own.items()}
    beside |= {_FEEDBACK + name: tensor for name, tensor in saved.feedback.items()}
    return sign(checkpoint.save({**saved.stored, **beside}, json.dumps(note)))


def read(body: bytes) -> Saved:
    """Return the file's content. Raises BundleError for other bytes."""
    try:
        note = json.loads(checkpoint.read_note(body))
        check_signed(body, note["sha256"])
        stored, _ = checkpoint.load(body)
        return Saved(
            own=_take(stored, _OWN),
            feedback=_take(stored, _FEEDBACK),
            stored=stored,
            manifest=note["manifest"],
            save=int(note["save"]),
            model=bool(note["model"]),
            reference=note["reference"],
            progress=dict(note["progress"]),
            best=bool(note["best"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"the note of a device's model is not valid: {error!r}") from None


def write_progress(save: int, progress: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``progress.json``: progress since the save with this number."""
    return sign(json.dumps({"sha256": UNSIGNED, "save": save, "progress": progress}).encode())


def read_progress(body: bytes, save: int) -> Mapping[str, Any] | None:
    """Return the progress since that save, None if the file belongs to another.

    Raises BundleError if the file is damaged.
    """
    try:
        kept = json.loads(body)
        check_signed(body, kept["sha256"])
        return dict(kept["progress"]) if kept["save"] == save else None
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"not the progress of a device: {error!r}") from None


def write_own(statistics: Mapping[str, Array], preparation: str | None, class_names: Sequence[str]) -> bytes:
    """Return the bytes of ``own.json``. statistics: initialiser -> values, for the preparation with this SHA-256."""
    numbers = {name: array.reshape(-1).tolist() for name, array in statistics.items()}
    own = {"preparation": preparation, "statistics": numbers, "class_names": list(class_names)}
    return json.dumps(own).encode()


def read_own(content: bytes | None, preparation: str) -> dict[str, NDArray[np.float32]] | None:
    """Return the device's statistics for the preparation with this SHA-256; None if there are none."""
    try:
        found = json.loads(content or b"")
        if found["preparation"] != preparation:
            return None
        return {str(name): np.array(numbers, np.float32) for name, numbers in found["statistics"].items()} or None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_class_names(content: bytes | None) -> tuple[str, ...]:
    """Return the names of all outputs on the device, empty if none are stored."""
    try:
        return tuple(map(str, json.loads(content or b"")["class_names"]))
    except (ValueError, KeyError, TypeError):
        return ()


def is_personal(note: str) -> bool:
    """Return whether a safetensors file with this note is a device's model, not a plain checkpoint."""
    try:
        return {"manifest", "save", "progress"} <= set(json.loads(note))
    except (ValueError, TypeError):
        return False


def _take(stored: Tensors, prefix: str) -> Tensors:
    """Remove the entries with this prefix; return them by name without it."""
    return {name.removeprefix(prefix): stored.pop(name) for name in list(stored) if name.startswith(prefix)}
