"""Rules that withstand malicious: against plain numpy, under every kind of mask, and under attack."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest

from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.checks import check_robust, completed
from sparrow.coordinator.methods import Aggregation, CoordinatorMethod, Situation, any_budget, load_method
from sparrow.coordinator.rounds.intake import sums_of
from sparrow.coordinator.sums import robust
from sparrow.coordinator.sums.robust import RobustSums
from sparrow.protocol.blocks import BlockMask, BlockTable
from sparrow.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from sparrow.protocol.masks import NeuronDraw, block_of, count_values, draw_neurons, pack, unpack_whole
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, random_mask

pytestmark = pytest.mark.integration  # plays many rounds

RULES = ("trimmed_mean", "median", "krum")
SHARE = 0.2


def flat(manifest, tensors):
    return pack(manifest, tensors, None)


def masked(manifest, kind, number):
    """The mask of the update of this number."""
    if kind == "neurons":
        return draw_neurons(manifest, NeuronDraw(f"d{number}", (0.2, 0.4, 0.6, 0.8, 1.0)[number % 5]))
    if kind == "elements":
        return random_mask(manifest, layer_counts(manifest, 0.6), number)
    if kind == "blocks":
        table = manifest.block_table
        return BlockMask(table.forced | (np.random.default_rng(number).random(len(table.sizes)) < 0.6))
    return None


@pytest.fixture(scope="module")
def model(small):
    shapes = {spec.name: spec.shape for spec in small.shared if spec.trainable}
    out = Layer(name="out", kind="linear", tensors=("out.weight", "out.bias"))
    layers = {"layers": [layer.model_dump() for layer in (*small.layers, out)]}
    return Manifest.model_validate({**small.model_dump(), **layers, "blocks": BlockTable.of(shapes, count=3).tensors})


def fold(manifest, rule, updates, folder, share=SHARE, drawn=0):
    """The rule's mean of (dense values [P], mask), and the model before."""
    old = initial_values(manifest, 0)
    sums = RobustSums(manifest, rule, share, folder)
    for values, mask in updates:
        sums.fold_in_place(pack(manifest, unpack_whole(manifest, values), mask), mask, 10)
    sums.drawn = drawn
    return flat(manifest, sums.mean(old)), flat(manifest, old)


def dense(manifest, count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, manifest.shared_values)).astype(np.float32)


def sent_by(manifest, mask):
    """Which values of the whole model a mask names, [P]."""
    flags = {spec.name: np.zeros(spec.shape) for spec in manifest.shared}
    for spec in manifest.shared:
        block_of(manifest, spec, mask).add(flags[spec.name], 1.0)
    return np.concatenate([each.reshape(-1) for each in flags.values()]) > 0


def cut(manifest, rows, held, old):
    """Rows [n, P] cut to the bounds of their tensors, and these bounds [P]: the rule as the docs have it, in a loop."""
    rows, bounds = rows.astype(np.float64), np.zeros(len(old))
    start = 0
    for spec in manifest.shared:
        place = slice(start, start + spec.size)
        far = sorted(
            np.abs(row[place] - old[place])[there[place]].max()
            for row, there in zip(rows, held, strict=True)
            if there[place].any()
        )
        bounds[place] = far[(len(far) - 1) // 2] if far else 0
        start += spec.size
    return np.clip(rows, old - bounds, old + bounds), bounds


@pytest.mark.parametrize("kind", ["whole", "neurons", "elements", "blocks"])
@pytest.mark.parametrize(("count", "share"), [(3, 0.2), (4, 0.2), (9, 0.2), (10, 0.2), (10, 0.3), (10, 0.1)])
def test_the_rules_by_coordinate_are_those_of_the_docs(model, tmp_path, kind, count, share):
    rows, masks = dense(model, count), [masked(model, kind, number) for number in range(count)]
    held = np.stack([sent_by(model, mask) for mask in masks])
    malicious = max(1, int(share * count + 1e-9))
    for rule in ("trimmed_mean", "median"):
        found, old = fold(model, rule, list(zip(rows, masks, strict=True)), tmp_path, share)
        inside, _ = cut(model, rows, held, old)
        for place in range(model.shared_values):
            values = np.sort(inside[held[:, place], place])
            if len(values) < max(3, 2 * malicious + 1):
                assert found[place].tobytes() == old[place].tobytes()
                continue
            left = values[malicious : len(values) - malicious]
            wanted = np.median(values) if rule == "median" else left.mean()
            assert found[place] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", ["whole", "elements"])
@pytest.mark.parametrize(("count", "share"), [(5, 0.2), (10, 0.2), (10, 0.3)])
def test_where_all_send_the_same_krum_is_the_papers_with_the_bound(model, tmp_path, kind, count, share):
    rows, mask = dense(model, count), masked(model, kind, 0)
    there, malicious = sent_by(model, mask), max(1, int(share * count + 1e-9))
    apart = ((rows[:, None, there].astype(np.float64) - rows[None][..., there]) ** 2).sum(axis=2)
    scores = [np.sort(np.delete(apart[place], place))[: count - malicious - 2].sum() for place in range(count)]
    chosen = np.sort(np.argsort(scores, kind="stable")[: count - malicious])
    found, old = fold(model, "krum", [(row, mask) for row in rows], tmp_path, share)
    inside, _ = cut(model, rows, np.tile(there, (count, 1)), old)
    np.testing.assert_allclose(found, np.where(there, inside[chosen].mean(axis=0), old), rtol=1e-6)


def lie(how, rows, honest, truth):
    """Return the values that malicious devices agree on, [P]; they know those of all the others."""
    match how:
        case "a million":
            return np.full_like(truth, 1e6)
        case "as far as numbers go":
            return np.where(np.arange(len(truth)) % 2, np.float32(3e38), np.float32(-3e38))
        case "the other way":
            return truth - 100 * (rows[honest].mean(axis=0) - truth)
        case "just beyond the others":
            return rows[honest].max(axis=0) + 1e-3
        case "one value alone":  # near to the others in every distance
            return np.where(np.arange(len(truth)) % 97 == 5, truth + 3, rows[honest].mean(axis=0))
    raise ValueError(how)


LIES = ("a million", "as far as numbers go", "the other way", "just beyond the others", "one value alone")


@pytest.mark.parametrize("malicious", [1, 2, 3])
@pytest.mark.parametrize("kind", ["whole", "neurons", "elements", "blocks"])
@pytest.mark.parametrize("how", LIES)
def test_malicious_updates_of_ten_move_no_coordinate_beyond_the_guarantee(model, tmp_path, how, kind, malicious):
    """All of them send everything, or all the same part that few others have; what they send, they agree on."""
    old = flat(model, initial_values(model, 0))
    truth = old + np.float32(0.01)
    rows = truth + np.float32(0.05) * dense(model, 10, seed=malicious)
    lying, honest = list(range(malicious)), list(range(malicious, 10))
    rows[lying] = lie(how, rows, honest, truth)
    own = [masked(model, kind, number) for number in range(10)]
    for part in (None, own[0]):
        masks = [*[part if kind != "whole" else None] * malicious, *own[malicious:]]
        held = np.stack([sent_by(model, mask) for mask in masks])
        inside, _ = cut(model, rows, held, old)
        low = np.where(held[honest], inside[honest], np.inf).min(axis=0)
        high = np.where(held[honest], inside[honest], -np.inf).max(axis=0)
        far = np.where(held[honest], np.abs(rows[honest] - old), 0)
        ends = np.cumsum([spec.size for spec in model.shared])[:-1]
        honest_most = np.repeat([part.max() for part in np.split(far, ends, axis=1)], [s.size for s in model.shared])
        enough = held.sum(axis=0) >= max(3, 2 * malicious + 1)
        for rule in ("trimmed_mean", "median"):
            found, _ = fold(model, rule, list(zip(rows, masks, strict=True)), tmp_path, malicious / 10, drawn=10)
            assert found[~enough].tobytes() == old[~enough].tobytes()
            assert (found[enough] >= low[enough] - 1e-6).all(), rule
            assert (found[enough] <= high[enough] + 1e-6).all(), rule
            assert (np.abs(found - old) <= honest_most + 1e-6).all(), rule
        if part is None and kind == "whole":
            found, _ = fold(model, "krum", list(zip(rows, masks, strict=True)), tmp_path, malicious / 10, drawn=10)
            assert (np.abs(found - old) <= honest_most + 1e-6).all()
            assert np.abs(found - truth).mean() < 0.1, "most values are honest ones"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("malicious", [3, 4, 5])
def test_more_malicious_updates_than_expected_still_move_nothing_further_than_honest_ones(
    model, tmp_path, rule, malicious
):
    """A cohort may by chance hold more of them than its share: up to half of its updates, the bound holds."""
    old = flat(model, initial_values(model, 0))
    rows = old + np.float32(0.05) * dense(model, 10)
    rows[:malicious] = 1e6
    masks = [None] * 10
    if rule != "krum":
        masks[malicious:] = [masked(model, "neurons", number) for number in range(malicious, 10)]
    found, _ = fold(model, rule, list(zip(rows, masks, strict=True)), tmp_path, drawn=10)
    assert np.abs(found - old).max() <= np.abs(rows[malicious:] - old).max() + 1e-6


def test_devices_that_do_not_answer_leave_no_majority_to_malicious_ones(model, tmp_path):
    """Ten are drawn, of which two are malicious and quick; of the others two answer before the deadline, or three."""
    old = flat(model, initial_values(model, 0))
    rows = old + np.float32(0.05) * dense(model, 5)
    rows[:2] = 1e6
    for rule in RULES:
        found, _ = fold(model, rule, [(row, None) for row in rows[:4]], tmp_path, drawn=10)
        assert found.tobytes() == old.tobytes(), "as it was"
    for rule in ("trimmed_mean", "median"):
        found, _ = fold(model, rule, [(row, None) for row in rows], tmp_path, drawn=10)
        assert (np.abs(found - old) <= np.abs(rows[2:] - old).max(axis=0) + 1e-6).all()


def test_what_the_rule_holds_back_is_counted(model, tmp_path):
    sums = RobustSums(model, "median", SHARE, tmp_path)
    for number in range(4):
        mask = masked(model, "blocks", number)
        sums.fold_in_place(np.zeros(count_values(model, mask), np.float32), mask, 1)
    senders = sum(sent_by(model, masked(model, "blocks", number)).astype(int) for number in range(4))
    assert sums.held_back == ((senders > 0) & (senders < 3)).sum() > 0
    sums.drawn = 10
    assert sums.held_back == (senders > 0).sum(), "five are needed where two of ten may lie"


def test_too_few_updates_leave_the_model_as_it_was(model, tmp_path):
    for rule, count in (("trimmed_mean", 2), ("median", 2), ("krum", 4), ("median", 0)):
        found, old = fold(model, rule, [(row, None) for row in dense(model, count)], tmp_path)
        assert found.tobytes() == old.tobytes()


def test_the_blocks_that_anybody_sent_are_touched(model, tmp_path):
    sums = RobustSums(model, "median", SHARE, tmp_path)
    assert not sums.touched.any()
    masks = [masked(model, "blocks", number) for number in (1, 2)]
    for mask in masks:
        sums.fold_in_place(np.zeros(count_values(model, mask), np.float32), mask, 1)
    np.testing.assert_array_equal(sums.touched, masks[0].on | masks[1].on)


WIDE = Manifest(
    task="wide",
    input_shape=(200,),
    output_shape=(150,),
    tensors=(TensorSpec(name="w", shape=(150, 200)),),
)


@pytest.mark.parametrize("rule", RULES)
def test_memory_is_that_of_a_few_models_whatever_the_cohort(tmp_path, rule, monkeypatch):
    monkeypatch.setattr(robust, "SMALLEST_SLICE", 1)  # the model is small
    row, old = np.ones(WIDE.shared_values, np.float32), {"w": np.zeros((150, 200), np.float32)}

    def peak(count):
        tracemalloc.start()
        sums = RobustSums(WIDE, rule, SHARE, tmp_path)
        for _ in range(count):
            sums.fold_in_place(row, None, 1)
        sums.mean(old)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    pairs = 8 * 6 * 200**2 if rule == "krum" else 0  # of a few numbers for each two updates
    few, many = peak(10), peak(200)
    assert many < 1.1 * few + pairs
    assert many < 14 * row.nbytes + pairs


def test_nothing_is_left_in_the_folder(model, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        fold(model, "median", [(row, None) for row in dense(model, 5)], tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


METHODS = (
    "fedspu",
    "fedavg",
    "fedprox",
    "ditto",
    "apfl",
    "fedem",
    "pfedme",
    "perfedavg",
    "fedper",
    "fedrep",
    "lgfedavg",
    "feddrop",
    "fjord",
    "heterofl",
)
METHODS += ("hermes", "prunefl_neurons", "pfedgate")


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_take_a_mean_take_a_robust_one(name, model, tmp_path):
    own = {"smallest_budget": 0.5} if name == "pfedgate" else {}  # a layer of three rows cannot be cut for less
    settings = completed(FederationSettings(method=name, robust="median", method_settings=own))
    method = load_method(name)
    check_robust(method, settings)
    manifest = method.manifest(Manifest.model_validate({**model.model_dump(), "blocks": {}}), settings)
    situation = Situation(manifest, settings, 1)
    first = method.start(initial_values(manifest, 0), situation)
    sums = sums_of(method, first, situation, tmp_path)
    assert isinstance(sums, RobustSums)
    for place in range(3):
        sums.fold_in_place(np.full(count_values(manifest, first.mask), place, np.float32), first.mask, 1)
    after = method.aggregation.close(first, sums, situation)
    assert (pack(manifest, after.tensors, after.mask) == 1).all()


@pytest.mark.parametrize(
    "name", ["local", "fedsgc", "feddst", "votedst", "dmpfl", "prunefl", "pfedgate", "grasp", "fedmp"]
)
def test_methods_that_need_more_than_a_mean_say_why_they_refuse(name):
    own = {"denominator": "all"} if name == "pfedgate" else {}
    settings = completed(FederationSettings(method=name, robust="median", method_settings=own))
    with pytest.raises(BadContent, match=rf"robust: {name}\b.*\bmedian\b"):
        check_robust(load_method(name), settings)


def test_methods_with_their_own_sums_are_refused_unless_means_suffice(model):
    own = CoordinatorMethod(smallest_budget=any_budget, aggregation=Aggregation())
    with pytest.raises(BadContent, match="an aggregation of its own"):
        check_robust(own, FederationSettings(robust="median"))


@pytest.mark.parametrize("name", METHODS)
def test_krum_is_refused_where_devices_send_different_parts(name):
    # FedAvg to LG-FedAvg: the whole shared model, or none of it.
    alike = name in METHODS[1 : METHODS.index("lgfedavg") + 1]
    settings = completed(FederationSettings(method=name, robust="krum"))
    if alike:
        check_robust(load_method(name), settings)
    else:
        with pytest.raises(BadContent, match="trimmed_mean or median"):
            check_robust(load_method(name), settings)


@pytest.mark.parametrize(
    ("rule", "least", "settings"),
    [
        ("median", 3, {"cohort": 2}),
        ("trimmed_mean", 3, {"cohort": 2}),
        ("krum", 5, {"cohort": 4}),
        ("krum", 11, {"cohort": 10, "robust_share": 0.4}),
        ("krum", 7, {"cohort": 10, "quorum": 0.6}),
        ("median", 9, {"cohort": 10, "quorum": 0.8, "robust_share": 0.4}),
        ("median", 9, {"cohort": 8, "over_selection": 0.3, "robust_share": 0.4}),
    ],
)
def test_rounds_in_which_nobody_could_tell_are_refused(rule, least, settings):
    with pytest.raises(BadContent, match=f"which needs {least}: raise cohort or quorum"):
        check_robust(load_method("fedavg"), FederationSettings(method="fedavg", robust=rule, **settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"buffer": 5}, "the fastest, so that they exceed robust_share"),
        ({"cohort_policy": "budget"}, "a device can raise its chance to be drawn"),
        ({"cohort_policy": "least_recently"}, "a device can raise its chance to be drawn"),
    ],
)
def test_rounds_that_devices_can_crowd_are_refused(settings, said):
    with pytest.raises(BadContent, match=said):
        check_robust(load_method("fedavg"), FederationSettings(method="fedavg", robust="median", **settings))


def test_what_one_device_prepares_comes_through_as_it_is(model, tmp_path):
    settings = completed(FederationSettings(method="grasp", robust="median"))
    method, situation = load_method("grasp"), Situation(model, settings, 0)
    sums = sums_of(method, method.start(initial_values(model, 0), situation), situation, tmp_path)
    assert not isinstance(sums, RobustSums)
