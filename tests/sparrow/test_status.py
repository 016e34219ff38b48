"""What ``sparrow status`` tells of a coordinator on a real port."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace

import pytest
import segno

from edge_sdk.device.transport import Transport
from sparrow import status
from sparrow.command_line.exits import Exit
from sparrow.coordinator.settings import Settings
from sparrow.transport import connect, httpx

from ..coordinator.api.test_contract import serving
from .conftest import ADMIN, ENROLMENT, OBSERVER


@pytest.fixture(autouse=True)
def _observer(monkeypatch):
    monkeypatch.setenv("SPARROW_OBSERVER_TOKEN", OBSERVER)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A coordinator with two devices in the running federation ``lab``, and another that waits."""
    with serving(Settings(data_dir=tmp_path_factory.mktemp("lab") / "data", default_task="")) as client:
        for name, settings in (("lab", {"rounds": 3}), ("night", {"method": "fedavg"})):
            body = {"name": name, "task": "digits", "settings": settings}
            client.post("/v1/federations", json=body).raise_for_status()
        for name in ("one", "two"):
            body = {"name": name, "enrolment_key": name.ljust(32, "k"), "budget": 0.4, "profile": {"board": "pi5"}}
            answer = client.post("/v1/federations/lab/devices", json=body).raise_for_status()
            asked = {"Authorization": f"Bearer {answer.json()['token']}"}
        client.get("/v1/federations/lab/assignment", params={"wait": 5}, headers=asked).raise_for_status()
        yield str(client.base_url).rstrip("/")


def test_all_federations_in_a_table(sparrow, lab):
    code, out, err = sparrow("status", "--server", lab)
    assert (code, err) == (0, "")
    first, _, head, *rows = out.partition("\n\nlab waits for")[0].splitlines()
    assert first == f"{lab}: ready"
    assert head.split() == ["federation", "status", "method", "task", "round", "devices", "stopped", "parameters"]
    assert {row.split()[0]: row.split()[1:4] for row in rows if row} == {
        "lab": ["running", "fedspu", "digits"],
        "night": ["waiting", "fedavg", "digits"],
    }


def test_one_of_them_with_its_rounds_and_devices(sparrow, lab):
    code, out, _ = sparrow("status", "lab", "--server", lab)
    assert code == 0
    assert "night" not in out
    assert "0 of 3" in out
    rows = [line.split() for line in out.splitlines() if line]
    assert ["1", "open", "0", "of", "2"] in [row[:5] for row in rows]
    assert ["one", "training", "0.4", "-", "-", "pi5"] in [row[:6] for row in rows]


def test_who_failed_is_named_with_the_reason(sparrow, tmp_path):
    reason = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"
    with serving(Settings(data_dir=tmp_path / "data", default_task="")) as client:
        client.post("/v1/federations", json={"name": "lab", "task": "digits"}).raise_for_status()
        body = {"name": "one", "enrolment_key": "one".ljust(32, "k")}
        one = client.post("/v1/federations/lab/devices", json=body).raise_for_status().json()
        client.patch(
            f"/v1/devices/{one['device_id']}",
            json={"conditions": {"available": False, "reason": reason}},
            headers={"Authorization": f"Bearer {one['token']}"},
        ).raise_for_status()
        server = str(client.base_url).rstrip("/")
        _, out, _ = sparrow("status", "lab", "--server", server)
        assert any(reason in line for line in out.splitlines() if line.startswith("one "))
        (said,) = [line for line in out.splitlines() if line.startswith(f"needs attention: one: {reason} (since ")]
        assert "smaller budget" in said
        notices = json.loads(sparrow("status", "lab", "--server", server, "--json")[1])["notices"]
        assert [notice["kind"] for notice in notices] == ["failed", "lost"]
        _, out, _ = sparrow("device", "show", "lab", "one", "--server", server)
        assert reason in out


def test_who_is_waited_for_is_named_and_since_when(sparrow, lab):
    for words in ((), ("lab",)):
        _, out, _ = sparrow("status", *words, "--server", lab)
        head, *rows = next(part for part in out.split("\n\n") if part.startswith("lab waits for")).splitlines()
        assert head.split()[3:] == ["asked", "to", "round", "since", "last", "heard"]
        assert sorted(row.split()[:3] for row in rows) == [["one", "train", "1"], ["two", "train", "1"]]
        assert all(row.endswith(" s ago") for row in rows)
    found = json.loads(sparrow("status", "lab", "--server", lab, "--json")[1])["open_work"]["lab"]
    assert {each["device"] for each in found["assignments"]} == {"one", "two"}
    assert all(each["since"] <= found["at"] and each["heard_at"] <= found["at"] for each in found["assignments"])


def test_a_program_is_given_one_document_as_the_contract_has_it(sparrow, lab):
    code, out, err = sparrow("status", "lab", "--server", lab, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["server"], found["ready"], found["trouble"]) == (lab, True, None)
    assert found["federations"] == [httpx.get(f"{lab}/v1/federations/lab").json()]
    assert found["rounds"] == httpx.get(f"{lab}/v1/federations/lab/rounds").json()
    assert [device["name"] for device in found["devices"]] == ["one", "two"]
    assert "rounds" not in json.loads(sparrow("status", "--server", lab, "--json")[1])


def test_it_looks_again_and_again_until_it_is_interrupted(sparrow, lab, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    code, out, err = sparrow("status", "--server", lab, "--json", "--watch", "7")
    assert (code, err, naps) == (130, "sparrow status: interrupted\n", [7.0] * 3)
    assert [json.loads(line)["ready"] for line in out.splitlines()] == [True] * 3


def test_nothing_that_a_coordinator_says_steers_the_terminal(lab):
    with connect(lab) as client:
        transport = Transport(client)
        transport.token = OBSERVER
        found = status.look(lab, transport, "lab")
    evil = "\x1b]0;owned\x07\x9b2J\u202e\r\n"
    info = found.federations[0].model_copy(
        update=dict.fromkeys(("name", "method", "task", "reason", "waiting_for", "warning"), evil)
    )
    hostile = replace(found, federations=[info], open_work=dict.fromkeys([evil], *found.open_work.values()))
    text = status.as_text(hostile)
    assert "owned" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_of_many_devices_the_newest_are_shown(sparrow, tmp_path):
    with serving(Settings(data_dir=tmp_path / "data", default_task="digits")) as client:
        for number in range(status.DEVICES_SHOWN + 2):
            body = {"name": f"d{number}", "enrolment_key": f"{number}".ljust(32, "k")}
            client.post("/v1/federations/default/devices", json=body).raise_for_status()
        _, out, _ = sparrow("status", "default", "--server", client.base_url)
        everything = json.loads(sparrow("status", "default", "--server", client.base_url, "--json")[1])
    assert out.splitlines()[-1] == "and 2 more: list all with --json"
    assert len(everything["devices"]) == status.DEVICES_SHOWN + 2


def test_a_coordinator_that_is_not_ready_says_why(sparrow, tmp_path):
    full = Settings(data_dir=tmp_path / "data", default_task="", min_free_bytes=2**60)
    with serving(full) as client:
        code, out, _ = sparrow("status", "--server", client.base_url)
        found = json.loads(sparrow("status", "--server", client.base_url, "--json")[1])
    assert code == 0
    assert "not ready: the disk of the data folder has" in out
    assert "no federations" in out
    assert not found["ready"]
    assert "the disk of the data folder has" in found["trouble"]


# --- links for phones ------------------------------------------------------------------------------------------------


@pytest.fixture
def named(monkeypatch):
    """Gives the address of a coordinator of this machine another name, which is not this machine's to phones."""
    usual = socket.getaddrinfo

    def look_up(host, *arguments, **named):
        ours = host in ("pi.lan", b"pi.lan")
        return usual("127.0.0.1" if ours else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return lambda address: str(address).rstrip("/").replace("127.0.0.1", "pi.lan")


@pytest.fixture(scope="module")
def open_lab(tmp_path_factory):
    """The address of a coordinator whose federation ``default`` needs no token of any kind."""
    folder = tmp_path_factory.mktemp("open") / "data"
    with serving(Settings(data_dir=folder, default_task="digits", hosts="pi.lan")) as client:
        alone = {"name": "alone", "task": "digits", "settings": {"method": "ditto"}}
        client.post("/v1/federations", json=alone).raise_for_status()
        yield client.base_url


def code_of(link):
    lines = io.StringIO()
    segno.make_qr(link).terminal(lines, border=2, compact=True)
    return lines.getvalue()


def test_the_link_for_phones_is_printed_with_its_qr_code(sparrow, open_lab, named):
    server = named(open_lab)
    link = f"{server}/join/default"
    code, out, err = sparrow("status", "default", "--server", server, "--join-link")
    assert (code, out) == (0, f"{link}\n\n{code_of(link)}")
    assert "plain http" in err
    assert "HTTPS" in err
    code, out, _ = sparrow("status", "default", "--server", f"{server}/", "--join-link", "--json")
    assert (code, json.loads(out)) == (0, {"link": link})


def test_a_qr_code_is_light_on_dark_whatever_the_terminals_colours_and_fits_it():
    link = "https://coordinator.example:8443/join/ward-3#token=sparrow_enrol_" + "Zm9v" * 11
    coloured = status.drawn(link, coloured=True).splitlines()
    assert len(coloured) <= 23, "with the prompt below it 24"
    assert all(line.startswith("\033[97;40m") and line.endswith("\033[0m") for line in coloured)
    bare = [line.removeprefix("\033[97;40m").removesuffix("\033[0m") for line in coloured]
    assert bare == status.drawn(link, coloured=False).splitlines()


def test_colours_are_for_terminals_and_not_where_they_are_unwanted(sparrow, open_lab, named, monkeypatch):
    words = ("status", "default", "--server", named(open_lab), "--join-link")
    assert "\033[" not in sparrow(*words)[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\033[" in sparrow(*words)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in sparrow(*words)[1]


def test_a_link_has_the_enrolment_token_that_it_needs(sparrow, fails, guarded, named, monkeypatch):
    words = ("status", "default", "--server", named(guarded), "--join-link")
    assert "set SPARROW_ENROLMENT_TOKEN" in fails(Exit.REFUSED, *words)
    for wrong, said in (("made-up", "not valid for default"), (ADMIN, "is an admin token")):
        monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", wrong)
        line = fails(Exit.REFUSED, *words)
        assert said in line
        assert wrong not in line
    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", ENROLMENT)
    _, out, err = sparrow(*words)
    assert out.splitlines()[0] == f"{named(guarded)}/join/default#token={ENROLMENT}"
    assert ENROLMENT not in err


def test_no_link_is_made_that_leads_phones_nowhere(fails, open_lab, named, monkeypatch):
    port = open_lab.port
    for here, there in (("192.0.2.7", f"http://192.0.2.7:{port}"), ("2001:db8::7", f"http://[2001:db8::7]:{port}")):
        monkeypatch.setattr(status, "in_network", lambda here=here: here)
        for own in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
            line = fails(Exit.USAGE, "status", "default", "--server", f"http://{own}:{port}/", "--join-link")
            assert line.endswith(f"sparrow status default --server {there} --join-link")
            assert f"phones cannot reach {own.strip('[]')}: give this machine's address on the network" in line
    monkeypatch.setattr(status, "in_network", lambda: None)
    line = fails(Exit.USAGE, "status", "default", "--server", "https://localhost", "--join-link")
    assert line.endswith("sparrow status default --server https://HOST --join-link")
    line = fails(Exit.NOT_FOUND, "status", "alone", "--server", named(open_lab), "--join-link")
    assert "ditto needs devices" in line
    assert "there is no federation 'none'" in fails(
        Exit.NOT_FOUND, "status", "none", "--server", named(open_lab), "--join-link"
    )


@pytest.mark.parametrize("words", [("--join-link",), ("default", "--join-link", "--watch", "3")])
def test_a_link_is_for_one_federation(fails, words):
    assert "sparrow status FEDERATION --join-link" in fails(Exit.USAGE, "status", *words)
