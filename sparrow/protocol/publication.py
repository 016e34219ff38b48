"""Publications: the signed terms of a model, and how devices enforce them.

The author signs ``Terms`` with an Ed25519 key. A ``Publication`` is that text with key and signature. A coordinator may
change the description of a model if this sends no more of it; ``differs`` finds all other changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from .fields import Digest, FederationName, Name, Record
from .manifest import Array, GraphName, Manifest, Tensors, TensorSpec
from .ranges import Range
from .signatures import BadPublication, Publication


class Terms(Record):
    """The content of a publication."""

    version: Literal[1] = 1
    federation: FederationName
    # Version number of the model under this name.
    edition: int = Field(default=1, ge=1, le=2**31)
    task: Name
    # SHA-256 of the published files.
    manifest: Digest
    graphs: dict[GraphName, Digest] = Field(default={})
    weights: dict[Name, Digest] = Field(default_factory=dict, max_length=100_000)
    # The allowed ranges.
    settings: dict[str, Range] = Field(default_factory=dict, max_length=200)

    @classmethod
    def of(cls, publication: Publication) -> Terms:
        """Return the content of a publication, unchecked. Raises BadPublication if it cannot be read."""
        try:
            return cls.model_validate_json(publication.statement)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadPublication(
                f"the publication cannot be read ({where}: {first['msg']}); update this SDK, or publish again"
            ) from None


def digest_of_values(values: Array) -> str:
    """Return the SHA-256 of a tensor's values, row-major and little endian."""
    ordered = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return hashlib.sha256(ordered.tobytes()).hexdigest()


def digests_of(tensors: Mapping[str, Array]) -> dict[str, str]:
    """Return the digest of each tensor's values: name -> digest."""
    return {name: digest_of_values(tensor) for name, tensor in tensors.items()}


def check_terms(terms: Terms, federation: str, manifest: Manifest, published: Manifest) -> None:
    """Raise BadPublication unless a federation's manifest follows the signed terms, except for allowed changes.
    published: the signed manifest, or the one that the method composes from it."""
    if terms.federation != federation:
        raise BadPublication(f"the publication is for the federation {terms.federation}, not for {federation}")
    for name, digest in manifest.graphs.items():
        if terms.graphs.get(name) != digest:
            raise BadPublication(
                f"the {name} of {federation} is not the one that its publisher signed; ask the operator which "
                f"model this is"
            )
    other = differs(published, manifest)
    if other is not None:
        raise BadPublication(f"{federation}: {other} differs from the signed manifest")


def differs(published: Manifest, manifest: Manifest) -> str | None:
    """Return the first difference from the published manifest that is not allowed. Allowed are tensors that stay on
    devices, blocks, answers on a public set, and a new neuron group for complete axes."""
    before = {spec.name: spec for spec in published.tensors}
    after = {spec.name: spec for spec in manifest.tensors}
    if before.keys() != after.keys():
        return f"the tensor {min(before.keys() ^ after.keys())}"
    added = manifest.group_sizes.keys() - published.group_sizes.keys()
    for name, spec in after.items():
        was = before[name]
        if spec.policy == "personal" and was.policy == "shared":
            spec = spec.model_copy(update={"policy": "shared"})
        if _axes_fit(was, spec, added):
            spec = spec.model_copy(update={"axes": was.axes})
        if spec != was:
            return f"the tensor {name}"
    if tuple(group for group in manifest.groups if group.name not in added) != published.groups:
        return "groups"
    left_out = {"tensors", "groups", "blocks", "outputs", "first_sha256"}
    left_out |= {f"{name}_sha256" for name in ("skeleton", "step", "evaluation", "preparation")}
    for field in Manifest.model_fields:
        if field not in left_out and getattr(manifest, field) != getattr(published, field):
            return field
    if (manifest.preparation_sha256 is None) != (published.preparation_sha256 is None):
        return "preparation_sha256"
    return None


def _axes_fit(before: TensorSpec, after: TensorSpec, added: Collection[str]) -> bool:
    """Return whether axes differ only in complete ones that got an added group."""
    old = before.axes or ((),) * len(after.axes)
    if len(old) != len(after.axes):
        return False
    pairs = zip(old, after.axes, strict=True)
    return all(
        segments == was or (not was and all(segment.group in added for segment in segments)) for was, segments in pairs
    )


def check_weights(terms: Terms, tensors: Tensors) -> None:
    """Raise BadPublication if a tensor's first values are not the signed ones. tensors: those received in full."""
    for name, tensor in tensors.items():
        wanted = terms.weights.get(name)
        if wanted is not None and digest_of_values(tensor) != wanted:
            raise BadPublication(f"{name}: its first values are not those that the publisher signed")
