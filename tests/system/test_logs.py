"""What a real coordinator process writes: every line, the server's own among them, is JSON, and none holds a secret."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sparrow.transport import httpx

from .conftest import Coordinator, environment

TOKENS = {"ADMIN": "first-secret-0123", "OBSERVER": "second-secret-0123", "ENROLMENT": "third-secret-0123"}


@pytest.fixture
def coordinator(tmp_path):
    settings = {f"COORDINATOR_{kind}_TOKEN": token for kind, token in TOKENS.items()}
    coordinator = Coordinator(
        tmp_path / "machine", COORDINATOR_LOG_LEVEL="DEBUG", COORDINATOR_LOG_FORMAT="json", **settings
    )
    coordinator.start()
    yield coordinator
    coordinator.close()


def test_every_line_is_json_and_none_holds_a_secret(coordinator):
    def call(method, path, token, **more):
        headers = {"Authorization": f"Bearer {token}", "X-Request-ID": "mine"}
        return httpx.request(method, f"{coordinator.url}{path}", headers=headers, timeout=10, **more)

    made = subprocess.run(
        [sys.executable, "-m", "sparrow.tokens", "create", "enrolment", "--uses", "1", "--records"],
        env=environment(COORDINATOR_DATA_DIR=str(coordinator.data)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    federation = {"name": "night", "task": "digits"}
    assert call("POST", "/v1/federations", TOKENS["ADMIN"], json=federation).status_code == 201
    body = {"name": "pi", "enrolment_key": "k" * 32}
    enrolled = call("POST", "/v1/federations/night/devices", made, json=body).json()
    device = enrolled["token"]
    assert call("GET", "/v1/federations/night/assignment", device).status_code == 204
    key = {"enrolment_key": body["enrolment_key"]}
    renewed = call("POST", f"/v1/devices/{enrolled['device_id']}/token", device, json=key).json()["token"]
    assert call("GET", "/v1/federations/night/assignment", renewed).status_code == 204
    for token in (*TOKENS.values(), device, "guessed-secret"):
        call("GET", "/metrics", token)
        call("POST", "/v1/federations/night/devices", token, content=b"{")
    call("POST", "/v1/federations/night/devices", made, json={**body, "name": "second"})
    coordinator.close()

    text = coordinator.log.read_text()
    lines = [json.loads(line) for line in text[text.index("\n{") + 1 :].splitlines()]  # from the coordinator's start on
    assert len(lines) > 15
    accessed = [json.loads(line) for line in text.splitlines() if '"uvicorn.access"' in line]
    asked = [line for line in accessed if "/night/assignment" in line["message"]]
    assert {line["device"] for line in asked} == {enrolled["device_id"]}
    assert {line["request"] for line in asked} == {"mine"}
    assert {line["federation"] for line in asked} == {"night"}
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    for secret in (*TOKENS.values(), made, device, renewed, "guessed-secret", "k" * 32):
        assert secret not in text
