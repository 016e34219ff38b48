"""The dropout family's device halves: narrow networks, how their neurons are chosen, and HeteroFL's particulars."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.methods import DeviceState, Job, choosing, load_method
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.fedspu import FEDSPU
from edge_sdk.protocol.bundle import decode, encode
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.flops import forward_flops, training_flops
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, merge_in_place, pack, same_mask
from edge_sdk.protocol.messages import Assignment, FederationSettings, Work
from edge_sdk.protocol.neurons import first_neurons, narrowed
from edge_sdk.tasks import Task, build_seeded
from edge_sdk.tasks.digits import DigitsNet
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tracing.coupling import describe
from edge_sdk.training.local import get_tensors, set_tensors
from edge_sdk.training.narrow import CannotNarrow

PERSONAL = ["fjord", "hermes", "fedmp", "prunefl_neurons"]
CHOOSING = ["hermes", "fedmp", "prunefl_neurons"]
EVERY = ["feddrop", "heterofl", *PERSONAL]
EXAMPLES, EPOCHS = 30, 2
ONCE = {"pruning": "once", "prune_rate": 0.2, "accuracy_threshold": 0.5, "ratios": "budget", "importance": "once"}
"""The forms of Hermes, FedMP and PruneFL in which devices choose once; the others are in test_pruning.py."""


@pytest.fixture(scope="module")
def manifest():
    return describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits")


def job_of(manifest, ratio=0.4, *, kind="train", state=None, number=1, mask=None, targets=None, **settings):
    """A round over random images; the payload holds the weights that follow from seed 7, those of ``mask`` or all."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(EXAMPLES) % 10 if targets is None else targets
    arrays = Arrays(torch.rand(EXAMPLES, 1, 8, 8, generator=generator), targets)
    task = classification("digits", build_seeded(DigitsNet, 0), arrays, arrays, None, batch_size=8)
    values = pack(manifest, get_tensors(build_seeded(DigitsNet, 7), manifest), mask)
    assignment = Assignment(
        assignment_id="a",
        kind=kind,
        round=number,
        deadline_seconds=60,
        settings=FederationSettings(
            **{"local_epochs": EPOCHS, "early_stopping": "off", "method_settings": ONCE, **settings}
        ),
        work=Work(key=f"{number:032x}", ratio=ratio),
    )
    received = decode(encode(manifest, values, mask), manifest)
    return Job(assignment, manifest, task, task.model, state or DeviceState(), received, federation="f", device="pi")


def expected_mask(manifest, method, trained, ratio=0.4):
    """The neurons that a method must train; of those that choose, as many as it must."""
    if method == "feddrop":
        return draw_neurons(manifest, NeuronDraw(f"{1:032x}", ratio))
    if method == "fjord":
        return first_neurons(manifest, ratio)
    if method == "heterofl":
        return first_neurons(manifest, ratio, lambda size, ratio: math.ceil(size * ratio))
    assert {name: len(index) for name, index in trained.update.mask.active.items()} == {
        name: math.floor(size * ratio) for name, size in manifest.group_sizes.items()
    }
    return trained.update.mask


def spread(manifest, values, mask):
    """Packed values as whole tensors, zero elsewhere."""
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.shared}
    merge_in_place(manifest, tensors, values, mask)
    return tensors


# --- what all share --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EVERY)
def test_a_round_trains_sends_and_counts_the_narrow_network_alone(manifest, method):
    job = job_of(manifest, learning_rate=0.1)
    trained = load_method(method).train(job)
    mask = expected_mask(manifest, method, trained)
    assert same_mask(trained.update.mask, mask)
    assert trained.update.values.size == count_values(manifest, mask) < manifest.shared_values / 3
    start = pack(manifest, spread(manifest, job.received.values, None), mask)
    assert np.abs(trained.update.values - start).max() > 0.01
    small, batch = narrowed(manifest, mask), 8
    more = {name: training_flops(manifest, batch) for name in CHOOSING}
    more["heterofl"] = EXAMPLES * forward_flops(small)
    assert trained.flops == training_flops(small, EPOCHS * EXAMPLES) + more.get(method, 0)
    assert (trained.num_examples, trained.steps, trained.stopped) == (EXAMPLES, EPOCHS * 4, False)


@pytest.mark.parametrize("method", EVERY)
def test_what_is_kept_is_the_network_that_was_trained_and_zeros(manifest, method):
    trained = load_method(method).train(job_of(manifest))
    if method not in PERSONAL:
        assert trained.state == DeviceState()
        return
    wanted = spread(manifest, trained.update.values, trained.update.mask)
    assert set(trained.state.personal) == set(wanted)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(trained.state.personal[name], tensor, err_msg=name)
    assert (trained.state.neurons is not None) == (method in CHOOSING)


@pytest.mark.parametrize("method", ["feddrop", "fjord"])
def test_training_narrow_is_training_whole_with_the_rest_frozen_at_zero(manifest, method):
    """FedSPU from zeros does the same arithmetic, in another order of sums."""
    job = job_of(manifest, learning_rate=0.05)
    trained = load_method(method).train(job)
    zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.kept}
    work = job.assignment.work
    if method == "fjord":  # as many neurons, and those that FedSPU draws put first
        mask = draw_neurons(manifest, NeuronDraw(**work.model_dump()))
        tensors = spread(manifest, job.received.values, None)
        order = {
            name: np.argsort(~np.isin(np.arange(size), mask.active[name]), kind="stable")
            for name, size in manifest.group_sizes.items()
        }
        moved = {spec.name: permuted(manifest, spec, tensors[spec.name], order) for spec in manifest.shared}
        received = decode(encode(manifest, pack(manifest, moved, None), None), manifest)
        trained = load_method(method).train(dataclasses.replace(job, received=received))
    spu = FEDSPU.train(dataclasses.replace(job, state=DeviceState(zeros)))
    np.testing.assert_allclose(trained.update.values, spu.update.values, rtol=2e-3, atol=2e-5)
    assert trained.train_loss == pytest.approx(spu.train_loss, rel=1e-4)
    assert trained.flops < spu.flops


def permuted(manifest, spec, tensor, order):
    """A tensor with the neurons of every group in another order."""
    for axis, segments in enumerate(spec.axes):
        if segments:
            (segment,) = segments
            index = order[segment.group][:, None] * segment.repeat + np.arange(segment.repeat)
            tensor = np.take(tensor, index.ravel(), axis=axis)
    return tensor


@pytest.mark.parametrize("method", ["feddrop", *PERSONAL])
def test_a_device_that_trains_everything_trains_as_in_fedavg(manifest, method):
    job = job_of(manifest, 1.0, learning_rate=0.1, momentum=0.5)
    plain = FEDAVG.train(job_of(manifest, 1.0, learning_rate=0.1, momentum=0.5))
    np.testing.assert_array_equal(load_method(method).train(job).update.values, plain.update.values)


@pytest.mark.parametrize("method", EVERY)
def test_equal_seeds_give_equal_bytes_and_the_part_alone_is_enough(manifest, method):
    torch.manual_seed(1)
    first = load_method(method).train(job_of(manifest))
    torch.manual_seed(2)
    state = DeviceState(neurons=first.state.neurons)
    again = load_method(method).train(job_of(manifest, mask=first.update.mask, state=state))
    np.testing.assert_array_equal(first.update.values, again.update.values)


@pytest.mark.parametrize("method", EVERY)
def test_another_part_is_refused(manifest, method):
    mask = NeuronMask({name: np.array([size - 1]) for name, size in manifest.group_sizes.items()})
    with pytest.raises(BundleError, match=r"mask is not the assignment's|holds a part of the model"):
        load_method(method).train(job_of(manifest, mask=mask))


@pytest.mark.parametrize("method", EVERY)
def test_early_stopping_judges_the_narrow_network(manifest, method):
    trained = load_method(method).train(job_of(manifest, early_stopping="paper", stop_weight=0.0))
    assert trained.stop_loss == trained.validation.loss
    assert trained.state.memory == {"last_loss": trained.stop_loss, "increases": 0}
    if method in PERSONAL:
        job = job_of(manifest, kind="evaluate", state=trained.state)
        found = load_method(method).evaluate(job)
        assert found.personal.loss == pytest.approx(trained.validation.loss, rel=1e-4)
        assert found.global_model is not None


@pytest.mark.parametrize("method", EVERY)
def test_adapting(manifest, method):
    def adapt(**settings):
        done = []
        job = job_of(manifest, kind="adapt", number=9, **settings)
        state = load_method(method).adapt(dataclasses.replace(job, progress=lambda step, *_: done.append(step)))
        return state, len(done)

    state, steps = adapt()
    assert steps == (EPOCHS * 4 if method in PERSONAL else 0)
    zeros = sum(int((tensor == 0).sum()) for tensor in state.personal.values())
    assert (zeros > manifest.shared_values / 2) == (method in PERSONAL)
    assert (state.neurons is not None) == (method in CHOOSING)
    assert adapt(finetune_epochs=3)[1] == 3 * 4


@pytest.mark.parametrize("method", EVERY)
def test_the_profile_predicts_narrow_networks(manifest, method):
    half = load_method(method)
    assert half.narrow
    assert half.sample_mask(manifest, 1.0) is None
    widths = {name: len(index) for name, index in half.sample_mask(manifest, 0.5).active.items()}
    assert widths == {name: size // 2 for name, size in manifest.group_sizes.items()}


def test_tensors_that_never_travel_stay_on_the_device():
    manifest = describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits", running_statistics="personal")
    trained = load_method("fjord").train(job_of(manifest))
    moved = trained.state.personal["bn1.running_mean"]
    (count,) = {np.flatnonzero(moved).size, len(trained.update.mask.active["conv1"])}
    again = load_method("fjord").train(job_of(manifest, state=trained.state, number=2, local_steps=1))
    np.testing.assert_allclose(again.state.personal["bn1.running_mean"][:count], moved[:count], atol=0.1)


def test_a_model_that_does_not_run_narrow_is_refused():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10)

        def forward(self, x):
            return self.out(self.conv(x).view(-1, 4 * 36))

    manifest = describe(Fixed(), torch.zeros(1, 1, 8, 8), task="fixed")
    job = job_of(describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits"), 0.5)
    model = Fixed()
    received = decode(encode(manifest, pack(manifest, get_tensors(model, manifest), None), None), manifest)
    task = dataclasses.replace(job.task, model=model)
    with pytest.raises(CannotNarrow, match="choose a method that trains the whole network, such as fedspu"):
        load_method("feddrop").train(
            dataclasses.replace(job, manifest=manifest, model=model, task=task, received=received)
        )


# --- choosing neurons ------------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """y = W2·W1·x, of three hidden neurons."""

    def __init__(self):
        super().__init__()
        self.W1, self.W2 = nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.W2(self.W1(x))


W1 = [[3.0, 0.0], [2.0, 2.0], [0.0, -1.0]]
"""l2 norms 3, 2.83, 1; l1 norms 3, 4, 1; gradients are W2 times the same row: the largest is the last."""
W2 = [[0.01, 0.01, 1.0]]


def choose(method, w1=W1, ratio=0.34, target=0.5):
    model = TwoLayers()
    manifest = describe(model, torch.zeros(1, 2), task="two")
    sent = {"W1.weight": np.array(w1, np.float32), "W2.weight": np.array(W2, np.float32)}
    batches = [(torch.tensor([[1.0, 1.0]]), torch.tensor([[target]]))]
    task = Task("two", model, F.mse_loss, batches, batches, classification=False)
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=1,
        deadline_seconds=60,
        settings=FederationSettings(local_epochs=1, learning_rate=0.001, early_stopping="off", method_settings=ONCE),
        work=Work(key="0" * 32, ratio=ratio),
    )
    received = decode(encode(manifest, pack(manifest, sent, None), None), manifest)
    set_tensors(model, {name: tensor + 100 for name, tensor in sent.items()})  # what is scored is what was received
    job = Job(assignment, manifest, task, model, DeviceState(), received, federation="f", device="pi")
    return load_method(method).train(job).update.mask.active["W1"].tolist()


@pytest.mark.parametrize(("method", "best"), [("hermes", [0]), ("fedmp", [1]), ("prunefl_neurons", [2])])
def test_scores_by_hand(method, best):
    assert choose(method) == best
    assert choose(method, ratio=0.67) == sorted({*best, {"hermes": 1, "fedmp": 0, "prunefl_neurons": 0}[method]})


@pytest.mark.parametrize("method", CHOOSING)
def test_of_equal_neurons_the_first_are_kept(method):
    """Where nothing is left to learn, equal rows stay equal, and gradients are zero."""
    assert choose(method, [[0.0, 0.0]] * 3, ratio=0.67, target=0.0) == [0, 1]


@pytest.mark.parametrize("method", ["hermes", "fedmp"])
def test_the_step_before_scoring_decides_between_equals(method):
    """Gradients are 2(y - t)·W2: of equal rows the last one moves most, down where y is too large, else up."""
    equal = [[1.0, 1.0]] * 3
    assert choose(method, equal, target=0.5) == [0]
    assert choose(method, equal, target=5.0) == [2]


def test_layers_that_add_their_outputs_are_scored_together():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1)

        def forward(self, x):
            return self.out(torch.relu(self.a(x) + self.b(x)))

    model = Added()
    manifest = describe(model, torch.zeros(1, 2), task="added")
    set_tensors(
        model,
        {
            "a.weight": np.array([[3, 0], [2, 0]], np.float32),
            "b.weight": np.array([[0, 0], [0, 3]], np.float32),
        },
    )
    batches = [(torch.ones(1, 2), torch.ones(1, 1))]
    task = Task("added", model, F.mse_loss, batches, batches, classification=False)
    received = decode(encode(manifest, pack(manifest, get_tensors(model, manifest), None), None), manifest)
    job = job_of(describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits"), 0.5)
    job = dataclasses.replace(job, manifest=manifest, model=model, task=task, received=received)
    assert [index.tolist() for index in load_method("hermes").train(job).update.mask.active.values()] == [[1]]


@pytest.mark.parametrize("method", CHOOSING)
def test_what_was_chosen_is_kept_while_the_budget_stays(manifest, method):
    kept = NeuronMask({name: np.arange(size - size * 4 // 10, size) for name, size in manifest.group_sizes.items()})
    state = DeviceState(neurons=kept)
    trained = load_method(method).train(job_of(manifest, state=state, mask=kept))
    assert same_mask(trained.state.neurons, kept)
    assert trained.flops == training_flops(narrowed(manifest, kept), EPOCHS * EXAMPLES)
    wider = load_method(method).train(job_of(manifest, 0.8, state=state))
    assert {len(index) for index in wider.state.neurons.active.values()} == {
        math.floor(size * 0.8) for size in manifest.group_sizes.values()
    }


@pytest.mark.parametrize("method", CHOOSING)
def test_choosing_leaves_running_statistics_and_gradients_alone(manifest, method):
    job = job_of(manifest, 1.0, learning_rate=1e-12, local_steps=1)
    set_tensors(job.model, get_tensors(build_seeded(DigitsNet, 7), manifest))
    choosing.measure(job, import_module(f"edge_sdk.methods.{method}").score)
    after = get_tensors(job.model, manifest)
    for name, tensor in get_tensors(build_seeded(DigitsNet, 7), manifest).items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert all(parameter.grad is None for parameter in job.model.parameters())


# --- HeteroFL --------------------------------------------------------------------------------------------------------


def test_heterofl_by_plain_torch(manifest):
    """Scaler, masked loss and statistics against a network written out by hand."""
    targets = torch.arange(EXAMPLES) % 3 + 4
    job = job_of(manifest, 0.4, targets=targets, learning_rate=0.1, local_steps=1, batch_size=8)
    trained = load_method("heterofl").train(job)
    widths = {name: math.ceil(0.4 * size) for name, size in manifest.group_sizes.items()}
    whole = spread(manifest, job.received.values, None)
    state = {
        key: torch.from_numpy(tensor)
        for key, tensor in spread(
            narrowed(manifest, first_neurons(manifest, 0.4, lambda size, r: math.ceil(size * r))),
            pack(manifest, whole, trained.update.mask),
            None,
        ).items()
    }
    assert trained.update.mask.active["fc1"].tolist() == list(range(widths["fc1"]))
    parameters = {key: value.clone().requires_grad_() for key, value in state.items() if "running" not in key}

    def forward(x, scale=0.4):
        for stage in "12":
            x = F.conv2d(x, parameters[f"conv{stage}.weight"], parameters[f"conv{stage}.bias"], padding=1) / scale
            scale_and_shift = parameters[f"bn{stage}.weight"], parameters[f"bn{stage}.bias"]
            x = F.max_pool2d(F.relu(F.batch_norm(x, None, None, *scale_and_shift, training=True)), 2)
        x = F.relu(F.linear(x.flatten(1), parameters["fc1.weight"], parameters["fc1.bias"]) / scale)
        return F.linear(x, parameters["out.weight"], parameters["out.bias"])

    torch.manual_seed(job.seed("train"))
    inputs, labels = next(iter(job.task.train))
    scores = forward(inputs)
    absent = torch.ones(10, dtype=torch.bool)
    absent[4:7] = False
    loss = F.cross_entropy(scores.masked_fill(absent, 0.0), labels)
    assert trained.train_loss == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    small = narrowed(manifest, trained.update.mask)
    sent = spread(small, trained.update.values, None)
    for key, parameter in parameters.items():
        np.testing.assert_allclose(
            sent[key], (parameter - 0.1 * parameter.grad).detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=key
        )
        parameter.data = torch.from_numpy(sent[key])
    assert not (sent["out.bias"][[0, 9]] - whole["out.bias"][[0, 9]]).any(), "nothing is unlearnt of absent classes"


def test_heterofls_statistics_are_means_over_the_training_data(manifest):
    """With a learning rate of nothing they are those of the model received, batch by batch, behind the scaler."""
    job = job_of(manifest, 0.4, learning_rate=1e-12, local_steps=1)
    trained = load_method("heterofl").train(job)
    sent = spread(narrowed(manifest, trained.update.mask), trained.update.values, None)
    torch.manual_seed(job.seed("train"))
    passes = [list(job.task.train), list(job.task.train)][1]
    outputs = [
        F.conv2d(inputs, torch.from_numpy(sent["conv1.weight"]), torch.from_numpy(sent["conv1.bias"]), padding=1) / 0.4
        for inputs, _ in passes
    ]
    mean = torch.stack([output.mean((0, 2, 3)) for output in outputs]).mean(0)
    var = torch.stack([output.var((0, 2, 3)) for output in outputs]).mean(0)
    np.testing.assert_allclose(sent["bn1.running_mean"], mean, rtol=0.1, atol=5e-3)
    np.testing.assert_allclose(sent["bn1.running_var"], var, rtol=0.1)


def test_heterofl_at_full_width_scales_nothing_and_leaves_no_hook(manifest):
    job = job_of(manifest, 1.0)
    load_method("heterofl").train(job)
    assert all(not module._forward_hooks for module in job.model.modules())
    assert {module.momentum for module in job.model.modules() if isinstance(module, nn.BatchNorm2d)} == {0.1}
