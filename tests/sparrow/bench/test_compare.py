"""Methods on a user's own data, in one command: what it runs, what it refuses, the page that it leaves."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sparrow.bench import rows
from sparrow.bench.__main__ import main
from sparrow.bench.compare import compared
from sparrow.bench.experiment import trials
from sparrow.bench.files import files_of_devices
from sparrow.protocol.settings import FederationSettings

PEOPLE = ("ann", "bob", "cleo")


def samples(count, seed=0, features=6):
    random = np.random.default_rng(seed)
    inputs = random.normal(5, 3, (count, features)).astype("f4")
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(int)


@pytest.fixture
def data(tmp_path):
    """One file of all, one that names people, and a folder with a file for each device."""
    x, y = samples(150)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    np.savez(tmp_path / "people.npz", x=x, y=y, person=np.array(PEOPLE)[np.arange(150) % 3])
    (tmp_path / "each").mkdir()
    for index, name in enumerate(PEOPLE):
        x, y = samples(60, seed=index)
        np.savez(tmp_path / "each" / f"{name}.npz", x_train=x, y_train=y, classes=2)
    return tmp_path


def command(*words):
    return ["compare", *map(str, words)]


# --- one command -----------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(("form", "seeds"), [("people.npz", 2), ("each", 1)])
def test_three_methods_on_ones_own_npz_end_with_a_page_and_a_table(data, form, seeds, capsys):
    folder = data / "work"
    words = command("--data", data / form, "rounds=2", "--seeds", seeds, "--processes", 1, "--folder", folder)
    assert main(words) == 0
    out = capsys.readouterr().out
    name = form.removesuffix(".npz")
    *written, _, head, spu, avg, local, _, note = out.splitlines()
    assert str(folder / f"{name}.md") in written
    for path in written:
        assert (folder / path).stat().st_size > 1000
    assert "accuracy, %" in head
    assert [line.split()[0] for line in (spu, avg, local)] == ["auto", "fedavg+ft", "local"]
    assert f"3 devices and {seeds} seed" in note
    found = rows.read(folder / "results.jsonl")
    assert [each.trial.label for each in found] == ["auto", "fedavg+ft", "local"] * seeds
    for each in found:
        assert "early_stopping" not in each.trial.settings, "as published"
        assert each.trial.settings["precision"] == "int8", "auto's, and so everybody's"
        assert all(device.accuracy is not None for device in each.result.devices)
    page = (folder / f"{name}.html").read_text()
    assert page.count("data:image/png;base64,") == len([path for path in written if path.endswith(".png")])
    assert "<th>" in page
    before = (folder / "results.jsonl").read_bytes()
    assert main([*words, "--resume"]) == 0
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.integration
def test_a_task_of_an_installed_package_is_compared_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "ownlab.py").write_text(
        "import torch\nfrom torch import nn\n"
        "from edge_sdk.tasks import build_seeded\nfrom edge_sdk.tasks.loading import Arrays, classification\n\n"
        "def load(data, *, device, seed, batch_size):\n"
        "    assert data == f'table{device[-1]}', data\n"
        "    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(int(device[-1])))\n"
        "    parts = [Arrays(x[i], (x[i, 0] > 0).long()) for i in (slice(0, 30), slice(30, 40), slice(40, 60))]\n"
        "    model = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), seed)\n"
        "    return classification('ownlab', model, *parts, batch_size=batch_size)\n"
    )
    info = tmp_path / "ownlab-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ownlab\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sparrow.tasks]\nownlab = ownlab:load\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--task", "ownlab", "--data", "table{index}", "--devices", 2, "rounds=1", "--seeds", 1)
    more = ("--methods", "local", "--processes", 1, "--folder", tmp_path / "work")
    try:
        assert main(command(*words, *more)) == 0
    finally:
        sys.modules.pop("ownlab", None)
    (found,) = rows.read(tmp_path / "work" / "results.jsonl")
    assert found.trial.task == "ownlab"
    assert len(found.result.devices) == 2


@pytest.mark.integration
def test_the_experiment_on_digits_needs_no_data_and_draws_its_page(tmp_path, capsys):
    more = (
        "--scale",
        "0.05",
        "--seed",
        "0",
        "--processes",
        "2",
        "--folder",
        str(tmp_path),
        "--only",
        "FedSPU",
        "--only",
        "Local",
    )
    assert main(["run", "digits", *more]) == 0
    found = rows.read(tmp_path / "results.jsonl")
    assert [each.trial.label for each in found] == ["FedSPU", "Local"]
    assert (tmp_path / "digits-curves.png").exists()
    assert "FedSPU minus it" in capsys.readouterr().out


# --- what is compared ------------------------------------------------------------------------------------------------


def test_defaults_are_as_published_and_only_some_methods_get_small_budgets(data):
    plan = compared("npz", str(data / "mine.npz"))
    assert (plan.devices, plan.partition, plan.seeds) == (3, "dirichlet", (0, 1, 2))
    assert "standardised" in plan.about
    assert [run.budgets for run in plan.methods] == [(0.2, 0.4, 0.6, 0.8, 1.0), (1.0,), (1.0,)]
    assert plan.methods[1].settings == {"finetune_epochs": 1}
    usual = FederationSettings().model_dump(mode="json")
    first = next(trials(plan, "mine", {}))
    beside = {"min_devices": 3, "deadline_seconds": 86400.0, "global_evaluation_devices": 3}
    assert {**usual, **first.settings} == {**usual, **beside, "method": "auto", "precision": "int8", "seed": 0}


def test_people_and_files_are_devices(data):
    assert compared("npz", str(data / "people.npz")).partition == "person"
    assert compared("npz", str(data / "people.npz")).devices == 3
    for text in (data / "each", data / "each" / "*.npz"):
        plan = compared("npz", str(text))
        assert (plan.partition, plan.devices) == ("default", 3)
    assert compared("npz", str(data / "each"), devices=2).devices == 2
    plan = compared("npz", str(data / "mine.npz"), partition="dirichlet,alpha=1", settings={"cohort": "2"})
    assert next(trials(plan, "mine", {})).data_text == "partition=dirichlet,alpha=1,seed=0"
    assert plan.settings == {"cohort": 2, "precision": "int8"}
    plan = compared("npz", str(data / "mine.npz"), methods="fedspu", settings={"cohort": "2"})
    assert plan.settings == {"cohort": 2}


def test_files_are_counted_where_they_are_numbered(data):
    (data / "each" / "ann.npz").rename(data / "each" / "device-0.npz")
    (data / "each" / "bob.npz").rename(data / "each" / "device-1.npz")
    found = files_of_devices("npz", f"{data}/each/{{name}}.npz")
    assert found == tuple(f"{data}/each/device-{index}.npz" for index in range(2))
    assert files_of_devices("mnist", str(data)) == ()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--data none.npz", 6, "none.npz: there is no such file; check --data"),
        ("--data mine.npz --methods fedspuu", 6, "did you mean fedspu?"),
        ("--data mine.npz --methods local,local", 2, "local is named twice; name it once"),
        ("--data mine.npz --devices 40", 1, "150 samples cannot give 40 devices 10 each; use fewer devices"),
        ("--data mine.npz --devices 1", 2, "takes at least 2"),
        ("--data mine.npz --seeds 0", 2, "--seeds 0: give at least 1"),
        ("--data mine.npz rounds=0", 2, "rounds"),
        ("--data people.npz --devices 4", 1, "4 devices for 3 people; leave of= out, or set of=3 (--devices 3 of"),
        ("--data each --devices 4", 1, "3 files are too few for 4 devices"),
        ("--data each --partition iid", 2, "each device has its own file and nothing is distributed; leave it out"),
        ("--data each/{index}.npz", 6, "for files with other names name their folder"),
        ("--data mine.npz --partition nosuch", 2, "unknown partition 'nosuch'"),
        ("--task nosuch", 6, "nosuch"),
        ("", 2, "add --data"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(data, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(data)
    assert main(command(*words.split())) == code
    error = capsys.readouterr().err
    assert said in error.splitlines()[-1]
    assert not list(data.glob("runs/**/trials"))


def test_devices_whose_models_differ_are_named(data, monkeypatch, capsys):
    monkeypatch.chdir(data)
    x, y = samples(60, features=5)
    np.savez(data / "each" / "cleo.npz", x_train=x, y_train=y, classes=2)
    assert main(command("--data", "each")) == 1
    error = capsys.readouterr().err
    assert "each/cleo.npz: its model has fc0.weight of (64, 5), that of each/ann.npz (64, 6)" in error
    assert "same shape" in error
