"""Predictions of what training takes: memory and work as they are counted, never as a clock or a heap has it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import profiler
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk import profile
from edge_sdk.arguments import MIB
from edge_sdk.budget.prediction import (
    MODELS_HELD,
    Memory,
    Predictor,
    predict_evaluation,
    predict_memory,
    predict_training,
)
from edge_sdk.budget.preparation import DoesNotFit, Preparation
from edge_sdk.join import JoinOptions, join
from edge_sdk.methods import load_method
from edge_sdk.publish import publish
from edge_sdk.tasks.loading import EVALUATION_BATCH
from edge_sdk.training.rehearsal import HEAP
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.flops import training_flops
from sparrow.protocol.messages import BudgetLimit
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models


def rehearse(task, batch, engine="torch", **settings):
    settings = FederationSettings(method="fedspu", batch_size=batch, **settings)
    loaded, manifest, make = profile.Subject(task, settings, engine=engine).load()
    return make(loaded, manifest, settings), manifest


def counted_peak(work):
    """The largest of torch's running sums of bytes while ``work`` is done, the second time."""
    work()
    with profiler.profile(profile_memory=True) as watched:
        work()
    held = peak = 0
    for event in watched.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("task", "batch", "budget", "settings"),
    [
        ("digits", 32, 1.0, {}),
        ("mnist:leaf", 32, 0.2, {"momentum": 0.9}),
        ("mnist:leaf", 32, 1.0, {}),
        ("cifar10", 128, 0.6, {}),
        ("cifar10:pfedgate", 32, 0.2, {"optimizer": "adam"}),
        ("har", 128, 0.4, {}),
    ],
)
def test_memory_in_use_is_predicted_from_a_handful_of_samples(task, batch, budget, settings):
    rehearsal, _ = rehearse(task, batch, **settings)
    effort = load_method("fedspu").at_budget(rehearsal, budget)
    counted = counted_peak(lambda: effort.train(2))
    assert predict_training(rehearsal, effort) / HEAP == pytest.approx(counted, rel=0.05)


def test_so_is_that_of_an_evaluation():
    rehearsal, _ = rehearse("mnist", 16)
    assert rehearsal.held_out == EVALUATION_BATCH
    inputs, targets = next(iter(rehearsal.task.held_out))
    rehearsal.first_batch = (inputs, targets)
    counted = counted_peak(lambda: rehearsal.evaluate(EVALUATION_BATCH))
    assert predict_evaluation(rehearsal) / HEAP == pytest.approx(counted, rel=0.05)


def test_a_round_takes_the_larger_of_training_and_evaluation_and_two_models():
    rehearsal, _ = rehearse("digits", 8)
    found = predict_memory(rehearsal, load_method("fedspu").at_budget(rehearsal, 0.5), lambda: 7)
    assert (found.held, found.models) == (7, MODELS_HELD * rehearsal.model_bytes)
    assert Memory(7, 3 * MIB, MIB, 10).total == 3 * MIB + 17
    assert Memory(7, MIB, 2 * MIB, 10).total == Memory(7, MIB, 2 * MIB, 10).without_training == 2 * MIB + 17


def test_both_engines_choose_by_the_same_rules(engine):
    settings = {"local_steps": 10, "batch_size": 8, "early_stopping": "off", "personal_model": "last"}
    settings = FederationSettings(method="fedspu", deadline_seconds=2.93, **settings)
    task, manifest, make = profile.Subject(TASK, settings, engine=engine).load()

    def rehearse(*given, **how):  # on a device of a gigaflop per second
        made = make(*given, **how)
        made.train = lambda steps, mask=None, samples=None, compute=None: [made.flops(8, mask) / 1e9] * (steps - 1)
        return made

    prepare = Preparation(None, memory_limit=2**40, clock=lambda: 0.0)
    found = prepare(task, manifest, SimpleNamespace(method="fedspu", settings=settings), rehearse)
    assert (found.budget, found.limited_by) == (0.6, BudgetLimit.deadline)


def test_onnx_runtimes_memory_follows_from_what_few_samples_take():
    def predicted(batch, budget):
        rehearsal, _ = rehearse(TASK, batch, engine="onnx")
        return predict_training(rehearsal, load_method("fedspu").at_budget(rehearsal, budget))

    whole, part, more = predicted(64, 1.0), predicted(64, 0.2), predicted(128, 1.0)
    assert part < 0.8 * whole < whole < 0.8 * more
    settings = FederationSettings(method="fedspu", batch_size=64)
    (row,) = profile.profile(profile.Subject(TASK, settings, engine="onnx"), (1.0,), steps=2).rows
    assert row.measured.flops is None
    assert 0.7 < row.memory.training / row.measured.above < 1.4


def test_a_rehearsal_leaves_the_model_and_chance_as_they_were():
    subject = profile.Subject("cifar10", FederationSettings(), engine="torch")
    task, manifest, make = subject.load()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    state = torch.get_rng_state()
    assert len(make(task, manifest, subject.settings).train(3)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_flops_of_the_whole_model_are_those_that_torch_counts():
    rehearsal, manifest = rehearse("mnist:leaf", 16)
    rehearsal.train(1)  # the first ever tries the memory format
    with FlopCounterMode(display=False) as counter:
        rehearsal.train(1)
    assert training_flops(manifest, 16) == counter.get_total_flops()


class Counting:
    """A clock that goes on by a second whenever it is read, so that seconds count work."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_profile_shows_the_prediction_that_join_chooses_by(monkeypatch):
    monkeypatch.setattr("edge_sdk.budget.prediction.held", lambda device: 100 * MIB)
    monkeypatch.setattr(profile, "_measured", lambda *_: None)
    settings = {"local_steps": 5, "batch_size": 8, "early_stopping": "off", "deadline_seconds": 600_000}
    subject = profile.Subject("mnist", FederationSettings(method="fedspu", **settings), engine="torch")
    limit = 130 * MIB
    shown = profile.profile(subject, (0.2, 0.5, 1.0), limit=limit, clock=Counting())
    task, manifest, _ = subject.load()
    info = SimpleNamespace(method="fedspu", settings=subject.settings)
    joined = Preparation(None, memory_limit=limit, clock=Counting())(task, manifest, info)
    for row in shown.rows:
        used = joined.controller.predictor.at(row.predicted.budget)
        assert row.predicted == used
        assert used.seconds > used.fixed_seconds
        assert used.memory.total > 100 * MIB
    assert joined.choice.seconds == joined.controller.predictor.at(joined.budget).seconds
    assert shown.choice.budget == joined.budget == 1.0


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    status = profile.main(["--task", "mnist", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Times no longer than it must, since seconds do not matter here."""
    monkeypatch.setattr("edge_sdk.budget.prediction.TIMED_SECONDS", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_predicts_and_measures(capsys):
    status, out, _ = run(capsys, "--budget", "0.4", "--steps", "2", "batch_size=8", "--json")
    assert status == 0
    found = json.loads(out)
    assert (found["task"], found["method"], found["samples"], found["device"]) == ("mnist", "fedspu", 8, "cpu")
    assert found["largest_budget"] == 0.4
    (row,) = found["budgets"]
    manifest = profile.Subject("mnist", FederationSettings()).load()[1]
    mask = load_method("fedspu").sample_mask(manifest, 0.4)
    assert row["predicted"]["flops"] == training_flops(manifest, 8, weight_gradients=mask)
    assert row["needed"] > row["predicted"]["base"] + row["predicted"]["above"]
    assert row["measured"]["base"] > 50 * MIB
    assert row["measured"]["seconds"] > 0


def test_what_does_not_fit_is_said_and_not_measured(capsys):
    status, out, _ = run(capsys, "--memory-limit", "1")
    assert status == 0
    assert out.count("does not fit") == len(profile.BUDGETS)
    assert "1 MiB" in out


def test_a_method_that_trains_the_whole_model_says_so(capsys):
    status, out, _ = run(capsys, "method=fedavg", "--memory-limit", "1")
    assert status == 0
    assert "fedavg trains the whole model" in out
    assert "Try a smaller one" not in out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--task", "mnits"], Exit.NOT_FOUND, "unknown task 'mnits' (did you mean mnist?)"),
        (["--task", "mnist:large"], Exit.NOT_FOUND, "large"),
        (["method=fedsup"], Exit.NOT_FOUND, "fedsup"),
        (["method=fedem"], Exit.USAGE, "cannot be profiled before its federation exists"),
        (["method=pfedgate"], Exit.USAGE, "cannot be profiled before its federation exists"),
        (["--data", "nowhere.npz"], Exit.NOT_FOUND, "nowhere.npz"),
        (["batch_size=0"], Exit.USAGE, "batch_size: 0 is invalid; give a number of at least 1"),
        (["momentum=2"], Exit.USAGE, "momentum: 2 is invalid; give a number below 1"),
    ],
)
def test_what_cannot_be_is_said(arguments, status, said, capsys):
    got, out, error = run(capsys, *arguments)
    assert got == status
    assert error.startswith("sparrow profile: ")
    assert said in error
    assert out == ""


@pytest.mark.parametrize("arguments", [["--budget", "1.5"], ["--steps", "0"], ["--memory-limit", "much"]])
def test_what_cannot_be_read_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run(capsys, *arguments)
    assert stop.value.code == 2


# --- joining ---------------------------------------------------------------------------------------------------------


SETTINGS = {
    "rounds": 1,
    "min_devices": 1,
    "cohort": 1,
    "local_steps": 1,
    "optimizer": "adam",
    "batch_size": 8,
    "evaluation_interval": 0,
    "early_stopping": "off",
}


TASK = "mnist:leaf"


@pytest.fixture(scope="module", params=["onnx", "torch"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def large():
    """8 MiB of weights, of which a budget trains some; judged in batches as small as it is trained in."""
    task, manifest, _ = profile.Subject(TASK, FederationSettings(**SETTINGS), engine="torch").load()
    return replace(task, validation=task.train), manifest


@pytest.fixture
def needs(large, engine, monkeypatch):
    """Bytes that rounds at a budget need, or that evaluating the model takes alone, where a process holds 100 MiB: what
    this one does changes by more than a budget takes, by what other tests leave and a first session brings."""
    for module in ("preparation", "prediction"):
        monkeypatch.setattr(f"edge_sdk.budget.{module}.held", lambda device: 100 * MIB)
    settings = FederationSettings(**SETTINGS)
    rehearse = profile.Subject(TASK, settings, engine=engine).load()[2]
    predictor = Predictor(*large, settings, timed=False, rehearse=rehearse)

    def of(budget=None):
        found = predictor.at(budget or 1.0).memory
        return found.without_training if budget is None else found.total

    return of


@pytest.fixture(scope="module")
def client(tmp_path_factory, engine):
    """A coordinator with a federation that one device has not joined yet, for each engine."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("coordinator"), default_task="", tick_seconds=0.05)
    with inprocess.running(create_app(settings)) as client:
        publish("", "f", TASK, client=client, **SETTINGS)
        yield client
        client.get("/readyz")


def take_part(client, large, folder, **how):
    name, options = how.pop("name", "pi"), JoinOptions(**how)
    return join("", large[0], federation="f", name=name, state_dir=folder, options=options, client=client, quiet=True)


def test_a_budget_that_does_not_fit_is_refused_before_enrolling_and_one_that_does_is_named(
    client, large, needs, engine, tmp_path
):
    limit = (needs(0.2) + needs(1.0)) // 2
    said = _refused(client, large, tmp_path / "pi", engine=engine, memory_limit=limit, budget=1.0)
    assert said.startswith("a budget of 1 needs ")
    assert f"{limit / MIB:,.0f} are available; a budget of 0." in said
    assert " fits: give --budget 0." in said
    assert client.get("/v1/federations/f").json()["devices"] == 0
    named = float(said.rsplit(" ", 1)[1])
    assert 0.1 <= named < 1
    assert take_part(client, large, tmp_path / "pi", engine=engine, memory_limit=limit, budget=named).rounds == 1


def test_without_a_budget_a_device_takes_the_largest_that_fits(client, large, needs, engine, tmp_path):
    found = take_part(
        client, large, tmp_path / "auto", engine=engine, name="auto", memory_limit=(needs(0.2) + needs(1.0)) // 2
    )
    assert 0.2 <= found.budget < 1
    assert found.choice.limited_by is BudgetLimit.memory
    assert "memory" in str(found.choice)
    (device,) = [each for each in client.get("/v1/federations/f/devices").json() if each["name"] == "auto"]
    assert (device["budget"], device["limited_by"]) == (found.budget, "memory")


def _refused(*what, **how):
    """What is said."""
    try:
        take_part(*what, **how)
    except DoesNotFit as refusal:
        return str(refusal)
    pytest.fail("not refused")


def test_where_no_budget_fits_it_says_what_else_helps(client, large, needs, engine, tmp_path):
    said = _refused(client, large, tmp_path / "pi", engine=engine, memory_limit=(needs() + needs(0.1)) // 2)
    assert "8 samples" in said


def test_where_evaluating_takes_too_much_smaller_batches_would_not_help(client, large, engine, tmp_path):
    said = _refused(client, large, tmp_path / "pi", engine=engine, memory_limit=MIB)
    assert "8 samples at once" in said


def test_where_there_is_plenty_nothing_is_tried(client, large, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_sdk.budget.prediction.predict_memory", lambda *_: pytest.fail("tried"))
    done = take_part(client, large, tmp_path / "late", engine=engine, name="late", memory_limit=2**40)
    assert done.rounds == 1 or done.adapted
