"""The scripts that make bash, zsh and fish complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p sparrow | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_choices(sparrow, tmp_path):
    code, script, err = sparrow("completion", "bash")
    assert (code, err) == (0, "")
    (tmp_path / "script").write_text(script)

    def complete(*words):
        asked = subprocess.run(
            ["bash", "-c", ASK, "ask", tmp_path / "script", "sparrow", *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return set(asked.stdout.split())

    assert complete("pub") == {"publish"}
    assert complete("publish", "--st") == {"--standardise"}
    assert complete("token", "create", "") >= {"admin", "observer", "enrolment"}
    assert complete("status", "--js") == {"--json"}
    assert complete("completion", "z") == {"zsh"}
    assert complete("completion", "f") == {"fish"}


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_so_does_fish(sparrow, tmp_path):
    code, script, err = sparrow("completion", "fish")
    assert (code, err) == (0, "")
    (tmp_path / "sparrow.fish").write_text(script)

    def complete(line):
        asked = subprocess.run(
            ["fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', tmp_path / "sparrow.fish", line],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        return {row.partition("\t")[0] for row in asked.stdout.splitlines()}

    assert complete("sparrow pub") == {"publish"}
    assert complete("sparrow publish --st") == {"--standardise"}
    assert complete("sparrow token create ") >= {"admin", "observer", "enrolment"}
    assert complete("sparrow federation create --ta") == {"--task"}
    assert complete("sparrow status --js") == {"--json"}


def test_zsh_has_a_script_of_its_own(sparrow):
    code, script, _ = sparrow("completion", "zsh")
    assert code == 0
    assert script.startswith("#compdef sparrow")
    assert "--standardise" in script


def test_a_part_that_is_not_installed_is_completed_by_its_name(sparrow, monkeypatch):
    for name in [each for each in sys.modules if each.startswith("sparrow.coordinator.commands.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, script, err = sparrow("completion", "bash")
    assert code == 0
    assert "_subparsers=(serve status" in script
    assert "sparrow_serve_option_strings=()" in script or "sparrow_serve_option_strings" not in script
    assert "uvicorn" in err
