"""The sums of a federation once more, from what went over the wire: by other code than the coordinator's, in numpy.

An update is unpacked to arrays of the model's shapes, with flags of where it has values. From there on everything is
written from the methods' formulas, over whole arrays, in float64, in the cohort's order:

    mean        Σ n_k w_ki / Σ n_k over those who sent i; where nobody did, the former value              FedAvg, FedSPU
    buffered    the same of w_now + (1 + t)^-a (w_k - w_then), for an update t models old                 FedBuff
    pruned      the K_l largest |mean| of each layer among those that somebody holds, and their signs     FedSGC
    voted       the same among those that more than ``vote_percent`` of the updates hold                  DM-PFL
    blocks      the mean, or with everybody as divisor                                                    pFedGate

Means are equal bit for bit where the coordinator adds in the same order. Where it adds updates of one mask apart from
those of others (masks of elements), or in an order that only it knows (buffered), float64 rounds the sum's last bit
otherwise, and so at most the last bit of float32: one unit in the last place is let pass, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.elements import ElementMask, from_bits
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import unpack
from sparrow.protocol.messages import UpdateReport

Arrays = dict[str, Any]


class Differs(AssertionError):
    """A model is not what its updates make."""


@dataclass(frozen=True)
class Model:
    """A global model as stored: values by name, the flags of what exists where it is sparse, and the method's own."""

    values: Arrays
    mask: ElementMask | None = None
    own: Arrays = field(default_factory=dict)

    @classmethod
    def read(cls, manifest: Manifest, values: bytes, state: bytes | None) -> Model:
        """Of its two files."""
        tensors, _ = checkpoint.load(values)
        if state is None:
            return cls(tensors)
        beside, _ = checkpoint.load(state)
        bits = beside.pop("mask", None)
        mask = None if bits is None else from_bits(manifest, bits.tobytes())
        return cls(tensors, mask, {name.removeprefix("own:"): array for name, array in beside.items()})


@dataclass(frozen=True)
class Sent:
    """An update as arrays: float32 values of a model, and where it has any. examples: its weight."""

    values: Arrays
    flags: Arrays
    examples: int


def read_update(manifest: Manifest, body: bytes, began: Model) -> Sent:
    """An update's body. began: the model that its device was given, which int8 is a difference from."""
    decoded = bundle.decode(body, manifest, began.mask)
    values = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.shared}
    flags = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.shared}
    for spec, part, packed in unpack(manifest, decoded.values, decoded.mask):
        part.put(values[spec.name], packed)
        part.put(flags[spec.name], np.ones_like(packed))
    has = {name: array.astype(bool) for name, array in flags.items()}
    if decoded.precision == "int8":
        values = {name: np.where(has[name], began.values[name] + array, 0) for name, array in values.items()}
    return Sent(values, has, UpdateReport.model_validate_json(decoded.report).num_examples)


def brought_forward(update: Sent, began: Model, now: Model, behind: int, exponent: float) -> Sent:
    """A late update, as if it had begun from today's model."""
    values = {}
    for name, array in update.values.items():
        moved = array.astype(np.float64) - began.values[name]
        values[name] = (now.values[name] + (1 + behind) ** -exponent * moved).astype(np.float32)
    return Sent(values, update.flags, update.examples)


@dataclass(frozen=True)
class Mean:
    """Σ n w / Σ n over those who sent a value, else the former one; the weights, and how many hold it."""

    values: Arrays
    weights: Arrays
    votes: Arrays


def mean_of(updates: Sequence[Sent], former: Arrays) -> Mean:
    values, weights, votes = {}, {}, {}
    for name, old in former.items():
        numerator, weight, vote = np.zeros(old.shape), np.zeros(old.shape), np.zeros(old.shape, np.int64)
        for update in updates:
            numerator += update.examples * update.values[name].astype(np.float64)
            weight += update.examples * update.flags[name]
            vote += update.flags[name]
        sent = weight > 0
        values[name] = np.where(sent, numerator / np.where(sent, weight, 1), old).astype(np.float32)
        weights[name], votes[name] = weight, vote
    return Mean(values, weights, votes)


def check_model(
    method: str, settings: Mapping[str, Any], manifest: Manifest, base: Model, updates: Sequence[Sent], model: Model
) -> int:
    """Raise Differs unless the model follows from the last one and these updates, in the cohort's order.

    Returns how many of its values differ in their last bit.
    """
    own = dict(settings["method_settings"])
    if method in ("fedavg", "fedspu"):
        exact, wanted = settings["buffer"] is None, mean_of(updates, base.values).values
        for name in wanted:
            if name.endswith("running_var"):  # late differences may bring it below 0
                wanted[name] = np.maximum(wanted[name], 0)
        return check_same(wanted, model.values, ulps=0 if exact else 1)
    if method == "pfedgate":
        return _blocks(own, manifest, base, updates, model)
    assert base.mask is not None
    assert model.mask is not None
    if method == "fedsgc":
        return _pruned(own, base, base.mask, updates, model, model.mask)
    if method == "dmpfl":
        return _voted(own, base, base.mask, updates, model, model.mask)
    raise Differs(f"nobody has written down how {method} makes a model")


def check_same(wanted: Arrays, found: Arrays, *, ulps: int) -> int:
    """Raise Differs where values lie further apart than so many units in the last place; returns how many differ."""
    if wanted.keys() != found.keys():
        raise Differs(f"tensors {sorted(wanted.keys() ^ found.keys())}")
    differing = 0
    for name, array in wanted.items():
        apart = np.abs(array.astype(np.float64) - found[name])
        off = array.view(np.uint32) != found[name].view(np.uint32)
        off &= apart > 0  # zeros of both signs are one value
        if (apart > ulps * np.spacing(np.maximum(np.abs(array), np.abs(found[name])))).any():
            raise Differs(f"{name}: {int(off.sum())} of {off.size} values differ, by up to {apart.max():.3g}")
        differing += int(off.sum())
    return differing


def check_kept(name: str, mean: Any, kept: Any, eligible: Any, count: int) -> None:
    """Raise Differs unless ``kept`` are the ``count`` largest of those that are ``eligible``, to rounding."""
    if (kept & ~eligible).any():
        raise Differs(f"{name}: exists where too few hold it")
    if kept.sum() != min(count, eligible.sum()):
        raise Differs(f"{name}: {kept.sum()} exist, not {min(count, eligible.sum())}")
    out = eligible & ~kept
    if kept.any() and out.any():
        smallest, largest = np.abs(mean[kept]).min(), np.abs(mean[out]).max()
        if largest > smallest + np.spacing(largest):
            raise Differs(f"{name}: {largest} was pruned, {smallest} was kept")


def _pruned(
    own: dict[str, Any], base: Model, before: ElementMask, updates: Sequence[Sent], model: Model, after: ElementMask
) -> int:
    mean = mean_of(updates, {name: np.zeros_like(array) for name, array in base.values.items()})
    wanted: Arrays = {}
    for name, array in mean.values.items():
        if name not in before.exists:
            wanted[name] = array
            continue
        kept, held = after.exists[name], mean.weights[name] > 0
        check_kept(name, array, kept, held, int(before.exists[name].sum()))
        wanted[name] = np.where(kept, array, np.float32(0))
        directions = model.own[f"direction:{name}"].reshape(array.shape)
        moved = (np.sign(array - base.values[name].astype(np.float64)) * held).astype(np.int8)
        if own["direction_memory"] and f"direction:{name}" in base.own:
            moved = np.where(moved == 0, base.own[f"direction:{name}"].reshape(array.shape), moved)
        # A value that moved by its last bit alone may round to the other side.
        clear = np.abs(array - base.values[name].astype(np.float64)) > np.spacing(np.abs(array))
        if (directions != moved)[clear | ~held].any():
            raise Differs(f"direction:{name}: {int((directions != moved).sum())} differ")
    new = sum(int((after.exists[name] & ~before.exists[name]).sum()) for name in before.exists)
    if int(model.own["replaced"][0]) != int(base.own["replaced"][0]) + new:
        raise Differs(f"replaced: {model.own['replaced'][0]}, not {base.own['replaced'][0]} + {new}")
    return check_same(wanted, model.values, ulps=1)


def _voted(
    own: dict[str, Any], base: Model, before: ElementMask, updates: Sequence[Sent], model: Model, after: ElementMask
) -> int:
    former = {name: base.own.get(name, array) for name, array in base.values.items()}
    mean = mean_of(updates, former)
    voting = any((update.flags[name] != before.exists[name]).any() for update in updates for name in before.exists)
    wanted: Arrays = {}
    for name, array in mean.values.items():
        if name not in before.exists:
            wanted[name] = array
            continue
        kept = after.exists[name]
        if (kept != before.exists[name]).any() or voting:
            eligible = 100 * mean.votes[name] > own["vote_percent"] * len(updates)
            check_kept(name, array, kept, eligible, int(own["counts"][name]))
        wanted[name] = np.where(kept, array, np.float32(0))
    dense = {name: mean.values[name] for name in before.exists}
    return check_same(wanted, model.values, ulps=1) + check_same(dense, model.own, ulps=1)


def _blocks(own: dict[str, Any], manifest: Manifest, base: Model, updates: Sequence[Sent], model: Model) -> int:
    mean = mean_of(updates, base.values)
    if own["denominator"] == "all":
        total = float(sum(update.examples for update in updates))
        for name, old in base.values.items():
            numerator = sum(update.examples * update.values[name].astype(np.float64) for update in updates)
            touched = mean.weights[name] > 0
            everybody = (numerator + (total - mean.weights[name]) * old.astype(np.float64)) / total
            mean.values[name] = np.where(touched, everybody, old).astype(np.float32)
    return check_same(mean.values, model.values, ulps=0)
