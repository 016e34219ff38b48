"""Tokens and invitations over HTTP: who makes and revokes them, what they permit, and what becomes of them."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from sparrow.coordinator.fleet.access import Tokens
from sparrow.protocol.settings import FederationSettings

SETTINGS = FederationSettings(method="fedavg", rounds=2, evaluation_interval=0)
ADMIN, OBSERVER = "the-chief-s-secret", "an-observer-s-secret"
DEVICES = "/v1/federations/default/devices"
INVITATIONS = "/v1/federations/default/invitations"
SERVER = "https://lab.example"


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


CHIEF = bearer(ADMIN)


@pytest.fixture
def guarded(open_app):
    """A client of an application whose calls of all kinds need a token."""
    return open_app(admin_token=ADMIN, observer_token=OBSERVER, enrolment_token="the-enrolment-token")


def make(client, headers=CHIEF, **wanted):
    return client.post("/v1/tokens", json={"kind": "enrolment", **wanted}, headers=headers)


def enrol(client, name, token, federation="default"):
    body = {"name": name, "enrolment_key": name.ljust(32, "k")}
    return client.post(f"/v1/federations/{federation}/devices", json=body, headers=bearer(token))


def listed(client, headers=CHIEF):
    return {each["id"]: each for each in client.get("/v1/tokens", headers=headers).json()}


def test_a_token_is_made_used_listed_and_revoked(guarded):
    answer = make(guarded, uses=1, seconds=3600, federation="default", note="ward 3")
    made = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    assert (made["status"], made["max_uses"], made["federation"], made["note"]) == ("valid", 1, "default", "ward 3")
    assert made["made_by"] == "settings"
    assert enrol(guarded, "one", made["secret"]).status_code == 201
    assert enrol(guarded, "two", made["secret"]).status_code == 401
    found = listed(guarded)
    assert (found[made["id"]]["uses"], found[made["id"]]["status"]) == (1, "used up")
    assert made["secret"] not in json.dumps(found)

    other = make(guarded, kind="observer").json()
    assert guarded.get("/v1/federations", headers=bearer(other["secret"])).status_code == 200
    answer = guarded.request("DELETE", f"/v1/tokens/{other['id']}", headers=CHIEF)
    assert answer.json() == {"revoked": [other["id"]]}
    assert guarded.get("/v1/federations", headers=bearer(other["secret"])).status_code == 401, "at once"
    assert guarded.request("DELETE", "/v1/tokens/nobody", headers=CHIEF).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "guest"},
        {"kind": "admin", "uses": 3},
        {"kind": "observer", "uses": 3},
        {"kind": "admin", "federation": "default"},
        {"uses": 0},
        {"uses": 2**31},
        {"seconds": 0},
        {"seconds": 1e12},
        {"note": "n" * 201},
        {"note": "a\0b"},
        {"secret": "chosen-by-the-caller"},
    ],
    ids=str,
)
def test_limits_that_cannot_be_make_no_token(guarded, wrong):
    assert make(guarded, **wrong).status_code == 422
    assert listed(guarded) == {}


def test_a_token_for_a_federation_that_there_is_not_is_not_made(guarded):
    answer = make(guarded, federation="defualt")
    assert (answer.status_code, "did you mean default?" in answer.json()["detail"]) == (404, True)
    assert listed(guarded) == {}


@pytest.mark.parametrize("kind", ["observer", "enrolment", "device"])
def test_only_administrators_make_see_and_revoke_tokens(guarded, kind):
    made = make(guarded, kind="observer").json()
    device = enrol(guarded, "one", "the-enrolment-token").json()["token"]
    token = {"observer": OBSERVER, "enrolment": "the-enrolment-token", "device": device}[kind]
    answers = [
        make(guarded, bearer(token)),
        guarded.get("/v1/tokens", headers=bearer(token)),
        guarded.request("DELETE", f"/v1/tokens/{made['id']}", headers=bearer(token)),
        guarded.post(INVITATIONS, json={}, headers=bearer(token)),
        guarded.request("DELETE", f"/v1/devices/{'0' * 32}", headers=bearer(token)),
    ]
    assert [answer.status_code for answer in answers] == [401] * len(answers)
    assert listed(guarded)[made["id"]]["status"] == "valid"


def test_a_device_may_remove_itself_and_no_other(guarded):
    one, two = (enrol(guarded, name, "the-enrolment-token").json() for name in ("one", "two"))
    refused = guarded.request("DELETE", f"/v1/devices/{two['device_id']}", headers=bearer(one["token"]))
    assert refused.status_code == 401
    for status in (204, 401):
        answer = guarded.request("DELETE", f"/v1/devices/{one['device_id']}", headers=bearer(one["token"]))
        assert answer.status_code == status


@pytest.mark.parametrize("set_too", [{}, {"enrolment_token": "the-enrolment-token"}, {"observer_token": OBSERVER}])
def test_without_an_admin_token_nobody_makes_the_first_one_over_http(open_app, set_too):
    """Who made it would have shut all others out, and enrolment tokens would be for everybody."""
    client = open_app(**set_too)
    headers = bearer(OBSERVER) if "observer_token" in set_too else {}
    for answer in (
        make(client, headers, kind="admin"),
        make(client, headers),
        client.get("/v1/tokens", headers=headers),
    ):
        assert (answer.status_code, "--records" in answer.json()["detail"]) == (403, True)
    answer = client.post(INVITATIONS, json={"server": SERVER}, headers=headers)
    assert answer.status_code == (403 if "enrolment_token" in set_too else 201)


def test_a_stolen_admin_token_is_revoked_with_what_was_made_with_it(guarded):
    stolen = make(guarded, kind="admin").json()
    child = make(guarded, bearer(stolen["secret"]), kind="admin").json()
    grandchild = make(guarded, bearer(child["secret"])).json()
    kept = make(guarded).json()
    assert (child["made_by"], grandchild["made_by"]) == (stolen["id"], child["id"])
    revoked = guarded.request("DELETE", f"/v1/tokens/{stolen['id']}?made=true", headers=CHIEF).json()["revoked"]
    assert set(revoked) == {stolen["id"], child["id"], grandchild["id"]}
    statuses = {each: info["status"] for each, info in listed(guarded).items()}
    assert statuses == {**dict.fromkeys(revoked, "revoked"), kept["id"]: "valid"}


def test_a_change_of_the_admin_token_leaves_what_was_made_with_it(guarded):
    chief = make(guarded, kind="admin").json()
    made = make(guarded, bearer(chief["secret"])).json()
    assert guarded.request("DELETE", f"/v1/tokens/{chief['id']}", headers=CHIEF).json() == {"revoked": [chief["id"]]}
    assert enrol(guarded, "one", made["secret"]).status_code == 201


def test_a_token_revoked_by_another_process_makes_no_more(guarded, monkeypatch):
    """Its look-up may be remembered here for some seconds."""
    chief = make(guarded, kind="admin").json()
    assert listed(guarded, bearer(chief["secret"]))
    # The other process revokes it; this one keeps its look-ups.
    monkeypatch.setattr(Tokens, "forget", lambda self: None)
    guarded.request("DELETE", f"/v1/tokens/{chief['id']}", headers=CHIEF)
    assert guarded.get("/v1/tokens", headers=bearer(chief["secret"])).status_code == 200, "it is remembered"
    assert make(guarded, bearer(chief["secret"])).status_code == 401
    path = f"/v1/tokens/{chief['id']}"
    assert guarded.request("DELETE", path, headers=bearer(chief["secret"])).status_code == 401


# --- invitations ------------------------------------------------------------------------------------------------------


def test_an_invitation_has_a_token_of_its_own_for_this_federation(guarded):
    guarded.post("/v1/federations", json={"name": "night", "task": "digits"}, headers=CHIEF)
    wanted = {"server": SERVER, "uses": 2, "seconds": 3600, "note": "two phones"}
    answer = guarded.post(INVITATIONS, json=wanted, headers=CHIEF)
    invitation = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    token = invitation["token"]
    assert (token["kind"], token["max_uses"], token["federation"], token["note"]) == (
        "enrolment",
        2,
        "default",
        "two phones",
    )
    link = urlsplit(invitation["join_link"]["link"])
    assert (link.netloc, link.path) == ("lab.example", "/join/default")
    assert parse_qs(link.fragment) == {"token": [token["secret"]]}
    assert invitation["join_link"]["svg"].startswith("<svg")
    assert invitation["command"].split() == [
        f"SPARROW_ENROLMENT_TOKEN={token['secret']}",
        *("sparrow", "join", "--server", SERVER, "--federation", "default"),
    ]
    assert enrol(guarded, "one", token["secret"], "night").status_code == 401
    assert [enrol(guarded, name, token["secret"]).status_code for name in ("a", "b", "c")] == [201, 201, 401]


def test_an_invitation_of_a_coordinator_whose_devices_need_no_token_has_none(open_app):
    client = open_app()
    invitation = client.post(INVITATIONS, json={"server": SERVER}).json()
    assert invitation["token"] is None
    assert invitation["join_link"]["link"] == f"{SERVER}/join/default"
    assert invitation["command"] == f"sparrow join --server {SERVER} --federation default"


def test_where_pages_cannot_take_part_an_invitation_is_a_command(guarded):
    body = {"name": "own", "task": "digits", "settings": {"method": "ditto"}}
    guarded.post("/v1/federations", json=body, headers=CHIEF)
    invitation = guarded.post("/v1/federations/own/invitations", json={"server": SERVER}, headers=CHIEF).json()
    assert invitation["join_link"] is None
    assert invitation["token"]["secret"] in invitation["command"]


@pytest.mark.parametrize("server", ["lab", "ftp://lab.example", "https://lab.example/?a", "https://" + "l" * 1000])
def test_a_wrong_address_leaves_no_token_behind(guarded, server):
    assert guarded.post(INVITATIONS, json={"server": server}, headers=CHIEF).status_code == 422
    assert listed(guarded) == {}
    assert guarded.post("/v1/federations/none/invitations", json={}, headers=CHIEF).status_code == 404


# --- devices that are removed -----------------------------------------------------------------------------------------


def test_a_removed_device_is_in_no_list_or_count_and_its_name_is_free(guarded):
    devices = {name: enrol(guarded, name, "the-enrolment-token").json() for name in ("one", "two", "three")}
    guarded.patch(f"/v1/devices/{devices['two']['device_id']}", json={"revoked": True}, headers=CHIEF)
    for name in ("one", "two"):
        path = f"/v1/devices/{devices[name]['device_id']}"
        assert [guarded.request("DELETE", path, headers=CHIEF).status_code for _ in range(2)] == [204, 204]
    answer = guarded.get(DEVICES, headers=CHIEF)
    assert ([each["name"] for each in answer.json()], answer.headers["sparrow-total"]) == (["three"], "1")
    overview = guarded.get("/v1/federations/default/overview", headers=CHIEF).json()
    assert (sum(overview["doing"].values()), overview["federation"]["devices"]) == (1, 1)
    assert guarded.get(f"{DEVICES}/states", headers=CHIEF).json()["names"] == ["three"]
    old = devices["one"]
    assert guarded.get("/v1/federations/default/assignment", headers=bearer(old["token"])).status_code == 401
    history = guarded.get(f"/v1/devices/{old['device_id']}", headers=CHIEF).json()
    assert history["device"]["name"] == "one", "whoever knows the id still finds it"
    body = {"name": "one", "enrolment_key": "another".ljust(32, "k")}
    assert guarded.post(DEVICES, json=body, headers=bearer("the-enrolment-token")).status_code == 201
