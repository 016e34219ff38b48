"""What an operator sees of a running coordinator: log lines that say what they are about, metrics, health."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections import namedtuple
from contextlib import closing, contextmanager
from urllib.parse import quote

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, text

from sparrow.command_line.table import table
from sparrow.coordinator.fleet.federations import Federations, find
from sparrow.coordinator.fleet.publishing import Publisher
from sparrow.coordinator.logs import JsonFormatter, TextFormatter, about
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Assignment, Device, Round
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import Assignment as Work
from sparrow.protocol.messages import CreateFederation, Phase, Telemetry
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.wire import WIRE

MANIFEST = load_builtin("digits").manifest
SETTINGS = FederationSettings(rounds=5, evaluation_interval=1, deadline_seconds=600, early_stopping="off")
TOKENS = {
    "admin_token": "key-secret-0123456",
    "observer_token": "eye-secret-0123456",
    "enrolment_token": "door-secret-0123456",
}


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def enrol(client, name, **headers):
    body = {"name": name, "enrolment_key": name.ljust(32, "k")}
    return client.post("/v1/federations/default/devices", json=body, headers=headers).json()


def ask(client, headers):
    answer = client.get("/v1/federations/default/assignment", params={"wait": 20}, headers=headers)
    return Work.model_validate(answer.json())


def put(client, headers, work, body, media_type=bundle.MEDIA_TYPE):
    path = f"/v1/assignments/{work.assignment_id}/update"
    return client.put(path, content=body, headers={**headers, "Content-Type": media_type})


# --- logs ------------------------------------------------------------------------------------------------------------


@contextmanager
def logging_to(formatter, level=logging.DEBUG):
    """The lines that everything in this process logs meanwhile."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

    handler, root = Keep(), logging.getLogger()
    handler.setFormatter(formatter)
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield lines
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


def test_lines_say_what_they_are_about():
    log = logging.getLogger("sparrow.coordinator.test")
    with logging_to(JsonFormatter()) as lines, about(federation="night", device=None):
        with about(request="r1"):
            log.info("round %s %r", 3, 'opens "now"\n', extra={"round": 3})
        log.warning("after")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
    first, second, third = map(json.loads, lines)
    assert {key: first[key] for key in ("federation", "round", "request", "level", "logger")} == {
        "federation": "night",
        "round": 3,
        "request": "r1",
        "level": "INFO",
        "logger": "sparrow.coordinator.test",
    }
    assert first["message"] == "round 3 'opens \"now\"\\n'"
    assert (second["federation"], "round" in second, "request" in second) == ("night", False, False)
    assert "ValueError: why" in third["exception"]
    with logging_to(TextFormatter()) as lines, about(federation="night", request="r2"):
        log.info("opens", extra={"round": 4})
    assert lines[0].endswith(" INFO sparrow.coordinator.test: opens federation=night round=4 request=r2")


def test_a_rounds_lines_name_federation_and_round_and_a_calls_lines_its_device(open_app):
    with logging_to(JsonFormatter()) as lines:
        client = open_app()
        one, two = (enrol(client, name) for name in ("one", "two"))
        work = ask(client, bearer(one["token"]))
        client.request(
            "DELETE", f"/v1/assignments/{work.assignment_id}", json={"reason": "hot"}, headers=bearer(one["token"])
        )
        ask(client, bearer(two["token"]))
    said = [json.loads(line) for line in lines]
    (opened,) = [line for line in said if "round 1 opened" in line["message"]]
    assert (opened["federation"], opened["round"]) == ("default", 1)
    (returned,) = [line for line in said if "returned train" in line["message"]]
    assert (returned["federation"], returned["round"], returned["device"]) == ("default", 1, one["device_id"])
    assert re.fullmatch("[0-9a-f]{16}", returned["request"])


def test_an_answer_names_its_request(open_app):
    client = open_app()
    assert {client.get(path).headers["sparrow-wire"] for path in ("/healthz", "/v1/nonsense")} == {str(WIRE)}
    assert client.get("/healthz", headers={"X-Request-ID": "from-the-proxy.1"}).headers["x-request-id"] == (
        "from-the-proxy.1"
    )
    for odd in ("a b", "x" * 65, 'a"', ""):
        made = client.get("/v1/nonsense", headers={"X-Request-ID": odd}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{16}", made)


def test_no_secret_is_ever_logged(open_app, train):
    with logging_to(JsonFormatter()) as lines:
        client = open_app(**TOKENS)
        one, two = (enrol(client, name, **bearer("door-secret-0123456")) for name in ("one", "two"))
        headers = bearer(one["token"])
        key = {"enrolment_key": "one".ljust(32, "k")}
        renewed = client.post(f"/v1/devices/{one['device_id']}/token", json=key, headers=headers).json()["token"]
        work = ask(client, bearer(renewed))
        put(client, bearer(renewed), work, b"rubbish")
        put(client, bearer(renewed), work, train(MANIFEST, work))
        for token in (*TOKENS.values(), one["token"], "wrong-secret"):
            for path in ("/v1/federations", "/metrics", "/v1/federations/default/assignment", "/v1/nonsense"):
                client.get(path, headers=bearer(token))
        client.post("/v1/federations", json={"name": "../", "task": "digits"}, headers=bearer("key-secret-0123456"))
        enrol(client, "../", **bearer("door-secret-0123456"))
        client.patch(f"/v1/devices/{two['device_id']}", json={"revoked": True}, headers=bearer("key-secret-0123456"))
    text = "\n".join(lines)
    assert "round 1 opened" in text
    keys = [name.ljust(32, "k") for name in ("one", "two", "../")]
    for secret in (*TOKENS.values(), one["token"], two["token"], renewed, "wrong-secret", *keys):
        assert secret not in text


# --- metrics ---------------------------------------------------------------------------------------------------------


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family):
    return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}


def test_metrics_count_what_happens_by_route_reason_and_federation(open_app, train):
    client = open_app()
    one, two = (bearer(enrol(client, name)["token"]) for name in ("one", "two"))
    first, second = ask(client, one), ask(client, two)
    assert put(client, one, first, b"rubbish").status_code == 422
    assert put(client, one, first, b"{}", "application/json").status_code == 415
    body = train(MANIFEST, first)
    assert [put(client, one, first, body).status_code for _ in range(2)] == [201, 200]
    assert put(client, two, second, train(MANIFEST, second)).status_code == 201
    client.get(f"/v1/assignments/{second.assignment_id}/payload", headers=two)
    judged = ask(client, one)
    assert judged.kind == "evaluate", "the round has closed"
    receipt = {"personal": {"num_examples": 4, "loss": 1.0, "accuracy": 0.75}}
    assert put(client, one, judged, json.dumps(receipt).encode(), "application/json").status_code == 201
    client.get("/v1/somewhere/else")

    found = families(client.get("/metrics").text)
    default = ("federation", "default")
    assert values(found["sparrow_updates_accepted"])[(default,)] == 3
    refused = {sample.labels["reason"]: sample.value for sample in found["sparrow_updates_refused"].samples}
    assert {reason for reason, count in refused.items() if count} == {"BadContent", "WrongMediaType"}
    assert values(found["sparrow_transferred_bytes"])[(("direction", "up"), default)] > len(body)
    rounds = found["sparrow_round_duration_seconds"]
    assert [sample.value for sample in rounds.samples if sample.name.endswith("_count")] == [1]
    assert values(found["sparrow_open_assignments"])[(default, ("kind", "train"))] == 2
    assert values(found["sparrow_accuracy_ratio"]) == {(default, ("model", "personal")): 0.75}
    routes = {
        (sample.labels["method"], sample.labels["route"], sample.labels["status"])
        for sample in found["sparrow_http_request_duration_seconds"].samples
    }
    assert ("PUT", "/v1/assignments/{assignment_id}/update", "201") in routes
    assert ("none", "none", "404") in routes
    assert not any(first.assignment_id in route for _, route, _ in routes)
    for name in ("sparrow_database_commit_duration_seconds", "sparrow_blob_write_duration_seconds"):
        assert any(sample.name.endswith("_count") and sample.value > 0 for sample in found[name].samples)
    assert {"process_resident_memory_bytes", "process_open_fds"} <= set(found)


def test_metrics_keep_to_the_naming_rules(open_app):
    client = open_app()
    enrol(client, "one")
    for name, family in families(client.get("/metrics").text).items():
        assert name.startswith(("sparrow_", "process_", "python_")), name
        assert family.documentation, name
        for sample in family.samples:
            assert "device" not in sample.labels
            if family.type == "counter":
                assert sample.name.endswith(("_total", "_created"))
            if "duration" in name:
                assert "_seconds" in name


@pytest.fixture
def recorded(tmp_path, clock):
    """A store whose federation has had any number of rounds; answers the function that records them."""
    with closing(Store(tmp_path / "data")) as store:
        create = CreateFederation(name="f", task="digits", settings=SETTINGS)
        models = Models(store)
        Publisher(store, models, clock, Federations(store, models, clock)).create(create)

        def record(first, last, devices=3):
            with store.writing() as db:
                federation = find(db, "f")
                for number in range(first, last + 1):
                    common = {"federation_id": federation.id, "deadline_at": 9.0}
                    times = {"opened_at": 1.0, "closed_at": 2.0}
                    db.add(Round(number=number, status="closed", target=devices, **times, **common))
                    for index in range(devices):
                        for kind in ("train", "evaluate"):
                            report = {"personal": {"accuracy": number / 1000}} if kind == "evaluate" else {}
                            db.add(
                                Assignment(
                                    id=f"{number}-{index}-{kind}",
                                    device_id=str(index),
                                    kind=kind,
                                    round=number,
                                    position=index,
                                    status="done",
                                    model_version=0,
                                    full=True,
                                    created_at=1.0,
                                    report=report,
                                    **common,
                                )
                            )
                federation.round = last

        with store.writing() as db:
            for index in range(3):
                device = {"id": str(index), "federation_id": find(db, "f").id, "name": str(index), "status": "active"}
                secrets = {"token_sha256": bytes(32), "enrolment_key_sha256": bytes(32), "profile": {}}
                db.add(Device(**device, **secrets, budget=1.0, token_issued_at=0.0, enrolled_at=0.0, seen_at=0.0))
        store.record = record
        yield store


def test_a_look_at_the_metrics_does_not_grow_with_the_rounds(recorded):
    metrics = Metrics()
    metrics.observe_records(recorded, time.time)
    statements = []
    engine = recorded.engine
    event.listen(engine, "before_cursor_execute", lambda c, cursor, sql, values, *_: statements.append((sql, values)))

    def look():
        statements.clear()
        return families(generate_latest(metrics.registry).decode()), len(statements)

    recorded.record(1, 2)
    _, few = look()
    recorded.record(3, 120)
    found, many = look()
    assert many == few <= 6
    assert [sample.value for sample in found["sparrow_accuracy_ratio"].samples] == [pytest.approx(0.12)]
    assert [sample.value for sample in found["sparrow_rounds_closed"].samples] == [120]
    with engine.connect() as connection:
        for sql, values in [each for each in statements if "assignments" in each[0]]:
            plan = "\n".join(row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values))
            assert "USING INDEX" in plan or "USING COVERING INDEX" in plan, plan
            assert "SCAN assignments" not in plan or "assignments_open" in plan, plan
        assert connection.execute(text("SELECT count(*) FROM assignments")).scalar() == 720


# --- health ----------------------------------------------------------------------------------------------------------


def test_it_is_not_ready_when_the_disk_is_nearly_full(open_app, monkeypatch):
    client = open_app()
    assert client.get("/readyz").status_code == 200
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    answer = client.get("/readyz")
    assert (answer.status_code, "5,000 bytes left" in answer.json()["detail"]) == (503, True)
    assert client.get("/healthz").status_code == 200


def test_unknown_callers_are_not_told_why_it_is_not_ready(open_app, tmp_path, monkeypatch):
    client = open_app(**TOKENS)
    shutil.rmtree(tmp_path / "data" / "blobs")
    (tmp_path / "data" / "blobs").write_text("a file where the folder was")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "cannot use" not in answer.text
    assert "cannot use its data folder" in client.get("/readyz", headers=bearer("eye-secret-0123456")).text


# --- what a caller says cannot be read as something else -------------------------------------------------------------

NASTY = "hot\n2026-01-01 CRITICAL root: all is lost\r\x1b[2J\x9b1m\u202egnp.exe\u2028\x7f\u200b"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_line_of_the_log_is_a_callers(open_app, formatter):
    with logging_to(formatter) as lines:
        client = open_app()
        one, two = (enrol(client, name) for name in ("one", "two"))
        headers = bearer(one["token"])
        work = ask(client, headers)
        path = f"/v1/assignments/{work.assignment_id}"
        assert client.request("DELETE", path, json={"reason": NASTY}, headers=headers).status_code == 204
        gone = {"conditions": {"available": False, "reason": NASTY}}
        assert (
            client.patch(f"/v1/devices/{two['device_id']}", json=gone, headers=bearer(two["token"])).status_code == 204
        )
        client.get("/v1/federations/default" + quote(NASTY))
        logging.getLogger("sparrow").info("%s", "x", extra={"device": NASTY, "round": 3})
        try:
            raise ValueError(NASTY)
        except ValueError:
            logging.getLogger("sparrow").exception("failed")
    assert sum("all is lost" in line for line in lines) >= 3
    for line in lines:
        first, *rest = line.split("\n")
        assert first.isprintable()
        assert all(each.isprintable() and each.startswith("    ") for each in rest), "a traceback, which is indented"
        if isinstance(formatter, JsonFormatter):
            said = json.loads(line)
            assert all(each.isprintable() for each in (said["message"], said.get("device", "")))


def test_no_line_of_a_table_is_a_devices():
    lines = table(("device", "board"), [("one", NASTY), ("two", "pi")]).split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


ASKED = "/v1/federations/default"


UNSTORABLE = [
    ("GET", f"{ASKED}%00", {}),
    ("GET", "/v1/devices%00", {}),
    ("GET", f"{ASKED}/devices?search=%00", {}),
    ("GET", f"{ASKED}/devices?%00=1", {}),
    ("GET", ASKED, {"headers": {"If-None-Match": b"a\0b"}}),
    ("POST", f"{ASKED}/devices", {"json": {"name": "a", "enrolment_key": "k" * 32, "profile": {"board": "a\0"}}}),
    ("POST", f"{ASKED}/devices", {"json": {"name": "a", "enrolment_key": "k" * 31 + "\ud800"}}),
    ("POST", f"{ASKED}/devices", {"json": {"name": "a", "enrolment_key": "k" * 32, "\ud800": 1}}),
    ("POST", f"{ASKED}/comparison", {"json": {"task": "a\0"}}),
    ("POST", "/v1/federations", {"json": {"name": "f", "task": "a\ud800"}}),
    ("POST", "/v1/federations", {"json": {"name": "f", "task": "digits", "settings": {"method": "\0"}}}),
]


def test_text_that_cannot_be_stored_is_refused_at_the_border(open_app):
    client = open_app()
    for method, path, more in UNSTORABLE:
        if "json" in more:
            more = {"content": json.dumps(more["json"]), "headers": {"Content-Type": "application/json"}}
        answer = client.request(method, path, **more)
        assert answer.status_code == 422, f"{method} {path}: {answer.text}"
        assert answer.json()["detail"]


def test_a_number_without_end_is_no_fault_of_the_storage(open_app):
    """A file's name of 400 digits is too long, and a disk that refuses it would be taken to be broken."""
    client = open_app()
    assert client.get(f"{ASKED}/model?version={'9' * 400}").status_code == 422
    wanted = {"action": "rollback", "model_version": 10**400}
    assert client.patch(ASKED, json=wanted).status_code == 422
    assert client.get(f"{ASKED}/rounds/{'9' * 400}/reports").status_code == 404
    assert client.get("/readyz").json() == {"status": "ready"}


def test_costs_without_bounds_are_refused_and_every_record_stays(open_app, train):
    client = open_app()
    one, _ = (bearer(enrol(client, name)["token"]) for name in ("one", "two"))
    endless = Phase.model_construct(seconds=1.7e308)
    work = ask(client, one)
    body = train(MANIFEST, work, telemetry=Telemetry.model_construct(download=endless, train=endless))
    answer = put(client, one, work, body)
    assert answer.status_code == 422
    assert "seconds" in answer.json()["detail"]
    put(client, one, work, train(MANIFEST, work)).raise_for_status()
    cost = {"assignment_id": work.assignment_id, "upload": {"seconds": 1.7e308}}
    headers = {**one, "Sparrow-Upload-Cost": json.dumps(cost)}
    assert client.get(f"{ASKED}/assignment", headers=headers).status_code in (200, 204), (
        "telemetry keeps nobody from work"
    )
    for path in ("/rounds", "/rounds?format=csv", "/rounds/1/reports", "/overview", "/devices"):
        assert client.get(ASKED + path).status_code == 200
    assert client.get(f"{ASKED}/rounds").json()[0]["updates"] == 1
