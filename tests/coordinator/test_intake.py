"""Clipping, outliers, weights, and values that no model can hold, over whole rounds in a coordinator's domain."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.methods import load_method
from sparrow.coordinator.rounds import closing
from sparrow.coordinator.rounds.intake import Intake, Update, centre, clip
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, pack, unpack, unpack_whole
from sparrow.protocol.messages import ChangeDevice, UpdateReport
from sparrow.protocol.quantization import Quantised, quantise, row_lengths
from sparrow.protocol.settings import FederationSettings

from .fakes import LocalCoordinator

pytestmark = pytest.mark.integration  # plays whole federations

DIGITS = load_builtin("digits").manifest
CALM = {"evaluation_interval": 0, "early_stopping": "off", "min_devices": 5, "cohort": 5, "rounds": 2}


CLIPS = {**CALM, "relative_clip": 3}


@pytest.fixture
def new_local(tmp_path, clock):
    """Opens coordinators, each over a folder of its own."""
    opened = []

    def start():
        opened.append(LocalCoordinator(tmp_path / str(len(opened)), clock))
        return opened[-1]

    yield start
    for each in opened:
        each.store.close()


@pytest.fixture
def coordinator(new_local):
    return new_local()


def send(coordinator, device, moved, manifest=DIGITS):
    """Answer with what was sent, all values moved by so much."""
    assignment = device.ask()
    tensors = checkpoint.load(coordinator.model())[0]
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
    work = assignment.work
    draw = NeuronDraw(work.key, work.ratio)
    mask = draw_neurons(manifest, draw)
    values = pack(manifest, tensors, mask) + np.float32(moved)
    assert device.send(assignment, bundle.encode(manifest, values, mask, draw=draw, report=report))


def play(coordinator, devices, moves):
    """One round in which each device moves its values by so much."""
    coordinator.rounds.advance()
    before = pack(DIGITS, checkpoint.load(coordinator.model())[0], None)
    for device, moved in zip(devices, moves, strict=True):
        send(coordinator, device, moved)
    coordinator.rounds.advance()
    return pack(DIGITS, checkpoint.load(coordinator.model())[0], None).astype(np.float64) - before


NAMES = ("a", "b", "c", "d", "e")


def test_a_longer_update_counts_as_one_of_the_clips_length(coordinator):
    count = DIGITS.shared_values
    coordinator.create(**CALM, update_clip=0.1 * count**0.5)
    devices = coordinator.enrol(*NAMES)
    moved = play(coordinator, devices, [0.05, 0.05, 0.05, 0.05, 30.0])
    np.testing.assert_allclose(moved, (4 * 0.05 + 0.1) / 5, rtol=1e-3, atol=1e-6)
    record = coordinator.record(1)
    assert (record.updates, record.notes["updates_clipped"], record.left_out) == (5, 1, {})


def test_an_outlier_is_acknowledged_counted_and_left_out_with_the_reason(coordinator):
    coordinator.create(**CALM, outlier_mads=5)
    devices = coordinator.enrol(*NAMES)
    moved = play(coordinator, devices, [0.05, 0.06, 0.055, 30.0, 0.045])
    np.testing.assert_allclose(moved, (0.05 + 0.06 + 0.055 + 0.045) / 4, rtol=1e-3, atol=1e-6)
    record = coordinator.record(1)
    assert (record.updates, record.notes["updates_left_out"]) == (5, 1)
    assert list(record.left_out) == ["d"]
    assert "moved by 30" in record.left_out["d"]
    assert coordinator.record(1) == record, "and so it is remembered"
    play(coordinator, devices, [0.05] * 5)
    assert coordinator.record(2).left_out == {}
    assert json.loads(coordinator.record(2).model_dump_json())["notes"]["updates_left_out"] == 0


def test_without_the_settings_nothing_is_said(coordinator):
    coordinator.create(**CALM, relative_clip=0)
    play(coordinator, coordinator.enrol(*NAMES), [0.05] * 4 + [30.0])
    assert coordinator.record(1).notes == {}


def test_an_update_much_longer_than_usual_counts_as_three_times_the_usual_one(coordinator):
    """In the first round what is usual is the round's own lower median, later that of the rounds before."""
    coordinator.create(**{**CLIPS, "rounds": 9})
    devices = coordinator.enrol(*NAMES)
    moved = play(coordinator, devices, [0.05, 0.04, 0.06, 0.05, 30.0])
    np.testing.assert_allclose(moved, (0.05 + 0.04 + 0.06 + 0.05 + 3 * 0.05) / 5, rtol=1e-3, atol=1e-6)
    record = coordinator.record(1)
    assert (record.updates, record.notes["updates_clipped"], list(record.clipped)) == (5, 1, ["e"])
    assert record.clipped["e"] == pytest.approx(3 * 0.05 / 30, rel=1e-3)
    moved = play(coordinator, devices, [0.2, 0.1, -0.4, 0.1, 1e6])
    np.testing.assert_allclose(moved, (0.15 + 0.1 - 0.15 + 0.1 + 0.15) / 5, rtol=1e-3, atol=1e-6)
    assert list(coordinator.record(2).clipped) == ["a", "c", "e"]


def test_by_default_an_update_counts_as_ten_times_the_usual_one_at_most(coordinator):
    coordinator.create(**CALM)
    moved = play(coordinator, coordinator.enrol(*NAMES), [0.05, 0.05, 0.05, 0.4, 1e6])
    np.testing.assert_allclose(moved, (3 * 0.05 + 0.4 + 0.5) / 5, rtol=1e-3, atol=1e-6)
    assert list(coordinator.record(1).clipped) == ["e"]


def test_updates_within_the_clip_give_the_same_model_bit_for_bit(new_local):
    made = []
    for relative_clip in (3, 0):
        coordinator = new_local()
        coordinator.create(**{**CALM, "relative_clip": relative_clip})
        devices = coordinator.enrol(*NAMES, b=0.4, d=0.2)
        for moves in ([0.05, 0.06, 0.04, -0.05, 0.08], [0.02, -0.06, 0.05, 0.01, 0.1]):
            play(coordinator, devices, moves)
        made.append(coordinator.model())
    assert made[0] == made[1]


@pytest.mark.parametrize("malicious", [1, 2])
def test_less_than_half_of_the_devices_never_raise_what_is_usual(coordinator, malicious):
    """They agree with each other, and send more in every round."""
    names = TEN[: 2 * malicious + 1]
    coordinator.create(**{**CLIPS, "rounds": 20, "cohort": len(names), "min_devices": len(names)})
    devices = coordinator.enrol(*names)
    honest = [0.05] * (len(names) - malicious)
    for number in range(4):
        moved = play(coordinator, devices, honest + [100.0**number] * malicious)
        np.testing.assert_allclose(moved, (sum(honest) + malicious * 0.15) / len(names), rtol=1e-3, atol=1e-6)


def test_of_two_devices_the_longer_is_no_measure_of_itself(coordinator):
    coordinator.create(**{**CLIPS, "rounds": 20, "cohort": 2, "min_devices": 2})
    devices = coordinator.enrol("a", "b")
    for number in range(4):
        moved = play(coordinator, devices, [0.05, 100.0**number])
        np.testing.assert_allclose(moved, (0.05 + 0.15) / 2, rtol=1e-3, atol=1e-6)


def test_devices_of_small_budgets_move_the_model_no_further(coordinator):
    """What counts is the length over all values that an update brings, which may be few."""
    coordinator.create(**CLIPS)
    devices = coordinator.enrol(*NAMES, a=0.2, b=0.4)
    play(coordinator, devices, [0.05, 0.05, 0.05, 0.05, 0.05])
    assert coordinator.record(1).clipped == {}
    moved = play(coordinator, devices, [30.0, 0.0, 0.0, 0.0, 0.0])
    assert list(coordinator.record(2).clipped) == ["a"]
    assert np.linalg.norm(moved) <= 3 * 0.05 * DIGITS.shared_values**0.5 * 1.001


def test_what_is_usual_is_the_same_after_a_restart(tmp_path, clock):
    coordinator = LocalCoordinator(tmp_path, clock)
    coordinator.create(**CLIPS)
    devices = coordinator.enrol(*NAMES)
    play(coordinator, devices, [0.05, 0.04, 0.06, 0.05, 0.05])
    coordinator.close()
    coordinator = LocalCoordinator(tmp_path, clock)
    for device in devices:
        device.coordinator = coordinator
    moved = play(coordinator, devices, [0.05] * 4 + [30.0])
    np.testing.assert_allclose(moved, (4 * 0.05 + 0.15) / 5, rtol=1e-3, atol=1e-6)
    coordinator.close()


def test_no_outliers_if_most_updates_are_zero(coordinator):
    coordinator.create(**CLIPS)
    moved = play(coordinator, coordinator.enrol(*NAMES), [0.0, 0.0, 0.0, 0.1, 0.1])
    np.testing.assert_allclose(moved, 0.04, rtol=1e-3, atol=1e-6)
    assert coordinator.record(1).clipped == {}


@pytest.mark.parametrize("kind", ["buffer", "elements", "blocks"])
def test_the_relative_clip_holds_whatever_an_update_is_made_of(coordinator, kind):
    settings = {**CLIPS, "cohort": 3, "min_devices": 3, "local_epochs": 1, **EVERY_KIND[kind]}
    coordinator.create(**settings)
    devices = coordinator.enrol("a", "b", "c")
    before = packed(coordinator).astype(np.float64)
    coordinator.rounds.advance()
    for device, far in zip(devices, (0.01, 0.01, 1e6), strict=True):
        assert answer(device, device.ask(), packed(coordinator) + np.float32(far))
    coordinator.rounds.advance()
    assert list(coordinator.record(1).clipped) == ["c"]
    assert np.abs(packed(coordinator) - before).max() < 0.1


def test_robust_rules_in_a_whole_round(coordinator):
    coordinator.create(**CALM, robust="median")
    moved = play(coordinator, coordinator.enrol(*NAMES), [0.05, 0.06, 0.055, 30.0, 0.045])
    np.testing.assert_allclose(moved, 0.055, rtol=1e-3, atol=1e-6)
    assert coordinator.record(1).updates == 5


TEN = tuple("abcdefghij")


def moved_by(manifest, device, assignment, tensors, precision, chance, lies):
    """The update of a device whose values move at random, or by a million in agreement with others."""
    work = assignment.work
    draw = None if work is None else NeuronDraw(work.key, work.ratio)
    mask = None if draw is None else draw_neurons(manifest, draw)
    start = pack(manifest, tensors, mask)
    moves = 0.05 * chance.normal(size=len(start)).astype(np.float32) if not lies else np.full_like(start, 6e4)
    report = UpdateReport(num_examples=1000 if lies else 10, steps=1, train_loss=0.5).model_dump_json()
    values = quantise(moves, row_lengths(manifest, mask), 0) if precision == "int8" else start + moves
    if precision == "fp16":
        values = np.clip(values, -6e4, 6e4)
    return bundle.encode(manifest, values, mask, draw=draw, precision=precision, report=report), mask


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("malicious", [1, 2, 3])
@pytest.mark.parametrize(("method", "rule"), [("fedspu", "trimmed_mean"), ("fedspu", "median"), ("fedavg", "krum")])
def test_malicious_devices_of_ten_move_no_value_further_than_honest_ones(
    coordinator, method, rule, malicious, precision
):
    """Budgets are from 0.2 to 1; malicious devices ask for 1, so that few others send what they send."""
    many = {
        **CALM,
        "min_devices": 10,
        "cohort": 10,
        "robust": rule,
        "robust_share": malicious / 10,
        "precision": precision,
    }
    coordinator.create(**many, method=method)
    budgets = {name: 1.0 if number < malicious else 0.2 * (number % 5 + 1) for number, name in enumerate(TEN)}
    devices = coordinator.enrol(*TEN, **(budgets if method == "fedspu" else {}))
    coordinator.rounds.advance()
    tensors, _ = checkpoint.load(coordinator.model())
    old = pack(DIGITS, tensors, None)
    chance, sent = np.random.default_rng(0), []
    for number, device in enumerate(devices):
        assignment = device.ask()
        body, mask = moved_by(DIGITS, device, assignment, tensors, precision, chance, number < malicious)
        assert device.send(assignment, body)
        decoded = bundle.decode(body, DIGITS).values
        if precision == "int8":
            decoded = decoded + pack(DIGITS, tensors, mask)
        row = np.full_like(old, np.nan)
        whole = unpack_whole(DIGITS, row)
        for spec, block, part in unpack(DIGITS, decoded, mask):
            block.put(whole[spec.name], part)
        sent.append(row)
    coordinator.rounds.advance()
    new = pack(DIGITS, checkpoint.load(coordinator.model())[0], None)
    honest = np.array(sent[malicious:])
    senders = (~np.isnan(sent)).sum(axis=0)
    enough = senders >= max(3, 2 * malicious + 1)
    assert new[~enough].tobytes() == old[~enough].tobytes()
    assert (new != old).mean() > (0.9 if method == "fedavg" else 0.1), "and it learns"
    assert np.abs(new - old).max() <= np.nanmax(np.abs(honest - old)) + 1e-6
    if rule != "krum":
        low, high = np.nanmin(honest[:, enough], axis=0), np.nanmax(honest[:, enough], axis=0)
        assert (new[enough] >= np.minimum(low, old[enough]) - 1e-6).all()
        assert (new[enough] <= np.maximum(high, old[enough]) + 1e-6).all()
    assert coordinator.record(1).notes["values_held_back"] == (~enough).sum()


class Kept:
    """Sums that keep what they are given."""

    def __init__(self):
        self.updates, self.values = 0, []

    def fold_in_place(self, values, mask, num_examples):
        self.updates += 1
        self.values.append(values)


def take_all(small, moves, mads):
    sent = initial_values(small, 0)
    base = pack(small, sent, None)
    updates = {str(place): Update(base + np.float32(moved), None, 1) for place, moved in enumerate(moves)}
    intake = Intake(Kept(), FederationSettings(outlier_mads=mads), small, sent)
    for key, update in updates.items():
        intake.take(f"id-{key}", key, update)
    assert intake.sums.updates == 0, "not before all have come"
    intake.finish(len(moves), updates.__getitem__)
    return intake


@pytest.mark.parametrize(
    "settings", [{"robust": "median"}, {"noise_multiplier": 1.0, "update_clip": 1e6}, {"secure": True}]
)
def test_beside_a_rule_noise_or_masks_no_update_is_measured_by_others(small, settings):
    sent = initial_values(small, 0)
    base = pack(small, sent, None)
    intake = Intake(Kept(), FederationSettings(**settings), small, sent, usual_length=0.1)
    for far in (0.1, 9.0):
        intake.take(f"{far}", f"{far}", Update(base + np.float32(far), None, 1))
    assert [np.abs(values - base).max().round(1) for values in intake.sums.values] == pytest.approx([0.1, 9.0])


def test_three_updates_are_too_few_to_tell(small):
    assert take_all(small, [0.1, 0.1, 9.0], 3).sums.updates == 3
    assert take_all(small, [0.1, 0.1, 0.1, 9.0], 3).notes()["left_out"].keys() == {"id-3"}


def test_devices_that_agree_are_no_reason_to_leave_the_next_one_out(small):
    assert take_all(small, [0.1, 0.1, 0.1, 0.1, 0.11], 3).sums.updates == 5


def test_one_that_hardly_moves_is_as_far_from_the_others(small):
    assert take_all(small, [1.0, 1.1, 0.9, 1.0, 0.0], 3).notes()["left_out"].keys() == {"id-4"}


def test_the_centre_is_the_median_and_the_scaled_mad():
    median, spread = centre([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (median, spread) == (3.0, pytest.approx(1.4826))


def test_clipping_keeps_direction_and_what_is_short_enough(small):
    sent = initial_values(small, 0)
    base = pack(small, sent, None)
    moved = np.random.default_rng(0).normal(size=len(base)).astype(np.float32)
    update = Update(base + moved, None, 1)
    same, norm = clip(small, sent, update, 1e6)
    assert same is update
    assert norm == pytest.approx(np.linalg.norm(moved), rel=1e-4)
    short, norm = clip(small, sent, update, 0.5)
    assert norm == pytest.approx(np.linalg.norm(moved), rel=1e-4)
    change = short.values.astype(np.float64) - base
    assert np.linalg.norm(change) == pytest.approx(0.5, rel=1e-4)
    assert change @ moved == pytest.approx(0.5 * np.linalg.norm(moved), rel=1e-4)


# --- what no model can hold --------------------------------------------------------------------------------------


def answer(device, assignment, values=None, *, moved=None, examples=10, precision="fp32"):
    """Send values [n] under the assignment's mask, or an int8 difference, by which all of them move by ``moved``."""
    coordinator = device.coordinator
    manifest, model = coordinator.served.manifest("f"), model_of(coordinator)
    work = assignment.work
    draw = NeuronDraw(work.key, work.ratio) if work else None
    mask = draw_neurons(manifest, draw) if draw else model.mask
    count = count_values(manifest, mask)
    if moved is not None:
        rows = row_lengths(manifest, mask)
        scales = np.full(len(rows), moved / 127, dtype=np.float32)
        values = Quantised(np.full(count, 127, dtype=np.int8), scales)
    else:
        values = np.broadcast_to(np.float32(values), count) if np.isscalar(values) else values
    report = UpdateReport(num_examples=examples, steps=1, train_loss=0.5).model_dump_json()
    body = bundle.encode(manifest, values, mask, draw=draw, precision=precision, known=mask_known(mask), report=report)
    return device.send(assignment, body)


def mask_known(mask):
    return mask if isinstance(mask, ElementMask) else None


def model_of(coordinator):
    with coordinator.store.reading() as db:
        federation = find(db, "f")
    return coordinator.models.model(federation, federation.model_version)


def packed(coordinator):
    return pack(coordinator.served.manifest("f"), model_of(coordinator).tensors, model_of(coordinator).mask)


HUGE = 3.3e38
EVERY_KIND = {
    "neurons": {"method": "fedspu"},
    "whole models": {"method": "fedavg"},
    "elements": {"method": "fedsgc"},
    "votes": {"method": "dmpfl", "rounds": 8},
    "blocks": {"method": "pfedgate"},
    "buffer": {"method": "fedavg", "buffer": 3},
    "median": {"method": "fedavg", "robust": "median"},
    "outliers": {"method": "fedavg", "outlier_mads": 5},
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_differences_that_add_up_to_infinity_are_refused_and_end_nobody_else(coordinator, kind):
    settings = {**CALM, "cohort": 3, "min_devices": 3, "local_epochs": 1, "precision": "int8", **EVERY_KIND[kind]}
    coordinator.create(**settings)
    devices = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    for device in devices:
        assert answer(device, device.ask(), moved=HUGE)
    coordinator.rounds.advance()
    assert np.isfinite(packed(coordinator)).all()
    assert coordinator.info().model_version == 1
    hostile, *honest = devices
    wrong = hostile.ask()
    with pytest.raises(BadContent, match="not finite"):
        answer(hostile, wrong, moved=HUGE)
    hostile.hand_back(wrong, "refused")
    for device in honest:
        assignment = device.ask()
        assert device.payload(assignment)
        assert answer(device, assignment, moved=0.0)
    coordinator.rounds.advance()
    record = coordinator.record(2)
    assert (record.status, record.updates, record.handed_back) == ("closed", 2, 1)
    assert np.isfinite(packed(coordinator)).all()


def test_a_running_variance_below_zero_is_refused(coordinator):
    coordinator.create(**CALM)
    devices = coordinator.enrol(*NAMES)
    coordinator.rounds.advance()
    assignment = devices[0].ask()
    base = packed(coordinator)
    wrong = {spec.name: part.copy() for spec, _, part in unpack(DIGITS, base, None)}
    wrong["bn1.running_var"][0] = -0.001
    with pytest.raises(BadContent, match=r"^bn1\.running_var: .*-0\.001\b"):
        answer(devices[0], assignment, pack(DIGITS, wrong, None))
    wrong["bn1.running_var"][0] = -1e-8
    assert answer(devices[0], assignment, pack(DIGITS, wrong, None)), "as rounding leaves it"
    for device in devices[1:]:
        answer(device, device.ask(), base)
    coordinator.rounds.advance()
    assert checkpoint.load(coordinator.model())[0]["bn1.running_var"].min() >= 0


def test_an_old_update_that_does_not_fit_todays_model_is_left_out_by_name(tmp_path, clock, caplog):
    """fp16 carries 65504: 60000 fit, and what moved so far, added to them, does not."""

    def play(restart):
        coordinator = LocalCoordinator(tmp_path / str(restart), clock)
        coordinator.create(**{**CALM, "cohort": 2, "min_devices": 2, "rounds": 9}, buffer=1, precision="fp16")
        quick, slow = coordinator.enrol("a", "b")
        coordinator.rounds.advance()
        old = slow.ask()
        answer(quick, quick.ask(), 60000.0, precision="fp16")
        coordinator.rounds.advance()
        answer(slow, old, 60000.0, precision="fp16")
        if restart:
            coordinator.store.close()
            coordinator = slow.coordinator = quick.coordinator = LocalCoordinator(tmp_path / str(restart), clock)
        coordinator.rounds.advance()
        record, model = coordinator.record(2), coordinator.info().model_sha256
        assert quick.payload(quick.ask()), "and everybody goes on"
        answer(quick, quick.ask(), 1.0, precision="fp16")
        coordinator.rounds.advance()
        assert coordinator.record(3).left_out == {}
        coordinator.store.close()
        return record, model

    record, model = play(False)
    assert record.left_out == {"b": "the sum of its values and the global model is not finite"}
    assert (record.updates, record.model_version) == (1, 1)
    assert "f: round 2 leaves out b" in caplog.text
    again, same = play(True)
    assert (again.left_out, same) == (record.left_out, model)


@pytest.mark.parametrize("fault", ["infinite", "error"])
def test_sums_that_are_not_finite_keep_the_old_model(coordinator, monkeypatch, fault, caplog):
    fedavg, broken = load_method("fedavg"), True

    def close(model, sums, situation):
        if broken and fault == "error":
            raise ValueError("these cannot be summed")
        made = fedavg.aggregation.close(model, sums, situation)
        return replace(made, own={"moment": np.full(3, np.inf, dtype=np.float32)}) if broken else made

    odd = replace(fedavg, aggregation=replace(fedavg.aggregation, close=close))
    monkeypatch.setattr(closing, "load_method", lambda name: odd)
    coordinator.create(**CALM, method="fedavg")
    devices = coordinator.enrol(*NAMES)
    coordinator.rounds.advance()
    before = coordinator.model()
    for device in devices:
        answer(device, device.ask(), 0.5)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.base_version, record.model_version) == ("closed", 5, 0, 0)
    assert set(record.left_out) == set(NAMES)
    said = "moment: a value of inf does not fit fp32" if fault == "infinite" else "these cannot be summed"
    assert (
        f"round 1 made no new model, the old one stays: {'fedavg' if fault == 'error' else ''}" in record.left_out["a"]
    )
    assert said in record.left_out["a"]
    assert said in coordinator.info().warning
    assert "f: round 1 leaves out a, b, c, d, e" in caplog.text
    assert coordinator.model() == before
    broken = False
    for device in devices:
        answer(device, device.ask(), 0.5)
    coordinator.rounds.advance()
    assert (coordinator.record(2).left_out, coordinator.info().model_version) == ({}, 1)
    assert coordinator.info().warning is None


def test_one_that_never_prepares_the_model_is_not_asked_for_ever(coordinator, clock):
    coordinator.create(**{**CALM, "min_devices": 3}, method="grasp")
    devices = coordinator.enrol("a", "b", "c")
    asked = []
    for _ in range(4):
        coordinator.rounds.advance()
        asked += [device.name for device in devices if device.ask() is not None]
        clock.pass_seconds(101)
        coordinator.rounds.advance()
        for device in devices:
            device.ask()  # it is there again
    assert set(asked[:3]) == {"a", "b", "c"}
    assert asked[3] == asked[0]


# --- what an update counts with ----------------------------------------------------------------------------------

TEN = tuple("abcdefghij")
PLAIN = {**CALM, "cohort": 10, "min_devices": 10, "rounds": 5, "method": "fedavg"}


def lie(coordinator, claimed, told=10, **settings):
    """The mean of a round in which the others send 0 and device ``a`` sends 1: its share. Counts are 10 each."""
    coordinator.create(**{**PLAIN, "relative_clip": 0, **settings})
    devices = coordinator.enrol(*TEN, examples={**dict.fromkeys(TEN, 10), "a": told})
    coordinator.rounds.advance()
    for device in devices:
        assert answer(device, device.ask(), float(device.name == "a"), examples=claimed if device.name == "a" else 10)
    coordinator.rounds.advance()
    (share,) = np.unique(packed(coordinator))
    return share


@pytest.mark.parametrize(
    ("told", "settings", "weight"),
    [
        (10, {}, 10),  # no more than it enrolled with
        (2**40, {}, 100),  # no more than ten times the median
        (None, {}, 100),
        (2**40, {"max_examples": 20}, 20),
        (10, {"buffer": 10}, 10),
    ],
)
def test_a_device_cannot_claim_its_weight(coordinator, told, settings, weight):
    assert lie(coordinator, 2**40, told, **settings) == pytest.approx(weight / (90 + weight))
    record = coordinator.record(1)
    assert record.capped == {"a": weight}
    assert record.num_examples == 90 + weight


@pytest.mark.parametrize("told", [dict.fromkeys(TEN, 30), {}])
def test_honest_weights_are_as_they_were(new_local, told):
    models = []
    for examples in (told, dict.fromkeys(TEN, 2**40)):
        coordinator = new_local()
        coordinator.create(**PLAIN)
        devices = coordinator.enrol(*TEN, examples=examples)
        coordinator.rounds.advance()
        for place, device in enumerate(devices):
            answer(device, device.ask(), 0.1 * place, examples=20 + place)
        coordinator.rounds.advance()
        assert coordinator.record(1).capped == {}
        models.append(coordinator.model())
    assert models[0] == models[1]


def test_only_a_reported_change_raises_the_cap_of_a_weight(coordinator):
    coordinator.create(**{**PLAIN, "cohort": 3, "min_devices": 3})
    devices = coordinator.enrol("a", "b", "c", examples={"a": 10, "b": 10, "c": 10})
    weights = []
    for number in (1, 2, 3):
        coordinator.rounds.advance()
        for device in devices:
            answer(device, device.ask(), 0.5, examples=50 if device.name == "a" else 10)
        if number == 2:
            coordinator.devices.change(devices[0].id, ChangeDevice(num_examples=40))
            devices[0].examples = None
            devices[0].enrol()  # again, without a count: the known one stays
        coordinator.rounds.advance()
        weights.append(coordinator.record(number).capped["a"])
    assert weights == [10, 10, 40]


def test_first_reports_cap_later_ones_without_counts_at_enrolment(coordinator):
    coordinator.create(**PLAIN)
    devices = coordinator.enrol(*TEN)
    for claimed in (10, 2**40):
        coordinator.rounds.advance()
        for device in devices:
            answer(device, device.ask(), 0.5, examples=claimed if device.name == "a" else 10)
    coordinator.rounds.advance()
    assert (coordinator.record(1).capped, coordinator.record(2).capped) == ({}, {"a": 10})


@pytest.mark.parametrize(("told", "weight"), [({"a": 2**40, "b": 10}, 100), ({"a": 2**40}, 2**40)])
def test_of_two_devices_the_smaller_is_the_measure(coordinator, told, weight):
    coordinator.create(**{**PLAIN, "cohort": 2, "min_devices": len(told)})
    devices = coordinator.enrol(*told, examples=told)
    coordinator.rounds.advance()
    for device in devices:
        answer(device, device.ask(), 0.5, examples=told[device.name])
    coordinator.rounds.advance()
    assert coordinator.record(1).num_examples == weight + 10 * (len(told) - 1)


def test_one_that_claims_much_and_answers_nothing_does_not_hold_the_model_still(coordinator, clock):
    """FedSGC as printed: devices that do not answer hold on to the old weights with all their samples."""
    own = {"preset": "paper", "density": 0.5, "adjust_interval": 0}
    coordinator.create(**{**PLAIN, "method": "fedsgc", "local_epochs": 1, "method_settings": own})
    devices = coordinator.enrol(*TEN, examples={**dict.fromkeys(TEN, 10), "a": 2**40})
    coordinator.rounds.advance()
    before = packed(coordinator).astype(np.float64)
    for device in devices[1:]:
        answer(device, device.ask(), packed(coordinator) + np.float32(1))
    devices[0].hand_back(devices[0].ask())
    coordinator.rounds.advance()
    np.testing.assert_allclose(packed(coordinator) - before, 90 / 190, rtol=1e-4)


def test_missing_bounds_are_logged_once_at_creation(coordinator, caplog):
    coordinator.create(**CALM, relative_clip=0)
    assert "no setting limits" in coordinator.info().notice
    assert [record.message for record in caplog.records] == [f"f: {coordinator.info().notice}"]
    bounds = ({}, {"relative_clip": 0, "update_clip": 1.0}, {"relative_clip": 0, "update_norm_limit": 1.0})
    bounds += ({"relative_clip": 0, "outlier_mads": 5.0}, {"relative_clip": 0, "robust": "median"})
    for number, bound in enumerate(bounds):
        coordinator.create(f"g{number}", **CALM, **bound)
        assert coordinator.info(f"g{number}").notice is None
    assert caplog.text.count("no setting limits") == 1
