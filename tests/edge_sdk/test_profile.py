"""What training takes, predicted: memory and work as they are counted, never as a clock or a heap has it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.autograd import profiler
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk import profile
from edge_sdk.arguments import MIB
from edge_sdk.budget.footprint import HEAP, MODELS_HELD, predict_evaluation, predict_training, whole_round
from edge_sdk.budget.pace import Pace
from edge_sdk.budget.preparing import DoesNotFit
from edge_sdk.join import join
from edge_sdk.methods import load_method
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.messages import BudgetLimit, FederationSettings
from edge_sdk.publish import publish
from edge_sdk.simulation import in_process as inprocess
from edge_sdk.training.rehearsal import Rehearsal
from sparrow.command_line.exits import Exit
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings


def rehearse(task, batch, **settings):
    subject = profile.Subject(task, FederationSettings(method="fedspu", batch_size=batch, **settings))
    loaded, manifest = subject.load()
    return Rehearsal(loaded, manifest, subject.settings), manifest


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
def test_memory_in_use_is_foretold_from_a_handful_of_samples(task, batch, budget, settings):
    rehearsal, manifest = rehearse(task, batch, **settings)
    mask = load_method("fedspu").sample_mask(manifest, budget)
    counted = counted_peak(lambda: rehearsal.train(2, mask=mask))
    assert predict_training(rehearsal, mask) / HEAP == pytest.approx(counted, rel=0.05)


def test_so_is_that_of_an_evaluation():
    rehearsal, _ = rehearse("mnist", 16)
    assert rehearsal.held_out == 256
    inputs, targets = next(iter(rehearsal.task.held_out))
    rehearsal._batch = (inputs, targets)
    counted = counted_peak(lambda: rehearsal.evaluate(256))
    assert predict_evaluation(rehearsal) / HEAP == pytest.approx(counted, rel=0.05)


def test_a_round_takes_what_the_larger_of_training_and_evaluation_does_and_two_models():
    rehearsal, _ = rehearse("digits", 8)
    models = MODELS_HELD * rehearsal.model_bytes
    assert whole_round(rehearsal, 3 * MIB, MIB) == models + 3 * MIB
    assert whole_round(rehearsal, MIB, 2 * MIB) == models + 2 * MIB


def test_a_rehearsal_leaves_the_model_and_chance_as_they_were():
    subject = profile.Subject("cifar10", FederationSettings())
    task, manifest = subject.load()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    state = torch.get_rng_state()
    assert len(Rehearsal(task, manifest, subject.settings).train(3)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_flops_of_the_whole_model_are_those_that_torch_counts():
    rehearsal, manifest = rehearse("mnist:leaf", 16)
    rehearsal.train(1)  # the first ever tries the memory format
    with FlopCounterMode(display=False) as counter:
        rehearsal.train(1)
    assert training_flops(manifest, 16) == counter.get_total_flops()


def test_seconds_are_linear_in_flops_under_a_mask_and_what_was_timed_without():
    rehearsal, manifest = rehearse("mnist", 8)
    mask = load_method("fedspu").sample_mask(manifest, 0.5)
    pace = Pace(whole=3.0, fixed=1.0, per_flop=1e-9)
    assert pace.predict(rehearsal, None) == 3.0
    assert pace.predict(rehearsal, mask) == 1.0 + 1e-9 * training_flops(manifest, 8, weight_gradients=mask)


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    status = profile.main(["--task", "mnist", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """What is timed does not matter here."""
    monkeypatch.setattr("edge_sdk.budget.pace.SECONDS", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_predicts_and_measures(capsys):
    status, out, _ = run(capsys, "--budget", "0.4", "--steps", "2", "--batch-size", "8", "--json")
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
    assert "None of these budgets fits into 1 MiB. Try a smaller one. A smaller --batch-size needs less." in out


def test_a_method_that_trains_the_whole_model_says_so(capsys):
    status, out, _ = run(capsys, "--method", "fedavg", "--memory-limit", "1")
    assert status == 0
    assert "fedavg runs the whole model" in out
    assert "Try a smaller one" not in out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--task", "mnits"], Exit.NOT_FOUND, "there is no task 'mnits' here (did you mean mnist?)"),
        (["--task", "mnist:large"], Exit.NOT_FOUND, "large"),
        (["--method", "fedsup"], Exit.NOT_FOUND, "fedsup"),
        (["--data", "nowhere.npz"], Exit.NOT_FOUND, "nowhere.npz"),
        (["--batch-size", "0"], Exit.USAGE, "batch-size: 0 cannot work; give a number of at least 1"),
        (["--set", "momentum=2"], Exit.USAGE, "momentum: 2 cannot work; give a number below 1"),
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


@pytest.fixture(scope="module")
def large():
    """8 MiB of weights, of which a budget trains some; judged in batches as small as it is trained in."""
    task, manifest = profile.Subject(TASK, FederationSettings(**SETTINGS)).load()
    return replace(task, validation=task.train), manifest


@pytest.fixture
def needs(large, monkeypatch):
    """Bytes that rounds at a budget need, or that judging the model takes alone, where a process holds 100 MiB: what
    this one does changes by more than a budget takes, by what other tests leave and a first session brings."""
    for room in ("preparing", "demand"):
        monkeypatch.setattr(f"edge_sdk.budget.{room}.held", lambda device: 100 * MIB)
    task, manifest = large
    rehearsal = Rehearsal(task, manifest, FederationSettings(**SETTINGS))

    def of(budget=None):
        training = 0
        if budget is not None:
            training = predict_training(rehearsal, load_method("fedspu").sample_mask(manifest, budget))
        return 100 * MIB + whole_round(rehearsal, training, predict_evaluation(rehearsal))

    return of


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    settings = Settings(data_dir=tmp_path_factory.mktemp("coordinator"), default_task="", tick_seconds=0.05)
    with inprocess.running(create_app(settings)) as client:
        publish("", "f", TASK, client=client, **SETTINGS)
        yield client
        client.get("/readyz")


def take_part(client, large, folder, **how):
    how = {"name": "pi", **how}
    return join("", large[0], federation="f", state_dir=folder, client=client, quiet=True, **how)


def test_a_budget_that_does_not_fit_is_refused_before_enrolling_and_one_that_does_is_named(
    client, large, needs, tmp_path
):
    limit = (needs(0.2) + needs(1.0)) // 2
    said = _refused(client, large, tmp_path / "pi", memory_limit=limit, budget=1.0)
    assert said.startswith("a budget of 1 needs ")
    assert f"and there are {limit / MIB:,.0f}; a budget of 0." in said
    assert " fits: give --budget 0." in said
    assert client.get("/v1/federations/f").json()["devices"] == 0
    named = float(said.rsplit(" ", 1)[1])
    assert 0.1 <= named < 1
    assert take_part(client, large, tmp_path / "pi", memory_limit=limit, budget=named).rounds == 1


@pytest.mark.slow
def test_without_a_budget_a_device_takes_the_largest_that_fits(client, large, needs, tmp_path):
    found = take_part(client, large, tmp_path / "auto", name="auto", memory_limit=(needs(0.2) + needs(1.0)) // 2)
    assert 0.2 <= found.budget < 1
    assert found.choice.limited_by is BudgetLimit.memory
    assert "the next larger one has too little memory" in str(found.choice)
    (device,) = [each for each in client.get("/v1/federations/f/devices").json() if each["name"] == "auto"]
    assert (device["budget"], device["limited_by"]) == (found.budget, "memory")


def _refused(*what, **how):
    """What is said."""
    try:
        take_part(*what, **how)
    except DoesNotFit as refusal:
        return str(refusal)
    pytest.fail("not refused")


@pytest.mark.slow
def test_where_no_budget_fits_it_says_what_else_helps(client, large, needs, tmp_path):
    said = _refused(client, large, tmp_path / "pi", memory_limit=(needs() + needs(0.1)) // 2)
    assert "no budget fits: free memory, or join a federation with smaller batches (here 8 samples)" in said


@pytest.mark.slow
def test_where_judging_takes_too_much_smaller_batches_would_not_help(client, large, tmp_path):
    said = _refused(client, large, tmp_path / "pi", memory_limit=MIB)
    assert "no budget fits, for judging the model on 8 samples at once takes more by itself" in said


def test_where_there_is_plenty_nothing_is_tried(client, large, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_sdk.budget.preparing.predict_training", lambda *_: pytest.fail("tried"))
    done = take_part(client, large, tmp_path / "late", name="late", memory_limit=2**40)
    assert done.rounds == 1 or done.adapted
