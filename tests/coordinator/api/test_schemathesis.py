"""Calls made up from the OpenAPI document, as somebody with every right, as a device, and as nobody: never a 5xx."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from .test_contract import ADMIN, ENROLMENT, TOKENS, bearer, enrol, open_app, settings_of  # noqa: F401

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EXAMPLES = 20
EXAMPLES_OF_NOBODY = 5


@pytest.fixture(scope="module")
def openapi():
    """What makes calls up; imported here, as it takes a second that tests which are not slow do without."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs Python 3.11")
    return schemathesis.openapi


def operations(openapi, client):
    """Every operation of the document, but for the event stream, which does not end; those that delete come last, as
    the others' things would be gone."""
    document = client.get("/openapi.json", headers=bearer(ADMIN)).json()
    found = [operation.ok() for operation in openapi.from_dict(document).get_all_operations()]
    found.sort(key=lambda operation: operation.method.lower() == "delete")
    yield from (operation for operation in found if not operation.path.endswith("/events"))


def probe(openapi, client, headers, known, examples):
    """Statuses of made-up calls of each operation; half of them about things that there are, half about any."""
    return {
        operation.label: statuses_of(operation, str(client.base_url), headers, known, examples)
        for operation in operations(openapi, client)
    }


def statuses_of(operation, address, headers, known, examples):
    found = set()

    @given(case=operation.as_strategy(), real=st.booleans())
    @hypothesis_settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def call(case, real):
        if real and case.path_parameters:
            case.path_parameters.update({key: known[key] for key in case.path_parameters if key in known})
        answer = case.call(address, headers=headers, timeout=30)
        assert answer.status_code < 500, f"{case.as_curl_command()}: {answer.text}"
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0] == "application/problem+json"
        found.add(answer.status_code)

    call()
    return found


@pytest.fixture
def client(open_app):  # noqa: F811
    return open_app(**TOKENS, max_wait_seconds=0.1)


@pytest.fixture
def known(client):
    """Two devices' federation, and one's work."""
    device_id, headers = enrol(client, "one", token=ENROLMENT)
    enrol(client, "two", token=ENROLMENT)
    path = "/v1/federations/default/assignment"
    while (answer := client.get(path, params={"wait": 1}, headers=headers)).status_code == 204:
        pass  # the round opens within a tick
    return {"name": "default", "device_id": device_id, "assignment_id": answer.json()["assignment_id"]}, headers


def test_an_admins_calls_are_never_a_5xx(openapi, client, known):
    names, _ = known
    statuses = probe(openapi, client, bearer(ADMIN), names, EXAMPLES)
    assert 200 in statuses["GET /v1/federations/{name}/rounds"]
    assert 204 in statuses["PATCH /v1/devices/{device_id}"]
    assert client.get("/readyz").status_code == 200


def test_a_devices_calls_are_never_a_5xx(openapi, client, known):
    names, headers = known
    statuses = probe(openapi, client, headers, names, EXAMPLES)
    assert 403 in statuses["POST /v1/devices/{device_id}/token"], "with another key than its own"
    assert client.get("/readyz").status_code == 200


def test_nobodys_calls_are_all_refused(openapi, client, known):
    names, _ = known
    statuses = probe(openapi, client, {}, names, EXAMPLES_OF_NOBODY)
    health = {label: found for label, found in statuses.items() if label in ("GET /healthz", "GET /readyz")}
    assert set().union(*health.values()) == {200}
    assert set().union(*(found for label, found in statuses.items() if label not in health)) == {401}
