"""Central differential privacy: what is added up, how much noise comes to it, what it costs, and what is refused."""

from __future__ import annotations

import hashlib
import math
import sqlite3
import statistics
import sys
import time

import numpy as np
import pytest
from sqlalchemy import event

from sparrow.coordinator.draws import choose_each, new_secret
from sparrow.coordinator.errors import BadContent, NotFound
from sparrow.coordinator.fleet.checks import check_privacy, completed
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.methods import Aggregation, CoordinatorMethod, any_budget, load_method
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.rounds.assignments import assign
from sparrow.coordinator.rounds.privacy import epsilon, spent
from sparrow.coordinator.storage.tables import Device
from sparrow.coordinator.sums import private
from sparrow.coordinator.sums.private import PrivateSums, noise_of, noisy_means
from sparrow.protocol import checkpoint
from sparrow.protocol.accounting import SENSITIVITY
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.evidence import CANDIDATES, GLOBAL, TOLD, Evidence
from sparrow.protocol.manifest import Manifest, initial_values
from sparrow.protocol.masks import NeuronDraw, draw_neurons, pack
from sparrow.protocol.messages import ChangeDevice, ChangeFederation, Kind
from sparrow.protocol.settings import FederationSettings

from .fakes import LocalCoordinator
from .test_intake import send

MNIST = load_builtin("mnist").manifest
PRIVATE = {"update_clip": 1.0, "noise_multiplier": 1.0, "early_stopping": "off"}
accountant = pytest.mark.skipif("not __import__('importlib').util.find_spec('dp_accounting')")


def private_sums(manifest, round_number=1, key=bytes(32), **changes):
    sent = initial_values(manifest, 0)
    settings = FederationSettings(**{**PRIVATE, "cohort": 4, **changes})
    sums = PrivateSums(manifest, sent, settings, key, round_number)
    return sums, sent, pack(manifest, sent, None).astype(np.float64)


@pytest.fixture
def quiet(monkeypatch):
    """No noise, and how much of it was asked for."""
    asked = []
    monkeypatch.setattr(private, "noise_of", lambda key, number, sums: asked.append(len(sums)) or np.zeros(len(sums)))
    return asked


def test_differences_are_clipped_alike_whatever_examples_and_divided_by_the_cohort(small, quiet):
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
        mask = None if ratio is None else draw_neurons(small, NeuronDraw("d", ratio))
        count = len(pack(small, sent, mask))
        sums.fold_in_place(np.full(count, 1e6, np.float32), mask, 2**40)
        moved = sums.clipped_sum
        assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-12)
        assert np.count_nonzero(moved) == count, "0 where nothing was sent"


@pytest.mark.integration
def test_the_noise_has_the_deviation_that_is_accounted_for(small):
    """2000 means of nothing: deviation z C / m on every coordinate, within 5 standard errors; never twice the same."""
    settings = {"update_clip": 0.3, "noise_multiplier": 2.0, "cohort": 3}
    rounds = [private_sums(small, number, **settings) for number in range(2000)]
    drawn = np.stack([pack(small, sums.mean(sent), None) - base for sums, sent, base in rounds])
    wanted, count = 2.0 * 0.3 / 3, drawn.size
    assert drawn.std() == pytest.approx(wanted, rel=5 / (2 * count) ** 0.5)
    assert abs(drawn.mean()) < 5 * wanted / count**0.5
    each = drawn.std(axis=0)
    assert (np.abs(each / wanted - 1) < 5 / (2 * 2000) ** 0.5).all(), "those that nobody sent, too"
    assert len({row.tobytes() for row in drawn}) == 2000


def test_a_round_has_one_noise_however_often_it_is_closed(small):
    def noisy(*args):
        sums, sent, base = private_sums(small, *args)
        return (pack(small, sums.mean(sent), None) - base).tobytes()

    assert len({noisy() for _ in range(60)}) == 1
    assert len({noisy(), noisy(2), noisy(1, bytes(31) + b"1")}) == 3


def test_two_sums_of_a_round_have_nothing_of_their_noise_in_common(small):
    """An update that comes or goes between two attempts to close a round must not lie open in their difference."""
    one, other = np.zeros(5000), np.zeros(5000)
    other[7] = 1e-12
    first, second = noise_of(bytes(32), 1, one), noise_of(bytes(32), 1, other)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 5000**0.5


def told_by(devices, gain):
    """Evidence of devices, one of which gains so much."""
    usual = {name: [1.0, 1.0, 1.0] for name in (GLOBAL, *CANDIDATES)}
    found = [Evidence.of(usual) for _ in range(devices)]
    return [*found[1:], Evidence.of({**usual, **{name: [1 - gain, 1.0, 1 + gain / 2] for name in CANDIDATES}})]


def test_one_report_on_candidates_moves_the_noisy_sum_by_at_most_one(quiet):
    settings = FederationSettings(**PRIVATE)
    usual = np.array([private.USUAL_TOLD[name.partition(" ")[0]] for name in TOLD])
    sums = [
        np.array(list(noisy_means(told_by(4, gain), 4, settings, bytes(32), 3).values())) * 4 / usual
        for gain in (0.0, 1e6, -1e6)
    ]
    for other in sums[1:]:
        assert np.linalg.norm(other - sums[0]) <= 2, "one that is another, replaced"
    assert np.linalg.norm(sums[1]) <= 4
    assert quiet == [len(TOLD)] * 3


def test_what_devices_tell_has_the_noise_that_is_accounted_for():
    """Of the same telling in many federations: deviation z on every coordinate, within 5 standard errors."""
    settings, told = FederationSettings(**{**PRIVATE, "noise_multiplier": 2.0}), told_by(4, 0.5)
    usual = np.array([private.USUAL_TOLD[name.partition(" ")[0]] for name in TOLD])
    found = [noisy_means(told, 4, settings, key.to_bytes(32, "little"), 3) for key in range(400)]
    drawn = np.array([list(each.values()) for each in found]) * 4 / usual
    assert np.std(drawn - drawn.mean(axis=0)) == pytest.approx(2.0, rel=5 / (2 * drawn.size) ** 0.5)


@accountant
def test_comparing_at_the_end_counts_as_one_more_event(open_coordinator):
    coordinator = open_coordinator()
    settings = {"method": "fedspu", "personal_model": "fleet", "cohort": 3, "min_devices": 3}
    coordinator.create(task="mnist", rounds=1, **settings, **PRIVATE)
    for name in "abc":
        coordinator.enrol(name)
    with coordinator.store.writing() as db:
        federation = find(db, "f")
        for device in db.query(Device):
            for kind in ("train", "compare"):
                db.add(assign(federation, device, Kind(kind), 1, 0, 0.0))
        federation_id = federation.id
    with coordinator.store.reading() as db:
        cost = spent(db, federation_id, 1, FederationSettings(**PRIVATE))
    assert cost.most_draws == 2
    assert cost.epsilon == epsilon(FederationSettings(**PRIVATE), 2)


def closed_form(z, times):
    """Epsilon at 1e-5 of Gaussian mechanisms in closed form (Balle and Wang, ICML 2018, theorem 8), by bisection."""
    normal, mu = statistics.NormalDist(), times**0.5 / z

    def delta(found):
        return normal.cdf(mu / 2 - found / mu) - math.exp(found) * normal.cdf(-mu / 2 - found / mu)

    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > 1e-5 else (low, middle)
    return high


@accountant
@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero_out", 1), ("replacement", 2)])
@pytest.mark.parametrize(("z", "times"), [(1.0, 1), (1.0, 10), (4.0, 16), (8.0, 3)])
def test_epsilon_is_that_of_the_largest_difference_between_neighbours(adjacency, sensitivity, z, times):
    """Rényi accounting lies a little above what is exact."""
    settings = FederationSettings(**{**PRIVATE, "noise_multiplier": z}, privacy_adjacency=adjacency)
    exact = closed_form(z / sensitivity, times)
    assert exact < epsilon(settings, times) < 1.1 * exact
    assert epsilon(settings, 0) == 0.0


@accountant
def test_epsilon_of_one_round_at_one():
    found = {each: epsilon(FederationSettings(**PRIVATE, privacy_adjacency=each), 1) for each in SENSITIVITY}
    assert found == {"zero_out": pytest.approx(4.73, abs=0.01), "replacement": pytest.approx(10.73, abs=0.01)}
    assert FederationSettings().privacy_adjacency == "replacement"


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero_out", 1), ("replacement", 2)])
def test_neighbours_differ_by_no_more_than_is_accounted_for(small, adjacency, sensitivity):
    """The worst replacement turns an update round; a device that sends nothing counts as zeros."""
    (one, _, base), (other, _, _) = private_sums(small, update_clip=0.5), private_sums(small, update_clip=0.5)
    one.fold_in_place(np.full(len(base), 1e6, np.float32), None, 1)
    if adjacency == "replacement":
        other.fold_in_place(np.full(len(base), -1e6, np.float32), None, 1)
    distance = np.linalg.norm(one.clipped_sum - other.clipped_sum)
    assert distance == pytest.approx(SENSITIVITY[adjacency] * 0.5, rel=1e-4)
    assert SENSITIVITY[adjacency] == sensitivity


REFUSED = {
    "update_clip": {"update_clip": None},
    "early_stopping": {"early_stopping": "paper"},
    "quorum": {"quorum": 0.9},
    "privacy_delta": {"privacy_delta": 0.1},
    "robust": {"robust": "median"},
    "outlier_mads": {"outlier_mads": 5},
    "cohort_policy": {"cohort_policy": "least_recently"},
    "joules_per_device": {"joules_per_device": 100.0},
    "over_selection": {"over_selection": 0.3},
    "min_updates": {"min_updates": 2},
    "buffer": {"buffer": 1},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_would_claim_more_than_it_keeps_is_refused_with_the_reason(small, setting):
    settings = completed(FederationSettings(**{**PRIVATE, **REFUSED[setting]}))
    with pytest.raises(BadContent, match=f"{setting}: noise_multiplier "):
        check_privacy(load_method("fedspu"), small, settings)


@pytest.mark.parametrize("name", ["local", "fedsgc", "feddst", "votedst", "dmpfl", "prunefl", "grasp", "pfedgate"])
def test_methods_that_let_more_out_than_a_mean_are_refused(small, name):
    with pytest.raises(BadContent, match=r"^method: noise_multiplier\b"):
        check_privacy(load_method(name), small, completed(FederationSettings(method=name, **PRIVATE)))


def test_methods_with_their_own_models_are_refused_unless_declared(small):
    own = CoordinatorMethod(smallest_budget=any_budget, aggregation=Aggregation(why_mean_only=None))
    with pytest.raises(BadContent, match="aggregation"):
        check_privacy(own, small, completed(FederationSettings(**PRIVATE)))


def test_running_statistics_are_refused(small):
    with pytest.raises(BadContent, match=r"bn\.running_mean: "):
        check_privacy(load_method("fedspu"), small, completed(FederationSettings(**PRIVATE)))


def without_norm(small):
    tensors = [spec.model_dump() for spec in small.tensors if not spec.name.startswith("bn.")]
    return Manifest.model_validate({**small.model_dump(), "tensors": tensors})


@accountant
@pytest.mark.parametrize(
    "name",
    ["fedspu", "fedavg", "fedprox", "ditto", "apfl", "fedem", "pfedme", "perfedavg", "feddrop", "heterofl", "hermes"],
)
def test_methods_of_a_plain_mean_may(small, name):
    check_privacy(load_method(name), without_norm(small), completed(FederationSettings(method=name, **PRIVATE)))


def test_without_an_accountant_nothing_is_promised(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    unknown = {**PRIVATE, "noise_multiplier": 1.2345}  # whose epsilon is not remembered from before
    settings = completed(FederationSettings(**unknown))
    with pytest.raises(BadContent, match=r"pip install 'sparrow-fl\[privacy\]'"):
        check_privacy(load_method("fedspu"), without_norm(small), settings)


# --- a whole federation ------------------------------------------------------------------------------------------

CALM = {"evaluation_interval": 0, "min_devices": 3, "cohort": 3, "rounds": 3, **PRIVATE}


@pytest.fixture
def coordinator(tmp_path, clock):
    opened = LocalCoordinator(tmp_path / "data", clock)
    yield opened
    opened.store.close()


def flat(coordinator):
    return pack(MNIST, checkpoint.load(coordinator.model())[0], None).astype(np.float64)


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
        assert (cost.most_draws, cost.delta, cost.adjacency) == (number, 1e-5, "replacement")
        assert cost.epsilon == pytest.approx(epsilon(coordinator.info().settings, number))
        assert coordinator.info().privacy == cost
    metrics = Metrics()
    metrics.observe_records(coordinator.store, time.time)
    told = metrics.registry.get_sample_value("sparrow_privacy_epsilon", {"federation": "f", "delta": "1e-05"})
    assert told == pytest.approx(cost.epsilon)
    assert quiet == [MNIST.shared_values] * 2


@pytest.mark.integration
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
    secret = new_secret("f", FederationSettings(draws="seed"))
    for number, cohort in enumerate(cohorts, 1):  # those who missed a round are away when the next one opens
        assert set(cohort) <= set(choose_each("abcd", 2 / 4, secret=secret, round_number=number))


@accountant
def test_a_device_that_is_revoked_and_enrols_again_goes_on_paying(coordinator, quiet):
    coordinator.create(task="mnist", **CALM)
    devices = coordinator.enrol("a", "b", "c")
    for number in (1, 2, 3):
        coordinator.rounds.advance()
        coordinator.devices.change(devices[0].id, ChangeDevice(revoked=True))
        for device in devices[1:]:
            send(coordinator, device, 1.0, MNIST)
        devices[0].enrol()
        coordinator.rounds.advance()
        assert coordinator.record(number).privacy.most_draws == number
    told = {each.device: each for each in coordinator.records.reports("f", 3)}
    assert "a" not in told, "it never answered, and pays for being asked"


@accountant
@pytest.mark.parametrize("again", ["goes on", "restarts"])
def test_retries_of_a_failed_commit_draw_no_new_noise(tmp_path, clock, again):
    """Sixty draws of noise would average away."""
    coordinator = LocalCoordinator(tmp_path / "data", clock, keep_models=5)
    coordinator.create(task="mnist", **CALM)
    devices = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    for device in devices:
        send(coordinator, device, 1.0, MNIST)
    made = set()

    def fail(connection):
        made.update(hashlib.sha256(path.read_bytes()).hexdigest() for path in files(tmp_path) - before)
        raise sqlite3.OperationalError("disk I/O error")

    before = files(tmp_path)
    event.listen(coordinator.store.engine, "commit", fail)
    for _ in range(5):
        coordinator.rounds.advance()
        assert coordinator.info().model_version == 0
        assert [each.version for each in coordinator.served.models("f")] == [0]
        with pytest.raises(NotFound, match="model 1 of f is not kept"):
            coordinator.served.model("f", 1)
        with pytest.raises(NotFound, match="model 1"):
            coordinator.change(action="rollback", model_version=1)
    assert len(made) == 1
    event.remove(coordinator.store.engine, "commit", fail)
    if again == "restarts":
        coordinator.store.close()
        coordinator = LocalCoordinator(tmp_path / "data", clock, keep_models=5)
    coordinator.rounds.advance()
    assert coordinator.info().model_version == 1
    assert {hashlib.sha256(coordinator.model()).hexdigest()} == made
    coordinator.store.close()


def files(folder):
    return set(folder.rglob("models/*.safetensors"))


@accountant
def test_a_change_is_held_to_what_creation_is(coordinator):
    coordinator.create(task="mnist", **{**CALM, "privacy_delta": 1e-3})
    with pytest.raises(BadContent, match="privacy_delta: noise_multiplier promises"):
        coordinator.change(cohort=2000)
    assert coordinator.info().settings.cohort == 3
    coordinator.create("robust", robust="median", cohort=5)
    with pytest.raises(BadContent, match="too few for"):
        coordinator.federations.change("robust", ChangeFederation(cohort=2))
