"""``sparrow federation``: list, show, create, control and delete the federations of a coordinator."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from edge_sdk.arguments import add_federation, add_settings, read_setting, settings_of
from edge_sdk.device.transport import Transport
from edge_sdk.publish import read_settings

from .command_line.command import Command, Parser, WrongUsage
from .command_line.faults import faults
from .command_line.options import add_yes, sure
from .command_line.table import printable, table
from .operating import add_coordinator, connected
from .protocol.messages import ChangeFederation, CreateFederation, FederationInfo, FederationStatus
from .protocol.settings import FederationSettings

STEERING = {
    "pause": "start no further round",
    "resume": "continue after a pause",
    "stop": "end a federation; its devices export their models",
    "reopen": "continue after the end; set more rounds first",
}
"""Commands that only need a federation's name, with their help texts."""

NONE = "no federations; create one with sparrow federation create NAME --task digits"

CHANGEABLE = tuple(name for name in ChangeFederation.model_fields if name not in ("action", "model_version"))
"""Settings of an existing federation that can be changed."""


def _options(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def part(name: str, text: str, *, named: bool = True) -> Parser:
        found: Parser = parts.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if named:
            add_federation(found)
        add_coordinator(found)
        return found

    part("list", "list all federations", named=False)
    part("show", "show a federation and its settings")
    create = part("create", "create a federation of a built-in task; for your own model see sparrow publish")
    create.add_argument("--task", required=True, help="a task installed at the coordinator, such as digits")
    add_settings(create)
    for name, text in STEERING.items():
        steer = part(name, text)
        if name == "stop":
            add_yes(steer)
    change = part("set", f"change {', '.join(CHANGEABLE[:-1])} or {CHANGEABLE[-1]}")
    change.add_argument("settings", nargs="*", type=read_setting, metavar="KEY=VALUE", help="such as rounds=80")
    back = part("rollback", "return to an earlier version of the global model")
    back.add_argument("version", type=_version, metavar="VERSION", help="version from sparrow model list, or best")
    add_yes(back)
    add_yes(part("delete", "delete a federation permanently, with its records, devices and models"))


def _run(options: argparse.Namespace) -> None:
    with connected(options) as transport:
        found = _do(options, transport)
        if options.json and found is not None:
            one = found.model_dump(mode="json") if isinstance(found, FederationInfo) else None
            print(
                json.dumps(one or [each.model_dump(mode="json") for each in found if isinstance(each, FederationInfo)])
            )
        elif isinstance(found, FederationInfo):
            more = ""
            if options.command == "rollback":
                more = f", {_which(found)}"
            elif options.command == "set":
                more = f"; {_changed(found, dict(options.settings))}"
            print(describe(found) if options.command == "show" else f"{_line(found)}{more}")
        elif found is not None:
            print(as_table(found) if found else NONE)


def _do(options: argparse.Namespace, transport: Transport) -> list[FederationInfo] | FederationInfo | None:
    match options.command:
        case "list":
            return transport.federations()
        case "show":
            return transport.federation(options.federation)
        case "create":
            return _create(options, transport)
        case "delete":
            _delete(options, transport)
            return None
        case "set":
            if not options.settings:
                raise WrongUsage("give at least one setting, such as rounds=80")
            return _change(transport, options.federation, dict(options.settings))
        case "rollback":
            return _roll_back(options, transport)
        case "stop":
            info = transport.federation(options.federation)
            sure(
                options,
                f"Stop {info.name} and its devices after round {info.round} of {info.rounds}?",
                f"this would stop {info.name} after round {info.round} of {info.rounds}",
            )
    return _change(transport, options.federation, {"action": options.command})


def _create(options: argparse.Namespace, transport: Transport) -> FederationInfo:
    settings = read_settings(settings_of(options.settings))
    wanted = CreateFederation(name=options.federation, task=options.task, settings=settings)
    return transport.create_federation(wanted.as_given().encode(), "application/json")


def _change(transport: Transport, name: str, what: dict[str, Any]) -> FederationInfo:
    try:
        change = ChangeFederation.model_validate(what)
    except ValidationError as error:
        raise WrongUsage(
            f"{_faults(error, CHANGEABLE)}; these settings can be changed: {', '.join(CHANGEABLE)}"
        ) from None
    # if it does not exist, the error lists the federations
    transport.federation(name)
    return transport.change_federation(name, change)


def _faults(error: ValidationError, known: Iterable[str]) -> str:
    return "; ".join(f"{name}: {text}" if name else text for name, text in faults(error, known))


BEST = "best"


def _version(text: str) -> int | None:
    """Return the version, or None for the best one."""
    if text == BEST:
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from sparrow model list, or {BEST}")
    return int(text)


def _roll_back(options: argparse.Namespace, transport: Transport) -> FederationInfo:
    info = transport.federation(options.federation)
    version = _best(transport, info.name) if options.version is None else options.version
    # The coordinator may delete it while a person thinks.
    transport.pin_model(info.name, version)
    sure(
        options,
        f"Return from model {info.model_version} of {info.name} to {version}, undoing the rounds between?",
        f"this would undo the rounds of {info.name} since model {version}",
    )
    return _change(transport, info.name, {"action": "rollback", "model_version": version})


def _best(transport: Transport, name: str) -> int:
    best = next((each for each in transport.models(name) if each.best), None)
    if best is None:
        raise WrongUsage(f"best: no device has evaluated a stored model; choose one from sparrow model list {name}")
    return best.version


def _which(info: FederationInfo) -> str:
    """Return which model a federation has after a rollback."""
    if info.rollback_version is not None:
        return f"model {info.model_version}; goes back to model {info.rollback_version} when the open round has closed"
    return f"model {info.model_version}"


def _changed(info: FederationInfo, names: Iterable[str]) -> str:
    """Return the settings of these names as arguments of a shell."""
    settings = info.settings.model_dump(mode="json")
    values = {name: "" if settings[name] is None else settings[name] for name in names}
    return printable(" ".join(shlex.quote(f"{name}={value}") for name, value in values.items()))


def _delete(options: argparse.Namespace, transport: Transport) -> None:
    info = transport.federation(options.federation)
    content = f"{info.devices} devices, {info.round} rounds"
    sure(
        options,
        f"Delete {info.name}, its {content} and all its models permanently?",
        f"this would delete {info.name} permanently",
    )
    transport.delete_federation(info.name)
    text = f"federation {printable(info.name)} is deleted: {content}"
    print(json.dumps({"deleted": info.name}) if options.json else text)


def _line(info: FederationInfo) -> str:
    reason = f" ({info.reason})" if info.reason else ""
    return printable(f"{info.name}: {info.status.value}{reason}, round {info.round} of {info.rounds}")


def describe(info: FederationInfo) -> str:
    """Return a federation's state, warnings and settings as text; changed settings come first."""
    usual = FederationSettings().model_dump(mode="json")
    settings = info.settings.model_dump(mode="json")
    changed = {name: value for name, value in settings.items() if usual[name] != value}
    about = {
        "status": _line(info).partition(": ")[2],
        "method": info.method,
        "task": info.task,
        "devices": f"{info.devices}, {info.devices_stopped} stopped early",
        "parameters": f"{info.parameters:,}",
        "model version": info.model_version,
    }
    notes = [text for text in (info.waiting_for, info.warning, info.notice) if text]
    parts = [table((info.name, ""), [(name, str(value)) for name, value in about.items()])]
    parts += [printable(text) for text in notes]
    unchanged = {name: value for name, value in settings.items() if name not in changed}
    for head, chosen in (("settings", changed), ("defaults", unchanged)):
        if chosen:
            parts.append(table((head, ""), [(name, json.dumps(value)) for name, value in chosen.items()]))
    if info.status in (FederationStatus.finished, FederationStatus.stopped):
        parts.append(f"download its model: sparrow model download {info.name}")
    return "\n\n".join(parts)


def as_table(found: list[FederationInfo]) -> str:
    """Return a table of federations."""
    head = ("federation", "status", "method", "task", "round", "devices", "stopped", "parameters")
    rows = [
        (
            info.name,
            info.status.value + (f" ({info.reason})" if info.reason else ""),
            info.method,
            info.task,
            f"{info.round} of {info.rounds}",
            str(info.devices),
            str(info.devices_stopped),
            f"{info.parameters:,}",
        )
        for info in found
    ]
    return table(head, rows)


COMMAND = Command(
    "sparrow federation",
    "List, show, create, control and delete federations.",
    _options,
    _run,
    epilog="Set SPARROW_ADMIN_TOKEN to the admin token if the coordinator requires one.",
)
