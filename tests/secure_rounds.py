"""Whole rounds of secure aggregation, played through the pure functions of devices and coordinator, without either.

What is random follows from a seed. What a device tells, and each word that the coordinator sees, is kept in a `View`; a
coordinator that lies is a function `bend` that changes what one device is told.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from sparrow.coordinator.rounds.secure import cell_size
from sparrow.protocol.secure import device, pads, shamir
from sparrow.protocol.secure.device import RoundSecrets
from sparrow.protocol.secure.groups import Cell, Sharing, choose_sharing, least_cell, make_cells, neighbourhoods
from sparrow.protocol.secure.messages import Agree, Keys, Peer, SecureWork, Shares, Statement, Unmask
from sparrow.protocol.secure.numbers import Scale, Words
from sparrow.protocol.secure.opening import CannotOpen, open_sum
from sparrow.protocol.secure.pads import BadSecret

PHASES = ("keys", "shares", "train", "agree", "unmask")
Bend = Callable[[str, str, SecureWork], SecureWork]
"""Phase, name, what an honest coordinator would tell this device -> what it is told."""


@dataclass
class View:
    """All that a coordinator has seen of a round, and what it chose. told: (phase, name) -> what a device was told."""

    context: str
    colluders: int
    identities: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Keys] = field(default_factory=dict)
    sharing: Sharing = field(default=Sharing(0, 0))
    cells: list[Cell] = field(default_factory=list)
    neighbours: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shares: dict[str, Shares] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    statements: dict[str, Statement] = field(default_factory=dict)
    agreed: dict[str, Agree] = field(default_factory=dict)
    answers: dict[str, Unmask] = field(default_factory=dict)
    told: dict[tuple[str, str], SecureWork] = field(default_factory=dict)

    def after(self, phase: str) -> View:
        """What it had seen when this phase was over."""
        later = PHASES[PHASES.index(phase) + 1 :]
        fields = {"shares": ["shares"], "train": ["masked", "statements"], "agree": ["agreed"], "unmask": ["answers"]}
        told = {key: work for key, work in self.told.items() if key[0] not in later}
        empty: dict[str, Any] = {which: {} for each in later for which in fields[each]}
        return replace(self, told=told, **empty)

    @property
    def points(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(sorted(self.keys), start=1)}

    def cell_of(self, name: str) -> tuple[str, ...]:
        return next(cell.names for cell in self.cells if name in cell.names)

    def collected(self) -> tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]:
        """The shares of self-masks and of pads that have come: whose -> point -> value."""
        points = self.points
        seeds, pad_secrets = dict[str, dict[int, int]](), dict[str, dict[int, int]]()
        for keeper, answer in self.answers.items():
            for kept, said in ((seeds, answer.seeds), (pad_secrets, answer.pads)):
                for name, share in said.items():
                    kept.setdefault(name, {})[points[keeper]] = int(share, 16)
        return seeds, pad_secrets


@dataclass
class Outcome:
    """Sums of cells by the names of those who are in them, cells that were lost, with the reason, and wrong shares."""

    sums: dict[tuple[str, ...], Words] = field(default_factory=dict)
    lost: dict[tuple[str, ...], str] = field(default_factory=dict)
    wrong: dict[str, set[int]] = field(default_factory=dict)


@cache
def identity_of(name: str) -> bytes:
    return hashlib.sha256(f"identity {name}".encode()).digest()


@cache
def public_identity_of(name: str) -> str:
    return pads.public_identity(identity_of(name)).hex()


def names_of(count: int) -> list[str]:
    return [f"d{place:03}" for place in range(count)]


def total_of(parts: Sequence[Words]) -> Words:
    """The sum modulo 2^b."""
    total: Words = np.add.reduce(parts, axis=0, dtype=parts[0].dtype)
    return total


@contextmanager
def seeded(chance: random.Random) -> Iterator[None]:
    """Draw all secrets, nonces and polynomials from ``chance``."""
    drawn = SimpleNamespace(token_bytes=chance.randbytes, randbelow=chance.randrange)
    with mock.patch.object(pads, "secrets", drawn), mock.patch.object(shamir, "secrets", drawn):
        yield


class Memory:
    """What all devices of a round compute, computed once: keys on which both ends agree, and checks of signatures."""

    def __init__(self) -> None:
        self._agreed: dict[Any, bytes] = {}
        self._agree, self._check_keys, self._pair_of = pads.agree, device.check_keys, pads.pair_of
        self._check_signature = pads.check_signature
        self._public: dict[Any, bytes] = {}
        self._checked: set[Any] = set()
        self.pair_of = cache(self._pair_of)

    def agree(self, own: Any, other: bytes, context: str, use: str) -> bytes:
        public = self._public.get(own)
        if public is None:
            public = self._public[own] = own.public_key().public_bytes_raw()
        key = (*sorted((public, other)), context, use)
        if key not in self._agreed:
            self._agreed[key] = self._agree(own, other, context, use)
        return self._agreed[key]

    def check_keys(self, keys: Keys, identity: str, context: str, name: str) -> None:
        key = (keys.signature, keys.pads, keys.shares, keys.commitment, identity, context, name)
        if key not in self._checked:
            self._check_keys(keys, identity, context, name)
            self._checked.add(key)

    def check_signature(
        self, public: bytes, signature: bytes, context: str, said: Mapping[str, str], name: str
    ) -> None:
        key = (public, signature, context, *said.items())
        if key not in self._checked:
            self._check_signature(public, signature, context, said, name)
            self._checked.add(key)

    @contextmanager
    def used(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(pads, "agree", self.agree))
            stack.enter_context(mock.patch.object(pads, "pair_of", self.pair_of))
            stack.enter_context(mock.patch.object(device, "check_keys", self.check_keys))
            stack.enter_context(mock.patch.object(pads, "check_signature", self.check_signature))
            yield


def _story_of(work: SecureWork) -> Any:
    return sorted(work.left), sorted(work.gone), sorted(sorted(cell) for cell in work.cells)


def signed_by(names: Collection[str], work: SecureWork, whole: str) -> dict[str, str]:
    """Signatures of the story that ``work`` tells."""
    said = {device.STORY: device.story(work.context, whole, work)}
    return {name: pads.sign(identity_of(name), work.context, said).hex() for name in names}


class SecureRound:
    """A round. vanish: phase -> who does not answer in it, nor later. words: what devices add, by name; else it follows
    from ``values`` and weights. sharing, cells: instead of those that the coordinator would choose. bases: SHA-256 of
    the model that a device was sent, where it is not that of all others. only_agreed: shares are asked of those alone
    who have signed."""

    def __init__(
        self,
        devices: int | Sequence[str],
        *,
        seed: int = 0,
        colluders: int = 1,
        dropouts: float = 0.3,
        size: int = 1000,
        ratios: Mapping[str, float | None] | None = None,
        weights: Mapping[str, float] | None = None,
        vanish: Mapping[str, Collection[str]] | None = None,
        words: Mapping[str, Words] | None = None,
        bits: int = 16,
        value_range: float = 0.5,
        sharing: Sharing | None = None,
        cells: Sequence[Cell] | None = None,
        bend: Bend = lambda phase, name, work: work,
        bases: Mapping[str, str] | None = None,
        only_agreed: bool = True,
        remember: bool = True,
    ) -> None:
        self.names = names_of(devices) if isinstance(devices, int) else list(devices)
        self.chance, self.seed, self.size, self.bits, self.value_range = (
            random.Random(seed),
            seed,
            size,
            bits,
            value_range,
        )
        self.dropouts, self.vanish, self.bend = dropouts, dict(vanish or {}), bend
        self.ratios = dict(ratios) if ratios is not None else dict.fromkeys(self.names)
        self.weights = dict(weights) if weights is not None else dict.fromkeys(self.names, 1.0)
        self.values = {
            name: np.random.default_rng([seed, place]).normal(0, 0.1, size).astype(np.float32)
            for place, name in enumerate(self.names if words is None else ())
        }
        self.words = dict(words or {})
        self.view = View(f"federation|{seed}|n", colluders)
        self.bases = dict(bases or {})
        self.only_agreed = only_agreed
        self.kept: dict[str, RoundSecrets] = {}
        self.refused: dict[tuple[str, str], str] = {}
        self.why_over: str | None = None
        self._sharing, self._cells, self._gone = sharing, cells, set[str]()
        self._memory = Memory() if remember else None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with seeded(self.chance), self._memory.used() if self._memory else ExitStack():
            yield

    def _asked(self, phase: str, names: Collection[str]) -> list[str]:
        self._gone |= set(self.vanish.get(phase, ()))
        return [name for name in sorted(names) if name not in self._gone]

    def _ask(self, phase: str, name: str, work: SecureWork, act: Callable[[SecureWork], Any]) -> Any:
        work = self._at_best(phase, self.bend(phase, name, work))
        self.view.told[phase, name] = work
        try:
            self.kept[name], answer = act(work)
        except BadSecret as error:
            self.refused[phase, name] = str(error)
            return None
        return answer

    def _at_best(self, phase: str, work: SecureWork) -> SecureWork:
        """What a coordinator that bends a story says with it: no statements of others than are left, and no signatures
        that it knows to be of another story."""
        if phase == "agree":
            return work.model_copy(update={"statements": {n: s for n, s in work.statements.items() if n in work.left}})
        if phase == "unmask":
            agreed, own = self.view.agreed, _story_of(work)
            fits = {name for name in agreed if _story_of(self.view.told["agree", name]) == own}
            signatures = {
                n: s for n, s in work.signatures.items() if n in fits or n not in agreed or s != agreed[n].signature
            }
            return work.model_copy(update={"signatures": signatures})
        return work

    def scale_of(self, cell: Collection[str]) -> Scale:
        return Scale(self.bits, len(cell), self.value_range, max(self.weights[name] for name in cell))

    def keys(self) -> None:
        view = self.view
        with self.drawing():
            for name in self._asked("keys", self.names):
                work = SecureWork(context=view.context, colluders=view.colluders)
                act = partial(device.begin, identity=identity_of(name))
                answer = self._ask("keys", name, work, lambda work, act=act: act(work.context))
                if answer is not None:
                    view.keys[name] = answer
                    view.identities[name] = public_identity_of(name)
        names = sorted(view.keys)
        sharing = self._sharing or choose_sharing(len(names), view.colluders, self.dropouts)
        if sharing is None:
            self.why_over = f"{len(names)} devices sent keys"
            return
        view.sharing = sharing
        settings: Any = SimpleNamespace(secure_colluders=view.colluders, secure_dropouts=self.dropouts)
        ratios = {name: self.ratios[name] for name in names}
        seed = self.chance.randbytes(16)
        view.cells = list(self._cells or make_cells(ratios, cell_size(settings), b"cells" + seed))
        view.neighbours = neighbourhoods(tuple(names), sharing.neighbours, b"graph" + seed)

    def _work(self, name: str, **told: Any) -> SecureWork:
        view, cell = self.view, self.view.cell_of(name)
        scale = self.scale_of(cell)
        return SecureWork(
            context=view.context,
            colluders=view.colluders,
            threshold=view.sharing.threshold,
            neighbours=view.neighbours[name],
            cell=cell,
            bits=self.bits,
            value_range=self.value_range,
            largest_weight=scale.largest_weight,
            weight=self.weights[name],
            **told,
        )

    def peer(self, name: str) -> Peer:
        view = self.view
        return Peer(name=name, identity=view.identities[name], keys=view.keys[name], point=self._points[name])

    def shares(self) -> None:
        view = self.view
        self._points = view.points
        peers = {name: self.peer(name) for name in view.keys}
        with self.drawing():
            for name in self._asked("shares", view.keys):
                others = sorted({*view.neighbours[name], *view.cell_of(name)} - {name})
                around = tuple(peers[other] for other in others)
                work = self._work(name, peers=around, cohort=dict(view.identities))
                act = partial(device.share, self.kept[name], name, known={})
                answer = self._ask("shares", name, work, lambda work, act=act: act(work=work))
                if answer is not None:
                    view.shares[name] = answer

    def words_of(self, name: str, work: SecureWork) -> Words:
        """What a device adds, before it is hidden."""
        if name not in self.words:
            scale = Scale(work.bits, len(work.cell), work.value_range, work.largest_weight)
            chance = np.random.default_rng([self.seed, 1, self.names.index(name)])
            self.words[name] = scale.round(self.values[name], work.weight, chance)[0]
        return self.words[name]

    def train(self) -> None:
        view, least = self.view, least_cell(self.view.colluders)
        shared = set(view.shares)
        alive = {name for cell in view.cells if len(shared & set(cell.names)) >= least for name in cell.names}
        with self.drawing():
            for name in self._asked("train", shared & alive):
                sealed = {other: said.sealed[name] for other, said in view.shares.items() if name in said.sealed}
                work = self._work(name, sealed=sealed, left=tuple(sorted(shared & set(view.cell_of(name)))))
                act = partial(self._mask, name)
                answer = self._ask("train", name, work, act)
                if answer is not None:
                    view.masked[name], view.statements[name] = answer

    def _mask(self, name: str, work: SecureWork) -> tuple[RoundSecrets, tuple[Words, Statement]]:
        base = self.bases.get(name, "the same model")
        kept, masked = device.mask(self.kept[name], name, work, self.words_of(name, work), base)
        return kept, (masked, device.state(kept, identity_of(name)))

    def _story(self, **told: Any) -> SecureWork:
        view = self.view
        return SecureWork(
            context=view.context,
            colluders=view.colluders,
            left=tuple(sorted(view.masked)),
            gone=tuple(sorted(set(view.shares) - set(view.masked))),
            cells=tuple(cell.names for cell in view.cells),
            **told,
        )

    def agree(self) -> None:
        view, work = self.view, self._story(statements=dict(self.view.statements))
        with self.drawing():
            for name in self._asked("agree", view.masked):
                answer = self._ask("agree", name, work, partial(self._agree, name))
                if answer is not None:
                    view.agreed[name] = answer

    def _agree(self, name: str, work: SecureWork) -> tuple[RoundSecrets, Agree]:
        return device.agree(self.kept[name], name, work, identity_of(name))

    def unmask(self) -> None:
        view = self.view
        work = self._story(signatures={name: agreed.signature for name, agreed in view.agreed.items()})
        with self.drawing():
            for name in self._asked("unmask", view.agreed if self.only_agreed else view.masked):
                act = partial(self._unmask, name)
                answer = self._ask("unmask", name, work, act)
                if answer is not None:
                    view.answers[name] = answer

    def _unmask(self, name: str, work: SecureWork) -> tuple[RoundSecrets, Unmask]:
        return device.unmask(self.kept[name], name, work)

    def open(self) -> Outcome:
        """The sums of cells, as the coordinator puts them together."""
        view, outcome = self.view, Outcome()
        if self.why_over is not None:
            return Outcome(lost={(): self.why_over})
        seeds, pad_secrets = view.collected()
        with self.drawing():
            for cell in view.cells:
                left = tuple(name for name in cell.names if name in view.masked)
                gone = [name for name in cell.names if name in view.shares and name not in view.masked]
                if len(left) < least_cell(view.colluders):
                    outcome.lost[left] = "too few are left"
                    continue
                total = total_of([view.masked[name] for name in left])
                try:
                    opened, wrong = open_sum(
                        total,
                        view.context,
                        left=left,
                        gone=gone,
                        keys=view.keys,
                        seeds=seeds,
                        pad_secrets=pad_secrets,
                        threshold=view.sharing.threshold,
                    )
                except CannotOpen as error:
                    outcome.lost[left] = str(error)
                    continue
                outcome.sums[left] = opened
                outcome.wrong |= wrong
        return outcome

    def until(self, phase: str) -> SecureRound:
        """Play all phases up to this one."""
        for each in PHASES[: PHASES.index(phase) + 1]:
            if self.why_over is None:
                getattr(self, each)()
        return self

    def play(self) -> Outcome:
        return self.until("unmask").open()

    def added(self, names: Sequence[str]) -> Words:
        """The sum modulo 2^b of what these devices added."""
        return total_of([self.words[name] for name in names])
