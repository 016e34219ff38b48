"""docs/extending.md as printed: its package beside ours, its commands against a real coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import onnx.helper
import pytest
import torch
import torch.nn.functional as F

from edge_sdk.device import watchdog
from edge_sdk.device.policy import Policy
from sparrow.devices import power
from sparrow.devices.conditions import ConditionsReader
from sparrow.devices.readings import Files
from sparrow.devices.system import System
from sparrow.export.errors import ExportError
from sparrow.export.passes import installed_passes
from sparrow.protocol import checkpoint
from sparrow.transport import httpx

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


def paths(site: Path) -> str:
    """The PYTHONPATH of a process that has the package."""
    return os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="module")
def lab(site, tmp_path_factory):
    """A coordinator that has the package."""
    coordinator = Coordinator(tmp_path_factory.mktemp("lab") / "coordinator", PYTHONPATH=paths(site))
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
        assert program == "sparrow"
        ended = subprocess.run(
            [sys.executable, "-m", "sparrow", *arguments, *more],
            cwd=tmp_path,
            env=environment(PYTHONPATH=paths(site), OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run


def commands(name: str) -> list[str]:
    """The printed commands of this name."""
    lines = "".join(text for _, text in fenced("bash")).replace("\\\n", "").splitlines()
    return [line for line in lines if line.startswith(f"sparrow {name} ")]


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


@pytest.fixture
def imported(site, monkeypatch):
    """Import a module of the package into this process, where its entry points are seen."""
    monkeypatch.syspath_prepend(site)
    yield lambda name: importlib.import_module(f"mylab.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "mylab"]:
        del sys.modules[name]


@pytest.fixture
def fresh(monkeypatch):
    """Look for installed sources and conditions anew, before the test and after it."""
    caches = (power.installed_sources, watchdog.installed_conditions)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_the_sensor_is_read_before_the_built_in_ones(imported, fresh, tmp_path):
    system = dataclasses.replace(System.here(), files=Files(tmp_path))
    watts = tmp_path / imported("hardware").WATTS
    assert "mylab meter" not in [each.name for each in power.find_sources(system, None, lambda: 0.0)]
    watts.parent.mkdir(parents=True)
    watts.write_text("4.5")
    first, *_ = power.find_sources(system, None, lambda: 0.0)
    (reading,) = first.read(1.0)
    assert (first.name, reading.value, first.joules((4.5,), (5.5,), 2.0)) == ("mylab meter", 4.5, 10.0)


def test_the_condition_keeps_work_from_beginning(imported, fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(imported("hardware"), "STOP", tmp_path / "stop")
    nothing = ConditionsReader(System.here()).read()
    assert watchdog.judge(Policy(), nothing, working=False, now=datetime.now().astimezone()) == []
    (tmp_path / "stop").touch()
    (found,) = watchdog.judge(Policy(), nothing, working=True, now=datetime.now().astimezone())
    assert "stop exists; remove it" in found.text


def test_the_export_pass_is_applied(imported):
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [output])
    model = onnx.helper.make_model(graph, doc_string="notes")
    assert installed_passes(model).doc_string == ""


def test_a_pass_that_breaks_the_model_is_named(imported, monkeypatch):
    monkeypatch.setattr(imported("hardware"), "without_notes", lambda model: onnx.ModelProto())
    with pytest.raises(ExportError, match=r"without_notes \(mylab\.hardware:without_notes\)"):
        installed_passes(onnx.ModelProto())


def test_the_endpoint_answers_beside_the_coordinators_own(imported, tmp_path, monkeypatch):
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path))
    app = imported("app").app

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=SERVER) as client:
            assert (await client.get("/mylab/rooms")).json() == ["attic", "cellar"]
            assert (await client.get("/healthz")).status_code == 200

    asyncio.run(ask())


def test_a_method_with_phases_and_masks_of_its_own_runs_as_printed(run, lab):
    *_, fleet = commands("fleet")
    run(fleet, "--quiet")
    info = lab.info("masks")
    assert (info["status"], info["method"]) == ("finished", "ownmask")
    assert info["settings"]["method_settings"] == {"density": 0.5, "dense_rounds": 2}
    model = global_model(lab, "masks")
    assert {name: int((model[name] != 0).sum()) for name in ("0.weight", "2.weight")} == {
        "0.weight": 12,
        "2.weight": 16,
    }
    records = lab.get("/v1/federations/masks/rounds").json()
    assert [each["notes"].get("replaced") for each in records][:2] == [None, 0]
    assert max(each["counts"].get("new", 0) for each in records) > 0, "devices chose other weights than the round's"


def test_a_method_with_a_part_of_its_own_runs_as_printed(run, lab):
    _, fleet, _ = commands("fleet")
    run(fleet.replace("threshold=0.4", "threshold=1").replace("rounds=3", "rounds=1"), "--quiet")
    assert lab.info("agreed")["settings"]["method_settings"] == {"threshold": 1.0}
    all_agree = lab.get("/v1/federations/agreed/rounds").json()[0]["notes"]["agreed"]

    again = fleet.replace("--federation agreed", "--federation half").replace("rounds=3", "rounds=1")
    run(again, "--quiet")
    (first,) = lab.get("/v1/federations/half/rounds").json()
    assert first["parts_up"]["direction"] > 0
    assert 0 < all_agree < first["notes"]["agreed"] < sum(each.numel() for each in global_model(lab, "half").values())

    # Published by hand, with a server that moves nothing about which two samples disagree: what both began with.
    publish, *_ = commands("publish")
    run(publish.replace("publish lab2", "publish start").replace("effective_steps=6", "effective_steps=0"))
    run(f"sparrow fleet --server {SERVER} --federation start --devices 4 --memory --quiet --data sensors.csv")
    old = global_model(lab, "start")
    sent = [trained(old, label) for label in range(len(SAMPLES))]
    for name, value in global_model(lab, "half").items():
        votes = sum(n * torch.sign(each[name] - old[name]) for n, each in zip(TRAINED, sent, strict=True))
        mean = sum(n * each[name] for n, each in zip(TRAINED, sent, strict=True)) / sum(TRAINED)
        torch.testing.assert_close(value, torch.where(votes.abs() >= 0.4 * sum(TRAINED), mean, old[name]))


def test_method_task_and_partition_run_in_a_fleet_as_printed(run, lab):
    fleet, *_ = commands("fleet")
    said = run(fleet, "--quiet")
    assert f"4 devices, {4 * ROUNDS} device-rounds" in said
    info = lab.info("lab")
    assert (info["status"], info["method"], info["task"]) == ("finished", "fednova", "sensors")
    assert info["settings"]["method_settings"] == {"effective_steps": LENGTH}

    # Published by hand, with a server that takes no step: the model stays as it was, and is what "lab" began with.
    publish, *_ = commands("publish")
    run(publish.replace("effective_steps=6", "effective_steps=0"))
    run(f"sparrow fleet --server {SERVER} --federation lab2 --devices 4 --memory --quiet --data sensors.csv")
    assert lab.info("lab2")["settings"]["method_settings"] == {"effective_steps": 0.0}
    assert lab.info("lab2")["model_version"] > 0
    start = global_model(lab, "lab2")

    end = global_model(lab, "lab")
    fednova, fedavg = (expected(start, normalised=normalised) for normalised in (True, False))
    assert apart(end, fednova) < 1e-5
    assert apart(end, fedavg) > 1e-3, "the test could not tell"
