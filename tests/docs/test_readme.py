"""README.md followed from its first to its last line in an empty environment, as printed.

Its commands run in order in a copy of the repository, with a home folder of their own. Python blocks are saved as the
file that the text before names.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .reader import Reader

ROOT = Path(__file__).parents[2]
SKIPPED = ("make demo", "make test")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """What the README has one do, in order: ("run", a command) or ("save as FILE", its text)."""
    text, found, before = (ROOT / "README.md").read_text(), [], 0
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            (name,) = re.findall(r"Save this as `([^`]+)`", text[before : block.start()])
            found.append((f"save as {name}", block[2]))
        else:
            lines = block[2].replace("\\\n", " ").splitlines()
            found += [("run", line) for line in lines if line and not line.startswith(SKIPPED)]
        before = block.end()
    return found


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_it_works_as_printed_in_an_empty_environment_without_and_with_tokens(tmp_path):
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    home, first, second = tmp_path / "home", tmp_path / "first", tmp_path / "second"
    home.mkdir()
    shutil.copytree(ROOT, first, ignore=unwanted)
    reader = Reader(home)
    printed = reader.follow(steps(), first, installs=True)
    assert "devices join with: sparrow join --server http" in printed
    assert re.search(r"^sample 2: class \d", printed, re.MULTILINE)
    assert "next: sparrow join --federation halves --data FILE" in printed
    assert re.search(r"^bob: 10 rounds, ", printed, re.MULTILINE)
    second.mkdir()
    reader.folder = second
    reader.do("pip install 'sparrow-fl[completion]'")  # what commands advise, of which a message names the extra
    reader.do("sparrow completion bash")
    admin, enrolment = "an-admin-token-0123", "an-enrolment-token"
    printed = reader.follow(
        steps(),
        second,
        installs=False,
        COORDINATOR_ADMIN_TOKEN=admin,
        COORDINATOR_ENROLMENT_TOKEN=enrolment,
        SPARROW_ADMIN_TOKEN=admin,
        SPARROW_ENROLMENT_TOKEN=enrolment,
    )
    assert "with SPARROW_ENROLMENT_TOKEN set" in printed
    assert re.search(r"^sample 2: class \d", printed, re.MULTILINE)
