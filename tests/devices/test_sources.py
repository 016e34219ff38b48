"""Sources of joules: rails of every Jetson, jetson-stats, NVIDIA's cards; and a load whose joules are known."""

import math
from types import SimpleNamespace

import pytest

from sparrow.devices import EnergyMeter, PowerModel, Quality
from sparrow.devices.board import find_board
from sparrow.devices.ina import find_ina
from sparrow.devices.jetson_stats import find_jetson_stats
from sparrow.devices.nvml import DRIVER, find_cards
from sparrow.devices.power import find_sources
from sparrow.devices.rails import TOTALS, total_of
from sparrow.devices.readings import Files, Reason
from sparrow.devices.system import System

HWMON = "sys/class/hwmon"


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return Files(root)


def chip(number, rails, name="ina3221"):
    """An INA3221 in hwmon's form: label -> milliamperes, at 5 V each."""
    files = {f"{HWMON}/hwmon{number}/name": name}
    for channel, (label, milliamperes) in enumerate(rails, start=1):
        files |= {f"{HWMON}/hwmon{number}/in{channel}_label": label}
        if milliamperes is not None:
            files |= {
                f"{HWMON}/hwmon{number}/in{channel}_input": 5000,
                f"{HWMON}/hwmon{number}/curr{channel}_input": milliamperes,
                f"{HWMON}/hwmon{number}/in{channel + 3}_input": 5240,
            }
    return files


# --- rails


@pytest.mark.parametrize("total", TOTALS, ids=lambda total: total.rails[0])
def test_every_boards_total_is_found_among_its_rails(total):
    assert total_of([*total.rails, "VDD_OTHER"]) == total_of(total.rails) == total


def test_the_widest_total_wins_and_no_rail_counts_twice():
    carrier = ["VDD_MUX", "VDD_5V0_IO_SYS", "VDD_IN", "VDD_SYS_GPU"]
    assert total_of(carrier).rails == ("VDD_MUX",)
    assert total_of(["VDD_SOC", "VDD_IN", "VDD_CPU_GPU_CV"]).rails == ("VDD_IN",)
    assert total_of(["VDD_CPU", "VDD_GPU"]) is None


def test_an_agx_orins_rails_are_added_without_the_one_inside_another(tmp_path):
    first = chip(4, [("VDD_GPU_SOC", 800), ("VDD_CPU_CV", 400), ("VIN_SYS_5V0", 600)])
    second = chip(5, [("NC", None), ("VDDQ_VDD2_1V8AO", 200), ("NC", None)])
    ina = find_ina(write(tmp_path, first | second))
    assert (ina.scope, ina.quality) == ("rails", Quality.DERIVED)
    assert sum(reading.value for reading in ina.read(0.0)) == pytest.approx(5 * 1.8)
    assert {rail.label for rail in ina.rails} == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"}


def test_a_thors_input_sensor_is_the_whole_board(tmp_path):
    rails = chip(1, [("VDD_GPU", -8), ("VDD_CPU_SOC_MSS", 900), ("VIN_SYS_5V0", 700)])
    path = f"{HWMON}/hwmon2"
    vin = {f"{path}/name": "ina238", f"{path}/label": "VIN", f"{path}/power1_input": 24500000}
    files = write(tmp_path, rails | vin | {f"{path}/in1_input": 20000, f"{path}/curr1_input": 1225})
    ina = find_ina(files)
    assert (ina.scope, ina.total.rails, ina.quality) == ("board", ("VIN",), Quality.MEASURED)
    assert ina.read(0.0)[0].value == pytest.approx(24.5)
    assert {rail.label: rail for rail in ina.rails}["VDD_GPU"].read(files, 0.0).value == pytest.approx(
        -0.04
    )  # a gated rail, as it stands


def test_a_gated_rail_does_not_spoil_the_sum(tmp_path):
    ina = find_ina(write(tmp_path, chip(1, [("VDD_GPU", 0), ("VDD_CPU_SOC_MSS", 900), ("VIN_SYS_5V0", 700)])))
    assert sum(reading.value for reading in ina.read(0.0)) == pytest.approx(8.0)


def test_channels_without_a_connection_that_raise_leave_the_others(tree):
    orin = tree("jetson-orin-nano-jp6/root")
    for file in ("in3_label", "in3_input", "curr3_input", "in7_label"):
        orin.over[f"{HWMON}/hwmon1/{file}"] = OSError(61, "no data available")
    ina = find_ina(orin.files)
    assert ina.read(0.0)[0].value == pytest.approx(6.140288)
    assert {rail.label for rail in ina.rails} == {"VDD_IN", "VDD_CPU_GPU_CV"}


@pytest.mark.parametrize("hidden", [["sys/class/hwmon"], ["sys/class/hwmon", "sys/bus/i2c/devices"]])
def test_a_chip_is_found_once_by_whichever_path_shows_it(tree, hidden):
    orin = tree("jetson-orin-nano-jp6/root")
    orin.over = {path: FileNotFoundError() for path in hidden}
    ina = find_ina(orin.files)
    assert len(ina.rails) == 3
    assert ina.read(0.0)[0].value == pytest.approx(6.140288)


def test_the_older_kernels_link_to_the_same_chip_is_not_a_second_one(tree, tmp_path):
    nano = tree("jetson-nano-l4t32/root").files
    folder = "sys/bus/i2c/devices/6-0040"
    names = nano.folders(f"{folder}/iio:device0")
    copy = {f"{folder}/{d}/{p.rpartition('/')[2]}": nano.text(p) for p in names for d in ("iio:device0", "iio_device")}
    ina = find_ina(write(tmp_path, copy | {f"{folder}/name": "ina3221x"}))
    assert [rail.label for rail in ina.rails] == ["POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"]


def test_a_monitor_without_rails_does_not_hide_the_ones_elsewhere(tree, tmp_path):
    nano = tree("jetson-nano-l4t32/root").files
    folder = "sys/bus/i2c/devices/6-0040/iio:device0"
    copy = {path: nano.text(path) for path in nano.folders(folder)}
    names = {"sys/bus/i2c/devices/6-0040/name": "ina3221x", f"{HWMON}/hwmon0/name": "ina3221x"}
    assert find_ina(write(tmp_path, copy | names)).read(0.0)[0].value == pytest.approx(0.933)


def test_rails_that_only_root_may_read_say_how_to_get_them(tree, clock):
    nano = tree("jetson-nano-l4t32/root")
    folder = "sys/bus/i2c/devices/6-0040/iio:device0"
    nano.over = {f"{folder}/{p.rpartition('/')[2]}": PermissionError() for p in nano.files.folders(folder)}
    ina = find_ina(nano.files)
    (reading,) = ina.read(0.0)
    assert (reading.value, reading.reason) == (None, Reason.PERMISSION)
    meter = EnergyMeter(nano.system, clock=clock, background=False)
    assert "usermod -aG i2c" in meter.describe()


def test_rails_that_no_table_knows_have_no_total(tmp_path):
    files = write(tmp_path, chip(1, [("VDD_NEW", 100)]))
    ina = find_ina(files)
    (reading,) = ina.read(0.0)
    assert (reading.value, reading.reason) == (None, Reason.ABSENT)
    assert ina.rails[0].read(files, 0.0).value == pytest.approx(0.5)


# --- jetson-stats


class Jtop:
    """A client of jetson-stats as it presents itself to Python."""

    def __init__(self, power, error=None):
        self.power, self._error, self.started, self.running = power, error, 0, True

    def start(self):
        self.started += 1
        if self._error is not None:
            raise self._error

    def ok(self, spin):
        assert spin, "anything else would wait"
        if isinstance(self.running, Exception):
            raise self.running
        return self.running


POWER = {
    "rail": {"POM_5V_CPU": {"power": 81, "avg": 81}, "POM_5V_GPU": {"power": 0, "avg": 0}},
    "tot": {"power": 933, "avg": 900, "name": "POM_5V_IN"},
}


def nano_with(tree, client):
    nano = tree("jetson-nano-l4t32/root")
    nano.over = {"sys/bus/i2c": PermissionError()}
    nano.libraries["jtop"] = SimpleNamespace(jtop=lambda: client)
    return nano


def test_jetson_stats_tells_what_only_root_may_read(tree):
    client = Jtop(POWER)
    nano = nano_with(tree, client)
    (source,) = find_sources(nano.system, None, lambda: 0.0)
    readings = [source.read(float(second))[0] for second in range(3)]
    assert [reading.value for reading in readings] == pytest.approx([0.933] * 3)
    assert (source.scope, source.name, client.started) == ("module", "jetson-stats POM_5V_IN", 1)


def test_its_own_sum_of_rails_is_left_aside(tree):
    rails = {name: {"power": 1000} for name in ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO", "usb")}
    nano = nano_with(tree, Jtop({"rail": rails, "tot": {"power": 5000}}))
    source = find_jetson_stats(nano.system, find_board(nano.system))
    assert sum(reading.value for reading in source.read(0.0)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (Jtop(POWER, RuntimeError("The jtop.service is not active")), Reason.POWERED_DOWN),
        (
            Jtop(POWER, RuntimeError("I can't access jtop.service.\nPlease logout or reboot this board.")),
            Reason.PERMISSION,
        ),
        (Jtop(POWER, PermissionError()), Reason.PERMISSION),
        (Jtop({}), Reason.PARSE),
        (Jtop({"rail": {"VDD_IN": {"power": "?"}}, "tot": {}}), Reason.PARSE),
        (Jtop({"rail": {}, "tot": {}}), Reason.ABSENT),
        (Jtop({"rail": {"VDD_IN": {"power": 0}}, "tot": {}}), Reason.STALE),
    ],
)
def test_jetson_stats_that_does_not_serve_is_a_reason(tree, client, reason):
    nano = nano_with(tree, client)
    (source,) = find_sources(nano.system, None, lambda: 0.0)
    (reading,) = source.read(0.0)
    assert (reading.value, reading.reason) == (None, reason)


@pytest.mark.parametrize("ended", [False, EOFError()])
def test_a_service_that_ends_is_asked_again_after_a_minute(tree, ended):
    client = Jtop(POWER)
    nano = nano_with(tree, client)
    (source,) = find_sources(nano.system, None, lambda: 0.0)
    assert source.read(0.0)[0].value == pytest.approx(0.933)
    client.running = ended
    assert [source.read(float(second))[0].reason for second in (1, 2, 30)] == [Reason.POWERED_DOWN] * 3
    client.running = True
    assert source.read(60.0)[0].value is None
    assert (source.read(61.0)[0].value, client.started) == (pytest.approx(0.933), 2)


def test_files_that_can_be_read_make_its_client_needless(tree):
    client = Jtop(POWER)
    nano = nano_with(tree, client)
    nano.over = {}
    (source,) = find_sources(nano.system, None, lambda: 0.0)
    assert (source.name, client.started) == ("INA POM_5V_IN", 0)


# --- NVIDIA's cards


class NvmlError(Exception):
    def __init__(self, value):
        self.value = value


class Pynvml:
    """NVIDIA's library for a machine with cards: each a counter in mJ (None: it has none) and a power in mW."""

    NVMLError = NvmlError
    NVML_ERROR_NO_PERMISSION = 4

    def __init__(self, *cards, error=None):
        self.cards, self.error, self.opened = [list(card) for card in cards], error, 0

    def nvmlInit(self):
        self.opened += 1
        if self.error is not None:
            raise self.error

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, index):
        return self._value(self.cards[index][0])

    def nvmlDeviceGetPowerUsage(self, index):
        return self._value(self.cards[index][1])

    def _value(self, value):
        if self.error is not None or value is None:
            raise self.error or NvmlError(3)
        return value


def machine_with(tmp_path, library):
    files = write(tmp_path, {DRIVER: "NVRM version"})
    return System(files, library=lambda name: {"pynvml": library}[name])


def test_a_cards_counter_gives_its_joules(tmp_path, clock):
    library = Pynvml([5_000_000, 70_000], [None, 10_000])
    meter = EnergyMeter(machine_with(tmp_path, library), clock=clock, background=False)
    with meter.phase("train") as phase:
        for _ in range(10):
            clock.now += 1
            library.cards[0][0] += 250_000
            meter.sample()
    assert phase.energy.joules == pytest.approx(2500 + 100)  # the second card, without a counter, draws 10 W
    assert (phase.energy.scope, phase.energy.quality, library.opened) == ("accelerator", Quality.MEASURED, 1)


def test_a_card_beside_a_processor_that_counts_adds_to_it(tmp_path, clock):
    zone = "sys/class/powercap/intel-rapl:0"
    write(tmp_path, {f"{zone}/name": "package-0", f"{zone}/energy_uj": 0, f"{zone}/max_energy_range_uj": 262143328850})
    library = Pynvml([0, 0])
    system = machine_with(tmp_path, library)
    with EnergyMeter(system, clock=clock, background=False) as meter:
        with meter.phase("train") as phase:
            clock.now += 1
            library.cards[0][0] = 250_000
            (tmp_path / f"{zone}/energy_uj").write_text("40000000")
        library.error = NvmlError(15)
        with meter.phase("after the card fell off the bus") as alone:
            clock.now += 1
            (tmp_path / f"{zone}/energy_uj").write_text("70000000")
    assert (phase.energy.joules, phase.energy.scope) == (pytest.approx(290), "package+accelerator")
    assert (alone.energy.joules, alone.energy.scope) == (pytest.approx(30), "package")


def test_a_card_alone_gives_way_to_a_model_of_the_whole_machine(tmp_path, clock):
    system = machine_with(tmp_path, Pynvml([0, 0]))
    write(tmp_path, {"proc/stat": "cpu  0 0 0 0 0 0 0 0"})
    meter = EnergyMeter(system, model=PowerModel.parse("40:100"), clock=clock, background=False)
    with meter.phase("train") as phase:
        clock.now += 10
    assert (phase.energy.joules, phase.energy.scope) == (pytest.approx(400), "board")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Pynvml([1, 1], error=NvmlError(4)), Reason.PERMISSION),
        (Pynvml([1, 1], error=NvmlError(9)), Reason.POWERED_DOWN),
        (Pynvml([None, None]), Reason.POWERED_DOWN),
        (Pynvml([-1, 1]), Reason.IMPLAUSIBLE),
        (Pynvml(), Reason.ABSENT),
    ],
)
def test_a_card_that_does_not_answer_is_a_reason(tmp_path, library, reason):
    (reading,) = find_cards(machine_with(tmp_path, library)).read(0.0)
    assert (reading.value, reading.reason) == (None, reason)


def test_without_the_library_one_is_told_what_to_install(tmp_path, clock):
    system = System(write(tmp_path, {DRIVER: "NVRM version"}), library=_none)
    meter = EnergyMeter(system, clock=clock, background=False)
    assert "pip install nvidia-ml-py" in meter.describe()


def _none(name):
    raise ImportError(name)


def test_a_counter_that_went_back_or_jumped_is_refused(tmp_path):
    cards = find_cards(machine_with(tmp_path, Pynvml([0, 0])))
    cards.read(0.0)
    assert cards.joules((100.0,), (90.0,), 1.0) is None
    assert cards.joules((100.0,), (5000.0,), 1.0) is None
    assert cards.joules((100.0,), (500.0,), 1.0) == 400


# --- a load of known power


def seconds_of_load(t):
    """Watts of the load: at rest, a slow swell as of warm-up, ten steps of training, cooling down."""
    if t < 20:
        return 3.0
    if t < 50:
        return 3.0 + 6.0 * (t - 20) / 30
    if t < 110:
        return 9.0 + 2.0 * math.sin(2 * math.pi * (t - 50) / 15)
    return 3.0 + 6.0 * math.exp(-(t - 110) / 20)


def integral(end, steps_per_second=1000):
    n = int(end * steps_per_second)
    return sum(seconds_of_load((k + 0.5) / steps_per_second) for k in range(n)) / steps_per_second


def orin(tree, watts):
    over = {f"{HWMON}/hwmon1/in1_input": "5000", f"{HWMON}/hwmon1/curr1_input": str(round(watts * 200))}
    tree.over = over


def pi(tree, watts):
    tree.commands["vcgencmd_pmic_read_adc"] = f"VDD_CORE_A current(7)={watts:.8f}A\n VDD_CORE_V volt(15)=1.0V"


def laptop(tree, watts):
    tree.over = {"sys/class/power_supply/BAT0/power_now": str(round(watts * 1e6))}


@pytest.mark.parametrize(
    ("where", "set_watts", "scope"),
    [
        ("jetson-orin-nano-jp6/root", orin, "module"),
        ("raspberry-pi-5/root", pi, "rails"),
        ("laptop-battery/root", laptop, "device"),
    ],
)
def test_joules_of_a_known_load_are_within_a_hundredth_of_its_integral(tree, clock, where, set_watts, scope):
    device = tree(where)
    set_watts(device, seconds_of_load(0.0))
    start, end = clock.now, 150
    with EnergyMeter(device.system, clock=clock, background=False) as meter, meter.phase("train") as phase:
        for second in range(1, end + 1):
            clock.now = start + second
            set_watts(device, seconds_of_load(float(second)))
            meter.sample()
    assert phase.energy.joules == pytest.approx(integral(end), rel=0.01)
    assert (phase.energy.scope, phase.energy.coverage) == (scope, pytest.approx(1.0))


def test_the_pis_power_chip_is_asked_every_other_second_at_most(tree, clock):
    device = tree("raspberry-pi-5/root")
    pi(device, 3.0)
    with EnergyMeter(device.system, clock=clock, background=False) as meter, meter.phase("train"):
        for _ in range(20):
            clock.now += 1
            meter.sample()
    assert device.asked.count("vcgencmd_pmic_read_adc") <= 12


def test_a_gap_of_more_than_five_periods_is_left_out(tree, clock):
    device = tree("jetson-orin-nano-jp6/root")
    orin(device, 4.0)
    with EnergyMeter(device.system, clock=clock, background=False) as meter, meter.phase("train") as phase:
        for pause in (1, 1, 5, 6, 1):
            clock.now += pause
            meter.sample()
    assert (phase.energy.joules, phase.energy.coverage) == (pytest.approx(4 * 8), pytest.approx(8 / 14))
    assert "too rare" in phase.energy.reason
