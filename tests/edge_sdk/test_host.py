"""Which devices a fleet simulates, and a process that hosts them: nothing passes from one device to the next."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from edge_sdk.device.opening import fetch_graphs
from edge_sdk.device.session import Known, Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.engines.onnx import Sessions
from edge_sdk.errors import BadArgument
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import load_task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.devices.simulation import BOARDS
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.messages import Kind
from sparrow.reading.errors import DataError
from sparrow.simulation import in_process as inprocess
from sparrow.simulation.host import Host, OnnxTrainer, Plan, TorchTrainer

# --- a plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "budgets", "wanted"),
    [
        (6, (0.2, 0.6, 1.0), [0.2, 0.2, 0.6, 0.6, 1.0, 1.0]),
        (5, (0.2, 1.0), [0.2, 0.2, 0.2, 1.0, 1.0]),
        (2, (0.5,), [0.5, 0.5]),
        (2, (0.2, 0.4, 0.6, 0.8), [0.2, 0.6]),
    ],
)
def test_budgets_are_dealt_in_equal_parts(devices, budgets, wanted):
    plan = Plan("f", devices, budgets=budgets)
    assert [plan.budget(index) for index in range(devices)] == wanted


def test_every_part_has_as_many_devices_as_another_give_or_take_one():
    for devices in range(3, 40):
        plan = Plan("f", devices, budgets=(0.2, 0.6, 1.0))
        dealt = [plan.budget(index) for index in range(devices)]
        counts = [dealt.count(budget) for budget in plan.budgets]
        assert max(counts) - min(counts) <= 1, devices
        assert dealt == sorted(dealt)


def test_new_devices_are_numbered_after_the_others_and_have_their_budgets_and_boards():
    boards = (BOARDS["pizero2w"], BOARDS["pi5"])
    plan = Plan("f", 4, new=3, budgets=(0.5, 1.0), boards=boards, prefix="pi")
    assert plan.total == 7
    assert plan.name(6) == "pi-6"
    assert [plan.budget(index) for index in range(4, 7)] == [0.5, 0.5, 1.0]
    assert [plan.board(index).name for index in range(7)] == ["pizero2w"] * 2 + ["pi5"] * 2 + ["pizero2w"] * 2 + ["pi5"]


def test_without_boards_devices_are_this_machine():
    assert Plan("f", 2).board(1) is None


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (None, "index=2,of=5"),
        ("", "index=2,of=5"),
        ("alpha=0.3", "alpha=0.3,index=2,of=5"),
        ("folder/{name}.npz", "folder/device-2.npz"),
        ("{index}-of-{of}", "2-of-5"),
        ("a{b}", "a{b},index=2,of=5"),
    ],
)
def test_each_device_has_its_part_of_the_data(data, wanted):
    assert Plan("f", 4, new=1, data=data).data_of(2) == wanted


@pytest.mark.parametrize("changed", [{"devices": 0}, {"devices": -1}, {"new": -1}])
def test_a_fleet_has_at_least_a_device(changed):
    with pytest.raises(BadArgument, match="give at least 1 device and 0 new ones"):
        Plan("f", **{"devices": 1, **changed})


def test_what_a_device_can_afford_follows_from_its_board():
    with pytest.raises(BadArgument, match="give boards, or budgets"):
        Plan("f", 1, budgets=())
    assert Plan("f", 1, budgets=(), boards=(BOARDS["pi5"],)).budget(0) is None


@pytest.mark.parametrize("budgets", [(0.0,), (0.5, 1.1), (-0.1,), (float("nan"),)])
def test_budgets_are_shares(budgets):
    with pytest.raises(BadArgument, match="give numbers above 0 and up to 1"):
        Plan("f", 1, budgets=budgets)


# --- a host ----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "rounds": 3,
    "cohort": 2,
    "min_devices": 2,
    "local_steps": 3,
    "evaluation_interval": 0,
    "early_stopping": "off",
    "deadline_seconds": 600,
}


@contextmanager
def coordinator(folder):
    """A client of a coordinator in this process."""
    settings = Settings(data_dir=folder, default_task="", tick_seconds=0.05)
    with inprocess.running(create_app(settings)) as client:
        yield client
        client.get("/readyz")  # let it take the last fact up: stopped in the middle of that, it may wait for ever


@pytest.fixture
def client(tmp_path):
    with coordinator(tmp_path / "coordinator") as client:
        yield client


def host_of(client, plan, folder, engine="onnx"):
    """A host of these devices, as a fleet makes it."""
    transport = Transport(client)
    known = Known.of(transport, plan.federation)
    task_of = cache(lambda index: plan.task(index, known))
    if engine == "torch":
        trainer = TorchTrainer(task_of(0), known, plan.compute, {})
    else:
        graphs, _ = fetch_graphs(known.manifest, partial(transport.graph, plan.federation))
        trainer = OnnxTrainer(task_of(0), known, Sessions(graphs))
    return Host(plan, client, folder, known, task_of, trainer, reference=None)


def digits(index, of=2):
    return load_task("digits", f"index={index},of={of}", device=f"device-{index}", seed=0, batch_size=16)


def wait_for_work(client, federation, number):
    """Until the coordinator waits for so many devices; their indices."""
    path = f"/v1/federations/{federation}/assignments"
    answer = client.get(path)
    while len(answer.json()["assignments"]) < number:
        answer = client.get(path, params={"wait": 20}, headers={"If-None-Match": answer.headers["ETag"]})
        assert answer.status_code == 200, "nothing has moved for long"
    return [int(work["device"].rsplit("-", 1)[1]) for work in answer.json()["assignments"]]


def personal_bytes(client, folder, federation):
    """The personal models of both devices, by device and tensor."""
    manifest = Transport(client).manifest(federation)
    found = {}
    for name in ("device-0", "device-1"):
        with closing(StateFolder(folder / name)) as state:
            tensors, _ = state.load(manifest)
        found |= {(name, tensor): values.tobytes() for tensor, values in tensors.items()}
    return found


@pytest.mark.integration
@pytest.mark.parametrize(
    ("engine", "published", "settings", "own"),
    [
        ("onnx", "digits", {"method": "fedper"}, "out.weight"),
        ("torch", digits(0), {"options": PublishOptions(running_statistics="personal")}, "bn1.running_mean"),
    ],
    ids=["onnx", "torch"],
)
def test_devices_that_share_a_model_end_as_those_that_have_one_each(tmp_path, engine, published, settings, own):
    """What never crosses the wire, running statistics or a layer, must not pass from a device to the next."""
    plan = Plan("personal", 2, make_task=lambda index, info: digits(index))
    ended = []
    for folder in (tmp_path / "shared", tmp_path / "apart"):
        with coordinator(folder / "coordinator") as client, ExitStack() as stack:
            publish(inprocess.ADDRESS, "personal", published, client=client, **SETTINGS, **settings)
            if folder.name == "shared":
                host = host_of(client, plan, folder, engine)
                host.start(0), host.start(1)
                step = host.step
            else:
                sessions = [
                    Session(
                        Transport(client),
                        stack.enter_context(closing(StateFolder(folder / plan.name(index)))),
                        federation="personal",
                        name=plan.name(index),
                        make_task=lambda info, manifest, index=index: digits(index),
                        options=SessionOptions(engine=engine),
                    )
                    for index in range(2)
                ]

                def step(index, sessions=sessions):
                    return sessions[index].step()

            for _ in range(SETTINGS["rounds"]):
                assert [step(index).outcome for index in wait_for_work(client, "personal", 2)] == [Outcome.worked] * 2
            wait_for_work(client, "personal", 2)  # the last evaluation: the last round is closed
            stack.close()
            models = personal_bytes(client, folder, "personal")
            ended.append((Transport(client).federation("personal").model_sha256, models))
    assert len({values for (_, tensor), values in ended[0][1].items() if tensor == own}) == 2, "each has its own"
    assert ended[0] == ended[1]


def test_a_device_does_the_one_thing_it_is_asked_for(client, tmp_path):
    publish(inprocess.ADDRESS, "night", "digits", client=client, **SETTINGS)
    host = host_of(client, Plan("night", 2), tmp_path)
    host.start(0)
    assert (host.step(0).outcome, host.step(0).kind) == (Outcome.idle, None)
    host.start(1)
    wait_for_work(client, "night", 2)
    stepped = host.step(0)
    assert (stepped.index, stepped.outcome, stepped.kind) == (0, Outcome.worked, Kind.train)
    assert stepped.seconds > 0


def test_what_is_left_after_the_end_is_done_and_told(client, tmp_path):
    """A device that comes late adapts the finished model; the fleet that counts it must hear of it."""
    publish(inprocess.ADDRESS, "night", "digits", client=client, **SETTINGS)
    host = host_of(client, Plan("night", 2, new=1), tmp_path)
    client.patch("/v1/federations/night", json={"action": "stop"}).raise_for_status()
    stepped = host.finish(2)
    assert (stepped.index, stepped.kind) == (2, Kind.adapt)
    assert host.finish(2) is None, "nothing is left"
    manifest = Transport(client).manifest("night")
    with closing(StateFolder(tmp_path / "device-2")) as state:
        tensors, progress = state.load(manifest)
    assert tensors is not None
    assert progress.adapted


def test_a_folder_is_free_after_each_step_whatever_came_of_it(client, tmp_path):
    def make_task(index, info):
        if broken:
            raise DataError("no such file")
        return digits(index)

    publish(inprocess.ADDRESS, "night", "digits", client=client, **SETTINGS)
    broken = []
    host = host_of(client, Plan("night", 2, make_task=make_task), tmp_path)
    broken.append(True)
    with pytest.raises(DataError, match="no such file"):
        host.start(1)
    broken.clear()
    host.start(1)
    with closing(StateFolder(tmp_path / "device-1")) as state:
        assert state.known_identity().token is not None


def test_another_model_than_the_federations_is_refused_before_anything_is_done(client, tmp_path):
    other = replace(digits(0), model=torch.nn.Linear(2, 2))
    publish(inprocess.ADDRESS, "night", "digits", client=client, **SETTINGS)
    with pytest.raises(ManifestError, match=r"this device's model"):
        host_of(client, Plan("night", 2, make_task=lambda index, info: other), tmp_path, "torch")
    assert client.get("/v1/federations/night/devices").json() == []


def test_a_simulated_board_reports_estimated_energy(client, tmp_path):
    publish(inprocess.ADDRESS, "night", "digits", client=client, **SETTINGS)
    board = BOARDS["pi4b"]
    host = host_of(client, Plan("night", 2, boards=(board,)), tmp_path)
    host.start(0), host.start(1)
    for device in client.get("/v1/federations/night/devices").json():
        assert (device["profile"]["board"], device["profile"]["system"]) == ("pi4b", "simulated")
        assert device["profile"]["memory_bytes"] == board.memory_bytes
    for index in wait_for_work(client, "night", 2):
        host.step(index)
    wait_for_work(client, "night", 2)
    for each in client.get("/v1/federations/night/rounds/1/reports").json():
        report, telemetry = each["report"], each["report"]["telemetry"]
        assert report["training_flops"] > 0
        computing = board.computing_seconds(report["training_flops"])
        transfer = board.transfer_seconds(telemetry["download"]["bytes_down"])
        assert telemetry["train"]["seconds"] == pytest.approx(computing)
        assert telemetry["train"]["joules"] == pytest.approx(board.power.max_watts * computing)
        assert telemetry["download"]["seconds"] == pytest.approx(transfer)
        assert telemetry["download"]["joules"] == pytest.approx(board.power.idle_watts * transfer)
        assert {phase["quality"] for phase in telemetry.values()} == {"estimated"}


def joules_by_round(client, folder, federation, **settings):
    """What two devices, a slow and a fast board, spend in each of their rounds, by device."""
    settings = {**SETTINGS, "rounds": 4, **settings}
    publish(inprocess.ADDRESS, federation, "digits", client=client, **settings)
    host = host_of(client, Plan(federation, 2, boards=(BOARDS["pizero2w"], BOARDS["pi5"])), folder)
    host.start(0), host.start(1)
    while client.get(f"/v1/federations/{federation}").json()["status"] != "finished":
        host.step(0), host.step(1)
    spent = {}
    for number in range(1, 5):
        for each in client.get(f"/v1/federations/{federation}/rounds/{number}/reports").json():
            phases = each["report"]["telemetry"]
            if "training_flops" in each["report"]:
                spent.setdefault(each["device"], []).append(phases["download"]["joules"] + phases["train"]["joules"])
    return spent


@pytest.mark.integration
def test_a_device_stops_with_the_round_that_spends_its_joules(client, tmp_path):
    first, second, third, *_ = joules_by_round(client, tmp_path / "night", "night")["device-0"]
    spent = joules_by_round(client, tmp_path / "day", "day", joules_per_device=first + second + third / 2)
    assert {name: len(rounds) for name, rounds in spent.items()} == {"device-0": 3, "device-1": 4}
    assert client.get("/v1/federations/day/rounds").json()[2]["stopped"] == ["device-0"]
