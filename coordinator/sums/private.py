"""Central differential privacy of the global models, user by user, a device being a user (docs/privacy.md).

    w ← w + (Σ_c clip(Δ_c, C) + N(0, (z C)²)) / m         C: update_clip, z: noise_multiplier, m: cohort

after McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
arXiv:1710.06963, with what makes it true here:

- Δ_c is what an update moved, 0 wherever its device sent nothing; its 2-norm over the whole model is at most C. Noise
  comes to every coordinate, sent or not, so that which were sent stays unknown. Updates count alike: weights by
  examples would be data, too. m is the setting and not the number that came.
- Noise comes also where nothing came of a drawn cohort: a model that stays would say so.
- The draw must not depend on anybody's data. So each device is drawn by itself, by the hash of its name and the
  round, with the same chance, cohort / enrolled: one that is away, or hands back, moves nobody else in or out.
- Cohorts are known to devices and observers. So no amplification by sampling is claimed: the event is a Gaussian
  mechanism for every round in which a device was drawn. epsilon is that of the device drawn most often, an upper bound
  by Rényi accounting (Mironov 2017). A device is counted by its name: revoked and enrolled again it is the same one.
- Two runs are neighbours if one device's updates differ (``privacy_adjacency``): they are others, of its own choice
  (replacement), or count as zeros (zero_out; Kairouz and others, "Practical and Private (Deep) Learning without
  Sampling or Shuffling", ICML 2021, arXiv:2103.00039). The device is drawn for the same rounds in both. One replaced
  update of norm C at most moves the sum by 2 C, one that becomes zeros by C. The noise is measured in C, so for
  replacement it counts half: z = 1 there is what z = 0.5 is here.
- What devices tell of their candidates at the end (``personal_model=fleet``) is summed with the same noise: one more
  event, counted for each device that was asked.
- Noise comes from a key of 256 random bits that the operating system gave and that never leaves the records, never from
  the federation's seed. It follows from the key, the round and the round's sum. So a round that is closed again,
  because a commit failed or the process was killed, gives the same model: who sees both cannot average the noise away.
  Two different sums never get the same noise, of which the difference of two models would be free.

Numbers are doubles, which a perfect Gaussian is not (Mironov, CCS 2012); this is not defended against.
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
"""Scale of each kind of number in ``TOLD``: they are divided by it before their 2-norm is limited to 1."""


def noise_of(key: bytes, round_number: int, sums: Sum) -> Sum:
    """Return a round's noise: independent draws of the standard normal distribution, as many as ``sums`` has values.

    The same for the same key, round and sums; for any others as good as independent (HMAC-SHA256 as a pseudo-random
    function, and PCG64 on its 256 bits).
    """
    query = round_number.to_bytes(8, "little") + hashlib.sha256(sums.tobytes()).digest()
    seed = int.from_bytes(hmac.digest(key, query, "sha256"), "little")
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(len(sums))


class PrivateSums:
    """The sums Σ clip(Δ_c, C) of one round's updates, with a noisy mean; memory is about one model in float64.

    key: the federation's noise key, 32 random bytes. round_number: the round's. In a secure federation what comes is
    the mean of so many updates, which devices have clipped.
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
        self._key, self._round = key, round_number
        self.clipped_sum = np.zeros(manifest.shared_values)
        self._parts: dict[str, Any] = unpack_whole(manifest, self.clipped_sum)
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update's difference from what was sent, clipped in float64: rounding to float32 could exceed C."""
        moved = difference(self._manifest, self._sent, values, mask)
        if self._secure:
            scale = float(num_examples)  # each of them counts as 1
        else:
            norm = float(np.linalg.norm(moved))
            scale = 1.0 if norm <= self._longest else self._longest / norm
        for spec, block, part in unpack(self._manifest, moved, mask):
            target = self._parts[spec.name]
            block.add(target, part, scale=scale)
        self.updates += 1

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values: name -> float32, all of them noisy."""
        noise = self._deviation * noise_of(self._key, self._round, self.clipped_sum)
        moved = (self.clipped_sum + noise) / self._cohort
        values = pack(self._manifest, previous, None).astype(np.float64) + moved
        return unpack_whole(self._manifest, values.astype(np.float32))


def noisy_means(
    told: Sequence[Evidence], asked: int, settings: FederationSettings, key: bytes, round_number: int
) -> dict[str, float]:
    """Return the means of what devices have told of their candidates, over all that were asked, with noise: one more
    event of the accountant, as each device moves their sum by at most 1, as measured in ``USUAL_TOLD``."""
    assert settings.noise_multiplier is not None, "the federation promises something"
    usual = np.array([USUAL_TOLD[name.partition(" ")[0]] for name in TOLD])
    total = np.zeros(len(TOLD))
    for each in told:
        numbers = np.array(list(each.told().values())) / usual
        total += numbers / max(1.0, float(np.linalg.norm(numbers)))
    noisy = total + settings.noise_multiplier * noise_of(key, round_number, total)
    return dict(zip(TOLD, (usual * noisy / max(1, asked)).tolist(), strict=True))
