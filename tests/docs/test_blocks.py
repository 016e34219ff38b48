"""Every block of code of every page is run, or says why not, in a comment of the line before it:

    <!-- not run: REASON -->                     nobody runs it
    <!-- not run (WORDS, WORDS): REASON -->      lines with these words are left out, the others are run
    <!-- run by tests/FILE.py -->                that test reads it from the page, or does the same
    <!-- output -->                              no code: what a program prints, or a drawing

Shell blocks run line by line as a reader would, against a real coordinator; lines that install are left out, because
tests/docs/test_readme.py installs for real. Python blocks of a page share one namespace. JSON, TOML, YAML
and signatures (pyi) are parsed.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from edge_sdk.tasks import digits

from .reader import ADDRESSES, DEVICE, INSTALLS, SERVER, Reader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLLOWED = {"README.md": "tests/docs/test_readme.py", "docs/extending.md": "tests/system/test_extending.py"}
"""Pages that a test of their own follows from first to last line."""
SHELL, PARSED = ("sh", "bash"), ("json", "toml", "yaml", "pyi")
MARK = re.compile(r"<!-- (not run|run by|output)(?: \(([^)]*)\))?:? ?(.*?) ?-->")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATIENCE = 300
"""Seconds for a page."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of its fence, from 1."""
    language: str
    text: str
    before: str
    """The text above it, its mark left out."""
    section: str = ""
    """The heading above it."""
    mark: str = ""
    left_out: tuple[str, ...] = ()
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the test below runs it."""
        return (not self.mark or bool(self.left_out)) and self.page not in FOLLOWED

    @property
    def lines(self) -> list[str]:
        """Its commands."""
        joined = re.sub(r"\\\n *", "", self.text).splitlines()
        return [each for each in joined if each.strip() and not each.startswith("#") and not self._skips(each)]

    def _skips(self, line: str) -> bool:
        return any(words in line for words in self.left_out)


def blocks_of(page: Path) -> list[Block]:
    name, lines, found, number = str(page.relative_to(ROOT)), page.read_text().splitlines(), [], 0
    while number < len(lines):
        fence = re.match(r"( *)```(\w*)", lines[number])
        if not fence:
            number += 1
            continue
        end = next(at for at in range(number + 1, len(lines)) if re.match(r" *```\s*$", lines[at]))
        above = [line for line in lines[:number] if line.strip()]
        mark = MARK.fullmatch(above[-1].strip()) if above else None
        text = "".join(f"{line.removeprefix(fence[1])}\n" for line in lines[number + 1 : end])
        before = "\n".join(above[-4:-1] if mark else above[-3:])
        kind, left_out, reason = mark.groups(default="") if mark else ("", "", "")
        words = tuple(each.strip() for each in left_out.split(",") if each.strip())
        section = next((line.lstrip("# ") for line in reversed(above) if re.match(r"#+ ", line)), "")
        found.append(Block(name, number + 1, fence[2], text, before, section, kind, words, reason))
        number = end + 1
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)


@each_block
def test_a_block_is_run_or_says_why_not(block):
    if block.page in FOLLOWED:
        assert Path(block.page).name in (ROOT / FOLLOWED[block.page]).read_text()
        return
    if block.mark == "run by":
        file = ROOT / block.reason
        assert file.is_file(), f"{block.place}: there is no {block.reason}"
        assert Path(block.page).name in file.read_text(), f"{block.place}: {block.reason} does not read this page"
    elif block.mark == "not run":
        assert len(block.reason.split()) >= 2, f"{block.place}: say why it is not run"
        for words in block.left_out:
            assert words in block.text, f"{block.place}: no line has {words!r}"
    elif block.mark == "output":
        assert block.language in ("", "text"), f"{block.place}: this is {block.language}, not what a program prints"
    else:
        known = (*SHELL, *PARSED, "python")
        assert block.language in known, f"{block.place}: nobody runs this block: say why, in a comment above it"


@each_block
def test_a_block_of_data_can_be_parsed(block):
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "pyi": signature, "python": ast.parse}
    if block.language in readers:
        readers[block.language](block.text)


def signature(text):
    called = re.sub(r"^class \w+", "def made", text.rstrip().removesuffix(": ..."))
    ast.parse(f"{called}: ...")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in SHELL], ids=lambda block: block.place)
def test_what_a_block_installs_is_there_to_be_installed(block):
    for words in re.findall(r"pip install (.*)", block.text):
        for extras in re.findall(r"(?:sparrow-fl|\.|whl)\[([\w,-]+)\]", words):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), f"{block.place}: {extras}"
        for version in re.findall(r"sparrow_fl-([\d.]+)-py3-none-any\.whl", words):
            assert version == PROJECT["version"], f"{block.place}: the wheel is of {version}"


# --- running -------------------------------------------------------------------------------------------------------

HOME = "docs/README.md"
"""Each of its sections is a way of its own; of other pages all blocks are one way."""
RUN: dict[str, list[Block]] = {}
for each in BLOCKS:
    if each.runs and (each.language in SHELL or each.language == "python"):
        RUN.setdefault(f"{HOME}: {each.section}" if each.page == HOME else each.page, []).append(each)

AT = "--server http://SERVER:8000"
TRAINED = f"sparrow join {AT} --device-name one --data index=0,of=2 --threads 1 --export one.onnx --quiet"
WARD = f"sparrow federation create ward-3 --task digits {AT}"
BEFORE = {"docs/tracking.md": [TRAINED], "docs/export.md": [TRAINED], "docs/operating.md": [WARD]}
"""Pages about a coordinator that runs: what their reader has done on it before."""
FOLDER = ("HOST/FEDERATION/NAME", "*/default/one")
"""How a page writes the state folder of a device, and that of the one that was trained."""
ON_EACH = "# on each device"
"""The end of a line that two devices give, each under a name of its own."""


def rows(seed, shape, classes, count=60):
    """Samples whose class is that of their largest value."""
    x = np.random.default_rng(seed).normal(size=(count, *shape)).astype("f4")
    return x, x.reshape(count, -1)[:, :classes].argmax(1)


def devices_of(line):
    """What a line has one do: once, or on each of two devices."""
    if not line.endswith(ON_EACH):
        return [line]
    line = line.removesuffix(ON_EACH)
    return [f"{line.replace('model.onnx', f'{name}.onnx')} --device-name {name}" for name in ("one", "two")]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A reader's folder and home: data of their own, and ``sparrow`` in ~/sparrow and on the path."""
    folder, home = tmp_path / "desk", tmp_path / "home"
    programs = home / "sparrow" / "bin"
    folder.mkdir()
    programs.mkdir(parents=True)
    for name in ("docs", "deploy", "examples", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    for name, module in (("python", ""), ("python3", ""), ("sparrow", "-m sparrow "), ("uvicorn", "-m uvicorn ")):
        (programs / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {module}"$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").touch()
    x, y = rows(0, (8,), 8)
    np.savez(folder / "mine.npz", x_train=x, y_train=y, classes=8)
    for number, name in enumerate(("ada", "ben", "cleo", "ada-week2", "cleo-week2")):
        states = ("busy", "idle", "failed") if name == "cleo-week2" else ("busy", "idle")
        x, y = rows(number, (len(states),), len(states))
        lines = [f"{row[0]:.3f},{row[1]:.3f},{states[label]}" for row, label in zip(x, y, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["load,heat,state", *lines, ""]))
    x, y = rows(1, (1, 8, 8), 10)
    np.savez(folder / "digits.npz", x_test=x, y_test=y)
    np.save(folder / "x.npy", next(iter(digits.load("index=0,of=2", device="one", seed=0, batch_size=20).test))[0][:3])
    reader = Reader(home, path=str(programs))
    reader.folder = folder
    reader.choose_port()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ".local" / "state"))
    yield reader
    reader.stop()


@pytest.mark.integration
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page, desk, compiling):
    blocks, before = RUN[page], BEFORE.get(page, [])
    lines = [line for block in blocks if block.language in SHELL for line in block.lines]
    joins = sum(bool(DEVICE.match(line)) and "--federation" not in line for line in lines)
    settings = {"rounds": 2, "min_devices": 1 if page in BEFORE else max(1, joins), "evaluation_interval": 1}
    desk.environment |= {"COORDINATOR_DEFAULT_SETTINGS": json.dumps(settings), "COORDINATOR_RETRY_AFTER_SECONDS": "0"}
    needed = page in BEFORE or any(ADDRESSES.search(block.text) for block in blocks)
    if needed and not any(SERVER.match(line) for line in lines):
        before = ["sparrow serve", *before]
    namespace: dict[str, object] = {"__name__": "page"}
    for line in before:
        desk.do(desk.here(line))
    desk.wait_for_devices()
    in_front = False  # whether a device was started last that its reader waits for, having no other terminal
    for block in blocks:
        if block.language == "python":
            desk.wait_for_devices()
            named = re.search(r"(?:[Ss]ave this as |^)`([\w./-]+\.py)`[:,]?\s*$", block.before)
            if named:
                (desk.folder / named[1]).write_text(desk.here(block.text))
            else:
                exec(compile(desk.here(block.text), block.place, "exec"), namespace)
            continue
        for line in block.lines:
            if INSTALLS.match(line):
                continue
            print(f"{block.place}: ", end="")
            device = bool(DEVICE.match(line))
            if in_front and not device:
                desk.wait_for_devices()
            in_front = device and not line.endswith("&")
            for given in devices_of(desk.here(line.replace(*FOLDER))):
                desk.do(given)
    desk.wait_for_devices()
    for command, process, log in desk.servers:
        assert process.poll() is None, f"{command} has ended:\n{log.read_text()}"
