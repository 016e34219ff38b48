"""Run a function in a separate process, with a deadline and a memory limit.

ONNX Runtime cannot be interrupted within a node, and its crash ends the process, so untrusted graphs run separately:

    answer = run_limited("sparrow.coordinator.models.judging", request, seconds=60, memory=2**30)

The module has a function ``answer(request: bytes) -> bytes``. Its standard output goes to the error output, whose end
is part of ``Crashed``. The process inherits only the environment variables in ``INHERITED``: no tokens and no database
addresses.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

LOOK_SECONDS = 0.05
"""Interval for checking the deadline and ``stop``."""

GRACE_SECONDS = 5.0
"""Seconds after the deadline at which the process ends itself, in case its parent was killed."""

MOST_SAID = 500
"""Largest part of the error output in an error, in characters."""

NO_MEMORY = 77
"""Exit code of a process that reached its memory limit."""

INHERITED = {
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "PATH", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "TZ"),
    *("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"),
    *("PYTHONHOME", "VIRTUAL_ENV"),
}
"""Environment variables that the process inherits."""


class NotAnswered(Exception):
    """Base class of the errors of ``run_limited``."""


class TookTooLong(NotAnswered):
    """The process reached its deadline."""


class TookTooMuchMemory(NotAnswered):
    """The process reached its memory limit."""


class Stopped(NotAnswered):
    """``stop`` was set."""


class Crashed(NotAnswered):
    """The process ended without an answer. code: its exit code, or the negative number of a signal."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run_limited(
    module: str, request: bytes, *, seconds: float, memory: int | None = None, stop: threading.Event | None = None
) -> bytes:
    """Run ``answer(request)`` of a module in a new process and return its result.

    seconds: limit that includes the start of the process. memory: limit in bytes of address space, beyond that after
    the import of the module; only on Linux. stop: an event that ends the process early.

    Raises TookTooLong, TookTooMuchMemory, Stopped, and Crashed for any other end without an answer.
    """
    deadline = time.monotonic() + seconds
    command = [sys.executable, "-m", __name__, module, str(seconds), str(memory or 0)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            # Ctrl-C in a terminal reaches only the parent, which then ends this process.
            start_new_session=True,
        )
    except OSError as error:
        raise Crashed(f"a process could not be started: {error}", 1) from error
    # communicate() must not close it
    feed = process.stdin
    process.stdin = None
    assert feed is not None, "it is a pipe"
    feeder = threading.Thread(target=_feed, args=(feed, request), daemon=True)
    feeder.start()
    try:
        answer, said = _wait(process, deadline, seconds, stop)
    finally:
        process.kill()
        process.wait()
        feeder.join()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if process.returncode == 0:
        return answer
    if process.returncode == NO_MEMORY:
        raise TookTooMuchMemory(f"it takes more than {memory or 0:,} bytes of memory")
    raise Crashed(_describe(process.returncode, said), process.returncode)


def _wait(
    process: subprocess.Popen[bytes], deadline: float, seconds: float, stop: threading.Event | None
) -> tuple[bytes, bytes]:
    """Wait for the process and return its output and error output.

    Raises TookTooLong after the deadline, Stopped if ``stop`` was set.
    """
    while True:
        try:
            return process.communicate(timeout=max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise Stopped("it was stopped before it answered") from None
            if time.monotonic() >= deadline:
                raise TookTooLong(f"it takes longer than {seconds:g} s") from None


def _feed(pipe: IO[bytes], request: bytes) -> None:
    # The process may end before it has read all.
    with suppress(OSError), pipe:
        pipe.write(request)


def _environment() -> dict[str, str]:
    """Return the environment of the process, which imports from the same path."""
    kept = {name: value for name, value in os.environ.items() if name.upper() in INHERITED}
    # Each thread of glibc may otherwise reserve 64 MiB of address space, which the limit counts.
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "MALLOC_ARENA_MAX": "2"}


def _describe(code: int, said: bytes) -> str:
    last = said.decode(errors="replace").strip()[-MOST_SAID:].rpartition("\n")[2]
    if code >= 0:
        return f"its process ended with the exit code {code}: {last}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"its process was ended by the signal {-code} ({name})"


def _limit_memory(memory: int) -> None:
    """Limit the address space to what this process has and ``memory`` bytes more; on Linux only."""
    if not memory or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = taken + memory
    soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))


def _main() -> None:
    """Answer the request on standard input; the main function of the new process."""
    module, seconds, memory = sys.argv[1:]
    if hasattr(signal, "setitimer"):
        # The signal ends the process in any state, since Python does not handle it.
        signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE_SECONDS)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        function = importlib.import_module(module).answer
        _limit_memory(int(memory))
        answer = function(sys.stdin.buffer.read())
    except MemoryError:
        os._exit(NO_MEMORY)
    except Exception as error:
        # ONNX Runtime's errors have one type for all causes, and only their texts tell them apart.
        if "bad_alloc" in str(error) or "allocate memory" in str(error):
            os._exit(NO_MEMORY)
        raise
    with open(output, "wb") as file:
        file.write(answer)
    sys.stderr.flush()
    # Skip the exit of libraries' threads, which may hang.
    os._exit(0)


if __name__ == "__main__":
    _main()
