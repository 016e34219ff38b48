"""Whole federations of the dropout family in one process: what is sent, what is refused, and who remembers what."""

from __future__ import annotations

import math
from contextlib import closing
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from edge_sdk.device.session import Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.tasks import build_seeded
from edge_sdk.tasks.digits import load_images
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from sparrow.coordinator.errors import BadContent
from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronMask, block_of, count_values, same_mask, unpack
from sparrow.protocol.messages import ChangeDevice, UpdateReport
from sparrow.protocol.neurons import CLASSES, active_count_up, first_neurons, first_neurons_up

from .fakes import next_assignment
from .sessions import Wire

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
WHOLE = 4 * DIGITS.shared_values
SPARE = 1500
"""What a bundle may take beside its values: its header, and an update's report."""

PERSONAL = ["fjord", "hermes", "fedmp", "prunefl_neurons"]
CHOOSING = ["hermes", "fedmp", "prunefl_neurons"]
EVERY = ["feddrop", "heterofl", *PERSONAL]
BUDGETS = {"a": 0.3, "b": 0.6, "c": 1.0}
ONCE = {
    "hermes": {"pruning": "once"},
    "fedmp": {"ratios": "budget", "residual": False},
    "prunefl_neurons": {"importance": "once"},
}
"""The forms in which devices choose once; the papers' own are in test_pruning.py."""


def values_at(method, budget):
    """V(k): floors, but for HeteroFL."""
    return count_values(DIGITS, first_neurons(DIGITS, budget, *([active_count_up] if method == "heterofl" else [])))


def create(coordinator, method, **settings):
    coordinator.create(method, method_settings=ONCE.get(method, {}), **settings)


def open_all(coordinator):
    return [coordinator.open_device(name, budget=budget) for name, budget in BUDGETS.items()]


def bundles(session, what):
    """The bundles that a device sent, or received to train, in order."""
    bodies = session.transport.sent if what == "sent" else session.transport.received
    return [decode(body, session.manifest) for body in bodies if body[:1] != b"{"]


def personal_zeros(session, mask):
    """Whether the personal model is zero wherever a neuron is dropped, and nowhere else of note."""
    for spec in DIGITS.shared:
        left = np.array(session.personal[spec.name])
        block = block_of(DIGITS, spec, mask)
        block.put(left, np.zeros(block.shape, np.float32))
        if left.any():
            return False
    return True


@pytest.mark.parametrize("method", EVERY)
def test_what_crosses_the_wire_is_the_active_part_and_little_more(coordinator, method):
    create(coordinator, method)
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    for session, budget in zip(sessions, BUDGETS.values(), strict=True):
        wanted = 4 * values_at(method, budget)
        trained = [body for body in session.transport.sent if body[:1] != b"{"]
        assert len(trained) == 3
        assert all(0 <= len(body) - wanted <= SPARE for body in trained)
        down = [len(body) for body in session.transport.received][:3]
        first = WHOLE if method in CHOOSING else wanted
        assert 0 <= down[0] - first <= SPARE
        assert all(0 <= size - wanted <= SPARE for size in down[1:])
    record = coordinator.records.rounds("f")[-1]
    assert (record.updates, record.handed_back) == (3, 0)
    assert (record.accuracy_personal is not None) == (method in PERSONAL)
    assert record.accuracy_global > 0.1, "better than chance, after three rounds"


@pytest.mark.parametrize("method", ["fjord", "heterofl"])
def test_first_neurons_cost_no_bits(coordinator, method):
    create(coordinator, method)
    session = open_all(coordinator)[0]
    coordinator.rounds.advance()
    session.step()
    assert "mask" not in bundles(session, "received")[0].sizes
    if method == "fjord":  # an update of HeteroFL also says which classes it brings
        assert "mask" not in bundles(session, "sent")[0].sizes


@pytest.mark.parametrize("method", EVERY)
def test_each_weight_is_averaged_over_those_who_held_it(coordinator, method):
    create(coordinator, method, rounds=1)
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    numerator = {spec.name: np.zeros(spec.shape) for spec in DIGITS.shared}
    weight = {spec.name: np.zeros(spec.shape) for spec in DIGITS.shared}
    for session in sessions:
        (update,) = bundles(session, "sent")
        examples = UpdateReport.model_validate_json(update.report).num_examples
        for spec, block, values in unpack(session.manifest, update.values, update.mask):
            dense, held = np.zeros(spec.shape), np.zeros(spec.shape)
            block.put(dense, values)
            block.put(held, np.ones(block.shape))
            numerator[spec.name] += examples * dense
            weight[spec.name] += examples * held
    final, _ = checkpoint.load(coordinator.served.model("f"))
    start = initial_values(DIGITS, 0)
    for name, total in weight.items():
        wanted = np.where(total > 0, numerator[name] / np.maximum(total, 1), start[name])
        np.testing.assert_allclose(final[name], wanted, rtol=1e-5, atol=1e-7, err_msg=name)
        if method != "heterofl" or not name.startswith("out."):
            assert (total > 0).all(), "the device of budget 1 holds everything"


@pytest.mark.parametrize("method", PERSONAL)
def test_a_device_keeps_its_neurons_and_is_judged_with_them(coordinator, method):
    create(coordinator, method)
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    for session in sessions:
        updates = bundles(session, "sent")
        assert all(same_mask(update.mask, updates[0].mask) for update in updates)
        assert personal_zeros(session, updates[0].mask)
    assert all(receipt.personal and receipt.global_model for receipt in coordinator.receipts())
    assert coordinator.info().status == "finished"


def open_with(coordinator, name, budget, classes):
    """A device that has images of these classes alone."""
    images = load_images()
    chosen = np.flatnonzero(np.isin(images.targets, classes))[:40]
    part = Arrays(torch.from_numpy(images.inputs[chosen]), torch.from_numpy(images.targets[chosen]))
    coordinator.folders.append(StateFolder(coordinator.folder / name))
    return Session(
        Wire(coordinator, name),
        coordinator.folders[-1],
        federation="f",
        name=name,
        options=SessionOptions(budget=budget),
        make_task=lambda info, manifest: classification(
            "digits", build_seeded(DigitsNet, 0), part, part, None, batch_size=16
        ),
    )


@pytest.mark.parametrize("settings", [{}, {"precision": "int8", "update_norm_limit": 1e4}, {"buffer": 2}])
def test_heterofls_rows_are_those_of_the_devices_that_have_the_class(coordinator, settings):
    """Nobody has class 9, and only the last device class 5."""
    coordinator.create("heterofl", rounds=1, min_devices=2, cohort=2, **settings)
    seen = {"a": [0, 1, 2], "b": [2, 3, 5]}
    sessions = [open_with(coordinator, name, budget, seen[name]) for name, budget in (("a", 0.3), ("b", 1.0))]
    coordinator.play(*sessions)
    updates = [bundles(session, "sent")[0] for session in sessions]
    for update, classes in zip(updates, seen.values(), strict=True):
        assert update.mask.active[CLASSES].tolist() == classes
    final, _ = checkpoint.load(coordinator.served.model("f"))
    start = initial_values(DIGITS, 0)
    for name in ("out.weight", "out.bias"):
        for row in (4, 6, 7, 8, 9):
            np.testing.assert_array_equal(final[name][row], start[name][row])
        assert (final[name][[0, 5]] != start[name][[0, 5]]).any()
    if not settings:
        parts = {spec.name: part for spec, _, part in unpack(sessions[1].manifest, updates[1].values, updates[1].mask)}
        for name in ("out.weight", "out.bias"):
            np.testing.assert_array_equal(final[name][[3, 5]], parts[name][[1, 2]])
    record = coordinator.records.rounds("f")[-1]
    assert record.counts["rows_left_out"] == 7 + 7
    assert record.handed_back == 0


def test_heterofl_sends_all_rows_to_hide_labels(coordinator):
    coordinator.create("heterofl", rounds=1, min_devices=2, cohort=2, method_settings={"rows": "all"})
    sessions = [open_with(coordinator, "a", 0.3, [0, 1]), open_with(coordinator, "b", 1.0, [2, 3])]
    assert sessions[0].manifest == DIGITS
    coordinator.play(*sessions)
    assert coordinator.records.rounds("f")[-1].counts["rows_left_out"] == 0
    widths = {name: math.ceil(0.3 * size) for name, size in DIGITS.group_sizes.items()}
    assert {name: len(index) for name, index in bundles(sessions[0], "sent")[0].mask.active.items()} == widths


def test_a_device_of_heterofl_may_leave_out_classes_and_nothing_else(coordinator):
    coordinator.create("heterofl")
    session = open_all(coordinator)[0]
    coordinator.rounds.advance()
    where, device = assignment_of(coordinator, session), session.identity.device_id
    mask = first_neurons_up(session.manifest, 0.3)
    few = NeuronMask({**mask.active, "fc1": np.arange(3), CLASSES: np.arange(2)})
    with pytest.raises(BadContent, match=r"^mask: .*\bround 1\b"):
        coordinator.acceptance.accept_update(where, device, forged(session, few, session.manifest))
    rows = NeuronMask({**mask.active, CLASSES: np.array([4, 7])})
    assert coordinator.acceptance.accept_update(where, device, forged(session, rows, session.manifest))


def test_dropped_neurons_change_from_round_to_round(coordinator):
    coordinator.create("feddrop")
    session, *others = open_all(coordinator)
    coordinator.play(session, *others)
    masks = [update.mask for update in bundles(session, "sent")]
    assert not same_mask(masks[0], masks[1])
    assert [len(index) for index in masks[0].active.values()] == [math.floor(0.3 * n) for n in (16, 32, 64)]
    assert session.personal is not None, "adapted after the end"


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_other_precisions(coordinator, method, precision):
    create(coordinator, method, precision=precision, rounds=2, update_norm_limit=1e4)
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    assert coordinator.info().round == 2
    assert [record.updates for record in coordinator.records.rounds("f")] == [3, 3]


@pytest.mark.parametrize(
    ("method", "form"),
    [*((method, {}) for method in PERSONAL), *ONCE.items()],
    ids=[*PERSONAL, *(f"{method}, once" for method in ONCE)],
)
def test_a_device_that_comes_after_the_end_adapts_at_its_budget(coordinator, method, form):
    coordinator.create(method, rounds=2, method_settings=form)
    coordinator.play(*open_all(coordinator))
    late = coordinator.open_device("d", budget=0.3)
    (worked,) = coordinator.play(late)
    assert [each.kind.value for each in worked] == ["adapt"]
    zeros = sum(int((tensor == 0).sum()) for tensor in late.personal.values())
    assert zeros > DIGITS.shared_values * 0.8
    assert late.progress.adapted


# --- who remembers what a device has chosen --------------------------------------------------------------------------


def restarted(coordinator, clock):
    """The same folders, another coordinator process."""
    from .sessions import CoordinatorWithDevices

    coordinator.close()
    return CoordinatorWithDevices(coordinator.folder, clock)


def test_a_restart_of_both_sides_forgets_nothing(coordinator, clock):
    create(coordinator, "hermes", rounds=4)
    sessions = open_all(coordinator)
    for _ in range(2):
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    coordinator.rounds.advance()
    chosen = bundles(sessions[0], "sent")[0].mask
    with closing(restarted(coordinator, clock)) as later:
        again = open_all(later)
        later.play(*again)
        assert later.info().round == 4
        down = [len(body) for body in again[0].transport.received]
        assert down[0] < WHOLE / 4, "slices alone"
        assert all(same_mask(update.mask, chosen) for update in bundles(again[0], "sent"))
        assert personal_zeros(again[0], chosen)


def test_a_restart_changes_no_bit(new_coordinator, clock):
    digests = []
    for disturbed in (False, True):
        coordinator = new_coordinator()
        create(coordinator, "fedmp", rounds=3)
        sessions = open_all(coordinator)
        if disturbed:
            coordinator.rounds.advance()
            sessions[1].step()
            coordinator = restarted(coordinator, clock)
            sessions = open_all(coordinator)
        coordinator.play(*sessions)
        digests.append(coordinator.info().model_sha256)
        if disturbed:
            coordinator.close()
    assert digests[0] == digests[1]


def lose(coordinator, name):
    """Its model and what belongs to it are gone; who it is it still knows."""
    folder = coordinator.folder / name
    for file in ("model.safetensors", "progress.json", "mask.bits"):
        (folder / file).unlink()


def test_a_device_that_lost_its_state_gets_the_whole_model_and_chooses_again(coordinator):
    create(coordinator, "hermes", rounds=4)
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    coordinator.folders[0].close()
    lose(coordinator, "a")
    again = coordinator.open_device("a", budget=0.3)
    coordinator.play(again, *sessions[1:])
    down = [len(body) for body in again.transport.received][:3]
    assert down[0] >= WHOLE > 4 * max(down[1:])
    assert [record.updates for record in coordinator.records.rounds("f")] == [3] * 4
    assert personal_zeros(again, bundles(again, "sent")[0].mask)


def test_another_budget_is_another_choice(coordinator):
    create(coordinator, "hermes", rounds=4)
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    device = coordinator.device("a")
    coordinator.devices.change(device.device_id, ChangeDevice(budget=0.6))
    coordinator.play(*sessions)
    updates, down = bundles(sessions[0], "sent"), [len(body) for body in sessions[0].transport.received]
    counts = [[len(index) for index in update.mask.active.values()] for update in updates]
    assert counts == [[4, 9, 19], *[[9, 19, 38]] * 3]
    assert down[1] >= WHOLE, "the whole model, once more"
    assert 4 * values_at("hermes", 0.6) <= down[2] <= 4 * values_at("hermes", 0.6) + SPARE
    assert personal_zeros(sessions[0], updates[-1].mask)


def forged(session, mask, manifest=DIGITS):
    """An update of this device's open assignment under another mask, of zeros."""
    values = np.zeros(count_values(manifest, mask), np.float32)
    report = UpdateReport(num_examples=9, status="active", steps=1, train_loss=1.0)
    return encode(manifest, values, mask, report=report.model_dump_json())


def assignment_of(coordinator, session):
    return next_assignment(coordinator, session.identity.device_id, asked=False).assignment.assignment_id


@pytest.mark.parametrize("method", CHOOSING)
def test_a_first_update_must_match_its_budget(coordinator, method):
    create(coordinator, method)
    session = open_all(coordinator)[0]
    coordinator.rounds.advance()
    where, device = assignment_of(coordinator, session), session.identity.device_id
    many = NeuronMask({name: np.arange(size // 2) for name, size in DIGITS.group_sizes.items()})
    for mask in (many, None):
        with pytest.raises(BadContent, match=r"p = 0\.3\b"):
            coordinator.acceptance.accept_update(where, device, forged(session, mask))
    last = NeuronMask(
        {name: np.arange(size - math.floor(0.3 * size), size) for name, size in DIGITS.group_sizes.items()}
    )
    assert coordinator.acceptance.accept_update(where, device, forged(session, last)), (
        "which ones is the device's to say"
    )


def test_a_later_update_of_other_neurons_is_refused(coordinator):
    create(coordinator, "hermes")
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    coordinator.rounds.advance()
    session = sessions[0]
    chosen = bundles(session, "sent")[0].mask
    other = NeuronMask({name: np.arange(len(index)) for name, index in chosen.active.items()})
    assert not same_mask(chosen, other)
    where, device = assignment_of(coordinator, session), session.identity.device_id
    with pytest.raises(BadContent, match=r"^mask: "):
        coordinator.acceptance.accept_update(where, device, forged(session, other))
    coordinator.play(*sessions)
    assert [record.updates for record in coordinator.records.rounds("f")] == [3] * 3


def test_masks_that_nobody_holds_any_more_are_deleted(coordinator):
    create(coordinator, "hermes", rounds=3)
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    coordinator.devices.change(coordinator.device("a").device_id, ChangeDevice(budget=0.6))
    coordinator.play(*sessions)
    assert len(list((coordinator.folder / "data").glob("blobs/*/masks/*"))) == 3


def test_an_update_that_was_lost_does_not_lose_the_choice(coordinator):
    create(coordinator, "hermes", rounds=3)
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    sessions[0].transport.broken = True
    with pytest.raises(ConnectionError):
        sessions[0].step()
    chosen = sessions[0].mask
    coordinator.folders[0].close()
    again = coordinator.open_device("a", budget=0.3)
    coordinator.play(again, *sessions[1:])
    assert all(same_mask(update.mask, chosen) for update in bundles(again, "sent"))
    assert [record.updates for record in coordinator.records.rounds("f")] == [3] * 3


def test_an_update_that_came_too_late_leaves_the_choice_with_the_device(coordinator):
    """The coordinator never learned it: it sends the whole model, and the device keeps its neurons."""
    create(coordinator, "hermes", rounds=3, quorum=0.5)
    sessions = open_all(coordinator)
    coordinator.rounds.advance()
    transport = sessions[0].transport
    update = transport.update

    def late(assignment_id, body, media_type, *_, **named):
        for session in sessions[1:]:
            session.step()
        coordinator.rounds.advance()
        transport.update = update
        update(assignment_id, body, media_type)

    transport.update = late
    sessions[0].step()
    assert transport.sent == []
    chosen = sessions[0].mask
    while coordinator.info().status == "running":  # the late one first, so that it is not late again
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    updates = bundles(sessions[0], "sent")
    assert updates
    assert all(same_mask(each.mask, chosen) for each in updates)
    sizes = [len(body) for body in transport.received]
    assert sizes[1] >= WHOLE
    assert sizes[2] < WHOLE / 4


def test_a_model_that_does_not_run_narrow_is_handed_back_with_the_reason(coordinator, monkeypatch):
    from edge_sdk.training import narrow

    def fails(*ignored):
        raise narrow.CannotNarrow("make its code take sizes from its tensors")

    monkeypatch.setattr(narrow, "_compare", fails)
    monkeypatch.setattr(narrow, "_compared", WeakKeyDictionary())
    coordinator.create("feddrop", min_devices=1)
    session = coordinator.open_device("a", budget=0.3)
    coordinator.rounds.advance()
    session.step()
    coordinator.rounds.advance()
    assert coordinator.records.rounds("f")[0].handed_back == 1
