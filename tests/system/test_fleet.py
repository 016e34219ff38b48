"""A fleet of simulated devices: the same models however it is hosted, and nothing lost when it is interrupted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import psutil
import pytest

from edge_sdk.errors import BadArgument, Refused, StateError
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import load_task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.devices.simulation import BOARDS
from sparrow.protocol.messages import FederationStatus, Kind
from sparrow.reading.errors import DataError
from sparrow.simulation import fleet
from sparrow.simulation import in_process as inprocess
from sparrow.simulation.fleet import Access, run_fleet
from sparrow.simulation.host import Plan

from .conftest import LOGS, Coordinator, Machine, environment, wait_until
from .proxy import Exchange, Fault, Proxy, Trouble

NAME = "fleet"
DEVICES = 6
ROUNDS = 4
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "cohort": 4,
    "min_devices": DEVICES,
    "local_steps": 5,
    "evaluation_interval": 2,
    "early_stopping": "off",
    "seed": 5,
    "draws": "seed",
}
CREATED = ("--task", "digits", *(f"{key}={value}" for key, value in SETTINGS.items()))
"""The federation as the command creates it."""
BUDGETS = (0.3, 0.6, 1.0)
PLAN = Plan(NAME, DEVICES, budgets=BUDGETS)


class Fleets:
    """Starts ``sparrow fleet``, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def __call__(self, server: str, *more: str, name: str = "fleet", without: str = "") -> subprocess.Popen[bytes]:
        """without: a package that cannot be imported."""
        script = "import sys; sys.modules[sys.argv.pop(1)] = None; from sparrow.simulation.simulate import main"
        command = [
            sys.executable,
            *("-P", "-c", f"{script}; sys.exit(main())", without),
            "--server",
            server,
            "--federation",
            NAME,
            "--quiet",
        ]
        LOGS[f"fleet in {self.folder.name}"] = log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, "--devices", str(DEVICES), "--budgets", "0.3,0.6,1", "--wait", "30", *more],
                cwd=self.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def output(self, name: str = "fleet") -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        LOGS.pop(f"fleet in {self.folder.name}", None)
        for process in self._started:
            if process.poll() is None:
                family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(10)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Fleets]:
    fleets = Fleets(tmp_path / "fleets")
    yield fleets
    fleets.close()


def outcome(get: Callable[[str], Any]) -> dict[str, Any]:
    """What became of the federation, but for what depends on clocks: global models, and what devices found."""
    records = get("/rounds")
    judged = get(f"/rounds/{ROUNDS}/reports")
    return {
        "models": [record["model_sha256"] for record in records],
        "cohorts": [record["cohort"] for record in records],
        # Not bytes_up: an update carries seconds as text, so its length differs by some bytes.
        "bytes_down": [record["bytes_down"] for record in records],
        "personal": {each["device"]: each["report"]["personal"] for each in judged if each["kind"] == "evaluate"},
        "status": (get("")["status"], get("")["reason"]),
    }


def outcome_at(coordinator: Coordinator) -> dict[str, Any]:
    return outcome(lambda path: coordinator.get(f"/v1/federations/{NAME}{path}").json())


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> dict[str, Any]:
    """What becomes of the federation over HTTP, hosted by one process."""
    coordinator, devices = machine()
    coordinator.create(NAME, **SETTINGS)
    result = run_fleet(coordinator.url, PLAN, processes=1, state_dir=devices.folder / "fleet", quiet=True)
    assert (result.hosted, result.device_rounds, result.evaluations) == (DEVICES, ROUNDS * 4, 2 * DEVICES)
    assert result.status is FederationStatus.finished
    assert result.seconds_to_first is not None
    found = outcome_at(coordinator)
    assert result.adapted == DEVICES - len({name for cohort in found["cohorts"] for name in cohort}), "never drawn"
    assert len(set(found["models"])) == ROUNDS
    assert len(found["personal"]) == DEVICES
    assert found["status"] == ("finished", "max_rounds")
    return found


# --- the same models however they are hosted -------------------------------------------------------------------------


def test_in_one_process_with_the_coordinator(undisturbed, tmp_path):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task=""))
    with inprocess.running(app) as client:
        publish(inprocess.ADDRESS, NAME, "digits", client=client, **SETTINGS)
        client.get("/readyz")
    with pytest.raises(BadArgument, match="allows only one: set 1"):
        run_fleet(None, PLAN, app=app, engine="torch", processes=2, state_dir=tmp_path / "fleet", quiet=True)
    run_fleet(None, PLAN, app=app, state_dir=tmp_path / "fleet", quiet=True)
    with inprocess.running(app) as client:
        found = outcome(lambda path: client.get(f"/v1/federations/{NAME}{path}").raise_for_status().json())
    assert found == undisturbed


def test_in_two_threads_without_pytorch(undisturbed, coordinator, command):
    process = command(coordinator.url, "--processes", "2", "--memory", *CREATED, without="torch")
    assert process.wait(60) == 0, command.output()
    said = command.output()
    assert f"{DEVICES} devices, {ROUNDS * 4} device-rounds and {2 * DEVICES} evaluations in" in said
    assert f"on the devices' own test data after round {ROUNDS}: personal models " in said
    assert "training moved " in said
    assert "the federation is finished" in command.output()
    assert outcome_at(coordinator) == undisturbed


def test_pytorch_in_two_processes_and_in_one(machine):
    found = []
    for processes in (1, 2):
        coordinator, _ = machine()
        coordinator.create(NAME, **SETTINGS)
        run_fleet(coordinator.url, PLAN, engine="torch", processes=processes, in_memory=True, quiet=True)
        found.append(outcome_at(coordinator))
    assert found[0] == found[1]


class Counting:
    """An ASGI application, and the calls of it by path."""

    def __init__(self, app: Any) -> None:
        self._app, self.router, self.state = app, app.router, app.state
        self.calls: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls[scope["path"]] += 1
        await self._app(scope, receive, send)


def test_devices_share_one_fetch_of_the_graphs_and_one_session_of_each(tmp_path, monkeypatch):
    made = []
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *given, **more: made.append(0) or session(*given, **more)
    )
    app = Counting(create_app(Settings(data_dir=tmp_path / "data", default_task="")))
    with inprocess.running(app) as client:
        settings = SETTINGS | {"method": "fedavg", "rounds": 2, "cohort": DEVICES}
        publish(inprocess.ADDRESS, NAME, "digits", client=client, **settings)
        client.get("/readyz")
    result = run_fleet(None, Plan(NAME, DEVICES), app=app, processes=2, in_memory=True, quiet=True)
    assert result.device_rounds == 2 * DEVICES
    asked = {path.rpartition("/")[2]: count for path, count in app.calls.items()}
    assert {name: asked[name] for name in ("manifest", "step.onnx", "evaluation.onnx")} == {
        "manifest": 1,
        "step.onnx": 1,
        "evaluation.onnx": 1,
    }
    assert len(made) == 2


def test_each_device_a_process_of_its_own(undisturbed, coordinator, device):
    coordinator.create(NAME, **SETTINGS)
    joined = [
        device(
            coordinator.url,
            NAME,
            PLAN.name(index),
            *("--data", f"index={index},of={DEVICES}", "--budget", str(PLAN.budget(index)), "--quiet"),
        )
        for index in range(DEVICES)
    ]
    for each in joined:
        assert each.wait(60) == 0, each.output
    assert outcome_at(coordinator) == undisturbed


def test_in_two_fleets_that_share_the_devices(undisturbed, coordinator, command, tmp_path):
    """Machines that simulate a part each: ``indices`` says which."""
    coordinator.create(NAME, **SETTINGS)
    script = (
        "import sys; from sparrow.simulation.fleet import Access, run_fleet; from sparrow.simulation.host import Plan; "
        f"plan = Plan({NAME!r}, {DEVICES}, budgets={BUDGETS}, indices=range(3)); "
        "run_fleet(sys.argv[1], plan, processes=1, in_memory=True, quiet=True, access=Access(patience_seconds=30))"
    )
    other = subprocess.Popen([sys.executable, "-P", "-c", script, coordinator.url], env=environment())
    try:
        rest = replace(PLAN, indices=range(3, DEVICES))
        run_fleet(coordinator.url, rest, processes=1, state_dir=tmp_path / "fleet", quiet=True)
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()
    assert outcome_at(coordinator) == undisturbed


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "processes"), [("onnx", 0), ("torch", 2)])
@pytest.mark.timeout(300)
def test_ctrl_c_ends_all_and_the_same_command_goes_on(coordinator, command, undisturbed, engine, processes):
    coordinator.create(NAME, **SETTINGS)
    more = ("--processes", "2", "--engine", engine, "--state-dir", "state")
    first = command(coordinator.url, *more, name="first")
    coordinator.wait_for_log(r"round 1 closed")
    family = psutil.Process(first.pid).children(recursive=True)
    assert len(family) == processes
    for each in [psutil.Process(first.pid), *family]:  # as a terminal does
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, command.output("first")
    assert not any(each.is_running() for each in family)
    assert "interrupted" in command.output("first")
    assert "Traceback" not in command.output("first")
    assert coordinator.info(NAME)["status"] == "running"

    assert command(coordinator.url, *more).wait(60) == 0, command.output()
    found = outcome_at(coordinator)
    assert found["status"] == undisturbed["status"]
    assert engine == "torch" or found == undisturbed, "the same models"


def test_an_interrupted_process_resumes_to_the_same_models(undisturbed, coordinator, tmp_path):
    coordinator.create(NAME, **SETTINGS)
    steps = []

    def interrupt(stepped):
        steps.append(stepped)
        if len(steps) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True, on_step=interrupt)
    assert len(steps) == 7
    run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True)
    assert outcome_at(coordinator) == undisturbed


def test_a_fleet_after_the_end_has_nothing_to_do(coordinator, tmp_path):
    coordinator.create(NAME, **{**SETTINGS, "rounds": 1, "local_steps": 1})
    run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True)
    again = run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True)
    assert (again.device_rounds, again.evaluations, again.adapted) == (0, 0, 0)
    assert again.status is FederationStatus.finished


def test_buffered_rounds_count_each_update_once_however_old_its_model(coordinator, tmp_path):
    settings = {"rounds": 4, "buffer": 2, "cohort": 4, "local_steps": 2, "early_stopping": "off"}
    coordinator.create(NAME, **{**SETTINGS, **settings})
    result = run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True)
    records = coordinator.rounds(NAME)
    assert [record["updates"] for record in records[:-1]] == [2, 2, 2]
    # Who trains while the last round closes sends its update too late.
    assert 0 <= result.device_rounds - sum(record["updates"] for record in records) < settings["cohort"]
    assert sum(record["notes"]["stale_updates"] for record in records) > 0
    assert coordinator.info(NAME)["status"] == "finished"


class LastWord(Trouble):
    """Holds the answer to the so-manieth update until ``lost`` is set; it is lost then."""

    def __init__(self, number: int) -> None:
        self.fault = Fault("", "", "answer")
        self._left = number

    def befalls(self, exchange: Exchange) -> Fault | None:
        self._left -= exchange.method == "PUT"
        return self.fault if self._left == 0 and exchange.method == "PUT" else None


def test_a_lost_last_answer_is_sent_again_before_new_work(coordinator, device):
    """The federation is over, as the coordinator sees it, and the device is in a process that still works for it."""
    coordinator.create(NAME, **SETTINGS | {"rounds": 1, "cohort": 2, "min_devices": 2, "local_steps": 1})
    trouble = LastWord(4)  # two that train, two that judge
    with contextlib.closing(Proxy(coordinator.port, trouble=trouble)) as proxy:
        fleet = device.fleet(proxy.url, NAME, "--devices", "2", "--processes", "2")
        assert trouble.fault.reached.wait(60)
        proxy.wait_for(lambda exchange: b'"finished"' in exchange.answer and exchange.complete)
        trouble.fault.ended.set()
        assert fleet.wait(60) == 0, fleet.output
    assert "2 devices, 2 device-rounds and 2 evaluations" in fleet.output


# --- new devices, lost devices, boards -------------------------------------------------------------------------------


def test_new_devices_adapt_the_finished_model(coordinator, tmp_path):
    coordinator.create(NAME, **{**SETTINGS, "rounds": 2, "cohort": DEVICES, "local_steps": 2})
    plan = Plan(NAME, DEVICES, new=2, budgets=BUDGETS)
    seen = []
    result = run_fleet(
        coordinator.url, plan, processes=1, state_dir=tmp_path / "fleet", quiet=True, on_step=seen.append
    )
    assert (result.hosted, result.adapted) == (DEVICES + 2, 2)
    assert sorted(each.index for each in seen if each.kind is Kind.adapt) == [6, 7]
    reports = coordinator.get(f"/v1/federations/{NAME}/rounds/2/reports").json()
    adapted = {each["device"]: each["report"] for each in reports if each["kind"] == "adapt"}
    assert set(adapted) == {"device-6", "device-7"}
    assert all(report["personal"]["num_examples"] > 0 for report in adapted.values())
    assert all(report["state_bytes"] > 0 for report in adapted.values()), "each holds a model"
    cohorts = {name for record in coordinator.rounds(NAME) for name in record["cohort"]}
    assert not cohorts & set(adapted), "they take part in no round"


@pytest.mark.slow
def test_a_device_that_missed_its_deadline_comes_back(coordinator, tmp_path, monkeypatch):
    """Its update came too late, so it is thought away; when nothing else moves, the fleet says that it is there."""
    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0.5)
    coordinator.create(NAME, **{**SETTINGS, "rounds": 2, "local_steps": 1, "min_devices": 1, "deadline_seconds": 3.0})
    late = []

    def make_task(index, info):
        task = load_task("digits", "index=0,of=2", device=f"device-{index}", seed=0, batch_size=16)

        def loss(outputs, targets):
            at_work = outputs.requires_grad and coordinator.rounds(NAME)  # the check of the task comes before any round
            if at_work and not late:
                late.append(index)
                wait_until(lambda: coordinator.rounds(NAME)[0]["expired"], "the round to expire")
            return task.loss(outputs, targets)

        return type(task)(**{**vars(task), "loss": loss})

    plan = Plan(NAME, 1, make_task=make_task)
    result = run_fleet(coordinator.url, plan, engine="torch", processes=1, state_dir=tmp_path / "fleet", quiet=True)
    assert result.status is FederationStatus.finished
    records = coordinator.rounds(NAME)
    assert [(record["expired"], record["updates"]) for record in records] == [(1, 0), (0, 1)]


def test_simulated_boards_report_seconds_and_joules_from_counted_work(coordinator, tmp_path):
    coordinator.create(NAME, **{**SETTINGS, "rounds": 2})
    names = ("pizero2w", "pi5")
    plan = Plan(NAME, DEVICES, budgets=BUDGETS, boards=tuple(BOARDS[name] for name in names))
    run_fleet(coordinator.url, plan, processes=1, state_dir=tmp_path / "fleet", quiet=True)
    for record in coordinator.rounds(NAME):
        reports = coordinator.get(f"/v1/federations/{NAME}/rounds/{record['round']}/reports").json()
        trained = [each for each in reports if each["kind"] == "train"]
        seconds = joules = 0.0
        for each in trained:
            board = BOARDS[names[int(each["device"].rsplit("-", 1)[1]) // 3]]
            telemetry = each["report"]["telemetry"]
            computing = each["report"]["training_flops"] / board.flops_per_second
            assert telemetry["train"]["seconds"] == pytest.approx(computing)
            phases = (telemetry["download"], each["upload"])
            traffic = sum(phase["bytes_down"] + phase["bytes_up"] for phase in phases)
            assert telemetry["download"]["seconds"] + each["upload"]["seconds"] == pytest.approx(
                traffic / board.bytes_per_second
            )
            seconds += computing
            joules += computing * board.power.max_watts
        assert record["train"]["seconds"] == pytest.approx(seconds)
        assert record["train"]["joules_estimated"] == pytest.approx(joules)
        for phase in ("download", "train", "upload", "evaluation"):
            assert (record[phase]["joules_measured"], record[phase]["seconds_without_joules"]) == (0, 0), phase


@pytest.fixture
def memory(monkeypatch):
    """Give a folder in memory that no fleet of another test uses."""
    with tempfile.TemporaryDirectory(dir=fleet.MEMORY) as folder:
        monkeypatch.setattr(fleet, "MEMORY", Path(folder))
        yield Path(folder)


def test_state_in_memory_is_gone_afterwards(coordinator, tmp_path, monkeypatch, memory):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    coordinator.create(NAME, **{**SETTINGS, "rounds": 1, "local_steps": 1})
    during = []
    run_fleet(
        coordinator.url,
        PLAN,
        processes=1,
        in_memory=True,
        quiet=True,
        on_step=lambda stepped: during.append([each.name.startswith("sparrow-fleet-") for each in memory.iterdir()]),
    )
    assert during
    assert all(found == [True] for found in during)
    assert not list(memory.iterdir())
    assert not (tmp_path / "home").exists()


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_a_second_fleet_on_the_same_state_is_refused(coordinator, tmp_path):
    coordinator.create(NAME, **{**SETTINGS, "rounds": 1, "local_steps": 1})
    refused = []

    def second(stepped):
        if not refused:
            with pytest.raises(StateError, match=r"another process uses .*fleet; stop it") as error:
                run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True)
            refused.append(error)

    result = run_fleet(coordinator.url, PLAN, processes=1, state_dir=tmp_path / "fleet", quiet=True, on_step=second)
    assert refused
    assert result.status is FederationStatus.finished, "the first was not disturbed"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_device_without_its_data_ends_the_fleet_with_a_word(coordinator, command, processes):
    coordinator.create(NAME, **SETTINGS)
    process = command(coordinator.url, "--processes", processes, "--data", "partition=classes,classes_per_device=99")
    assert process.wait(60) == 2, "an option of the data that cannot be"
    output = command.output()
    assert output.startswith("sparrow fleet: "), output
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1


def test_a_device_that_fails_later_ends_the_fleet_with_its_error(coordinator, tmp_path):
    def make_task(index, info):
        if index == 4:
            raise DataError("device 4 has lost its disk")
        return load_task("digits", f"index={index},of=6", device=f"device-{index}", seed=0, batch_size=16)

    coordinator.create(NAME, **SETTINGS)
    with pytest.raises(DataError, match="device 4 has lost its disk"):
        run_fleet(
            coordinator.url,
            Plan(NAME, DEVICES, make_task=make_task),
            processes=1,
            state_dir=tmp_path / "fleet",
            quiet=True,
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"server": None}, "give either the coordinator's address or its application"),
        ({"server": "http://127.0.0.1:1", "app": object()}, "give either the coordinator's address or its application"),
    ],
)
def test_a_fleet_has_one_coordinator(arguments, said):
    with pytest.raises(BadArgument, match=said):
        run_fleet(arguments.pop("server"), PLAN, quiet=True, **arguments)


def test_a_device_that_is_to_judge_and_to_train_does_one_after_the_other(coordinator, command):
    """Both are given out at once, and two processes are free: its state folder bears one session."""
    coordinator.create(NAME, **SETTINGS | {"min_devices": 1, "cohort": 1, "evaluation_interval": 1})
    process = command(coordinator.url, "--devices", "1", "--processes", "2", "--memory")
    assert process.wait(60) == 0, command.output()
    records = coordinator.get(f"/v1/federations/{NAME}/rounds").json()
    assert [(record["updates"], record["evaluated_devices"]) for record in records] == [(1, 1)] * ROUNDS


def test_a_fleet_that_is_killed_takes_its_processes_along(coordinator, command):
    coordinator.create(NAME, **SETTINGS | {"rounds": 1000})
    process = command(
        coordinator.url, "--engine", "torch", "--processes", "2", "--state-dir", str(command.folder / "state")
    )
    family = psutil.Process(process.pid)
    workers = wait_until(lambda: len(family.children()) == 2 and family.children(), "two processes that host devices")
    wait_until(lambda: coordinator.get(f"/v1/federations/{NAME}").json()["round"] > 1, "the second round")
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    again = command(
        coordinator.url, "--engine", "torch", "--processes", "2", "--state-dir", str(command.folder / "state")
    )
    before = coordinator.get(f"/v1/federations/{NAME}").json()["round"]
    wait_until(lambda: coordinator.get(f"/v1/federations/{NAME}").json()["round"] > before + 1, "rounds going on")
    again.send_signal(signal.SIGINT)
    assert again.wait(30) == 130, command.output()


def test_where_the_coordinator_asks_for_tokens(tmp_path):
    guarded = Coordinator(
        tmp_path / "guarded",
        COORDINATOR_ADMIN_TOKEN="the-chief-s-secret",
        COORDINATOR_OBSERVER_TOKEN="an-observer-s-secret",
        COORDINATOR_ENROLMENT_TOKEN="the-enrolment-token",
    )
    guarded.start()
    try:
        publish(guarded.url, NAME, "digits", options=PublishOptions(admin_token="the-chief-s-secret"), **SETTINGS)
        with pytest.raises(Refused, match="needs an observer token"):
            run_fleet(
                guarded.url,
                PLAN,
                processes=1,
                in_memory=True,
                quiet=True,
                access=Access(enrolment_token="the-enrolment-token"),
            )
        result = run_fleet(
            guarded.url,
            PLAN,
            processes=1,
            in_memory=True,
            quiet=True,
            access=Access("the-enrolment-token", "an-observer-s-secret"),
        )
    finally:
        guarded.close()
    assert result.status is FederationStatus.finished
