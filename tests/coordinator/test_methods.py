"""Whole federations of each method in one process: real devices train the digits, the wire is left out."""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np
import pytest

from edge_sdk.device.rounding import round_update
from edge_sdk.device.session import FAILURES, Outcome
from edge_sdk.errors import Refused, RoundOver
from edge_sdk.methods import load_method
from edge_sdk.methods.merging import sent_values
from edge_sdk.tasks.digits import load_images
from sparrow.coordinator.errors import BadContent, WrongMediaType, WrongState
from sparrow.coordinator.rounds.acceptance import JSON_TYPE
from sparrow.coordinator.rounds.dispatch import REST_SECONDS
from sparrow.coordinator.storage.tables import Assignment
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.masks import merge_in_place
from sparrow.protocol.messages import ChangeDevice, ChangeFederation, CreateFederation, Enrol, Kind, UpdateReport
from sparrow.protocol.quantization import row_lengths
from sparrow.protocol.settings import FederationSettings

from ..kinds import chosen
from .fakes import next_assignment
from .sessions import CoordinatorWithDevices

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest

SOON = {"early_stopping": "validation", "min_participations": 1, "min_improvement": 0.99}
"""Whatever a loss does, it has not improved enough."""


@pytest.fixture
def any_loss_stops(monkeypatch):
    """Devices count as having begun to learn from the first round on."""
    monkeypatch.setattr("edge_sdk.methods.early_stopping.BEGUN", -1.0)


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def kinds(assignments):
    return [assignment.kind.value for assignment in assignments]


# --- counts that prove that a mechanism acted ---------------------------------------------------------------------

OFTEN = {"adjust_interval": 1}
SO_THAT_IT_ACTS = {
    "dmpfl": {**OFTEN, "iterations": 1, "replaced": 0.2},
    "feddst": {**OFTEN, "device_interval": 1},
    "fedsgc": {**OFTEN, "device_interval": 1},
    "grasp": {"score_batches": 2},
    "prunefl": {**OFTEN, "prepare_rounds": 1},
    "prunefl_neurons": OFTEN,
    "votedst": OFTEN,
}
"""Settings under which a mechanism acts in four rounds."""

OF_ADAPTERS = ("hetlora",)
"""Methods that refuse these networks, which have no adapters: tests/edge_sdk/test_adapters.py plays them."""

ACTING = sorted(
    entry.name
    for entry in entry_points(group="sparrow.device_methods")
    if entry.value.startswith("edge_sdk.methods.") and load_method(entry.name).acts and entry.name not in OF_ADAPTERS
)


def counted(coordinator):
    """Counts and notes of a federation's rounds, added up."""
    total = {}
    for record in coordinator.records.rounds("f"):
        assert not set(record.counts) & set(record.notes), "two things of the same name"
        for name, count in (*record.counts.items(), *record.notes.items()):
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("method", ACTING)
def test_a_mechanism_that_acts_is_counted(coordinator, method):
    coordinator.create(method, rounds=4, local_epochs=2, method_settings=SO_THAT_IT_ACTS.get(method, {}))
    coordinator.play(*(coordinator.open_device(name, 0.6) for name in "ab"))
    if not coordinator.records.rounds("f"):  # it trains whole models
        coordinator.play(*(coordinator.open_device(name) for name in "cd"))
    total = counted(coordinator)
    assert {name: total.get(name, 0) > 0 for name in load_method(method).acts} == dict.fromkeys(
        load_method(method).acts, True
    )


ON_BOTH = sorted(
    entry.name
    for entry in entry_points(group="sparrow.device_methods")
    if entry.value.startswith("edge_sdk.methods.")
    and "onnx" in load_method(entry.name).engines
    and entry.name not in OF_ADAPTERS
)

CLOSE = 0.1
"""Relative L2 distance; that of two seeds is about 1."""


@pytest.mark.integration
@pytest.mark.parametrize("method", chosen(ON_BOTH))
def test_engines_train_the_same(coordinator, new_coordinator, method):
    """Of two devices both train with PyTorch, or one with ONNX Runtime: what is counted and the models that
    come out are the same. But for rounding: now and then it decides on which side of zero a value lies that a whole
    flat area of these images shares, after which the models are some thousandths apart."""
    played = []
    for engines in (("torch", "torch"), ("onnx", "torch")):
        player = coordinator if not played else new_coordinator()
        own = SO_THAT_IT_ACTS.get(method, {})
        if method == "lgfedavg":
            own = {"fedavg_share": 0.5}  # its own part begins as FedAvg's: each engine draws first values its own way
        player.create(method, rounds=4, local_epochs=2, personal_model="last", method_settings=own)
        budget = 1.0 if load_method(method).active is None else 0.6
        devices = [player.open_device(name, budget, engine=each) for name, each in zip("ab", engines, strict=True)]
        player.play(*devices)
        played.append((counted(player), player, devices))
    (counts, first, sessions), (found, other, devices) = played
    assert found == pytest.approx(counts, rel=1e-2)
    if method in ("fedper", "fedrep"):
        return
    for one, same in zip(sessions, devices, strict=True):
        assert apart(same.best, one.best) < CLOSE
    if method != "local":
        assert apart(other.model().tensors, first.model().tensors) < CLOSE


RATES = {"digits": 0.05, "mnist": 0.02, "cifar10": 0.002}
"""An activation that rounding puts on the other side of zero moves others across it, the sooner the larger the steps:
with a rate of 0.05 MNIST's network ended 0.02 apart on one kind of processor, and 1e-5 on another; behind batch norm
CIFAR-10's does so anywhere."""


def as_images(folder, task):
    """A file of the digits, enlarged to images as a public data set has them; each pixel is a square."""
    size, channels = {"mnist": (28, 0), "cifar10": (32, 3)}[task]
    digits = load_images()
    images = np.kron(digits.inputs[:, 0], np.ones((4, 4)))[:, :size, :size]
    if channels:
        images = images[..., None] * np.linspace(1, 0.5, channels)
    images, path = np.rint(255 * images).astype(np.uint8), folder / f"{task}.npz"
    np.savez(path, x=images, y=digits.targets)
    return path


@pytest.mark.parametrize("task", RATES)
def test_engines_agree_after_five_rounds_of_ten_steps(new_coordinator, tmp_path, task):
    """FedSPU with half of its devices on each engine, and with all on one, which repeats itself bit for bit."""
    engines = {"torch": ["torch"] * 4, "mixed": ["torch", "onnx"] * 2, "onnx": ["onnx"] * 4, "again": ["onnx"] * 4}
    data, models = None if task == "digits" else as_images(tmp_path, task), {}
    for name, of_devices in engines.items():
        player = new_coordinator()
        player.create("fedspu", task=task, rounds=5, local_steps=10, learning_rate=RATES[task])
        start = player.model().tensors
        devices = [
            player.open_device(device, budget, engine=engine, data=data)
            for device, budget, engine in zip("abcd", (0.4, 0.6, 0.8, 1.0), of_devices, strict=True)
        ]
        player.play(*devices)
        models[name] = player.model().tensors
        assert apart(models[name], start) > 0.01
    for name in ("mixed", "onnx"):
        assert apart(models[name], models["torch"]) < 1e-4
    assert same(models["again"], models["onnx"])


def apart(found, wanted):
    """Relative L2 distance of two models."""
    pairs = [(np.asarray(found[name], np.float64), np.asarray(wanted[name], np.float64)) for name in wanted]
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs))


IDLE = [
    ("ditto", {"proximal_weight": 0.0}, "pulled_steps"),
    ("dmpfl", {**SO_THAT_IT_ACTS["dmpfl"], "replaced": 0.0}, "replaced"),
    ("feddst", {**SO_THAT_IT_ACTS["feddst"], "over_pruning": 0.0}, "replaced"),
    ("fedprox", {"proximal_weight": 0.0}, "pulled_steps"),
    ("fedsgc", {**SO_THAT_IT_ACTS["fedsgc"], "guided_share": 0.0}, "dropped_guided"),
    ("fedspu", {}, "frozen_values"),
    ("grasp", {**SO_THAT_IT_ACTS["grasp"], "density": 1.0}, "prepare_pruned"),
    ("prunefl", {**SO_THAT_IT_ACTS["prunefl"], "density": 1.0, "share": 0.0}, "positions_changed"),
]
"""Settings that turn a mechanism off, and the count that says so; FedSPU's is off where every budget is 1."""


@pytest.mark.parametrize(("method", "own", "count"), IDLE, ids=[method for method, *_ in IDLE])
def test_a_mechanism_that_is_turned_off_counts_nothing(coordinator, method, own, count):
    coordinator.create(method, rounds=4, local_epochs=2, method_settings=own)
    coordinator.play(*(coordinator.open_device(name) for name in "ab"))
    assert count in load_method(method).acts
    assert counted(coordinator).get(count, 0) == 0


# --- FedAvg and FedProx ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedspu"])
def test_the_finished_model_may_be_the_mean_of_the_last_rounds(coordinator, new_coordinator, method):
    def finished(player, rounds, **own):
        player.create(method, rounds=rounds, local_epochs=1, draws="seed", method_settings=own)
        player.play(*(player.open_device(name) for name in "ab"))
        return player, player.model().tensors

    _, second = finished(coordinator, 2)
    _, third = finished(new_coordinator(), 3)
    player, mean = finished(new_coordinator(), 3, averaged_rounds=2)
    assert player.records.rounds("f")[-1].notes["averaged_rounds"] == 2
    assert {name: tensor.shape for name, tensor in mean.items()} == {n: tensor.shape for n, tensor in third.items()}
    for name, tensor in mean.items():
        np.testing.assert_allclose(tensor, (second[name] + third[name]) / 2, rtol=1e-5, atol=1e-7)
    assert not same(second, third)
    whole, _ = checkpoint.load(player.served.model("f"))
    assert same({name: whole[name] for name in mean}, mean), "what is downloaded is the mean, and nothing beside it"


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_everybody_ends_with_the_last_global_model(coordinator, method):
    coordinator.create(method)
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train"] * 3 + ["evaluate", "adapt"]] * 2
    info = coordinator.info()
    assert (info.status, info.round, info.model_version) == ("finished", 3, 3)
    final, _ = checkpoint.load(coordinator.served.model("f"))
    for session in sessions:
        assert same(final, session.personal)
        assert session.progress.adapted
    record = coordinator.records.rounds("f")[-1]
    assert (record.accuracy_personal, record.updates) == (None, 2)
    assert record.accuracy_global > 0.1
    assert record.training_flops > 0


def test_every_download_is_the_whole_model(coordinator):
    coordinator.create("fedavg")
    (worked,) = coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))[:1]
    assert len({assignment.payload.bytes for assignment in worked}) == 1
    assert all(assignment.work is None for assignment in worked)


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_what_fine_tuning_computes_is_counted_apart_from_training(coordinator, new_coordinator, method):
    records = []
    for epochs, each in ((0, coordinator), (2, new_coordinator())):
        each.create(method, finetune_epochs=epochs)
        each.play(each.open_device("a"), each.open_device("b"))
        records.append(each.records.rounds("f"))
    plain, tuned = records
    assert [record.finetune_flops for record in plain] == [0, 0, 0]
    assert [record.training_flops for record in plain] == [record.training_flops for record in tuned]
    assert tuned[-1].finetune_flops == 2 * tuned[-1].training_flops, "two epochs where a round has one"
    assert tuned[-1].accuracy_personal is not None


def test_fine_tuned_copies_are_judged_and_the_last_is_kept(coordinator):
    coordinator.create("fedavg", finetune_epochs=3)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    record = coordinator.records.rounds("f")[-1]
    assert record.loss_personal < record.loss_global
    assert all(receipt.validation["num_examples"] for receipt in coordinator.receipts())
    assert [receipt.state_bytes for receipt in coordinator.receipts()] == [0, 0]
    adapted = coordinator.receipts("adapt")
    assert [receipt.state_bytes for receipt in adapted] == [4 * DIGITS.shared_values] * 2
    judged = sorted(receipt.personal["loss"] for receipt in coordinator.receipts())
    assert judged == sorted(receipt.personal["loss"] for receipt in adapted), "the same copy as was judged"


def test_perfedavg_s_adapted_copies_are_judged_and_kept(coordinator):
    """Beside the global model, which every device is sent; nothing stays on devices from round to round."""
    coordinator.create("perfedavg", method_settings={"inner_rate": 0.1, "adaptation_steps": 3}, evaluation_interval=3)
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train"] * 3 + ["evaluate", "adapt"]] * 2
    record = coordinator.records.rounds("f")[-1]
    assert record.loss_personal < record.loss_global
    assert record.finetune_flops > 0
    assert [receipt.state_bytes for receipt in coordinator.receipts()] == [0, 0]
    judged = sorted(receipt.personal["loss"] for receipt in coordinator.receipts())
    assert judged == sorted(receipt.personal["loss"] for receipt in coordinator.receipts("adapt")), "the same copy"


def test_pfedme_without_mixing_keeps_the_servers_model_and_devices_have_their_own(coordinator, new_coordinator):
    start = initial_values(DIGITS, 0)
    for mixing, each in ((0.0, coordinator), (1.0, new_coordinator())):
        own = {"proximal_weight": 1.0, "outer_rate": 0.1, "server_mixing": mixing}
        each.create("pfedme", method_settings=own, local_epochs=3, evaluation_interval=3)
        sessions = [each.open_device(name) for name in "ab"]
        worked = each.play(*sessions)
        assert [kinds(of_device) for of_device in worked] == [["train"] * 3 + ["evaluate"]] * 2
        record = each.records.rounds("f")[-1]
        assert record.loss_personal < record.loss_global
        assert not same(sessions[0].personal, sessions[1].personal)
        assert same(each.model().tensors, start) == (mixing == 0)


def test_fedavg_is_fedspu_of_devices_that_train_everything(coordinator, new_coordinator):
    coordinator.create("fedavg", early_stopping="paper", patience=9)
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    other = new_coordinator()
    other.create("fedspu", early_stopping="paper", patience=9)
    other.play(other.open_device("a"), other.open_device("b"))
    assert other.info().model_sha256 == coordinator.info().model_sha256


def test_fedprox_without_weight_is_fedavg_and_with_it_stays_nearer(coordinator, new_coordinator):
    start = initial_values(DIGITS, 0)
    models = {}
    for label, method, own in (
        ("fedavg", "fedavg", {}),
        ("0", "fedprox", {"proximal_weight": 0}),
        ("default", "fedprox", {}),
        ("1", "fedprox", {"proximal_weight": 1.0}),
    ):
        other = new_coordinator()
        other.create(method, method_settings=own, rounds=1, local_epochs=5)
        other.play(other.open_device("a"), other.open_device("b"))
        models[label], _ = checkpoint.load(other.served.model("f"))
    moved = {
        label: sum(np.square(model[spec.name] - start[spec.name]).sum() for spec in DIGITS.shared if spec.trainable)
        for label, model in models.items()
    }
    assert same(models["fedavg"], models["0"])
    assert moved["1"] < moved["default"] < moved["0"]


def test_a_device_that_stops_gets_the_last_model_too(coordinator, any_loss_stops):
    coordinator.create("fedavg", rounds=4, **SOON, patience=1)
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert (coordinator.info().reason, coordinator.info().round) == ("all_stopped", 2)
    assert [kinds(each) for each in worked] == [["train", "train", "evaluate", "adapt"]] * 2
    assert sessions[0].personal is not None


# --- who is drawn ------------------------------------------------------------------------------------------------


def test_a_small_budget_is_told_waits_and_adapts(coordinator, caplog):
    coordinator.create("fedavg")
    small, large = coordinator.open_device("a", budget=0.4), coordinator.open_device("b")
    assert "budget of 0.4" in caplog.text
    assert caplog.text.count("budget") == 2, "the other device is told nothing"
    worked = coordinator.play(small, large)
    assert [kinds(each) for each in worked] == [["evaluate", "adapt"], ["train"] * 3 + ["evaluate", "adapt"]]


def test_a_federation_of_small_budgets_says_what_it_waits_for(coordinator):
    coordinator.create("fedavg", rounds=2)
    sessions = [coordinator.open_device(name, budget=0.5) for name in "ab"]
    coordinator.play(*sessions)
    assert coordinator.info().status == "running"
    assert coordinator.info().waiting_for == (
        "a device with a budget of at least 1, which fedavg needs; the present devices have less"
    )
    coordinator.open_device("c")
    assert coordinator.info().waiting_for is None


def test_small_budgets_do_not_keep_a_federation_open_whose_others_have_stopped(coordinator, any_loss_stops):
    coordinator.create("fedavg", rounds=9, **SOON, patience=1)
    coordinator.play(coordinator.open_device("a", budget=0.5), coordinator.open_device("b"))
    assert (coordinator.info().status, coordinator.info().reason, coordinator.info().round) == (
        "finished",
        "all_stopped",
        2,
    )


# --- settings ----------------------------------------------------------------------------------------------------


def test_a_methods_own_settings_are_completed_and_reach_the_devices(coordinator):
    assert coordinator.create("fedprox").settings.method_settings == {"proximal_weight": 0.01}
    session = coordinator.open_device("a")
    assert session.info.settings.method_settings == {"proximal_weight": 0.01}


@pytest.mark.parametrize(
    ("method", "own", "said"),
    [
        ("fedprox", {"mu": 1.0}, r"method_settings\.mu: there is no such setting; fedprox takes proximal_weight"),
        ("fedprox", {"proximal_weight": -1}, r"method_settings\.proximal_weight: .* at least 0"),
        ("fedavg", {"proximal_weight": 1}, r"method_settings\.proximal_weight: .*; fedavg takes averaged_rounds"),
    ],
)
def test_settings_that_are_not_the_methods_are_refused(coordinator, method, own, said):
    with pytest.raises(BadContent, match=said):
        coordinator.create(method, method_settings=own)


def test_statistics_cannot_stay_on_devices_that_keep_nothing(coordinator):
    task = load_builtin("digits")
    tensors = [
        spec.model_copy(update={"policy": "personal"}) if spec.name.endswith("running_mean") else spec
        for spec in task.manifest.tensors
    ]
    manifest = Manifest.model_validate(
        {**task.manifest.model_dump(), "tensors": [spec.model_dump() for spec in tensors]}
    )
    published = initial_values(manifest, 0)
    extra = {
        "sparrow.manifest": np.frombuffer(manifest.model_dump_json().encode(), dtype=np.uint8),
        **{f"sparrow.{name}": np.frombuffer(graph, dtype=np.uint8) for name, graph in task.graphs.items()},
    }

    def publish(method):
        request = CreateFederation(name=method, settings=FederationSettings(method=method))
        return coordinator.publisher.publish(checkpoint.save({**published, **extra}, request.model_dump_json()))

    with pytest.raises(BadContent, match=r"^bn1\.running_mean: .*fedavg.*--running-statistics shared"):
        publish("fedavg")
    assert publish("fedspu").method == "fedspu"


# --- reopening ---------------------------------------------------------------------------------------------------


def test_reopened_devices_adapt_the_later_model(coordinator):
    coordinator.create("fedavg", rounds=1)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    coordinator.reopen(3)
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train", "train", "evaluate", "adapt"]] * 2
    final, _ = checkpoint.load(coordinator.served.model("f"))
    assert all(same(final, session.personal) for session in sessions)


def test_an_adapted_device_that_starts_again_adapts_the_later_model(coordinator):
    """What it holds is the model of before, whatever it says of it."""
    coordinator.create("fedavg", rounds=1)
    idle, busy = coordinator.open_device("a"), coordinator.open_device("b")
    coordinator.play(idle, busy)
    coordinator.reopen(2)
    coordinator.devices.change(coordinator.device("a").device_id, ChangeDevice(holds_model=True))
    coordinator.play(busy, idle)
    final, _ = checkpoint.load(coordinator.served.model("f"))
    assert same(final, idle.personal)


def test_adapting_that_was_open_when_the_federation_went_on_is_forgotten(coordinator):
    coordinator.create("fedavg", rounds=1)
    session = coordinator.open_device("a")
    coordinator.open_device("b").step()
    coordinator.rounds.advance()
    session.step()
    coordinator.federations.change("f", ChangeFederation(action="stop"))
    assert next_assignment(coordinator, coordinator.device("b").device_id).assignment.kind in (
        Kind.train,
        Kind.adapt,
    )
    coordinator.rounds.advance()
    assert next_assignment(coordinator, coordinator.device("b").device_id).assignment.kind is Kind.adapt
    coordinator.reopen(2)
    for name in ("a", "b"):
        next_assignment(coordinator, coordinator.device(name).device_id)
    coordinator.rounds.advance()
    assert next_assignment(coordinator, coordinator.device("b").device_id).assignment.kind is Kind.train


def test_a_reopening_that_is_refused_forgets_nothing(coordinator):
    coordinator.create("fedavg", rounds=1)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    with pytest.raises(WrongState):
        coordinator.reopen(1)
    assert [kinds(each) for each in coordinator.play(*sessions)] == [[], []]


def test_devices_with_personal_models_keep_them_over_a_reopening(coordinator):
    coordinator.create("fedspu", rounds=1)
    sessions = [coordinator.open_device(name, budget=0.5) for name in "ab"]
    coordinator.play(*sessions)
    coordinator.reopen(2)
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["train", "evaluate"]] * 2
    assert worked[0][0].payload.bytes < worked[0][1].payload.bytes


# --- local training ----------------------------------------------------------------------------------------------


def test_local_training_runs_through_and_leaves_the_global_model(coordinator):
    before = coordinator.create("local", evaluation_interval=2).model_sha256
    sessions = [coordinator.open_device(name) for name in "ab"]
    worked = coordinator.play(*sessions)
    assert [kinds(each) for each in worked] == [["personalise"] * 2 + ["evaluate", "personalise", "evaluate"]] * 2
    info = coordinator.info()
    assert (info.status, info.round, info.model_version, info.model_sha256) == ("finished", 3, 0, before)
    assert not info.global_model_usable
    records = coordinator.records.rounds("f")
    assert [record.updates for record in records] == [2, 2, 2]
    assert [record.cohort for record in records] == [("a", "b")] * 3
    assert records[0].bytes_down > 0
    assert [record.bytes_down for record in records[1:]] == [0, 0]
    assert all(0 < record.bytes_up < 2 * 2000 for record in records)
    assert records[2].train_loss < records[0].train_loss
    assert records[2].training_flops > 0
    assert (records[2].accuracy_global, records[1].evaluated_devices) == (None, 2)
    assert sessions[0].progress.rounds == 3
    assert [receipt.state_bytes for receipt in coordinator.receipts()] == [4 * DIGITS.shared_values] * 4
    assert set(sessions[0].transport.media_types) == {"application/json"}
    assert sessions[0].progress.training.bytes_up > 0
    assert coordinator.store.blobs.keys("1/updates") == []


def test_local_models_are_not_moved_by_others(coordinator, new_coordinator):
    coordinator.create("local", min_devices=1)
    alone = coordinator.open_device("a")
    coordinator.play(alone)
    other = new_coordinator()
    other.create("local", min_devices=1)
    together = other.open_device("a")
    other.play(together, other.open_device("b"), other.open_device("c"))
    assert same(alone.personal, together.personal)
    assert not same(alone.personal, initial_values(DIGITS, 0))


def test_local_training_stops_early_and_ends_when_all_have(coordinator, any_loss_stops):
    coordinator.create("local", rounds=9, **SOON, patience=2)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    assert (coordinator.info().reason, coordinator.info().round) == ("all_stopped", 3)
    assert [session.progress.stopped_round for session in sessions] == [3, 3]


def test_a_device_that_comes_after_the_end_trains_the_initial_weights(coordinator):
    coordinator.create("local", rounds=1)
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    late = coordinator.open_device("c")
    assert [kinds(each) for each in coordinator.play(late)] == [["adapt"]]
    assert not same(initial_values(DIGITS, 0), late.personal)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedspu"])
def test_a_round_survives_a_kill_between_saving_and_sending(coordinator, new_coordinator, method):
    coordinator.create(method, rounds=2)
    undisturbed = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*undisturbed)

    other = new_coordinator()
    other.create(method, rounds=2)
    first, second = other.open_device("a"), other.open_device("b")
    other.rounds.advance()
    first.transport.broken = True
    with pytest.raises(ConnectionError):
        first.step()
    first.folder.close()
    again = other.open_device("a")
    assert again.progress.pending.kind.value == ("personalise" if method == "local" else "train")
    assert again.progress.rounds == 1
    other.play(again, second)
    assert same(undisturbed[0].personal, again.personal)
    assert again.progress.rounds == 2
    assert other.info().model_sha256 == coordinator.info().model_sha256
    assert [record.updates for record in other.records.rounds("f")] == [2, 2]


@pytest.mark.parametrize(
    ("method", "own"),
    [("fedavg", {}), ("fedsgc", {"adjust_interval": 0}), ("fedspu", {})],
    ids=lambda value: str(value),
)
def test_what_int8_owes_is_of_the_updates_that_counted(coordinator, clock, monkeypatch, method, own):
    """Under a lost acknowledgement, a restart, an update that comes too late and one that is refused: what was sent and
    counted, and what is owed in the end, is together what was to be sent, but for float32's rounding."""
    counted, tried = [], []

    def watched(job, update, feedback):
        numbers, left = round_update(job, update, feedback)
        change = np.asarray(update.values) - sent_values(job.manifest, job.received, update.mask)
        rounded = numbers.values(row_lengths(job.manifest, update.mask))
        tried[:] = [spread(change, update.mask), spread(rounded, update.mask), len(feedback)]
        return numbers, left

    def spread(values, mask):
        tensors = {spec.name: np.zeros(spec.shape) for spec in DIGITS.shared}
        merge_in_place(DIGITS, tensors, values, mask)
        return np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])

    def disturbed(fault):
        device = coordinator.open_device("a", 0.5 if method == "fedspu" else 1.0)
        sends = device.transport.update

        def update(assignment_id, body, media_type, *_, **named):
            if media_type == bundle.MEDIA_TYPE and fault and not isinstance(fault[0], ConnectionError):
                raise fault.pop()
            sends(assignment_id, body, media_type)
            if media_type == bundle.MEDIA_TYPE and len(tried) == 3:
                counted.append(tuple(tried))
                tried.clear()
            if fault:
                raise fault.pop()

        device.transport.update = update
        return device

    def until(rounds, device):
        while coordinator.info().round < rounds or device.progress.pending is not None:
            coordinator.rounds.advance()
            device.step()
            clock.pass_seconds(61)
        return device

    monkeypatch.setattr("edge_sdk.device.session.work.round_update", watched)
    coordinator.create(method, precision="int8", rounds=7, min_devices=1, method_settings=own, silence_seconds=600)
    until(1, disturbed([])).folder.close()
    device = disturbed([ConnectionError("the acknowledgement is lost")])
    with pytest.raises(ConnectionError):
        until(2, device)
    device.folder.close()
    until(2, disturbed([])).folder.close()
    until(3, disturbed([RoundOver(409, "too late")])).folder.close()
    until(4, disturbed([Refused(422, "no")])).folder.close()
    device = until(7, disturbed([]))
    total, sent = (sum(each[part] for each in counted) for part in (0, 1))
    owed = np.concatenate([device.folder.feedback[spec.name].reshape(-1) for spec in DIGITS.shared])
    assert len(counted) >= 5
    assert np.count_nonzero(owed) > 1000
    np.testing.assert_allclose(sent + owed, total, atol=len(counted) * 1e-6)
    carried = [record.counts["carried_values"] for record in coordinator.records.rounds("f") if record.updates]
    assert carried[0] == 0
    assert all(count > 100 for count in carried[1:])


def test_a_device_whose_preparation_came_too_late_goes_on(coordinator, clock):
    """Its round was withdrawn, and the assignment with it: there is nothing to hand back either."""
    coordinator.create("grasp", rounds=1, min_devices=1, method_settings={"density": 0.3})
    session = coordinator.open_device("a")
    coordinator.rounds.advance()
    session.transport.broken = True
    with pytest.raises(ConnectionError):
        session.step()
    clock.pass_seconds(1000)
    coordinator.rounds.advance()
    session.transport.broken = False
    assert session.step().outcome is Outcome.idle, "it had been thought away"
    (worked,) = coordinator.play(session)
    assert kinds(worked) == ["prepare", "train", "evaluate", "adapt"]
    assert [record.round for record in coordinator.records.rounds("f")] == [0, 1]


def test_what_personalising_answers_is_a_report_as_json(coordinator):
    coordinator.create("local", rounds=1)
    session = coordinator.open_device("a")
    coordinator.open_device("b")
    coordinator.rounds.advance()
    device = coordinator.device("a").device_id
    assignment = next_assignment(coordinator, device).assignment
    with pytest.raises(WrongMediaType, match="of kind personalise as application/json"):
        coordinator.acceptance.check_envelope(assignment.assignment_id, device, "text/plain")
    with pytest.raises(BadContent, match="num_examples"):
        coordinator.acceptance.accept_update(assignment.assignment_id, device, b"{}", JSON_TYPE)
    report = UpdateReport(num_examples=3, steps=1, train_loss=0.5)
    assert coordinator.acceptance.accept_update(
        assignment.assignment_id, device, report.model_dump_json().encode(), JSON_TYPE
    )
    assert session.step().outcome is Outcome.idle


def test_enrolling_without_a_notice(coordinator):
    coordinator.create("fedspu")
    enrolled = coordinator.devices.enrol("f", Enrol(name="x", enrolment_key="k" * 32, budget=0.1))
    assert enrolled.notice is None


# --- a model that one device has spoilt ---------------------------------------------------------------------------


def test_a_spoilt_model_ends_no_device_and_an_older_one_helps(tmp_path, clock):
    """Finite, but no device's loss is: the ones that join since and those that trained before hand their work back."""
    coordinator = CoordinatorWithDevices(tmp_path, clock, keep_models=3)
    unbounded = {"deadline_seconds": 100, "silence_seconds": 1000, "relative_clip": 0}
    coordinator.create("fedavg", rounds=50, min_devices=2, **unbounded)
    honest = coordinator.open_device("a")
    (hostile,) = coordinator.enrol("hostile")
    coordinator.rounds.advance()
    assignment = hostile.ask()
    sent = bundle.decode(hostile.payload(assignment), DIGITS)
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
    huge = np.full(len(sent.values), 3e38, dtype=np.float32)
    assert hostile.send(assignment, bundle.encode(DIGITS, huge, None, report=report))
    assert honest.step().failed is None
    coordinator.rounds.advance()
    coordinator.devices.change(hostile.id, ChangeDevice(revoked=True))
    fresh = coordinator.open_device("b")
    for _ in range(2 * FAILURES):
        clock.pass_seconds(REST_SECONDS)
        coordinator.rounds.advance()
        for session in (honest, fresh):
            step = session.step()
            if step.assignment is not None:
                assert "loss" in step.failed
    with coordinator.store.reading() as db:
        reasons = [row.return_reason for row in db.query(Assignment).filter(Assignment.status == "returned")]
    assert "unsound-model" in reasons
    assert fresh.failed_rounds == 0, "it is not to blame, and does not give up"
    coordinator.federations.change("f", ChangeFederation(action="rollback", model_version=0))
    for _ in range(4):
        clock.pass_seconds(REST_SECONDS)
        coordinator.rounds.advance()
        last = [session.step() for session in (honest, fresh)]
    assert [step.failed for step in last] == [None, None]
    assert fresh.progress.rounds
    coordinator.close()
