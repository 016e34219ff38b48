"""Large updates over connections that break: what was sent is not sent again, and only a whole update counts."""

from __future__ import annotations

import hashlib
import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from edge_sdk.device import uploads as device_uploads
from edge_sdk.device.transport import Transport
from edge_sdk.tasks.digits import load_images
from sparrow.protocol import bundle, checkpoint
from sparrow.transport import httpx

from ...system.proxy import Proxy
from .test_contract import DIGITS, assert_problem, open_app, pair, put, settings_of

__all__ = ["open_app", "pair", "settings_of"]  # fixtures


@pytest.fixture
def client(open_app):
    return open_app()


@pytest.fixture
def proxy(client):
    made = Proxy(client.base_url.port)
    yield made
    made.close()


@pytest.fixture
def update(pair, train):
    """A device's headers, its update's path and body."""
    _, headers, assignment = pair[0]
    return headers, f"/v1/assignments/{assignment.assignment_id}/update", train(DIGITS.manifest, assignment)


def become_received(client, update, count):
    """Wait until the coordinator has read so much of the update."""
    headers, path, body = update
    asked = {"sha256": hashlib.sha256(body).hexdigest()}
    for _ in range(500):
        if client.get(path, params=asked, headers=headers).json()["received"] == count:
            return
        time.sleep(0.02)
    raise AssertionError("in vain")


def parts(tmp_path):
    return list((tmp_path / "data" / "uploads").rglob("*.part"))


def uploads(proxy):
    return [each for each in proxy.exchanges if each.method == "PUT"]


def test_what_was_sent_is_not_sent_again(client, proxy, update, pair, tmp_path, monkeypatch):
    headers, path, body = update
    monkeypatch.setattr(device_uploads, "RESUMED", 1000)
    cuts = (len(body) // 3, len(body) // 4)

    faults = [proxy.fault("PUT", "/update", "request", cut) for cut in cuts]
    proxy.fault("PUT", "/update", "answer", hold=False)  # all has come, and nobody hears of it

    def break_connections():
        """Each when what was sent has been read: what is in the kernel's hands when a connection goes is lost."""
        for number, fault in enumerate(faults):
            assert fault.reached.wait(60)
            become_received(client, update, sum(cuts[: number + 1]))
            fault.ended.set()

    with httpx.Client(base_url=proxy.url) as wire, ThreadPoolExecutor(1) as pool:
        breaking = pool.submit(break_connections)
        device = Transport(wire, sleep=lambda seconds: time.sleep(0.1))
        device.token = headers["Authorization"].removeprefix("Bearer ")
        device.update(path.split("/")[3], body, bundle.MEDIA_TYPE)
        breaking.result()
    assert [each.up for each in uploads(proxy)][:3] == [*cuts, len(body) - sum(cuts)]
    assert uploads(proxy)[-1].status == 200, "it was taken the time before"
    assert put(client, headers, pair[0][2], body).status_code == 200
    assert parts(tmp_path) == []


def ranged(client, update, first, last=None, body=None, **more):
    headers, path, whole = update
    last = len(whole) - 1 if last is None else last
    said = {
        "Content-Type": bundle.MEDIA_TYPE,
        "Content-Range": f"bytes {first}-{last}/{len(whole)}",
        "Sparrow-Update-SHA256": hashlib.sha256(whole).hexdigest(),
    }
    return client.put(path, content=whole[first:] if body is None else body, headers={**headers, **said, **more})


def test_parts_that_do_not_fit_are_refused_and_leave_nothing(client, update, tmp_path):
    headers, path, body = update
    assert_problem(ranged(client, update, 10), 416, "0 bytes of this update have arrived")
    assert_problem(ranged(client, update, 0, body=body[:-1]), 411, "Content-Length")
    assert_problem(ranged(client, update, 0, **{"Content-Range": "bytes 1"}), 422, "FIRST-LAST/TOTAL")
    huge = {"Content-Range": f"bytes 0-{10**12 - 1}/{10**12}"}
    assert_problem(ranged(client, update, 0, **huge), 413, "must have at most")
    damaged = bytes([body[0] ^ 1]) + body[1:]
    assert_problem(ranged(client, update, 0, body=damaged), 416, "does not match its announced digest")
    assert parts(tmp_path) == []
    asked = {"sha256": hashlib.sha256(body).hexdigest()}
    assert client.get(path, params=asked, headers=headers).json() == {"received": 0}
    assert ranged(client, update, 0).status_code == 201


def test_nothing_is_added_to_what_is_whole(client, update, tmp_path):
    """Its file may be a stored update by then; and a body in chunks says no length that the server could hold it to."""
    said = {"Content-Range": "bytes */0", "Sparrow-Update-SHA256": hashlib.sha256(b"").hexdigest()}
    headers = {**update[0], **said, "Content-Type": bundle.MEDIA_TYPE}
    assert_problem(
        client.put(update[1], content=iter([b"more"]), headers=headers), 422, "longer than its Content-Range"
    )
    assert [path.stat().st_size for path in parts(tmp_path)] == [0]
    assert ranged(client, update, 0).status_code == 201
    assert parts(tmp_path) == []


def test_it_is_nobody_elses(client, update, pair):
    _, path, body = update
    unknown = pair[1][1]
    asked = {"sha256": hashlib.sha256(body).hexdigest()}
    assert_problem(client.get(path, params=asked, headers=unknown), 403, "another device")
    assert_problem(ranged(client, (unknown, *update[1:]), 0), 403, "another device")


def test_simultaneous_equal_uploads_count_once(client, update, tmp_path):
    """As a proxy does that sends again what it thinks is lost."""
    headers, path, body = update
    first = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
    said = {
        **headers,
        "Content-Type": bundle.MEDIA_TYPE,
        "Sparrow-Update-SHA256": hashlib.sha256(body).hexdigest(),
        "Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}",
        "Content-Length": str(len(body)),
    }
    with closing(first):
        first.putrequest("PUT", path)
        for name, value in said.items():
            first.putheader(name, value)
        first.endheaders(body[:1000])
        become_received(client, update, 1000)
        assert ranged(client, update, 0).status_code == 201
        first.send(body[1000:])
        answer = first.getresponse()
        assert (answer.status, "ask how many bytes have arrived" in answer.read().decode()) == (416, True)
    assert parts(tmp_path) == []
    assert ranged(client, update, 0).status_code == 200, "the same again"


def test_what_is_left_goes_when_its_assignment_is_settled(client, proxy, update, tmp_path):
    headers, path, body = update
    fault = proxy.fault("PUT", "/update", "request", len(body) // 2)
    with httpx.Client(base_url=proxy.url) as wire, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ranged, wire, update, 0)
        become_received(client, update, len(body) // 2)
        fault.ended.set()
        with pytest.raises(httpx.TransportError):
            sending.result()
    assert len(parts(tmp_path)) == 1
    client.request("DELETE", path.removesuffix("/update"), json={"reason": "too hot"}, headers=headers)
    for _ in range(500):
        if not parts(tmp_path):
            break
        time.sleep(0.02)
    assert parts(tmp_path) == []


def test_an_update_may_arrive_in_parts(client, update):
    _, _, body = update
    half = len(body) // 2
    assert ranged(client, update, 0, half - 1, body[:half]).json() == {"received": half}
    assert ranged(client, update, half, len(body) - 1, body[half:]).status_code == 201


def in_parts(client, body, *parts):
    headers = {"Content-Type": checkpoint.MEDIA_TYPE, "Sparrow-Body-SHA256": hashlib.sha256(body).hexdigest()}
    for first, last in parts:
        span = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
        answer = client.post(
            "/v1/federations/default/model/evaluation", content=body[first : last + 1], headers={**headers, **span}
        )
    return answer


def test_other_bodies_may_arrive_in_parts(client, pair, tmp_path):
    found = load_images()
    body = checkpoint.save({"inputs": found.inputs[:100], "targets": found.targets[:100]})
    end = len(body) - 1
    assert in_parts(client, body, (0, 9)).json() == {"received": 10}
    assert_problem(in_parts(client, body, (11, end)), 416, "10 bytes of this body have arrived")
    assert in_parts(client, body, (0, 9), (0, 9), (5, 99)).json() == {"received": 100}
    assert_problem(in_parts(client, body, (100, end + 1)), 416, "within the body")
    assert in_parts(client, body, (100, end)).json()["num_examples"] == 100
    assert parts(tmp_path) == []
    assert_problem(in_parts(client, body, (0, 9), (5, 4)), 416, "within the body")
