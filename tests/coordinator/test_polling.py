"""Devices without work come again in turn: counted, on a clock that the test moves."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from sparrow.coordinator.fleet.polling import Polling
from sparrow.protocol.messages import ChangeFederation

from .fakes import LocalCoordinator

DEVICES, CALLS = 60, 2.0
CYCLE = DEVICES / CALLS


@pytest.fixture
def coordinator(tmp_path, clock):
    opened = LocalCoordinator(tmp_path / "data", clock)
    yield opened
    opened.store.close()


@pytest.fixture
def devices(coordinator):
    coordinator.create(min_devices=1000)
    return coordinator.enrol(*(f"d{number}" for number in range(DEVICES)))


def polling(coordinator, clock, calls=CALLS, least=1):
    return Polling(coordinator.store, clock, least=least, calls=calls)


def test_a_fleet_that_returns_at_once_is_spread_over_a_cycle(coordinator, clock, devices):
    """All ask in the same second, as after an outage; from then on one cycle sees each device once at most."""
    steps = polling(coordinator, clock)
    begin = clock.now
    coming = [(begin, device.name) for device in devices]  # ids are drawn anew in every run
    heapq.heapify(coming)
    calls = Counter()
    by_device = Counter()
    while coming[0][0] < begin + 20 * CYCLE:
        clock.now, device = heapq.heappop(coming)
        calls[int(clock.now - begin)] += 1
        by_device[device] += 1
        heapq.heappush(coming, (clock.now + steps.retry_after(device), device))
    assert calls.pop(0) == DEVICES
    assert sum(calls.values()) <= 20 * DEVICES, "no more calls than asked for"
    assert sum(calls.values()) > 0.85 * 20 * DEVICES
    assert max(calls.values()) <= 10, "of 60 at once: five standard deviations above two"
    assert max(by_device.values()) - min(by_device.values()) <= 4, "nobody is forgotten"


def test_who_asks_twice_is_told_the_same_moment_and_others_another(coordinator, clock, devices):
    steps = polling(coordinator, clock)
    first = {device.id: clock.now + steps.retry_after(device.id) for device in devices}
    assert {device.id: clock.now + steps.retry_after(device.id) for device in devices} == first
    assert len(set(first.values())) > DEVICES / 3
    clock.pass_seconds(CYCLE)
    second = {device.id: clock.now + steps.retry_after(device.id) - CYCLE for device in devices}
    assert sum(first[device] == second[device] for device in first) < DEVICES / 5, "not the same neighbours again"


def test_small_fleets_are_told_the_usual_pause(coordinator, clock, devices):
    assert {polling(coordinator, clock, calls=60.0).retry_after(device.id) for device in devices} == {1}
    assert polling(coordinator, clock, calls=2.0, least=45).retry_after("x") == 45


def test_only_polling_devices_count_and_the_count_is_cached(coordinator, clock, devices, monkeypatch):
    steps, looked = polling(coordinator, clock), []
    reading = coordinator.store.reading
    monkeypatch.setattr(coordinator.store, "reading", lambda: looked.append(clock.now) or reading())
    waits = [steps.retry_after(devices[0].id) for _ in range(50)]
    assert len(looked) == 1
    assert max(waits) > 1
    coordinator.federations.change("f", ChangeFederation(action="stop"))
    looked.clear()
    assert steps.retry_after(devices[0].id) == waits[0], "remembered"
    clock.pass_seconds(10)
    assert steps.retry_after(devices[0].id) == 1
    assert len(looked) == 1
