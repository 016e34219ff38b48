"""The demo, whole, as ``make demo`` runs it: what a new user sees first must hold."""

import json
import signal
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from sparrow.transport import httpx

DIGIT = np.zeros((2, 1, 8, 8), dtype=np.float32)


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_the_demo_ends_with_a_table_a_report_and_five_models(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "benchmarks.demo", "--folder", str(folder), "--keep"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as demo,
    ):
        said = []
        for line in demo.stdout:
            said.append(line)
            if line.startswith("the page stays open at "):
                break
        assert demo.poll() is None, (tmp_path / "log").read_text()[-3000:]
        address = said[-1].split()[5]
        assert said[0].startswith(f"see it live at {address}")
        assert 'data-federation="demo"' in httpx.get(address).text
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0
    shown = "".join(said)
    report = json.loads((folder / "report.json").read_text())
    rows = report["devices"]
    assert [row["budget"] for row in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]
    gain = np.mean([row["accuracy_personal"] - row["accuracy_local_only"] for row in rows])
    assert gain >= -0.01
    shares = [row["traffic_share"] for row in rows]
    assert shares == sorted(shares)
    assert shares[0] < 0.15
    for row in rows:
        assert row["device"] in shown
        assert row["joules_measured"] or row["joules_estimated"]
        session = onnxruntime.InferenceSession(folder / row["device"] / "model.onnx")
        assert session.run(None, {"input": DIGIT})[0].shape == (2, 10)
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
