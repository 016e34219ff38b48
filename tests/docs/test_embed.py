"""docs/embed.md: an application that runs the page's blocks, in their order, against a real coordinator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..system.conftest import Coordinator

PAGE = (Path(__file__).parents[2] / "docs" / "embed.md").read_text()


@pytest.mark.integration
def test_its_blocks_run_in_their_order(tmp_path, monkeypatch, capfd):
    coordinator = Coordinator(tmp_path / "coordinator")
    coordinator.start()
    try:
        coordinator.create("default", method="fedspu", rounds=8, min_devices=1, local_epochs=20, early_stopping="off")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        names, said = {}, []
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block.replace("http://SERVER:8000", coordinator.url), "embed.md", "exec"), names)
            said.append(capfd.readouterr())
    finally:
        coordinator.close()
    assert len(said) == 8
    printed = [each.out for each in said]
    with_lines = [each.err for each in said if each.err]
    assert not with_lines, "a call that is not answered prints no line"
    assert re.fullmatch(r"\w+: round \d of 8, step \d+ of \d+\n", printed[1])
    stopped, ended = printed[2].splitlines()
    before = int(re.fullmatch(r"stopped after (\d) rounds", stopped)[1])
    assert 0 < before < int(re.fullmatch(r"(\d) 0\.\d+", ended)[1]), "it was stopped on the way, and went on"
    assert names["learner"].result.accuracy_after > 0.5
    assert re.fullmatch(r"\[\d \d \d\]\n", printed[3])
    assert names["scores"].shape == (3, 10)
    assert re.fullmatch(r"opening True\n", printed[5])
    assert printed[6].startswith("try again later: http://127.0.0.1:9 does not answer")
    assert printed[7].splitlines()[0].startswith("finished 8 ['kiosk-7'")
    assert len(printed[7].splitlines()) == 9
