"""The door through which a device is seen: real programs and folders, and copies that stand for a device."""

import sys

import pytest

from sparrow.devices.readings import ReadError, Reason
from sparrow.devices.system import Commands, System


def refused(argv, timeout=5.0):
    with pytest.raises(ReadError) as failure:
        Commands().text(argv, timeout)
    return failure.value.reason


def test_what_a_program_prints_is_its_text():
    assert Commands().text([sys.executable, "-c", "print('  a word\\n')"]) == "a word"


def test_a_program_is_asked_in_the_language_that_is_parsed():
    assert Commands().text([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]) == "C"


def test_every_way_in_which_a_program_fails_is_a_reason(tmp_path):
    script = tmp_path / "not-to-be-run"
    script.write_text("#!/bin/sh\n")
    assert refused(["a-program-that-nobody-has"]) is Reason.ABSENT
    assert refused([str(script)]) is Reason.PERMISSION
    assert refused([sys.executable, "-c", "import time; time.sleep(60)"], 0.05) is Reason.STALE
    assert refused([sys.executable, "-c", "raise SystemExit(3)"]) is Reason.PARSE
    assert refused([sys.executable, "-c", "raise SystemExit('Permission denied')"]) is Reason.PERMISSION


def test_a_program_that_asks_for_input_gets_none():
    assert Commands().text([sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"]) == "''"


def test_a_copy_has_files_commands_variables_and_what_it_may_not_read(trees):
    phone = System.at(trees / "phone-termux")
    assert phone.environment["PREFIX"] == "/data/data/com.termux/files/usr"
    assert phone.commands.text(["termux-battery-status"]).startswith("{")
    assert phone.files.text("proc/meminfo").startswith("MemTotal")
    for path in ("proc/stat", "sys/class/thermal/thermal_zone0/temp"):
        with pytest.raises(ReadError) as failure:
            phone.files.text(path)
        assert failure.value.reason is Reason.PERMISSION
    with pytest.raises(ReadError) as failure:
        phone.files.children("sys/class/power_supply")
    assert failure.value.reason is Reason.PERMISSION
    with pytest.raises(ImportError):
        phone.library("pynvml")


def test_names_that_a_copied_device_does_not_have_are_absent(trees):
    pi = System.at(trees / "raspberry-pi-4")
    assert pi.commands.text(["vcgencmd", "measure_clock", "arm"]) == "frequency(48)=1000212864"
    with pytest.raises(ReadError) as failure:
        pi.commands.text(["vcgencmd", "pmic_read_adc"])
    assert failure.value.reason is Reason.ABSENT


def test_this_machine_runs_programs_of_one_word_size():
    assert System.here().pointer_bits in (32, 64)


def test_folders_come_in_the_order_of_their_numbers(tmp_path):
    for number in (0, 10, 2, 1):
        (tmp_path / f"sys/zone{number}").mkdir(parents=True)
    (tmp_path / "sys/other²").mkdir()
    files = System.at(tmp_path).files
    assert files.folders("sys", "zone") == ["sys/zone0", "sys/zone1", "sys/zone2", "sys/zone10"]
    assert len(files.folders("sys")) == 5
    assert files.folders("proc") == []
