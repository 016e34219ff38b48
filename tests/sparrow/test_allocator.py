"""A process at rest holds little, however large what has passed through it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

PASS_THROUGH = """
import sys, threading
from sparrow.command_line import allocator
if sys.argv[1] == "yes":
    allocator.give_back()

def pass_through():
    for _ in range(3):
        kept = [bytearray(2_000_000) for _ in range(12)]
        small = bytearray(2000)
        del kept

threads = [threading.Thread(target=pass_through) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_what_large_blocks_took_is_given_back():
    command = [sys.executable, "-c", PASS_THROUGH]
    resting = int(subprocess.run([*command, "yes"], capture_output=True, text=True, check=True, timeout=60).stdout)
    assert resting < 40_000_000  # an interpreter and less than a tenth of what was allocated
