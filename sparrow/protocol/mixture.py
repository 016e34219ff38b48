"""The manifest of a mixture: several models of one kind, and weights by which what they predict is added.

    p(y | x) = Σ_m π_m softmax(h_m(x))_y

Component m is the model h_m, whose tensors are called ``components.m.NAME``. A tensor that nobody trains is there once,
under its name in component 0; its names in the others are aliases. The tensor ``mixture_weights`` [M] holds π. It is
each device's own, begins uniform, and never leaves the device. The mixture's output is ln p(y | x) for every class y,
in the place of a classifier's scores: softmax, argmax and cross-entropy of it are the mixture's own.
"""

from __future__ import annotations

from .manifest import Constant, Layer, Manifest, TensorSpec

WEIGHTS = "mixture_weights"
SMALLEST_WEIGHT = 1e-30
"""Weights below it count as this, so that their logarithm is finite in float32."""


def name_in(component: int, name: str) -> str:
    """Return what a tensor or layer of one model is called in a component of the mixture, counted from 0."""
    return f"components.{component}.{name}"


def names_in(component: int, manifest: Manifest) -> dict[str, str]:
    """Return tensor of one model -> tensor of the mixture, as a component reads it."""
    frozen = {spec.name for spec in manifest.frozen}
    return {spec.name: name_in(0 if spec.name in frozen else component, spec.name) for spec in manifest.tensors}


def mixture_of(manifest: Manifest, components: int) -> Manifest:
    """Return the manifest of a mixture of ``components`` models like ``manifest``, without graphs, neurons and blocks.
    Raises ValueError for a name that becomes too long."""
    tensors, layers, aliases = list[TensorSpec](), list[Layer](), dict[str, str]()
    for each in range(components):
        names = names_in(each, manifest)
        for spec in manifest.tensors:
            if each and spec.policy == "frozen":
                aliases[name_in(each, spec.name)] = names[spec.name]
            else:
                tensors.append(TensorSpec.model_validate({**spec.model_dump(), "name": names[spec.name], "axes": ()}))
        for layer in manifest.layers:
            read = tuple(names[name] for name in layer.tensors)
            layers.append(
                Layer.model_validate({**layer.model_dump(), "name": name_in(each, layer.name), "tensors": read})
            )
        aliases |= {name_in(each, alias): names[name] for alias, name in manifest.aliases.items()}
    uniform = Constant(value=1 / components)
    tensors.append(TensorSpec(name=WEIGHTS, shape=(components,), policy="personal", trainable=False, init=uniform))
    return Manifest(
        task=manifest.task,
        input_shape=manifest.input_shape,
        output_shape=manifest.output_shape,
        tensors=tuple(tensors),
        layers=tuple(layers),
        coupling=False,
        aliases=aliases,
        frozen_sha256=manifest.frozen_sha256,
        metrics=manifest.metrics,
        frozen_precision=manifest.frozen_precision,
        preparation=manifest.preparation,
        preparation_sha256=manifest.preparation_sha256,
        targets=manifest.targets,
    )


def components_of(manifest: Manifest) -> int:
    """Return how many components a mixture has."""
    (size,) = next(spec.shape for spec in manifest.tensors if spec.name == WEIGHTS)
    return size


def first_component(manifest: Manifest) -> Manifest:
    """Return the mixture's manifest with the layers of its first component alone, of which FLOPs can be counted."""
    first = name_in(0, "")
    return manifest.model_copy(
        update={"layers": tuple(layer for layer in manifest.layers if layer.name.startswith(first))}
    )
