"""``sparrow federation``, ``device`` and ``model``: what an operator does, and what keeps them from it."""

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
    lab.patch("/v1/federations/night", json={"action": "stop"})
    lab.delete("/v1/federations/night")
    lab.post("/v1/federations", json={"name": "night", "task": "digits", "settings": {"min_devices": 1}})
    return str(lab.base_url).rstrip("/")


DELETE = ("federation", "delete")


class Person(io.StringIO):
    def isatty(self):
        return True


def test_it_is_gone_for_good_and_its_name_is_free(sparrow, night, lab):
    code, out, err = sparrow(*DELETE, "night", "--server", night, "--yes", "--json")
    assert (code, json.loads(out), err) == (0, {"deleted": "night"}, "")
    assert lab.get("/v1/federations/night").status_code == 404
    assert sparrow("publish", "night", "--server", night, "rounds=7")[0] == 0
    assert lab.get("/v1/federations/night").json()["rounds"] == 7


def test_who_publishes_is_told_that_nothing_bounds_a_device(sparrow, night, lab):
    lab.delete("/v1/federations/night")
    words = ("publish", "night", "--server", night, "--json")
    code, out, err = sparrow(*words)
    assert (code, json.loads(out)["notice"], err) == (0, None, "")
    lab.delete("/v1/federations/night")
    code, out, err = sparrow(*words, "relative_clip=0")
    assert (code, err) == (0, f"warning: {json.loads(out)['notice']}\n")
    assert "relative_clip" in err


def test_a_person_is_asked(sparrow, night, lab, monkeypatch):
    monkeypatch.setattr("sys.stdin", Person("n\n"))
    code, out, err = sparrow(*DELETE, "night", "--server", night)
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert err.endswith("sparrow federation: nothing was changed\n")
    assert "Delete night, its 0 devices, 0 rounds and all its models permanently? [y/N]" in err
    monkeypatch.setattr("sys.stdin", Person("y\n"))
    code, out, _ = sparrow(*DELETE, "night", "--server", night)
    assert (code, out) == (0, "federation night is deleted: 0 devices, 0 rounds\n")


@pytest.fixture
def enrolled(night, lab):
    """A device in ``night``, which waits for another one."""
    lab.delete("/v1/federations/night")
    lab.post("/v1/federations", json={"name": "night", "task": "digits", "settings": {"min_devices": 2}})
    device = {"name": "pi", "enrolment_key": "k" * 32}
    return lab.post("/v1/federations/night/devices", json=device).raise_for_status().json()


@pytest.mark.parametrize(
    ("words", "asked", "done"),
    [
        (("federation", "stop", "night"), "Stop night and its devices after round 0 of 30?", "night: stopped"),
        (
            ("federation", "rollback", "night", "0"),
            "Return from model 0 of night to 0, undoing the rounds between?",
            "night: waiting, round 0 of 30, model 0\n",
        ),
        (("federation", "delete", "night"), "Delete night, its 1 devices", "federation night is deleted"),
        (("device", "revoke", "night", "pi"), "Revoke pi's token permanently?", "device pi is revoked"),
        (("device", "remove", "night", "pi"), "and remove it from lists and counts?", "device pi is removed"),
    ],
)
def test_destructive_commands_ask_for_confirmation(
    sparrow, fails, night, lab, enrolled, words, asked, done, monkeypatch
):
    server = ("--server", night)
    before = lab.get("/v1/federations/night").json(), lab.get("/v1/federations/night/devices").json()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "--yes" in fails(Exit.USAGE, *words, *server)
    for answer in ("n\n", "\n", ""):  # no, the usual answer, and the end of input
        monkeypatch.setattr("sys.stdin", Person(answer))
        code, out, err = sparrow(*words, *server)
        assert (code, out) == (Exit.INTERRUPTED, "")
        assert asked in err
        assert err.endswith(f"[y/N] sparrow {words[0]}: nothing was changed\n")
    assert (lab.get("/v1/federations/night").json(), lab.get("/v1/federations/night/devices").json()) == before
    if words[1] == "delete":
        lab.patch("/v1/federations/night", json={"action": "stop"}).raise_for_status()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = sparrow(*words, *server, "--yes")
    assert (code, err) == (0, "")
    assert out.startswith(done)


def test_the_best_model_needs_an_evaluation(sparrow, fails, night):
    words = ("federation", "rollback", "night")
    assert "no device has evaluated" in fails(Exit.USAGE, *words, "best", "--server", night, "--yes")
    code, _, err = sparrow(*words, "first", "--server", night, "--yes")
    assert code == Exit.USAGE
    assert "give a number from sparrow model list, or best" in err
    assert "model 7" in fails(Exit.NOT_FOUND, *words, "7", "--server", night, "--yes")


def test_so_is_who_takes_a_token_away(sparrow, fails, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
    with serving(Settings(data_dir=tmp_path / "data", default_task="")):
        pass
    made = json.loads(sparrow("token", "create", "admin", "--records", "--json")[1])["id"]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "give --yes" in fails(Exit.USAGE, "token", "revoke", made, "--records")
    for answer, code in (("n\n", Exit.INTERRUPTED), ("y\n", Exit.DONE)):
        assert json.loads(sparrow("token", "list", "--records", "--json")[1])[0]["status"] == "valid"
        monkeypatch.setattr("sys.stdin", Person(answer))
        assert sparrow("token", "revoke", made, "--records")[0] == code
    assert json.loads(sparrow("token", "list", "--records", "--json")[1])[0]["status"] == "revoked"


def test_settings_may_stand_anywhere_on_the_line(sparrow, fails, night, lab):
    lab.delete("/v1/federations/made")
    words = ("federation", "create", "made", "--server", night, "--task", "digits")
    assert "did you mean rounds?" in fails(Exit.USAGE, *words, "ruonds=7")
    assert "'seven': give a setting as KEY=VALUE" in sparrow(*words, "seven")[2]
    assert sparrow(*words, "rounds=7", "min_devices=1") == (0, "made: waiting, round 0 of 7\n", "")
    assert sparrow("federation", "set", "--server", night, "made", "--json", "rounds=9")[0] == 0
    assert lab.get("/v1/federations/made").json()["rounds"] == 9
    lab.delete("/v1/federations/made")
    apart = ("federation", "create", "made", "rounds=7", "--server", night, "--task", "digits", "cohort=3")
    assert sparrow(*apart)[0] == 0
    made = lab.get("/v1/federations/made").json()
    assert (made["rounds"], made["settings"]["cohort"]) == (7, 3)


def test_what_keeps_it_from_that_is_one_line(fails, night, lab, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "give --yes" in fails(Exit.USAGE, *DELETE, "night", "--server", night)
    assert "there is no federation 'day'" in fails(Exit.NOT_FOUND, *DELETE, "day", "--server", night, "--yes")
    device = {"name": "pi", "enrolment_key": "k" * 32}
    lab.post("/v1/federations/night/devices", json=device).raise_for_status()
    lab.patch("/v1/federations/night", json={"action": "pause"}).raise_for_status()
    assert "night is paused: its devices would lose" in fails(Exit.FAILED, *DELETE, "night", "--server", night, "--yes")
    lab.patch("/v1/federations/night", json={"action": "stop"}).raise_for_status()
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", "wrong")
    assert "SPARROW_ADMIN_TOKEN" in fails(Exit.REFUSED, *DELETE, "night", "--server", night, "--yes")


def test_publishing_an_existing_federation_needs_exist_ok(sparrow, fails, night):
    words = ("publish", "night", "--server", night)
    assert sparrow(*words, "--exist-ok", "min_devices=1")[0] == 0
    assert "exists; choose another name" in fails(Exit.USAGE, *words)
    assert "min_devices: asked for 2, it has 1" in fails(Exit.FAILED, *words, "--exist-ok")


def test_a_federation_is_made_steered_and_looked_at(sparrow, fails, night, lab):
    server = ("--server", night)
    lab.delete("/v1/federations/made")
    words = ("rounds=7", "cohort=3", "min_devices=1", "proximal_weight=0.5", "method=fedprox")
    code, out, _ = sparrow("federation", "create", "made", *words, "--task", "digits", *server)
    assert (code, out) == (0, "made: waiting, round 0 of 7\n")
    _, out, _ = sparrow("federation", "list", *server, "--json")
    assert {"made", "night"} <= {each["name"] for each in json.loads(out)}
    for action, status in (("pause", "paused"), ("resume", "waiting"), ("stop", "stopped"), ("reopen", "waiting")):
        code, out, _ = sparrow("federation", action, "made", *server, *(["--yes"] if action == "stop" else []))
        assert (code, out.startswith(f"made: {status}")) == (0, True), out
    words = ("rounds=9", "cohort=2", "purpose=To read digits")
    _, out, _ = sparrow("federation", "set", "made", *words, *server)
    assert out == "made: waiting, round 0 of 9; rounds=9 cohort=2 'purpose=To read digits'\n"
    _, out, _ = sparrow("federation", "show", "made", *server)
    assert ["rounds", "9"] in [line.split() for line in out.splitlines()]
    assert '"proximal_weight": 0.5' in out
    assert sparrow("federation", "set", "made", "purpose=To read digits", "operator=Ulm", *server)[0] == 0
    settings = lab.get("/v1/federations/made").json()["settings"]
    assert (settings["operator"], settings["purpose"]) == ("Ulm", "To read digits")
    assert "purpose: " in fails(Exit.USAGE, "federation", "set", "made", f"purpose={'x' * 301}", *server)
    assert "rounds: x" in fails(Exit.USAGE, "federation", "set", "made", "rounds=x", *server)
    assert "settings can be changed: rounds, cohort" in fails(
        Exit.USAGE, "federation", "set", "made", "seed=3", *server
    )
    assert "did you mean made" in fails(Exit.NOT_FOUND, "federation", "pause", "mad", *server)


def test_devices_are_listed_and_revoked(sparrow, fails, night, lab):
    server = ("--server", night)
    lab.delete("/v1/federations/night")  # of two devices, so that no round begins between two looks
    lab.post("/v1/federations", json={"name": "night", "task": "digits", "settings": {"min_devices": 2}})
    assert sparrow("device", "list", "night", *server)[1] == "no devices yet\n"
    device = {"name": "pi", "enrolment_key": "k" * 32, "profile": {"board": "pi5"}}
    lab.post("/v1/federations/night/devices", json=device).raise_for_status()
    rows = [line.split() for line in sparrow("device", "list", "night", *server)[1].splitlines()]
    assert rows[1][:4] == ["pi", "ready", "1", "-"]
    _, out, _ = sparrow("device", "show", "night", "pi", *server)
    assert "pi5" in out
    assert "did you mean pi" in fails(Exit.NOT_FOUND, "device", "show", "night", "pie", *server)
    assert sparrow("device", "revoke", "night", "pi", "--yes", *server) == (0, "device pi is revoked\n", "")
    assert json.loads(sparrow("device", "list", "night", "--json", *server)[1])[0]["doing"] == "revoked"


def test_a_model_is_downloaded_as_what_its_name_says(sparrow, fails, night, tmp_path):
    server = ("--server", night)
    lines = sparrow("model", "list", "night", *server)[1].splitlines()
    assert lines[1].split()[-1] == "current"
    for ending, begin in ((".onnx", b"\x08"), (".safetensors", None)):
        out = tmp_path / f"night{ending}"
        assert sparrow("model", "download", "night", "--output", str(out), *server)[0] == 0
        assert out.stat().st_size > 1000
        assert begin is None or out.read_bytes().startswith(begin)
    assert ".safetensors" in fails(Exit.USAGE, "model", "download", "night", "--output", "night.pt", *server)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_made_listed_and_revoked_over_http(sparrow, fails, night, lab, monkeypatch):
    server = ("--server", night)
    words = ("create", "enrolment", "--uses", "2", "--expires", "7d", "--federation", "night", "--note", "ward 3")
    code, out, err = sparrow("token", *words, *server)
    secret = out.strip()
    assert (code, secret.startswith("sparrow_enrol_")) == (0, True)
    assert "for 2 devices" in err
    device = {"name": "pi", "enrolment_key": "k" * 32}
    bearer = {"Authorization": f"Bearer {secret}"}
    enrolled = lab.post("/v1/federations/night/devices", json=device, headers=bearer).raise_for_status().json()
    (listed,) = json.loads(sparrow("token", "list", *server, "--json")[1])
    assert (listed["uses"], listed["max_uses"], listed["made_by"]) == (1, 2, "settings")
    assert "ward 3" in sparrow("token", "list", *server)[1]
    assert "give --yes" in fails(Exit.USAGE, "token", "revoke", listed["id"], *server)
    for wanted in (listed["id"], enrolled["device_id"]):
        answer = sparrow("token", "revoke", wanted, *server, "--yes", "--json")[1]
        assert json.loads(answer) == {"revoked": [wanted]}
    assert lab.get("/v1/federations/night/devices").json()[0]["status"] == "revoked"
    fails(Exit.NOT_FOUND, "token", "revoke", "nobody", *server, "--yes")
    wrong = ("create", "observer", "--federation", "nihgt")
    assert "did you mean night?" in fails(Exit.NOT_FOUND, "token", *wrong, *server)
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", secret)
    fails(Exit.REFUSED, "token", "list", *server)


def test_what_a_thief_made_is_revoked_over_http(sparrow, night, monkeypatch):
    server = ("--server", night, "--json")
    stolen = json.loads(sparrow("token", "create", "admin", *server)[1])
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", stolen["secret"])
    made = json.loads(sparrow("token", "create", "admin", *server)[1])
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", ADMIN)
    revoked = json.loads(sparrow("token", "revoke", stolen["id"], "--made", "--yes", *server)[1])["revoked"]
    assert revoked == [stolen["id"], made["id"]]


def test_a_removed_device_is_not_listed(sparrow, night, enrolled):
    code, out, _ = sparrow("device", "remove", "night", "pi", "--server", night, "--yes")
    assert (code, out) == (0, "device pi is removed\n")
    assert sparrow("device", "list", "night", "--server", night)[1] == "no devices yet\n"
