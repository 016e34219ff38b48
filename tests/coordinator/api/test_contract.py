"""The HTTP contract, row by row, over the whole application: what is answered, to whom, and what a refusal changes."""

from __future__ import annotations

import asyncio
import base64
import csv
import hashlib
import io
import json
import logging
import re
import shutil
import socket
import sqlite3
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import onnx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from edge_sdk.methods import fedsgc
from sparrow.coordinator import errors
from sparrow.coordinator.api import device_calls
from sparrow.coordinator.api.middleware.body_limits import TooSlow
from sparrow.coordinator.calls.problems import STATUS
from sparrow.coordinator.fleet.serving import ServedModels
from sparrow.coordinator.main import create_app
from sparrow.coordinator.rounds import dispatch
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.store import RECORDS_FILE
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.manifest import MAX_GRAPH, Manifest, initial_values
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons
from sparrow.protocol.messages import ASSIGNMENT_TYPE, Assignment, Phase, UpdateReport, UploadCost
from sparrow.protocol.parts import expected
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import httpx

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits")
BUNDLE = {"Content-Type": bundle.MEDIA_TYPE}
JSON = {"Content-Type": "application/json"}
ADMIN, OBSERVER, ENROLMENT = "admin-secret-0123", "observer-secret-0123", "enrolment-secret-0123"
TOKENS = {"admin_token": ADMIN, "observer_token": OBSERVER, "enrolment_token": ENROLMENT}
SETTINGS = FederationSettings(rounds=2, evaluation_interval=0, deadline_seconds=600)


@contextmanager
def serving(settings, **server):
    """A client of the application on a real port: streams, long polls and broken bodies are those of the wire.

    server: more options of uvicorn."""
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sends at once only on what says that it is TCP
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # from here on calls wait until the server is there
    config = uvicorn.Config(create_app(settings), log_config=None, ws="none", timeout_graceful_shutdown=5, **server)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=60, follow_redirects=True) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture
def settings_of(tmp_path):
    """Settings of a coordinator that keeps its data in this test's folder."""

    def make(**changes):
        usual = {"data_dir": tmp_path / "data", "default_settings": SETTINGS, "tick_seconds": 0.05}
        return Settings(**{**usual, **changes})

    return make


@pytest.fixture
def open_app(settings_of):
    """Starts the application with these settings; answers a client of it."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(serving(settings_of(**changes)))


@pytest.fixture
def client(open_app):
    return open_app()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def enrol(client, name, federation="default", token=None, **profile):
    answer = client.post(
        f"/v1/federations/{federation}/devices",
        json={"name": name, "enrolment_key": name.ljust(32, "k"), **profile},
        headers=bearer(token) if token else {},
    )
    assert answer.status_code == 201, answer.text
    return answer.json()["device_id"], bearer(answer.json()["token"])


def ask(client, headers, wait=20.0, federation="default"):
    answer = client.get(f"/v1/federations/{federation}/assignment", params={"wait": wait}, headers=headers)
    assert answer.status_code == 200, answer.text
    return Assignment.model_validate(answer.json())


def put(client, headers, assignment, body, media_type=bundle.MEDIA_TYPE):
    path = f"/v1/assignments/{assignment.assignment_id}/update"
    return client.put(path, content=body, headers={**headers, "Content-Type": media_type})


def assert_problem(answer, status, *said):
    """An RFC 9457 document of this status, whose detail says these things."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["type"].startswith("urn:sparrow:problem:")
    assert document["title"]
    assert document["detail"].strip()
    for words in said:
        assert words in document["detail"], document["detail"]
    return document


@pytest.fixture
def pair(client):
    """Two enrolled devices and their first assignments."""
    one, two = enrol(client, "one"), enrol(client, "two")
    return (*one, ask(client, one[1])), (*two, ask(client, two[1]))


# --- errors ------------------------------------------------------------------------------------------------------


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_of_the_coordinator_has_a_status():
    found = set(subclasses(errors.RequestError)) - {TooSlow}  # which is answered as the framework's own errors are
    assert len(found) >= 12
    assert found - set(STATUS) == set()
    unavailable = {errors.Unreadable, errors.Unavailable, *subclasses(errors.Unavailable)}
    assert all((status >= 500) == (kind in unavailable) for kind, status in STATUS.items())


def test_what_the_framework_refuses_is_a_problem_document_too(client):
    assert_problem(
        client.get("/v1/nonsense"), 404, "there is nothing at /v1/nonsense; check the address; the page at /docs"
    )
    assert_problem(client.post("/healthz"), 405, "/docs")
    assert_problem(client.get("/v1/federations/default/rounds?format=xml"), 422, "format", "/docs")


def test_an_unforeseen_error_shows_advice_and_no_secrets(client, tmp_path, caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"something in {tmp_path}")

    monkeypatch.setattr(ServedModels, "model", broken)
    document = assert_problem(client.get("/v1/federations/default/model"), 500, "try again", "operator")
    assert str(tmp_path) not in json.dumps(document)
    assert "GET /v1/federations/default/model failed" in caplog.text


# --- health, metrics, the way in ---------------------------------------------------------------------------------


def test_health_and_readiness(client, tmp_path):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").status_code == 200
    shutil.rmtree(tmp_path / "data" / "blobs")
    (tmp_path / "data" / "blobs").write_text("a file where the folder was")
    assert_problem(client.get("/readyz"), 503, "check the database and the disk")
    assert client.get("/healthz").status_code == 200


def test_metrics_are_prometheus_text(client, pair, train):
    for _, headers, assignment in pair:
        assert put(client, headers, assignment, train(DIGITS.manifest, assignment)).status_code == 201
    ask(client, pair[0][1])  # the next round is open: the first is closed
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    (rounds,) = families["sparrow_rounds_closed"].samples
    assert (rounds.labels, rounds.value) == ({"federation": "default"}, 1)
    (updates,) = families["sparrow_updates_accepted"].samples
    assert updates.value == 2
    devices = {sample.labels["status"]: sample.value for sample in families["sparrow_devices"].samples}
    assert devices == {"active": 2, "stopped": 0, "revoked": 0, "not_joined": 0}
    bodies = {sample.labels["direction"]: sample.value for sample in families["sparrow_transferred_bytes"].samples}
    assert bodies["up"] > 0
    assert all(family.documentation for family in families.values())


def test_people_find_the_calls(client):
    assert client.get("/").status_code == 200
    assert client.get("/docs").status_code == 200
    document = client.get("/openapi.json").json()
    assert "/v1/assignments/{assignment_id}/update" in document["paths"]
    assert (
        bundle.MEDIA_TYPE
        in document["paths"]["/v1/assignments/{assignment_id}/update"]["put"]["requestBody"]["content"]
    )


# --- federations -------------------------------------------------------------------------------------------------


def test_a_federation_is_created_described_and_listed(client):
    wanted = {"name": "night", "task": "digits", "settings": {"rounds": 7, "seed": 3}}
    answer = client.post("/v1/federations", json=wanted)
    assert answer.status_code == 201
    info = answer.json()
    assert (info["name"], info["status"], info["rounds"], info["task"]) == ("night", "waiting", 7, "digits")
    assert info["method"] == "fedspu"
    assert info["manifest_digest"] == DIGITS.manifest.digest
    assert info["parameters"] == DIGITS.manifest.trainable_values
    assert info["global_model_usable"] is True
    assert client.get("/v1/federations/night").json() == info
    assert [each["name"] for each in client.get("/v1/federations").json()] == ["default", "night"]
    assert_problem(client.post("/v1/federations", json=wanted), 409, "'night' exists; choose another name")
    assert_problem(client.get("/v1/federations/day"), 404, "no federation 'day'; GET /v1/federations lists")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            {"name": "n", "task": "digits", "settings": {"learning_rte": 0.1}},
            ("settings.learning_rte", "the page at /docs"),
        ),
        ({"name": "n", "task": "digits", "settings": {"quorum": 0}}, ("settings.quorum", "greater than 0")),
        ({"name": "n", "task": "digits", "settings": {"method": "fedsup"}}, ("'fedsup' is not installed", "fedspu")),
        (
            {"name": "n", "task": "digit"},
            ("'digit' is not built in (did you mean digits?); choose one of cifar10", "sparrow publish"),
        ),
        ({"name": "n"}, ("not built in",)),
        ({"name": "../up", "task": "digits"}, ("name",)),
        ({"task": "digits"}, ("name", "Field required")),
        ([], ("body",)),
    ],
)
def test_a_federation_that_cannot_be_is_refused_with_advice(client, wanted, said):
    assert_problem(client.post("/v1/federations", json=wanted), 422, *said)
    assert len(client.get("/v1/federations").json()) == 1


def test_the_envelope_of_a_federation_is_checked(client):
    assert_problem(client.post("/v1/federations", content=b"{", headers=JSON), 422, "JSON")
    assert_problem(client.post("/v1/federations", content=b"{}", headers={"Content-Type": "text/plain"}), 415, "send")
    assert_problem(client.post("/v1/federations", content=iter([b"{}"]), headers=JSON), 411, "Content-Length")
    assert_problem(client.post("/v1/federations", content=b" " * (2**20 + 1), headers=JSON), 413, "1048577")


OWN = DIGITS.manifest.model_dump()
OWN = Manifest.model_validate({**OWN, "tensors": [{**tensor, "init": {"kind": "data"}} for tensor in OWN["tensors"]]})


def published(change=lambda tensors: None, note=None, **graphs):
    """A checkpoint of digits' model as if it were somebody's own: its initial values travel with it."""
    tensors = dict(initial_values(DIGITS.manifest, 9))
    tensors["sparrow.manifest"] = np.frombuffer(OWN.model_dump_json().encode(), np.uint8)
    for graph, content in {**DIGITS.graphs, **graphs}.items():
        tensors[f"sparrow.{graph}"] = np.frombuffer(content, np.uint8)
    change(tensors)
    return checkpoint.save(tensors, note or json.dumps({"name": "mine"}))


CHECKPOINT = {"Content-Type": checkpoint.MEDIA_TYPE}
FROM_MODEL = "/v1/federations/from-model"


def test_a_model_of_ones_own_is_published(client):
    answer = client.post(FROM_MODEL, content=published(), headers=CHECKPOINT)
    assert answer.status_code == 201, answer.text
    tensors, _ = checkpoint.load(client.get("/v1/federations/mine/model").content)
    wanted = initial_values(DIGITS.manifest, 9)
    assert all(tensors[name].tobytes() == wanted[name].tobytes() for name in wanted)
    for graph, content in DIGITS.graphs.items():
        assert client.get(f"/v1/federations/mine/{graph}.onnx").content == content


def test_a_new_version_of_a_model_is_sent_as_a_file(client):
    tensors, _ = checkpoint.load(published())
    graphs = {name: tensor for name, tensor in tensors.items() if name.startswith("sparrow.")}
    assert client.post(FROM_MODEL, content=published(), headers=CHECKPOINT).status_code == 201
    again = client.patch("/v1/federations/mine/model", content=checkpoint.save(graphs), headers=CHECKPOINT)
    assert (again.status_code, again.json()["name"], again.json()["replacing"]) == (200, "mine", False), again.text
    weights = client.patch("/v1/federations/mine/model", content=published(), headers=CHECKPOINT)
    assert_problem(weights, 422, "weights cannot be replaced")


def test_a_model_may_be_published_without_its_training_step(client):
    named = OWN.model_copy(update={"step_sha256": None, "evaluation_sha256": None})
    alone = np.frombuffer(Manifest.model_validate(named.model_dump()).model_dump_json().encode(), np.uint8)

    def without(tensors):
        tensors["sparrow.manifest"] = alone
        del tensors["sparrow.step"], tensors["sparrow.evaluation"]

    unnamed = published(lambda tensors: tensors.update({"sparrow.manifest": alone}))
    assert_problem(client.post(FROM_MODEL, content=unnamed, headers=CHECKPOINT), 422, "sparrow.evaluation")
    assert client.post(FROM_MODEL, content=published(without), headers=CHECKPOINT).status_code == 201
    assert client.get("/v1/federations/mine/skeleton.onnx").content == DIGITS.skeleton
    for graph in ("step", "evaluation"):
        answer = client.get(f"/v1/federations/mine/{graph}.onnx")
        assert_problem(answer, 404, f"published without the graph {graph}; its devices need PyTorch")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (published(lambda t: t.pop("sparrow.skeleton")), "lacks 'sparrow.skeleton'; publish with"),
        (published(lambda t: t.pop("sparrow.evaluation")), "lacks 'sparrow.evaluation'; publish with"),
        (published(step=b"another"), "step_sha256 of the manifest is not that of the step sent; publish both"),
        (published(lambda t: t.pop("conv1.bias")), "lack 'conv1.bias'"),
        (published(lambda t: t.update({"conv1.bias": np.zeros(3, np.float32)})), "conv1.bias: the published weights"),
        (published(lambda t: t["conv1.bias"].fill(np.nan)), "conv1.bias: an initial value is not finite"),
        (published(skeleton=b"another"), "not that of the skeleton sent; publish both together"),
        (published(note='{"name": "mine", "task": "digits"}'), "task: leave it out"),
        (published(note="[]"), "body"),
        (published(note='{"name": "mine", "task": "a\\u0000"}'), "NUL"),
        (published(lambda t: t.update({"sparrow.manifest": np.zeros(9, np.uint8)})), "JSON"),
        (published()[:-5], "not a safetensors file"),
        (b"", "too few"),
    ],
)
def test_a_model_that_cannot_be_published_leaves_nothing_behind(client, body, said):
    assert_problem(client.post(FROM_MODEL, content=body, headers=CHECKPOINT), 422, said)


def endless_chain(count):
    """Return a graph of this many nodes in a chain."""
    value = onnx.helper.make_tensor_value_info("n0", onnx.TensorProto.FLOAT, [])
    nodes = [onnx.helper.make_node("Neg", [f"n{number}"], [f"n{number + 1}"]) for number in range(count)]
    graph = onnx.helper.make_graph(nodes, "endless", [value], [])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]).SerializeToString()


@pytest.mark.parametrize(
    ("name", "graph", "said"),
    [
        ("step", b"\xff" * 1000, "the step's graph is refused"),
        ("evaluation", b"\xff" * 1000, "the evaluation's graph is refused"),
        ("step", DIGITS.graphs["evaluation"], "the step's graph is refused: it has no output 'error'"),
        ("step", endless_chain(150_000), "the step's graph is refused: the graph has more than 500000 fields"),
        ("evaluation", endless_chain(20_000), "it has 20000 nodes; it must have at most 10000"),
    ],
    ids=["no step", "no evaluation", "an evaluation as step", "a huge step", "a large evaluation"],
)
def test_a_step_that_devices_would_refuse_is_not_published(client, name, graph, said):
    named = OWN.with_graphs({**DIGITS.graphs, name: graph})
    manifest = np.frombuffer(named.model_dump_json().encode(), np.uint8)

    def changed(tensors):
        tensors["sparrow.manifest"] = manifest

    sent = published(changed, **{name: graph})
    assert_problem(client.post(FROM_MODEL, content=sent, headers=CHECKPOINT), 422, said)
    assert client.post(FROM_MODEL, content=published(), headers=CHECKPOINT).status_code == 201
    tensors, _ = checkpoint.load(sent)
    again = checkpoint.save({key: tensor for key, tensor in tensors.items() if key.startswith("sparrow.")})
    assert_problem(client.patch("/v1/federations/mine/model", content=again, headers=CHECKPOINT), 422, said)


def test_a_few_lines_do_not_describe_gigabytes(client):
    """Constant and drawn values need not travel: tensors of gigabytes would have been made of these 2 kB."""
    for count, policy, status, said in (
        (3, "shared", 413, "accepts up to 2147483648"),
        (16, "shared", 422, "17,179,869,184 bytes in total; the maximum is 4,294,967,296; publish a smaller model"),
        (16, "personal", 422, "17,179,869,184 bytes in total"),
    ):
        spec = {"shape": [2**28], "init": {"kind": "constant", "value": 1}, "policy": policy}
        tensors = [{"name": f"w{number}", **spec} for number in range(count)]
        manifest = {"task": "big", "input_shape": [1], "output_shape": [1], "tensors": tensors}
        body = checkpoint.save(
            {
                "sparrow.manifest": np.frombuffer(json.dumps(manifest).encode(), np.uint8),
                "sparrow.skeleton": np.zeros(1, np.uint8),
            },
            json.dumps({"name": "big", "settings": {"method": "fedavg"}}),
        )
        assert_problem(client.post(FROM_MODEL, content=body, headers=CHECKPOINT), status, said)
    note = checkpoint.save({}, json.dumps({"name": "big", "x": "y" * 2**16}))
    assert_problem(client.post(FROM_MODEL, content=note, headers=CHECKPOINT), 413, "the note has")
    graph = published(step=bytes(MAX_GRAPH + 1))
    assert_problem(client.post(FROM_MODEL, content=graph, headers=CHECKPOINT), 413, "the step has 16,777,217")
    assert [each["name"] for each in client.get("/v1/federations").json()] == ["default"]


def test_a_federation_is_steered(client):
    path = "/v1/federations/default"
    assert client.patch(path, json={"action": "pause"}).json()["status"] == "paused"
    assert_problem(client.patch(path, json={"action": "pause"}), 409, "default is paused; pause it while it is")
    assert client.patch(path, json={"action": "resume", "cohort": 3}).json()["settings"]["cohort"] == 3
    assert client.patch(path, json={"action": "stop"}).json()["reason"] == "operator"
    assert client.patch(path, json={"action": "reopen", "rounds": 9}).json()["rounds"] == 9
    assert_problem(client.patch(path, json={"action": "explode"}), 422, "action")
    assert_problem(client.patch(path, json={"learning_rate": 1}), 422, "learning_rate")
    assert_problem(client.patch("/v1/federations/none", json={"action": "stop"}), 404, "GET /v1/federations")


def test_rounds_as_json_and_csv(client, pair, train):
    (_, headers, assignment), _ = pair
    put(client, headers, assignment, train(DIGITS.manifest, assignment))
    (record,) = client.get("/v1/federations/default/rounds").json()
    assert (record["round"], record["status"], record["updates"]) == (1, "open", 1)
    assert record["cohort"] == ["one", "two"]
    answer = client.get("/v1/federations/default/rounds", params={"format": "csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert set(row) == set(record)
    assert (row["round"], row["updates"], row["accuracy_personal"]) == ("1", "1", "")
    assert json.loads(row["cohort"]) == ["one", "two"]
    assert_problem(client.get("/v1/federations/none/rounds"), 404)


# --- files: whole, in part, or not again -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["payload", "model", "model.onnx", "skeleton.onnx", "step.onnx", "evaluation.onnx"])
def test_files_have_etags_and_ranges(client, pair, what):
    (_, headers, assignment), _ = pair
    path = f"/v1/federations/default/{what}"
    if what == "payload":
        path = f"/v1/assignments/{assignment.assignment_id}/payload"
    whole = client.get(path, headers=headers)
    body, etag = whole.content, whole.headers["etag"]
    assert whole.status_code == 200
    assert whole.headers["accept-ranges"] == "bytes"
    assert int(whole.headers["content-length"]) == len(body)
    assert etag == f'"{hashlib.sha256(body).hexdigest()}"'
    again = client.get(path, headers={**headers, "If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    for asked, first, last in (
        ("10-19", 10, 19),
        ("100-", 100, len(body) - 1),
        (f"5-{len(body) * 2}", 5, len(body) - 1),
    ):
        part = client.get(path, headers={**headers, "Range": f"bytes={asked}", "If-Range": etag})
        assert part.status_code == 206
        assert part.headers["content-range"] == f"bytes {first}-{last}/{len(body)}"
        assert part.content == body[first : last + 1]
    beyond = client.get(path, headers={**headers, "Range": f"bytes={len(body)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(body)}")
    changed = client.get(path, headers={**headers, "Range": "bytes=10-19", "If-Range": '"older"'})
    assert (changed.status_code, changed.content) == (200, body)
    for odd in ("bytes=-5", "bytes=1-2,4-5", "lines=1-2", "bytes=a-b"):
        assert client.get(path, headers={**headers, "Range": odd}).content == body


def test_the_payload_is_what_the_assignment_announced(client, pair):
    (_, headers, assignment), _ = pair
    answer = client.get(f"/v1/assignments/{assignment.assignment_id}/payload", headers=headers)
    assert answer.headers["content-type"] == bundle.MEDIA_TYPE
    assert len(answer.content) == assignment.payload.bytes
    assert hashlib.sha256(answer.content).hexdigest() == assignment.payload.sha256
    received = bundle.decode(answer.content, DIGITS.manifest)
    assert len(received.values) == DIGITS.manifest.shared_values


# --- work that comes with its payload ----------------------------------------------------------------------------


WITH_PAYLOAD = {"Accept": ASSIGNMENT_TYPE}


def become(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def split(answer):
    """The JSON of an answer that brings a payload along, and the payload."""
    assert answer.headers["content-type"] == ASSIGNMENT_TYPE
    line, end, payload = answer.content.partition(b"\n")
    assert end
    return json.loads(line), payload


def test_a_small_payload_comes_with_its_assignment_for_who_accepts_it(client, pair):
    (_, headers, assignment), _ = pair
    path = "/v1/federations/default/assignment"
    described, payload = split(client.get(path, headers={**headers, **WITH_PAYLOAD}))
    plain = client.get(path, headers=headers)
    assert plain.headers["content-type"] == "application/json"
    seconds = {"deadline_seconds": 0}
    assert described | seconds == plain.json() | seconds
    assert payload == client.get(f"/v1/assignments/{assignment.assignment_id}/payload", headers=headers).content
    assert hashlib.sha256(payload).hexdigest() == described["payload"]["sha256"]


def test_a_large_payload_is_asked_for(client, pair, monkeypatch):
    (_, headers, assignment), _ = pair
    monkeypatch.setattr(device_calls, "LARGEST_BROUGHT", assignment.payload.bytes - 1)
    answer = client.get("/v1/federations/default/assignment", headers={**headers, **WITH_PAYLOAD})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["assignment_id"] == assignment.assignment_id


def test_the_answer_to_an_update_brings_the_next_work_where_there_is_some(open_app, train):
    settings = FederationSettings(rounds=3, cohort=1, min_devices=1, evaluation_interval=1, early_stopping="off")
    client = open_app(default_settings=settings)
    _, headers = enrol(client, "one")
    assignment = ask(client, headers)
    path = f"/v1/assignments/{assignment.assignment_id}/update"
    body = train(DIGITS.manifest, assignment)
    sent = client.put(path, content=body, headers={**headers, **BUNDLE, **WITH_PAYLOAD})
    assert (sent.status_code, sent.json()) == (201, {"new": True}), "the round has not closed yet"
    evaluation = ask(client, headers)
    assert evaluation.kind == "evaluate"
    receipt = json.dumps({"personal": {"num_examples": 5, "loss": 1.0, "accuracy": 0.5}})
    become(lambda: len(client.get("/v1/federations/default/assignments").json()["assignments"]) == 2)
    path = f"/v1/assignments/{evaluation.assignment_id}/update"
    answer, payload = split(client.put(path, content=receipt, headers={**headers, **JSON, **WITH_PAYLOAD}))
    following = Assignment.model_validate(answer["next"])
    assert (following.kind, following.round) == ("train", 2)
    assert hashlib.sha256(payload).hexdigest() == following.payload.sha256
    again = client.put(path, content=receipt, headers={**headers, **JSON})
    assert (again.status_code, again.json()) == (200, {"new": False}), "who does not accept it must ask"
    assert put(client, headers, following, train(DIGITS.manifest, following)).status_code == 201


def test_what_has_just_been_said_is_not_looked_up_again(open_app, train, monkeypatch):
    client = open_app(default_settings=FederationSettings(rounds=3, min_devices=2, early_stopping="off"))
    (_, headers), (_, others) = enrol(client, "one"), enrol(client, "two")
    assignment, other = ask(client, headers), ask(client, others)
    path = f"/v1/assignments/{assignment.assignment_id}/update"
    body = train(DIGITS.manifest, assignment)
    assert client.put(path, content=body, headers={**headers, **BUNDLE, **WITH_PAYLOAD}).json() == {"new": True}
    looked = []
    usual = dispatch.oldest_open
    monkeypatch.setattr(dispatch, "oldest_open", lambda db, device: looked.append(device) or usual(db, device))
    time.sleep(0.2)  # whatever moves of itself has moved
    assert client.get("/v1/federations/default/assignment", headers=headers).status_code == 204
    assert looked == []
    assert client.get("/v1/federations/default/assignment", headers=headers).status_code == 204
    assert len(looked) == 1, "a second time it is"
    assert put(client, others, other, train(DIGITS.manifest, other)).status_code == 201
    assert ask(client, headers).round >= 1


@pytest.mark.parametrize(
    ("query", "accept", "status"),
    [
        ({"wait": "soon"}, None, 422),
        ({"mask": "x"}, ASSIGNMENT_TYPE, 422),
        ({"unknown": "1"}, ASSIGNMENT_TYPE, 200),
        ({}, "text/html, application/json;q=0.9", 200),
    ],
)
def test_odd_calls_for_work_are_answered_as_the_framework_would(client, pair, query, accept, status):
    (_, headers, _), _ = pair
    sent = {**headers, **({} if accept is None else {"Accept": accept})}
    answer = client.get("/v1/federations/default/assignment", params=query, headers=sent)
    assert answer.status_code == status
    if status == 422:
        assert_problem(answer, 422, next(iter(query)))
    elif accept != ASSIGNMENT_TYPE:
        assert answer.headers["content-type"] == "application/json"


def test_the_global_model_as_checkpoint_and_as_onnx(client):
    info = client.get("/v1/federations/default").json()
    answer = client.get("/v1/federations/default/model")
    assert answer.headers["content-type"] == checkpoint.MEDIA_TYPE
    assert hashlib.sha256(answer.content).hexdigest() == info["model_sha256"]
    tensors, _ = checkpoint.load(answer.content)
    graph = onnx.load_model_from_string(client.get("/v1/federations/default/model.onnx").content)
    onnx.checker.check_model(graph, full_check=True)
    filled = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    assert filled["fc1.weight"].tobytes() == tensors["fc1.weight"].tobytes()
    manifest = client.get("/v1/federations/default/manifest")
    assert manifest.text == DIGITS.manifest.text


# --- devices and assignments -------------------------------------------------------------------------------------


def test_a_device_enrols_once_and_again(client):
    device_id, headers = enrol(client, "pi")
    again, renewed = enrol(client, "pi")
    assert again == device_id
    assert client.get("/v1/federations/default/assignment", headers=renewed).status_code == 204
    assert_problem(client.get("/v1/federations/default/assignment", headers=headers), 401, "enrol again")
    path = "/v1/federations/default/devices"
    assert_problem(
        client.post(path, json={"name": "pi", "enrolment_key": "t" * 32}), 409, "choose another --device-name"
    )
    assert_problem(client.post(path, json={"name": "pi", "enrolment_key": "short"}), 422, "enrolment_key")
    assert_problem(client.post(path, json={"name": "p", "enrolment_key": "k" * 32, "budget": 0}), 422, "budget")
    assert_problem(client.post(path, content=b"{", headers=JSON), 422, "/docs")
    assert_problem(
        client.post("/v1/federations/none/devices", json={"name": "p", "enrolment_key": "k" * 32}), 404, "GET /v1"
    )


def test_without_work_a_device_is_told_when_to_ask_again(open_app):
    client = open_app(retry_after_seconds=7)
    _, headers = enrol(client, "pi")
    answer = client.get("/v1/federations/default/assignment", headers=headers)
    assert (answer.status_code, answer.headers["retry-after"], answer.content) == (204, "7", b"")
    answer = client.get("/v1/federations/default/assignment", params={"wait": 0.1}, headers=headers)
    assert answer.status_code == 204
    for wait in (-1, 601, "nan", "soon"):
        assert_problem(client.get("/v1/federations/default/assignment", params={"wait": wait}, headers=headers), 422)


def test_a_long_poll_wakes_when_work_appears(client):
    _, headers = enrol(client, "one")
    answers = []

    def wait():
        answers.append(client.get("/v1/federations/default/assignment", params={"wait": 40}, headers=headers))

    waiting = threading.Thread(target=wait)
    waiting.start()
    enrol(client, "two")
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    assert answers[0].status_code == 200
    assert answers[0].json()["kind"] == "train"


def test_an_assignment_belongs_to_its_device(client, pair, train):
    (_, headers, assignment), (_, other, _) = pair
    path = f"/v1/assignments/{assignment.assignment_id}"
    assert_problem(client.get(f"{path}/payload", headers=other), 403, "belongs to another device; ask for your own")
    assert_problem(put(client, other, assignment, train(DIGITS.manifest, assignment)), 403, "another device")
    assert_problem(client.request("DELETE", path, json={"reason": "hot"}, headers=other), 403, "another device")
    for missing in ({}, bearer("wrong"), {"Authorization": "Basic b25lOnR3bw=="}):
        answer = client.get(f"{path}/payload", headers=missing)
        assert_problem(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert_problem(client.get(f"/v1/assignments/{'0' * 32}/payload", headers=headers), 404, "ask for the next one")


def test_a_device_asks_only_in_its_own_federation(client):
    client.post("/v1/federations", json={"name": "night", "task": "digits"})
    _, headers = enrol(client, "one")
    path = "/v1/federations/night/assignment"
    assert_problem(client.get(path, headers=headers), 403, "not enrolled in night; enrol it there first")
    assert_problem(client.get("/v1/federations/none/assignment", headers=headers), 403, "not enrolled in none")


def test_an_assignment_is_handed_back_with_a_reason(client, pair, train):
    (_, headers, assignment), _ = pair
    path = f"/v1/assignments/{assignment.assignment_id}"
    assert_problem(client.request("DELETE", path, headers=headers), 422, "/docs")
    assert_problem(client.request("DELETE", path, json={"reason": ""}, headers=headers), 422, "reason")
    for _ in range(2):
        assert client.request("DELETE", path, json={"reason": "too hot"}, headers=headers).status_code == 204
    assert_problem(put(client, headers, assignment, train(DIGITS.manifest, assignment)), 409, "ask for the next")
    assert_problem(client.get(f"{path}/payload", headers=headers), 409, "ask for the next one")
    assert_problem(client.request("DELETE", f"/v1/assignments/{'0' * 32}", json={"reason": "r"}, headers=headers), 404)
    (record,) = client.get("/v1/federations/default/rounds").json()
    assert record["handed_back"] == 1


def test_a_device_changes_itself_and_an_admin_revokes_it(open_app):
    client = open_app(admin_token=ADMIN)
    (one, headers), (two, other) = enrol(client, "one"), enrol(client, "two")
    ask(client, headers)
    assert client.patch(f"/v1/devices/{one}", json={"budget": 0.5}, headers=headers).status_code == 204
    assert (
        client.patch(f"/v1/devices/{one}", json={"conditions": {"available": False}}, headers=headers).status_code
        == 204
    )
    assert_problem(client.patch(f"/v1/devices/{one}", json={"budget": 2}, headers=headers), 422, "budget")
    for nobody in (other, {}):
        answer = client.patch(f"/v1/devices/{one}", json={"budget": 0.1}, headers=nobody)
        assert answer.status_code in (401, 403)
        answer = client.patch(f"/v1/devices/{one}", json={"revoked": True}, headers=nobody)
        assert answer.status_code in (401, 403)
    assert client.patch(f"/v1/devices/{one}", json={"revoked": True}, headers=bearer(ADMIN)).status_code == 204
    assert_problem(client.get("/v1/federations/default/assignment", headers=headers), 401, "revoked")
    assert_problem(client.patch("/v1/devices/none", json={"revoked": True}, headers=bearer(ADMIN)), 404)
    assert client.get("/v1/federations/default/assignment", headers=other).status_code == 200
    assert two != one


def test_what_the_last_upload_cost_comes_with_the_next_call(client, pair, train):
    (_, headers, assignment), _ = pair
    put(client, headers, assignment, train(DIGITS.manifest, assignment))
    path = "/v1/federations/default/assignment"
    assert client.get(path, headers={**headers, "Sparrow-Upload-Cost": "{nonsense"}).status_code == 204
    cost = UploadCost(assignment_id=assignment.assignment_id, upload=Phase(seconds=3, bytes_up=4321))
    assert client.get(path, headers={**headers, "Sparrow-Upload-Cost": cost.model_dump_json()}).status_code == 204
    (record,) = client.get("/v1/federations/default/rounds").json()
    assert (record["bytes_up"], record["upload"]["seconds"]) == (4321, 3)


# --- updates -----------------------------------------------------------------------------------------------------


def test_the_secret_of_the_draws_is_in_no_answer_and_no_line_of_the_log(client, settings_of, pair, train, caplog):
    caplog.set_level("DEBUG")
    (_, headers, assignment), (_, others, other) = pair
    assert assignment.work.key != other.work.key
    for who, work in ((headers, assignment), (others, other)):
        assert put(client, who, work, train(DIGITS.manifest, work)).status_code == 201
    with closing(sqlite3.connect(settings_of().data_dir / RECORDS_FILE)) as records:
        ((secret,),) = records.execute("SELECT secret FROM federations").fetchall()
    names = {"name": "default", "assignment_id": assignment.assignment_id, "number": "1", "device": "one"}
    paths = [path for path, calls in client.get("/openapi.json").json()["paths"].items() if "get" in calls]
    seen = 0
    for path in (*paths, "/"):
        if "events" in path:
            continue
        for who in ({}, headers):
            answer = client.get(re.sub(r"{(\w+)}", lambda found: names.get(found[1], "1"), path), headers=who)
            seen += answer.status_code == 200
            for form in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()):
                assert form not in answer.content, path
    assert seen > 10
    assert secret.hex() not in caplog.text
    assert assignment.work.key not in caplog.text


def test_an_update_is_accepted_once(client, pair, train):
    (_, headers, assignment), _ = pair
    body = train(DIGITS.manifest, assignment)
    first, again = (put(client, headers, assignment, body) for _ in range(2))
    assert (first.status_code, first.json()) == (201, {"new": True})
    assert (again.status_code, again.json()) == (200, {"new": False})
    other = train(DIGITS.manifest, assignment, salt="other")
    assert_problem(put(client, headers, assignment, other), 409, "another update was accepted")
    (record,) = client.get("/v1/federations/default/rounds").json()
    assert record["updates"] == 1


def bad_updates(assignment, train, sign, take_apart):
    """name -> (status, what is said, body)."""
    manifest = DIGITS.manifest
    good = train(manifest, assignment)
    draw = NeuronDraw(assignment.work.key, assignment.work.ratio)
    mask = draw_neurons(manifest, draw)
    report = UpdateReport(num_examples=5, steps=1, train_loss=0.5).model_dump_json()

    def update(mask, *, precision="fp32", report=report, draw=None):
        values = np.zeros(count_values(manifest, mask), dtype=np.float32)
        return bundle.encode(manifest, values, mask, precision=precision, report=report, draw=draw)

    header, data = take_apart(good)
    infinite = sign(header, np.float32(np.inf).tobytes() + data[4:])
    short = json.loads(json.dumps(header))
    short["values"].update(shape=[10], data_offsets=[0, 40])
    next_round = draw_neurons(manifest, NeuronDraw(draw.key[::-1], draw.ratio))
    fewer = NeuronMask({group: neurons[:-1] for group, neurons in mask.active.items()})
    other_model = manifest.model_copy(update={"task": "other"})
    other_model = type(manifest).model_validate(other_model.model_dump())
    values = np.zeros(count_values(manifest, mask), dtype=np.float32)
    limit = bundle.largest_bundle(len(values), "fp32", manifest)
    return {
        "empty": (422, "too few", b""),
        "truncated in the header": (422, "send it again", good[:100]),
        "truncated in the values": (422, "send the whole file", good[:-100]),
        "damaged": (422, "does not match its content; send it again", good[:-1] + bytes([good[-1] ^ 1])),
        "random": (422, "bundle", bytes(range(256)) * 4),
        "too large": (413, "must have at most", bytes(limit + 1)),
        "not finite": (422, "conv1.weight: a value is not finite; do not send", infinite),
        "too few values": (422, "pack it again", sign(short, data[:40])),
        "another round's mask": (422, "mask: it differs from the mask of one in round 1", update(next_round)),
        "a smaller mask": (422, "fetch the assignment again", update(fewer)),
        "no mask": (422, "mask", update(None)),
        "another precision": (422, "the federation's precision is fp32", update(mask, precision="bf16")),
        "another model": (422, "another model", bundle.encode(other_model, values, mask, report=report)),
        "no report": (422, "body", update(mask, report="")),
        "no examples": (422, "num_examples", update(mask, report=report.replace(":5", ":0"))),
        "a loss that is none": (422, "train_loss", update(mask, report=report.replace("0.5", "NaN"))),
        "a broken character": (422, "", update(mask, report="\ud800")),
    }


def all_that_counts(client):
    """All that an upload could change."""
    rounds = client.get("/v1/federations/default/rounds").json()
    return client.get("/v1/federations/default").json(), rounds, client.get("/v1/federations/default/model").content


@pytest.fixture
def half_pair(client):
    """Two devices of which the first trains half of its neurons, so that masks matter."""
    one, two = enrol(client, "one", budget=0.5), enrol(client, "two")
    return (*one, ask(client, one[1])), (*two, ask(client, two[1]))


def test_a_bad_upload_is_refused_and_changes_nothing(client, half_pair, train, sign, take_apart, without_rest):
    (_, headers, assignment), _ = half_pair
    before = all_that_counts(client)
    for name, (status, said, body) in bad_updates(assignment, train, sign, take_apart).items():
        answer = put(client, headers, assignment, body)
        assert answer.status_code == status, f"{name}: {answer.text}"
        assert_problem(answer, status, said)
        assert all_that_counts(client) == before, name
    good = train(DIGITS.manifest, assignment)
    path = f"/v1/assignments/{assignment.assignment_id}/update"
    assert_problem(put(client, headers, assignment, good, "application/json"), 415, bundle.MEDIA_TYPE)
    assert_problem(client.put(path, content=good, headers=headers), 415, "as application/octet-stream")
    assert_problem(client.put(path, content=iter([good]), headers={**headers, **BUNDLE}), 411, "send Content-Length")
    assert_problem(client.put(path, content=good, headers=BUNDLE), 401, "token")
    assert_problem(client.put(path, content=good, headers={**BUNDLE, **bearer("x")}), 401, "enrol again")
    nowhere = f"/v1/assignments/{'0' * 32}/update"
    assert_problem(
        client.put(nowhere, content=good, headers={**headers, **BUNDLE}), 404, "this assignment does not exist"
    )
    assert all_that_counts(client) == before
    assert put(client, headers, assignment, good).status_code == 201, "the right one is still welcome"


def test_an_update_after_its_round_is_refused_and_changes_nothing(open_app, train):
    client = open_app(default_settings=SETTINGS.model_copy(update={"quorum": 0.5}))
    one, two = enrol(client, "one"), enrol(client, "two")
    early, late = ask(client, one[1]), ask(client, two[1])
    assert put(client, one[1], early, train(DIGITS.manifest, early)).status_code == 201
    assert ask(client, one[1]).round == 2
    before = all_that_counts(client)
    answer = put(client, two[1], late, train(DIGITS.manifest, late))
    assert_problem(answer, 409, "round 1 no longer accepts it; keep the personal model and ask for the next")
    assert all_that_counts(client) == before


@pytest.mark.parametrize("method", ["fedavg", "fedsgc", "fedspu"])
def test_an_update_for_a_removed_model_is_late_or_a_duplicate(open_app, method):
    """The round closed and its model was deleted: what a device then sends, again or at last, is answered as ever."""
    client = open_app(default_settings=SETTINGS.model_copy(update={"method": method, "quorum": 0.5}))
    one, two = enrol(client, "one"), enrol(client, "two")
    early, late = ask(client, one[1]), ask(client, two[1])
    sent, body = sparse_update(client, one[1], early), sparse_update(client, two[1], late, check=False)
    assert put(client, one[1], early, sent).status_code == 201  # half of the cohort: the round closes at the next tick
    assert ask(client, one[1]).round == 2
    assert put(client, one[1], early, sent).json() == {"new": False}
    assert_problem(put(client, two[1], late, body), 409, "round 1 no longer accepts it")
    assert_problem(put(client, two[1], late, b"x" * 10_000_000), 413)


def play(client, headers, train):
    """Do what one device is asked to until there is nothing now; the kinds of work done."""
    done = []
    while True:
        answer = client.get("/v1/federations/default/assignment", headers=headers)
        if answer.status_code != 200:
            return done, answer
        assignment = Assignment.model_validate(answer.json())
        if assignment.kind == "train":
            sent = put(client, headers, assignment, train(DIGITS.manifest, assignment))
        else:
            sent = put(client, headers, assignment, b"{}", "application/json; charset=utf-8")
        assert sent.status_code == 201, sent.text
        done.append(assignment.kind.value)


def test_after_the_end_only_late_devices_get_work(open_app, train):
    client = open_app(default_settings=SETTINGS.model_copy(update={"rounds": 1}))
    pair = [enrol(client, name)[1] for name in ("one", "two")]
    for headers in pair:
        assignment = ask(client, headers)
        assert put(client, headers, assignment, train(DIGITS.manifest, assignment)).status_code == 201
    for name, headers in zip(("one", "two"), pair, strict=True):
        assignment = ask(client, headers)
        assert assignment.kind == "evaluate"
        assert_problem(put(client, headers, assignment, b"{}", bundle.MEDIA_TYPE), 415, "application/json")
        # One more refusal in a row would end the assignment.
        refused = {"one": (b'{"personl": 1}', 422), "two": (b" " * 70_000, 413)}
        body, status = refused[name]
        assert_problem(put(client, headers, assignment, body, "application/json"), status)
        assert put(client, headers, assignment, b"{}", "application/json").status_code == 201
    over = client.get("/v1/federations/default/assignment", params={"wait": 20}, headers=pair[0])
    assert_problem(over, 410, "finished after 1 rounds; no work is left")
    _, late = enrol(client, "late")
    done, over = play(client, late, train)
    assert done == ["adapt"]
    assert_problem(over, 410)


# --- sparse global models ----------------------------------------------------------------------------------------


SPARSE = SETTINGS.model_copy(
    update={
        "method": "fedsgc",
        "rounds": 4,
        "method_settings": {"density": 0.3, "adjust_interval": 2, "device_interval": 1},
    }
)


def payload_of(client, headers, assignment, known=None):
    answer = client.get(f"/v1/assignments/{assignment.assignment_id}/payload", headers=headers)
    assert answer.status_code == 200, answer.text
    assert (len(answer.content), hashlib.sha256(answer.content).hexdigest()) == (
        assignment.payload.bytes,
        assignment.payload.sha256,
    )
    parts = expected(fedsgc.FEDSGC.payload_parts, DIGITS.manifest, assignment.plan)
    return bundle.decode(answer.content, DIGITS.manifest, known, parts=parts)


def sparse_update(client, headers, assignment, *, known=None, change=lambda mask: mask, check=True):
    """The values that were sent, as they came, under their mask or another."""
    received = payload_of(client, headers, assignment, known)
    mask = change(received.mask)
    values = received.values
    if mask is not received.mask:
        values = np.zeros(count_values(DIGITS.manifest, mask), dtype=np.float32)
    if assignment.work is not None:  # FedSPU sends a part of the whole model
        work = assignment.work
        draw = NeuronDraw(work.key, work.ratio)
        mask = draw_neurons(DIGITS.manifest, draw)
        values = np.zeros(count_values(DIGITS.manifest, mask), dtype=np.float32)
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
    return bundle.encode(DIGITS.manifest, values, mask, report=report)


def ask_with(client, headers, mask, wait=20.0):
    path = "/v1/federations/default/assignment"
    params = {"wait": wait, **({"mask": mask} if mask is not None else {})}
    return client.get(path, params=params, headers=headers)


def test_a_device_is_sent_the_mask_that_it_does_not_name(open_app):
    client = open_app(default_settings=SPARSE)
    one, two = enrol(client, "one")[1], enrol(client, "two")[1]
    first = ask(client, one)
    assert first.plan == {}
    received = payload_of(client, one, first)
    whole, digest = first.payload.bytes, received.mask.digest
    again = Assignment.model_validate(ask_with(client, one, digest).json())
    assert again.assignment_id == first.assignment_id
    bits = len(received.mask.bits)
    assert abs(whole - again.payload.bytes - bits) < 100, "what is left out are its bits; it is named instead"
    assert payload_of(client, one, again, received.mask).mask is received.mask
    unknown = Assignment.model_validate(ask_with(client, one, "f" * 64).json())
    assert unknown.payload == first.payload, "of a mask that nobody knows nothing can be left out"
    assert Assignment.model_validate(ask_with(client, one, None).json()).payload == first.payload
    for malformed in ("", "f" * 63, "F" * 64, "../" + "f" * 61, "f" * 64 + "%0a"):
        assert_problem(ask_with(client, one, malformed, wait=0), 422, "mask")
    assert ask(client, two).payload == first.payload


def test_a_mask_is_ignored_by_methods_without_masks(client, pair):
    (_, headers, assignment), _ = pair
    answer = Assignment.model_validate(ask_with(client, headers, "f" * 64).json())
    assert (answer.assignment_id, answer.payload) == (assignment.assignment_id, assignment.payload)


def less(mask):
    """The mask without one weight of its first sparse layer."""
    exists = {name: flags.copy() for name, flags in mask.exists.items()}
    flags = next(flags for flags in exists.values() if not flags.all()).reshape(-1)
    flags[np.flatnonzero(flags)[0]] = False
    return ElementMask(exists)


def moved(mask):
    """The mask with one weight of its first sparse layer in another place."""
    exists = {name: flags.copy() for name, flags in mask.exists.items()}
    flags = next(flags for flags in exists.values() if not flags.all()).reshape(-1)
    here, there = np.flatnonzero(flags)[0], np.flatnonzero(~flags)[0]
    flags[here], flags[there] = False, True
    return ElementMask(exists)


def test_wrong_masks_are_refused_and_change_nothing(open_app, without_rest):
    client = open_app(default_settings=SPARSE)
    pair = [enrol(client, name)[1] for name in ("one", "two")]
    assignments = [ask(client, headers) for headers in pair]
    before = all_that_counts(client)
    wrong = {
        "changed": (moved, "it differs from the round's, which devices of this method may not change; train under it"),
        "fewer": (less, "differs from the round's"),
        "all": (lambda mask: everything(DIGITS.manifest), "differs from the round's"),
        "none": (lambda mask: None, "fetch the assignment again"),
    }
    for name, (change, said) in wrong.items():
        body = sparse_update(client, pair[0], assignments[0], change=change)
        answer = put(client, pair[0], assignments[0], body)
        if name in ("all", "none"):  # longer than what is valid, or refused for its mask
            assert answer.status_code in (413, 422), name
        else:
            assert_problem(answer, 422, "mask: ", said)
        assert all_that_counts(client) == before, name
    for headers, assignment in zip(pair, assignments, strict=True):
        assert put(client, headers, assignment, sparse_update(client, headers, assignment)).status_code == 201
    adjusting = ask(client, pair[0])
    assert (adjusting.round, set(adjusting.plan)) == (2, {"expected_epochs"})
    body = sparse_update(client, pair[0], adjusting, change=less)
    assert_problem(put(client, pair[0], adjusting, body), 422, "mask: ", "but must have", "grow as many as drop")
    body = sparse_update(client, pair[0], adjusting, change=moved)
    assert put(client, pair[0], adjusting, body).status_code == 201


def test_a_round_that_re_adjusts_says_so_and_sends_directions(open_app):
    client = open_app(default_settings=SPARSE)
    pair = [enrol(client, name)[1] for name in ("one", "two")]
    plans, signs = [], []
    for _ in range(4):
        for headers in pair:
            assignment = ask(client, headers)
            received = payload_of(client, headers, assignment)
            body = sparse_update(client, headers, assignment)
            assert put(client, headers, assignment, body).status_code == 201
        plans.append(assignment.plan)
        signs.append(len(received.parts["signs"]) if received.parts else None)
    epochs = SPARSE.local_epochs * SPARSE.rounds
    assert plans == [{}, {"expected_epochs": epochs}, {}, {}], "not in the last"
    assert signs == [None, received.mask.count, None, None]
    assert ask(client, pair[0]).kind == "evaluate"
    records = client.get("/v1/federations/default/rounds").json()
    assert [record["notes"]["positions_replaced"] for record in records] == [0] * 4
    assert all(record["parts_up"]["values"] == 2 * 4 * len(received.values) for record in records)
    info = client.get("/v1/federations/default").json()
    assert info["warning"].startswith("no weight has been replaced in 1 re-adjusting rounds")


def test_reports_of_a_round_that_prepares_are_there_only_where_one_did(client, pair):
    path = "/v1/federations/default/rounds"
    assert client.get(f"{path}/1/reports").json() == []
    assert_problem(client.get(f"{path}/0/reports"), 404, "there is no round 0")
    assert_problem(client.get(f"{path}/-1/reports"), 404, "there is no round -1")


def test_methods_that_prepare_have_a_round_0(open_app):
    client = open_app(default_settings=SETTINGS.model_copy(update={"method": "grasp"}))
    _, headers = enrol(client, "one")
    path = "/v1/federations/default/rounds"
    assert client.get(f"{path}/0/reports").json() == []
    _, other = enrol(client, "two")
    prepared = [
        answer for answer in (ask_with(client, each, None, wait=0.5) for each in (headers, other)) if answer.content
    ]
    (assignment,) = [Assignment.model_validate(answer.json()) for answer in prepared]
    assert (assignment.kind, assignment.round) == ("prepare", 0)
    (record,) = client.get(path).json()
    assert (record["round"], record["status"], record["updates"], len(record["cohort"])) == (0, "open", 0, 1)
    assert client.get("/v1/federations/default").json()["round"] == 0


# --- who may -----------------------------------------------------------------------------------------------------


def every_call(client):
    """(method, path) of every operation of the OpenAPI document, and of the pages that are not in it."""
    paths = client.get("/openapi.json", headers=bearer(OBSERVER)).json()["paths"]
    for path, operations in paths.items():
        for method in operations:
            filled = path.replace("{name}", "default").replace("{assignment_id}", "0" * 32)
            yield method.upper(), filled.replace("{device_id}", "0" * 32)
    yield from (("GET", path) for path in ("/", "/docs", "/openapi.json"))


def test_without_a_token_nothing_is_learnt_but_health(open_app):
    client = open_app(**TOKENS)
    calls = list(every_call(client))
    assert len(calls) > 19
    bodies = {None: set(), "wrong": set()}
    for method, path in [*calls, ("GET", "/v1/nonsense"), ("PUT", "/healthz/none"), ("POST", "/v1/federations/x/y")]:
        for token, told in bodies.items():
            headers = bearer(token) if token else {}
            answer = client.request(method, path, headers=headers, follow_redirects=False)
            if path in ("/healthz", "/readyz"):
                assert answer.status_code == 200
            elif path in ("/", "/docs"):
                assert (answer.status_code, answer.headers["location"][:7]) == (303, "sign-in")
            else:
                told.add(assert_problem(answer, 401, "token")["detail"])
                told.add(client.request(method, path, content=b"{", headers={**JSON, **headers}).json()["detail"])
                hidden = client.request(method, path.replace("default", "other"), headers=headers)
                told.add(assert_problem(hidden, 401)["detail"])
    # The same for every path, whether or not anything is there.
    assert [len(told) for told in bodies.values()] == [1, 1]


LARGE = ("POST /v1/federations", f"POST {FROM_MODEL}", "PATCH /v1/federations/default/model")
"""Calls with bodies of more than a few kilobytes."""


def test_no_unknown_caller_can_fill_the_memory(open_app):
    """A body is refused by its length, or by its sender, before it is read."""
    client = open_app(**TOKENS)
    for method, path in every_call(client):
        if method == "GET" or f"{method} {path}" in LARGE or path.endswith(("/update", "/model/evaluation")):
            continue
        known = {**JSON, **bearer(ADMIN)}
        assert_problem(
            client.request(method, path, content=b" " * (2**20 + 1), headers=known), 413, "the body is too long"
        )
        assert_problem(client.request(method, path, content=iter([b"{}"]), headers=known), 411, "send Content-Length")
        assert_problem(client.request(method, path, content=iter([b"{}"]), headers=JSON), 401, "token")
    judging, update = "/v1/federations/default/model/evaluation", f"/v1/assignments/{'0' * 32}/update"
    for method, path in (*map(str.split, LARGE), ("POST", judging), ("PUT", update)):
        assert_problem(client.request(method, path, content=iter([b"{}"]), headers=JSON), 401, "token")


def test_each_token_opens_its_own_doors(open_app):
    client = open_app(**TOKENS)
    _, device = enrol(client, "one", token=ENROLMENT)
    enrol(client, "two", token=ADMIN)
    looks = ["/v1/federations", "/v1/federations/default", "/v1/federations/default/rounds", "/metrics", "/docs"]
    looks += ["/v1/federations/default/model", "/v1/federations/default/manifest"]
    for token in (bearer(OBSERVER), bearer(ADMIN)):
        assert {client.get(path, headers=token).status_code for path in looks} == {200}
    answers = {path: client.get(path, headers=device, follow_redirects=False).status_code for path in looks}
    assert {path for path, status in answers.items() if status == 200} == {looks[1], *looks[-2:]}, "its own federation"
    assert {path for path, status in answers.items() if status == 303} == {"/docs"}, "to the form"
    assert set(answers.values()) == {200, 303, 401}
    to_join = {"/v1/federations/default", "/v1/federations/default/manifest"}
    for path in looks:
        answer = client.get(path, headers=bearer(ENROLMENT))
        if path in to_join:  # a device must read what it is to join
            assert answer.status_code == 200
        elif path != "/docs":
            assert_problem(answer, 401)
    wanted = {"name": "night", "task": "digits"}
    for token in (bearer(OBSERVER), bearer(ENROLMENT), device, {}):
        assert_problem(client.post("/v1/federations", json=wanted, headers=token), 401, "token")
        assert_problem(client.patch("/v1/federations/default", json={"action": "stop"}, headers=token), 401)
    for token in (bearer(OBSERVER), device):
        body = {"name": "three", "enrolment_key": "k" * 32}
        assert_problem(client.post("/v1/federations/default/devices", json=body, headers=token), 401, "enrolment")
        assert_problem(client.get("/v1/federations/default/assignment", headers=bearer(OBSERVER)), 401, "enrol again")
    assert client.post("/v1/federations", json=wanted, headers=bearer(ADMIN)).status_code == 201
    assert client.get("/v1/federations/default/assignment", headers=device).status_code in (200, 204)


def test_secrets_are_not_in_answers_records_or_the_settings_text(open_app, tmp_path):
    client = open_app(**TOKENS)
    enrol(client, "one", token=ENROLMENT)
    shown = client.get("/v1/federations/default", headers=bearer(ADMIN)).text
    settings = Settings(data_dir=tmp_path, **TOKENS)
    for secret in (ADMIN, OBSERVER, ENROLMENT, "one".ljust(32, "k")):
        assert secret not in shown
        assert secret not in repr(settings)
        for records in (tmp_path / "data").glob("coordinator.sqlite3*"):
            assert secret.encode() not in records.read_bytes()


async def call_at(app, address, times=1):
    """Calls the started application for a page that everybody gets, at this address of the machine."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/join/default", "query_string": b"", "headers": []}
    async with app.router.lifespan_context(app):
        for _ in range(times):
            await app({**scope, "server": None if address is None else (address, 80)}, receive, send)
    assert {each["status"] for each in sent if "status" in each} == {200}


def test_a_missing_token_is_logged_once_beyond_loopback(settings_of, caplog):
    app = create_app(settings_of(observer_token=OBSERVER))
    assert "OPEN" not in caplog.text
    asyncio.run(call_at(app, "192.0.2.1", times=3))
    (warning,) = [record for record in caplog.records if "OPEN TO THE NETWORK" in record.message]
    assert warning.levelno == logging.CRITICAL
    assert "192.0.2.1" in warning.message
    assert "COORDINATOR_ADMIN_TOKEN, COORDINATOR_ENROLMENT_TOKEN" in warning.message
    assert "OBSERVER" not in warning.message


@pytest.mark.parametrize(
    ("address", "tokens"),
    [("127.0.0.1", {}), ("::1", {}), ("testserver", {}), (None, {}), ("192.0.2.1", TOKENS)],
)
def test_on_loopback_or_with_tokens_nothing_is_said(settings_of, caplog, address, tokens):
    asyncio.run(call_at(create_app(settings_of(**tokens)), address))
    assert "OPEN" not in caplog.text


# --- one coordinator, restarts, streams --------------------------------------------------------------------------


def test_a_second_coordinator_on_the_same_folder_is_refused(client, settings_of):
    async def start_another():
        app = create_app(settings_of())
        async with app.router.lifespan_context(app):
            pass

    assert client.get("/healthz").status_code == 200
    with pytest.raises(errors.DataInUse, match="another coordinator"):
        asyncio.run(start_another())
    assert client.get("/readyz").status_code == 200


def test_a_restart_keeps_federations_devices_and_assignments(settings_of, train):
    with serving(settings_of()) as client:
        pair = [enrol(client, name)[1] for name in ("one", "two")]
        assignments = [ask(client, headers) for headers in pair]
        body = train(DIGITS.manifest, assignments[0])
        assert put(client, pair[0], assignments[0], body).status_code == 201
    with serving(settings_of()) as client:
        assert put(client, pair[0], assignments[0], body).json() == {"new": False}
        assert ask(client, pair[1]).assignment_id == assignments[1].assignment_id
        assert put(client, pair[1], assignments[1], train(DIGITS.manifest, assignments[1])).status_code == 201
        assert ask(client, pair[0]).round == 2
        assert client.get("/v1/federations/default/rounds").json()[0]["updates"] == 2


def events(answer):
    kind = None
    for line in answer.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_events_tell_what_happens(client):
    assert_problem(client.get("/v1/federations/none/events"), 404)
    with client.stream("GET", "/v1/federations/default/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer)
        kind, overview = next(told)
        assert (kind, overview["federation"]["status"]) == ("overview", "waiting")
        assert overview["may_change"] is True, "no admin token is set"
        for name in ("one", "two"):
            enrol(client, name)
        running = next(overview["open_round"] for _, overview in told if overview["open_round"])
        assert (running["round"], running["cohort"]) == (1, 2)
        assert [(each["device"], each["kind"]) for each in running["waiting_for"]] == [
            ("one", "train"),
            ("two", "train"),
        ]


def test_later_events_bring_only_the_points_that_changed(client, train):
    devices = [enrol(client, name)[1] for name in ("one", "two")]
    with client.stream("GET", "/v1/federations/default/events") as answer:
        told, points = events(answer), []
        for number in (1, 2):
            for device in devices:
                work = ask(client, device)
                assert work.round == number
                assert put(client, device, work, train(DIGITS.manifest, work)).status_code == 201
            while not points or points[-1]["round"] < number:
                points += next(told)[1]["points"]
    assert [point["round"] for point in points] == [1, 2]
    assert client.get("/v1/federations/default/overview").json()["points"] == points


def test_long_bodies_are_refused_unread_except_on_authenticated_paths(open_app):
    client = open_app()
    big = b"[" + b" " * (2 * 1024 * 1024)
    for method, path in (
        ("PATCH", "/v1/devices/update"),
        ("DELETE", "/v1/assignments/update"),
        ("PATCH", "/v1/federations/update"),
    ):
        answer = client.request(method, path, content=big, headers={"Content-Type": "application/json"})
        assert_problem(answer, 413)


def test_an_operator_finds_a_device_and_its_id(open_app):
    client = open_app()
    device_id, _ = enrol(client, "one")
    (listed,) = client.get("/v1/federations/default/devices").json()
    assert (listed["device_id"], listed["name"], listed["status"], listed["present"]) == (
        device_id,
        "one",
        "active",
        True,
    )
    assert "token" not in str(listed)
    assert client.patch(f"/v1/devices/{device_id}", json={"revoked": True}).status_code == 204
    assert client.get("/v1/federations/default/devices").json()[0]["status"] == "revoked"
