"""int8 updates and error feedback: what rounding takes from one update is sent with the next."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from edge_sdk.device.rounding import round_update
from edge_sdk.methods import DeviceState, Job, Update
from edge_sdk.tasks import Task
from edge_sdk.training.engine import TorchEngine
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronMask, count_values, merge_in_place, pack, unpack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.quantization import row_lengths
from sparrow.protocol.settings import FederationSettings

NEURONS = NeuronMask({"conv": np.array([0, 2]), "fc": np.array([1, 2, 5])})


def elements(small, seed=0):
    generator = np.random.default_rng(seed)
    return ElementMask({spec.name: generator.random(spec.shape) < 0.4 for spec in small.maskable})


def job_of(small, *, number=1, mask=None, received=True):
    """A round whose payload holds the model of seed 7 under ``mask``."""
    assignment = Assignment(
        assignment_id="a", kind="train", round=number, deadline_seconds=9, settings=FederationSettings()
    )
    model = nn.Linear(1, 1)
    task = Task("small", model, lambda outputs, targets: outputs.sum(), [], [])
    tensors = initial_values(small, 7)
    payload = decode(encode(small, pack(small, tensors, mask), mask), small) if received else None
    return Job(assignment, small, task, TorchEngine(task, small), DeviceState(), payload, federation="f", device="pi")


def change(count, seed=0, scale=0.01):
    return (np.random.default_rng(seed).normal(size=count) * scale).astype(np.float32)


def spread(small, packed, mask):
    """Packed values as one vector of the whole model, 0 where nothing is."""
    tensors = {spec.name: np.zeros(spec.shape, dtype=np.float32) for spec in small.shared}
    merge_in_place(small, tensors, packed, mask)
    return pack(small, tensors, None)


@pytest.mark.parametrize("kind", ["all", "neurons", "elements"])
def test_an_update_is_its_difference_from_what_was_received(small, kind):
    mask = {"all": None, "neurons": NEURONS, "elements": elements(small)}[kind]
    job = job_of(small, mask=mask)
    moved = change(count_values(small, mask))
    numbers, left = round_update(job, Update(job.received.values + moved, mask), {})
    lengths = row_lengths(small, mask)
    sent, kept = numbers.values(lengths), pack(small, left, mask)
    assert (np.abs(sent - moved) <= np.repeat(numbers.scales, lengths) + 1e-6).all()
    np.testing.assert_allclose(sent + kept, moved, atol=1e-6)
    assert set(left) == {spec.name for spec in small.shared}
    assert all(tensor.dtype == np.float32 for tensor in left.values())
    inside = spread(small, np.ones(len(sent), np.float32), mask)
    assert not pack(small, left, None)[inside == 0].any(), "what is not sent is owed nothing"


def test_a_whole_payload_counts_under_the_mask_only(small):
    """A device that was thought to have lost its model gets all of it again."""
    part, whole = job_of(small, mask=NEURONS), job_of(small)
    update = Update(part.received.values + change(len(part.received.values)), NEURONS)
    one, other = round_update(part, update, {}), round_update(whole, update, {})
    assert one[0].numbers.tobytes() == other[0].numbers.tobytes()
    assert one[0].scales.tobytes() == other[0].scales.tobytes()


def test_weights_that_did_not_exist_before_differ_from_zero(small):
    before, after = elements(small), elements(small, 1)
    job = job_of(small, mask=before)
    tensors = {name: np.zeros_like(tensor) for name, tensor in initial_values(small, 7).items()}
    merge_in_place(small, tensors, job.received.values, before)
    moved = change(count_values(small, after))
    update = Update(pack(small, tensors, after) + moved, after)
    numbers, left = round_update(job, update, {})
    np.testing.assert_allclose(numbers.values(row_lengths(small, after)) + pack(small, left, after), moved, atol=1e-6)


@pytest.mark.parametrize("kind", ["all", "neurons", "elements"])
@pytest.mark.parametrize("rounds", [1, 40])
def test_in_the_long_run_nothing_is_lost(small, kind, rounds):
    """What the server adds over T rounds is what the device moved, up to what it still owes: one scale at most.

    Payload and move are the same each time, and a hair of float32 is lost in each.
    """
    mask = {"all": None, "neurons": NEURONS, "elements": elements(small)}[kind]
    lengths, feedback = row_lengths(small, mask), {}
    moved = change(count_values(small, mask))
    added, largest = np.zeros(len(moved)), np.zeros(len(moved))
    for number in range(1, rounds + 1):
        job = job_of(small, number=number, mask=mask)
        numbers, feedback = round_update(job, Update(job.received.values + moved, mask), feedback)
        added += numbers.values(lengths)
        largest = np.maximum(largest, np.repeat(numbers.scales, lengths))
    assert (np.abs(added - rounds * moved.astype(np.float64)) <= largest + rounds * 2e-7).all()
    np.testing.assert_allclose(added + pack(small, feedback, mask), rounds * moved, atol=rounds * 2e-7)


def test_other_rounds_round_otherwise_and_the_same_round_alike(small):
    def numbers(number):
        job = job_of(small, number=number)
        return round_update(job, Update(job.received.values + change(small.shared_values), None), {})[0].numbers

    assert numbers(3).tobytes() == numbers(3).tobytes(), "a round done again sends the same bytes"
    assert numbers(3).tobytes() != numbers(4).tobytes()


def test_what_neurons_of_other_rounds_are_owed_stays(small):
    job, owed = job_of(small, mask=NEURONS), {spec.name: np.ones(spec.shape, np.float32) for spec in small.shared}
    before = {name: tensor.copy() for name, tensor in owed.items()}
    _, left = round_update(job, Update(job.received.values, NEURONS), owed)
    inside = spread(small, np.ones(len(job.received.values), np.float32), NEURONS) == 1
    assert (pack(small, left, None)[~inside] == 1).all()
    assert (np.abs(pack(small, left, None)[inside]) < 1).all(), "sent, but for what rounding takes"
    assert all(np.array_equal(tensor, before[name]) for name, tensor in owed.items()), "new tensors"


def test_an_element_that_no_longer_exists_is_owed_nothing(small):
    mask, owed = elements(small), {spec.name: np.ones(spec.shape, np.float32) for spec in small.shared}
    job = job_of(small, mask=mask)
    _, left = round_update(job, Update(job.received.values, mask), owed)
    for name, exists in mask.exists.items():
        assert not left[name][~exists].any()


def test_without_a_payload_there_is_nothing_to_differ_from(small):
    with pytest.raises(BundleError, match="has no payload"):
        round_update(job_of(small, received=False), Update(np.zeros(small.shared_values, np.float32)), {})
    part = job_of(small, mask=NEURONS)
    with pytest.raises(BundleError, match="a part of the model"):
        round_update(part, Update(np.zeros(small.shared_values, np.float32)), {})


@pytest.mark.parametrize("seed", range(5))
def test_variances_do_not_become_negative(small, seed):
    """That of a channel which is hardly used is smaller than the rounding of its vector; a mean may have any sign."""
    job = job_of(small, number=seed)
    base = {spec.name: np.array(tensor) for spec, tensor in zip(small.shared, _whole(small, job), strict=True)}
    base["bn.running_var"] = np.array([1e-2, 5.0, 2e-2], np.float32)
    base["bn.running_mean"] = np.array([1e-4, 0.0, -1e-3], np.float32)
    after = {name: tensor.copy() for name, tensor in base.items()}
    after["bn.running_var"] = np.array([1e-3, 9.0, 0.0], np.float32)
    update = Update(pack(small, after, None), base=base)
    numbers, left = round_update(job, update, {})
    decoded = pack(small, base, None) + numbers.values(row_lengths(small, None))
    found = {spec.name: part for spec, _, part in unpack(small, decoded, None)}
    assert (found["bn.running_var"] >= 0).all()
    np.testing.assert_allclose(found["bn.running_var"], after["bn.running_var"], atol=5 / 127)
    np.testing.assert_allclose(decoded + pack(small, left, None), update.values, atol=1e-6)


def _whole(small, job):
    return [part for _, _, part in unpack(small, job.received.values, None)]
