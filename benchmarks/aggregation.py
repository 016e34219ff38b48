"""``python -m benchmarks.aggregation``: the cost of adding one update to a round's sums, by the kind of its mask.

    dense            the whole model, float64 sums
    float32          the whole model with float32 sums, fused in slices: the cost of precision, not the product
    neurons          only the weights between a device's active neurons, a new draw per update
    shared           elements under the mask that all updates of a round share
    elements         elements under masks of the devices' own
    Flower           its ``aggregate``: whole models, float32 sums, all updates in memory at once; measured in turn with
                     ours, left out if it is not installed (``python -m benchmarks.peers.install``)

It takes the least processor time of many repetitions, because other work on the machine only adds time. Each update is
a different array, so that caches do not help, and is read once before, as in decoding. Compare only the ratios to
``float32`` and to Flower between machines, from the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from benchmarks.peers.install import PYTHON, ROOT
from edge_sdk.publishing.coupling import describe
from sparrow.bench.server import machine
from sparrow.coordinator.sums.averages import ElementSums, MaskedSums, Sums
from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.masks import (
    CHUNK_VALUES,
    Mask,
    NeuronDraw,
    NeuronMask,
    active_count,
    blocks,
    count_values,
    draw_neurons,
)
from sparrow.protocol.sparsity import layer_counts, random_mask

DENSITY = 0.2
UPDATES = 8
"""Different updates that are folded in turn: 73 MB of them dense, more than caches hold."""
TURNS = 5
"""Number of times that all kinds are measured in turn."""


def network(hidden: int = 269) -> nn.Module:
    """Return a CNN of two convolutions with batch norm, a flatten, and two linear layers.

    hidden: neurons of the first linear layer; 269 make 2.28 million parameters, 256 make 2.2 million.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def ratio_for(manifest: Manifest, density: float) -> float:
    """Return the active ratio at which a draw of neurons has about this share of the model's values.

    A value exists if both its neurons do, so the ratio is near the square root of the density.
    """
    ratios = [step / 1000 for step in range(1, 1000)]
    return min(ratios, key=lambda ratio: abs(share(manifest, first(manifest, ratio)) - density))


def first(manifest: Manifest, ratio: float) -> NeuronMask:
    """Return a mask of the first neurons, as many as are drawn at ``ratio``."""
    return NeuronMask({name: np.arange(active_count(size, ratio)) for name, size in manifest.group_sizes.items()})


def share(manifest: Manifest, mask: Mask | None) -> float:
    """Return the share of the model's values that a mask names."""
    return count_values(manifest, mask) / manifest.shared_values


class Fused32:
    """Plain float32 sums in slices that stay in the cache: a lower bound, too coarse for a large round."""

    def __init__(self, manifest: Manifest) -> None:
        self.updates = 0
        self._sum = np.zeros(manifest.shared_values, np.float32)
        self._scratch = np.empty(CHUNK_VALUES, np.float32)

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        for start in range(0, len(values), CHUNK_VALUES):
            part = values[start : start + CHUNK_VALUES]
            scaled = np.multiply(part, np.float32(num_examples), out=self._scratch[: len(part)])
            self._sum[start : start + CHUNK_VALUES] += scaled
        self.updates += 1


def fold_all(sums: Sums, updates: Sequence[tuple[Array, Mask | None]], repetitions: int) -> Iterator[float]:
    """Return the milliseconds of processor time of each addition."""
    for number, (values, mask) in enumerate(itertools.islice(itertools.cycle(updates), repetitions)):
        values.min()
        begin = time.thread_time_ns()
        sums.fold_in_place(values, mask, 100 + number)
        yield (time.thread_time_ns() - begin) / 1e6


def least(new: Callable[[], Sums], updates: Sequence[tuple[Array, Mask | None]], repetitions: int) -> float:
    """Return the smallest time, with new sums."""
    return min(fold_all(new(), updates, repetitions))


def cases(manifest: Manifest) -> dict[str, tuple[Callable[[], Sums], list[Mask | None]]]:
    """Return the cases: name -> (new sums, masks of the updates)."""
    ratio = ratio_for(manifest, DENSITY)
    counts = layer_counts(manifest, DENSITY)
    held = random_mask(manifest, counts, 0)
    own = [random_mask(manifest, counts, seed) for seed in range(1, UPDATES + 1)]
    drawn = [draw_neurons(manifest, NeuronDraw(f"device-{n}", ratio)) for n in range(UPDATES)]
    for mask in (held, *own):
        # Decoding an update computes these cached values before it is folded, so they are not measured.
        _ = mask.digest, mask.index
    return {
        "dense": (lambda: MaskedSums(manifest), [None] * UPDATES),
        "float32": (lambda: Fused32(manifest), [None] * UPDATES),
        "neurons": (lambda: MaskedSums(manifest), list(drawn)),
        "shared": (lambda: ElementSums(manifest, held), [held] * UPDATES),
        "elements": (lambda: ElementSums(manifest, held), list(own)),
    }


@contextmanager
def flower(manifest: Manifest) -> Iterator[Callable[[], float] | None]:
    """Return a call that gives Flower's milliseconds per update for one average, or None if Flower is not installed."""
    if not PYTHON.exists():
        yield None
        return
    shapes = json.dumps([spec.shape for spec in manifest.shared])
    command = [str(PYTHON), "-m", "benchmarks.peers.averaging", shapes, str(UPDATES)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        asked = peer.stdin
        answers = peer.stdout

        def ask() -> float:
            print(file=asked, flush=True)
            answer = answers.readline()
            if not answer:
                raise SystemExit("Flower's average has ended; its own message is above")
            return float(answer)

        yield ask
        asked.close()


def measure(repetitions: int) -> dict[str, tuple[float, float]]:
    """Return name -> (share of the model's values, least milliseconds per update)."""
    torch.manual_seed(0)
    manifest = describe(network(), torch.zeros(2, 3, 32, 32), task="aggregation")
    chance = np.random.Generator(np.random.PCG64(0))
    measures: dict[str, Callable[[], float]] = {}
    shares = {"Flower": 1.0}
    for name, (new, masks) in cases(manifest).items():
        updates = [(chance.standard_normal(count_values(manifest, m), dtype=np.float32), m) for m in masks]
        for mask in masks:
            list(blocks(manifest, mask))
        measures[name] = partial(least, new, updates, repetitions)
        shares[name] = share(manifest, masks[0])
    with flower(manifest) as ask:
        if ask is not None:
            measures["Flower"] = lambda: min(ask() for _ in range(-(-repetitions // UPDATES)))
        found = dict.fromkeys(measures, math.inf)
        for name in tqdm([*measures] * TURNS, leave=False, disable=None):
            found[name] = min(found[name], measures[name]())
    return {name: (shares[name], milliseconds) for name, milliseconds in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aggregation", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--repetitions", type=int, default=80, help="additions of each kind per turn; the minimum counts"
    )
    options = parser.parse_args(arguments)
    found = measure(options.repetitions)
    print(f"2.28 M parameters, one thread, {machine()}; least of {TURNS} x {options.repetitions}, processor time\n")
    others = [name for name in ("float32", "Flower") if name in found]
    print("| masks | share of the values | ms per update |" + "".join(f" of {name} |" for name in others))
    print("|---|---|---|" + "---|" * len(others))
    for name, (density, milliseconds) in found.items():
        ratios = "".join(f" {milliseconds / found[other][1]:.2f} |" for other in others)
        print(f"| {name} | {density:.3f} | {milliseconds:.2f} |{ratios}")
    if "Flower" not in found:
        print("\nFlower is not installed: python -m benchmarks.peers.install")
    return 0


if __name__ == "__main__":
    sys.exit(main())
