"""VoteDST: a vote worked out by hand, what devices send, and a whole federation."""

from __future__ import annotations

import numpy as np
import pytest

from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import GlobalModel, Situation, load_method, why_mean_only
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import UpdateReport
from sparrow.protocol.parts import Expected, expected
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import Election, ballot, draw_candidates, elect, elections, over_pruning

from .fakes import next_assignment

LAYER = Manifest(
    task="votes",
    input_shape=(10,),
    output_shape=(1,),
    tensors=(TensorSpec(name="w", shape=(1, 10)), TensorSpec(name="b", shape=(1,))),
    layers=(Layer(name="fc", kind="linear", tensors=("w", "b")),),
)
MASK = ElementMask({"w": np.array([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]], dtype=bool)})
SERVER = load_method("votedst")
OWN = {"density": 0.4, "adjust_interval": 1, "over_pruning": 0.5, "candidates": 2.0}


def situation(number=1, *, manifest=LAYER, rounds=3, plan=None, **own):
    complete = SERVER.settings_type.model_validate({**OWN, **own}).model_dump()
    settings = FederationSettings(method="votedst", method_settings=complete, rounds=rounds)
    return Situation(manifest, settings, number, plan or {})


def start():
    tensors = {"w": np.array([[0.5, -0.1, 0.2, -0.4, 0, 0, 0, 0, 0, 0]], np.float32), "b": np.zeros(1, np.float32)}
    return GlobalModel(tensors, MASK, {"replaced": np.zeros(1, dtype=np.int64)})


def closed(votes, *, examples=(100, 200, 100)):
    """The model after a round in which three devices kept their weights and so voted about three candidates."""
    where = situation(plan={"votes": 3, "share": 0.5}, candidates=1.5)
    sums = SERVER.aggregation.sums(start(), where)
    packed = np.concatenate([start().tensors["w"][MASK.exists["w"]], start().tensors["b"]])
    for count, vote in zip(examples, votes, strict=True):
        sums.fold_in_place(packed, MASK, count)
        sums.fold_votes_in_place(np.array(vote, dtype=np.int8), count)
    [places] = draw_candidates(MASK, {"w": Election(2, 3)}, 0, 1).values()
    return SERVER.aggregation.close(start(), sums, where), places


def test_votes_of_one_sign_add_up_and_of_both_cancel_out():
    """Two of K = 4 weights are replaced: Σ n v is -100 + 200 - 100 = 0, 100 + 200 = 300 and 200 - 100 = 100."""
    model, places = closed([[-1, 1, 0], [1, 1, 1], [-1, 0, -1]])
    exists = np.flatnonzero(model.mask.exists["w"])
    assert exists.tolist() == sorted([0, 3, places[1], places[2]]), "the smallest, at 1 and 2, went"
    np.testing.assert_array_equal(model.tensors["w"][0, exists], np.array([0.5, -0.4, 0, 0], np.float32))
    assert model.notes == {"positions_replaced": 2}
    assert model.own["replaced"].tolist() == [2]


def test_candidates_without_votes_do_not_grow():
    model, places = closed([[0, 0, -1], [0, 0, -1], [0, 0, -1]])
    assert np.flatnonzero(model.mask.exists["w"]).tolist() == sorted([0, 2, 3, places[2]])
    assert model.notes == {"positions_replaced": 1}
    model, _ = closed([[0, 0, 0]] * 3)
    assert model.mask.digest == MASK.digest


def test_a_device_votes_for_its_largest_gradients():
    assert ballot(np.array([0.1, -3.0, 2.0, 0.0, -0.5]), 3).tolist() == [0, -1, 1, 0, -1]
    assert ballot(np.array([1.0, -1.0, 1.0]), 1).tolist() == [1, 0, 0], "among equals the lower index"
    assert ballot(np.zeros(3), 2).tolist() == [0, 0, 0]
    assert elect(np.array([5.0, -7.0, 0.0, 5.0]), 2).tolist() == [0, 1]


def test_votes_fill_all_replaced_weights_if_candidates_suffice():
    assert elections(LAYER, {"w": 4}, 0.5, 2.0) == {"w": Election(2, 4)}
    assert elections(LAYER, {"w": 4}, 0.5, 100.0) == {"w": Election(2, 6)}, "six positions are free"
    assert elections(LAYER, {"w": 8}, 0.5, 2.0) == {"w": Election(2, 2)}
    assert elections(LAYER, {"w": 4}, 0.2, 2.0) == elections(LAYER, {"w": 10}, 0.5, 2.0) == {}


def test_candidates_exist_nowhere_and_follow_from_seed_and_round():
    votes = {"w": Election(2, 3)}
    drawn = [draw_candidates(MASK, votes, seed, number)["w"] for seed in range(6) for number in (1, 2)]
    assert all(len(set(places)) == 3 and (np.diff(places) > 0).all() and places.min() >= 4 for places in drawn)
    assert len({tuple(places) for places in drawn}) > 6
    assert draw_candidates(MASK, votes, 0, 1)["w"].tolist() == drawn[0].tolist()


def test_a_round_with_votes_says_how_many_and_the_last_has_none():
    assert SERVER.schedule.work(situation(1)).plan == {"votes": 2, "share": over_pruning(1, 3, 0.5)}, (
        "floor(0.375 x 4) = 1 seat"
    )
    for idle in (
        situation(3),
        situation(1, adjust_interval=0),
        situation(1, adjust_interval=2),
        situation(1, density=1),
    ):
        assert SERVER.schedule.work(idle).plan == {}
    assert expected(SERVER.parts, LAYER, {"votes": 2, "share": 0.375}) == {"signs": Expected("sign", 2)}
    assert expected(SERVER.parts, LAYER, {}) == {}


def test_rounds_in_which_nobody_would_vote_are_refused():
    with pytest.raises(BadContent, match=r"adjust_interval: .*\b3\b"):
        SERVER.start(start().tensors, situation(adjust_interval=3))
    SERVER.start(start().tensors, situation(adjust_interval=0))
    assert "votes" in SERVER.why_not_secure(situation().settings)
    assert SERVER.why_not_secure(situation(adjust_interval=0).settings) is None
    assert "votes" in why_mean_only(SERVER, situation().settings)


def test_the_first_weights_are_as_much_larger_as_fewer_exist():
    dense = {"w": np.linspace(-1, 1, 10, dtype=np.float32).reshape(1, 10), "b": np.ones(1, np.float32)}
    scaled, drawn = (SERVER.start(dense, situation(initial_scale=scale)) for scale in ("sparse", "dense"))
    assert scaled.mask.digest == drawn.mask.digest
    np.testing.assert_allclose(scaled.tensors["w"], drawn.tensors["w"] * np.sqrt(10 / 4), rtol=1e-6)
    np.testing.assert_array_equal(drawn.tensors["w"], np.where(drawn.mask.exists["w"], dense["w"], 0))
    assert scaled.tensors["b"].tolist() == [1]


# --- a whole federation ---------------------------------------------------------------------------------------------

DIGITS = load_builtin("digits").manifest
QUICK = {"density": 0.3, "adjust_interval": 2}


@pytest.mark.integration
def test_devices_vote_in_re_adjusting_rounds_and_all_keep_the_rounds_mask(coordinator):
    coordinator.create("votedst", rounds=5, precision="int8", method_settings=QUICK)
    first = coordinator.model().mask
    coordinator.play(*(coordinator.open_device(name) for name in "ab"))
    records, last = coordinator.records.rounds("f"), coordinator.model().mask
    seats = sum(vote.seats for vote in elections(DIGITS, first.counts, over_pruning(2, 5, 0.5), 4.0).values())
    assert [record.counts.get("votes", 0) > 0 for record in records] == [False, True, False, True, False]
    assert records[1].counts["votes"] == 2 * seats, "each of both devices votes for as many as there are seats"
    assert last.counts == first.counts
    assert last.without(first).count > 0
    assert sum(record.notes.get("positions_replaced", 0) for record in records) >= last.without(first).count


@pytest.mark.integration
@pytest.mark.parametrize("wrong", ["none", "fewer", "gradients"])
def test_an_update_without_the_votes_that_are_wanted_is_refused(coordinator, wrong):
    coordinator.create("votedst", rounds=3, method_settings={**QUICK, "adjust_interval": 1})
    coordinator.open_device("a"), coordinator.open_device("b")
    coordinator.rounds.advance()
    device = coordinator.device("a").device_id
    assignment = next_assignment(coordinator, device).assignment
    model, wanted = coordinator.model(), assignment.plan["votes"]
    body = bundle.encode(
        DIGITS,
        pack(DIGITS, model.tensors, model.mask),
        model.mask,
        known=model.mask,
        parts={
            "none": {},
            "fewer": {"signs": np.ones(wanted - 1, dtype=np.int8)},
            "gradients": {"gradients": np.zeros(model.mask.size, np.float32)},
        }[wrong],
        report=UpdateReport(num_examples=5, steps=1, train_loss=1.0).model_dump_json(),
    )
    with pytest.raises(
        BadContent,
        match="not a part of this message" if wrong == "gradients" else f"must have {wanted} signs besides its values",
    ):
        coordinator.acceptance.accept_update(assignment.assignment_id, device, body)
