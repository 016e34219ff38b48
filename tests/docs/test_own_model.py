"""The script of docs/own-model.md: short, and two devices that run it end with models that predict like PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..system.conftest import Coordinator, environment

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"


def script():
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "nn.LSTM" in code)
    return found


@pytest.mark.integration
@pytest.mark.timeout(360)
def test_two_devices_run_it_to_models_that_predict_like_pytorch(tmp_path):
    (tmp_path / "windows.py").write_text(script())
    coordinator = Coordinator(tmp_path / "coordinator")
    coordinator.start()
    devices = []
    try:
        devices += [
            subprocess.Popen(
                [sys.executable, "windows.py", name, coordinator.url],
                cwd=tmp_path,
                env=environment(HOME=str(tmp_path), OMP_NUM_THREADS="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("alice", "bob")
        ]
        for name, device in zip(("alice", "bob"), devices, strict=True):
            said, errors = device.communicate(timeout=300)
            assert device.returncode == 0, errors
            assert re.match(rf"{name}: \d+%, differs from PyTorch by \de-0[5-9]", said), said
            assert (tmp_path / f"{name}.onnx").exists()
    finally:
        for device in devices:
            device.kill()
        coordinator.close()
