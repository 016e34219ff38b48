"""pFedMe and Per-FedAvg: their steps by hand, on losses whose minima and Hessians are known, with both engines."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import Task
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.rehearsal import TorchRehearsal
from sparrow.coordinator.methods import GlobalModel, Situation
from sparrow.coordinator.methods import load_method as load_server
from sparrow.coordinator.sums.averages import MaskedSums
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

PFEDME, PERFEDAVG, FEDAVG = (load_method(name) for name in ("pfedme", "perfedavg", "fedavg"))
OWN = {
    "pfedme": {"proximal_weight": 15.0, "inner_steps": 5, "outer_rate": 0.01},
    "perfedavg": {"hessian": "first_order", "inner_rate": 0.05, "difference": 0.01, "adaptation_steps": 1},
    "fedavg": {},
}
MODELS = {
    "line": lambda: nn.Linear(3, 1, bias=False),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1, bias=False)),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1, bias=False)),
}
ENGINES = ["torch", pytest.param("onnx", marks=pytest.mark.integration)]  # a model compiles for seconds


def batches_of(count, seed=0, size=8):
    """Batches of 3 inputs and one target each, in a fixed order."""
    chance = np.random.default_rng(seed)
    return [
        (chance.normal(1.0, 1.0, (size, 3)).astype(np.float32), chance.normal(size=(size, 1)).astype(np.float32))
        for _ in range(count)
    ]


@functools.cache
def graphs(kind):
    inputs, targets = (torch.from_numpy(each) for each in batches_of(1)[0])
    return compile_step(MODELS[kind](), F.mse_loss, inputs, targets)


def job_of(
    method, engine="torch", kind="line", *, batches=None, own=None, number=1, personal=None, held_out=None, **given
):
    """A round over a few batches, of a model whose first weights follow from a seed."""
    torch.manual_seed(3)
    model, batches = MODELS[kind](), batches or batches_of(1)
    task = Task("t", model, F.mse_loss, batches, held_out or batches_of(1, seed=9), classification=False)
    manifest = describe_whole(model, torch.from_numpy(batches[0][0]), task="t")
    torch_engine = TorchEngine(task, manifest)
    body = encode(manifest, pack(manifest, torch_engine.read(), None), None)
    trains = torch_engine
    if engine == "onnx":
        trains = OnnxEngine(Network(manifest, Sessions(graphs(kind))), classification=False)
    settings = FederationSettings(
        **{
            "method": method,
            "local_steps": 1,
            "early_stopping": "off",
            "personal_model": "last",
            "learning_rate": 0.02,
            "method_settings": {**OWN[method], **(own or {})},
            **given,
        }
    )
    assignment = Assignment(assignment_id="a", kind="train", round=number, deadline_seconds=9, settings=settings)
    received = decode(body, manifest)
    return Job(assignment, manifest, task, trains, DeviceState(personal), received, federation="f", device="pi")


def gradient(weights, batch):
    """∇f(w) of f(w) = mean (x·w - y)², float64 [3]; ``weights`` [3]."""
    inputs, targets = (np.asarray(each, np.float64) for each in batch)
    return 2 * inputs.T @ (inputs @ weights - targets[:, 0]) / len(inputs)


def hessian(batch):
    inputs = np.asarray(batch[0], np.float64)
    return 2 * inputs.T @ inputs / len(inputs)


def start_of(job):
    return job.received.values[-3:].astype(np.float64)  # the weights, behind a norm's statistics


def weights_of(tensors):
    (found,) = (each for name, each in tensors.items() if name.endswith("weight"))
    return found.reshape(-1)


# --- pFedMe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight", [2.0, 15.0])
def test_with_enough_inner_steps_the_local_model_follows_the_moreau_envelope(engine, weight):
    """Its gradient is λ(w - prox(w)), and prox of a quadratic solves (H + λ)θ = λw - ∇f(0)."""
    (batch,) = batches = batches_of(1)
    own = {"proximal_weight": weight, "inner_steps": 400, "outer_rate": 0.03}
    job = job_of("pfedme", engine, batches=batches, own=own)
    w, trained = start_of(job), PFEDME.train(job)
    nearest = np.linalg.solve(hessian(batch) + weight * np.eye(3), weight * w - gradient(np.zeros(3), batch))
    np.testing.assert_allclose(weights_of(trained.state.personal), nearest, atol=1e-5)
    np.testing.assert_allclose((w - trained.update.values) / 0.03, weight * (w - nearest), atol=2e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_step_moves_the_local_model_by_its_share_of_the_way_exactly(engine):
    job = job_of("pfedme", engine)
    trained, w = PFEDME.train(job), job.received.values
    personal = weights_of(trained.state.personal)
    share = np.float32(0.01 * 15.0)
    assert trained.update.values.tobytes() == (w - share * (w - personal)).tobytes()
    assert np.abs(personal - w).min() > 0
    assert np.abs(trained.update.values - personal).min() > 0, "the personal model is θ, and not w"


@pytest.mark.parametrize("engine", ENGINES)
def test_pfedme_by_hand_over_several_batches(engine):
    """θ goes on from batch to batch; both rates decay with the rounds."""
    batches, steps, inner, weight = batches_of(3), 5, 4, 6.0
    own = {"proximal_weight": weight, "inner_steps": inner, "outer_rate": 0.05}
    job = job_of("pfedme", engine, batches=batches, own=own, number=3, local_steps=steps, learning_rate_decay=0.8)
    rate, share, losses = 0.02 * 0.8**2, 0.05 * 0.8**2 * weight, []
    w = theta = start_of(job)
    for step in range(steps):
        batch = batches[step % 3]
        losses.append(float(np.square(batch[0] @ theta - batch[1][:, 0]).mean()))
        for _ in range(inner):
            theta = theta - rate * (gradient(theta, batch) + weight * (theta - w))
        w = w - share * (w - theta)
    trained = PFEDME.train(job)
    np.testing.assert_allclose(trained.update.values, w, atol=1e-5)
    np.testing.assert_allclose(weights_of(trained.state.personal), theta, atol=1e-5)
    assert trained.train_loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (trained.steps, trained.counts) == (steps, {"pulled_steps": steps * inner, "envelope_steps": steps})
    assert trained.flops == training_flops(job.manifest, steps * inner * 8)


def test_a_strong_pull_keeps_the_personal_model_where_it_is():
    """At a rate of 1/λ each step is θ = w - ∇f(θ)/λ."""
    distances = []
    for weight in (10.0, 1e2, 1e4):
        own = {"proximal_weight": weight, "inner_steps": 30, "outer_rate": 0.1 / weight}
        job = job_of("pfedme", own=own, learning_rate=1 / weight)
        distances.append(np.abs(weights_of(PFEDME.train(job).state.personal) - start_of(job)).max())
    assert distances[0] > 0.05
    assert distances[2] < 1e-3
    assert distances[1] / distances[2] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_move_once_a_batch_and_go_up(engine):
    batches = batches_of(2)
    trained = PFEDME.train(job_of("pfedme", engine, "norm", batches=batches, local_steps=2))
    wanted = np.zeros(3)
    for inputs, _ in batches:
        wanted = 0.9 * wanted + 0.1 * inputs.mean(axis=0)
    np.testing.assert_allclose(trained.update.values[:3], wanted, atol=1e-6)
    np.testing.assert_array_equal(trained.state.personal["0.running_mean"], trained.update.values[:3])


def test_the_round_begins_as_the_model_received_whatever_the_device_keeps():
    kept = {"weight": np.full((1, 3), 7, np.float32)}
    first, second = (PFEDME.train(job_of("pfedme", personal=each)) for each in (None, kept))
    assert first.update.values.tobytes() == second.update.values.tobytes()
    assert first.state.personal["weight"].tobytes() == second.state.personal["weight"].tobytes()


def test_both_models_are_judged_and_a_late_device_is_pulled_to_the_finished_one():
    job = job_of("pfedme")
    trained = PFEDME.train(job)
    found = PFEDME.evaluate(dataclasses.replace(job, state=trained.state))
    for evaluation, weights in (
        (found.personal, weights_of(trained.state.personal)),
        (found.global_model, job.received.values),
    ):
        (inputs, targets) = job.task.validation[0]
        assert evaluation.loss == pytest.approx(np.square(inputs @ weights - targets[:, 0]).mean(), rel=1e-4)
    distances = []
    for weight in (1.0, 20.0):
        job = job_of("pfedme", own={"proximal_weight": weight}, local_steps=400)
        adapted, (batch,) = weights_of(PFEDME.adapt(job).personal), job.task.train
        nearest = hessian(batch) + weight * np.eye(3)
        wanted = np.linalg.solve(nearest, weight * start_of(job) - gradient(np.zeros(3), batch))
        np.testing.assert_allclose(adapted, wanted, atol=1e-4)
        distances.append(np.abs(adapted - start_of(job)).max())
    assert distances[1] < distances[0] / 2


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("pfedme", {"own": {"proximal_weight": 1e6, "inner_steps": 100}}),
        ("perfedavg", {"learning_rate": 100.0}),
        ("perfedavg", {"own": {"inner_rate": 100.0}}),
    ],
)
def test_what_diverges_has_failed(method, given):
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        load_method(method).train(job_of(method, local_steps=200, **given))


def closed(mixing):
    """The last model, the mean of two updates of 8 and 24 samples, and the next model."""
    manifest = job_of("pfedme", kind="norm").manifest
    settings = FederationSettings(method="pfedme", method_settings={"server_mixing": mixing})
    chance = np.random.default_rng(0)
    old = {spec.name: chance.random(spec.shape, np.float32) for spec in manifest.shared}
    sums = MaskedSums(manifest)
    for examples in (8, 24):
        sums.fold_in_place(chance.random(manifest.shared_values, np.float32), None, examples)
    aggregation = load_server("pfedme").aggregation
    return old, sums.mean(old), aggregation.close(GlobalModel(old), sums, Situation(manifest, settings, 1))


@pytest.mark.parametrize("mixing", [0.0, 0.3, 1.0, 2.0])
def test_the_server_goes_its_share_of_the_way_to_the_mean_and_beyond_it(mixing):
    old, mean, model = closed(mixing)
    for name in old:
        share = min(1.0, mixing) if "running" in name else mixing
        np.testing.assert_allclose(model.tensors[name], old[name] + share * (mean[name] - old[name]), atol=1e-6)
        assert model.tensors[name].dtype == np.float32
    if mixing in (0, 1):
        assert all(model.tensors[name].tobytes() == (mean if mixing else old)[name].tobytes() for name in old)


@pytest.mark.parametrize(
    ("given", "own", "said"),
    [
        ({}, {}, None),
        (
            {"learning_rate": 0.2},
            {},
            "learning_rate x method_settings.proximal_weight is 3; personal models diverge from 2",
        ),
        ({"learning_rate": 0.2, "momentum": 0.9}, {}, None),
        ({"learning_rate": 0.2, "optimizer": "adam"}, {}, None),
        ({}, {"outer_rate": 0.2}, "outer_rate x proximal_weight is 3; local models diverge from 2"),
    ],
)
def test_rates_that_cannot_work_are_told_to_the_operator(given, own, said):
    settings = FederationSettings(method="pfedme", **given, method_settings=own)
    found = load_server("pfedme").warning(GlobalModel({}), Situation(job_of("pfedme").manifest, settings))
    assert found is None if said is None else said in found


# --- Per-FedAvg ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("difference", [0.01, 0.1, 1.0])
def test_a_hessian_free_step_on_a_quadratic_is_the_exact_one(engine, difference):
    first, second, third = batches = batches_of(3)
    own = {"hessian": "hessian_free", "difference": difference}
    job = job_of("perfedavg", engine, batches=batches, own=own)
    w, trained = start_of(job), PERFEDAVG.train(job)
    outer = gradient(w - 0.05 * gradient(w, first), second)
    wanted = w - 0.02 * (outer - 0.05 * hessian(third) @ outer)
    np.testing.assert_allclose(trained.update.values, wanted, atol=2e-6)
    assert np.abs(0.02 * 0.05 * hessian(third) @ outer).max() > 1e-3, "the Hessian's part is there to be seen"
    assert trained.counts == {"meta_steps": 1, "hessian_steps": 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_first_order_step_is_the_gradient_where_the_inner_step_ends(engine):
    first, second = batches = batches_of(2)
    job = job_of("perfedavg", engine, batches=batches)
    w, trained = start_of(job), PERFEDAVG.train(job)
    ahead = w - 0.05 * gradient(w, first)
    np.testing.assert_allclose(trained.update.values, w - 0.02 * gradient(ahead, second), atol=1e-6)
    assert trained.train_loss == pytest.approx(np.square(second[0] @ ahead - second[1][:, 0]).mean(), rel=1e-5)
    assert trained.counts == {"meta_steps": 1, "hessian_steps": 0}
    assert trained.state.personal is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hessian_free", [False, True])
def test_perfedavg_by_hand_over_several_steps(engine, hessian_free):
    """Each gradient has the next batch; the optimiser's memory is of w, and its rate alone decays with the rounds."""
    batches, steps, place = batches_of(4), 5, 0
    own = {"hessian": "hessian_free" if hessian_free else "first_order"}
    given = {"local_steps": steps, "momentum": 0.9, "learning_rate_decay": 0.5, "number": 2}
    job = job_of("perfedavg", engine, batches=batches, own=own, **given)
    w, memory = start_of(job), np.zeros(3)
    for _ in range(steps):
        first, second, third = (batches[(place + each) % 4] for each in range(3))
        outer = gradient(w - 0.05 * gradient(w, first), second)
        if hessian_free:
            outer = outer - 0.05 * hessian(third) @ outer
        place += 3 if hessian_free else 2
        memory = 0.9 * memory + outer
        w = w - 0.01 * memory
    trained = PERFEDAVG.train(job)
    np.testing.assert_allclose(trained.update.values, w, atol=1e-5)
    assert trained.steps == trained.counts["meta_steps"] == steps


@pytest.mark.parametrize(("hessian", "gradients"), [("first_order", 2), ("hessian_free", 4)])
def test_costs_are_those_of_all_gradients(hessian, gradients):
    job = job_of("perfedavg", batches=batches_of(3), own={"hessian": hessian}, local_steps=6)
    fedavg = FEDAVG.train(job_of("fedavg", batches=batches_of(3), local_steps=6))
    trained = PERFEDAVG.train(job)
    assert (trained.steps, trained.flops) == (fedavg.steps, gradients * fedavg.flops)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_ends_of_a_difference_see_the_same_dropout(engine):
    """The difference of two other networks, divided by 2δ, would grow as δ falls."""
    found = [
        PERFEDAVG.train(
            job_of("perfedavg", engine, "dropout", own={"hessian": "hessian_free", "difference": each})
        ).update.values
        for each in (0.01, 0.1, 1.0)
    ]
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("own", "given", "steps"),
    [
        ({}, {}, [(0.05, 0)]),
        ({"adaptation_steps": 3}, {}, [(0.05, 0), (0.05, 1), (0.05, 0)]),
        ({}, {"finetune_epochs": 2, "finetune_learning_rate": 0.01}, [(0.01, 0), (0.01, 1)] * 2),
    ],
)
def test_the_personal_model_is_the_global_one_after_its_inner_steps(engine, own, given, steps):
    batches = batches_of(2)
    job = job_of("perfedavg", engine, batches=batches, own=own, **given)
    w = adapted = start_of(job)
    for rate, place in steps:
        adapted = adapted - rate * gradient(adapted, batches[place])
    found, ((inputs, targets),) = PERFEDAVG.evaluate(job), job.task.validation
    assert found.personal.loss == pytest.approx(np.square(inputs @ adapted - targets[:, 0]).mean(), rel=1e-5)
    assert found.global_model.loss == pytest.approx(np.square(inputs @ w - targets[:, 0]).mean(), rel=1e-5)
    assert found.flops == training_flops(job.manifest, 8 * len(steps))
    np.testing.assert_allclose(weights_of(PERFEDAVG.adapt(job).personal), adapted, atol=1e-6)


def test_early_stopping_goes_by_the_adapted_model_and_the_local_one_is_sent():
    job = job_of("perfedavg", early_stopping="validation")
    trained, (batch,), ((inputs, targets),) = PERFEDAVG.train(job), job.task.train, job.task.validation
    plain = PERFEDAVG.train(job_of("perfedavg"))
    w = plain.update.values.astype(np.float64)
    adapted = w - 0.05 * gradient(w, batch)
    assert trained.update.values.tobytes() == plain.update.values.tobytes()
    assert trained.validation.loss == pytest.approx(np.square(inputs @ adapted - targets[:, 0]).mean(), rel=1e-5)
    assert trained.flops - plain.flops == training_flops(job.manifest, 8)
    assert weights_of(job.engine.read()).tobytes() == trained.update.values.tobytes()


@pytest.mark.parametrize("hessian_free", [False, True])
def test_rounds_end_where_adapted_models_are_best(hessian_free):
    """Of two devices with losses a(w - c)²/2 the mean of f(w - α∇f(w)) is least where both weigh a(1 - αa)²; without
    the Hessian rounds end where they weigh a(1 - αa). FedAvg's weights are a."""
    slopes, centres, alpha, rate = np.array([1.0, 6.0]), np.array([3.0, -1.0]), 0.1, 0.2
    # One input 3-vector (x, 0, 0) has f = (x w - y)², so a = 2x² and y = x c; the other weights have no gradient.
    devices = [
        (np.array([[np.sqrt(a / 2), 0, 0]], np.float32), np.array([[np.sqrt(a / 2) * c]], np.float32))
        for a, c in zip(slopes, centres, strict=True)
    ]
    own = {"hessian": "hessian_free" if hessian_free else "first_order", "inner_rate": alpha, "difference": 0.1}
    jobs = [job_of("perfedavg", batches=[each], held_out=[each], own=own, learning_rate=rate) for each in devices]
    values = jobs[0].received.values
    for _ in range(60):
        received = decode(encode(jobs[0].manifest, values, None), jobs[0].manifest)
        found = [PERFEDAVG.train(dataclasses.replace(job, received=received)).update.values for job in jobs]
        values = np.mean(found, axis=0, dtype=np.float32)
    weights = slopes * (1 - alpha * slopes) ** (2 if hessian_free else 1)
    assert values[0] == pytest.approx((weights * centres).sum() / weights.sum(), abs=1e-3)


# --- predictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "own", "gradients"),
    [
        ("pfedme", {}, 5),
        ("pfedme", {"inner_steps": 2}, 2),
        ("perfedavg", {}, 2),
        ("perfedavg", {"hessian": "hessian_free"}, 4),
    ],
)
def test_what_a_round_takes_is_rehearsed_as_it_is_trained(method, own, gradients):
    job = job_of(method, own=own)
    rehearsal = TorchRehearsal(job.task, job.manifest, job.assignment.settings)
    effort = load_method(method).at_budget(rehearsal, 1.0)
    assert effort.flops() == gradients * training_flops(job.manifest, 8) == load_method(method).train(job).flops
    assert len(effort.train(4)) == 3
    assert effort.values == 3
