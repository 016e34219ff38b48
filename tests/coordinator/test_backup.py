"""A copy of a running coordinator, and devices that have gone on before it is brought back."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import select

from sparrow.coordinator.commands import backup, restore
from sparrow.coordinator.commands.backup import back_up
from sparrow.coordinator.commands.restore import bring_back
from sparrow.coordinator.errors import BackupFailed, DamagedRecords, NoRecords, NotAuthenticated
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.database import connect
from sparrow.coordinator.storage.store import RECORDS_FILE, Store
from sparrow.coordinator.storage.tables import Base

from .fakes import LocalCoordinator
from .sessions import CoordinatorWithDevices

pytestmark = pytest.mark.integration  # plays whole federations


def settings_for(folder, **more):
    return Settings(data_dir=folder, default_task="", **more)


def some_way(coordinator, answer, rounds=2):
    """Closed rounds, and an open one with one of its two updates."""
    coordinator.create(rounds=5, cohort=2)
    devices = coordinator.enrol("a", "b")
    for _ in range(rounds):
        coordinator.rounds.advance()
        for device in devices:
            answer(device)
    coordinator.rounds.advance()
    answer(devices[0])
    return devices


@contextmanager
def going_on(folder, clock, devices, **settings):
    """A restored coordinator, which these devices call from now on."""
    coordinator = LocalCoordinator(folder, clock, **settings)
    with closing(coordinator.store):
        for device in devices:
            device.coordinator = coordinator
        yield coordinator


def test_what_was_acknowledged_is_in_the_copy(tmp_path, clock, answer, play):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        devices = some_way(coordinator, answer)
        assert back_up(settings_for(tmp_path / "data"), tmp_path / "copy")["federations"] == {"f": 2}
        play(coordinator, devices)
        wanted = coordinator.model()
    bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    with going_on(tmp_path / "new", clock, devices) as coordinator:
        assert coordinator.record(3).updates == 1, "it was acknowledged, and its round is open"
        play(coordinator, devices)
        assert coordinator.model() == wanted, "bit for bit what became of the other"


def test_rounds_that_close_meanwhile_do_no_harm(tmp_path, clock, answer, play):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        devices = some_way(coordinator, answer)
        tries = []

        def meanwhile():
            tries.append(coordinator.info().round)
            for device in devices:
                answer(device)
            coordinator.rounds.advance()  # the update and the model that the records name go

        assert back_up(settings_for(tmp_path / "data"), tmp_path / "copy", meanwhile)["federations"] == {"f": 3}
        assert tries == [2, 3], "what the newer records name was copied before it went, too"
    bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    with closing(Store(tmp_path / "new")) as store:
        assert any(key.startswith("1/models/000000003.") for key in store.blobs.keys("1/models"))


def test_nothing_is_overwritten_and_nothing_incomplete_is_used(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
    with pytest.raises(BackupFailed, match="is not empty; give a new folder"):
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
    with pytest.raises(NoRecords, match="COORDINATOR_DATA_DIR"):
        back_up(settings_for(tmp_path / "elsewhere"), tmp_path / "copy2")
    with pytest.raises(BackupFailed, match="already has records"):
        bring_back(settings_for(tmp_path / "data"), tmp_path / "copy")
    with pytest.raises(NoRecords, match=r"has no backup\.json"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "data")
    (model,) = (tmp_path / "copy" / "blobs" / "1" / "models").glob("*")
    body = model.read_bytes()
    model.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(BackupFailed, match="is damaged"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    model.unlink()
    with pytest.raises(BackupFailed, match=r"1/models/000000002\.[0-9a-f]{64}\.safetensors"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    assert not (tmp_path / "new" / "coordinator.sqlite3").exists()


@pytest.mark.parametrize("folder", ["models", "files", "updates"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_folder_is_not_backed_up_and_what_is_damaged_is_named(
    tmp_path, clock, answer, monkeypatch, capsys, folder, how
):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        path = next((tmp_path / "data" / "blobs" / "1" / folder).iterdir())
        body = path.read_bytes()
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]) if how == "changed" else body[:-1])
        if how == "gone":
            path.unlink()
        monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
        assert backup.main([str(tmp_path / "copy")]) == 1
    assert f"damaged or missing: 1/{folder}/{path.name}; the copy is incomplete" in capsys.readouterr().err
    assert not (tmp_path / "copy" / "backup.json").exists()


@pytest.mark.parametrize(
    "where", ["{tmp}/{sha}", "../../{sha}", "1/models/../../../../{sha}.service", "1//{sha}", "{sha}"]
)
def test_a_hostile_backup_writes_nothing_beside_the_data_folder(tmp_path, clock, answer, where):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
    planted = b"* * * * * root id"
    key = where.format(tmp=tmp_path / "etc", sha=hashlib.sha256(planted).hexdigest())
    (tmp_path / "etc").mkdir()
    source = tmp_path / "copy" / "blobs" / key
    source.parent.mkdir(exist_ok=True)
    source.write_bytes(planted)
    summary = json.loads((tmp_path / "copy" / "backup.json").read_text())
    (tmp_path / "copy" / "backup.json").write_text(json.dumps({**summary, "blobs": [*summary["blobs"], key]}))
    source_files = set(tmp_path.rglob("*"))
    with pytest.raises(BackupFailed, match="is damaged"):
        bring_back(settings_for(tmp_path / "deep" / "new"), tmp_path / "copy")
    assert set(tmp_path.rglob("*")) == source_files, "nothing was written"


def test_damaged_records_are_neither_copied_nor_restored(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
    for damaged in (tmp_path / "data", tmp_path / "copy"):
        data = bytearray((damaged / "coordinator.sqlite3").read_bytes())
        data[4096:8192] = b"\xff" * 4096
        (damaged / "coordinator.sqlite3").write_bytes(data)
    with pytest.raises(DamagedRecords, match=r"coordinator\.sqlite3 is damaged"):
        back_up(settings_for(tmp_path / "data"), tmp_path / "second")
    with pytest.raises(BackupFailed, match=r"coordinator\.sqlite3"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    (tmp_path / "copy" / "backup.json").write_text("{")
    with pytest.raises(BackupFailed, match=r"backup\.json is damaged"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    assert not (tmp_path / "new").exists()


def test_the_commands(tmp_path, clock, answer, monkeypatch, capsys):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))
        assert backup.main([str(tmp_path / "copy")]) == 0
        assert "f after round 2" in capsys.readouterr().out
    assert restore.main([str(tmp_path / "copy")]) == 1
    assert "already has records" in capsys.readouterr().err
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "new"))
    assert restore.main([str(tmp_path / "copy")]) == 0


def test_of_postgresql(tmp_path, clock, answer, play, monkeypatch, postgresql):
    monkeypatch.setenv("PATH", f"{postgresql.programs}{os.pathsep}{os.environ['PATH']}")
    first, second = postgresql.new_database(), postgresql.new_database()
    coordinator = LocalCoordinator(tmp_path / "data", clock, database_url=first)
    with closing(coordinator.store):
        devices = some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data", database_url=first), tmp_path / "copy")
        play(coordinator, devices)
        wanted = coordinator.model()
    with pytest.raises(BackupFailed, match="already has a coordinator's tables"):
        bring_back(settings_for(tmp_path / "new", database_url=first), tmp_path / "copy")
    bring_back(settings_for(tmp_path / "new", database_url=second), tmp_path / "copy")
    with going_on(tmp_path / "new", clock, devices, database_url=second) as coordinator:
        play(coordinator, devices)
        assert coordinator.model() == wanted


def rows(url_or_path):
    """All rows of all tables, apart from those of processes."""
    engine = connect(url_or_path)
    with engine.connect() as connection:
        tables = [each for each in Base.metadata.sorted_tables if each.name != "processes"]
        found = {each.name: sorted(map(str, connection.execute(select(each)))) for each in tables}
    engine.dispose()
    return found


def test_a_federation_moves_from_sqlite_to_postgresql_and_goes_on(tmp_path, clock, answer, play, postgresql):
    url = postgresql.new_database()
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        devices = some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
        play(coordinator, devices)
        wanted = coordinator.model()
    bring_back(settings_for(tmp_path / "new", database_url=url), tmp_path / "copy")
    assert rows(url) == rows(tmp_path / "copy" / RECORDS_FILE)
    with going_on(tmp_path / "new", clock, devices, database_url=url) as coordinator:
        play(coordinator, devices)
        assert coordinator.model() == wanted
        # Numbers of rows go on, too.
        coordinator.create("g")
        assert coordinator.info("g").uid != coordinator.info().uid


def test_records_do_not_move_from_postgresql_to_sqlite(tmp_path, clock, answer, monkeypatch, postgresql):
    monkeypatch.setenv("PATH", f"{postgresql.programs}{os.pathsep}{os.environ['PATH']}")
    url = postgresql.new_database()
    coordinator = LocalCoordinator(tmp_path / "data", clock, database_url=url)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data", database_url=url), tmp_path / "copy")
    with pytest.raises(BackupFailed, match="COORDINATOR_DATABASE_URL"):
        bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedspu", {}),
        ("pfedgate", {"method_settings": {"smallest_budget": 0.5}}),
        ("fedsgc", {"method_settings": {"adjust_interval": 2, "device_interval": 1}}),
    ],
)
def test_devices_that_were_ahead_go_on(tmp_path, clock, method, more):
    """They hold models and masks of rounds that the restored coordinator has never had, and an update for one."""
    coordinator = CoordinatorWithDevices(tmp_path, clock)
    coordinator.create(method, rounds=6, cohort=2, **more)
    a, b = coordinator.open_device("a"), coordinator.open_device("b")
    while coordinator.info().round < 2:
        coordinator.rounds.advance()
        for session in (a, b):
            session.step()
    back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
    while coordinator.info().round < 4:
        coordinator.rounds.advance()
        for session in (a, b):
            session.step()
    coordinator.rounds.advance()
    a.transport.broken = True
    with pytest.raises(ConnectionError):
        a.step()  # trained, and could not send it
    assert a.progress.pending is not None
    coordinator.close()

    (tmp_path / "data").rename(tmp_path / "lost")
    bring_back(settings_for(tmp_path / "data"), tmp_path / "copy")
    coordinator = CoordinatorWithDevices(tmp_path, clock)
    with closing(coordinator):
        coordinator.rounds.resume_after_restart()
        a, b = coordinator.open_device("a"), coordinator.open_device("b")
        assert coordinator.info().round == 2
        assert a.progress.last_round > 3
        coordinator.play(a, b)
        info, records = coordinator.info(), coordinator.records.rounds("f")
        assert (info.status, info.round) == ("finished", 6)
        assert [record.updates for record in records] == [2] * 6


def test_a_device_that_enrolled_later_is_told_to_enrol_again(tmp_path, clock, answer):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        some_way(coordinator, answer)
        back_up(settings_for(tmp_path / "data"), tmp_path / "copy")
        (late,) = coordinator.enrol("late")
    bring_back(settings_for(tmp_path / "new"), tmp_path / "copy")
    coordinator = LocalCoordinator(tmp_path / "new", clock)
    with closing(coordinator.store):
        with pytest.raises(NotAuthenticated, match="enrol again"):
            coordinator.devices.authenticate(late.token)
        late.coordinator = coordinator
        late.enrol()
        coordinator.devices.authenticate(late.token)
