"""Hermes, FedMP and neuron-wise PruneFL as their papers have them: the bandit, the residual, and whole federations."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import Participation, Situation
from sparrow.coordinator.methods.fedmp import FedMPSettings, next_ratio, rewards
from sparrow.coordinator.sums.averages import MaskedSums
from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronMask, count_values, pack, same_mask, unpack
from sparrow.protocol.messages import ChangeDevice, UpdateReport
from sparrow.protocol.neurons import best_neurons, counts_at, first_neurons, is_within, norm_scores
from sparrow.protocol.settings import FederationSettings

from .fakes import next_assignment

DIGITS = load_builtin("digits").manifest
WHOLE = 4 * DIGITS.shared_values
BUDGETS = {"a": 0.3, "b": 0.6, "c": 1.0}


def open_all(coordinator):
    return [coordinator.open_device(name, budget=budget) for name, budget in BUDGETS.items()]


def bundles(session, what):
    """The bundles that a device sent, or received to train, in order."""
    bodies = session.transport.sent if what == "sent" else session.transport.received
    return [decode(body, DIGITS) for body in bodies if body[:1] != b"{"]


def masks_of(session):
    return [update.mask for update in bundles(session, "sent")]


def total(coordinator, name):
    return sum(record.counts.get(name, 0) for record in coordinator.records.rounds("f"))


def one_round(coordinator, *sessions):
    coordinator.rounds.advance()
    for session in sessions:
        session.step()


def forged(mask):
    """An update under a mask, of zeros."""
    values = np.zeros(count_values(DIGITS, mask), np.float32)
    report = UpdateReport(num_examples=9, status="active", steps=1, train_loss=1.0)
    return encode(DIGITS, values, mask, report=report.model_dump_json())


def assignment_of(coordinator, session):
    return next_assignment(coordinator, session.identity.device_id, asked=False).assignment.assignment_id


# --- FedMP: the bandit -----------------------------------------------------------------------------------------------


def chances(seed):
    return np.random.default_rng(seed).uniform(1e-9, 1, 400)


def play(reward_of, budget=1.0, rounds=400, **own):
    rules, plays = FedMPSettings(**own), []
    for chance in chances(3)[:rounds]:
        ratio = next_ratio(plays, budget, chance, rules)
        plays.append((ratio, reward_of(ratio)))
    return [ratio for ratio, _ in plays]


@pytest.mark.integration
@pytest.mark.parametrize("good", [(0.1, 0.4), (0.4, 0.7), (0.7, 1.0)])
def test_the_bandit_follows_reward(good):
    """Without a difference of rewards it tries all alike."""
    low, high = good

    def share(ratios):
        return np.mean([low < ratio <= high for ratio in ratios[100:]])

    assert share(play(lambda ratio: 1.0 if low < ratio <= high else -1.0)) > 0.6
    assert share(play(lambda ratio: 0.0)) < 0.5
    assert share(play(lambda ratio: -1.0 if low < ratio <= high else 1.0)) < 0.2


def test_the_bandit_turns_where_rewards_turn():
    """Old rewards are discounted: what was good for 200 rounds and is not any more is left."""
    plays, rules = [], FedMPSettings()
    for number, chance in enumerate(chances(4)):
        ratio = next_ratio(plays, 1.0, chance, rules)
        plays.append((ratio, 1.0 if (ratio > 0.55) == (number < 200) else -1.0))
    late = [ratio for ratio, _ in plays[300:]]
    assert np.mean([ratio <= 0.55 for ratio in late]) > 0.7


def test_a_ratio_is_never_above_the_budget_nor_below_the_smallest():
    ratios = play(lambda ratio: ratio, budget=0.4, rounds=100, smallest_ratio=0.2)
    assert 0.2 <= min(ratios) < 0.3 < max(ratios) <= 0.4
    assert play(lambda ratio: ratio, budget=0.05, rounds=3) == [0.05] * 3


def test_every_region_is_tried_before_one_is_tried_again():
    """Each split leaves one half that nobody has tried; regions narrower than ``region`` are not split."""
    rules = FedMPSettings(smallest_ratio=0.2, region=0.5)
    assert next_ratio([], 1.0, 0.5, rules) == pytest.approx(0.6)
    assert next_ratio([(0.6, 1.0)], 1.0, 0.5, rules) == pytest.approx(0.8), "of (0.2, 0.6] and (0.6, 1] the untried"
    assert next_ratio([(0.6, 1.0), (0.8, 0.0)], 1.0, 0.5, rules) == pytest.approx(0.4)


def participation(number, device, loss, flops, budget=1.0, examples=10, seconds=0.0):
    return Participation(number, device, budget, 0.5, examples, loss, flops, seconds)


def situation(**own):
    settings = completed(FederationSettings(method="fedmp", method_settings=own))
    return Situation(DIGITS, settings, 9)


def test_rewards_by_hand():
    """Round 2: the loss falls by 1; times 2 and 4, the mean 3, both a third from it. Round 3: it rises by 0.5."""
    one = training_flops(DIGITS, 1)
    history = [
        participation(1, "a", 3.0, one),
        participation(2, "a", 2.0, 2 * one),
        participation(2, "b", 2.0, 4 * one),
        participation(3, "a", 2.5, one),
    ]
    largest = 0.5 / 0.1
    expected = [0.0, 1 / (1 / 3 + 0.1) / largest, 1 / (1 / 3 + 0.1) / largest, -1.0]
    assert rewards(history, situation()) == pytest.approx(expected)


def test_the_device_whose_time_is_the_means_has_the_larger_reward():
    one = training_flops(DIGITS, 1)
    history = [participation(1, "a", 3.0, one)]
    for name, time, seconds in (("a", 2, 3.0), ("b", 3, 4.0), ("c", 4, 2.0)):
        history.append(participation(2, name, 2.0, time * one, seconds=seconds))
    first, mean, last = rewards(history, situation())[1:]
    assert mean == 1.0 > first == last > 0
    assert rewards(history, situation(time="seconds"))[1:] == [mean, first, last]


def test_time_is_counted_for_the_device_s_budget():
    """A device of half the neurons that trains all its budget allows takes as long as a whole one that does."""
    half = training_flops(DIGITS, 1, weight_gradients=first_neurons(DIGITS, 0.5), narrow=True)
    history = [
        participation(1, "a", 3.0, 1),
        participation(2, "a", 2.0, training_flops(DIGITS, 1)),
        participation(2, "b", 2.0, half, budget=0.5),
    ]
    assert rewards(history, situation())[1:] == [1.0, 1.0]


# --- FedMP: R2SP -----------------------------------------------------------------------------------------------------


def test_a_residual_is_recovered_exactly():
    """Bit for bit what numpy makes of whole models: what each device returned, and the rest as it was."""
    random = np.random.default_rng(0)
    start = initial_values(DIGITS, 0)
    sums = MaskedSums(DIGITS, everybody=True)
    numerator = {spec.name: np.zeros(spec.shape) for spec in DIGITS.shared}
    weight = 0
    for examples, ratio in ((16, 0.3), (4, 0.6), (12, 0.3)):  # a power of two in all: products of float32 are exact
        mask = NeuronMask(
            {name: np.sort(random.permutation(size)[: int(size * ratio)]) for name, size in DIGITS.group_sizes.items()}
        )
        values = random.normal(size=count_values(DIGITS, mask)).astype(np.float32)
        sums.fold_in_place(values, mask, examples)
        whole = {name: np.array(tensor) for name, tensor in start.items()}
        for spec, block, part in unpack(DIGITS, values, mask):
            block.put(whole[spec.name], part)
        for name, tensor in whole.items():
            numerator[name] += examples * tensor.astype(np.float64)
        weight += examples
    mean = sums.mean(start)
    for name, summed in numerator.items():
        np.testing.assert_array_equal(mean[name], (summed / weight).astype(np.float32), err_msg=name)
    assert sums.completed == 3 * DIGITS.shared_values - sum(
        count_values(DIGITS, first_neurons(DIGITS, ratio)) for ratio in (0.3, 0.6, 0.3)
    )


def test_unsent_weights_stay_and_whole_models_give_the_mean():
    start = initial_values(DIGITS, 0)
    mask = first_neurons(DIGITS, 0.3)
    sums = MaskedSums(DIGITS, everybody=True)
    for examples in (3, 7):
        sums.fold_in_place(np.full(count_values(DIGITS, mask), 0.1, np.float32), mask, examples)
    mean = sums.mean(start)
    last = DIGITS.group_sizes["fc1"] - 1
    np.testing.assert_array_equal(mean["fc1.weight"][last], start["fc1.weight"][last])
    assert mean["fc1.bias"][0] == np.float32(0.1)
    both = [MaskedSums(DIGITS, everybody=everybody) for everybody in (False, True)]
    for each in both:
        each.fold_in_place(pack(DIGITS, start, None), None, 3)
        each.fold_in_place(pack(DIGITS, initial_values(DIGITS, 1), None), None, 5)
    plain, whole = (each.mean(start) for each in both)
    for name, tensor in plain.items():
        np.testing.assert_array_equal(whole[name], tensor)


# --- federations -----------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_fedmp_gives_each_device_the_ratio_and_the_neurons_that_the_coordinator_chose(coordinator):
    coordinator.create("fedmp", rounds=4)
    sessions = open_all(coordinator)
    models = [initial_values(DIGITS, 0)]
    for _ in range(4):
        one_round(coordinator, *sessions)
        coordinator.rounds.advance()
        models.append(checkpoint.load(coordinator.served.model("f"))[0])
    coordinator.play(*sessions)
    seen = set()
    for session, budget in zip(sessions, BUDGETS.values(), strict=True):
        sent, received = bundles(session, "sent"), bundles(session, "received")
        for before, down, up in zip(models, received, sent, strict=False):
            ratio = len(up.mask.active["fc1"]) / 64
            assert ratio <= budget
            assert same_mask(down.mask, up.mask), "the mask comes with the payload"
            counts = {name: len(index) for name, index in up.mask.active.items()}
            assert same_mask(up.mask, best_neurons(norm_scores(DIGITS, before, 1), counts))
            seen.add(tuple(counts.values()))
    assert len(seen) > 6
    record = coordinator.records.rounds("f")[-1]
    moved = [bundles(session, "sent")[-1].values.size for session in sessions]
    assert record.notes["residual_values"] == 3 * DIGITS.shared_values - sum(moved)
    assert record.counts["neurons_pruned"] > 0
    assert total(coordinator, "ratio_changes") == 3 * 3
    assert record.accuracy_personal is not None
    assert record.accuracy_global is not None


@pytest.mark.integration
def test_fedmps_global_model_is_the_mean_of_whole_models(coordinator):
    coordinator.create("fedmp", rounds=1)
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    start = initial_values(DIGITS, 0)
    numerator, weight = {name: np.zeros(tensor.shape) for name, tensor in start.items()}, 0
    for session in sessions:
        (update,) = bundles(session, "sent")
        examples = UpdateReport.model_validate_json(update.report).num_examples
        whole = {name: np.array(tensor) for name, tensor in start.items()}
        for spec, block, values in unpack(DIGITS, update.values, update.mask):
            block.put(whole[spec.name], values)
        for name, tensor in whole.items():
            numerator[name] += examples * tensor.astype(np.float64)
        weight += examples
    final, _ = checkpoint.load(coordinator.served.model("f"))
    for name, summed in numerator.items():
        np.testing.assert_allclose(final[name], summed / weight, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedmp", {}),
        ("hermes", {"accuracy_threshold": 0.0, "prune_rate": 0.4}),
        ("prunefl_neurons", {"adjust_interval": 2}),
    ],
)
def test_a_restart_changes_no_bit(new_coordinator, clock, method, own):
    """The bandit's memory is the records'; masks are files."""
    from .sessions import CoordinatorWithDevices

    digests = []
    for disturbed in (False, True):
        coordinator = new_coordinator()
        coordinator.create(method, rounds=4, method_settings=own)
        sessions = open_all(coordinator)
        for _ in range(4):
            one_round(coordinator, *sessions)
            if disturbed:
                coordinator.close()
                coordinator = CoordinatorWithDevices(coordinator.folder, clock)
                sessions = open_all(coordinator)
        coordinator.play(*sessions)
        assert coordinator.info().round == 4
        digests.append(coordinator.info().model_sha256)
        if disturbed:
            coordinator.close()
    assert digests[0] == digests[1]


@pytest.mark.integration
def test_hermes_masks_shrink_to_the_budgets_and_no_further(coordinator):
    coordinator.create("hermes", rounds=6, method_settings={"accuracy_threshold": 0.0, "prune_rate": 0.4})
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    for session, budget in zip(sessions, BUDGETS.values(), strict=True):
        masks = masks_of(session)
        assert all(is_within(after, before) for before, after in pairwise(masks))
        assert [len(index) for index in masks[-1].active.values()] == [
            math.floor(budget * size) for size in DIGITS.group_sizes.values()
        ]
        received = bundles(session, "received")
        assert received[0].values.size == DIGITS.shared_values
        for down, mask in zip(received[1:], masks, strict=False):
            if down.mask is not None:
                assert same_mask(down.mask, mask), "a device is sent what it has left"
    steps = {name: total(coordinator, name) for name in ("pruning_steps", "pruning_steps_rejected")}
    assert steps["pruning_steps"] >= 4
    assert steps["pruning_steps_rejected"] == 0
    pruned = sum(2 * 112 - sum(len(i) for i in masks_of(s)[-1].active.values()) - 112 for s in sessions)
    assert total(coordinator, "neurons_pruned") == pruned
    assert coordinator.info().status == "finished"


@pytest.mark.integration
def test_hermes_prunes_nothing_where_accuracy_does_not_hold(coordinator):
    coordinator.create("hermes", rounds=2, method_settings={"accuracy_threshold": 1.0})
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    assert all(update.values.size == DIGITS.shared_values for s in sessions for update in bundles(s, "sent"))
    assert total(coordinator, "pruning_steps_rejected") == 2 * 2, "a device of budget 1 has nothing to prune"
    assert total(coordinator, "neurons_pruned") == 0


@pytest.mark.integration
def test_hermes_updates_may_neither_grow_nor_fall_below_the_budget(coordinator, without_rest):
    coordinator.create("hermes", method_settings={"accuracy_threshold": 0.0, "prune_rate": 0.4})
    sessions = open_all(coordinator)
    one_round(coordinator, *sessions)
    coordinator.rounds.advance()
    (held,) = masks_of(sessions[0])
    where, device = assignment_of(coordinator, sessions[0]), sessions[0].identity.device_id
    grown = first_neurons(DIGITS, 1.0)
    with pytest.raises(BadContent, match=r"^mask: "):
        coordinator.acceptance.accept_update(where, device, forged(grown))
    small = NeuronMask({name: index[:2] for name, index in held.active.items()})
    for mask in (small, None):
        with pytest.raises(BadContent, match=r"p = 0\.3\b"):
            coordinator.acceptance.accept_update(where, device, forged(mask))
    least = NeuronMask({name: index[: counts_at(DIGITS, 0.3)[name]] for name, index in held.active.items()})
    assert coordinator.acceptance.accept_update(where, device, forged(least))


@pytest.mark.integration
def test_a_hermes_device_that_lost_its_state_or_got_more_budget_begins_anew(coordinator):
    coordinator.create("hermes", rounds=6, method_settings={"accuracy_threshold": 0.0, "prune_rate": 0.7})
    sessions = open_all(coordinator)
    one_round(coordinator, *sessions)
    coordinator.devices.change(coordinator.device("a").device_id, ChangeDevice(budget=0.6))
    one_round(coordinator, *sessions)
    masks = masks_of(sessions[0])
    assert [sum(map(len, mask.active.values())) for mask in masks] == [32, 112]
    coordinator.folders[1].close()
    for file in ("model.safetensors", "progress.json", "mask.bits"):
        (coordinator.folder / "b" / file).unlink()
    again = coordinator.open_device("b", budget=0.6)
    coordinator.play(sessions[0], again, sessions[2])
    assert bundles(again, "received")[0].values.size == DIGITS.shared_values
    assert [record.updates for record in coordinator.records.rounds("f")] == [3] * 6


@pytest.mark.integration
def test_prunefl_sends_the_whole_model_where_devices_choose_again(coordinator):
    coordinator.create("prunefl_neurons", rounds=5, method_settings={"adjust_interval": 2})
    sessions = open_all(coordinator)
    coordinator.play(*sessions)
    for session, budget in list(zip(sessions, BUDGETS.values(), strict=True))[:2]:
        whole = [down.values.size == DIGITS.shared_values for down in bundles(session, "received")][:5]
        assert whole == [True, True, False, True, False]
        masks = masks_of(session)
        assert all(len(mask.active["fc1"]) == math.floor(64 * budget) for mask in masks)
        assert same_mask(masks[1], masks[2])
        assert same_mask(masks[3], masks[4])
    assert total(coordinator, "adjustments") == 2 * 2
    replaced = sum(
        sum(len(np.setdiff1d(after.active[name], before.active[name])) for name in DIGITS.group_sizes)
        for session in sessions
        for before, after in pairwise(masks_of(session))
    )
    assert total(coordinator, "neurons_replaced") == replaced > 0


@pytest.mark.integration
def test_between_prunefls_choices_other_neurons_are_refused(coordinator):
    coordinator.create("prunefl_neurons", rounds=5, method_settings={"adjust_interval": 2})
    sessions = open_all(coordinator)
    other = NeuronMask({name: np.arange(n - math.floor(0.3 * n), n) for name, n in DIGITS.group_sizes.items()})
    for number in (1, 2, 3):
        coordinator.rounds.advance()
        where, device = assignment_of(coordinator, sessions[0]), sessions[0].identity.device_id
        if number == 3:
            with pytest.raises(BadContent, match=r"^mask: "):
                coordinator.acceptance.accept_update(where, device, forged(other))
        if number == 2:
            many = first_neurons(DIGITS, 0.5)
            with pytest.raises(BadContent, match="this mask has another number"):
                coordinator.acceptance.accept_update(where, device, forged(many))
        for session in sessions:
            session.step()
    assert not Counter(map(len, masks_of(sessions[0])[0].active.values())) - Counter([4, 9, 19])


@pytest.mark.integration
@pytest.mark.parametrize("method", ["hermes", "fedmp", "prunefl_neurons"])
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_other_precisions(coordinator, method, precision):
    own = {"hermes": {"accuracy_threshold": 0.0}, "prunefl_neurons": {"adjust_interval": 1}}.get(method, {})
    coordinator.create(method, precision=precision, rounds=3, update_norm_limit=1e4, method_settings=own)
    coordinator.play(*open_all(coordinator))
    assert [record.updates for record in coordinator.records.rounds("f")] == [3, 3, 3]
    assert total(coordinator, "neurons_pruned") > 0
