"""Faults of machines, networks, disks and databases, drawn from a seed, struck at counted points of a federation.

Two sources. Of the calls of devices, ``SHARE`` are lost, cut, delayed, doubled or sent again later, by a draw from the
seed, the kind of call, and how many of its kind there were. And ``Strike``s come one after the other: each at an
exchange between a device and a coordinator, as soon as so many updates are acknowledged and so many exchanges of its
place have passed. No clock decides when. Which device makes the n-th call is up to the machine, so two runs of a seed
draw the same faults, and are alike, not the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sparrow.coordinator.storage.blobs import digest_of
from sparrow.protocol import bundle

from ..disks import fill
from .conftest import Forked, wait_until
from .proxy import Exchange, Fault, Trouble

if TYPE_CHECKING:
    from .chaos import World

# --- the network -------------------------------------------------------------------------------------------------

NETWORK: dict[str, Callable[[random.Random], Fault | None]] = {
    "request lost": lambda chance: _break("request"),
    "answer lost": lambda chance: _break("answer"),
    "request truncated": lambda chance: _break("request", share=chance.random()),
    "answer truncated": lambda chance: _break("answer", share=chance.random()),
    "delayed": lambda chance: None,
    "sent twice at once": lambda chance: Fault("", "", "copy"),
    "sent again later": lambda chance: Fault("", "", "copy"),
}
SHARE = 0.1
"""Of calls that something befalls on the network."""

LONGEST_DELAY = 12
"""Calls that overtake one that is delayed, at most; one that nobody overtakes goes on after ``PATIENCE_SECONDS``."""

LATEST_COPY = 300
"""Calls after which a request is sent again, at most."""

PATIENCE_SECONDS = 0.2


def _break(where: str, share: float | None = None) -> Fault:
    fault = Fault("", "", where, share=share)
    fault.ended.set()
    return fault


# --- where -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A point of the exchanges ``method`` ``ending``: sent on whole, answered (and the answer not yet passed on), or
    after a share of the body of the request, or of the answer."""

    method: str
    ending: str
    point: str

    def fits(self, exchange: Exchange) -> bool:
        return exchange.method == self.method and exchange.path.split("?")[0].endswith(self.ending)


ENROLLED = Place("POST", "/devices", "answered")
ASSIGNED = Place("GET", "/assignment", "answered")
DOWNLOAD = Place("GET", "/payload", "answer")
DOWNLOADED = Place("GET", "/payload", "answered")
UPLOAD = Place("PUT", "/update", "request")
ARRIVED = Place("PUT", "/update", "sent")
ACKNOWLEDGED = Place("PUT", "/update", "answered")


# --- what --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of strike. closing: it comes with the last update of a round. weight: how often, beside the others of its
    family. possible: where. kills: processes of ours that it kills."""

    name: str
    family: str
    place: Place
    act: Callable[[Chaos, Struck], None]
    weight: int = 1
    closing: bool = False
    possible: Callable[[World], bool] = lambda world: True
    kills: int = 0


@dataclass(frozen=True)
class Struck:
    """The exchange that is struck, of which device, a number in [0, 1) for whatever else is to be drawn, and the files
    of models that there were before."""

    exchange: Exchange
    device: str
    chance: float
    models: frozenset[str]

    @property
    def seconds(self) -> float:
        """How long something lasts."""
        return 0.2 + 0.8 * self.chance


def _kill(chaos: Chaos, at: Struck) -> None:
    with chaos.victim(at.chance) as coordinator:
        coordinator.kill()


def _kill_when_written(is_it: Callable[[str], bool]) -> Callable[[Chaos, Struck], None]:
    """Killed as soon as there is such a new file of a model: its transaction follows within milliseconds, so this
    looks without a pause."""

    def act(chaos: Chaos, at: Struck) -> None:
        until = time.monotonic() + 2
        with chaos.victim(at.chance, moves=True) as coordinator:
            while time.monotonic() < until:
                if any(map(is_it, chaos.world.model_files() - at.models)):
                    break
            else:
                raise NotMet
            coordinator.kill()

    return act


def _has_values(name: str) -> bool:
    """Of the files of a model, that of its values, whole; the other ones are partial, or the method's own."""
    return name.endswith(".safetensors") and ".state." not in name


def _kill_starting(chaos: Chaos, at: Struck) -> None:
    with chaos.victim(at.chance) as coordinator:
        coordinator.kill()
        coordinator.launch()
        time.sleep(0.4 * at.chance)
        coordinator.kill()


def _kill_device(chaos: Chaos, at: Struck) -> None:
    chaos.world.kill_device(at.device)
    chaos.note_unheard(at.exchange)
    chaos.world.start_device(at.device)
    raise Cut


def _kill_training(chaos: Chaos, at: Struck) -> None:
    def later() -> None:
        wait_until(lambda: at.exchange.over, "the end of a download")
        time.sleep(0.05 * at.chance)
        chaos.kill_device(at.device)

    chaos.later(later)


def _kill_both(chaos: Chaos, at: Struck) -> None:
    with chaos.victim(at.chance) as coordinator:
        coordinator.kill()
        chaos.world.kill_device(at.device)
    chaos.note_unheard(at.exchange)
    chaos.world.start_device(at.device)
    raise Cut


def _stop(chaos: Chaos, at: Struck) -> None:
    with chaos.victim(at.chance, away=False) as coordinator, _stopped(coordinator.pid):
        time.sleep(at.seconds)


def _stop_mover(chaos: Chaos, at: Struck) -> None:
    """Until another process moves rounds: a process that hangs is replaced."""
    world = chaos.world
    with chaos.victim(at.chance, moves=True) as mover, _stopped(mover.pid):
        wait_until(lambda: world.mover() is not mover, "another process to move rounds in place of one that hangs", 60)


def _stop_device(chaos: Chaos, at: Struck) -> None:
    device = chaos.world.running[at.device]

    def later() -> None:
        device.signal(signal.SIGSTOP)
        time.sleep(at.seconds)
        device.signal(signal.SIGCONT)

    chaos.later(later)


def _miss_deadline(chaos: Chaos, at: Struck) -> None:
    """It has its work, and a deadline passes before it goes on; half the time another one of the cohort is stopped
    with it, so that there is no quorum."""
    world = chaos.world
    stopped = [at.device]
    if at.chance < 0.5:
        others = sorted(world.running.keys() - {at.device})
        stopped.append(others[int(at.chance * 2 * len(others))])

    def later() -> None:
        for name in stopped:
            world.running[name].signal(signal.SIGSTOP)
        time.sleep(world.scenario.settings["deadline_seconds"] + 0.7)
        for name in stopped:
            world.running[name].signal(signal.SIGCONT)

    chaos.later(later)


@contextmanager
def _stopped(pid: int):  # type: ignore[no-untyped-def]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _lock_records(chaos: Chaos, at: Struck) -> None:
    world = chaos.world
    if world.database is None:
        file = world.coordinators[0].data / "coordinator.sqlite3"
        with suppress(sqlite3.OperationalError):  # always in use: it was not our turn
            connection = sqlite3.connect(file, timeout=5, isolation_level=None)
            try:
                connection.execute("BEGIN IMMEDIATE")
                time.sleep(at.seconds)
            finally:
                connection.close()
        return
    with world.connected() as database:
        database.execute("LOCK TABLE assignments IN ACCESS EXCLUSIVE MODE")
        time.sleep(at.seconds)
        database.rollback()


def _end_connections(chaos: Chaos, at: Struck) -> None:
    with chaos.world.connected() as database:
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def _restart_database(chaos: Chaos, at: Struck) -> None:
    server = chaos.world.server
    assert server is not None
    server.stop()
    time.sleep(0.3 * at.chance)
    server.start()


def _fill_disk(chaos: Chaos, at: Struck) -> None:
    full = fill(chaos.world.coordinators[0].data)
    try:
        time.sleep(at.seconds)
    finally:
        full.unlink()


def _fail_writes(chaos: Chaos, at: Struck) -> None:
    """No file of the process may be written beyond its first bytes (EFBIG)."""
    with chaos.victim(at.chance, away=False) as coordinator:
        process = psutil.Process(coordinator.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (16, psutil.RLIM_INFINITY))
        try:
            time.sleep(at.seconds)
        finally:
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def _step_clock(chaos: Chaos, at: Struck) -> None:
    """Its machine starts again with a clock that is hours ahead or behind."""
    with chaos.victim(at.chance) as coordinator:
        coordinator.kill()
        coordinator.clock_step = (at.chance - 0.5) * 2 * 12 * 3600


# --- damage at rest ----------------------------------------------------------------------------------------------


def _flip(file: Path, chance: float) -> None:
    body = bytearray(file.read_bytes())
    place = min(len(body) - 1, len(body) // 2 + int(chance * len(body) / 2))  # among its values
    body[place] ^= 1 << int(8 * chance)
    file.write_bytes(body)


def _cut_short(file: Path, chance: float) -> None:
    os.truncate(file, int(chance * file.stat().st_size))


def _delete(file: Path, chance: float) -> None:
    file.unlink()


HARM = {"a bit flipped": _flip, "cut short": _cut_short, "deleted": _delete}


def _damage_update(harm: Callable[[Path, float], None]) -> Callable[[Chaos, Struck], None]:
    """Of an acknowledged update that is in no model yet, while the coordinator is down: so that it is in no memory."""

    def act(chaos: Chaos, at: Struck) -> None:
        with chaos.victim(at.chance) as coordinator:
            coordinator.kill()
            files = sorted((coordinator.data / "blobs").glob("1/updates/*"))
            files = [each for each in files if each.suffix != ".partial"]
            if not files:
                raise NotMet
            hurt = files[int(at.chance * len(files))]
            chaos.damaged.add(f"/v1/assignments/{hurt.name[:32]}/update")
            harm(hurt, at.chance)

    return act


def _damage_model(harm: Callable[[Path, float], None], *, current: bool) -> Callable[[Chaos, Struck], None]:
    """A model's file is damaged while the coordinator is down. It must say so and not serve it, and goes on when its
    operator has brought the file back."""

    def act(chaos: Chaos, at: Struck) -> None:
        world = chaos.world
        with chaos.victim(at.chance) as coordinator:
            coordinator.kill()
            files = sorted(name for name in world.model_files() if not name.endswith(".partial"))
            newest = max(int(name[:9]) for name in files)
            files = [name for name in files if (int(name[:9]) == newest) == current]
            if not files:
                raise NotMet
            file = world.models / files[int(at.chance * len(files))]
            whole = file.read_bytes()
            try:
                harm(file, at.chance)
                coordinator.launch()
                if current:
                    wait_until(
                        lambda: file.name in _why_not_ready(coordinator) or _is_whole(file),
                        f"/readyz names {file.name}, or its round, which was not closed, makes it anew",
                        30,
                    )
                else:
                    coordinator.wait_until_it_answers()
                    if _has_values(file.name) and world.get("")["global_model_usable"]:
                        version, gone = int(file.name[:9]), not file.exists()
                        answer = coordinator.http.get(f"/v1/federations/{world.name}/model?version={version}")
                        right = (503, 404) if gone else (503,)  # deleted is as good as not kept any more
                        assert answer.status_code in right, f"damaged {file.name} is answered with {answer.status_code}"
            finally:
                coordinator.kill()
                file.write_bytes(whole)

    return act


def _is_whole(file: Path) -> bool:
    """Return whether a file is what its name says."""
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == digest_of(file.name)


def _why_not_ready(coordinator: Forked) -> str:
    """What /readyz says where it is not ready, or the log of one that did not start."""
    if not coordinator.runs:
        return coordinator.log.read_text(errors="replace")[-2000:]
    with suppress(Exception):
        answer = coordinator.http.get("/readyz")
        return "" if answer.status_code == 200 else answer.text
    return ""


def _one_process(world: World) -> bool:
    return len(world.coordinators) == 1


def _several(world: World) -> bool:
    return not _one_process(world)


def _on_postgresql(world: World) -> bool:
    return world.database is not None


def _with_deadlines(world: World) -> bool:
    return world.scenario.deadlines_pass


def _hides(world: World) -> bool:
    return _one_process(world) and not _with_deadlines(world)


KINDS = [
    Kind("coordinator killed while devices enrol", "kill", ENROLLED, _kill, kills=1),
    Kind("coordinator killed as it hands out work", "kill", ASSIGNED, _kill, kills=1),
    Kind("coordinator killed in a download", "kill", DOWNLOAD, _kill, kills=1),
    Kind("coordinator killed in an upload", "kill", UPLOAD, _kill, kills=1),
    Kind("coordinator killed with an update not acknowledged", "kill", ARRIVED, _kill, kills=1),
    Kind("coordinator killed with an update acknowledged", "kill", ACKNOWLEDGED, _kill, weight=2, kills=1),
    Kind(
        "coordinator killed writing a model",
        "kill",
        ARRIVED,
        _kill_when_written(lambda name: not _has_values(name)),
        closing=True,
        kills=1,
    ),
    Kind(
        "coordinator killed closing a round",
        "kill",
        ARRIVED,
        _kill_when_written(_has_values),
        weight=2,
        closing=True,
        kills=1,
    ),
    Kind("coordinator killed twice, the second time starting", "kill", ACKNOWLEDGED, _kill_starting, kills=2),
    Kind("device killed while it enrols", "device", ENROLLED, _kill_device, kills=1),
    Kind("device killed in a download", "device", DOWNLOAD, _kill_device, kills=1),
    Kind("device killed training", "device", DOWNLOADED, _kill_training, kills=1),
    Kind("device killed in an upload", "device", UPLOAD, _kill_device, kills=1),
    Kind("device killed before it hears of its update", "device", ACKNOWLEDGED, _kill_device, kills=1),
    Kind("device and coordinator killed in an upload", "device", UPLOAD, _kill_both, kills=2),
    Kind("device and coordinator killed, an update acknowledged", "device", ACKNOWLEDGED, _kill_both, kills=2),
    Kind("coordinator stopped for a while", "stop", ARRIVED, _stop),
    Kind("device stopped for a while", "stop", DOWNLOADED, _stop_device),
    Kind("device stopped beyond its deadline", "stop", DOWNLOADED, _miss_deadline, weight=3, possible=_with_deadlines),
    Kind("process that moves rounds stopped", "mover", ARRIVED, _stop_mover, possible=_several),
    Kind("records locked", "records", ARRIVED, _lock_records),
    Kind("connections to PostgreSQL ended", "records", ARRIVED, _end_connections, possible=_on_postgresql),
    Kind("PostgreSQL restarted", "records", ARRIVED, _restart_database, possible=_on_postgresql),
    Kind("disk full", "disk", ARRIVED, _fill_disk, possible=lambda world: world.own_disk),
    Kind("writes fail", "disk", ARRIVED, _fail_writes, possible=_one_process),
    Kind("clock stepped by hours", "clock", ACKNOWLEDGED, _step_clock, possible=_one_process, kills=1),
    *(
        Kind(f"update {what}", "damage", ACKNOWLEDGED, _damage_update(harm), possible=_hides, kills=1)
        for what, harm in HARM.items()
    ),
    *(
        Kind(
            f"current model {what}", "damage", ACKNOWLEDGED, _damage_model(harm, current=True), possible=_hides, kills=1
        )
        for what, harm in HARM.items()
    ),
    *(
        Kind(
            f"older model {what}", "damage", ACKNOWLEDGED, _damage_model(harm, current=False), possible=_hides, kills=1
        )
        for what, harm in HARM.items()
    ),
]
BY_NAME = {kind.name: kind for kind in KINDS}
FAMILIES = tuple(dict.fromkeys(["network", *(kind.family for kind in KINDS)]))
"""What may be asked for by name. damage and clock and mover need what the coordinator does about them."""


@dataclass(frozen=True, order=True)
class Strike:
    """Strikes at the first fitting exchange when so many ``updates`` are acknowledged, after ``skip`` of them."""

    updates: int
    skip: int
    kind: str
    chance: float


def draw_strikes(seed: int, count: int, world: World, families: Sequence[str]) -> list[Strike]:
    """``count`` strikes, spread over a federation's updates; every kind that is possible comes up in turn."""
    chance = random.Random(f"{seed}|strikes")
    decks = {
        family: [kind for kind in KINDS if kind.family == family and kind.possible(world) for _ in range(kind.weight)]
        for family in FAMILIES
        if family in families and family != "network"
    }
    turns = [family for family, deck in decks.items() if deck]
    turns += [family for family in ("kill", "kill", "device") if family in turns]  # as often as all else together
    hands: dict[str, list[Kind]] = {family: [] for family in turns}
    rounds, cohort = world.scenario.settings["rounds"], world.scenario.settings["cohort"]
    found: list[Strike] = []
    order: list[str] = []
    for number in range(count if turns else 0):
        if not order:
            order = chance.sample(turns, len(turns))
        family = order.pop()
        if not hands[family]:
            hands[family] = chance.sample(decks[family], len(decks[family]))
        kind = hands[family].pop()
        low, high = number * rounds * cohort // count, (number + 1) * rounds * cohort // count
        updates, skip = chance.randint(low, max(low, high - 1)), chance.randrange(4)
        if kind.place is ENROLLED:
            updates, skip = 0, chance.randrange(2)
        elif kind.closing:
            updates, skip = cohort * max(1, round(updates / cohort)) - 1, 0  # that of the last one is on its way
        found.append(Strike(updates, skip, kind.name, round(chance.random(), 4)))
    return sorted(found, key=lambda each: (each.updates, BY_NAME[each.kind].place is not ENROLLED, each))


class Cut(Exception):
    """The exchange is to be cut off."""


class NotMet(Exception):
    """What a strike was meant for is not there now: it does not count."""


@dataclass
class StrikeOn(Fault):
    """A strike in the middle of a body."""

    act: Callable[[], None] = field(default=lambda: None)

    def strike(self) -> None:
        self.reached.set()
        self.act()
        raise ConnectionAbortedError("broken as the test wanted it")


class Chaos:
    """What befalls the calls of a federation's devices, and the machines that make and answer them.

    ``befell`` counts what did, by kind, ``kills`` the processes killed. ``acknowledged`` has what each update was
    answered with, by path, and ``bodies`` what was sent. ``told`` has round, device and kind of each assignment by the
    path of its update. ``damaged`` are the paths of updates that were damaged at rest, ``unheard`` of those whose
    device was killed before it could hear of its acknowledgement. ``errors`` has what went wrong in a strike.
    """

    def __init__(self, world: World, strikes: Sequence[Strike], seed: int, *, network: bool) -> None:
        self.world = world
        self._holders: dict[str, str] = {}  # by the token: the device's name
        self.befell: Counter[str] = Counter()
        self.kills = 0
        self.acknowledged: dict[str, list[int]] = {}
        self.bodies: dict[str, bytes] = {}
        self.trained: set[str] = set()
        self.told: dict[str, tuple[int, str, str]] = {}
        self.damaged: set[str] = set()
        self.unheard: list[str] = []
        self.errors: list[BaseException] = []
        self.over = False
        self._seed, self._network = seed, network
        self._strikes = deque(strikes)
        self._skip: int | None = None
        self._calls: Counter[str] = Counter()
        self._begun = 0
        self._copies: list[tuple[int, Fault]] = []
        self._away: set[Forked] = set()
        self._turn = 0
        self._parts: dict[str, bytearray] = {}
        self._before: dict[int, frozenset[str]] = {}
        self._later: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._striking = threading.Lock()

    def of(self, device: str) -> Trouble:
        """What befalls the calls of this device's proxy."""
        return _Way(self, device)

    def port(self) -> int:
        """The next coordinator's that is there, as a load balancer chooses."""
        with self._changed:
            there = [each for each in self.world.coordinators if each not in self._away]
            if not there:
                raise ConnectionRefusedError("the coordinator is dead")
            self._turn += 1
            return there[self._turn % len(there)].port

    @contextmanager
    def victim(self, chance: float, *, moves: bool = False, away: bool = True):  # type: ignore[no-untyped-def]
        """A coordinator to which no calls go meanwhile; it is started afterwards, if it does not run.

        moves: the one that moves rounds. away: calls are kept from it.
        """
        several = self.world.coordinators
        chosen = self.world.mover() if moves and len(several) > 1 else several[int(chance * len(several))]
        with self._changed:
            if away:
                self._away.add(chosen)
        try:
            yield chosen
        finally:
            if not chosen.runs:
                chosen.start()
            with self._changed:
                self._away.discard(chosen)

    def all_ended(self) -> bool:
        """Whether every device has ended, and none is about to be started again."""
        with self._striking:
            return not any(device.alive() for device in self.world.running.values())

    def kill_device(self, name: str) -> None:
        """Kill a device and start it again, unless it has ended."""
        with self._striking:
            if self.world.running[name].alive():
                self.world.kill_device(name)
                self.world.start_device(name)

    def note_unheard(self, exchange: Exchange) -> None:
        """A device was killed before it could hear that this update was acknowledged."""
        path = exchange.path.split("?")[0]
        if exchange.produced == 201 and path in self.acknowledged:
            self.unheard.append(path)

    def later(self, work: Callable[[], None]) -> None:
        """Do it beside what goes on."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._later.append(thread)
        thread.start()

    def finish(self) -> None:
        """Send all copies that would have come later yet, and wait for what goes on beside."""
        with self._changed:
            self.over = True
            for _, copy in self._copies:
                copy.ended.set()
            self._copies.clear()
        for thread in self._later:
            thread.join(30)

    def befalls(self, device: str, exchange: Exchange) -> Fault | None:
        kind = f"{exchange.method} {re.sub('[0-9a-f]{32}', 'ID', exchange.path.split('?')[0])}"
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
            for due, copy in self._copies:
                if due <= self._begun:
                    copy.ended.set()
            self._copies = [(due, copy) for due, copy in self._copies if due > self._begun]
            strike = self._due(exchange, "request") or self._due(exchange, "answer")
            if strike is not None:
                place = BY_NAME[strike.kind].place
                return StrikeOn(
                    "", "", place.point, share=strike.chance, act=lambda: self._act(strike, device, exchange)
                )
            self._calls[kind] += 1
            chance = random.Random(f"{self._seed}|{kind}|{self._calls[kind]}")
            if not self._network or self.over or chance.random() >= SHARE:
                return None
            what = chance.choice(list(NETWORK))
            self.befell[what] += 1
            fault = NETWORK[what](chance)
            if what == "sent twice at once":
                fault.ended.set()
            elif what == "sent again later":
                self._copies.append((self._begun + chance.randint(1, LATEST_COPY), fault))
            elif what == "delayed":
                until = self._begun + chance.randint(1, LONGEST_DELAY)
                self._changed.wait_for(lambda: self._begun >= until, PATIENCE_SECONDS)
        return fault

    def reached(self, device: str, exchange: Exchange, point: str) -> None:
        if point == "begun":
            return
        models = self.world.model_files() if exchange.method == "PUT" and point == "sent" else None
        with self._changed:
            if models is not None:
                self._before[id(exchange)] = models
            if point == "answered":
                self._note(device, exchange)
            strike = self._due(exchange, point)
        if strike is not None:
            self._act(strike, device, exchange)

    def _due(self, exchange: Exchange, point: str) -> Strike | None:
        """The next strike, if this is its place."""
        while self._strikes and self.trained and BY_NAME[self._strikes[0].kind].place is ENROLLED:
            self._strikes.popleft()  # all have enrolled by now
        if not self._strikes or self.over:
            return None
        strike = self._strikes[0]
        place = BY_NAME[strike.kind].place
        if place.point != point or not place.fits(exchange) or len(self.trained) < strike.updates:
            return None
        if place.point == "answered" and exchange.produced not in (200, 201):
            return None
        if self._skip is None:
            self._skip = strike.skip
        if self._skip > 0:
            self._skip -= 1
            return None
        self._skip = None
        return self._strikes.popleft()

    def _act(self, strike: Strike, device: str, exchange: Exchange) -> None:
        kind = BY_NAME[strike.kind]
        at = Struck(exchange, device, strike.chance, self._before.get(id(exchange), frozenset()))
        with self._striking:
            if self.over or (kind.family == "device" and not self.world.running[device].alive()):
                return
            cut = strike.chance < 0.5
            try:
                kind.act(self, at)
            except NotMet:
                return
            except Cut:
                cut = True
            except BaseException as error:
                self.errors.append(error)
                raise ConnectionAbortedError(str(error)) from error
            with self._changed:
                self.befell[kind.name] += 1
                self.kills += kind.kills
        if cut and kind.kills:
            raise ConnectionAbortedError("broken as the test wanted it")

    def _named(self, device: str, called: str, exchange: Exchange) -> str:
        """Return whose call it is: the devices of one process are told apart by the tokens that they were given."""
        head, _, body = exchange.sent.partition(b"\r\n\r\n")
        shown = re.search(rb"(?i)\r\nauthorization: bearer (\S+)", head)
        device = self._holders.get(shown[1].decode() if shown else "", device)
        if exchange.method == "POST" and exchange.produced == 201 and called.endswith(("/devices", "/token")):
            with suppress(ValueError, KeyError):
                name = json.loads(body)["name"] if called.endswith("/devices") else device
                self._holders[json.loads(exchange.answer)["token"]] = name
        return device

    def _note(self, device: str, exchange: Exchange) -> None:
        """What the coordinator has said, whether or not it is passed on."""
        called = exchange.path.split("?")[0]
        device = self._named(device, called, exchange)
        if called.endswith(("/assignment", "/update")) and exchange.produced in (200, 201):
            with suppress(ValueError):  # cut short: it was killed in the middle of it
                answer = json.loads(exchange.answer)
                each = answer.get("next") if called.endswith("/update") else answer
                if each is not None:
                    self.told[f"/v1/assignments/{each['assignment_id']}/update"] = (each["round"], device, each["kind"])
        if exchange.method != "PUT" or not called.endswith("/update"):
            return
        head, _, body = exchange.sent.partition(b"\r\n\r\n")
        part = re.search(rb"\r\ncontent-range: bytes (?:(\d+)-\d+|\*)/(\d+)", head.lower())
        if part is not None:  # the rest of one that broke off
            body = b"".join(self._resumed(called))
        if exchange.produced in (200, 201):
            self.acknowledged.setdefault(called, []).append(exchange.produced)
            former = self.bodies.setdefault(called, body)
            if called in self.damaged:  # its device was asked again, and has trained again
                self.bodies[called] = body
            elif former != body:
                self.errors.append(AssertionError(f"{called}: two different updates were acknowledged"))
            if exchange.media_type == bundle.MEDIA_TYPE:
                self.trained.add(called)

    def _resumed(self, path: str) -> list[bytes]:
        """An update of which parts came in several calls, of whole and broken ones."""
        whole = bytearray()
        for exchange in self.world.exchanges():
            head, _, body = exchange.sent.partition(b"\r\n\r\n")
            if exchange.method != "PUT" or exchange.path.split("?")[0] != path or not body:
                continue
            part = re.search(rb"\r\ncontent-range: bytes (\d+)-\d+/(\d+)", head.lower())
            first, total = (int(part[1]), int(part[2])) if part else (0, len(body))
            whole.extend(bytes(max(0, total - len(whole))))
            whole[first : first + len(body)] = body
        return [bytes(whole)]


class _Way(Trouble):
    def __init__(self, chaos: Chaos, device: str) -> None:
        self._chaos, self._device = chaos, device

    def befalls(self, exchange: Exchange) -> Fault | None:
        return self._chaos.befalls(self._device, exchange)

    def reached(self, exchange: Exchange, point: str) -> None:
        self._chaos.reached(self._device, exchange, point)
