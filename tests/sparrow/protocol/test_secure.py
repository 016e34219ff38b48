"""Secure aggregation, part by part: shares, neighbours, cells, numbers, pads; whole rounds; and what devices refuse."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from edge_sdk.device.demands import Demands
from edge_sdk.device.secure import SecureRound as OneDevice
from edge_sdk.device.trust import Trust
from edge_sdk.methods import Update
from sparrow.protocol.messages import Kind
from sparrow.protocol.secure import device, pads, shamir
from sparrow.protocol.secure.device import RoundSecrets
from sparrow.protocol.secure.fine import METRICS, hide_extras, read_extras
from sparrow.protocol.secure.groups import (
    LARGEST_FAILURE,
    Sharing,
    chance_of_failure,
    choose_sharing,
    make_cells,
    most_of,
    neighbourhoods,
)
from sparrow.protocol.secure.messages import Peer
from sparrow.protocol.secure.numbers import WORDS, Scale
from sparrow.protocol.secure.opening import CannotOpen, open_sum, secret_of
from sparrow.protocol.secure.pads import BadSecret
from sparrow.protocol.secure.shamir import PRIME, SHARE_BYTES, at, join, split
from sparrow.protocol.settings import FederationSettings

from ...kinds import ALL
from ...secure_rounds import (
    PHASES,
    SecureRound,
    identity_of,
    names_of,
    public_identity_of,
    seeded,
    signed_by,
    total_of,
)

# Shamir's shares.


@pytest.fixture
def field(monkeypatch):
    """A function that sets the size of the field and what is drawn from it."""

    def set_to(prime, drawn):
        coefficients = iter(drawn)
        monkeypatch.setattr(shamir, "PRIME", prime)
        monkeypatch.setattr(shamir, "secrets", SimpleNamespace(randbelow=lambda below: next(coefficients)))

    return set_to


def test_shares_are_those_of_the_published_example(field):
    field(1613, [166, 94])
    shares = split(1234, 3, range(1, 7))
    assert list(shares.values()) == [1494, 329, 965, 176, 1188, 775]
    for three in itertools.combinations(shares, 3):
        assert join({point: shares[point] for point in three}) == 1234


def test_any_t_of_n_shares_give_the_secret_and_every_other_share():
    chance = random.Random(0)
    for _ in range(40):
        count = chance.randint(1, 12)
        threshold = chance.randint(1, count)
        points = chance.sample(range(1, 1000), count)
        secret = chance.randrange(PRIME)
        with seeded(chance):
            shares = split(secret, threshold, points)
        some = {point: shares[point] for point in chance.sample(points, threshold)}
        assert join(some) == secret
        assert all(at(point, some) == shares[point] for point in points)
        if threshold > 1:
            few = {point: shares[point] for point in list(some)[:-1]}
            assert join(few) != secret  # by chance once in 2^255


@pytest.mark.parametrize("known", [(1, 2), (2, 5), (3, 4)])
def test_fewer_than_t_shares_are_as_likely_with_every_secret(known, field):
    prime, seen = 7, {}
    for secret in range(prime):
        for coefficients in itertools.product(range(prime), repeat=2):
            field(prime, coefficients)
            shares = split(secret, 3, range(1, 6))
            seen.setdefault(tuple(shares[point] for point in known), Counter())[secret] += 1
    assert len(seen) == prime**2
    assert all(counts == Counter(range(prime)) for counts in seen.values())


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [(-1, 1, [1]), (PRIME, 1, [1]), (1, 3, [1, 2]), (1, 2, [1, 1]), (1, 2, [0, 1]), (1, 0, [1]), (1, 2, [1, PRIME])],
)
def test_shares_that_cannot_be_made_are_refused(secret, threshold, points):
    with pytest.raises(ValueError, match="field"):
        split(secret, threshold, points)


def test_wrong_shares_are_named_and_the_secret_still_comes_out():
    chance, secret = random.Random(0), bytes(range(31))
    with seeded(chance):
        shares = split(int.from_bytes(secret, "big"), 6, range(1, 11))
    assert secret_of(shares, 6, lambda each: each == secret) == (secret, set())
    for wrong in ({1}, {1, 2}, {4, 9}):  # {1, 2}: the first six, two of them wrong, give the right secret
        changed = {point: (share + (point in wrong)) % PRIME for point, share in shares.items()}
        assert secret_of(changed, 6, lambda each: each == secret) == (secret, wrong)
    many = {point: share ^ (point < 5) for point, share in shares.items()}
    assert secret_of(many, 6, lambda each: each == secret) == (secret, set())  # right, but nobody can be named
    too_many = {point: share * (1 + point * (point < 6)) % PRIME for point, share in shares.items()}
    assert secret_of(too_many, 6, lambda each: each == secret)[0] is None
    few = {point: shares[point] for point in range(1, 6)}
    assert secret_of(few, 6, lambda each: each == secret) == (None, set())


# Neighbours and cells.


@pytest.mark.parametrize(("devices", "gone", "neighbours", "threshold"), [(7, 2, 4, 3), (9, 3, 6, 4), (8, 1, 2, 2)])
def test_the_chance_of_failure_is_that_of_all_neighbourhoods(devices, gone, neighbours, threshold):
    vanished, bound = set(range(gone)), 0.0
    for name in range(devices):
        sets = list(itertools.combinations([other for other in range(devices) if other != name], neighbours))
        bound += sum(len(set(each) - vanished) < threshold for each in sets) / len(sets)
    assert chance_of_failure(devices, gone, neighbours, threshold) == pytest.approx(bound)


def test_the_smallest_sharing_that_is_safe_and_seldom_fails_is_chosen():
    for devices, colluders, dropouts in itertools.product(range(4, 26), range(4), (0.0, 0.1, 0.3)):
        gone, chosen = math.floor(dropouts * devices + 1e-9), choose_sharing(devices, colluders, dropouts)
        fits = [
            (neighbours, threshold)
            for neighbours in [*range(2, devices - 1, 2), devices - 1]
            for threshold in [math.floor((neighbours + colluders) / 2) + 1]
            if threshold <= neighbours and chance_of_failure(devices, gone, neighbours, threshold) < LARGEST_FAILURE
        ]
        assert chosen == (Sharing(*fits[0]) if fits else None), (devices, colluders, dropouts)


@pytest.mark.parametrize("devices", [5, 10, 31, 50, 100, 200])
def test_no_coordinator_with_colluders_gets_both_kinds_of_shares(devices):
    for colluders, dropouts in itertools.product(range(6), (0.0, 0.05, 0.2, 0.3)):
        chosen = choose_sharing(devices, colluders, dropouts)
        if chosen is not None:
            assert (chosen.neighbours + colluders) / 2 < chosen.threshold <= chosen.neighbours < devices
            gone = math.floor(dropouts * devices + 1e-9)
            assert chance_of_failure(devices, gone, chosen.neighbours, chosen.threshold) < LARGEST_FAILURE == 1e-4


def test_six_of_ten_shares_would_fail_in_nearly_all_rounds_of_fifty():
    chance, failed, names = random.Random(0), 0, names_of(50)
    for each in range(1000):
        around = neighbourhoods(tuple(names), 10, f"{each}".encode())
        left = set(chance.sample(names, 35))
        failed += any(len(left & set(of)) < 6 for of in around.values())
    assert failed / 1000 > 0.98
    assert chance_of_failure(50, 15, 10, 6) > 1  # a bound: expected devices whose secrets are lost


@pytest.mark.parametrize(("devices", "neighbours"), [(3, 2), (5, 4), (6, 5), (10, 8), (10, 9), (51, 32), (200, 82)])
def test_neighbours_are_mutual_and_as_many_as_asked_for(devices, neighbours):
    names = names_of(devices)
    around = neighbourhoods(tuple(names), neighbours, b"seed")
    assert around.keys() == set(names)
    for name, others in around.items():
        assert len(others) == len(set(others)) == neighbours
        assert name not in others
        assert all(name in around[other] for other in others)
    assert around == neighbourhoods(tuple(names[::-1]), neighbours, b"seed")
    assert devices < 6 or around != neighbourhoods(tuple(names), neighbours, b"other")


def test_each_device_is_in_one_cell_that_asks_no_more_of_it_than_it_can():
    for seed in range(200):
        chance = random.Random(seed)
        least = chance.randint(1, 6)
        choices = chance.sample([0.1, 0.25, 0.5, 0.75, 1.0], chance.randint(1, 5))
        ratios = {name: chance.choice(choices) for name in names_of(chance.randint(1, 60))}
        cells = make_cells(ratios, least, b"%d" % seed)
        held = [name for cell in cells for name in cell.names]
        assert sorted(held) == sorted(ratios)
        assert len(held) == len(set(held))
        for cell in cells:
            assert len(cell.names) >= min(least, len(ratios))
            assert cell.ratio == min(ratios[name] for name in cell.names)
        for name, ratio in ratios.items():  # a ratio with enough devices is trained by all of them, or in a smaller one
            held_by = next(cell for cell in cells if name in cell.names)
            assert held_by.ratio <= ratio


def test_devices_that_train_the_whole_model_are_one_cell():
    (cell,) = make_cells(dict.fromkeys(names_of(7)), 3, b"")
    assert cell.names == tuple(names_of(7))
    assert cell.ratio is None


# Numbers.


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("devices", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_the_largest_numbers_does_not_wrap(bits, devices, sign):
    scale = Scale(bits, devices, 0.25, 30.0)
    largest = np.full(50, sign * 0.25, np.float32)
    parts = [scale.round(largest, 30.0, np.random.default_rng(each))[0] for each in range(devices)]
    found = scale.sum_of(total_of(parts))
    np.testing.assert_allclose(found, sign * 0.25 * 30.0 * devices, rtol=1e-12)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("devices", [3, 20, 200])
def test_running_statistics_and_metrics_are_summed_far_finer_than_a_word_says(bits, devices):
    """Means and variances of any magnitude, moved by up to 16 times as much, beside losses and accuracies."""
    chance = np.random.default_rng(devices)
    scale, weights = Scale(bits, devices, 0.5, 40.0), chance.integers(1, 41, devices)
    base = np.array([0.0, 1.0, 1e-6, -300.0, 5e4], np.float32)
    moved = chance.uniform(-16, 16, (devices, 5)) * (1 + abs(base.astype(np.float64)))
    told = [{"train_loss": chance.uniform(0, 5), "accuracy_global": chance.uniform()} for _ in range(devices)]
    told[0]["accuracy_global"] = None
    total = np.zeros(2 * (5 + 2 * len(METRICS)), WORDS[bits])
    for change, metrics, weight in zip(moved, told, weights, strict=True):
        words, clipped = hide_extras(change, base, metrics, scale, float(weight), chance)
        assert (len(words), clipped) == (len(total), 0)
        total += words
    sums, means = read_extras(total, base, scale, metrics=True)
    # Six deviations of what rounding does to a sum, as a share of its range.
    error = 6 * 40 / (2 * scale.steps**2) * math.sqrt(devices) / 2 + 1e-12
    wanted = (weights[:, None] * moved).sum(axis=0)
    assert (abs(sums - wanted) <= error * 16 * (1 + abs(base.astype(np.float64)))).all()
    loss, weight = means["train_loss"]
    assert abs(weight - weights.sum()) <= error
    assert abs(loss - sum(w * each["train_loss"] for w, each in zip(weights, told, strict=True))) <= 100 * error
    accuracy, weight = means["accuracy_global"]
    assert abs(weight - weights[1:].sum()) <= error
    assert (
        abs(accuracy - sum(w * each["accuracy_global"] for w, each in list(zip(weights, told, strict=True))[1:]))
        <= error
    )
    assert abs(means["loss_personal"][1]) <= error  # nobody had it


def test_a_statistic_that_moves_further_is_clipped_and_counted():
    scale, base = Scale(16, 4, 0.5, 1.0), np.array([1.0, 1.0, 1.0], np.float32)
    words, clipped = hide_extras(np.array([40.0, -40.0, np.nan]), base, None, scale, 1.0, np.random.default_rng(0))
    assert clipped == 3
    np.testing.assert_allclose(read_extras(words, base, scale, metrics=False)[0], [32, -32, 0], atol=1e-5)


def test_rounding_is_right_on_average_and_within_the_stated_deviation():
    scale, count, rounds = Scale(16, 40, 0.5, 10.0), 300, 400
    values = np.random.default_rng(0).uniform(-0.5, 0.5, count).astype(np.float32)
    exact = values.astype(np.float64) * 7
    errors = np.array(
        [scale.sum_of(scale.round(values, 7.0, np.random.default_rng([1, each]))[0]) - exact for each in range(rounds)]
    )
    assert np.abs(errors).max() < scale.step
    assert np.abs(errors.mean(axis=0)).max() < 5 * scale.deviation(1) / math.sqrt(rounds)
    assert abs(errors.mean()) < 5 * scale.deviation(1) / math.sqrt(rounds * count)
    assert errors.std(axis=0).max() < 1.1 * scale.deviation(1)


def test_what_is_clipped_is_counted():
    values = np.array([0.0, 0.5, -0.5, 0.51, -9.0, np.inf, -np.inf, np.nan], np.float32)
    words, clipped = Scale(32, 3, 0.5, 1.0).round(values, 1.0, np.random.default_rng(0))
    assert clipped == 5
    found = Scale(32, 3, 0.5, 1.0).sum_of(words)
    np.testing.assert_allclose(found, [0, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0], atol=1e-8)


# Keys, pads and signatures, against published vectors.


def hkdf(material: bytes, salt: bytes, info: bytes, count: int) -> bytes:
    """RFC 5869, written down once more."""
    key = hmac.digest(salt or bytes(32), material, "sha256")
    out, last = b"", b""
    for number in itertools.count(1):
        if len(out) >= count:
            return out[:count]
        last = hmac.digest(key, last + info + bytes([number]), "sha256")
        out += last
    raise AssertionError


def test_keys_are_derived_as_rfc_5869_says():
    first = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    third = hkdf(b"\x0b" * 22, b"", b"", 42)
    assert third.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert pads.derive(b"\x0b" * 31, "round", "pads") == hkdf(b"\x0b" * 31, b"", b'["round", "pads"]', 32)
    assert pads.derive(b"\x0b" * 31, "round", "pads") != pads.derive(b"\x0b" * 31, "round", "shares")
    assert pads.derive(b"\x0b" * 31, "round", "pads") != pads.derive(b"\x0b" * 31, "another", "pads")


def test_pads_are_the_stream_of_rfc_8439():
    zero = pads.stream(bytes(32), 64, 16).tobytes()
    assert zero.hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11c"
        "c387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45"
        "ace10a1f4b794d6f"
    )
    third = pads.stream(bytes([0, 0xFF]) + bytes(30), 48, 32).tobytes()[128:]
    assert third.hex() == (
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b"
        "7374f4872e99f096"
    )


def test_keys_are_agreed_on_as_rfc_7748_says():
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    common = bytes.fromhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    own = X25519PrivateKey.from_private_bytes(scalar)
    both = sorted((own.public_key().public_bytes_raw().hex(), point.hex()))
    assert pads.agree(own, point, "round", "pads") == pads.derive(common, "round", "pads", *both)


def test_both_devices_agree_on_one_key_and_nobody_else_does():
    one, other, third = (pads.pair_of(bytes([each]) * 31, "round", "pads") for each in range(3))
    public = {pair: pair.public_key().public_bytes_raw() for pair in (one, other, third)}
    key = pads.agree(one, public[other], "round", "pads")
    assert key == pads.agree(other, public[one], "round", "pads")
    assert len({key, pads.agree(one, public[third], "round", "pads"), pads.agree(one, public[other], "r", "pads")}) == 3
    assert key != pads.agree(one, public[other], "round", "shares")


@pytest.mark.parametrize("point", sorted(pads.LOW_ORDER))
@pytest.mark.parametrize("high", [0, 2**255])
def test_public_keys_of_low_order_are_refused(point, high):
    for same in (point, point + PRIME):
        if same < 2**255:
            public = (same + high).to_bytes(32, "little")
            with pytest.raises(BadSecret, match="X25519"):
                pads.agree(pads.pair_of(bytes(31), "round", "pads"), public, "round", "pads")
            with pytest.raises(BadSecret, match="d007"):
                pads.check_public(public, "d007")


def test_other_public_keys_are_not():
    for each in range(20):
        public = pads.pair_of(bytes([each]) * 31, "round", "pads").public_key().public_bytes_raw()
        pads.check_public(public, "d007")
        assert X25519PublicKey.from_public_bytes(public)


def test_signatures_are_those_of_rfc_8032(monkeypatch):
    identity = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert pads.public_identity(identity) == public
    monkeypatch.setattr(pads, "_said", lambda context, said: b"")
    assert pads.sign(identity, "", {}).hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b"
    )


def test_a_signature_is_of_one_round_and_of_all_that_is_said():
    identity = hashlib.sha256(b"identity").digest()
    public, said = pads.public_identity(identity), {"pads": "1", "shares": "2"}
    signature = pads.sign(identity, "round", said)
    pads.check_signature(public, signature, "round", said, "d007")
    others = [
        (public, signature, "another", said),
        (public, signature, "round", said | {"pads": "3"}),
        (public, signature, "round", {"pads": "2", "shares": "1"}),
        (public, bytes([signature[0] ^ 1]) + signature[1:], "round", said),
        (public, b"", "round", said),
        (pads.public_identity(hashlib.sha256(b"other").digest()), signature, "round", said),
        (bytes(31), signature, "round", said),
    ]
    for other in others:
        with pytest.raises(BadSecret, match="d007"):
            pads.check_signature(*other, "d007")


def test_a_sealed_message_that_is_changed_in_any_byte_is_refused():
    key, message = bytes(range(32)), bytes(range(64))
    sealed = pads.seal(key, message, "about")
    assert pads.unseal(key, sealed, "about", "d007") == message
    changed = [bytes(byte ^ (place == at) for at, byte in enumerate(sealed)) for place in range(len(sealed))]
    for other in [*changed, sealed[:-1], sealed + b"0", b"", sealed[:12]]:
        with pytest.raises(BadSecret, match="d007"):
            pads.unseal(key, other, "about", "d007")
    for other_key, about in ((key, "another"), (bytes(32), "about")):
        with pytest.raises(BadSecret):
            pads.unseal(other_key, sealed, about, "d007")
    assert pads.seal(key, message, "about") != sealed


# Whole rounds.


def random_round(devices: int, seed: int, share: float, phase: str, **settings: object) -> SecureRound:
    chance = random.Random(f"{devices} {seed} {share} {phase}")
    names = names_of(devices)
    vanish = {phase: chance.sample(names, math.floor(share * devices))}
    weights = {name: float(chance.randint(1, 100)) for name in names}
    return SecureRound(devices, seed=seed, weights=weights, vanish=vanish, **settings)


def check_round(played: SecureRound) -> int:
    """Play a round, check every sum that comes out, and return how many cells have none though enough are left."""
    outcome = played.play()
    assert not played.refused
    assert not outcome.wrong
    view, least = played.view, played.view.colluders + 2
    failed = int(played.why_over is not None)
    for cell in view.cells if not failed else ():
        left = tuple(name for name in cell.names if name in view.masked)
        if left not in outcome.sums:
            failed += len(left) >= least
            continue
        assert len(left) >= least
        assert (outcome.sums[left] == played.added(left)).all()
        scale = played.scale_of(cell.names)
        clipped = {
            name: np.clip(played.values[name].astype(float), -scale.value_range, scale.value_range) for name in left
        }
        exact = np.add.reduce([clipped[name] * played.weights[name] for name in left])
        error = scale.sum_of(outcome.sums[left]) - exact
        assert np.abs(error).max() < len(left) * scale.step
        assert math.sqrt((error**2).mean()) < 1.15 * scale.deviation(len(left))
    return failed


def grid(*devices: int) -> list[tuple[int, float, str]]:
    vanishing = [(share, phase) for share in (0.1, 0.3) for phase in PHASES]
    return [(count, share, phase) for count in devices for share, phase in [(0.0, "keys"), *vanishing]]


@pytest.mark.integration
def test_sums_are_those_of_all_whose_masked_updates_came():
    failed = sum(check_round(random_round(*case[:1], seed, *case[1:])) for case in grid(10) for seed in range(6))
    failed += sum(check_round(random_round(*case[:1], 0, *case[1:])) for case in grid(50))
    assert failed == 0


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_at_most_one_round_of_three_hundred_has_no_sum():
    runs = {10: 20, 50: 12, 200: 1}
    cases = [(*case, seed) for count, seeds in runs.items() for case in grid(count) for seed in range(seeds)]
    cases += [(200, 0.3, phase, seed) for phase in ("train", "unmask") for seed in range(1, 3)]
    cases = cases[:300]
    assert len(cases) >= 299
    cases = cases[:: 1 if ALL else 5]
    assert sum(check_round(random_round(devices, seed, *rest)) for devices, *rest, seed in cases) <= 1


@pytest.mark.integration
@pytest.mark.parametrize("bits", [16, 32])
def test_cells_of_several_ratios_are_summed_apart(bits):
    ratios = {name: (0.25, 0.5, 0.5, 1.0)[place % 4] for place, name in enumerate(names_of(40))}
    for phase in PHASES:
        played = random_round(40, 1, 0.3, phase, ratios=ratios, bits=bits)
        assert check_round(played) == 0
        assert len(played.view.cells) >= 2


def test_what_is_kept_between_devices_of_a_test_changes_nothing():
    rounds = [SecureRound(10, vanish={"train": ["d003"]}, remember=remember) for remember in (True, False)]
    outcomes = [each.play() for each in rounds]
    assert rounds[0].view.keys == rounds[1].view.keys
    assert rounds[0].view.shares == rounds[1].view.shares
    assert rounds[0].view.answers == rounds[1].view.answers
    assert all((rounds[0].view.masked[name] == words).all() for name, words in rounds[1].view.masked.items())
    assert all((outcomes[0].sums[names] == words).all() for names, words in outcomes[1].sums.items())


def test_a_cell_of_too_few_survivors_is_lost_and_others_are_not():
    ratios = {name: 0.5 if name < "d006" else 1.0 for name in names_of(20)}
    played = SecureRound(20, ratios=ratios, vanish={"train": ["d000", "d001", "d002", "d003"]})
    outcome = played.play()
    assert list(outcome.lost) == [("d004", "d005")]
    assert [len(left) for left in outcome.sums] == [14]
    answers = played.view.answers.values()
    assert not any({"d000", "d004", "d005"} & {*answer.seeds, *answer.pads} for answer in answers)


def test_a_cell_that_shrinks_while_sharing_is_not_trained():
    ratios = {name: 0.5 if name < "d006" else 1.0 for name in names_of(20)}
    played = SecureRound(20, ratios=ratios, vanish={"shares": ["d000", "d001", "d002", "d003"]})
    outcome = played.play()
    assert not {"d004", "d005"} & played.view.masked.keys()
    assert [len(left) for left in outcome.sums] == [14]


# What devices refuse.


@pytest.fixture(scope="module")
def opened() -> SecureRound:
    """A round that is over, in which d003 vanished instead of sending an update."""
    played = SecureRound(10, vanish={"train": ["d003"]}, seed=5, size=50)
    played.play()
    return played


@pytest.fixture(scope="module")
def keyed() -> SecureRound:
    """A round whose keys are told."""
    return SecureRound(10, seed=5, size=50).until("shares")


def shares_work(played: SecureRound, name: str = "d000"):
    return played.view.told["shares", name]


def with_peer(work, place: int, **changes):
    peers = list(work.peers)
    peers[place] = Peer.model_validate(peers[place].model_dump() | changes)
    return work.model_copy(update={"peers": tuple(peers)})


def ask_shares(played: SecureRound, work, known=None):
    fresh = replace(played.kept["d000"], shared=None, work=None)
    return device.share(fresh, "d000", work, known or {})


def test_a_forged_signature_is_refused(keyed):
    work = shares_work(keyed)
    keys = work.peers[2].keys.model_dump()
    forged = keys | {"signature": keys["signature"][:-1] + ("0" if keys["signature"][-1] != "0" else "1")}
    with pytest.raises(BadSecret, match="not signed"):
        ask_shares(keyed, with_peer(work, 2, keys=forged))


@pytest.mark.parametrize("which", ["pads", "shares", "commitment"])
def test_a_key_that_the_coordinator_puts_in_its_place_is_refused(keyed, which):
    work = shares_work(keyed)
    for other in (keyed.view.keys["d009"].model_dump(), {which: "09" + 31 * "00"}):
        keys = work.peers[2].keys.model_dump() | {which: other[which]}
        with pytest.raises(BadSecret, match=r"not signed|same pad key"):
            ask_shares(keyed, with_peer(work, 2, keys=keys))


def test_keys_that_two_devices_have_swapped_are_refused(keyed):
    work = shares_work(keyed)
    one, other = (work.peers[place].keys.model_dump() for place in (2, 4))
    with pytest.raises(BadSecret, match="not signed"):
        ask_shares(keyed, with_peer(with_peer(work, 2, keys=other), 4, keys=one))


def test_an_identity_that_is_not_that_of_rounds_before_is_refused(keyed):
    work = shares_work(keyed)
    name, identity = work.peers[2].name, work.peers[2].identity
    assert ask_shares(keyed, work, {name: identity})
    with pytest.raises(BadSecret, match=name):
        ask_shares(keyed, work, {name: work.peers[3].identity})


def test_a_device_under_two_names_is_refused(keyed):
    work = shares_work(keyed)
    twin = Peer.model_validate(work.peers[2].model_dump() | {"name": "twin", "point": 77})
    itself = Peer.model_validate(keyed.peer("d000").model_dump() | {"name": "mirror", "point": 77})
    for other in (twin, itself):
        told = {"peers": (*work.peers, other), "cell": (*work.cell, other.name)}
        with pytest.raises(BadSecret, match="two names"):
            ask_shares(keyed, work.model_copy(update=told | {"cohort": work.cohort | {other.name: other.identity}}))
        with pytest.raises(BadSecret, match="not the whole cohort"):
            ask_shares(keyed, work.model_copy(update=told))
    own = keyed.peer("d000")
    with pytest.raises(BadSecret, match="two names"):
        ask_shares(keyed, work.model_copy(update={"peers": (*work.peers, own)}))


def test_a_cohort_that_is_not_that_of_the_peers_is_refused(keyed):
    work, name = shares_work(keyed), "d003"
    for missing in (name, "d000"):
        cohort = {other: identity for other, identity in work.cohort.items() if other != missing}
        with pytest.raises(BadSecret, match="not the whole cohort"):
            ask_shares(keyed, work.model_copy(update={"cohort": cohort}))
    for identity, match in ((64 * "1", "two identity keys"), (work.cohort["d004"], "two names")):
        with pytest.raises(BadSecret, match=match):
            ask_shares(keyed, work.model_copy(update={"cohort": work.cohort | {name: identity}}))
    far = work.model_copy(update={"cohort": work.cohort | {"far": 64 * "1"}})  # no peer, and not met before
    assert ask_shares(keyed, far)
    with pytest.raises(BadSecret, match="far: its identity key differs"):
        ask_shares(keyed, far, {"far": 64 * "2"})


def test_a_key_of_low_order_is_refused(keyed):
    identity = hashlib.sha256(b"identity of d004").digest()
    kept = keyed.kept["d004"]
    keys = device.public_keys(kept, identity).model_dump() | {"pads": 64 * "0"}
    del keys["signature"]
    signature = pads.sign(identity, kept.context, keys).hex()
    work = shares_work(keyed)
    place = next(place for place, peer in enumerate(work.peers) if peer.name == "d004")
    changes = {"identity": pads.public_identity(identity).hex(), "keys": keys | {"signature": signature}}
    work = work.model_copy(update={"cohort": work.cohort | {"d004": changes["identity"]}})
    with pytest.raises(BadSecret, match="d004: a public key"):
        ask_shares(keyed, with_peer(work, place, **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"threshold": 4}, "both kinds"),
        ({"threshold": 0}, "both kinds"),
        ({"threshold": 9}, "both kinds"),
        ({"colluders": 2}, "both kinds"),
        ({"colluders": 9}, "both kinds"),
        ({"cell": ("d000", "d001")}, "needs at least"),
        ({"cell": ("d001", "d002", "d003")}, "not the cell"),
        ({"cell": ("d000", "d001", "nobody")}, "not list all"),
        ({"neighbours": ("d000", "d001", "d002")}, "not list all"),
        ({"neighbours": ("d001", "d001", "d002", "d003", "d004", "d005", "d006", "d007")}, "twice"),
        ({"peers": ()}, "not list all"),
        ({"context": "federation|4|n"}, "another round"),
    ],
)
def test_what_protects_nobody_is_refused(keyed, changes, match):
    with pytest.raises(BadSecret, match=match):
        ask_shares(keyed, shares_work(keyed).model_copy(update=changes))


def test_two_shares_at_one_point_are_refused(keyed):
    work = shares_work(keyed)
    with pytest.raises(BadSecret, match="same share"):
        ask_shares(keyed, with_peer(work, 2, point=work.peers[3].point))
    with pytest.raises(BadSecret, match="twice"):
        ask_shares(keyed, work.model_copy(update={"peers": (*work.peers, work.peers[0])}))


def test_shares_are_told_once_and_the_same_again(keyed):
    work, kept = shares_work(keyed), keyed.kept["d000"]
    assert device.share(kept, "d000", work, {}) == (kept, kept.shared)
    with pytest.raises(BadSecret, match="twice"):
        device.share(kept, "d000", work.model_copy(update={"threshold": 6}), {})
    with pytest.raises(BadSecret, match="twice"):
        device.share(kept, "d000", work.model_copy(update={"neighbours": work.neighbours[:-1]}), {})


def train_lies(work):
    few = ("d000", "d001")
    least = dict(itertools.islice(work.sealed.items(), 4))
    other = sorted(work.sealed)[0]
    return [
        ({"left": few}, "at least 3"),
        ({"left": work.left[1:]}, "at least 3 must"),
        ({"sealed": least}, "too few neighbours"),
        ({"context": "federation|4|n"}, "another round"),
        ({"left": tuple(name for name in work.left if name != other)}, "other devices of the cell"),
        (
            {"sealed": {name: sealed for name, sealed in work.sealed.items() if name != other}},
            "other devices of the cell",
        ),
    ]


@pytest.mark.parametrize("place", range(6))
def test_an_update_that_too_few_would_hide_is_not_sent(opened, place):
    work, kept = opened.view.told["train", "d000"], opened.kept["d000"]
    changes, match = train_lies(work)[place]
    fresh = replace(kept, masked="", present=(), sealed={}, told=None)
    assert (device.mask(fresh, "d000", work, opened.words["d000"])[1] == opened.view.masked["d000"]).all()
    with pytest.raises(BadSecret, match=match):
        device.mask(fresh, "d000", work.model_copy(update=changes), opened.words["d000"])


def test_an_update_before_shares_is_not_sent(opened):
    work, kept = opened.view.told["train", "d000"], opened.kept["d000"]
    with pytest.raises(BadSecret, match="before shares"):
        device.mask(replace(kept, work=None, shared=None), "d000", work, opened.words["d000"])


def test_a_second_update_of_a_round_is_refused_and_the_first_sent_again(opened):
    work, kept, words = opened.view.told["train", "d000"], opened.kept["d000"], opened.words["d000"]
    same, masked = device.mask(kept, "d000", work, words)
    assert same == kept
    assert (masked == opened.view.masked["d000"]).all()
    with pytest.raises(BadSecret, match="a second, different update"):
        device.mask(kept, "d000", work, words + words.dtype.type(1))
    outside = next(name for name in work.cell if name not in {*kept.work.neighbours, "d000"})
    fewer = {"left": tuple(name for name in work.left if name != outside)}
    with pytest.raises(
        BadSecret, match="a second, different update"
    ):  # another set of pads: the difference would be one pad
        device.mask(kept, "d000", work.model_copy(update=fewer), words)


def story_lies(work):
    cell = work.cells[0]
    return [
        ({"gone": (*work.gone, "d005")}, "both kinds"),
        ({"left": (*work.left, "d003")}, "both kinds"),
        ({"left": tuple(name for name in work.left if name != "d000")}, "each device once"),
        ({"left": (*work.left, "nobody")}, "each device once"),
        ({"cells": (cell, ("d001", "d002", "d004"))}, "each device once"),
        ({"cells": ((*cell, "d001"),)}, "each device once"),
        ({"cells": ()}, "each device once"),
        ({"cells": ((*cell, "d010"),)}, "changed the cell"),
        ({"cells": (cell[:5], cell[5:])}, "changed the cell"),
        ({"gone": ()}, "list of the cell differs"),
        ({"left": work.left[:-1]}, "list of the cell differs"),
        ({"context": "federation|4|n"}, "another round"),
    ]


def ask_agreement(played: SecureRound, work, name: str = "d000", **kept):
    fresh = replace(played.kept[name], **{"told": None, "story": "", **kept})
    return device.agree(fresh, name, work, identity_of(name))


@pytest.mark.parametrize("place", range(12))
def test_stories_that_would_give_an_update_away_are_not_signed(opened, place):
    work = opened.view.told["agree", "d000"]
    assert ask_agreement(opened, work)[1] == opened.view.agreed["d000"]
    changes, match = story_lies(work)[place]
    with pytest.raises(BadSecret, match=match):
        ask_agreement(opened, work.model_copy(update=changes))


@pytest.mark.parametrize("place", range(12))
def test_questions_that_would_give_an_update_away_are_refused(opened, place):
    work, kept = opened.view.told["unmask", "d000"], replace(opened.kept["d000"], told=None)
    assert device.unmask(kept, "d000", work)[1] == opened.view.answers["d000"]
    changes, _ = story_lies(work)[place]
    lie = work.model_copy(update=changes)
    lie = lie.model_copy(update={"signatures": signed_by(opened.view.keys, lie, whole_of(opened))})
    with pytest.raises(BadSecret, match=r"other lists|another round"):
        device.unmask(kept, "d000", lie)


def whole_of(played: SecureRound) -> str:
    return device.whole_of(played.view.identities, played.view.colluders)


def test_a_second_story_is_not_signed_and_the_first_is_signed_again(opened):
    work, kept = opened.view.told["agree", "d000"], opened.kept["d000"]
    assert device.agree(kept, "d000", work, identity_of("d000")) == (kept, opened.view.agreed["d000"])
    again = work.model_copy(update={"left": work.left[::-1], "cells": (work.cells[0][::-1],)})
    assert device.agree(kept, "d000", again, identity_of("d000"))[1] == opened.view.agreed["d000"]
    left, gone = tuple(name for name in work.left if name != "d005"), ("d003", "d005")
    other = {name: stated for name, stated in work.statements.items() if name != "d005"}
    second = work.model_copy(update={"left": left, "gone": gone, "statements": other})
    assert ask_agreement(opened, second)  # as good as the first one, had it been told alone
    with pytest.raises(BadSecret, match="two different lists"):
        device.agree(kept, "d000", second, identity_of("d000"))


def test_who_is_in_the_cohort_by_another_identity_key_signs_nothing(opened):
    work = opened.view.told["agree", "d000"]
    with pytest.raises(BadSecret, match="another identity key for this device"):
        device.agree(replace(opened.kept["d000"], story=""), "d000", work, identity_of("another"))


def test_a_story_is_not_signed_before_an_update_was_sent(opened):
    with pytest.raises(BadSecret, match="before an update"):
        ask_agreement(opened, opened.view.told["agree", "d000"], sealed={})
    with pytest.raises(BadSecret, match="no masked update"):
        device.state(replace(opened.kept["d000"], masked=""), identity_of("d000"))


def test_a_device_states_once_what_it_was_told(opened):
    work, kept = opened.view.told["train", "d000"], opened.kept["d000"]
    assert device.state(kept, identity_of("d000")) == opened.view.statements["d000"]
    other = work.model_copy(update={"value_range": 1.0})  # the same words, asked for again as of another scale
    again, _ = device.mask(kept, "d000", other, opened.words["d000"], "another model")
    assert device.state(again, identity_of("d000")) == opened.view.statements["d000"]


def statement_of(played: SecureRound, name: str, context: str | None = None, **changes: object):
    """What a device would state of other things, signed."""
    said = {**played.view.statements[name].said(), **changes}
    signature = pads.sign(identity_of(name), context or played.view.context, said).hex()
    return device.Statement(**said, signature=signature)


@pytest.mark.parametrize("who", ["d000", "d001", "d009"])
def test_statements_that_are_forged_or_missing_or_of_other_things_are_refused(opened, who):
    work, view = opened.view.told["agree", "d000"], opened.view
    true = view.statements[who]
    less = device.present_of(["d000", "d001", "d002"], whole_of(opened))
    smaller = dict(itertools.islice(view.identities.items(), 9))
    other_cohort = device.present_of(opened.kept[who].present, device.whole_of(smaller, 1))
    other_colluders = device.present_of(opened.kept[who].present, device.whole_of(view.identities, 0))
    flipped = f"{int(true.signature[0], 16) ^ 1:x}" + true.signature[1:]
    lies = [
        (true.model_copy(update={"signature": flipped}), "not signed"),
        (true.model_copy(update={"scale": 64 * "1"}), "not signed"),
        (true.model_copy(update={"present": less}), "not signed"),
        (view.statements["d004"], "not signed"),
        (statement_of(opened, who, context="federation|4|n"), "not signed"),
        (statement_of(opened, who, scale=64 * "1"), "different scales or masks"),
        (statement_of(opened, who, present=less), "other devices"),
        (statement_of(opened, who, present=other_cohort), "other devices"),
        (statement_of(opened, who, present=other_colluders), "other devices"),
    ]
    for statement, match in lies:
        with pytest.raises(BadSecret, match=match):
            ask_agreement(opened, work.model_copy(update={"statements": {**work.statements, who: statement}}))
    fewer = {name: stated for name, stated in work.statements.items() if name != who}
    gone = {"d003": statement_of(opened, "d000")}
    for statements in (fewer, {**work.statements, **gone}, {}):
        with pytest.raises(BadSecret, match="does not send the statements"):
            ask_agreement(opened, work.model_copy(update={"statements": statements}))


def test_what_a_device_has_stated_itself_is_not_changed_for_it(opened):
    work = opened.view.told["agree", "d000"]
    with pytest.raises(BadSecret, match="statement"):
        ask_agreement(opened, work, scale=64 * "1")


def test_shares_are_told_only_where_most_have_signed(opened):
    work, kept, view = opened.view.told["unmask", "d000"], replace(opened.kept["d000"], told=None), opened.view
    least = most_of(10, 1)
    assert (least, len(work.signatures)) == (6, 9)

    def ask(signatures, **changes):
        return device.unmask(replace(kept, **changes), "d000", work.model_copy(update={"signatures": signatures}))

    def some(count):
        return dict(itertools.islice(work.signatures.items(), count))

    assert ask(some(least))[1] == view.answers["d000"]
    for few in ({}, some(least - 1)):
        with pytest.raises(BadSecret, match=f"{len(few)} of 10 devices have signed"):
            ask(few)
    unknown = signed_by(["e000", "e001"], work, whole_of(opened))
    with pytest.raises(BadSecret, match="5 of 10 devices have signed"):
        ask({**some(least - 1), **unknown})
    wrong = [
        work.signatures["d001"],  # another's
        view.statements["d005"].signature,  # of something else
        view.keys["d005"].signature,
        signed_by(["d005"], work.model_copy(update={"context": "federation|4|n"}), whole_of(opened))["d005"],
        signed_by(["d005"], work.model_copy(update={"gone": ()}), whole_of(opened))["d005"],
        signed_by(["d005"], work, device.whole_of({"d005": view.identities["d005"]}, 1))["d005"],
        signed_by(["d005"], work, device.whole_of(view.identities, 2))["d005"],
        64 * "00",
    ]
    for signature in wrong:
        with pytest.raises(BadSecret, match="d005"):
            ask({**some(least - 1), "d005": signature})
    with pytest.raises(BadSecret, match="other lists"):
        ask(work.signatures, story="")


def test_no_two_stories_have_enough_signatures():
    """Of the others each signs one; colluders sign both."""
    for devices, colluders in itertools.product(range(3, 30), range(4)):
        assert 2 * most_of(devices, colluders) > devices + colluders >= 2 * (most_of(devices, colluders) - 1)


def test_shares_before_an_update_was_sent_are_refused(opened):
    work, kept = opened.view.told["unmask", "d000"], replace(opened.kept["d000"], told=None, sealed={})
    with pytest.raises(BadSecret, match="before an update"):
        device.unmask(kept, "d000", work)


def test_a_second_question_gets_the_first_answer(opened):
    work, kept = opened.view.told["unmask", "d000"], opened.kept["d000"]
    other = work.model_copy(update={"left": ("d000", "d001", "d002"), "gone": ("d005",)})
    assert device.unmask(kept, "d000", other) == (kept, opened.view.answers["d000"])


def test_shares_that_somebody_else_sealed_are_told_to_nobody(opened):
    work, kept = opened.view.told["unmask", "d000"], replace(opened.kept["d000"], told=None)
    one, other = sorted(kept.sealed)[:2]
    for wrong in (kept.sealed[other], "00" + kept.sealed[one][2:], opened.view.shares[one].sealed[other], "00"):
        told = device.unmask(replace(kept, sealed=dict(kept.sealed) | {one: wrong}), "d000", work)[1]
        assert one not in {*told.seeds, *told.pads}
        assert {*told.seeds, *told.pads} == set(kept.sealed) - {one}


def as_signed(played: SecureRound, name: str, work):
    """What a device keeps that has signed a story, whatever it is, and the work with the signatures of all."""
    whole = whole_of(played)
    kept = replace(played.kept[name], told=None, story=device.story(work.context, whole, work))
    return kept, name, work.model_copy(update={"signatures": signed_by(played.view.keys, work, whole)})


def test_shares_are_sent_only_for_the_known_cell():
    """A coordinator that tells some devices that others are in one cell with the victim is told nothing of it."""
    ratios = {name: 0.5 if name < "d006" else 1.0 if name < "d012" else 0.25 for name in names_of(18)}
    played = SecureRound(18, ratios=ratios, size=50).until("agree")
    first, second, third = (played.view.cell_of(name) for name in ("d000", "d006", "d012"))
    lie = {"left": ("d000", *second, *third), "gone": first[1:], "cells": (first + third, second)}
    for name in second:
        honest = played.view.told["agree", name]
        _, told = device.unmask(*as_signed(played, name, honest.model_copy(update=lie)))
        assert {*told.seeds, *told.pads} <= set(second)
        _, told = device.unmask(*as_signed(played, name, honest))
        assert {*told.seeds} == set(played.kept[name].sealed)
        statements = {other: stated for other, stated in honest.statements.items() if other in lie["left"]}
        with pytest.raises(BadSecret, match="other devices"):
            ask_agreement(played, honest.model_copy(update=lie | {"statements": statements}), name)


def test_shares_for_another_cohort_are_not_sent(opened):
    work, kept = opened.view.told["unmask", "d000"], replace(opened.kept["d000"], told=None)
    for changes in ({"cohort": {**kept.work.cohort, "far": 64 * "1"}}, {"colluders": 0}):
        other = replace(kept, work=kept.work.model_copy(update=changes))
        whole = device.whole_of(other.work.cohort, other.work.colluders)
        other = replace(other, story=device.story(kept.context, whole, work))
        signed = work.model_copy(update={"signatures": signed_by(opened.view.keys, work, whole)})
        told = device.unmask(other, "d000", signed)[1]
        assert not told.seeds
        assert not told.pads


@pytest.mark.parametrize("wrong_ones", [{"d001"}, {"d001", "d007"}])
def test_neighbours_that_lie_are_named_and_the_sum_still_comes_out(wrong_ones):
    played = SecureRound(10, vanish={"train": ["d003"]}, size=50, seed=2)
    played.until("unmask")
    view = played.view
    for name in wrong_ones:
        answer = view.answers[name]
        seeds = {other: f"{int(share, 16) ^ 1:0{2 * SHARE_BYTES}x}" for other, share in answer.seeds.items()}
        secrets = dict.fromkeys(answer.pads, (PRIME - 1).to_bytes(SHARE_BYTES, "big").hex())
        view.answers[name] = answer.model_copy(update={"seeds": seeds, "pads": secrets})
    outcome = played.open()
    left = tuple(sorted(view.masked))
    assert (outcome.sums[left] == played.added(left)).all()
    points = {view.points[name] for name in wrong_ones}
    assert set().union(*outcome.wrong.values()) == points
    for name, wrong in outcome.wrong.items():
        keepers = {keeper for keeper in wrong_ones if name in {*view.answers[keeper].seeds, *view.answers[keeper].pads}}
        assert wrong == {view.points[keeper] for keeper in keepers}


def test_too_few_shares_give_no_sum(opened):
    view = opened.view
    seeds, secrets = view.collected()
    left = sorted(view.masked)
    total = total_of([view.masked[name] for name in left])

    def opens(seeds, secrets):
        told = {"left": left, "gone": ["d003"], "keys": view.keys, "threshold": view.sharing.threshold}
        return open_sum(total, view.context, seeds=seeds, pad_secrets=secrets, **told)

    assert (opens(seeds, secrets)[0] == opened.added(left)).all()
    few = dict(itertools.islice(seeds["d001"].items(), view.sharing.threshold - 1))
    with pytest.raises(CannotOpen, match="self-mask of d001"):
        opens(seeds | {"d001": few}, secrets)
    with pytest.raises(CannotOpen, match="self-mask of d001"):
        opens({name: shares for name, shares in seeds.items() if name != "d001"}, secrets)
    few = dict(itertools.islice(secrets["d003"].items(), view.sharing.threshold - 1))
    with pytest.raises(CannotOpen, match="pads of d003"):
        opens(seeds, {"d003": few})
    with pytest.raises(CannotOpen, match="pads of d003"):
        opens(seeds, {"d003": {point: share ^ 1 for point, share in secrets["d003"].items()}})


def test_one_device_that_seals_nonsense_costs_its_own_cell_alone():
    ratios = {name: 0.5 if name < "d006" else 1.0 for name in names_of(20)}
    played = SecureRound(20, ratios=ratios, size=50).until("shares")
    shares = played.view.shares["d000"]
    played.view.shares["d000"] = shares.model_copy(update={"sealed": dict.fromkeys(shares.sealed, "00" * 92)})
    played.train()
    played.agree()
    played.unmask()
    outcome = played.open()
    assert not played.refused
    assert [len(left) for left in outcome.sums] == [14]
    assert list(outcome.lost.values()) == ["too few shares of the self-mask of d000 arrived"]


def test_secrets_are_read_back_as_they_were_kept(opened, keyed):
    for kept in (*opened.kept.values(), *keyed.kept.values()):
        assert RoundSecrets.from_json(kept.to_json()).to_json() == kept.to_json()
    kept = opened.kept["d000"]
    back = RoundSecrets.from_json(kept.to_json())
    assert (back.work, back.shared, back.told) == (kept.work, kept.shared, kept.told)
    assert (back.story, back.scale) == (kept.story, kept.scale)
    assert (back.masked, list(back.present), dict(back.sealed)) == (kept.masked, list(kept.present), dict(kept.sealed))


# The device's half, with what it keeps on disk.


class Folder:
    """A state folder in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def cached(self, name: str) -> bytes | None:
        return self.files.get(name)

    def cache(self, name: str, data: bytes) -> None:
        self.files[name] = data


def job_of(work, examples: int, count: int = 50, **settings: object):
    told = FederationSettings(secure=True, **settings)
    return SimpleNamespace(
        assignment=SimpleNamespace(kind=Kind.train, secure=work, settings=told, round=3, plan={}),
        task=SimpleNamespace(train=SimpleNamespace(num_examples=examples)),
        manifest=SimpleNamespace(shared=(), alike=()),  # without running statistics
        received=SimpleNamespace(values=np.full(count, 0.25, "<f4"), mask=None),
        seed=lambda purpose: 7,
    )


@pytest.fixture(scope="module")
def weighed() -> SecureRound:
    """A round of devices that count by 7 samples, d001 by 20, before d000 sends its update."""
    return SecureRound(10, weights=dict.fromkeys(names_of(10), 7.0) | {"d001": 20.0}, size=50, seed=4).until("train")


def device_of(played: SecureRound, name: str = "d000") -> tuple[Folder, OneDevice]:
    folder = Folder()
    fresh = replace(played.kept[name], masked="", present=(), sealed={}, scale="")
    folder.cache("secure.json", fresh.to_json().encode())
    return folder, OneDevice(folder, name, identity_of(name), None, Trust("f", Demands()))


UPDATE = Update(np.full(50, 0.5, np.float32))


def test_a_device_counts_by_its_own_samples_alone(weighed):
    work = weighed.view.told["train", "d000"]
    assert (work.weight, work.largest_weight) == (7.0, 20.0)
    for weight, largest, examples in (
        (6.0, 20.0, 7),
        (20.0, 20.0, 7),
        (7.0, 20.0, 8),
        (20.0, 2.0**40, 7),
        (7.0, 5.0, 7),
    ):
        folder, one = device_of(weighed)
        before = dict(folder.files)
        lie = work.model_copy(update={"weight": weight, "largest_weight": largest})
        with pytest.raises(BadSecret, match=f"a weight of {weight:g}"):
            one.mask(job_of(lie, examples), UPDATE, None)
        assert folder.files == before  # nothing was hidden, nor stated
    for weight, largest, examples in ((7.0, 20.0, 7), (20.0, 20.0, 21), (5.0, 5.0, 7)):
        told = work.model_copy(update={"weight": weight, "largest_weight": largest})
        assert device_of(weighed)[1].mask(job_of(told, examples), UPDATE, None)


def test_a_device_states_the_scale_that_it_was_told(weighed):
    work = weighed.view.told["train", "d000"]
    true = device_of(weighed)[1].mask(job_of(work, 7), UPDATE, None).statement
    device.check_statement(true, public_identity_of("d000"), work.context, "d000")
    assert device_of(weighed)[1].mask(job_of(work, 7), UPDATE, None).statement == true
    others = [
        job_of(work.model_copy(update=changes), 7) for changes in ({"value_range": 1.0}, {"largest_weight": 21.0})
    ]
    for job in others:
        stated = device_of(weighed)[1].mask(job, UPDATE, None).statement
        assert stated.scale != true.scale
        assert stated.present == true.present


def test_a_device_that_is_killed_signs_no_second_story(weighed):
    if "unmask" not in {phase for phase, _ in weighed.view.told}:
        weighed.agree()
        weighed.unmask()
    folder = Folder()
    folder.cache("secure.json", replace(weighed.kept["d000"], told=None, story="").to_json().encode())
    work = weighed.view.told["agree", "d000"]

    def answer(kind, work):
        again = OneDevice(folder, "d000", identity_of("d000"), None, Trust("f", Demands()))
        return again.answer(SimpleNamespace(kind=kind, secure=work))

    signed = answer(Kind.agree, work)
    assert answer(Kind.agree, work) == signed == weighed.view.agreed["d000"].model_dump_json().encode()
    left, other = work.left[:-1], {name: work.statements[name] for name in work.left[:-1]}
    with pytest.raises(BadSecret, match="two different lists"):
        answer(Kind.agree, work.model_copy(update={"left": left, "gone": work.left[-1:], "statements": other}))
    told = answer(Kind.unmask, weighed.view.told["unmask", "d000"])
    assert told == weighed.view.answers["d000"].model_dump_json().encode()
