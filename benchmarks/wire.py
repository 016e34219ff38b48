"""``python -m benchmarks.wire``: the cost of a sparse update on both sides, compared with boolean masks.

An update passes five stations: mask (from a new round's seed), pack (active values out of the model), encode (to
bytes), decode (checked), fold (into the running sums). The other implementation does the same work directly: one
boolean array per tensor, ``tensor[mask]`` out, ``numpy.savez`` to bytes, ``numpy.load``, ``sums[mask] += n * values``.
It has no checks and no digest. Both first draw the neurons of a new round from the seed.

The same is measured under masks of elements (FedSGC): a round's mask, which both sides have, and one with a quarter
replaced by a device, which is sent with the values, in the other implementation as packed bits. Medians over
alternating repetitions, one thread.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.aggregation import network
from benchmarks.places import ROWS, write_section
from edge_sdk.publishing.coupling import describe
from sparrow.bench.server import machine
from sparrow.coordinator.sums.averages import ElementSums, MaskedSums
from sparrow.protocol import bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons, pack
from sparrow.protocol.sparsity import layer_counts, random_mask

DENSITIES = (0.2, 0.4, 0.6, 0.8, 1.0)
ELEMENT_DENSITIES = (0.1, 0.2, 0.4)
REPLACED = 0.25
STATIONS = ("mask", "pack", "encode", "decode", "fold")


def boolean_masks(manifest: Manifest, mask: NeuronMask) -> Tensors:
    """Return one boolean array per shared tensor, of its shape."""
    masks: Tensors = {}
    for spec in manifest.shared:
        flags = np.zeros(spec.shape, dtype=np.float64)
        block_of(manifest, spec, mask).add(flags, 1.0)
        masks[spec.name] = flags > 0
    return masks


class Ours:
    """The product's code."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.sums = MaskedSums(manifest)

    def make_mask(self, draw: NeuronDraw) -> None:
        self.draw = draw
        self.mask = draw_neurons(self.manifest, draw)

    def pack(self, tensors: Tensors) -> Any:
        return pack(self.manifest, tensors, self.mask)

    def encode(self, values: Any) -> bytes:
        return bundle.encode(self.manifest, values, self.mask, draw=self.draw)

    def decode(self, body: bytes) -> Any:
        return bundle.decode(body, self.manifest)

    def fold(self, decoded: Any) -> None:
        self.sums.fold_in_place(decoded.values, decoded.mask, 100)


class Boolean:
    """The direct implementation with boolean masks."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.sums = {spec.name: np.zeros(spec.shape) for spec in manifest.shared}
        self.weights = {spec.name: np.zeros(spec.shape) for spec in manifest.shared}

    def make_mask(self, draw: NeuronDraw) -> None:
        self.masks = boolean_masks(self.manifest, draw_neurons(self.manifest, draw))

    def pack(self, tensors: Tensors) -> Any:
        return {name: tensors[name][mask] for name, mask in self.masks.items()}

    def encode(self, values: Any) -> bytes:
        file = io.BytesIO()
        np.savez(file, **values)
        return file.getvalue()

    def decode(self, body: bytes) -> Any:
        with np.load(io.BytesIO(body), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    def fold(self, decoded: Any) -> None:
        for name, mask in self.masks.items():
            self.sums[name][mask] += 100.0 * decoded[name]
            self.weights[name][mask] += 100.0


class Elements:
    """The product's code under an element mask; ``sent`` is an update's, ``held`` the round's."""

    def __init__(self, manifest: Manifest, held: ElementMask, sent: ElementMask) -> None:
        self.manifest = manifest
        self.held = held
        self.sent = sent
        self.sums = ElementSums(manifest, held)

    def make_mask(self, draw: NeuronDraw) -> None:
        """Return a new mask, without anything cached from the last update."""
        self.mask = ElementMask(self.sent.exists) if self.sent is not self.held else self.held

    def pack(self, tensors: Tensors) -> Any:
        return pack(self.manifest, tensors, self.mask)

    def encode(self, values: Any) -> bytes:
        return bundle.encode(self.manifest, values, self.mask, known=self.held)

    def decode(self, body: bytes) -> Any:
        return bundle.decode(body, self.manifest, self.held)

    def fold(self, decoded: Any) -> None:
        self.sums.fold_in_place(decoded.values, decoded.mask, 100)


class BooleanElements(Boolean):
    """The direct implementation under an element mask."""

    def __init__(self, manifest: Manifest, held: ElementMask, sent: ElementMask) -> None:
        super().__init__(manifest)
        self.travels = sent is not held
        everything = {spec.name: np.ones(spec.shape, dtype=bool) for spec in manifest.shared}
        self.masks: Any = everything | dict(sent.exists)

    def make_mask(self, draw: NeuronDraw) -> None:
        pass

    def encode(self, values: Any) -> bytes:
        bits = {f"{name}:mask": np.packbits(mask) for name, mask in self.masks.items()} if self.travels else {}
        return super().encode(values | bits)

    def decode(self, body: bytes) -> Any:
        decoded = super().decode(body)
        if self.travels:
            self.masks = {
                name: np.unpackbits(decoded[f"{name}:mask"], count=mask.size).reshape(mask.shape).astype(bool)
                for name, mask in self.masks.items()
            }
        return decoded


Side = Ours | Boolean | Elements


def timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds and the result of a call."""
    begin = time.perf_counter()
    result = action(*arguments)
    return time.perf_counter() - begin, result


def one_pass(side: Side, tensors: Tensors, draw: NeuronDraw) -> tuple[dict[str, float], int]:
    """Return the milliseconds at each station for one update, and its size in bytes."""
    spent: dict[str, float] = {}
    spent["mask"], _ = timed(side.make_mask, draw)
    spent["pack"], values = timed(side.pack, tensors)
    spent["encode"], body = timed(side.encode, values)
    spent["decode"], decoded = timed(side.decode, body)
    spent["fold"], _ = timed(side.fold, decoded)
    return {station: 1e3 * seconds for station, seconds in spent.items()}, len(body)


def measure(repetitions: int) -> list[dict[str, Any]]:
    """Return a row per density."""
    torch.manual_seed(0)
    cnn = network(256)
    manifest = describe(cnn, torch.zeros(2, 3, 32, 32), task="wire")
    state = cnn.state_dict()
    tensors: Tensors = {spec.name: state[spec.name].numpy() for spec in manifest.shared}
    rows = []
    for density in tqdm(DENSITIES, desc="neurons", disable=None):
        rows.append(compare("neurons", density, Ours(manifest), Boolean(manifest), tensors, repetitions))
    for density in tqdm(ELEMENT_DENSITIES, desc="elements", disable=None):
        held = random_mask(manifest, layer_counts(manifest, density), 0)
        for masks, sent in (("elements", held), ("elements, replaced", replaced(held))):
            ours = Elements(manifest, held, sent)
            other = BooleanElements(manifest, held, sent)
            rows.append(compare(masks, density, ours, other, tensors, repetitions))
    return rows


def replaced(mask: ElementMask) -> ElementMask:
    """Return the mask with a share of the elements of each layer replaced by others."""
    chance = np.random.Generator(np.random.PCG64(0))
    exists = {}
    for name, flags in mask.exists.items():
        count = min(int(REPLACED * mask.counts[name]), flags.size - mask.counts[name])
        new = flags.copy().reshape(-1)
        new[chance.choice(np.flatnonzero(~flags), count, replace=False)] = True
        new[chance.choice(mask.index[name], count, replace=False)] = False
        exists[name] = new.reshape(flags.shape)
    return ElementMask(exists)


def compare(masks: str, density: float, ours: Side, other: Side, tensors: Tensors, repetitions: int) -> dict[str, Any]:
    """Return one row: medians over alternating repetitions."""
    sides = {"ours": ours, "boolean": other}
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    sizes = {}
    for number in range(repetitions):
        for name, side in sides.items():
            draw = NeuronDraw(f"device-{number}", density)
            spent, sizes[name] = one_pass(side, tensors, draw)
            passes[name].append(spent)
    medians = {
        name: {station: statistics.median(each[station] for each in all_) for station in STATIONS}
        for name, all_ in passes.items()
    }
    parameters = ours.manifest.trainable_values
    return {"masks": masks, "density": density, "parameters": parameters, "ms": medians, "bytes": sizes}


def page(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a page of Markdown."""
    lines = [
        "# What a sparse update costs",
        "",
        f"A CNN of {rows[0]['parameters']:,} parameters, with masks of neurons at the given budget and masks of "
        f"elements at the given density. An element mask is either known to both sides, or {REPLACED:.0%} of it was "
        "replaced, so that it is sent with the update. Times are milliseconds per update, medians of alternating "
        "repetitions, one thread. *Boolean* is the simplest format: a boolean array per tensor, `numpy.savez`, no "
        "checks. Sparrow's format includes checks of lengths, mask, digest and finite values.",
        "",
        f"Made by `python -m benchmarks.wire` on {machine()}; the rows are in `wire.jsonl`.",
        "",
        f"| masks | ratio or density | {' | '.join(STATIONS)} | all | boolean: {' | '.join(STATIONS)} | all | ratio | "
        "bytes | boolean |",
        "|---" * (2 * len(STATIONS) + 7) + "|",
    ]
    for row in rows:
        ours = row["ms"]["ours"]
        other = row["ms"]["boolean"]
        totals = sum(ours.values()), sum(other.values())
        cells = [f"{ours[station]:.2f}" for station in STATIONS] + [f"{totals[0]:.2f}"]
        cells += [f"{other[station]:.2f}" for station in STATIONS] + [f"{totals[1]:.2f}"]
        lines.append(
            f"| {row['masks']} | {row['density']} | {' | '.join(cells)} | **{totals[0] / totals[1]:.2f}** | "
            f"{row['bytes']['ours']:,} | {row['bytes']['boolean']:,} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire", description="Measure the cost of a sparse update."
    )
    parser.add_argument("--repetitions", type=int, default=41)
    options = parser.parse_args(arguments)
    rows = measure(options.repetitions)
    (ROWS / "wire.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_section("speed", "wire", page(rows))
    print(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
