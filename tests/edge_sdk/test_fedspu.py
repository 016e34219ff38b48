"""FedSPU's device half: vector V6 by hand, the merge, and what must hold for any model."""

from __future__ import annotations

import dataclasses
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.training import derive_seed
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.fedspu import FEDSPU
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, build_seeded, passes
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensors, get_tensors, set_tensors
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import Bundle, decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec, initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_group, draw_neurons, merge_in_place, pack
from sparrow.protocol.messages import Assignment, Work
from sparrow.protocol.settings import FederationSettings


def hidden(name):
    return (Segment(group=name),)


class TwoLayers(nn.Module):
    """y = W2·W1·x."""

    def __init__(self):
        super().__init__()
        self.W1 = nn.Linear(2, 2, bias=False)
        self.W2 = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.W2(self.W1(x))


TWO_LAYERS = Manifest(
    task="v6",
    input_shape=(2,),
    output_shape=(1,),
    tensors=(
        TensorSpec(name="W1.weight", shape=(2, 2), axes=(hidden("h"), ())),
        TensorSpec(name="W2.weight", shape=(1, 2), axes=((), hidden("h"))),
    ),
    groups=(NeuronGroup(name="h", size=2),),
)


def two_layers(w1, w2):
    return {"W1.weight": np.array(w1, dtype=np.float32), "W2.weight": np.array(w2, dtype=np.float32)}


PERSONAL = two_layers([[1, 0], [0, 1]], [[1, 1]])
GLOBAL = two_layers([[2, 1], [1, 2]], [[0.5, 0.5]])
SECOND = NeuronMask({"h": np.array([1])})


def round_that_draws(index):
    """The first round in which half of the two hidden neurons is neuron ``index``."""
    return next(r for r in range(1, 100) if draw_group(NeuronDraw(f"{r:032x}", 0.5), "h", 2).tolist() == [index])


def payload(manifest, tensors, mask=None):
    """What a device would decode."""
    return decode(encode(manifest, pack(manifest, tensors, mask), mask), manifest)


def v6_job(received, *, personal=PERSONAL, **settings):
    settings = FederationSettings(learning_rate=0.1, local_epochs=1, early_stopping="off", **settings)
    number = round_that_draws(1)
    batches = [(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.5]]))]
    model = TwoLayers()
    task = Task("v6", model, lambda y, target: 0.5 * F.mse_loss(y, target), batches, batches, classification=False)
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=number,
        deadline_seconds=60,
        settings=settings,
        work=Work(key=f"{number:032x}", ratio=0.5),
    )
    return Job(assignment, TWO_LAYERS, task, TorchEngine(task, TWO_LAYERS), DeviceState(personal), received)


@pytest.mark.parametrize("mask", [SECOND, None], ids=["partial payload", "whole payload sent again"])
def test_v6_one_step_by_hand(mask):
    trained = FEDSPU.train(v6_job(payload(TWO_LAYERS, GLOBAL, mask)))
    personal = trained.state.personal
    np.testing.assert_allclose(personal["W1.weight"], [[1, 0], [0.95, 1.9]], rtol=1e-6)
    np.testing.assert_allclose(personal["W2.weight"], [[1, 0]], atol=1e-6)
    np.testing.assert_allclose(trained.update.values, [0.95, 1.9, 0.0], atol=1e-6)
    assert trained.update.mask.active["h"].tolist() == [1]
    assert trained.update.draw == NeuronDraw(f"{round_that_draws(1):032x}", 0.5)
    assert trained.train_loss == pytest.approx(0.5)  # ½(3.5 - 2.5)², before the step
    assert (trained.num_examples, trained.steps, trained.stopped) == (1, 1, False)
    assert (trained.validation.num_examples, trained.stop_loss) == (1, None)


def test_clipping_counts_active_gradients_only():
    personal = FEDSPU.train(v6_job(payload(TWO_LAYERS, GLOBAL), clip=1.0)).state.personal
    norm = np.sqrt(0.5**2 + 1**2 + 5**2)  # with the frozen entries it would be 5.71
    np.testing.assert_allclose(personal["W1.weight"][1], [1 - 0.05 / norm, 2 - 0.1 / norm], rtol=1e-5)
    np.testing.assert_allclose(personal["W2.weight"][0], [1, 0.5 - 0.5 / norm], rtol=1e-5)


def test_the_state_given_is_left_alone():
    job = v6_job(payload(TWO_LAYERS, GLOBAL))
    FEDSPU.train(job)
    assert job.state.personal["W1.weight"].tolist() == [[1, 0], [0, 1]]


def test_the_first_download_is_kept_whole():
    personal = FEDSPU.train(v6_job(payload(TWO_LAYERS, GLOBAL), personal=None)).state.personal
    assert personal["W1.weight"][0].tolist() == [2, 1]
    assert personal["W2.weight"][0, 0] == 0.5


@pytest.mark.parametrize("start", ["current", "initial"])
def test_a_device_begins_with_the_model_of_today_or_with_the_first_of_all(start):
    """Where nothing is trained in its first round; what is trained begins with today's."""
    manifest = load_builtin("digits").manifest
    first = initial_values(manifest, 0)
    today = {name: values + np.float32(1) for name, values in first.items()}
    draw = NeuronDraw("a" * 32, 0.5)
    mask = draw_neurons(manifest, draw)
    settings = {"method": "fedspu", "local_steps": 1, "learning_rate": 1e-9, "method_settings": {"start": start}}
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=5,
        deadline_seconds=9,
        settings=FederationSettings(**settings, early_stopping="off"),
        work=Work(key="a" * 32, ratio=0.5),
    )
    body = encode(manifest, pack(manifest, today, None), None)
    arrays = Arrays(torch.randn(8, 1, 8, 8), torch.arange(8) % 10)
    task = classification("digits", DigitsNet(), arrays, arrays, None, batch_size=8)
    engine = TorchEngine(task, manifest)
    job = Job(assignment, manifest, task, engine, DeviceState(), decode(body, manifest))
    found = FEDSPU.train(job).state.personal
    for spec in manifest.shared:
        if spec.trainable:
            wanted = dict(today if start == "current" else first)[spec.name].copy()
            block = block_of(manifest, spec, mask)
            block.put(wanted, block.take(today[spec.name]))
            np.testing.assert_allclose(found[spec.name], wanted, atol=1e-5)


def test_a_first_download_that_is_not_whole_is_refused():
    with pytest.raises(BundleError, match="hand the assignment back"):
        FEDSPU.train(v6_job(payload(TWO_LAYERS, GLOBAL, SECOND), personal=None))


def test_a_payload_under_another_mask_is_refused():
    first = NeuronMask({"h": np.array([0])})
    with pytest.raises(BundleError, match="mask differs from the assignment's"):
        FEDSPU.train(v6_job(payload(TWO_LAYERS, GLOBAL, first)))


def test_a_missing_payload_is_refused():
    with pytest.raises(BundleError, match="has no payload"):
        FEDSPU.train(v6_job(None))


# --- any model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_manifest():
    return describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits")


def digits_job(manifest, ratio=0.4, *, kind="train", state=None, received=None, number=1, **settings):
    """A round over thirty random images, from weights that follow from seed 0."""
    generator = torch.Generator().manual_seed(0)
    model = build_seeded(DigitsNet, 0)
    arrays = Arrays(torch.rand(30, 1, 8, 8, generator=generator), torch.arange(30) % 10)
    task = classification("digits", model, arrays, arrays, None, batch_size=8)
    work = None if ratio is None else Work(key=f"{number:032x}", ratio=ratio)
    assignment = Assignment(
        assignment_id="a",
        kind=kind,
        round=number,
        deadline_seconds=60,
        settings=FederationSettings(local_epochs=2, **settings),
        work=work,
    )
    whole = payload(manifest, get_tensors(model, manifest))
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state or DeviceState(),
        received or whole,
        federation="f",
        device="pi",
    )


def test_equal_seeds_give_equal_bytes(digits_manifest):
    def update():
        trained = FEDSPU.train(digits_job(digits_manifest))
        return encode(digits_manifest, trained.update.values, trained.update.mask, draw=trained.update.draw)

    torch.manual_seed(1)
    first = update()
    torch.manual_seed(2)
    assert update() == first


@pytest.mark.parametrize("ratio", [1.0, None])
def test_at_ratio_1_a_round_is_plain_training(digits_manifest, ratio):
    job = digits_job(digits_manifest, ratio, learning_rate=0.1, momentum=0.5)
    trained = FEDSPU.train(job)
    plain = build_seeded(DigitsNet, 0).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    batches = passes(job.task.train, derive_seed("f:0", "pi", 1, "train"))
    for inputs, targets in map(as_tensors, islice(batches, 2 * len(job.task.train))):
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    for name, tensor in get_tensors(plain, digits_manifest).items():
        np.testing.assert_array_equal(trained.state.personal[name], tensor, err_msg=name)
    np.testing.assert_array_equal(trained.update.values, pack(digits_manifest, trained.state.personal, None))


def test_a_round_changes_the_active_part_only_and_sends_exactly_it(digits_manifest):
    first = FEDSPU.train(digits_job(digits_manifest))
    personal = first.state.personal
    mask = draw_neurons(digits_manifest, NeuronDraw(f"{2:032x}", 0.4))
    everywhere = {spec.name: np.full(spec.shape, 0.01, dtype=np.float32) for spec in digits_manifest.shared}
    received = payload(digits_manifest, everywhere, mask)
    second = FEDSPU.train(digits_job(digits_manifest, state=first.state, received=received, number=2))
    for spec in digits_manifest.tensors:
        if spec.trainable:
            active = np.zeros(spec.shape, dtype=bool)
            block = block_of(digits_manifest, spec, mask)
            block.put(active, np.ones(block.shape, dtype=bool))
            np.testing.assert_array_equal(second.state.personal[spec.name][~active], personal[spec.name][~active])
    assert second.update.values.size == received.values.size
    merge_in_place(digits_manifest, personal, second.update.values, mask)
    for spec in digits_manifest.shared:
        if spec.trainable:
            np.testing.assert_array_equal(personal[spec.name], second.state.personal[spec.name])


def test_a_mask_with_every_neuron_counts_as_whole(digits_manifest):
    job = digits_job(digits_manifest, 1.0)
    mask = draw_neurons(digits_manifest, NeuronDraw(f"{1:032x}", 1.0))
    received = dataclasses.replace(job.received, mask=mask)
    trained = FEDSPU.train(dataclasses.replace(job, received=received))
    alone = FEDSPU.train(digits_job(digits_manifest, 1.0))
    np.testing.assert_array_equal(trained.update.values, alone.update.values)


def test_tensors_that_never_travel_stay_on_the_device():
    manifest = describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits", running_statistics="personal")
    trained = FEDSPU.train(digits_job(manifest))
    assert "bn1.running_mean" in trained.state.personal
    assert trained.update.values.size < manifest.shared_values
    again = FEDSPU.train(digits_job(manifest, state=trained.state, number=2, local_steps=1))
    moved = again.state.personal["bn1.running_mean"]
    np.testing.assert_allclose(moved, trained.state.personal["bn1.running_mean"], atol=0.1)
    assert moved.any()


def test_early_stopping_remembers_its_last_participation(digits_manifest):
    settings = {"learning_rate": 1e-6, "early_stopping": "paper", "stop_weight": 0.0}
    first = FEDSPU.train(digits_job(digits_manifest, 1.0, **settings))
    assert not first.stopped
    assert first.stop_loss == first.validation.loss
    assert first.state.memory == {"last_loss": first.stop_loss, "increases": 0}
    lower = DeviceState(first.state.personal, {"last_loss": first.stop_loss / 2, "increases": 0})
    second = FEDSPU.train(digits_job(digits_manifest, 1.0, state=lower, **settings))
    assert second.stopped
    assert second.update.values.size == digits_manifest.shared_values
    patient = FEDSPU.train(digits_job(digits_manifest, 1.0, state=lower, patience=2, **settings))
    assert not patient.stopped
    assert patient.state.memory["increases"] == 1


def test_personal_and_global_model_are_judged_apart(digits_manifest):
    job = digits_job(digits_manifest, kind="evaluate")
    assert FEDSPU.evaluate(dataclasses.replace(job, received=None)) == dataclasses.replace(
        FEDSPU.evaluate(job), global_model=None, validation=None
    )
    trained = FEDSPU.train(digits_job(digits_manifest, 1.0, local_steps=60, learning_rate=0.1))
    found = FEDSPU.evaluate(dataclasses.replace(job, state=trained.state))
    assert found.personal.loss < found.global_model.loss
    before = FEDSPU.evaluate(job)
    assert before.personal is None
    assert before.global_model.loss == pytest.approx(found.global_model.loss)


def test_evaluation_needs_the_whole_global_model(digits_manifest):
    mask = draw_neurons(digits_manifest, NeuronDraw(f"{1:032x}", 0.4))
    job = digits_job(digits_manifest, kind="evaluate")
    partial = Bundle(
        pack(digits_manifest, get_tensors(job.engine.model, digits_manifest), mask), mask, None, "fp32", ""
    )
    with pytest.raises(BundleError, match="sends the whole model"):
        FEDSPU.evaluate(dataclasses.replace(job, received=partial))


def test_adapting_fine_tunes_the_global_model_under_the_mask(digits_manifest):
    job = digits_job(digits_manifest, kind="adapt", number=9)
    start = get_tensors(job.engine.model, digits_manifest)
    set_tensors(job.engine.model, {name: np.zeros_like(tensor) for name, tensor in start.items()})
    state = FEDSPU.adapt(job)
    mask = draw_neurons(digits_manifest, NeuronDraw(f"{9:032x}", 0.4))
    spec = next(spec for spec in digits_manifest.shared if spec.name == "conv2.weight")
    block = block_of(digits_manifest, spec, mask)
    changed = state.personal["conv2.weight"] != start["conv2.weight"]
    assert block.take(changed).any()
    block.put(changed, np.zeros(block.shape, dtype=bool))
    assert not changed.any()


def test_adapting_takes_a_round_or_the_set_epochs(digits_manifest):
    def steps(**settings):
        done = []
        job = digits_job(digits_manifest, kind="adapt", **settings)
        FEDSPU.adapt(dataclasses.replace(job, progress=lambda step, total, loss: done.append(step)))
        return len(done)

    assert steps() == 2 * 4
    assert steps(finetune_epochs=5) == 5 * 4


def test_validation_is_the_personal_models_or_else_the_global_ones(digits_manifest):
    job = digits_job(digits_manifest, kind="evaluate")
    without = FEDSPU.evaluate(job)
    assert without.validation == without.global_model
    trained = FEDSPU.train(digits_job(digits_manifest, 1.0, local_steps=60, learning_rate=0.1))
    found = FEDSPU.evaluate(dataclasses.replace(job, state=trained.state))
    assert found.validation == found.personal != found.global_model


def test_the_method_is_found_by_its_name():
    assert load_method("fedspu") is FEDSPU


@pytest.mark.parametrize(("alone", "times"), [(False, 1), (True, 2)])
def test_a_local_only_model_counts_in_the_cost_of_a_budget(alone, times):
    manifest = load_builtin("digits").manifest
    settings = FederationSettings(method="fedspu", method_settings={"alone": alone})
    rehearsal = SimpleNamespace(
        manifest=manifest,
        settings=settings,
        samples=16,
        flops=lambda samples, mask: 1000 * samples,
        train=lambda steps, mask, samples: [0.5] * (steps - 1),
    )
    effort = FEDSPU.at_budget(rehearsal, 0.5)
    assert effort.flops() == times * 16_000
    assert effort.train(4) == [times * 0.5] * 3
    assert effort.values < manifest.shared_values, "but it sends no more"
