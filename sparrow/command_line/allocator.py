"""Settings of glibc's allocator: freed arrays go back to the system, so an idle coordinator holds about one
model, and a device what it trains with.

glibc would keep it. Each time that a block is freed it raises the size from which it asks the system (up to 32 MiB), so
that updates of some megabytes soon come from heaps, of which it has several for each core: pieces of all of them stay.
"""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Constants of glibc's malloc.h; see mallopt(3)."""
LARGE_BYTES = 1024 * 1024
HEAPS = 2


def give_back() -> None:
    """Tell glibc so, for this process. Elsewhere nothing happens: others have allocators that do it by themselves."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_ARENA_MAX, HEAPS)
