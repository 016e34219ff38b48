"""What observers and fleets look at: open work, the reports of a round; and tokens that no longer count."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.messages import Assignment, Phase, UploadCost
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess

MANIFEST = load_builtin("digits").manifest
OPEN = "/v1/federations/default/assignments"
SETTINGS = FederationSettings(rounds=2, evaluation_interval=1, deadline_seconds=600, early_stopping="off")


@pytest.fixture
def client(open_app):
    return open_app()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def enrol(client, name, **headers):
    answer = client.post(
        "/v1/federations/default/devices", json={"name": name, "enrolment_key": name.ljust(32, "k")}, headers=headers
    )
    assert answer.status_code == 201, answer.text
    return answer.json()["device_id"], bearer(answer.json()["token"])


def ask(client, headers, wait=20.0, cost=None):
    headers = {**headers, "Sparrow-Upload-Cost": cost.model_dump_json()} if cost else headers
    answer = client.get("/v1/federations/default/assignment", params={"wait": wait}, headers=headers)
    assert answer.status_code == 200, answer.text
    return Assignment.model_validate(answer.json())


def put(client, headers, assignment, body, media_type=bundle.MEDIA_TYPE):
    answer = client.put(
        f"/v1/assignments/{assignment.assignment_id}/update",
        content=body,
        headers={**headers, "Content-Type": media_type},
    )
    assert answer.status_code == 201, answer.text


def listed(answer):
    assert answer.status_code == 200, answer.text
    return [(each["device"], each["kind"], each["round"]) for each in answer.json()["assignments"]]


def listed_when(client, wanted):
    """The open work once it is ``wanted``: each look waits for the next change."""
    answer = client.get(OPEN)
    while listed(answer) != wanted:
        answer = client.get(OPEN, params={"wait": 20}, headers={"If-None-Match": answer.headers["ETag"]})
        assert answer.status_code == 200, "nothing has moved for long"
    return answer


# --- open work -------------------------------------------------------------------------------------------------------


def test_open_work_says_who_is_waited_for_oldest_first(client, train):
    nobody = client.get(OPEN).json()
    assert nobody.pop("at")
    assert nobody == {"status": "waiting", "round": 0, "assignments": []}
    one, two = enrol(client, "one")[1], enrol(client, "two")[1]
    answer = listed_when(client, [("one", "train", 1), ("two", "train", 1)])
    assert answer.json()["status"] == "running"
    first = ask(client, one)
    assert answer.json()["assignments"][0]["assignment_id"] == first.assignment_id
    put(client, one, first, train(MANIFEST, first))
    assert listed(client.get(OPEN)) == [("two", "train", 1)]
    second = ask(client, two)
    put(client, two, second, train(MANIFEST, second))
    evaluations = [("one", "evaluate", 1), ("two", "evaluate", 1)]
    answer = listed_when(client, [*evaluations, ("one", "train", 2), ("two", "train", 2)])
    assert answer.json()["round"] == 1


def test_what_has_not_changed_is_not_sent_again(client):
    enrol(client, "one")
    etag = client.get(OPEN).headers["ETag"]
    same = client.get(OPEN, headers={"If-None-Match": etag})
    assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
    same = client.get(OPEN, params={"wait": 0.05}, headers={"If-None-Match": etag})
    assert (same.status_code, same.headers["ETag"]) == (304, etag)
    assert client.get(OPEN, params={"wait": 20}).status_code == 200, "who knows nothing does not wait"


def test_a_wait_ends_with_new_work(client):
    enrol(client, "one")
    etag = client.get(OPEN).headers["ETag"]
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.get, OPEN, params={"wait": 50}, headers={"If-None-Match": etag}, timeout=60)
        enrol(client, "two")
        answer = poll.result(30)
    assert listed(answer) == [("one", "train", 1), ("two", "train", 1)]
    assert answer.headers["ETag"] != etag


def test_a_wait_ends_when_the_federation_does(client):
    etag = client.get(OPEN).headers["ETag"]
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.get, OPEN, params={"wait": 50}, headers={"If-None-Match": etag}, timeout=60)
        client.patch("/v1/federations/default", json={"action": "stop"}).raise_for_status()
        assert poll.result(30).json()["status"] == "stopped"


@pytest.mark.parametrize("path", ["assignments", "rounds/1/reports"])
def test_unknown_callers_do_not_look_at_work_and_reports(open_app, path):
    client = open_app(
        observer_token="an-observer-s-secret", enrolment_token="the-enrolment-token", admin_token="the-chief-s-secret"
    )
    url = f"/v1/federations/default/{path}"
    _, device = enrol(client, "one", **bearer("the-enrolment-token"))
    for headers in ({}, bearer("the-enrolment-token"), bearer("nonsense"), device):
        refused = client.get(url, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["title"] == "NotAuthenticated"
    for headers in (bearer("an-observer-s-secret"), bearer("the-chief-s-secret")):
        assert client.get(url, headers=headers).status_code == 200


def test_open_work_of_no_federation(client):
    missing = client.get("/v1/federations/none/assignments", params={"wait": 20})
    assert missing.status_code == 404
    assert "there is no federation 'none'" in missing.json()["detail"]


# --- reports ---------------------------------------------------------------------------------------------------------


def test_reports_of_a_round_training_first_with_what_each_upload_cost(client, train):
    headers = {name: enrol(client, name)[1] for name in ("one", "two")}
    cost = {}
    for name in ("two", "one"):
        assignment = ask(client, headers[name])
        put(client, headers[name], assignment, train(MANIFEST, assignment, examples=7, status="active"))
        cost[name] = UploadCost(assignment_id=assignment.assignment_id, upload=Phase(seconds=2.5, bytes_up=900))
    receipt = {"personal": {"num_examples": 3, "loss": 0.5, "accuracy": 1.0, "metrics": {}}, "state_bytes": 12}
    assignment = ask(client, headers["one"], cost=cost["one"])
    assert assignment.kind == "evaluate"
    put(client, headers["one"], assignment, json.dumps(receipt).encode(), "application/json")

    reports = client.get("/v1/federations/default/rounds/1/reports").json()
    assert [(each["device"], each["kind"]) for each in reports] == [
        ("one", "train"),
        ("two", "train"),
        ("one", "evaluate"),
    ]
    trained, other, judged = reports
    assert (trained["report"]["num_examples"], trained["report"]["train_loss"]) == (7, 0.5)
    assert trained["upload"] | {"seconds": 2.5, "bytes_up": 900, "joules": None} == trained["upload"]
    assert (other["upload"]["seconds"], other["upload"]["bytes_up"] > 0) == (0.0, True), "as yet, what arrived"
    assert judged["report"]["personal"] == receipt["personal"]
    assert judged["report"]["state_bytes"] == 12


@pytest.mark.parametrize("number", [0, -1, 3, 99])
def test_a_round_that_was_not_has_no_reports(client, number):
    answer = client.get(f"/v1/federations/default/rounds/{number}/reports")
    assert answer.status_code == 404
    assert f"there is no round {number}" in answer.json()["detail"]


def test_a_round_that_nobody_has_answered_yet_has_no_reports_either(client):
    assert client.get("/v1/federations/default/rounds/1/reports").json() == []
    assert client.get("/v1/federations/none/rounds/1/reports").status_code == 404
    assert client.get("/v1/federations/default/rounds/one/reports").status_code == 422


# --- tokens are remembered, and forgotten at once --------------------------------------------------------------------


def uses(client, headers, assignment_id):
    """The statuses of every call that a device makes with its token."""
    return [
        client.get("/v1/federations/default/assignment", headers=headers).status_code,
        client.get(f"/v1/assignments/{assignment_id}/payload", headers=headers).status_code,
        client.put(f"/v1/assignments/{assignment_id}/update", content=b"x", headers=headers).status_code,
        client.request(
            "DELETE", f"/v1/assignments/{assignment_id}", json={"reason": "tired"}, headers=headers
        ).status_code,
    ]


@pytest.mark.parametrize("warm", [True, False])
def test_a_revoked_devices_token_stops_working_at_once(open_app, warm):
    client = open_app(observer_token="an-observer-s-secret", admin_token="the-chief-s-secret")
    device_id, headers = enrol(client, "one")
    _, other = enrol(client, "two")
    assignment = ask(client, other)
    if warm:
        assert ask(client, headers).kind == "train"
        assert client.get("/v1/federations/default/model", headers=headers).status_code == 200
    client.patch(
        f"/v1/devices/{device_id}", json={"revoked": True}, headers=bearer("the-chief-s-secret")
    ).raise_for_status()
    assert uses(client, headers, assignment.assignment_id) == [401] * 4
    assert client.get("/v1/federations/default/model", headers=headers).status_code == 401, "nor may it look any more"
    assert client.patch(f"/v1/devices/{device_id}", json={"budget": 0.5}, headers=headers).status_code == 401
    assert ask(client, other).assignment_id == assignment.assignment_id, "the others go on"


def test_the_token_of_before_a_device_enrolled_again_works_until_the_new_one_is_used(client):
    device_id, before = enrol(client, "one")
    enrol(client, "two")
    assignment = ask(client, before)
    again, after = enrol(client, "one")
    assert again == device_id
    assert before != after
    assert ask(client, before).assignment_id == assignment.assignment_id
    assert ask(client, after).assignment_id == assignment.assignment_id
    assert uses(client, before, assignment.assignment_id) == [401] * 4


def test_a_token_outlives_the_coordinators_memory(open_app, tmp_path):
    settings = {"data_dir": tmp_path / "other", "default_settings": SETTINGS, "tick_seconds": 0.05}
    with inprocess.running(create_app(Settings(**settings))) as client:
        _, headers = enrol(client, "one")
        _, other = enrol(client, "two")
        before = ask(client, headers)
        client.get("/readyz")
    client = open_app(**settings)
    assert ask(client, headers).assignment_id == before.assignment_id
    assert ask(client, other).kind == "train"
