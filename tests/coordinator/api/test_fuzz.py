"""Mutated bundles, against the decoder and a running coordinator: refused in words, and nothing is left of them. And
mutated calls of every route: never a 5xx, and nothing that a call leaves behind keeps an observer from looking.

21,000 bundles and 500 calls by ``make test-integration``, the same ones every time, and a few by ``make test``;
``FUZZ_SEEDS=40 pytest -m integration tests/coordinator/api/test_fuzz.py`` makes 20,000 calls, of forty seeds.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import random
import struct
import tracemalloc
from collections import Counter
from urllib.parse import quote

import numpy as np
import psutil
import pytest

from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.blocks import BlockMask, BlockTable
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from sparrow.protocol.messages import Assignment, UpdateReport
from sparrow.protocol.parts import Expected, all_maskable
from sparrow.protocol.quantization import quantise, row_lengths
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, random_mask
from sparrow.simulation import in_process

from .test_contract import ask, enrol, open_app, published, put, settings_of  # noqa: F401 (two are fixtures)

DIGITS = load_builtin("digits").manifest
REPORT = UpdateReport(num_examples=10, steps=3, train_loss=0.5).model_dump_json()
LONGER = [pytest.mark.integration, pytest.mark.timeout(3600)]
DECODED = [1_000, pytest.param(20_000, marks=LONGER)]
SENT = [60, pytest.param(600, marks=LONGER)]
MEGABYTE = 2**20

STRANGE = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "F32", "I8", "U8", "BF16", "{}", "[]", "null", '{"form":"full"}', '{"form":"bits"}', '{"form":"known"}'),
    *("\x00", "é" * 50, "\ud800", "0" * 64, "9" * 5000, [], [0], [[]], {}, {"form": {}}, [0, 2**63], [0, -8]),
)


def seeds(manifest):
    """Valid bundles of every kind, and the mask that their reader holds."""
    chance = np.random.default_rng(0)
    held = random_mask(manifest, layer_counts(manifest, 0.5), 0)
    other = random_mask(manifest, layer_counts(manifest, 0.5), 1)
    draw = NeuronDraw("a", 0.5)
    drawn = draw_neurons(manifest, draw)
    table = manifest.block_table
    masks = {
        "full": (None, {}),
        "draw": (drawn, {"draw": draw}),
        "bits": (drawn, {}),
        "index": (NeuronMask({name: np.array([size - 1]) for name, size in manifest.group_sizes.items()}), {}),
        "first": (NeuronMask({name: np.arange(1) for name in manifest.group_sizes}), {}),
        "known": (held, {"known": held}),
        "changed": (other, {"known": held}),
        "elements": (other, {}),
        "blocks": (BlockMask(table.forced), {}),
    }
    found = []
    weights = sum(spec.size for spec in manifest.maskable)
    for mask, more in masks.values():
        values = chance.normal(size=count_values(manifest, mask)).astype(np.float32)
        for precision in ("fp32", "fp16", "bf16"):
            found.append(bundle.encode(manifest, values, mask, precision=precision, report=REPORT, **more))
        found.append(
            bundle.encode(manifest, quantise(values, row_lengths(manifest, mask), 0), mask, report=REPORT, **more)
        )
    signs = chance.integers(-1, 2, weights).astype(np.int8)
    gradients = chance.normal(size=weights).astype(np.float32)
    values = pack(manifest, initial_values(manifest, 0), held)
    found.append(
        bundle.encode(manifest, values, held, known=held, parts={"signs": signs, "gradients": gradients}, report=REPORT)
    )
    return found, held


def spoil_bytes(body, others, chance):
    """Bytes changed, lost, added, or taken from another bundle; most die of the digest."""
    data = bytearray(body)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        if not data:
            break
        place, length = chance.randrange(len(data)), chance.choice((1, 1, 4, 8, 64))
        match chance.randrange(7):
            case 0:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = chance.randbytes(length)
            case 4:
                data[place : place + length] = bytes(min(length, len(data) - place))
            case 5:
                other = chance.choice(others)
                data[place:] = other[chance.randrange(len(other)) :]
            case 6:
                data[:8] = struct.pack("<Q", chance.choice((0, 1, 7, len(data), 2**16, 2**32, 2**63, 2**64 - 1)))
    return bytes(data)


def spoil_signed(body, chance, take_apart, sign):
    """Header fields and data changed, and the digest made right again: these reach what lies behind it."""
    header, data = take_apart(body)
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        where = chance.choice(list(header))
        match chance.randrange(6):
            case 0 if where != "__metadata__":
                header[where][chance.choice(("dtype", "shape", "data_offsets", "more"))] = chance.choice(STRANGE)
            case 1 if where != "__metadata__" and isinstance(header[where].get("data_offsets"), list):
                header[where]["data_offsets"] = [chance.choice((0, 8, len(data), 2**40)) for _ in range(2)]
            case 2:
                header["__metadata__"][chance.choice(("mask", "report", "manifest", "sparrow"))] = chance.choice(
                    STRANGE
                )
            case 3:
                spoil_mask(header["__metadata__"], chance)
            case 4 if data:
                for _ in range(chance.choice((1, 4, 32))):
                    data[chance.randrange(len(data))] = chance.choice((0, 255, 127, 128, chance.randrange(256)))
            case _:
                data = data[: chance.randrange(len(data) + 1)] if chance.random() < 0.5 else data + chance.randbytes(8)
    return sign(header, bytes(data))


def spoil_mask(metadata, chance):
    """One field of the mask's description is something else."""
    if not isinstance(metadata["mask"], str):
        return
    try:
        mask = json.loads(metadata["mask"])
    except (ValueError, RecursionError):
        return
    if isinstance(mask, dict):
        mask[chance.choice((*mask, "form", "ratio", "counts"))] = chance.choice(
            (*STRANGE, "draw", "bits", "index", "first", "known", "changed", "elements", "blocks", "full")
        )
        metadata["mask"] = json.dumps(mask)


def mutants(bodies, count, take_apart, sign):
    """``count`` spoilt bundles, the same every time."""
    chance = random.Random(20)
    for _ in range(count):
        body = chance.choice(bodies)
        yield (
            spoil_bytes(body, bodies, chance) if chance.random() < 0.4 else spoil_signed(body, chance, take_apart, sign)
        )


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("count", DECODED)
def test_the_decoder_refuses_in_words_and_remembers_nothing(small, take_apart, sign, count):
    shapes = {spec.name: spec.shape for spec in small.shared if spec.trainable}
    manifest = small.with_blocks(BlockTable.of(shapes, count=3).tensors)
    bodies, held = seeds(manifest)
    weights = all_maskable(manifest, {})
    parts = {"gradients": Expected("float32", weights), "signs": Expected("sign", weights)}
    for body in bodies:
        bundle.decode(body, manifest, held, parts=parts)
    came = Counter()
    before = 0
    for number, body in enumerate(mutants(bodies, count, take_apart, sign)):
        if number == count // 10:
            before = resident()
        if number % 500 == 0:
            tracemalloc.start()
        try:
            decoded = bundle.decode(body, manifest, held, parts=parts)
        except ProtocolError as refusal:
            came["refused" if str(refusal) else "refused without a word"] += 1
        else:
            assert decoded.values.shape == (count_values(manifest, decoded.mask),)
            assert np.isfinite(decoded.values).all()
            came["accepted"] += 1
        if number % 500 == 0:
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < bundle.MAX_MEMORY_FACTOR * len(body) + bundle.MAX_MEMORY_FIXED
    assert resident() - before < 16 * MEGABYTE
    assert came["refused"] > 0.7 * count
    assert not came["refused without a word"]
    assert came["accepted"] > 0.01 * count, "values that changed are values, too"


@pytest.mark.parametrize("count", SENT)
def test_a_running_coordinator_answers_and_keeps_no_file_and_no_memory(
    open_app,  # noqa: F811
    tmp_path,
    train,
    take_apart,
    sign,
    count,
):
    settings = FederationSettings(
        rounds=1_000_000, evaluation_interval=0, early_stopping="off", min_devices=1, cohort=1, deadline_seconds=7200
    )
    client = open_app(default_settings=settings)
    _, headers = enrol(client, "a", budget=0.5)
    assignment = ask(client, headers)
    chance = random.Random(21)
    others = [train(DIGITS, assignment, salt=str(number)) for number in range(3)]
    came = Counter()
    before = 0
    for number in range(count):
        if number == count // 10:
            before = resident()
        body = train(DIGITS, assignment)
        spoilt = spoil_bytes(body, others, chance) if number % 3 else spoil_signed(body, chance, take_apart, sign)
        answer = put(client, headers, assignment, spoilt)
        came[answer.status_code] += 1
        assert answer.status_code in (201, 413, 422), answer.text
        if answer.status_code == 201:  # what it changed was values
            assignment = ask(client, headers)
        else:
            assert answer.headers["content-type"] == "application/problem+json"
            if "gets no work" in answer.json()["detail"]:  # it rests after three refusals, and another goes on
                _, headers = enrol(client, f"a{number}", budget=0.5)
                assignment = ask(client, headers)
    assert resident() - before < 64 * MEGABYTE
    assert came[422] > count / 2
    assert put(client, headers, assignment, train(DIGITS, assignment)).status_code == 201
    ask(client, headers)
    blobs = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
    assert not [path for path in blobs if path.suffix == ".partial"]
    # The three graphs, the newest three models, the best one, and every tenth; nothing of any update.
    assert not [path for path in blobs if "updates" in path.parts]
    assert len(blobs) <= 10
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {
        "blobs",
        "clock.json",
        "lock",
        "coordinator.sqlite3",
        "coordinator.sqlite3-wal",
        "coordinator.sqlite3-shm",
    }


# --- calls of every route ----------------------------------------------------------------------------------------

CALLS = 500
CALLED = [pytest.param(seed, CALLS, marks=LONGER) for seed in range(int(os.environ.get("FUZZ_SEEDS", "1")))]
PHASE = {"seconds": 1.0, "paused_seconds": 0.1, "throttled_seconds": 0.0, "celsius_peak": 50, "bytes_down": 10}
PHASE |= {"bytes_up": 10, "joules": 2.0, "quality": "measured", "source": "rapl"}
TELEMETRY = {"download": PHASE, "train": PHASE}
FOUND = {"num_examples": 10, "loss": 0.5, "accuracy": 0.5}
FULL_REPORT = {"num_examples": 10, "status": "active", "steps": 3, "training_flops": 10**9, "train_loss": 0.5}
FULL_REPORT |= {"validation_loss": 0.5, "stop_loss": 0.5, "counts": {"dropped": 1}, "received": {"values": 4}}
FULL_REPORT |= {"telemetry": TELEMETRY}
RECEIPT = {"personal": FOUND, "global_model": FOUND, "validation": FOUND, "others": {"mixed": FOUND}, "state_bytes": 1}
RECEIPT |= {"telemetry": TELEMETRY}
PROFILE = {"board": "pi", "system": "Linux", "cores": 4, "memory_bytes": 2**30, "sensors": ["rapl"], "sdk_version": "1"}
FEDERATION = "/v1/federations/{name}"
VIEWS = [FEDERATION + more for more in ("", "/rounds", "/devices", "/overview", "/assignments", "/models", "/manifest")]
LOOKED_AT = [
    "/v1/federations",
    "/metrics",
    *(path.format(name="default") for path in (*VIEWS, VIEWS[1] + "/1/reports")),
]
DEEP = '{"name":' + '{"a":[' * 40_000
EDGES = (
    2**40,
    2**40 + 1,
    2**43,
    2**43 + 1,
    2**53 + 1,
    -(2**63) - 1,
    1.7e308,
    -1.7e308,
    5e-324,
    3.5e38,
    1e9,
    1e12,
    1001,
)
ENDLESS = (1.7e308, -1.7e308, 1e300, 3.4e38, 5e-324, float("nan"), 2**31, 2**53, 2**63, 2**64, -1)
WORDS = (
    "a\x00b",
    "\ud800",
    "\udc00x",
    "\u202e",
    "\x1b[2J",
    "a\nb",
    "%00",
    "../..",
    "'",
    "x" * 300,
    "😀",
    "stopped",
    "off",
)


def places(value, at=()):
    """Every place in a JSON value, as keys and indices from its root."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def with_numbers(value, number):
    """The same JSON value with this in the place of every number of its type."""
    if isinstance(value, dict):
        return {key: with_numbers(inner, number) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_numbers(inner, number) for inner in value]
    return number if type(value) is type(number) else value


def spoil_value(value, chance):
    """A JSON value of which all whole numbers, or all others, or one or two places are other, lost or renamed."""
    value = copy.deepcopy(value)
    if chance.random() < 0.2:
        return with_numbers(value, chance.choice(ENDLESS))
    for _ in range(chance.choice((1, 1, 1, 2))):
        at = chance.choice(list(places(value)))
        strange = copy.deepcopy(chance.choice((*STRANGE, *EDGES, *WORDS)))
        if not at:
            if chance.random() < 0.1:
                return strange
            continue
        inside = value
        for key in at[:-1]:
            inside = inside[key]
        match chance.randrange(6):
            case 0 if isinstance(inside, dict):
                del inside[at[-1]]
            case 1 if isinstance(inside, dict):
                inside[chance.choice(("new", *WORDS))] = chance.choice((1, strange))
            case 2 if isinstance(inside, dict):
                inside[chance.choice(WORDS)] = inside.pop(at[-1])
            case 3 if isinstance(inside, list):
                inside *= chance.choice((2, 40))
            case _:
                inside[at[-1]] = strange
    return value


def as_json(value, chance):
    """A JSON value as bytes, now and then broken ones."""
    body = json.dumps(value).encode()
    if chance.random() < 0.05:
        body = chance.choice(
            (body[:-1], DEEP.encode(), body + b"}", b"\xff" + body, b"[" * 5000, b"\x00", b"", b"9" * 5000)
        )
    return body


class Fuzzer:
    """Calls that are valid but for what is spoilt, about a federation and two devices that are there."""

    def __init__(self, client, chance, train, take_apart, sign):
        self._client, self._chance = client, chance
        self._train, self._take_apart, self._sign = train, take_apart, sign
        self._made = 0
        self._publication = published()
        self._devices, self._work = {}, {}

    def settle(self):
        """Have everything there again that calls have taken away; then look at all there is."""
        listed = {each["name"]: each["round"] for each in self._client.get("/v1/federations").json()}
        for name in listed if listed.get("default", 0) > 50 else list(listed)[10:]:
            self._client.patch(f"/v1/federations/{name}", json={"action": "stop"})
            assert self._client.delete(f"/v1/federations/{name}").status_code == 204
        for name in ("default", "crowd"):
            if self._client.get(f"/v1/federations/{name}").status_code == 404:
                wanted = {"name": name, "task": "digits", "settings": FUZZED_SETTINGS}
                assert self._client.post("/v1/federations", json=wanted).status_code == 201
        now = {"cohort": 1000, "deadline_seconds": 7200, "silence_seconds": 7200, "rounds": 1_000_000}
        assert self._client.patch("/v1/federations/default", json=now).status_code == 200
        for action in ("resume", "reopen"):
            self._client.patch("/v1/federations/default", json={"action": action})
        listed = self._client.get("/v1/federations/default/devices").json()
        for taken in (each for each in listed if each["name"] in ("one", "two") and each["status"] != "revoked"):
            assert self._client.patch(f"/v1/devices/{taken['device_id']}", json={"revoked": True}).status_code == 204
        for name in ("one", "two"):
            wanted = {"name": name, "enrolment_key": name * 12, "budget": 0.5, "profile": PROFILE}
            answer = self._client.post("/v1/federations/default/devices", json=wanted)
            assert answer.status_code == 201, answer.text
            found = answer.json()
            self._devices[name] = (found["device_id"], {"Authorization": f"Bearer {found['token']}"})
            self._work.pop(name, None)
        for path in LOOKED_AT:
            answer = self._client.get(path)
            assert answer.status_code in (200, 404), f"{path}: {answer.status_code} {answer.text[:500]}"

    def _ask(self, name):
        """The device's work, if it has any; if not, it no longer rests, and the federation goes on."""
        device_id, token = self._devices[name]
        answer = self._client.get("/v1/federations/default/assignment", headers=token)
        if answer.status_code != 200:
            for action in ("resume", "reopen"):
                self._client.patch("/v1/federations/default", json={"action": action})
            self._client.patch(f"/v1/devices/{device_id}", json={"conditions": {}, "budget": 0.5}, headers=token)
        self._work[name] = Assignment.model_validate(answer.json()) if answer.status_code == 200 else None
        return self._work[name]

    def call(self):
        """Make one call; its answer."""
        chance, client = self._chance, self._client
        name = chance.choice(("one", "two"))
        device_id, token = self._devices[name]
        work = self._work.get(name) or (self._ask(name) if chance.random() < 0.5 else None)
        assignment = f"/v1/assignments/{work.assignment_id if work else '0' * 32}"
        params, headers, body = {}, dict(token), None
        kind = chance.choices(range(12), (6, 4, 4, 4, 1, 1, 2, 1, 3, 12, 2, 1))[0]
        method, path = "GET", ""
        match kind:
            case 0:
                path, params = chance.choice(VIEWS), {"search": "pi", "order": "seen", "offset": 0, "limit": 5}
                params |= {"format": "csv", "wait": 0, "doing": "ready"}
                headers = {"If-None-Match": '"x"'}
            case 1:
                method, path, headers = "POST", "/v1/federations/crowd/devices", {}
                body = {"name": f"d{chance.randrange(50)}", "enrolment_key": "k" * 32, "budget": 0.5}
                body |= {"limited_by": "heat", "num_examples": 5, "hosted": False, "profile": PROFILE}
            case 2:
                method, path = "PATCH", f"/v1/devices/{device_id}"
                body = {"budget": 0.5, "limited_by": "memory", "holds_model": True}
                body |= {"conditions": {"available": False, "reason": "too hot"}}
            case 3:
                path, params = FEDERATION + "/assignment", {"wait": 0, "mask": "0" * 64, "model": "0" * 64}
                cost = {"assignment_id": assignment.rpartition("/")[2], "upload": PHASE, "everything": {"bytes_up": 5}}
                headers["Sparrow-Upload-Cost"] = as_json(spoil_value(cost, chance), chance)
            case 4:
                method, path = "DELETE", assignment
                body = {"reason": chance.choice(("heat", "the loss is nan"))}
            case 5:
                method, path, headers = "POST", "/v1/federations", {}
                self._made += 1
                body = {"name": f"f{self._made}", "task": "digits", "settings": {**FUZZED_SETTINGS}}
                own = {"density": 0.2, "adjust_interval": 5, "over_pruning": 0.5, "smallest_budget": 0.5, "blocks": 20}
                body["settings"] |= {"method": chance.choice(METHODS), "clip": 1.0, "method_settings": {}}
                if chance.random() < 0.5:
                    body["settings"]["method_settings"] = {key: own[key] for key in chance.sample(list(own), 1)}
            case 6:
                method, path = "PATCH", FEDERATION
                body = {"action": chance.choice(("pause", "resume", "stop", "reopen", "rollback")), "model_version": 0}
                body |= {"rounds": 1000, "cohort": 1000, "deadline_seconds": 600, "silence_seconds": 60}
                body = {key: body[key] for key in chance.sample(list(body), chance.randrange(1, 4))}
            case 7:
                method, path = "POST", FEDERATION + "/comparison"
                body = {"task": "digits", "model_digest": "0" * 64, "settings": FUZZED_SETTINGS}
            case 8:
                path = chance.choice((*FILES, assignment + "/payload", assignment + "/update"))
                params = {"version": 0, "sha256": "0" * 64, "federation": "default"}
                headers |= {"Range": "bytes=0-99", "If-Range": '"x"'}
            case 9:
                work = work or self._ask(name)
                if work is not None:
                    return self._update(work, name, f"/v1/assignments/{work.assignment_id}", headers)
                path = FEDERATION
            case 10:
                return self._heavy(chance)
            case 11:
                method, path = chance.choice(
                    (("POST", f"{assignment}/heartbeat"), ("POST", f"/v1/devices/{device_id}/token"))
                )
        if body is not None:
            spoilt = spoil_value(body, chance) if chance.random() < 0.85 else body
            body, headers["Content-Type"] = as_json(spoilt, chance), "application/json"
        for key in list(params):
            if chance.random() < 0.4:
                del params[key]
            elif chance.random() < 0.3:
                params[key] = chance.choice((*STRANGE[:16], *EDGES, *WORDS))
        if headers and chance.random() < 0.1:
            headers[chance.choice(list(headers))] = chance.choice(ODD_HEADERS)
        if chance.random() < 0.05:
            path = path.replace(
                chance.choice(path.split("/")) or "v1",
                quote(str(chance.choice((*WORDS, *EDGES))).encode("utf-8", "surrogatepass")),
            )
        path = path.replace("{name}", chance.choice(("default",) * 8 + ("crowd", "none")))
        number = chance.choice((0, 1, 2, 10**30, "nan", -1))
        query = "&".join(f"{key}={quote(str(value).encode('utf-8', 'surrogatepass'))}" for key, value in params.items())
        return client.request(
            method,
            path.replace("{number}", str(number)) + ("?" + query if query else ""),
            content=body,
            headers=headers,
        )

    def _update(self, work, name, assignment, headers):
        """An answer to this work, whose report or envelope is spoilt."""
        chance = self._chance
        headers["Content-Type"] = "application/json" if work.kind not in ("train", "prepare") else bundle.MEDIA_TYPE
        if work.kind == "train":
            header, data = self._take_apart(self._train(DIGITS, work, salt=str(chance.random())))
            report = spoil_value(FULL_REPORT, chance) if chance.random() < 0.7 else FULL_REPORT
            header["__metadata__"]["report"] = as_json(report, chance).decode("latin-1")
            body = self._sign(header, data)
            if chance.random() < 0.2:
                body = spoil_signed(body, chance, self._take_apart, self._sign)
            elif chance.random() < 0.2:
                first = chance.choice((0, 1, len(body) // 2))
                headers["Content-Range"] = chance.choice(
                    (f"bytes {first}-{len(body) - 1}/{len(body)}", f"bytes */{len(body)}", "bytes 1-", "x")
                )
                headers["Sparrow-Update-SHA256"] = chance.choice(("0" * 64, "x"))
                body = body[first:]
        else:
            body = as_json(spoil_value(RECEIPT, chance) if chance.random() < 0.7 else RECEIPT, chance)
        answer = self._client.put(f"{assignment}/update", content=body, headers=headers)
        if answer.status_code in (200, 201, 409):
            self._work[name] = None
        return answer

    def _heavy(self, chance):
        """A publication or test data, of which bytes, the note or the manifest are spoilt; now and then a deletion."""
        what = chance.randrange(4)
        if what == 0:
            return self._client.delete(
                chance.choice(("/v1/federations/default", "/v1/federations/f1", "/v1/federations/%00"))
            )
        body, path = self._publication, "/v1/federations/from-model"
        if what == 1:
            tensors, _ = checkpoint.load(body)
            manifest = json.loads(tensors["sparrow.manifest"].tobytes())
            tensors["sparrow.manifest"] = np.frombuffer(
                as_json(spoil_value(manifest, chance), chance) or b" ", np.uint8
            )
            note = as_json(spoil_value({"name": "mine", "settings": FUZZED_SETTINGS}, chance), chance)
            body = checkpoint.save(tensors, note.decode("latin-1"))
        elif what == 2:
            body = spoil_bytes(body, [body], chance)
        else:
            path = "/v1/federations/default/model/evaluation"
            tests = {
                "inputs": np.zeros((3, 1, 8, 8), np.float32),
                "targets": np.full(3, chance.choice((0, 9, 10, -1)), np.int64),
            }
            tests["inputs"] *= np.float32(chance.choice((1, 3e38, float("nan"))))
            body = (
                spoil_bytes(checkpoint.save(tests), [body], chance) if chance.random() < 0.7 else checkpoint.save(tests)
            )
        return self._client.post(path, content=body, headers={"Content-Type": checkpoint.MEDIA_TYPE})


METHODS = ("fedspu", "fedavg", "fedsgc", "dmpfl", "pfedgate", "prunefl", "grasp", "fjord", "heterofl", "hermes", "none")
FUZZED_SETTINGS = {"rounds": 1_000_000, "evaluation_interval": 3, "min_devices": 1, "deadline_seconds": 7200}
FUZZED_SETTINGS |= {"cohort": 1000, "quorum": 1e-3, "min_participations": 2, "patience": 1}
FILES = [
    FEDERATION + more for more in ("/model", "/model.onnx", "/skeleton.onnx", "/step.onnx", "/rounds/{number}/reports")
]
FILES += [
    "/",
    "/sign-in",
    "/page/dashboard.css",
    "/docs",
    "/openapi.json",
    "/healthz",
    "/readyz",
    "/metrics",
    "/nonsense",
]
ODD_HEADERS = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"bytes=9-1",
    b"9" * 5000,
    b"bytes 0-9/10",
    b"Bearer ",
)


def record_calls(client, chance, count, *tools):
    """Make ``count`` calls; how often each status came."""
    fuzzer, came = Fuzzer(client, chance, *tools), Counter()
    for number in range(count):
        if number % 100 == 0:
            fuzzer.settle()
        if number % 1_000 == 999:
            print(number + 1, dict(came), flush=True)  # with -s
        answer = fuzzer.call()
        came[answer.status_code] += 1
        assert answer.status_code < 500, f"call {number}: {answer.request} {answer.text[:500]}"
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"]
    fuzzer.settle()
    return came


@pytest.mark.parametrize(("seed", "count"), CALLED)
def test_no_call_is_answered_by_a_5xx_and_none_spoils_a_view(tmp_path, train, take_apart, sign, caplog, seed, count):
    check_calls(tmp_path, caplog, seed, count, train, take_apart, sign)


def test_nor_with_postgresql(tmp_path, train, take_apart, sign, caplog, postgresql):
    check_calls(tmp_path, caplog, 5, 300, train, take_apart, sign, database_url=postgresql.new_database())


def check_calls(tmp_path, caplog, seed, count, *tools, **settings):
    caplog.set_level(logging.ERROR)
    usual = {"data_dir": tmp_path / "data", "tick_seconds": 0.05, "max_wait_seconds": 0, "max_model_bytes": 2**22}
    settings |= {"default_settings": FederationSettings(**FUZZED_SETTINGS), "min_free_bytes": 0}
    with in_process.running(create_app(Settings(**usual, **settings))) as client:
        came = record_calls(client, random.Random(seed), count, *tools)
    assert min(came[200], came[201]) > count / 50
    assert came[422] > count / 5
    assert not caplog.records, caplog.text[:2000]
