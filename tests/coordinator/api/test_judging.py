"""The global model on an operator's test file, through the API and the command."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import onnxruntime
import psutil
import pytest

from edge_sdk.tasks.digits import load_images
from sparrow import evaluate, operating
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.simulation import in_process as inprocess

SHAPE = load_builtin("digits").manifest.input_shape
PATH = "/v1/federations/default/model/evaluation"
FILE = {"Content-Type": checkpoint.MEDIA_TYPE}


@pytest.fixture
def client(tmp_path):
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "data", max_test_bytes=10**6))) as client:
        yield client


@pytest.fixture(scope="module")
def digits():
    found = load_images()
    return {"inputs": found.inputs[:700], "targets": found.targets[:700]}


def test_the_model_is_judged_as_onnxruntime_runs_it(client, digits):
    found = client.post(PATH, content=checkpoint.save(digits), headers=FILE).json()
    session = onnxruntime.InferenceSession(client.get("/v1/federations/default/model.onnx").content)
    (scores,) = session.run(None, {session.get_inputs()[0].name: digits["inputs"]})
    chance = np.exp(scores.astype(np.float64))
    chance /= chance.sum(axis=1, keepdims=True)
    assert found["num_examples"] == 700
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == digits["targets"]).mean())
    assert found["loss"] == pytest.approx(-np.log(chance[np.arange(700), digits["targets"]]).mean())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs": None}, "lacks 'inputs'"),
        ({"inputs": np.zeros((3, 5), np.float32)}, "the model takes float32"),
        ({"inputs": np.zeros((700, *SHAPE), np.float64)}, "scaled as in training"),
        ({"inputs": np.full((700, *SHAPE), np.nan, np.float32)}, "not finite"),
        ({"targets": np.zeros(3, np.int64)}, "one integer per input"),
        ({"targets": np.zeros(700, np.float32)}, "one integer per input"),
        ({"targets": np.full(700, 10)}, "of them are not classes from 0 to 9, such as 10"),
        ({"inputs": np.zeros((0, *SHAPE), np.float32), "targets": np.zeros(0, np.int64)}, "one integer per input"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(client, digits, changed, message):
    tensors = {name: array for name, array in {**digits, **changed}.items() if array is not None}
    answer = client.post(PATH, content=checkpoint.save(tensors), headers=FILE)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_envelopes(client, digits):
    assert client.post(PATH, content=b"{}", headers={"Content-Type": "application/json"}).status_code == 415
    assert client.post(PATH, content=b"rubbish", headers=FILE).status_code == 422
    assert client.post(PATH, content=bytes(10**6 + 1), headers=FILE).status_code == 413
    assert client.post("/v1/federations/none/model/evaluation", content=b"", headers=FILE).status_code == 404


def test_a_model_that_is_none_by_itself_is_not_judged(client, digits):
    wanted = {"name": "gated", "task": "digits", "settings": {"method": "pfedgate"}}
    assert client.post("/v1/federations", json=wanted).status_code == 201
    answer = client.post("/v1/federations/gated/model/evaluation", content=checkpoint.save(digits), headers=FILE)
    assert answer.status_code == 404


def test_an_evaluation_ends_at_its_deadline(tmp_path, digits):
    app = create_app(Settings(data_dir=tmp_path, max_test_seconds=0.05))
    with inprocess.running(app) as client:
        answer = client.post(PATH, content=checkpoint.save(digits), headers=FILE)
        assert answer.status_code == 422
        assert "0.05 s" in answer.json()["detail"]


def child_of(process):
    """The process of an evaluation, when there is one."""
    while True:
        for child in process.children():
            if "sparrow.limited" in child.cmdline():
                return child


def test_a_crash_of_an_evaluation_is_said_in_words(client, digits):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, PATH, content=checkpoint.save(digits), headers=FILE)
        child_of(psutil.Process()).send_signal(signal.SIGFPE)
        assert answer.result().status_code == 422
        assert "SIGFPE" in answer.result().json()["detail"]


def test_it_takes_an_admin(tmp_path, digits):
    app = create_app(
        Settings(data_dir=tmp_path, admin_token="the-chief-s-secret", observer_token="an-observer-s-secret")
    )
    with inprocess.running(app) as client:
        for token, status in (("an-observer-s-secret", 401), ("the-chief-s-secret", 200)):
            headers = {**FILE, "Authorization": f"Bearer {token}"}
            assert client.post(PATH, content=checkpoint.save(digits), headers=headers).status_code == status


def test_the_command(client, digits, tmp_path, monkeypatch, capsys):
    file = tmp_path / "test.npz"
    np.savez(file, x=digits["inputs"], y=digits["targets"])
    monkeypatch.setattr(operating, "connect", lambda server, trust: nullcontext(client))
    command = ["default", "--server", inprocess.ADDRESS, "--data", str(file)]
    assert evaluate.main([*command, "--inputs", "x", "--targets", "y"]) == 0
    assert capsys.readouterr().out.startswith("700 samples: accuracy 0.")
    assert evaluate.main(command) == Exit.FAILED
    assert "--inputs and --targets" in capsys.readouterr().err
    assert evaluate.main([*command, "--inputs", "y", "--targets", "y"]) == Exit.USAGE
    assert "sparrow evaluate: inputs: int64" in capsys.readouterr().err
    assert evaluate.main([*command[:3], "--data", str(tmp_path / "none.npz")]) == Exit.NOT_FOUND
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04")
    assert evaluate.main([*command[:3], "--data", str(tmp_path / "bad.npz")]) == 1
