"""docs/extending.md as printed: its package beside ours, its commands against a real coordinator."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge_sdk.protocol import checkpoint

from .conftest import Coordinator, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
SERVER = "http://127.0.0.1:8000"
SAMPLES = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, -0.5], [-1.0, 0.5, 0.0], [0.5, -1.0, 1.0]], dtype=np.float32)
"""One per class: all samples of a class are alike, so that no order of batches matters."""
DEALT, TRAINED, STEPS = (8, 14, 20, 31), (4, 8, 12, 18), (5, 10, 15, 25)
"""Per class: samples in the table; those its device trains on; steps of five epochs in batches of 4."""
ROUNDS, LENGTH, LEARNING_RATE = 3, 6.0, 0.05


def fenced(language: str) -> list[tuple[str, str]]:
    """Each block of this language: the file's name in the line above it, or "", and the text."""
    found = re.findall(rf"^(?:`([\w./]+)`\n\n)?```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/extending.md has no block of {language}"
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder that ``pip install`` would have filled: the package, and its entry points in its dist-info."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "mylab").mkdir()
    (folder / "mylab" / "__init__.py").touch()
    for name, text in fenced("python"):
        (folder / name).write_text(text)
    ((name, text),) = fenced("toml")
    assert name == "pyproject.toml"
    project = tomllib.loads(text)["project"]
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    about.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def lab(site, tmp_path_factory):
    """A coordinator that has the package."""
    coordinator = Coordinator(tmp_path_factory.mktemp("lab") / "coordinator", PYTHONPATH=str(site))
    coordinator.start()
    yield coordinator
    coordinator.close()


@pytest.fixture
def run(site, lab, tmp_path):
    """Run a printed command, with what is to be replaced in it, where the table is; returns what it wrote."""
    rows = [[*SAMPLES[label], label] for label, count in enumerate(DEALT) for _ in range(count)]
    np.savetxt(tmp_path / "sensors.csv", rows, delimiter=",", fmt="%g")

    def run(command: str, *more: str) -> str:
        program, *arguments = shlex.split(command.replace(SERVER, lab.url))
        assert program == "python"
        ended = subprocess.run(
            [sys.executable, *arguments, *more],
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(site), OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run


def commands(module: str) -> list[str]:
    """The printed commands of one module."""
    lines = "".join(text for _, text in fenced("bash")).replace("\\\n", "").splitlines()
    return [line for line in lines if f"-m {module} " in line]


def global_model(lab: Coordinator, federation: str) -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.load(lab.get(f"/v1/federations/{federation}/model").content)
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


def trained(model: dict[str, torch.Tensor], label: int) -> dict[str, torch.Tensor]:
    """Gradient descent on the one sample of a class."""
    inputs, target = torch.from_numpy(SAMPLES[label : label + 1]), torch.tensor([label])
    for _ in range(STEPS[label]):
        model = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
        hidden = torch.tanh(F.linear(inputs, model["0.weight"], model["0.bias"]))
        F.cross_entropy(F.linear(hidden, model["2.weight"], model["2.bias"]), target).backward()
        model = {name: tensor.detach() - LEARNING_RATE * tensor.grad for name, tensor in model.items()}
    return model


def expected(model: dict[str, torch.Tensor], *, normalised: bool) -> dict[str, torch.Tensor]:
    """FedNova by its formula, or FedAvg, where each device holds one class."""
    for _ in range(ROUNDS):
        sent = [trained(model, label) for label in range(len(SAMPLES))]
        shares = [n / sum(TRAINED) for n in TRAINED]
        factors = [p * LENGTH / steps if normalised else p for p, steps in zip(shares, STEPS, strict=True)]
        model = {
            name: old + sum(c * (new[name] - old) for c, new in zip(factors, sent, strict=True))
            for name, old in model.items()
        }
    return model


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_it_is_short():
    assert len(PAGE.splitlines()) < 150


@pytest.mark.slow
def test_method_task_and_partition_run_in_a_fleet_as_printed(run, lab):
    (fleet,) = commands("edge_sdk.simulation.simulate")
    said = run(fleet, "--quiet")
    assert f"4 devices, {4 * ROUNDS} device-rounds" in said
    info = lab.info("lab")
    assert (info["status"], info["method"], info["task"]) == ("finished", "fednova", "sensors")
    assert info["settings"]["method_settings"] == {"effective_steps": LENGTH}

    # Published by hand, with a server that takes no step: the model stays as it was, and is what "lab" began with.
    publish, *_ = commands("edge_sdk.publish")
    run(publish.replace("effective_steps=6", "effective_steps=0"))
    run(f"sparrow fleet --server {SERVER} --federation lab2 --devices 4 --memory --quiet --data sensors.csv")
    assert lab.info("lab2")["settings"]["method_settings"] == {"effective_steps": 0.0}
    assert lab.info("lab2")["model_version"] > 0
    start = global_model(lab, "lab2")

    end = global_model(lab, "lab")
    fednova, fedavg = (expected(start, normalised=normalised) for normalised in (True, False))
    assert apart(end, fednova) < 1e-5
    assert apart(end, fedavg) > 1e-3, "the test could not tell"
