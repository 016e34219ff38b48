"""Analyses of mechanisms: their arithmetic on small masks and models, their pictures, and rows of real federations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.analysis import measures, observing
from benchmarks.analysis.looking import Look, own_neurons
from benchmarks.analysis.observing import Observer
from benchmarks.analysis.summaries import Summaries
from benchmarks.analysis.theorem import Terms, measure_terms, summarise
from benchmarks.report.analyses import analysis_sections, draw_analyses
from edge_sdk.methods.dual import Dual
from sparrow.bench import rows
from sparrow.bench.report.figures import Group, mean_analysed
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.neurons import first_neurons

YES, NO = True, False


def masks(*flags, size=4):
    return [{"fc": np.isin(np.arange(size), each)} for each in flags]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_jaccard_and_overlap_of_known_masks():
    three = masks([0, 1, 2], [2, 3], [])
    assert measures.jaccard(three).tolist() == [[1, 1 / 4, 0], [1 / 4, 1, 0], [0, 0, 1]]
    assert measures.overlap(three).tolist() == [[1, 1 / 2, 1], [1 / 2, 1, 1], [1, 1, 1]]
    assert measures.similarity(three[0], three[1]) == 1 / 4


def test_layers_are_one_set_but_chance_goes_layer_by_layer():
    one = {"a": np.array([YES, YES]), "b": np.array([YES, NO, NO, NO])}
    other = {"a": np.array([YES, YES]), "b": np.array([NO, YES, NO, NO])}
    assert measures.jaccard([one, other])[0, 1] == 2 / 4
    # In a both have everything, in b a quarter: 2 + 1/4 of 6 - (2 + 1/4) in common.
    assert measures.chance_jaccard([one, other])[0, 1] == 2.25 / 3.75


def test_distances_of_vectors_in_parts():
    vectors = [{"a": np.array([[3.0]]), "b": np.array([0.0, 4.0])}, {"a": np.array([[0.0]]), "b": np.zeros(2)}]
    vectors.append({"a": np.array([[-6.0]]), "b": np.array([0.0, -8.0])})
    products = measures.gram(vectors)
    assert measures.euclidean(products).tolist() == [[0, 5, 15], [5, 0, 10], [15, 10, 0]]
    assert measures.cosine(products)[0].tolist() == [0, 1, 2]


def test_distances_of_labels():
    counts = np.array([[10, 0], [0, 5], [5, 5]])
    assert measures.label_distances(counts).tolist() == [[0, 1, 0.5], [1, 0, 0.5], [0.5, 0.5, 0]]
    # 15 of 25 samples are of the first class.
    assert measures.distances_to_all(counts) == pytest.approx([0.4, 0.6, 0.1])


def test_histograms_have_twenty_bins_and_their_distance_is_a_share():
    bins = measures.histogram(np.array([-1.0, 0.0, 0.049, 0.05, 0.5, 1.0, 2.0]))
    assert (bins[0], bins[1], bins[10], bins[19], sum(bins), len(bins)) == (3, 1, 1, 2, 7, 20)
    assert measures.histogram_distance([2, 2], [4, 0]) == 0.5
    assert measures.histogram_distance([1, 1], [5, 5]) == 0


def test_correlation_over_pairs_and_its_chance():
    places = np.arange(6.0)
    apart = np.abs(places[:, None] - places)
    found = measures.together(apart, 2 * apart)
    assert found["r"] == pytest.approx(1)
    # Of 720 orders two leave all distances as they are; 999 random ones and the given one are looked at.
    assert 1 / 1000 <= found["p"] < 0.02
    assert measures.together(apart, -apart)["r"] == pytest.approx(-1)
    assert measures.together(apart, np.ones((6, 6))) is None, "a constant goes with nothing"
    assert measures.together_each(places, places**3)["r"] == pytest.approx(np.corrcoef(places, places**3)[0, 1])
    assert measures.together_each(places[:2], places[:2]) is None, "two devices say nothing"


def test_clusters_and_neighbours():
    places = np.array([0.0, 10.0, 1.0, 12.0])
    apart = np.abs(places[:, None] - places)
    assert measures.nearest(apart).tolist() == [2, 3, 0, 1]
    merged = measures.ward(apart)
    assert [sorted(map(int, row[:2])) for row in merged[:2]] == [[0, 2], [1, 3]]
    assert [row[2] for row in merged[:2]] == [1, 2]


def test_neurons_of_a_narrow_model_are_those_with_incoming_weights():
    manifest = load_builtin("digits").manifest
    mask = first_neurons(manifest, 0.5)
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in manifest.kept}
    for spec in manifest.kept:
        if spec.axes and spec.axes[0] and len(spec.shape) > 1:
            tensors[spec.name][mask.active[spec.axes[0][0].group]] = 1
    found = own_neurons(manifest, tensors)
    assert {name: index.tolist() for name, index in found.active.items()} == {
        name: index.tolist() for name, index in mask.active.items()
    }


# --- summaries -------------------------------------------------------------------------------------------------------


def neuron_look(*active):
    (mask,) = masks(active)
    return Look({"w": np.array([float(len(active))])}, "neurons", mask, {"fc": len(active) / 4})


def test_rows_of_two_rounds():
    labels = np.array([[4, 0], [0, 4], [2, 2]])
    summaries = Summaries(labels)
    summaries.add(5, [neuron_look(0, 1), neuron_look(0, 1), None])
    summaries.add(10, [neuron_look(0, 1), neuron_look(1, 2), neuron_look(3)])
    found = {(each.kind, each.round): each.numbers for each in summaries.rows()}
    assert set(found) == {("data", 0), *((kind, n) for kind in ("masks", "kept", "models") for n in (5, 10))}
    first, last = found["masks", 5], found["masks", 10]
    assert (first["devices"], first["jaccard"], first["own"]) == ([0, 1], {"mean": 1, "least": 1, "most": 1}, None)
    assert "matrix" not in first, "only the last row of a kind has one"
    assert last["matrix"] == [[1, 0.3333, 0], [0.3333, 1, 0], [0, 0, 1]]
    assert last["own"] == pytest.approx({"mean": 2 / 3, "least": 1 / 3, "most": 1}), "device 2 had none before"
    assert found["kept", 10]["layers"]["fc"]["bins"] == [0] * 5 + [1] + [0] * 4 + [2] + [0] * 9
    assert found["models", 10]["euclidean"] == pytest.approx({"mean": 2 / 3, "least": 0, "most": 1})
    assert found["data", 0]["to_all"] == [0.5, 0.5, 0]


def test_what_is_shared_with_a_global_mask():
    mine, together = masks([0, 1, 2, 3], [0, 1, 2], size=8), masks([0, 1, 7], size=8)[0]
    summaries = Summaries()
    summaries.add(1, [Look(unit="weights", mask=each, kept={}, shared=together) for each in mine])
    changed = masks([0, 1, 2], size=8)[0]
    summaries.add(2, [Look(unit="weights", mask=each, kept={}, shared=changed) for each in mine])
    found = {(each.kind, each.round): each.numbers for each in summaries.rows()}
    assert found["private", 1]["shared"] == pytest.approx({"mean": 7 / 12, "least": 1 / 2, "most": 2 / 3})
    assert found["private", 2]["each"] == [0.75, 1]
    assert found["global", 1] == {"kept": 3 / 8, "before": None, "first": 1}
    assert found["global", 2] == {"kept": 3 / 8, "before": 0.5, "first": 0.5}


def test_gates_by_round_and_by_device():
    def gated(place, gate):
        return Look(gates=np.array([0.0, gate]), gate={"gate:linear.weight": np.array([place])})

    summaries = Summaries(np.array([[3, 1, 0], [0, 1, 1], [0, 0, 2]]))
    summaries.add(1, [gated(0.0, 0.5), gated(1.0, 0.5), gated(5.0, 0.5)])
    summaries.add(2, [gated(0.0, 0.5), gated(1.0, 0.7), gated(5.0, 0.5)])
    first, last = (each.numbers for each in summaries.rows() if each.kind == "gates")
    assert (first["bins"][0], first["bins"][10], first["change"], first["moved"]) == (3, 3, None, None)
    assert last["change"] == pytest.approx(1 / 6)
    assert last["moved"]["mean"] == pytest.approx(0.2 / 2 / 3)
    assert last["euclidean"]["most"] == 5
    # 0 and 1 share a class, as do 1 and 2; the nearest of 2 is 1.
    assert (last["common_nearest"], last["common_any"]) == (1, pytest.approx(2 / 3))
    assert last["linkage"][0][:3] == [0, 1, 1]


def test_matrices_have_at_most_twenty_devices():
    summaries = Summaries(np.eye(25, dtype=np.int64) + 1)
    summaries.add(1, [neuron_look(index % 4) for index in range(25)])
    for each in summaries.rows():
        assert len(each.numbers.get("matrix", [])) <= 20
    assert mean_of(summaries, "masks", "jaccard.least") == 0


def mean_of(summaries, kind, what):
    found = [each.numbers for each in summaries.rows() if each.kind == kind][-1]
    for name in what.split("."):
        found = found[name]
    return found


# --- Theorem 1 -------------------------------------------------------------------------------------------------------


class Quadratic:
    """An engine whose loss is half the squared distance from 1, so that a gradient is the weights minus 1."""

    def load(self, tensors):
        self.tensors = {name: np.array(tensor) for name, tensor in tensors.items()}

    def epochs(self, batches, seed):
        return iter(batches)

    def differentiate(self, batches, names, visit):
        for name in names:
            visit(name, self.tensors[name] - np.float32(1))
        return 0.0, np.zeros(1)


def test_the_terms_of_a_loss_whose_gradients_are_known():
    manifest = load_builtin("digits").manifest
    trainable = sum(spec.size for spec in manifest.shared if spec.trainable)
    mine = {spec.name: np.full(spec.shape, 3, spec.dtype) for spec in manifest.kept}
    theirs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in manifest.kept}
    batches = [(np.zeros((2, 1)), np.zeros(2)), (np.zeros((1, 1)), np.zeros(1))]
    whole, half = (
        measure_terms(Quadratic(), manifest, batches, personal=mine, global_model=theirs, budget=budget, key="test")
        for budget in (1.0, 0.5)
    )
    assert (whole.gradient, whole.merged, whole.active) == (4 * trainable, 0, 0), "all is received"
    assert (whole.drift, whole.values) == (4 * trainable, 1)
    assert half.drift == 4 * trainable - half.merged, "what was received moved by 2, and has no gradient any more"
    assert half.active == 0
    assert 0 < half.drift < whole.drift
    assert half.steepness == whole.steepness == pytest.approx(1)


def test_the_bound_follows_from_the_largest_terms():
    two = [Terms(0.5, 2.0, 1.0, 0.3, 4.0, 5.0, 0.3), Terms(1.0, 1.0, 2.0, 2.0, 1.0, 3.0, 1.0)]
    found = summarise(two, learning_rate=0.1)
    assert (found["q"], found["sigma2"], found["steepness"], found["gradient"]) == (2, 4, 5, 1.5)
    small, whole = found["budgets"]
    assert (small["budget"], small["lemma"], small["condition"]) == (0.5, 0.3, 2 * 5 / 0.25)
    assert whole["condition"] == 10
    assert small["epsilon2"] == pytest.approx(6 * 2 * 4 / ((0.2 - 5 * 0.01) * 0.25 + 2))


# --- a federation ----------------------------------------------------------------------------------------------------

TINY = """
title = "Tiny"
task = "digits"
devices = 4
rounds = 4
evaluate_every = 2
seeds = [0]

[settings]
cohort = 3
learning_rate = 0.1
local_epochs = 1

[axes]
alpha = [0.5]

[[methods]]
label = "FedSPU"
method = "fedspu"
budgets = [0.5, 1.0]

[[methods]]
label = "DM-PFL"
method = "dmpfl"
settings = { method_settings = { iterations = 1, replaced = 0.2, adjust_interval = 1 } }

[[methods]]
label = "pFedGate"
method = "pfedgate"
budgets = [0.5]
"""


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """The rows of a tiny experiment, and every device's state at its last evaluation: label -> name -> state."""
    folder = tmp_path_factory.mktemp("analysed")
    (folder / "tiny.toml").write_text(TINY)
    states, read = {}, observing.read_folder

    def reading(path, manifest, reference):
        stored = read(path, manifest, reference)
        states.setdefault(path.parents[1].name, {})[path.name] = (manifest, stored)
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observing, "read_folder", reading)
        command = ["analyse", str(folder / "tiny.toml"), "--folder", str(folder / "work")]
        assert main(command) == 0
    found = rows.read(folder / "work" / "analysis.jsonl")
    return folder, found, dict(zip([each.trial.label for each in found], states.values(), strict=True))


def numbers(recorded, kind, at=-1):
    return [each.numbers for each in recorded.analyses if each.kind == kind][at]


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_run_leaves_rows_of_its_evaluated_rounds(analysed):
    folder, (fedspu, dmpfl, gated), _ = analysed
    kinds = {each.trial.label: {row.kind for row in each.analyses} for each in (fedspu, dmpfl, gated)}
    always = {"data", "masks", "kept", "models"}
    assert kinds == {
        "FedSPU": always | {"theorem"},
        "DM-PFL": always | {"private", "global"},
        "pFedGate": always | {"gates"},
    }
    for each in (fedspu, dmpfl, gated):
        assert [row.round for row in each.analyses if row.kind == "masks"] == [2, 4]
        assert len(numbers(each, "masks")["matrix"]) == 4
    assert not list((folder / "work" / "analyses").iterdir()), "the trials' own folders are gone"
    page = (folder / "work" / "tiny.md").read_text()
    assert all(f"## {title}\n" in page for title in ("Masks", "Shared weights", "Gates", "Theorem 1"))


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_fedspus_masks_are_those_that_its_devices_trained(analysed):
    _, (fedspu, *_), _ = analysed
    last = numbers(fedspu, "masks")
    assert last["unit"] == "neurons"
    assert last["matrix"][2][3] == 1, "at a budget of 1 all neurons are trained"
    assert last["matrix"][0][2] == 0.5, "half of the neurons, of all"
    assert {layer["least"] for layer in numbers(fedspu, "kept")["layers"].values()} == {0.5}
    whole = numbers(fedspu, "theorem")["budgets"][1]
    assert (whole["budget"], whole["values"]) == (1, 1)
    assert whole["lemma"] == pytest.approx(1)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_dm_pfls_rows_are_of_the_devices_own_states(analysed):
    _, (_, dmpfl, _), states = analysed
    duals = []
    for _, (manifest, stored) in sorted(states["DM-PFL"].items()):
        duals.append(Dual.load(manifest, stored.personal, stored.own))
    for one, other in ((0, 1), (2, 3)):
        first, second = (np.concatenate([f.reshape(-1) for f in duals[i].mask.exists.values()]) for i in (one, other))
        expected = (first & second).sum() / (first | second).sum()
        assert numbers(dmpfl, "masks")["matrix"][one][other] == pytest.approx(expected, rel=1e-3)
    shared = [1 - dual.private.count / dual.mask.count for dual in duals]
    assert numbers(dmpfl, "private")["each"] == pytest.approx(shared, rel=1e-3)
    assert min(shared) < 1, "masks have parted"


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_gates_and_distances_are_of_the_devices_own_states(analysed):
    _, (_, _, gated), states = analysed
    known = [stored for _, (_, stored) in sorted(states["pFedGate"].items())]
    gates = np.concatenate([stored.own["static"] for stored in known])
    assert numbers(gated, "gates")["bins"] == measures.histogram(gates)
    manifest = states["pFedGate"]["device-0"][0]
    names = [spec.name for spec in manifest.kept if spec.trainable]
    apart = sum(float(np.square(known[0].personal[n].astype(float) - known[3].personal[n]).sum()) for n in names)
    assert numbers(gated, "models")["matrix"][0][3] == pytest.approx(math.sqrt(apart), rel=1e-3)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_pictures_are_drawn_from_rows_alone_and_are_the_same_each_time(analysed, tmp_path):
    _, found, _ = analysed
    group = Group("alpha = 0.5", {each.trial.label: (each,) for each in found})
    assert mean_analysed([found[0]], "masks", "jaccard.mean") == numbers(found[0], "masks")["jaccard"]["mean"]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        draw_analyses([group], tmp_path / name, "tiny")
    drawn = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert drawn == [
        f"tiny-{kind}.png" for kind in sorted(("masks", "pairs", "distances", "private", "kept", "gates", "theorem"))
    ]
    for name in drawn:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    without = Group("", {each.trial.label: (replace(each, analyses=()),) for each in found})
    assert analysis_sections([without]) == []


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_an_error_of_a_look_ends_the_trial(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)

    def fail(self, number):
        raise ValueError("cannot be summarised")

    monkeypatch.setattr(Observer, "close", fail)
    assert main(["analyse", str(tmp_path / "tiny.toml"), "--folder", str(tmp_path / "work"), "--only", "FedSPU"]) != 0
    assert "cannot be summarised" in capsys.readouterr().err
