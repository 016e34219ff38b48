"""sparrow devices, as a person and as a program see it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.command_line.exits import Exit
from sparrow.devices.__main__ import main
from sparrow.devices.survey import Survey
from sparrow.devices.system import System


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        (
            "raspberry-pi-5",
            [
                "raspberry-pi-5 (raspberry-pi): Raspberry Pi 5 Model B Rev 1.0",
                "bcm2712, cortex-a76, 4 cores, 64-bit, 8.46 GB of memory, revision d04170",
                "PMIC rails  1.97 W  derived, rails",
                "board input  2.84 W  estimated, board; fitted on one board",
                "board  47.40 °C  measured",
                "throttled now  no  measured",
                "the supply offers  5 A",
            ],
        ),
        (
            "raspberry-pi-4",
            [
                "throttled now  yes  measured",
                "since the start  yes  measured; under_voltage, throttled",
                "cores, from the firmware  1 GHz",
                "limit of its control group  -  unavailable: controller_absent",
            ],
        ),
        ("raspberry-pi-zero-2-w", ["32-bit system: it can predict from an exported file"]),
        (
            "jetson-orin-nano-jp6",
            [
                "L4T 36.4.3 (JetPack 6.2), CUDA capability 8.7",
                "INA VDD_IN  6.14 W  derived, module",
                "rail VDD_SOC  1.56 W  derived, VDD_SOC; part of another",
                "gpu  -  unavailable: powered_down",
                "power mode  1  measured; 25W",
                "oc2 events  2 events",
            ],
        ),
        ("laptop-rapl", ["RAPL psys  120.5 kJ  measured, board; counted so far", "x86 (laptop): LENOVO 20HES0XX00"]),
        ("laptop-battery", ["battery  81 %  measured; discharging", "battery  6.01 W  measured, device"]),
        (
            "phone-termux",
            [
                "battery  -  unavailable: unreliable_current_unit, device",
                "battery  96 %  measured; status charging, plugged ac, health good",
                "- battery: Android reports current in no reliable unit",
                "- power: no sensor and no known board; give sparrow join --watts IDLE:MAX for an estimate",
            ],
        ),
    ],
)
def test_a_person_sees_what_a_copied_board_tells(run, trees, where, lines):
    status, out, _ = run("--root", trees / where)
    assert status == 0
    seen = "\n".join("  ".join(filter(None, (part.strip() for part in line.split("  ")))) for line in out.splitlines())
    for line in lines:
        assert line in seen


def test_what_is_missing_is_told_with_how_to_get_it(tree, clock):
    nano = tree("jetson-nano-l4t32/root")
    nano.over = {"sys/bus/i2c/devices/6-0040/iio:device0": PermissionError()}
    survey = Survey(nano.system, clock)
    pi = tree("raspberry-pi-5/root")
    pi.commands["vcgencmd_pmic_read_adc"] = pi.commands["vcgencmd_get_throttled"] = (255, "Can't open device file: x")
    weak = Survey(pi.system, clock)
    laptop = tree("laptop-rapl/root")
    laptop.over = {f"sys/class/powercap/intel-rapl:{n}/energy_uj": PermissionError() for n in (0, 1)}
    counters = Survey(laptop.system, clock)
    assert any("usermod -aG video" in line for line in weak.missing(weak.read()))
    assert any("chmod 0440" in line for line in counters.missing(counters.read()))
    assert survey.missing(survey.read())


def test_counters_show_as_watts_from_the_second_look_on(tree, clock, rapl_rows):
    laptop = tree("laptop-rapl/root")
    laptop.over = dict(rapl_rows[1][1])
    survey = Survey(laptop.system, clock)
    assert survey.counts
    survey.read()
    clock.now += 10
    laptop.over = dict(rapl_rows[2][1])
    power = {each.name: each.reading for each in survey.read() if each.group == "power"}
    assert (power["RAPL psys"].value, power["RAPL psys"].unit) == (pytest.approx(12.21), "W")
    clock.now += 10
    stuck = {each.name: each.reading for each in survey.read() if each.group == "power"}["RAPL psys"]
    assert (stuck.value, stuck.reason) == (None, "stale")


def test_a_program_gets_json(run, trees):
    status, out, _ = run("--root", trees / "jetson-orin-nano-jp6", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["board"]["name"], told["board"]["module"]) == ("jetson-orin-nano", "p3767-0003")
    gpu = next(sensor for sensor in told["sensors"] if (sensor["group"], sensor["name"]) == ("heat", "gpu"))
    assert (gpu["value"], gpu["quality"], gpu["reason"]) == (None, "unavailable", "powered_down")
    assert all(
        {"value", "unit", "scope", "quality", "source", "t_monotonic", "reason"} <= set(s) for s in told["sensors"]
    )


def test_whoever_reads_along_may_stop(trees):
    command = [sys.executable, "-m", "sparrow.devices", "--root", str(trees / "raspberry-pi-5"), "--watch", "0.01"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout.readline().startswith("raspberry-pi-5")
    watching.stdout.close()
    assert watching.stderr.read() == ""
    assert watching.wait(60) == 0
    watching.stderr.close()


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="not on Linux")
def test_this_machine_is_told_truly():
    done = subprocess.run(
        [sys.executable, "-m", "sparrow.devices", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(done.stdout)
    memory = next(s for s in told["sensors"] if (s["group"], s["name"]) == ("memory", "total"))
    with open("/proc/meminfo") as file:
        assert memory["value"] == int(file.readline().split()[1]) * 1024
    assert all((sensor["value"] is None) == (sensor["reason"] is not None) for sensor in told["sensors"])


def test_it_looks_again_and_again_until_it_is_stopped(run, trees, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sparrow.devices.__main__.time.sleep", sleep)
    status, out, _ = run("--root", trees / "raspberry-pi-5", "--json", "--watch", "0.5")
    assert (status, naps, len(out.splitlines())) == (Exit.INTERRUPTED, [0.5] * 3, 3)


def test_joules_per_phase_come_from_an_external_meter(run, tmp_path):
    (tmp_path / "meter.csv").write_text("time,watts\n" + "".join(f"{t},4\n" for t in range(100, 121)))
    (tmp_path / "phases.csv").write_text("name,start,end\ntrain,1100,1110\nsend,1110,1112.5\nlater,2000,2001\n")
    files = ("--meter", tmp_path / "meter.csv", "--phases", tmp_path / "phases.csv", "--offset", "1000")
    status, out, _ = run(*files)
    assert status == 0
    train, send, later = out.splitlines()
    assert train.split()[:5] == ["train", "40.00", "J", "measured,", "100%"]
    assert send.split()[1] == "10.00"
    assert "offset between its clock" in later
    _, out, _ = run(*files, "--json")
    assert [row["joules"] for row in json.loads(out)] == [pytest.approx(40), pytest.approx(10), None]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--root", "nowhere"], Exit.NOT_FOUND, "nowhere is not a folder; give one with a copy"),
        (["--meter", "none.csv"], Exit.USAGE, "--meter needs --phases"),
        (["--meter", "none.csv", "--phases", "none.csv"], Exit.NOT_FOUND, "No such file"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(run, arguments, code, said):
    status, out, err = run(*arguments)
    assert (status, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_time_to_wait_is_above_zero(seconds, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--watch", seconds])
    assert stopped.value.code == 2
    assert "--watch" in capsys.readouterr().err


def test_importing_it_needs_the_standard_library_alone():
    probe = (
        "import sys, pkgutil, importlib\n"
        "before = set(sys.modules) | {'tomli'}\n"
        "import sparrow.devices\n"
        "for m in pkgutil.iter_modules(sparrow.devices.__path__):\n"
        "    m.name != '__main__' and importlib.import_module(f'sparrow.devices.{m.name}')\n"
        "names = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "print(sorted(names - set(sys.stdlib_module_names) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("['sparrow']", "")


def test_a_copy_may_be_its_folder_or_its_root(trees):
    assert System.at(trees / "raspberry-pi-4").files.root == System.at(trees / "raspberry-pi-4/root").files.root
