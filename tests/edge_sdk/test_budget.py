"""The budget that a device can afford: the choice, the corrections from rounds, and the federation that uses it."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from edge_sdk import profile
from edge_sdk.arguments import MIB
from edge_sdk.budget.prediction import BUDGETS, Memory, Prediction, Predictor
from edge_sdk.budget.preparation import Prepared
from edge_sdk.budget.search import (
    DEADLINE_SHARE,
    NOTHING,
    BudgetController,
    Learned,
    Limits,
    board_budget,
    choose,
    read_learned,
)
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.publish import publish
from edge_sdk.tasks.digits import load
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.devices.estimate import PowerModel
from sparrow.devices.simulation import Board
from sparrow.protocol.flops import training_flops
from sparrow.protocol.messages import BudgetLimit, Phase
from sparrow.protocol.neurons import first_neurons, narrowed
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess
from sparrow.simulation.fleet import run_fleet
from sparrow.simulation.host import Plan


def federation(method="fedspu", **settings):
    return FederationSettings(method=method, **{"deadline_seconds": 100, "local_steps": 40, **settings})


class Known:
    """Predictions that a test sets: seconds, bytes and memory of the whole model; the part ``fixed`` of the seconds is
    the same at any budget."""

    def __init__(self, seconds=100.0, *, fixed=0.0, memory=0, size=0, budgets=BUDGETS):
        self.seconds, self.fixed, self.memory, self.size, self.budgets = seconds, fixed, memory, size, budgets
        self.asked = []

    def at(self, budget):
        self.asked.append(budget)
        seconds = self.seconds * (self.fixed + (1 - self.fixed) * budget)
        size = round(self.size * budget)
        memory = Memory(0, round(self.memory * budget), 0, 0)
        return Prediction(budget, 1, 40, seconds, 0.0, size, size, memory)


def chosen(predictor, *, memory=None, deadline=100.0, **how):
    return choose(predictor, Limits(memory, deadline), federation(), **how)


# --- choosing --------------------------------------------------------------------------------------------------------


def test_a_device_that_can_afford_everything_finds_out_at_one_try():
    predictor = Known(seconds=10)
    choice = chosen(predictor)
    assert (choice.budget, choice.fits, choice.limited_by, choice.advice) == (1.0, True, None, ())
    assert set(predictor.asked) == {1.0}


@pytest.mark.parametrize("seconds", [76, 100, 125, 250, 375, 749, 750])
def test_it_takes_the_largest_budget_that_leaves_a_part_of_the_deadline(seconds):
    choice = chosen(Known(seconds=seconds))
    fitting = [each for each in BUDGETS if seconds * each <= 100 * DEADLINE_SHARE + 1e-9]
    assert (choice.budget, choice.limited_by) == (max(fitting), BudgetLimit.deadline)
    assert choice.seconds == pytest.approx(seconds * choice.budget)


def test_memory_limits_too_and_comes_first():
    choice = chosen(Known(seconds=200, memory=1000 * MIB), memory=250 * MIB)
    assert (choice.budget, choice.limited_by) == (0.2, BudgetLimit.memory)
    assert "200 MiB of memory of 250" in str(choice)


def test_the_smallest_budget_is_chosen_with_a_warning_if_none_fits():
    choice = chosen(Known(seconds=5000))
    assert (choice.budget, choice.fits, choice.limited_by) == (0.1, False, BudgetLimit.deadline)
    assert "no budget meets the deadline" in str(choice)
    assert "--budget" in choice.advice[0]


def test_where_seconds_do_not_count_memory_alone_decides():
    choice = chosen(Known(seconds=5000, memory=1000), memory=600, deadline=float("inf"))
    assert (choice.budget, choice.limited_by) == (0.6, BudgetLimit.memory)
    assert "inf" not in str(choice)


def test_the_link_counts_once_it_is_known():
    predictor = Known(seconds=10, size=1_000_000)
    assert chosen(predictor).budget == 1.0
    slow = chosen(predictor, learned=Learned(down_rate=20_000, up_rate=20_000))
    assert (slow.budget, slow.limited_by) == (0.6, BudgetLimit.deadline)
    assert (slow.bytes_down, slow.bytes_up) == (600_000, 600_000)
    assert slow.seconds == pytest.approx(6 + 60)


def test_a_device_that_rests_half_of_the_time_can_afford_half():
    assert chosen(Known(seconds=75)).budget == 1.0
    assert chosen(Known(seconds=75), duty=0.5).budget == 0.5


def test_budgets_that_a_method_cannot_work_at_are_not_chosen():
    assert chosen(Known(seconds=5000, budgets=(0.3, 0.4, 0.5))).budget == 0.3


def test_a_device_whose_budget_saves_little_is_told_what_helps():
    choice = chosen(Known(seconds=100, fixed=0.7))
    assert (choice.budget, choice.fits) == (0.1, True)
    (advice,) = choice.advice
    assert "fedspu at a budget of 0.1 saves 27 %" in advice
    assert "batch_size below 16" in advice


def test_no_advice_for_a_budget_that_saves_enough():
    assert chosen(Known(seconds=150)).advice == ()


def test_one_without_memory_is_told_of_smaller_batches():
    (advice,) = chosen(Known(seconds=1, memory=1000), memory=500).advice
    assert "smaller batches" in advice


# --- learning and looking again --------------------------------------------------------------------------------------


def kept(predictor, *, memory=None, **how):
    limits = {"memory": memory}
    budgets = BudgetController(predictor, federation(), lambda deadline: Limits(limits["memory"], deadline), **how)
    return budgets, limits


def train(budgets, seconds, *, paused=0.0, down=0, up=0, transfer=1.0):
    """A round of so many seconds, and its transfers."""
    download = Phase(seconds=transfer if down else 0, bytes_down=down)
    budgets.after_training(download, Phase(seconds=seconds, paused_seconds=paused))
    budgets.after_upload(Phase(seconds=transfer if up else 0, bytes_up=up))


def test_a_round_that_took_longer_than_predicted_lowers_the_next_ones_budget():
    said = []
    budgets, _ = kept(Known(seconds=75), keep=said.append)
    assert budgets.budget == 1.0
    train(budgets, 150)  # twice as long: half of it is believed at once
    assert budgets.reassess(100)
    assert (budgets.budget, budgets.choice.limited_by) == (0.6, BudgetLimit.deadline)
    assert said[-1].seconds == pytest.approx(1.5)


def test_pauses_are_no_computing():
    budgets, _ = kept(Known(seconds=50))
    train(budgets, 150, paused=100)
    assert budgets.learned.seconds == pytest.approx(1.0)
    assert not budgets.reassess(100)


def test_the_links_speed_is_learned_from_transfers():
    budgets, _ = kept(Known(seconds=10, size=1000))
    train(budgets, 10, down=2000, up=500, transfer=2.0)
    assert (budgets.learned.down_rate, budgets.learned.up_rate) == (1000, 250)
    assert (budgets.learned.bytes_down, budgets.learned.bytes_up) == (1.5, 0.75)
    train(budgets, 10)  # a round without transfers says nothing of them
    assert (budgets.learned.down_rate, budgets.learned.up_rate) == (1000, 250)


def test_the_budget_falls_at_once_and_rises_by_a_tier():
    budgets, limits = kept(Known(seconds=1, memory=1000), memory=1000)
    limits["memory"] = 450
    assert budgets.reassess(100)
    assert budgets.budget == 0.4
    limits["memory"] = 550  # the next tier fits, but none above it
    assert not budgets.reassess(100)
    limits["memory"] = 950
    shares = []
    for _ in range(6):
        budgets.reassess(100)
        shares.append(budgets.budget)
    assert shares == [0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
    assert budgets.choice.limited_by is BudgetLimit.memory
    limits["memory"] = 1000
    budgets.reassess(100), budgets.reassess(100)
    assert (budgets.budget, budgets.choice.limited_by) == (1.0, None)


def test_conditions_that_sway_by_less_than_a_tier_change_nothing():
    budgets, limits = kept(Known(seconds=1, memory=1000), memory=490)
    for memory in (510, 460, 599, 400, 505):
        limits["memory"] = memory
        assert not budgets.reassess(100)
    assert budgets.budget == 0.4


def test_a_device_that_grew_hot_takes_a_tier_less_for_its_next_round():
    budgets, _ = kept(Known(seconds=1))
    assert budgets.reassess(100, hot=True)
    assert (budgets.budget, budgets.choice.limited_by) == (0.9, BudgetLimit.heat)
    assert budgets.reassess(100)
    assert (budgets.budget, budgets.choice.limited_by) == (1.0, None)


def test_a_shorter_deadline_counts_from_the_next_round_on():
    budgets, _ = kept(Known(seconds=70))
    assert budgets.budget == 1.0
    assert budgets.reassess(50)
    assert budgets.budget == 0.5


def test_learned_costs_survive_restarts_and_damaged_files_are_ignored():
    learned = Learned(seconds=1.2, down_rate=1e6)
    assert read_learned(learned.model_dump_json().encode()) == learned
    assert read_learned(b"[") == NOTHING
    assert read_learned(None) == NOTHING


# --- trying and counting ---------------------------------------------------------------------------------------------


def subject(method, engine="torch", **settings):
    found = profile.Subject("digits", FederationSettings(method=method, batch_size=16, **settings), engine=engine)
    return found, *found.load()


@pytest.mark.parametrize(("method", "engine"), [("fedspu", "onnx"), ("fedspu", "torch"), ("heterofl", "torch")])
def test_less_of_a_model_takes_fewer_bytes(method, engine):
    _, task, manifest, rehearse = subject(method, engine)
    settings = federation(method, early_stopping="off")
    predictor = Predictor(task, manifest, settings, timed=False, memory=False, rehearse=rehearse)
    low, high = predictor.at(0.2), predictor.at(1.0)
    assert low.bytes_up < high.bytes_up / 2
    assert (low.memory, low.seconds, predictor.budgets) == (None, 0.0, BUDGETS)


def test_fjord_is_predicted_at_the_widths_that_rounds_draw():
    own = {"widths": "uniform", "width_steps": 5, "distil": True, "distil_weight": 1.0, "distil_temperature": 1.0}
    _, task, manifest, _ = subject("fjord")
    found = {}
    for name, changed in (("paper", {}), ("no teacher", {"distil": False}), ("fixed", {"widths": "fixed"})):
        settings = federation("fjord", early_stopping="off", method_settings=own | changed)
        found[name] = Predictor(task, manifest, settings, timed=False).at(0.6)
    at = {width: training_flops(narrowed(manifest, first_neurons(manifest, width)), 16) for width in (0.2, 0.4, 0.6)}
    assert found["fixed"].flops == at[0.6]
    assert found["no teacher"].flops == sum(at.values()) // 3
    assert found["paper"].flops == at[0.6] + (at[0.2] + at[0.4]) // 3
    memory = {name: each.memory.training for name, each in found.items()}
    # Weights and gradients that lie in numpy's arrays between steps of several widths are not PyTorch's to count.
    assert memory["paper"] > memory["no teacher"] > 0.8 * memory["fixed"]


def test_a_narrow_network_takes_less_memory():
    # FedSPU's does not: the whole model runs forward, and on one so small masks take what gradients save.
    _, task, manifest, _ = subject("heterofl")
    predictor = Predictor(task, manifest, federation("heterofl", early_stopping="off"), timed=False)
    assert predictor.at(0.2).memory.training < predictor.at(1.0).memory.training


def test_a_trial_costs_as_a_round_and_keeps_the_model():
    _, task, manifest, _ = subject("fedspu")
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    predictor = Predictor(task, manifest, federation(local_steps=7), memory=False)
    prediction = predictor.at(0.5)
    assert prediction.seconds > prediction.fixed_seconds > 0
    assert predictor.at(0.5) is prediction
    assert all(tensor.equal(before[name]) for name, tensor in task.model.state_dict().items())


@pytest.fixture
def settings(tmp_path):
    return Settings(data_dir=tmp_path / "coordinator", default_task="", tick_seconds=0.05)


def publish_to(client, method, *, deadline=300.0, **method_settings):
    """A federation of the digits for five devices."""
    return publish(
        "",
        "f",
        "digits",
        client=client,
        method=method,
        rounds=2,
        cohort=5,
        min_devices=5,
        local_steps=12,
        learning_rate=0.1,
        batch_size=16,
        early_stopping="off",
        evaluation_interval=0,
        deadline_seconds=deadline,
        method_settings=method_settings,
    )


def task_of(index):
    return load(f"index={index},of=5,partition=iid", device=f"device-{index}", seed=0, batch_size=16).seeded(0)


def test_budgets_below_the_federations_smallest_are_none(settings):
    with inprocess.running(create_app(settings)) as client:
        info, manifest = publish_to(client, "pfedgate", smallest_budget=0.35), Transport(client).manifest("f")
    predictor = Predictor(task_of(0), manifest, info.settings, memory=False)
    assert predictor.budgets == BUDGETS[3:]
    assert predictor.at(0.4).seconds > 0


# --- a federation ----------------------------------------------------------------------------------------------------

FULL_SECONDS = (60.0, 110.0, 150.0, 190.0, 235.0)
"""How long a round at a budget of 1 takes each of five devices, computing; the deadline leaves 75 s."""


def run_boards(settings, boards, budgets):
    """Budgets that the coordinator knows, and seconds of each device in the second round, by name."""
    plan = Plan("f", 5, data="partition=iid", budgets=budgets, boards=boards)
    run_fleet(None, plan, app=create_app(settings), in_memory=True, quiet=True)
    with inprocess.running(create_app(settings)) as client:
        devices = client.get("/v1/federations/f/devices").json()
        reports = client.get("/v1/federations/f/rounds/2/reports").json()
    seconds = {}
    for each in [report for report in reports if report["kind"] == "train"]:
        phases = (each["report"]["telemetry"]["download"], each["report"]["telemetry"]["train"], each["upload"])
        seconds[each["device"]] = sum(phase.get("seconds", 0.0) for phase in phases)
    return {device["name"]: device["budget"] for device in devices}, seconds


def spread(seconds):
    return max(seconds.values()) - min(seconds.values())


@pytest.mark.integration
def test_a_pfedgate_federation_of_unequal_devices_keeps_step_by_the_budgets_they_choose(tmp_path):
    def new_settings(name):
        return Settings(data_dir=tmp_path / name, default_task="", tick_seconds=0.05)

    def create(name):
        with inprocess.running(create_app(new_settings(name))) as client:
            # Beside so small a model a gate that sees the whole input takes what the deadline leaves the slowest.
            info = publish_to(client, "pfedgate", deadline=100, smallest_budget=0.3, cost="flops", gate_pool=0)
            return info, Transport(client).manifest("f")

    info, manifest = create("chosen")
    watts = PowerModel(1.0, 2.0, "test")
    one = Board("one", 1.0, watts, 1, 2**30)
    flops = Predictor(task_of(0), manifest, info.settings, board=one).at(1.0).seconds
    boards = tuple(
        Board(f"{seconds:g}s", flops / seconds, watts, 1, 2**30, bytes_per_second=1e6) for seconds in FULL_SECONDS
    )
    predicted = {
        f"device-{index}": board_budget(board, task_of(index), manifest, info.settings)
        for index, board in enumerate(boards)
    }
    budgets, seconds = run_boards(new_settings("chosen"), boards, ())
    assert budgets == {name: choice.budget for name, choice in predicted.items()}
    assert len(set(budgets.values())) >= 4
    for name, choice in predicted.items():
        assert choice.fits
        assert seconds[name] == pytest.approx(choice.seconds, rel=0.25)
        assert seconds[name] <= 100

    create("equal")
    mean = round(sum(budgets.values()) / 5, 1)
    _, equal = run_boards(new_settings("equal"), boards, (mean,))
    assert spread(seconds) <= 0.7 * spread(equal)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("method", "engine", "possible"),
    [
        ("fedspu", "onnx", BUDGETS),
        ("fedspu", "torch", BUDGETS),
        pytest.param("pfedgate", "torch", BUDGETS[2:], marks=pytest.mark.integration),
    ],
)
def test_a_budget_that_changes_between_rounds_is_what_the_next_one_trains(settings, tmp_path, method, engine, possible):
    """A device finds out in round 1 that it is far slower than it thought; round 2 asks less of it."""
    predictor = Known(seconds=1.0, budgets=possible)

    def prepare(task, manifest, info, rehearse):
        return Prepared(task, 1.0, BudgetController(predictor, info.settings, lambda deadline: Limits(None, deadline)))

    def grow_slow(assignment, done, total, loss):
        predictor.seconds = 1000.0  # half of it is believed after a round, and of 300 s it plans with 225: 0.4 fits

    with inprocess.running(create_app(settings)) as client, ExitStack() as stack:
        publish_to(client, method)
        sessions = [
            Session(
                Transport(client),
                stack.enter_context(closing(StateFolder(tmp_path / f"device-{index}"))),
                federation="f",
                name=f"device-{index}",
                make_task=lambda info, manifest, index=index: task_of(index),
                options=SessionOptions(prepare=prepare if index == 0 else None, progress=grow_slow, engine=engine),
            )
            for index in range(5)
        ]
        budgets, running = {}, list(sessions)
        while running:
            for session in list(running):
                before, step = session.budget, session.step(0.1)
                if session is sessions[0] and step.assignment is not None:
                    budgets.setdefault(step.assignment.round, before)
                if step.outcome is Outcome.over:
                    running.remove(session)
        assert (budgets[1], budgets[2]) == (1.0, 0.4)
        flops = {}
        for number in (1, 2):
            reports = client.get(f"/v1/federations/f/rounds/{number}/reports").json()
            (flops[number],) = (
                r["report"]["training_flops"] for r in reports if (r["device"], r["kind"]) == ("device-0", "train")
            )
        assert flops[2] < 0.9 * flops[1]
