"""Cache of payloads, each packed once for all devices that request it.

The first call packs the payload; simultaneous ones wait.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass

PAYLOAD_CACHE_BYTES = 64 * 1024 * 1024

Key = tuple[int, int, Hashable]
"""Federation, model version, and everything else that the payload depends on."""


@dataclass(frozen=True)
class Packed:
    """A payload, and its SHA-256."""

    body: bytes
    sha256: str


class Payloads:
    """The latest payloads, up to ``PAYLOAD_CACHE_BYTES``."""

    def __init__(self) -> None:
        self._packed: OrderedDict[Key, Future[Packed]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, pack: Callable[[], bytes]) -> Packed:
        """Return the payload of this key, made by ``pack`` if it is not cached. Raises the errors of ``pack``."""
        with self._lock:
            packed = self._packed.get(key)
            if packed is not None:
                self._packed.move_to_end(key)
            else:
                # Payloads of older models are rarely needed.
                for old in [old for old in self._packed if old[0] == key[0] and old[1] < key[1]]:
                    del self._packed[old]
                mine = self._packed[key] = Future()
        if packed is not None:
            return packed.result()
        try:
            body = pack()
        except BaseException as error:
            with self._lock:
                # The next caller may succeed.
                if self._packed.get(key) is mine:
                    del self._packed[key]
            mine.set_exception(error)
            raise
        mine.set_result(Packed(body, hashlib.sha256(body).hexdigest()))
        self._shrink()
        return mine.result()

    def _shrink(self) -> None:
        with self._lock:
            sizes = [(key, len(each.result().body)) for key, each in self._packed.items() if _is_there(each)]
            total = sum(size for _, size in sizes)
            for key, size in sizes[:-1]:
                if total <= PAYLOAD_CACHE_BYTES:
                    break
                del self._packed[key]
                total -= size


def _is_there(packed: Future[Packed]) -> bool:
    return packed.done() and packed.exception() is None
