"""GraSP and PruneFL: whole federations whose sparse model one device prepares, and what its server half refuses."""

from __future__ import annotations

import numpy as np
import pytest

from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import GlobalModel, Situation, load_method
from sparrow.coordinator.methods.prunefl import SquaredGradientSums
from sparrow.coordinator.sums.averages import OneUpdate
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import encode
from sparrow.protocol.elements import everything
from sparrow.protocol.manifest import Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, pack
from sparrow.protocol.messages import Kind, UpdateReport
from sparrow.protocol.parts import expected
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import random_mask, weight_budget

from .fakes import next_assignment

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
WEIGHTS = sum(spec.size for spec in DIGITS.maskable)
OTHERS = DIGITS.shared_values - WEIGHTS
QUICK = {"prepare_rounds": 2, "adjust_interval": 0}


def own(method, **settings):
    return {**(QUICK if method == "prunefl" else {}), **settings}


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def kinds(assignments):
    return [assignment.kind.value for assignment in assignments]


def parts(record, values, **more):
    """What a round's updates should consist of, but for their headers."""
    return {"header": record.parts_up["header"], "values": 4 * values, **more}


def mask_of(counts):
    return random_mask(DIGITS, dict(zip((spec.name for spec in DIGITS.maskable), counts, strict=True)), seed=0)


# --- whole federations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grasp", "prunefl"])
def test_one_device_prepares_and_everybody_trains_what_exists(coordinator, method):
    coordinator.create(method, rounds=2, method_settings=own(method))
    sessions = [coordinator.open_device(name) for name in "abc"]
    worked = coordinator.play(*sessions)
    assert sorted(map(kinds, worked)) == [
        ["prepare", "train", "train", "evaluate", "adapt"],
        ["train", "train", "evaluate", "adapt"],
        ["train", "train", "evaluate", "adapt"],
    ]
    info, model = coordinator.info(), coordinator.model()
    assert (info.status, info.round, info.model_version) == ("finished", 2, 3)
    zeroth, *rounds = coordinator.records.rounds("f")
    count = model.mask.count
    assert count == weight_budget(DIGITS, 0.2) == 2716
    assert (zeroth.round, len(zeroth.cohort), zeroth.updates, zeroth.notes["weights"]) == (0, 1, 1, count)
    assert zeroth.parts_up == parts(zeroth, count + OTHERS, mask=(WEIGHTS + 7) // 8)
    assert [(record.round, record.updates) for record in rounds] == [(1, 3), (2, 3)]
    assert all(record.parts_up == parts(record, 3 * (count + OTHERS)) for record in rounds)
    for name, exists in model.mask.exists.items():
        assert not model.tensors[name][~exists].any()
        assert exists.any()
    assert all(same(model.tensors, session.personal) for session in sessions), "the one that prepared, too"
    assert [session.progress.rounds for session in sessions] == [2, 2, 2]


def test_grasp_of_everything_is_fedavg_bit_for_bit(coordinator, new_coordinator):
    coordinator.create("grasp", rounds=2, method_settings={"density": 1.0})
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    other = new_coordinator()
    other.create("fedavg", rounds=2)
    other.play(other.open_device("a"), other.open_device("b"))
    assert same(coordinator.model().tensors, other.model().tensors)


def test_grasp_begins_with_the_first_weights_and_keeps_its_mask(coordinator):
    coordinator.create("grasp", rounds=2)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    coordinator.rounds.advance()
    first, start = coordinator.model(), initial_values(DIGITS, 0)
    for spec in DIGITS.shared:
        exists = first.mask.exists.get(spec.name, np.ones(spec.shape, dtype=bool))
        np.testing.assert_array_equal(first.tensors[spec.name], start[spec.name] * exists)
    coordinator.play(*sessions)
    assert coordinator.model().mask.digest == first.mask.digest
    assert not same(coordinator.model().tensors, first.tensors)


def test_prunefl_replaces_weights_in_rounds_that_send_gradients(coordinator):
    coordinator.create("prunefl", rounds=4, method_settings=own("prunefl", density=0.3, adjust_interval=2))
    sessions = [coordinator.open_device(name) for name in "ab"]
    masks = {}
    moved = True
    while moved:
        moved = coordinator.rounds.advance()
        masks.setdefault(coordinator.info().model_version, coordinator.model().mask)
        for session in sessions:
            moved |= session.step().assignment is not None
    most = weight_budget(DIGITS, 0.3)
    counts = [masks[version].count for version in range(1, 6)]
    assert all(count <= most for count in counts)
    digests = [masks[version].digest for version in range(1, 6)]
    assert digests[0] == digests[1] != digests[2] == digests[3] == digests[4], "round 4, the last, changes nothing"
    records = coordinator.records.rounds("f")
    second = records[2]
    assert second.parts_up == parts(second, 2 * (counts[1] + OTHERS), gradients=2 * 4 * WEIGHTS)
    new = sum(int((masks[3].exists[name] & ~masks[2].exists[name]).sum()) for name in masks[3].exists)
    gone = sum(int((masks[2].exists[name] & ~masks[3].exists[name]).sum()) for name in masks[3].exists)
    assert second.notes == {"positions_replaced": new, "positions_changed": new + gone, "weights": counts[2]}
    assert new > 0
    assert [record.notes for record in records[3:]] == [{}, {}]
    assert all("gradients" not in record.parts_up for record in records if record is not second)
    assert records[0].counts == {"prepare_rounds": 2, "prepare_pruned": WEIGHTS - counts[0]}
    assert records[0].notes == {"weights": counts[0]}


def test_whole_numbers_and_gradients_go_together(coordinator):
    """Updates in int8 are differences, what is prepared is not, and squared gradients stay as they are."""
    coordinator.create("prunefl", rounds=3, precision="int8", method_settings=own("prunefl", adjust_interval=2))
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    zeroth, first, second, _ = coordinator.records.rounds("f")
    assert zeroth.parts_up["values"] == 4 * (2716 + OTHERS)
    assert first.parts_up["values"] == 2 * (2716 + OTHERS)
    assert second.parts_up["gradients"] == 2 * 4 * WEIGHTS
    assert coordinator.info().status == "finished"


def prepare_open(coordinator, *names):
    """Who is asked to prepare, and the assignment."""
    coordinator.rounds.advance()
    asked = {name: next_assignment(coordinator, coordinator.device(name).device_id).assignment for name in names}
    ((name, assignment),) = [(name, each) for name, each in asked.items() if each is not None]
    assert (assignment.kind, assignment.round) == (Kind.prepare, 0)
    return name, assignment


@pytest.mark.parametrize("method", ["grasp", "prunefl"])
def test_another_device_prepares_where_the_first_hands_it_back(coordinator, method):
    coordinator.create(method, rounds=1, method_settings=own(method))
    sessions = {name: coordinator.open_device(name) for name in "ab"}
    name, assignment = prepare_open(coordinator, "a", "b")
    coordinator.dispatch.hand_back(assignment.assignment_id, coordinator.device(name).device_id, "too hot")
    other, again = prepare_open(coordinator, "a", "b")
    assert other != name
    assert again.assignment_id != assignment.assignment_id
    coordinator.play(*sessions.values())
    records = coordinator.records.rounds("f")
    assert [(record.round, record.cohort) for record in records[:1]] == [(0, (other,))]
    assert coordinator.info().round == 1


def test_a_small_budget_is_told_what_the_density_is(coordinator, caplog):
    coordinator.create("grasp", rounds=1, method_settings={"density": 0.3})
    small, enough = coordinator.open_device("a", budget=0.2), coordinator.open_device("b", budget=0.3)
    assert "budget of 0.2" in caplog.text
    assert caplog.text.count("your budget") == 1
    worked = coordinator.play(small, enough)
    assert [kinds(each) for each in worked] == [["evaluate", "adapt"], ["prepare", "train", "evaluate", "adapt"]]


# --- what is refused ---------------------------------------------------------------------------------------------


REPORT = UpdateReport(num_examples=3, steps=1, train_loss=0.5).model_dump_json()


def send(coordinator, name, assignment, mask, *, known=None, gradients=None):
    body = encode(
        DIGITS,
        np.zeros(count_values(DIGITS, mask), np.float32),
        mask,
        report=REPORT,
        known=known,
        parts=None if gradients is None else {"gradients": gradients},
    )
    return coordinator.acceptance.accept_update(assignment.assignment_id, coordinator.device(name).device_id, body)


@pytest.mark.parametrize(
    ("method", "counts", "said"),
    [
        ("grasp", (72, 505, 1500, 640), "has 2717 weights; it must have at most 2716"),
        ("grasp", (72, 503, 1500, 640), "has 2715 weights, but must have 2716"),
        ("grasp", (0, 576, 1500, 640), "conv1.weight has no weight"),
        ("prunefl", (72, 505, 1500, 640), "has 2717 weights; it must have at most 2716"),
        ("prunefl", (72, 505, 1500, 0), "out.weight has no weight"),
    ],
)
def test_masks_that_nobody_may_prepare_are_refused(coordinator, method, counts, said):
    coordinator.create(method, rounds=1, method_settings=own(method))
    for name in "ab":
        coordinator.open_device(name)
    name, assignment = prepare_open(coordinator, "a", "b")
    with pytest.raises(BadContent, match=said.replace(".", r"\.")):
        send(coordinator, name, assignment, mask_of(counts))


@pytest.mark.parametrize("method", ["grasp", "prunefl"])
def test_what_is_prepared_has_a_mask_of_elements(coordinator, method, without_rest):
    coordinator.create(method, rounds=1, method_settings=own(method))
    for name in "ab":
        coordinator.open_device(name)
    name, assignment = prepare_open(coordinator, "a", "b")
    with pytest.raises(BadContent, match="prepares"):
        send(coordinator, name, assignment, None)
    with pytest.raises(BadContent, match=r"mask: it differs from the mask of .* in round 0"):
        send(coordinator, name, assignment, draw_neurons(DIGITS, NeuronDraw(name, 0.5)))
    with pytest.raises(BadContent, match="'gradients' is not a part of this message"):
        send(coordinator, name, assignment, mask_of((72, 504, 1500, 640)), gradients=np.zeros(WEIGHTS, np.float32))
    assert send(coordinator, name, assignment, mask_of((72, 504, 1500, 640)))


def test_prunefl_may_prepare_fewer_weights(coordinator):
    coordinator.create("prunefl", rounds=1, method_settings=own("prunefl"))
    coordinator.open_device("a"), coordinator.open_device("b")
    name, assignment = prepare_open(coordinator, "a", "b")
    mask = mask_of((1, 1, 1, 1))
    assert send(coordinator, name, assignment, mask)
    coordinator.rounds.advance()
    assert coordinator.model().mask.digest == mask.digest
    assert coordinator.records.rounds("f")[0].notes == {"weights": 4}


def in_round(coordinator, number, method, **settings):
    """Devices a and b with open assignments of this round."""
    coordinator.create(method, rounds=9, method_settings=own(method, **settings))
    sessions = {name: coordinator.open_device(name) for name in "ab"}
    while True:
        coordinator.rounds.advance()
        asked = {name: next_assignment(coordinator, coordinator.device(name).device_id).assignment for name in sessions}
        if all(each is not None and each.round == number and each.kind is Kind.train for each in asked.values()):
            return asked
        for name, assignment in asked.items():
            if assignment is not None:
                sessions[name].step()


@pytest.mark.parametrize("method", ["grasp", "prunefl"])
def test_devices_change_no_mask_of_their_own(coordinator, method):
    asked = in_round(coordinator, 1, method)
    mask = coordinator.model().mask
    other = mask_of(mask.counts.values())
    assert other.digest != mask.digest
    with pytest.raises(BadContent, match=r"^mask: "):
        send(coordinator, "a", asked["a"], other, known=mask)
    assert send(coordinator, "a", asked["a"], mask, known=mask)


def test_gradients_come_when_they_are_asked_for_and_only_then(coordinator):
    asked = in_round(coordinator, 2, "prunefl", adjust_interval=2)
    assert asked["a"].plan == {"gradients": True}
    mask, gradients = coordinator.model().mask, np.ones(WEIGHTS, np.float32)
    with pytest.raises(BadContent, match=f"{WEIGHTS} gradients"):
        send(coordinator, "a", asked["a"], mask, known=mask)
    assert send(coordinator, "a", asked["a"], mask, known=mask, gradients=gradients)
    assert send(coordinator, "b", asked["b"], mask, known=mask, gradients=gradients)
    coordinator.rounds.advance()
    later = next_assignment(coordinator, coordinator.device("a").device_id).assignment
    assert (later.round, later.plan) == (3, {})
    mask = coordinator.model().mask
    with pytest.raises(BadContent, match="'gradients' is not a part of this message"):
        send(coordinator, "a", later, mask, known=mask, gradients=gradients)


@pytest.mark.parametrize("method", ["grasp", "prunefl"])
def test_a_model_without_weights_to_prune_is_refused(method):
    manifest = Manifest(task="w", input_shape=(1,), output_shape=(1,), tensors=(TensorSpec(name="w", shape=(1,)),))
    with pytest.raises(BadContent, match="no layer can be sparse"):
        load_method(method).start({}, Situation(manifest, FederationSettings(method=method)))


# --- the server half by itself -----------------------------------------------------------------------------------


def situation(number=0, **more):
    method = load_method("prunefl")
    settings = FederationSettings(
        method="prunefl", rounds=101, method_settings=method.settings_type(**more).model_dump()
    )
    plan = method.schedule.work(Situation(DIGITS, settings, number)).plan
    return method, Situation(DIGITS, settings, number, plan)


def test_which_rounds_send_gradients():
    planned = [number for number in range(102) if situation(number)[1].plan]
    assert planned == [50, 100]
    assert [number for number in range(102) if situation(number, adjust_interval=25)[1].plan] == [25, 50, 75, 100]
    method, last = situation(101, adjust_interval=101)
    assert not last.plan
    assert [set(expected(method.parts, DIGITS, plan)) for plan in ({}, {"gradients": True})] == [set(), {"gradients"}]


def test_squared_gradients_are_weighted_with_examples():
    mask = mask_of((72, 504, 1500, 640))
    sums = SquaredGradientSums(DIGITS, mask)
    values = np.zeros(count_values(DIGITS, mask), np.float32)
    ramp = np.arange(WEIGHTS, dtype=np.float32)
    for update, squares, count in ((values, ramp, 30), (values + 4, np.zeros(WEIGHTS, np.float32), 10)):
        sums.fold_in_place(update, mask, count)
        sums.fold_squares_in_place(squares, count)
    importance = sums.importance()
    assert [part.shape for part in importance.values()] == [spec.shape for spec in DIGITS.maskable]
    np.testing.assert_allclose(np.concatenate([part.reshape(-1) for part in importance.values()]), 0.75 * ramp)
    np.testing.assert_allclose(pack(DIGITS, sums.mean(initial_values(DIGITS, 0)), mask), 1.0)


def adjusted(round_number, **more):
    """What a round makes of weights that all exist, where the squared gradients of the last layer alone are not 0."""
    method, at = situation(round_number, density=1.0, fixed_cost=0.0, **more)
    mask = everything(DIGITS)
    tensors = initial_values(DIGITS, 0)
    sums = method.aggregation.sums(GlobalModel(tensors, mask), at)
    gradients = np.zeros(WEIGHTS, np.float32)
    gradients[-640:] = 1.0
    sums.fold_in_place(pack(DIGITS, tensors, mask), mask, 10)
    sums.fold_squares_in_place(gradients, 10)
    return tensors, method.aggregation.close(GlobalModel(tensors, mask), sums, at)


def test_less_may_go_as_rounds_pass():
    _, early = adjusted(50, half_life=50.0)
    _, late = adjusted(100, half_life=50.0)
    dense = {spec.name: spec.size for spec in DIGITS.maskable}
    for name in ("conv1.weight", "conv2.weight", "fc1.weight"):
        assert early.mask.counts[name] == dense[name] - int(0.15 * dense[name] + 1e-9)
        assert late.mask.counts[name] == dense[name] - int(0.075 * dense[name] + 1e-9)
    assert early.mask.counts["out.weight"] == 640, "worth their time"
    gone = sum(dense.values()) - early.mask.count
    assert early.notes == {"positions_replaced": 0, "positions_changed": gone, "weights": early.mask.count}


def test_the_smallest_go_and_what_stays_is_the_mean():
    tensors, model = adjusted(50)
    for name, exists in model.mask.exists.items():
        if not exists.all():
            assert np.abs(tensors[name][exists]).min() >= np.abs(tensors[name][~exists]).max()
        np.testing.assert_array_equal(model.tensors[name], np.where(exists, tensors[name], 0))
    np.testing.assert_array_equal(model.tensors["out.bias"], tensors["out.bias"])


def test_what_is_new_begins_at_zero():
    method, at = situation(50, share=0.0, density=1.0, fixed_cost=10.0)
    mask = mask_of((72, 504, 1500, 640))
    tensors = {**initial_values(DIGITS, 0)}
    for name, exists in mask.exists.items():
        tensors[name] = tensors[name] * exists
    sums = method.aggregation.sums(GlobalModel(tensors, mask), at)
    sums.fold_in_place(pack(DIGITS, tensors, mask), mask, 10)
    sums.fold_squares_in_place(np.ones(WEIGHTS, np.float32), 10)
    model = method.aggregation.close(GlobalModel(tensors, mask), sums, at)
    assert model.mask.count == WEIGHTS, "such a t_0 makes everything worth its time"
    new = WEIGHTS - 2716
    assert model.notes == {"positions_replaced": new, "positions_changed": new, "weights": WEIGHTS}
    assert all(not model.tensors[name][~exists].any() for name, exists in mask.exists.items())
    assert same(model.tensors, tensors)


def test_the_first_model_is_what_was_prepared():
    method, at = situation()
    mask = mask_of((72, 504, 1500, 640))
    sums = method.aggregation.sums(GlobalModel(initial_values(DIGITS, 0)), at)
    assert isinstance(sums, OneUpdate)
    values = np.arange(count_values(DIGITS, mask), dtype=np.float32) + 1
    sums.fold_in_place(values, mask, 5)
    model = method.aggregation.close(GlobalModel(initial_values(DIGITS, 0)), sums, at)
    np.testing.assert_array_equal(pack(DIGITS, model.tensors, mask), values)
    assert model.mask is mask
    assert all(not model.tensors[name][~exists].any() for name, exists in mask.exists.items())
