"""FedSGC and FedDST: their server half against numbers worked out by hand, and whole federations of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from edge_sdk.device.session import Outcome
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.methods import GlobalModel, Situation, load_method
from sparrow.coordinator.models.global_models import Models
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import count_values, pack
from sparrow.protocol.messages import ChangeDevice, Conditions, Kind, UpdateReport
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import device_interval, interval, layer_counts, random_mask

from .fakes import next_assignment
from .sessions import CoordinatorWithDevices

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits").manifest
DENSITY = 0.3
COUNTS = layer_counts(DIGITS, DENSITY)
QUICK = {"density": DENSITY, "adjust_interval": 2, "device_interval": 1, "over_pruning": 0.1}
"""Re-adjusts in every second round, the last excepted, and so little that what changed is shorter than the mask."""


# --- the server half ------------------------------------------------------------------

LAYER = Manifest(
    task="v84",
    input_shape=(6,),
    output_shape=(1,),
    tensors=(TensorSpec(name="w", shape=(1, 6)),),
    layers=(Layer(name="fc", kind="linear", tensors=("w",)),),
)
THETA = [0.5, -0.2, 0.1, 0, 0, 0]
UPDATES = [
    (100, [0.6, -0.1, 0, 0.4, 0, 0], [1, 1, 0, 1, 0, 0]),
    (200, [0.4, 0, 0.2, 0.1, 0, 0], [1, 0, 1, 1, 0, 0]),
    (100, [0.5, 0.3, 0, 0, -0.8, 0], [1, 1, 0, 0, 1, 0]),
]
D_PRE = [-1, 1, 1, 1, -1, 0]


def mask_of(flags):
    return ElementMask({"w": np.array([flags], dtype=bool)})


def situation(method="fedsgc", manifest=LAYER, *, own=None, **more):
    """A round of a federation with these settings of the method, the others being its defaults."""
    federation = {name: more.pop(name) for name in ("rounds", "cohort", "local_epochs", "local_steps") if name in more}
    complete = load_method(method).settings_type.model_validate(own or {}).model_dump()
    return Situation(manifest, FederationSettings(method=method, method_settings=complete, **federation), **more)


def close(updates=UPDATES, *, method="fedsgc", before=None, kept=3, num_examples=1000, **own):
    """The model that follows. For more than three weights one of value 0, at index 5, exists too: it wins nothing."""
    server = load_method(method)
    flags = [1, 1, 1, 0, 0, kept == 4]
    start = {"replaced": np.zeros(1, dtype=np.int64)}
    model = before or GlobalModel({"w": np.array([THETA], dtype=np.float32)}, mask_of(flags), start)
    where = situation(method, own=own, round=1, num_examples=num_examples)
    sums = server.aggregation.sums(model, where)
    for examples, values, held in updates:
        dense, mask = np.array([values], dtype=np.float32), mask_of(held)
        sums.fold_in_place(pack(LAYER, {"w": dense}, mask), mask, examples)
    return server.aggregation.close(model, sums, where)


def flat(model):
    """(mask, values, directions) as lists."""
    directions = model.own["direction:w"]
    assert directions.dtype == np.int8
    return model.mask.exists["w"][0].astype(int).tolist(), model.tensors["w"][0], directions.tolist()


V84 = [
    ("all", 3, [1, 0, 0, 1, 1, 0], [0.49, 0, 0, 0.2, -0.8, 0]),
    ("all", 4, [1, 1, 0, 1, 1, 0], [0.49, -0.125, 0, 0.2, -0.8, 0]),
    ("none", 3, [1, 0, 0, 1, 1, 0], [0.475, 0, 0, 0.2, -0.8, 0]),
    ("none", 4, [1, 0, 1, 1, 1, 0], [0.475, 0, 0.2, 0.2, -0.8, 0]),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(("rest", "kept", "mask", "theta"), V84)
def test_v84_in_any_order(rest, kept, mask, theta, order):
    model = close([UPDATES[place] for place in order], rest=rest, kept=kept)
    exists, values, directions = flat(model)
    assert exists == mask
    np.testing.assert_allclose(values, np.array(theta, dtype=np.float32), rtol=1e-7)
    assert directions == D_PRE
    assert values.dtype == np.float32


def test_v84_what_the_round_counted():
    assert close(rest="all").notes == {"positions_replaced": 2, "union": 5}
    assert close(rest="all").own["replaced"].tolist() == [2]
    assert close(rest="none").notes == {"positions_replaced": 2, "union": 5}


def test_v84_sums():
    server, where = load_method("fedsgc"), situation(num_examples=1000)
    model = GlobalModel({"w": np.array([THETA], dtype=np.float32)}, mask_of([1, 1, 1, 0, 0, 0]))
    sums = server.aggregation.sums(model, where)
    for examples, values, held in UPDATES:
        mask = mask_of(held)
        sums.fold_in_place(pack(LAYER, {"w": np.array([values], dtype=np.float32)}, mask), mask, examples)
    ((_, numerator, weights),) = sums.totals()
    assert weights.tolist() == [400, 200, 200, 300, 100, 0]
    np.testing.assert_allclose(numerator, [190, 20, 40, 60, -80, 0], rtol=1e-6)


def test_directions_after_the_prune_say_towards_zero_where_it_removed():
    assert flat(close(rest="all", direction="post_prune"))[2] == [-1, 1, -1, 1, -1, 0]


def test_what_does_not_exist_is_a_zero_without_sign():
    for rest, kept, mask, _ in V84:
        values = flat(close(rest=rest, kept=kept))[1]
        assert values[np.array(mask) == 0].tobytes() == bytes(4 * mask.count(0))


# --- the server half: its properties (8.6) ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2, 3, 1000])
@pytest.mark.parametrize("rest", ["all", "none"])
def test_more_examples_everywhere_change_nothing(rest, factor):
    scaled = [(factor * examples, values, held) for examples, values, held in UPDATES]
    one, other = close(rest=rest), close(scaled, rest=rest, num_examples=factor * 1000)
    assert flat(one)[0] == flat(other)[0]
    assert flat(one)[2] == flat(other)[2]
    np.testing.assert_allclose(flat(one)[1], flat(other)[1], rtol=1e-6)


@pytest.mark.parametrize("rest", ["all", "none"])
def test_a_mask_that_nobody_changes_stays(rest):
    held = [1, 1, 1, 0, 0, 0]
    updates = [(100, [0.6, 0.0, 0.1, 0, 0, 0], held), (300, [0.2, -0.1, 0.1, 0, 0, 0], held)]
    model = close(updates, rest=rest)
    assert flat(model)[0] == held
    assert model.notes == {"positions_replaced": 0, "union": 3}
    assert flat(model)[2] == [-1, 1, 0, 0, 0, 0], "0 where nothing moved"


@pytest.mark.parametrize("known", [400, 390, 0])
def test_where_everybody_answers_nobody_rests(known):
    """Nor where the devices have more examples than they told when they enrolled."""
    one, other = close(rest="all", num_examples=known), close(rest="none")
    assert flat(one)[0] == flat(other)[0]
    assert flat(one)[1].tobytes() == flat(other)[1].tobytes()


def test_feddst_is_fedsgc_without_directions_and_rest():
    one, other = close(method="feddst"), close(guided_share=0.0, rest="none")
    assert (one.mask.digest, "direction:w" in one.own) == (other.mask.digest, False)
    assert one.tensors["w"].tobytes() == other.tensors["w"].tobytes()
    assert one.notes == other.notes
    with pytest.raises(ValueError, match="rest"):
        close(method="feddst", rest="all")


def test_those_who_do_not_answer_keep_a_position_alive():
    """The whole cohort drops index 0, the largest; with the rest it stays as it was, without them it goes."""
    updates = [(100, [0, -0.1, 0.1, 0.2, 0, 0], [0, 1, 1, 1, 0, 0])]
    mask, values, directions = flat(close(updates, rest="all"))
    assert mask[0] == 1
    assert (values[0], directions[0]) == (np.float32(0.5), 0), "nobody who trained it has moved it"
    mask, values, directions = flat(close(updates, rest="none"))
    assert (mask[0], values[0], directions[0]) == (0, 0, 0)


def test_what_is_not_masked_rests_like_the_weights():
    manifest = Manifest.model_validate(
        {**LAYER.model_dump(), "tensors": [*LAYER.model_dump()["tensors"], {"name": "b", "shape": (1,)}]}
    )
    mask = mask_of([1, 1, 1, 0, 0, 0])
    old = {"w": np.array([THETA], dtype=np.float32), "b": np.array([4], dtype=np.float32)}
    start = GlobalModel(old, mask, {"replaced": np.zeros(1, dtype=np.int64)})
    for rest, wanted in (("all", (1000 * 4 - 250 * 4 + 250 * 8) / 1000), ("none", 8)):
        server, where = load_method("fedsgc"), situation(own={"rest": rest}, manifest=manifest, num_examples=1000)
        sums = server.aggregation.sums(start, where)
        sums.fold_in_place(pack(manifest, {**old, "b": np.array([8], dtype=np.float32)}, mask), mask, 250)
        after = server.aggregation.close(start, sums, where)
        assert after.tensors["b"].tolist() == [wanted]
        assert set(after.mask.exists) == {"w"}


def test_with_a_memory_the_last_direction_stays():
    first = close(direction_memory=True)
    held = flat(first)[0]
    assert held == [1, 0, 0, 1, 1, 0]
    values = flat(first)[1].tolist()
    again = [(100, [values[0] + 1, 0, 0, values[3], values[4] - 1, 0], held)]
    assert flat(close(again, before=first, direction_memory=True))[2] == [1, 1, 1, 1, -1, 0]
    assert flat(close(again, before=first))[2] == [1, 0, 0, 0, -1, 0]


@pytest.mark.parametrize("remember", [False, True])
@pytest.mark.parametrize("direction", ["pre_prune", "post_prune"])
@pytest.mark.parametrize("examples", [30, 100])
def test_an_ordinary_round_ends_as_one_in_which_anybody_may_bring_another_mask(
    examples, direction, remember, monkeypatch
):
    chance = np.random.default_rng(examples)
    own = {"density": 0.2, "direction": direction, "direction_memory": remember}
    server, where = load_method("fedsgc"), situation(own=own, manifest=DIGITS, num_examples=examples)
    model = server.start(initial_values(DIGITS, 0), where)
    model.own.update(
        {f"direction:{name}": chance.integers(-1, 2, each.size, np.int8) for name, each in model.mask.exists.items()}
    )
    sums = server.aggregation.sums(model, where)
    for _ in range(3):
        values = pack(DIGITS, model.tensors, model.mask)
        values += chance.integers(-1, 2, len(values)).astype(np.float32)  # some stay
        sums.fold_in_place(values, model.mask, 10)
    short = server.aggregation.close(model, sums, where)
    monkeypatch.setattr(type(sums), "alike", False)
    whole = server.aggregation.close(model, sums, where)
    assert short.notes == whole.notes
    assert short.mask.digest == whole.mask.digest
    for one, other in ((short.tensors, whole.tensors), (short.own, whole.own)):
        assert {name: (each.dtype, each.shape, each.tobytes()) for name, each in one.items()} == {
            name: (each.dtype, each.shape, each.tobytes()) for name, each in other.items()
        }


@pytest.mark.parametrize("seed", range(4))
def test_every_layer_keeps_its_number_whatever_comes(seed):
    chance = np.random.default_rng(seed)
    server, where = load_method("fedsgc"), situation(own={"density": 0.2}, manifest=DIGITS, num_examples=50)
    model = server.start(initial_values(DIGITS, seed), where)
    counts = dict(model.mask.counts)
    sums = server.aggregation.sums(model, where)
    for number in range(3):
        mask = random_mask(DIGITS, counts, 100 * seed + number)
        values = chance.normal(size=count_values(DIGITS, mask)).astype(np.float32)
        sums.fold_in_place(values, mask, 10)
    after = server.aggregation.close(model, sums, where)
    assert after.mask.counts == counts == layer_counts(DIGITS, 0.2)
    for name, exists in after.mask.exists.items():
        assert not after.tensors[name][~exists].any()
    assert after.notes["positions_replaced"] == sum(
        int(np.count_nonzero(after.mask.exists[name] & ~model.mask.exists[name])) for name in counts
    )


# --- the server half: settings, plans, directions ---------------------------------------------------------------------


def test_the_first_model_is_that_of_the_seed_under_the_first_mask():
    where = situation(own={"density": DENSITY}, manifest=DIGITS)
    tensors = initial_values(DIGITS, 0)
    model = load_method("fedsgc").start(tensors, where)
    assert model.mask.digest == random_mask(DIGITS, COUNTS, 0).digest
    for spec in DIGITS.shared:
        exists = model.mask.exists.get(spec.name, np.ones(spec.shape, bool))
        np.testing.assert_array_equal(model.tensors[spec.name], np.where(exists, tensors[spec.name], 0))
    largest = load_method("fedsgc").start(
        tensors, situation(own={"density": DENSITY, "initial_mask": "magnitude"}, manifest=DIGITS)
    )
    for name, exists in largest.mask.exists.items():
        assert np.count_nonzero(exists) == COUNTS[name]
        sizes = np.abs(tensors[name])
        assert exists.all() or sizes[exists].min() >= sizes[~exists].max()


@pytest.mark.parametrize(
    ("own", "manifest", "more", "said"),
    [
        ({}, DIGITS, {"local_steps": 3}, "local_steps: .* set local_epochs instead"),
        ({}, Manifest.model_validate({**DIGITS.model_dump(), "layers": ()}), {}, "no linear layer or convolution"),
    ],
)
def test_what_cannot_be_trained_sparsely_is_refused(own, manifest, more, said):
    where = situation(own=own, manifest=manifest, **more)
    with pytest.raises(BadContent, match=said):
        load_method("fedsgc").start(initial_values(DIGITS, 0), where)


@pytest.mark.parametrize(
    "own",
    [{"density": 0}, {"density": 1.1}, {"over_pruning": 1}, {"guided_share": 2}, {"rest": 1}, {"adjust_interval": -1}],
)
def test_settings_out_of_range_are_refused(own):
    with pytest.raises(ValueError, match=next(iter(own))):
        situation(own=own)


def test_the_papers_values_are_a_preset_that_gives_way():
    settings = load_method("fedsgc").settings_type
    plain, paper = settings(), settings(preset="paper")
    assert (plain.rest, paper.rest, settings(preset="paper", rest="none").rest) == ("none", "all", "none")
    assert (paper.density, paper.over_pruning, paper.guided_share) == (0.2, 0.5, 0.01)
    assert (plain.direction, plain.adjust_at) == ("pre_prune", "penultimate")
    assert (paper.direction, paper.adjust_at) == ("post_prune", "end")
    assert settings.model_validate(paper.model_dump()) == paper, "completed settings stay what they are"


NUMBERS = {"rounds": 40, "local_epochs": 5, "cohort": 10, "min_devices": 100}
"""Those of the run that was called the paper's, and replaced no weight: T_c = 20."""
PAPER = {"preset": "paper"}


@pytest.mark.parametrize(
    ("method", "own", "more", "said"),
    [
        ("fedsgc", PAPER, {}, r"device_interval: .* every 20 of its epochs, until round 20 .* T_c = 20 .* below 20,"),
        ("feddst", {"device_interval": 5}, {"rounds": 10}, r"every 5 of its epochs.* T_c = 5 .* below 5, more rounds"),
        (
            "fedsgc",
            {**PAPER, "device_interval": 1},
            {"rounds": 20},
            r"adjust_interval: weights are replaced every 20 .* never in 20 .*more than 20 rounds",
        ),
        ("feddst", {"adjust_interval": 2, "device_interval": 11}, {"rounds": 4, "min_devices": 1}, "below 11,"),
        (
            "feddst",
            {},
            {"rounds": 1, "local_epochs": 1},
            "adjust_interval: weights are replaced every 1 rounds .* never in 1",
        ),
        ("prunefl", {"adjust_interval": 50}, {}, "replaced every 50 rounds .* never in 40"),
        ("prunefl", {}, {"rounds": 1}, "never in 1"),
        ("dmpfl", {"adjust_interval": 10}, {"rounds": 30}, "every 10 rounds of the stage masks, which has 8: never"),
        ("dmpfl", {"adjust_interval": 8, "iterations": 1, "anneal": "cosine"}, {"rounds": 16}, "to 7 or less"),
    ],
)
def test_settings_by_which_no_weight_could_be_replaced_are_refused(coordinator, method, own, more, said):
    with pytest.raises(BadContent, match=said):
        coordinator.create(method, method_settings=own, **{**NUMBERS, **more})


@pytest.mark.parametrize(
    ("method", "own", "more"),
    [
        ("fedsgc", {**PAPER, "of_rounds": 400}, {}),
        ("fedsgc", {**PAPER, "adjust_interval": 0}, {}),
        ("fedsgc", {**PAPER, "over_pruning": 0.0}, {}),
        ("fedsgc", {**PAPER, "density": 1.0}, {}),
        ("fedsgc", PAPER, {"rounds": 50}),
        ("feddst", {"adjust_interval": 2, "device_interval": 10}, {"rounds": 4, "min_devices": 1}),
        ("feddst", {}, {"rounds": 2, "min_devices": 10}),
        ("prunefl", {"adjust_interval": 0}, {}),
        ("prunefl", {}, {"rounds": 2}),
        ("dmpfl", {"adjust_interval": 0}, {}),
        ("dmpfl", {"adjust_interval": 20, "replaced": 0.0}, {}),
        ("dmpfl", {"adjust_interval": 7, "iterations": 1, "anneal": "cosine"}, {"rounds": 16}),
        ("dmpfl", {}, {"rounds": 8}),
    ],
)
def test_settings_that_replace_weights_or_say_that_they_do_not_are_taken(coordinator, method, own, more):
    coordinator.create(method, method_settings=own, **{**NUMBERS, **more})


def test_a_shortened_run_scales_both_intervals_with_the_expected_epochs():
    """ΔR, ΔT and T_c of the paper are 20, 20 and 200 in 400 rounds; in a tenth of them 2, 2 and 20."""
    server, own = load_method("fedsgc"), {**PAPER, "of_rounds": 400}
    plans = {}
    for rounds in (40, 400, 4000):
        where = {"own": own, "rounds": rounds, "cohort": 10, "local_epochs": 5, "devices": 100}
        given = [server.schedule.work(situation(round=number, **where)).plan for number in range(1, rounds)]
        first = next(number for number, plan in enumerate(given, start=1) if plan)
        expected = given[first - 1]["expected_epochs"]
        plans[rounds] = first, device_interval(20, 400, rounds, expected), expected
    assert plans == {40: (2, 2, 20), 400: (20, 20, 200), 4000: (20, 20, 2000)}


def test_intervals_that_are_not_given_fit_the_run():
    assert [interval("auto", 5, length) for length in (1, 2, 3, 4, 9, 10, 400)] == [1, 1, 1, 2, 4, 5, 5]
    assert (interval(0, 5, 10), interval(7, 5, 10), interval(7, 5, 10, 0.01)) == (0, 7, 1)


@pytest.mark.parametrize("method", ["fedsgc", "feddst"])
def test_without_re_adjusting_rounds_the_mask_stays(coordinator, method):
    sessions = start(coordinator, method, own={"adjust_interval": 0}, rounds=3)
    history = play(coordinator, *sessions)
    assert len({model.mask.digest for model in history}) == 1
    assert coordinator.info().warning is None, "it was asked for"


@pytest.mark.parametrize("interval", [1, 2, 5, 20])
def test_rounds_re_adjust_at_the_interval_but_for_the_last(interval):
    server = load_method("fedsgc")
    where = {"own": {"adjust_interval": interval}, "rounds": 20, "cohort": 3, "local_epochs": 4, "devices": 10}
    planned = [bool(server.schedule.work(situation(round=number, **where)).plan) for number in range(1, 21)]
    assert planned == [number % interval == 0 and number < 20 for number in range(1, 21)]


def test_expected_epochs_are_those_of_the_cohorts_share():
    """E·R·cohort/N, and E·R where the cohort is everybody; never 0."""

    def expected(**more):
        where = {"own": {"adjust_interval": 1}, "round": 1, **more}
        return load_method("fedsgc").schedule.work(situation(**where)).plan["expected_epochs"]

    assert expected(local_epochs=5, rounds=400, cohort=10, devices=100) == 200
    assert expected(local_epochs=2, rounds=10, cohort=10, devices=4) == 20
    assert expected(local_epochs=2, rounds=10, cohort=10, devices=0) == 20
    assert expected(local_epochs=1, rounds=2, cohort=1, devices=1000) == 1


def test_directions_go_down_in_re_adjusting_rounds_where_they_are_wanted():
    server, model = load_method("fedsgc"), close(rest="all")
    asked = {"plan": {"expected_epochs": 9}, "round": 20}
    assert server.payload_parts(model, situation(round=3)) == {}
    assert server.payload_parts(model, situation(**asked))["signs"].tolist() == [-1, 1, -1], (
        "of what exists: 0, 3 and 4"
    )
    assert server.payload_parts(model, situation(own={"direction_memory": True}, **asked))["signs"].tolist() == D_PRE
    assert server.payload_parts(model, situation(own={"adjust_interval": 1}, **asked))["signs"].tolist() == D_PRE
    assert server.payload_parts(model, situation(own={"guided_share": 0}, **asked)) == {}
    assert load_method("feddst").payload_parts is None
    first = GlobalModel(model.tensors, model.mask, {})
    assert server.payload_parts(first, situation(**asked))["signs"].tolist() == [0, 0, 0], "nothing has moved yet"


def test_the_warning_counts_rounds_that_re_adjusted():
    server = load_method("fedsgc")
    still = close([(1, THETA, [1, 1, 1, 0, 0, 0])])
    own = {"adjust_interval": 2}
    said = [server.warning(still, situation(own=own, rounds=4, round=number)) for number in range(5)]
    assert said[:2] == [None, None]
    assert all(text.startswith("no weight has been replaced in 1 re-adjusting rounds") for text in said[2:])
    said = server.warning(still, situation(own=own, rounds=2, round=1))
    assert said == "none of 2 rounds replaces weights; set an adjust_interval of less than 2", "none is to come"
    assert server.warning(close(), situation(own=own, rounds=4, round=4)) is None


# --- whole federations ------------------------------------------------------------------------------------------------


def start(coordinator, method="fedsgc", names="ab", own=None, **settings):
    """A federation and its devices. Two epochs, so that what is due at the end of a round is done after the first."""
    usual = {"rounds": 6, "local_epochs": 2, "min_devices": len(names)}
    coordinator.create(method, method_settings={**QUICK, **(own or {})}, **{**usual, **settings})
    return [coordinator.open_device(name) for name in names]


def play(coordinator, *sessions):
    """Everything to the end; the global models, version after version."""
    history = [coordinator.model()]
    moved = True
    while moved:
        moved = coordinator.rounds.advance()
        if coordinator.info().model_version == len(history):
            history.append(coordinator.model())
        for session in sessions:
            moved |= session.step().outcome is Outcome.worked
    assert coordinator.info().model_version == len(history) - 1
    return history


def header(body, take_apart):
    """What a bundle says of itself: form of its mask, and its parts."""
    found, _ = take_apart(body)
    description = json.loads(found["__metadata__"]["mask"])
    return SimpleNamespace(
        form=description["form"], digest=description.get("digest"), parts=set(found) - {"__metadata__"}
    )


def held_masks(coordinator):
    """Digests of the masks on the coordinator's disk."""
    return {key.rpartition("/")[2] for key in coordinator.store.blobs.keys("1/masks")}


@pytest.mark.parametrize("method", ["fedsgc", "feddst"])
def test_the_mask_keeps_its_numbers_and_its_places_change(coordinator, method, take_apart):
    sessions = start(coordinator, method)
    history = play(coordinator, *sessions)
    assert (coordinator.info().status, coordinator.info().round, coordinator.info().warning) == ("finished", 6, None)
    for model in history:
        assert model.mask.counts == COUNTS
        for name, exists in model.mask.exists.items():
            assert not model.tensors[name][~exists].any()
    digests = [model.mask.digest for model in history]
    assert digests[0] == digests[1] != digests[2] == digests[3] != digests[4] == digests[5] == digests[6]
    records = coordinator.records.rounds("f")
    for record, before, after in zip(records, history, history[1:], strict=False):
        adjusting = record.round in (2, 4)
        replaced = sum(np.count_nonzero(after.mask.exists[n] & ~before.mask.exists[n]) for n in COUNTS)
        assert record.notes["positions_replaced"] == replaced
        assert (replaced > 0) == adjusting
        assert record.notes["union"] >= sum(COUNTS.values()) + replaced - 1
        assert (record.notes["union"] > sum(COUNTS.values())) == adjusting
        assert record.counts.get("adjusted", 0) == (2 if adjusting else 0), "both devices, once"
        assert ("mask" in record.parts_up) == adjusting
        # What goes down: the mask at first and after it changed, directions where they are wanted.
        assert ("mask" in record.parts_down) == (record.round in (1, 3, 5))
        assert ("signs" in record.parts_down) == (adjusting and method == "fedsgc")
        if adjusting:
            assert record.counts["dropped"] > 0
            assert (record.counts["grown_guided"] + record.counts["dropped_guided"] > 0) == (method == "fedsgc")
    forms = [header(body, take_apart).form for body in sessions[0].transport.received]
    assert forms == ["elements", "known", "changed", "known", "changed", "known", "known", "known"]


def test_feddst_is_fedsgc_without_directions_bit_for_bit(coordinator, new_coordinator):
    play(coordinator, *start(coordinator, "feddst", rounds=4))
    other = new_coordinator()
    play(other, *start(other, "fedsgc", own={"guided_share": 0, "rest": "none"}, rounds=4))
    (one, two) = (each.model() for each in (coordinator, other))
    assert {name: tensor.tobytes() for name, tensor in one.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in two.tensors.items()
    }
    assert two.mask.digest == one.mask.digest


def test_a_restarted_coordinator_has_the_same_model_mask_and_directions(coordinator):
    play(coordinator, *start(coordinator, rounds=3))
    model = coordinator.model()
    with coordinator.store.reading() as db:
        again = Models(coordinator.store).model(find(db, "f"), 3)
    assert again.mask.digest == model.mask.digest
    assert list(again.mask.exists) == list(model.mask.exists)
    for one, other in (
        (again.tensors, model.tensors),
        (again.own, model.own),
        (again.mask.exists, model.mask.exists),
    ):
        assert set(one) == set(other)
        for name, array in other.items():
            assert (one[name].dtype, one[name].shape) == (array.dtype, array.shape)
            assert one[name].tobytes() == array.tobytes()
    assert set(model.own) == {"replaced", *(f"direction:{name}" for name in COUNTS)}


def test_a_mask_that_never_changes_is_said_and_logged_once(coordinator, caplog):
    sessions = start(coordinator, own={"over_pruning": 0}, rounds=4)
    assert coordinator.info().warning is None
    play(coordinator, *sessions)
    said = "no weight has been replaced in 1 re-adjusting rounds, so the mask is still the first one"
    assert coordinator.info().warning.startswith(said)
    assert caplog.text.count(said) == 1
    assert [record.notes["positions_replaced"] for record in coordinator.records.rounds("f")] == [0] * 4


def leave(coordinator, session, *, there=False):
    coordinator.devices.change(session.identity.device_id, ChangeDevice(conditions=Conditions(available=there)))


def test_a_returning_device_gets_all_changes_in_one_download(coordinator, take_apart):
    sessions = start(coordinator, names="abc", rounds=7)
    *others, away = sessions
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    coordinator.rounds.advance()
    away.step()  # asks, and so says which mask it holds
    first = away.mask.digest
    leave(coordinator, away)
    while coordinator.info().round < 5:
        coordinator.rounds.advance()
        for session in others:
            session.step()
    assert coordinator.model().mask.digest != first
    leave(coordinator, away, there=True)
    while not len(away.transport.received) > 2:
        coordinator.rounds.advance()
        for session in sessions:
            session.step()
    told = header(away.transport.received[2], take_apart)
    assert (told.form, told.digest) == ("changed", first)
    assert coordinator.model().mask.digest == away.mask.digest == others[0].mask.digest
    coordinator.play(*sessions)
    assert away.progress.adapted


def test_the_last_to_answer_gets_what_changed_though_it_has_not_asked_yet(coordinator, take_apart):
    """Its update closes the round and replaces the mask before it can say which one it holds."""
    (session,) = start(coordinator, names="a", own={"adjust_interval": 1}, rounds=4)
    play(coordinator, session)
    forms = [header(body, take_apart).form for body in session.transport.received]
    assert forms[:4] == ["elements", "changed", "changed", "changed"]


@pytest.mark.parametrize("damage", ["absent", "short", "another"])
def test_a_device_that_lost_its_mask_is_sent_all_of_it(coordinator, take_apart, damage):
    first, second = start(coordinator, rounds=3)
    coordinator.rounds.advance()
    first.step(), second.step()
    path = first.folder.path / "mask.bits"
    bits = path.read_bytes()
    first.folder.close()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(bits[:-1] if damage == "short" else bytes([bits[0] ^ 1]) + bits[1:])
    again = coordinator.open_device("a")
    play(coordinator, again, second)
    forms = [header(body, take_apart).form for body in again.transport.received]
    assert forms == ["elements", "changed", "known", "known"], "rounds 2 and 3, and what follows them"
    assert path.read_bytes()[32:] == coordinator.model().mask.bits
    assert again.progress.adapted


def test_masks_that_nobody_holds_are_deleted(coordinator):
    """On disk are the current one and those that devices hold; never more than those."""
    sessions = start(coordinator, own={"adjust_interval": 1}, rounds=5)
    seen = set()
    while coordinator.info().status != "finished":
        coordinator.rounds.advance()
        seen |= held_masks(coordinator)
        assert coordinator.model().mask.digest in held_masks(coordinator)
        assert len(held_masks(coordinator)) <= 2
        for session in sessions:
            session.step()
    assert len(seen) == 5, "the first, and after each round but the last another"
    states = coordinator.store.blobs.keys("1/models")
    named = [re.sub(r"\.[0-9a-f]{64}", "", key.rpartition("/")[2]) for key in states]
    assert sorted(named) == ["000000005.safetensors", "000000005.state.safetensors"]


def test_a_revoked_device_holds_no_mask(coordinator):
    sessions = start(coordinator, names="abc", rounds=3)
    coordinator.rounds.advance()
    for session in sessions:
        session.step()
    gone = sessions.pop()
    first = gone.mask.digest
    coordinator.devices.change(gone.identity.device_id, ChangeDevice(revoked=True))
    play(coordinator, *sessions)
    assert first not in held_masks(coordinator)


def test_directions_of_every_position_travel_with_a_memory(coordinator, take_apart):
    first, second = start(coordinator, own={"direction_memory": True}, rounds=4)
    play(coordinator, first, second)
    with_signs = [body for body in first.transport.received if "signs" in header(body, take_apart).parts]
    assert len(with_signs) == 1
    found, data = take_apart(with_signs[0])
    low, _ = found["signs"]["data_offsets"]
    assert int.from_bytes(data[low : low + 4], "little") == coordinator.model().mask.size


def test_the_global_model_of_a_sparse_federation_can_be_used(coordinator):
    play(coordinator, *start(coordinator, rounds=3))
    model, info = coordinator.model(), coordinator.info()
    body = coordinator.served.model("f")
    assert hashlib.sha256(body).hexdigest() == info.model_sha256
    tensors, _ = checkpoint.load(body)
    graph = onnx.load_model_from_string(coordinator.served.model_onnx("f"))
    onnx.checker.check_model(graph, full_check=True)
    filled = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    for name, exists in model.mask.exists.items():
        assert filled[name].tobytes() == tensors[name].tobytes() == model.tensors[name].tobytes()
        assert not filled[name][~exists].any()
        assert np.count_nonzero(filled[name]) <= COUNTS[name]


@pytest.mark.parametrize("epochs", [0, 2])
def test_evaluating_and_adapting_keep_the_zeros(coordinator, epochs):
    sessions = start(coordinator, rounds=3, evaluation_interval=2, finetune_epochs=epochs)
    play(coordinator, *sessions)
    model = coordinator.model()
    for session in sessions:
        for name, exists in model.mask.exists.items():
            assert not session.personal[name][~exists].any()
            assert np.array_equal(session.personal[name], model.tensors[name]) == (epochs == 0)
    record = coordinator.records.rounds("f")[-1]
    assert record.evaluated_devices == 2
    assert record.accuracy_global > 0.3
    assert (record.loss_personal is not None) == (epochs > 0)


def test_a_budget_below_the_density_is_told_and_not_drawn(coordinator, caplog):
    coordinator.create("fedsgc", method_settings={**QUICK, "adjust_interval": 1}, rounds=2, min_devices=3)
    small, enough, whole = (
        coordinator.open_device(name, budget=budget) for name, budget in (("a", 0.2), ("b", DENSITY), ("c", 1.0))
    )
    assert "budget of 0.2" in caplog.text
    assert caplog.text.count("your budget") == 1
    play(coordinator, small, enough, whole)
    assert [record.cohort for record in coordinator.records.rounds("f")] == [("b", "c")] * 2
    assert small.progress.adapted, "it gets the last model like everybody else"


def test_more_than_one_seed_gives_other_masks_and_the_same_seed_the_same(coordinator, new_coordinator):
    play(coordinator, *start(coordinator, rounds=3))
    again, other = new_coordinator(), new_coordinator()
    play(again, *start(again, rounds=3))
    play(other, *start(other, rounds=3, seed=1))
    assert again.info().model_sha256 == coordinator.info().model_sha256
    assert again.model().mask.digest == coordinator.model().mask.digest != other.model().mask.digest


# --- updates that are refused -----------------------------------------------------------------------------------------


def update(model, mask, *, seed=0, examples=10, status="active", **more):
    """What a device could send: the model's values with noise, packed under ``mask``."""
    chance = np.random.default_rng(seed)
    noisy = {n: (t + chance.normal(size=t.shape)).astype(np.float32) for n, t in model.tensors.items()}
    noisy |= {name: np.abs(values) for name, values in noisy.items() if name.endswith("running_var")}
    report = UpdateReport(num_examples=examples, status=status, steps=1, train_loss=0.5).model_dump_json()
    return bundle.encode(DIGITS, pack(DIGITS, noisy, mask), mask, report=report, known=model.mask, **more)


def assigned(coordinator, session):
    return next_assignment(coordinator, session.identity.device_id).assignment


def changed(mask, *, drop=1, grow=1, name="fc1.weight"):
    """The mask with so many weights of one layer fewer, and so many others more."""
    flags = {each: array.copy() for each, array in mask.exists.items()}
    flat_flags = flags[name].reshape(-1)
    here, there = np.flatnonzero(flat_flags), np.flatnonzero(~flat_flags)
    flat_flags[here[:drop]] = False
    flat_flags[there[:grow]] = True
    return ElementMask(flags)


def test_a_mask_may_change_in_re_adjusting_rounds_alone_and_keeps_its_numbers(coordinator, without_rest):
    first, second = start(coordinator)
    coordinator.rounds.advance()
    model = coordinator.model()

    def send(session, mask):
        assignment = assigned(coordinator, session)
        device = session.identity.device_id
        return coordinator.acceptance.accept_update(assignment.assignment_id, device, update(model, mask))

    with pytest.raises(BadContent, match=r"^mask: "):
        send(first, changed(model.mask))
    with pytest.raises(BadContent, match="mask"):
        send(first, None)
    assert send(first, model.mask)
    assert send(second, model.mask)
    coordinator.rounds.advance()
    assert assigned(coordinator, first).plan == {"expected_epochs": 12}
    model, count = coordinator.model(), COUNTS["fc1.weight"]
    for drop, grow in ((1, 0), (0, 1), (2, 1)):
        said = rf"mask: fc1\.weight has {count - drop + grow} weights, but must have {count}; grow as many as drop"
        with pytest.raises(BadContent, match=said):
            send(first, changed(model.mask, drop=drop, grow=grow))
    assert send(first, changed(model.mask, drop=40, grow=40))
    assert send(second, model.mask)
    coordinator.rounds.advance()
    assert coordinator.model().mask.digest != model.mask.digest
    assert coordinator.records.rounds("f")[1].notes["union"] == sum(COUNTS.values()) + 40


def test_gradients_and_signs_are_not_asked_for_and_refused(coordinator):
    (session,) = start(coordinator, names="a")
    coordinator.rounds.advance()
    model, assignment = coordinator.model(), assigned(coordinator, session)
    for more in (
        {"gradients": np.zeros(model.mask.size, dtype=np.float32)},
        {"signs": np.zeros(model.mask.count, dtype=np.int8)},
    ):
        body = update(model, model.mask, parts=more)
        with pytest.raises(BadContent, match="is not a part of this message"):
            coordinator.acceptance.accept_update(assignment.assignment_id, session.identity.device_id, body)


def test_who_stops_with_a_round_counts_in_it_once(coordinator, new_coordinator):
    """n is of all who were enrolled in the round: a device is not among those who rest because it stops with it."""

    def two_of_three(coordinator, status):
        stops = {"early_stopping": "validation", "min_participations": 1, "patience": 1}
        sessions = start(coordinator, names="abc", own={"rest": "all"}, cohort=2, **stops)
        coordinator.rounds.advance()
        model = coordinator.model()
        cohort = [session for session in sessions if assigned(coordinator, session)]
        assert len(cohort) == 2
        for session, how in zip(cohort, (status, "active"), strict=True):
            body = update(model, model.mask, status=how)
            coordinator.acceptance.accept_update(
                assigned(coordinator, session).assignment_id, session.identity.device_id, body
            )
        coordinator.rounds.advance()
        return coordinator.info()

    assert two_of_three(coordinator, "stopped").model_sha256 == two_of_three(new_coordinator(), "active").model_sha256
    assert coordinator.info().devices_stopped == 1


# --- fewer bytes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def precisions(tmp_path_factory):
    """The same federation in three number formats: (records, forms) by precision."""
    found = {}
    for precision in ("fp32", "fp16", "int8"):
        with closing(
            CoordinatorWithDevices(tmp_path_factory.mktemp(precision), lambda: 1_700_000_000.0)
        ) as coordinator:
            play(coordinator, *start(coordinator, rounds=6, precision=precision, local_epochs=3))
            found[precision] = coordinator.records.rounds("f"), coordinator.model()
    return found


@pytest.mark.parametrize(("precision", "up", "down"), [("fp16", 1 / 2, 1 / 2), ("int8", 1 / 4, 1)])
def test_values_take_their_share_of_bytes(precisions, precision, up, down):
    for plain, short in zip(precisions["fp32"][0], precisions[precision][0], strict=True):
        assert short.parts_up["values"] == up * plain.parts_up["values"]
        assert short.parts_down["values"] == down * plain.parts_down["values"]
        assert ("scales" in short.parts_up) == (precision == "int8")
        assert "scales" not in short.parts_down
        if precision == "int8":
            assert short.parts_up["values"] + short.parts_up["scales"] < 0.3 * plain.parts_up["values"]


def test_accuracy_does_not_suffer(precisions):
    accuracies = {name: records[-1].accuracy_global for name, (records, _) in precisions.items()}
    assert accuracies["fp32"] > 0.5
    assert all(abs(each - accuracies["fp32"]) < 0.1 for each in accuracies.values())


def test_masks_are_replaced_in_every_number_format(precisions):
    for records, model in precisions.values():
        assert [record.notes["positions_replaced"] > 0 for record in records] == [
            False,
            True,
            False,
            True,
            False,
            False,
        ]
        for name, exists in model.mask.exists.items():
            assert np.count_nonzero(exists) == COUNTS[name]
            assert not model.tensors[name][~exists].any()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_updates_that_move_too_far_are_refused(coordinator, caplog, precision):
    """Measured from what was sent, also where the update is the difference already."""
    sessions = start(coordinator, rounds=1, own={"adjust_interval": 0}, precision=precision, update_norm_limit=1e-6)
    coordinator.play(*sessions)
    assert coordinator.info().round == 1
    assert (coordinator.records.rounds("f")[0].handed_back, coordinator.info().model_version) == (2, 0)
    moved = re.findall(
        r"values: they moved by (\S+) from the payload \(2-norm\), but the federation allows 1e-06", caplog.text
    )
    assert all(0.01 < float(norm) < 100 for norm in moved)
    assert len(moved) >= 2


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_updates_within_the_limit_are_welcome(coordinator, precision):
    play(coordinator, *start(coordinator, rounds=3, precision=precision, update_norm_limit=50))
    assert [record.updates for record in coordinator.records.rounds("f")] == [2, 2, 2]


def test_only_updates_of_training_are_rounded(coordinator):
    sessions = start(coordinator, rounds=1, own={"adjust_interval": 0}, precision="int8")
    coordinator.rounds.advance()
    settings = assigned(coordinator, sessions[0]).settings
    assert settings.precision_of("up", Kind.train) == "int8"
    assert {settings.precision_of("down", kind) for kind in Kind} == {"fp32"}
    body = update(coordinator.model(), coordinator.model().mask)
    assignment = assigned(coordinator, sessions[0])
    with pytest.raises(BadContent, match=r"fp32.*int8"):
        coordinator.acceptance.accept_update(assignment.assignment_id, sessions[0].identity.device_id, body)
