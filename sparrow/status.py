"""``sparrow status``: show the federations of a running coordinator as tables or JSON.

    sparrow status lab --server http://192.168.1.5:8000 --join-link

prints the link for phones to join a federation, and its QR code.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import segno

from edge_sdk.arguments import add_federation
from edge_sdk.device.connection import token_of
from edge_sdk.device.transport import Transport

from .command_line.command import Command, Parser, WrongUsage
from .command_line.options import add_json, add_server, add_wait, coloured
from .command_line.table import moment, percent, printable, table
from .device import as_table as as_table_of_devices
from .federation import NONE, as_table
from .protocol.addresses import in_network, means_caller
from .protocol.messages import DeviceInfo, FederationInfo, FederationStatus, MakeJoinLink, OpenWork, RoundRecord
from .protocol.overview import Overview
from .protocol.signatures import fingerprint
from .transport import connect, httpx, tls

WATCH_SECONDS = 2.0
ROUNDS_SHOWN = 10
DEVICES_SHOWN = 20
CLEAR = "\033[2J\033[H"
WHITE_ON_BLACK = "\033[97;40m"
USUAL = "\033[0m"
QUIET = 2
"""Margin around a QR code, in modules: small enough for a terminal of 24 lines."""


@dataclass(frozen=True)
class Status:
    """The state of a coordinator."""

    server: str
    # Reason why it is not ready.
    trouble: str | None
    federations: list[FederationInfo]
    # State of the requested federation.
    overview: Overview | None = None
    rounds: list[RoundRecord] | None = None
    devices: list[DeviceInfo] | None = None
    # Open work by federation, of those that wait for devices.
    open_work: dict[str, OpenWork] = field(default_factory=dict)


def look(server: str, transport: Transport, federation: str | None = None) -> Status:
    """Return the coordinator's state. Raises SdkError if a call fails."""
    overview = rounds = devices = None
    if federation is None:
        found = transport.federations()
    else:
        found = [transport.federation(federation)]
        overview = transport.overview(federation)
        rounds = transport.rounds(federation)
        devices = transport.devices(federation)
    running = [info.name for info in found if info.status is FederationStatus.running]
    work = {name: transport.open_work(name, 0, "")[0] for name in running}
    awaited = {name: each for name, each in work.items() if each is not None and each.assignments}
    return Status(server, transport.trouble(), found, overview, rounds, devices, awaited)


def as_json(status: Status) -> str:
    """Return the state as JSON, in the coordinator's messages (docs/contract.md)."""
    found: dict[str, Any] = {"server": status.server, "ready": status.trouble is None, "trouble": status.trouble}
    for name in ("federations", "rounds", "devices"):
        messages = getattr(status, name)
        if messages is not None:
            found[name] = [message.model_dump(mode="json") for message in messages]
    if status.overview is not None:
        found["notices"] = [notice.model_dump(mode="json") for notice in status.overview.notices]
        found["ends_at"] = status.overview.ends_at
    found["open_work"] = {name: work.model_dump(mode="json") for name, work in status.open_work.items()}
    return json.dumps(found)


def as_text(status: Status) -> str:
    """Return the state as tables, with the newest rounds and devices."""
    parts = [f"{status.server}: {'ready' if status.trouble is None else f'not ready: {status.trouble}'}"]
    parts.append(as_table(status.federations) if status.federations else NONE)
    for info in status.federations:
        parts += [printable(f"{info.name}: {text}") for text in (info.waiting_for, info.warning) if text]
    publisher = status.federations[0].publisher if len(status.federations) == 1 else None
    if publisher is not None:
        parts.append(printable(f"{status.federations[0].name}: signed by {fingerprint(publisher)}"))
    if status.overview is not None:
        parts += _attention(status.overview)
    parts += [_awaited(name, work) for name, work in status.open_work.items()]
    if status.rounds:
        parts.append(_rounds(status.rounds))
    if status.rounds and status.devices:
        parts.append(_moved(status.federations[0], status.rounds, status.devices))
    if status.devices:
        parts.append(_devices(status.devices))
    return "\n\n".join(parts)


def _attention(overview: Overview) -> list[str]:
    """Return the notices with their remedies, and the expected end."""
    # notices on the method concern every federation
    found = [
        f"{notice.text}{f' (since {moment(notice.since)})' if notice.since else ''}. {notice.remedy or ''}".rstrip()
        for notice in overview.notices
        if notice.kind != "method"
    ]
    lines = [printable("needs attention: " + text) for text in found]
    if overview.ends_at:
        lines.append(f"ends by {moment(overview.ends_at)} if the remaining rounds take as long as the last ones")
    return lines


def _rounds(found: list[RoundRecord]) -> str:
    head = ("round", "status", "updates", "loss", "personal", "global", "up", "down", "seconds")
    rows = [
        (
            str(record.round),
            "undone" if record.undone else record.status,
            f"{record.updates} of {len(record.cohort)}",
            "-" if record.train_loss is None else f"{record.train_loss:.3f}",
            _percent(record.accuracy_personal),
            _percent(record.accuracy_global),
            f"{record.bytes_up:,} B",
            f"{record.bytes_down:,} B",
            "-" if record.seconds is None else f"{record.seconds:.1f}",
        )
        for record in found[-ROUNDS_SHOWN:]
    ]
    return table(head, rows)


def _awaited(federation: str, work: OpenWork) -> str:
    """Return a table of the devices that a federation waits for, longest silent first."""

    def past(then: str) -> str:
        passed = datetime.fromisoformat(work.at) - datetime.fromisoformat(then)
        return f"{max(0.0, passed.total_seconds()):.0f} s"

    silent = sorted(work.assignments, key=lambda each: each.heard_at)
    rows = [
        (each.device, each.kind.value, str(each.round), past(each.since), f"{past(each.heard_at)} ago")
        for each in silent[:DEVICES_SHOWN]
    ]
    more = len(silent) - len(rows)
    head = (f"{federation} waits for", "asked to", "round", "since", "last heard")
    return table(head, rows) + (f"\nand {more:,} more: list all with --json" if more else "")


def _devices(found: list[DeviceInfo]) -> str:
    newest = sorted(found, key=lambda device: device.seen_at, reverse=True)
    more = len(found) - DEVICES_SHOWN if len(found) > DEVICES_SHOWN else 0
    return as_table_of_devices(newest[:DEVICES_SHOWN]) + (f"\nand {more:,} more: list all with --json" if more else "")


def _moved(info: FederationInfo, rounds: list[RoundRecord], devices: list[DeviceInfo]) -> str:
    training = [(record.bytes_up, record.bytes_down) for record in rounds]
    everything = [(device.everything.bytes_up, device.everything.bytes_down) for device in devices]
    up, down = (sum(column) for column in zip(*training, strict=True))
    # A device reports its total with its next call; until then the training part is a lower bound.
    all_up, all_down = (
        max(sum(column), part) for column, part in zip(zip(*everything, strict=True), (up, down), strict=True)
    )
    return (
        f"training moved {up:,} B up and {down:,} B down; all calls {all_up + info.published_bytes:,} B up and "
        f"{all_down:,} B down, including {info.published_bytes:,} B of publication"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


def check_reachable(address: httpx.URL, federation: str) -> None:
    """Raise WrongUsage for a loopback address, which phones cannot reach."""
    if not means_caller(address.host):
        return
    here = in_network()
    other = "https://HOST" if here is None else str(address.copy_with(host=here)).rstrip("/")
    wanted = "its name or address on the network" if here is None else "this machine's address on the network"
    raise WrongUsage(
        f"phones cannot reach {address.host}: give {wanted} (and start the coordinator with sparrow serve --host "
        f"0.0.0.0): sparrow status {federation} --server {other} --join-link"
    )


def drawn(link: str, *, coloured: bool) -> str:
    """Return a QR code for a terminal, light on dark. coloured: set the colours instead of using the terminal's."""
    lines = io.StringIO()
    segno.make_qr(link).terminal(lines, border=QUIET, compact=True)
    before, after = (WHITE_ON_BLACK, USUAL) if coloured else ("", "")
    return "\n".join(f"{before}{line}{after}" for line in lines.getvalue().splitlines())


def _options(parser: Parser) -> None:
    add_federation(parser, optional="show only this one, with its rounds and devices")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"refresh at this interval (default: {WATCH_SECONDS:g})",
    )
    parser.add_argument(
        "--join-link",
        action="store_true",
        help="print the link for phones to join the federation, and its QR code",
    )
    add_server(parser)
    add_wait(parser)
    add_json(parser, "; with --watch one line per refresh")
    tls.add_options(parser)


def _run(options: argparse.Namespace) -> None:
    if options.watch is not None and not options.watch > 0:
        raise WrongUsage(f"--watch {options.watch}: use seconds above 0")
    if options.join_link and (options.federation is None or options.watch is not None):
        raise WrongUsage("--join-link needs one federation and no --watch: sparrow status FEDERATION --join-link")
    with connect(options.server, tls.from_options(options)) as client:
        transport = Transport(client, patience_seconds=options.wait)
        transport.token = token_of("observer", "admin")
        if options.join_link:
            check_reachable(client.base_url, options.federation)
            _print_link(transport, str(client.base_url), options.federation, as_document=options.json)
        else:
            _print_state(transport, options)


def _print_link(transport: Transport, server: str, federation: str, *, as_document: bool) -> None:
    """Print the link of a federation, and hints on stderr."""
    # if it does not exist, the error lists the federations
    name = transport.federation(federation).name
    found = transport.join_link(name, MakeJoinLink(server=server, token=token_of("enrolment")))
    for hint in found.hints:
        sys.stderr.write(f"sparrow status: {printable(hint)}\n")
    if as_document:
        print(json.dumps({"link": found.link}))
    else:
        print(f"{found.link}\n\n{drawn(found.link, coloured=coloured())}")


def _print_state(transport: Transport, options: argparse.Namespace) -> None:
    """Print the state of the coordinator, repeatedly with ``--watch``."""
    while True:
        status = look(options.server, transport, options.federation)
        fresh = CLEAR if options.watch is not None and not options.json and sys.stdout.isatty() else ""
        print(fresh + (as_json if options.json else as_text)(status), flush=True)
        if options.watch is None:
            return
        time.sleep(options.watch)


COMMAND = Command(
    "sparrow status",
    "Show the federations of a running coordinator.",
    _options,
    _run,
    epilog="Set SPARROW_OBSERVER_TOKEN to the observer token if the coordinator requires one, and "
    "SPARROW_ENROLMENT_TOKEN to the token for the link of --join-link.",
)
