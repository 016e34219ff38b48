"""Open a task: check its data and model against the federation, and create the engine."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sparrow.graphs import Graphs
from sparrow.protocol.errors import GraphError, ManifestError
from sparrow.protocol.manifest import Array, Constant, GraphName, Manifest, Tensors, TensorSpec, own_initial_values
from sparrow.protocol.messages import FederationInfo

from ..budget.prediction import rehearse_torch
from ..budget.preparation import Prepared
from ..engines import Engine, EngineChoice, EngineName
from ..errors import BadArgument
from ..methods import load_method
from ..tasks import Task, as_arrays
from ..tasks.compute import ACCELERATORS, PROCESSOR, Compute, choose_device
from ..tasks.intake import Taken, long_axes, random_state_kept, suited, take_in
from ..tasks.loading import ArrayBatches, Reshaped
from .trainable import CannotTrain
from .trainable import check as check_trainable

if TYPE_CHECKING:
    from torch import nn

    from sparrow.graphs.checking import Needs

    from ..engines.onnx import Sessions
    from ..engines.rehearsal import Rehearse

Prepare = Callable[[Task, Manifest, FederationInfo, "Rehearse"], Prepared]


def add_compute(parser: argparse.ArgumentParser) -> None:
    """Add the options for the engine and the accelerator."""
    parser.add_argument(
        "--engine",
        choices=get_args(EngineChoice),
        default="auto",
        metavar="NAME",
        help="onnx (without PyTorch), torch, or auto: onnx if possible and there is no GPU (default: auto)",
    )
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default="auto", help="device to train on (default: a GPU if present)"
    )
    parser.add_argument("--bfloat16", action="store_true", help="forward passes in bfloat16, with torch's autocast")


def choose_compute(
    engine: EngineChoice, accelerator: str, threads: int | None, *, bfloat16: bool, deterministic: bool = False
) -> tuple[EngineChoice, Compute]:
    """Return the engine, if already determined, and the compute.

    Raises CannotTrain if no engine is installed, BadArgument if options contradict.
    """
    if accelerator == "cuda" or bfloat16:
        if engine == "onnx":
            option = "--accelerator cuda" if accelerator == "cuda" else "--bfloat16"
            raise BadArgument(f"{option} needs PyTorch; give --engine torch, or leave {option} out")
        engine = "torch"
    check_trainable(module=None if engine == "auto" else "torch" if engine == "torch" else "onnxruntime")
    device = choose_device("cpu" if engine == "onnx" else accelerator, deterministic=deterministic)
    return engine, Compute(device, threads, bfloat16=bfloat16)


def choose_engine(asked: EngineChoice, task: Task, manifest: Manifest, method: str) -> EngineName:
    """Return the engine for ``task`` and a method.

    ``auto`` is ONNX Runtime, unless it cannot train this, or the task has a model for a GPU or bfloat16. Raises
    CannotTrain, and BadArgument if PyTorch needs a model that the task lacks.
    """
    lacks = _onnx_lacks(manifest, method)
    compute = task.compute
    accelerated = compute.device != PROCESSOR or compute.bfloat16
    if asked == "onnx" or (asked == "auto" and not lacks and not (accelerated and task.model is not None)):
        if lacks:
            raise CannotTrain(f"{lacks}: join with --engine torch")
        return "onnx"
    try:
        check_trainable()
    except CannotTrain as error:
        raise CannotTrain(f"{lacks}, and {error}" if lacks else str(error)) from None
    if task.model is None:
        if lacks:
            raise BadArgument(f"the task needs a model, because {lacks}; give one")
        raise BadArgument("the task has no model for PyTorch to train; give one, or --engine onnx")
    return "torch"


def _onnx_lacks(manifest: Manifest, method: str) -> str | None:
    if "onnx" not in load_method(method).engines:
        return f"{method} needs PyTorch to train"
    if "step" not in manifest.graphs:
        return "the model was published without a training step"
    missing = [package for package in ("onnx", "onnxruntime") if find_spec(package) is None]
    return f"{missing[0]} is not installed" if missing else None


def open_torch(
    task: Task, manifest: Manifest, info: FederationInfo, values: Tensors, prepare: Prepare | None, budget: float
) -> tuple[Prepared, Engine]:
    """Check model and data; return the prepared task and PyTorch's engine.

    Raises BadArgument, ManifestError if they do not fit the federation, DoesNotFit if memory is short.
    """
    # Imported here, because the other engine needs no PyTorch.
    from ..training.checking import check_task, suited_to_model
    from ..training.engine import TorchEngine

    task = load_method(info.method).task_of(task, manifest, info.settings.seed)
    check_model(task.model, manifest)
    take_values(task.model, manifest, values)
    task = suited_to_model(task)
    check_task(task, manifest)
    prepared = Prepared(task, budget) if prepare is None else prepare(task, manifest, info, rehearse_torch)
    return prepared, TorchEngine(prepared.task, manifest)


def open_onnx(
    task: Task,
    manifest: Manifest,
    info: FederationInfo,
    graphs: Graphs,
    prepare: Prepare | None,
    budget: float,
    *,
    needs: tuple[Needs, Needs],
    free: int,
    trial: bool,
) -> tuple[Prepared, Engine]:
    """Return the prepared task and ONNX Runtime's engine for a federation's step.

    free: bytes that training may add. trial: first run the step once in a separate process. Raises as ``share_onnx``;
    TooCostly.
    """
    from ..engines.onnx import Sessions
    from ..engines.rehearsal import OnnxRehearsal

    task = suited(replace(task, compute=Compute(threads=task.compute.threads)), types_of(graphs))
    _check_costs(task, manifest, graphs, needs, free=free, trial=trial)
    prepared = Prepared(task, budget)
    sessions = cache(lambda threads: Sessions(graphs, threads=threads))
    if prepare is not None:
        prepared = prepare(task, manifest, info, partial(OnnxRehearsal, sessions=sessions))
    engine = _engine_of(task, manifest, info, sessions(prepared.task.compute.threads or 1))
    # Free the sessions of other thread counts.
    sessions.cache_clear()
    return prepared, engine


def _check_costs(
    task: Task, manifest: Manifest, graphs: Graphs, needs: tuple[Needs, Needs], *, free: int, trial: bool
) -> None:
    from ..engines.affordable import check_affordable, try_step

    with random_state_kept(task.train, task.held_out):
        batch, held_out = (next(map(as_arrays, loader), None) for loader in (task.train, task.held_out))
    if batch is None or held_out is None:
        # Training reports the missing samples.
        return
    inputs, targets = batch
    check_affordable(needs, manifest, len(inputs), len(held_out[0]), free)
    if trial:
        chance = np.random.Generator(np.random.PCG64(0))
        tensors = {spec.name: _some_values(spec, chance) for spec in manifest.kept}
        try_step(graphs, needs[0], tensors, inputs, targets)


def _some_values(spec: TensorSpec, chance: np.random.Generator) -> Array:
    if isinstance(spec.init, Constant):
        return np.full(spec.shape, spec.init.value, np.dtype(spec.dtype))
    return (0.05 * chance.standard_normal(spec.shape)).astype(np.dtype(spec.dtype))


def share_onnx(task: Task, manifest: Manifest, info: FederationInfo, sessions: Sessions) -> Engine:
    """Return ONNX Runtime's engine for a federation's training step; engines may share ``sessions``.

    Raises BadArgument if the data do not fit the model, ManifestError if a device's own part has no initial values.
    """
    suited(take_in(task, manifest), types_of(sessions.graphs))
    return _engine_of(task, manifest, info, sessions)


def _engine_of(task: Task, manifest: Manifest, info: FederationInfo, sessions: Sessions) -> Engine:
    from ..engines.engine import OnnxEngine
    from ..engines.onnx import Network

    network = Network(manifest, sessions)
    network.load(own_initial_values(manifest, info.settings.seed, sessions.graphs.first))
    return OnnxEngine(network, classification=task.classification, metrics=task.measured)


def fetch_graphs(
    manifest: Manifest,
    fetch: Callable[[GraphName], bytes],
    frozen: Tensors | None = None,
    first: Tensors | None = None,
) -> tuple[Graphs, tuple[Needs, Needs]] | None:
    """Return the checked graphs of training step and evaluation, with their memory and work; None if unpublished.

    Raises GraphError if a graph differs from the manifest or is not allowed.
    """
    if "step" not in manifest.graphs:
        return None
    # Imported here, because PyTorch's engine needs no onnx.
    from sparrow.graphs.checking import check_graphs

    graphs = Graphs(fetch("step"), fetch("evaluation"), frozen or {}, first or {})
    check_digest(manifest, "step", graphs.step)
    check_digest(manifest, "evaluation", graphs.evaluation)
    return graphs, check_graphs(graphs, manifest)


def check_digest(manifest: Manifest, name: GraphName, graph: bytes) -> None:
    """Raise GraphError unless a graph has the digest in the manifest."""
    digest = hashlib.sha256(graph).hexdigest()
    wanted = manifest.graphs.get(name)
    if digest != wanted:
        raise GraphError(f"the downloaded {name} has the SHA-256 {digest}, the manifest names {wanted}; try again")


def as_taken(task: Task, manifest: Manifest) -> Task:
    """Return the task with samples reshaped for the model, if only axes of length 1 differ."""

    def fitted(batches: Any) -> Any:
        if not isinstance(batches, ArrayBatches):
            return batches
        shape = batches.arrays.take(slice(0, 1))[0].shape[1:]
        if shape == manifest.input_shape or long_axes(shape) != long_axes(manifest.input_shape):
            return batches
        return replace(batches, arrays=Reshaped(batches.arrays, manifest.input_shape))

    parts = {name: fitted(getattr(task, name)) for name in ("train", "validation", "test", "public")}
    return replace(task, **parts)


def types_of(graphs: Graphs) -> Taken:
    """Return the input and target types of a federation's training step."""
    import onnx

    described = {each.name: each.type.tensor_type for each in onnx.load_model_from_string(graphs.step).graph.input}
    named = {name: described.get(name) for name in ("input", "target")}
    types = {
        name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(each.elem_type)) for name, each in named.items() if each
    }
    target = named["target"]
    shape = tuple(axis.dim_value for axis in target.shape.dim[1:]) if target else None
    return Taken(types.get("input", np.dtype(np.float32)), types.get("target"), shape)


def take_values(model: nn.Module, manifest: Manifest, values: Tensors) -> None:
    """Load the federation's values into a model, and make the manifest's trainable tensors trainable."""
    from ..training.local import set_tensors

    set_tensors(model, values)
    trainable = {spec.name for spec in manifest.tensors if spec.trainable}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(manifest.aliases.get(name, name) in trainable)


def check_model(model: nn.Module, manifest: Manifest) -> None:
    """Raise ManifestError unless the task's model matches the federation's."""
    state = model.state_dict(keep_vars=True)
    untied = [alias for alias, name in manifest.aliases.items() if state.get(alias) is not state.get(name)]
    if untied:
        name = manifest.aliases[untied[0]]
        raise ManifestError(f"{untied[0]}: must be the same tensor as {name} (tied weights), as in the published model")
    left_out = {spec.name for spec in manifest.tensors if spec.policy == "dropped"}.union(manifest.aliases)
    arrays = {name: np.asarray(tensor.detach().cpu().numpy()) for name, tensor in state.items() if name not in left_out}
    manifest.check_tensors(arrays, what="the tensors of this device's model", which="whole")
