"""Whatever goes wrong while a sensor is read, a reading has no value but a reason: never an exception, never a zero."""

import errno
import json
import math
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.devices import battery, cores, heat, jetson, memory, network, throttle
from sparrow.devices.board import find_board
from sparrow.devices.conditions import Conditions, ConditionsReader
from sparrow.devices.ina import find_ina
from sparrow.devices.pmic import find_pmic
from sparrow.devices.rapl import find_packages
from sparrow.devices.readings import Files, Quality, ReadError, Reason
from sparrow.devices.survey import Survey
from sparrow.devices.system import Commands, System
from sparrow.devices.termux import TermuxBattery

ZONE = "sys/class/thermal/thermal_zone0/temp"
RAPL = "sys/class/powercap/intel-rapl:0/energy_uj"
OC1 = "sys/class/hwmon/hwmon3/oc1_event_cnt"
NANO_RAIL = "sys/bus/i2c/devices/6-0040/iio:device0/in_power0_input"
BAT0 = "sys/class/power_supply/BAT0"

# What is read: on which device, the one file that tells it, and how.
READERS = {
    "temperature": (
        "raspberry-pi-4/root",
        ZONE,
        lambda s: heat.Thermometer(s.files, find_board(s)).read(1.0),
    ),
    "zone": ("jetson-nano-l4t32/root", ZONE, lambda s: heat.temperatures(s.files, 1.0)["ao"]),
    "current of a rail": (
        "jetson-orin-nano-jp6/root",
        "sys/class/hwmon/hwmon1/curr1_input",
        lambda s: find_ina(s.files).read(1.0)[0],
    ),
    "voltage of a rail": (
        "jetson-orin-nano-jp6/root",
        "sys/class/hwmon/hwmon1/in1_input",
        lambda s: find_ina(s.files).read(1.0)[0],
    ),
    "power of a rail": ("jetson-nano-l4t32/root", NANO_RAIL, lambda s: find_ina(s.files).read(1.0)[0]),
    "limit of a rail": (
        "jetson-orin-nano-jp6/root",
        "sys/class/hwmon/hwmon1/curr1_crit",
        lambda s: find_ina(s.files).rails[0].current_limit(s.files, 1.0),
    ),
    "energy counter": ("laptop-rapl/root", RAPL, lambda s: find_packages(s.files).read(1.0)[0]),
    "charge": ("laptop-battery/root", f"{BAT0}/capacity", lambda s: battery.find_batteries(s.files).charge(1.0)),
    "battery's power": (
        "laptop-battery/root",
        f"{BAT0}/power_now",
        lambda s: battery.find_batteries(s.files).read(1.0)[0],
    ),
    "battery's heat": (
        "laptop-battery/root",
        f"{BAT0}/temp",
        lambda s: battery.find_batteries(s.files).temperature(1.0),
    ),
    "battery's health": (
        "laptop-battery/root-charge",
        "sys/class/power_supply/BAT1/charge_full_design",
        lambda s: battery.find_batteries(s.files).health(1.0),
    ),
    "over-current events": (
        "jetson-orin-nano-jp6/root",
        OC1,
        lambda s: throttle.over_current_events(s.files, 1.0)["oc1"],
    ),
    "under-voltage of a Jetson": (
        "jetson-orin-nano-jp6/root",
        OC1,
        lambda s: throttle.Throttle(s, find_board(s)).read(1.0)[1],
    ),
    "thermal alert": (
        "jetson-orin-nano-jp6/root",
        "sys/class/thermal/cooling_device10/cur_state",
        lambda s: throttle.Alerts(s.files).read(1.0),
    ),
    "under-voltage alarm": (
        "raspberry-pi-5/root",
        "sys/class/hwmon/hwmon3/in0_lcrit_alarm",
        lambda s: throttle.Throttle(s, find_board(s)).read(1.0)[1],
    ),
    "clock": (
        "raspberry-pi-5/root",
        f"{cores.CPU}/cpu0/cpufreq/scaling_cur_freq",
        lambda s: cores.clock(s.files, 0, 1.0),
    ),
    "busy time": ("raspberry-pi-5/root", "proc/stat", lambda s: cores.busy_seconds(s.files, 1.0)),
    "own time": ("phone-termux/root", "proc/self/stat", lambda s: cores.own_seconds(s.files, 1.0)),
    "load": ("raspberry-pi-5/root", "proc/loadavg", lambda s: cores.load_average(s.files, 1.0)),
    "load by others": ("raspberry-pi-5/root", "proc/loadavg", lambda s: cores.LoadOfOthers(s.files).read(1.0)),
    "memory": ("raspberry-pi-5/root", "proc/meminfo", lambda s: memory.free_memory(s.files, 1.0)),
    "GPU clock": (
        "jetson-orin-nano-jp6/root",
        "sys/class/devfreq/17000000.gpu/cur_freq",
        lambda s: jetson.gpu_clock(s.files, 1.0),
    ),
}


def check(reading, reason):
    assert (reading.value, reading.quality, reading.reason) == (None, Quality.UNAVAILABLE, reason)


@pytest.mark.integration
@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (PermissionError(), Reason.PERMISSION),
        (FileNotFoundError(), Reason.ABSENT),  # it was there when the folder was listed
        (OSError(errno.EAGAIN, "try again"), Reason.POWERED_DOWN),
        (OSError(errno.EIO, "I/O error"), Reason.POWERED_DOWN),
        (OSError(errno.ENODATA, "no data"), Reason.POWERED_DOWN),
        ("", Reason.PARSE),
        ("\x00\x00\x00\n", Reason.PARSE),
        ("n/a\n", Reason.PARSE),
    ],
    ids=["permission", "vanished", "again", "input-output", "no-data", "empty", "nuls", "words"],
)
def test_every_failure_of_every_file_is_a_reason(tree, what, failure, reason):
    where, path, read = READERS[what]
    device = tree(where)
    device.over = {path: failure}
    if what == "charge" and reason is Reason.ABSENT:
        assert read(device.system).value == pytest.approx(41.23 / 50.34 * 100)
        device.over[f"{BAT0}/energy_full"] = failure
        reason = Reason.STALE  # absent would mean that there is no battery
    check(read(device.system), reason)


@pytest.mark.parametrize("what", READERS)
def test_nuls_and_newlines_around_a_value_do_no_harm(tree, what):
    where, path, read = READERS[what]
    device = tree(where)
    plain = read(device.system)
    assert plain.value is not None
    device.over = {path: (device.root / path).read_text().rstrip("\n") + "\x00\n\x00"}
    assert read(device.system) == plain


@pytest.mark.parametrize(
    ("what", "text", "reason"),
    [
        ("temperature", "-256000", Reason.POWERED_DOWN),
        ("temperature", "999000", Reason.IMPLAUSIBLE),
        ("energy counter", "-5", Reason.IMPLAUSIBLE),
        ("over-current events", "-1", Reason.IMPLAUSIBLE),
        ("charge", "101", Reason.IMPLAUSIBLE),
        ("charge", "-1", Reason.IMPLAUSIBLE),
        ("battery's power", "0", Reason.STALE),  # a device that runs draws something: the sensor is stuck
        ("current of a rail", "0", Reason.STALE),
        ("power of a rail", "0", Reason.STALE),
        ("power of a rail", "-8", Reason.STALE),
        ("battery's health", "0", Reason.IMPLAUSIBLE),
        ("busy time", "cpu  -5 0 0 0 0 0 0 0", Reason.PARSE),
    ],
)
def test_a_value_that_cannot_be_true_is_none(tree, what, text, reason):
    where, path, read = READERS[what]
    device = tree(where)
    device.over = {path: text}
    check(read(device.system), reason)


# --- commands

COMMANDS = {
    "PMIC": ("raspberry-pi-5/root", "vcgencmd_pmic_read_adc", lambda s: find_pmic(s).read(1.0)[0]),
    "PMIC's estimate": ("raspberry-pi-5/root", "vcgencmd_pmic_read_adc", lambda s: find_pmic(s).input_watts(1.0)),
    "throttle word": (
        "raspberry-pi-5/root",
        "vcgencmd_get_throttled",
        lambda s: throttle.Throttle(s, find_board(s)).read(1.0)[0],
    ),
    "firmware's clock": ("raspberry-pi-5/root", "vcgencmd_measure_clock_arm", lambda s: cores.arm_clock(s, 1.0)),
    "phone's battery": ("phone-termux/root", "termux_battery_status", lambda s: TermuxBattery(s).charge(1.0)),
    "phone's plug": ("phone-termux/root", "termux_battery_status", lambda s: TermuxBattery(s).on_mains(1.0)),
    "clock's state": (
        "raspberry-pi-5/root",
        "timedatectl_show_property=NTPSynchronized_value",
        lambda s: network.clock_synchronised(s, 1.0),
    ),
}
NO_PERMISSION = (255, "Can't open device file: /dev/vcio_gencmd\n")


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FileNotFoundError(), Reason.ABSENT),
        (PermissionError(), Reason.PERMISSION),
        (NO_PERMISSION, Reason.PERMISSION),
        (subprocess.TimeoutExpired("x", 5), Reason.STALE),
        (OSError(errno.EIO, "I/O error"), Reason.POWERED_DOWN),
        ((1, "it broke"), Reason.PARSE),
        ("", Reason.PARSE),
        ('error=1 error_msg="Command not registered"', Reason.PARSE),
        ("\x00\x00", Reason.PARSE),
    ],
    ids=["missing", "denied", "refused", "late", "input-output", "failed", "silent", "unknown", "nuls"],
)
def test_every_failure_of_every_command_is_a_reason(tree, what, answer, reason):
    where, words, read = COMMANDS[what]
    device = tree(where)
    device.commands[words.replace("-", "_")] = answer
    check(read(device.system), reason)


def test_the_refusal_of_a_copied_board_is_the_expected_one(trees, expected):
    want = expected("raspberry-pi-5")["no_permission"]
    text = (trees / "raspberry-pi-5/commands/vcgencmd_no_permission.txt").read_text()
    assert (want["exit_status"], text.strip()) == (NO_PERMISSION[0], NO_PERMISSION[1].strip())
    assert want["reason"] == Reason.PERMISSION


def test_power_without_one_of_its_voltages_is_none_rather_than_too_little(tree, trees):
    pi = tree("raspberry-pi-5/root")
    text = (trees / "raspberry-pi-5/commands/vcgencmd_pmic_read_adc.txt").read_text()
    pi.commands["vcgencmd_pmic_read_adc"] = "\n".join(line for line in text.splitlines() if "3V3_SYS_V" not in line)
    check(find_pmic(pi.system).read(0.0)[0], Reason.PARSE)


def test_power_that_stands_at_nothing_is_stuck(tree):
    pi = tree("raspberry-pi-5/root")
    pi.commands["vcgencmd_pmic_read_adc"] = "HDMI_A current(22)=0.0A\nHDMI_V volt(23)=5.1V\n"
    check(find_pmic(pi.system).read(0.0)[0], Reason.STALE)


@pytest.mark.parametrize("text", ["[]", '{"percentage": 96}', '{"percentage": 300, "temperature": 1}', "{"])
def test_a_phones_answer_that_is_not_one_is_none(tree, text):
    phone = tree("phone-termux/root")
    phone.commands["termux_battery_status"] = text
    told = TermuxBattery(phone.system)
    for reading in (told.charge(0.0), told.temperature(0.0), told.on_mains(0.0), told.power(0.0)):
        check(reading, Reason.PARSE)
    assert told.words(0.0) == {}


# --- noise


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    noise=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)), what=st.sampled_from(sorted(READERS))
)
def test_noise_in_a_file_is_a_reading_all_the_same(trees, noise, what):
    where, path, read = READERS[what]
    root = trees / where
    files = Files(root, lambda p: noise if p == root / path else p.read_bytes())
    reading = read(System(files))
    assert reading.value is None or math.isfinite(reading.value)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    noise=st.one_of(
        st.text(max_size=60),
        st.builds("throttled={}".format, st.text(max_size=12)),
        st.builds("frequency(0)={}".format, st.text(max_size=12)),
        st.builds("X_A current(1)={}A\nX_V volt(2)={}V".format, st.text(max_size=6), st.floats()),
        st.fixed_dictionaries(
            {key: st.one_of(st.floats(), st.text(max_size=5), st.none()) for key in ("percentage", "temperature")}
            | {key: st.one_of(st.just("UNKNOWN"), st.integers()) for key in ("status", "plugged", "health")}
        ).map(json.dumps),
    ),
    what=st.sampled_from(sorted(COMMANDS)),
)
def test_noise_of_a_command_is_a_reading_all_the_same(trees, noise, what):
    where, _, read = COMMANDS[what]
    reading = read(System(Files(trees / where), Commands(lambda _argv, _timeout: (0, noise))))
    assert reading.value is None or math.isfinite(reading.value)


def test_the_order_of_the_power_chips_lines_does_not_matter(tree, trees):
    pi = tree("raspberry-pi-5/root")
    text = (trees / "raspberry-pi-5/commands/vcgencmd_pmic_read_adc.txt").read_text()
    pi.commands["vcgencmd_pmic_read_adc"] = "\n".join(reversed(text.splitlines())) + "\nNEW_V volt(26)=1.0V\nwhatever\n"
    assert find_pmic(pi.system).read(0.0)[0].value == pytest.approx(1.96781, abs=1e-5)


# --- all at once

FAILURES = [PermissionError(), FileNotFoundError(), OSError(errno.EIO, "I/O error"), "", "\x00", "garbage"]
TREES = [
    "jetson-nano-l4t32/root",
    "jetson-orin-nano-jp6/root",
    "laptop-battery/root",
    "laptop-rapl/root",
    "phone-termux/root",
    "raspberry-pi-4/root",
    "raspberry-pi-5/root",
]
# What may have a value where no file can be read: a device that runs is fed, and without alerts none is up.
DERIVED = {"on_mains", "throttled"}


@pytest.mark.integration
@pytest.mark.parametrize("where", TREES)
@pytest.mark.parametrize("failure", FAILURES, ids=["permission", "absent", "input-output", "empty", "nul", "garbage"])
def test_a_device_that_fails_all_over_has_conditions_without_values(tree, clock, where, failure):
    device = tree(where)
    reader, survey = ConditionsReader(device.system, clock=clock), Survey(device.system, clock)
    device.over = dict.fromkeys(("sys", "proc", "etc", "var"), failure)
    conditions = reader.read()
    assert isinstance(conditions, Conditions)
    values = {name: reading for name, reading in vars(conditions).items() if reading.value is not None}
    assert set(values) <= DERIVED
    assert all(reading.quality is Quality.DERIVED for reading in values.values())
    for sensor in survey.read():
        known_before = sensor.name == "the supply offers"
        assert sensor.reading.value is None or sensor.reading.quality is not Quality.MEASURED or known_before
        assert sensor.reading.value != 0 or sensor.name == "throttled now"


def test_a_folder_that_is_none_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder; give one with a copy"):
        System.at(tmp_path / "none")


def test_a_mode_without_its_name_is_an_error_with_a_reason(tree):
    nano = tree("jetson-nano-l4t32/root")
    nano.over = {"var/lib/nvpmodel/status": "pmode:0007"}
    with pytest.raises(ReadError) as failure:
        jetson.power_mode(nano.system)
    assert failure.value.reason is Reason.ABSENT  # nor is there an nvpmodel to ask
    nano.commands["nvpmodel_q"] = "NVPM WARN: fan mode is not set!\nNV Power Mode: 25W\n1\n"
    assert jetson.power_mode(nano.system) == jetson.PowerMode(1, "25W")
    nano.commands["nvpmodel_q"] = "?"
    with pytest.raises(ReadError) as failure:
        jetson.power_mode(nano.system)
    assert failure.value.reason is Reason.PARSE
