"""The compose file: what it names is there, and its settings are settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.database import POSTGRESQL

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "compose.yaml"
SECRETS = {"POSTGRES_PASSWORD", "ADMIN_TOKEN", "OBSERVER_TOKEN", "ENROLMENT_TOKEN"}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(FILE.read_text())


def test_compose_takes_the_file():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("needs docker compose")
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", **dict.fromkeys(SECRETS, "x")}
    command = [docker, "compose", "--file", str(FILE), "config", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_coordinator_gets_settings_that_it_has(compose):
    given = compose["services"]["coordinator"]["environment"]
    assert {f"COORDINATOR_{name.upper()}" for name in Settings.model_fields} >= set(given)
    address = given["COORDINATOR_DATABASE_URL"]
    database = compose["services"]["database"]["environment"]
    name = database["POSTGRES_USER"]
    assert re.fullmatch(rf"{POSTGRESQL[0]}://{name}:\$\{{POSTGRES_PASSWORD:\?.*\}}@database/{name}", address)
    assert database["POSTGRES_DB"] == name


def test_nothing_starts_without_secrets_and_the_example_names_them_all(compose):
    needed = set(re.findall(r"\$\{(\w+):\?", FILE.read_text()))
    assert needed == SECRETS
    example = (DEPLOY / "compose.env").read_text().splitlines()
    assert {line for line in example if not line.startswith("#")} == {f"{name}=" for name in needed}


def test_what_the_services_name_is_there(compose):
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
    build = services["coordinator"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    copied = [
        name
        for line in (context / build["dockerfile"]).read_text().splitlines()
        if line.startswith("COPY ")
        for name in line.split()[1:-1]
    ]
    assert "pyproject.toml" in copied
    assert all((context / name).exists() for name in copied)
