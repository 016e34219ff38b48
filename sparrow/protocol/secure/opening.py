"""The coordinator's half: from masked updates and shares to the sum of a cell, and nothing else."""

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
"""Sets of shares that are tried where some are wrong."""


class CannotOpen(ProtocolError):
    """A cell whose sum does not come out: too few are left of it, or too few shares have come."""


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
    """Return the sum modulo 2^b of those left of a cell, and wrong shares: name -> points.

    total: of their masked updates. gone: those of the cell who shared and sent none. seeds, pad_secrets: the shares of
    each that have come. Raises CannotOpen.
    """
    wrong, streams = dict[str, set[int]](), list[tuple[bytes, bool]]()
    for name in sorted(left):
        seed, bad = secret_of(seeds.get(name, {}), threshold, partial(_is_seed, keys[name], context))
        if seed is None:
            raise CannotOpen(f"too few shares of the self-mask of {name} have come")
        wrong |= {name: bad} if bad else {}
        streams.append((seed_key(seed, context), False))
    for name in sorted(gone):
        secret, bad = secret_of(pad_secrets.get(name, {}), threshold, partial(_is_pads_secret, keys[name], context))
        if secret is None:
            raise CannotOpen(f"too few shares of the pads of {name}, who has vanished, have come")
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
    """Return the secret that ``check`` knows, and the points of wrong shares; None if no shares give it. Nobody is
    named if so many are wrong that others could be: more than half of those not needed."""
    if len(shares) < threshold:
        return None, set()
    points, found = sorted(shares), None
    most_wrong = (len(points) + 1 - threshold) // 2  # Reed-Solomon's bound, the secret counted as one share more
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
    """Return sets of points whose shares are tried one after the other: in order first, then at random."""
    yield points[:threshold]
    chance = random.Random(str(points))
    for _ in range(TRIES if len(points) > threshold else 0):
        yield chance.sample(points, threshold)
