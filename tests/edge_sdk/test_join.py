"""What the command line says; whole federations are in tests/system."""

import io
import json
import re
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_sdk import join, publish
from edge_sdk.budget.search import Choice
from edge_sdk.device.bar import Bar
from edge_sdk.device.embedding import DeviceProgress, ProgressReporter, Stop
from edge_sdk.device.exporting import Export
from edge_sdk.device.opening import choose_engine
from edge_sdk.device.result import TAKEN
from edge_sdk.device.session import FAILURES, FIRST_REST, LONGEST_REST, Outcome, Session, SessionOptions, Step
from edge_sdk.device.state import StateFolder, Totals, default_root
from edge_sdk.device.trainable import CannotTrain
from edge_sdk.device.transport import Transport
from edge_sdk.errors import BadArgument, FederationDeleted, NotAuthenticated, NotFound
from edge_sdk.tasks.compute import USUAL, Compute
from edge_sdk.tasks.digits import load
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.graphs import Graphs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import GraphError
from sparrow.protocol.evidence import CANDIDATES, GLOBAL
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import BudgetLimit, Moved
from sparrow.reading.errors import BadOption
from sparrow.simulation import in_process
from sparrow.transport import httpx

from .hostile import changed


@pytest.mark.parametrize("budget", ["0", "-1", "1.5", "nan", "much"])
def test_a_budget_outside_0_to_1_is_refused_before_anything_else(budget, capsys):
    with pytest.raises(SystemExit) as stop:
        join.main(["--server", "http://127.0.0.1:9", "--budget", budget])
    assert stop.value.code == 2
    assert "is not a number above 0 and up to 1" in capsys.readouterr().err


def test_watts_that_cannot_be_read_are_refused_with_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        join.main(["--server", "http://127.0.0.1:9", "--watts", "6"])
    assert stop.value.code == 2
    assert ":" in capsys.readouterr().err


def test_a_coordinator_that_never_answers_ends_in_advice(tmp_path, capsys):
    command = ["--server", "http://127.0.0.1:9", "--wait", "0", "--state-dir", str(tmp_path), "--quiet"]
    assert join.main(command) == Exit.UNREACHABLE
    assert "does not answer" in capsys.readouterr().err


def result(**given):
    """What a device did: nothing, but for what is given."""
    usual = {
        "name": "pi",
        "rounds": 0,
        "steps": 0,
        "stopped_round": None,
        "best_round": None,
        "global_share": 0.0,
        "adapted": False,
        "accuracy_before": None,
        "accuracy_alone": None,
        "accuracy_after": None,
        "training": Totals(),
        "evaluation": Totals(),
        "everything": Moved(),
        "export": None,
        "engine": "PyTorch",
    }
    return join.Result(**{**usual, **given})


def test_totals_never_blend_measured_and_estimated_joules():
    spent = Totals(seconds=4, joules_estimated=5, bytes_down=3000, bytes_up=7)
    moved = Moved(bytes_down=4000, bytes_up=8)
    text = join.report(
        result(rounds=3, stopped_round=2, best_round=1, accuracy_before=0.1, training=spent, everything=moved), "none"
    )
    assert "5.0 J estimated" in text
    assert "measured" not in text
    assert "10.0 % before, unknown after" in text
    assert "stopped early in round 2, keeps the model of round 1" in text
    assert "training 3,000 down and 7 up; everything 4,000 down and 8 up" in text


@pytest.mark.parametrize("taken", [GLOBAL, *CANDIDATES])
def test_the_summary_says_which_model_all_devices_have_chosen(taken):
    first = join.report(result(rounds=3, best_round=3, global_share=0.5, taken=taken), "none").splitlines()[0]
    assert TAKEN[taken] in first
    assert "chosen by all devices together" in first
    assert "keeps the model" not in first
    own = join.report(result(rounds=3, best_round=3, global_share=0.5), "none").splitlines()[0]
    assert "a mixture of 50 % personal model of round 3 and 50 % finished global model" in own


def test_the_summary_has_costs_temperature_and_advice():
    spent = Totals(seconds=40, joules_estimated=60, paused_seconds=12, throttled_seconds=3, celsius_peak=71.4)
    choice = Choice(0.4, 3.0, 2.0, 1, 1, 0, True, BudgetLimit.deadline, ("budget 0.4: a round takes 3 s",), ("rest",))
    done = result(rounds=3, accuracy_before=0.1, accuracy_after=0.4, training=spent, budget=0.4, choice=choice)
    text = join.report(done, "none")
    assert "energy per update          20.00 J estimated" in text
    assert "energy per point           2.00 J estimated" in text
    assert "at most 71 °C, throttled for 3 s, paused for 12 s" in text
    assert "budget 0.4: a round takes 3 s\n                             rest" in text


def test_the_summary_counts_one_and_leaves_a_comparison_of_alike_outputs_out():
    export = Export(Path("a.onnx"), 5, 5, (), 1, 0.0, 0.1, "ONNX Runtime")
    text = join.report(result(rounds=1, steps=1, export=export), "none")
    assert text.splitlines()[0] == "pi: 1 round, 1 local step"
    assert text.endswith("a.onnx: 5 bytes (dense), 0.10 ms a sample (p50)")
    differs = join.report(result(export=replace(export, max_difference=2e-6)), "none")
    assert differs.endswith("largest difference from ONNX Runtime 2.0e-06 on 1 sample")
    torch = join.report(result(export=replace(export, engine="PyTorch", samples=2)), "none")
    assert torch.endswith("largest difference from PyTorch 0.0e+00 on 2 samples")


def test_what_is_not_known_is_said_to_be_unknown():
    text = join.report(result(), "none")
    assert "energy per update          unknown" in text
    assert "no temperature known, throttling unknown, paused for 0 s" in text
    assert "budget                     1, as given" in text


DIGITS = load_builtin("digits").manifest
UNTRAINED = Manifest.model_validate({**DIGITS.model_dump(), "step_sha256": None, "evaluation_sha256": None})


def engine_of(asked="auto", *, method="fedspu", manifest=DIGITS, compute=USUAL, model=True):
    task = replace(load("index=0,of=20", device="pi", seed=0, batch_size=16), compute=compute)
    task = task if model else replace(task, model=None, loss=None)
    return choose_engine(asked, task, manifest, method)


def test_onnx_runtime_trains_where_federation_and_method_allow_it_and_no_gpu_is_there():
    assert engine_of() == engine_of("onnx", compute=Compute("cuda")) == engine_of(model=False) == "onnx"
    assert engine_of(compute=Compute("cuda"), model=False) == "onnx", "what has no model PyTorch cannot train"
    assert engine_of(compute=Compute("cuda")) == engine_of(compute=Compute(bfloat16=True)) == "torch"
    assert engine_of("torch") == engine_of(method="pfedgate") == engine_of(manifest=UNTRAINED) == "torch"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"method": "pfedgate"}, "pfedgate needs PyTorch to train"),
        ({"manifest": UNTRAINED}, "the model was published without a training step"),
    ],
)
def test_where_pytorch_is_needed_what_is_missing_is_said(monkeypatch, given, why):
    with pytest.raises(CannotTrain, match=f"{why}: join with --engine torch"):
        engine_of("onnx", **given)
    with pytest.raises(BadArgument, match=f"model, because {why}"):
        engine_of(model=False, **given)
    with pytest.raises(BadArgument, match="--engine onnx"):
        engine_of("torch", model=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CannotTrain, match=f"{why}.*PyTorch.*pip install"):
        engine_of(**given)


def test_a_device_without_onnx_runtime_trains_with_pytorch(monkeypatch):
    monkeypatch.setattr("edge_sdk.device.opening.find_spec", lambda name: None)
    assert engine_of() == "torch"
    with pytest.raises(CannotTrain, match=r"\bonnx\b.*--engine torch"):
        engine_of("onnx")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "none.toml"], "give --policy a TOML file, auto or none"),
        (["--policy", "none", "--limit", "pause=70"], "pause: there is no such setting; there are on_mains"),
        (["--policy", "none", "--limit", "hours=night"], "is not a time of day; give hours such as 22:00-07:00"),
    ],
)
def test_a_policy_that_means_nothing_is_refused_before_anything_else(more, said, capsys):
    assert join.main(["--server", "http://127.0.0.1:9", "--wait", "0", *more]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_a_setting_that_is_none_names_the_option(capsys):
    assert publish.main(["--server", "http://127.0.0.1:9", "x", "learning_rate=-1"]) == Exit.USAGE
    assert "learning_rate: -1" in capsys.readouterr().err


def test_a_name_that_no_device_can_have_is_refused_before_anything_is_made(tmp_path, capsys):
    state = tmp_path / "state"
    command = ["--server", "http://127.0.0.1:9", "--device-name", "pi kitchen", "--state-dir", str(state)]
    assert join.main(command) == Exit.USAGE
    assert "--device-name" in capsys.readouterr().err
    assert not state.exists()


def test_an_export_that_cannot_be_written_is_refused_before_the_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "model.onnx"
    assert join.main(["--server", "http://127.0.0.1:9", "--export", str(target), "--wait", "0"]) == Exit.USAGE
    assert "give another --export" in capsys.readouterr().err


def test_a_state_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    state = tmp_path / "file" / "state"
    assert join.main(["--server", "http://127.0.0.1:9", "--state-dir", str(state), "--wait", "0"]) == Exit.FAILED
    assert "give another --state-dir" in capsys.readouterr().err


def test_quiet_hides_the_bar_and_nothing_that_needs_attention(capsys):
    shown = Bar(quiet=True)
    tell = ProgressReporter(shown.show, quiet=True)
    tell.phase("train")
    tell.unreachable("http://pi:8000", "connection refused", 2.0)
    tell.connected_again()
    assert capsys.readouterr().err == ("http://pi:8000 does not answer (connection refused); trying again in 2.0 s\n")
    loud = ProgressReporter(Bar(quiet=False).show)
    loud.connected_again()
    assert capsys.readouterr().err == "connected again\n"


def show(bar):
    """What a device does in two of three rounds."""
    bar.show(DeviceProgress("waiting", round=0, rounds=3))
    for number in (1, 2):
        for step in range(1, 5):
            bar.show(DeviceProgress("train", round=number, rounds=3, step=step, steps=4, loss=1 / step))
        bar.show(DeviceProgress("upload", round=number, rounds=3))
        bar.show(DeviceProgress("waiting", round=number, rounds=3))
    bar.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_progress_is_a_line_a_round(capsys, monkeypatch):
    show(Bar(quiet=False))
    assert capsys.readouterr().err == "round 1 of 3, loss 0.250\nround 2 of 3, loss 0.250\n"
    show(Bar(quiet=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    show(Bar(quiet=False))
    assert "\r" in terminal.getvalue()
    assert "round 1 of 3" not in terminal.getvalue()


def test_a_wrong_address_leaves_no_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert join.main(["--server", "http://127.0.0.1:9", "--wait", "0", "--device-name", "pi"]) == Exit.UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not answer" in line
    assert list(tmp_path.iterdir()) == []


def test_two_coordinators_have_folders_of_their_own():
    one, other = (default_root(f"http://{host}:8000", "f") for host in ("a", "b"))
    assert one != other
    assert one.parts[-3:] == ("sparrow", "a_8000", "f")
    assert default_root("http://a:8000/", "f") == one
    assert default_root("http://a:8000/lab", "f").parts[-2] == "a_8000_lab"


def test_settings_that_contradict_each_other_are_said_without_an_option(capsys):
    command = ["--server", "http://127.0.0.1:9", "x", "optimizer=adam", "momentum=0.9"]
    assert publish.main(command) == Exit.USAGE
    assert "momentum" in capsys.readouterr().err


def test_a_device_without_work_comes_again_at_the_moment_it_was_told(monkeypatch):
    """To the second: the coordinator spreads its fleet, and jitter of the devices' own would undo that."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    steps = [Step(Outcome.idle, pause_seconds=seconds) for seconds in (7.0, 31.0)] + [Step(Outcome.over)]
    session = SimpleNamespace(
        step=lambda wait: steps.pop(0), progress=SimpleNamespace(stopped_round=None), failed_rounds=0
    )
    join.run_session(session, SimpleNamespace(between=lambda paused: None), Stop(None), lambda: None)
    assert slept == [7.0, 31.0]


# --- a coordinator that is wrong, or hostile --------------------------------------------------------------------------


class Spoiling(httpx.BaseTransport):
    """Passes calls on, and spoils the answers whose path ends so while ``times`` is left."""

    def __init__(self, client):
        self.client, self.calls, self.waits = client, [], []
        self.end, self.spoil, self.times = "", lambda answer: answer, 0

    def handle_request(self, request):
        request.read()
        self.calls.append((request.method, request.url.path, request.content))
        request.headers["Accept"] = "application/json"  # so that a payload has an answer of its own to be spoilt
        spoilt = self.times and request.url.path.endswith(self.end)
        if request.method == "DELETE":  # the coordinator would let the device rest for a minute
            return httpx.Response(204)
        answer = self.client.send(request)
        if spoilt and answer.status_code == 200:
            self.times -= 1
            return self.spoil(answer)
        return answer


def problem(status, kind, detail="the payload holds values that are no numbers"):
    document = {"type": f"urn:sparrow:problem:{kind}", "title": kind, "status": status, "detail": detail}
    return httpx.Response(status, json=document, headers={"Content-Type": "application/problem+json"})


@pytest.fixture
def spoiling(tmp_path):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task="", tick_seconds=0.05))
    with in_process.running(app) as client:
        settings = {"rounds": 1, "cohort": 1, "min_devices": 1, "local_epochs": 1, "evaluation_interval": 0}
        publish.publish(in_process.ADDRESS, "f", "digits", client=client, method="fedavg", **settings)
        yield Spoiling(client)


@pytest.fixture
def session(spoiling, tmp_path):
    client = httpx.Client(base_url=in_process.ADDRESS, transport=spoiling)
    with closing(StateFolder(tmp_path / "state")) as folder:
        yield Session(
            Transport(client, sleep=spoiling.waits.append),
            folder,
            federation="f",
            name="pi",
            make_task=lambda info, manifest: load("index=0,of=20", device="pi", seed=0, batch_size=16),
            options=SessionOptions(engine="torch"),
        )


def test_a_forgotten_federation_is_named_if_the_data_fit_it(spoiling, tmp_path):
    client = httpx.Client(base_url=in_process.ADDRESS, transport=spoiling)
    for data, fits in (("index=0,of=20", True), (str(tmp_path / "other.csv"), False)):
        with pytest.raises(NotFound) as refused:
            join.join(in_process.ADDRESS, data=data, client=client, state_dir=tmp_path / "none", quiet=True)
        assert ("--federation f" in str(refused.value)) is fits
        assert not (tmp_path / "none").exists()


def test_data_for_another_federation_than_default_name_it_and_report_nothing(spoiling, tmp_path):
    client = httpx.Client(base_url=in_process.ADDRESS, transport=spoiling)
    table = tmp_path / "north.csv"
    table.write_text("heat,label\n" + "".join(f"{row},{'ab'[row % 2]}\n" for row in range(60)))
    publish.publish(in_process.ADDRESS, "default", "digits", client=spoiling.client, method="fedavg", min_devices=2)
    where = {"name": "pi", "client": client, "state_dir": tmp_path / "pi", "quiet": True}
    with pytest.raises(BadOption, match=r"north\.csv") as alone:
        join.join(in_process.ADDRESS, data=str(table), **where)
    assert "--federation" not in str(alone.value), "no federation takes it"
    task = publish.load_to_publish(publish.OWN, str(table), {}, device="publisher")
    said = []
    options = publish.PublishOptions(progress=said.append)
    publish.publish(in_process.ADDRESS, "heat", task, client=spoiling.client, method="fedavg", options=options)
    assert re.fullmatch(r"sending [1-9]\d* kB", said[-1])
    with pytest.raises(BadArgument, match=r"data fit --federation heat, and not the federation 'default' \("):
        join.join(in_process.ADDRESS, data=str(table), **where)
    assert not (tmp_path / "pi").exists()
    assert spoiling.client.get("/v1/federations/default/devices").json() == []
    with pytest.raises(BadOption, match="unknown entry"):
        join.join(in_process.ADDRESS, data=str(table), federation="default", **where)
    assert [each["name"] for each in spoiling.client.get("/v1/federations/default/devices").json()] == ["pi"]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_device_says_where_its_state_is_and_how_many_devices_are_missing(spoiling, tmp_path, quiet, capsys):
    client = httpx.Client(base_url=in_process.ADDRESS, transport=spoiling)
    publish.publish(in_process.ADDRESS, "three", "digits", client=spoiling.client, method="fedavg", min_devices=3)

    def enrolled():
        return bool(spoiling.client.get("/v1/federations/three/devices").json())

    where = {"federation": "three", "data": "index=0,of=20", "state_dir": tmp_path / "pi", "name": "pi"}
    assert join.join(in_process.ADDRESS, client=client, stop=enrolled, quiet=quiet, **where).interrupted
    said = capsys.readouterr().err
    assert said.count(f"pi keeps its state in {tmp_path / 'pi'}") == (not quiet)
    assert said.count("waiting for 2 more devices (min_devices=3)") == (not quiet)


def fetched(spoiling):
    """The graphs that were downloaded, in turn."""
    return [call[1].rpartition("/")[2] for call in spoiling.calls if call[1].endswith(".onnx")]


def test_the_training_step_is_downloaded_once_and_again_where_it_was_damaged(spoiling, session):
    assert not fetched(spoiling), "where nothing asks for it, none"
    digits = load_builtin("digits").graphs
    assert session.graphs == session.graphs == Graphs(digits["step"], digits["evaluation"])
    assert fetched(spoiling) == ["step.onnx", "evaluation.onnx"]
    del session.graphs  # as after a restart
    (session.folder.path / "step.onnx").write_bytes(digits["evaluation"])
    assert session.graphs.step == digits["step"]
    assert fetched(spoiling)[2:] == ["step.onnx"]


def test_a_training_step_that_is_not_the_manifests_is_neither_used_nor_kept(spoiling, session):
    spoiling.end, spoiling.times = "step.onnx", 1
    spoiling.spoil = lambda answer: httpx.Response(200, content=load_builtin("mnist").graphs["step"])
    with pytest.raises(GraphError, match="the downloaded step has the SHA-256 "):
        session.graphs  # noqa: B018
    assert session.folder.cached("step.onnx") is None
    assert session.graphs is not None


@pytest.mark.parametrize("named", [False, True])
def test_a_training_step_that_was_not_published_or_must_not_be_run(spoiling, session, named):
    """A coordinator whose manifest names the two graphs the wrong way round."""
    graphs = session.manifest.graphs
    swapped = {"step_sha256": graphs["evaluation"], "evaluation_sha256": graphs["step"]}
    gone = {"step_sha256": None, "evaluation_sha256": None}
    session.manifest = Manifest.model_validate({**session.manifest.model_dump(), **(swapped if named else gone)})
    if not named:
        assert session.graphs is None
        return
    for name, other in (("step", "evaluation"), ("evaluation", "step")):
        session.folder.cache(f"{name}.onnx", load_builtin("digits").graphs[other])
    with pytest.raises(GraphError, match=r"step.*'error'"):
        session.graphs  # noqa: B018


WRONG = {
    "a payload that cannot be sent": (
        "payload",
        lambda answer: problem(422, "BundleError"),
        "no numbers",
        "coordinator-fault",
    ),
    "a payload that is refused": (
        "payload",
        lambda answer: problem(400, "Whatever"),
        "no numbers",
        "coordinator-fault",
    ),
    "a payload that is not there": (
        "payload",
        lambda answer: problem(404, "NotFound"),
        "no numbers",
        "coordinator-fault",
    ),
    "a payload that is damaged": (
        "payload",
        lambda answer: httpx.Response(200, content=b"x"),
        "did not match",
        "bad-payload/damaged",
    ),
    "a payload that is no bundle": (
        "assignment",
        changed(payload={"bytes": 2, "sha256": "0" * 64}),
        "did not match its digest",
        "bad-payload/damaged",
    ),
    "a payload of petabytes": (
        "assignment",
        changed(payload={"bytes": 2**52, "sha256": "0" * 64}),
        "a payload of 4,503,599,627,370,496 bytes is announced",
        "bad-payload/size",
    ),
    "a payload that the method does not expect": ("assignment", changed(payload=None), "payload", "bad-payload"),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", WRONG)
def test_no_fault_of_the_coordinator_ends_a_device(spoiling, session, name):
    spoiling.end, spoiling.spoil, why, failure = WRONG[name]
    faults = FAILURES + 2
    rests = []
    for _ in range(faults):
        spoiling.times, before = 3, len(spoiling.calls)  # a damaged download is tried so often
        while not (step := session.step(wait_seconds=5)).failed:
            assert step.outcome is Outcome.idle
        assert why in step.failed
        assert step.outcome is Outcome.idle
        rests.append(step.pause_seconds)
        made = spoiling.calls[before:]
        assert "DELETE" in [method for method, *_ in made], "handed back, with the reason"
        assert json.loads(next(body for method, _, body in made if method == "DELETE")) == {"reason": failure}
        if "petabytes" in name:
            assert not any(path.endswith("/payload") for _, path, _ in made), "not a byte is asked for"
    assert rests == [FIRST_REST * 2**number for number in range(faults)]
    spoiling.times = 0
    while (step := session.step(wait_seconds=5)).outcome is Outcome.idle:
        assert step.failed is None
    assert session.progress.rounds == 1


@pytest.mark.integration
def test_rests_have_an_end_and_what_concerns_the_device_itself_ends_it(spoiling, session):
    spoiling.end, spoiling.spoil = "payload", lambda answer: problem(422, "BundleError")
    rests = []
    while len(rests) < 12:
        spoiling.times = 1
        step = session.step(wait_seconds=5)
        rests += [step.pause_seconds] if step.failed else []
    assert rests[-1] == LONGEST_REST == max(rests)
    for kind, status, error in (
        ("NotAuthenticated", 401, NotAuthenticated),
        ("FederationDeleted", 410, FederationDeleted),
    ):
        spoiling.times, spoiling.spoil = 1, lambda answer, kind=kind, status=status: problem(status, kind)
        with pytest.raises(error):
            session.step(wait_seconds=5)


WEIRD = {
    "round": 10**400,
    "deadline_seconds": 1e308,
    "assignment_id": "../../x?y#z\r\nHost: a",
    "payload": {"bytes": -1, "sha256": "0" * 64},
    "model_sha256": "x" * 100_000,
    "work": {"job": "j", "round": -1, "device": "../x", "ratio": 2},
    "settings": {"local_epochs": 10**9},
    "plan": {"p": {"of": "objects"}},
}


@pytest.mark.integration
@pytest.mark.parametrize("field", WEIRD)
def test_work_that_no_coordinator_gives_is_asked_for_again(spoiling, session, field):
    spoiling.end, spoiling.spoil, spoiling.times = "assignment", changed(**{field: WEIRD[field]}), 2
    while session.step(wait_seconds=5).outcome is Outcome.idle:
        pass
    assert session.progress.rounds == 1
    assert spoiling.times == 0
    assert len(spoiling.waits) == 2
