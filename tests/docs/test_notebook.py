"""docs/notebook.ipynb runs in a real Jupyter kernel, is printed with its outputs, and stays small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def check(cells):
    """Every cell of code has run, without an error or a warning; one has drawn a picture, one has the comparison."""
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    assert len(outputs) > 3
    found = [each for outputs_ in outputs for each in outputs_]
    assert {each["output_type"] for each in found} <= {"execute_result", "display_data"}, found
    assert any("image/png" in each["data"] for each in found)
    (accuracy,) = (
        "".join(each["data"]["text/plain"]) for each in found if "FedAvg" in str(each) and "round" in str(each)
    )
    last = [float(text) for text in accuracy.splitlines()[-1].split()[1:]]
    assert len(last) == 3
    assert last[0] > last[2], "FedSPU is above training alone"


def test_it_has_its_outputs():
    check(json.loads(NOTEBOOK.read_text())["cells"])


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages in this process; the notebook runs in another
def test_it_runs_in_a_kernel(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'sparrow-fl[dev]'")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", ""))))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(notebook.cells)
    assert not list(tmp_path.iterdir()), "it writes nothing"
