"""Uploads: large updates resume where a connection broke. The part that has arrived is kept, and the rest is sent.

    PUT /v1/assignments/{id}/update               Sparrow-Update-SHA256: D, Content-Range: bytes FIRST-LAST/TOTAL
    GET /v1/assignments/{id}/update?sha256=D      {"received": N}: go on with bytes N-LAST/TOTAL, or, where N is TOTAL,
                                                  with an empty body and bytes */TOTAL

The range always goes to the end, so an update is one request where nothing breaks. A large update without a range goes
the same way, but begins anew. Parts lie in a folder of this machine, wherever blobs are kept; whole, one becomes the
update's blob without being written again where that is a file beside it. They are no acknowledgement and need not
outlive the process: at start they are removed, likewise an hour after their last byte, and when their assignment is
settled. Another process of the same coordinator does not know them: there the update begins anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from fastapi import Request
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from ..errors import BadContent, LengthRequired, TooLarge, WrongRange
from ..rounds.acceptance import Acceptance, Sent
from ..rounds.dispatch import Ask, Asked, Dispatch
from ..storage.blobs import make_folder, map_file, private
from ..storage.database import BUSY_SECONDS
from ..storage.store import Store
from ..storage.tables import Assignment
from .bodies import read_body
from .threads import Batches, Threads

DIGEST_HEADER = "Sparrow-Update-SHA256"
KEEP_SECONDS = 3600.0
SWEEP_SECONDS = 1.0
"""The time between two looks at all parts, which take a query."""
AT_ONCE = 4
"""Large updates that are in memory, to be checked and stored: as many as keep cores and disk busy."""
SMALL_BYTES = 16 * 1024 * 1024
"""Small updates that are in memory as they come, together; beyond it they go the way of large ones."""
GATHERED_BYTES = 1024 * 1024
"""The longest update that is read first, and then checked."""
WRITTEN_BYTES = 2 * 1024 * 1024
"""The size of a write: a network hands an update over in pieces of some kB, and a thread and an open file for each cost
more than all else that is done with an update."""


@dataclass
class _Part:
    """The part of an update of ``total`` bytes that has arrived. digest: as announced; empty for one without a range.

    received: its bytes on the disk. found: their digest. gathered: what is written next. turn: how many calls went on
    with it. calls: how many are at it now. forgotten: it has no file any more."""

    digest: str
    total: int
    path: Path
    touched: float
    received: int = 0
    found: hashlib._Hash = field(default_factory=hashlib.sha256)
    turn: int = 0
    calls: int = 0
    forgotten: bool = False
    gathered: deque[bytes] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Taken:
    """An update that was received: whether it is new, its bytes, and what its device does next, where it asked."""

    new: bool
    size: int
    asked: Asked | None


class Uploads:
    """Updates on their way, one for each assignment."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        acceptance: Acceptance,
        dispatch: Dispatch,
        clock: Callable[[], float],
        writers: Threads,
    ) -> None:
        self._sending = Batches("updates", self._take_in, BUSY_SECONDS)
        self._answer_all = dispatch.answer_all
        self._folder, self._store, self._clock = folder / secrets.token_hex(8), store, clock
        self._acceptance, self._writers = acceptance, writers
        self._parts: dict[str, _Part] = {}
        self._few = asyncio.Semaphore(AT_ONCE)
        self._one_of_device: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._small = 0
        self._taking = threading.Lock()
        self._swept = -math.inf
        if store.is_first:
            shutil.rmtree(folder, ignore_errors=True)

    def received(self, assignment_id: str, digest: str) -> int:
        """Return how many bytes of this update have arrived."""
        part = self._parts.get(assignment_id)
        if part is None or part.digest != digest:
            return 0
        self._write(part)
        return part.received

    async def receive(
        self, request: Request, assignment_id: str, device_id: str, media_type: str, ask: Ask | None = None
    ) -> Taken:
        """Receive an update, and have it checked and stored. ask: of a device that wants to know what comes next.

        A small one is read first, and the rest is done with all that have come meanwhile. A large one is checked
        against its assignment before its first byte is taken, too: it may bring no more than is valid. It is written to
        the disk as it comes.

        Raises the errors of ``Acceptance.accept_update``; LengthRequired, TooLarge, BadContent, WrongRange.
        """
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdigit() else 0
        whole = "content-range" not in request.headers
        if not (whole and size <= GATHERED_BYTES and self._small + size <= SMALL_BYTES):
            return await self._receive_large(request, assignment_id, device_id, media_type, ask)
        self._small += size
        try:
            body = await read_body(request, GATHERED_BYTES)
            return await self._sending.run((Sent(assignment_id, device_id, body, media_type), ask))
        finally:
            self._small -= size

    def _take_in(self, updates: Sequence[tuple[Sent, Ask | None]]) -> list[Taken | BaseException]:
        """Have small updates accepted together, and look for what comes next."""
        outcomes = self._acceptance.accept_all([sent for sent, _ in updates])
        return [
            new if isinstance(new, BaseException) else Taken(new, len(sent.body), self._next(ask))
            for (sent, ask), new in zip(updates, outcomes, strict=True)
        ]

    def _next(self, ask: Ask | None) -> Asked | None:
        """Return what a device does next; None where it does not ask, or where that cannot be said just now."""
        if ask is None:
            return None
        (asked,) = self._answer_all([ask])
        return asked if isinstance(asked, Asked) else None

    async def _receive_large(
        self, request: Request, assignment_id: str, device_id: str, media_type: str, ask: Ask | None
    ) -> Taken:
        """Add what was missing of a large update, and have the whole accepted; its part is removed when that is done.

        Few at a time are in memory, and one of a device; the others wait when they have sent everything already.

        Raises WrongRange if it does not begin where the last one broke, or the digest is another.
        """
        declared, digest = request.headers.get("content-length", ""), request.headers.get(DIGEST_HEADER, "")
        if "content-range" in request.headers:
            asked = re.fullmatch(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", request.headers["content-range"])
            if asked is None or not re.fullmatch("[0-9a-f]{64}", digest):
                raise BadContent(
                    f"Content-Range: write bytes FIRST-LAST/TOTAL, and the update's digest in {DIGEST_HEADER}"
                )
            total = int(asked[3])
            first, last = (total, total - 1) if asked[1] is None else (int(asked[1]), int(asked[2]))
        else:
            total, digest = int(declared), ""
            first, last = 0, total - 1

        def begin() -> tuple[_Part, int]:
            limit = self._acceptance.check_envelope(assignment_id, device_id, media_type)
            if total > limit:
                raise TooLarge(f"the update has {total} bytes, nothing valid here is longer than {limit}")
            if (declared or ("0" if first == total else "")) != str(last - first + 1):
                raise LengthRequired("Content-Length must be the length of Content-Range; send both")
            if last != total - 1:
                raise WrongRange("the range must go to the update's end")
            with self._taking:
                return self._begin(assignment_id, digest, first, total)

        part, turn = await run_in_threadpool(begin)
        try:
            await self._gather(request, part, turn)
            async with self._one_of_device.setdefault(device_id, asyncio.Lock()), self._few:
                accept = self._accept
                return await self._writers.run(accept, part, turn, assignment_id, device_id, media_type, ask)
        finally:
            with self._taking:
                part.calls -= 1

    def _accept(
        self, part: _Part, turn: int, assignment_id: str, device_id: str, media_type: str, ask: Ask | None
    ) -> Taken:
        """Have a whole update accepted, and remove its part."""
        body, found = self._read(part, turn)
        if part.digest and found != part.digest:
            self.forget(assignment_id)
            raise WrongRange("the update's digest is another than was announced; send it again from its first byte")
        new = self._acceptance.accept_update(
            *(assignment_id, device_id, body, media_type, found, part.path), intact=bool(part.digest)
        )
        self.forget(assignment_id)
        return Taken(new, len(body), self._next(ask))

    async def _gather(self, request: Request, part: _Part, turn: int) -> None:
        """Add what a call brings to its part."""
        unwritten = 0
        try:
            async for piece in request.stream():
                if part.turn == turn:  # else another call goes on with it
                    part.gathered.append(piece)
                unwritten += len(piece)
                if unwritten >= WRITTEN_BYTES:
                    await run_in_threadpool(self._write, part)
                    unwritten = 0
        except BaseException as error:
            self._write(part)  # the call was cut off: its pieces take no memory, and need not be sent again
            if isinstance(error, ClientDisconnect):
                raise BadContent("the connection broke before the whole body had come; send the rest") from None
            raise

    def _begin(self, assignment_id: str, digest: str, first: int, total: int) -> tuple[_Part, int]:
        """Return the part that a call goes on with, one of its calls from now on, and the call's turn."""
        received = self.received(assignment_id, digest)
        part = self._parts.get(assignment_id)
        if first == 0 and (part is None or (part.digest, part.total) != (digest, total) or received):
            received = 0
            self.forget(assignment_id)
            # A name of its own: another thread may still remove the former file.
            path = self._folder / f"{assignment_id}.{secrets.token_hex(8)}.part"
            part = self._parts[assignment_id] = _Part(digest, total, path, self._clock())
            with self._store.troubles.of_blobs():
                make_folder(self._folder)
                os.close(private(part.path, os.O_WRONLY | os.O_CREAT))
        if part is None or received != first or part.total != total:
            raise WrongRange(f"{received} bytes of this update are here; go on with the next")
        with part.lock:
            if self._parts.get(assignment_id) is not part:
                raise WrongRange("the part of this update that had arrived is gone; begin with its first byte")
            part.turn += 1
            part.calls += 1
            return part, part.turn

    def _write(self, part: _Part) -> None:
        """Write to the file what has been gathered."""
        with part.lock:
            # Only this function takes from it; later pieces are appended meanwhile.
            pieces = [part.gathered.popleft() for _ in range(len(part.gathered))]
            size = sum(map(len, pieces))
            if not size or part.forgotten:
                return
            if part.received + size > part.total:  # a whole update is never written again: it may be a blob already
                raise BadContent("more has come than Content-Range says; send the update again")
            with self._store.troubles.of_blobs(size), part.path.open("r+b") as file:
                file.seek(part.received)
                file.writelines(pieces)
                file.truncate()  # the rest of a write that a full disk has cut off
            for piece in pieces:  # while caches hold it
                part.found.update(piece)
            part.received += size
            part.touched = self._clock()

    def _read(self, part: _Part, turn: int) -> tuple[memoryview, str]:
        self._write(part)
        with part.lock, self._store.troubles.of_blobs():
            if part.turn != turn:
                raise WrongRange("another call goes on with this update, or has brought it; ask how much is here")
            return map_file(part.path), part.found.hexdigest()

    def close(self) -> None:
        """Take in no more updates."""
        self._sending.close()

    def forget(self, assignment_id: str) -> None:
        """Remove the part of an assignment's update that has arrived, if any."""
        part = self._parts.pop(assignment_id, None)
        if part is not None:
            with part.lock:
                part.turn += 1
                part.forgotten = True  # pieces of a call that goes on are dropped
                part.gathered.clear()
                part.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove parts that nobody continues, and those of settled assignments; may be called at any time."""
        now = self._clock()
        if not self._parts or now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        with self._store.reading() as db:
            open_ = select(Assignment.id).where(Assignment.id.in_(list(self._parts)), Assignment.status == "open")
            still = set(db.scalars(open_))
        for assignment_id, part in list(self._parts.items()):
            over = assignment_id not in still or now - part.touched > KEEP_SECONDS
            if over and not part.calls:
                self.forget(assignment_id)
