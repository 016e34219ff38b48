"""Check that a device can afford a federation's graphs: by prediction before anything is allocated, then by a trial.

Nothing ends ONNX Runtime within a node. So no node may be predicted to take longer than ``MOST_SECONDS`` for a batch of
this device, on this device; what a batch takes must fit its memory; and a published step, which may be made to deceive
the prediction, first runs in a process that is killed at a deadline.
"""

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

SPARE = 64 * MIB
"""Bytes beyond what is free that are left to ``budget.preparation``: it measures, and names a budget that fits."""
MOST_BATCH_SECONDS = 300.0
"""Seconds that a batch may take, as predicted."""
STARTING_SECONDS = 60.0
"""Of the process of a trial: to start, and to load the graph. Small boards take ten."""
OVER = 10
"""How many times as long as predicted a trial may take, and how much memory."""
BESIDE = 512 * MIB
"""Bytes of the process of a trial beside those that are predicted."""

_tried: set[tuple[str, int]] = set()


class TooCostly(GraphError):
    """A graph that takes more time or memory than this device gives it."""

    failure = Failure("bad-work/cost")


def check_affordable(needs: tuple[Needs, Needs], manifest: Manifest, train: int, held_out: int, free: int) -> None:
    """Raise TooCostly if a step or an evaluation of a federation takes too long, or more memory than there is.

    needs: of both. train, held_out: samples of a batch of each. free: bytes that training may add.
    """
    speed = measured_speed()
    tensors = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manifest.kept)
    for what, each, samples in (("training step", needs[0], train), ("evaluation", needs[1], held_out)):
        smaller = "ask the operator for a smaller batch_size, or its author for a smaller model"
        name, operator, seconds = each.slowest(samples, speed)
        if seconds > MOST_SECONDS:
            raise TooCostly(
                f"the node {name[:80]!r} ({operator[:80]!r}) of the {what} is predicted to take {seconds:,.1f} s for a "
                f"batch of {samples} samples on this device, at most {MOST_SECONDS:g} s are accepted; {smaller}"
            )
        whole = each.seconds(samples, speed)
        if whole > MOST_BATCH_SECONDS:
            raise TooCostly(
                f"the {what} is predicted to take {whole:,.0f} s for a batch of {samples} samples on this device, at "
                f"most {MOST_BATCH_SECONDS:g} are accepted; {smaller}"
            )
        taken = tensors + each.bytes(samples)
        if taken > max(0, free) + SPARE:
            raise TooCostly(
                f"the {what} is predicted to take {taken / MIB:,.0f} MiB of memory for a batch of {samples} samples, "
                f"and there are {max(0, free) / MIB:,.0f}; give this device more, or {smaller}"
            )


def try_step(graphs: Graphs, needs: Needs, tensors: Tensors, inputs: Array, targets: Array) -> None:
    """Run a published step once, on a batch, in a process that is killed if it takes too much; then return.

    tensors: the model's, by name. A step is tried once in a process, for each size of a batch. Raises TooCostly, and
    GraphError for a step that the runtime does not run.
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
            f"the training step was tried on {len(inputs)} samples in a process of its own: {error}, and far less was "
            "predicted. Do not train with it; tell the operator and the model's author"
        ) from None
    except NotAnswered as error:
        raise GraphError(
            f"the training step was tried in a process of its own, and {error}. Do not train with it; tell the "
            "operator and the model's author"
        ) from None
    _tried.add(key)
