"""pFedGate on the wire, read by a proxy: the gate stays, updates are touched blocks, payloads what has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from edge_sdk.device.state import StateFolder
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.public import MODELS
from sparrow.protocol import bundle
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import unpack
from sparrow.transport import httpx

from .conftest import Coordinator, Machine
from .proxy import Exchange, Proxy

NAME, LATE, ROUNDS = "gates", "late", 4
DEVICES = {"one": 0.4, "two": 0.7}
SPARE = 2048
"""What an exchange may take beside its values: a header, a bitmap, a report."""


def task(name: str) -> Task:
    generator = torch.Generator().manual_seed(len(name))
    inputs, targets = torch.randn(40, 1, 28, 28, generator=generator), torch.arange(40) % 10
    train, validation = Arrays(inputs[:32], targets[:32]), Arrays(inputs[32:], targets[32:])
    return classification("random", MODELS["mnist"]["small"].build(), train, validation, None, batch_size=8)


@dataclass
class Played:
    """What a proxy saw of each device, and everything that each device has ever kept."""

    manifest: Manifest
    proxies: dict[str, Proxy]
    kept: dict[str, list[tuple[Tensors, Tensors]]] = field(default_factory=dict)

    def exchanges(self, name: str, method: str, ending: str) -> list[Exchange]:
        return [
            each
            for each in self.proxies[name].exchanges
            if each.method == method and urlsplit(each.path).path.endswith(ending)
        ]

    def updates(self, name: str) -> list[bundle.Bundle]:
        sent = (each.sent.split(b"\r\n\r\n", 1) for each in self.exchanges(name, "PUT", "/update"))
        return [bundle.decode(body, self.manifest) for head, body in sent if bundle.MEDIA_TYPE.encode() in head]


@pytest.fixture(scope="module")
def coordinator(machine: Machine) -> Coordinator:
    return machine()[0]


@pytest.fixture(scope="module")
def played(coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Two devices to the end, then a third that comes too late. An evaluation after the second round and the last."""
    folder = tmp_path_factory.mktemp("devices")
    rules = {"smallest_budget": 0.3, "blocks": 10, "touched_limit": 0.75, "gate_learning_rate": 0.5}
    publish(
        coordinator.url,
        NAME,
        task(""),
        method="pfedgate",
        method_settings=rules,
        rounds=ROUNDS,
        min_devices=len(DEVICES),
        local_epochs=1,
        evaluation_interval=2,
        early_stopping="off",
    )
    manifest = Manifest.model_validate(coordinator.get(f"/v1/federations/{NAME}/manifest").json())
    proxies = {name: Proxy(coordinator.port, keeps=True) for name in (*DEVICES, LATE)}
    everything = Played(manifest, proxies)
    save = StateFolder.save

    def watched(self, manifest, personal, progress, own=None, feedback=None, **more):  # type: ignore[no-untyped-def]
        if personal is not None and own:
            copied = [{name: np.array(tensor) for name, tensor in tensors.items()} for tensors in (personal, own)]
            everything.kept.setdefault(self.path.name, []).append((copied[0], copied[1]))
        save(self, manifest, personal, progress, own, feedback, **more)

    def take_part(name: str) -> None:
        budget = DEVICES.get(name, 0.5)
        join(
            proxies[name].url,
            task(name),
            federation=NAME,
            name=name,
            state_dir=folder / name,
            options=JoinOptions(budget=budget, patience_seconds=30, deterministic=True),
            quiet=True,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateFolder, "save", watched)
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(take_part, name) for name in DEVICES]:
                future.result(60)
        take_part(LATE)
    yield everything
    for proxy in proxies.values():
        proxy.close()


def pieces(tensor: np.ndarray) -> list[bytes]:
    """Eight values in a row from several places of a tensor, where they are not all the same."""
    flat = np.ascontiguousarray(tensor, dtype=np.float32).reshape(-1)
    runs = [flat[start : start + 8] for start in range(0, len(flat) - 7, max(8, len(flat) // 16))]
    return [run.tobytes() for run in runs if len(np.unique(run)) > 4]


@pytest.mark.parametrize("name", [*DEVICES, LATE])
def test_the_gate_never_leaves_the_device(played, name):
    sent = b"".join(each.sent for each in played.proxies[name].exchanges)
    gates = [tensor for _, own in played.kept[name] for key, tensor in own.items() if key.startswith("gate:")]
    assert len(gates) >= 5
    found = [piece for tensor in gates for piece in pieces(tensor)]
    assert len(found) > 20
    assert not any(piece in sent for piece in found)
    for word in (b"gate:", b"linear.weight", b"batch_norm", b"running_mean", b"norm.weight"):
        assert word not in sent
    # Nor what the gate gives: of a model under its mean gates and of θ the scales could be computed.
    names = [spec.name for spec in played.manifest.shared if spec.size >= 8]
    personal = [piece for tensors, _ in played.kept[name] for key in names for piece in pieces(tensors[key])]
    assert personal
    assert not any(piece in sent for piece in personal)


@pytest.mark.parametrize("name", DEVICES)
def test_what_does_leave_it_would_be_found(played, name):
    sent = b"".join(each.sent for each in played.exchanges(name, "PUT", "/update"))
    trained = dict(zip([s.name for s in played.manifest.shared], _model(played, name), strict=True))
    first = trained["conv2.weight"].reshape(-1)[: played.manifest.blocks["conv2.weight"][0]]
    assert first[:8].tobytes() in sent


def _model(played: Played, name: str, place: int = -1) -> list[np.ndarray]:
    own = played.kept[name][place][1]
    return [part.reshape(spec.shape) for spec, _, part in unpack(played.manifest, own["model"], None)]


@pytest.mark.parametrize("name", DEVICES)
def test_upload_bytes_follow_the_touched_blocks(played, name):
    table = played.manifest.block_table
    exchanges = [each for each in played.exchanges(name, "PUT", "/update") if bundle.MEDIA_TYPE.encode() in each.sent]
    updates = played.updates(name)
    assert len(updates) == len(exchanges) == ROUNDS
    for update, exchange in zip(updates, exchanges, strict=True):
        assert isinstance(update.mask, BlockMask)
        touched = int(table.sizes[update.mask.on].sum())
        assert touched < table.sizes.sum()
        counts = json.loads(update.report)["counts"]
        assert counts["values_touched"] == touched
        assert counts["values_kept"] <= DEVICES[name] * counts["values"]
        print(f"{name}: {exchange.up} bytes up for {touched} of {table.sizes.sum()} values")
        assert 4 * touched + len(update.mask.packed()) <= exchange.up <= 4 * touched + SPARE


@pytest.mark.parametrize("name", DEVICES)
def test_payloads_are_what_has_changed(played, coordinator, name):
    """The first is the whole model. Then the device says which it holds; the rest follows from everybody's updates."""
    table, whole = played.manifest.block_table, 4 * played.manifest.shared_values
    asking = [each for each in played.proxies[name].exchanges if each.path.partition("?")[0].endswith(ASKING)]
    asked = [parse_qs(urlsplit(each.path).query).get("model") for each in asking]
    digests = [record["model_sha256"] for record in coordinator.rounds(NAME)]
    said = list(dict.fromkeys(model[0] for model in asked if model))
    assert asked[0] is None
    assert said[1:] == digests[: ROUNDS - 1], "after the first model, of which no round is, those that it trained on"
    union = {
        number: np.logical_or(*(played.updates(each)[number].mask.on for each in DEVICES)) for number in range(ROUNDS)
    }
    downs = [each.payload for each in played.proxies[name].exchanges if each.payload]
    assert whole <= downs[0] <= whole + SPARE
    # Rounds 3 and 4 (held: of round 1 and 2), then the last evaluation (held: of round 3).
    wanted = [4 * int(table.sizes[union[number]].sum()) for number in (1, 2, 3)]
    print(f"{name}: {downs} bytes down of {whole}; {wanted} are due in the last rounds")
    assert all(due <= down <= due + SPARE for due, down in zip(wanted, _last_three(downs), strict=True))


ASKING = ("/assignment", "/update")
"""What a device calls to be given work, or to send an update and be given more."""


def _last_three(downs: list[int]) -> list[int]:
    """Round 1, round 2, evaluation, round 3, round 4, evaluation."""
    assert len(downs) == 6
    return downs[3:]


def test_a_device_that_comes_after_the_end_trains_its_gate_alone(played, coordinator):
    assert played.updates(LATE) == []
    (exchange,) = played.exchanges(LATE, "PUT", "/update")
    assert exchange.up < SPARE
    (download,) = [each for each in played.proxies[LATE].exchanges if each.payload]
    version = coordinator.info(NAME)["model_version"]
    path = sorted(Path(coordinator.data / "blobs").glob(f"*/models/{version:09d}.[!s]*.safetensors"))[0]
    theta = load_file(path)
    held = dict(zip([spec.name for spec in played.manifest.shared], _model(played, LATE), strict=True))
    assert theta.keys() == held.keys()
    assert all(held[name].tobytes() == tensor.tobytes() for name, tensor in theta.items()), "θ bits unchanged"
    assert {tensor.dtype for tensor in theta.values()} == {np.dtype(np.float32)}
    assert download.payload >= 4 * played.manifest.shared_values
    assert any(key.startswith("gate:") for key in played.kept[LATE][-1][1])


def test_a_device_is_judged_in_four_more_ways(coordinator):
    for number in (2, ROUNDS):
        reports = coordinator.get(f"/v1/federations/{NAME}/rounds/{number}/reports").json()
        judged = [each["report"] for each in reports if each["kind"] == "evaluate"]
        assert len(judged) == len(DEVICES)
        for report in judged:
            assert set(report["others"]) == {"batch", "local", "local batch", "static"}
            assert report["personal"]["num_examples"] == 8
            assert report.get("global_model") is None
            assert all(np.isfinite(each["loss"]) for each in report["others"].values())


def test_the_bare_global_model_is_refused(coordinator):
    info = coordinator.info(NAME)
    assert (info["status"], info["global_model_usable"], info["warning"]) == ("finished", False, None)
    for path in ("model", "model.onnx"):
        answer = httpx.get(f"{coordinator.url}/v1/federations/{NAME}/{path}")
        assert answer.status_code == 404
        assert "pfedgate has no complete global model" in answer.json()["detail"]
