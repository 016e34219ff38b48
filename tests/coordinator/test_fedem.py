"""FedEM on the coordinator: the federation's model is a mixture of the published one."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.methods.fedem import FEDEM as DEVICE
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import Task
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import PublishedModel
from sparrow.coordinator.methods.fedem import FEDEM
from sparrow.graphs.errors import SkeletonError
from sparrow.graphs.mixture import mix
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.mixture import WEIGHTS, mixture_of
from sparrow.protocol.settings import FederationSettings

DIGITS = load_builtin("digits")


def composed(manifest=DIGITS.manifest, files=DIGITS.graphs, tensors=None, seed=0, **own):
    settings = completed(FederationSettings(method="fedem", seed=seed, method_settings=own))
    return FEDEM.compose(PublishedModel(manifest, files, tensors or {}), settings)


def test_a_mixture_has_each_tensor_once_for_each_component():
    found = composed(components=4).manifest
    assert found.shared_values == 4 * DIGITS.manifest.shared_values
    assert found.trainable_values == 4 * DIGITS.manifest.trainable_values
    (own,) = (spec for spec in found.tensors if spec.policy == "personal")
    assert (own.name, own.shape, own.init.value, own.trainable) == (WEIGHTS, (4,), 0.25, False)
    assert found.graphs.keys() == {"skeleton", "step", "evaluation"}


def test_components_of_recipes_begin_apart_by_their_names():
    found = initial_values(composed(components=3).manifest, 0)
    weights = [found[f"components.{each}.fc1.weight"] for each in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.corrcoef(weights[one].reshape(-1), weights[other].reshape(-1))[0, 1] < 0.1


def test_published_components_begin_apart_by_noise_from_the_seed():
    manifest = Manifest.model_validate(
        {
            **DIGITS.manifest.model_dump(),
            "tensors": [{**each.model_dump(), "init": {"kind": "data"}} for each in DIGITS.manifest.tensors],
        }
    )
    weights = initial_values(DIGITS.manifest, 5)
    first, again, other = (composed(manifest, tensors=weights, seed=seed, spread=0.2).tensors for seed in (1, 1, 2))
    name = "fc1.weight"
    assert np.array_equal(first[f"components.0.{name}"], weights[name])
    noise = first[f"components.1.{name}"] - weights[name]
    assert noise.std() == pytest.approx(0.2 * np.sqrt(np.mean(weights[name] ** 2)), rel=0.05)
    assert abs(noise.mean()) < 0.05 * noise.std()
    assert np.array_equal(first[f"components.1.{name}"], again[f"components.1.{name}"])
    assert not np.array_equal(first[f"components.1.{name}"], other[f"components.1.{name}"])
    assert not np.array_equal(noise, first[f"components.2.{name}"] - weights[name])
    running = "bn1.running_var"
    assert np.array_equal(first[f"components.1.{running}"], weights[running]), "statistics are no weights"


def test_what_nobody_trains_is_there_once(tmp_path):
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 7).requires_grad_(False)
            self.head = nn.Linear(7, 3)

        def forward(self, x):
            return self.head(F.relu(self.base(x)))

    model, x = Tuned(), torch.randn(6, 5)
    single = describe_whole(model, x, task="tuned")
    mixture = mixture_of(single, 3)
    assert [spec.name for spec in mixture.frozen] == ["components.0.base.weight", "components.0.base.bias"]
    assert mixture.shared_values == 3 * (7 * 3 + 3)
    task = DEVICE.task_of(Task("tuned", model, F.cross_entropy, [(x, torch.zeros(6).long())], []), mixture, 0)
    first, second, third = task.model.components
    assert first.base.weight is second.base.weight is third.base.weight
    assert first.head.weight is not second.head.weight
    assert first.base.weight is not model.base.weight


@pytest.mark.parametrize("shape", [(), (1,), (3, 8, 8)])
def test_a_model_that_does_not_score_classes_is_refused(shape):
    manifest = Manifest.model_validate({**DIGITS.manifest.model_dump(), "output_shape": shape})
    with pytest.raises(BadContent, match=r"fedem\b.*shape"):
        composed(manifest)


def test_a_step_whose_targets_are_no_classes_is_refused():
    import onnx

    step = onnx.load_from_string(DIGITS.graphs["step"])
    (target,) = (each for each in step.graph.input if each.name == "target")
    target.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(SkeletonError, match="the step's targets are not classes"):
        mix(step.SerializeToString(), DIGITS.manifest, 2)


def test_a_step_that_devices_would_refuse_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr("sparrow.coordinator.methods.fedem.MOST_NODES", 100)
    with caplog.at_level(logging.WARNING):
        found = composed()
    assert found.manifest.graphs.keys() == found.files.keys() == {"skeleton"}
    assert "devices need PyTorch" in caplog.text


@pytest.mark.parametrize(
    ("own", "said"), [({"components": 0}, "components"), ({"components": 11}, "components"), ({"spread": 0}, "spread")]
)
def test_settings_out_of_bounds_are_refused(own, said):
    with pytest.raises(BadContent, match=f"method_settings.{said}"):
        composed(**own)
