"""Rules that withstand malicious: against plain numpy, under every kind of mask, and under attack."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest

from edge_sdk.protocol.blocks import BlockMask, BlockTable
from edge_sdk.protocol.manifest import Layer, Manifest, TensorSpec, initial_values
from edge_sdk.protocol.masks import NeuronDraw, block_of, count_values, draw_neurons, pack, unpack_whole
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.protocol.sparsity import layer_counts, random_mask
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.fleet.federations import completed
from sparrow.coordinator.methods import Aggregation, CoordinatorMethod, Situation, any_budget, load_method
from sparrow.coordinator.rounds import robust
from sparrow.coordinator.rounds.intake import sums_of
from sparrow.coordinator.rounds.robust import RobustSums, check_robust
from sparrow.coordinator.rounds.sums import ElementSums, MaskedSums

RULES = ("trimmed_mean", "median", "krum")
SHARE = 0.2


def flat(manifest, tensors):
    return pack(manifest, tensors, None)


def masked(manifest, kind, number):
    """The mask of the update of this number."""
    if kind == "neurons":
        return draw_neurons(manifest, NeuronDraw("j", 1, f"d{number}", (0.4, 0.7, 1.0)[number % 3]))
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


def fold(manifest, rule, updates, folder):
    """The rule's mean of (dense values [P], mask), and the model before."""
    old = initial_values(manifest, 0)
    sums = RobustSums(manifest, rule, SHARE, folder)
    for values, mask in updates:
        sums.fold_in_place(pack(manifest, unpack_whole(manifest, values), mask), mask, 10)
    return flat(manifest, sums.mean(old)), flat(manifest, old)


def dense(manifest, count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, manifest.shared_values)).astype(np.float32)


@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_on_whole_models_the_rules_are_plain_numpys(model, tmp_path, count):
    rows = dense(model, count)
    wide = np.sort(rows.astype(np.float64), axis=0)
    cut = min(int(np.ceil(SHARE * count - 1e-9)), (count - 1) // 2)
    trimmed, _ = fold(model, "trimmed_mean", [(row, None) for row in rows], tmp_path)
    np.testing.assert_array_equal(trimmed, wide[cut : count - cut].mean(axis=0).astype(np.float32))
    median, _ = fold(model, "median", [(row, None) for row in rows], tmp_path)
    np.testing.assert_array_equal(median, np.median(wide, axis=0).astype(np.float32))


@pytest.mark.parametrize("count", [5, 10])
def test_on_whole_models_krum_is_the_papers(model, tmp_path, count):
    rows = dense(model, count)
    malicious = max(1, int(SHARE * count))
    apart = ((rows[:, None].astype(np.float64) - rows[None]) ** 2).sum(axis=2)
    scores = [np.sort(np.delete(apart[place], place))[: count - malicious - 2].sum() for place in range(count)]
    chosen = np.sort(np.argsort(scores, kind="stable")[: count - malicious])
    krum, _ = fold(model, "krum", [(row, None) for row in rows], tmp_path)
    np.testing.assert_array_equal(krum, rows[chosen].astype(np.float64).mean(axis=0).astype(np.float32))


def sent_by(manifest, mask):
    """Which values of the whole model a mask names, [P]."""
    flags = {spec.name: np.zeros(spec.shape) for spec in manifest.shared}
    for spec in manifest.shared:
        block_of(manifest, spec, mask).add(flags[spec.name], 1.0)
    return np.concatenate([each.reshape(-1) for each in flags.values()]) > 0


@pytest.mark.parametrize("kind", ["neurons", "elements", "blocks"])
def test_under_masks_a_coordinate_is_judged_among_those_that_sent_it(model, tmp_path, kind):
    rows, masks = dense(model, 9), [masked(model, kind, number) for number in range(9)]
    held = np.stack([sent_by(model, mask) for mask in masks])
    for rule in ("trimmed_mean", "median"):
        found, old = fold(model, rule, list(zip(rows, masks, strict=True)), tmp_path)
        for place in range(model.shared_values):
            values = np.sort(rows[held[:, place], place].astype(np.float64))
            count = len(values)
            cut = (count - 1) // 2 if rule == "median" else min(int(np.ceil(SHARE * count - 1e-9)), (count - 1) // 2)
            wanted = old[place] if count < 3 else values[cut : count - cut].mean()
            assert found[place] == pytest.approx(wanted, rel=1e-6)
            if count < 3:
                assert found[place].tobytes() == old[place].tobytes()


@pytest.mark.parametrize("kind", ["neurons", "elements", "blocks"])
def test_krum_measures_what_both_sent(model, tmp_path, kind):
    rows, masks = dense(model, 9), [masked(model, kind, number) for number in range(9)]
    held = np.stack([sent_by(model, mask) for mask in masks])
    apart = np.full((9, 9), np.inf)
    for one in range(9):
        for two in range(9):
            both = held[one] & held[two]
            if one != two and both.any():
                apart[one, two] = ((rows[one, both].astype(float) - rows[two, both]) ** 2).mean()
    scores = np.sort(apart, axis=1)[:, : 9 - 1 - 2].sum(axis=1)
    chosen = np.sort(np.argsort(scores, kind="stable")[:8])
    found, old = fold(model, "krum", list(zip(rows, masks, strict=True)), tmp_path)
    count = held[chosen].sum(axis=0)
    total = np.where(held[chosen], rows[chosen].astype(float), 0).sum(axis=0)
    np.testing.assert_allclose(found, np.where(count, total / np.maximum(count, 1), old), rtol=1e-6)


LIES = {
    "sign-flipped": lambda honest: -honest,
    "scaled": lambda honest: 100 * honest,
    "constant": lambda honest: np.full_like(honest, 50),
}


@pytest.mark.parametrize("kind", ["whole", "neurons", "elements", "blocks"])
@pytest.mark.parametrize("lie", LIES)
def test_a_fifth_of_malicious_updates_wrecks_the_mean_and_no_rule(model, tmp_path, lie, kind):
    """Fifteen devices near the same model, three of which lie and claim a hundred times the examples."""
    truth = np.random.default_rng(7).normal(size=model.shared_values).astype(np.float32) + 2
    rows = truth + 0.05 * dense(model, 15)
    masks = [masked(model, kind, number) for number in range(15)]
    malicious = (0, 6, 14)
    for attacker in malicious:
        rows[attacker] = LIES[lie](rows[attacker])
    plain = ElementSums(model, masks[0]) if kind == "elements" else MaskedSums(model)
    if kind != "blocks":
        for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            plain.fold_in_place(pack(model, unpack_whole(model, row), mask), mask, 1000 if number in malicious else 10)
        wrecked = flat(model, plain.mean(initial_values(model, 0)))
        assert np.abs(wrecked - truth).mean() > 1
    # Where malicious are no more than the rule can bear: of the devices that sent a value, too.
    held = np.stack([sent_by(model, mask) for mask in masks])
    count, lying = held.sum(axis=0), held[list(malicious)].sum(axis=0)
    for rule in RULES:
        found, _ = fold(model, rule, list(zip(rows, masks, strict=True)), tmp_path)
        safe = count >= 3
        if rule == "median":
            safe &= lying <= (count - 1) // 2
        if rule == "trimmed_mean":
            safe &= lying <= np.minimum(np.ceil(SHARE * count - 1e-9), (count - 1) // 2)
        assert safe.mean() > 0.5
        assert np.abs(found - truth)[safe].max() < 0.3, rule


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
    assert many < 13 * row.nbytes + pairs


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
    "fedper",
    "fedrep",
    "lgfedavg",
    "feddrop",
    "fjord",
    "heterofl",
)
METHODS += ("hermes", "fedmp", "prunefl_neurons", "grasp", "pfedgate")


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_take_a_mean_take_a_robust_one(name, model, tmp_path):
    settings = completed(FederationSettings(method=name, robust="median"))
    method = load_method(name)
    check_robust(method, settings)
    manifest = method.manifest(Manifest.model_validate({**model.model_dump(), "blocks": {}}), settings)
    situation = Situation(manifest, settings, 1)
    first = method.start(initial_values(manifest, 0), situation)
    if name == "grasp":  # prepared
        first = type(first)(first.tensors, random_mask(manifest, layer_counts(manifest, 0.5), 0))
    sums = sums_of(method, first, situation, tmp_path)
    assert isinstance(sums, RobustSums)
    for place in range(3):
        sums.fold_in_place(np.full(count_values(manifest, first.mask), place, np.float32), first.mask, 1)
    after = method.close(first, sums, situation)
    assert (pack(manifest, after.tensors, after.mask) == 1).all()


@pytest.mark.parametrize("name", ["local", "fedsgc", "feddst", "dmpfl", "prunefl", "pfedgate"])
def test_methods_that_need_more_than_a_mean_say_why_they_refuse(name):
    own = {"denominator": "all"} if name == "pfedgate" else {}
    settings = completed(FederationSettings(method=name, robust="krum", method_settings=own))
    with pytest.raises(BadContent, match=f"robust: {name} cannot do with krum: .{{15,}}; leave robust out"):
        check_robust(load_method(name), settings)


def test_a_method_with_sums_of_its_own_is_refused_unless_it_says_that_a_mean_will_do(model):
    own = CoordinatorMethod(smallest_budget=any_budget, aggregation=Aggregation())
    with pytest.raises(BadContent, match="an aggregation of its own"):
        check_robust(own, FederationSettings(robust="median"))


@pytest.mark.parametrize(("rule", "cohort"), [("median", 2), ("trimmed_mean", 2), ("krum", 4)])
def test_cohorts_in_which_nobody_could_tell_are_refused(rule, cohort):
    with pytest.raises(BadContent, match="cannot tell who lies"):
        check_robust(load_method("fedspu"), FederationSettings(robust=rule, cohort=cohort))


def test_what_one_device_prepares_comes_through_as_it_is(model, tmp_path):
    settings = completed(FederationSettings(method="grasp", robust="median"))
    method, situation = load_method("grasp"), Situation(model, settings, 0)
    sums = sums_of(method, method.start(initial_values(model, 0), situation), situation, tmp_path)
    assert not isinstance(sums, RobustSums)
