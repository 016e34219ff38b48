"""Many pages on one federation: it is looked at once for all of them, and each is told what it was not told before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sparrow.coordinator.api import watch
from sparrow.coordinator.api.parts import Bell
from sparrow.coordinator.api.watch import Watches


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(watch, "LEAST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "SHARE_OF_TIME", 1e6)


@pytest.fixture
def house(open_house):
    return open_house()


def counted(house):
    """The house's overviews, and the looks that were taken at them."""
    looks = []

    def look(name, since=None):
        looks.append(since)
        return house.overviews.look(name, since)

    return SimpleNamespace(look=look), looks


def test_pages_share_their_looks(house):
    house.create()
    overviews, looks = counted(house)

    async def open_pages():
        bell = Bell()
        watches = Watches(overviews, bell.next_ring, lambda: False)
        pages = [watches.on("f") for _ in range(20)]
        first = await asyncio.gather(*(page.after(None) for page in pages))
        assert len(looks) == 1
        assert (await watches.on("f").after(None)) is first[0], "who comes later need not wait"
        waiting = asyncio.gather(*(page.after(had) for page, had in zip(pages, first, strict=True)))
        await asyncio.sleep(0)
        house.enrol("a")
        bell.ring()
        second = await waiting
        assert {id(each) for each in second} == {id(second[0])}
        assert second[0].federation.devices == 1
        assert len(looks) == 2

    asyncio.run(open_pages())


def test_a_page_that_waits_is_sent_home_when_the_process_stops(house):
    house.create()

    async def stop():
        bell, closing = Bell(), []
        page = Watches(house.overviews, bell.next_ring, lambda: bool(closing)).on("f")
        waiting = asyncio.create_task(page.after(await page.after(None)))
        await asyncio.sleep(0)
        closing.append(True)
        bell.ring()
        assert await waiting is None

    asyncio.run(stop())


def test_an_evaluation_of_long_ago_is_told_and_nothing_else(house, answer, play):
    house.create(cohort=3, rounds=15, evaluation_interval=1)
    one, two, slow = house.enrol("a", "b", "c")
    house.rounds.advance()
    for device in (one, two, slow):
        answer(device, stopped=device is slow)  # who has stopped is still asked to evaluate
    play(house, [one, two])
    overviews, looks = counted(house)

    async def look_twice():
        bell = Bell()
        page = Watches(overviews, bell.next_ring, lambda: False).on("f")
        before = await page.after(None)
        assert (before.federation.round, before.evaluating_since) == (15, 1)
        assert answer(slow, accuracy=0.8).round == 1
        bell.ring()
        return before, await page.after(before)

    before, after = asyncio.run(look_twice())
    assert looks == [None, 1]
    assert [new.round for old, new in zip(before.points, after.points, strict=True) if new is not old] == [1]
    assert after.points[0].accuracy_personal == pytest.approx(0.6)
    assert after.evaluating_since == 2
