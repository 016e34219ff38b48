"""State folders that were copied, restored from a backup, or left behind by a renamed machine."""

import shutil

import pytest

from edge_sdk import join
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder, default_root
from edge_sdk.device.transport import Transport
from edge_sdk.errors import StateCopied
from edge_sdk.tasks.digits import load
from sparrow.command_line.exits import Exit
from sparrow.protocol.messages import Enrol, Start
from sparrow.transport import connect, httpx

from .conftest import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def start(coordinator):
    """Starts a device's process: its folder is locked until it is closed."""
    coordinator.create("lab", method="fedavg", cohort=1, min_devices=1, rounds=1000, local_steps=1)
    made = []

    def begin(folder, **options):
        client = connect(coordinator.url, None)
        locked = StateFolder(folder)
        made.extend([client, locked])
        try:
            session = Session(
                Transport(client, patience_seconds=10),
                locked,
                federation="lab",
                name="pi",
                make_task=lambda info, manifest: load("index=0,of=20", device="pi", seed=0, batch_size=16),
                options=SessionOptions(**options),
            )
        except StateCopied:
            locked.close()
            raise
        session.end = locked.close
        return session

    yield begin
    for each in made:
        each.close()


def worked(session):
    wait_until(lambda: session.step(1.0).outcome is Outcome.worked, "work")


def listed(coordinator):
    (device,) = coordinator.get("/v1/federations/lab/devices").json()
    return device


def test_two_copies_of_a_folder_are_both_refused_until_one_takes_over(start, coordinator, tmp_path):
    first = start(tmp_path / "card")
    worked(first)
    shutil.copytree(tmp_path / "card", tmp_path / "clone")
    second = start(tmp_path / "clone")
    worked(second)
    with pytest.raises(StateCopied):
        first.step()
    with pytest.raises(StateCopied):
        second.step()
    assert listed(coordinator)["failure"]["reason"].startswith("its state folder was copied")
    first.end()
    kept = start(tmp_path / "card", take_over=True)
    assert listed(coordinator)["failure"] is None
    worked(kept)
    with pytest.raises(StateCopied):
        second.step()


def test_late_requests_of_an_earlier_process_do_not_stop_a_device(start, coordinator, tmp_path):
    first = start(tmp_path / "card")
    late = Enrol(
        name="pi",
        enrolment_key=first.identity.enrolment_key,
        start=Start(id=first.identity.starts[-1]),
    ).model_dump(mode="json", exclude_none=True)
    first.end()
    second = start(tmp_path / "card")
    with httpx.Client(base_url=coordinator.url) as client:
        answer = client.post("/v1/federations/lab/devices", json=late)
        assert answer.status_code == 201
        headers = {"Authorization": f"Bearer {second.identity.token}"}
        change = {"start": {"id": first.identity.starts[-1]}, "conditions": {"available": False}}
        answer = client.patch(f"/v1/devices/{second.identity.device_id}", json=change, headers=headers)
        assert answer.json()["type"].endswith(":OtherStart")
    worked(second)
    assert listed(coordinator)["failure"] is None


def test_a_folder_restored_from_a_backup_is_refused(start, coordinator, tmp_path):
    first = start(tmp_path / "card")
    worked(first)
    first.end()
    shutil.copytree(tmp_path / "card", tmp_path / "backup")
    again = start(tmp_path / "card")
    worked(again)
    again.end()
    with pytest.raises(StateCopied):
        start(tmp_path / "backup")
    worked(start(tmp_path / "backup", take_over=True))


def test_devices_go_on_with_a_coordinator_restored_from_a_backup(start, coordinator, tmp_path):
    device = start(tmp_path / "card")
    worked(device)
    device.end()
    coordinator.stop()
    shutil.copytree(coordinator.data, tmp_path / "backup")
    coordinator.start()
    running = start(tmp_path / "card")
    worked(running)
    coordinator.stop()
    shutil.rmtree(coordinator.data)
    shutil.copytree(tmp_path / "backup", coordinator.data)
    coordinator.start()
    worked(running)
    running.end()
    worked(start(tmp_path / "card"))


def test_a_renamed_machine_is_told_whose_state_it_has(coordinator, tmp_path, monkeypatch, capsys):
    coordinator.create("lab", method="fedavg", cohort=1, min_devices=1, rounds=1, local_steps=1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = ["--server", coordinator.url, "--federation", "lab", "--data", "index=0,of=20", "--quiet"]
    monkeypatch.setattr(join.socket, "gethostname", lambda: "pi-old")
    assert join.main(command) == 0
    monkeypatch.setattr(join.socket, "gethostname", lambda: "pi-new")
    assert join.main(command) == Exit.USAGE
    assert "pi-old" in capsys.readouterr().err
    assert not (default_root(coordinator.url, "lab") / "pi-new").exists()
    # The state is known again.
    assert join.main([*command, "--device-name", "pi-old"]) == 0
