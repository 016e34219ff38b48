"""The personal and the global model of DM-PFL+ in one ONNX graph (KDD 2023, Algorithm 4).

For each sample x, with the softmax entropy H and the cosine similarity of the scores Sim:

    z_c, z_g = θ_c(x), θ_g(x)
    y = z_c if H(z_c) - (1 - Sim)·BE_c < H(z_g) - (1 - Sim)·BE_g else z_g

Shared values are stored once. A weight with masks m_c and m_g (one bit per position) is stored as the packed values at
the positions of either mask; ONNX Runtime folds the unpacking on load:

    θ = [0, values][cumsum(m_c or m_g)·m],    m = m_c or m_g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from sparrow.graphs.building import Building
from sparrow.graphs.graph import again, check_valid, set_nodes_in_place
from sparrow.graphs.skeleton import OUTPUT, fill
from sparrow.protocol.elements import ElementMask, from_bits
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, Tensors

from .errors import ExportError
from .source import Source

PERSONAL = "adaptive/personal"
"""Name of a value in the graph: bool [N], True if the personal model answers."""

MARGIN = 1e-4
"""Smallest difference of entropies (minus their bases, in nats) that rounding cannot reorder."""

_SMALLEST_NORM = 1e-12
"""Scores of a smaller 2-norm have similarity 0, as in ``edge_sdk.methods.adaptive``."""


def adaptive_model(
    skeleton: bytes,
    manifest: Manifest,
    own: Tensors,
    memory: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    personal: Tensors,
) -> ModelProto:
    """Build a graph with both models of a DM-PFL device and the selection rule of DM-PFL+.

    own, memory, personal: the device's state. settings: the method's. Raises SkeletonError, and ExportError if the
    state has no base entropies or belongs to another method or model.
    """
    missing = [name for name in ("mask", "global_mask", "rest") if name not in own]
    if missing:
        raise ExportError(
            f"the state has no {missing[0]!r}: the device has not trained yet, or not with DM-PFL; export the personal "
            f"model instead"
        )
    bases = [memory.get(f"entropy_{kind}") for kind in ("personal", "global")]
    if None in bases:
        raise ExportError(
            "the state has no base entropies, which choose the model: they are measured in the stage 'personal'; "
            "export after that stage, or export only the personal model"
        )
    if len(manifest.output_shape) != 1:
        raise ExportError(
            f"a dynamic export needs class scores, the outputs have the shape {manifest.output_shape}; export only the "
            f"personal model"
        )
    masks = _masks(manifest, own)
    # ``fill`` checks names, shapes and types; the packed weights then replace the personal model's
    model = onnx.load_model_from_string(fill(skeleton, manifest, personal))
    to = Building("adaptive/")
    renamed = _store(model, manifest, own, masks, to)
    scores = _copy(model, to, "personal/", {}), _copy(model, to, "global/", renamed)
    _choose(to, scores, [float(base) for base in bases if base is not None], settings.get("similarity", "logits"))
    set_nodes_in_place(model.graph, to.nodes)
    model.graph.initializer.extend(to.initializers)
    check_valid(model, "the two models make no valid ONNX model", "export only the personal one", full=True)
    return model


def dynamic_model(source: Source, budget: float | None) -> ModelProto:
    """Build the dynamic export of DM-PFL. budget: ignored. Raises as ``adaptive_model``."""
    assert source.membership is not None, "checked by load_form"
    settings = source.membership.federation.settings.method_settings
    return adaptive_model(
        source.skeleton, source.manifest, source.own, source.memory, settings, personal=source.tensors
    )


def _masks(manifest: Manifest, own: Tensors) -> tuple[ElementMask, ElementMask]:
    """Return m_c and m_g, checked against the length of ``rest``."""
    try:
        mask, global_mask = (from_bits(manifest, own[name].tobytes()) for name in ("mask", "global_mask"))
    except ManifestError as error:
        raise ExportError(f"the state is of another model: {error}; use the manifest it was trained with") from None
    wanted = global_mask.without(mask).count
    if len(own["rest"]) != wanted:
        raise ExportError(
            f"the state has {len(own['rest'])} weights only in the global mask, its masks need {wanted}; restore the "
            f"state, or train again"
        )
    return mask, global_mask


def _store(
    model: ModelProto, manifest: Manifest, own: Tensors, masks: tuple[ElementMask, ElementMask], to: Building
) -> dict[str, str]:
    """Add the global model's tensors. Return the names of tensors that differ from the personal model."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    renamed = {}
    start = 0
    for spec in manifest.whole:
        name = spec.name
        other = own.get(f"global:{name}")
        values = onnx.numpy_helper.to_array(stored[name])
        if name in masks[0].exists:
            mine, theirs = (each.exists[name].reshape(-1) for each in masks)
            added = theirs & ~mine
            union = np.array(values).reshape(-1) * mine
            end = start + int(added.sum())
            union[added] = own["rest"][start:end]
            start = end
            if mine.all() and theirs.all():
                continue
            model.graph.initializer.remove(stored[name])
            renamed[name] = _packed(to, name, spec.shape, union, mine, theirs)
        elif other is not None and other.tobytes() != values.tobytes():
            if other.shape != spec.shape or other.dtype != values.dtype:
                raise ExportError(
                    f"{name}: the state's global tensor has shape {other.shape} of {other.dtype}, but the manifest has "
                    f"{spec.shape} of {spec.dtype}; use the manifest it was trained with"
                )
            renamed[name] = to.constant(other)
    return {name: other for name, other in renamed.items() if name != other}


def _packed(
    to: Building,
    name: str,
    shape: tuple[int, ...],
    union: NDArray[np.float32],
    mine: NDArray[np.bool_],
    theirs: NDArray[np.bool_],
) -> str:
    """Add nodes that unpack both models' weights: the personal weight as ``name``. Return the name of the global
    weight.
    """
    either = mine | theirs
    values = to.constant(np.concatenate([np.zeros(1, np.float32), union[either]]))
    first = _bits(to, mine)
    same = bool((mine == theirs).all())
    second = first if same else _bits(to, theirs)
    places = to.add("CumSum", first if same else to.add("Max", first, second), to.whole(0))

    def weights(bits: str, output: str | None) -> str:
        found = to.add("Gather", values, to.add("Mul", places, bits))
        return to.add("Reshape", found, to.whole(*shape), output=output)

    weights(first, name)
    return name if same else weights(second, None)


def _bits(to: Building, flags: NDArray[np.bool_]) -> str:
    """Add nodes that unpack the flags to int32 [n], from one bit each in the file."""
    if flags.all():
        ones = onnx.helper.make_tensor("one", TensorProto.INT32, [1], [1])
        return to.add("ConstantOfShape", to.whole(len(flags)), value=ones)
    rows = to.constant(np.packbits(flags)[:, None])
    shifted = to.add("BitShift", rows, to.constant(np.arange(8, dtype=np.uint8)), direction="LEFT")
    bits = to.add("BitShift", shifted, to.constant(np.array(7, dtype=np.uint8)), direction="RIGHT")
    flat = to.reshape(to.add("Cast", bits, to=TensorProto.INT32), (-1,))
    return to.slice(flat, 0, 0, len(flags))


def _copy(model: ModelProto, to: Building, prefix: str, renamed: Mapping[str, str]) -> str:
    """Copy the forward pass with renamed weights. Return the name of its scores."""
    inner = {name for node in model.graph.node for name in node.output if name}
    names = {**{name: f"{prefix}{name}" for name in inner}, **renamed}
    for node in model.graph.node:
        read = [names.get(name, name) for name in node.input]
        made = [names.get(name, name) for name in node.output]
        to.nodes.append(again(node, read, made))
    return names[OUTPUT]


def _choose(to: Building, scores: tuple[str, str], bases: list[float], similarity: str) -> None:
    """Add the selection rule and the output.

    scores, bases: values of the personal and of the global model, in this order.
    """
    logs = [to.add("LogSoftmax", each, axis=1) for each in scores]
    powers = [to.add("Exp", each) for each in logs]
    entropies = [to.add("Neg", to.sum(to.add("Mul", *pair), 1)) for pair in zip(powers, logs, strict=True)]
    one, other = scores if similarity == "logits" else powers
    norms = [to.add("Sqrt", to.sum(to.add("Mul", each, each), 1)) for each in (one, other)]
    least = to.constant(np.array(_SMALLEST_NORM, np.float32))
    product = to.add("Max", to.add("Mul", *norms), to.constant(np.array(_SMALLEST_NORM**2, np.float32)))
    cosine = to.add("Div", to.sum(to.add("Mul", one, other), 1), product)
    like_nothing = to.add("Less", to.add("Min", *norms), least)
    alike = to.add("Where", like_nothing, to.constant(np.array(0, np.float32)), cosine)
    doubt = to.add("Sub", to.constant(np.array(1, np.float32)), alike)
    left, right = (
        to.add("Sub", entropy, to.add("Mul", doubt, to.constant(np.array(base, np.float32))))
        for entropy, base in zip(entropies, bases, strict=True)
    )
    surer = to.add("Less", left, right)
    to.add("Squeeze", surer, to.whole(1), output=PERSONAL)
    to.add("Where", surer, *scores, output=OUTPUT)
