"""What a phase says of heat, with a clock and sensors of the test's own."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from edge_sdk.device.connection import Traffic
from edge_sdk.device.telemetry import SAMPLE_SECONDS, Telemetry
from sparrow.devices import EnergyMeter
from sparrow.devices.energy import Energy
from sparrow.devices.readings import Quality, Reason
from sparrow.devices.system import System
from sparrow.protocol.fields import MOST_SECONDS

from .conditions import conditions


class Device:
    def __init__(self, root, **sensors):
        self.now, self.sensors, self.looks = 0.0, sensors, 0
        meter = EnergyMeter(System.at(root), clock=lambda: self.now, background=False)
        self.telemetry = Telemetry(meter, Traffic(), lambda: self.now, read=self.read)

    def read(self):
        self.looks += 1
        return conditions(**self.sensors)

    def work(self, seconds, **sensors):
        self.sensors.update(sensors)
        self.now += seconds
        self.telemetry.sample()


def test_a_phase_knows_its_peak_and_how_long_it_was_throttled(tmp_path):
    device = Device(tmp_path, temperature=50.0)
    with device.telemetry.phase("train") as train:
        device.work(10, temperature=81.0)
        device.work(10, throttled=1.0)
        device.work(10)
        device.work(10, throttled=0.0, temperature=70.0)
        device.telemetry.pause(7.0)
    assert train.cost.celsius_peak == 81
    assert train.cost.throttled_seconds == pytest.approx(5 + 10 + 5)
    assert (train.cost.seconds, train.cost.paused_seconds) == (40, 7)
    with device.telemetry.phase("train") as after:
        device.work(10)
    assert (after.cost.celsius_peak, after.cost.throttled_seconds, after.cost.paused_seconds) == (70, 0, 0)


def test_unreadable_sensors_are_not_reported(tmp_path):
    device = Device(tmp_path, temperature=Reason.ABSENT, throttled=Reason.ABSENT)
    with device.telemetry.phase("train") as train:
        device.work(10)
    assert (train.cost.celsius_peak, train.cost.throttled_seconds) == (None, None)


def test_sensors_are_not_asked_at_every_step_nor_in_transfers(tmp_path):
    device = Device(tmp_path)
    with device.telemetry.phase("train"):
        for _ in range(1000):
            device.work(0.01)
    assert device.looks <= 10 / SAMPLE_SECONDS + 2
    looks = device.looks
    with device.telemetry.phase("download") as download:
        device.work(10)
    assert (device.looks, download.cost.celsius_peak) == (looks, None)


@pytest.mark.parametrize("celsius", [math.nan, math.inf, -math.inf, -1e300, 1e300, -274.0])
def test_impossible_readings_are_left_out(tmp_path, celsius):
    """A coordinator would refuse the whole report, again and again."""
    device = Device(tmp_path, temperature=celsius)
    with device.telemetry.phase("train") as train:
        device.work(10)
        device.work(10, temperature=60.0)
        device.work(10, temperature=celsius)
    assert (train.cost.celsius_peak, train.cost.seconds) == (60, 30)
    with device.telemetry.phase("train") as train:
        device.work(1e300)
    assert (train.cost.celsius_peak, train.cost.seconds) == (None, MOST_SECONDS)


def test_joules_beyond_reason_are_none():
    @contextmanager
    def phase(name):
        yield SimpleNamespace(energy=Energy(1e300, Quality.MEASURED, "a\0 broken\x1b sensor", "board", 1.0, 1.0))

    telemetry = Telemetry(SimpleNamespace(phase=phase), Traffic())
    with telemetry.phase("train") as train:
        pass
    assert (train.cost.joules, train.cost.quality) == (None, "unavailable")
    assert train.cost.source == r"a\x00 broken\x1b sensor"
