"""Every command's help: it fits a screen, and says the same however the command is called."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from sparrow.command_line.exits import Exit
from sparrow.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
TOKENS = ("create", "list", "revoke")
BENCH = ("compare", "run", "tune", "report")


@pytest.fixture(autouse=True)
def _screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(len(line) <= 80 for line in said.out.splitlines())
    return said.out


def test_sparrow_lists_its_commands(capsys):
    text = help_of(capsys)
    for name, source in COMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(source.help)}$", text, re.MULTILINE)
    assert main_without_arguments(capsys) == text


def main_without_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name, capsys):
    text = help_of(capsys, name)
    assert text.startswith(f"usage: sparrow {name} ")
    assert "--traceback" in text


@pytest.mark.parametrize("words", [*(("token", each) for each in TOKENS), *(("bench", each) for each in BENCH)])
def test_so_have_commands_within_commands(words, capsys):
    assert f"usage: sparrow {' '.join(words)}" in help_of(capsys, *words)


def parts(parser):
    """Yield a parser and those of the commands within it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from parts(part)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_means_one_thing_in_every_command(name):
    """Of all that call a coordinator: the same words for its address, and none of the former ones."""
    for part in parts(COMMANDS[name].load().parser(f"sparrow {name}")):
        text = " ".join(part.format_help().split())
        if "--server" in text:
            assert "--server URL the coordinator's address (default: SPARROW_SERVER, or http://127.0" in text
        options = set(re.findall(r"^  (--[a-z-]+)", part.format_help(), re.MULTILINE))
        assert "--name" not in options
        assert "--patience" not in options, "it is a setting of early stopping"
        assert "docs/" not in text, "who installed a wheel has no such page"


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (("publish",), "rounds (30)"),
        (("federation", "create"), "rounds (30)"),
        (("fleet",), "rounds (30)"),
        (("profile",), "rounds (30)"),
        (("join",), "pause_celsius (unset)"),
        (("serve",), "COORDINATOR_TICK_SECONDS (0.5)"),
    ],
)
def test_settings_are_explained_without_the_documentation(capsys, words, setting):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help-settings"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert setting in lines
    assert all(line.startswith("  ") for line in lines if not re.match(r"[A-Za-z_0-9]+ \(", line))
    assert "docs/" not in "".join(lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_module_that_python_m_runs_is_the_same_command(name):
    module = importlib.import_module(COMMANDS[name].module)
    assert getattr(module, "main", module.COMMAND.main) == module.COMMAND.main
    called = module.COMMAND.name
    assert called in (f"sparrow {name}", "edge_sdk.join")
    assert f"`{name}`" in PAGE.split("## Exit codes")[0]


@pytest.mark.parametrize(
    "command", [("publish", "x"), ("federation", "create", "x"), ("fleet",), ("profile",), ("bench", "compare")]
)
def test_a_setting_written_as_an_option_gets_a_hint(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--local-epochs", "3"])
    assert ended.value.code == Exit.USAGE
    assert "local_epochs=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("noun", ["federation", "device", "model", "data", "token", "bench"])
def test_a_command_without_its_subcommand_prints_its_help(capsys, noun):
    assert help_of(capsys, noun) == bare(capsys, noun)


def bare(capsys, noun):
    with pytest.raises(SystemExit) as ended:
        main([noun])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_the_version_is_printed(capsys, asked):
    with pytest.raises(SystemExit) as ended:
        main([asked])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("sparrow-fl")
