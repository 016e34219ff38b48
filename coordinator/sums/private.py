"""Central differential privacy of the global models at user level; a device is a user (docs/privacy.md).

    w ← w + (Σ_c clip(Δ_c, C) + N(0, (z C)²)) / m         C: update_clip, z: noise_multiplier, m: cohort

McMahan, Ramage, Talwar, Zhang, ICLR 2018, arXiv:1710.06963, with these conditions:

- Δ_c is the change of an update, 0 for values not sent; its 2-norm over the full model is at most C. Every coordinate
  gets noise, which hides the sent ones. Updates have equal weights, because weights by examples would depend on data. m
  is the setting ``cohort``.
- A cohort without updates gets noise, too: an unchanged model would reveal it.
- Each device is drawn independently by the hash of its name and the round, with probability cohort / enrolled.
- Cohorts are known, so sampling amplifies nothing: each round of a device is one Gaussian mechanism. epsilon is that of
  the most drawn device, by Rényi accounting (Mironov 2017). Devices are counted by name, also after a new enrolment.
- Two runs are neighbours if one device's updates differ (``privacy_adjacency``): arbitrarily (replacement), which
  changes the sum by at most 2 C, or to zeros (zero_out; Kairouz and others, ICML 2021, arXiv:2103.00039), by at most C.
- Reports on candidates at the end (``personal_model=fleet``) are summed with the same noise: one more event.
- Noise is derived from a secret key of 256 random bits, the round and its sum. So a round that is closed again has the
  same noise, which cannot be averaged out; different sums have different noise, which does not cancel in their
  difference.

Numbers are doubles, with which a Gaussian is not exact (Mironov, CCS 2012); there is no defence against this.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow.protocol.evidence import TOLD, Evidence
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask, pack, unpack, unpack_whole
from sparrow.protocol.settings import FederationSettings

from .averages import Sum, difference

USUAL_TOLD = {"inverse_parts": 0.5, "gain": 0.5, "product": 0.25, "within": 0.5}
"""Divisor of each kind of number in ``TOLD`` before their 2-norm is limited to 1."""


def noise_of(key: bytes, round_number: int, sums: Sum) -> Sum:
    """Return a round's noise: independent standard normal draws, one per value of ``sums``.

    Deterministic: HMAC-SHA256 of key, round and sums seeds PCG64 with 256 bits.
    """
    query = round_number.to_bytes(8, "little") + hashlib.sha256(sums.tobytes()).digest()
    seed = int.from_bytes(hmac.digest(key, query, "sha256"), "little")
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(len(sums))


class PrivateSums:
    """Sums Σ clip(Δ_c, C) of one round's updates, with a noisy mean; memory is about one model in float64.

    key: the federation's noise key, 32 random bytes. In a secure federation an update is the mean of many clipped ones.
    """

    def __init__(
        self, manifest: Manifest, sent: Tensors, settings: FederationSettings, key: bytes, round_number: int
    ) -> None:
        assert settings.update_clip is not None
        assert settings.noise_multiplier is not None, "its settings ask for both"
        self._manifest = manifest
        self._sent = sent
        self._longest = settings.update_clip
        self._deviation = settings.noise_multiplier * settings.update_clip
        self._cohort = settings.cohort
        self._secure = settings.secure
        self._key = key
        self._round = round_number
        self.clipped_sum = np.zeros(manifest.shared_values)
        self._parts: dict[str, Any] = unpack_whole(manifest, self.clipped_sum)
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update's clipped difference from the sent values, in float64: rounding to float32 could exceed C."""
        moved = difference(self._manifest, self._sent, values, mask)
        if self._secure:
            # The number of updates, each of which counts as 1.
            scale = float(num_examples)
        else:
            norm = float(np.linalg.norm(moved))
            scale = 1.0 if norm <= self._longest else self._longest / norm
        for spec, block, part in unpack(self._manifest, moved, mask):
            target = self._parts[spec.name]
            block.add(target, part, scale=scale)
        self.updates += 1

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values by name, float32, all of them noisy."""
        noise = self._deviation * noise_of(self._key, self._round, self.clipped_sum)
        moved = (self.clipped_sum + noise) / self._cohort
        values = pack(self._manifest, previous, None).astype(np.float64) + moved
        return unpack_whole(self._manifest, values.astype(np.float32))


def noisy_means(
    told: Sequence[Evidence], asked: int, settings: FederationSettings, key: bytes, round_number: int
) -> dict[str, float]:
    """Return the noisy means of the devices' reports on candidates, over all asked devices."""
    # It is one more event of the accountant: scaled by ``USUAL_TOLD``, each device moves the sum by at most 1.
    assert settings.noise_multiplier is not None, "the federation promises something"
    usual = np.array([USUAL_TOLD[name.partition(" ")[0]] for name in TOLD])
    total = np.zeros(len(TOLD))
    for each in told:
        numbers = np.array(list(each.told().values())) / usual
        total += numbers / max(1.0, float(np.linalg.norm(numbers)))
    noisy = total + settings.noise_multiplier * noise_of(key, round_number, total)
    return dict(zip(TOLD, (usual * noisy / max(1, asked)).tolist(), strict=True))
