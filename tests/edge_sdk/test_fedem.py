"""FedEM: responsibilities and weights of the mixture follow the paper's steps, and devices of each kind find theirs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import httpx
import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines import Graphs
from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.errors import BadArgument, WrongSettings
from edge_sdk.join import join
from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.fedem import FEDEM, responsibilities
from edge_sdk.protocol import checkpoint
from edge_sdk.protocol.bundle import decode, encode
from edge_sdk.protocol.flops import forward_flops, training_flops
from edge_sdk.protocol.manifest import Manifest, initial_values
from edge_sdk.protocol.masks import pack, unpack_whole
from edge_sdk.protocol.messages import Assignment, CreateFederation, FederationSettings
from edge_sdk.protocol.mixture import WEIGHTS, mixture_of, name_in
from edge_sdk.publish import publish
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.simulation import in_process
from edge_sdk.simulation.simulate import simulate
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.mixture import Mixture
from sparrow.coordinator.main import create_app
from sparrow.coordinator.methods.fedem import FEDEM as SERVER
from sparrow.coordinator.settings import Settings
from sparrow.export.mixture import mix

SAMPLES, CLASSES = 20, 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, CLASSES))


def task_of(model):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % CLASSES
    arrays = Arrays(inputs, targets)
    return classification("t", model, arrays, arrays, None, batch_size=8)


@pytest.fixture(scope="module")
def graphs():
    """The published model's own."""
    task = task_of(network())
    return compile_step(task.model, task.loss, *map(torch.as_tensor, next(iter(task.train))))


def components_of(manifest, components):
    """Other weights for each component."""
    chance = np.random.default_rng(3)
    return {
        spec.name: chance.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        if "running" in spec.name
        else chance.normal(scale=0.6, size=spec.shape).astype(np.float32)
        for spec in mixture_of(manifest, components).shared
    }


def job_of(components=2, *, weights=None, engine="torch", graphs=None, tensors=None, received=True, **given):
    """A round over random samples; weights: of a device that has a personal model."""
    single = describe_whole(network(), torch.zeros(2, 6), task="t")
    manifest = mixture_of(single, components)
    tensors = tensors or components_of(single, components)
    task = task_of(network())
    if engine == "torch":
        task = FEDEM.task_of(task, manifest, 0)
        found = TorchEngine(task, manifest)
    else:
        mixed = Graphs(*(mix(each, single, components) for each in (graphs.step, graphs.evaluation)))
        found = OnnxEngine(Network(manifest, Sessions(mixed)), classification=True)
    settings = {"local_epochs": 1, "early_stopping": "off", "learning_rate": 0.1, **given}
    assignment = Assignment(
        assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=FederationSettings(**settings)
    )
    personal = None if weights is None else {**tensors, WEIGHTS: np.asarray(weights, np.float32)}
    payload = decode(encode(manifest, pack(manifest, tensors, None), None), manifest) if received else None
    return Job(assignment, manifest, task, found, DeviceState(personal), payload, federation="f", device="pi")


def modules_of(tensors, components):
    """The components as modules of their own, in evaluation mode."""
    modules = []
    for each in range(components):
        module = network()
        state = {name: torch.tensor(tensors[name_in(each, name)]) for name in module.state_dict() if "tracked" not in name}
        module.load_state_dict(state, strict=False)
        modules.append(module.eval())
    return modules


def data():
    return tuple(torch.cat([torch.as_tensor(np.asarray(batch[part])) for batch in task_of(None).train]) for part in (0, 1))


def by_hand(tensors, weights):
    """r [N, M] of Algorithm 1, in double precision."""
    x, y = data()
    losses = torch.stack([F.cross_entropy(each(x), y, reduction="none") for each in modules_of(tensors, len(weights))], 1)
    joint = torch.tensor(weights) * torch.exp(-losses.detach().double())
    return (joint / joint.sum(1, keepdim=True)).numpy()


# --- the round ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_the_weights_are_the_mean_of_the_papers_responsibilities(engine, graphs):
    job = job_of(3, weights=[0.2, 0.5, 0.3], engine=engine, graphs=graphs, local_epochs=2)
    trained = FEDEM.train(job)
    found, before = trained.state.personal[WEIGHTS], np.float32([0.2, 0.5, 0.3])
    np.testing.assert_allclose(found, by_hand(job.state.personal, before.astype(float)).mean(0), rtol=1e-5)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert trained.counts == {"mixture_moved": 1, "components_used": int((found >= 1 / 6).sum())}


def test_the_e_step_of_likelihoods_beyond_float32():
    found = responsibilities(np.float32([[-1000, -1001], [0, -2000]]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(found, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], [1, 0]], atol=1e-12)
    assert responsibilities(np.float32([[-1, -1]]), np.array([1.0, 0.0])).tolist() == [[1, pytest.approx(0, abs=1e-29)]]


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"}])
def test_components_train_on_samples_weighted_as_received(engine, more, graphs):
    """In two epochs of one batch: the responsibilities of the second are still those of the components received."""
    job = job_of(2, weights=[0.3, 0.7], engine=engine, graphs=graphs, local_epochs=2, **more)
    x, y = data()
    whole = [(x.numpy(), y.numpy())]
    trained = FEDEM.train(replace(job, task=replace(job.task, train=whole)))
    shares = torch.tensor(by_hand(job.state.personal, [0.3, 0.7]))
    sent = unpack_whole(job.manifest, trained.update.values)
    for each, module in enumerate(modules_of(job.state.personal, 2)):
        module.train()
        kind = torch.optim.Adam if "optimizer" in more else torch.optim.SGD
        rules = {name: value for name, value in more.items() if name != "optimizer"}
        optimiser = kind(module.parameters(), lr=0.1, **rules)
        for _ in range(2):
            optimiser.zero_grad()
            losses = F.cross_entropy(module(x), y, reduction="none")
            (shares[:, each] * losses).mean().backward()
            optimiser.step()
        for name, tensor in module.state_dict().items():
            # Batch norm cancels the bias before it, whose gradient is rounding, which Adam enlarges.
            if "tracked" not in name and name not in ("0.bias", "1.running_mean"):
                np.testing.assert_allclose(sent[name_in(each, name)], tensor.numpy(), rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_mixture_of_one_is_fedavg(engine, graphs):
    single = describe_whole(network(), torch.zeros(2, 6), task="t")
    tensors = components_of(single, 1)
    job = job_of(1, tensors=tensors, engine=engine, graphs=graphs, local_epochs=3, momentum=0.9)
    task = task_of(network())
    plain = {name.removeprefix("components.0."): each for name, each in tensors.items()}
    payload = decode(encode(single, pack(single, plain, None), None), single)
    alone = FEDAVG.train(replace(job, manifest=single, task=task, engine=TorchEngine(task, single), received=payload))
    trained = FEDEM.train(job)
    np.testing.assert_allclose(trained.update.values, alone.update.values, rtol=1e-3, atol=1e-4)
    assert trained.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
    assert trained.state.personal[WEIGHTS].tolist() == [1.0]
    assert trained.counts["mixture_moved"] == 0
    assert (trained.steps, trained.num_examples) == (alone.steps, alone.num_examples)


def test_weights_move_to_the_component_that_fits():
    job = job_of(2)
    right = modules_of(components_of(describe_whole(network(), torch.zeros(2, 6), task="t"), 2), 2)[1]
    x, _ = data()
    labels = right(x).argmax(1)
    task = replace(job.task, train=[(x.numpy(), labels.numpy())])
    weights = [FEDEM.train(replace(job, task=task)).state.personal[WEIGHTS][1]]
    for _ in range(3):
        state = DeviceState({**job_of(2, weights=[1 - weights[-1], weights[-1]]).state.personal})
        weights.append(FEDEM.train(replace(job_of(2), task=task, state=state)).state.personal[WEIGHTS][1])
    assert 0.5 < weights[0] < weights[1] < weights[2] < weights[3] < 1


def test_a_rounds_flops_are_those_of_every_component_and_the_e_step():
    single = describe_whole(network(), torch.zeros(2, 6), task="t")
    samples = 2 * SAMPLES
    trained = FEDEM.train(job_of(3, local_epochs=2))
    assert trained.flops == 3 * (training_flops(single, samples) + samples * forward_flops(single))


def test_nothing_of_the_weights_is_sent():
    job = job_of(3, weights=[0.2, 0.5, 0.3])
    trained = FEDEM.train(job)
    assert trained.update.values.size == 3 * sum(p.numel() for p in network().parameters()) + 3 * 18
    assert WEIGHTS not in {spec.name for spec in job.manifest.shared}


def test_a_round_that_diverges_says_what_to_do():
    with pytest.raises(TrainingDiverged, match="lower the learning rate of 1e\\+20 or set a clip"):
        FEDEM.train(job_of(2, learning_rate=1e20, local_epochs=9))


# --- judging and adapting -----------------------------------------------------------------------------------------


def test_a_device_without_a_model_finds_its_weights_and_leaves_the_components():
    job = job_of(3)
    state = FEDEM.adapt(job)
    weights = np.full(3, 1 / 3)
    for _ in range(200):
        weights = by_hand(components_of(describe_whole(network(), torch.zeros(2, 6), task="t"), 3), weights).mean(0)
    np.testing.assert_allclose(state.personal[WEIGHTS], weights, atol=5e-3)
    for name, tensor in components_of(describe_whole(network(), torch.zeros(2, 6), task="t"), 3).items():
        assert np.array_equal(state.personal[name], tensor)
    tuned = FEDEM.adapt(job_of(3, finetune_epochs=1))
    assert not np.array_equal(tuned.personal["components.0.0.weight"], state.personal["components.0.0.weight"])


def test_new_devices_are_judged_under_weights_that_fit_their_data():
    judged = FEDEM.evaluate(job_of(3))
    assert judged.personal is None
    uniform = job_of(3)
    uniform.engine.load({**components_of(describe_whole(network(), torch.zeros(2, 6), task="t"), 3)})
    assert judged.validation.loss < uniform.engine.evaluate(uniform.task.validation).loss
    known = FEDEM.evaluate(job_of(3, weights=[1, 0, 0]))
    assert known.personal == known.global_model, "the same components, under the weights that the device has"


# --- what the federation's model is made of -----------------------------------------------------------------------


def test_both_engines_and_the_forward_graph_answer_as_the_formula(graphs):
    weights = [0.1, 0.6, 0.3]
    job, other = (job_of(3, weights=weights, engine=engine, graphs=graphs) for engine in ("torch", "onnx"))
    x, y = data()
    wanted = sum(
        weight * each(x).softmax(1) for weight, each in zip(weights, modules_of(job.state.personal, 3), strict=True)
    )
    for engine in (job.engine, other.engine):
        engine.load(job.state.personal)
        np.testing.assert_allclose(np.exp(engine.scores(job.task.train)[0]), wanted.detach(), rtol=1e-4, atol=1e-6)
        assert engine.evaluate(job.task.train).loss == pytest.approx(F.nll_loss(wanted.log(), y).item(), rel=1e-5)


def test_without_responsibilities_gradients_are_of_the_mixtures_own_loss(graphs):
    found = []
    for kind in ("torch", "onnx"):
        job = job_of(3, weights=[0.2, 0.5, 0.3], engine=kind, graphs=graphs)
        job.engine.load(job.state.personal)
        gradients = {}
        batch = next(iter(job.engine.epochs(job.task.train, 0)))
        names = [spec.name for spec in job.manifest.tensors if spec.trainable]
        loss, _ = job.engine.differentiate([batch], names, lambda name, each: gradients.__setitem__(name, np.array(each)))
        found.append((loss, gradients))
    (loss, gradients), (other, same) = found
    assert other == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == same.keys()
    for name, each in gradients.items():
        np.testing.assert_allclose(same[name], each, rtol=1e-3, atol=1e-6, err_msg=name)


def test_an_optional_mixture_is_told_from_another_model():
    job = job_of(2)
    engine = TorchEngine(task_of(network()), job.manifest)
    with pytest.raises(Exception, match="is no mixture"):
        engine.likelihoods(job.task.train)
