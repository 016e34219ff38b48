"""The cohort is drawn uniformly, whatever the order of enrolment, and again the same after a restart."""

from __future__ import annotations

from collections import Counter

from sparrow.coordinator.draws import Candidate, choose, choose_each, neuron_key, new_secret
from sparrow.protocol.settings import FederationSettings

NAMES = [f"dev-{number}" for number in range(20)]


def draw(names, size, *, secret, round_number):
    return choose([Candidate(name) for name in names], size, secret=secret, round_number=round_number)


def test_a_cohort_has_the_size_asked_for_without_repeats_sorted():
    cohort = draw(NAMES, 5, secret=b"j", round_number=1)
    assert len(set(cohort)) == 5
    assert set(cohort) <= set(NAMES)
    assert cohort == sorted(cohort)


def test_too_few_devices_all_take_part():
    assert draw(["b", "a"], 10, secret=b"j", round_number=1) == ["a", "b"]
    assert draw([], 10, secret=b"j", round_number=1) == []


def test_the_order_of_enrolment_does_not_matter():
    assert draw(reversed(NAMES), 5, secret=b"j", round_number=1) == draw(NAMES, 5, secret=b"j", round_number=1)


def test_the_same_secret_and_round_draw_the_same_and_others_do_not():
    cohorts = [draw(NAMES, 5, secret=secret, round_number=number) for secret in (b"a", b"b") for number in (1, 2)]
    assert cohorts == [
        draw(NAMES, 5, secret=secret, round_number=number) for secret in (b"a", b"b") for number in (1, 2)
    ]
    assert len({tuple(cohort) for cohort in cohorts}) == 4


def test_devices_that_leave_do_not_change_the_rank_of_the_others():
    first = draw(NAMES, 5, secret=b"j", round_number=1)
    without = draw([name for name in NAMES if name != first[0]], 5, secret=b"j", round_number=1)
    assert set(first[1:]) < set(without)


def test_the_draw_is_uniform_over_devices_and_pairs():
    rounds = 4000
    alone, together = Counter(), Counter()
    for number in range(rounds):
        cohort = draw(NAMES, 5, secret=b"j", round_number=number)
        alone.update(cohort)
        together.update((one, other) for one in cohort for other in cohort if one < other)
    # Five standard deviations of a binomial around the expected share.
    for counts, share, cases in ((alone, 5 / 20, 20), (together, 5 * 4 / (20 * 19), 190)):
        assert len(counts) == cases
        spread = 5 * (rounds * share * (1 - share)) ** 0.5
        assert all(abs(count - rounds * share) < spread for count in counts.values())


def test_the_longest_absent_devices_are_drawn_first():
    last = dict.fromkeys(NAMES, -1)
    seen = []
    for number in range(1, 9):
        candidates = [Candidate(name, last_round=last[name]) for name in NAMES]
        cohort = choose(candidates, 5, secret=b"j", round_number=number, policy="least_recently")
        seen.append(cohort)
        last.update(dict.fromkeys(cohort, number))
    for start in (0, 4):
        assert sorted(name for cohort in seen[start : start + 4] for name in cohort) == sorted(NAMES), (
            "each once in four"
        )
    first = [choose([Candidate(name) for name in NAMES], 5, secret=b"j", round_number=1, policy="least_recently")]
    assert first == seen[:1] == [draw(NAMES, 5, secret=b"j", round_number=1)], (
        "chance decides among those who waited as long"
    )


def test_chances_grow_with_budgets():
    """With one place, a device of twice the budget is drawn twice as often: five standard deviations of a binomial."""
    candidates = [Candidate(name, budget) for name, budget in zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True)]
    rounds = 4000
    drawn = Counter()
    for number in range(rounds):
        drawn.update(choose(candidates, 1, secret=b"j", round_number=number, policy="budget"))
    for each in candidates:
        spread = 5 * (rounds * each.budget * (1 - each.budget)) ** 0.5
        assert abs(drawn[each.name] - rounds * each.budget) < spread


def test_a_larger_budget_never_takes_a_device_out_of_a_round():
    for number in range(200):
        others = [Candidate(name, 0.5) for name in NAMES[1:]]
        cohorts = [
            choose([Candidate(NAMES[0], budget), *others], 5, secret=b"j", round_number=number, policy="budget")
            for budget in (0.1, 0.3, 0.5, 0.9)
        ]
        drawn = [NAMES[0] in cohort for cohort in cohorts]
        assert drawn == sorted(drawn)


def test_drawn_each_by_itself_nobody_is_moved_by_another():
    rounds, chance = 4000, 0.25
    drawn = Counter()
    for number in range(rounds):
        cohort = choose_each(NAMES, chance, secret=b"j", round_number=number)
        drawn.update(cohort)
        without = choose_each(NAMES[1:], chance, secret=b"j", round_number=number)
        assert without == [name for name in cohort if name != NAMES[0]]
    spread = 5 * (rounds * chance * (1 - chance)) ** 0.5
    assert len(drawn) == len(NAMES)
    assert all(abs(count - rounds * chance) < spread for count in drawn.values())
    assert choose_each(NAMES, 1.0, secret=b"j", round_number=1) == sorted(NAMES)


def test_a_secret_is_random_unless_it_is_to_follow_from_the_seed():
    usual, seeded = FederationSettings(seed=1), FederationSettings(seed=1, draws="seed")
    assert len({new_secret("f", usual), new_secret("f", usual), new_secret("f", seeded)}) == 3
    assert new_secret("f", seeded) == new_secret("f", seeded)
    other_seed = FederationSettings(seed=2, draws="seed")
    assert len({new_secret("f", seeded), new_secret("g", seeded), new_secret("f", other_seed)}) == 3


def test_keys_are_of_one_secret_round_and_device():
    keys = [neuron_key(secret, number, name) for secret in (b"a", b"b") for number in (1, 2) for name in ("c", "d")]
    assert len(set(keys)) == 8
    assert keys == [neuron_key(secret, number, name) for secret in (b"a", b"b") for number in (1, 2) for name in "cd"]


def test_evaluating_devices_are_drawn_separately_from_the_cohort():
    candidates = [Candidate(name) for name in NAMES]
    cohorts = [choose(candidates, 5, secret=b"j", round_number=number) for number in range(9)]
    others = [choose(candidates, 5, secret=b"j", round_number=number, purpose="evaluation") for number in range(9)]
    assert all(cohort != other for cohort, other in zip(cohorts, others, strict=True))
