"""Central differential privacy: what is added up, how much noise comes to it, what it costs, and what is refused."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np
import pytest

from edge_sdk.protocol import checkpoint
from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.manifest import Manifest, initial_values
from edge_sdk.protocol.masks import NeuronDraw, draw_neurons, pack
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.errors import BadContent, NotFound, Unavailable
from sparrow.coordinator.fleet.federations import completed
from sparrow.coordinator.methods import Aggregation, CoordinatorMethod, any_budget, load_method
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.rounds import intake
from sparrow.coordinator.rounds.cohort import choose_each
from sparrow.coordinator.rounds.privacy import PrivateSums, check_privacy, epsilon, system_noise

from .fakes import LocalCoordinator
from .test_intake import send

MNIST = load_builtin("mnist").manifest
PRIVATE = {"update_clip": 1.0, "noise_multiplier": 1.0, "early_stopping": "off"}
accountant = pytest.mark.skipif("not __import__('importlib').util.find_spec('dp_accounting')")


def silent(count):
    return np.zeros(count)


def private_sums(manifest, noise=silent, **changes):
    sent = initial_values(manifest, 0)
    settings = FederationSettings(**{**PRIVATE, "cohort": 4, **changes})
    return PrivateSums(manifest, sent, settings, noise), sent, pack(manifest, sent, None).astype(np.float64)


def test_differences_are_clipped_alike_whatever_examples_and_divided_by_the_cohort(small):
    sums, sent, base = private_sums(small)
    chance = np.random.default_rng(0)
    wanted = np.zeros(len(base))
    for examples, size in ((1, 0.01), (10**6, 5.0), (3, 0.2)):
        moved = size * chance.normal(size=len(base))
        values = (base + moved).astype(np.float32)
        moved = values - base
        wanted += moved / max(1.0, np.linalg.norm(moved))
        sums.fold_in_place(values, None, examples)
    found = pack(small, sums.mean(sent), None)
    np.testing.assert_allclose(found - base, wanted / 4, atol=1e-6)


def test_no_update_moves_the_sum_by_more_than_the_clip(small):
    for ratio in (None, 0.2, 0.5):
        sums, sent, _ = private_sums(small, update_clip=0.5, cohort=1)
        mask = None if ratio is None else draw_neurons(small, NeuronDraw("j", 1, "d", ratio))
        count = len(pack(small, sent, mask))
        sums.fold_in_place(np.full(count, 1e6, np.float32), mask, 2**40)
        moved = sums.clipped_sum
        assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-12)
        assert np.count_nonzero(moved) == count, "0 where nothing was sent"


def test_the_noise_has_the_deviation_that_is_accounted_for(small):
    """2000 means of nothing: deviation z C / m on every coordinate, within 5 standard errors; never twice the same."""
    sums, sent, base = private_sums(small, system_noise, update_clip=0.3, noise_multiplier=2.0, cohort=3)
    drawn = np.stack([pack(small, sums.mean(sent), None) - base for _ in range(2000)])
    wanted, count = 2.0 * 0.3 / 3, drawn.size
    assert drawn.std() == pytest.approx(wanted, rel=5 / (2 * count) ** 0.5)
    assert abs(drawn.mean()) < 5 * wanted / count**0.5
    each = drawn.std(axis=0)
    assert (np.abs(each / wanted - 1) < 5 / (2 * 2000) ** 0.5).all(), "those that nobody sent, too"
    assert len({row.tobytes() for row in drawn}) == 2000


@accountant
def test_epsilon_is_a_known_accountants():
    """Gaussian mechanisms in closed form (Balle and Wang 2018): 4.3772 and 17.8566; Rényi accounting lies above."""
    assert 4.3772 < epsilon(1.0, 1e-5, 1) < 4.75
    assert 17.8566 < epsilon(1.0, 1e-5, 10) < 19.1
    assert epsilon(1.0, 1e-5, 0) == 0.0
    assert epsilon(4.0, 1e-5, 16) == pytest.approx(epsilon(1.0, 1e-5, 1), rel=0.01), "16 times at 4 are one at 1"


REFUSED = {
    "update_clip": {"update_clip": None},
    "early_stopping": {"early_stopping": "paper"},
    "quorum": {"quorum": 0.9},
    "privacy_delta": {"privacy_delta": 0.1},
    "robust": {"robust": "median"},
    "outlier_mads": {"outlier_mads": 5},
    "cohort_policy": {"cohort_policy": "least_recently"},
    "over_selection": {"over_selection": 0.3},
    "min_updates": {"min_updates": 2},
    "buffer": {"buffer": 1},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_would_claim_more_than_it_keeps_is_refused_with_the_reason(small, setting):
    settings = completed(FederationSettings(**{**PRIVATE, **REFUSED[setting]}))
    with pytest.raises(BadContent, match=f"{setting}: noise_multiplier promises differential privacy, but .{{20,}}"):
        check_privacy(load_method("fedspu"), small, settings)


@pytest.mark.parametrize("name", ["local", "fedsgc", "feddst", "dmpfl", "prunefl", "grasp", "pfedgate"])
def test_methods_that_let_more_out_than_a_mean_are_refused(small, name):
    with pytest.raises(BadContent, match=r"method: noise_multiplier promises differential privacy, but .{20,}"):
        check_privacy(load_method(name), small, completed(FederationSettings(method=name, **PRIVATE)))


def test_a_method_that_makes_its_models_in_its_own_way_is_refused_unless_it_vouches_for_it(small):
    own = CoordinatorMethod(smallest_budget=any_budget, aggregation=Aggregation(why_mean_only=None))
    with pytest.raises(BadContent, match="an aggregation of its own, which may tell more than the mean"):
        check_privacy(own, small, completed(FederationSettings(**PRIVATE)))


def test_running_statistics_are_refused(small):
    with pytest.raises(BadContent, match=r"bn\.running_mean: running statistics would get noise"):
        check_privacy(load_method("fedspu"), small, completed(FederationSettings(**PRIVATE)))


def without_norm(small):
    tensors = [spec.model_dump() for spec in small.tensors if not spec.name.startswith("bn.")]
    return Manifest.model_validate({**small.model_dump(), "tensors": tensors})


@accountant
@pytest.mark.parametrize("name", ["fedspu", "fedavg", "fedprox", "ditto", "apfl", "feddrop", "heterofl", "hermes"])
def test_methods_of_a_plain_mean_may(small, name):
    check_privacy(load_method(name), without_norm(small), completed(FederationSettings(method=name, **PRIVATE)))


def test_without_an_accountant_nothing_is_promised(small, monkeypatch):
    epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(BadContent, match=r"pip install 'sparrow-fl\[privacy\]'"):
        check_privacy(load_method("fedspu"), without_norm(small), completed(FederationSettings(**PRIVATE)))


# --- a whole federation ------------------------------------------------------------------------------------------

CALM = {"evaluation_interval": 0, "min_devices": 3, "cohort": 3, "rounds": 3, **PRIVATE}


@pytest.fixture
def coordinator(tmp_path, clock):
    opened = LocalCoordinator(tmp_path / "data", clock)
    yield opened
    opened.store.close()


def flat(coordinator):
    return pack(MNIST, checkpoint.load(coordinator.model())[0], None).astype(np.float64)


@pytest.fixture
def quiet(monkeypatch):
    """No noise, and how much of it was asked for."""
    asked = []
    monkeypatch.setattr(
        intake, "PrivateSums", lambda *known: PrivateSums(*known, lambda count: asked.append(count) or np.zeros(count))
    )
    return asked


@accountant
def test_a_round_costs_what_the_device_drawn_most_often_pays(coordinator, quiet):
    coordinator.create(task="mnist", **CALM)
    devices = coordinator.enrol("a", "b", "c")
    assert coordinator.info().privacy.epsilon == 0.0
    for number in (1, 2):
        coordinator.rounds.advance()
        before = flat(coordinator)
        for device in devices:
            send(coordinator, device, 10.0, MNIST)
        coordinator.rounds.advance()
        assert np.linalg.norm(flat(coordinator) - before) == pytest.approx(1.0, rel=1e-3), (
            "three of length 1, over three"
        )
        cost = coordinator.record(number).privacy
        assert (cost.most_draws, cost.delta) == (number, 1e-5)
        assert cost.epsilon == pytest.approx(epsilon(1.0, 1e-5, number))
        assert coordinator.info().privacy == cost
    metrics = Metrics()
    metrics.observe_records(coordinator.store)
    told = metrics.registry.get_sample_value("sparrow_privacy_epsilon", {"federation": "f", "delta": "1e-05"})
    assert told == pytest.approx(cost.epsilon)
    assert quiet == [MNIST.shared_values] * 2


@accountant
def test_a_round_in_which_nobody_answers_makes_noise_all_the_same(coordinator, clock):
    coordinator.create(task="mnist", **CALM)
    coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    before = flat(coordinator)
    clock.pass_seconds(101)
    coordinator.rounds.advance()
    assert np.abs(flat(coordinator) - before).std() == pytest.approx((1 - 2 / np.pi) ** 0.5 / 3, rel=0.05), (
        "half-normal"
    )
    assert coordinator.record(1).updates == 0
    assert coordinator.record(1).privacy.most_draws == 1


@accountant
def test_a_round_whose_transaction_fails_draws_its_noise_once_and_shows_no_model(coordinator, clock, monkeypatch):
    coordinator.create(task="mnist", **CALM)
    coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    drawn, mean, writing = [], PrivateSums.mean, coordinator.store.writing
    monkeypatch.setattr(PrivateSums, "mean", lambda *known: drawn.append(1) or mean(*known))
    clock.pass_seconds(101)
    fails = 10

    @contextmanager
    def failing():
        nonlocal fails
        with writing() as db:
            yield db
            if len(drawn) and fails:
                fails -= 1
                raise (Unavailable if fails % 2 else OSError)("no commit")

    monkeypatch.setattr(coordinator.store, "writing", failing)
    while fails:
        coordinator.rounds.advance()
        assert coordinator.info().model_version == 0
        with pytest.raises(NotFound):
            coordinator.federations.model("f", 1)
    (made,) = (key for key in coordinator.store.blobs.keys("1/models") if "000000001" in key)
    coordinator.rounds.advance()
    assert len(drawn) == 1
    assert coordinator.store.blobs.get(made) == coordinator.model()
    assert coordinator.record(1).privacy.most_draws == 1


@accountant
def test_each_device_is_drawn_by_itself(coordinator, clock):
    coordinator.create(task="mnist", **{**CALM, "rounds": 12, "cohort": 2, "min_devices": 4})
    devices = coordinator.enrol("a", "b", "c", "d")
    for _ in range(8):
        coordinator.rounds.advance()
        clock.pass_seconds(101)
        coordinator.rounds.advance()
        for device in devices:
            device.ask()  # all are back
    cohorts = [record.cohort for record in coordinator.records.rounds("f")]
    assert len({len(cohort) for cohort in cohorts}) > 2, "not always two"
    for number, cohort in enumerate(cohorts, 1):  # those who missed a round are away when the next one opens
        assert set(cohort) <= set(choose_each("abcd", 2 / 4, job="f:0", round_number=number))
