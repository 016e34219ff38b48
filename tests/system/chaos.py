"""Bad networks and sudden deaths, drawn from a seed: what ``test_chaos`` puts between a fleet and its coordinator.

What befalls a call follows from the seed and from how many calls of its kind there were before, when the coordinator
dies from counted progress: no clock decides. Which device makes the n-th call is up to the machine, so that two runs
of one seed are alike, not the same.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.protocol import bundle

from .conftest import Coordinator, wait_until
from .proxy import Exchange, Fault, Trouble

TROUBLES: dict[str, Callable[[random.Random], Fault | None]] = {
    "request lost": lambda chance: _break("request"),
    "answer lost": lambda chance: _break("answer"),
    "request truncated": lambda chance: _break("request", share=chance.random()),
    "answer truncated": lambda chance: _break("answer", share=chance.random()),
    "delayed": lambda chance: None,
    "sent twice at once": lambda chance: Fault("", "", "copy"),
    "sent again later": lambda chance: Fault("", "", "copy"),
}
SHARE = 0.2
"""Of calls that something befalls."""

LONGEST_DELAY = 12
"""Calls that overtake one that is delayed, at most; one that nobody overtakes goes on after ``PATIENCE_SECONDS``."""

LATEST_COPY = 300
"""Calls after which a request is sent again, at most."""

PATIENCE_SECONDS = 0.2


def _break(where: str, share: float | None = None) -> Fault:
    fault = Fault("", "", where, share=share)
    fault.ended.set()
    return fault


@dataclass(frozen=True, order=True)
class Death:
    """When the coordinator is killed: when so many ``updates`` are acknowledged, then at the first of the ``points``
    (``proxy.Trouble``) that is followed by no more than so many. closing: as soon as the model of round ``closing``
    is in its folder, instead."""

    updates: int
    points: int = 0
    closing: int | None = None


def deaths(seed: int, kills: int, *, devices: int, cohort: int, rounds: int) -> list[Death]:
    """One while devices enrol, a third when a round has come to its end, the others spread over all updates."""
    chance = random.Random(f"{seed}|deaths")
    found = [Death(0, chance.randrange(3 * devices))]
    for number in chance.sample(range(1, rounds + 1), min(rounds, kills // 3)):
        if chance.random() < 0.5:
            found.append(Death(number * cohort, closing=number))
        else:
            found.append(Death(number * cohort, chance.randrange(6)))
    left, updates = kills - len(found), rounds * cohort + devices
    for piece in range(left):
        first, last = 1 + piece * updates // left, (piece + 1) * updates // left
        found.append(Death(chance.randint(first, last), chance.randrange(12)))
    return sorted(found)


class Chaos(Trouble):
    """What befalls the calls to ``coordinator``, which is killed at ``deaths`` and started again.

    ``befell`` counts what did, ``kills`` how often it was killed; ``acknowledged`` has what it answered each update
    with, by path, those of training in ``trained`` too. ``errors`` has what kept it from starting again.
    """

    def __init__(self, coordinator: Coordinator, seed: int, deaths: list[Death]) -> None:
        self.befell: Counter[str] = Counter()
        self.kills = 0
        self.acknowledged: dict[str, list[int]] = {}
        self.trained: set[str] = set()
        self.errors: list[BaseException] = []
        self._coordinator, self._seed, self._deaths = coordinator, seed, deque(deaths)
        self._calls: Counter[str] = Counter()
        self._begun = 0
        self._points: int | None = None
        self._down = False
        self._copies: list[tuple[int, Fault]] = []
        self._changed = threading.Condition()

    def port(self) -> int:
        """The coordinator's, while it runs."""
        if self._down:
            raise ConnectionRefusedError("the coordinator is dead")
        return self._coordinator.port

    def befalls(self, exchange: Exchange) -> Fault | None:
        kind = f"{exchange.method} {re.sub('[0-9a-f]{32}', 'ID', exchange.path.split('?')[0])}"
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
            for due, copy in self._copies:
                if due <= self._begun:
                    copy.ended.set()
            self._copies = [(due, copy) for due, copy in self._copies if due > self._begun]
            self._calls[kind] += 1
            chance = random.Random(f"{self._seed}|{kind}|{self._calls[kind]}")
            if chance.random() >= SHARE:
                return None
            what = chance.choice(list(TROUBLES))
            self.befell[what] += 1
            fault = TROUBLES[what](chance)
            if what == "sent twice at once":
                fault.ended.set()
            elif what == "sent again later":
                self._copies.append((self._begun + chance.randint(1, LATEST_COPY), fault))
            elif what == "delayed":
                self._delay(self._begun + chance.randint(1, LONGEST_DELAY))
        return fault

    def _delay(self, until: int) -> None:
        self._changed.wait_for(lambda: self._begun >= until, PATIENCE_SECONDS)

    def send_all_copies(self) -> None:
        """Those that would have come later yet."""
        with self._changed:
            for _, copy in self._copies:
                copy.ended.set()
            self._copies.clear()

    def reached(self, exchange: Exchange, point: str) -> None:
        with self._changed:
            if point == "answered" and exchange.method == "PUT" and exchange.produced in (200, 201):
                self.acknowledged.setdefault(exchange.path, []).append(exchange.produced)
                if exchange.media_type == bundle.MEDIA_TYPE:
                    self.trained.add(exchange.path)
            death = self._due()
            if death is None:
                return
            self._down = True
        try:
            if death.closing is not None:
                self._wait_for_model(death.closing)
            self._coordinator.kill()
            self._coordinator.start()
        except BaseException as error:
            self.errors.append(error)
            raise ConnectionAbortedError("the coordinator is gone for good") from error
        with self._changed:
            self._down = False
            self.kills += 1

    def _due(self) -> Death | None:
        """The next death, if this is its point."""
        if self._down or not self._deaths or len(self.acknowledged) < self._deaths[0].updates:
            return None
        if self._points is None:
            self._points = self._deaths[0].points
        if self._points > 0:
            self._points -= 1
            return None
        self._points = None
        return self._deaths.popleft()

    def _wait_for_model(self, version: int) -> None:
        """Until a round's model is in its folder: the transaction that names it follows some milliseconds later."""
        models = self._coordinator.data / "blobs" / "1" / "models"
        model = f"{version:09d}.[!s]*.safetensors"
        wait_until(lambda: list(models.glob(model)), f"the model of round {version}", interval=0)
