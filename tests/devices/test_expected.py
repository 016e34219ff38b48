"""Every copied device gives what its expected.json says a correct reader makes of it, through the public readers."""

import pytest

from sparrow.devices import battery, cores, heat, jetson, memory, throttle
from sparrow.devices.board import find_board
from sparrow.devices.estimate import board_model
from sparrow.devices.ina import find_ina
from sparrow.devices.pmic import find_pmic
from sparrow.devices.power import find_sources
from sparrow.devices.rapl import find_packages, find_psys
from sparrow.devices.readings import Quality, Reason
from sparrow.devices.system import System
from sparrow.devices.termux import TermuxBattery

BOARDS = [
    "jetson-nano-l4t32",
    "jetson-orin-nano-jp6",
    "laptop-rapl",
    "phone-termux",
    "raspberry-pi-4",
    "raspberry-pi-5",
    "raspberry-pi-zero-2-w",
]

# expected.json's word -> what a board says of it
FACTS = {
    "board": lambda b: b.name,
    "soc": lambda b: b.soc,
    "module": lambda b: b.module,
    "super": lambda b: b.super_mode,
    "cuda_cc": lambda b: b.cuda,
    "l4t": lambda b: b.l4t,
    "jetpack": lambda b: b.jetpack,
    "revision": lambda b: b.revision,
    "ram_code_bytes": lambda b: b.ram_code_bytes,
    "memory_total_bytes": lambda b: b.memory_bytes,
    "userland_bits": lambda b: b.bits,
    "cpu": lambda b: b.cpu,
    "cpu_core": lambda b: b.cpu_core,
    "physical_cores": lambda b: b.physical_cores,
    "online_cpus": lambda b: b.cores,
    "torch_wheel": lambda b: b.has_wheels,
    "onnxruntime_wheel": lambda b: b.has_wheels,
    "supply_max_current_ma": lambda b: b.supply_milliamperes,
    "undervoltage_detector": lambda b: b.detects_under_voltage,
}


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_what_it_is(trees, expected, name):
    board, want = find_board(System.at(trees / name)), expected(name)
    told = {key: fact(board) for key, fact in FACTS.items() if key in want}
    assert told == {key: want[key] for key in told}
    assert board.kind == ("phone" if want.get("platform") == "termux" else board.kind)


@pytest.mark.parametrize("name", ["jetson-orin-nano-jp6", "raspberry-pi-4", "raspberry-pi-5"])
def test_its_control_groups_limit_what_they_limit(trees, expected, name):
    want = expected(name)["cgroup"]
    files = System.at(trees / name).files
    limit = memory.memory_limit(files, 0.0)
    assert (limit.value, limit.reason) == (want["memory_limit_bytes"], want.get("reason"))
    if limit.value is not None:
        assert memory.free_memory(files, 0.0).value == want["headroom_bytes"]
        assert memory.core_quota(files, 0.0).value == want["cpu_quota_cores"]
    else:
        assert memory.core_quota(files, 0.0).reason is Reason.ABSENT


@pytest.mark.parametrize("name", [name for name in BOARDS if name != "phone-termux"])
def test_its_temperatures_are_read_zone_by_zone(trees, expected, name):
    want = expected(name)
    files = System.at(trees / name).files
    found = heat.temperatures(files, 0.0)
    for zone, degrees in want["temperature_c"].items():
        if zone == "ignored":
            assert not {each.lower() for each in degrees} & set(found)
        elif zone != "package":
            assert found[zone].value == degrees
            assert found[zone].reason == want.get("none_reason", {}).get(zone)
    decisive = heat.Thermometer(files, find_board(System.at(trees / name))).read(0.0)
    assert decisive.value == max(t for z, t in want["temperature_c"].items() if z != "ignored" and t is not None)


@pytest.mark.parametrize("name", ["jetson-nano-l4t32", "jetson-orin-nano-jp6"])
def test_a_jetsons_rails_mode_and_gpu(trees, expected, name):
    system, want = System.at(trees / name), expected(name)
    ina, power = find_ina(system.files), want["power"]
    factor = 1e3 if "rails_mw" in power else 1.0
    rails = power.get("rails_mw") or power["rails_w"]
    assert {rail.label: rail.read(system.files, 0.0).value * factor for rail in ina.rails} == pytest.approx(rails)
    (total,) = ina.read(0.0)
    assert total.value * factor == pytest.approx(power.get("total_mw") or power["total_w"])
    assert (ina.scope, ina.total.rails, str(total.quality)) == (
        power["scope"],
        (power["total_rail"],),
        power["quality"],
    )
    assert find_sources(system, None, lambda: 0.0)[0].name == ina.name
    if "current_limit_ma" in power:
        assert ina.rails[0].current_limit(system.files, 0.0).value * 1e3 == pytest.approx(power["current_limit_ma"])
        assert ina.rails[1].current_limit(system.files, 0.0).reason is Reason.ABSENT
    mode = jetson.power_mode(system)
    assert {"id": mode.id, "name": mode.name} == want["power_mode"]
    assert jetson.gpu_load(system.files, 0.0).value == pytest.approx(want["gpu_load_percent"])
    assert jetson.gpu_clock(system.files, 0.0).value == want.get("gpu_freq_hz", 76800000)
    assert throttle.Alerts(system.files).read(0.0).value == float(want["throttled_now"])
    events = {key: r.value for key, r in throttle.over_current_events(system.files, 0.0).items()}
    assert events == want.get("over_current_events", {})
    assert battery.find_batteries(system.files) is None


@pytest.mark.parametrize(("state", "text"), [("idle", ""), ("loaded", "_loaded")])
def test_a_pi_5_tells_its_rails_and_estimates_its_input(tree, expected, state, text):
    pi, want = tree("raspberry-pi-5/root"), expected("raspberry-pi-5")[f"power_{state}"]
    pi.play("raspberry-pi-5", vcgencmd_pmic_read_adc=f"vcgencmd_pmic_read_adc{text}.txt")
    chip = find_pmic(pi.system)
    rails = chip.rails()
    (total,) = chip.read(0.0)
    assert (len(rails), chip.scope, total.quality) == (want["rails"], want["scope"], Quality.DERIVED)
    assert total.value == pytest.approx(want["sum_w"], abs=1e-5)
    assert rails["VDD_CORE"] == pytest.approx(want["vdd_core_w"], abs=1e-5)
    estimate = chip.input_watts(0.0)
    assert (estimate.value, estimate.quality) == (pytest.approx(want["input_estimate_w"], abs=1e-4), Quality.ESTIMATED)


@pytest.mark.parametrize("name", ["raspberry-pi-4", "raspberry-pi-zero-2-w"])
def test_a_pi_without_a_sensor_has_an_estimate_and_nothing_else(trees, expected, name):
    system, want = System.at(trees / name), expected(name)
    assert want["power"] == {"value": None, "reason": "absent"}
    assert [source.quality for source in find_sources(system, None, lambda: 0.0)] == [Quality.ESTIMATED]
    model = board_model(system.files)
    full = want.get("power_estimate_full_load", {"idle_w": want.get("power_estimate_idle_w")})
    assert model.idle_watts == full["idle_w"]
    if "max_w" in full:
        assert (model.watts(1.0), model.coefficients) == (pytest.approx(full["max_w"]), full["coefficients"])


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("raspberry-pi-4", "throttled", ""),
        ("raspberry-pi-4", "throttled_hot", "_hot"),
        ("raspberry-pi-5", "throttled", ""),
        ("raspberry-pi-5", "throttled_history", "_history"),
    ],
)
def test_a_pis_throttle_word_is_told_bit_by_bit(tree, expected, name, key, text):
    pi, want = tree(f"{name}/root"), expected(name)[key]
    pi.play(name, vcgencmd_get_throttled=f"vcgencmd_get_throttled{text}.txt")
    word = throttle.throttle_word(pi.system)
    assert {"now": throttle.words(word), "since_boot": throttle.words(word, throttle.SINCE_BOOT)} == want
    throttled, weak = throttle.Throttle(pi.system, find_board(pi.system)).read(0.0)
    assert throttled.value == float(bool(set(want["now"]) - {"under_voltage"}))
    assert weak.value == float("under_voltage" in want["now"])


def test_the_kernels_throttle_word_is_the_firmwares(tree, trees, expected):
    assert expected("raspberry-pi-4")["sysfs_word_equals_command"]
    without_command = tree("raspberry-pi-4/root").system
    assert throttle.throttle_word(without_command) == throttle.throttle_word(System.at(trees / "raspberry-pi-4"))


def test_the_firmwares_clock_shows_what_the_kernels_hides(trees, expected):
    want = expected("raspberry-pi-4")["cpufreq_hides_throttle"]
    system = System.at(trees / "raspberry-pi-4")
    assert cores.clock(system.files, 0, 0.0).value == want["scaling_cur_freq_khz"] * 1e3
    assert cores.arm_clock(system, 0.0).value == want["arm_clock_hz"]
    five = cores.arm_clock(System.at(trees / "raspberry-pi-5"), 0.0)
    assert five.value == expected("raspberry-pi-5")["arm_clock_hz"]


@pytest.mark.parametrize("root", ["root", "root-charge", "root-charging"])
def test_a_laptops_battery(trees, expected, root):
    files, want = System.at(trees / "laptop-battery" / root).files, expected("laptop-battery")[root]
    own = battery.find_batteries(files)
    assert (battery.on_mains(files, 0.0).value, own.status()) == (float(want["on_mains"]), want["status"])
    assert own.charge(0.0).value == want["percent"]
    (power,) = own.read(0.0)
    assert power.value == (None if want["power_w"] is None else pytest.approx(want["power_w"]))
    assert power.reason == want.get("reason")
    for key, reading in {
        "energy_now_wh": own.energy_left(0.0),
        "health_percent": own.health(0.0),
        "temperature_c": own.temperature(0.0),
    }.items():
        if key in want:
            assert reading.value == pytest.approx(want[key], abs=0.05 if key == "health_percent" else 1e-6)
    if want["power_w"] is not None:
        assert (str(own.quality), own.scope) == (want["quality"], "device")


@pytest.mark.parametrize(
    ("key", "text"), [("battery", ""), ("battery_discharging", "_discharging"), ("battery_chromebook", "_chromebook")]
)
def test_a_phones_battery(tree, expected, key, text):
    phone, want = tree("phone-termux/root"), expected("phone-termux")[key]
    phone.play("phone-termux", termux_battery_status=f"termux-battery-status{text}.json")
    told = TermuxBattery(phone.system)
    words = told.words(0.0)
    assert told.charge(0.0).value == want["percent"]
    assert {key: words[key] for key in ("status", "plugged")} == {key: want[key] for key in ("status", "plugged")}
    assert told.on_mains(0.0).value == float(want["plugged"] != "unplugged")
    warmth = want["temperature_c"]
    assert told.temperature(0.0).value == (None if warmth is None else pytest.approx(warmth))
    assert (told.power(0.0).value, told.power(0.0).reason) == (None, "unreliable_current_unit")
    assert words["health"] == want.get("health", "good")


def test_a_phones_processor_time_is_this_process_alone(trees, expected):
    files, want = System.at(trees / "phone-termux").files, expected("phone-termux")
    total = cores.busy_seconds(files, 0.0)
    assert {"value": total.value, "reason": total.reason} == want["cpu_total"]
    own = want["cpu_busy"]
    assert cores.own_seconds(files, 0.0).value == (own["utime_ticks"] + own["stime_ticks"]) / cores.JIFFIES_PER_SECOND


def test_a_laptops_energy_counters(trees, expected):
    files, want = System.at(trees / "laptop-rapl").files, expected("laptop-rapl")
    assert find_psys(files).name == f"RAPL {want['board_power_w_first_interval']['preferred']}"
    assert find_packages(files).name == "RAPL package-0 + dram"
    assert battery.on_mains(files, 0.0).value == float(want["on_mains"])
    assert find_board(System.at(trees / "laptop-rapl")).kind == "laptop"
