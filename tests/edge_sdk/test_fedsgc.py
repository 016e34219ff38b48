"""FedSGC's and FedDST's device halves: numbers worked out by hand, and what holds for every network."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.feddst import FEDDST
from edge_sdk.methods.fedsgc import FEDSGC, replacing
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import ElementMask, check_elements
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import growth_flops, training_flops
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, merge_in_place, pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.parts import expected as expected_parts
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, over_pruning, random_mask

from .networks import convolutions, perceptron

OWN = {
    "density": 0.3,
    "layer_sparsity": "uniform",
    "device_interval": 1,
    "of_rounds": 0,
    "over_pruning": 0.5,
    "adjust_at": "penultimate",
    "grow_batches": 1,
    "exploration": 1.0,
    "proximal_weight": 0.0,
    "guided_share": 0.3,
    "guided_basis": "total",
}


def job_of(
    network,
    *,
    seed=0,
    examples=22,
    epochs_before=0,
    expected=50,
    signs="active",
    signs_seed=0,
    number=4,
    whole=False,
    **given,
):
    """A round over random samples: the payload is a random sparse model, and directions where ``signs`` says."""
    own = {**OWN, **{name: given.pop(name) for name in list(given) if name in OWN}}
    torch.manual_seed(seed)
    model, shape = network() if callable(network) else network
    inputs = torch.randn(examples, *shape)
    manifest = describe(model, inputs[:2], task="t")
    outputs = manifest.output_shape[0]
    arrays = Arrays(inputs, torch.arange(examples) % outputs)
    task = classification("t", model, arrays, arrays, None, batch_size=8)
    counts = layer_counts(manifest, own["density"], own["layer_sparsity"])
    mask = None if whole else random_mask(manifest, counts, seed)
    size = 0 if whole else {"active": mask.count, "all": mask.size, "none": 0}[signs]
    directions = np.random.default_rng(signs_seed).integers(-1, 2, size=size).astype(np.int8) if size else None
    body = encode(
        manifest,
        pack(manifest, get_tensors(model, manifest), mask),
        mask,
        parts=None if directions is None else {"signs": directions},
    )
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=number,
        deadline_seconds=9,
        settings=FederationSettings(**{"local_epochs": 2, "early_stopping": "off", "method_settings": own, **given}),
        plan={"expected_epochs": expected} if expected else {},
    )
    state = DeviceState(None, {"epochs": epochs_before} if epochs_before else {})
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state,
        decode(body, manifest, parts=expected_parts(FEDSGC.payload_parts, manifest, {})),
        federation="f",
        device="pi",
    )


MLP = lambda: perceptron(12, 20, 16, 4)  # noqa: E731
CNN = lambda: convolutions(6, 3, 10, dropout=True)  # noqa: E731


def same_update(one, other):
    assert one.update.mask.digest == other.update.mask.digest
    np.testing.assert_array_equal(one.update.values, other.update.values)


# --- prune and grow on ten weights ------------------------------------------------------------------------------

VECTOR = {
    "theta": [0.12, -0.10, 0.30, -0.40, 0.06, 0.05, 0, 0, 0, 0],
    "theta0": [0.10, -0.15, 0.35, -0.30, 0.06, 0.02, 0, 0, 0, 0],
    "mask": [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
    "d": [1, -1, 1, -1, 1, 1, 0, 1, -1, 0],
    "G": [0.03, -0.02, 0.05, 0.01, 0.02, -0.10, 0.90, -0.15, -0.70, 0.30],
}


def ten_weights(share, directions):
    return one_layer(VECTOR, share, directions, density=0.6)


def one_layer(vector, share, directions, *, density):
    """(what replaces, its job, its batch): y = w·x, and a loss that is y: its gradient is the batch, G.

    At half of the expected time σ is α/2, so that it is 0.5 where α is 1.
    """
    model = nn.Sequential(nn.Linear(len(vector["G"]), 1, bias=False))
    manifest = describe(model, torch.zeros(1, len(vector["G"])), task="line")
    mask = ElementMask({"0.weight": np.array([vector["mask"]], dtype=bool)})
    received = np.array([vector["theta0"]], dtype=np.float32)
    signs = np.array(directions, dtype=np.int8)
    body = encode(manifest, pack(manifest, {"0.weight": received}, mask), mask, parts={"signs": signs})
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([vector["theta"]]))
    batch = (torch.tensor([vector["G"]]), torch.zeros(1))
    task = Task("line", model, lambda outputs, targets: outputs.sum(), [batch], [batch], classification=False)
    own = {**OWN, "density": density, "over_pruning": 1.0, "guided_share": share}
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=1,
        deadline_seconds=9,
        settings=FederationSettings(local_epochs=1, method_settings=own),
        plan={"expected_epochs": 2},
    )
    job = Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        DeviceState(),
        decode(body, manifest, parts=expected_parts(FEDSGC.payload_parts, manifest, {})),
    )
    return replacing(job), job, batch


def test_ten_weights_of_the_card():
    replacing, job, batch = ten_weights(0.4, VECTOR["d"])
    assert list(replacing.steps) == [1]
    change = replacing.decide(1, [batch])
    after = [1, 0, 0, 1, 1, 0, 1, 1, 1, 0]
    assert replacing.mask.exists["0.weight"].astype(int).tolist() == [after]
    assert change.elements["0.weight"].astype(int).tolist() == [after]
    weights = job.engine.model[0].weight.detach()
    torch.testing.assert_close(weights, torch.tensor([[0.12, 0, 0, -0.40, 0.06, 0, 0, 0, 0, 0]]))
    assert change.renewed["0.weight"].astype(int).tolist() == [[0, 1, 1, 0, 0, 1, 1, 1, 1, 0]]
    assert replacing.counts == {"dropped": 3, "dropped_guided": 2, "grown_guided": 1, "replaced": 3, "adjusted": 1}
    assert replacing.flops == growth_flops(job.manifest, 1, replacing.mask)


@pytest.mark.parametrize(("share", "directions"), [(0.0, VECTOR["d"]), (0.4, [0] * 10)], ids=["share", "directions"])
def test_ten_weights_without_guidance(share, directions):
    replacing, job, batch = ten_weights(share, directions)
    change = replacing.decide(1, [batch])
    assert change.elements["0.weight"].astype(int).tolist() == [[1, 0, 1, 1, 0, 0, 1, 0, 1, 1]]
    weights = job.engine.model[0].weight.detach()
    torch.testing.assert_close(weights, torch.tensor([[0.12, 0, 0.30, -0.40, 0, 0, 0, 0, 0, 0]]))
    assert (replacing.counts["dropped_guided"], replacing.counts["grown_guided"]) == (0, 0)


def test_directions_of_weights_that_exist_alone_protect_small_ones_that_agree():
    """The map of the active six: 5, dropped as the smallest left, is congruent and taken back, with its value.

    Guided growth, where the map ends at what exists: 7 has no direction any more.
    """
    replacing, job, batch = ten_weights(0.4, VECTOR["d"][:6])
    change = replacing.decide(1, [batch])
    assert change.elements["0.weight"].astype(int).tolist() == [[1, 0, 0, 1, 1, 1, 1, 0, 1, 0]]
    weights = job.engine.model[0].weight.detach()
    torch.testing.assert_close(weights, torch.tensor([[0.12, 0, 0, -0.40, 0.06, 0.05, 0, 0, 0, 0]]))
    assert change.renewed["0.weight"].astype(int).tolist() == [[0, 1, 1, 0, 0, 1, 1, 0, 1, 0]], "but without its memory"
    assert replacing.counts == {"dropped": 3, "dropped_guided": 2, "grown_guided": 1, "replaced": 2, "adjusted": 1}


def test_revived_weights_start_at_zero_if_no_other_is_left():
    """Of four weights three exist; 1 and 2 go, 3 comes, and of the two the one of the larger gradient must return."""
    vector = {"theta": [0.3, 0.2, 0.1, 0], "theta0": [0.3, 0.4, 0.3, 0], "mask": [1, 1, 1, 0], "G": [0, 0.5, 0.1, 0.2]}
    replacing, job, batch = one_layer(vector, 1.0, [0, 1, 1, 0], density=0.75)
    change = replacing.decide(1, [batch])
    assert replacing.counts["dropped_guided"] == 2
    assert change.elements["0.weight"].astype(int).tolist() == [[1, 1, 0, 1]]
    assert change.renewed["0.weight"].astype(int).tolist() == [[0, 1, 1, 1]]
    torch.testing.assert_close(job.engine.model[0].weight.detach(), torch.tensor([[0.3, 0, 0, 0]]))


@pytest.mark.parametrize("count", [0, 5, 7, 11])
def test_directions_of_another_number_are_refused(count):
    signs = np.zeros(count, dtype=np.int8)
    _, job, _ = ten_weights(0.4, VECTOR["d"])
    received = dataclasses.replace(job.received, parts={"signs": signs})
    with pytest.raises(BundleError, match=f"{count} directions for 6 weights"):
        replacing(dataclasses.replace(job, received=received))


# --- section 8.2: when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "epochs", "interval", "expected", "plan"),
    [
        (15, 5, 20, 200, [4]),
        (10, 5, 20, 200, []),
        (195, 5, 20, 200, []),
        (40, 20, 10, 800, [10, 19]),
        (790, 20, 10, 800, []),
        (15, 5, 20, 0, []),
        (19, 1, 20, 200, [0.5]),
    ],
)
def test_a_device_goes_by_its_own_epochs(before, epochs, interval, expected, plan):
    job = job_of(MLP, epochs_before=before, local_epochs=epochs, device_interval=interval, expected=expected)
    batches = len(job.task.train)
    assert list(replacing(job).steps) == [math.ceil(batches * epoch) for epoch in plan]


def test_epochs_are_remembered_and_counted_on_whether_or_not_anything_is_replaced():
    first = FEDSGC.train(job_of(MLP, expected=0))
    assert first.state.memory["epochs"] == 2
    assert first.state.personal is None
    job = job_of(MLP, number=5, local_epochs=3)
    noted = dataclasses.replace(job, state=DeviceState(None, {**first.state.memory, "mine": 1}))
    second = FEDSGC.train(noted)
    assert second.state.memory["epochs"] == 5
    assert second.state.memory["mine"] == 1
    stopping = job_of(MLP, early_stopping="paper")
    assert set(FEDSGC.train(stopping).state.memory) == {"epochs", "last_loss", "increases"}


def test_boldness_follows_the_devices_own_time():
    """Of 0.3·W weights σ(t) are dropped in every layer, and as many revived."""
    job = job_of(MLP, epochs_before=18, local_epochs=3, device_interval=20, expected=40)
    trained = FEDSGC.train(job)
    sigma = over_pruning(20, 40, 0.5)
    wanted = 0
    for spec in job.manifest.maskable:
        exist = trained.update.mask.counts[spec.name]
        wanted += exist - math.floor((1 - sigma) * 0.3 * spec.size + 1e-9)
    assert sigma == pytest.approx(0.25)
    assert trained.counts["dropped"] == wanted
    assert trained.counts["adjusted"] == 1


# --- a round -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "clip": 1.0}])
def test_a_round_that_replaces_nothing_is_fedavgs_under_the_mask(network, optimizer):
    fedavg = FEDAVG.train(job_of(network, expected=0, **optimizer))
    fedsgc = FEDSGC.train(job_of(network, expected=0, **optimizer))
    same_update(fedsgc, fedavg)
    assert fedsgc.flops == fedavg.flops
    assert fedsgc.train_loss == fedavg.train_loss
    assert not fedsgc.counts


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("proximal_weight", [0.0, 0.1])
def test_feddst_is_fedsgc_without_guidance(network, proximal_weight):
    own = {"proximal_weight": proximal_weight, "local_epochs": 3}
    job = job_of(network, signs="none", **own)
    settings = job.assignment.settings.model_dump()
    for name in ("guided_share", "guided_basis"):  # which FedDST's settings do not have
        del settings["method_settings"][name]
    assignment = job.assignment.model_copy(update={"settings": FederationSettings(**settings)})
    feddst = FEDDST.train(dataclasses.replace(job, assignment=assignment))
    fedsgc = FEDSGC.train(job_of(network, guided_share=0.0, signs="active", **own))
    same_update(feddst, fedsgc)
    assert feddst.counts == fedsgc.counts
    assert feddst.counts["replaced"] > 0
    assert feddst.counts["dropped_guided"] == feddst.counts["grown_guided"] == 0
    assert feddst.flops == fedsgc.flops


def test_a_round_is_the_same_done_again_and_another_with_another_map():
    one, again = (FEDSGC.train(job_of(CNN, signs="all")) for _ in range(2))
    same_update(one, again)
    other = FEDSGC.train(job_of(CNN, signs="all", signs_seed=1))
    assert one.counts["dropped_guided"] > 0
    assert one.counts["grown_guided"] > 0
    assert other.update.mask.digest != one.update.mask.digest


def test_flops_are_those_of_what_exists_and_of_the_batches_that_decide():
    job = job_of(MLP, local_epochs=3, grow_batches=2)
    trained = FEDSGC.train(job)
    adjusted = trained.counts["adjusted"]
    assert adjusted == 2, "what is due after the last epoch joins what is due after the one before"
    mask = job.received.mask
    sizes = [len(targets) for _, targets in job.task.train]
    shown = sum(sizes[-2:])  # at the end of an epoch
    assert trained.flops == training_flops(job.manifest, 3 * 22, weight_gradients=mask) + adjusted * growth_flops(
        job.manifest, shown, mask
    )


@pytest.mark.parametrize("exploration", [0.3, 0.6])
def test_limited_exploration_chooses_others_and_as_many(exploration):
    every, some, again = (
        FEDSGC.train(job_of(MLP, exploration=share, signs="none")) for share in (1.0, exploration, exploration)
    )
    same_update(some, again)
    assert some.update.mask.digest != every.update.mask.digest
    assert some.update.mask.counts == every.update.mask.counts


def test_the_pull_of_fedprox_holds_back_what_exists_alone():
    free = FEDSGC.train(job_of(MLP, expected=0))
    held = FEDSGC.train(job_of(MLP, expected=0, proximal_weight=5.0))
    start = job_of(MLP).received.values
    assert np.abs(held.update.values - start).sum() < 0.9 * np.abs(free.update.values - start).sum()


def test_the_batch_that_decides_is_not_counted_in_running_statistics():
    """What is replaced after the last step leaves everything else of the round as it is without."""
    plain, replaced = job_of(CNN, expected=0), job_of(CNN, adjust_at="end", device_interval=2)
    one, other = FEDSGC.train(plain), FEDSGC.train(replaced)
    assert other.counts["replaced"] > 0
    for name, tensor in get_tensors(plain.engine.model, plain.manifest).items():
        if name not in plain.received.mask.exists:
            np.testing.assert_array_equal(
                get_tensors(replaced.engine.model, plain.manifest)[name], tensor, err_msg=name
            )
    assert int(replaced.engine.model[1].num_batches_tracked) == one.steps == other.steps


def test_a_dense_model_has_nothing_to_replace():
    trained = FEDSGC.train(job_of(MLP, density=1.0))
    assert trained.update.mask.count == trained.update.mask.size
    assert not trained.counts
    same_update(trained, FEDAVG.train(job_of(MLP, density=1.0)))


def test_layers_that_are_dense_stay_so():
    """Erdos-Renyi-Kernel keeps the smallest layer whole."""
    job = job_of(lambda: perceptron(30, 30, 3), density=0.3, layer_sparsity="erk")
    counts = job.received.mask.counts
    assert counts["2.weight"] == 90 > counts["0.weight"] / 4
    trained = FEDSGC.train(job)
    assert trained.update.mask.counts == counts
    assert trained.counts["replaced"] > 0


def test_a_round_that_diverges_where_weights_are_replaced_has_failed():
    """The loss of the last step was finite, the weights after it are not; the model can be used for the next round."""
    job = job_of(MLP, examples=8, local_epochs=1, learning_rate=100.0)
    huge = dataclasses.replace(job.task, loss=lambda outputs, targets: 1e36 * F.cross_entropy(outputs, targets))
    with pytest.raises(TrainingDiverged, match=r"step 1\b"):
        FEDSGC.train(dataclasses.replace(job, task=huge, engine=TorchEngine(huge, job.manifest)))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in job.engine.model.parameters())
    calm = job_of(MLP, local_epochs=1)
    task = dataclasses.replace(calm.task, model=job.engine.model)
    again = dataclasses.replace(calm, task=task, engine=TorchEngine(task, calm.manifest))
    same_update(FEDSGC.train(again), FEDSGC.train(job_of(MLP, local_epochs=1)))


@pytest.mark.parametrize("payload", ["nothing", "the whole model", "neurons"])
def test_a_payload_without_a_mask_of_elements_is_refused(payload):
    job = job_of(MLP, whole=True)
    if payload == "nothing":
        job = dataclasses.replace(job, received=None)
    if payload == "neurons":
        mask = draw_neurons(job.manifest, NeuronDraw("pi", 0.5))
        values = np.zeros(count_values(job.manifest, mask), dtype=np.float32)
        job = dataclasses.replace(job, received=decode(encode(job.manifest, values, mask), job.manifest))
    with pytest.raises(BundleError):
        FEDSGC.train(job)


def test_evaluating_and_adapting_are_fedavgs():
    job = job_of(MLP, finetune_epochs=3)
    found = FEDSGC.evaluate(job)
    assert found.personal.loss < found.global_model.loss
    personal = FEDSGC.adapt(job).personal
    for name, exists in job.received.mask.exists.items():
        assert not personal[name][~exists].any(), "a personal model is as sparse as the global one"


def test_the_methods_are_found_by_their_names():
    assert load_method("fedsgc") is FEDSGC
    assert load_method("feddst") is FEDDST


# --- every network -----------------------------------------------------------------------------------------------


@st.composite
def networks(draw):
    if draw(st.booleans()):
        widths = draw(st.lists(st.integers(2, 14), min_size=3, max_size=4))
        return perceptron(*widths)
    return convolutions(
        draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 5])), draw(st.integers(1, 9)), dropout=True
    )


@pytest.mark.integration
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_after_every_round_each_layer_has_exactly_its_weights_and_nothing_else_exists(data):
    """Three rounds in a row: what a device sends is what it gets next."""
    choose = data.draw
    torch.manual_seed(0)
    job = job_of(
        choose(networks()),
        seed=choose(st.integers(0, 99)),
        density=choose(st.sampled_from([0.02, 0.1, 0.35, 0.6, 0.97, 1.0])),
        layer_sparsity=choose(st.sampled_from(["erk", "feddst", "uniform"])),
        over_pruning=choose(st.sampled_from([0.0, 0.1, 0.5, 0.99])),
        guided_share=choose(st.sampled_from([0.0, 0.01, 0.5, 1.0])),
        guided_basis=choose(st.sampled_from(["total", "moved"])),
        adjust_at=choose(st.sampled_from(["penultimate", "end"])),
        exploration=choose(st.sampled_from([0.01, 0.5, 1.0])),
        grow_batches=choose(st.integers(1, 4)),
        proximal_weight=choose(st.sampled_from([0.0, 0.3])),
        signs=choose(st.sampled_from(["none", "active", "all"])),
        local_epochs=choose(st.integers(1, 3)),
        **choose(st.sampled_from([{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])),
    )
    wanted = job.received.mask.counts
    for number in range(1, 4):
        trained = FEDSGC.train(job)
        mask, values = trained.update.mask, trained.update.values
        check_elements(job.manifest, mask)
        assert mask.counts == wanted, f"round {number}"
        assert mask.counts == {name: int(flags.sum()) for name, flags in mask.exists.items()}
        assert values.shape == (count_values(job.manifest, mask),)
        assert np.isfinite(values).all()
        held = {spec.name: np.zeros(spec.shape, np.float32) for spec in job.manifest.shared}
        merge_in_place(job.manifest, held, values, mask)
        for name, tensor in get_tensors(job.engine.model, job.manifest).items():
            np.testing.assert_array_equal(tensor, held[name], err_msg=f"{name}: something exists outside of the mask")
        assert all(parameter.grad is None and parameter.requires_grad for parameter in job.engine.model.parameters())
        assert trained.state.memory["epochs"] == number * job.assignment.settings.local_epochs
        received = decode(encode(job.manifest, values, mask), job.manifest)
        job = dataclasses.replace(job, received=received, state=trained.state)
