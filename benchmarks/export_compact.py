"""``python -m benchmarks.export_compact``: savings of a compact ONNX file against the dense one, and the best possible.

Three files of a task's network are run in turn, in one process: *dense*, with all weights; *compact*, made from the
dense one with 0.3 of its neurons left and zeros for the rest; *small*, a network built by torch with only those
neurons, published and filled as usual: the best possible result. ONNX Runtime uses one thread. Medians over the turns,
so that other load affects all three equally.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import onnx
import torch
from torch import nn

from benchmarks.markdown import markdown_table
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.tasks.models import cifar10_fedspu, mnist_leaf
from sparrow.bench.server import machine
from sparrow.export.alignment import align
from sparrow.export.compact import compact
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import BuiltinTask, load_builtin
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, neuron_block
from sparrow.protocol.neurons import narrowed

NETWORKS = {"mnist:leaf": mnist_leaf, "cifar10": cifar10_fedspu}
BATCHES = (1, 32)
RATIO = 0.3
TURN = 10
SAME = 1e-5
"""Largest difference between outputs, relative to the largest output, that counts as rounding."""


def files(name: str, ratio: float) -> dict[str, bytes]:
    """Return the three ONNX files of a task; compact and small ones are checked against the masked dense one."""
    task = load_builtin(name)
    mask = draw_neurons(task.manifest, NeuronDraw("device-0", ratio))
    weights = random_weights(task.manifest)
    masked = onnx.load_from_string(fill(task.skeleton, task.manifest, zero_outside(task.manifest, weights, mask)))
    found = {
        "dense": fill(task.skeleton, task.manifest, weights),
        "compact": align(compact(masked)).SerializeToString(deterministic=True),
        "small": built_small(task, weights, mask),
    }
    x = np.random.default_rng(1).normal(size=(64, *task.manifest.input_shape)).astype(np.float32)
    wanted = Runner(masked.SerializeToString())(x)
    for which in ("compact", "small"):
        difference = np.abs(np.subtract(Runner(found[which])(x), wanted)).max() / np.abs(wanted).max()
        assert difference <= SAME, f"{name}: the {which} file differs by {difference:g}"
    return found


def random_weights(manifest: Manifest) -> Tensors:
    """Return random weights that keep activations near 1."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for spec in manifest.kept:
        values = rng.normal(size=spec.shape) / math.sqrt(math.prod(spec.shape[1:]))
        tensors[spec.name] = (np.abs(values) if spec.name.endswith("running_var") else values).astype(np.float32)
    return tensors


def zero_outside(manifest: Manifest, tensors: Tensors, mask: NeuronMask) -> Tensors:
    """Return the tensors with zeros for all neurons outside the mask."""
    masked = {}
    for spec in manifest.kept:
        masked[spec.name] = np.zeros_like(tensors[spec.name])
        part = neuron_block(manifest, spec, mask)
        part.put(masked[spec.name], part.take(tensors[spec.name]))
        if spec.name.endswith("running_var"):
            masked[spec.name] = tensors[spec.name]
    return masked


def built_small(task: BuiltinTask, weights: Tensors, mask: NeuronMask) -> bytes:
    """Return the ONNX file of a network that torch builds with the mask's neurons alone."""
    narrow = narrowed(task.manifest, mask)
    shapes = {spec.name: spec.shape for spec in narrow.kept}
    model = NETWORKS[task.name]()
    for name, module in list(model.named_children()):
        shape = shapes.get(f"{name}.weight", ())
        if isinstance(module, nn.Conv2d):
            layer: nn.Module = nn.Conv2d(shape[1], shape[0], shape[2], padding=module.padding)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            layer = nn.Linear(shape[1], shape[0], bias=module.bias is not None)
        elif isinstance(module, nn.BatchNorm2d):
            layer = nn.BatchNorm2d(shape[0])
        else:
            continue
        setattr(model, name, layer)
    example = torch.zeros(1, *task.manifest.input_shape)
    manifest = describe(model.eval(), example, task=task.name)
    taken = {}
    for spec in task.manifest.kept:
        taken[spec.name] = neuron_block(task.manifest, spec, mask).take(weights[spec.name]).reshape(shapes[spec.name])
    return fill(make_skeleton(model, example, manifest), manifest, taken)


class Runner:
    """An ONNX file in ONNX Runtime, one thread."""

    def __init__(self, body: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"])

    def __call__(self, x: Array) -> Array:
        output: Array = self._session.run(None, {"input": x})[0]
        return output


def latencies(bodies: dict[str, bytes], shape: Sequence[int], batch: int, turns: int) -> dict[str, float]:
    """Return file -> median seconds of a run; the files take turns of ``TURN`` runs.

    A device runs one model over and over. The first run of a turn finds the caches full of another's weights and is
    not counted.
    """
    runners = {which: Runner(body) for which, body in bodies.items()}
    x = np.random.default_rng(2).normal(size=(batch, *shape)).astype(np.float32)
    taken: dict[str, list[float]] = {which: [] for which in runners}
    for _ in range(turns):
        for which, run in runners.items():
            run(x)
            for _ in range(TURN):
                began = time.perf_counter()
                run(x)
                taken[which].append(time.perf_counter() - began)
    return {which: median(seconds) for which, seconds in taken.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_compact", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--turns", type=int, default=60, help=f"turns of {TURN} runs of each file (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    head = ["task", "batch", "dense ms", "compact ms", "small ms", "dense / compact", "dense / small", "size"]
    rows = []
    for name in NETWORKS:
        bodies = files(name, RATIO)
        size = len(bodies["compact"]) / len(bodies["dense"])
        for batch in BATCHES:
            found = latencies(bodies, load_builtin(name).manifest.input_shape, batch, options.turns)
            times = [f"{1e3 * found[which]:.3f}" for which in ("dense", "compact", "small")]
            ratios = [f"{found['dense'] / found[which]:.2f}" for which in ("compact", "small")]
            rows.append([name, str(batch), *times, *ratios, f"{size:.3f}"])
    print(f"{RATIO:g} of the channels, one thread, medians of {TURN * options.turns}; {machine()}\n")
    print(markdown_table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
