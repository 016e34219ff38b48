"""A model as data: its tensors, its neurons, how its weights begin, and the shape of its forward pass.

The coordinator has no torch, yet draws initial weights, plans which neurons a device trains and packs their values, all
by the manifest. Every axis of every tensor says which neurons its rows or columns belong to: it is a sequence of
``Segment(group, repeat)``, the neurons of a group in order, each owning ``repeat`` consecutive entries. A
``NeuronGroup`` are the output channels or features of a hidden layer, or of several whose outputs are added. Repeat is
1, except behind a flatten, where channel c of an H x W map owns the columns c*H*W .. (c+1)*H*W-1; several segments
stand for a concatenation. An axis without segments is always complete. A value is active if all its axes are (FedSPU,
arXiv:2403.11464).

For conv(1->3), flatten of 2x2 maps, linear(12->5), linear(5->2):

    conv.weight [3,1,3,3]   axes: [conv], [], [], []
    fc.weight   [5,12]      axes: [fc], [conv x 4]
    out.weight  [2,5]       axes: [], [fc]
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .blocks import BlockTable, BudgetPer, Groups
from .errors import ManifestError
from .fields import Digest, Name, Record, Size
from .preparation import Preparation, Targets

Array = NDArray[np.generic]
Tensors = dict[str, Array]

MAX_MODEL_BYTES = 2**32
"""Bytes that a manifest's tensors may have in all: a few lines can describe any number, and an ONNX file holds half."""

MAX_SAMPLE_BYTES = 2**28
"""Bytes that the input, the output and the raw form of one sample may have: batches of them are made."""

MAX_NEURONS = 2**20
"""Most neurons of all groups together: masks name them one by one."""

MAX_MANIFEST = 16 * 1024 * 1024
"""Largest manifest accepted, as JSON, in bytes."""

MAX_GRAPH = 16 * 1024 * 1024
"""Largest ONNX graph accepted, in bytes: without weights, one of thousands of nodes is well below 1 MiB."""

MOST_NODES = 10_000
"""Most nodes of a training step or an evaluation that devices accept."""

GraphName = Literal["skeleton", "step", "evaluation", "preparation"]

Values = Literal["frozen", "first"]
"""Files of values: of what nobody trains, and the first ones of what stays on devices."""

FileName = GraphName | Values
"""What lies beside a manifest, which names it by digest."""

MOST_METRICS = 8
"""Of a task; more would make records long."""

MetricName = Annotated[str, Field(min_length=1, max_length=64)]


class NeuronGroup(Record):
    """An index set of ``size`` neurons of one hidden layer, or of several whose outputs are added."""

    name: Name
    size: Size


class Segment(Record):
    """The neurons of ``group`` in order, each owning ``repeat`` consecutive entries of an axis."""

    group: Name
    repeat: Size = 1


class Constant(Record):
    """Every value begins as ``value``."""

    kind: Literal["constant"] = "constant"
    value: float


class Uniform(Record):
    """Values begin uniform in [-bound, bound), drawn by ``initial_values``."""

    kind: Literal["uniform"] = "uniform"
    bound: float = Field(ge=0, allow_inf_nan=False)


class Data(Record):
    """Values begin as published beside the manifest."""

    kind: Literal["data"] = "data"


Recipe = Annotated[Constant | Uniform | Data, Field(discriminator="kind")]


class TensorSpec(Record):
    """One entry of the model's state dict.

    policy: ``shared`` values cross the wire and are averaged. ``personal`` ones stay on the device: local running
    statistics, and integer and 0-dimensional buffers. ``dropped`` ones are read by no forward pass, and are not kept.
    ``frozen`` ones are trained by nobody, and downloaded once (``protocol.values``). trainable: False for buffers.
    """

    name: Name
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=8)
    dtype: Literal["float32", "int64", "int32", "uint8", "bool"] = "float32"
    policy: Literal["shared", "personal", "dropped", "frozen"] = "shared"
    trainable: bool = True
    axes: tuple[tuple[Segment, ...], ...] = ()
    init: Recipe = Data()

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its values."""
        return self.size * np.dtype(self.dtype).itemsize

    @model_validator(mode="after")
    def _check(self) -> TensorSpec:
        if self.axes and len(self.axes) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.axes)} axes described, its shape has {len(self.shape)}")
        if any(self.axes[2:]):
            raise ValueError(f"{self.name}: only its first two axes can belong to neurons; leave the others without")
        if self.policy == "shared" and self.dtype != "float32":
            raise ValueError(
                f"{self.name}: dtype {self.dtype} cannot be averaged; give it the policy personal, frozen or dropped"
            )
        if self.policy == "frozen" and (self.trainable or any(self.axes)):
            raise ValueError(f"{self.name}: what is frozen is not trainable, and always complete; publish it again")
        return self


MULTIPLYING = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Kinds of layers that multiply every input with a weight."""

COUNTED = MULTIPLYING | {
    *("rnn", "gru", "lstm", "rnncell", "grucell", "lstmcell", "multiheadattention"),
    *("convtranspose1d", "convtranspose2d", "convtranspose3d"),
}
"""Kinds of layers that multiply each of their matrices once for every position: those whose FLOPs are known."""

InputError = Literal["none", "active", "all"]


class Layer(Record):
    """A layer with weights.

    positions: output positions per sample; one sample costs 2 * positions * active weights FLOPs forward. input_error:
    the part of the input's gradient that is of use if only weights between active neurons are trained. ``none``: the
    input is data. ``active``: entries of active neurons, the columns of the weight; below lie only layers whose input
    is data, and nothing mixes neurons. ``all`` is always right.
    """

    name: Name
    kind: Name
    tensors: tuple[Name, ...]
    positions: Size = 1
    input_error: InputError = "all"


class Manifest(Record):
    """A model as its tensors (state-dict order), hidden neuron groups (forward order), layers and input.

    Shapes leave the batch out. ``*_sha256`` name the files published beside it: graphs (step and evaluation both or
    neither), values of frozen tensors, and first values of what stays on devices (``protocol.values``).
    frozen_precision: in which frozen tensors with at least two axes are stored. blocks: name -> sizes of runs of values
    (``protocol.blocks``). coupling: False if nobody looked for neurons; then there are no groups. metrics: what the
    task measures. outputs: what devices exchange that is no tensor of the model, such as answers on a public set.
    aliases: other names of tensors in the state dict (tied weights). preparation: describes the graph from raw samples
    to inputs. targets: the meaning of outputs.
    """

    version: Literal[1] = 1
    task: Name
    input_shape: tuple[Size, ...]
    output_shape: tuple[Size, ...]
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=100_000)
    groups: tuple[NeuronGroup, ...] = ()
    layers: tuple[Layer, ...] = ()
    blocks: dict[Name, tuple[Size, ...]] = Field(default={})
    coupling: bool = True
    outputs: tuple[TensorSpec, ...] | None = None
    aliases: dict[Name, Name] = Field(default={})
    skeleton_sha256: Digest | None = None
    step_sha256: Digest | None = None
    evaluation_sha256: Digest | None = None
    frozen_sha256: Digest | None = None
    first_sha256: Digest | None = None
    metrics: tuple[MetricName, ...] = Field(default=(), max_length=MOST_METRICS)
    frozen_precision: Literal["float32", "float16"] = "float32"
    preparation_sha256: Digest | None = None
    preparation: Preparation | None = None
    targets: Targets | None = None

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        self._check_targets()
        self._check_bytes()
        _no_repeats("tensor", [tensor.name for tensor in (*self.tensors, *(self.outputs or ()))])
        self._check_outputs()
        self._check_neurons()
        self._check_names()
        self._check_graphs()
        self._check_blocks()
        return self

    def _check_outputs(self) -> None:
        for output in self.outputs or ():
            if output.policy != "shared" or any(output.axes):
                raise ValueError(
                    f"{output.name}: an output is shared, and belongs to no neurons; leave policy and axes"
                )

    def _check_neurons(self) -> None:
        """Raise ValueError unless axes are those of known neurons, and there are not too many of these."""
        _no_repeats("neuron group", [group.name for group in self.groups])
        sizes = {group.name: group.size for group in self.groups}
        for tensor in self.tensors:
            for axis, (segments, length) in enumerate(zip(tensor.axes, tensor.shape, strict=False)):
                unknown = [segment.group for segment in segments if segment.group not in sizes]
                if unknown:
                    raise ValueError(f"{tensor.name}: axis {axis} names the unknown neuron group {unknown[0]!r}")
                described = sum(sizes[segment.group] * segment.repeat for segment in segments)
                if segments and described != length:
                    raise ValueError(f"{tensor.name}: axis {axis} has length {length}, its segments add to {described}")
        neurons = sum(sizes.values())
        if neurons > sum(sum(tensor.shape) for tensor in self.tensors):
            raise ValueError(f"{neurons} neurons in all are more than rows and columns; publish it again")
        if neurons > MAX_NEURONS:
            raise ValueError(
                f"{neurons:,} neurons in all, at most {MAX_NEURONS:,} are accepted; publish a smaller model"
            )
        if self.groups and not self.coupling:
            raise ValueError("the manifest names neuron groups, but says that they are unknown; publish it again")

    def _check_names(self) -> None:
        """Raise ValueError unless layers and aliases name tensors that there are."""
        names = {tensor.name for tensor in self.tensors}
        for layer in self.layers:
            for name in layer.tensors:
                if name not in names:
                    raise ValueError(f"layer {layer.name}: the manifest has no tensor {name!r}")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise ValueError(f"aliases: {alias!r} is to be another name of {name!r}; the manifest has no such pair")

    def _check_graphs(self) -> None:
        if (self.step_sha256 is None) != (self.evaluation_sha256 is None):
            raise ValueError("step_sha256 and evaluation_sha256: name both graphs, or neither")
        if self.frozen_sha256 is not None and not self.frozen:
            raise ValueError("frozen_sha256: no tensor is frozen; leave it out")

    def _check_blocks(self) -> None:
        trainable = {tensor.name: tensor.size for tensor in self.shared if tensor.trainable}
        for name, blocks in self.blocks.items():
            if trainable.get(name) != sum(blocks):
                raise ValueError(
                    f"blocks: {name!r} has blocks of {sum(blocks)} values; cut shared, trainable tensors, and whole"
                )

    def _check_bytes(self) -> None:
        """Raise ValueError for a description of more bytes than either side is to hold."""
        total = sum(spec.bytes for spec in (*self.tensors, *(self.outputs or ())))
        if total > MAX_MODEL_BYTES:
            raise ValueError(
                f"tensors: {total:,} bytes in all, at most {MAX_MODEL_BYTES:,} are accepted; publish a smaller model, "
                f"or have its method exchange less"
            )
        samples = {"input_shape": (self.input_shape, 8), "output_shape": (self.output_shape, 8)}
        if self.preparation is not None:
            samples["preparation.shape"] = self.preparation.shape, np.dtype(self.preparation.dtype).itemsize
        for what, (shape, width) in samples.items():
            if math.prod(shape) * width > MAX_SAMPLE_BYTES:
                raise ValueError(
                    f"{what}: {math.prod(shape):,} values for one sample have more than {MAX_SAMPLE_BYTES:,} bytes; "
                    f"publish a model of smaller samples"
                )

    def _check_targets(self) -> None:
        if (self.preparation_sha256 is None) != (self.preparation is None):
            raise ValueError("preparation: describe the graph and name it by digest, or leave both out")
        if self.targets is None:
            return
        count = len(self.targets.names) + self.targets.spare
        if self.targets.names and self.output_shape[:1] != (count,):
            raise ValueError(f"targets: {count} names and spare outputs, but the model gives {self.output_shape}")

    @cached_property
    def shared(self) -> tuple[TensorSpec, ...]:
        """The tensors that cross the wire, in state-dict order, and after them the outputs."""
        return tuple(tensor for tensor in (*self.tensors, *(self.outputs or ())) if tensor.policy == "shared")

    @cached_property
    def output_bias(self) -> TensorSpec | None:
        """The last layer's bias, one value for each output of a sample, if it is trained and shared."""
        names = self.layers[-1].tensors if self.layers else ()
        fitting = (spec for spec in self.shared if spec.name in names and spec.shape == self.output_shape)
        return next((spec for spec in fitting if spec.trainable), None)

    @cached_property
    def graphs(self) -> dict[GraphName, str]:
        """The graphs that are published beside it -> their SHA-256."""
        named: dict[GraphName, str | None] = {
            "skeleton": self.skeleton_sha256,
            "step": self.step_sha256,
            "evaluation": self.evaluation_sha256,
            "preparation": self.preparation_sha256,
        }
        return {name: digest for name, digest in named.items() if digest is not None}

    @cached_property
    def files(self) -> dict[FileName, str]:
        """The files that are published beside it -> their SHA-256."""
        named: dict[FileName, str | None] = {name: self.graphs[name] for name in self.graphs}
        named |= {"frozen": self.frozen_sha256, "first": self.first_sha256}
        return {name: digest for name, digest in named.items() if digest is not None}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For every shared tensor, the place of the first one whose shape and axes are the same."""
        first: dict[object, int] = {}
        return tuple(first.setdefault((spec.shape, spec.axes), place) for place, spec in enumerate(self.shared))

    @cached_property
    def kept(self) -> tuple[TensorSpec, ...]:
        """The tensors that a device's personal model consists of: what is shared, and what stays on the device."""
        return tuple(tensor for tensor in self.tensors if tensor.policy in ("shared", "personal"))

    @cached_property
    def frozen(self) -> tuple[TensorSpec, ...]:
        """The tensors that nobody trains, in state-dict order."""
        return tuple(tensor for tensor in self.tensors if tensor.policy == "frozen")

    @cached_property
    def first(self) -> tuple[TensorSpec, ...]:
        """The tensors that stay on devices and begin as they were published, in state-dict order."""
        return tuple(each for each in self.tensors if each.policy == "personal" and isinstance(each.init, Data))

    @cached_property
    def published(self) -> tuple[TensorSpec, ...]:
        """The tensors whose values are published by name: what is shared, and how what stays on devices begins."""
        first = set(self.first)
        return tuple(each for each in self.tensors if each.policy == "shared" or each in first)

    @cached_property
    def whole(self) -> tuple[TensorSpec, ...]:
        """The tensors that the forward pass reads: all but the dropped ones."""
        return tuple(tensor for tensor in self.tensors if tensor.policy != "dropped")

    @cached_property
    def shared_values(self) -> int:
        """The number of values that a full download holds."""
        return sum(tensor.size for tensor in self.shared)

    @cached_property
    def maskable_values(self) -> int:
        """The number of weights that masks of elements can leave out."""
        return sum(tensor.size for tensor in self.maskable)

    @cached_property
    def trainable_values(self) -> int:
        """The number of parameters of the model, without running statistics and other buffers."""
        return sum(tensor.size for tensor in self.tensors if tensor.trainable)

    @cached_property
    def maskable(self) -> tuple[TensorSpec, ...]:
        """The tensors that a sparse method may prune: shared weights of linear layers and convolutions that nothing
        else uses."""
        uses = Counter(name for layer in self.layers for name in layer.tensors)
        weights = {name for layer in self.layers if layer.kind in MULTIPLYING for name in layer.tensors}
        return tuple(
            spec
            for spec in self.shared
            if spec.name in weights and uses[spec.name] == 1 and spec.trainable and len(spec.shape) > 1
        )

    def block_groups(self, per: BudgetPer) -> Groups:
        """Return the blocks that share a budget: all, those of linear layers and those of others, or each layer's."""
        table, groups = self.block_table, dict[str, list[int]]()
        layers = {name: layer for layer in reversed(self.layers) for name in layer.tensors}
        for name, place in table.places.items():
            layer = layers.get(name)
            group = ""
            if per == "kind":
                group = "linear layers" if layer is not None and layer.kind == "linear" else "other layers"
            elif per == "layer":
                group = name if layer is None else layer.name
            groups.setdefault(group, []).extend(range(place.start, place.stop))
        return {group: np.array(blocks, dtype=np.intp) for group, blocks in groups.items()}

    @cached_property
    def block_table(self) -> BlockTable:
        """The blocks that the model is cut into, in state-dict order."""
        return BlockTable({spec.name: self.blocks[spec.name] for spec in self.shared if spec.name in self.blocks})

    @cached_property
    def uncut(self) -> frozenset[str]:
        """The names of shared parameters without blocks, which travel with every mask of blocks."""
        return frozenset(spec.name for spec in self.shared if spec.trainable and spec.name not in self.blocks)

    @cached_property
    def group_sizes(self) -> dict[str, int]:
        """Neuron group name -> number of neurons, in forward order."""
        return {group.name: group.size for group in self.groups}

    @property
    def text(self) -> str:
        """The manifest's JSON, as it is sent and kept."""
        return self.model_dump_json(exclude_none=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's JSON: two parties with the same digest have the same description of a model."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def values_digest(self) -> str:
        """SHA-256 of the names, shapes and neurons of a model's values, of its inputs and outputs, and of its
        preparation, but not of its graphs and layers. Bundles and a device's state name it."""
        return self._digest_without("layers", "preparation", "targets")

    @cached_property
    def tensors_digest(self) -> str:
        """SHA-256 of the names, shapes and neurons of a model's values, whatever prepares its inputs."""
        return self._digest_without("layers", "preparation", "preparation_sha256", "targets")

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 of the model itself, without first weights and graphs, but with the values of frozen tensors."""
        return self._digest_without("task", "preparation", "preparation_sha256", "targets")

    def _digest_without(self, *fields: str) -> str:
        """Return the SHA-256 of all but these fields, the graphs that train and the first weights."""
        left_out = dict.fromkeys(
            (*fields, "skeleton_sha256", "step_sha256", "evaluation_sha256", "first_sha256", "metrics"), True
        )
        # A field without content counts as one that the manifest does not have.
        left_out |= dict.fromkeys(
            (name for name in ("outputs", "preparation_sha256") if getattr(self, name) is None), True
        )
        model = self.model_dump(mode="json", exclude={**left_out, "tensors": {"__all__": {"init"}}})
        return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()

    def with_graphs(self, graphs: Mapping[GraphName, bytes]) -> Manifest:
        """Return the same manifest, naming these ONNX graphs. (``model_copy`` would take the old digest along.)"""
        digests = {f"{name}_sha256": hashlib.sha256(graph).hexdigest() for name, graph in graphs.items()}
        return self._with(**digests)

    def _with(self, **fields: object) -> Manifest:
        return Manifest.model_validate({**self.model_dump(), **fields})

    def with_values(self, which: Values, file: bytes) -> Manifest:
        """Return the same manifest, naming this file of values."""
        return self._with(**{f"{which}_sha256": hashlib.sha256(file).hexdigest()})

    def with_private(self, names: Collection[str]) -> Manifest:
        """Return the same manifest, the tensors so named being personal."""
        tensors = [
            {**spec.model_dump(), "policy": "personal"} if spec.name in names else spec.model_dump()
            for spec in self.tensors
        ]
        return self._with(tensors=tensors) if names else self

    def with_outputs(self, outputs: Sequence[TensorSpec]) -> Manifest:
        """Return the same manifest, its devices exchanging these, too."""
        return self._with(outputs=[each.model_dump() for each in outputs])

    def with_blocks(self, blocks: Mapping[str, Sequence[int]]) -> Manifest:
        """Return the same manifest, its tensors cut like this. Raises ValueError where that is not all of a tensor."""
        return self._with(blocks=blocks)

    def check_tensors(
        self, tensors: Tensors, *, what: str, which: Literal["published", "kept", "whole"] = "kept"
    ) -> None:
        """Raise ManifestError, naming the tensor, unless ``tensors`` has exactly this model's names, shapes and types.
        what: how the message calls them."""
        wanted: tuple[TensorSpec, ...] = getattr(self, which)
        missing = [spec.name for spec in wanted if spec.name not in tensors]
        if missing:
            raise ManifestError(f"{what} lack {missing[0]!r}; they must hold every tensor of the manifest")
        extra = sorted(set(tensors) - {spec.name for spec in wanted})
        if extra:
            raise ManifestError(f"{what} hold {extra[0]!r}, which the manifest does not know; remove it")
        for spec in wanted:
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape or tensor.dtype != np.dtype(spec.dtype):
                raise ManifestError(
                    f"{spec.name}: {what} have shape {tensor.shape} of {tensor.dtype}, "
                    f"the manifest says {spec.shape} of {spec.dtype}; publish and train the same model"
                )


def _no_repeats(what: str, names: list[str]) -> None:
    repeated = min((name for name, count in Counter(names).items() if count > 1), default=None)
    if repeated is not None:
        raise ValueError(f"the {what} {repeated!r} stands twice")


def initial_values(manifest: Manifest, seed: int, published: Tensors | None = None) -> Tensors:
    """Return the model's first shared weights, w^0, by name: drawn from the recipes, or taken from ``published``.

    Draws use PCG64's raw 64-bit stream, which numpy promises never to change, one stream per tensor: value = bound *
    (2u - 1) with u the top 24 bits of each output. Raises ManifestError for values that are missing or not finite.
    """
    return {spec.name: _initial(spec, seed, published or {}) for spec in manifest.shared}


def own_initial_values(manifest: Manifest, seed: int, published: Tensors) -> Tensors:
    """Return the first values of every kept tensor that no payload holds. published: those of ``Manifest.first``."""
    return {spec.name: _initial(spec, seed, published) for spec in manifest.kept if spec.policy == "personal"}


def _initial(spec: TensorSpec, seed: int, published: Tensors) -> Array:
    with np.errstate(over="ignore"):  # what does not fit float32 becomes infinite, and is refused below
        if isinstance(spec.init, Constant):
            values: Array = np.full(spec.shape, spec.init.value, dtype=np.float32)
        elif isinstance(spec.init, Uniform):
            values = draw_uniform(spec, spec.init.bound, seed)
        elif spec.name in published:
            values = np.array(published[spec.name], dtype=np.dtype(spec.dtype)).reshape(spec.shape)
        else:
            raise ManifestError(f"{spec.name}: its initial values must be published with the manifest")
    if not np.isfinite(values).all():
        raise ManifestError(f"{spec.name}: an initial value is not finite in float32; publish a sound model")
    return values


def draw_uniform(spec: TensorSpec, bound: float, seed: int) -> Array:
    """Return float32 of the tensor's shape, uniform in [-bound, bound), drawn by its name as in ``initial_values``."""
    key = hashlib.sha256(f"init|{seed}|{spec.name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(key[:16], "big")).random_raw(spec.size)
    unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return (bound * (2.0 * unit - 1.0)).astype(np.float32).reshape(spec.shape)
