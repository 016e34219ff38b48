"""``from sparrow import Client, join, publish, simulate, Task, SdkError``: light to import, and one type to catch."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparrow
from edge_sdk.device.trainable import CannotTrain
from edge_sdk.errors import BadArgument, Damaged, FederationDeleted, NotFound, Refused, Unreachable, WrongSettings
from edge_sdk.tasks import load_task
from sparrow import JoinOptions, PublishOptions, SdkError, Seeded, SimulationOptions, Task, join, publish, simulate
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation.in_process import ADDRESS, running

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DOWN = "http://127.0.0.1:9"


def test_importing_it_loads_nothing_that_a_device_may_lack():
    probe = "import sys, sparrow; from sparrow import SdkError; print({'torch', 'httpx', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_a_name_that_is_not_there_is_none_of_its(monkeypatch):
    with pytest.raises(ImportError, match="cannot import name 'jion'"):
        from sparrow import jion  # noqa: F401
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CannotTrain, match="PyTorch is not installed") as refused:
        sparrow.publish  # noqa: B018
    assert sparrow.join is not None  # ONNX Runtime may train
    assert refused.value.exit_code is Exit.CANNOT
    assert isinstance(refused.value, SdkError)
    assert sparrow.Client is not None  # it trains nothing


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A coordinator with the federation ``default``, which waits for a second device."""
    with running(create_app(Settings(data_dir=tmp_path_factory.mktemp("data"), default_task=""))) as client:
        publish(ADDRESS, "default", task(), client=client, method="fedavg", rounds=1, min_devices=2)
        yield client


def task(inputs=4, outputs=2, name="own", values=None):
    x = torch.randn(40, inputs) if values is None else values
    batches = DataLoader(TensorDataset(x, torch.arange(40) % 2), 10)
    return Task(name, Seeded(lambda: nn.Linear(inputs, outputs)), nn.CrossEntropyLoss(), batches, batches)


WRONG = {
    "server down": lambda where: publish(DOWN, "f", "digits", options=PublishOptions(patience_seconds=0)),
    "server down for a device": lambda where: join(
        DOWN, task(), options=JoinOptions(patience_seconds=0), state_dir=where["state_dir"]
    ),
    "server down for a fleet": lambda where: simulate(
        DOWN,
        devices=2,
        options=SimulationOptions(patience_seconds=0, in_memory=True),
    ),
    "address without a scheme": lambda where: join("127.0.0.1:8000", task()),
    "no such federation": lambda where: join(ADDRESS, task(), federation="none", **where),
    "not a task": lambda where: join(ADDRESS, nn.Linear(2, 2), **where),
    "class in place of a model": lambda where: Task("own", nn.Linear, None, [], []),
    "another model": lambda where: join(ADDRESS, task(inputs=5), **where),
    "unknown task": lambda where: simulate(ADDRESS, "digit", app=object(), devices=2),
    "no data": lambda where: load_task("npz", "none.npz", device="d", seed=0, batch_size=8),
    "bad data": lambda where: join(ADDRESS, task(values=torch.full((40, 4), torch.nan)), **where),
    "bad setting": lambda where: publish(ADDRESS, "g", task(), client=where["client"], rounds=-1),
    "unknown setting": lambda where: publish(ADDRESS, "g", task(), client=where["client"], raunds=1),
    "unknown method": lambda where: publish(ADDRESS, "g", task(), client=where["client"], method="fedfoo"),
    "unsuitable model": lambda where: publish(
        ADDRESS, "g", Task("lstm", nn.LSTM(4, 2), nn.MSELoss(), task().train, task().train), client=where["client"]
    ),
    "name taken": lambda where: publish(ADDRESS, "default", task(), client=where["client"]),
    "another federation": lambda where: publish(
        ADDRESS, "default", task(), client=where["client"], exist_ok=True, rounds=77
    ),
    "export to a folder": lambda where: join(ADDRESS, task(), export=where["state_dir"].parent, **where),
    "state in a file": lambda where: join(ADDRESS, task(), **{**where, "state_dir": where["state_dir"] / "file"}),
    "fleet's state in a file": lambda where: simulate(
        DOWN, devices=2, state_dir=where["state_dir"] / "file", options=SimulationOptions(patience_seconds=0)
    ),
    "bad budget": lambda where: join(ADDRESS, task(), options=JoinOptions(budget=2.0), **where),
    "no device": lambda where: simulate(ADDRESS, devices=0),
    "settings without a task": lambda where: simulate(ADDRESS, devices=2, rounds=3),
    "no coordinator at all": lambda where: simulate(devices=2),
    "an application that is not there": lambda where: simulate(app="no.such:app", devices=2),
    "masks where there are none": lambda where: join(
        ADDRESS, task(), options=JoinOptions(budget=1.0, require_secure=1), **where
    ),
    "known devices in no file": lambda where: join(
        ADDRESS, task(), options=JoinOptions(known_devices="no file"), **where
    ),
    "colluders": lambda where: join(ADDRESS, task(), options=JoinOptions(require_secure=-1), **where),
    "memory": lambda where: join(ADDRESS, task(), options=JoinOptions(budget=1.0, memory_limit=1), **where),
}


@pytest.mark.parametrize("what", WRONG)
def test_whatever_goes_wrong_is_an_sdk_error(client, tmp_path, what):
    state = tmp_path / "state"
    state.mkdir()
    (state / "file").write_text("in the way")
    with pytest.raises(SdkError) as refused:
        WRONG[what]({"client": client, "state_dir": state, "name": "pi", "quiet": True})
    assert str(refused.value)
    assert isinstance(refused.value.exit_code, Exit)


def test_answers_of_the_coordinator_are_told_apart(client, tmp_path):
    with pytest.raises(Unreachable):
        publish(DOWN, "f", "digits", options=PublishOptions(patience_seconds=0))
    with pytest.raises(NotFound, match="did you mean default"):
        join(ADDRESS, task(), federation="defualt", client=client, state_dir=tmp_path / "s", quiet=True)
    with pytest.raises(WrongSettings) as refused:
        publish(ADDRESS, "h", "digits", client=client, method_settings={"nothing": 1})
    assert not isinstance(refused.value, Refused)
    assert not issubclass(Damaged, Refused)


def test_a_federation_that_is_deleted_meanwhile(client, tmp_path):
    publish(ADDRESS, "brief", task(), client=client, method="fedavg", rounds=1, min_devices=1)
    where, gone = "/v1/federations/brief", []

    class Deleting(nn.CrossEntropyLoss):
        """Has the federation deleted while the device trains its first batch."""

        def forward(self, outputs, targets):
            if not gone and client.get(where).json()["devices"]:
                client.patch(where, json={"action": "stop"}).raise_for_status()
                client.delete(where).raise_for_status()
                gone.append(True)
            return super().forward(outputs, targets)

    mine = replace(task(), loss=Deleting())
    with pytest.raises(FederationDeleted, match="was deleted by its operator"):
        join(
            ADDRESS,
            mine,
            federation="brief",
            client=client,
            name="pi",
            options=JoinOptions(budget=1.0),
            state_dir=tmp_path / "s",
            quiet=True,
        )
    assert gone


def test_a_few_lines_simulate_devices(tmp_path):
    app = create_app(Settings(data_dir=tmp_path, default_task=""))
    brief = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "quiet": True}
    brief["options"] = SimulationOptions(in_memory=True)
    done = simulate(app=app, task="digits", devices=3, **brief)
    assert (done.hosted, done.device_rounds) == (3, 3)
    assert done.ended is not None
    assert simulate(app=app, task=lambda index: task(), federation="own", devices=2, **brief).device_rounds == 2
    theirs = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "min_devices": 2}
    with running(app) as client:
        made = client.post("/v1/federations", json={"name": "theirs", "task": "digits", "settings": theirs})
    assert made.status_code == 201, made.text
    assert simulate(app=app, task="digits", federation="theirs", devices=2, **brief).device_rounds == 2, "it joins"
    with running(app) as client:
        draws = {each["name"]: each["settings"]["draws"] for each in client.get("/v1/federations").json()}
    assert draws == {"default": "seed", "own": "seed", "theirs": "secret"}


def test_the_docs_lines_run_also_inside_an_event_loop(tmp_path, monkeypatch):
    """As a notebook runs them; nothing of it stays but what it writes."""
    page = Path(__file__).parents[2] / "docs" / "fleet.md"
    code = page.read_text().partition("## From Python")[2].partition("```python\n")[2].partition("```")[0]
    assert 3 < len(code.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    names = {}

    async def cell():
        exec(code, names)

    asyncio.run(cell())
    table, result = names["result"].to_pandas(), names["result"]
    assert list(table.index) == [1, 2, 3, 4, 5]
    assert table["accuracy_personal"].iloc[-1] == result.ended.accuracy_personal > 0.5
    assert {each.device for each in result.devices} == {f"device-{number}" for number in range(20)}
    assert [each.name for each in tmp_path.iterdir()] == ["accuracy.png"]
    assert {str(table[name].dtype) for name in ("accuracy_personal", "accuracy_global", "train_loss")} == {"float64"}
    with pytest.raises(BadArgument, match="cannot be written"):
        result.plot(tmp_path / "none" / "x.png")


def test_windows_of_a_series_in_a_file_are_no_images(client, tmp_path, compiling):
    """A file's arrays [N, 1, 64] and [N, 64]: the model that was published says what a sample is."""
    net = Seeded(lambda: nn.Sequential(nn.Conv1d(1, 6, 7), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 58, 3)))
    x, y = np.random.default_rng(0).normal(size=(60, 1, 64)).astype(np.float32), np.arange(60) % 3
    batches = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 20)
    brief = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "min_devices": 1}
    publish(ADDRESS, "waves", Task("waves", net, nn.CrossEntropyLoss(), batches, batches), client=client, **brief)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, classes=3)
    given = {"federation": "waves", "client": client, "state_dir": tmp_path / "state", "quiet": True}
    assert join(ADDRESS, data=str(tmp_path / "a.npz"), **given).rounds == 1
    np.savez(tmp_path / "b.npz", x_train=x[:, 0, :32], y_train=y, classes=3)
    with pytest.raises(
        BadArgument, match=re.escape("samples have the shape (32,), but the federation's model takes (1, 64)")
    ):
        join(ADDRESS, data=str(tmp_path / "b.npz"), **{**given, "state_dir": tmp_path / "other"})


def test_nothing_is_simulated_without_a_task(tmp_path):
    with pytest.raises(BadArgument, match=r"\btask\b"):
        simulate(devices=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": 5, "devices": 3}, "a function from a device's number to its Task"),
        ({"task": "digits", "devices": "3"}, "devices: '3' is invalid"),
        ({"task": "digits", "devices": 3, "state_dirs": 2}, "did you mean state_dir?"),
        ({"task": "digits", "devices": 3, "budgets": 0.3}, "budgets=0.3 is invalid; give shares of a full step"),
        ({"task": "digits", "devices": 3, "budgets": "0.3,1"}, "budgets='0.3,1' is invalid"),
        ({"task": task, "devices": 3, "data": "partition=iid"}, "data needs a task known by name"),
        ({"server": "digits", "devices": 3, "rounds": 2}, "if it is a task, give task='digits'"),
        ({"server": None, "app": "nowhere:app", "task": "digits", "devices": 3}, "give sparrow.coordinator.main:app"),
    ],
)
def test_simulate_says_at_once_what_cannot_work(given, said):
    with pytest.raises(SdkError, match=re.escape(said)):
        simulate(**{"server": "http://127.0.0.1:1", **given})
