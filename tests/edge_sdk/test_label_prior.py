"""Logit adjustment: a device's class frequencies are in its outputs, and in nothing that it sends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.device.label_prior import LabelPrior
from edge_sdk.device.trainable import CannotTrain
from edge_sdk.methods import DeviceState, Job, Update, load_method
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.checks import check_adjustment
from sparrow.coordinator.methods import load_method as load_server_half
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.masks import NeuronDraw, draw_neurons, pack, unpack_whole
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

LABELS = torch.tensor([0] * 15 + [1] * 5)


def job_of(strength=1.0, *, last=None, method="fedavg", work=None, personal=None, labels=LABELS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3), *([last] if last else []))
    inputs = torch.randn(20, 6)
    manifest = describe(model, inputs[:2], task="t")
    arrays = Arrays(inputs, labels)
    task = classification("t", model, arrays, arrays, None, batch_size=20)
    draw = None if work is None else NeuronDraw(**work)
    mask = None if draw is None else draw_neurons(manifest, draw)
    body = encode(manifest, pack(manifest, get_tensors(model, manifest), mask), mask, draw=draw)
    settings = FederationSettings(
        method=method, local_epochs=1, early_stopping="off", learning_rate=0.1, logit_adjustment=strength
    )
    assignment = Assignment(assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=settings, work=work)
    received = decode(body, manifest)
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        DeviceState(personal),
        received,
        federation="f",
        device="pi",
    )


def prior_of(job):
    return LabelPrior.of(job.task, job.manifest, job.assignment.settings)


def test_outputs_are_moved_by_the_logarithms_of_the_class_frequencies():
    job = job_of(strength=2.0)
    prior = prior_of(job)
    shares = np.array([15.5, 5.5, 0.5]) / 21.5
    np.testing.assert_allclose(prior.offset, 2.0 * (np.log(shares) + np.log(3)), rtol=1e-6)
    plain, _ = job.engine.scores(job.task.train)
    adjusted = prior.received(job)
    job.engine.load(unpack_whole(job.manifest, adjusted.received.values))
    moved, _ = job.engine.scores(job.task.train)
    np.testing.assert_allclose(moved - plain, np.tile(prior.offset, (20, 1)), atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedspu"])
def test_a_step_has_the_gradient_of_the_adjusted_loss_and_the_update_no_prior(method):
    work = {"key": "a" * 32, "ratio": 0.5} if method == "fedspu" else None
    job = job_of(method=method, work=work)
    if method == "fedspu":
        job = dataclasses.replace(job, state=DeviceState(get_tensors(job.engine.model, job.manifest)))
    prior, before = prior_of(job), get_tensors(job.engine.model, job.manifest)["2.bias"]
    trained = load_method(method).train(prior.received(job))
    sent = prior.sent(job, trained.update)
    scores = torch.from_numpy(job_of().engine.scores(job.task.train)[0]) + torch.from_numpy(prior.offset)
    slope = torch.softmax(scores, dim=1) - nn.functional.one_hot(LABELS, 3)
    start = len(sent.values) - 3  # the output's bias is the last of the values, and always whole
    np.testing.assert_allclose(sent.values[start:], before - 0.1 * slope.mean(dim=0).numpy(), atol=1e-6)
    if method == "fedspu":
        np.testing.assert_allclose(trained.state.personal["2.bias"], sent.values[start:] + prior.offset, atol=1e-6)


def test_a_class_that_a_device_lacks_is_hardly_unlearnt():
    fell = []
    for strength in (0.0, 1.0):
        job = job_of(strength, labels=torch.zeros(20, dtype=torch.int64))
        prior, before = prior_of(job), job.received.values[-3:]
        trained = load_method("fedavg").train(job if prior is None else prior.received(job))
        update = trained.update if prior is None else prior.sent(job, trained.update)
        fell.append(float((before - update.values[-3:])[1:].sum()))
    assert fell[1] < fell[0] / 5


def test_what_an_update_started_from_has_no_prior_either():
    job = job_of()
    prior = prior_of(job)
    tensors = get_tensors(job.engine.model, job.manifest)
    update = Update(pack(job.manifest, tensors, None), base=tensors)
    moved = prior.sent(job, update)
    np.testing.assert_array_equal(moved.base["2.bias"], tensors["2.bias"] - prior.offset)
    np.testing.assert_array_equal(moved.base["0.bias"], tensors["0.bias"])


def test_a_model_whose_outputs_do_not_follow_the_bias_is_refused():
    prior_of(job_of()).check(job_of().engine, job_of().task.train)
    for last, fits in ((nn.LogSoftmax(dim=1), True), (nn.Tanh(), False)):
        job = job_of(last=last)
        before = job.engine.read()
        if fits:
            prior_of(job).check(job.engine, job.task.train)
        else:
            with pytest.raises(CannotTrain, match=r"they do not follow 2\.bias"):
                prior_of(job).check(job.engine, job.task.train)
        for name, tensor in job.engine.read().items():
            np.testing.assert_array_equal(tensor, before[name])


def test_methods_and_models_without_a_place_for_it_are_refused_by_the_coordinator():
    job = job_of()
    settings = job.assignment.settings
    for method in ("fedavg", "fedspu", "fjord", "hermes"):
        check_adjustment(load_server_half(method), job.manifest, settings)
    with pytest.raises(BadContent, match=r"\bfedsgc\b"):
        check_adjustment(load_server_half("fedsgc"), job.manifest, settings.model_copy(update={"method": "fedsgc"}))
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3, bias=False))
    manifest = describe(model, torch.randn(2, 6), task="t")
    with pytest.raises(BadContent, match="no trained bias with a value per class"):
        check_adjustment(load_server_half("fedavg"), manifest, settings)
    assert LabelPrior.of(job.task, job.manifest, settings.model_copy(update={"logit_adjustment": 0.0})) is None
    regression = dataclasses.replace(job.task, classification=False)
    with pytest.raises(CannotTrain, match="needs a classification model"):
        LabelPrior.of(regression, job.manifest, settings)
