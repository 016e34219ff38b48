"""Check that a federation's graphs fit a device's time and memory: by prediction, then by a trial."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from sparrow import trial
from sparrow.graphs import Graphs
from sparrow.graphs.bounds import MIB, MOST_SECONDS
from sparrow.graphs.checking import Needs
from sparrow.limited import NotAnswered, TookTooLong, TookTooMuchMemory, run_limited
from sparrow.protocol import checkpoint
from sparrow.protocol.errors import GraphError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Array, Manifest, Tensors

from .speed import measured_speed

# ONNX Runtime cannot be stopped within a node. So each node's predicted time per batch is limited (``MOST_SECONDS``),
# and a step that was made to deceive the prediction is caught by a trial in a process with a deadline.
SPARE = 64 * MIB
"""Bytes beyond the free memory that pass this check; ``budget.preparation`` measures them and suggests a budget."""
MOST_BATCH_SECONDS = 300.0
"""Longest predicted time of a batch."""
STARTING_SECONDS = 60.0
"""Time limit for the trial's process to start and load the graph, seconds; small boards need ten."""
OVER = 10
"""Factor on predicted time and memory of a trial."""
BESIDE = 512 * MIB
"""Bytes of the trial's process in addition to the prediction."""

_tried: set[tuple[str, int]] = set()


class TooCostly(GraphError):
    """A graph needs more time or memory than this device has."""

    failure = Failure("bad-work/cost")


def check_affordable(needs: tuple[Needs, Needs], manifest: Manifest, train: int, held_out: int, free: int) -> None:
    """Raise TooCostly if a training step or an evaluation takes too long or needs too much memory.

    train, held_out: samples per batch. free: bytes that training may add.
    """
    speed = measured_speed()
    tensors = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manifest.kept)
    for what, each, samples in (("training step", needs[0], train), ("evaluation", needs[1], held_out)):
        smaller = "ask the operator for a smaller batch_size, or its author for a smaller model"
        name, operator, seconds = each.slowest(samples, speed)
        if seconds > MOST_SECONDS:
            raise TooCostly(
                f"the node {name[:80]!r} ({operator[:80]!r}) of the {what} is predicted to take {seconds:,.1f} s for a "
                f"batch of {samples} samples on this device; it must take at most {MOST_SECONDS:g} s: {smaller}"
            )
        whole = each.seconds(samples, speed)
        if whole > MOST_BATCH_SECONDS:
            raise TooCostly(
                f"the {what} is predicted to take {whole:,.0f} s for a batch of {samples} samples on this device; "
                f"it must take at most {MOST_BATCH_SECONDS:g} s: {smaller}"
            )
        taken = tensors + each.bytes(samples)
        if taken > max(0, free) + SPARE:
            raise TooCostly(
                f"the {what} is predicted to take {taken / MIB:,.0f} MiB of memory for a batch of {samples} samples, "
                f"but only {max(0, free) / MIB:,.0f} are available; give this device more, or {smaller}"
            )


def try_step(graphs: Graphs, needs: Needs, tensors: Tensors, inputs: Array, targets: Array) -> None:
    """Run a published step on one batch in a process with limits on time and memory.

    Raises TooCostly, and GraphError if the runtime cannot run it.
    """
    key = hashlib.sha256(graphs.step).hexdigest(), len(inputs)
    if key in _tried or not sys.executable:
        return
    seconds = STARTING_SECONDS + OVER * needs.seconds(len(inputs), measured_speed())
    held = sum(tensor.nbytes for tensor in (*tensors.values(), *graphs.frozen.values()))
    memory = BESIDE + OVER * (needs.bytes(len(inputs)) + held + inputs.nbytes + len(graphs.step))
    graph = {trial.GRAPH: np.frombuffer(graphs.step, np.uint8)}
    request = checkpoint.save({**tensors, **graphs.frozen, **graph, "input": inputs, "target": targets})
    try:
        run_limited(trial.__name__, request, seconds=seconds, memory=memory)
    except (TookTooLong, TookTooMuchMemory) as error:
        raise TooCostly(
            f"the training step was tried on {len(inputs)} samples in a separate process: {error}, far more than "
            "predicted. Do not train with it; report it to the operator and the model's author"
        ) from None
    except NotAnswered as error:
        raise GraphError(
            f"the training step was tried in a separate process, and {error}. Do not train with it; report it to the "
            "operator and the model's author"
        ) from None
    _tried.add(key)
