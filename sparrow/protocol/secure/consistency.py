"""The digest of everything that determines an update of a secure round, except the data.

A coordinator could read one update from a sum if it gave devices different models, steps or settings, so that the
updates of the others are zero (Pasquini, Francati, Ateniese, CCS 2022). Therefore a round's context ends with this
digest. Devices sign their keys for that context before they receive the model, derive all pads from it, and compare it
with the received data. Devices with different digests cannot verify each other's signatures, and their pads do not
cancel.

This does not prevent a malicious step that is the same on all devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from ..elements import ElementMask
from ..manifest import Array, Manifest
from ..masks import Mask
from ..ranges import OPERATORS, binding
from ..settings import FederationSettings

SEPARATOR = "|"


def model_digest(values: Array, mask: Mask | None) -> str:
    """Return the SHA-256 of a global model: existing values, float32 as decoded by devices, and a sparse model's
    mask."""
    hasher = hashlib.sha256(np.ascontiguousarray(values, "<f4").data)
    if isinstance(mask, ElementMask):
        hasher.update(mask.bits)
    return hasher.hexdigest()


def round_digest(
    manifest: Manifest, model: str, settings: FederationSettings, plan: Mapping[str, object], number: int
) -> str:
    """Return the SHA-256 of a round's model (its digest), graphs, settings and plan."""
    asked = {name: value for name, value in binding(settings).items() if name not in OPERATORS}
    said = [model, manifest.digest, asked, dict(plan), number]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def with_digest(context: str, digest: str) -> str:
    """Return a round's context with a digest."""
    return f"{context}{SEPARATOR}{digest}"


def digest_in(context: str) -> str:
    """Return the digest of a round's context."""
    return context.rpartition(SEPARATOR)[2]
