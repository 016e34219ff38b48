"""Who may do what: tokens from the records, devices' tokens that are renewed and expire, and how often one may call."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from sparrow import tokens
from sparrow.command_line.exits import Exit
from sparrow.coordinator.calls.buckets import BURST_SECONDS, RateLimit, Turns, address_key
from sparrow.coordinator.errors import NameTaken, NotAuthenticated, NotFound, TokenExpired
from sparrow.coordinator.fleet import access
from sparrow.coordinator.fleet.access import MOST_REMEMBERED, PREFIXES, REMEMBER_SECONDS, Tokens
from sparrow.coordinator.fleet.devices import Devices
from sparrow.coordinator.fleet.federations import Federations
from sparrow.coordinator.fleet.publishing import Publisher
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.store import Store
from sparrow.protocol.messages import ChangeDevice, CreateFederation, Enrol
from sparrow.protocol.settings import FederationSettings

from .test_contract import serving

pytestmark = pytest.mark.integration  # serves from a real port

SETTINGS = FederationSettings(rounds=2, evaluation_interval=0, deadline_seconds=600, early_stopping="off")
DEVICES = "/v1/federations/default/devices"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs ``sparrow token --records`` on this test's records; answers its JSON, or its error line."""
    monkeypatch.setenv("COORDINATOR_DATA_DIR", str(tmp_path / "data"))

    def run(*arguments):
        status = tokens.main([*arguments, "--records", "--json"])
        said = capsys.readouterr()
        return json.loads(said.out) if status == 0 else said.err

    return run


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def enrolment(name):
    return {"name": name, "enrolment_key": name.ljust(32, "k")}


def enrol(client, name, token=None, federation="default", **more):
    headers = bearer(token) if token else {}
    return client.post(f"/v1/federations/{federation}/devices", json={**enrolment(name), **more}, headers=headers)


# --- tokens of operators, made beside a running coordinator -----------------------------------------------------------


def test_a_kind_that_has_a_token_is_shut_and_opens_to_it_alone(open_app, command):
    client = open_app()
    wanted = {"name": "night", "task": "digits"}
    made = command("create", "admin", "--note", "ours")
    assert made["secret"].startswith("sparrow_admin_")
    for headers in ({}, bearer("sparrow_admin_x"), bearer(command("create", "observer")["secret"])):
        answer = client.post("/v1/federations", json=wanted, headers=headers)
        assert (answer.status_code, "an admin token" in answer.text) == (401, True)
    assert client.post("/v1/federations", json=wanted, headers=bearer(made["secret"])).status_code == 201
    assert client.get("/v1/federations").status_code == 401
    assert client.get("/v1/federations", headers=bearer(made["secret"])).status_code == 200, "an admin may look, too"
    assert enrol(client, "one").status_code == 201, "no enrolment token was made"


EVIL = {"Host": "evil.example:8000"}


def test_a_name_that_is_not_this_machines_opens_nothing(open_app, command):
    """DNS rebinding: a page's own name, which has come to mean this machine."""
    client = open_app()
    made = {"name": "night", "task": "digits"}
    observing = ("/v1/federations", DEVICES, "/metrics", "/", "/docs", "/v1/federations/default/model")
    for headers in (EVIL, {**EVIL, **bearer("made-up")}, {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}):
        answers = [client.get(path, headers=headers) for path in observing]
        answers.append(client.post("/v1/federations", json=made, headers=headers))
        answers.append(client.patch("/v1/federations/default", json={"status": "stopped"}, headers=headers))
        answers.append(client.request("DELETE", "/v1/federations/default", headers=headers))
        assert [answer.status_code for answer in answers] == [403] * len(answers)
        assert {answer.json()["title"] for answer in answers} == {"WrongHost"}
        assert "COORDINATOR_HOSTS" in answers[0].json()["detail"]
    own = ("127.0.0.1:8000", "[::1]:8000", "192.0.2.1", "LOCALHOST:80", socket.gethostname(), "localhost.")
    for name in own:
        assert client.get("/v1/federations", headers={"Host": name}).status_code == 200, name
    observer, admin = (command("create", kind)["secret"] for kind in ("observer", "admin"))
    assert client.get("/v1/federations", headers={**EVIL, **bearer(observer)}).status_code == 200
    assert client.post("/v1/federations", json=made, headers={**EVIL, **bearer(admin)}).status_code == 201


def test_devices_join_under_any_name(open_app, command):
    client = open_app()
    name = {"Host": "SERVER:8000"}
    assert client.get("/v1/federations/default", headers=name).status_code == 200
    assert client.get("/v1/federations/default/manifest", headers=name).status_code == 200
    key = {"name": "pi", "enrolment_key": 32 * "k"}
    answer = client.post("/v1/federations/default/devices", json=key, headers=name)
    assert answer.status_code == 201
    device = {**name, **bearer(answer.json()["token"])}
    assert client.get("/v1/federations/default/assignment", headers=device).status_code == 204
    assert client.get("/v1/federations/default/model", headers=device).status_code == 200
    token = command("create", "enrolment")["secret"]
    assert client.get("/v1/federations/default", headers={**name, **bearer(token)}).status_code == 200
    assert client.get("/v1/federations/default", headers=EVIL).status_code == 403, "who joins has a token now"


def test_a_page_that_enrols_a_device_is_no_administrator_with_its_token(open_app):
    client = open_app()
    device = {**EVIL, **bearer(client.post(DEVICES, json=enrolment("page"), headers=EVIL).json()["token"])}
    answers = [client.get(path, headers=device) for path in ("/v1/federations", DEVICES, "/metrics", "/")]
    answers.append(client.patch("/v1/federations/default", json={"action": "stop"}, headers=device))
    answers.append(client.request("DELETE", "/v1/federations/default", headers=device))
    assert [answer.json()["title"] for answer in answers] == ["WrongHost"] * len(answers)
    other = enrol(client, "other").json()["device_id"]
    assert client.patch(f"/v1/devices/{other}", json={"revoked": True}, headers=device).status_code == 403
    assert client.get("/v1/federations", headers=bearer(device["Authorization"].split()[1])).status_code == 200


def test_other_names_are_given(open_app, tmp_path):
    client = open_app(hosts="lab.example, Pi")
    names = ("lab.example", "pi:8000", "LAB.example.", "evil.example")
    answers = [client.get("/v1/federations", headers={"Host": name}).status_code for name in names]
    assert answers == [200, 200, 200, 403]
    assert open_app(hosts="*", data_dir=tmp_path / "other").get("/v1/federations", headers=EVIL).status_code == 200


def test_an_enrolment_token_admits_its_number_of_devices(open_app, command):
    client = open_app()
    token = command("create", "enrolment", "--uses", "2")
    # A device that could not join at first counts once.
    assert enrol(client, "one", token["secret"], failure="no-memory").status_code == 201
    enrolled = [enrol(client, name, token["secret"]).json() for name in ("one", "two")]
    again = enrol(client, "one", token["secret"])
    assert (again.status_code, again.json()["device_id"]) == (201, enrolled[0]["device_id"]), "its answer was lost"
    refused = enrol(client, "three", token["secret"])
    assert (refused.status_code, "is used up or no longer valid" in refused.json()["detail"]) == (401, True)
    assert [device["name"] for device in client.get(DEVICES).json()] == ["one", "two"]
    (listed,) = command("list")
    assert (listed["uses"], listed["max_uses"], listed["status"]) == (2, 2, "used up")
    assert "secret" not in listed


def test_a_token_for_one_federation_opens_no_other(open_app, command):
    client = open_app()
    for name in ("day", "night"):
        assert client.post("/v1/federations", json={"name": name, "task": "digits"}).status_code == 201
    enroller = command("create", "enrolment", "--federation", "day")["secret"]
    observer = command("create", "observer", "--federation", "day")["secret"]
    answers = [enrol(client, "one", enroller, name) for name in ("night", "none")]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].json() == answers[1].json(), "whether there is such a federation is not theirs to know"
    assert enrol(client, "one", enroller, "day").status_code == 201
    looks = ("/v1/federations/day/rounds", "/v1/federations/night/rounds", "/v1/federations", "/metrics")
    assert [client.get(path, headers=bearer(observer)).status_code for path in looks] == [200, 401, 401, 401]
    assert "for the federation day" in client.get("/metrics", headers=bearer(observer)).json()["detail"]
    assert client.get("/v1/federations/day", headers=bearer(enroller)).status_code == 200
    assert client.get("/v1/federations/night", headers=bearer(enroller)).status_code == 401


def test_the_command_says_what_is_wrong(open_app, command, tmp_path, capsys):
    assert "set its COORDINATOR_DATA_DIR" in command("list")
    assert not (tmp_path / "data").exists()
    open_app()
    assert "there is no federation 'none'" in command("create", "enrolment", "--federation", "none")
    assert "there is no token with the id 'nobody'" in command("revoke", "nobody", "--yes")
    for wrong in (
        ["create", "guest"],
        ["create", "admin", "--uses", "3"],
        ["create", "admin", "--federation", "default"],
        ["create", "enrolment", "--uses", "0"],
        ["create", "enrolment", "--expires", "soon"],
        ["create", "enrolment", "--note", "n" * 201],
    ):
        try:
            code = tokens.main([*wrong, "--records"])
        except SystemExit as ended:
            code = ended.code
        assert code == Exit.USAGE
    capsys.readouterr()
    assert tokens.main(["create", "enrolment", "--uses", "3", "--expires", "7d", "--records"]) == 0
    said = capsys.readouterr()
    assert said.out.strip().startswith("sparrow_enrol_")
    assert len(said.out.split()) == 1, "alone, for $(...)"
    assert "for 3 devices" in said.err
    assert tokens.main(["list", "--records"]) == 0
    listed = capsys.readouterr().out
    assert "0 of 3" in listed
    assert said.out.strip() not in listed


def test_secrets_are_kept_as_digests_only(open_app, command, tmp_path):
    client = open_app()
    secrets = [command("create", kind)["secret"] for kind in ("admin", "observer", "enrolment")]
    device = enrol(client, "one", secrets[2]).json()
    key, path = {"enrolment_key": "one".ljust(32, "k")}, f"/v1/devices/{device['device_id']}/token"
    new = client.post(path, json=key, headers=bearer(device["token"])).json()["token"]
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.sqlite3")) as connection:
        dump = "\n".join(connection.iterdump())
    for secret in (*secrets, device["token"], new, "one".ljust(32, "k")):
        assert secret not in dump
        assert secret.removeprefix("sparrow_")[10:] not in dump


@pytest.fixture
def domain(tmp_path, clock):
    """A store with one federation, and what looks after tokens over it, as another process than the command's."""
    with closing(Store(tmp_path / "data")) as store:
        models = Models(store)
        Publisher(store, models, clock, Federations(store, models, clock)).create(
            CreateFederation(name="default", task="digits", settings=SETTINGS)
        )
        yield store


def test_a_token_revoked_elsewhere_or_expired_lives_on_for_seconds_at_most(domain, clock, command, monkeypatch):
    monkeypatch.setattr("sparrow.coordinator.commands.tokens.SteadyClock", lambda folder: clock)
    known = Tokens(domain, clock, {})
    assert known.guarded() == frozenset()
    made, short = command("create", "observer"), command("create", "enrolment", "--expires", "30m")
    assert known.find(made["secret"]).kind == "observer"
    assert known.find(short["secret"]).kind == "enrolment"
    command("revoke", made["id"], "--yes")
    assert known.find(made["secret"]) is not None, "remembered"
    clock.pass_seconds(REMEMBER_SECONDS)
    assert known.find(made["secret"]) is None
    assert known.guarded() == {"observer", "enrolment"}, "and their calls stay guarded"
    clock.pass_seconds(1800 - REMEMBER_SECONDS - 1)
    assert known.find(short["secret"]) is not None
    clock.pass_seconds(1)
    assert known.known_holder(short["secret"]) is None, "to the second, remembered or not"
    assert known.find(short["secret"]) is None
    assert {each["status"] for each in command("list")} == {"revoked", "expired"}


def test_what_the_settings_and_unknown_callers_send_costs_no_memory(domain, clock):
    known = Tokens(domain, clock, {"admin": "key"})
    assert known.find("key").kind == "admin"
    for number in range(100):
        assert known.find(f"unknown {number}") is None
    assert len(known.remembered) == 0
    assert MOST_REMEMBERED >= 10_000


# --- devices' tokens -------------------------------------------------------------------------------------------------


def enrol_in(devices, name="one"):
    return devices.enrol("default", Enrol(**enrolment(name)))


def rotate(devices, enrolled, name="one"):
    return devices.rotate(enrolled.device_id, enrolment(name)["enrolment_key"])


def test_a_device_revoked_by_another_process_is_out_within_seconds(domain, clock, command):
    devices = Devices(domain, clock)
    one = enrol_in(devices)
    assert one.token.startswith(PREFIXES["device"])
    assert devices.authenticate(one.token).device_id == one.device_id
    assert command("revoke", one.device_id, "--yes") == {"revoked": [one.device_id]}
    clock.pass_seconds(REMEMBER_SECONDS)
    with pytest.raises(NotAuthenticated, match="revoked"):
        devices.authenticate(one.token)


def test_a_new_token_replaces_the_old_one_at_first_use(domain, clock):
    devices = Devices(domain, clock, rotation_seconds=100)
    one = enrol_in(devices)
    caller = devices.authenticate(one.token)
    assert not devices.wants_rotation(caller)
    clock.pass_seconds(100)
    assert devices.wants_rotation(devices.authenticate(one.token))
    lost, new = (rotate(devices, one).token for _ in range(2))
    clock.pass_seconds(1000)
    assert devices.authenticate(one.token).device_id == one.device_id, "good however long the new one is not used"
    assert lost == new, "whichever answer arrives"
    renewed = devices.authenticate(new)
    assert (renewed.device_id, devices.wants_rotation(renewed)) == (one.device_id, False)
    with pytest.raises(NotAuthenticated):
        devices.authenticate(one.token)
    devices.change(one.device_id, ChangeDevice(revoked=True))
    with pytest.raises(NotAuthenticated):
        devices.authenticate(new)
    with pytest.raises(NotAuthenticated):
        rotate(devices, one)


def test_a_token_offered_to_a_device_that_is_revoked_is_none(domain, clock):
    devices = Devices(domain, clock)
    one, two = enrol_in(devices), enrol_in(devices, "two")
    offered, same = rotate(devices, one).token, rotate(devices, two, "two").token
    devices.change(one.device_id, ChangeDevice(revoked=True))
    again = enrol_in(devices, "two")
    assert again.token == same, "whichever of the two answers the device keeps"
    assert devices.authenticate(again.token).device_id == two.device_id
    for token in (offered, two.token):
        with pytest.raises(NotAuthenticated):
            devices.authenticate(token)


def test_an_enrolment_that_comes_twice_takes_no_token_from_the_device(domain, clock):
    """A proxy sends it again, or the first call was slow and the device asked once more: it may hold any of the
    answers."""
    devices = Devices(domain, clock)
    tokens = [enrol_in(devices).token for _ in range(4)]
    assert len(set(tokens)) == 2
    assert devices.authenticate(tokens[0]).device_id == devices.authenticate(tokens[-1]).device_id
    with pytest.raises(NotAuthenticated):
        devices.authenticate(tokens[0])
    late = enrol_in(devices).token
    assert devices.authenticate(tokens[-1]), "one that came late, of which the device never hears"
    assert late not in tokens
    with pytest.raises(NameTaken):
        devices.enrol("default", Enrol(name="one", enrolment_key="another" * 8))
    assert devices.authenticate(tokens[-1])


def test_a_thief_without_the_key_cannot_renew_a_token(open_app):
    client = open_app()
    stolen = enrol(client, "one").json()
    path, headers = f"/v1/devices/{stolen['device_id']}/token", bearer(stolen["token"])
    tries = ({}, {"enrolment_key": "g" * 43}, {"enrolment_key": stolen["token"]}, {"enrolment_key": ""})
    statuses = [client.post(path, json=guess, headers=headers).status_code for guess in tries]
    assert statuses == [422, 403, 403, 422]
    assert client.post(path, headers=headers).status_code == 422

    own = {"enrolment_key": enrolment("one")["enrolment_key"]}
    renewed = client.post(path, json=own, headers=headers).json()["token"]
    assert client.post(path, json=own, headers=headers).json()["token"] == renewed, "a lost answer does no harm"
    work = "/v1/federations/default/assignment"
    assert client.get(work, headers=headers).status_code == 204, "the device has not used the new one yet"
    assert client.get(work, headers=bearer(renewed)).status_code == 204
    assert client.get(work, headers=headers).status_code == 401
    assert client.post(path, json=own, headers=headers).status_code == 401


def test_an_expired_token_is_good_for_nothing_but_enrolling_again(domain, clock):
    devices = Devices(domain, clock, rotation_seconds=10, lifetime_seconds=100)
    one = enrol_in(devices)
    assert devices.authenticate(one.token)
    clock.pass_seconds(99)
    assert devices.authenticate(one.token)
    clock.pass_seconds(1)
    for _ in range(2):
        with pytest.raises(TokenExpired, match="restart the device"):
            devices.authenticate(one.token)
    assert enrol_in(devices).device_id == one.device_id


def test_a_lifetime_that_ends_before_tokens_are_renewed_is_refused(tmp_path):
    for rotation in (0, 7, 8):
        with pytest.raises(ValueError, match="would expire before they are renewed"):
            Settings(data_dir=tmp_path, device_token_rotation_days=rotation, device_token_lifetime_days=7)


def test_a_stolen_token_reaches_nothing_of_another_device(open_app):
    client = open_app(
        admin_token="the-chief-s-secret", observer_token="an-observer-s-secret", enrolment_token="the-enrolment-token"
    )
    wanted = {"name": "night", "task": "digits"}
    assert client.post("/v1/federations", json=wanted, headers=bearer("the-chief-s-secret")).status_code == 201
    thief, other = (enrol(client, name, "the-enrolment-token").json() for name in ("thief", "other"))
    unknown = enrol(client, "far", "the-enrolment-token", "night").json()
    work = client.get("/v1/federations/default/assignment", params={"wait": 20}, headers=bearer(other["token"])).json()
    path = f"/v1/assignments/{work['assignment_id']}"
    of_other = {"enrolment_key": enrolment("other")["enrolment_key"]}
    for token in (thief["token"], unknown["token"]):
        headers = bearer(token)
        answers = [
            client.get(f"{path}/payload", headers=headers),
            client.put(f"{path}/update", content=b"{}", headers=headers),
            client.request("DELETE", path, json={"reason": "mine"}, headers=headers),
            client.patch(f"/v1/devices/{other['device_id']}", json={"budget": 0.1}, headers=headers),
            client.patch(f"/v1/devices/{other['device_id']}", json={"revoked": True}, headers=headers),
            client.post(f"/v1/devices/{other['device_id']}/token", json=of_other, headers=headers),
            client.patch("/v1/federations/default", json={"action": "stop"}, headers=headers),
            *(
                client.get(f"/v1/federations/default/{what}", headers=headers)
                for what in ("assignments", "devices", "rounds", "rounds/1/reports", "events")
            ),
            *(client.get(page, headers=headers) for page in ("/v1/federations", "/metrics", "/openapi.json")),
        ]
        assert {answer.status_code for answer in answers} <= {401, 403}
    night = (
        "night",
        "night/manifest",
        "night/skeleton.onnx",
        "night/step.onnx",
        "night/model",
        "night/model.onnx",
        "night/assignment",
    )
    answers = [client.get(f"/v1/federations/{what}", headers=bearer(thief["token"])) for what in night]
    assert {answer.status_code for answer in answers} <= {401, 403}
    again = client.get("/v1/federations/default/assignment", headers=bearer(other["token"])).json()
    assert again["assignment_id"] == work["assignment_id"], "nothing has come of it"


def test_single_reports_are_for_observers_and_administrators_alone(open_app, command):
    client = open_app()
    enrolled = enrol(client, "one").json()
    of_device = f"/v1/devices/{enrolled['device_id']}"
    federation = "/v1/federations/default"
    records = [f"{federation}/{what}" for what in ("rounds", "rounds/1/reports", "devices", "overview", "assignments")]
    joining = [federation, f"{federation}/manifest"]

    def statuses(paths, token=None):
        headers = bearer(token) if token else {}
        return {client.get(path, headers=headers).status_code for path in paths}

    assert statuses([*records, of_device, *joining]) == {200}, "without an observer token for everybody"
    tokens = {kind: command("create", kind)["secret"] for kind in ("admin", "observer")}
    limited = command("create", "observer", "--federation", "default")["secret"]
    for kind in ("admin", "observer"):
        assert statuses([*records, of_device, *joining], tokens[kind]) == {200}
    assert (statuses([*records, of_device]), statuses(joining)) == ({401}, {200}), "anybody may still join"
    tokens["enrolment"] = command("create", "enrolment")["secret"]
    assert (statuses([*records, *joining], limited), statuses([of_device], limited)) == ({200}, {401})
    for token in (tokens["enrolment"], enrolled["token"], None):
        assert statuses([*records, of_device], token) == {401}, "not even its own"
    assert statuses(joining, tokens["enrolment"]) == statuses(joining, enrolled["token"]) == {200}
    model = f"{federation}/model"
    assert (statuses([model], enrolled["token"]), statuses([model], tokens["enrolment"])) == ({200}, {401})


# --- how often -------------------------------------------------------------------------------------------------------


def test_a_caller_begins_a_few_calls_in_each_turn_of_the_loop():
    async def call():
        turns, begun = Turns(most=2), []

        async def one(caller):
            await turns.begin(caller)
            begun.append((turn, caller))

        calls = [asyncio.ensure_future(one(caller)) for caller in "aaaaab"]
        calls[3].cancel()
        turn = 0
        while not all(each.done() for each in calls):
            turn += 1
            await asyncio.sleep(0)
        assert [[caller for at, caller in begun if at == number] for number in sorted({at for at, _ in begun})] == [
            ["a", "a", "b"],
            ["a", "a"],
        ]

    asyncio.run(call())


def test_a_bucket_holds_so_many_and_fills_again(clock):
    limit = RateLimit(2, clock)
    assert [limit.take("a") for _ in range(20)] == [0.0] * 20
    assert limit.take("a") == pytest.approx(0.5)
    assert limit.take("b") == 0.0, "each has its own"
    clock.pass_seconds(0.5)
    assert limit.take("a") == 0.0
    assert limit.take("a") > 0
    clock.pass_seconds(1000)
    assert [limit.take("a") for _ in range(20)] == [0.0] * 20, "no more than full"
    limit.charge("a", 1e9)
    assert limit.wait("a") <= BURST_SECONDS + 0.5, "a debt ends"


def test_unknown_callers_with_many_addresses_take_no_memory(clock):
    limit = RateLimit(1, clock, most=50)
    for number in range(1000):
        limit.take(f"10.0.{number // 256}.{number % 256}")
    assert len(limit) == 50


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("/run/sparrow.sock", None),
        (None, None),
    ],
)
def test_addresses_are_counted_by_customer(host, key):
    assert address_key(host) == key


def test_who_calls_too_often_is_asked_to_wait_and_others_are_not(open_app):
    client = open_app(
        limit_loopback=True,
        device_calls_per_second=0.5,
        address_calls_per_second=3,
        enrolment_token="the-enrolment-token",
    )
    one, two = (enrol(client, name, "the-enrolment-token").json()["token"] for name in ("one", "two"))
    path = "/v1/federations/default"
    answers = [client.get(path, headers=bearer(one)) for _ in range(8)]
    assert {answer.status_code for answer in answers[:5]} == {200}
    late = answers[-1]
    assert (late.status_code, late.json()["title"]) == (429, "TooManyRequests")
    assert 0 < int(late.headers["retry-after"]) <= BURST_SECONDS
    assert client.get(path, headers=bearer(two)).status_code == 200
    assert client.get(path).status_code == 200, "the address has a bucket of its own"


def test_guessing_costs_more_and_keeps_known_devices_from_nothing(open_app):
    client = open_app(limit_loopback=True, address_calls_per_second=5, enrolment_token="the-enrolment-token")
    device = enrol(client, "one", "the-enrolment-token").json()["token"]
    path = "/v1/federations/default/assignment"
    assert client.get(path, headers=bearer(device)).status_code == 204
    statuses = [client.get(path, headers=bearer(f"guess {number}")).status_code for number in range(8)]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    assert statuses.count(401) <= 5
    assert client.get(path, headers=bearer(device)).status_code == 204
    assert client.get("/healthz").status_code == 200


def test_on_this_machine_nothing_is_limited_by_default(open_app):
    client = open_app(device_calls_per_second=0.1, address_calls_per_second=0.1)
    token = enrol(client, "one").json()["token"]
    for headers in ({}, bearer(token), bearer("guess")):
        assert {client.get("/v1/federations/default", headers=headers).status_code for _ in range(10)} == {200}


def test_uses_are_counted_exactly_however_many_come_at_once(domain, clock, command):
    devices = Devices(domain, clock)
    token = command("create", "enrolment", "--uses", "5")

    def come(name):
        try:
            return devices.enrol("default", Enrol(**enrolment(name)), token["id"]).device_id
        except NotAuthenticated:
            return None

    with ThreadPoolExecutor(8) as pool:
        let_in = [each for each in pool.map(come, [f"d{number}" for number in range(20)]) if each]
    assert len(let_in) == len(set(let_in)) == 5
    (listed,) = command("list")
    assert (listed["uses"], listed["status"]) == (5, "used up")


def test_a_device_that_is_not_let_in_costs_no_use(domain, clock, command):
    devices = Devices(domain, clock)
    token = command("create", "enrolment", "--uses", "5")
    enrol_in(devices)
    with pytest.raises(NameTaken):
        devices.enrol("default", Enrol(name="one", enrolment_key="another" * 8), token["id"])
    with pytest.raises(NotFound):
        devices.enrol("none", Enrol(**enrolment("two")), token["id"])
    assert command("list")[0]["uses"] == 0


def test_behind_a_proxy_on_this_machine_callers_are_counted_by_their_own_addresses(tmp_path):
    path = "/v1/federations/default"
    with serving(Settings(data_dir=tmp_path / "data", address_calls_per_second=0.5)) as client:

        def call(address):
            return client.get(path, headers={"X-Forwarded-For": address}).status_code

        assert [call("203.0.113.9") for _ in range(8)][-1] == 429
        assert call("203.0.113.10") == 200
        assert {client.get(path).status_code for _ in range(8)} == {200}, "this machine itself"


def test_a_token_for_one_federation_shows_its_page_and_names_no_other(command, tmp_path):
    with serving(Settings(data_dir=tmp_path / "data")) as client:
        for name in ("day", "night"):
            assert client.post("/v1/federations", json={"name": name, "task": "digits"}).status_code == 201
        observer = bearer(command("create", "observer", "--federation", "day")["secret"])
        assert 'data-federation="day"' in client.get("/", headers=observer).text
        assert client.get("/page/dashboard.js", headers=observer).status_code == 200
        overview = client.get("/v1/federations/day/overview", headers=observer).json()
        with client.stream("GET", "/v1/federations/day/events", headers=observer) as answer:
            told = next(line for line in answer.iter_lines() if line.startswith("data: "))
        for seen in (overview, json.loads(told.removeprefix("data: "))):
            assert [line["name"] for line in seen["federations"]] == ["day"]
        assert client.get("/v1/federations/night/events", headers=observer).status_code == 401


def test_a_stream_ends_when_its_token_is_taken_away(command, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "REMEMBER_SECONDS", 0.0)
    with serving(Settings(data_dir=tmp_path / "data")) as client:
        path = "/v1/federations/default/events"
        assert client.get("/readyz").status_code == 200
        made = command("create", "observer")
        with client.stream("GET", path, headers=bearer(made["secret"])) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: overview"
            command("revoke", made["id"], "--yes")
            enrol(client, "one")  # which would be told
            assert [line for line in lines if line.startswith("event")] == []
