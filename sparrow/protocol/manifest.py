"""A model as data: its tensors, neurons, initial weights, and the shape of its forward pass.

Every axis of every tensor is a sequence of ``Segment(group, repeat)``, the neurons of a group in order, each owning
``repeat`` consecutive entries. A ``NeuronGroup`` is the set of output channels or features of a hidden layer, or of
several layers whose outputs are added. Repeat is 1, except behind a flatten, where channel c of an H x W map owns the
columns c*H*W .. (c+1)*H*W-1; several segments stand for a concatenation. An axis without segments is always complete. A
value is active if all its axes are (FedSPU, arXiv:2403.11464).

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
"""Largest total bytes of a manifest's tensors, because a few lines could describe any number."""

MAX_SAMPLE_BYTES = 2**28
"""Largest bytes of the input, output or raw form of one sample, since batches of them are allocated."""

MAX_NEURONS = 2**20
"""Largest number of neurons in all groups, since masks may list each neuron."""

MAX_MANIFEST = 16 * 1024 * 1024
"""Largest accepted manifest as JSON, in bytes."""

MAX_GRAPH = 16 * 1024 * 1024
"""Largest accepted ONNX graph in bytes; without weights, thousands of nodes take far less than 1 MiB."""

MOST_NODES = 10_000
"""Largest number of nodes in a training step or evaluation."""

GraphName = Literal["skeleton", "step", "evaluation", "preparation"]

Values = Literal["frozen", "first"]
"""Files of values of frozen tensors, and of first values of tensors that stay on devices."""

FileName = GraphName | Values
"""Files beside a manifest, which has their digests."""

MOST_METRICS = 8
"""Largest number of metrics per task, to keep records short."""

MetricName = Annotated[str, Field(min_length=1, max_length=64)]


class NeuronGroup(Record):
    """The ``size`` neurons of a hidden layer, or of several layers whose outputs are added."""

    name: Name
    size: Size


class Segment(Record):
    """The neurons of ``group`` in order, each owning ``repeat`` consecutive entries of an axis."""

    group: Name
    repeat: Size = 1


class Constant(Record):
    """All initial values equal ``value``."""

    kind: Literal["constant"] = "constant"
    value: float


class Uniform(Record):
    """Initial values are uniform in [-bound, bound), drawn by ``initial_values``."""

    kind: Literal["uniform"] = "uniform"
    bound: float = Field(ge=0, allow_inf_nan=False)


class Data(Record):
    """Initial values are published with the manifest."""

    kind: Literal["data"] = "data"


Recipe = Annotated[Constant | Uniform | Data, Field(discriminator="kind")]


class TensorSpec(Record):
    """One entry of the model's state dict."""

    name: Name
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=8)
    dtype: Literal["float32", "int64", "int32", "uint8", "bool"] = "float32"
    # ``shared`` values are sent and averaged. ``personal`` ones stay on the device: local running statistics, and
    # integer and 0-dimensional buffers. ``dropped`` ones are in no forward pass, and not kept. ``frozen`` ones are
    # never trained, and downloaded once (``protocol.values``).
    policy: Literal["shared", "personal", "dropped", "frozen"] = "shared"
    # False for buffers.
    trainable: bool = True
    axes: tuple[tuple[Segment, ...], ...] = ()
    init: Recipe = Data()

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Total bytes of its values."""
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
            raise ValueError(f"{self.name}: a frozen tensor is not trainable, and always complete; publish it again")
        return self


MULTIPLYING = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Layer kinds that multiply every input with a weight."""

COUNTED = MULTIPLYING | {
    *("rnn", "gru", "lstm", "rnncell", "grucell", "lstmcell", "multiheadattention"),
    *("convtranspose1d", "convtranspose2d", "convtranspose3d"),
}
"""Layer kinds with known FLOPs: each matrix is multiplied once per position."""

InputError = Literal["none", "active", "all"]
"""The part of the gradient of a layer's input that a training step needs: none, that of active values, or all."""


class Layer(Record):
    """A layer with weights."""

    name: Name
    kind: Name
    tensors: tuple[Name, ...]
    # Output positions per sample; a sample costs 2 * positions * active weights FLOPs forward.
    positions: Size = 1
    # The useful part of the input's gradient if only weights between active neurons are trained. ``none``: the input
    # is data. ``active``: entries of active neurons, the columns of the weight; all layers below have data as input,
    # and nothing mixes neurons. ``all`` is always correct.
    input_error: InputError = "all"


class Manifest(Record):
    """A model: tensors (state-dict order), hidden neuron groups (forward order), layers and input.

    Shapes leave the batch out. ``*_sha256`` are digests of its files: graphs (step and evaluation both or neither),
    values of frozen tensors, and first values of tensors that stay on devices (``protocol.values``).
    """

    version: Literal[1] = 1
    task: Name
    input_shape: tuple[Size, ...]
    output_shape: tuple[Size, ...]
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=100_000)
    groups: tuple[NeuronGroup, ...] = ()
    layers: tuple[Layer, ...] = ()
    # Name -> sizes of runs of values (``protocol.blocks``).
    blocks: dict[Name, tuple[Size, ...]] = Field(default={})
    # False if neurons are unknown; then there are no groups.
    coupling: bool = True
    # Exchanged values that are not tensors of the model, such as scores on a public set.
    outputs: tuple[TensorSpec, ...] | None = None
    # Other names of tensors in the state dict (tied weights).
    aliases: dict[Name, Name] = Field(default={})
    skeleton_sha256: Digest | None = None
    step_sha256: Digest | None = None
    evaluation_sha256: Digest | None = None
    frozen_sha256: Digest | None = None
    first_sha256: Digest | None = None
    # Measured by the task.
    metrics: tuple[MetricName, ...] = Field(default=(), max_length=MOST_METRICS)
    # Stored precision of frozen tensors with at least two axes.
    frozen_precision: Literal["float32", "float16"] = "float32"
    preparation_sha256: Digest | None = None
    # Describes the graph from raw samples to inputs.
    preparation: Preparation | None = None
    # The meaning of outputs.
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
                raise ValueError(f"{output.name}: an output is shared and has no neurons; leave policy and axes out")

    def _check_neurons(self) -> None:
        """Raise ValueError unless axes use known neurons, within the limit."""
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
            raise ValueError(f"{neurons} neurons are more than all rows and columns; publish it again")
        if neurons > MAX_NEURONS:
            raise ValueError(f"{neurons:,} neurons in total; the maximum is {MAX_NEURONS:,}; publish a smaller model")
        if self.groups and not self.coupling:
            raise ValueError("the manifest has neuron groups, but coupling is false; publish it again")

    def _check_names(self) -> None:
        """Raise ValueError unless layers and aliases refer to existing tensors."""
        names = {tensor.name for tensor in self.tensors}
        for layer in self.layers:
            for name in layer.tensors:
                if name not in names:
                    raise ValueError(f"layer {layer.name}: the manifest has no tensor {name!r}")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise ValueError(
                    f"aliases: {alias!r} cannot be another name of {name!r}; the manifest has no such pair"
                )

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
                    f"blocks: {name!r} has blocks of {sum(blocks)} values; cut whole, shared, trainable tensors"
                )

    def _check_bytes(self) -> None:
        """Raise ValueError if the model exceeds the size that either side may allocate."""
        total = sum(spec.bytes for spec in (*self.tensors, *(self.outputs or ())))
        if total > MAX_MODEL_BYTES:
            raise ValueError(
                f"tensors: {total:,} bytes in total; the maximum is {MAX_MODEL_BYTES:,}; publish a smaller model, "
                f"or have its method exchange less"
            )
        samples = {"input_shape": (self.input_shape, 8), "output_shape": (self.output_shape, 8)}
        if self.preparation is not None:
            samples["preparation.shape"] = self.preparation.shape, np.dtype(self.preparation.dtype).itemsize
        for what, (shape, width) in samples.items():
            if math.prod(shape) * width > MAX_SAMPLE_BYTES:
                raise ValueError(
                    f"{what}: {math.prod(shape):,} values for one sample have more than {MAX_SAMPLE_BYTES:,} bytes; "
                    f"publish a model with smaller samples"
                )

    def _check_targets(self) -> None:
        if (self.preparation_sha256 is None) != (self.preparation is None):
            raise ValueError("preparation: describe the graph and name it by digest, or leave both out")
        if self.targets is None:
            return
        count = len(self.targets.names) + self.targets.spare
        if self.targets.names and self.output_shape[:1] != (count,):
            raise ValueError(
                f"targets: {count} names and spare outputs, but the model's outputs have the shape {self.output_shape}"
            )

    @cached_property
    def shared(self) -> tuple[TensorSpec, ...]:
        """The transferred tensors, in state-dict order, followed by the outputs."""
        return tuple(tensor for tensor in (*self.tensors, *(self.outputs or ())) if tensor.policy == "shared")

    @cached_property
    def output_bias(self) -> TensorSpec | None:
        """The last layer's bias, one value per output, if it is trained and shared."""
        names = self.layers[-1].tensors if self.layers else ()
        fitting = (spec for spec in self.shared if spec.name in names and spec.shape == self.output_shape)
        return next((spec for spec in fitting if spec.trainable), None)

    @cached_property
    def graphs(self) -> dict[GraphName, str]:
        """SHA-256 digests of the model's graphs: name -> digest."""
        named: dict[GraphName, str | None] = {
            "skeleton": self.skeleton_sha256,
            "step": self.step_sha256,
            "evaluation": self.evaluation_sha256,
            "preparation": self.preparation_sha256,
        }
        return {name: digest for name, digest in named.items() if digest is not None}

    @cached_property
    def files(self) -> dict[FileName, str]:
        """SHA-256 digests of the model's files: name -> digest."""
        named: dict[FileName, str | None] = {name: self.graphs[name] for name in self.graphs}
        named |= {"frozen": self.frozen_sha256, "first": self.first_sha256}
        return {name: digest for name, digest in named.items() if digest is not None}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For every shared tensor, the index of the first tensor with the same shape and axes."""
        first: dict[object, int] = {}
        return tuple(first.setdefault((spec.shape, spec.axes), place) for place, spec in enumerate(self.shared))

    @cached_property
    def kept(self) -> tuple[TensorSpec, ...]:
        """The tensors of a device's personal model: shared and personal tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.policy in ("shared", "personal"))

    @cached_property
    def frozen(self) -> tuple[TensorSpec, ...]:
        """The frozen tensors, in state-dict order."""
        return tuple(tensor for tensor in self.tensors if tensor.policy == "frozen")

    @cached_property
    def first(self) -> tuple[TensorSpec, ...]:
        """The personal tensors with published initial values, in state-dict order."""
        return tuple(each for each in self.tensors if each.policy == "personal" and isinstance(each.init, Data))

    @cached_property
    def published(self) -> tuple[TensorSpec, ...]:
        """The tensors with published values: shared tensors and ``first``."""
        first = set(self.first)
        return tuple(each for each in self.tensors if each.policy == "shared" or each in first)

    @cached_property
    def whole(self) -> tuple[TensorSpec, ...]:
        """The tensors of the forward pass: all except dropped tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.policy != "dropped")

    @cached_property
    def shared_values(self) -> int:
        """Number of values in a full download."""
        return sum(tensor.size for tensor in self.shared)

    @cached_property
    def maskable_values(self) -> int:
        """Number of maskable weights."""
        return sum(tensor.size for tensor in self.maskable)

    @cached_property
    def trainable_values(self) -> int:
        """Number of the model's parameters, without running statistics and other buffers."""
        return sum(tensor.size for tensor in self.tensors if tensor.trainable)

    @cached_property
    def maskable(self) -> tuple[TensorSpec, ...]:
        """The tensors that a sparse method may prune: shared weights of linear layers and convolutions that no other
        layer uses.
        """
        uses = Counter(name for layer in self.layers for name in layer.tensors)
        weights = {name for layer in self.layers if layer.kind in MULTIPLYING for name in layer.tensors}
        return tuple(
            spec
            for spec in self.shared
            if spec.name in weights and uses[spec.name] == 1 and spec.trainable and len(spec.shape) > 1
        )

    def block_groups(self, per: BudgetPer) -> Groups:
        """Return the blocks of each budget, one for the model, for linear and other layers, or for each layer."""
        table = self.block_table
        groups = dict[str, list[int]]()
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
        """The table of the model's blocks, in state-dict order."""
        return BlockTable({spec.name: self.blocks[spec.name] for spec in self.shared if spec.name in self.blocks})

    @cached_property
    def uncut(self) -> frozenset[str]:
        """Names of shared parameters without blocks, which are sent with every mask of blocks."""
        return frozenset(spec.name for spec in self.shared if spec.trainable and spec.name not in self.blocks)

    @cached_property
    def group_sizes(self) -> dict[str, int]:
        """Neuron group name -> number of neurons, in forward order."""
        return {group.name: group.size for group in self.groups}

    @property
    def text(self) -> str:
        """The manifest as JSON, as sent and stored."""
        return self.model_dump_json(exclude_none=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's JSON."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def values_digest(self) -> str:
        """SHA-256 of values' names, shapes and neurons, of inputs, outputs and preparation, but not of graphs and
        layers. Bundles and a device's state contain it."""
        return self._digest_without("layers", "preparation", "targets")

    @cached_property
    def tensors_digest(self) -> str:
        """SHA-256 of values' names, shapes and neurons, for any preparation of inputs."""
        return self._digest_without("layers", "preparation", "preparation_sha256", "targets")

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 of the model, including frozen values, but not first weights and graphs."""
        return self._digest_without("task", "preparation", "preparation_sha256", "targets")

    def _digest_without(self, *fields: str) -> str:
        """Return the SHA-256 of the manifest without these fields, training graphs and initial weights."""
        left_out = dict.fromkeys(
            (*fields, "skeleton_sha256", "step_sha256", "evaluation_sha256", "first_sha256", "metrics"), True
        )
        # An empty field counts as missing.
        left_out |= dict.fromkeys(
            (name for name in ("outputs", "preparation_sha256") if getattr(self, name) is None), True
        )
        model = self.model_dump(mode="json", exclude={**left_out, "tensors": {"__all__": {"init"}}})
        return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()

    def with_graphs(self, graphs: Mapping[GraphName, bytes]) -> Manifest:
        """Return a copy with the digests of these ONNX graphs."""
        # model_copy would copy the cached digest.
        digests = {f"{name}_sha256": hashlib.sha256(graph).hexdigest() for name, graph in graphs.items()}
        return self._with(**digests)

    def _with(self, **fields: object) -> Manifest:
        return Manifest.model_validate({**self.model_dump(), **fields})

    def with_values(self, which: Values, file: bytes) -> Manifest:
        """Return a copy with the digest of this file of values."""
        return self._with(**{f"{which}_sha256": hashlib.sha256(file).hexdigest()})

    def with_private(self, names: Collection[str]) -> Manifest:
        """Return a copy with these tensors personal."""
        tensors = [
            {**spec.model_dump(), "policy": "personal"} if spec.name in names else spec.model_dump()
            for spec in self.tensors
        ]
        return self._with(tensors=tensors) if names else self

    def with_outputs(self, outputs: Sequence[TensorSpec]) -> Manifest:
        """Return a copy with these outputs."""
        return self._with(outputs=[each.model_dump() for each in outputs])

    def with_blocks(self, blocks: Mapping[str, Sequence[int]]) -> Manifest:
        """Return a copy with these blocks. Raises ValueError unless they cover whole tensors."""
        return self._with(blocks=blocks)

    def check_tensors(
        self, tensors: Tensors, *, what: str, which: Literal["published", "kept", "whole"] = "kept"
    ) -> None:
        """Raise ManifestError unless ``tensors`` has exactly this model's names, shapes and types."""
        wanted: tuple[TensorSpec, ...] = getattr(self, which)
        missing = [spec.name for spec in wanted if spec.name not in tensors]
        if missing:
            raise ManifestError(f"{what} lack {missing[0]!r}; give every tensor of the manifest")
        extra = sorted(set(tensors) - {spec.name for spec in wanted})
        if extra:
            raise ManifestError(f"{what} have {extra[0]!r}, which is not in the manifest; remove it")
        for spec in wanted:
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape or tensor.dtype != np.dtype(spec.dtype):
                raise ManifestError(
                    f"{spec.name}: {what} have shape {tensor.shape} of {tensor.dtype}, "
                    f"the manifest has {spec.shape} of {spec.dtype}; publish and train the same model"
                )


def _no_repeats(what: str, names: list[str]) -> None:
    repeated = min((name for name, count in Counter(names).items() if count > 1), default=None)
    if repeated is not None:
        raise ValueError(f"the {what} {repeated!r} occurs twice")


def initial_values(manifest: Manifest, seed: int, published: Tensors | None = None) -> Tensors:
    """Return the model's first shared weights w^0, name -> array, drawn from recipes or taken from ``published``.

    Each tensor has its own PCG64 raw 64-bit stream, which numpy guarantees: value = bound * (2u - 1) with u the top 24
    bits of each output. Raises ManifestError for values that are missing or not finite.
    """
    return {spec.name: _initial(spec, seed, published or {}) for spec in manifest.shared}


def own_initial_values(manifest: Manifest, seed: int, published: Tensors) -> Tensors:
    """Return the initial values of all personal tensors. published: values of ``Manifest.first``."""
    return {spec.name: _initial(spec, seed, published) for spec in manifest.kept if spec.policy == "personal"}


def _initial(spec: TensorSpec, seed: int, published: Tensors) -> Array:
    # Values beyond float32 become infinite, and are refused below.
    with np.errstate(over="ignore"):
        if isinstance(spec.init, Constant):
            values: Array = np.full(spec.shape, spec.init.value, dtype=np.float32)
        elif isinstance(spec.init, Uniform):
            values = draw_uniform(spec, spec.init.bound, seed)
        elif spec.name in published:
            values = np.array(published[spec.name], dtype=np.dtype(spec.dtype)).reshape(spec.shape)
        else:
            raise ManifestError(f"{spec.name}: its initial values must be published with the manifest")
    if not np.isfinite(values).all():
        raise ManifestError(
            f"{spec.name}: an initial value is not finite in float32; publish a model with finite values"
        )
    return values


def draw_uniform(spec: TensorSpec, bound: float, seed: int) -> Array:
    """Return float32 of the tensor's shape, uniform in [-bound, bound), drawn as in ``initial_values``."""
    key = hashlib.sha256(f"init|{seed}|{spec.name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(key[:16], "big")).random_raw(spec.size)
    unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return (bound * (2.0 * unit - 1.0)).astype(np.float32).reshape(spec.shape)
