"""``sparrow track FEDERATION``: write a federation's rounds to TensorBoard or MLflow, live or afterwards.

Written rounds are read back from the tracker, so the command can be stopped and repeated at any time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

from edge_sdk.arguments import add_federation
from edge_sdk.device.transport import Transport

from .command_line.command import Command, Parser, WrongUsage
from .command_line.options import add_json, add_server, add_wait
from .operating import connected
from .protocol.messages import FederationStatus, RoundRecord
from .trackers import MLflow, TensorBoard, Tracker
from .transport import tls

__all__ = ["curves", "follow"]

EVERY_SECONDS = 5.0


def follow(
    transport: Transport,
    federation: str,
    written: Collection[int] = (),
    *,
    every_seconds: float = EVERY_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RoundRecord]:
    """Yield complete records of rounds not yet ``written``, in order, until the federation ends. Raises SdkError if a
    call fails.

    A record is complete if its round has closed, a later round exists or the federation has ended, no device has open
    work of the round, and the record has not changed since the last poll: a device reports the costs of an upload with
    its next call.
    """
    done = set(written)
    before: dict[int, RoundRecord] = {}
    while True:
        over = transport.federation(federation).status in (FederationStatus.finished, FederationStatus.stopped)
        work, _ = transport.open_work(federation, 0, "")
        asked = {each.round for each in work.assignments} if work else set()
        records = transport.rounds(federation)
        left = [record for record in records if record.round not in done and record.status == "closed"]
        for record in left:
            followed = over or record.round < records[-1].round
            # later rounds wait for this one, to keep the order
            if not followed or record.round in asked or before.get(record.round) != record:
                break
            done.add(record.round)
            yield record
        before = {record.round: record for record in left if record.round not in done}
        if over and not before:
            return
        sleep(every_seconds)


def curves(record: RoundRecord) -> dict[str, float]:
    """Return the metrics of a round by name, except unknown values.

    Accuracies (in [0, 1]) and losses are means over devices; bytes, joules and the seconds of a phase are sums over
    devices. ``bytes/evaluation`` counts both directions and is not part of the others.
    """
    phases = {"download": record.download, "train": record.train, "upload": record.upload}
    found = {
        "accuracy/personal": record.accuracy_personal,
        "accuracy/personal_decile": record.accuracy_personal_decile,
        "accuracy/global": record.accuracy_global,
        "loss/train": record.train_loss,
        "loss/personal": record.loss_personal,
        "loss/global": record.loss_global,
        "bytes/down": record.bytes_down,
        "bytes/up": record.bytes_up,
        "bytes/evaluation": record.evaluation_bytes_down + record.evaluation_bytes_up,
        "joules/measured": sum(phase.joules_measured for phase in phases.values()) or None,
        "joules/estimated": sum(phase.joules_estimated for phase in phases.values()) or None,
        "seconds/round": record.seconds,
        **{f"seconds/{name}": phase.seconds for name, phase in phases.items()},
        "devices/asked": len(record.cohort),
        "devices/updates": record.updates,
        "devices/stopped": len(record.stopped),
        "privacy/epsilon": record.privacy.epsilon if record.privacy else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _options(parser: Parser) -> None:
    add_federation(parser)
    parser.add_argument("--tensorboard", metavar="DIR", help="write event files to this folder")
    parser.add_argument(
        "--mlflow", metavar="URI", help="write to this tracking server or store: http://..., sqlite:///..."
    )
    add_json(parser, ", one line per round")
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_SECONDS,
        metavar="SECONDS",
        help="interval between polls (default: %(default)g)",
    )
    add_server(parser)
    add_wait(parser, None)
    tls.add_options(parser)


def _run(options: argparse.Namespace) -> None:
    if not (options.tensorboard or options.mlflow or options.json):
        raise WrongUsage("no output is chosen: give --tensorboard DIR, --mlflow URI or --json")
    if not options.every > 0:
        raise WrongUsage(f"--every {options.every}: use seconds above 0")
    with ExitStack() as stack:
        transport = stack.enter_context(connected(options, ("observer", "admin"), _say_waiting))
        info = transport.federation(options.federation)
        trackers: list[Tracker] = []
        if options.tensorboard:
            trackers.append(TensorBoard(options.tensorboard, info))
        if options.mlflow:
            trackers.append(MLflow(options.mlflow, info))
        for tracker in trackers:
            stack.callback(tracker.close)
            sys.stderr.write(f"{tracker.where}\n")
        written = [tracker.written() for tracker in trackers]
        everywhere = set.intersection(*written) if written and not options.json else set()
        rounds = follow(transport, options.federation, everywhere, every_seconds=options.every, sleep=time.sleep)
        for record in rounds:
            found = curves(record)
            for tracker, known in zip(trackers, written, strict=True):
                if record.round not in known:
                    tracker.write(record.round, found, record.closed_at)
            if options.json:
                print(json.dumps({"round": record.round, "closed_at": record.closed_at, **found}), flush=True)
        for tracker in trackers:
            tracker.finish()


def _say_waiting(reason: str, seconds: float) -> None:
    sys.stderr.write(f"sparrow track: {reason}; retrying in {seconds:.0f} s\n")


COMMAND = Command(
    "sparrow track",
    "Write a federation's rounds to TensorBoard or MLflow, while it runs or afterwards.",
    _options,
    _run,
    epilog="Install both with pip install 'sparrow-fl[tracking]'. Set SPARROW_OBSERVER_TOKEN to the observer token if "
    "the coordinator requires one.",
)
