"""DM-PFL's device half: numbers worked out by hand, and what holds for every network."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_sdk.device.state import Progress, StateFolder
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.adaptive import entropy
from edge_sdk.methods.dmpfl import DMPFL, _composed, _replacing
from edge_sdk.methods.dual import Dual
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensor, evaluate, get_tensors, set_tensors
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import ElementMask, check_elements
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import growth_flops, training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, random_mask

from .networks import convolutions, perceptron

OWN = {
    "density": 0.4,
    "layer_sparsity": "uniform",
    "personal_unmasked": True,
    "adjust_at": "penultimate",
    "similarity": "logits",
}


MLP = lambda: perceptron(12, 20, 16, 4)  # noqa: E731
CNN = lambda: convolutions(6, 3, 10)  # noqa: E731


class Device:
    """One device, to whom rounds come one after the other."""

    def __init__(self, network=MLP, *, seed=0, examples=22, **given):
        self.own = {**OWN, **{name: given.pop(name) for name in list(given) if name in OWN}}
        torch.manual_seed(seed)
        self.model, shape = network() if callable(network) else network
        inputs = torch.randn(examples, *shape)
        self.manifest = describe(self.model, inputs[:2], task="t")
        outputs = self.manifest.output_shape[0]
        arrays = Arrays(inputs, torch.arange(examples) % outputs)
        self.task = classification("t", self.model, arrays, arrays, None, batch_size=8)
        self.counts = layer_counts(self.manifest, self.own["density"], self.own["layer_sparsity"])
        self.settings = FederationSettings(
            **{"local_epochs": 2, "early_stopping": "off", "learning_rate": 0.1, "method_settings": self.own, **given}
        )
        self.chance = np.random.default_rng(seed)
        self.tensors = {spec.name: get_tensors(self.model, self.manifest)[spec.name] for spec in self.manifest.shared}
        self.m_g = random_mask(self.manifest, self.counts, seed)
        self.state, self.number = DeviceState(), 0

    def job(self, stage="masks", *, kind="train", m_g=None, **plan):
        mask = m_g or self.m_g
        received = decode(encode(self.manifest, pack(self.manifest, self.tensors, mask), mask), self.manifest)
        assignment = Assignment(
            assignment_id="a",
            kind="personalise" if stage == "personal" else kind,
            round=self.number + 1,
            deadline_seconds=9,
            settings=self.settings,
            plan={"stage": stage, **plan},
        )
        return Job(
            assignment,
            self.manifest,
            self.task,
            TorchEngine(self.task, self.manifest),
            self.state,
            received,
            federation="f",
            device="pi",
        )

    def play(self, stage="masks", **given):
        job = self.job(stage, **given)
        trained = DMPFL.personalise(job) if stage == "personal" else DMPFL.train(job)
        self.state, self.number = trained.state, self.number + 1
        return trained

    def move(self, *, drop=3, noise=0.3):
        """What other devices have made of the global model: other weights, and in each layer fewer."""
        exists = {name: array.copy() for name, array in self.m_g.exists.items()}
        for flags in exists.values():
            flat = flags.reshape(-1)
            here, there = np.flatnonzero(flat), np.flatnonzero(~flat)
            flat[self.chance.permutation(here)[:drop]] = False
            flat[self.chance.permutation(there)[: max(0, drop - 1)]] = True
        self.m_g = ElementMask(exists)
        self.tensors = {
            name: tensor + self.chance.normal(scale=noise, size=tensor.shape).astype(np.float32) ** 2
            for name, tensor in self.tensors.items()
        }

    @property
    def dual(self):
        return Dual.load(self.manifest, self.state.personal, self.state.own)


# --- 8.1 and 8.2: composition -----------------------------------------------------------------------------------------

FIGURE = {
    "m_g": [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
    "m_c": [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 1, 1]],
    "w_g": [[1.2, 1.3, 0, 0], [0, 1.4, -1.0, 0], [0, 0, 0, -1.1]],
    "theta_c": [[0, 1.3, 0, 0], [0, 0, -1.0, 0], [0.3, 0, 2.1, -1.1]],
}
START2 = [
    [[0, 0.9, 0, 0], [0.4, 0, -1.0, 0], [0, 1.1, 0, -1.1]],
    [[0.6, 0, 0, 0], [0, -1.1, -1.0, 0], [0, -0.9, 0, -1.1]],
]
START3 = [
    [[0, 0.9, 0, 0], [0.8, 0, -0.8, 0], [0, 0.6, 0, -0.7]],
    [[0.4, 0, 0, 0], [0.8, -0.7, -0.8, 0], [0, 0, 0, -0.7]],
]
UP1 = [
    [[0, 0.9, 0, 0], [0.4, 0, -1.1, 0], [0, 1.1, 0, -1.2]],
    [[0.6, 0, 0, 0], [0, -1.1, -0.9, 0], [0, -0.9, 0, -1.0]],
]
UP2 = [
    [[0, 0.9, 0, 0], [1.0, 0, -1.1, 0], [0, 0.6, 0, -0.6]],
    [[0.4, 0, 0, 0], [0.6, -0.7, -0.5, 0], [0, 0, 0, -0.8]],
]
W_G1 = [[0.6, 0.9, 0.2, -0.1], [0.4, -1.1, -1.0, 0.2], [0.3, 0.1, -0.1, -1.1]]
W_G2 = [[0.4, 0.9, 0.2, -0.1], [0.8, -0.7, -0.8, 0.2], [0.3, 0.6, -0.1, -0.7]]
M_G1 = [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
M_G2 = [[0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]


def grid(personal, m_c, w_g, m_g):
    """A device that holds this personal model of one layer, and is sent that global one."""
    device = Device(lambda: (nn.Sequential(nn.Linear(4, 3, bias=False)), (4,)), density=5 / 12)
    (name,) = device.m_g.exists
    mask = ElementMask({name: np.array(m_c, dtype=bool)})
    device.m_g = ElementMask({name: np.array(m_g, dtype=bool)})
    device.tensors = {name: np.array(w_g, dtype=np.float32)}
    theta = {name: np.array(personal, dtype=np.float32)}
    before = Dual.of(device.manifest, theta, mask, device.tensors, device.m_g)
    device.state = DeviceState(theta, {}, before.stored())
    dual = _composed(device.job(), device.m_g)
    return dual, name


def test_composition_of_the_card():
    before = [[0, 9.0, 0, 0], [0, 0, 9.0, 0], [0.3, 0, 2.1, 9.0]]
    dual, name = grid(before, FIGURE["m_c"], FIGURE["w_g"], FIGURE["m_g"])
    np.testing.assert_array_equal(dual.personal[name], np.array(FIGURE["theta_c"], dtype=np.float32))
    assert (dual.mask.count, dual.private.count) == (5, 2)  # three are shared
    np.testing.assert_array_equal(dual.global_model()[name], np.array(FIGURE["w_g"], dtype=np.float32))
    np.testing.assert_array_equal(dual.rest, np.array([1.2, 1.4], dtype=np.float32))


@pytest.mark.parametrize(
    ("up", "w_g", "m_g", "start"),
    [
        *((UP1[place], W_G1, M_G1, START2[place]) for place in range(2)),
        *((UP2[place], W_G2, M_G2, START3[place]) for place in range(2)),
    ],
)
def test_what_a_device_starts_from_in_the_next_round(up, w_g, m_g, start):
    dual, name = grid(up, np.array(up) != 0, w_g, m_g)
    np.testing.assert_array_equal(dual.personal[name], np.array(start, dtype=np.float32))
    assert dual.mask.counts[name] == 5
    np.testing.assert_array_equal(dual.global_model()[name], np.array(w_g, dtype=np.float32) * np.array(m_g))


# --- 8.4: prune and regrow --------------------------------------------------------------------------------------------


def eight(weights, mask, gradient, share):
    """(what replaces, its job, its batch): y = w·x and a loss that is y, so that the gradient is the batch."""
    model = nn.Sequential(nn.Linear(len(weights), 1, bias=False))
    manifest = describe(model, torch.zeros(1, len(weights)), task="line")
    m_c = ElementMask({"0.weight": np.array([mask], dtype=bool)})
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([weights]))
    batch = (torch.tensor([gradient]), torch.zeros(1))
    task = Task("line", model, lambda outputs, targets: outputs.sum(), [batch], [batch], classification=False)
    body = encode(manifest, pack(manifest, get_tensors(model, manifest), m_c), m_c)
    assignment = Assignment(
        assignment_id="a",
        kind="train",
        round=1,
        deadline_seconds=9,
        settings=FederationSettings(local_epochs=1, method_settings=OWN),
        plan={"stage": "masks", "replace": share},
    )
    job = Job(assignment, manifest, task, TorchEngine(task, manifest), DeviceState(), decode(body, manifest))
    return _replacing(job, m_c), model, batch


def test_eight_weights_of_the_card():
    replacing, model, batch = eight(
        [0.5, -0.05, 0.3, 0.02, -0.7, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0.1, 0.6, 0.1, 0.2, 0.3, 0.05, -0.9, 0.4],
        0.4,
    )
    change = replacing.decide(1, [batch])
    assert change.elements["0.weight"].astype(int).tolist() == [[1, 1, 1, 0, 1, 0, 1, 0]]
    torch.testing.assert_close(model[0].weight.detach(), torch.tensor([[0.5, -0.05, 0.3, 0, -0.7, 0, 0, 0]]))
    assert (replacing.counts["dropped"], replacing.counts["replaced"]) == (2, 1)
    assert change.renewed["0.weight"].astype(int).tolist() == [[0, 1, 0, 1, 0, 0, 1, 0]]


@pytest.mark.parametrize(("share", "dropped"), [(0.01, 1), (0.2, 1), (0.21, 2), (0.6, 3), (0.99, 5)])
def test_the_number_that_goes_is_rounded_up(share, dropped):
    replacing, _, batch = eight([5.0, 4, 3, 2, 1, 0, 0], [1] * 5 + [0] * 2, [0.0] * 5 + [9, 9], share)
    replacing.decide(1, [batch])
    assert (replacing.counts["dropped"], replacing.counts["replaced"]) == (dropped, min(2, dropped))


def test_among_equals_the_higher_index_goes_and_the_lower_comes():
    replacing, _, batch = eight([0.5, 0.5, 0.5, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0.0, 0, 0, 1, 1, 1], 0.3)
    change = replacing.decide(1, [batch])
    assert change.elements["0.weight"].astype(int).tolist() == [[1, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("epochs", "at", "step"), [(2, "penultimate", 3), (5, "penultimate", 12), (1, "penultimate", 2), (2, "end", 6)]
)
def test_when_in_a_round(epochs, at, step):
    device = Device(local_epochs=epochs, adjust_at=at)
    assert list(_replacing(device.job(replace=0.1), device.m_g).steps) == [step]
    assert list(_replacing(device.job(), device.m_g).steps) == []
    assert list(_replacing(device.job(replace=0.0), device.m_g).steps) == []


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"}])
def test_with_the_global_mask_the_stage_masks_is_fedavg_under_it(network, more):
    device, other = Device(network, **more), Device(network, **more)
    trained, fedavg = device.play(), FEDAVG.train(other.job())
    np.testing.assert_array_equal(trained.update.values, fedavg.update.values)
    assert trained.update.mask.digest == fedavg.update.mask.digest
    assert trained.flops == fedavg.flops
    assert trained.counts == {"private": 0, "personal": device.m_g.count}


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
def test_the_stage_global_is_fedavg_and_leaves_what_is_ones_own(network):
    device, other = Device(network), Device(network)
    device.play(replace=0.3)
    device.move()
    other.tensors, other.m_g, other.number = device.tensors, device.m_g, device.number
    before = {**device.state.personal, **device.state.own}
    kept = {name: np.array(tensor) for name, tensor in before.items()}
    trained, fedavg = device.play("global"), FEDAVG.train(other.job("global"))
    np.testing.assert_array_equal(trained.update.values, fedavg.update.values)
    after = {**device.state.personal, **device.state.own}
    assert after.keys() == kept.keys()
    assert all(after[name].tobytes() == kept[name].tobytes() for name in kept)


@pytest.mark.integration
@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("personal_unmasked", [True, False])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adamw", "clip": 1.0}])
def test_the_stage_personal_moves_what_is_private_alone(network, personal_unmasked, more):
    device = Device(network, personal_unmasked=personal_unmasked, **more)
    device.play(replace=0.4)
    device.move(drop=4)
    start = _composed(device.job("personal"), device.m_g)
    trained = device.play("personal", epochs=5)
    after = device.dual
    assert trained.update is None
    assert after.mask.digest == start.mask.digest
    assert after.global_mask.digest == device.m_g.digest
    private = after.private
    assert trained.counts == {"private": private.count, "personal": after.mask.count, "personal_steps": trained.steps}
    assert private.count > 0
    moved = 0
    for name, mine in private.exists.items():
        still = ~mine
        assert after.personal[name][still].tobytes() == start.personal[name][still].tobytes(), name
        moved += np.count_nonzero(after.personal[name][mine] != start.personal[name][mine])
    assert moved > 0.5 * private.count
    for name, parameter in device.model.named_parameters():
        if name not in private.exists:
            same = np.array_equal(after.personal[name], device.tensors[name])
            assert same != personal_unmasked or name == "3.bias", name
        assert parameter.requires_grad
    assert trained.steps == 5 * len(device.task.train)
    assert trained.flops == training_flops(device.manifest, 5 * 22, weight_gradients=after.mask)


def test_the_global_model_that_is_kept_is_the_one_received():
    device = Device(CNN)
    device.play(replace=0.4)
    device.move()
    wanted = {name: tensor * device.m_g.exists.get(name, np.float32(1)) for name, tensor in device.tensors.items()}
    for stage in ("masks", "personal"):
        device.play(stage)
        found = device.dual.global_model()
        for name, tensor in wanted.items():
            assert stage == "masks" or np.array_equal(found[name], tensor), name
        for name, exists in device.m_g.exists.items():
            mine = device.dual.mask.exists[name]
            assert np.array_equal(found[name][exists & ~mine], wanted[name][exists & ~mine])
            assert not found[name][~exists].any()


def test_what_nothing_shares_has_no_global_weight():
    device = Device(density=0.4)
    device.play()
    mine = device.dual.mask
    others = ElementMask({name: ~flags for name, flags in mine.exists.items()})
    before = {name: np.array(device.state.personal[name]) for name in mine.exists}
    dual = _composed(device.job(m_g=others), others)
    assert dual.private.counts == mine.counts
    for name, tensor in before.items():
        assert dual.personal[name].tobytes() == tensor.tobytes()


def test_base_entropies_are_those_of_the_training_data():
    device = Device()
    device.play(replace=0.3)
    device.move()
    device.play("personal", epochs=2)
    for name, tensors in (("personal", device.state.personal), ("global", device.dual.global_model())):
        set_tensors(device.model, tensors)
        device.model.eval()
        with torch.no_grad():
            wanted = np.concatenate(
                [entropy(device.model(as_tensor(inputs)).numpy()) for inputs, _ in device.task.train]
            ).mean()
        assert device.state.memory[f"entropy_{name}"] == pytest.approx(wanted, rel=1e-5)


def test_evaluation_has_three_ways_to_predict_after_the_stage_personal():
    device = Device()
    none = DMPFL.evaluate(device.job(kind="evaluate"))
    assert none.personal is None
    assert none.global_model is not None
    device.play(replace=0.3)
    assert not DMPFL.evaluate(device.job(kind="evaluate")).others
    device.play("personal", epochs=3)
    found = DMPFL.evaluate(device.job(kind="evaluate"))
    set_tensors(device.model, device.state.personal)
    assert found.personal == evaluate(device.model, device.task, device.task.held_out)
    assert found.others["adaptive"].num_examples == 22
    without_payload = dataclasses.replace(device.job(kind="evaluate"), received=None)
    assert DMPFL.evaluate(without_payload).global_model is None
    assert DMPFL.evaluate(without_payload).personal == found.personal


def test_a_task_that_is_no_classification_has_no_entropies():
    device = Device(lambda: perceptron(12, 8, 1))
    inputs, _ = next(iter(device.task.train))
    batch = (inputs, torch.zeros(len(inputs)))
    device.task = Task(
        "line", device.model, lambda out, goal: ((out[:, 0] - goal) ** 2).mean(), [batch], [batch], classification=False
    )
    device.play()
    device.play("personal")
    assert not device.state.memory
    assert not DMPFL.evaluate(device.job(kind="evaluate")).others


def test_a_first_meeting_in_the_stage_global_leaves_the_global_model():
    device = Device(CNN)
    device.play("global")
    dual = device.dual
    assert dual.mask.digest == dual.global_mask.digest == device.m_g.digest
    for name, exists in device.m_g.exists.items():
        assert np.array_equal(dual.personal[name], device.tensors[name] * exists)
    assert np.array_equal(dual.personal["1.bias"], device.tensors["1.bias"])


@pytest.mark.parametrize("stage", ["masks", "global", "personal"])
def test_a_newcomers_mask_has_all_its_weights(stage):
    device = Device()
    exists = {name: array.copy() for name, array in device.m_g.exists.items()}
    for flags in exists.values():
        flat = flags.reshape(-1)
        flat[np.flatnonzero(flat)[::2]] = False
    device.m_g = ElementMask(exists)
    assert device.m_g.count < sum(device.counts.values())
    device.play(stage)
    assert device.dual.mask.counts == device.counts
    assert device.m_g.without(device.dual.mask).count == 0


@pytest.mark.parametrize("stage", ["masks", "global", "personal"])
def test_everything_may_exist(stage):
    device = Device(density=1.0)
    trained = device.play(stage, replace=0.2)
    assert device.dual.mask.count == device.dual.mask.size
    assert trained.counts.get("private", 0) == 0


def test_a_stage_personal_without_anything_to_train_trains_nothing():
    device = Device(lambda: (nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)), (6,)))
    trained = device.play("personal", epochs=4)
    assert (trained.steps, trained.flops, trained.num_examples) == (0, 0, 22)
    assert math.isfinite(trained.train_loss)
    memory = device.state.memory
    assert memory["entropy_personal"] == pytest.approx(memory["entropy_global"], rel=1e-5)


def test_parameters_that_the_task_does_not_train_stay_in_the_stage_personal():
    device = Device(personal_unmasked=False)
    device.model[0].bias.requires_grad_(False)
    device.play("personal")
    assert np.array_equal(device.state.personal["0.bias"], device.tensors["0.bias"])


def test_flops_of_a_round_that_replaces():
    device = Device()
    trained = device.play(replace=0.2)
    last = 22 % 8
    assert trained.flops == training_flops(device.manifest, 2 * 22, weight_gradients=device.m_g) + growth_flops(
        device.manifest, last, device.m_g
    )
    assert trained.counts["replaced"] > 0


def test_a_payload_without_a_mask_is_refused():
    device = Device()
    whole = decode(encode(device.manifest, pack(device.manifest, device.tensors, None), None), device.manifest)
    for received in (None, whole):
        for work in (DMPFL.train, DMPFL.personalise):
            with pytest.raises(BundleError):
                work(dataclasses.replace(device.job(), received=received))


def test_the_method_is_found_by_its_name():
    assert load_method("dmpfl") is DMPFL


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_both_have_is_stored_once(tmp_path):
    """One array for the shared weights, in memory and on disk."""
    device = Device(lambda: perceptron(40, 60, 50, 4))
    device.play(replace=0.3)
    device.move()
    device.play("personal")
    dual, own = device.dual, device.state.own
    only_global = dual.global_mask.without(dual.mask).count
    assert own["rest"].nbytes == 4 * only_global
    unmasked = sum(tensor.nbytes for tensor in dual.unmasked.values())
    bits = 2 * math.ceil(dual.mask.size / 8)
    assert sum(array.nbytes for array in own.values()) == 4 * only_global + unmasked + bits
    folder = StateFolder(tmp_path, durable=False)
    folder.save(device.manifest, device.state.personal, Progress(), own)
    personal = sum(tensor.nbytes for tensor in device.state.personal.values())
    extra = (tmp_path / "model.safetensors").stat().st_size - personal
    assert extra < 4 * only_global + unmasked + bits + 3000
    assert extra < 0.35 * personal, "not two models"
    folder.close()


def test_state_comes_back_from_the_disk(tmp_path):
    device = Device(CNN)
    device.play(replace=0.3)
    device.move()
    device.play("personal")
    folder = StateFolder(tmp_path, durable=False)
    folder.save(device.manifest, device.state.personal, Progress(memory=dict(device.state.memory)), device.state.own)
    folder.close()
    folder = StateFolder(tmp_path, durable=False)
    personal, progress = folder.load(device.manifest)
    folder.close()
    assert folder.own.keys() == device.state.own.keys()
    assert all(folder.own[name].tobytes() == array.tobytes() for name, array in device.state.own.items())
    wanted = device.play(replace=0.2)
    device.number -= 1
    device.state = DeviceState(personal, progress.memory, folder.own)
    again = device.play(replace=0.2)
    np.testing.assert_array_equal(wanted.update.values, again.update.values)
    assert wanted.update.mask.digest == again.update.mask.digest


# --- every network ----------------------------------------------------------------------------------------------------


@st.composite
def networks(draw):
    if draw(st.booleans()):
        return perceptron(*draw(st.lists(st.integers(2, 12), min_size=3, max_size=4)))
    return convolutions(draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 5])), draw(st.integers(1, 8)))


@pytest.mark.integration
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_after_every_round_a_personal_mask_has_exactly_its_weights(data):
    choose = data.draw
    torch.manual_seed(0)
    device = Device(
        choose(networks()),
        seed=choose(st.integers(0, 99)),
        density=choose(st.sampled_from([0.05, 0.3, 0.6, 0.97, 1.0])),
        layer_sparsity=choose(st.sampled_from(["erk", "uniform"])),
        adjust_at=choose(st.sampled_from(["penultimate", "end"])),
        personal_unmasked=choose(st.booleans()),
        local_epochs=choose(st.integers(1, 3)),
        **choose(st.sampled_from([{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])),
    )
    share = choose(st.sampled_from([0.0, 0.01, 0.4, 0.99]))
    for stage in choose(st.lists(st.sampled_from(["masks", "global", "personal"]), min_size=2, max_size=4)):
        device.move(drop=choose(st.integers(0, 3)))
        device.m_g = trimmed(device)
        trained = device.play(stage, replace=share)
        dual = device.dual
        check_elements(device.manifest, dual.mask)
        assert dual.mask.counts == device.counts
        for name, exists in dual.mask.exists.items():
            assert not dual.personal[name][~exists].any()
            assert not dual.global_model()[name][~dual.global_mask.exists[name]].any()
        if trained.update is not None:
            sent = device.m_g if stage == "global" else dual.mask
            assert trained.update.mask.digest == sent.digest
        assert all(parameter.grad is None and parameter.requires_grad for parameter in device.model.parameters())


def trimmed(device):
    """The global mask has K_l weights at most."""
    exists = {name: array.copy() for name, array in device.m_g.exists.items()}
    for name, flags in exists.items():
        flat = flags.reshape(-1)
        flat[np.flatnonzero(flat)[device.counts[name] :]] = False
    return ElementMask(exists)


@pytest.mark.parametrize("stage", ["masks", "global", "personal"])
def test_nobody_stops_early_and_misses_the_last_stage(stage, monkeypatch):
    monkeypatch.setattr("edge_sdk.methods.early_stopping.BEGUN", -1.0)
    device = Device(early_stopping="validation", min_participations=1, patience=1, min_improvement=0.99)
    for _ in range(3):
        trained = device.play(stage)
        assert (trained.stopped, trained.stop_loss, trained.validation) == (False, None, None)
