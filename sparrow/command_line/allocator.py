"""Settings of glibc's allocator that return freed arrays to the system.

By default glibc raises its mmap threshold (up to 32 MiB) with every freed block. Updates of some megabytes then come
from heaps, several per core, which stay allocated.
"""

from __future__ import annotations

import contextlib
import ctypes

# constants of glibc's malloc.h; see mallopt(3)
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

LARGE_BYTES = 1024 * 1024
HEAPS = 2


def give_back() -> None:
    """Configure glibc's allocator for this process; without glibc, do nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_ARENA_MAX, HEAPS)
