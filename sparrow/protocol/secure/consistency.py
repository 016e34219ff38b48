"""One digest of everything that decides an update of a secure round, except the data.

A coordinator that gives devices different models, steps or settings can read one update from a sum: it makes the others
send nothing (Pasquini, Francati, Ateniese, "Eluding Secure Aggregation in Federated Learning via Model Inconsistency",
CCS 2022). So a round's context ends with this digest. Devices sign their keys for that context before they get the
model, all their pads follow from it, and each compares it with what it then gets. Devices that were given different
digests cannot check each other's signatures, and their pads do not cancel.

It does not stop a coordinator that gives all devices one step whose update depends on the data.
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
    """Return the SHA-256 of a global model: existing values, float32 as devices decode them, and a sparse model's
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
    """Return the context of a round that is bound to a digest."""
    return f"{context}{SEPARATOR}{digest}"


def digest_in(context: str) -> str:
    """Return the digest that a round's context is bound to."""
    return context.rpartition(SEPARATOR)[2]
