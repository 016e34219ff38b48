"""pFedGate's device half: what a round may use, sends and keeps, and how a device is judged."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.device.rounding import round_update
from edge_sdk.device.state import Progress, StateFolder
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods import pfedgate as module
from edge_sdk.methods.pfedgate import PFEDGATE, BudgetTooSmall
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.digits import load_images
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.gates.gated import Gated
from edge_sdk.training.local import evaluate, get_tensors, set_tensors
from edge_sdk.training.rehearsal import block_nanoseconds
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import Situation
from sparrow.coordinator.methods import load_method as load_server
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import block_flops
from sparrow.protocol.masks import merge_in_place, pack, unpack
from sparrow.protocol.messages import Assignment, UpdateReport
from sparrow.protocol.settings import FederationSettings

from .networks import convolutions, perceptron

pytestmark = pytest.mark.integration  # traces many models, plays whole federations

ROUGH = {"momentum": 0.9, "weight_decay": 0.05}


def mlp():
    return perceptron(6, 12, 10, 4)


def cnn():
    return convolutions(5, 3, 12)


class Device:
    """A device of one federation, and the global model that it is sent."""

    def __init__(self, network=mlp, *, budget=0.5, samples=22, batch=8, seed=0, name="pi", more=None, **given):
        torch.manual_seed(seed)
        self.name, self.budget = name, budget
        self.model, shape = network()
        generator = torch.Generator().manual_seed(seed)
        arrays = Arrays(torch.randn(samples, *shape, generator=generator), torch.arange(samples) % 4)
        self.task = classification("t", self.model, arrays, arrays, None, batch_size=batch)
        server = load_server("pfedgate")
        own = server.settings_type.model_validate({"smallest_budget": min(0.4, budget), **(more or {})})
        usual = {"local_epochs": 2, "early_stopping": "off", "learning_rate": 0.1, "seed": 3}
        self.settings = FederationSettings(method="pfedgate", method_settings=own.model_dump(), **{**usual, **given})
        published = describe(self.model, torch.from_numpy(arrays.inputs[:2]), task="t")
        self.manifest = server.manifest(published, self.settings)
        shared = {spec.name for spec in self.manifest.shared}
        start = get_tensors(self.model, self.manifest)
        self.tensors = {name: tensor for name, tensor in start.items() if name in shared}
        self.state, self.number = DeviceState(), 1

    def job(self, kind="train", *, changed=None, digest=None):
        """Work whose payload is the whole model, or the blocks ``changed`` of it."""
        body = encode(self.manifest, pack(self.manifest, self.tensors, changed), changed)
        assignment = Assignment(
            assignment_id="a",
            kind=kind,
            round=self.number,
            deadline_seconds=9,
            settings=self.settings,
            model_sha256=digest or f"{self.number:064x}",
        )
        received = decode(body, self.manifest)
        return Job(
            assignment,
            self.manifest,
            self.task,
            TorchEngine(self.task, self.manifest),
            self.state,
            received,
            federation="f",
            device=self.name,
            budget=self.budget,
        )

    def play(self, **how):
        trained = PFEDGATE.train(self.job(**how))
        self.state, self.number = trained.state, self.number + 1
        return trained

    def kept(self, what="model", mask=None):
        """One of the arrays that the device keeps, as tensors."""
        return {
            spec.name: part.reshape(spec.shape) for spec, _, part in unpack(self.manifest, self.state.own[what], mask)
        }

    def gate(self):
        return {name: tensor for name, tensor in self.state.own.items() if name.startswith("gate:")}

    def move(self, on, by=0.25):
        """The others have moved these blocks."""
        moved = {name: tensor + np.float32(by) for name, tensor in self.tensors.items()}
        merge_in_place(self.manifest, self.tensors, pack(self.manifest, moved, on), on)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.fixture
def used(monkeypatch):
    """The choice of every batch that is trained on."""
    choices = []
    call = Gated.__call__

    def watched(self, inputs):
        outputs = call(self, inputs)
        if self.model.training:
            choices.append(self.chosen)
        return outputs

    monkeypatch.setattr(Gated, "__call__", watched)
    return choices


# --- a round ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [mlp, cnn], ids=["mlp", "cnn"])
@pytest.mark.parametrize("cost", ["parameters", "flops"])
@pytest.mark.parametrize("budget", [0.25, 0.5, 0.8, 1.0])
def test_no_batch_exceeds_the_budget_and_what_is_sent_is_the_union(network, cost, budget, used):
    device = Device(network, budget=budget, more={"cost": cost, "gate_learning_rate": 2.0}, **ROUGH)
    table = device.manifest.block_table
    costs = table.sizes if cost == "parameters" else block_flops(device.manifest)
    for number in range(2):
        before, used[:] = device.tensors, []
        trained = device.play()
        assert len(used) == 2 * 3
        assert all(costs[on].sum() <= budget * costs.sum() + 1e-6 for on in used)
        assert all(on[table.forced].all() for on in used)
        union = np.logical_or.reduce(used)
        assert (trained.update.mask.on == union).all()
        assert budget < 1 or union.all()
        after = device.kept()
        for name, place in table.places.items():
            on = np.repeat(union[place], table.tensors[name]).reshape(before[name].shape)
            assert after[name][~on].tobytes() == before[name][~on].tobytes(), "whatever momentum and decay"
        assert (pack(device.manifest, after, None) != pack(device.manifest, before, None)).mean() > 0.5 * budget
        assert trained.update.values.tobytes() == pack(device.manifest, after, trained.update.mask).tobytes()
        samples = [8, 8, 6] * 2
        assert trained.counts["values"] == table.sizes.sum()
        assert trained.counts["values_touched"] == table.sizes[union].sum()
        kept = sum(count * int(table.sizes[on].sum()) for count, on in zip(samples, used, strict=True))
        assert trained.counts["values_kept"] == kept // 44
        worked = sum(
            count * int(block_flops(device.manifest)[on].sum()) for count, on in zip(samples, used, strict=True)
        )
        gate = device.state.own["gate:linear.weight"].size
        assert trained.flops == 3 * worked + 4 * gate * 44
        device.move(BlockMask(np.arange(len(union)) % 2 == number))


def test_a_touched_limit_caps_what_is_sent():
    def share(limit):
        device = Device(more={"touched_limit": limit, "gate_learning_rate": 5.0, "blocks": 8}, local_epochs=6)
        counts = device.play().counts
        return counts["values_touched"] / counts["values"]

    assert share(1.0) > 0.7
    assert share(0.6) <= 0.6


def test_devices_of_one_federation_begin_with_the_same_gate():
    """Whatever their names, their data, and what torch has drawn before."""
    gates = []
    for name, seed in (("pi", 0), ("jetson", 7)):
        device = Device(name=name, seed=seed)
        gated = module.gated_model(device.job(), device.tensors)
        gates.append({key: tensor.clone() for key, tensor in gated.gate.state_dict().items()})
    assert all(torch.equal(tensor, gates[1][key]) for key, tensor in gates[0].items())
    other = Device()
    other.settings = other.settings.model_copy(update={"seed": 4})
    assert not torch.equal(module.gated_model(other.job(), other.tensors).gate.linear.weight, gates[0]["linear.weight"])


def test_the_gate_learns_from_round_to_round_and_dropped_blocks_with_it():
    device = Device(seed=1, more={"blocks": 6})
    device.play()
    first = device.gate()
    device.play()
    second = device.gate()
    assert first.keys() == second.keys()
    length = len(device.manifest.block_table.sizes)
    moved = np.abs(second["gate:batch_norm.bias"] - first["gate:batch_norm.bias"])
    importances = moved[length:]
    assert (importances[device.manifest.block_table.forced] == 0).all(), "nobody asks for theirs"
    free = importances[~device.manifest.block_table.forced]
    assert np.count_nonzero(free) >= len(free) - 1, "all but those of a neuron that no sample wakes"
    assert np.count_nonzero(moved[:length]) >= device.state.own["touched"].sum() - 1


def test_the_same_round_again_is_the_same_update():
    one, other = Device(cnn, seed=1).play(), Device(cnn, seed=1).play()
    assert one.update.values.tobytes() == other.update.values.tobytes()
    assert same(one.state.own, other.state.own)
    assert same(one.state.personal, other.state.personal)


@pytest.mark.parametrize("samples", [1, 9])
def test_a_batch_of_one_sample_trains(samples):
    """Nine samples in batches of eight, or a single one: its gate goes by what it remembers."""
    device = Device(samples=samples, more={"gate_learning_rate": 0.5})
    trained = device.play()
    assert trained.num_examples == samples
    assert np.isfinite(trained.update.values).all()
    assert any((tensor != device.tensors[name]).any() for name, tensor in device.kept().items())


def test_after_a_single_step_every_sample_can_be_judged_alone():
    device = Device(cnn, local_steps=1)
    device.play()
    found = PFEDGATE.evaluate(device.job("evaluate"))
    assert np.isfinite(found.personal.loss)


def test_learning_rates_of_gate_and_model_decay_alike(monkeypatch):
    seen = []
    monkeypatch.setattr(
        module,
        "GatedOptimisation",
        lambda gated, settings, **rates: seen.append(rates) or (_ for _ in ()).throw(BundleError("enough")),
    )
    device = Device(learning_rate_decay=0.5, more={"gate_learning_rate": 0.8})
    device.number = 3
    with pytest.raises(BundleError, match="enough"):
        device.play()
    assert seen == [{"model_rate": pytest.approx(0.025), "gate_rate": pytest.approx(0.2)}]


@pytest.mark.parametrize(("gradients", "probe"), [("exact", 1.0), ("estimated", 0.125)])
def test_how_gates_of_off_blocks_learn(gradients, probe, monkeypatch):
    seen = []
    make = Gated.__init__

    def watched(self, *args, **how):
        seen.append(how["probe"])
        make(self, *args, **how)

    monkeypatch.setattr(Gated, "__init__", watched)
    one = Device(more={"gate_gradients": gradients}).play()
    assert seen == [probe]
    assert np.isfinite(one.train_loss)
    if gradients == "estimated":
        exact = Device().play()
        assert any((one.state.own[name] != tensor).any() for name, tensor in exact.state.own.items())


def test_what_seconds_cost_is_measured_once_and_kept():
    device = Device(cnn, budget=0.6, more={"cost": "seconds"})
    device.play()
    measured = device.state.own["nanoseconds"]
    table = device.manifest.block_table
    assert measured.dtype == np.int64
    assert measured[table.places["5.weight"]].sum() > 0
    assert not measured[table.places["1.weight"]].any(), "batch norm counts for nothing"
    device.play()
    assert device.state.own["nanoseconds"].tobytes() == measured.tobytes()


def test_seconds_of_a_layer_are_shared_by_its_weights():
    device = Device(cnn)
    inputs, _ = next(iter(device.task.train))
    before = get_tensors(device.model, device.manifest)
    costs = block_nanoseconds(device.model, device.manifest, torch.from_numpy(inputs))
    table = device.manifest.block_table
    for layer in device.manifest.layers:
        for name in layer.tensors:
            place = table.places[name]
            if name.endswith("bias") or layer.kind not in ("linear", "conv2d"):
                assert not costs[place].any()
            else:
                shares = costs[place] / table.sizes[place]
                assert shares.max() <= shares.min() + 1, "but for whole numbers"
                assert costs[place].min() > 0
    assert same(before, get_tensors(device.model, device.manifest)), "no running statistics move"


def test_a_budget_that_holds_no_first_blocks_hands_a_round_back():
    device = Device(budget=0.3)
    device.play()
    device.budget = 0.02
    with pytest.raises(BudgetTooSmall, match="the smallest is 0"):
        PFEDGATE.train(device.job("train"))


def test_below_the_smallest_budget_a_device_adapts_and_is_judged_with_a_gate_of_that_budget():
    device = Device(budget=0.3)
    device.play()

    def adapted_and_judged(budget):
        device.budget = budget
        return PFEDGATE.adapt(device.job("adapt")), PFEDGATE.evaluate(device.job("evaluate"))

    (state, judged), (expected, as_expected) = adapted_and_judged(0.02), adapted_and_judged(0.3)
    assert same(state.personal, expected.personal)
    assert judged == as_expected


# --- what the gate chooses --------------------------------------------------------------------------------------------


def heavy():
    """A network whose first dense layer holds two thirds of the weights, as in pFedGate's CIFAR-10 network."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class DigitsDevices:
    """Devices with parts of the digits, and the federation that they train in, played with both halves."""

    def __init__(self, count=4, *, budget=0.3, **own):
        torch.manual_seed(0)
        images, labels = load_images().inputs, load_images().targets
        order = np.argsort(labels[:600], kind="stable")  # each device has the digits of two or three classes
        self.model, self.budget, self.server = heavy(), budget, load_server("pfedgate")
        parts = [torch.from_numpy(part) for part in np.array_split(order, count)]
        self.arrays = [Arrays(torch.from_numpy(images)[part], torch.from_numpy(labels)[part]) for part in parts]
        given = {"local_steps": 2, "early_stopping": "off", "learning_rate": 0.1, "rounds": 10, "momentum": 0.9}
        self.settings = completed(FederationSettings(method="pfedgate", method_settings=own, **given))
        published = describe(self.model, torch.from_numpy(self.arrays[0].inputs[:2]), task="t")
        self.manifest = self.server.manifest(published, self.settings)
        self.global_model = self.server.start(get_tensors(self.model, self.manifest), self.at(0))
        self.states = [DeviceState() for _ in parts]

    def blocks(self):
        return self.manifest.block_groups("layer")

    def at(self, number):
        return Situation(self.manifest, self.settings, round=number)

    def job(self, device, kind, number, plan=None):
        task = classification("t", self.model, self.arrays[device], self.arrays[device], None, batch_size=16)
        assignment = Assignment(
            assignment_id="a",
            kind=kind,
            round=number,
            deadline_seconds=9,
            settings=self.settings,
            model_sha256="0" * 64,
            plan=plan or {},
        )
        body = encode(self.manifest, pack(self.manifest, self.global_model.tensors, None), None)
        received, state = decode(body, self.manifest), self.states[device]
        job = Job(
            assignment,
            self.manifest,
            task,
            TorchEngine(task, self.manifest),
            state,
            received,
            federation="f",
            device=str(device),
        )
        return dataclasses.replace(job, budget=self.budget)

    def play(self, number):
        """Play a round, and return what the devices made of it."""
        sums, trained = self.server.aggregation.sums(self.global_model, self.at(number)), []
        for device in range(len(self.arrays)):
            found = PFEDGATE.train(self.job(device, "train", number, self.server.schedule.work(self.at(number)).plan))
            sums.fold_in_place(found.update.values, found.update.mask, found.num_examples)
            self.states[device] = found.state
            trained.append(found)
        self.global_model = self.server.aggregation.close(self.global_model, sums, self.at(number))
        return trained


def shares_of(trained):
    """The share of each layer's weights that batches kept, of the counts of device-rounds."""
    counts = sum((Counter(each.counts) for each in trained), Counter())
    layers = [name.removeprefix("kept of ") for name in counts if name.startswith("kept of ")]
    return {layer: counts[f"kept of {layer}"] / counts[f"values of {layer}"] for layer in layers}


def test_over_ten_rounds_masks_differ_and_every_layer_keeps_its_share():
    """Where one dense layer holds two thirds of the weights, as on CIFAR-10."""
    devices = DigitsDevices()
    sizes = {name: devices.manifest.block_table.sizes[on].sum() for name, on in devices.blocks().items()}
    assert max(sizes.values()) > 0.66 * sum(sizes.values())
    trained, noted = [], 0
    for number in range(1, 11):
        trained += devices.play(number)
        noted += devices.global_model.notes["masks"]
    masks = {each.update.mask.packed() for each in trained}
    assert len(trained) == 40
    assert len(masks) >= 20
    assert 20 <= noted <= 40, "the server half counts those of one round"
    shares = shares_of(trained)
    assert shares.keys() == sizes.keys()
    assert min(shares.values()) >= 0.5 * 0.3, shares
    assert sum(each.counts["batches_decided"] for each in trained) > 0


def test_batches_are_decided_by_the_gate_or_not():
    """Equal importances lead to one choice; a gate counts where it made another, or where all it did was scale."""
    device = Device(more={"blocks": 6, "gate_input": "nothing", "gate_learning_rate": 1e-9})
    counts = device.play().counts
    assert (counts["batches_decided"], counts["batch_masks"]) == (0, 1), "every importance is one half"
    assert Device(budget=1.0).play().counts["batches_decided"] == 6
    counts = Device(more={"blocks": 6}).play().counts
    assert counts["batches_decided"] > 0
    assert counts["kept of 0"] + counts["kept of 2"] + counts["kept of 4"] == pytest.approx(
        counts["values_kept"], abs=3
    )


def test_many_layers_and_long_names_fit_into_a_report():
    torch.manual_seed(0)
    layers = [nn.Linear(4 + (place == 3), 4 + (place == 2)) for place in range(20)]
    model = nn.Sequential(OrderedDict((f"{place:03}{'x' * 70}", layer) for place, layer in enumerate(layers)))
    counts = Device(lambda: (model, (4,)), local_steps=1).play().counts
    UpdateReport(num_examples=1, steps=1, train_loss=0.0, counts=counts)
    assert counts["values of other layers"] == 20 * 20 + 5 + 4 - sum(
        count for name, count in counts.items() if name.startswith(("values of 0", "values of x"))
    )


def test_client_wise_a_device_has_one_choice_for_all_its_samples():
    device = Device(cnn, more={"gate_input": "device", "blocks": 6})
    device.play()
    inputs, _ = zip(*device.task.train, strict=True)
    assert device.state.own["gate:mean"] == pytest.approx(np.concatenate(inputs).mean(0), abs=1e-5)
    gated = module.gated_model(device.job(), device.tensors)
    importances, scales = gated.gate.eval().each(torch.randn(5, 2, 6, 6))
    assert (importances == importances[0]).all()
    settled = torch.sigmoid(torch.from_numpy(device.state.own["gate:settled"]))
    torch.testing.assert_close(torch.cat([scales[0], importances[0]]), settled)
    first = device.gate()
    device.play()
    assert (device.gate()["gate:linear.weight"] != first["gate:linear.weight"]).any(), "it learns"
    assert PFEDGATE.evaluate(device.job("evaluate")).personal.accuracy is not None


def test_a_window_averages_the_gates_of_the_last_inputs():
    device = Device(cnn, more={"gate_window": 3})
    device.play()
    wide = module.gated_model(device.job(), device.tensors)
    inputs = torch.randn(7, 2, 6, 6)
    with torch.no_grad():
        wide.gate.eval()
        wide.model.eval()
        importances, scales = wide.gate.each(inputs)
        found = wide.each(inputs)
        for place in range(7):
            last = slice(max(0, place - 2), place + 1)
            on = torch.from_numpy(wide.select(importances[last].mean(0)))
            expected = wide.network(inputs[place : place + 1], scales[last].mean(0) * on, on.numpy())
            torch.testing.assert_close(found[place : place + 1], expected, atol=1e-5, rtol=1e-4)
        assert not torch.equal(wide.each(inputs[6:]), found[6:]), "alone it is judged by its own gates"


def test_a_dense_last_round_trains_only_the_shared_model():
    """Table 10: one more epoch without gates, one more average, and the model can be judged by itself."""
    devices = DigitsDevices(dense_last=True)
    for number in (8, 9):
        assert all(each.update.mask is not None for each in devices.play(number))
    before = list(devices.states)
    trained = devices.play(10)
    steps = [-(-len(arrays) // 16) for arrays in devices.arrays]
    assert [each.steps for each in trained] == steps, "one epoch"
    assert all(each.update.mask is None for each in trained)
    assert all(same(one.own, other.own) for one, other in zip(before, devices.states, strict=True))
    mean = sum(each.update.values.astype(float) * each.num_examples for each in trained)
    mean /= sum(each.num_examples for each in trained)
    np.testing.assert_allclose(pack(devices.manifest, devices.global_model.tensors, None), mean, atol=1e-6)
    job = devices.job(0, "evaluate", 10)
    found = PFEDGATE.evaluate(job)
    set_tensors(devices.model, devices.global_model.tensors)
    assert found.global_model == evaluate(devices.model, job.task, job.task.held_out)
    assert found.personal == found.others["local"]
    devices.states[1] = DeviceState()
    new = PFEDGATE.evaluate(devices.job(1, "evaluate", 10))
    assert new.personal is None
    assert new.global_model is not None
    assert PFEDGATE.evaluate(devices.job(0, "evaluate", 9)).global_model is None


# --- what goes down ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [mlp, cnn], ids=["mlp", "cnn"])
def test_from_what_has_changed_the_whole_model_is_rebuilt_bit_for_bit(network):
    device = Device(network, **ROUGH)
    device.play()
    chance = np.random.default_rng(0)
    for _ in range(4):
        on = BlockMask(chance.random(len(device.manifest.block_table.sizes)) < 0.4)
        device.move(on, by=chance.normal())
        whole = dataclasses.replace(device.job(), state=dataclasses.replace(device.state, model=None))
        part = device.job(changed=on)
        assert part.received.values.size < whole.received.values.size
        rebuilt = module.newest_model(part)
        assert same({name: rebuilt[name] for name in device.tensors}, device.tensors)
        one, other = PFEDGATE.train(part), PFEDGATE.train(whole)
        assert one.update.values.tobytes() == other.update.values.tobytes()
        assert same(one.state.own, other.state.own)
        assert other.update.base is None
        assert same({name: one.update.base[name] for name in device.tensors}, device.tensors)
        device.play(changed=on)


def test_a_round_that_changed_nothing_sends_next_to_nothing():
    device = Device()
    device.play()
    nothing = BlockMask(np.zeros(len(device.manifest.block_table.sizes), dtype=bool))
    job = device.job(changed=nothing)
    assert job.received.values.size == 0
    assert same(module.newest_model(job), device.tensors)


def test_a_part_without_a_base_is_refused():
    device = Device()
    some = BlockMask(np.arange(len(device.manifest.block_table.sizes)) % 2 == 0)
    for work in (PFEDGATE.train, PFEDGATE.adapt):
        with pytest.raises(BundleError, match="has no base for it"):
            work(device.job(changed=some))
        with pytest.raises(BundleError, match="no payload"):
            work(dataclasses.replace(device.job(), received=None))


def test_a_model_whose_every_block_changed_is_whole():
    device = Device()
    everything = BlockMask(np.ones(len(device.manifest.block_table.sizes), dtype=bool))
    assert same(module.newest_model(device.job(changed=everything)), device.tensors)


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_int8_updates_are_differences_from_what_the_round_started_from(whole):
    device = Device(cnn)
    device.play()
    on = None if whole else BlockMask(np.arange(len(device.manifest.block_table.sizes)) % 2 == 0)
    if on is not None:
        device.move(on)
    job = device.job(changed=on)
    trained = PFEDGATE.train(job)
    numbers, left = round_update(job, trained.update, {})
    mask = trained.update.mask
    moved = trained.update.values - pack(device.manifest, device.tensors, mask)
    error = pack(device.manifest, left, mask)
    decoded = decode(encode(device.manifest, numbers, mask), device.manifest)
    np.testing.assert_allclose(decoded.values + error, moved, atol=1e-6)
    assert np.abs(error).max() <= np.abs(moved).max() / 127 * 1.01
    for name, place in device.manifest.block_table.places.items():
        on = np.repeat(mask.on[place], device.manifest.block_table.tensors[name])
        assert not left[name].reshape(-1)[~on].any(), "untouched blocks are owed nothing"


# --- how it is judged -------------------------------------------------------------------------------------------------


def test_a_device_without_a_gate_is_not_judged():
    assert PFEDGATE.evaluate(Device().job("evaluate")).personal is None


@pytest.mark.parametrize("network", [mlp, cnn], ids=["mlp", "cnn"])
def test_the_ways_to_predict(network):
    """The newest θ here is what the device trained, but for one block."""
    device = Device(network, more={"gate_learning_rate": 1.0}, learning_rate=0.3, local_epochs=6)
    device.play()
    last = BlockMask(np.arange(len(device.manifest.block_table.sizes)) == 0)
    device.tensors = {name: np.array(tensor) for name, tensor in device.kept().items()}
    device.move(last, by=0.5)
    state = {name: tensor.copy() for name, tensor in {**device.state.personal, **device.state.own}.items()}
    job = device.job("evaluate")
    found = PFEDGATE.evaluate(job)
    assert found.global_model is None
    assert set(found.others) == {"batch", "local", "local batch", "static"}
    assert found.validation == found.personal, "there is no test data"
    assert same({**device.state.personal, **device.state.own}, state), "judging keeps nothing"

    gated = module.gated_model(job, device.tensors)
    held_out = device.task.held_out
    gated.gate.eval()
    assert evaluate(device.model, device.task, held_out, gated.each) == found.personal
    assert evaluate(device.model, device.task, held_out, gated) == found.others["batch"]
    device.tensors = device.kept()
    local = PFEDGATE.evaluate(device.job("evaluate"))
    assert local.personal == found.others["local"] == local.others["local"]
    assert local.others["batch"] == found.others["local batch"]
    assert found.personal != found.others["local"]
    set_tensors(device.model, device.state.personal)
    assert evaluate(device.model, device.task, held_out).loss == pytest.approx(local.others["static"].loss, rel=1e-5)


def test_personal_tensors_are_a_plain_model_within_the_budget():
    device = Device(cnn, budget=0.45)
    device.play()
    trained, table, share = device.kept(), device.manifest.block_table, 0
    for name, sizes in table.tensors.items():
        ends = np.cumsum(sizes)[:-1]
        parts = np.split(device.state.personal[name].reshape(-1), ends)
        for part, whole in zip(parts, np.split(trained[name].reshape(-1), ends), strict=True):
            if not whole.any():  # a batch norm's biases that no batch has touched: of any scale
                continue
            scale = (part @ whole) / (whole @ whole)
            np.testing.assert_allclose(part, scale * whole, rtol=1e-5, atol=1e-7)
            assert 0 <= scale < 1
            share += len(part) * (scale > 0)
    assert share <= 0.45 * table.sizes.sum()
    assert device.state.personal.keys() == {spec.name for spec in device.manifest.kept}


def test_a_gate_of_another_shape_begins_anew():
    device = Device()
    device.play()
    job = device.job()
    rules = {**device.settings.method_settings, "gate_paths": 1}
    assert PFEDGATE.train(job.with_settings(method_settings=rules)).state.own["gate:linear.bias"].size < (
        device.state.own["gate:linear.bias"].size
    )


# --- after the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("network", [mlp, cnn], ids=["mlp", "cnn"])
def test_a_late_device_trains_its_gate_alone(network, epochs, monkeypatch):
    steps = []
    take = module.take_steps
    monkeypatch.setattr(module, "take_steps", lambda *args, **how: steps.append(how["seed"]) or take(*args, **how))
    device = Device(network, finetune_epochs=epochs, more={"gate_learning_rate": 0.3}, **ROUGH)
    start = module.gated_model(device.job("adapt"), device.tensors).gate.state_dict()
    state = PFEDGATE.adapt(device.job("adapt", digest="e" * 64))
    assert 1 <= len(steps) <= (epochs or module.ADAPT_EPOCHS)
    assert len(set(steps)) == len(steps), "every epoch draws its own batches"
    device.state = state
    assert state.model == "e" * 64
    held = device.kept()
    for name, tensor in device.tensors.items():
        assert held[name].tobytes() == tensor.tobytes(), "θ and its running statistics as they came, bit for bit"
    assert any((start[name.removeprefix("gate:")].numpy() != tensor).any() for name, tensor in device.gate().items())
    found = PFEDGATE.evaluate(device.job("evaluate"))
    assert found.personal == found.others["local"]


def test_adapting_keeps_the_gate_of_the_best_epoch(monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 0.5])
    monkeypatch.setattr(module, "evaluate", lambda *args: dataclasses.make_dataclass("E", ["loss"])(next(losses)))
    gates = []
    tensors_of = module.gate_tensors
    monkeypatch.setattr(module, "gate_tensors", lambda gate: gates.append(tensors_of(gate)) or gates[-1])
    device = Device()
    state = PFEDGATE.adapt(device.job("adapt"))
    assert next(losses) == 0.5, "it stops where the loss rises"
    best = gates[2]  # of before, after the first epoch, after the second
    assert all(state.own[f"gate:{name}"].tobytes() == tensor.tobytes() for name, tensor in best.items())
    assert not same(best, gates[0])


@pytest.mark.parametrize("network", [mlp, cnn], ids=["mlp", "cnn"])
def test_who_adapted_can_go_on_with_what_changes(network):
    """A federation that was finished may be reopened."""
    device = Device(network)
    device.state = PFEDGATE.adapt(device.job("adapt"))
    some = BlockMask(np.arange(len(device.manifest.block_table.sizes)) % 3 == 0)
    device.move(some)
    job = device.job(changed=some)
    rebuilt = module.newest_model(job)
    assert same({name: rebuilt[name] for name in device.tensors}, device.tensors)
    assert PFEDGATE.train(job).steps == 6


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_state_comes_back_from_the_disk(tmp_path):
    device = Device(cnn, more={"cost": "flops"})
    device.play()
    folder = StateFolder(tmp_path, durable=False)
    folder.save(device.manifest, device.state.personal, Progress(model=device.state.model), device.state.own)
    folder.close()
    folder = StateFolder(tmp_path, durable=False)
    personal, progress = folder.load(device.manifest)
    folder.close()
    assert progress.model == f"{1:064x}"
    some = BlockMask(np.arange(len(device.manifest.block_table.sizes)) % 2 == 0)
    device.move(some)
    wanted = PFEDGATE.train(device.job(changed=some))
    device.state = DeviceState(personal, progress.memory, folder.own, progress.model)
    again = PFEDGATE.train(device.job(changed=some))
    assert wanted.update.values.tobytes() == again.update.values.tobytes()
    assert same(wanted.state.own, again.state.own)


def test_what_is_kept_beside_the_personal_model():
    """θ once, the received values of touched blocks, a byte and a mean gate for each block, and the gate."""
    device = Device()
    device.play()
    own, touched = device.state.own, BlockMask(device.state.own["touched"].astype(bool))
    assert own["model"].size == device.manifest.shared_values
    assert own["received"].tobytes() == pack(device.manifest, device.tensors, touched).tobytes()
    assert {name.split(":")[0] for name in own} == {"gate", "model", "received", "static", "touched"}


def test_the_method_is_found_by_its_name():
    assert load_method("pfedgate") is PFEDGATE
