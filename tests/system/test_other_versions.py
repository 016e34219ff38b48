"""Devices and coordinators of other versions: a message names the side to upgrade.

An earlier commit is installed from a wheel of its own. A clone without that commit has only its recorded calls.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path

import pytest

from edge_sdk.device.transport import Transport
from edge_sdk.errors import BadContent
from sparrow.bench.server import free_port
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.messages import Enrol
from sparrow.protocol.wire import WIRE, WIRE_HEADER
from sparrow.simulation import in_process
from sparrow.transport import httpx

from .conftest import environment, wait_until

ROOT = Path(__file__).parents[2]

# It names no version, rejects this version's settings as a device, and this version's enrolment as a coordinator.
EARLIER = "3f28585674449a8bcd3665848e5b9c97b93e294e"
# Its first call as a device, and its answer to this version's enrolment.
CALL = {"accept": "*/*", "connection": "keep-alive", "user-agent": "python-httpx/0.28.1", "accept-encoding": "identity"}
ANSWER = {
    "headers": {"content-type": "application/problem+json", "x-request-id": "1e1fd4c2e7b8a4f5"},
    "json": {
        "type": "urn:sparrow:problem:InvalidRequest",
        "title": "InvalidRequest",
        "status": 422,
        "detail": "body.start.again: Extra inputs are not permitted; the page at /docs describes this call",
    },
}


@pytest.fixture
def client(tmp_path):
    with in_process.running(create_app(Settings(data_dir=tmp_path))) as client:
        yield client


def detail(answer):
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:sparrow:problem:OtherVersion")
    return answer.json()["detail"]


def test_the_recorded_call_of_an_earlier_device_is_refused(client):
    said = detail(client.get("/v1/federations/default", headers=CALL))
    assert f"names none as its version of the HTTP contract, this coordinator uses {WIRE}; upgrade" in said


@pytest.mark.parametrize("named", [str(WIRE + 1), str(WIRE - 1), "x" * 1000, ""])
def test_a_caller_of_another_version_is_refused(client, named):
    answer = client.post("/v1/federations/default/devices", content=b"", headers={WIRE_HEADER: named})
    assert f"names {named[:20]!r} as its version" in detail(answer)


@pytest.mark.parametrize("headers", [{WIRE_HEADER: str(WIRE)}, {}, CALL | {"user-agent": "curl/7.88"}])
def test_other_clients_are_answered(client, headers):
    assert client.get("/v1/federations/default", headers=headers).status_code == 200
    assert client.get("/healthz", headers=CALL).status_code == 200
    assert client.get("/v1/federations/default/rounds", headers=CALL).status_code == 200


def test_a_field_of_a_newer_caller_is_named(client):
    body = {"name": "one", "enrolment_key": "k" * 32, "newer": 1}
    answer = client.post("/v1/federations/default/devices", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body.newer: the coordinator knows no such field; ")


def test_the_recorded_refusal_of_an_earlier_coordinator_says_that_it_is_older():
    transport = httpx.MockTransport(lambda request: httpx.Response(422, **ANSWER))
    with (
        httpx.Client(base_url="http://coordinator", transport=transport) as client,
        pytest.raises(
            BadContent, match=r"older Sparrow than this installation \(body.start.again: .*; upgrade it there"
        ),
    ):
        Transport(client).enrol("default", Enrol(name="one", enrolment_key="k" * 32))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The folder of an installation of the earlier commit, for PYTHONPATH; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("earlier")
    found = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"this clone has no commit {EARLIER[:10]}: git fetch --unshallow")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as files:
        files.extractall(folder / "source", filter="data")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    installed = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, built], check=True, capture_output=True)
    return installed


@pytest.fixture
def serve(tmp_path):
    """Start a coordinator from a folder of packages and return its address."""
    with ExitStack() as stack:

        def start(packages):
            port = free_port()
            where = environment(PYTHONPATH=str(packages), COORDINATOR_DATA_DIR=str(tmp_path / "data"))
            log = stack.enter_context((tmp_path / "log").open("wb"))
            command = [sys.executable, "-m", "sparrow", "serve", "--port", str(port)]
            process = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, env=where, stdout=log, stderr=log))
            stack.callback(process.kill)
            server = f"http://127.0.0.1:{port}"

            def answers():
                assert process.poll() is None, (tmp_path / "log").read_text()
                with suppress(httpx.TransportError):
                    return httpx.get(f"{server}/readyz").status_code == 200

            wait_until(answers, "the coordinator to answer")
            return server

        yield start


@pytest.mark.integration
@pytest.mark.parametrize("older", ["device", "coordinator"])
def test_a_wheel_of_an_earlier_commit_and_this_one_say_what_to_upgrade(older, serve, earlier, tmp_path):
    server = serve(earlier if older == "coordinator" else ROOT)
    command = [sys.executable, "-m", "sparrow", "join", "--server", server, "--state-dir", str(tmp_path / "state")]
    where = environment(PYTHONPATH=str(earlier if older == "device" else ROOT))
    joined = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=300, check=False)
    assert joined.returncode != 0
    assert {"device": "upgrade the older Sparrow", "coordinator": "upgrade it there"}[older] in joined.stderr
    assert "check the address" not in joined.stderr
