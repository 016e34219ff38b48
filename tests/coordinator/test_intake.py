"""Clipping and outliers, over whole rounds in a coordinator's domain."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_sdk.protocol import bundle, checkpoint
from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.manifest import initial_values
from edge_sdk.protocol.masks import NeuronDraw, draw_neurons, pack, unpack, unpack_whole
from edge_sdk.protocol.messages import FederationSettings, UpdateReport
from edge_sdk.protocol.quantization import quantise, row_lengths
from sparrow.coordinator.rounds.intake import Intake, Update, centre, clip

from .fakes import LocalCoordinator

DIGITS = load_builtin("digits").manifest
CALM = {"evaluation_interval": 0, "early_stopping": "off", "min_devices": 5, "cohort": 5, "rounds": 2}


@pytest.fixture
def coordinator(tmp_path, clock):
    opened = LocalCoordinator(tmp_path / "data", clock)
    yield opened
    opened.store.close()


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
    coordinator.create(**CALM)
    play(coordinator, coordinator.enrol(*NAMES), [0.05] * 4 + [30.0])
    assert coordinator.record(1).notes == {}


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

    def fold_in_place(self, values, mask, num_examples, gradients=None):
        self.updates += 1
        self.values.append(values)


def take_all(small, moves, mads):
    sent = initial_values(small, 0)
    base = pack(small, sent, None)
    updates = {str(place): Update(base + np.float32(moved), None, 1) for place, moved in enumerate(moves)}
    intake = Intake(Kept(), FederationSettings(outlier_mads=mads), small, sent, updates.__getitem__)
    for key, update in updates.items():
        intake.take(f"id-{key}", key, update)
    assert intake.sums.updates == 0, "not before all have come"
    intake.finish(len(moves))
    return intake


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
    same, clipped = clip(small, sent, update, 1e6)
    assert same is update
    assert not clipped
    short, clipped = clip(small, sent, update, 0.5)
    assert clipped
    change = short.values.astype(np.float64) - base
    assert np.linalg.norm(change) == pytest.approx(0.5, rel=1e-4)
    assert change @ moved == pytest.approx(0.5 * np.linalg.norm(moved), rel=1e-4)
