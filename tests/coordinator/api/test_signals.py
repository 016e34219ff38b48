"""A signal wakes the waiters of one loop, from any thread; a coordinator is built without a loop."""

from __future__ import annotations

import asyncio
import threading

from sparrow.coordinator.app import Coordinator
from sparrow.coordinator.calls.signals import Signal
from sparrow.coordinator.settings import Settings


def test_another_thread_wakes_everybody_who_waits():
    signal = Signal()
    signal.send()  # nobody waits yet

    async def wait():
        events = [signal.next(), signal.next()]
        threading.Thread(target=signal.send).start()
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 10)
        assert not signal.next().is_set(), "the next waiter waits for the next one"

    asyncio.run(wait())
    signal.send()  # its loop has ended
    asyncio.run(wait())


def test_a_coordinator_needs_no_event_loop(tmp_path):
    coordinator = Coordinator(Settings(data_dir=tmp_path, tick_seconds=0.05))
    coordinator.open()
    coordinator.fact_recorded()
    coordinator.wake()
    assert [each.name for each in coordinator.federations.list()] == ["default"]
    coordinator.close()
    assert "rounds" not in [thread.name for thread in threading.enumerate()]
