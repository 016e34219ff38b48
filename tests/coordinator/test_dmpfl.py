"""DM-PFL: its server half against numbers worked out by hand, and whole federations that pass through the stages."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from edge_sdk.device.session import Outcome
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import Situation, load_method
from sparrow.coordinator.methods.dmpfl import Stage, stages
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask, from_bits
from sparrow.protocol.flops import growth_flops, training_flops
from sparrow.protocol.manifest import MULTIPLYING, Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import ChangeDevice, Conditions, Kind, UpdateReport
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, layer_densities

from .fakes import next_assignment

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
CIFAR = load_builtin("cifar10:dmpfl").manifest
DENSITY = 0.5
COUNTS = layer_counts(DIGITS, DENSITY)
LAYERS = [layer for layer in DIGITS.layers if layer.kind in MULTIPLYING]
SERVER = load_method("dmpfl")


def layer_of(shape):
    """A model of one linear layer with weights of this shape, and a bias that nothing masks."""
    tensors = (TensorSpec(name="w", shape=shape), TensorSpec(name="b", shape=shape[:1]))
    return Manifest(
        task="v",
        input_shape=shape[1:],
        output_shape=shape[:1],
        tensors=tensors,
        layers=(Layer(name="fc", kind="linear", tensors=("w", "b")),),
    )


def situation(manifest, *, own=None, plan=None, number=1, devices=0, **federation):
    complete = SERVER.settings_type.model_validate(own or {}).model_dump()
    settings = FederationSettings(method="dmpfl", method_settings=complete, **federation)
    return Situation(manifest, settings, number, plan or {"stage": "masks"}, devices=devices)


def array(rows):
    return np.array(rows, dtype=np.float32)


def fold(sums, manifest, weights, *, held=None, num_examples=1, bias=0.0):
    """One update; it holds what is not zero unless told."""
    mask = ElementMask({"w": weights != 0 if held is None else held})
    tensors = {"w": weights, "b": np.full(manifest.tensors[1].shape, bias, dtype=np.float32)}
    sums.fold_in_place(pack(manifest, tensors, mask), mask, num_examples)


# --- two rounds of the stage masks -----------------------------------------------------------------------------------

NET = layer_of((3, 4))
W_G = [
    [[0.2, 0.3, 0.2, -0.1], [0.1, -0.3, -0.3, 0.2], [0.3, 0.2, -0.1, -0.4]],
    [[0.6, 0.9, 0.2, -0.1], [0.4, -1.1, -1.0, 0.2], [0.3, 0.1, -0.1, -1.1]],
    [[0.4, 0.9, 0.2, -0.1], [0.8, -0.7, -0.8, 0.2], [0.3, 0.6, -0.1, -0.7]],
]
M_G = [
    [[0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]],
    [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
    [[0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]],
]
UP = [
    [
        [[0, 0.9, 0, 0], [0.4, 0, -1.1, 0], [0, 1.1, 0, -1.2]],
        [[0.6, 0, 0, 0], [0, -1.1, -0.9, 0], [0, -0.9, 0, -1.0]],
    ],
    [
        [[0, 0.9, 0, 0], [1.0, 0, -1.1, 0], [0, 0.6, 0, -0.6]],
        [[0.4, 0, 0, 0], [0.6, -0.7, -0.5, 0], [0, 0, 0, -0.8]],
    ],
]
HALF = {"density": 5 / 12, "layer_sparsity": "uniform"}


def start(manifest, weights, **own):
    tensors = {"w": array(weights), "b": np.zeros(manifest.tensors[1].shape, dtype=np.float32)}
    return SERVER.start(tensors, situation(manifest, own=own))


def flags(model):
    return model.mask.exists["w"].astype(int).tolist()


def test_the_largest_weights_are_shared_at_first():
    model = start(NET, W_G[0], **HALF)
    assert flags(model) == M_G[0]
    np.testing.assert_array_equal(model.own["w"], array(W_G[0]), "w_g is dense")
    np.testing.assert_array_equal(model.tensors["w"], array(W_G[0]) * np.array(M_G[0]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_two_rounds_of_masks(order):
    model = start(NET, W_G[0], **HALF)
    for updates, weights, mask in zip(UP, W_G[1:], M_G[1:], strict=True):
        before, where = model, situation(NET, own=HALF)
        sums = SERVER.aggregation.sums(model, where)
        for place in order:
            fold(sums, NET, array(updates[place]), num_examples=7, bias=1 + place)
        model = SERVER.aggregation.close(model, sums, where)
        np.testing.assert_allclose(model.own["w"], array(weights), rtol=0, atol=1e-6)
        assert flags(model) == mask
        np.testing.assert_array_equal(model.tensors["w"], model.own["w"] * model.mask.exists["w"])
        np.testing.assert_allclose(model.tensors["b"], 1.5)
        assert "b" not in model.own, "what is stored once need not be stored twice"
        nobody = ~np.logical_or.reduce([array(update) != 0 for update in updates])
        assert model.own["w"][nobody].tobytes() == before.own["w"][nobody].tobytes()
        new = model.mask.exists["w"] & ~before.mask.exists["w"]
        assert model.notes == {"positions_replaced": np.count_nonzero(new), "shared": 5}


def test_means_are_weighted_by_examples_and_votes_are_not():
    model, where = start(NET, W_G[0], **HALF), situation(NET, own=HALF)
    sums = SERVER.aggregation.sums(model, where)
    for update, num_examples in zip(UP[0], (300, 100), strict=True):
        fold(sums, NET, array(update), num_examples=num_examples)
    after = SERVER.aggregation.close(model, sums, where)
    np.testing.assert_allclose(after.own["w"][1, 2], (3 * -1.1 - 0.9) / 4, rtol=1e-6)
    np.testing.assert_allclose(after.own["w"][0, 0], 0.6, err_msg="of its holder alone")
    assert sums.votes["w"].reshape(3, 4)[:, :2].tolist() == [[1, 1], [1, 1], [0, 2]]


def test_the_stage_global_keeps_the_mask_and_what_lies_outside():
    model, where = start(NET, W_G[0], **HALF), situation(NET, own=HALF, plan={"stage": "global"})
    sums = SERVER.aggregation.sums(model, where)
    for factor, num_examples in ((2, 1), (6, 3)):
        fold(sums, NET, factor * model.tensors["w"], held=model.mask.exists["w"], num_examples=num_examples, bias=1)
    after = SERVER.aggregation.close(model, sums, where)
    assert after.mask.digest == model.mask.digest
    np.testing.assert_allclose(after.tensors["w"], 5 * model.tensors["w"], rtol=1e-6)
    outside = ~model.mask.exists["w"]
    assert after.own["w"][outside].tobytes() == model.own["w"][outside].tobytes()
    assert after.notes == {"positions_replaced": 0, "shared": 5}


def test_a_stage_global_shares_weights_that_have_become_zero():
    """The mask is not what is not zero."""
    model, where = start(NET, W_G[0], **HALF), situation(NET, own=HALF, plan={"stage": "global"})
    sums = SERVER.aggregation.sums(model, where)
    fold(sums, NET, 0 * model.tensors["w"], held=model.mask.exists["w"])
    assert flags(SERVER.aggregation.close(model, sums, where)) == M_G[0]


# --- 8.3: more than 30 % ----------------------------------------------------------------------------------------------

RULE_W = [0.10, -0.90, 0.80, 0.40, -0.95, 0.30, -0.20, 0.70]
VOTES = [10, 4, 3, 9, 2, 10, 7, 0]
EIGHT = layer_of((1, 8))


def vote(count, *, cohort=10, votes=VOTES, **own):
    rules = {"density": count / 8, "layer_sparsity": "uniform", **own}
    model, where = start(EIGHT, [RULE_W], **rules), situation(EIGHT, own=rules)
    sums = SERVER.aggregation.sums(model, where)
    for place in range(cohort):
        held = np.array([[place < votes_of for votes_of in votes]])
        fold(sums, EIGHT, array([RULE_W]) * held, held=held)
    return flags(SERVER.aggregation.close(model, sums, where))[0]


@pytest.mark.parametrize(
    ("count", "own", "mask"),
    [
        (3, {}, [0, 1, 0, 1, 0, 1, 0, 0]),
        (4, {}, [0, 1, 0, 1, 0, 1, 1, 0]),
        (6, {}, [1, 1, 0, 1, 0, 1, 1, 0]),
        (4, {"vote_percent": 0}, [0, 1, 1, 1, 1, 0, 0, 0]),
        (6, {"fill": True}, [1, 1, 0, 1, 1, 1, 1, 0]),
        (4, {"fill": True}, [0, 1, 0, 1, 0, 1, 1, 0]),
    ],
)
def test_what_more_than_thirty_percent_hold_is_shared(count, own, mask):
    assert vote(count, **own) == mask


def test_without_the_rule_the_largest_would_be():
    """Without the rule of 30 %: nobody's position has a mean of its own, so all eight are in the running."""
    assert vote(4, votes=[10] * 8) == [0, 1, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("cohort", "votes", "shared"), [(3, 1, 1), (5, 1, 0), (5, 2, 1), (10, 3, 0), (10, 4, 1), (1, 1, 1), (7, 2, 0)]
)
def test_thresholds(cohort, votes, shared):
    assert vote(8 - 1, cohort=cohort, votes=[cohort] * 7 + [votes])[7] == shared


def test_among_equals_the_lower_index_is_shared():
    rules = {"density": 0.25, "layer_sparsity": "uniform"}
    model, where = start(EIGHT, [[0.5, -0.5] * 4], **rules), situation(EIGHT, own=rules)
    assert flags(model)[0] == [1, 1, 0, 0, 0, 0, 0, 0]
    sums = SERVER.aggregation.sums(model, where)
    fold(sums, EIGHT, array([[0, -0.5, 0.5, 0.5, 0, 0, 0, 0]]), num_examples=100)
    assert flags(SERVER.aggregation.close(model, sums, where))[0] == [0, 1, 1, 0, 0, 0, 0, 0]


@given(data=st.data())
@examples(max_examples=60, deadline=None, derandomize=True)
def test_every_order_gives_the_same_model_and_no_layer_has_too_many(data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(2, 6)))
    size = shape[0] * shape[1]
    manifest, values = layer_of(shape), st.lists(st.integers(-6, 6), min_size=size, max_size=size)
    count = data.draw(st.integers(1, size))
    own = {
        "density": count / size,
        "layer_sparsity": "uniform",
        "vote_percent": data.draw(st.sampled_from([0, 30, 60, 99])),
        "fill": data.draw(st.booleans()),
    }
    model, where = start(manifest, np.reshape(data.draw(values), shape), **own), situation(manifest, own=own)
    assert model.mask.counts == {"w": count}
    updates = []
    for _ in range(data.draw(st.integers(1, 4))):
        held = np.zeros(size, dtype=bool)
        held[data.draw(st.permutations(range(size)))[:count]] = True
        held = held.reshape(shape)
        updates.append((array(data.draw(values)).reshape(shape) * held, held, data.draw(st.integers(1, 9))))
    results = []
    for order in (updates, updates[::-1]):
        sums = SERVER.aggregation.sums(model, where)
        for weights, held, num_examples in order:
            fold(sums, manifest, weights, held=held, num_examples=num_examples)
        results.append(SERVER.aggregation.close(model, sums, where))
    one, other = results
    assert one.mask.digest == other.mask.digest  # small integers: sums are exact in any order
    assert one.own["w"].tobytes() == other.own["w"].tobytes()
    assert one.mask.counts["w"] == count if own["fill"] else one.mask.counts["w"] <= count
    union = np.logical_or.reduce([held for _, held, _ in updates])
    assert one.own["w"][~union].tobytes() == model.own["w"][~union].tobytes()
    if not own["fill"]:
        assert not (one.mask.exists["w"] & ~union).any()


# --- 8.6: when --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "lengths", "epochs"),
    [(1, (150, 75, 75), 38), (2, (75, 38, 37), 19), (3, (50, 25, 25), 13), (4, (38, 19, 18), 9), (5, (30, 15, 15), 8)],
)
def test_schedules_of_the_card(iterations, lengths, epochs):
    found = stages(300, iterations)
    assert [(each.name, each.last - each.first + 1) for each in found] == [
        *zip(("masks", "global", "personal"), lengths, strict=True)
    ] * iterations
    assert [each.before for each in found[::3]] == [lengths[0] * place for place in range(iterations)]
    for each in found[2::3]:
        own = {"iterations": iterations}
        where = situation(CIFAR, own=own, number=each.first, devices=100, rounds=300, cohort=10, local_epochs=5)
        work = SERVER.schedule.work(where)
        assert (work.kind, work.everyone, work.rounds) == (Kind.personalise, True, lengths[2])
        assert work.plan == {"stage": "personal", "epochs": epochs}


@given(rounds=st.integers(1, 400), iterations=st.integers(0, 9))
def test_stages_cover_every_round_once(rounds, iterations):
    found = stages(rounds, iterations)
    assert [number for each in found for number in range(each.first, each.last + 1)] == list(range(1, rounds + 1))
    assert all(each.first <= each.last for each in found)
    masks = 0
    for each in found:
        if each.name == "masks":
            assert each.before == masks
            masks += each.last - each.first + 1


@pytest.mark.parametrize(("rounds", "iterations"), [(10, 3), (13, 2), (4, 1), (5, 1), (7, 1), (301, 2)])
def test_the_first_iterations_take_the_remainder(rounds, iterations):
    found, start_at = stages(rounds, iterations), 0
    for place in range(iterations):
        length = rounds // iterations + (place < rounds % iterations)
        masks = math.ceil(length / 2)
        shared = math.ceil((length - masks) / 2)
        mine = [each for each in found if start_at < each.first <= start_at + length]
        wanted = [("masks", masks), ("global", shared), ("personal", length - masks - shared)]
        assert [(each.name, each.last - each.first + 1) for each in mine] == [each for each in wanted if each[1]]
        start_at += length


def test_no_iterations_are_masks_alone():
    assert stages(300, 0) == [Stage("masks", 1, 300, 0)]


def plans(**own):
    return {
        number: SERVER.schedule.work(situation(CIFAR, own=own, number=number, rounds=300)).plan
        for number in range(1, 301)
    }


def test_when_weights_are_replaced():
    found = plans()
    assert [number for number, plan in found.items() if "replace" in plan] == [
        first + 10 * place for first in (0, 150) for place in range(1, 8)
    ]
    assert {plan["replace"] for plan in found.values() if "replace" in plan} == {0.01}
    assert found[75] == {"stage": "masks"}
    assert found[76] == found[113] == {"stage": "global"}
    assert found[114]["stage"] == "personal"
    assert [number for number, plan in plans(iterations=0).items() if "replace" in plan] == list(range(10, 301, 10))


def test_annealing_goes_over_all_rounds_of_masks():
    found = plans(anneal="cosine", replaced=0.4)
    for number, place in ((10, 10), (70, 70), (160, 85), (220, 145)):
        assert found[number]["replace"] == pytest.approx(0.2 * (1 + math.cos(math.pi * place / 150)))
    assert plans(anneal="cosine", iterations=0)[300]["replace"] == 0.0


def test_the_epochs_of_few_devices_are_no_more_than_all():
    for devices, cohort, epochs in ((5, 10, 2 * 3), (0, 10, 6), (12, 4, 2), (100, 1, 1)):
        where = situation(CIFAR, number=7, own={"iterations": 1}, rounds=8, cohort=cohort, devices=devices)
        where = Situation(
            where.manifest, where.settings.model_copy(update={"local_epochs": 3}), 7, where.plan, devices=devices
        )
        assert SERVER.schedule.work(where).plan["epochs"] == epochs


def test_the_last_stage_for_everyone():
    def last(number):
        return SERVER.schedule.last_for_everyone(situation(CIFAR, number=number, rounds=300))

    assert [last(number) for number in (0, 114, 149, 150, 151, 299, 300)] == [None, None, None, 150, 150, 150, 300]
    assert SERVER.schedule.last_for_everyone(situation(CIFAR, own={"iterations": 0}, number=300, rounds=300)) is None


# --- 8.7: how many weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sparsity", "rule", "densities", "total", "share"),
    [
        (0.5, "erk", [1, 0.202070, 0.484186, 1, 1], 398_623, 0.4223),
        (0.8, "erk", [0.910644, 0.076503, 0.183311, 0.443495, 1], 159_448, 0.2966),
        (0.5, "uniform_first_dense", [1] + [0.496971] * 4, None, 0.6258),
        (0.8, "uniform_first_dense", [1] + [0.195154] * 4, None, 0.4013),
    ],
)
def test_layers_of_the_card(sparsity, rule, densities, total, share):
    kept = layer_densities(CIFAR, 1 - sparsity, rule)
    assert list(kept.values()) == pytest.approx(densities, abs=5e-7)
    own = {"density": 1 - sparsity, "layer_sparsity": rule}
    model = SERVER.start(initial_values(CIFAR, 0), situation(CIFAR, own=own, rounds=300))
    assert model.mask.counts == layer_counts(CIFAR, 1 - sparsity, rule)
    assert total in (None, model.mask.count)
    macs = [3_763_200, 10_240_000, 614_400, 73_728, 1_920]
    assert sum(macs) == 14_693_248
    assert sum(mac * density for mac, density in zip(macs, kept.values(), strict=True)) / sum(macs) == pytest.approx(
        share, abs=5e-5
    )


# --- settings that cannot be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": 7}, r"rounds: 7 rounds are too few for 2 iterations of three stages; set at least 8"),
        ({"rounds": 8, "local_epochs": 1, "local_steps": 3}, "local_steps: .* set local_epochs instead"),
        (
            {"rounds": 8, "method_settings": {"density": 0.001, "layer_sparsity": "uniform_first_dense"}},
            r"method_settings: density is 0\.001; the first layer has more",
        ),
        ({"rounds": 8, "method_settings": {"density": 0}}, "density"),
        ({"rounds": 8, "method_settings": {"vote_percent": 100}}, "vote_percent"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused(coordinator, settings, said):
    with pytest.raises(BadContent, match=said):
        coordinator.create("dmpfl", **settings)


def test_fewer_rounds_are_enough_for_masks_alone(coordinator):
    coordinator.create("dmpfl", rounds=1, method_settings={"iterations": 0})


# --- whole federations ------------------------------------------------------------------------------------------------

QUICK = {"iterations": 2, "replaced": 0.2, "adjust_interval": 1}
PLANNED = ["masks", "masks", "global", "personal"] * 2


def begin(coordinator, names="abc", *, own=None, **settings):
    given = {"rounds": 8, "min_devices": len(names), "cohort": len(names), **settings}
    coordinator.create("dmpfl", method_settings={**QUICK, **(own or {})}, **given)
    return [coordinator.open_device(name) for name in names]


def kinds(assignments):
    return [assignment.kind.value for assignment in assignments]


def masks_of(session):
    own = session.folder.own
    return tuple(from_bits(DIGITS, own[name].tobytes()) for name in ("mask", "global_mask"))


def check_personal(session):
    """Exactly K_l weights in each layer, and nothing outside."""
    mask, m_g = masks_of(session)
    assert mask.counts == COUNTS
    assert all(m_g.counts[name] <= COUNTS[name] for name in COUNTS)
    for name, exists in mask.exists.items():
        assert not session.personal[name][~exists].any()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_federation_passes_through_all_stages(coordinator, precision):
    sessions = begin(coordinator, precision=precision, local_epochs=2, evaluation_interval=4)
    worked = coordinator.play(*sessions)
    for each in worked:
        training = [(a.kind.value, a.round, a.plan["stage"]) for a in each if a.kind is not Kind.evaluate]
        assert training == [
            ("personalise" if stage == "personal" else "train", number, stage)
            for number, stage in enumerate(PLANNED, start=1)
        ]
        assert kinds(each).count("evaluate") == 2
    info, records = coordinator.info(), coordinator.records.rounds("f")
    assert (info.status, info.round, info.model_version) == ("finished", 8, 6)
    assert [record.updates for record in records] == [3] * 8
    model = coordinator.model()
    assert all(model.mask.counts[name] <= COUNTS[name] for name in COUNTS)
    for session in sessions:
        check_personal(session)
        assert masks_of(session)[1].digest == model.mask.digest
    assert records[0].counts["replaced"] > 0
    for number in (1, 2, 4, 5, 6, 8):
        counts = records[number - 1].counts
        assert counts["personal"] == 3 * sum(COUNTS.values())
        assert 0 < counts["private"] < counts["personal"]
    last = records[-1]
    assert last.accuracy_personal > 0.3
    assert last.accuracy_global > 0.3
    assert all(receipt.others["adaptive"]["accuracy"] > 0.3 for receipt in coordinator.receipts()[-3:])
    assert records[3].parts_up == records[7].parts_up == {}, "nothing of a model goes up"


def test_shared_weights_are_the_global_ones_and_private_ones_are_not(coordinator):
    sessions = begin(coordinator, local_epochs=2)
    coordinator.play(*sessions)
    model = coordinator.model()
    for session in sessions:
        mask, m_g = masks_of(session)
        for name, mine in mask.exists.items():
            both = mine & m_g.exists[name]
            assert session.personal[name][both].tobytes() == model.tensors[name][both].tobytes()
    biases = [session.personal["fc1.bias"] for session in sessions]
    assert not np.array_equal(biases[0], biases[1]), "trained in the stage personal"


def test_biases_stay_shared_where_the_settings_say_so(coordinator):
    sessions = begin(coordinator, own={"personal_unmasked": False})
    coordinator.play(*sessions)
    model = coordinator.model()
    for session in sessions:
        for name in ("conv1.bias", "fc1.bias", "out.bias"):
            assert session.personal[name].tobytes() == model.tensors[name].tobytes()


def test_masks_stay_full_and_the_global_stage_keeps_private_weights(coordinator):
    sessions = begin(coordinator)
    before = {}
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        for session in sessions:
            step = session.step()
            if step.outcome is not Outcome.worked or step.assignment.kind is Kind.evaluate:
                continue
            check_personal(session)
            kept = {**session.personal, **session.folder.own}
            old, stage = before.get(session), step.assignment.plan["stage"]
            if stage == "global":
                assert all(kept[name].tobytes() == old[name].tobytes() for name in kept)
            if stage == "personal":
                assert kept["mask"].tobytes() == old["mask"].tobytes()
                mask, m_g = masks_of(session)
                model = coordinator.model()
                for name, mine in mask.exists.items():
                    shared = mine & m_g.exists[name]
                    assert np.array_equal(session.personal[name][shared], model.tensors[name][shared])
            before[session] = {name: np.array(tensor) for name, tensor in kept.items()}
        coordinator.rounds.advance()


def test_rounds_count_for_several(coordinator):
    """Sixteen rounds in one iteration: eight, four, and one for everyone that counts for four."""
    sessions = begin(coordinator, "ab", own={"iterations": 1}, rounds=16, evaluation_interval=8)
    worked = coordinator.play(*sessions)
    assert [record.round for record in coordinator.records.rounds("f")] == [*range(1, 13), 16]
    assert (coordinator.info().round, coordinator.info().model_version) == (16, 12)
    assert [assignment.round for assignment in worked[0] if assignment.kind is Kind.evaluate] == [8, 16]
    (last,) = [assignment for assignment in worked[0] if assignment.kind is Kind.personalise]
    assert last.plan == {"stage": "personal", "epochs": 4}


def test_everybody_is_asked_in_the_stage_personal(coordinator):
    sessions = begin(coordinator, "abcd", cohort=2, own={"iterations": 1}, rounds=4)
    coordinator.play(*sessions)
    records = coordinator.records.rounds("f")
    assert [len(record.cohort) for record in records] == [2, 2, 2, 4]
    for session in sessions:
        check_personal(session)


def test_without_iterations_there_is_no_stage_for_everyone(coordinator):
    sessions = begin(coordinator, "ab", own={"iterations": 0}, rounds=2)
    assert {kind for each in coordinator.play(*sessions) for kind in kinds(each)} == {"train", "evaluate"}
    late = coordinator.open_device("c")
    assert [kinds(each) for each in coordinator.play(late)] == [["adapt"]]
    assert late.progress.adapted
    check_personal(late)


def test_a_newcomers_mask_is_filled_up(coordinator):
    """With four devices that agree on little, the global mask has fewer weights than there could be."""
    own = {"iterations": 1, "replaced": 0.6, "vote_percent": 60}
    sessions = begin(coordinator, "abcd", own=own, rounds=8, local_epochs=2)
    coordinator.play(*sessions)
    model = coordinator.model()
    assert model.mask.count < sum(COUNTS.values())
    late = coordinator.open_device("e")
    coordinator.play(late)
    mask, m_g = masks_of(late)
    assert mask.counts == COUNTS
    assert m_g.digest == model.mask.digest
    for name, exists in m_g.exists.items():
        assert (mask.exists[name] | ~exists).all()
        new = mask.exists[name] & ~exists
        assert not new.any() or late.personal[name][new].any(), "what is new is trained"


def test_dense_models_are_fedavgs(coordinator, new_coordinator):
    """If all masks are the global one and that has everything, the stage masks is FedAvg."""
    sessions = begin(coordinator, "ab", own={"density": 1.0, "iterations": 0}, rounds=3)
    coordinator.play(*sessions)
    other = new_coordinator()
    other.create("fedavg", rounds=3, min_devices=2)
    other.play(other.open_device("a"), other.open_device("b"))
    for name, tensor in other.model().tensors.items():
        np.testing.assert_allclose(coordinator.model().tensors[name], tensor, atol=1e-6)


# --- who is late ------------------------------------------------------------------------------------------------------


def away(coordinator, session):
    identity = session.identity.device_id
    coordinator.devices.change(identity, ChangeDevice(conditions=Conditions(available=False, reason="out")))


def play_until(coordinator, number, *sessions):
    """Until that round has closed; the next one is open, and nobody has looked at it."""
    coordinator.rounds.advance()
    while coordinator.info().round < number:
        for session in sessions:
            session.step()
        coordinator.rounds.advance()
    assert coordinator.info().round == number


def test_a_device_that_missed_the_personal_stage_catches_up(coordinator):
    first, second, third = begin(coordinator, cohort=2)
    coordinator.rounds.advance()
    away(coordinator, third)
    # The first rounds may have drawn it: what it does not answer, nobody waits for.
    assigned = next_assignment(coordinator, third.identity.device_id).assignment
    if assigned is not None:
        third.step()
    away(coordinator, third)
    play_until(coordinator, 4, first, second)
    record = coordinator.records.rounds("f")[3]
    assert (record.cohort, record.updates) == (("a", "b"), 2)
    step = third.step()
    assert (step.assignment.kind, step.assignment.round) == (Kind.personalise, 4)
    assert step.assignment.plan == {"stage": "personal", "epochs": 1}
    check_personal(third)
    record = coordinator.records.rounds("f")[3]
    assert (sorted(record.cohort), record.updates) == (["a", "b", "c"], 3), "it is in the record"
    assert coordinator.info().round == 4
    assert third.step().outcome is Outcome.idle or third.progress.last_round == 4, "once is enough"


def test_who_missed_it_after_the_end_catches_up_once(coordinator, clock):
    first, second = begin(coordinator, "ab", rounds=4, own={"iterations": 1})
    play_until(coordinator, 3, first, second)
    first.step()
    clock.pass_seconds(coordinator.info().settings.deadline_seconds + 1)
    play_until(coordinator, 4)
    coordinator.play(first)
    assert coordinator.info().round == 4
    record = coordinator.records.rounds("f")[-1]
    assert (record.updates, record.expired) == (1, 1)
    (worked,) = coordinator.play(second)
    assert "personalise" in kinds(worked)
    assert kinds(worked).count("personalise") == 1
    check_personal(second)
    assert second.step().outcome is Outcome.over
    assert coordinator.records.rounds("f")[-1].updates == 2
    assert coordinator.records.rounds("f")[-1].expired == 0


def test_late_work_is_dropped_when_the_device_is_drawn(coordinator, clock):
    first, second = begin(coordinator, "ab")
    play_until(coordinator, 3, first, second)
    first.step()
    clock.pass_seconds(coordinator.info().settings.deadline_seconds + 1)
    play_until(coordinator, 4, first)
    second_id = second.identity.device_id
    late = next_assignment(coordinator, second_id).assignment
    assert (late.kind, late.round) == (Kind.personalise, 4)
    play_until(coordinator, 5, first)
    now = next_assignment(coordinator, second_id).assignment
    assert (now.kind, now.round) == (Kind.train, 6)
    (worked,) = coordinator.play(first, second)[1:]
    assert [(each.kind.value, each.round) for each in worked[:3]] == [
        ("train", 6),
        ("train", 7),
        ("personalise", 8),
    ]
    assert coordinator.records.rounds("f")[3].expired == 1


def test_a_device_that_arrives_after_the_end_gets_missed_work(coordinator):
    coordinator.play(*begin(coordinator, "ab", rounds=8))
    late = coordinator.open_device("c")
    (worked,) = coordinator.play(late)
    assert [(each.kind.value, each.round) for each in worked] == [("personalise", 8)]
    assert worked[0].plan == {"stage": "personal", "epochs": 1}
    check_personal(late)
    assert not coordinator.model().own.keys() - set(COUNTS)
    assert late.step().outcome is Outcome.over
    (report,) = [each for each in coordinator.records.reports("f", 8) if each.device == "c"]
    assert report.report.counts["personal"] == sum(COUNTS.values())


def test_a_small_budget_is_not_drawn_for_the_stage_personal_either(coordinator):
    sessions = begin(coordinator, "ab", own={"iterations": 1}, rounds=4)
    small = coordinator.open_device("c", budget=0.2)
    worked = coordinator.play(*sessions, small)
    assert set(kinds(worked[2])) == {"evaluate", "adapt"}


def test_a_device_that_the_stage_global_meets_first_keeps_the_global_model(coordinator):
    first, second = begin(coordinator, "ab", own={"iterations": 1}, rounds=8, cohort=1)
    away(coordinator, second)
    play_until(coordinator, 4, first)
    second.step()  # it looks
    first.step()
    away(coordinator, first)
    coordinator.rounds.advance()
    before = coordinator.model()
    step = second.step()
    assert step.assignment.plan == {"stage": "global"}
    check_personal(second)
    for name, exists in masks_of(second)[0].exists.items():
        assert np.array_equal(exists, before.mask.exists[name])
        assert second.personal[name].tobytes() == before.tensors[name].tobytes()


# --- reopening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [9, 10, 11, 12, 16])
def test_a_reopened_federation_ends_where_it_should(coordinator, rounds):
    """The stages are cut anew: what was its end may lie in the middle of a stage personal."""
    sessions = begin(coordinator, "ab", own={"iterations": 1})
    coordinator.play(*sessions)
    coordinator.reopen(rounds)
    coordinator.play(*sessions)
    assert (coordinator.info().status, coordinator.info().round) == ("finished", rounds)
    for session in sessions:
        check_personal(session)
    assert all(record.round <= rounds for record in coordinator.records.rounds("f"))


def without_header(parts):
    return sum(count for name, count in parts.items() if name != "header")


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["erk", "uniform_first_dense"])
def test_bytes_and_flops_are_the_cards(coordinator, rule):
    """3.7: at S = 0.5, values of float32 and a bit for every maskable weight, at most 1.02 times.

    Digits is a small network: what frames a bundle and its report is left out, the manifest's parts counted.
    """
    own = {"iterations": 1, "layer_sparsity": rule, "replaced": 0.01, "adjust_interval": 2}
    sessions = begin(coordinator, "ab", own=own, rounds=8, local_epochs=2)
    coordinator.play(*sessions)
    counts = layer_counts(DIGITS, 0.5, rule)
    kept, maskable = sum(counts.values()), sum(spec.size for spec in DIGITS.maskable)
    unmasked = DIGITS.shared_values - maskable
    values, bits = 4 * (kept + unmasked), math.ceil(maskable / 8)
    down = [values + bits] * 4 + [values + bits, values] + [values]
    up = [values + bits] * 4 + [values] * 2 + [0]
    records = coordinator.records.rounds("f")
    assert [record.round for record in records] == [1, 2, 3, 4, 5, 6, 8]
    for record, most_down, most_up in zip(records, down, up, strict=True):
        assert without_header(record.parts_down) <= 1.02 * 2 * most_down
        assert without_header(record.parts_up) <= 1.02 * 2 * most_up
    assert sum(sum(each.parts_up.values()) for each in records) >= 0.9 * 2 * sum(up[4:])
    for number, epochs in ((1, 2), (5, 2), (8, 2 * 2)):
        for report in coordinator.records.reports("f", number):
            if report.kind is Kind.evaluate:
                continue
            dense = training_flops(DIGITS, report.report.num_examples * epochs)
            macs = [layer.positions * spec.size for layer, spec in zip(LAYERS, DIGITS.maskable, strict=True)]
            densities = layer_densities(DIGITS, 0.5, rule).values()
            share = sum(mac * density for mac, density in zip(macs, densities, strict=True)) / sum(macs)
            replacing = growth_flops(DIGITS, 16, coordinator.model().mask)
            assert report.report.training_flops <= 1.02 * share * dense + replacing


def test_flops_of_replacing_are_one_dense_gradient_more(coordinator):
    sessions = begin(coordinator, "a", own={"iterations": 1, "adjust_interval": 1}, rounds=4, local_epochs=2)
    before = coordinator.model()
    coordinator.rounds.advance()
    sessions[0].step()
    (report,) = coordinator.records.reports("f", 1)
    examples_seen = report.report.num_examples
    batch = (examples_seen - 1) % 16 + 1
    wanted = training_flops(DIGITS, 2 * examples_seen, weight_gradients=before.mask) + growth_flops(
        DIGITS, batch, before.mask
    )
    assert report.report.training_flops == wanted


# --- updates that are refused -----------------------------------------------------------------------------------------


def changed(mask, *, drop=1, grow=1, name="fc1.weight"):
    exists = {each: array.copy() for each, array in mask.exists.items()}
    flat = exists[name].reshape(-1)
    here, there = np.flatnonzero(flat), np.flatnonzero(~flat)
    flat[here[:drop]] = False
    flat[there[:grow]] = True
    return ElementMask(exists)


def send(coordinator, session, mask):
    identity = session.identity.device_id
    assignment = next_assignment(coordinator, identity).assignment
    model = coordinator.model()
    report = UpdateReport(num_examples=9, status="active", steps=1, train_loss=0.5).model_dump_json()
    body = bundle.encode(DIGITS, pack(DIGITS, model.tensors, mask), mask, report=report, known=model.mask)
    return coordinator.acceptance.accept_update(assignment.assignment_id, identity, body)


def test_masks_of_ones_own_are_for_the_stage_masks_and_have_their_numbers(coordinator, without_rest):
    first, second = begin(coordinator, "ab", own={"iterations": 1}, rounds=4)
    coordinator.rounds.advance()
    count, m_g = COUNTS["fc1.weight"], coordinator.model().mask
    for drop, grow in ((1, 0), (0, 1), (3, 1)):
        said = rf"mask: fc1\.weight has {count - drop + grow} weights, but must have {count}"
        with pytest.raises(BadContent, match=said):
            send(coordinator, first, changed(m_g, drop=drop, grow=grow))
    with pytest.raises(BadContent, match="mask"):
        send(coordinator, first, None)
    assert send(coordinator, first, changed(m_g, drop=30, grow=30))
    assert send(coordinator, second, m_g)
    coordinator.rounds.advance()
    assert coordinator.info().round == 1
    m_g = coordinator.model().mask
    # The next round replaces nothing, and still takes them.
    assert send(coordinator, first, _refilled(m_g))
    assert send(coordinator, second, _refilled(m_g))
    coordinator.rounds.advance()
    assert coordinator.records.rounds("f")[-1].round == 3
    m_g = coordinator.model().mask
    with pytest.raises(BadContent, match=r"^mask: "):
        send(coordinator, first, changed(m_g))
    assert send(coordinator, first, m_g)


def _refilled(mask):
    """A mask of K_l in each layer that holds the global one."""
    exists = {name: array.copy() for name, array in mask.exists.items()}
    for name, flat in ((name, array.reshape(-1)) for name, array in exists.items()):
        flat[np.flatnonzero(~flat)[: COUNTS[name] - np.count_nonzero(flat)]] = True
    return ElementMask(exists)


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["masks", "global", "personal"])
def test_a_device_that_died_before_it_sent_goes_on_in_the_same_stage(coordinator, new_coordinator, stage):
    def end(coordinator, victim_at):
        first, second = begin(coordinator, "ab", own={"iterations": 1}, rounds=8)
        killed = False
        while coordinator.info().status != "finished":
            coordinator.rounds.advance()
            for place in range(2):
                session = (first, second)[place]
                opened = (
                    next_assignment(coordinator, session.identity.device_id, asked=False).assignment
                    if coordinator.info().status == "running"
                    else None
                )
                plan = opened.plan.get("stage") if opened else None
                if place == 0 and not killed and victim_at and plan == victim_at:
                    first.transport.broken = True
                    with pytest.raises(ConnectionError):
                        first.step()
                    first.folder.close()
                    first = coordinator.open_device("a")
                    assert first.progress.pending is not None
                    killed = True
                else:
                    session.step()
        assert killed == (victim_at is not None)
        return first, second

    undisturbed, disturbed = end(coordinator, None), end(other := new_coordinator(), stage)
    assert coordinator.info().model_sha256 == other.info().model_sha256
    for one, two in zip(undisturbed, disturbed, strict=True):
        assert all(one.personal[name].tobytes() == two.personal[name].tobytes() for name in one.personal)
        own, same = one.folder.own, two.folder.own
        assert own.keys() == same.keys()
        assert all(own[name].tobytes() == same[name].tobytes() for name in own)
        assert one.progress.memory == two.progress.memory


def test_coordinators_know_nothing_of_a_device(coordinator):
    """D21: masks and weights of a device are in the sums alone."""
    sessions = begin(coordinator, "ab")
    coordinator.play(*sessions)
    assert set(coordinator.model().own) == set(COUNTS)
    assert not list(coordinator.store.blobs.keys("1/updates"))
