"""Where a coordinator keeps its data unless told, which variables it takes, and what it says when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sparrow.command_line.command import WrongUsage
from sparrow.coordinator.clock import KEEP_SECONDS, SteadyClock
from sparrow.coordinator.commands.starting import Listening, introduction
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings, read_settings
from sparrow.simulation import in_process


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home folder and nothing set; in it, the folder where the coordinator is started."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_data_folder_is_the_same_from_everywhere(home, monkeypatch):
    found = home / ".local/state/sparrow-coordinator"
    assert Settings().data_dir == found
    monkeypatch.chdir(home)
    assert Settings().data_dir == found
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    assert Settings().data_dir == home / "state/sparrow-coordinator"
    monkeypatch.setenv("COORDINATOR_DATA_DIR", "~/mine")
    assert Settings().data_dir == home / "mine"
    monkeypatch.setenv("COORDINATOR_DATA_DIR", "mine")
    assert Settings().data_dir == Path.cwd() / "mine"


@pytest.mark.parametrize("name", ["COORDINATOR_DEFUALT_TASK", "coordinator_data_dri", "COORDINATOR_PORT"])
def test_a_variable_that_is_no_setting_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "8000")
    with pytest.raises(ValidationError, match=f"{name} is not a setting"):
        Settings()


def test_what_kubernetes_sets_for_a_service_of_that_name_is_not(monkeypatch):
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"COORDINATOR_{name}", "10.0.0.1")
        monkeypatch.setenv(f"COORDINATOR_POSTGRES_{name}", "10.0.0.2")
    monkeypatch.setenv("COORDINATOR_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("COORDINATOR_POSTGRES_PORT", "tcp://10.0.0.2:5432")
    monkeypatch.setenv("COORDINATOR_TICK_SECONDS", "2")
    assert Settings().tick_seconds == 2


def test_a_coordinator_says_how_to_join_it(home):
    (data, page, join, only) = introduction(Settings(), Listening("127.0.0.1", 8000), enrolment_guarded=False)
    assert data == f"data folder: {home / '.local/state/sparrow-coordinator'}"
    assert page == "page: http://127.0.0.1:8000/"
    assert join == "devices join with: sparrow join --server http://127.0.0.1:8000"
    assert "--host 0.0.0.0" in only
    settings = Settings(default_task="")
    (_, _, join) = introduction(settings, Listening("10.0.0.7", 8443, tls=True), enrolment_guarded=True)
    assert join.endswith("--server https://10.0.0.7:8443 --federation NAME, with SPARROW_ENROLMENT_TOKEN set")
    assert len(list(introduction(Settings(), None, enrolment_guarded=False))) == 1


@pytest.mark.parametrize(
    ("listening", "tokens", "made"),
    [
        (Listening("192.0.2.7", 8000), {}, True),
        (Listening("::", 8000, tls=True), {}, True),
        (Listening("127.0.0.1", 8000), {}, False),
        (Listening("0.0.0.0", 8000), {"observer_token": "0123456789abcdef"}, False),  # its operator has chosen
        (None, {}, False),  # uvicorn
    ],
)
def test_tokens_are_made_at_the_first_start_on_a_network(home, capsys, listening, tokens, made):
    settings = Settings(data_dir=home / "data", default_task="", **tokens)
    file = home / "data" / "tokens.sh"
    for start in (1, 2):
        with in_process.running(create_app(settings, listening)) as client:
            status = client.get("/v1/federations").status_code
        assert (status, file.exists()) == (401 if made or tokens else 200, made)
        said = capsys.readouterr().err
        assert ("shown only now" in said) == (made and start == 1)
        assert ("unencrypted" in said) == (made and start == 1 and not listening.tls)
    if made:
        assert file.stat().st_mode & 0o777 == 0o600
        secret = file.read_text().partition("SPARROW_ADMIN_TOKEN=")[2].split()[0]
        with in_process.running(create_app(settings)) as client:  # they stay in force
            assert client.get("/v1/federations").status_code == 401
            allowed = {"Authorization": f"Bearer {secret}"}
            assert client.get("/v1/federations", headers=allowed).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_who_listens_on_all_addresses_names_one_that_others_can_use(host):
    url = Listening(host, 8000).url
    assert url.startswith("http://")
    assert url.endswith(":8000")
    assert "//0.0.0.0" not in url
    assert "[::]" not in url


@pytest.mark.parametrize("weak", ["", "secret", "a" * 64, "abababababababababab", "fifteen-letters"])
@pytest.mark.parametrize("kind", ["ADMIN", "OBSERVER", "ENROLMENT"])
def test_a_token_that_is_easy_to_guess_is_refused_and_not_repeated(monkeypatch, kind, weak):
    monkeypatch.setenv(f"COORDINATOR_{kind}_TOKEN", weak)
    with pytest.raises(WrongUsage, match=f"^COORDINATOR_{kind}_TOKEN: .*16 ") as refused:
        read_settings()
    with pytest.raises(ValidationError) as plain:  # as uvicorn coordinator.main:app says it
        Settings()
    assert not weak or weak not in f"{refused.value} {plain.value}"


def test_one_token_is_not_for_two_kinds(monkeypatch):
    """Each device would hold the operator's."""
    for kind in ("ADMIN", "ENROLMENT"):
        monkeypatch.setenv(f"COORDINATOR_{kind}_TOKEN", "0123456789abcdef")
    with pytest.raises(WrongUsage, match=r"COORDINATOR_ADMIN_TOKEN.*COORDINATOR_ENROLMENT_TOKEN"):
        read_settings()
    monkeypatch.setenv("COORDINATOR_ADMIN_TOKEN", "fedcba9876543210")
    assert len(read_settings().tokens()) == 2


# --- the clock --------------------------------------------------------------------------------------------------------


class Machine:
    """A machine whose clock is set, and which boots."""

    def __init__(self, folder):
        self.folder, self.wall, self.up, self.boots = folder, 1.8e9, 100.0, 1

    def passes(self, seconds):
        self.wall += seconds
        self.up += seconds

    def boot(self, *, lost=0.0):
        self.up, self.boots = 5.0, self.boots + 1
        self.wall -= lost

    def clock(self):
        return SteadyClock(self.folder, now=lambda: self.wall, passed=lambda: self.up, boot=lambda: str(self.boots))


@pytest.mark.parametrize("steps", [(5 * 3600,), (-5 * 3600,), (9 * 3600, -18 * 3600, 4 * 3600)])
def test_no_step_of_the_machines_clock_is_seen_by_the_coordinator(tmp_path, steps):
    machine = Machine(tmp_path)
    began, clock = machine.wall, machine.clock()
    for number, step in enumerate(steps, start=1):
        clock.keep()
        machine.wall += step
        assert clock() == began + (number - 1) * 30, "while it runs"
        machine.passes(30)
        clock = machine.clock()
        assert clock() == began + number * 30, "after a restart of the process"


def test_after_a_reboot_time_goes_on_and_never_back(tmp_path, caplog):
    machine = Machine(tmp_path)
    machine.clock().keep()
    machine.passes(3600)
    machine.boot()
    assert machine.clock()() == machine.wall, "read anew"
    clock = machine.clock()
    clock.keep()
    last = clock()
    machine.passes(KEEP_SECONDS / 2)
    machine.boot(lost=machine.wall)  # a board without a battery for its clock begins in 1970
    again = machine.clock()
    assert again() == last, "the last time that was kept"
    assert "behind the coordinator's last time" in caplog.text
    again.keep()
    machine.wall = 1.9e9  # NTP
    machine.passes(10)
    assert machine.clock()() == again()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"boot": "1", "offset": "x", "at": 0}', "\x00" * 50])
def test_a_damaged_anchor_is_read_anew_from_the_machine(tmp_path, text, caplog):
    (tmp_path / "clock.json").write_text(text)
    machine = Machine(tmp_path)
    assert machine.clock()() == machine.wall
    assert "cannot be read" in caplog.text
    machine.clock().keep()
    assert (tmp_path / "clock.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.integration
def test_no_bit_of_the_anchor_that_flips_moves_the_time(tmp_path):
    machine = Machine(tmp_path)
    machine.clock().keep()
    machine.passes(30)
    file, time = tmp_path / "clock.json", machine.clock()()
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert machine.clock()() == time, damaged


def test_the_time_is_kept_once_a_minute(tmp_path, monkeypatch):
    machine, writes, replace = Machine(tmp_path), [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (writes.append(path), replace(path, target)))
    clock = machine.clock()
    for _ in range(600):
        clock.keep()
        machine.passes(1)
    assert len(writes) == 10
