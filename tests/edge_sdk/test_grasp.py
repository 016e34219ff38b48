"""GraSP's device half; whole federations of it are in tests/coordinator/test_prepared.py."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.methods import DeviceState, Job, UnknownWork, load_method
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.grasp import GRASP, score
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, build_seeded
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import NeuronDraw, draw_neurons, pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

OWN = {"density": 0.3, "temperature": 200.0, "score_batches": 0, "proximal_weight": 0.0}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.hidden = nn.Linear(8, 5)
        self.out = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(torch.tanh(self.norm(self.conv(x))).flatten(1))))


MANIFEST = describe(Small(), torch.zeros(1, 1, 3, 3), task="small")
WEIGHTS = 8 + 40 + 15


class Batches:
    """Five samples and three, in an order that torch's generator draws; remembers what it gave."""

    def __init__(self, sizes=(5, 3), classes=3):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(sum(sizes), 1, 3, 3, generator=generator)
        self.targets = torch.arange(sum(sizes)) % classes
        self.sizes, self.given, self.shuffles = sizes, [], True

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        order = torch.randperm(len(self.inputs)) if self.shuffles else torch.arange(len(self.inputs))
        self.given.append([])
        for index in order.split(list(self.sizes)):
            self.given[-1].append(index.tolist())
            yield self.inputs[index], self.targets[index]


def job_of(*, kind="prepare", loss=F.cross_entropy, model=None, batches=None, mask=None, number=0, **own):
    model = model or build_seeded(Small, 0)
    task = Task("small", model, loss, Batches() if batches is None else batches, Batches())
    settings = FederationSettings(
        method="grasp", learning_rate=0.1, early_stopping="off", method_settings={**OWN, **own}
    )
    assignment = Assignment(assignment_id="a", kind=kind, round=number, deadline_seconds=60, settings=settings)
    values = pack(MANIFEST, get_tensors(build_seeded(Small, 7), MANIFEST), mask)
    received = decode(encode(MANIFEST, values, mask), MANIFEST)
    return Job(
        assignment, MANIFEST, task, TorchEngine(task, MANIFEST), DeviceState(), received, federation="f", device="pi"
    )


def explicit_scores(temperature, batches):
    """θ ⊙ H g in float64: the Hessian of the loss of all samples, as a matrix; batch norm sees one batch at a time."""
    model = build_seeded(Small, 7).double().train()
    names = [spec.name for spec in MANIFEST.maskable]
    parameters = dict(model.named_parameters())
    theta = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    shapes = [parameters[name].shape for name in names]

    def loss(flat):
        parts = [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        changed = dict(zip(names, parts, strict=True))
        total = 0.0
        for inputs, targets in batches:
            outputs = functional_call(copy.deepcopy(model), changed, inputs.double())
            total = total + F.cross_entropy(outputs / temperature, targets, reduction="sum")
        return total / sum(len(targets) for _, targets in batches)

    gradient = torch.autograd.functional.jacobian(loss, theta)
    hessian = torch.autograd.functional.hessian(loss, theta)
    return (theta * (hessian @ gradient)).numpy()


def flat(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


def load(job):
    job.engine.model.load_state_dict(build_seeded(Small, 7).state_dict())
    return job


@pytest.mark.parametrize("temperature", [1.0, 200.0])
def test_scores_are_those_of_an_explicit_hessian(temperature):
    batches = Batches()
    batches.shuffles = False
    wanted = explicit_scores(temperature, list(batches))
    scored = score(load(job_of(batches=batches, temperature=temperature)))
    assert list(scored.scores) == [spec.name for spec in MANIFEST.maskable]
    np.testing.assert_allclose(flat(scored.scores), wanted, rtol=2e-3, atol=1e-5 * np.abs(wanted).max())
    assert scored.samples == 8
    model = build_seeded(Small, 7).train()
    losses = [F.cross_entropy(model(inputs), targets).item() * len(targets) for inputs, targets in batches]
    assert scored.loss == pytest.approx(sum(losses) / 8), "of the model as it is, at no temperature"


def test_some_batches_are_enough():
    batches, first = Batches(), Batches()
    batches.shuffles = first.shuffles = False
    wanted = explicit_scores(200.0, list(first)[:1])
    scored = score(load(job_of(batches=batches, score_batches=1)))
    np.testing.assert_allclose(flat(scored.scores), wanted, rtol=2e-3, atol=1e-5 * np.abs(wanted).max())
    assert scored.samples == 5
    assert score(load(job_of(score_batches=99))).samples == 8


def test_both_passes_see_the_same_batches_and_other_devices_others():
    def given(job):
        score(job)
        return job.task.train.given

    first, second = given(job_of())
    assert first == second
    assert sorted(index for batch in first for index in batch) == list(range(8))
    assert given(dataclasses.replace(job_of(), device="other"))[0] != first
    assert given(job_of())[0] == first


def test_the_largest_scores_stay_and_what_is_sent_is_what_came():
    job = job_of()
    before = {name: buffer.clone() for name, buffer in build_seeded(Small, 0).named_buffers()}
    trained = GRASP.prepare(job)
    update = trained.update
    assert update.mask.count == 18, "0.3 * 63 = 18.9"
    scores = score(load(job_of())).scores
    best = {(name, int(score.argmax())) for name, score in scores.items()}
    others = [(name, i) for name, score in scores.items() for i in range(score.size) if (name, i) not in best]
    others.sort(key=lambda at: -scores[at[0]].reshape(-1)[at[1]])
    kept = {(name, int(i)) for name, index in update.mask.index.items() for i in index}
    assert kept == best | set(others[:15])
    received = get_tensors(build_seeded(Small, 7), MANIFEST)
    np.testing.assert_array_equal(update.values, pack(MANIFEST, received, update.mask))
    assert (trained.num_examples, trained.steps, trained.stopped) == (8, 0, False)
    assert trained.train_loss == score(load(job_of())).loss
    assert trained.flops == 4 * training_flops(MANIFEST, 8)
    assert int(job.engine.model.norm.num_batches_tracked) == int(before["norm.num_batches_tracked"])
    np.testing.assert_array_equal(job.engine.model.norm.running_mean, build_seeded(Small, 7).norm.running_mean)
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())


def test_a_tiny_density_leaves_a_weight_in_every_layer():
    mask = GRASP.prepare(job_of(density=0.001)).update.mask
    assert list(mask.counts.values()) == [1, 1, 1]


def test_preparing_again_prepares_the_same():
    one, other = (GRASP.prepare(job_of()).update for _ in range(2))
    assert one.mask.digest == other.mask.digest
    np.testing.assert_array_equal(one.values, other.values)


def test_progress_goes_over_both_passes():
    steps = []
    job = dataclasses.replace(job_of(), progress=lambda done, total, loss: steps.append((done, total)))
    GRASP.prepare(job)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_is_not_finite_fails():
    with pytest.raises(TrainingDiverged, match="the loss is nan before any training"):
        GRASP.prepare(job_of(loss=lambda outputs, targets: outputs.mean() * float("nan")))
    # |y|^(1/2) has no derivative at 0, and a loss of 0 there.
    with pytest.raises(TrainingDiverged, match=r"weight: a score is not finite"):
        GRASP.prepare(job_of(loss=lambda outputs, targets: (outputs * 0).abs().sqrt().mean()))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, error):
        (x,) = ctx.saved_tensors
        return 2 * x * error


def test_a_model_that_cannot_be_differentiated_twice_hands_its_work_back():
    def loss(outputs, targets):
        return F.cross_entropy(Once.apply(outputs), targets)

    with pytest.raises(UnknownWork, match="second derivatives"):
        GRASP.prepare(job_of(loss=loss))


def test_a_device_without_data_or_with_a_part_of_the_model_prepares_nothing():
    with pytest.raises(ValueError, match="has no batches"):
        GRASP.prepare(job_of(batches=Batches(sizes=())))
    with pytest.raises(BundleError):
        GRASP.prepare(dataclasses.replace(job_of(), received=None))
    some = draw_neurons(MANIFEST, NeuronDraw("pi", 0.5))
    with pytest.raises(BundleError):
        GRASP.prepare(job_of(mask=some))


def test_ordinary_rounds_are_fedavgs_unless_they_are_pulled():
    mask = GRASP.prepare(job_of()).update.mask
    grasp, fedavg, pulled = (
        method.train(job_of(kind="train", mask=mask, number=1, proximal_weight=weight)).update
        for method, weight in ((GRASP, 0.0), (FEDAVG, 0.0), (GRASP, 1.0))
    )
    np.testing.assert_array_equal(grasp.values, fedavg.values)
    assert len(grasp.values) == mask.count + sum(spec.size for spec in MANIFEST.shared) - WEIGHTS
    assert grasp.mask.digest == mask.digest
    assert not np.array_equal(grasp.values, pulled.values)


def test_the_method_is_found_by_its_name():
    assert load_method("grasp") is GRASP
