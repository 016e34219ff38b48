"""``sparrow delete``: asks, deletes, and says what keeps it from that."""

from __future__ import annotations

import io
import json

import pytest

from sparrow.command_line.exits import Exit
from sparrow.coordinator.settings import Settings

from ..coordinator.api.test_contract import serving
from .conftest import ADMIN


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(
        Settings(data_dir=tmp_path_factory.mktemp("lab") / "data", default_task="", admin_token=ADMIN)
    ) as client:
        client.headers["Authorization"] = f"Bearer {ADMIN}"
        yield client


@pytest.fixture
def night(lab, monkeypatch):
    """The address of a coordinator with the federation ``night``."""
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    lab.delete("/v1/federations/night")
    lab.post("/v1/federations", json={"name": "night", "task": "digits", "settings": {"min_devices": 1}})
    return str(lab.base_url).rstrip("/")


class Person(io.StringIO):
    def isatty(self):
        return True


def test_it_is_gone_for_good_and_its_name_is_free(sparrow, night, lab):
    code, out, err = sparrow("delete", night, "night", "--yes", "--json")
    assert (code, json.loads(out), err) == (0, {"deleted": "night"}, "")
    assert lab.get("/v1/federations/night").status_code == 404
    assert sparrow("publish", "--server", night, "--name", "night", "--rounds", "7")[0] == 0
    assert lab.get("/v1/federations/night").json()["rounds"] == 7


def test_who_publishes_is_told_that_nothing_bounds_a_device(sparrow, night, lab):
    lab.delete("/v1/federations/night")
    words = ("publish", "--server", night, "--name", "night", "--json")
    code, out, err = sparrow(*words, "--update-clip", "10")
    assert (code, json.loads(out)["notice"], err) == (0, None, "")
    lab.delete("/v1/federations/night")
    code, out, err = sparrow(*words)
    assert (code, err) == (0, f"warning: {json.loads(out)['notice']}\n")
    assert "set update_clip or update_norm_limit, and outlier_mads or robust" in err


def test_a_person_is_asked(sparrow, night, lab, monkeypatch):
    monkeypatch.setattr("sys.stdin", Person("n\n"))
    code, out, err = sparrow("delete", night, "night")
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert err.endswith("sparrow delete: nothing was deleted\n")
    assert "Delete night for good, its 0 devices, 0 rounds and all its models? [y/N]" in err
    monkeypatch.setattr("sys.stdin", Person("y\n"))
    code, out, _ = sparrow("delete", night, "night")
    assert (code, out) == (0, "federation night is deleted: 0 devices, 0 rounds\n")


def test_what_keeps_it_from_that_is_one_line(fails, night, lab, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "give --yes to delete it" in fails(Exit.USAGE, "delete", night, "night")
    assert "there is no federation 'day'" in fails(Exit.NOT_FOUND, "delete", night, "day", "--yes")
    device = {"name": "pi", "enrolment_key": "k" * 32}
    lab.post("/v1/federations/night/devices", json=device).raise_for_status()
    lab.patch("/v1/federations/night", json={"action": "pause"}).raise_for_status()
    assert "night is paused: its devices would lose" in fails(Exit.FAILED, "delete", night, "night", "--yes")
    lab.patch("/v1/federations/night", json={"action": "stop"}).raise_for_status()
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", "wrong")
    assert "set SPARROW_ADMIN_TOKEN" in fails(Exit.REFUSED, "delete", night, "night", "--yes")


def test_publishing_what_is_there_is_fine_where_one_says_so(sparrow, fails, night):
    words = ("publish", "--server", night, "--name", "night")
    assert sparrow(*words, "--exist-ok", "--min-devices", "1")[0] == 0
    assert "exists; choose another name" in fails(Exit.FAILED, *words)
    assert "min_devices: asked for 2, it has 1" in fails(Exit.FAILED, *words, "--exist-ok")
