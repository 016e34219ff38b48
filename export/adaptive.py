"""A device's personal and global model and the choice between them in one ONNX graph: DM-PFL+ (KDD 2023, Algorithm 4).

    z_c, z_g = θ_c(x), θ_g(x)
    y = z_c where H(z_c) - (1 - Sim)·BE_c < H(z_g) - (1 - Sim)·BE_g, else z_g

for every sample; H is the entropy of the softmax, Sim the cosine of the scores. What both models
have is in the file once. Of a weight with masks m_c and m_g that are the values at the positions of either, packed,
and the masks at a bit per position:

    θ = [0, values][cumsum(m_c or m_g)·m],    m being m_c or m_g

of operators that ONNX Runtime folds when it loads the file, so that inference meets plain weights. Biases, norms and
buffers that are equal are one.
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
"""Which samples the personal model answers, bool [N]: the value's name in the graph."""

MARGIN = 1e-4
"""Of entropies less their base, in nats, that are less than this apart, rounding may decide."""

_SMALLEST_NORM = 1e-12
"""As in ``edge_sdk.methods.adaptive``: scores of a smaller 2-norm are like nothing."""


def adaptive_model(
    skeleton: bytes,
    manifest: Manifest,
    own: Tensors,
    memory: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    personal: Tensors,
) -> ModelProto:
    """Return both models of a device of DM-PFL, and the rule of DM-PFL+.

    own, memory and personal are the device's state, settings the method's. Raises SkeletonError, and ExportError for a
    state without base entropies, or one of another method or model.
    """
    missing = [name for name in ("mask", "global_mask", "rest") if name not in own]
    if missing:
        raise ExportError(
            f"the state has no {missing[0]!r}: it is no state of DM-PFL, or its device has not trained yet; export its "
            f"personal model instead"
        )
    bases = [memory.get(f"entropy_{which}") for which in ("personal", "global")]
    if None in bases:
        raise ExportError(
            "the state has no base entropies, by which models are chosen: they are measured in the stage 'personal'; "
            "export after it, or the personal model alone"
        )
    if len(manifest.output_shape) != 1:
        raise ExportError(
            f"the choice goes by scores of classes, and outputs have the shape {manifest.output_shape}; export the "
            f"personal model alone"
        )
    masks = _masks(manifest, own)
    # what is filled in is checked for names, shapes and types; packed weights replace those of the personal model
    model = onnx.load_model_from_string(fill(skeleton, manifest, personal))
    to = Building("adaptive/")
    renamed = _store(model, manifest, own, masks, to)
    scores = _copy(model, to, "personal/", {}), _copy(model, to, "global/", renamed)
    _choose(to, scores, [float(base) for base in bases if base is not None], settings.get("similarity", "logits"))
    set_nodes_in_place(model.graph, to.nodes)
    model.graph.initializer.extend(to.initializers)
    check_valid(model, "the two models make no valid ONNX model", "export the personal one alone", full=True)
    return model


def dynamic_model(source: Source, budget: float | None) -> ModelProto:
    """Return both models of a device's state and the choice; the form of DM-PFL for ``--mode dynamic``.

    budget: of no effect here. Raises as above.
    """
    assert source.membership is not None, "checked where the form is chosen"
    settings = source.membership.federation.settings.method_settings
    return adaptive_model(
        source.skeleton, source.manifest, source.own, source.memory, settings, personal=source.tensors
    )


def _masks(manifest: Manifest, own: Tensors) -> tuple[ElementMask, ElementMask]:
    """Return m_c and m_g, to which ``rest`` fits."""
    try:
        mask, global_mask = (from_bits(manifest, own[name].tobytes()) for name in ("mask", "global_mask"))
    except ManifestError as error:
        raise ExportError(f"the state is one of another model: {error}; use the manifest it was trained with") from None
    wanted = global_mask.without(mask).count
    if len(own["rest"]) != wanted:
        raise ExportError(
            f"the state has {len(own['rest'])} weights that the global mask alone has, its masks say {wanted}; "
            f"restore it, or let the device train again"
        )
    return mask, global_mask


def _store(
    model: ModelProto, manifest: Manifest, own: Tensors, masks: tuple[ElementMask, ElementMask], to: Building
) -> dict[str, str]:
    """Put the global model beside the personal one; the names of tensors that are not the personal one's."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    renamed, start = {}, 0
    for spec in manifest.whole:
        name, other = spec.name, own.get(f"global:{spec.name}")
        values = onnx.numpy_helper.to_array(stored[name])
        if name in masks[0].exists:
            mine, theirs = (each.exists[name].reshape(-1) for each in masks)
            alone = theirs & ~mine
            union = np.array(values).reshape(-1) * mine
            end = start + int(alone.sum())
            union[alone], start = own["rest"][start:end], end
            if mine.all() and theirs.all():
                continue
            model.graph.initializer.remove(stored[name])
            renamed[name] = _packed(to, name, spec.shape, union, mine, theirs)
        elif other is not None and other.tobytes() != values.tobytes():
            if other.shape != spec.shape or other.dtype != values.dtype:
                raise ExportError(
                    f"{name}: the state's global one has shape {other.shape} of {other.dtype}, the manifest says "
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
    """Compose both models' weights; the personal one has ``name``, the global one the answer."""
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
    """Return int32 [n], 1 where a flag is set; in the file a bit each."""
    if flags.all():
        ones = onnx.helper.make_tensor("one", TensorProto.INT32, [1], [1])
        return to.add("ConstantOfShape", to.whole(len(flags)), value=ones)
    rows = to.constant(np.packbits(flags)[:, None])
    shifted = to.add("BitShift", rows, to.constant(np.arange(8, dtype=np.uint8)), direction="LEFT")
    bits = to.add("BitShift", shifted, to.constant(np.array(7, dtype=np.uint8)), direction="RIGHT")
    flat = to.reshape(to.add("Cast", bits, to=TensorProto.INT32), (-1,))
    return to.slice(flat, 0, 0, len(flags))


def _copy(model: ModelProto, to: Building, prefix: str, renamed: Mapping[str, str]) -> str:
    """Copy the forward pass, with other weights; return the name of its scores."""
    inner = {name for node in model.graph.node for name in node.output if name}
    names = {**{name: f"{prefix}{name}" for name in inner}, **renamed}
    for node in model.graph.node:
        read, made = ([names.get(name, name) for name in values] for values in (node.input, node.output))
        to.nodes.append(again(node, read, made))
    return names[OUTPUT]


def _choose(to: Building, scores: tuple[str, str], bases: list[float], similarity: str) -> None:
    """Add the rule, whose choice becomes the output. scores, bases: of the personal and of the global model."""
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
