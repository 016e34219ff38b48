"""Manifests of mixtures: several models with the same architecture, whose predictions are averaged with weights.

    p(y | x) = Σ_m π_m softmax(h_m(x))_y

Component m is the model h_m, with tensors ``components.m.NAME``. A frozen tensor exists once, under its name in
component 0; its names in other components are aliases. The tensor ``mixture_weights`` [M] is π: it starts uniform and
stays on each device. The mixture's output is ln p(y | x) for every class y in place of a classifier's scores: its
softmax, argmax and cross-entropy are those of the mixture.
"""

from __future__ import annotations

from .manifest import Constant, Layer, Manifest, TensorSpec

WEIGHTS = "mixture_weights"
SMALLEST_WEIGHT = 1e-30
"""Lower bound for weights, so that their logarithm is finite in float32."""


def name_in(component: int, name: str) -> str:
    """Return the name of a model's tensor or layer in a component of the mixture, counted from 0."""
    return f"components.{component}.{name}"


def names_in(component: int, manifest: Manifest) -> dict[str, str]:
    """Return a component's tensors: name in the model -> name in the mixture."""
    frozen = {spec.name for spec in manifest.frozen}
    return {spec.name: name_in(0 if spec.name in frozen else component, spec.name) for spec in manifest.tensors}


def mixture_of(manifest: Manifest, components: int) -> Manifest:
    """Return the manifest of a mixture of ``components`` models like ``manifest``, without graphs, neurons and blocks.
    Raises ValueError if a name becomes too long."""
    tensors = list[TensorSpec]()
    layers = list[Layer]()
    aliases = dict[str, str]()
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
    """Return the number of components."""
    (size,) = next(spec.shape for spec in manifest.tensors if spec.name == WEIGHTS)
    return size


def first_component(manifest: Manifest) -> Manifest:
    """Return the mixture's manifest with only the first component's layers, for counting FLOPs."""
    first = name_in(0, "")
    return manifest.model_copy(
        update={"layers": tuple(layer for layer in manifest.layers if layer.name.startswith(first))}
    )
