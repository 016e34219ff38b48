"""What the command line says; whole federations are in tests/system."""

import pytest

from edge_sdk import join, publish
from edge_sdk.state import Totals


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
    assert join.main(command) == 1
    assert "does not answer" in capsys.readouterr().err


def test_totals_never_blend_measured_and_estimated_joules():
    result = join.Result("pi", 3, 30, 2, 0.1, None, Totals(seconds=4, joules_estimated=5), Totals(), None)
    text = join.report(result, "none")
    assert "5.0 J estimated" in text
    assert "measured" not in text
    assert "10.0 % before, unknown after" in text
    assert "stopped early in round 2" in text


def test_a_setting_that_is_none_names_the_option(capsys):
    assert publish.main(["--server", "http://127.0.0.1:9", "--name", "x", "--learning-rate", "-1"]) == 2
    assert "--learning-rate: Input should be greater than 0" in capsys.readouterr().err
