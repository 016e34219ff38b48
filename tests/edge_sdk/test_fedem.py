"""FedEM: responsibilities and weights of the mixture follow the paper's steps, and devices of each kind find theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.join import JoinOptions, join
from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.fedem import FEDEM, responsibilities
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.mixture import Mixture
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.graphs import Graphs
from sparrow.graphs.mixture import mix
from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import pack, unpack_whole
from sparrow.protocol.messages import Assignment
from sparrow.protocol.mixture import WEIGHTS, mixture_of, name_in
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process

SAMPLES = 20
DIGITS = load_builtin("digits")
SINGLE = DIGITS.manifest


def task_of(model):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.arange(SAMPLES) % 10
    arrays = Arrays(inputs, targets)
    return classification("digits", model, arrays, arrays, None, batch_size=8)


def components_of(components):
    """Other weights for each component."""
    chance = np.random.default_rng(3)
    return {
        spec.name: chance.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        if "running" in spec.name
        else chance.normal(scale=0.2, size=spec.shape).astype(np.float32)
        for spec in mixture_of(SINGLE, components).shared
    }


def job_of(components=2, *, weights=None, engine="torch", **given):
    """A round over random samples; weights: of a device that has a personal model."""
    manifest, tensors = mixture_of(SINGLE, components), components_of(components)
    task = task_of(DigitsNet())
    if engine == "torch":
        task = FEDEM.task_of(task, manifest, 0)
        found = TorchEngine(task, manifest)
    else:
        mixed = Graphs(*(mix(DIGITS.graphs[name], SINGLE, components) for name in ("step", "evaluation")))
        found = OnnxEngine(Network(manifest, Sessions(mixed)), classification=True)
    settings = {"local_epochs": 1, "early_stopping": "off", "learning_rate": 0.1, **given}
    assignment = Assignment(
        assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=FederationSettings(**settings)
    )
    personal = None if weights is None else {**tensors, WEIGHTS: np.asarray(weights, np.float32)}
    payload = decode(encode(manifest, pack(manifest, tensors, None), None), manifest)
    return Job(assignment, manifest, task, found, DeviceState(personal), payload, federation="f", device="pi")


def modules_of(tensors, components):
    """The components as modules of their own, in evaluation mode."""
    modules = []
    for each in range(components):
        module = DigitsNet()
        module.load_state_dict({spec.name: torch.tensor(tensors[name_in(each, spec.name)]) for spec in SINGLE.shared})
        modules.append(module.eval())
    return modules


def data():
    return tuple(
        torch.cat([torch.as_tensor(np.asarray(batch[part])) for batch in task_of(None).train]) for part in (0, 1)
    )


def losses_of(tensors, components):
    """The loss of each sample in each component, double [N, M]."""
    x, y = data()
    modules = modules_of(tensors, components)
    return torch.stack([F.cross_entropy(each(x), y, reduction="none") for each in modules], 1).detach().double()


def by_hand(losses, weights):
    """r [N, M] of Algorithm 1."""
    joint = torch.tensor(weights) * torch.exp(-losses)
    return (joint / joint.sum(1, keepdim=True)).numpy()


# --- the round ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_the_weights_are_the_mean_of_the_papers_responsibilities(engine):
    job = job_of(3, weights=[0.2, 0.5, 0.3], engine=engine, local_epochs=2)
    trained = FEDEM.train(job)
    found, before = trained.state.personal[WEIGHTS], np.float32([0.2, 0.5, 0.3])
    np.testing.assert_allclose(
        found, by_hand(losses_of(job.state.personal, 3), before.astype(float)).mean(0), rtol=1e-5
    )
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert trained.counts == {"mixture_moved": 1, "components_used": int((found >= 1 / 6).sum())}


def test_the_e_step_of_likelihoods_beyond_float32():
    found = responsibilities(np.float32([[-1000, -1001], [0, -2000]]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(found, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], [1, 0]], atol=1e-12)
    assert responsibilities(np.float32([[-1, -1]]), np.array([1.0, 0.0])).tolist() == [[1, pytest.approx(0, abs=1e-29)]]


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"}])
def test_components_train_on_samples_weighted_as_received(engine, more):
    """In two epochs of one batch: the responsibilities of the second are still those of the components received."""
    job = job_of(2, weights=[0.3, 0.7], engine=engine, local_epochs=2, **more)
    x, y = data()
    whole = [(x.numpy(), y.numpy())]
    trained = FEDEM.train(replace(job, task=replace(job.task, train=whole)))
    shares = torch.tensor(by_hand(losses_of(job.state.personal, 2), [0.3, 0.7]))
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
        for name in ("fc1.weight", "fc1.bias", "out.weight", "out.bias"):  # behind it batch norm cancels biases
            np.testing.assert_allclose(
                sent[name_in(each, name)], module.get_parameter(name).detach(), rtol=2e-3, atol=2e-4, err_msg=name
            )


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_mixture_of_one_is_fedavg(engine):
    job, task = job_of(1, engine=engine, local_epochs=3), task_of(DigitsNet())
    plain = {name.removeprefix("components.0."): each for name, each in components_of(1).items()}
    payload = decode(encode(SINGLE, pack(SINGLE, plain, None), None), SINGLE)
    alone = FEDAVG.train(replace(job, manifest=SINGLE, task=task, engine=TorchEngine(task, SINGLE), received=payload))
    trained = FEDEM.train(job)
    np.testing.assert_allclose(trained.update.values, alone.update.values, rtol=1e-3, atol=1e-4)
    assert trained.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
    assert trained.state.personal[WEIGHTS].tolist() == [1.0]
    assert trained.counts["mixture_moved"] == 0
    assert (trained.steps, trained.num_examples) == (alone.steps, alone.num_examples)


def test_weights_move_to_the_component_that_fits():
    job = job_of(2)
    right = modules_of(components_of(2), 2)[1]
    x, _ = data()
    labels = right(x).argmax(1)
    task = replace(job.task, train=[(x.numpy(), labels.numpy())])
    weights = [FEDEM.train(replace(job, task=task)).state.personal[WEIGHTS][1]]
    for _ in range(3):
        state = DeviceState({**job_of(2, weights=[1 - weights[-1], weights[-1]]).state.personal})
        weights.append(FEDEM.train(replace(job_of(2), task=task, state=state)).state.personal[WEIGHTS][1])
    assert 0.5 < weights[0] < weights[1] < weights[2] < weights[3] < 1


def test_a_rounds_flops_are_those_of_every_component_and_the_e_step():
    samples, trained = 2 * SAMPLES, FEDEM.train(job_of(3, local_epochs=2))
    assert trained.flops == 3 * (training_flops(SINGLE, samples) + samples * forward_flops(SINGLE))


def test_nothing_of_the_weights_is_sent():
    job = job_of(3, weights=[0.2, 0.5, 0.3])
    trained = FEDEM.train(job)
    assert trained.update.values.size == 3 * SINGLE.shared_values
    assert WEIGHTS not in {spec.name for spec in job.manifest.shared}


def test_a_round_that_diverges_says_what_to_do():
    with pytest.raises(TrainingDiverged, match="lower the learning rate of 100"):
        FEDEM.train(job_of(2, learning_rate=100, local_epochs=9, momentum=0.9))


# --- judging and adapting -----------------------------------------------------------------------------------------


def test_a_device_without_a_model_finds_its_weights_and_leaves_the_components():
    state = FEDEM.adapt(job_of(3))
    losses, weights = losses_of(components_of(3), 3), np.full(3, 1 / 3)
    for _ in range(100):
        weights = by_hand(losses, weights).mean(0)
    np.testing.assert_allclose(state.personal[WEIGHTS], weights, atol=1e-2)
    for name, tensor in components_of(3).items():
        assert np.array_equal(state.personal[name], tensor)
    tuned, name = FEDEM.adapt(job_of(3, finetune_epochs=1)), "components.0.out.weight"
    assert not np.array_equal(tuned.personal[name], state.personal[name])
    assert np.array_equal(tuned.personal[WEIGHTS], state.personal[WEIGHTS])


def test_new_devices_are_judged_under_weights_that_fit_their_data():
    judged = FEDEM.evaluate(job_of(3))
    assert judged.personal is None
    uniform = job_of(3)
    uniform.engine.load(components_of(3))
    assert judged.validation.loss < uniform.engine.evaluate(uniform.task.validation).loss
    known = FEDEM.evaluate(job_of(3, weights=[1, 0, 0]))
    assert known.personal == known.global_model, "the same components, under the weights that the device has"


# --- what the federation's model is made of -----------------------------------------------------------------------


def test_both_engines_and_the_forward_graph_answer_as_the_formula():
    weights = [0.1, 0.6, 0.3]
    job, other = (job_of(3, weights=weights, engine=engine) for engine in ("torch", "onnx"))
    x, y = data()
    wanted = sum(
        weight * each(x).softmax(1) for weight, each in zip(weights, modules_of(job.state.personal, 3), strict=True)
    )
    for engine in (job.engine, other.engine):
        engine.load(job.state.personal)
        np.testing.assert_allclose(np.exp(engine.scores(job.task.train)[0]), wanted.detach(), rtol=1e-4, atol=1e-6)
        assert engine.evaluate(job.task.train).loss == pytest.approx(F.nll_loss(wanted.log(), y).item(), rel=1e-5)


def test_without_responsibilities_gradients_are_of_the_mixtures_own_loss():
    found = []
    for kind in ("torch", "onnx"):
        job = job_of(3, weights=[0.2, 0.5, 0.3], engine=kind)
        job.engine.load(job.state.personal)
        gradients = {}
        batch = next(iter(job.engine.epochs(job.task.train, 0)))
        names = [spec.name for spec in job.manifest.tensors if spec.trainable]
        loss, _ = job.engine.differentiate([batch], names, gradients.__setitem__)
        found.append((loss, gradients))
    (loss, gradients), (other, same) = found
    assert other == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == same.keys()
    for name, each in gradients.items():
        np.testing.assert_allclose(same[name], each, rtol=1e-3, atol=1e-6, err_msg=name)


def test_a_model_that_is_no_mixture_has_no_likelihoods():
    job = job_of(2)
    engine = TorchEngine(task_of(DigitsNet()), job.manifest)
    with pytest.raises(ManifestError, match="a DigitsNet is not a mixture"):
        engine.likelihoods(job.task.train)


# --- whole federations --------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


def opposites(index):
    """Devices of even numbers say 1 where the others say 0."""
    torch.manual_seed(0)
    model = Small()
    generator = torch.Generator().manual_seed(10 + index)
    x = torch.randn(96, 4, generator=generator)
    y = ((x[:, 0] + x[:, 1] > 0).long() + index) % 2
    parts = [(x[at : at + 16], y[at : at + 16]) for at in range(0, 96, 16)]
    return Task("opposites", model, F.cross_entropy, parts[:4], parts[4:5], parts[5:])


@pytest.mark.integration
@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_devices_of_opposite_labels_end_at_different_components(tmp_path, compiling, engine):
    """From published weights, so that the components begin apart by noise alone. FedAvg can only guess."""
    settings = {"rounds": 20, "min_devices": 2, "learning_rate": 0.3, "early_stopping": "off", "draws": "seed"}
    own = {"fedem": {"method_settings": {"components": 2}}, "fedavg": {}}
    app, results, records = create_app(Settings(data_dir=tmp_path / "data", default_task="")), {}, {}
    with in_process.running(app) as client:
        for method, more in own.items():
            publish(in_process.ADDRESS, method, opposites(0), client=client, method=method, **settings, **more)
            with ThreadPoolExecutor(2) as pool:
                results[method] = list(pool.map(partial(take_part, client, method, engine, tmp_path), range(2)))
            records[method] = client.get(f"/v1/federations/{method}/rounds").json()
        manifest = Manifest.model_validate_json(client.get("/v1/federations/fedem/manifest").content)
        assert "mixture_weights is kept on the devices" in client.get("/v1/federations/fedem/model").text
    kept = [checkpoint.load((tmp_path / f"fedem-{index}" / "best.safetensors").read_bytes())[0] for index in range(2)]
    first, second = (each[WEIGHTS] for each in kept)
    assert {int(first.argmax()), int(second.argmax())} == {0, 1}
    assert min(first.max(), second.max()) > 0.9
    assert [result.accuracy_after >= 0.85 for result in results["fedem"]] == [True, True]
    assert records["fedavg"][-1]["accuracy_global"] < 0.75
    assert sum(record["counts"]["mixture_moved"] for record in records["fedem"]) > 2
    values = sum(each.numel() for each in Small().parameters())
    for record, plain in zip(records["fedem"], records["fedavg"], strict=True):
        for way in ("parts_up", "parts_down"):
            assert (record[way]["values"], plain[way]["values"]) == (2 * 4 * 2 * values, 2 * 4 * values)
    for tensors, result in zip(kept, results["fedem"], strict=True):
        mixture, x = Mixture(Small(), 2), torch.randn(7, 4)
        mixture.load_state_dict({spec.name: torch.tensor(tensors[spec.name]) for spec in manifest.kept})
        (found,) = onnxruntime.InferenceSession(result.export.path).run(None, {"input": x.numpy()})
        np.testing.assert_allclose(found, mixture(x).detach(), rtol=1e-3, atol=1e-4)
        assert result.export.max_difference < 1e-4


def take_part(client, method, engine, folder, index):
    return join(
        in_process.ADDRESS, opposites(index), client=client, federation=method, name=f"device-{index}",
        options=JoinOptions(engine=engine, budget=1.0, patience_seconds=60), quiet=True,
        state_dir=folder / f"{method}-{index}", export=folder / f"{method}-{index}.onnx",
    )  # fmt: skip
