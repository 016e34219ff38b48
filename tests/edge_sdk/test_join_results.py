"""What ``join`` refuses, returns and raises, against a coordinator in the same process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.result import report
from edge_sdk.errors import BadArgument, NothingTrained, Refused, SdkError
from edge_sdk.join import FAILURES, JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task, load_task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol.failures import in_words
from sparrow.simulation import in_process as inprocess
from sparrow.simulation.host import Plan

from ..kinds import chosen

pytestmark = pytest.mark.integration  # plays whole federations

ALONE = JoinOptions(budget=1.0, deterministic=True)

NARROW = ("fedspu", "feddrop", "fjord", "heterofl", "hermes", "fedmp", "pfedgate", "prunefl_neurons")
OWN = {
    "dmpfl": {"rounds": 8, "method_settings": {"iterations": 2}},
    "prunefl": {"method_settings": {"prepare_rounds": 1}},
}


@pytest.fixture
def client(tmp_path):
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "coordinator", default_task=""))) as client:
        yield client


def digits(index: int, of: int = 2, more: str = "") -> Task:
    return load_task("digits", f"index={index},of={of}{more}", device=f"device-{index}", seed=0, batch_size=16)


def exploding() -> Task:
    """Finite at first, not after a step or two."""
    inputs = 1e18 * torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = [(inputs, (inputs[:, 0] > 0).long())]
    return Task("exploding", nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), F.cross_entropy, data, data)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"budget": budget}, r"budget=.* is invalid; give the share") for budget in (0.0, 1.5, -1, "0.5")),
        ({"budget": float("nan")}, "budget=nan is invalid"),
        ({"threads": 0}, "threads=0 is invalid; give a positive integer"),
        ({"memory_limit": -1}, "memory_limit=-1 is invalid"),
        ({"patience_seconds": -1}, "patience_seconds=-1 is invalid"),
        ({"accelerator": "gpu"}, "unknown accelerator 'gpu'; choose from auto, cpu, cuda"),
        ({"federation": "a/b"}, "cannot be a federation's name"),
        ({"name": ""}, "cannot be a device's name"),
        ({"task": nn.Linear(1, 1)}, "task is a Linear; give a Task"),
        ({"task": lambda info: None}, "returns a NoneType; return a Task"),
    ],
)
def test_an_argument_that_cannot_work_is_named(client, tmp_path, wrong, said):
    publish(inprocess.ADDRESS, "default", "digits", client=client)
    options = {name: wrong[name] for name in wrong if hasattr(JoinOptions, name)}
    given = {name: value for name, value in wrong.items() if name not in options}
    given = {"task": digits(0), "state_dir": tmp_path / "state", "client": client, "quiet": True, **given}
    with pytest.raises(BadArgument, match=said):
        join(inprocess.ADDRESS, options=JoinOptions(**options), **given)


def test_files_in_the_wrong_place_are_refused(client, tmp_path):
    with pytest.raises(BadArgument, match=r"is a folder; give --export a file in it"):
        join(inprocess.ADDRESS, digits(0), client=client, export=tmp_path, quiet=True)


def test_a_federation_that_is_not_there_brings_those_that_are(client, tmp_path):
    publish(inprocess.ADDRESS, "kitchen", "digits", client=client)
    with pytest.raises(Refused, match=r"'kitchn'.*\bkitchen\b"):
        join(inprocess.ADDRESS, digits(0), client=client, federation="kitchn", state_dir=tmp_path / "s", quiet=True)


def test_a_budget_that_a_fleet_cannot_mean_is_refused():
    with pytest.raises(BadArgument, match="give numbers above 0"):
        Plan("f", 2, budgets=(0.0,))


def test_a_device_whose_rounds_all_fail_ends_with_the_reason(client, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sparrow.coordinator.rounds.dispatch.REST_SECONDS", 0.0
    )  # after each failure it rests: here there is no need
    publish(inprocess.ADDRESS, "default", exploding(), client=client, rounds=50, min_devices=1)
    where = {"client": client, "name": "pi", "state_dir": tmp_path / "state", "options": ALONE}
    with pytest.raises(NothingTrained, match=rf"^pi\b.*\b{FAILURES} rounds\b.*\bnan\b"):
        join(inprocess.ADDRESS, exploding(), quiet=True, **where)
    records = client.get("/v1/federations/default/rounds").json()
    assert len(records) <= FAILURES + 1  # it left: no round waits for it


def test_a_device_that_arrives_after_a_failed_federation_reports_it(client, tmp_path):
    publish(inprocess.ADDRESS, "default", exploding(), client=client, rounds=1, min_devices=1, finetune_epochs=1)
    where = {"client": client, "name": "pi", "state_dir": tmp_path / "state", "options": ALONE}
    with pytest.raises(NothingTrained, match=r"^pi\b.*\bloss\b"):
        join(inprocess.ADDRESS, exploding(), quiet=True, **where)


def test_a_device_whose_first_updates_are_all_refused_gives_up_and_says_why(client, tmp_path, caplog):
    settings = {"method": "fedavg", "rounds": 3, "min_devices": 1, "local_steps": 1, "update_norm_limit": 1e-9}
    publish(inprocess.ADDRESS, "default", "digits", client=client, **settings)
    with (
        caplog.at_level(logging.WARNING, "edge_sdk.device.session"),
        pytest.raises(NothingTrained, match=r"accepted none of its updates: 3 rounds in a row failed: .*they moved by"),
    ):
        together(client, tmp_path, "default", [1.0])
    last = [each.getMessage() for each in caplog.records if each.name.startswith("edge_sdk.device.session")][-1]
    assert last.startswith("the update was refused: values: they moved by")
    assert last.endswith("3 updates in a row were refused, so this device gets no work for 10 minutes")


def together(client, tmp_path, federation, budgets, more=""):
    """The results of devices that join at the same time, one for each of ``budgets``. more: further options of data."""

    def run(index: int):
        return join(
            inprocess.ADDRESS,
            digits(index, len(budgets), more),
            client=client,
            federation=federation,
            name=f"device-{index}",
            state_dir=tmp_path / federation / str(index),
            options=JoinOptions(budget=budgets[index], deterministic=True),
            quiet=True,
            export=tmp_path / f"{federation}-{index}.onnx",
        )

    with ThreadPoolExecutor(len(budgets)) as pool:
        return list(pool.map(run, range(len(budgets))))


def check_line(result):
    """The README's own line."""
    assert f"{result.accuracy_before:.0%} before, {result.accuracy_after:.0%} after, {result.export.bytes} bytes"


def test_a_narrow_first_model_is_judged_too(client, tmp_path):
    publish(inprocess.ADDRESS, "default", "digits", client=client, method="fjord", rounds=1)
    for result in together(client, tmp_path, "default", [0.5, 0.5]):
        check_line(result)
        assert result.accuracy_before < result.accuracy_after


# hetlora is of adapters.
@pytest.mark.parametrize(
    "method",
    chosen(sorted(each.name for each in entry_points(group="sparrow.device_methods") if each.name != "hetlora")),
)
def test_every_method_s_result_has_the_figures_that_a_classification_has(client, tmp_path, method):
    publish(
        inprocess.ADDRESS, "default", "digits", client=client, **{"method": method, "rounds": 2, **OWN.get(method, {})}
    )
    more = ",public=0.1" if method == "fedmd" else ""
    for result in together(client, tmp_path, "default", [0.5 if method in NARROW else 1.0] * 2, more):
        check_line(result)


def test_a_device_below_pfedgates_smallest_budget_adapts_the_model(client, tmp_path, caplog):
    """With a gate of its own tiny budget it would answer below the dense model that it received: 0 of 55 % here."""
    publish(
        inprocess.ADDRESS,
        "default",
        "digits",
        client=client,
        method="pfedgate",
        method_settings={"smallest_budget": 0.5},
        rounds=8,
        early_stopping="off",
    )
    with caplog.at_level(logging.WARNING, "edge_sdk.device.session"):
        *_, least, less = together(client, tmp_path, "default", [0.5, 0.5, 0.1, 0.2])
    assert "budget of 0.1" in caplog.text
    for result in (least, less):
        assert result.adapted
        assert result.accuracy_after > result.accuracy_before - 0.05
        check_line(result)


# --- what the operator sees -------------------------------------------------------------------------------------------


def listed(client, **selection):
    return client.get("/v1/federations/default/devices", params=selection).json()


def broken(client, tmp_path, what):
    """Try to join as a device that cannot; raises its error."""
    task = digits(0)
    options = ALONE
    if what == "values":
        inputs, targets = next(iter(task.train))
        task = replace(task, train=[(torch.full_like(torch.as_tensor(inputs), torch.nan), torch.as_tensor(targets))])
    elif what == "memory":
        options = replace(ALONE, memory_limit=1)
    else:
        task = partial(_unreadable, what)
    join(inprocess.ADDRESS, task, client=client, name="pi", state_dir=tmp_path / "pi", options=options, quiet=True)


def _unreadable(what, info):
    if what == "program":
        raise TypeError("a fault of the program's own")
    raise FileNotFoundError(2, "No such file or directory", "/private/data.csv")


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("values", "data-unusable/values"),
        ("memory", "no-memory"),
        ("file", "data-unusable"),
        ("program", "program-error/TypeError"),
    ],
)
def test_a_device_that_cannot_join_is_listed_with_the_reason_until_it_does(client, tmp_path, what, failure):
    publish(inprocess.ADDRESS, "default", "digits", client=client, method="fedavg", rounds=1, min_devices=1)
    for _ in range(2):
        with pytest.raises((SdkError, TypeError)):
            broken(client, tmp_path, what)
    (found,) = listed(client)
    assert (found["doing"], found["failure"]["reason"]) == ("not_joined", in_words(failure))
    assert "private" not in str(found)
    info = client.get("/v1/federations/default").json()
    assert (info["status"], info["devices"]) == ("waiting", 0)
    where = {"client": client, "name": "pi", "state_dir": tmp_path / "pi", "options": ALONE, "quiet": True}
    result = join(inprocess.ADDRESS, digits(0), export=tmp_path / "pi.onnx", **where)
    assert result.export is not None
    (found,) = listed(client)
    assert (found["failure"], found["exported"], found["doing"]) == (None, True, "done")
    assert listed(client, only="not_exported") == []


def test_a_device_that_has_joined_and_cannot_start_again_is_listed_with_the_reason(client, tmp_path):
    publish(inprocess.ADDRESS, "default", "digits", client=client, method="fedavg", rounds=2, min_devices=2)
    where = {"client": client, "name": "pi", "state_dir": tmp_path / "pi", "options": ALONE, "quiet": True}
    assert join(inprocess.ADDRESS, digits(0), stop=lambda: bool(listed(client)), **where).interrupted
    with pytest.raises(SdkError):
        broken(client, tmp_path, "values")
    (found,) = listed(client)
    assert (found["status"], found["doing"]) == ("active", "away")
    assert found["failure"]["reason"] == in_words("data-unusable/values")
    assert listed(client, only="failing") == [found]


def test_a_device_all_of_whose_updates_were_refused_says_so(client, tmp_path):
    settings = {"method": "fedavg", "rounds": 2, "min_devices": 1, "local_steps": 1, "update_norm_limit": 1e-9}
    publish(inprocess.ADDRESS, "default", "digits", client=client, deadline_seconds=5, **settings)
    (result,) = together(client, tmp_path, "default", [1.0])
    assert (result.rounds, result.refused, result.nothing_accepted) == (2, 2, True)
    assert "2 rounds, 2 local steps, all of its 2 updates were refused" in report(result, "")
    (warning,) = [text for text in result.warnings if "refused 2 of this device's 2 updates" in text]
    assert "they moved by" in warning
