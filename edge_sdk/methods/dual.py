"""A device's personal and global sparse models, which share the weights in both masks (DM-PFL, Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.elements import ElementMask, from_bits
from sparrow.protocol.manifest import Manifest, Tensors


@dataclass(frozen=True)
class Dual:
    """Both models; shared weights are stored once."""

    # Θ_c, zero outside ``mask``, m_c.
    personal: Tensors
    mask: ElementMask
    # M_g.
    global_mask: ElementMask
    # Packed global weights outside ``mask``.
    rest: NDArray[np.float32]
    # The global biases, norms and buffers.
    unmasked: Tensors

    @classmethod
    def of(cls, manifest: Manifest, personal: Tensors, mask: ElementMask, received: Tensors, m_g: ElementMask) -> Dual:
        """Return both models, from θ_c and the received θ_g."""
        rest = pack_weights(received, m_g.without(mask))
        unmasked = {spec.name: np.array(received[spec.name]) for spec in manifest.shared if spec.name not in m_g.exists}
        return cls(personal, mask, m_g, rest, unmasked)

    @classmethod
    def load(cls, manifest: Manifest, personal: Tensors, own: Mapping[str, NDArray[np.generic]]) -> Dual:
        """Return the models from the personal one and ``stored``. Raises ManifestError if a mask does not fit."""
        mask, m_g = (from_bits(manifest, own[name].tobytes()) for name in ("mask", "global_mask"))
        unmasked = {name.removeprefix("global:"): array for name, array in own.items() if name.startswith("global:")}
        return cls(personal, mask, m_g, np.asarray(own["rest"], dtype=np.float32), unmasked)

    def stored(self) -> Tensors:
        """Return everything except the personal model: name -> array."""
        bits = {"mask": self.mask.bits, "global_mask": self.global_mask.bits}
        arrays: Tensors = {name: np.frombuffer(data, dtype=np.uint8) for name, data in bits.items()}
        return {**arrays, "rest": self.rest, **{f"global:{name}": array for name, array in self.unmasked.items()}}

    @property
    def private(self) -> ElementMask:
        """The weights in the personal mask only."""
        return self.mask.without(self.global_mask)

    def global_model(self) -> Tensors:
        """Return θ_g by name."""
        tensors: Tensors = {name: np.array(tensor) for name, tensor in self.personal.items()} | self.unmasked
        tensors |= self.global_mask.apply(tensors)
        start = 0
        for name, index in self.global_mask.without(self.mask).index.items():
            tensors[name].reshape(-1)[index] = self.rest[start : start + len(index)]
            start += len(index)
        return tensors


def pack_weights(tensors: Tensors, mask: ElementMask) -> NDArray[np.float32]:
    """Return the weights of ``tensors`` in ``mask``, tensor after tensor."""
    parts = [np.take(tensors[name].reshape(-1), index) for name, index in mask.index.items()]
    return np.concatenate(parts).astype(np.float32, copy=False)
