"""Pages and devices with the SDK play one federation, and what breaks does not change its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from edge_sdk.tasks.dealing import deal, read_dealing
from edge_sdk.tasks.digits import load_images
from sparrow.protocol.evidence import CANDIDATES, GLOBAL

from ..kinds import chosen
from . import browsers
from .browsers import PageDevice
from .conftest import Coordinator, Device, Devices, Nursery, one_machine, wait_until
from .proxy import Exchange, Fault, Proxy, Trouble

browser = browsers.browser

NAME = "lab"
SEED = 3
NAMES = ("one", "two", "three", "four")
"""The first two are pages wherever there are some."""
OF = 16
"""Each device has the images of one of so many."""
BUDGET = 0.5
SETTINGS = {
    "method": "fedspu",
    "rounds": 3,
    "cohort": 4,
    "min_devices": 4,
    "local_epochs": 30,
    "learning_rate": 0.05,
    "evaluation_interval": 2,
    "seed": SEED,
}
SAME = (
    *("cohort", "updates", "num_examples", "training_flops", "finetune_flops", "counts", "stopped", "handed_back"),
    *("evaluated_devices", "accuracy_personal", "accuracy_global", "accuracy_personal_decile", "expired"),
)
"""Fields of a round's record that do not depend on the last bits of a value."""
CLOSE = ("train_loss", "loss_personal", "loss_global")


def part_of(place: int) -> str:
    return f"index={place},of={OF}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The samples of each device as a file for its page: those that an SDK device takes of the task by itself."""
    folder, dataset, kept = tmp_path_factory.mktemp("samples"), load_images(), {}
    for place, name in enumerate(NAMES):
        dealing = read_dealing(part_of(place), task="digits", seed=SEED, needs_path=False)
        parts = deal(dataset, dealing, device=name)
        arrays: dict[str, Any] = {"classes": 10}
        for use, index in (("train", parts.train), ("val", parts.validation), ("test", parts.test)):
            arrays |= {f"x_{use}": dataset.inputs[index], f"y_{use}": dataset.targets[index]}
        kept[name] = folder / f"{name}.npz"
        np.savez(kept[name], **arrays)
    return kept


@contextmanager
def played(
    nursery: Callable[[], Nursery], folder: Path, more: dict[str, Any] | None = None, **environment: str
) -> Iterator[tuple[Coordinator, Devices]]:
    """A coordinator with the federation, and devices in their own folders. more: settings beside the usual ones."""
    with one_machine(nursery, folder, **environment) as (coordinator, devices):
        coordinator.create(NAME, **{**SETTINGS, **(more or {})})
        yield coordinator, devices


def start_sdk(
    coordinator: Coordinator, devices: Devices, *names: str, budget: float = BUDGET, server: str = ""
) -> list[Device]:
    """Start devices with the SDK. server: the address that they are given; by default the coordinator's."""
    words = ("--engine", "onnx", "--budget", str(budget))
    server = server or coordinator.url
    return [devices(server, NAME, name, *words, "--data", part_of(NAMES.index(name))) for name in names]


def outcome(coordinator: Coordinator) -> SimpleNamespace:
    """The final model and the records of a federation that has finished."""
    wait_until(lambda: coordinator.info(NAME)["status"] == "finished", "the federation to finish", timeout=90)
    answer = coordinator.get(f"/v1/federations/{NAME}/model")
    return SimpleNamespace(model=load(answer.content), rounds=coordinator.rounds(NAME))


@pytest.fixture(scope="module")
def undisturbed(nursery: Callable[[], Nursery], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The outcome where all devices have the SDK and nothing breaks."""
    return of_the_sdk_alone(nursery, tmp_path_factory.mktemp("sdk"))


def of_the_sdk_alone(
    nursery: Callable[[], Nursery], folder: Path, more: dict[str, Any] | None = None, budget: float = BUDGET
) -> SimpleNamespace:
    with played(nursery, folder, more) as (coordinator, devices):
        started = start_sdk(coordinator, devices, *NAMES, budget=budget)
        found = outcome(coordinator)
        for each in started:
            assert each.wait() == 0, each.output
        return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative L2 of two models of the same tensors."""
    assert one.keys() == other.keys()
    left, right = (np.concatenate([each[name].ravel().astype(np.float64) for name in one]) for each in (one, other))
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


def assert_same(found: SimpleNamespace, undisturbed: SimpleNamespace) -> None:
    """The same model and the same records, but for the last bits of two runtimes."""
    assert distance(found.model, undisturbed.model) < 1e-5
    assert len(found.rounds) == len(undisturbed.rounds) == SETTINGS["rounds"]
    for one, other in zip(found.rounds, undisturbed.rounds, strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}
        for name in CLOSE:
            wanted = other[name] if other[name] is None else pytest.approx(other[name], rel=1e-4)
            assert one[name] == wanted, name
        assert one["updates"] == len(NAMES), "each counted once"
    assert any(record["accuracy_personal"] is not None for record in found.rounds)


@pytest.fixture
def open_device(browser: Any) -> Iterator[Callable[..., PageDevice]]:
    """Opens pages that are devices, each a browser user's of its own unless ``context`` names one."""
    with ExitStack() as stack:

        def open_one(server: str, federation: str = NAME, *, context: Any = None) -> PageDevice:
            if context is None:
                context = browser.new_context()
                stack.callback(context.close)
            return PageDevice(context, server, federation)

        yield open_one


def open_both(
    open_device: Callable[..., PageDevice], server: str, files: dict[str, Path], budget: float = BUDGET
) -> list[PageDevice]:
    """The first two devices as pages that take part."""
    pages = [open_device(server) for _ in range(2)]
    for page, name in zip(pages, NAMES, strict=False):
        page.take_part(files[name], name, budget=budget, seed=SEED)
    return pages


@pytest.mark.parametrize("where", ["this machine", "a network"])
def test_pages_and_the_sdk_end_with_the_model_of_the_sdk_alone(
    where, nursery, tmp_path, open_device, files, undisturbed
):
    """On loopback pages are isolated and have threads; over plain http of a network browsers hold much back."""
    with played(nursery, tmp_path, COORDINATOR_HOSTS="phones.test") as (coordinator, devices):
        server = coordinator.url if where == "this machine" else f"http://phones.test:{coordinator.port}"
        started = start_sdk(coordinator, devices, *NAMES[2:])
        pages = open_both(open_device, server, files)
        found = outcome(coordinator)
        for each in started:
            assert each.wait() == 0, each.output
        for page in pages:
            page.wait_for("state.phase === 'finished'")
            state = page.state
            assert (state["secure"], state["isolated"]) == ((True, True) if where == "this machine" else (False, False))
            assert state["threads"] > 1 if where == "this machine" else state["threads"] == 1
            assert state["rounds"] == SETTINGS["rounds"]
            assert page.said == []
    assert_same(found, undisturbed)


@pytest.mark.parametrize("precision", chosen(["fp32", "int8"], ["int8"]))
def test_pages_add_their_class_frequencies_and_choose_with_all_others_at_the_end(
    nursery, tmp_path, open_device, files, precision
):
    """Few epochs: the first steps from outputs so far apart enlarge the last bits that two runtimes differ in."""
    more = {"logit_adjustment": 1.0, "logit_adjustment_from": 0.01, "local_epochs": 3, "precision": precision}
    more |= {"personal_model": "fleet", "finetune_epochs": 3}
    wanted = of_the_sdk_alone(nursery, tmp_path / "sdk", more)
    assert wanted.rounds[-1]["finetune_flops"] > 0
    assert wanted.rounds[0]["notes"]["label_skew_permille"] > 10, "outputs are adjusted from the second round on"
    with played(nursery, tmp_path / "both", more) as (coordinator, devices):
        started = start_sdk(coordinator, devices, *NAMES[2:])
        pages = open_both(open_device, coordinator.url, files)
        found = outcome(coordinator)
        for each in started:
            assert each.wait() == 0, each.output
        for page in pages:
            page.wait_for("state.phase === 'finished'")
        reports = coordinator.get(f"/v1/federations/{NAME}/rounds/{SETTINGS['rounds']}/reports").json()
    compared = {each["device"] for each in reports if each["kind"] == "compare" and each["report"].get("evidence")}
    assert compared == {*NAMES}
    assert {each["report"].get("taken") for each in reports if each["kind"] == "evaluate"} <= {GLOBAL, *CANDIDATES}
    assert found.rounds[0]["notes"]["label_skew_permille"] == wanted.rounds[0]["notes"]["label_skew_permille"]
    if precision == "fp32":
        assert_same(found, wanted)
    assert distance(found.model, wanted.model) < 1e-5, "a few values are rounded otherwise under int8"


def test_pages_choose_among_copy_global_model_and_mixtures_as_the_sdk_does(nursery, tmp_path, open_device, files):
    """A rate of 1 spoils the copies."""
    tuned = {"finetune_epochs": 2, "finetune_learning_rate": 1.0, "clip": 5.0}
    more = {"method": "fedavg", "local_epochs": 3, "rounds": 2, **tuned}
    wanted = of_the_sdk_alone(nursery, tmp_path / "sdk", more, budget=1.0)
    with played(nursery, tmp_path / "both", more) as (coordinator, devices):
        started = start_sdk(coordinator, devices, *NAMES[2:], budget=1.0)
        pages = open_both(open_device, coordinator.url, files, budget=1.0)
        found = outcome(coordinator)
        for each in started:
            assert each.wait() == 0, each.output
        for page in pages:
            page.wait_for("state.phase === 'finished'")
        reports = coordinator.get(f"/v1/federations/{NAME}/rounds/2/reports").json()
    judged = {each["device"]: each["report"] for each in reports if each["kind"] == "evaluate"}
    assert all("copy" in judged[name]["others"] for name in NAMES[:2]), "pages kept another model than the copy"
    last, other = found.rounds[-1], wanted.rounds[-1]
    assert last["accuracy_personal"] == other["accuracy_personal"]
    assert last["loss_personal"] == pytest.approx(other["loss_personal"], rel=1e-4)
    assert last["accuracy_personal"] >= last["accuracy_global"] - 0.05


def test_a_page_closed_during_training_resumes(nursery, tmp_path, open_device, files, undisturbed):
    """It has its samples, its identity and its model, and trains the round again, to the same update."""
    with played(nursery, tmp_path) as (coordinator, devices):
        start_sdk(coordinator, devices, *NAMES[2:])
        page, _ = open_both(open_device, coordinator.url, files)
        context = page.page.context
        page.die_when(
            "state.work?.kind === 'train' && state.work.round > 1 && 0 < state.work.step < state.work.steps / 2"
        )
        died_in = coordinator.rounds(NAME)[-1]
        assert died_in["status"] == "open"
        assert died_in["updates"] < len(NAMES)
        again = PageDevice(context, coordinator.url, NAME)
        found = outcome(coordinator)
        again.wait_for("state.phase === 'finished'")
        assert again.state["rounds"] == SETTINGS["rounds"]
        assert again.state["device"]["name"] == NAMES[0]
    assert_same(found, undisturbed)


class SecondUpdateHeld(Trouble):
    """Holds the second update before anything of it is passed on."""

    def __init__(self) -> None:
        self.fault = Fault("PUT", "/update", "request")
        self._updates = 0

    def befalls(self, exchange: Exchange) -> Fault | None:
        if not self.fault.fits(exchange):
            return None
        self._updates += 1
        return self.fault if self._updates == 2 else None


def test_pages_go_on_when_the_coordinator_is_killed_in_the_middle_of_a_round(
    nursery, tmp_path, open_device, files, undisturbed
):
    with played(nursery, tmp_path) as (coordinator, devices):
        trouble = SecondUpdateHeld()
        with closing(Proxy(coordinator.port, trouble=trouble)) as between:
            start_sdk(coordinator, devices, NAMES[2])
            start_sdk(coordinator, devices, NAMES[3], server=between.url)
            pages = open_both(open_device, coordinator.url, files)
            # Round 2 stays open without this update.
            assert trouble.fault.reached.wait(90)
            coordinator.kill()
            coordinator.start()
            (record,) = coordinator.rounds(NAME)[1:]
            assert (record["round"], record["status"]) == (2, "open")
            trouble.fault.ended.set()
            found = outcome(coordinator)
            for page in pages:
                page.wait_for("state.phase === 'finished'")
    assert_same(found, undisturbed)


def test_an_upload_that_breaks_goes_on_where_it_broke(coordinator, proxy, open_device, tmp_path):
    """A page's own server is the proxy: it has its files from there, too.

    The connection breaks twice. Chromium itself sends all again, once, where the broken one had been used before.
    """
    settings = {"method": "fedavg", "rounds": 1, "cohort": 1, "min_devices": 1, "local_steps": 1}
    body = {"name": NAME, "task": "mnist:leaf", "settings": {**settings, "evaluation_interval": 0}}
    coordinator.http.post("/v1/federations", json=body).raise_for_status()
    chance = np.random.default_rng(0)
    pixels = chance.integers(0, 256, (12, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "made-up.npz", x_train=pixels, y_train=np.arange(12) % 10, classes=10)
    between = proxy()
    for _ in range(2):
        between.fault("PUT", "/update", "request", after=3 * 2**20, hold=False)
    page = open_device(between.url)
    page.take_part(tmp_path / "made-up.npz", "phone")
    page.wait_for("state.phase === 'finished'")

    calls = [each for each in between.exchanges if each.path.endswith("/update") or "/update?sha256=" in each.path]
    of_training = [each for each in calls if each.path.startswith(calls[0].path)]
    broken, last = of_training[:-1], of_training[-1]
    whole = 4 * coordinator.info(NAME)["parameters"]
    assert [each.up for each in broken if each.method == "PUT"] == [3 * 2**20] * 2
    assert (broken[-1].method, broken[-1].status) == ("GET", 200), "asked what has arrived"
    assert (last.method, last.status) == ("PUT", 201)
    assert 0 < last.up <= whole - 2 * 2**20, "the rest alone"
    (record,) = coordinator.rounds(NAME)
    assert (record["updates"], record["handed_back"], record["expired"]) == (1, 0, 0)
    assert page.state["rounds"] == 1
    assert page.said == []
