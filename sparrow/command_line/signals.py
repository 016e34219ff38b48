"""Set signal handlers, and restore the previous ones."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from signal import Signals
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handled(handlers: Mapping[Signals, Handler]) -> Iterator[None]:
    """Context manager: install these handlers, and restore the former ones on exit."""
    # It has no effect outside the main thread, which alone may install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, before in former.items():
            # None: a library installed it, not Python, and it cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if before is None else before)
