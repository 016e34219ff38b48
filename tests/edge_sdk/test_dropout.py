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
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, build_seeded, passes
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensors, get_tensors, set_tensors
from edge_sdk.training.narrow import CannotNarrow
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, merge_in_place, pack, same_mask
from sparrow.protocol.messages import Assignment, Work
from sparrow.protocol.neurons import CLASSES, first_neurons, narrowed, with_classes
from sparrow.protocol.settings import FederationSettings

from .test_tracing import NETS

pytestmark = pytest.mark.integration  # traces many models

PERSONAL = ["fjord", "hermes", "fedmp", "prunefl_neurons"]
CHOOSING = ["hermes", "fedmp", "prunefl_neurons"]
EVERY = ["feddrop", "heterofl", *PERSONAL]
EXAMPLES, EPOCHS = 30, 2
ONCE = {"pruning": "once", "prune_rate": 0.2, "accuracy_threshold": 0.5, "ratios": "budget", "importance": "once"}
"""The forms of Hermes, FedMP and PruneFL in which devices choose once; the others are in test_pruning.py."""

PAPER = {"widths": "uniform", "width_steps": 5, "distil": True, "distil_weight": 1.0, "distil_temperature": 1.0} | {
    "scaled": True
}
"""The settings of FjORD and FedDrop that the coordinator fills in."""

SIMPLE = {"widths": "fixed", "scaled": False}
"""The forms in which FedSPU's paper compares them."""


@pytest.fixture(scope="module")
def manifest():
    return describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits")


def job_of(manifest, ratio=0.4, *, kind="train", state=None, number=1, mask=None, targets=None, own=None, received=None,
           **settings):  # fmt: skip
    """A round over random images; the payload holds the weights that follow from seed 7, those of ``mask`` or all.

    own: settings of the method other than the defaults. received: another payload."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(EXAMPLES) % 10 if targets is None else targets
    arrays = Arrays(torch.rand(EXAMPLES, 1, 8, 8, generator=generator), targets)
    task = classification("digits", build_seeded(DigitsNet, 0), arrays, arrays, None, batch_size=8)
    if received is None:
        values = pack(manifest, get_tensors(build_seeded(DigitsNet, 7), manifest), mask)
        received = decode(encode(manifest, values, mask), manifest)
    assignment = Assignment(
        assignment_id="a",
        kind=kind,
        round=number,
        deadline_seconds=60,
        settings=FederationSettings(
            **{"local_epochs": EPOCHS, "early_stopping": "off", **settings},
            method_settings=ONCE | PAPER | (own or {}),
        ),
        work=Work(key=f"{number:032x}", ratio=ratio),
    )
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state or DeviceState(),
        received,
        federation="f",
        device="pi",
    )


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
    job = job_of(manifest, learning_rate=0.1, own=SIMPLE)
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
    assert (
        trained.counts["neurons_left_out"] == sum(manifest.group_sizes.values()) - sum(small.group_sizes.values()) > 0
    )
    assert all(trained.counts[name] for name in load_method(method).acts)


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
    job = job_of(manifest, learning_rate=0.05, own=SIMPLE)
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
    job = job_of(manifest, 1.0, learning_rate=0.1, momentum=0.5, own={"widths": "fixed"})
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
    with pytest.raises(BundleError, match=r"assignment's|part of the model"):
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
    with pytest.raises(CannotNarrow, match=r"\bfedspu\b"):
        load_method("feddrop").train(
            dataclasses.replace(
                job, manifest=manifest, task=task, engine=TorchEngine(task, manifest), received=received
            )
        )


# --- FjORD -----------------------------------------------------------------------------------------------------------


def first_draw(manifest, wanted, **settings):
    """A job at budget 0.6 of one step, whose width is number ``wanted`` of 0.2, 0.4 and 0.6."""
    jobs = (job_of(manifest, 0.6, number=n, local_steps=1, learning_rate=0.1, **settings) for n in range(1, 50))
    return next(job for job in jobs if np.random.default_rng(job.seed("widths")).integers(3) == wanted)


def sent_of(manifest, trained):
    """What a device sent, as tensors of the whole shapes."""
    return spread(manifest, trained.update.values, trained.update.mask)


def by_hand(parameters, x, ratio, running=None):
    """DigitsNet of the first neurons at a width, in training mode. running: takes what becomes of bn1's mean."""
    first, second, hidden = (int(ratio * size + 1e-9) for size in (16, 32, 64))
    for stage, inputs, outputs in (("1", 1, first), ("2", first, second)):
        cut = {key: parameters[f"{key}{stage}.{kind}"][:outputs] for key in ("conv", "bn") for kind in ("weight",)}
        shifts = {key: parameters[f"{key}{stage}.bias"][:outputs] for key in ("conv", "bn")}
        x = F.conv2d(x, cut["conv"][:, :inputs], shifts["conv"], padding=1)
        if running is not None and stage == "1":
            running.append(x.mean((0, 2, 3)))
        x = F.max_pool2d(F.relu(F.batch_norm(x, None, None, cut["bn"], shifts["bn"], training=True)), 2)
    fc = parameters["fc1.weight"][:hidden, : 4 * second]
    x = F.relu(F.linear(x.flatten(1), fc, parameters["fc1.bias"][:hidden]))
    return F.linear(x, parameters["out.weight"][:, :hidden], parameters["out.bias"])


FORMS = {
    "the paper's": {},
    "alpha and T": {"distil_weight": 0.3, "distil_temperature": 2.0},
    "no distillation": {"distil": False},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [0.2, 0.4, 0.6])
def test_a_step_of_fjord_by_plain_torch(manifest, form, width):
    """One step at each width of a device of budget 0.6: loss, gradients, running statistics and FLOPs."""
    job = first_draw(manifest, round(width * 5) - 1, own=FORMS[form])
    trained = load_method("fjord").train(job)
    whole = spread(manifest, job.received.values, None)
    parameters = {key: torch.from_numpy(t).requires_grad_() for key, t in whole.items() if "running" not in key}
    inputs, labels = as_tensors(next(passes(job.task.train, job.seed("train"))))
    means = []
    teacher = by_hand(parameters, inputs, 0.6, means)
    student = by_hand(parameters, inputs, width)
    distils, narrow = form != "no distillation", width < 0.6
    alpha, temperature = (0.3, 2.0) if form == "alpha and T" else (1.0, 1.0)
    loss = F.cross_entropy(student, labels)
    if distils and narrow:
        wanted = (teacher.detach() / temperature).softmax(1)
        divergence = (wanted * (wanted.log() - (student / temperature).log_softmax(1))).sum(1).mean()
        loss = F.cross_entropy(teacher, labels) + (1 - alpha) * loss + alpha * temperature**2 * divergence
    loss.backward()
    assert trained.train_loss == pytest.approx(loss.item(), rel=1e-5)
    sent, own = sent_of(manifest, trained), first_neurons(manifest, 0.6)
    for key, parameter in parameters.items():
        moved = {spec.name: whole[spec.name].copy() for spec in manifest.shared}
        moved[key] = (parameter - 0.1 * parameter.grad).detach().numpy()
        moved = spread(manifest, pack(manifest, moved, own), own)[key]
        np.testing.assert_allclose(sent[key], moved, rtol=1e-3, atol=1e-5, err_msg=key)
    statistics = 0.9 * whole["bn1.running_mean"][:9] + 0.1 * means[0].detach().numpy()
    if distils or not narrow:
        np.testing.assert_allclose(sent["bn1.running_mean"][:9], statistics, rtol=1e-3, atol=1e-6)
    else:
        np.testing.assert_array_equal(sent["bn1.running_mean"][:9], whole["bn1.running_mean"][:9])
    flops = {ratio: training_flops(narrowed(manifest, first_neurons(manifest, ratio)), 8) for ratio in (width, 0.6)}
    assert trained.flops == (sum(flops.values()) if distils else flops[width])
    counts = {"narrow_steps": narrow, "widths_drawn": 1, "distilled_steps": distils and narrow}
    assert {name: trained.counts[name] for name in counts} == counts


def test_fjord_draws_widths_up_to_its_own_and_no_wider(manifest):
    trained = load_method("fjord").train(job_of(manifest, 0.55, local_steps=30))
    assert trained.counts["widths_drawn"] == 3, "0.2, 0.4 and 0.55"
    assert 10 < trained.counts["narrow_steps"] == trained.counts["distilled_steps"] < 30
    assert same_mask(trained.update.mask, first_neurons(manifest, 0.55))
    small = load_method("fjord").train(job_of(manifest, 0.2, local_steps=5)).counts
    assert (small["widths_drawn"], small["narrow_steps"]) == (1, 0)
    finer = job_of(manifest, 0.55, local_steps=60, own={"width_steps": 10})
    assert load_method("fjord").train(finer).counts["widths_drawn"] == 6


def test_a_step_at_a_narrow_width_moves_nothing_beyond_it(manifest):
    job = first_draw(manifest, 0, own={"distil": False})
    sent = sent_of(manifest, load_method("fjord").train(job))
    whole = spread(manifest, job.received.values, first_neurons(manifest, 1.0))
    inner, own = first_neurons(manifest, 0.2), first_neurons(manifest, 0.6)
    start = spread(manifest, pack(manifest, whole, own), own)
    assert np.abs(sent["conv1.weight"][:3] - start["conv1.weight"][:3]).max() > 0
    zeros = np.zeros(count_values(manifest, inner), np.float32)
    for tensors in (sent, start):
        merge_in_place(manifest, tensors, zeros, inner)
    for name, tensor in sent.items():
        np.testing.assert_array_equal(tensor, start[name], err_msg=name)


def test_a_task_without_classes_has_nothing_to_distil(manifest):
    job = job_of(manifest, 0.6, local_steps=6, targets=torch.rand(EXAMPLES, 10))
    task = dataclasses.replace(job.task, loss=F.mse_loss, classification=False)
    counts = load_method("fjord").train(dataclasses.replace(job, task=task, engine=TorchEngine(task, manifest))).counts
    assert counts["distilled_steps"] == 0 < counts["narrow_steps"]


# --- FedDrop ---------------------------------------------------------------------------------------------------------


def mean_output(job, key):
    """(The neurons that FedDrop draws of TwoLayers, the mean of the outputs of the network that it trains.)"""
    model = TwoLayers()
    manifest = describe(model, torch.zeros(1, 2), task="two")
    sent = {"W1.weight": np.array(W1, np.float32), "W2.weight": np.array([[1.0, -2.0, 4.0]], np.float32)}
    batches = [(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.zeros(2, 1))]
    task = Task("two", model, lambda outputs, targets: outputs.mean(), batches, batches, classification=False)
    received = decode(encode(manifest, pack(manifest, sent, None), None), manifest)
    work = job.assignment.work.model_copy(update={"key": key})
    assignment = job.assignment.model_copy(update={"work": work})
    trained = load_method("feddrop").train(
        dataclasses.replace(
            job,
            manifest=manifest,
            task=task,
            engine=TorchEngine(task, manifest),
            received=received,
            assignment=assignment,
        ).with_settings(learning_rate=1e-9, local_steps=1)
    )
    return tuple(trained.update.mask.active["W1"].tolist()), trained.train_loss


@pytest.mark.parametrize(("ratio", "draws"), [(0.34, 3), (0.67, 3), (1.0, 1)])
def test_feddrops_outputs_are_on_average_those_of_the_whole_network(manifest, ratio, draws):
    """Of a linear network, over all draws, each once: exactly. Without scaling they are a share of it."""
    whole = (torch.tensor([[1.0, 2.0], [3.0, -1.0]]) @ torch.tensor(W1).T @ torch.tensor([[1.0, -2.0, 4.0]]).T).mean()
    for scaled, wanted in ((True, whole), (False, whole * {0.34: 1 / 3, 0.67: 2 / 3, 1.0: 1.0}[ratio])):
        job = job_of(manifest, ratio, own={"scaled": scaled})
        found = dict(mean_output(job, f"{number:032x}") for number in range(12))
        assert len(found) == draws
        assert np.mean(list(found.values())) == pytest.approx(wanted.item(), rel=1e-6)


def test_feddrops_statistics_are_those_behind_scaled_activations(manifest):
    """Of the network sent, over the training data; conv1 sees the image, conv2 and all that follows scaled channels."""
    trained = load_method("feddrop").train(job_of(manifest, 0.4, learning_rate=1e-12, local_steps=1))
    small = narrowed(manifest, trained.update.mask)
    sent = {key: torch.from_numpy(tensor) for key, tensor in spread(small, trained.update.values, None).items()}
    generator = torch.Generator().manual_seed(0)
    x = F.conv2d(
        torch.rand(EXAMPLES, 1, 8, 8, generator=generator), sent["conv1.weight"], sent["conv1.bias"], padding=1
    )
    np.testing.assert_allclose(sent["bn1.running_mean"], x.mean((0, 2, 3)), rtol=0.05, atol=5e-3)
    taken = F.max_pool2d(F.relu(F.batch_norm(x, None, None, sent["bn1.weight"], sent["bn1.bias"], training=True)), 2)
    second = F.conv2d(taken * 16 / 6, sent["conv2.weight"], sent["conv2.bias"], padding=1)
    np.testing.assert_allclose(sent["bn2.running_mean"], second.mean((0, 2, 3)), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(sent["bn2.running_var"], second.var((0, 2, 3)), rtol=0.25)


def test_feddrop_counts_what_it_scales(manifest):
    job = job_of(manifest, 0.4, local_steps=2)
    trained = load_method("feddrop").train(job)
    small = narrowed(manifest, trained.update.mask)
    columns = 6 + 12 * 2 * 2 + 25  # of conv2, fc1 and out
    assert trained.counts["columns_scaled"] == 2 * columns
    assert trained.flops == training_flops(small, 2 * 8) + EXAMPLES * forward_flops(small)
    simple = load_method("feddrop").train(job_of(manifest, 0.4, local_steps=2, own=SIMPLE))
    assert "columns_scaled" not in simple.counts
    assert np.abs(simple.update.values - trained.update.values).max() > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_feddrop_and_fjord_train_every_kind_of_network(name):
    """Layers over time steps, over concatenated groups, depthwise ones: FedDrop scales each column by its own group's
    share, and FjORD cuts narrower networks from the device's."""
    build, shape = NETS[name]
    model, x = build(), torch.randn(4, *shape)
    manifest = describe(model, x, task="net")
    batches = [(x, torch.zeros(4))]
    task = Task("net", model, lambda outputs, targets: outputs.square().mean(), batches, batches, classification=False)
    received = decode(encode(manifest, pack(manifest, get_tensors(model, manifest), None), None), manifest)
    job = job_of(manifest, 0.6, local_steps=6, learning_rate=0.001, received=received)
    job = dataclasses.replace(job, task=task, engine=TorchEngine(task, manifest))
    assert load_method("feddrop").train(job).counts["columns_scaled"] > 0
    assert load_method("fjord").train(job).steps == 6


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
    job = Job(
        assignment, manifest, task, TorchEngine(task, manifest), DeviceState(), received, federation="f", device="pi"
    )
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
    job = dataclasses.replace(job, manifest=manifest, task=task, engine=TorchEngine(task, manifest), received=received)
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
    set_tensors(job.engine.model, get_tensors(build_seeded(DigitsNet, 7), manifest))
    choosing.measure(job, import_module(f"edge_sdk.methods.{method}").score)
    after = get_tensors(job.engine.model, manifest)
    for name, tensor in get_tensors(build_seeded(DigitsNet, 7), manifest).items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())


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

    inputs, labels = as_tensors(next(passes(job.task.train, job.seed("train"))))
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
    outputs = [
        F.conv2d(
            torch.from_numpy(inputs),
            torch.from_numpy(sent["conv1.weight"]),
            torch.from_numpy(sent["conv1.bias"]),
            padding=1,
        )
        / 0.4
        for inputs, _ in job.task.train
    ]
    mean = torch.stack([output.mean((0, 2, 3)) for output in outputs]).mean(0)
    var = torch.stack([output.var((0, 2, 3)) for output in outputs]).mean(0)
    np.testing.assert_allclose(sent["bn1.running_mean"], mean, rtol=0.1, atol=5e-3)
    np.testing.assert_allclose(sent["bn1.running_var"], var, rtol=0.1)


def test_heterofl_leaves_out_the_rows_of_classes_without_a_sample(manifest):
    manifest = with_classes(manifest)
    targets = torch.arange(EXAMPLES) % 3 + 4
    trained = load_method("heterofl").train(job_of(manifest, 0.4, targets=targets))
    assert trained.update.mask.active[CLASSES].tolist() == [4, 5, 6]
    everything = load_method("heterofl").train(job_of(manifest, 0.4))
    width = len(trained.update.mask.active["fc1"])
    assert everything.update.values.size - trained.update.values.size == 7 * (width + 1)
    assert (trained.counts["rows_left_out"], everything.counts["rows_left_out"]) == (7, 0)
    assert trained.counts["neurons_left_out"] == 16 + 32 + 64 - sum(math.ceil(0.4 * size) for size in (16, 32, 64))
    sent, start = (
        spread(manifest, values, trained.update.mask)
        for values in (trained.update.values, pack(manifest, trained.update.base, trained.update.mask))
    )
    assert (sent["out.weight"][4:7] != start["out.weight"][4:7]).any()
    assert not sent["out.weight"][[0, 1, 2, 3, 7, 8, 9]].any()


def test_heterofl_scales_hidden_layers_alone_whether_rows_are_left_out_or_not(manifest):
    plain, named = (load_method("heterofl").train(job_of(each, 0.4)) for each in (manifest, with_classes(manifest)))
    assert plain.train_loss == named.train_loss
    np.testing.assert_array_equal(plain.update.values, named.update.values)


def test_heterofl_at_full_width_scales_nothing_and_leaves_no_hook(manifest):
    job = job_of(manifest, 1.0)
    load_method("heterofl").train(job)
    assert all(not module._forward_hooks for module in job.engine.model.modules())
    assert {module.momentum for module in job.engine.model.modules() if isinstance(module, nn.BatchNorm2d)} == {0.1}
