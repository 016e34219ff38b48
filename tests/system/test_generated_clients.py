"""Clients that public generators make of a running coordinator's OpenAPI document, as docs/contract.md prints them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.numpy

from sparrow.transport import httpx

from ..coordinator.api.test_contract import published
from .conftest import Coordinator, environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text().partition("## Generated clients")[2]
NODE_PACKAGES = ("openapi-fetch@0.17.0", "openapi-typescript@7.13.0", "typescript@5.9.3")


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path / "coordinator")
    made.start()
    (tmp_path / "openapi.json").write_text(made.get("/openapi.json").text)
    (tmp_path / "own.model").write_bytes(published())
    yield made
    made.close()


def block(language, coordinator):
    code = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    return code.replace("http://127.0.0.1:8000", coordinator.url)


def run(folder, *command, **more):
    """Run a command in this folder, and return what it writes; it ends well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(PATH=path, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def check(coordinator, said):
    """What both clients print: the status, a device, the model's size or nothing, a problem document, a federation."""
    lines = said.splitlines()
    (device,) = coordinator.get("/v1/federations/lab/devices").json()
    assert lines[:2] == ["waiting", device["device_id"]]
    assert lines[-2].startswith("404 there is no federation 'lob'")
    assert lines[-1] == "mine"
    assert coordinator.info("lab")["settings"]["method"] == "fedavg"
    assert coordinator.info("mine")["status"] == "waiting"


def python(coordinator, folder, code):
    """Return what this code prints, beside a client that is generated first."""
    if find_spec("openapi_python_client") is None:
        pytest.skip("openapi-python-client is not installed, which needs Python 3.11")
    said = run(folder, sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json")
    assert "warning" not in said.lower(), said
    (folder / "use.py").write_text(code)
    return run(folder, sys.executable, "use.py", PYTHONPATH=str(folder / "sparrow-coordinator-client"))


def test_a_python_client_has_every_call_and_works_as_printed(coordinator, tmp_path):
    check(coordinator, python(coordinator, tmp_path, block("python", coordinator)))
    model = safetensors.numpy.load_file(tmp_path / "lab.safetensors")
    assert model["out.bias"].shape == (10,)
    modules = {file.stem for file in (tmp_path / "sparrow-coordinator-client").rglob("api/*/*.py")}
    paths = json.loads((tmp_path / "openapi.json").read_text())["paths"].values()
    assert {call["operationId"] for each in paths for call in each.values()} <= modules


def test_a_python_client_replaces_and_evaluates_a_model_and_plays_a_round(coordinator, tmp_path):
    """The calls with files, and what a device does: it asks for work, and hands it back."""
    tensors = safetensors.numpy.load(published())
    graphs = {name: tensor for name, tensor in tensors.items() if name.startswith("sparrow.")}
    safetensors.numpy.save_file(graphs, tmp_path / "graphs.model", {"sparrow": ""})
    code = f"""
import io
import numpy, safetensors.numpy
from sparrow_coordinator_client import AuthenticatedClient, Client
from sparrow_coordinator_client.api.devices import enrol, get_assignment, get_payload, hand_back, put_update
from sparrow_coordinator_client.api.federations import create_federation, evaluate_model, publish_model, replace_model
from sparrow_coordinator_client.models import CreateFederation, Enrol, FederationSettings, HandBack
from sparrow_coordinator_client.types import File

client = Client("{coordinator.url}")
publish_model.sync(client=client, body=File(open("own.model", "rb")))
print(replace_model.sync("mine", client=client, body=File(open("graphs.model", "rb"))).replacing)
samples = dict(inputs=numpy.zeros((3, 1, 8, 8), "f4"), targets=numpy.zeros(3, "i8"))
body = File(io.BytesIO(safetensors.numpy.save(samples)))
print(evaluate_model.sync("mine", client=client, body=body).num_examples)
wrong = CreateFederation("wrong", task="digits", settings=FederationSettings(rounds=-1))
print(create_federation.sync(client=client, body=wrong).detail)
alone = FederationSettings(method="fedavg", rounds=5, min_devices=1)
create_federation.sync(client=client, body=CreateFederation("alone", task="digits", settings=alone))
token = enrol.sync("alone", client=client, body=Enrol("one", enrolment_key="k" * 32)).token
device = AuthenticatedClient("{coordinator.url}", token=token)
work = get_assignment.sync("alone", client=device, wait=10)
payload = get_payload.sync(work.assignment_id, client=device).payload.read()
print(work.kind, len(payload) == work.payload.bytes_)
print(put_update.sync(work.assignment_id, client=device, body=File(io.BytesIO(payload))).status)
print(hand_back.sync_detailed(work.assignment_id, client=device, body=HandBack("enough")).status_code.value)
"""
    lines = python(coordinator, tmp_path, code).splitlines()
    assert lines[:2] == ["False", "3"]
    assert lines[2].startswith("settings.rounds: ")
    assert lines[3] == "train True"
    assert lines[4:] == ["422", "204"], "a payload is no update, as it has no report"


def test_a_typescript_client_compiles_and_works_as_printed(coordinator, tmp_path):
    missing = next((program for program in ("node", "npm") if shutil.which(program) is None), None)
    if missing is not None:
        pytest.skip(f"{missing} is not installed, so no TypeScript client is made: apt install nodejs npm")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    run(tmp_path, "npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *NODE_PACKAGES, "@types/node@20")
    (options,) = re.findall(r"npx openapi-typescript openapi\.json (.*)", PAGE)
    run(tmp_path, "npx", "openapi-typescript", "openapi.json", *options.split())
    (tmp_path / "use.ts").write_text(block("ts", coordinator))
    compiler = ("npx", "tsc", "--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck")
    run(tmp_path, *compiler, "--rewriteRelativeImportExtensions", "use.ts")
    said = run(tmp_path, "node", "use.js")
    check(coordinator, said)
    size = len(httpx.get(f"{coordinator.url}/v1/federations/lab/model").content)
    assert said.splitlines()[2] == str(size)
