"""Targets that a loss leaves out (``ignore_index``): the same loss, accuracy and steps in both engines."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.label_prior import LabelPrior
from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.targets import ignored_label
from edge_sdk.tasks import Task
from edge_sdk.tasks.metrics import iou, top1
from edge_sdk.training.engine import TorchEngine
from sparrow.export.samples import Samples
from sparrow.protocol.preparation import Targets
from sparrow.protocol.settings import FederationSettings


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.CrossEntropyLoss(ignore_index=0), 0),
        (nn.NLLLoss(ignore_index=255), 255),
        (F.cross_entropy, -100),
        (nn.MSELoss(), None),
        (lambda outputs, targets: outputs.sum(), None),
    ],
)
def test_a_loss_says_which_label_it_leaves_out(loss, ignored):
    assert ignored_label(loss) == ignored


class Own:
    """A loss of the user's."""

    ignore_index = 7

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=self.ignore_index)


def test_a_loss_of_the_users_says_so_too():
    assert ignored_label(Own()) == 7


class Words(nn.Module):
    """Scores [N, C, T] of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.words(x)).transpose(1, 2)


def problem(kind: str, ignored: int):
    chance = torch.Generator().manual_seed(0)
    if kind == "sample":
        model, inputs, shape = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(12, 4), (12,)
    elif kind == "pixel":
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        inputs, shape = torch.randn(12, 1, 3, 3), (12, 3, 3)
    else:
        model, inputs, shape = Words(), torch.randint(9, (12, 5)), (12, 5)
    targets = torch.randint(3, shape, generator=chance)
    targets[torch.rand(shape, generator=chance) < 0.3] = ignored
    targets[4:8] = ignored  # a batch of nothing else
    targets[1], targets[9] = 1, 2
    return model, inputs, targets


def both(kind: str, ignored: int, smoothing: float = 0.0):
    """Both engines with the same model, and batches of which one has no target that counts."""
    model, inputs, targets = problem(kind, ignored)
    loss = nn.CrossEntropyLoss(ignore_index=ignored, label_smoothing=smoothing)
    batches = [(inputs[start : start + 4], targets[start : start + 4]) for start in (0, 4, 8)]
    task = Task("t", model, loss, batches, batches, classification=kind == "sample", metrics=("top1",))
    manifest = describe(model, inputs[:2], task="t").model_copy(update={"targets": Targets(ignored=ignored)})
    graphs = compile_step(model, loss, inputs, targets)
    network = Network(manifest, Sessions(graphs))
    network.load({name: each.detach().numpy() for name, each in copy.deepcopy(model).state_dict().items()})
    arrays = [(x.numpy(), y.numpy()) for x, y in batches]
    onnx = OnnxEngine(network, classification=task.classification, metrics=task.measured)
    return onnx, arrays, TorchEngine(task, manifest), batches


@pytest.mark.integration  # compiles a step
@pytest.mark.parametrize(
    ("kind", "ignored", "smoothing"),
    [("sample", -100, 0.1), ("sample", 0, 0.0), ("pixel", -100, 0.1), ("token", 0, 0.0)],
)
def test_both_engines_leave_the_same_targets_out(kind, ignored, smoothing):
    onnx, arrays, torch_engine, batches = both(kind, ignored, smoothing)
    found, wanted = onnx.evaluate(arrays, metrics=True), torch_engine.evaluate(batches, metrics=True)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert (found.accuracy, found.metrics["top1"]) == (wanted.accuracy, pytest.approx(wanted.metrics["top1"]))
    outputs, targets = torch_engine.scores(batches)
    known = targets != ignored
    right = (outputs.argmax(1) == targets)[known].mean()
    assert found.metrics["top1"] == pytest.approx(right)
    if kind == "sample":
        assert found.accuracy == pytest.approx(right)
        assert found.num_examples == known.sum()
        assert found.loss == pytest.approx(
            F.cross_entropy(
                torch.tensor(outputs), torch.tensor(targets), ignore_index=ignored, label_smoothing=smoothing
            ).item(),
            rel=1e-5,
        )

    settings = FederationSettings(method="fedavg", local_steps=3)
    for engine, data in ((onnx, arrays), (torch_engine, batches)):
        engine.train([data[0], data[2]], settings, learning_rate=0.5, seed=0)
    for name, tensor in torch_engine.read().items():
        assert np.allclose(onnx.read()[name], tensor, atol=1e-5), name


def test_metrics_of_classes_leave_ignored_targets_out():
    outputs = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    targets = np.array([0, 2, 2, 255])
    assert top1(outputs, targets, 255) == pytest.approx(2 / 3)
    assert iou(outputs, targets, 255) == pytest.approx((1 + 0 + 0.5) / 3)


def test_class_frequencies_leave_ignored_labels_out():
    model = nn.Linear(4, 3)
    manifest = describe(model, torch.randn(2, 4), task="t").model_copy(update={"targets": Targets(ignored=-100)})
    settings = FederationSettings(method="fedavg", logit_adjustment=1.0)

    def prior(labels):
        batches = [(np.zeros((len(labels), 4), np.float32), np.array(labels))]
        return LabelPrior.of(Task("t", model, F.cross_entropy, batches, batches), manifest, settings)

    assert np.array_equal(prior([0, 0, 1, -100, -100]).offset, prior([0, 0, 1]).offset)


def test_an_export_is_judged_on_samples_that_have_a_label():
    samples = Samples(np.arange(3.0)[:, None], np.array([1, 0, 2]), np.zeros((1, 1)))
    assert samples.labelled(0).inputs.ravel().tolist() == [0.0, 2.0]
    assert samples.labelled(None) is samples
