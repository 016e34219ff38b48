"""``sparrow track``: what is written is what the records say, each round once, wherever it was interrupted."""

from __future__ import annotations

import json
import sys
import time

import pytest

from sparrow.command_line.exits import Exit
from sparrow.coordinator.errors import Finished
from sparrow.coordinator.settings import Settings
from sparrow.protocol.messages import ChangeDevice, Conditions, Evaluation, Phase, Receipt, RoundRecord, UploadCost
from sparrow.track import curves, follow

from ..coordinator.api.test_contract import ADMIN, DIGITS, OBSERVER, TOKENS, ask, bearer, enrol, put, serving
from ..coordinator.fakes import DIGITS as MANIFEST
from ..coordinator.fakes import LocalCoordinator
from ..disks import fill, small_disk

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

__all__ = ["small_disk"]  # a fixture

JUDGED = Receipt(
    personal=Evaluation(num_examples=4, loss=0.5, accuracy=0.75),
    global_model=Evaluation(num_examples=4, loss=0.9, accuracy=0.5),
)


# --- when a record is complete ---------------------------------------------------------------------------------------


class Direct:
    """A transport to a coordinator's domain in this process."""

    def __init__(self, coordinator):
        self._coordinator = coordinator

    def federation(self, name):
        return self._coordinator.info(name)

    def open_work(self, name, wait_seconds, etag):
        return self._coordinator.open_assignments.list(name), ""

    def rounds(self, name):
        return self._coordinator.records.rounds(name)


class Slowly:
    """Devices that do one thing for each look that is taken, the last judgement of a round long after the next began.

    What an upload cost a device tells when it asks again, which may be after its round has closed."""

    def __init__(self, coordinator, devices, train):
        self.coordinator, self.train = coordinator, train
        self.devices, self.late, self.costs = list(devices), [], {}

    def __call__(self, seconds):
        self.coordinator.rounds.advance()
        for device in self.devices:
            if device.id in self.costs:
                self.coordinator.costs.note(device.id, self.costs.pop(device.id))
            try:
                assignment = device.ask()
            except Finished:
                continue
            if assignment is None:
                continue
            if assignment.kind == "evaluate" and assignment.assignment_id not in self.late:
                self.late.append(assignment.assignment_id)  # the next time
                continue
            if assignment.kind == "evaluate":
                device.send(assignment, JUDGED.model_dump_json().encode())
                return
            device.send(assignment, self.train(MANIFEST, assignment))
            upload = Phase(seconds=1, bytes_up=1000, joules=2, quality="measured")
            self.costs[device.id] = UploadCost(assignment_id=assignment.assignment_id, upload=upload)
            return


@pytest.fixture
def coordinator(tmp_path, clock):
    made = LocalCoordinator(tmp_path, clock)
    made.create(rounds=3, cohort=2, evaluation_interval=1)
    yield made
    made.store.close()


@pytest.mark.parametrize("interval", [0, 1])
def test_each_round_is_told_once_and_as_it_stays(coordinator, train, interval):
    coordinator.create("g", rounds=3, cohort=2, evaluation_interval=interval)
    play = Slowly(coordinator, coordinator.enrol("one", "two", federation="g"), train)
    told = list(follow(Direct(coordinator), "g", sleep=play))
    assert told == coordinator.records.rounds("g")
    assert [record.round for record in told] == [1, 2, 3]
    assert [record.evaluated_devices for record in told] == [2 * interval, 2 * interval, 2]
    assert all(record.upload.joules_measured == 4 for record in told)


def test_what_was_written_is_not_told_again(coordinator, train):
    play = Slowly(coordinator, coordinator.enrol("one", "two"), train)
    assert [record.round for record in follow(Direct(coordinator), "f", {1, 2}, sleep=play)] == [3]


def test_a_round_that_none_follows_yet_may_still_be_judged(coordinator, train):
    devices = coordinator.enrol("one", "two")
    coordinator.rounds.advance()
    for device in devices:
        assignment = device.ask()
        device.send(assignment, train(MANIFEST, assignment))
        coordinator.devices.change(device.id, ChangeDevice(conditions=Conditions(available=False)))
    coordinator.rounds.advance()
    assert [record.status for record in coordinator.records.rounds("f")] == ["closed"]
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        next(follow(Direct(coordinator), "f", sleep=nap))


def test_curves_have_what_was_measured_and_no_more(coordinator, train):
    record = next(follow(Direct(coordinator), "f", sleep=Slowly(coordinator, coordinator.enrol("one", "two"), train)))
    found = curves(record)
    assert (found["accuracy/personal"], found["accuracy/global"], found["loss/train"]) == (0.75, 0.5, 0.5)
    assert (found["bytes/up"], found["joules/measured"], found["seconds/upload"]) == (2000, 4, 2)
    assert (found["devices/asked"], found["devices/updates"]) == (2, 2)
    assert not {"joules/estimated", "privacy/epsilon"} & set(found)


# --- the command -----------------------------------------------------------------------------------------------------


class Lab:
    """A coordinator on a real port with a federation of one device, which takes part when it is told to."""

    def __init__(self, client, train):
        self.client, self.train = client, train
        self.url = str(client.base_url).rstrip("/")
        self.look = bearer(OBSERVER)
        settings = {"rounds": 3, "min_devices": 1, "cohort": 1, "evaluation_interval": 2}
        body = {"name": "lab", "task": "digits", "settings": settings}
        client.post("/v1/federations", json=body, headers=bearer(ADMIN)).raise_for_status()
        self.device = enrol(client, "one", "lab", token=ADMIN)[1]

    def work(self, times):
        for _ in range(times):
            assignment = ask(self.client, self.device, federation="lab")
            if assignment.kind == "train":
                sent = put(self.client, self.device, assignment, self.train(DIGITS.manifest, assignment))
            else:
                sent = put(self.client, self.device, assignment, JUDGED.model_dump_json(), "application/json")
            assert sent.status_code == 201, sent.text

    def records(self):
        answer = self.client.get("/v1/federations/lab/rounds", headers=self.look).raise_for_status()
        return [RoundRecord.model_validate(record) for record in answer.json()]


@pytest.fixture
def lab(tmp_path, train, monkeypatch):
    monkeypatch.setenv("SPARROW_OBSERVER_TOKEN", OBSERVER)
    with serving(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.05, **TOKENS)) as client:
        yield Lab(client, train)


def scalars(folder):
    """Tag -> (step, value) of each point, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (run,) = folder.iterdir()
    found = accumulator.EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected(records):
    found = {}
    for record in records:
        for name, value in curves(record).items():
            found.setdefault(name, []).append((record.round, pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_live_interrupted_and_on(sparrow, lab, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    words = ["track", "lab", "--server", lab.url, "--tensorboard", tmp_path / "board"]
    nap = time.sleep
    steps = iter([1, 2, 0, 0, 0])  # a round; its successor, judged, and so on

    def sleep(seconds):
        if seconds != 5:  # somebody else's
            return nap(seconds)
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        lab.work(step)
        return nap(0.2)

    monkeypatch.setattr(time, "sleep", sleep)
    code, _, err = sparrow(*words)
    assert (code, err.splitlines()[-1]) == (Exit.INTERRUPTED, "sparrow track: interrupted")
    first = scalars(tmp_path / "board")["devices/updates"]
    assert first in ([(1, 1.0)], [(1, 1.0), (2, 1.0)])

    monkeypatch.setattr(time, "sleep", nap)
    lab.work(2)
    words += ["--every", "0.1"]
    code, out, err = sparrow(*words)
    assert (code, out) == (Exit.DONE, "")
    assert f"tensorboard --logdir {tmp_path / 'board'}" in err
    found = scalars(tmp_path / "board")
    assert found == expected(lab.records())
    assert [step for step, _ in found["accuracy/personal"]] == [2, 3]
    assert sparrow(*words)[0] == Exit.DONE
    assert scalars(tmp_path / "board") == found


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning", "ignore::ResourceWarning")
def test_mlflow(sparrow, lab, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    lab.work(5)
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    words = ["track", "lab", "--server", lab.url, "--mlflow", uri, "--every", "0.1"]
    for _ in range(2):  # the second time there is nothing new
        assert sparrow(*words)[:2] == (Exit.DONE, "")
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("sparrow").experiment_id
        (run,) = client.search_runs([experiment])
        assert (run.info.run_name, run.info.status) == ("lab", "FINISHED")
        assert run.data.params.items() >= {"method": "fedspu", "task": "digits", "rounds": "3"}.items()
        history = {
            name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        assert history == expected(lab.records())


def test_json_is_for_everything_else(sparrow, lab):
    lab.work(5)
    code, out, err = sparrow("track", "lab", "--server", lab.url, "--json", "--every", "0.1")
    assert (code, err) == (Exit.DONE, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert found == [
        {"round": record.round, "closed_at": record.closed_at, **curves(record)} for record in lab.records()
    ]


def test_it_must_be_told_where_to(fails, lab):
    assert "--tensorboard DIR" in fails(Exit.USAGE, "track", "lab", "--server", lab.url)
    assert "--every 0.0" in fails(Exit.USAGE, "track", "lab", "--server", lab.url, "--json", "--every", "0")


@pytest.mark.parametrize(
    ("option", "lacks"),
    [("--tensorboard", "tensorboard.backend.event_processing.event_accumulator"), ("--mlflow", "mlflow")],
)
def test_what_is_not_installed_is_named(fails, lab, tmp_path, monkeypatch, option, lacks):
    monkeypatch.setitem(sys.modules, lacks, None)
    line = fails(Exit.CANNOT, "track", "lab", "--server", lab.url, option, tmp_path / "there")
    assert "pip install 'sparrow-fl[tracking]'" in line


def test_a_tracking_server_that_is_none_is_told_in_one_line(fails, lab, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "MLflow at http://127.0.0.1:9: " in fails(
        Exit.FAILED, "track", "lab", "--server", lab.url, "--mlflow", "http://127.0.0.1:9"
    )


def test_a_full_disk(fails, lab, small_disk, sparrow):
    pytest.importorskip("tensorboard")
    lab.work(5)
    words = ["track", "lab", "--server", lab.url, "--tensorboard", small_disk / "board", "--every", "0.1"]
    (small_disk / "board").mkdir()
    others = fill(small_disk)
    assert "free some space" in sparrow(*words)[2].splitlines()[-1]
    assert sparrow(*words)[0] == Exit.FULL
    others.unlink()
    assert sparrow(*words)[0] == Exit.DONE
    assert scalars(small_disk / "board") == expected(lab.records())
