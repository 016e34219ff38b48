"""``python -m benchmarks.sampling``: the cost of reading a device's energy and conditions, as a share of one core.

For each kind of source, on the copied devices of the tests: processor time of one read, its children's included, over
the time between two reads at the sampler's rate of one a second (less often for slow sources). Commands of a board that
this machine lacks are replaced by a real process that prints the same text. Then a meter with its thread as in the SDK,
by the processor time of the whole process. It ends with 1 if anything costs 1 % of a core or more. A board's core is
slower than this machine's and its sensors answer more slowly, but waiting for them uses no core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.markdown import markdown_table
from sparrow.bench.server import machine
from sparrow.devices import EnergyMeter
from sparrow.devices.conditions import ConditionsReader
from sparrow.devices.integral import Integral
from sparrow.devices.power import find_sources
from sparrow.devices.system import Commands, System

TREES = Path("tests/devices/fixtures")
BOARDS = (
    "jetson-nano-l4t32",
    "jetson-orin-nano-jp6",
    "raspberry-pi-5",
    "raspberry-pi-4",
    "laptop-rapl",
    "laptop-battery",
    "phone-termux",
)
PERIOD_SECONDS = 1.0
CONDITIONS_PERIOD_SECONDS = 5.0
LIMIT = 0.01
"""A share of one core."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument("--fixtures", type=Path, default=TREES, help="folder of copied devices")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each meter's run")
    parser.add_argument("--reads", type=int, default=200, help="reads of each source")
    options = parser.parse_args(arguments)
    systems = {"this machine": System.here()}
    systems |= {name: _with_processes(options.fixtures / name) for name in BOARDS}
    rows = [row for name, system in systems.items() for row in _sources(name, system, options.reads)]
    rows += [_conditions(name, system, options.reads) for name, system in systems.items()]
    rows += [_meter(name, system, options.seconds) for name, system in systems.items()]
    print(f"{machine()}, a read every {PERIOD_SECONDS:g} s, {options.reads} reads each\n")
    head = ["device", "what", "every", "processor time of one", "share of a core"]
    print(markdown_table(head, [row for row, _ in rows]))
    most = max(share for _, share in rows)
    print(f"most: {most:.3%} of a core; the limit is {LIMIT:.0%}")
    return 0 if most < LIMIT else 1


Row = tuple[list[str], float]


def _sources(name: str, system: System, reads: int) -> list[Row]:
    rows = []
    for source in find_sources(system, None, time.process_time):
        integral = Integral(source, PERIOD_SECONDS)
        now = iter(range(10**9))
        seconds = _cost(lambda source=source, now=now: source.read(float(next(now))), reads)  # type: ignore[misc]
        rows.append(_row(name, source.name, integral.wake_seconds, seconds))
    return rows


def _conditions(name: str, system: System, reads: int) -> Row:
    """Read conditions as a policy does, slow ones less often."""
    now = 0.0

    def clock() -> float:
        return now

    reader = ConditionsReader(system, clock=clock)

    def look() -> None:
        nonlocal now
        now += CONDITIONS_PERIOD_SECONDS
        reader.read()

    return _row(name, "conditions", CONDITIONS_PERIOD_SECONDS, _cost(look, reads))


def _meter(name: str, system: System, seconds: float) -> Row:
    """Run a meter with its thread while the process sleeps."""
    with EnergyMeter(system, period_seconds=PERIOD_SECONDS) as meter:
        start = time.monotonic()
        used = _used()
        with meter.phase("sleep"):
            time.sleep(seconds)
        share = (_used() - used) / (time.monotonic() - start)
    return [name, "meter with its thread", f"{PERIOD_SECONDS:g} s", "", f"{share:.3%}"], share


def _row(name: str, what: str, period: float, seconds: float) -> Row:
    share = seconds / period
    return [name, what.partition(",")[0], f"{period:g} s", f"{seconds * 1e6:.0f} µs", f"{share:.3%}"], share


def _cost(work: Callable[[], object], times: int) -> float:
    """Return the processor seconds of one run of ``work``, with those of the processes that it starts."""
    work()
    used = _used()
    for _ in range(times):
        work()
    return (_used() - used) / times


def _used() -> float:
    # Imported here, because Windows lacks this module.
    import resource

    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def _with_processes(folder: Path) -> System:
    """Return a copied device whose commands are real processes that print the device's output."""

    def run(argv: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
        name = "_".join(word.lstrip("-").replace("/", "_") for word in argv)
        texts = [folder / "commands" / f"{name}{suffix}" for suffix in (".txt", ".json")]
        text = next((path for path in texts if path.is_file()), None)
        if text is None:
            raise FileNotFoundError(argv[0])
        done = subprocess.run(["cat", str(text)], capture_output=True, timeout=timeout_seconds, check=True)
        return 0, done.stdout.decode()

    return replace(System.at(folder), commands=Commands(run))


if __name__ == "__main__":
    sys.exit(main())
