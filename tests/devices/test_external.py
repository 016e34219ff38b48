"""An external meter's readings, from a CSV file to joules per phase."""

import math
from datetime import datetime

import pytest

from sparrow.devices import EnergyMeter, Quality
from sparrow.devices.external import ExternalMeter, load_phases
from sparrow.devices.system import System


@pytest.fixture
def file(tmp_path):
    def write(text, name="meter.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def watts(t):
    return 5 + 2 * math.sin(t / 7)


def joules(a, b):
    return 5 * (b - a) - 14 * (math.cos(b / 7) - math.cos(a / 7))


def test_joules_are_the_integral_between_any_two_moments():
    meter = ExternalMeter([float(t) for t in range(101)], [watts(t) for t in range(101)])
    energy = meter.energy(10.4, 77.9)
    assert energy.joules == pytest.approx(joules(10.4, 77.9), rel=0.01)
    assert (energy.quality, energy.coverage, energy.seconds) == (Quality.MEASURED, 1.0, pytest.approx(67.5))


def test_two_phases_side_by_side_are_one():
    meter = ExternalMeter([float(t) for t in range(101)], [watts(t) for t in range(101)])
    parts = meter.energy(10, 33.3).joules + meter.energy(33.3, 60).joules
    assert parts == pytest.approx(meter.energy(10, 60).joules)


def test_a_phase_within_one_of_the_meters_periods_has_joules():
    assert ExternalMeter([0, 10], [4, 8]).energy(2.5, 5).joules == pytest.approx((5 + 6) / 2 * 2.5)


def test_a_gap_is_left_out_and_shows_as_coverage():
    times = [float(t) for t in [*range(11), *range(30, 41)]]
    energy = ExternalMeter(times, [4.0] * len(times)).energy(0, 40)
    assert (energy.joules, energy.coverage) == (pytest.approx(80), pytest.approx(0.5))
    assert "offset between its clock" in energy.reason
    inside = ExternalMeter(times, [4.0] * len(times)).energy(15, 25)
    assert (inside.joules, inside.quality) == (None, Quality.UNAVAILABLE)


def test_an_offset_moves_the_meters_clock_to_the_devices(file):
    path = file("0,1\n1,2\n2,3\n3,4\n")
    assert ExternalMeter.load(path, 1000.5).energy(1000.5, 1002.5).joules == pytest.approx(4)
    assert ExternalMeter.load(path).energy(1000.5, 1002.5).joules is None


@pytest.mark.parametrize(
    "text",
    [
        "time,watts\n1763800000,3\n1763800010,5\n",
        "\ufeffVolts, Watts , TIME\n5,3,1763800000\n5,5,1763800010\n\n",
        "2025-11-22T08:26:40Z,3\n2025-11-22T09:26:50+01:00,5\n",
        "2025-11-22T08:26:40+00:00,3\n1763800010,5\n",
    ],
)
def test_files_may_have_names_of_columns_and_dates(file, text):
    assert ExternalMeter.load(file(text)).energy(1763800000, 1763800010).joules == pytest.approx(40)


def test_a_date_without_a_zone_is_local(file):
    start = datetime(2025, 11, 22, 8).astimezone().timestamp()
    meter = ExternalMeter.load(file("2025-11-22T08:00:00,3\n2025-11-22T08:00:10,5\n"))
    assert meter.energy(start, start + 10).joules == pytest.approx(40)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 times and 0 powers; give at least two readings"),
        ("time,watts\n1,2\n", "give at least two readings"),
        ("1,2\n2,many\n", "line 2: could not convert .*; write a time and watts"),
        ("1,2\nyesterday,3\n", "line 2: 'yesterday' is not a time; write"),
        ("1,2\n\n2\n", "line 3: must have the columns time, watts"),
        ("1,2\n2,-1\n", r"reading 2 is -1.0 W .* power not below 0"),
        ("1,2\n2,nan\n", "reading 2 is nan W"),
        ("nan,2\n2,1\n", "both must be finite"),
        ("2,1\n1,2\n", "reading 2 is not after the one before it; sort"),
        ("1,1\n1,2\n", "reading 2 is not after"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_line(file, text, said):
    with pytest.raises(ValueError, match=said) as refused:
        ExternalMeter.load(file(text))
    assert "meter.csv" in str(refused.value)


def test_a_phase_does_not_end_before_it_starts():
    with pytest.raises(ValueError, match="cannot end at 1 when it starts at 2"):
        ExternalMeter([0, 1], [1, 1]).energy(2, 1)


def test_a_phases_span_is_what_the_meters_clock_needs(clock, tmp_path):
    wall = iter([1763800000.0, 1763800004.0])
    meter = EnergyMeter(System.at(tmp_path), clock=clock, background=False, wall_clock=lambda: next(wall))
    with meter.phase("train") as phase:
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = phase.span
        clock.now += 4
    external = ExternalMeter([1763799990.0, 1763800010.0], [2.0, 2.0])
    assert external.energy(*phase.span).joules == pytest.approx(8)


def test_phases_come_from_a_file_of_their_own(file):
    path = file("name,start,end\ntrain,1763800000,1763800010\nsend,2025-11-22T08:26:50Z,1763800011\n", "phases.csv")
    assert load_phases(path) == [("train", 1763800000, 1763800010), ("send", 1763800010, 1763800011)]


@pytest.mark.parametrize(
    ("text", "said"), [("", "no phases"), ("train,1\n", "line 1: must"), ("a,b,c\n", "line 1: 'b'")]
)
def test_a_file_without_phases_is_told(file, text, said):
    with pytest.raises(ValueError, match=said):
        load_phases(file(text, "phases.csv"))
