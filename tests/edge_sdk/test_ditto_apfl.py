"""Ditto and APFL: the global model is FedAvg's, what is personal follows the papers' updates, and stays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.apfl import APFL
from edge_sdk.methods.ditto import DITTO
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.local import LOCAL
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import as_tensors, get_tensors, train_locally
from edge_sdk.training.optimisation import Optimisation
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings


def job_of(*, personal=None, memory=None, own=None, number=3, batch_size=8, norm=False, **given):
    """A round over random samples; what is received is what the model was made with, moved a little."""
    method_settings = {name: given.pop(name) for name in ("proximal_weight", "mixing_weight") if name in given}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), *([nn.BatchNorm1d(9)] if norm else []), nn.ReLU(), nn.Linear(9, 3))
    inputs = torch.randn(20, 6)
    manifest = describe(model, inputs[:2], task="t")
    arrays = Arrays(inputs, torch.arange(20) % 3)
    task = classification("t", model, arrays, arrays, None, batch_size=batch_size)
    body = encode(manifest, pack(manifest, get_tensors(model, manifest), None), None)
    settings = FederationSettings(
        **{
            "local_epochs": 2,
            "early_stopping": "off",
            "learning_rate": 0.1,
            "method_settings": method_settings,
            **given,
        }
    )
    assignment = Assignment(assignment_id="a", kind="train", round=number, deadline_seconds=9, settings=settings)
    state = DeviceState(personal, memory or {}, own or {})
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state,
        decode(body, manifest),
        federation="f",
        device="pi",
    )


def other_model(seed=5):
    job = job_of()
    chance = np.random.default_rng(seed)
    return {
        name: (tensor + chance.normal(scale=0.3, size=tensor.shape)).astype(np.float32)
        for name, tensor in get_tensors(job.engine.model, job.manifest).items()
    }


def received(job):
    tensors = get_tensors(job_of().engine.model, job.manifest)
    np.testing.assert_array_equal(pack(job.manifest, tensors, None), job.received.values)
    return tensors


OPTIMISERS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "clip": 1.0}]


# --- Ditto --------------------------------------------------------------------------------------------------------


def test_ditto_can_train_a_mixture_once_more_at_the_end_as_plain_training():
    job = job_of(finetune_epochs=3, local_epochs=1, proximal_weight=0.5)
    found, flops = DITTO.finish(job, other_model())
    plain = job_of(local_epochs=3)
    plain.engine.load(other_model())
    plain.engine.train(
        plain.task.train, plain.assignment.settings, learning_rate=0.1, seed=job.seed("finish"), progress=job.progress
    )
    for name, tensor in plain.engine.read().items():
        np.testing.assert_array_equal(found[name], tensor)
    assert flops > 0


@pytest.mark.integration
@pytest.mark.parametrize("more", OPTIMISERS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("personal", [False, True])
def test_dittos_update_is_fedavgs(more, norm, personal):
    first = FEDAVG.train(job_of(norm=norm, **more))
    mine = DITTO.train(job_of(norm=norm, proximal_weight=0.1, **more)).state.personal if personal else None
    trained = DITTO.train(job_of(norm=norm, proximal_weight=0.1, personal=mine, **more))
    assert trained.update.values.tobytes() == first.update.values.tobytes()
    assert (trained.flops, trained.steps) == (2 * first.flops, 2 * first.steps)
    assert trained.train_loss == first.train_loss


@pytest.mark.parametrize("more", OPTIMISERS)
def test_ditto_without_a_pull_is_local_training_of_ones_own(more):
    mine = other_model()
    trained = DITTO.train(job_of(personal=mine, proximal_weight=0.0, **more))
    job = job_of(**more)
    with torch.no_grad():
        for name, parameter in job.engine.model.named_parameters():
            parameter.copy_(torch.from_numpy(mine[name]))
    train_locally(
        job.engine.model,
        job.task,
        job.assignment.settings,
        learning_rate=0.1,
        freezing=Freezing(job.engine.model, job.manifest, None),
        seed=job.seed("personal"),
    )
    for name, tensor in get_tensors(job.engine.model, job.manifest).items():
        assert trained.state.personal[name].tobytes() == tensor.tobytes()
    assert load_method("local") is LOCAL


def test_ditto_with_a_strong_pull_stays_at_the_global_model():
    job = job_of(personal=other_model(), proximal_weight=9.9, local_epochs=20)
    trained, w = DITTO.train(job), received(job)
    far = DITTO.train(job_of(personal=other_model(), proximal_weight=0.0, local_epochs=20)).state.personal
    for name, tensor in trained.state.personal.items():
        distance, free = np.abs(tensor - w[name]).max(), np.abs(far[name] - w[name]).max()
        assert distance < 0.1 < free, name


def test_ditto_by_hand():
    """v <- v - lr(grad F(v) + λ(v - w)), one whole batch a step, from a model that is not the one received."""
    mine, weight, rate = other_model(), 0.4, 0.1
    job = job_of(personal=mine, proximal_weight=weight, batch_size=20, local_epochs=3)
    trained, w = DITTO.train(job), received(job)
    inputs, targets = as_tensors(next(iter(job.task.train)))
    v = {name: torch.tensor(tensor, requires_grad=True) for name, tensor in mine.items()}
    for _ in range(3):
        loss = nn.functional.cross_entropy(torch.func.functional_call(job.engine.model, v, inputs), targets)
        slopes = torch.autograd.grad(loss, list(v.values()))
        v = {
            name: (tensor - rate * (slope + weight * (tensor - torch.tensor(w[name])))).detach().requires_grad_()
            for (name, tensor), slope in zip(v.items(), slopes, strict=True)
        }
    for name, tensor in v.items():
        np.testing.assert_allclose(trained.state.personal[name], tensor.detach(), atol=1e-5)


def test_dittos_first_personal_model_is_the_global_one():
    one = DITTO.train(job_of(proximal_weight=0.3))
    other = DITTO.train(job_of(proximal_weight=0.3, personal=received(job_of())))
    for name, tensor in one.state.personal.items():
        assert tensor.tobytes() == other.state.personal[name].tobytes()


def test_ditto_judges_both_models():
    job = job_of(personal=other_model(), proximal_weight=0.1)
    found = DITTO.evaluate(job)
    assert found.personal.loss != found.global_model.loss
    assert DITTO.evaluate(dataclasses.replace(job, state=DeviceState())).personal is None
    assert DITTO.adapt(job_of(proximal_weight=0.1)).personal.keys() == other_model().keys()


def test_a_pull_is_to_the_centre_that_is_given():
    torch.manual_seed(0)
    job = job_of()
    centre = {name: torch.full_like(parameter, 3.0) for name, parameter in job.engine.model.named_parameters()}
    optimisation = Optimisation(
        Freezing(job.engine.model, job.manifest, None),
        job.assignment.settings,
        learning_rate=0.5,
        proximal_weight=1.0,
        proximal_centre=centre,
    )
    before = get_tensors(job.engine.model, job.manifest)
    with optimisation:
        optimisation.forget_gradients()
        (0.0 * sum(parameter.sum() for parameter in job.engine.model.parameters())).backward()
        optimisation.step()
    for name, tensor in get_tensors(job.engine.model, job.manifest).items():
        np.testing.assert_allclose(tensor, before[name] + 0.5 * (3.0 - before[name]), rtol=1e-5)


# --- APFL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("own", [False, True])
def test_apfl_by_hand(alpha, own):
    """Algorithm 1: both models step in every batch, the weight once, at the end, on the last one."""
    rate, epochs = 0.1, 2
    mine = other_model() if own else None
    job = job_of(own=mine, mixing_weight=alpha, batch_size=20, local_epochs=epochs)
    trained, start = APFL.train(job), received(job)
    inputs, targets = as_tensors(next(iter(job.task.train)))

    def tensors(of):
        return {name: torch.tensor(tensor) for name, tensor in of.items()}

    def slopes(at):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(job.engine.model, leaves, inputs), targets)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    w, v = tensors(start), tensors(mine or start)
    slope = 0.0
    for _ in range(epochs):
        mixture = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
        of_w, of_mixture = slopes(w), slopes(mixture)
        slope = sum(float(((v[name] - w[name]) * of_mixture[name]).sum()) for name in w)
        w = {name: w[name] - rate * of_w[name] for name in w}
        v = {name: v[name] - rate * alpha * of_mixture[name] for name in v}
    after = min(1.0, max(0.0, alpha - rate * slope))
    assert trained.state.memory["mixing_weight"] == pytest.approx(after, abs=1e-5)
    for name in w:
        np.testing.assert_allclose(trained.state.own[name], v[name], atol=1e-5)
        np.testing.assert_allclose(trained.state.personal[name], after * v[name] + (1 - after) * w[name], atol=1e-5)
    np.testing.assert_allclose(
        trained.update.values, pack(job.manifest, {name: t.numpy() for name, t in w.items()}, None), atol=1e-5
    )


@pytest.mark.integration
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("more", OPTIMISERS)
def test_apfls_update_is_fedavgs(alpha, norm, more):
    fedavg = FEDAVG.train(job_of(norm=norm, **more))
    trained = APFL.train(job_of(norm=norm, mixing_weight=alpha, **more))
    if not (norm and "optimizer" in more):  # Adam makes full steps of the rounding in biases before a norm
        np.testing.assert_allclose(trained.update.values, fedavg.update.values, rtol=1e-5, atol=1e-6)
    assert trained.train_loss == pytest.approx(fedavg.train_loss, rel=1e-6)
    other = APFL.train(job_of(norm=norm, mixing_weight=0.25, **more))
    assert trained.update.values.tobytes() == other.update.values.tobytes(), "whatever the weight"
    assert (trained.flops, trained.steps) == (2 * fedavg.flops, fedavg.steps)


def test_without_weight_the_own_model_stays_where_it_is():
    mine = other_model()
    trained = APFL.train(job_of(own=mine, mixing_weight=0.0))
    for name, tensor in mine.items():
        assert trained.state.own[name].tobytes() == tensor.tobytes()


@pytest.mark.integration
@pytest.mark.parametrize("rate", [0.1, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_weight_stays_a_share_and_is_remembered(rate, seed):
    mine = {name: 5 * tensor for name, tensor in other_model(seed).items()}
    first = APFL.train(job_of(own=mine, mixing_weight=0.5, learning_rate=rate, local_epochs=1))
    assert 0 <= first.state.memory["mixing_weight"] <= 1
    kept = {"mixing_weight": 0.25, "other": 1}
    second = APFL.train(job_of(own=mine, memory=kept, mixing_weight=0.9, learning_rate=0.0001, number=4))
    assert second.state.memory["mixing_weight"] == pytest.approx(0.25, abs=0.05)
    assert second.state.memory["other"] == 1


def test_a_diverging_mixture_has_failed():
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        APFL.train(job_of(own={n: 1e30 * t for n, t in other_model().items()}, mixing_weight=0.5))
