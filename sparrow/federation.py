"""``sparrow federation``: list, look at, create, steer and delete the federations of a running coordinator.

sparrow federation list
sparrow federation create lab method=fedspu rounds=50 --task digits
sparrow federation set lab rounds=80 cohort=20
sparrow federation rollback lab 12
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from edge_sdk.arguments import add_federation, read_setting
from edge_sdk.device.transport import Transport

from .command_line.command import Command, Parser, WrongUsage
from .command_line.faults import faults
from .command_line.options import add_help_settings, add_yes, sure
from .command_line.table import printable, table
from .operating import add_coordinator, connected
from .protocol.messages import ChangeFederation, CreateFederation, FederationInfo, FederationStatus
from .protocol.settings import FederationSettings

STEERING = {
    "pause": "open no further round",
    "resume": "go on after a pause",
    "stop": "end it; its devices export what they have",
    "reopen": "go on after its end; set more rounds first",
}
"""Commands that need no more than a federation's name, and what they do."""

NONE = "no federations; sparrow federation create NAME --task digits makes one"

CHANGEABLE = tuple(name for name in ChangeFederation.model_fields if name not in ("action", "model_version"))
"""Settings that can be changed later."""


def _options(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def part(name: str, text: str, *, named: bool = True) -> argparse.ArgumentParser:
        found: argparse.ArgumentParser = parts.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if named:
            add_federation(found)
        add_coordinator(found)
        return found

    part("list", "all federations", named=False)
    part("show", "one federation, with all its settings")
    create = part("create", "a federation of a built-in task; sparrow publish takes your own model")
    create.add_argument("--task", required=True, help="a task that the coordinator knows, such as digits")
    _add_settings(create, "its settings, such as rounds=50")
    add_help_settings(create, FederationSettings, "all settings")
    for name, text in STEERING.items():
        steer = part(name, text)
        if name == "stop":
            add_yes(steer)
    _add_settings(part("set", f"change {', '.join(CHANGEABLE[:-1])} or {CHANGEABLE[-1]}"), "what to change: rounds=80")
    back = part("rollback", "go back to the global model of an earlier version")
    back.add_argument("version", type=int, metavar="VERSION", help="the version, as sparrow model list has it")
    add_yes(back)
    add_yes(part("delete", "delete it for good, with records, devices and models"))


def _add_settings(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("settings", nargs="*", type=read_setting, metavar="KEY=VALUE", help=text)


def _run(options: argparse.Namespace) -> None:
    with connected(options) as transport:
        found = _do(options, transport)
        if options.json and found is not None:
            one = found.model_dump(mode="json") if isinstance(found, FederationInfo) else None
            print(
                json.dumps(one or [each.model_dump(mode="json") for each in found if isinstance(each, FederationInfo)])
            )
        elif isinstance(found, FederationInfo):
            print(describe(found) if options.command == "show" else _line(found))
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
                raise WrongUsage("give what to change, such as rounds=80")
            return _change(transport, options.federation, dict(options.settings))
        case "rollback":
            return _roll_back(options, transport)
        case "stop":
            info = transport.federation(options.federation)
            sure(
                options,
                f"Stop {info.name} after round {info.round} of {info.rounds}? Its devices end",
                f"{info.name} would end after round {info.round} of {info.rounds}",
            )
    return _change(transport, options.federation, {"action": options.command})


def _create(options: argparse.Namespace, transport: Transport) -> FederationInfo:
    try:
        settings = FederationSettings.model_validate({name: _value(text) for name, text in options.settings})
    except ValidationError as error:
        raise WrongUsage(_faults(error, FederationSettings.model_fields)) from None
    wanted = CreateFederation(name=options.federation, task=options.task, settings=settings)
    return transport.create_federation(wanted.as_given().encode(), "application/json")


def _value(text: str) -> Any:
    """Return a setting's value: JSON where it is that, such as a table, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _change(transport: Transport, name: str, what: dict[str, Any]) -> FederationInfo:
    try:
        change = ChangeFederation.model_validate(what)
    except ValidationError as error:
        raise WrongUsage(f"{_faults(error, CHANGEABLE)}; what can be changed is {', '.join(CHANGEABLE)}") from None
    transport.federation(name)  # names the others where there is none of this name
    return transport.change_federation(name, change)


def _faults(error: ValidationError, known: Iterable[str]) -> str:
    return "; ".join(f"{name}: {text}" if name else text for name, text in faults(error, known))


def _roll_back(options: argparse.Namespace, transport: Transport) -> FederationInfo:
    info = transport.federation(options.federation)
    sure(
        options,
        f"Go back from model {info.model_version} of {info.name} to {options.version}? The rounds between are undone",
        f"the rounds of {info.name} since model {options.version} would be undone",
    )
    return _change(transport, info.name, {"action": "rollback", "model_version": options.version})


def _delete(options: argparse.Namespace, transport: Transport) -> None:
    info = transport.federation(options.federation)
    what = f"{info.devices} devices, {info.round} rounds"
    sure(options, f"Delete {info.name} for good, its {what} and all its models?", f"{info.name} would be gone for good")
    transport.delete_federation(info.name)
    print(
        json.dumps({"deleted": info.name}) if options.json else f"federation {printable(info.name)} is deleted: {what}"
    )


def _line(info: FederationInfo) -> str:
    where = f"round {info.round} of {info.rounds}"
    return printable(f"{info.name}: {info.status.value}{f' ({info.reason})' if info.reason else ''}, {where}")


def describe(info: FederationInfo) -> str:
    """Return a federation as text: how it is, what is wrong with it, and its settings, those that are not as usual
    first."""
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
    for head, chosen in (("settings", changed), ("as usual", {k: v for k, v in settings.items() if k not in changed})):
        if chosen:
            parts.append(table((head, ""), [(name, json.dumps(value)) for name, value in chosen.items()]))
    if info.status in (FederationStatus.finished, FederationStatus.stopped):
        parts.append(f"its model: sparrow model download {info.name}")
    return "\n\n".join(parts)


def as_table(found: list[FederationInfo]) -> str:
    """Return federations as a table."""
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
    "List, look at, create, steer and delete federations.",
    _options,
    _run,
    epilog="SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one.",
)
