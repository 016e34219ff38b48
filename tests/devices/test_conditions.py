"""What a device is like right now, on copied boards, with a clock that only the test moves."""

from dataclasses import fields

import pytest

from sparrow.devices.board import find_board
from sparrow.devices.conditions import Conditions, ConditionsReader
from sparrow.devices.cores import LoadOfOthers
from sparrow.devices.network import clock_synchronised, metered, traffic
from sparrow.devices.readings import Quality, Reading, Reason
from sparrow.devices.system import System
from sparrow.devices.throttle import Throttle

HWMON = "sys/class/hwmon"
BUSCTL = (
    "busctl_get_property_org.freedesktop.NetworkManager_/org/freedesktop/NetworkManager"
    "_org.freedesktop.NetworkManager_Metered"
)


@pytest.fixture
def reader(clock):
    return lambda device: ConditionsReader(device.system, clock=clock)


@pytest.mark.parametrize(
    ("where", "want"),
    [
        ("raspberry-pi-4", {"temperature": 80.8, "throttled": 1.0, "under_voltage": 1.0, "on_mains": 1.0}),
        (
            "raspberry-pi-5",
            {"temperature": 47.4, "throttled": 0.0, "under_voltage": 0.0, "free_memory": 7757000 * 1024.0},
        ),
        ("raspberry-pi-zero-2-w", {"temperature": 44.6, "throttled": 0.0, "under_voltage": Reason.ABSENT}),
        ("jetson-nano-l4t32", {"temperature": 34.0, "throttled": 0.0, "under_voltage": Reason.ABSENT}),
        ("jetson-orin-nano-jp6", {"temperature": 46.406, "under_voltage": 0.0, "free_memory": 1518338048.0}),
        (
            "laptop-battery",
            {"battery": 81.0, "battery_temperature": 31.2, "on_mains": 0.0, "temperature": Reason.ABSENT},
        ),
        ("laptop-rapl", {"temperature": 47.0, "battery": Reason.ABSENT, "on_mains": 1.0, "load_by_others": 0.31 / 4}),
        (
            "phone-termux",
            {
                "temperature": Reason.PERMISSION,
                "battery": 96.0,
                "battery_temperature": 24.6,
                "on_mains": 1.0,
                "load_by_others": Reason.PERMISSION,
                "metered": Reason.ABSENT,
            },
        ),
    ],
)
def test_copied_boards_have_the_conditions_that_their_files_tell(trees, clock, where, want):
    conditions = ConditionsReader(System.at(trees / where), clock=clock).read()
    for name, value in want.items():
        reading = getattr(conditions, name)
        if isinstance(value, Reason):
            assert (name, reading.value, reading.reason) == (name, None, value)
        else:
            assert (name, reading.value) == (name, pytest.approx(value, rel=1e-6))


def test_this_machine_has_conditions_of_which_each_is_a_reading():
    conditions = ConditionsReader(System.here()).read()
    assert all(isinstance(getattr(conditions, field.name), Reading) for field in fields(Conditions))
    assert conditions.free_memory.value > 0
    assert conditions.free_storage.value > 0


def test_what_answers_slowly_is_asked_seldom(tree, reader, clock):
    pi = tree("raspberry-pi-5/root")
    pi.play("raspberry-pi-5", vcgencmd_get_throttled="vcgencmd_get_throttled.txt")
    conditions = reader(pi)
    pi.reads.clear()
    for _ in range(120):
        clock.now += 0.5
        conditions.read()
    assert pi.asked.count("vcgencmd_get_throttled") == 12
    assert pi.asked.count("timedatectl_show_property=NTPSynchronized_value") == 1
    assert pi.reads.count("sys/class/thermal/thermal_zone0/temp") <= 60


def test_an_answer_in_between_keeps_the_moment_when_it_was_given(tree, reader, clock):
    pi = tree("raspberry-pi-5/root")
    conditions = reader(pi)
    first = conditions.read().free_memory
    clock.now += 0.4
    assert conditions.read().free_memory is first
    clock.now += 1.0
    assert conditions.read().free_memory.t_monotonic == clock.now


def test_a_phone_is_asked_once_a_minute(tree, reader, clock):
    phone = tree("phone-termux/root")
    phone.environment["PREFIX"] = "/data/data/com.termux/files/usr"
    phone.play("phone-termux", termux_battery_status="termux-battery-status_discharging.json")
    conditions = reader(phone)
    for _ in range(13):
        assert (conditions.read().battery.value, conditions.read().on_mains.value) == (45.0, 0.0)
        clock.now += 5
    assert phone.asked.count("termux-battery-status") == 2


def test_a_phone_without_its_app_has_a_battery_that_nobody_may_read(tree, reader):
    phone = tree("phone-termux/root")
    phone.environment["PREFIX"] = "/data/data/com.termux/files/usr"
    conditions = reader(phone).read()
    assert (conditions.battery.value, conditions.battery.reason) == (None, Reason.PERMISSION)
    assert conditions.on_mains.value is None


def test_free_storage_is_the_folders_or_a_reason(tree, reader, clock):
    pi = tree("raspberry-pi-5/root")
    conditions = reader(pi)
    for free, value, reason in [
        (10**9, 1e9, None),
        (PermissionError(), None, Reason.PERMISSION),
        (FileNotFoundError(), None, Reason.ABSENT),
    ]:
        pi.free = free
        reading = conditions.read().free_storage
        assert (reading.value, reading.reason) == (value, reason)
        clock.now += 10


# --- heat


@pytest.mark.parametrize(
    ("where", "changes", "degrees"),
    [
        ("jetson-nano-l4t32", {"thermal_zone2/temp": "61000"}, 61.0),  # the GPU is the hotter one
        ("jetson-nano-l4t32", {"thermal_zone1/temp": OSError(11, "again")}, 31.0),
        ("jetson-nano-l4t32", {"thermal_zone0/temp": "99000"}, 34.0),  # AO throttles nothing
        ("jetson-orin-nano-jp6", {"thermal_zone0/temp": "99000"}, 46.406),  # tj is the one
        ("laptop-rapl", {"thermal_zone0/temp": "99000"}, 47.0),  # acpitz may be anything
    ],
)
def test_a_board_is_as_hot_as_the_zone_that_throttles_it(tree, reader, where, changes, degrees):
    device = tree(f"{where}/root")
    device.over = {f"sys/class/thermal/{path}": value for path, value in changes.items()}
    assert reader(device).read().temperature.value == degrees


def test_a_zone_that_is_switched_off_is_no_temperature(tree, reader):
    orin = tree("jetson-orin-nano-jp6/root")
    orin.over = {"sys/class/thermal/thermal_zone8/temp": "-256000"}
    temperature = reader(orin).read().temperature
    assert (temperature.value, temperature.reason) == (None, Reason.POWERED_DOWN)


# --- throttling


def test_a_jetsons_alert_is_throttling_and_its_fan_is_not(tree):
    orin = tree("jetson-orin-nano-jp6/root")
    state = Throttle(orin.system, find_board(orin.system))
    orin.over = {"sys/class/thermal/cooling_device0/cur_state": "3"}
    assert state.read(0.0)[0].value == 0.0
    orin.over = {"sys/class/thermal/cooling_device12/cur_state": "1"}
    assert state.read(0.0)[0].value == 1.0


def test_over_current_counts_only_while_it_rises(tree):
    orin = tree("jetson-orin-nano-jp6/root")
    state = Throttle(orin.system, find_board(orin.system))
    seen = []
    for oc1, oc2 in [("0", "2"), ("0", "5"), ("0", "5"), ("1", "5"), ("1", "5"), ("0", "0")]:
        orin.over = {f"{HWMON}/hwmon3/oc1_event_cnt": oc1, f"{HWMON}/hwmon3/oc2_event_cnt": oc2}
        seen.append(tuple(reading.value for reading in state.read(0.0)))
    assert seen == [(0.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]


def test_a_failed_count_in_between_is_neither_lost_nor_an_event(tree):
    orin = tree("jetson-orin-nano-jp6/root")
    state = Throttle(orin.system, find_board(orin.system))
    path = f"{HWMON}/hwmon3/oc1_event_cnt"
    orin.over = {path: OSError(5, "I/O error")}
    assert state.read(0.0)[1].reason is Reason.POWERED_DOWN
    orin.over = {path: "1"}
    assert state.read(0.0)[1].value == 1.0


def test_without_vcgencmd_a_pi_still_sees_a_weak_supply(tree):
    pi = tree("raspberry-pi-5/root")
    pi.over = {f"{HWMON}/hwmon3/in0_lcrit_alarm": "1"}
    throttled, weak = Throttle(pi.system, find_board(pi.system)).read(0.0)
    assert (throttled.value, throttled.reason, weak.value) == (None, Reason.ABSENT, 1.0)


# --- load by others


def test_what_this_process_works_is_no_load_by_others(tree):
    pi = tree("raspberry-pi-5/root")
    others = LoadOfOthers(pi.files)

    def at(now, busy, own):
        pi.over = {
            "proc/stat": f"cpu  {busy} 0 0 0 0 0 0 0\n",
            "proc/self/stat": f"1 (a b) c) R 0 0 0 0 0 0 0 0 0 0 {own} 0 0 0\n",
            "proc/loadavg": "2.00 1.00 0.50 1/100 1\n",
        }
        return others.read(now).value

    assert at(0.0, 1000, 0) == pytest.approx(2 / 4)
    assert at(10.0, 1000 + 3000, 2000) == pytest.approx((30 - 20) / 10 / 4)
    assert at(20.0, 4000 + 3000, 5000) == pytest.approx((60 - 50) / 20 / 4)
    assert at(80.0, 7000 + 6000, 5000) == pytest.approx(60 / 60 / 4)  # the last minute counts
    assert at(90.0, 9000, 5000) == pytest.approx(2 / 4 - 50 / 60 / 4)  # a core went and took its count along


# --- network


@pytest.mark.parametrize(
    ("answer", "value", "quality"),
    [
        ("u 1", 1.0, Quality.MEASURED),
        ("u 2", 0.0, Quality.MEASURED),
        ("u 3", 1.0, Quality.ESTIMATED),
        ("u 4", 0.0, Quality.ESTIMATED),
        ("u 0", None, Quality.UNAVAILABLE),
        ((1, "no bus"), None, Quality.UNAVAILABLE),
    ],
)
def test_networkmanager_knows_whether_traffic_is_metered(tree, answer, value, quality):
    pi = tree("raspberry-pi-5/root")
    pi.commands[BUSCTL.replace("-", "_")] = answer
    reading = metered(pi.system, 0.0)
    assert (reading.value, reading.quality) == (value, quality)


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
{}\t00000000\t0100A8C0\t0003\t0\t0\t{}\t00000000\t0\t0\t0
wlan0\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
"""


@pytest.fixture
def routed(tmp_path):
    def make(interface, metric):
        (tmp_path / "proc/net").mkdir(parents=True)
        (tmp_path / "proc/net/route").write_text(ROUTES.format(interface, metric))
        for name, counts in {interface: (1000, 500), "wlan0": (7, 8)}.items():
            folder = tmp_path / f"sys/class/net/{name}/statistics"
            folder.mkdir(parents=True)
            for file, count in zip(("rx_bytes", "tx_bytes"), counts, strict=True):
                (folder / file).write_text(f"{count}\n")
        return System.at(tmp_path)

    return make


@pytest.mark.parametrize(("interface", "value"), [("wwan0", 1.0), ("ppp0", 1.0), ("rmnet_data0", 1.0), ("eth0", None)])
def test_a_modem_is_metered_and_a_cable_is_unknown(routed, interface, value):
    assert metered(routed(interface, 100), 0.0).value == value


def test_bytes_are_those_of_the_default_route(routed):
    received, sent = traffic(routed("eth1", 100).files, 0.0)
    assert (received.value, sent.value, received.scope) == (1000, 500, "eth1")


def test_a_route_of_higher_metric_stands_back(routed):
    assert [reading.value for reading in traffic(routed("eth1", 700).files, 0.0)] == [7, 8]


@pytest.mark.parametrize(("answer", "value"), [("yes", 1.0), ("no", 0.0)])
def test_the_kernel_says_whether_its_clock_is_right(tree, answer, value):
    pi = tree("raspberry-pi-5/root")
    pi.commands["timedatectl_show_property=NTPSynchronized_value"] = answer
    assert clock_synchronised(pi.system, 0.0).value == value
