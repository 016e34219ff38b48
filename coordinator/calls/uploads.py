"""Resumable uploads of large updates.

    PUT /v1/assignments/{id}/update               Sparrow-Update-SHA256: D, Content-Range: bytes FIRST-LAST/TOTAL
    GET /v1/assignments/{id}/update?sha256=D      {"received": N}: continue with bytes N-LAST/TOTAL, or, if N is
                                                  TOTAL, with an empty body and bytes */TOTAL

If a range ends before TOTAL - 1, the answer is 202 with the number of bytes received; proxies may limit the length of
a body. A large update without a range cannot resume. Received bytes are files in a local folder. If the folder is on
the file system of the blobs, a complete file becomes the update's blob without a copy. Files are removed at start, an
hour after their last byte, and when their assignment is settled. An upload that continues in another process of the
coordinator restarts.
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

from ..errors import BadContent, LengthRequired, TooLarge, WrongMediaType, WrongRange
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
"""Shortest time between two sweeps, each of which takes a query."""
AT_ONCE = 4
"""Large updates in memory at a time, enough to keep cores and disk busy."""
SMALL_BYTES = 16 * 1024 * 1024
"""Maximum bytes of small updates in memory; beyond it they are received like large ones."""
GATHERED_BYTES = 1024 * 1024
"""Longest update that is read before it is checked."""
WRITTEN_BYTES = 2 * 1024 * 1024
"""Size of a write: a thread and an open file for each piece from the network would cost more than all other work."""


@dataclass
class _Part:
    # The announced digest; empty without a range.
    digest: str
    total: int
    path: Path
    touched: float
    # Bytes on the disk.
    received: int = 0
    # The digest of the bytes on the disk.
    found: hashlib._Hash = field(default_factory=hashlib.sha256)
    # Number of the call that may continue the part.
    turn: int = 0
    # Calls in progress.
    calls: int = 0
    # Whether the file was removed.
    forgotten: bool = False
    # Pieces not written yet.
    gathered: deque[bytes] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Taken:
    """A received update."""

    new: bool
    size: int
    asked: Asked | None


class Uploads:
    """Uploads in progress, one per assignment."""

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
        self._folder = folder / secrets.token_hex(8)
        self._store = store
        self._clock = clock
        self._acceptance = acceptance
        self._writers = writers
        self._parts: dict[str, _Part] = {}
        self._few = asyncio.Semaphore(AT_ONCE)
        self._one_of_device: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._small = 0
        self._taking = threading.Lock()
        self._swept = -math.inf
        if store.is_first:
            shutil.rmtree(folder, ignore_errors=True)

    def received(self, assignment_id: str, digest: str) -> int:
        """Return the number of bytes received of this update."""
        part = self._parts.get(assignment_id)
        if part is None or part.digest != digest:
            return 0
        self._write(part)
        return part.received

    async def receive(
        self, request: Request, assignment_id: str, device_id: str, media_type: str, ask: Ask | None = None
    ) -> Taken | int:
        """Receive an update, check it and store it.

        Return the number of bytes received if more parts are to follow.

        Raises the errors of ``Acceptance.accept_update``, LengthRequired, TooLarge, BadContent, WrongRange.
        """
        # A small update is read in full and accepted in a batch. A large one is checked against its assignment before
        # its first byte is read, which limits its size, and is written to the disk as it arrives.
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
        """Accept small updates in one batch, and find each device's next work."""
        outcomes = self._acceptance.accept_all([sent for sent, _ in updates])
        return [
            new if isinstance(new, BaseException) else Taken(new, len(sent.body), self._next(ask))
            for (sent, ask), new in zip(updates, outcomes, strict=True)
        ]

    def _next(self, ask: Ask | None) -> Asked | None:
        """Return the device's next work; None if unknown or not asked for."""
        if ask is None:
            return None
        (asked,) = self._answer_all([ask])
        return asked if isinstance(asked, Asked) else None

    async def _receive_large(
        self, request: Request, assignment_id: str, device_id: str, media_type: str, ask: Ask | None
    ) -> Taken | int:
        """Receive the missing bytes of a large update, accept the whole, and remove its part.

        Raises WrongRange if the range does not continue the part.
        """
        declared = request.headers.get("content-length", "")
        digest = request.headers.get(DIGEST_HEADER, "")
        if "content-range" in request.headers:
            asked = re.fullmatch(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", request.headers["content-range"])
            if asked is None or not re.fullmatch("[0-9a-f]{64}", digest):
                raise BadContent(
                    f"Content-Range: send bytes FIRST-LAST/TOTAL, with the update's SHA-256 in {DIGEST_HEADER}"
                )
            total = int(asked[3])
            first, last = (total, total - 1) if asked[1] is None else (int(asked[1]), int(asked[2]))
        else:
            total = int(declared)
            digest = ""
            first = 0
            last = total - 1

        def begin() -> tuple[_Part, int]:
            try:
                limit = self._acceptance.check_envelope(assignment_id, device_id, media_type)
                if total > limit:
                    raise TooLarge(f"the update has {total} bytes; it must have at most {limit}")
            except (TooLarge, WrongMediaType) as error:
                raise self._acceptance.count_refusal(assignment_id, device_id, error) from None
            if (declared or ("0" if first == total else "")) != str(last - first + 1):
                raise LengthRequired("Content-Length must be the length of Content-Range; send both")
            if not first - 1 <= last < total:
                raise WrongRange("Content-Range: send a range within the update")
            with self._taking:
                return self._begin(assignment_id, digest, first, total)

        part, turn = await run_in_threadpool(begin)
        try:
            await self._gather(request, part, turn)
            if last < total - 1:
                await run_in_threadpool(self._write, part)
                return part.received
            async with self._one_of_device.setdefault(device_id, asyncio.Lock()), self._few:
                accept = self._accept
                return await self._writers.run(accept, part, turn, assignment_id, device_id, media_type, ask)
        finally:
            with self._taking:
                part.calls -= 1

    def _accept(
        self, part: _Part, turn: int, assignment_id: str, device_id: str, media_type: str, ask: Ask | None
    ) -> Taken:
        body, found = self._read(part, turn)
        if part.digest and found != part.digest:
            self.forget(assignment_id)
            raise WrongRange("the update does not match its announced digest; send it again from its first byte")
        intact = bool(part.digest)
        new = self._acceptance.accept_update(
            assignment_id, device_id, body, media_type, found, part.path, intact=intact
        )
        self.forget(assignment_id)
        return Taken(new, len(body), self._next(ask))

    async def _gather(self, request: Request, part: _Part, turn: int) -> None:
        unwritten = 0
        try:
            async for piece in request.stream():
                # Otherwise another call has taken over.
                if part.turn == turn:
                    part.gathered.append(piece)
                unwritten += len(piece)
                if unwritten >= WRITTEN_BYTES:
                    await run_in_threadpool(self._write, part)
                    unwritten = 0
        except BaseException as error:
            # Keep the pieces on the disk, so that they need not be sent again.
            self._write(part)
            if isinstance(error, ClientDisconnect):
                raise BadContent("the connection broke before the body was complete; send the rest") from None
            raise

    def _begin(self, assignment_id: str, digest: str, first: int, total: int) -> tuple[_Part, int]:
        received = self.received(assignment_id, digest)
        part = self._parts.get(assignment_id)
        if first == 0 and (part is None or (part.digest, part.total) != (digest, total) or received):
            received = 0
            self.forget(assignment_id)
            # A new name: another thread may still remove the former file.
            path = self._folder / f"{assignment_id}.{secrets.token_hex(8)}.part"
            part = self._parts[assignment_id] = _Part(digest, total, path, self._clock())
            with self._store.troubles.of_blobs():
                make_folder(self._folder)
                os.close(private(part.path, os.O_WRONLY | os.O_CREAT))
        if part is None or received != first or part.total != total:
            raise WrongRange(f"{received} bytes of this update have arrived; continue with the next byte")
        with part.lock:
            if self._parts.get(assignment_id) is not part:
                raise WrongRange("the received part of this update was removed; send it again from its first byte")
            part.turn += 1
            part.calls += 1
            return part, part.turn

    def _write(self, part: _Part) -> None:
        """Write the gathered pieces to the file."""
        with part.lock:
            # Only this function takes pieces; others append meanwhile.
            pieces = [part.gathered.popleft() for _ in range(len(part.gathered))]
            size = sum(map(len, pieces))
            if not size or part.forgotten:
                return
            # A complete update must not be written again: it may be a blob already.
            if part.received + size > part.total:
                raise BadContent("the body is longer than its Content-Range; send the update again")
            with self._store.troubles.of_blobs(size), part.path.open("r+b") as file:
                file.seek(part.received)
                file.writelines(pieces)
                # A full disk may have cut off an earlier write.
                file.truncate()
            for piece in pieces:
                part.found.update(piece)
            part.received += size
            part.touched = self._clock()

    def _read(self, part: _Part, turn: int) -> tuple[memoryview, str]:
        self._write(part)
        with part.lock, self._store.troubles.of_blobs():
            if part.turn != turn:
                raise WrongRange("another call continues or has sent this update; ask how many bytes have arrived")
            return map_file(part.path), part.found.hexdigest()

    def close(self) -> None:
        """Stop accepting updates."""
        self._sending.close()

    def forget(self, assignment_id: str) -> None:
        """Remove the received part of an assignment's update, if any."""
        part = self._parts.pop(assignment_id, None)
        if part is not None:
            with part.lock:
                part.turn += 1
                # Later pieces of a call in progress are dropped.
                part.forgotten = True
                part.gathered.clear()
                part.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove abandoned parts and parts of settled assignments; may be called at any time."""
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
