"""``sparrow device``: list, inspect, revoke and remove the devices of a federation."""

from __future__ import annotations

import argparse
import json

from edge_sdk.arguments import add_federation, read_setting
from edge_sdk.device.transport import Transport
from edge_sdk.errors import NotFound

from .command_line.command import Command, Parser
from .command_line.nearest import nearest
from .command_line.options import add_yes, sure
from .command_line.table import moment, percent, printable, table
from .operating import add_coordinator, connected
from .protocol.messages import ChangeDevice, DeviceHistory, DeviceInfo, Doing, PauseReason

SHOWN = 20
"""Number of work items that ``show`` prints."""


def _options(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in {
        "list": "list the devices of a federation",
        "show": "show a device's work, costs and failures",
        "tag": "set a device's tags, in place of its own; KEY= gives the device's own back",
        "revoke": "revoke a device's token permanently",
        "remove": "revoke a device's token permanently, and remove the device from lists and counts",
    }.items():
        part = parts.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_federation(part)
        if name != "list":
            part.add_argument("device", metavar="DEVICE", help="the device's name")
        if name == "list":
            part.add_argument("--where", default="", metavar="TAGS", help="by tags, such as 'board=orin and site!=lab'")
        if name == "tag":
            part.add_argument("tags", nargs="+", type=read_setting, metavar="KEY=VALUE", help="such as board=orin")
        if name in ("revoke", "remove"):
            add_yes(part)
        add_coordinator(part)


def _run(options: argparse.Namespace) -> None:
    with connected(options) as transport:
        # if it does not exist, the error lists the federations
        transport.federation(options.federation)
        where = options.where if options.command == "list" else ""
        devices = transport.devices(options.federation, where)
        if options.command == "list":
            found = [each.model_dump(mode="json") for each in devices]
            none = f"no devices with {where}" if where else "no devices yet"
            print(json.dumps(found) if options.json else as_table(devices) if devices else none)
            return
        device = _named(devices, options.device)
        if options.command == "revoke":
            _revoke(options, transport, device)
            return
        if options.command == "remove":
            _remove(options, transport, device)
            return
        if options.command == "tag":
            _tag(options, transport, device)
            return
        history = transport.device(device.device_id)
        print(history.model_dump_json() if options.json else describe(history))


def _named(devices: list[DeviceInfo], name: str) -> DeviceInfo:
    found = sorted((each for each in devices if each.name == name), key=lambda each: each.status == "revoked")
    if not found:
        raise NotFound(404, f"there is no device {name!r}{nearest(name, [each.name for each in devices])}")
    return found[0]


def _revoke(options: argparse.Namespace, transport: Transport, device: DeviceInfo) -> None:
    sure(options, f"Revoke {device.name}'s token permanently?", f"this would revoke {device.name}'s token permanently")
    transport.change_device(device.device_id, ChangeDevice(revoked=True))
    print(json.dumps({"revoked": device.device_id}) if options.json else f"device {printable(device.name)} is revoked")


def _remove(options: argparse.Namespace, transport: Transport, device: DeviceInfo) -> None:
    sure(
        options,
        f"Revoke {device.name}'s token permanently, and remove it from lists and counts?",
        f"this would revoke {device.name}'s token permanently and remove it from lists",
    )
    transport.remove_device(device.device_id)
    print(json.dumps({"removed": device.device_id}) if options.json else f"device {printable(device.name)} is removed")


def _tag(options: argparse.Namespace, transport: Transport, device: DeviceInfo) -> None:
    change = ChangeDevice(set_tags={key: value or None for key, value in options.tags})
    transport.change_device(device.device_id, change)
    after = transport.device(device.device_id).device
    print(json.dumps(after.tags) if options.json else f"{printable(after.name)}: {tags_of(after) or 'no tags'}")


def tags_of(device: DeviceInfo) -> str:
    """Return a device's tags in one line, such as ``board=orin site=lab``."""
    return " ".join(f"{key}={value}" for key, value in sorted(device.tags.items()))


def as_table(devices: list[DeviceInfo]) -> str:
    """Return a table of devices."""
    head = ("device", "doing", "budget", "accuracy", "seconds", "board", "tags", "last seen", "failure")
    rows = [
        (
            device.name,
            doing(device),
            f"{device.budget:g}",
            _shown_percent(device.accuracy),
            _shown(device.seconds, ".1f"),
            device.profile.board[:30] or "-",
            tags_of(device) or "-",
            moment(device.seen_at),
            "-" if device.failure is None else device.failure.reason[:80],
        )
        for device in devices
    ]
    return table(head, rows)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shown_percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


PAUSED = {
    PauseReason.charging: "not charging",
    PauseReason.battery: "battery low",
    PauseReason.heat: "too hot",
    PauseReason.throttled: "processor throttled",
    PauseReason.power: "not on mains",
    PauseReason.network: "metered network",
    PauseReason.load: "other programs need the processor",
    PauseReason.memory: "memory short",
    PauseReason.storage: "disk full",
    PauseReason.hours: "outside its hours",
    PauseReason.energy: "daily energy used up",
}
"""Reason for a pause -> description."""


def doing(device: DeviceInfo) -> str:
    """Return a device's activity, or the reason why it does not train, as text."""
    if device.doing is Doing.stopped:
        return f"stopped in {device.stopped_round}"
    if device.doing is Doing.paused and device.paused is not None:
        return f"paused: {PAUSED[device.paused]}"
    if device.doing is Doing.untrained:
        return "trained nothing"
    if device.doing is Doing.not_joined:
        return "could not join"
    return str(device.doing.value).replace("_", " ")


def describe(history: DeviceHistory) -> str:
    """Return a device's properties, last failure and work as text."""
    device = history.device
    about = {
        "federation": history.federation,
        "doing": doing(device),
        "budget": f"{device.budget:g}" + (f", limited by {device.limited_by.value}" if device.limited_by else ""),
        "board": device.profile.board or "unknown",
        "system": device.profile.system or "unknown",
        "tags": tags_of(device) or "none",
        "enrolled": moment(device.enrolled_at),
        "last seen": moment(device.seen_at),
        "exported": "yes" if device.exported else "no",
        "refused": f"{device.refusals} in a row",
        "moved": f"{device.everything.bytes_up:,} B up, {device.everything.bytes_down:,} B down",
    }
    parts = [table((device.name, ""), list(about.items()))]
    parts += [printable(f"data: {text}") for text in device.profile.data_warnings]
    if (failure := device.failure) is not None:
        work = f" ({failure.kind.value}, round {failure.round})" if failure.kind else ""
        parts.append(printable(f"failing since {moment(failure.at)}{work}: {failure.reason}"))

    rows = [
        (
            str(each.round),
            each.kind.value,
            each.status + (f": {each.reason}" if each.reason else ""),
            _shown(each.loss, ".3f"),
            _shown_percent(each.accuracy if each.accuracy is not None else each.accuracy_global),
            _shown(each.seconds, ".1f"),
            _shown(each.bytes_up, ","),
            _shown(each.bytes_down, ","),
            _shown(each.joules, ".1f"),
        )
        for each in history.work[:SHOWN]
    ]
    head = ("round", "work", "outcome", "loss", "accuracy", "seconds", "bytes up", "bytes down", "joules")
    parts.append(table(head, rows) if rows else "no work yet")
    return "\n\n".join(parts)


COMMAND = Command(
    "sparrow device",
    "List, inspect, tag, revoke and remove the devices of a federation.",
    _options,
    _run,
    epilog="Set SPARROW_ADMIN_TOKEN to the admin token if the coordinator requires one.",
)
