"""What the command line says; whole federations are in tests/system."""

from types import SimpleNamespace

import pytest

from edge_sdk import join, publish
from edge_sdk.budget.search import Choice
from edge_sdk.device.session import Outcome, Step
from edge_sdk.device.state import Totals, default_root
from edge_sdk.protocol.messages import BudgetLimit, Moved
from sparrow.command_line.exits import Exit


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
    command = ["--server", "http://127.0.0.1:9", "--patience", "0", "--state-dir", str(tmp_path), "--quiet"]
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
        "accuracy_after": None,
        "training": Totals(),
        "evaluation": Totals(),
        "everything": Moved(),
        "export": None,
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
    assert "stopped early in round 2, best in round 1" in text
    assert "training 3,000 down and 7 up; everything 4,000 down and 8 up" in text


def test_the_summary_says_what_an_update_and_a_point_took_how_hot_it_grew_and_what_helps():
    spent = Totals(seconds=40, joules_estimated=60, paused_seconds=12, throttled_seconds=3, celsius_peak=71.4)
    choice = Choice(0.4, 3.0, 2.0, 1, 1, 0, True, BudgetLimit.deadline, ("budget 0.4: a round takes 3 s",), ("rest",))
    done = result(rounds=3, accuracy_before=0.1, accuracy_after=0.4, training=spent, budget=0.4, choice=choice)
    text = join.report(done, "none")
    assert "energy per update          20.00 J estimated" in text
    assert "energy per point           2.00 J estimated" in text
    assert "at most 71 °C, throttled for 3 s, paused for 12 s" in text
    assert "budget 0.4: a round takes 3 s\n                             rest" in text


def test_what_is_not_known_is_said_to_be_unknown():
    text = join.report(result(), "none")
    assert "energy per update          unknown" in text
    assert "no temperature known, throttling unknown, paused for 0 s" in text
    assert "budget                     1, as given" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "none.toml"], "give --policy a TOML file, auto or none"),
        (["--policy", "none", "--limit", "pause=70"], "pause: Extra inputs are not permitted; there are on_mains"),
        (["--policy", "none", "--limit", "hours=night"], "is not a part of a day; give 22:00-07:00"),
    ],
)
def test_a_policy_that_means_nothing_is_refused_before_anything_else(more, said, capsys):
    assert join.main(["--server", "http://127.0.0.1:9", "--patience", "0", *more]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_a_setting_that_is_none_names_the_option(capsys):
    assert publish.main(["--server", "http://127.0.0.1:9", "--name", "x", "--learning-rate", "-1"]) == Exit.USAGE
    assert "--learning-rate: -1 cannot work; give a number above 0" in capsys.readouterr().err


def test_a_name_that_no_device_can_have_is_refused_before_anything_is_made(tmp_path, capsys):
    state = tmp_path / "state"
    command = ["--server", "http://127.0.0.1:9", "--name", "pi kitchen", "--state-dir", str(state)]
    assert join.main(command) == Exit.USAGE
    assert "choose another --name" in capsys.readouterr().err
    assert not state.exists()


def test_an_export_that_cannot_be_written_is_refused_before_the_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "model.onnx"
    assert join.main(["--server", "http://127.0.0.1:9", "--export", str(target), "--patience", "0"]) == Exit.USAGE
    assert "give another --export" in capsys.readouterr().err


def test_a_state_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    state = tmp_path / "file" / "state"
    assert join.main(["--server", "http://127.0.0.1:9", "--state-dir", str(state), "--patience", "0"]) == Exit.FAILED
    assert "give another --state-dir" in capsys.readouterr().err


def test_quiet_hides_the_bar_and_nothing_that_needs_attention(capsys):
    bar = join._Bar(quiet=True)
    bar.start(session=None)
    bar.waiting("connection refused", 2.0)
    assert capsys.readouterr().err == ("the coordinator does not answer (connection refused); trying again in 2.0 s\n")


def test_two_coordinators_have_folders_of_their_own():
    one, other = (default_root(f"http://{host}:8000", "f") for host in ("a", "b"))
    assert one != other
    assert one.parts[-3:] == ("sparrow", "a_8000", "f")
    assert default_root("http://a:8000/", "f") == one
    assert default_root("http://a:8000/lab", "f").parts[-2] == "a_8000_lab"


def test_settings_that_contradict_each_other_are_said_without_an_option(capsys):
    command = ["--server", "http://127.0.0.1:9", "--name", "x", "--optimizer", "adam", "--momentum", "0.9"]
    assert publish.main(command) == Exit.USAGE
    assert "sparrow publish: momentum belongs to the optimizer sgd" in capsys.readouterr().err


def test_a_device_without_work_comes_again_at_the_moment_it_was_told(monkeypatch):
    """To the second: the coordinator spreads its fleet, and jitter of the devices' own would undo that."""
    slept = []
    monkeypatch.setattr(join.time, "sleep", slept.append)
    steps = [Step(Outcome.idle, pause_seconds=seconds) for seconds in (7.0, 31.0)] + [Step(Outcome.over)]
    session = SimpleNamespace(
        step=lambda wait: steps.pop(0), progress=SimpleNamespace(stopped_round=None), failed_rounds=0
    )
    join.run_session(session, SimpleNamespace(after=lambda session: None), lambda: None)
    assert slept == [7.0, 31.0]
