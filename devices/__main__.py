"""``sparrow devices``: the board, the sensors and the conditions of this device."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.options import add_json

from .board import BoardInfo
from .external import ExternalMeter, load_phases
from .readings import Reading
from .survey import Sensor, Survey
from .system import System

_COUNTING_SECONDS = 1.0


def _run(options: argparse.Namespace) -> None:
    if options.meter is not None:
        _print_phases(options.meter, options.phases, options.offset, as_json=options.json)
        return
    system = System.here() if options.root is None else System.at(options.root)
    survey = Survey(system)
    if options.root is None and survey.counts:
        survey.read()
        time.sleep(_COUNTING_SECONDS)
    _show(survey, options.watch, as_json=options.json)


def _show(survey: Survey, every: float | None, *, as_json: bool) -> None:
    while True:
        sensors = survey.read()
        print(_as_json(survey, sensors) if as_json else _as_text(survey, sensors), flush=True)
        if every is None:
            return
        time.sleep(every)
        if not as_json:
            print()


def _options(parser: Parser) -> None:
    add_json(parser, ", with --watch one line per reading")
    parser.add_argument(
        "--watch", type=_seconds, nargs="?", const=2.0, metavar="SECONDS", help="repeat every SECONDS (default: 2)"
    )
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="read a copy of another device's files")
    parser.add_argument("--meter", type=Path, metavar="CSV", help="readings of an external meter: time,watts")
    parser.add_argument("--phases", type=Path, metavar="CSV", help="phases to compute joules for: name,start,end")
    parser.add_argument(
        "--offset", type=float, default=0.0, metavar="SECONDS", help="add to the meter's times if its clock differs"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"interval of {text} seconds; give a number above 0")
    return seconds


# --- for a person

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def _as_text(survey: Survey, sensors: list[Sensor]) -> str:
    lines = [*_headline(survey.board)]
    group = ""
    width = max(len(_short(sensor.name)) for sensor in sensors)
    for sensor in sensors:
        if sensor.group != group:
            group = sensor.group
            lines.append(group)
        lines.append(f"  {_short(sensor.name):<{width}}  {_value(sensor.reading):>12}  {_provenance(sensor)}".rstrip())
    missing = survey.missing(sensors)
    if missing:
        lines += ["missing, and how to get it", *(f"  - {line}" for line in missing)]
    return "\n".join(lines)


def _headline(board: BoardInfo) -> list[str]:
    facts = [board.soc, board.module, board.cpu_core or board.cpu]
    facts += [f"{board.cores} cores", f"{board.bits}-bit"]
    if board.memory_bytes is not None:
        facts.append(f"{board.memory_bytes / 1e9:.3g} GB of memory")
    if board.revision:
        facts.append(f"revision {board.revision}")
    if board.l4t:
        facts.append(f"L4T {board.l4t} (JetPack {board.jetpack or 'unknown'}), CUDA capability {board.cuda}")
    lines = [f"{board.name} ({board.kind}){': ' if board.model else ''}{board.model}"]
    lines.append("  " + ", ".join(fact for fact in facts if fact))
    if not board.has_wheels:
        lines.append("  32-bit system: it can predict from an exported file; torch has no 32-bit release")
    return lines


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:31]}..."


def _value(reading: Reading) -> str:
    value = reading.value
    unit = reading.unit
    if value is None:
        return "-"
    if unit == "1":
        return "yes" if value else "no"
    if unit in ("B", "Hz", "J"):
        factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(value) >= f), (1.0, ""))
        return f"{value / factor:.4g} {prefix}{unit}"
    digits = f"{value:.0f}" if unit in ("1/255", "id", "events") or value == round(value) else f"{value:.2f}"
    return digits if unit == "id" else f"{digits} {unit}"


def _provenance(sensor: Sensor) -> str:
    reading = sensor.reading
    said = f"{reading.quality}: {reading.reason}" if reading.reason is not None else str(reading.quality)
    scope = f", {reading.scope}" if sensor.group == "power" else ""
    note = f"; {sensor.note}" if sensor.note and reading.value is not None else ""
    return f"{said}{scope}{note}"


# --- for a program


def _as_json(survey: Survey, sensors: list[Sensor]) -> str:
    board = {**vars(survey.board), "features": sorted(survey.board.features)}
    each = [{"group": s.group, "name": s.name, **_record(s.reading), "note": s.note} for s in sensors]
    return json.dumps({"board": board, "sensors": each, "missing": survey.missing(sensors)})


def _record(reading: Reading) -> dict[str, Any]:
    reason = None if reading.reason is None else str(reading.reason)
    return {**vars(reading), "quality": str(reading.quality), "reason": reason}


# --- an external meter


def _print_phases(meter: Path, phases: Path | None, offset: float, *, as_json: bool) -> None:
    if phases is None:
        raise WrongUsage("--meter needs --phases: give a file with a line NAME,START,END per phase")
    recorded = ExternalMeter.load(meter, offset)
    rows = [(name, recorded.energy(start, end)) for name, start, end in load_phases(phases)]
    if as_json:
        print(json.dumps([{"name": name, **vars(energy), "quality": str(energy.quality)} for name, energy in rows]))
        return
    for name, energy in rows:
        joules = f"{energy.joules:.2f} J" if energy.joules is not None else "-"
        why = f"; {energy.reason}" if energy.reason else ""
        print(f"{name:<20}  {joules:>12}  {energy.quality}, {energy.coverage:.0%} of {energy.seconds:.1f} s{why}")


COMMAND = Command("sparrow devices", "Show this device's board, power and conditions.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
