"""A device's memory: whole or not at all, its own, and honest about damage."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import closing
from random import Random

import numpy as np
import pytest

from edge_sdk.device.session import MASK, Outcome, Session
from edge_sdk.device.state import Pending, Progress, Reference, StateFolder, Totals
from edge_sdk.device.transport import Transport
from edge_sdk.errors import StateError
from edge_sdk.publish import publish
from edge_sdk.tasks.digits import load
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.messages import Kind, Phase, UploadCost
from sparrow.simulation import in_process as inprocess

from ..power import watching


@pytest.fixture
def folder(tmp_path):
    opened = StateFolder(tmp_path / "state")
    yield opened
    opened.close()


def personal(manifest):
    return initial_values(manifest, 5)


def test_a_new_folder_knows_nothing(folder, small):
    assert folder.load(small) == (None, Progress())
    assert folder.cached("manifest.json") is None


def test_model_and_progress_come_back_together(folder, small):
    progress = Progress(
        rounds=3,
        last_round=7,
        memory={"last_loss": 0.5},
        training=Totals(seconds=1.5, bytes_up=3),
        pending=Pending(assignment_id="a", kind=Kind.train, sha256="0" * 64),
        upload_cost=UploadCost(assignment_id="a", upload=Phase(seconds=1)),
    )
    folder.save(small, personal(small), progress)
    tensors, loaded = folder.load(small)
    assert loaded == progress
    assert all(tensors[name].tobytes() == tensor.tobytes() for name, tensor in personal(small).items())
    tensors["conv.weight"][...] = 0  # a copy that can be trained on


def test_progress_without_a_model_is_kept_too(folder, small):
    folder.save(small, None, Progress(rounds=1))
    assert folder.load(small) == (None, Progress(rounds=1))


def test_a_save_replaces_the_last_one_and_leaves_nothing_beside_it(folder, small):
    for rounds in range(3):
        folder.save(small, personal(small), Progress(rounds=rounds))
    assert folder.load(small)[1].rounds == 2
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "model.safetensors"]


def test_a_save_that_was_killed_leaves_the_last_one_whole(folder, small):
    """What a killed process leaves is a partial file under another name; the next save is not hindered by it."""
    folder.save(small, personal(small), Progress(rounds=1))
    (folder.path / "model.safetensors.partial").write_bytes(b"half")
    assert folder.load(small)[1].rounds == 1
    folder.save(small, personal(small), Progress(rounds=2))
    assert folder.load(small)[1].rounds == 2


def test_one_process_at_a_time(folder, tmp_path):
    with pytest.raises(StateError, match=r"another process.*--device-name"):
        StateFolder(tmp_path / "state")
    folder.close()
    StateFolder(tmp_path / "state").close()


def test_the_lock_is_for_its_owner_alone_and_no_link(folder, tmp_path):
    assert stat.S_IMODE((folder.path / "lock").stat().st_mode) == 0o600
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(victim)
    with pytest.raises(StateError, match=r"\bother\b.*--state-dir"):
        StateFolder(tmp_path / "other")
    assert victim.read_bytes() == b"kept"


def test_an_identity_is_made_once_and_is_nobody_elses_business(folder):
    first = folder.identity("f", "uid", "pi")
    assert len(first.enrolment_key) >= 32
    assert (first.device_id, first.token) == (None, None)
    assert folder.identity("f", "uid", "pi") == first
    folder.save_identity(first.model_copy(update={"device_id": "d", "token": "t"}))
    assert folder.identity("f", "uid", "pi").token == "t"
    mode = (folder.path / "identity.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) & 0o077 in (0, 0o055), "the umask's, at most"


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        (("f", "uid", "other"), "belongs to pi in f, not to other in f; use another --state-dir"),
        (("g", "uid", "pi"), "belongs to pi in f, not to pi in g"),
        (("f", "new", "pi"), "created before this one was reset; use another --state-dir"),
    ],
)
def test_a_folder_belongs_to_one_device(folder, whose, said):
    folder.identity("f", "uid", "pi")
    with pytest.raises(StateError) as refused:
        folder.identity(*whose)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}', "\x00"])
def test_a_damaged_identity_is_told_with_advice(folder, text):
    folder.identity("f", "uid", "pi")
    (folder.path / "identity.json").write_text(text)
    with pytest.raises(StateError, match=r"identity\.json\b.*--state-dir"):
        folder.identity("f", "uid", "pi")


def test_a_model_of_another_manifest_is_refused(folder, small):
    folder.save(small, personal(small), Progress())
    other = Manifest.model_validate({**small.model_dump(), "task": "other"})
    with pytest.raises(StateError, match=r"manifest.*--state-dir"):
        folder.load(other)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_model_is_told_with_advice(folder, small, keep):
    folder.save(small, personal(small), Progress())
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StateError, match=r"model\.safetensors\b"):
        folder.load(small)


@pytest.mark.parametrize(
    "note", ["", "[]", "1", "{}", '{"progress": {}}', '{"progress": {"rounds": "x"}, "manifest": ""}']
)
def test_a_note_that_is_none_is_damage(folder, small, note):
    (folder.path / "model.safetensors").write_bytes(checkpoint.save({"w": np.zeros(1)}, note))
    with pytest.raises(StateError, match="is damaged"):
        folder.load(small)


def test_the_outbox_gives_back_what_was_laid_out(folder):
    pending = folder.put_outbox("a", Kind.train, b"update")
    assert (pending.assignment_id, pending.kind) == ("a", Kind.train)
    assert folder.outbox(pending) == b"update"


def test_an_outbox_of_another_update_is_not_sent(folder):
    first = folder.put_outbox("a", Kind.train, b"first")
    folder.put_outbox("b", Kind.evaluate, b"second")
    with pytest.raises(StateError, match=r"outbox\.bundle\b.*--state-dir"):
        folder.outbox(first)
    (folder.path / "outbox.bundle").unlink()
    with pytest.raises(StateError, match="is missing or damaged"):
        folder.outbox(first)


def test_downloads_are_cached_beside_the_state(folder):
    folder.cache("manifest.json", b"{}")
    assert folder.cached("manifest.json") == b"{}"


def test_totals_never_blend_measured_and_estimated_joules():
    total = Totals()
    for phase in (
        Phase(seconds=1, bytes_up=1, joules=10, quality="measured"),
        Phase(seconds=2, bytes_down=2, joules=20, quality="estimated"),
        Phase(seconds=4, joules=40, quality="derived"),
        Phase(seconds=8),
    ):
        total = total.plus(phase)
    assert total == Totals(
        seconds=15, bytes_down=2, bytes_up=1, joules_measured=50, joules_estimated=20, seconds_without_joules=8
    )


# --- progress beside the model ---------------------------------------------------------------------------------------


def reopened(folder, **options):
    """The same folder in another process."""
    folder.close()
    return closing(StateFolder(folder.path, **options))


def test_later_progress_is_kept_beside_the_model(folder, small):
    folder.save(small, personal(small), Progress(rounds=1))
    model = (folder.path / "model.safetensors").read_bytes()
    folder.save_progress(Progress(rounds=1, steps=5))
    assert (folder.path / "model.safetensors").read_bytes() == model, "what is large is not written again"
    with reopened(folder) as again:
        tensors, progress = again.load(small)
    assert progress == Progress(rounds=1, steps=5)
    assert set(tensors) == set(personal(small))


def test_later_progress_needs_no_model(folder, small):
    folder.save_progress(Progress(adapted=True))
    with reopened(folder) as again:
        assert again.load(small) == (None, Progress(adapted=True))


def test_progress_of_before_a_save_no_longer_counts(folder, small):
    folder.save(small, personal(small), Progress(rounds=1))
    folder.save_progress(Progress(rounds=1, steps=5))
    folder.save(small, personal(small), Progress(rounds=2))
    with reopened(folder) as again:
        assert again.load(small)[1] == Progress(rounds=2)
        again.save_progress(Progress(rounds=2, steps=9))
        assert again.load(small)[1] == Progress(rounds=2, steps=9)


def test_a_save_after_a_restart_is_newer_than_the_progress_of_before(folder, small):
    """Saves are numbered on: counted from the start again, an old progress would fit a new model."""
    folder.save(small, personal(small), Progress(rounds=1))
    folder.save_progress(Progress(rounds=1, steps=5))
    with reopened(folder) as again:
        again.load(small)
        again.save(small, personal(small), Progress(rounds=2))
    with closing(StateFolder(folder.path)) as third:
        assert third.load(small)[1] == Progress(rounds=2)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "{}", '{"save": 1}', '{"save": 1, "progress": {"rounds": "x"}}'])
def test_damaged_progress_is_told_with_advice(folder, small, text):
    folder.save(small, personal(small), Progress(rounds=1))
    (folder.path / "progress.json").write_text(text)
    with pytest.raises(StateError, match=r"(?s)is damaged .*; move it away"):
        folder.load(small)


# --- simulated devices: a difference from a reference ----------------------------------------------------------------


@pytest.fixture
def reference(small):
    return initial_values(small, 1)


@pytest.fixture
def simulated(tmp_path, reference):
    opened = StateFolder(tmp_path / "simulated", durable=False, reference=Reference.of(reference))
    yield opened
    opened.close()


def partly_changed(reference):
    tensors = {name: tensor.copy() for name, tensor in reference.items()}
    tensors["fc.weight"][0] += 1
    return tensors


def test_a_difference_comes_back_as_the_model(simulated, small, reference):
    wanted = partly_changed(reference)
    simulated.save(small, wanted, Progress(rounds=1))
    with reopened(simulated, durable=False, reference=Reference.of(reference)) as again:
        tensors, progress = again.load(small)
    assert progress == Progress(rounds=1)
    assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {
        name: tensor.tobytes() for name, tensor in wanted.items()
    }
    tensors["conv.weight"][...] = 0  # a copy that can be trained on
    assert not np.array_equal(reference["conv.weight"], tensors["conv.weight"])


def test_a_difference_is_smaller_than_the_model(simulated, folder, small, reference):
    for each in (simulated, folder):
        each.save(small, partly_changed(reference), Progress())
    sizes = [(each.path / "model.safetensors").stat().st_size for each in (simulated, folder)]
    assert sizes[0] < sizes[1]


def test_a_model_that_is_the_references_is_a_model_all_the_same(simulated, small, reference):
    simulated.save(small, reference, Progress(rounds=1))
    tensors, _ = simulated.load(small)
    assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {
        name: tensor.tobytes() for name, tensor in reference.items()
    }
    simulated.save(small, None, Progress(rounds=2))
    assert simulated.load(small) == (None, Progress(rounds=2))


def test_a_difference_cannot_be_opened_without_its_reference(simulated, small, reference):
    simulated.save(small, partly_changed(reference), Progress())
    with (
        reopened(simulated) as again,
        pytest.raises(StateError, match=r"\bfleet\b"),
    ):
        again.load(small)


def test_a_whole_model_opens_beside_a_reference(folder, small, reference):
    """A device that ran by itself may be hosted by a fleet from then on."""
    folder.save(small, personal(small), Progress(rounds=1))
    with reopened(folder, reference=Reference.of(reference)) as again:
        tensors, progress = again.load(small)
    assert progress.rounds == 1
    assert all(tensors[name].tobytes() == tensor.tobytes() for name, tensor in personal(small).items())


@pytest.mark.parametrize("durable", [True, False])
def test_files_are_flushed_where_they_are_to_survive_a_power_cut(tmp_path, small, monkeypatch, durable):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    with closing(StateFolder(tmp_path / "state", durable=durable)) as folder:
        folder.save(small, personal(small), Progress(rounds=1))
        folder.save_progress(Progress(rounds=1, steps=1))
        assert bool(flushed) == durable
        assert folder.load(small)[1].steps == 1
        assert not list(folder.path.glob("*.partial"))


def flushed_life(folder, small, monkeypatch, without=None):
    """Two rounds of a device, and whatever it keeps is safe; the places that flush."""
    folder.mkdir()
    with watching(folder, monkeypatch, without=without) as disk:
        with closing(StateFolder(folder / "state" / "pi")) as state:
            state.identity("f", "uid", "pi")
            disk.check()
            for number in (1, 2):
                pending = state.put_outbox("a", Kind.train, b"update %d" % number)
                progress = Progress(rounds=number, pending=pending)
                state.save(small, personal(small), progress, best=True)
                disk.check()
                state.save_progress(progress.model_copy(update={"pending": None}))
                disk.check()
        return disk.flushed_at


def test_a_power_cut_takes_nothing_of_a_device_that_was_kept(tmp_path, small, monkeypatch):
    places = flushed_life(tmp_path / "life", small, monkeypatch)
    assert len(places) >= 4
    for number, place in enumerate(places):  # left out, each of its flushes is missed
        with pytest.raises(AssertionError, match="may be lost"):
            flushed_life(tmp_path / str(number), small, monkeypatch, place)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_cut_at_any_step_a_device_goes_on_from_one_save(tmp_path, small, monkeypatch, seed):
    random, count, known = Random(seed), 0, []

    def cut():
        nonlocal count
        count += 1
        disk.after_cut(tmp_path / str(count), random)
        left = tmp_path / str(count) / "state"
        if (left / "pi").exists():
            with closing(StateFolder(left / "pi")) as state:
                tensors, progress = state.load(small)
                assert progress.rounds in (len(known), len(known) - 1), "what was kept is there, or what was being kept"
                assert progress.rounds == 0 or tensors is not None
                assert progress.pending is None or state.outbox(progress.pending) == b"update %d" % progress.rounds
        shutil.rmtree(tmp_path / str(count))

    (tmp_path / "life").mkdir()
    with watching(tmp_path / "life", monkeypatch) as disk:
        disk.on_step = cut
        with closing(StateFolder(tmp_path / "life" / "state" / "pi")) as state:
            for number in (1, 2, 3):
                known.append(number)
                pending = state.put_outbox("a", Kind.train, b"update %d" % number)
                state.save(small, personal(small), Progress(rounds=number, pending=pending), best=True)
                state.save_progress(Progress(rounds=number))
    assert count > 20


# --- what is damaged on the disk -----------------------------------------------------------------------------


def flipped(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-1], lambda data: b""], ids=["flip", "cut", "empty"])
def test_what_was_damaged_is_neither_trained_from_nor_sent(folder, small, damage):
    identity = folder.identity("f", "uid", "pi")
    pending = folder.put_outbox("a", Kind.train, b"an update")
    folder.save(small, personal(small), Progress(rounds=1, pending=pending))
    folder.keep_as_best()
    folder.save_progress(Progress(rounds=1, pending=pending, steps=5))
    uses = {
        "identity.json": lambda: folder.identity("f", "uid", "pi"),
        "model.safetensors": lambda: folder.load(small),
        "best.safetensors": lambda: folder.best(small),
        "progress.json": lambda: folder.load(small),
        "outbox.bundle": lambda: folder.outbox(pending),
    }
    assert {path.name for path in folder.path.iterdir()} == {*uses, "lock"}, "there is no file that is not checked"
    for name, use in uses.items():
        path = folder.path / name
        whole = path.read_bytes()
        path.unlink()  # the best one is the model's second name
        path.write_bytes(damage(whole))
        with pytest.raises(StateError, match=rf"{name} (is damaged|cannot be read|is missing or damaged)"):
            use()
        path.write_bytes(whole)
        use()
    assert folder.identity("f", "uid", "pi") == identity


# --- what rounding took ------------------------------------------------------------------------------------------


def owed(manifest):
    return {spec.name: np.full(spec.shape, 0.25, dtype=np.float32) for spec in manifest.shared}


def same(one, other):
    return set(one) == set(other) and all(tensor.tobytes() == other[name].tobytes() for name, tensor in one.items())


@pytest.mark.parametrize("model", [True, False])
def test_what_rounding_took_comes_back_with_its_save(folder, small, model):
    folder.save(small, personal(small) if model else None, Progress(rounds=2), feedback=owed(small))
    with reopened(folder) as again:
        tensors, progress = again.load(small)
        assert same(again.feedback, owed(small))
    assert progress.rounds == 2
    assert (tensors is not None) == model
    assert tensors is None or same(tensors, personal(small)), "the model has no tensor of it"


def test_a_new_folder_owes_nothing_and_neither_does_one_that_never_rounds(folder, small):
    assert folder.feedback == {}
    folder.save(small, personal(small), Progress())
    folder.load(small)
    assert folder.feedback == {}


def test_a_save_without_anything_rounded_keeps_what_is_owed(folder, small):
    """An evaluation or fine-tuning between two rounds takes nothing away."""
    folder.save(small, None, Progress(rounds=1), feedback=owed(small))
    folder.save(small, personal(small), Progress(rounds=1, adapted=True))
    folder.save_progress(Progress(rounds=1, adapted=True, steps=5))
    with reopened(folder) as again:
        assert again.load(small)[1].steps == 5
        assert same(again.feedback, owed(small))


def test_what_is_owed_follows_its_save_and_no_other(folder, small):
    """It lies in the model's file: a save that was killed leaves the last one's."""
    folder.save(small, None, Progress(rounds=1), feedback=owed(small))
    before = (folder.path / "model.safetensors").read_bytes()
    folder.save(small, None, Progress(rounds=2), feedback={name: tensor * 2 for name, tensor in owed(small).items()})
    (folder.path / "model.safetensors").write_bytes(before)
    with reopened(folder) as again:
        assert again.load(small)[1].rounds == 1
        assert same(again.feedback, owed(small))


def test_what_is_owed_is_nothing_that_a_reference_is_taken_from(simulated, small, reference):
    simulated.save(small, partly_changed(reference), Progress(rounds=1), feedback=owed(small))
    with reopened(simulated, reference=Reference.of(reference)) as again:
        tensors, _ = again.load(small)
        assert same(again.feedback, owed(small))
    assert same(tensors, partly_changed(reference))


# --- the mask of elements ----------------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.05))
    with inprocess.running(app) as client:
        publish(
            inprocess.ADDRESS, "f", "digits", client=client, method="fedsgc", rounds=3, cohort=1, min_devices=1,
            local_epochs=1, evaluation_interval=0, method_settings={"adjust_interval": 0},
        )  # fmt: skip
        yield client


def bytes_of_a_round(client, path):
    """The device of this state folder, started anew, does one piece of work: the bytes of its payload."""
    with closing(StateFolder(path)) as folder:
        session = Session(
            Transport(client),
            folder,
            federation="f",
            name="pi",
            make_task=lambda info, manifest: load("index=0,of=20", device="pi", seed=0, batch_size=16),
        )
        while (step := session.step(wait_seconds=5)).outcome is not Outcome.worked:
            pass
        return step.assignment.payload.bytes


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "another mask": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.integration
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_mask_that_was_lost_or_damaged_is_sent_again_and_a_whole_one_is_not(coordinator, tmp_path, damage):
    path = tmp_path / "state"
    first, second = (bytes_of_a_round(coordinator, path) for _ in range(2))
    kept = (path / MASK).read_bytes()
    DAMAGE[damage](path / MASK)
    assert bytes_of_a_round(coordinator, path) == first
    assert first - second > 0.9 * len(kept), "the second names what the first brought"
    assert (path / MASK).read_bytes() == kept
