"""Disks that are full: a real file system of a few megabytes, where this user may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# A process of its own unmounts, also if the tests are killed: what stays mounted cannot be removed by the next run.
GUARD = """
mount -t tmpfs -o "size=$2" tmpfs "$1" || exit 1
echo mounted
read -r line
umount --lazy "$1"
"""


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[bool]:
    """A file system of so many megabytes in ``folder``; False where none can be mounted."""
    command = ["sh", "-c", GUARD, "guard", str(folder), f"{megabytes}m"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        done = guard.stdout.readline() == "mounted\n"
        try:
            yield done
        finally:
            # A line, for a forked process may hold the other end of a pipe that is closed here.
            if done:
                guard.stdin.write("\n")
                guard.stdin.flush()
                assert guard.wait() == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, 4) as done:
        if not done:
            pytest.skip("file systems cannot be mounted here: needs root")
        yield folder


def fill(folder):
    """Use the disk up to its last byte; returns the file to delete."""
    with (folder / "others").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return folder / "others"
