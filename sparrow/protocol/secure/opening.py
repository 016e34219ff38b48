"""Server side of secure aggregation: the sum of a cell from masked updates and shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import numpy as np

from ..errors import ProtocolError
from . import pads
from .device import PADS, commitment, pad_key, public_key, seed_key
from .messages import Keys
from .numbers import Words
from .shamir import SECRET_BYTES, at, join

Kept = Mapping[int, int]
"""Shares of one secret: point -> value."""

TRIES = 500
"""Number of share sets to try if some are wrong."""


class CannotOpen(ProtocolError):
    """The sum of a cell cannot be unmasked, because too few devices or shares are left."""


def open_sum(
    total: Words,
    context: str,
    *,
    left: Collection[str],
    gone: Collection[str],
    keys: Mapping[str, Keys],
    seeds: Mapping[str, Kept],
    pad_secrets: Mapping[str, Kept],
    threshold: int,
) -> tuple[Words, dict[str, set[int]]]:
    """Return a cell's sum modulo 2^b over ``left``, and wrong shares: name -> points.

    total: sum of their masked updates. gone: the cell's devices with shares but without update. seeds, pad_secrets: the
    received shares. Raises CannotOpen if too few devices or shares are left.
    """
    wrong = dict[str, set[int]]()
    streams = list[tuple[bytes, bool]]()
    for name in sorted(left):
        seed, bad = secret_of(seeds.get(name, {}), threshold, partial(_is_seed, keys[name], context))
        if seed is None:
            raise CannotOpen(f"too few shares of the self-mask of {name} arrived")
        wrong |= {name: bad} if bad else {}
        streams.append((seed_key(seed, context), False))
    for name in sorted(gone):
        secret, bad = secret_of(pad_secrets.get(name, {}), threshold, partial(_is_pads_secret, keys[name], context))
        if secret is None:
            raise CannotOpen(f"too few shares of the pads of {name}, which dropped out, arrived")
        wrong |= {name: bad} if bad else {}
        pair = pads.pair_of(secret, context, PADS)
        streams += [(pad_key(pair, keys[other].pads, context), other > name) for other in sorted(left)]
    opened: Words = np.array(total)
    pads.add_streams(opened, streams)
    return opened, wrong


def _is_seed(keys: Keys, context: str, secret: bytes) -> bool:
    return commitment(secret, context) == keys.commitment


def _is_pads_secret(keys: Keys, context: str, secret: bytes) -> bool:
    return public_key(secret, context, PADS) == keys.pads


def secret_of(shares: Kept, threshold: int, check: Callable[[bytes], bool]) -> tuple[bytes | None, set[int]]:
    """Return the secret that passes ``check``, and the points of wrong shares; None if no shares give it. The points
    are empty if too many are wrong to be sure: more than half of the surplus shares."""
    if len(shares) < threshold:
        return None, set()
    points = sorted(shares)
    found = None
    # Reed-Solomon's bound; the secret counts as one more share.
    most_wrong = (len(points) + 1 - threshold) // 2
    for some in _chosen(points, threshold):
        chosen = {point: shares[point] for point in some}
        value = join(chosen)
        if value.bit_length() <= 8 * SECRET_BYTES and check(secret := value.to_bytes(SECRET_BYTES, "big")):
            bad = {point for point in points if point not in chosen and at(point, chosen) != shares[point]}
            if len(bad) <= most_wrong:
                return secret, bad
            found = secret
    return found, set()


def _chosen(points: list[int], threshold: int) -> Iterator[list[int]]:
    """Yield sets of points to try: the first ones in order, then random ones."""
    yield points[:threshold]
    chance = random.Random(str(points))
    for _ in range(TRIES if len(points) > threshold else 0):
        yield chance.sample(points, threshold)
