import contextlib
import os
import threading
from pathlib import Path

import pytest

from sparrow.devices import Energy, EnergyMeter, Files, PowerModel, Quality, System

POWERCAP = "sys/class/powercap"
BATTERY = "sys/class/power_supply/BAT0"


@pytest.fixture
def meter_on(clock):
    """A meter without a thread on some tree, moved by the test's clock."""

    def make(tree, **options):
        return EnergyMeter(tree.system, clock=clock, cpu_seconds=clock.cpu_seconds, background=False, **options)

    return make


def play(meter, clock, tree, moments):
    """A phase that lives through these moments: (seconds since its start, overlay), sampled at each."""
    start = clock.now
    tree.over = dict(moments[0][1])
    with meter.phase("train") as phase:
        for seconds, overlay in moments[1:]:
            clock.now, tree.over = start + seconds, dict(overlay)
            meter.sample()
    return phase.energy


# --- counters


def test_a_laptop_on_mains_is_measured_by_its_platform_counter(meter_on, clock, tree, expected, rapl_rows):
    laptop = tree("laptop-rapl/root")
    energy = play(meter_on(laptop), clock, laptop, rapl_rows)
    assert energy.joules == pytest.approx(expected("laptop-rapl")["joules_30s"]["psys"])
    assert energy == Energy(energy.joules, Quality.MEASURED, "RAPL psys", "board", 1.0, 30.0)


def test_a_platform_counter_below_the_package_gives_way_to_it(meter_on, clock, tree, expected, rapl_rows):
    laptop = tree("laptop-rapl/root")
    for _, overlay in rapl_rows:
        overlay[f"{POWERCAP}/intel-rapl:1/energy_uj"] = "120450000000"
    energy = play(meter_on(laptop), clock, laptop, rapl_rows)
    want = expected("laptop-rapl")["joules_30s"]["package-0"] + 10 * (0.54 + 0.54 + 1.23)
    assert energy.joules == pytest.approx(want)
    assert energy.scope == "package+dram"


def test_the_two_ends_are_enough_for_a_short_phase(meter_on, clock, tree, rapl_rows):
    laptop = tree("laptop-rapl/root")
    start = rapl_rows[0][1]
    end = start | {f"{POWERCAP}/intel-rapl:1/energy_uj": str(120450000000 + 6000000)}
    energy = play(meter_on(laptop), clock, laptop, [(0.0, start), (0.4, end)])
    assert (energy.joules, energy.coverage) == (pytest.approx(6.0), pytest.approx(1.0))


def test_a_failed_read_in_between_costs_nothing_and_makes_no_spike(meter_on, clock, tree, expected, rapl_rows):
    laptop = tree("laptop-rapl/root")
    seconds, _ = rapl_rows[1]
    rapl_rows[1] = (seconds, {POWERCAP: OSError(5, "I/O error")})
    energy = play(meter_on(laptop), clock, laptop, rapl_rows)
    assert energy.joules == pytest.approx(expected("laptop-rapl")["joules_30s"]["psys"])


def test_a_reset_counter_is_left_out_of_the_sum(meter_on, clock, tree, rapl_rows):
    laptop = tree("laptop-rapl/root")
    reset = dict.fromkeys(rapl_rows[1][1], "1000")
    after = reset | {f"{POWERCAP}/intel-rapl:1/energy_uj": "12001000"}
    energy = play(meter_on(laptop), clock, laptop, [rapl_rows[1], (1.0, reset), (2.0, after)])
    assert (energy.joules, energy.coverage) == (pytest.approx(12.0), pytest.approx(0.5))
    assert "was it reset" in energy.reason


def test_counters_that_stand_still_are_not_zero_joules(meter_on, clock, tree, rapl_rows):
    laptop = tree("laptop-rapl/root")
    still = rapl_rows[0][1]
    energy = play(meter_on(laptop), clock, laptop, [(0.0, still), (5.0, still)])
    assert (energy.joules, energy.quality) == (None, Quality.UNAVAILABLE)
    assert "did not change" in energy.reason


def test_without_permission_the_answer_is_how_to_get_it_not_a_guess(meter_on, clock, tree):
    laptop = tree("laptop-rapl/root")
    moments = [(t, {f"{POWERCAP}/intel-rapl:{n}/energy_uj": PermissionError() for n in (0, 1)}) for t in (0.0, 10.0)]
    meter = meter_on(laptop)
    energy = play(meter, clock, laptop, moments)
    assert (energy.joules, energy.quality, energy.coverage) == (None, Quality.UNAVAILABLE, 0.0)
    assert "sudo chmod 0440" in energy.reason
    assert "sudo chmod 0440" in meter.describe()
    assert "\n" not in meter.describe()


def test_without_permission_a_model_is_used_when_it_was_asked_for(meter_on, clock, tree):
    laptop = tree("laptop-rapl/root")
    denied = {f"{POWERCAP}/intel-rapl:{n}/energy_uj": PermissionError() for n in (0, 1)}
    meter = meter_on(laptop, model=PowerModel.parse("4:20"))
    assert play(meter, clock, laptop, [(0.0, denied), (10.0, denied)]).quality is Quality.ESTIMATED


# --- batteries


def watts(value):
    return {f"{BATTERY}/power_now": str(round(value * 1e6))}


def test_watts_are_integrated_by_the_trapezoid_rule(meter_on, clock, tree):
    laptop = tree("laptop-battery/root")
    energy = play(meter_on(laptop), clock, laptop, [(0, watts(4)), (10, watts(8)), (15, watts(6))])
    assert energy.joules == pytest.approx(60 + 35)
    assert energy == Energy(energy.joules, Quality.MEASURED, "battery", "device", 1.0, 15.0)


def test_a_long_gap_is_dropped_and_shows_as_coverage(meter_on, clock, tree):
    laptop = tree("laptop-battery/root")
    lost = {BATTERY: OSError(5, "I/O error")}
    moments = [(0, watts(4)), (10, watts(4)), (20, lost), (40, watts(9)), (50, watts(9))]
    energy = play(meter_on(laptop), clock, laptop, moments)
    assert energy.joules == pytest.approx(40 + 90)
    assert (energy.coverage, energy.seconds) == (pytest.approx(20 / 50), 50)
    assert energy.reason


def test_a_short_gap_is_bridged(meter_on, clock, tree):
    laptop = tree("laptop-battery/root")
    moments = [(0, watts(4)), (10, {BATTERY: OSError(5, "I/O error")}), (20, watts(4))]
    energy = play(meter_on(laptop), clock, laptop, moments)
    assert (energy.joules, energy.coverage, energy.reason) == (pytest.approx(80), 1.0, None)


def test_a_slow_gauge_is_not_asked_at_every_sample(meter_on, clock, tree):
    laptop = tree("laptop-battery/root")
    meter = meter_on(laptop)
    laptop.reads.clear()
    play(meter, clock, laptop, [(t, watts(4)) for t in range(11)])
    assert laptop.reads.count(f"{BATTERY}/power_now") == 4  # at 0, 5 and 10, and at the end


def test_what_comes_out_of_a_charger_is_no_energy_of_the_device(meter_on, clock, tree):
    laptop = tree("laptop-battery/root-charging")
    energy = play(meter_on(laptop), clock, laptop, [(0, {}), (10, {})])
    assert energy.joules is None
    assert "unplug the charger" in energy.reason


def test_a_battery_that_discharges_is_preferred_to_the_package_alone(clock, tmp_path):
    package, battery = tmp_path / POWERCAP / "intel-rapl:0", tmp_path / BATTERY
    package.mkdir(parents=True)
    battery.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "0", "max_energy_range_uj": "262143328850"}.items():
        (package / name).write_text(text)
    for name, text in {"type": "Battery", "status": "Discharging", "power_now": "6000000"}.items():
        (battery / name).write_text(text)

    def ten_seconds(joules, status_after):
        with EnergyMeter(System.at(tmp_path), clock=clock, background=False) as meter, meter.phase("train") as phase:
            clock.now += 10
            (package / "energy_uj").write_text(str(int((package / "energy_uj").read_text()) + joules * 1000000))
            (battery / "status").write_text(status_after)
        return phase.energy

    assert ten_seconds(20, "Discharging").source == "battery"
    assert (
        ten_seconds(90, "Discharging").source == "RAPL package-0"
    )  # the gauge lags: a device draws what its CPU draws
    assert ten_seconds(20, "Charging").source == "RAPL package-0"  # plugged in on the way


# --- estimates and nothing


def test_a_known_board_is_estimated_and_says_so(meter_on, clock, tree):
    pi = tree("raspberry-pi-4/root")
    meter = meter_on(pi)
    busy = {"proc/stat": "cpu  368800 40 13200 1241600 2160 0 880 0 0 0\n"}  # 4000 jiffies more
    energy = play(meter, clock, pi, [(0, {}), (10, busy)])
    assert energy.joules == pytest.approx(68)
    assert (energy.quality, energy.scope, energy.coverage) == (Quality.ESTIMATED, "board", 1.0)
    assert meter.describe() == (
        "energy: estimated, util-linear-v1 pi4b ±30%, utilisation of all cores (/proc/stat) (scope board)"
    )


def test_an_unknown_machine_without_a_sensor_says_what_to_do(clock, tmp_path):
    meter = EnergyMeter(System.at(tmp_path), clock=clock, background=False)
    with meter.phase("train") as phase:
        clock.now += 5
    assert phase.energy.quality is Quality.UNAVAILABLE
    assert phase.energy.seconds == 5
    assert "--watts IDLE:MAX, such as 2.3:6.4" in phase.energy.reason
    assert meter.describe().startswith("energy: unavailable, no readable power sensor")


def test_a_phone_is_unavailable_unless_a_model_is_given(meter_on, clock, tree, denied):
    phone = tree("phone-termux/root")
    phone.over = dict(denied)
    assert play(meter_on(phone), clock, phone, [(0, denied), (10, denied)]).joules is None
    phone.over = dict(denied)
    meter = meter_on(phone, model=PowerModel.parse("1:5"))
    with meter.phase("train") as phase:
        clock.now += 10
        clock.cpu += 40
    assert phase.energy.joules == pytest.approx(10 * (1 + 4 * 0.5))
    assert "this process only" in phase.energy.source


# --- phases and the thread


def test_a_phase_that_fails_still_has_its_energy(meter_on, clock, tree):
    phase = meter_on(tree("raspberry-pi-4/root")).phase("train")
    with contextlib.suppress(MemoryError), phase:
        clock.now += 1
        raise MemoryError
    assert phase.energy.joules == pytest.approx(2.31)


def test_energy_is_not_there_before_the_end(meter_on, tree):
    with (
        meter_on(tree("raspberry-pi-4/root")).phase("train") as phase,
        pytest.raises(RuntimeError, match=r"'train' has not ended"),
    ):
        _ = phase.energy


def test_phases_may_overlap_and_take_no_time(meter_on, clock, tree):
    meter = meter_on(tree("raspberry-pi-4/root"))
    with meter.phase("round") as whole, meter.phase("download") as first:
        clock.now += 1
    with meter.phase("nothing") as nothing:
        pass
    assert (whole.energy.joules, first.energy.joules) == (pytest.approx(2.31), pytest.approx(2.31))
    assert (nothing.energy.joules, nothing.energy.coverage) == (0.0, 1.0)


@pytest.mark.parametrize("period", [0.0, -1.0, float("nan"), float("inf")])
def test_a_period_must_be_a_time(period):
    with pytest.raises(ValueError, match="period_seconds must be above 0"):
        EnergyMeter(period_seconds=period)


def sampler_threads():
    return [thread for thread in threading.enumerate() if thread.name == "energy-meter"]


def test_a_thread_samples_by_itself_and_ends_with_the_meter(tree):
    pi, sampled = tree("raspberry-pi-4/root"), threading.Event()
    read = pi.files.read

    def watched(path: Path) -> bytes:
        if threading.current_thread().name == "energy-meter":
            sampled.set()
        return read(path)

    system = System(Files(pi.root, watched))
    with EnergyMeter(system, period_seconds=0.001) as meter, meter.phase("train") as phase:
        assert sampled.wait(30)
        assert len(sampler_threads()) == 1
    assert not sampler_threads()
    assert phase.energy.coverage == pytest.approx(1.0)
    with meter.phase("after closing") as late:
        assert not sampler_threads()
    assert late.energy.quality is Quality.ESTIMATED


def test_where_threads_cannot_start_the_ends_remain(monkeypatch, clock, tree):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with EnergyMeter(tree("raspberry-pi-4/root").system, clock=clock) as meter, meter.phase("train") as phase:
        clock.now += 1
    assert phase.energy.joules == pytest.approx(2.31)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_measures_with_a_thread_of_its_own(tree):
    with EnergyMeter(tree("raspberry-pi-4/root").system, period_seconds=3600) as meter, meter.phase("parent"):
        meter.lock.acquire()  # as if the sampler were at work at the very moment of the fork
        child = os.fork()
        if child == 0:
            with meter.phase("child") as phase:
                started = meter.thread is not None and meter.thread.is_alive()
            os._exit(0 if started and phase.energy.joules is not None else 1)
        meter.lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("joules", "quality", "coverage", "reason"),
    [
        (None, Quality.MEASURED, 1.0, "x"),
        (0.0, Quality.UNAVAILABLE, 0.0, "x"),
        (None, Quality.UNAVAILABLE, 0.0, None),
        (-1.0, Quality.MEASURED, 1.0, None),
        (float("inf"), Quality.MEASURED, 1.0, None),
        (1.0, Quality.MEASURED, 1.5, None),
    ],
)
def test_an_energy_does_not_contradict_itself(joules, quality, coverage, reason):
    with pytest.raises(ValueError, match=r"cannot be|not negative|needs a reason|share from 0 to 1"):
        Energy(joules, quality, "s", "board", coverage, 1.0, reason)
