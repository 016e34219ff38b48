"""Measured and predicted time and memory of training steps.

    python -m benchmarks.graph_costs [--only WORD] [--samples 8]

One row for each built-in task and, with the extra ``zoo``, for each popular model. Seconds are processor seconds of one
step on one core, the fastest of ``TRIES`` after a first one; memory is the growth of the process, with the session. The
last line has the number of predictions that are at most ``BAR`` times the measurement.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np

from benchmarks.markdown import markdown_table
from edge_sdk.engines.onnx import Network, Sessions, give_back
from edge_sdk.engines.speed import measured_speed
from sparrow.devices import memory
from sparrow.graphs import Graphs
from sparrow.graphs.checking import check_graphs
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.errors import GraphError
from sparrow.protocol.manifest import Array, Manifest

TRIES = 3
BAR = 5.0


@dataclass(frozen=True)
class Row:
    """Seconds and bytes of one step, predicted and measured."""

    name: str
    predicted: float
    seconds: float
    predicted_bytes: int
    bytes: int


def measure(name: str, graphs: Graphs, manifest: Manifest, inputs: Array, targets: Array) -> Row:
    """Take steps on a batch. Raises GraphError for graphs that a device refuses."""
    needs, _ = check_graphs(graphs, manifest)
    speed = measured_speed()
    samples = len(inputs)
    network = Network(manifest, Sessions(graphs))
    chance = np.random.Generator(np.random.PCG64(0))
    some = {spec.name: chance.uniform(0.5, 1, spec.shape).astype(np.dtype(spec.dtype)) for spec in manifest.kept}
    network.load({name: values / max(1, values.shape[-1] if values.ndim else 1) for name, values in some.items()})
    again, _, grown = first_step(network, inputs, targets)
    fastest = min(again() for _ in range(TRIES))
    return Row(name, needs.seconds(samples, speed), fastest, needs.bytes(samples), grown)


def first_step(network: Network, inputs: Array, targets: Array) -> tuple[Callable[[], float], float, int]:
    """Run a network's first step on a batch.

    Returns a function that runs another step and returns its processor seconds; the first step's seconds; and the bytes
    by which this process grew, with the session.
    """
    gc.collect()
    give_back()
    memory.give_back()
    before = memory.resident()
    memory.forget_peak()
    step = network.step()
    drawn = step.draw(np.random.Generator(np.random.PCG64(0)), len(inputs))

    def again() -> float:
        begin = time.process_time()
        step.run(inputs, targets, drawn)
        return time.process_time() - begin

    seconds = again()
    return again, seconds, max(0, memory.peak_resident() - before)


def _built_in(samples: int, only: str) -> Iterator[Row]:
    for task in builtin_tasks():
        if only in task:
            known = load_builtin(task)
            shape = (samples, *known.manifest.input_shape)
            graphs = Graphs(known.graphs["step"], known.graphs["evaluation"])
            yield measure(task, graphs, known.manifest, np.ones(shape, np.float32), np.zeros(samples, np.int64))


def _popular(samples: int, only: str) -> Iterator[Row]:
    import torch

    from benchmarks.zoo import ZOO
    from edge_sdk.publishing.step import compile_step
    from edge_sdk.publishing.translations import CannotCompile
    from edge_sdk.publishing.untraced import describe_whole

    for name, entry in ZOO.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model = entry.model()
        inputs = entry.samples(samples)
        with torch.no_grad():
            answer = model.eval()(inputs)
        targets = torch.randint(answer.shape[1], (samples, *answer.shape[2:]))
        try:
            graphs = compile_step(model.train(), torch.nn.CrossEntropyLoss(), inputs, targets)
        except CannotCompile as error:
            # Gradients of a few random samples can be all rounding, behind many batch norms.
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        manifest = describe_whole(model, inputs[:2], task="zoo")
        kept = model.state_dict()
        frozen = {spec.name: kept[spec.name].numpy() for spec in manifest.tensors if spec.policy == "frozen"}
        graphs = replace(graphs, frozen=frozen)
        yield measure(name, graphs, manifest, inputs.numpy(), targets.numpy())


def main() -> int:
    """Print the table, and return 1 if a step is refused or too many predictions are beyond the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    kinds = [_built_in]
    if all(find_spec(package) for package in ("torchvision", "timm", "transformers")):
        kinds.append(_popular)
    rows = list[Row]()
    try:
        for kind in kinds:
            for row in kind(options.samples, options.only):
                rows.append(row)
                print(f"{row.name}: {row.seconds:.3f} s, predicted {row.predicted:.3f}", file=sys.stderr)
    except GraphError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    columns = ("step", "s", "predicted", "ratio", "MB", "predicted", "ratio")
    table = [
        (
            row.name,
            f"{row.seconds:.3f}",
            f"{row.predicted:.3f}",
            f"{row.predicted / row.seconds:.1f}",
            f"{row.bytes / 1e6:.0f}",
            f"{row.predicted_bytes / 1e6:.0f}",
            f"{row.predicted_bytes / max(1, row.bytes):.1f}",
        )
        for row in rows
    ]
    print(markdown_table(columns, table))
    within = sum(row.predicted <= BAR * row.seconds for row in rows)
    print(f"\n{within} of {len(rows)} steps are predicted to take at most {BAR:g} times what they take.")
    return 0 if within >= 0.95 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
