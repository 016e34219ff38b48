"""Older global models: which are kept, and what going back to one means to rounds, records and devices.

And new versions of a model, which take the place of the one before."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import onnx
import pytest

from edge_sdk.methods import load_method
from sparrow.coordinator.commands.backup import back_up
from sparrow.coordinator.commands.restore import bring_back
from sparrow.coordinator.errors import BadContent, DifferentFederation, NotFound, RoundClosed, WrongState
from sparrow.coordinator.models.retention import Quality, Retention, best_of
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.tables import Model
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import ChangeFederation
from sparrow.protocol.parts import expected

from .fakes import DIGITS, LocalCoordinator
from .sessions import CoordinatorWithDevices

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models


@pytest.fixture
def coordinator(tmp_path, clock):
    coordinator = LocalCoordinator(tmp_path / "data", clock, keep_models=3, keep_every=4)
    with closing(coordinator.store):
        yield coordinator


def versions(coordinator):
    return [model.version for model in coordinator.served.models("f")]


def test_the_newest_are_kept_and_every_so_many(coordinator, play):
    coordinator.create(rounds=10)
    play(coordinator, coordinator.enrol("a", "b"))
    assert versions(coordinator) == [0, 4, 8, 9, 10]
    models = coordinator.served.models("f")
    assert [model.round for model in models] == [0, 4, 8, 9, 10]
    assert [model.current for model in models] == [False] * 4 + [True]
    records = coordinator.records.rounds("f")
    assert models[1].model_sha256 == records[3].model_sha256
    tensors, note = checkpoint.load(coordinator.served.model("f", 4))
    assert note == '{"version": 4}'
    assert tensors
    with pytest.raises(NotFound, match=r"model 5 of f\b"):
        coordinator.served.model("f", 5)


def test_older_models_are_thinned_and_their_number_hardly_grows():
    def after(rounds):
        """The versions that are left when so many rounds have closed one after another."""
        left = [Model(version=0)]
        for number in range(1, rounds + 1):
            left.append(Model(version=number))
            stay = Retention(last=3, every=10).kept(left)
            left = [each for each in left if each.version in stay]
        return [each.version for each in left]

    assert after(25) == [0, 10, 20, 23, 24, 25]
    assert after(250) == [0, 40, *range(60, 160, 20), *range(160, 250, 10), 248, 249, 250]
    assert len(after(2000)) < 45


def test_the_best_by_evaluation_is_kept_until_a_better_one_comes(coordinator, answer):
    coordinator.create(rounds=9, cohort=1, min_devices=1, evaluation_interval=1)
    (device,) = coordinator.enrol("a")
    accuracies = [0.0, 0.5, 0.9, 0.7, 0.6, 0.6, 0.6, 0.6, 0.95, 0.2]
    found = []
    coordinator.rounds.advance()
    while coordinator.info().status != "finished":
        if answer(device, accuracy=accuracies[coordinator.info().round]).kind == "evaluate":
            found.append(next(model.version for model in coordinator.served.models("f") if model.best))
        coordinator.rounds.advance()
    assert found == [1, 2, 2, 2, 2, 2, 2, 8, 8]
    models = {model.version: model for model in coordinator.served.models("f")}
    assert list(models) == [0, 4, 7, 8, 9]
    assert (models[8].accuracy, models[9].accuracy, models[0].accuracy) == (0.95, 0.2, None)
    coordinator.change(action="rollback", model_version=7)
    assert not any(model.best for model in coordinator.served.models("f") if model.undone)
    assert next(model.version for model in coordinator.served.models("f") if model.best) == 7


def test_a_model_that_few_devices_evaluated_is_not_the_best():
    models = [Model(version=number, undone=False) for number in (1, 2, 3)]
    quality = {1: Quality(0.8, 0.5, 4), 2: Quality(1.0, 0.1, 1), 3: Quality(0.7, 0.6, 2)}
    assert best_of(models, quality) == 1
    assert best_of(models[1:], quality) == 2


def test_a_pinned_model_outlives_its_time(coordinator, clock, answer):
    devices = some_rounds(coordinator, answer, 5)
    coordinator.federations.pin_model("f", 3)

    def play(count):
        for _ in range(count):
            for device in devices:
                answer(device)
            coordinator.rounds.advance()

    play(4)
    assert versions(coordinator) == [0, 3, 4, 7, 8, 9]
    coordinator.federations.pin_model("f", 3)
    clock.now += 100
    play(1)
    assert 3 in versions(coordinator)
    clock.now += 100
    play(1)
    assert versions(coordinator) == [0, 4, 8, 9, 10, 11]
    with pytest.raises(NotFound):
        coordinator.federations.pin_model("f", 3)


def some_rounds(coordinator, answer, count):
    """Play until ``count`` rounds have closed and the next is open; the devices."""
    coordinator.create(rounds=20, cohort=2)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for _ in range(count):
        for device in devices:
            answer(device)
        coordinator.rounds.advance()
    return devices


def test_the_next_round_begins_from_the_older_model(coordinator, answer):
    devices = some_rounds(coordinator, answer, 5)
    wanted = coordinator.served.model("f", 3)
    info = coordinator.change(action="rollback", model_version=3)
    assert (info.model_version, info.rollback_version) == (5, 3), "its open round closes first"
    for device in devices:
        answer(device)
    coordinator.rounds.advance()
    info = coordinator.info()
    assert (info.round, info.model_version, info.rollback_version) == (6, 3, None)
    assert coordinator.model() == wanted
    assert info.model_sha256 == coordinator.record(3).model_sha256
    assignment = devices[0].ask()
    assert assignment.round == 7
    received = bundle.decode(devices[0].payload(assignment), coordinator.served.manifest("f"))
    tensors, _ = checkpoint.load(wanted)
    assert np.isin(received.values, np.concatenate([each.ravel() for each in tensors.values()])).all()
    for device in devices:
        answer(device)
    coordinator.rounds.advance()
    records = coordinator.records.rounds("f")
    assert [record.undone for record in records[:7]] == [False, False, False, True, True, True, False]
    assert [(record.base_version, record.model_version) for record in records[4:7]] == [(4, 5), (5, 6), (3, 7)]
    assert records[5].updates == 2, "what was acknowledged is in the records"
    assert coordinator.info().model_version == 7, "no number is used twice"


def test_between_rounds_it_is_done_at_once_and_can_be_taken_back(coordinator, play):
    coordinator.create(rounds=5)
    devices = coordinator.enrol("a", "b")
    play(coordinator, devices)
    assert coordinator.info().status == "finished"
    newest = coordinator.model()
    assert coordinator.change(action="rollback", model_version=3).model_version == 3
    assert [record.undone for record in coordinator.records.rounds("f")] == [False, False, False, True, True]
    assert coordinator.change(action="rollback", model_version=5).model_version == 5
    assert coordinator.model() == newest
    assert not any(record.undone for record in coordinator.records.rounds("f"))
    coordinator.change(action="rollback", model_version=4)
    coordinator.change(action="reopen", rounds=6)
    play(coordinator, devices)
    assert (coordinator.info().model_version, coordinator.record(6).base_version) == (6, 4)


def test_what_cannot_be_gone_back_to_is_refused(coordinator, play):
    coordinator.create(rounds=6)
    play(coordinator, coordinator.enrol("a", "b"))
    with pytest.raises(NotFound, match=r"model 3\b.*0, 4, 5, 6"):
        coordinator.change(action="rollback", model_version=3)
    with pytest.raises(BadContent, match="with the action rollback"):
        coordinator.change(action="rollback")
    with pytest.raises(BadContent, match="with the action rollback"):
        coordinator.change(model_version=4)
    assert coordinator.info().model_version == 6


def test_a_restart_with_a_rollback_pending(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "again", clock, keep_models=3)
    devices = some_rounds(coordinator, answer, 3)
    coordinator.change(action="rollback", model_version=1)
    coordinator.store.close()
    coordinator = LocalCoordinator(tmp_path / "again", clock, keep_models=3)
    with closing(coordinator.store):
        for device in devices:
            device.coordinator = coordinator
            answer(device)
        coordinator.rounds.advance()
        assert (coordinator.info().round, coordinator.info().model_version) == (4, 1)


# --- a new version of the model ----------------------------------------------------------------------------------


def version(number, change=lambda manifest, tensors: manifest, **left_out):
    """A new version of digits' model as it is sent: its graphs are stamped with a number."""
    task, graphs = load_builtin("digits"), {}
    for name, content in task.graphs.items():
        graph = onnx.load_from_string(content)
        graph.producer_version = str(number)
        if name not in left_out:
            graphs[name] = graph.SerializeToString()
    tensors = {f"sparrow.{name}": np.frombuffer(graph, np.uint8) for name, graph in graphs.items()}
    bare = {**task.manifest.model_dump(), **{f"{name}_sha256": None for name in task.graphs}}
    manifest = change(Manifest.model_validate(bare).with_graphs(graphs), tensors)
    tensors["sparrow.manifest"] = np.frombuffer(manifest.model_dump_json().encode(), np.uint8)
    return checkpoint.save(tensors)


def stamp(coordinator):
    """Which version of the model is served, all graphs alike, and whether the manifest names them."""
    graphs = {name: coordinator.served.graph("f", name) for name in ("skeleton", "step", "evaluation")}
    assert coordinator.served.manifest("f").with_graphs(graphs) == coordinator.served.manifest("f")
    graphs["filled"] = coordinator.served.model_onnx("f")
    (found,) = {onnx.load_from_string(graph).producer_version for graph in graphs.values()}
    return found


def graph_files(coordinator):
    return len(coordinator.store.blobs.keys("1/files"))


def test_a_new_version_waits_for_the_open_round_also_through_a_restart(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "again", clock)
    devices = some_rounds(coordinator, answer, 1)
    before, first = stamp(coordinator), devices[0].ask()
    assert coordinator.publisher.replace_model("f", version(1)).replacing
    assert coordinator.publisher.replace_model("f", version(2)).replacing, "the last counts"
    assert stamp(coordinator) == before
    assert devices[0].ask().manifest_digest == first.manifest_digest == coordinator.info().manifest_digest
    coordinator.store.close()
    coordinator = LocalCoordinator(tmp_path / "again", clock)
    with closing(coordinator.store):
        for device in devices:
            device.coordinator = coordinator
            assert answer(device).manifest_digest == first.manifest_digest
        coordinator.rounds.advance()
        info = coordinator.info()
        assert (info.round, info.replacing, stamp(coordinator)) == (2, False, "2")
        assert answer(devices[0]).manifest_digest == info.manifest_digest != first.manifest_digest
        assert graph_files(coordinator) == 3, "those of other versions are gone"


def test_a_backup_has_the_version_that_waits(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        devices = some_rounds(coordinator, answer, 1)
        coordinator.publisher.replace_model("f", version(1))
        back_up(coordinator.settings, tmp_path / "copy")
    bring_back(Settings(data_dir=tmp_path / "new", default_task=""), tmp_path / "copy")
    coordinator = LocalCoordinator(tmp_path / "new", clock)
    with closing(coordinator.store):
        for device in devices:
            device.coordinator = coordinator
            answer(device)
        coordinator.rounds.advance()
        assert (coordinator.info().round, stamp(coordinator)) == (2, "1")


def test_a_new_version_between_rounds_takes_effect_at_once(coordinator, play):
    coordinator.create(rounds=3)
    play(coordinator, coordinator.enrol("a", "b"))
    weights, old = coordinator.model(), coordinator.info().manifest_digest
    info = coordinator.publisher.replace_model("f", version(1))
    assert (info.replacing, info.manifest_digest != old, stamp(coordinator)) == (False, True, "1")
    assert coordinator.publisher.replace_model("f", version(1)) == info, "the same again changes nothing"
    assert coordinator.change(action="rollback", model_version=2).model_version == 2
    assert stamp(coordinator) == "1"
    assert coordinator.model() != weights


def test_buffered_work_ends_with_its_model_version(coordinator, answer, train):
    coordinator.create(rounds=9, cohort=3, buffer=2)
    a, b, slow = coordinator.enrol("a", "b", "slow")
    coordinator.rounds.advance()
    late = slow.ask()
    coordinator.publisher.replace_model("f", version(1))
    for device in (a, b):
        answer(device)
    coordinator.rounds.advance()
    assert (coordinator.info().round, stamp(coordinator)) == (1, "1")
    with pytest.raises(RoundClosed):
        slow.send(late, train(DIGITS, late))


def reshaped(manifest, tensors):
    first, *others = manifest.model_dump()["tensors"]
    shape = (first["shape"][0], *first["shape"][1:-1], first["shape"][-1] + 1)
    return Manifest.model_validate(
        {**manifest.model_dump(), "tensors": [{**first, "shape": shape, "axes": ()}, *others]}
    )


def with_weights(manifest, tensors):
    tensors["conv1.bias"] = np.zeros(3, np.float32)
    return manifest


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (version(1, reshaped), DifferentFederation, r"has shape .* inputs or outputs under another name"),
        (
            version(1, lambda manifest, tensors: manifest.model_copy(update={"task": "letters"})),
            DifferentFederation,
            "task: the new version has letters, the federation digits",
        ),
        (
            version(1, lambda manifest, tensors: manifest.model_copy(update={"output_shape": (11,)})),
            DifferentFederation,
            r"output_shape: the new version has \(11,\), the federation \(10,\)",
        ),
        (version(1, with_weights), BadContent, r"conv1\.bias: weights cannot be replaced"),
        (version(1, step=True, evaluation=True), BadContent, "version has none; publish a version that compiles"),
        (version(1, skeleton=True), BadContent, "the manifest names no skeleton"),
        (b"nothing", BadContent, "safetensors"),
    ],
)
def test_another_model_is_refused_as_a_new_version(coordinator, body, error, said):
    coordinator.create()
    before = coordinator.info()
    with pytest.raises(error, match=said):
        coordinator.publisher.replace_model("f", body)
    assert coordinator.info() == before
    assert graph_files(coordinator) == 3


# --- methods, with devices that train ----------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path, clock):
    coordinator = CoordinatorWithDevices(tmp_path, clock, keep_models=5)
    with closing(coordinator):
        yield coordinator


SETTINGS = {
    "pfedgate": {"method_settings": {"smallest_budget": 0.5}},
    "fedsgc": {"method_settings": {"adjust_interval": 2, "device_interval": 1}},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_devices_are_ahead_of_the_older_model_and_get_along(real, method):
    real.create(method, rounds=4, cohort=2, **SETTINGS[method])
    a, b = real.open_device("a"), real.open_device("b")
    real.play(a, b)
    held = {session: session.progress.model for session in (a, b)}
    wanted = real.served.models("f")[2]
    real.federations.change("f", ChangeFederation(action="rollback", model_version=2))
    assert real.info().model_sha256 == wanted.model_sha256
    before = real.model().tensors
    real.reopen(rounds=6)
    for session in (a, b):
        session.transport.assignment("f", 0, None, None, held[session])
    real.rounds.advance()
    for session in (a, b):
        wire = session.transport
        wire.received.clear()
        assignment, _ = wire.assignment("f", 0, None, None, held[session])
        manifest = real.served.manifest("f")
        parts = expected(load_method(method).payload_parts, manifest, assignment.plan)
        body = wire.payload(assignment.assignment_id, assignment.payload)
        received = bundle.decode(body, manifest, parts=parts)
        if method == "pfedgate":
            assert received.mask is None or received.mask.on.all(), "what it holds was undone: it is sent the whole"
        assert np.isin(received.values, np.concatenate([each.ravel() for each in before.values()])).all()
    real.play(a, b)
    records = real.records.rounds("f")
    assert [record.updates for record in records] == [2] * 6
    assert [record.base_version for record in records] == [0, 1, 2, 3, 2, 5]
    assert real.info().status == "finished"


def test_dmpfl_goes_back_within_a_stage(real):
    real.create("dmpfl", rounds=8, cohort=2, method_settings={"iterations": 1})
    a, b = real.open_device("a"), real.open_device("b")
    while real.info().round < 3:
        real.rounds.advance()
        for session in (a, b):
            session.step()
    real.rounds.advance()  # round 5 is open, the first of the stage global (5 and 6)
    refusal = r"stages build on each other, and round 6 is of the stage global.*rounds 4 to 5, not from that of round 2"
    with pytest.raises(WrongState, match=refusal):
        real.federations.change("f", ChangeFederation(action="rollback", model_version=2))
    real.play(a, b)
    assert real.info().round == 8
    with pytest.raises(WrongState, match=r"round 8\b"):
        real.federations.change("f", ChangeFederation(action="rollback", model_version=5))
