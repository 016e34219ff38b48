"""What a device that cannot train is told: one line, with a status of its own, and before anything is tried."""

import subprocess
import sys
from pathlib import Path

import pytest

import edge_sdk
from edge_sdk.device import trainable
from sparrow.command_line.exits import Exit

SDK = Path(edge_sdk.__file__).parent

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # what import makes of a package that is not there
from sparrow.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_this_device_can_train():
    trainable.check()


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ({"pointer_bytes": 4, "platform": "linux-armv7l"}, "its Python has 32 bits (linux-armv7l)"),
        # Raspberry Pi OS for 32 bits on a Pi 4: the kernel's word size is not what decides
        ({"pointer_bytes": 4, "platform": "linux-aarch64"}, "its Python has 32 bits (linux-aarch64)"),
        ({"module": "no_such_torch"}, "PyTorch is not installed"),
    ],
)
def test_a_device_that_cannot_train_gets_reason_and_remedy(python, told):
    with pytest.raises(trainable.CannotTrain) as refusal:
        trainable.check(**python)
    text = str(refusal.value)
    assert told in text
    assert "sparrow predict" in text
    assert "\n" not in text


def test_the_page_of_devices_shows_what_it_says():
    with pytest.raises(trainable.CannotTrain) as refusal:
        trainable.check(pointer_bytes=4, platform="linux-armv7l")
    assert f"sparrow join: {refusal.value}\n" in (SDK.parent / "docs" / "devices.md").read_text()


def test_a_broken_torch_is_distinguished_from_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "broken_torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    (tmp_path / "half_torch.py").write_text("import a_part_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(trainable.CannotTrain, match=r"libcudart\.so\.12: cannot open"):
        trainable.check(module="broken_torch")
    with pytest.raises(trainable.CannotTrain, match="No module named 'a_part_that_is_missing'"):
        trainable.check(module="half_torch")


@pytest.mark.parametrize("command", ["profile", "publish"])
def test_commands_say_so_with_a_status_of_its_own_before_they_make_anything(tmp_path, command):
    state = tmp_path / "state"
    options = ["--server", "http://127.0.0.1:9", "--wait", "0", "--state-dir", str(state)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, command, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == Exit.CANNOT
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sparrow {command}: this device cannot train, because PyTorch is not installed")
    assert not state.exists()
