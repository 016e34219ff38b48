"""FedEM, server half: a mixture of ``components`` models of the published kind, averaged one by one.

Marfoq et al., NeurIPS 2021, arXiv:2108.10252, Algorithm 1. The federation's model is a mixture
(``sparrow.protocol.mixture``), so traffic is ``components`` times FedAvg's, and the mean of updates is the mean of each
component, weighted by n_i. The mixture weights π stay on devices.

Values with a recipe are drawn for each component by name. Published values go to the first component; the others add
noise from the federation's seed, whose standard deviation is ``spread`` times the tensor's root mean square.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from pydantic import Field

from sparrow.protocol.manifest import (
    MAX_GRAPH,
    MOST_NODES,
    Array,
    FileName,
    GraphName,
    Manifest,
    Tensors,
    draw_uniform,
)
from sparrow.protocol.mixture import mixture_of, name_in
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from . import CoordinatorMethod, MethodSettings, PublishedModel, needs_sums_alone, own_settings

log = logging.getLogger(__name__)

TRAINING: tuple[GraphName, ...] = ("step", "evaluation")
"""Graphs for training without PyTorch, both or neither."""


class FedEMSettings(MethodSettings):
    """FedEM's settings beyond FedAvg's."""

    components: int = Field(default=3, ge=1, le=10, description="Models in the mixture, M; traffic is M times FedAvg's")
    spread: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Noise between initial components of a published model, as a share of each tensor's RMS",
    )


def compose(published: PublishedModel, settings: FederationSettings) -> PublishedModel:
    """Return the mixture of ``components`` published models. Raises BadContent; SkeletonError without classes."""
    # onnx takes 7 MB, which built-in tasks of other methods do not need.
    from sparrow.graphs.mixture import MIXED, mix_all

    rules = own_settings(settings, FedEMSettings)
    manifest = published.manifest
    if len(manifest.output_shape) != 1 or manifest.output_shape[0] < 2:
        raise BadContent(
            f"fedem mixes classifiers, but this model's outputs have the shape {manifest.output_shape} per sample; "
            f"publish a model with a score for each of at least two classes, or choose another method"
        )
    # This limits the mixture's bytes before they are made.
    mixture = mixture_of(manifest, rules.components)
    graphs = mix_all({name: published.files[name] for name in manifest.graphs}, manifest, rules.components)
    if not all(_may_run(graphs[name]) for name in TRAINING if name in graphs):
        log.warning("%s: the mixture's training graph is too large, so devices need PyTorch", manifest.task)
        graphs = {name: graph for name, graph in graphs.items() if name not in TRAINING}
    others = {name: file for name, file in published.files.items() if name not in MIXED}
    files: dict[FileName, bytes] = others | {name: graphs[name] for name in graphs}
    tensors = _of_each(published.tensors, manifest, rules, settings.seed)
    return PublishedModel(mixture.with_graphs(graphs), files, tensors)


def _may_run(graph: bytes) -> bool:
    """Return True if devices accept a graph of this size."""
    import onnx

    return len(graph) <= MAX_GRAPH and len(onnx.load_from_string(graph).graph.node) <= MOST_NODES


def _of_each(tensors: Mapping[str, Array], manifest: Manifest, rules: FedEMSettings, seed: int) -> Tensors:
    """Return the published weights of each component, with noise except for the first."""
    trained = {spec.name: spec for spec in manifest.shared if spec.trainable}
    mixed = Tensors()
    for each in range(rules.components):
        for name, tensor in tensors.items():
            new = name_in(each, name)
            mixed[new] = tensor
            if each and name in trained:
                deviation = rules.spread * float(np.sqrt(np.mean(np.square(tensor, dtype=np.float64))))
                spec = trained[name].model_copy(update={"name": new})
                noise = draw_uniform(spec, 3**0.5 * deviation, seed)
                mixed[new] = tensor.astype(np.float32) + np.asarray(noise, np.float32)
    return mixed


FEDEM = CoordinatorMethod(
    settings_type=FedEMSettings,
    personal_models=True,
    mixes_global=True,
    compose=compose,
    why_not_secure=needs_sums_alone,
)
