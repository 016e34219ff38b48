"""Facts that come together are written down together, and one that cannot be harms no other."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from sparrow.coordinator.commands.backup import back_up, blobs_named
from sparrow.coordinator.commands.restore import bring_back
from sparrow.coordinator.errors import BadStorage, RoundClosed
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage import mounts
from sparrow.coordinator.storage.mounts import network_type
from sparrow.coordinator.storage.store import RECORDS_FILE, Store

from ...power import watching
from ..fakes import DIGITS, LocalCoordinator

CROWD = 24


class Counted(Store):
    """Counts its transactions."""

    def __init__(self, folder):
        self.transactions = 0
        super().__init__(folder)

    @contextmanager
    def writing(self):
        with super().writing() as session:
            yield session
            self.transactions += 1


@pytest.fixture
def flushes(monkeypatch):
    """Counts flushes of files and of folders; ``hold`` keeps the first one of a folder until it is set."""
    counts, hold, flush = Counter(), threading.Event(), os.fsync
    hold.set()

    def counting(number):
        kind = "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
        counts[kind] += 1
        if kind == "folder":
            assert hold.wait(30)
        flush(number)

    monkeypatch.setattr(os, "fsync", counting)
    counts.hold = hold
    return counts


@pytest.fixture
def crowd(tmp_path, clock, train, flushes):
    """A round's devices, each with its update ready to be sent: the coordinator, and a call per device."""
    coordinator = LocalCoordinator(tmp_path / "data", clock, Counted)
    with closing(coordinator.store):
        coordinator.create(cohort=CROWD, rounds=1)
        devices = coordinator.enrol(*(f"device-{number:02d}" for number in range(CROWD)))
        coordinator.rounds.advance()
        asked = [(device, device.ask()) for device in devices]
        ready = [(device, assignment, train(DIGITS, assignment)) for device, assignment in asked]
        (device, assignment, body), *rest = ready
        assert device.send(assignment, body)  # makes the folder
        yield coordinator, rest


@pytest.mark.integration
def test_a_crowd_of_updates_shares_transactions_and_flushes(crowd, flushes):
    coordinator, ready = crowd
    before, transactions = dict(flushes), coordinator.store.transactions
    flushes.hold.clear()  # a disk that takes its time
    with ThreadPoolExecutor(len(ready)) as pool:
        sent = [pool.submit(device.send, assignment, body) for device, assignment, body in ready]
        while flushes["file"] < before["file"] + len(ready):
            assert not any(each.done() for each in sent), "acknowledged before it was durable"
        flushes.hold.set()
        assert [each.result() for each in sent] == [True] * len(ready)
    assert flushes["file"] - before["file"] == len(ready), "each file once, side by side"
    assert flushes["folder"] - before["folder"] <= len(ready) // 4
    assert coordinator.store.transactions - transactions <= len(ready) // 4
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == CROWD


def test_alone_an_update_waits_for_nobody(crowd, flushes):
    coordinator, ready = crowd
    for device, assignment, body in ready[:3]:
        before, transactions = dict(flushes), coordinator.store.transactions
        assert device.send(assignment, body)
        assert flushes - Counter(before) == {"file": 1, "folder": 1}
        assert coordinator.store.transactions - transactions == 1


def test_what_cannot_be_recorded_harms_nothing_that_came_with_it(tmp_path, flushes):
    with closing(Store(tmp_path / "data")) as store:
        with store.writing() as db:
            db.execute(text("CREATE TABLE facts (name TEXT)"))

        def fact(name):
            def work(db):
                db.execute(text("INSERT INTO facts VALUES (:name)"), {"name": name})
                if name == "late":
                    raise RoundClosed("too late")
                return name

            return work

        def record(work, keys=()):
            (outcome,) = store.record_all([(work, keys)])
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        store.blobs.put("facts/first", b"")
        flushes.hold.clear()
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(record, fact("first"), ["facts/first"])  # has the pen, and waits for the disk
            rest = {name: pool.submit(record, fact(name)) for name in ("a", "late", "b")}
            flushes.hold.set()
            assert first.result() == "first"
            assert (rest["a"].result(), rest["b"].result()) == ("a", "b")
            with pytest.raises(RoundClosed, match="too late"):
                rest["late"].result()
        with store.reading() as db:
            assert sorted(db.scalars(text("SELECT name FROM facts"))) == ["a", "b", "first"]


# --- network file systems ----------------------------------------------------------------------------------------

LOCAL = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:35 / /srv/my\\040share rw,relatime shared:20 - {kind} host:/export rw,vers=4.2
41 40 8:1 / /srv/my\\040share/disk rw shared:21 - xfs /dev/sda1 rw
"""


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "9p", "fuse.sshfs", "fuse.s3fs", "ceph"])
def test_a_network_file_system_is_found_by_its_mount(tmp_path, kind):
    table = LOCAL.format(kind=kind)
    assert network_type(tmp_path, table) is None
    assert network_type(Path("/srv/my share/data"), table) == kind
    assert network_type(Path("/srv/my share/disk/data"), table) is None, "a local disk below it"
    over = table + "50 22 8:2 / /srv/my\\040share rw - ext4 /dev/sdb1 rw\n"
    assert network_type(Path("/srv/my share/data"), over) is None, "mounted over it"


def test_a_data_folder_on_a_network_is_refused_with_advice(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(f"36 35 0:50 / {tmp_path} rw,noatime - nfs4 nas:/export rw,vers=4.2\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)
    with pytest.raises(BadStorage, match=r"nfs4.*COORDINATOR_DATA_DIR"):
        Store(tmp_path / "data")
    assert not (tmp_path / "data" / "coordinator.sqlite3").exists()


# --- who may read ------------------------------------------------------------------------------------------------


def open_to_others(folder):
    return sorted(str(path) for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077)


@pytest.fixture
def usual_mask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_a_coordinator_keeps_is_for_its_own_user_alone(tmp_path, clock, answer, usual_mask):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        coordinator.create()
        devices = coordinator.enrol("a", "b")
        coordinator.rounds.advance()
        answer(devices[0])
        assert len(list((tmp_path / "data").glob("coordinator.sqlite3*"))) == 3, "with SQLite's -wal and -shm"
        assert open_to_others(tmp_path / "data") == []
        settings = Settings(data_dir=tmp_path / "data", default_task="")
        back_up(settings, tmp_path / "copy")
    assert open_to_others(tmp_path / "data") == open_to_others(tmp_path / "copy") == []
    bring_back(Settings(data_dir=tmp_path / "new", default_task=""), tmp_path / "copy")
    assert open_to_others(tmp_path / "new") == []


def test_no_lock_of_a_coordinator_is_a_link_or_open_to_others(tmp_path, usual_mask):
    Store(tmp_path / "data").close()
    assert (tmp_path / "data" / "lock").stat().st_mode & 0o777 == 0o600
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Store(tmp_path / "other")
    assert victim.read_bytes() == b"kept"


def test_old_folders_become_private_and_foreign_ones_cause_a_warning(tmp_path, caplog, usual_mask):
    data = tmp_path / "data"
    Store(data).close()
    for path in [data, *data.iterdir()]:
        path.chmod(path.stat().st_mode | 0o055)
    Store(data).close()
    assert open_to_others(data) == []
    assert caplog.text.count("removed other users' access to") == 5
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "photographs").mkdir()
    Store(shared).close()
    assert shared.stat().st_mode & 0o077 == 0o055, "its user decides"
    assert f"chmod go= {shared}" in caplog.text


# --- power cuts --------------------------------------------------------------------------------------------------


def check_named(coordinator, disk):
    """Whatever the records name is on the disk, whole."""
    with Session(coordinator.store.engine) as db:
        named = blobs_named(db)
    for key in named:
        content = disk.survives(coordinator.store.folder / "blobs" / key)
        assert content is not None, f"{key} may be lost"
        assert hashlib.sha256(content).hexdigest() in key


def check_restored(folder, disk):
    """With the records there is all that they name."""
    records = disk.outcomes(folder / RECORDS_FILE)
    if records != {None}:
        disk.check(folder / "blobs")
        assert records <= {None, (folder / RECORDS_FILE).read_bytes()}, "the records may be lost"


def flushed_life(tmp_path, clock, answer, train, monkeypatch, without=None):
    """Two rounds, a backup, a restore and a start, with a power cut at each step; the places that flush."""
    (tmp_path / "disk").mkdir(parents=True)
    folder, places = tmp_path / "disk" / "new" / "data", set()
    with watching(tmp_path / "disk", monkeypatch, without=without) as disk:
        coordinator = LocalCoordinator(folder, clock)
        with closing(coordinator.store):
            disk.on_step = lambda: check_named(coordinator, disk)
            coordinator.create(rounds=2)
            devices = coordinator.enrol("a", "b")
            for _ in range(2):
                coordinator.rounds.advance()
                check_named(coordinator, disk)
                one, two = devices
                assert answer(one)
                check_named(coordinator, disk)
                part = folder / "uploads" / "0.part"  # as ``calls.uploads`` leaves a large one: written, not flushed
                part.parent.mkdir(exist_ok=True)
                assignment = two.ask()
                part.write_bytes(body := train(DIGITS, assignment))
                coordinator.acceptance.accept_update(assignment.assignment_id, two.id, body, file=part)
                check_named(coordinator, disk)
            coordinator.rounds.advance()
            check_named(coordinator, disk)
        places |= disk.flushed_at
    (tmp_path / "backups").mkdir()
    with watching(tmp_path / "backups", monkeypatch, without=without) as disk:
        back_up(Settings(data_dir=folder, default_task=""), tmp_path / "backups" / "copy")
        disk.check()
        places |= disk.flushed_at
    again = tmp_path / "again"
    again.mkdir()
    with watching(again, monkeypatch, "none", without) as disk:
        disk.on_step = lambda: check_restored(again / "data", disk)
        bring_back(Settings(data_dir=again / "data", default_task=""), tmp_path / "backups" / "copy")
        disk.check()
        places |= disk.flushed_at
    with watching(folder, monkeypatch, "*.sqlite3", without) as disk:
        Store(folder).close()
        sealed = folder / f"{RECORDS_FILE}.sha256"
        sealed.unlink()  # that of this stop
        assert disk.outcomes(sealed) == {None}, "the one of before, which does not fit any more, may be lost or not"
        places |= disk.flushed_at
    return places


def test_a_power_cut_at_any_step_takes_nothing_that_was_acknowledged(tmp_path, clock, answer, train, monkeypatch):
    assert len(flushed_life(tmp_path, clock, answer, train, monkeypatch)) >= 9


@pytest.mark.integration
def test_no_flush_is_there_that_a_power_cut_does_not_need(tmp_path, clock, answer, train, monkeypatch):
    """And the test above would notice if one of them were gone."""
    places, unnoticed = flushed_life(tmp_path / "life", clock, answer, train, monkeypatch), []
    for number, place in enumerate(sorted(places)):
        try:
            flushed_life(tmp_path / str(number), clock, answer, train, monkeypatch, place)
        except AssertionError as error:
            assert "may be lost" in str(error)  # noqa: PT017
        else:
            unnoticed.append(place)
    assert not unnoticed, "left out, these flushes are missed by nobody"
