"""Many pages on one federation: it is looked at once for all of them, and each is told what it was not told before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sparrow.coordinator.calls import live_views
from sparrow.coordinator.calls.live_views import LiveViews
from sparrow.coordinator.calls.signals import Signal


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(live_views, "LEAST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(live_views, "SHARE_OF_TIME", 1e6)


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


def counted(coordinator):
    """The coordinator's overviews, and the looks that were taken at them."""
    looks = []

    def look(name, since=None):
        looks.append(since)
        return coordinator.overviews.look(name, since)

    return SimpleNamespace(look=look), looks


def test_pages_share_their_looks(coordinator):
    coordinator.create()
    overviews, looks = counted(coordinator)

    async def open_pages():
        changed = Signal()
        views = LiveViews(overviews, changed, lambda: False)
        pages = [views.of("f") for _ in range(20)]
        first = await asyncio.gather(*(page.after(None) for page in pages))
        assert len(looks) == 1
        assert (await views.of("f").after(None)) is first[0], "who comes later need not wait"
        waiting = asyncio.gather(*(page.after(had) for page, had in zip(pages, first, strict=True)))
        await asyncio.sleep(0)
        coordinator.enrol("a")
        changed.send()
        second = await waiting
        assert {id(each) for each in second} == {id(second[0])}
        assert second[0].federation.devices == 1
        assert len(looks) == 2

    asyncio.run(open_pages())


def test_a_page_that_waits_is_sent_home_when_the_process_stops(coordinator):
    coordinator.create()

    async def stop():
        changed, closing = Signal(), []
        page = LiveViews(coordinator.overviews, changed, lambda: bool(closing)).of("f")
        waiting = asyncio.create_task(page.after(await page.after(None)))
        await asyncio.sleep(0)
        closing.append(True)
        changed.send()
        assert await waiting is None

    asyncio.run(stop())


def test_an_evaluation_of_long_ago_is_told_and_nothing_else(coordinator, answer, play):
    coordinator.create(cohort=3, rounds=15, evaluation_interval=1, min_participations=1, patience=1)
    one, two, slow = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    for device in (one, two, slow):
        answer(device, stopped=device is slow)  # who has stopped is still asked to evaluate
    play(coordinator, [one, two])
    overviews, looks = counted(coordinator)

    async def look_twice():
        changed = Signal()
        page = LiveViews(overviews, changed, lambda: False).of("f")
        before = await page.after(None)
        assert (before.federation.round, before.evaluating_since) == (15, 1)
        assert answer(slow, accuracy=0.8).round == 1
        changed.send()
        return before, await page.after(before)

    before, after = asyncio.run(look_twice())
    assert looks == [None, 1]
    assert [new.round for old, new in zip(before.points, after.points, strict=True) if new is not old] == [1]
    assert after.points[0].accuracy_personal == pytest.approx(0.6)
    assert after.evaluating_since == 2
