"""The cohort is drawn uniformly, whatever the order of enrolment, and again the same after a restart."""

from __future__ import annotations

from collections import Counter

from coordinator.cohort import choose

NAMES = [f"dev-{number}" for number in range(20)]


def test_a_cohort_has_the_size_asked_for_without_repeats_sorted():
    cohort = choose(NAMES, 5, job="j", round_number=1)
    assert len(set(cohort)) == 5
    assert set(cohort) <= set(NAMES)
    assert cohort == sorted(cohort)


def test_too_few_devices_all_take_part():
    assert choose(["b", "a"], 10, job="j", round_number=1) == ["a", "b"]
    assert choose([], 10, job="j", round_number=1) == []


def test_the_order_of_enrolment_does_not_matter():
    assert choose(reversed(NAMES), 5, job="j", round_number=1) == choose(NAMES, 5, job="j", round_number=1)


def test_the_same_job_and_round_draw_the_same_and_others_do_not():
    cohorts = [choose(NAMES, 5, job=job, round_number=number) for job in ("a:0", "a:1") for number in (1, 2)]
    assert cohorts == [choose(NAMES, 5, job=job, round_number=number) for job in ("a:0", "a:1") for number in (1, 2)]
    assert len({tuple(cohort) for cohort in cohorts}) == 4


def test_devices_that_leave_do_not_change_the_rank_of_the_others():
    first = choose(NAMES, 5, job="j", round_number=1)
    without = choose([name for name in NAMES if name != first[0]], 5, job="j", round_number=1)
    assert set(first[1:]) < set(without)


def test_the_draw_is_uniform_over_devices_and_pairs():
    rounds = 4000
    alone, together = Counter(), Counter()
    for number in range(rounds):
        cohort = choose(NAMES, 5, job="j", round_number=number)
        alone.update(cohort)
        together.update((one, other) for one in cohort for other in cohort if one < other)
    # Five standard deviations of a binomial around the expected share.
    for counts, share, cases in ((alone, 5 / 20, 20), (together, 5 * 4 / (20 * 19), 190)):
        assert len(counts) == cases
        spread = 5 * (rounds * share * (1 - share)) ** 0.5
        assert all(abs(count - rounds * share) < spread for count in counts.values())
