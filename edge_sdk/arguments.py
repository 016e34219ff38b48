"""Argument types and checks that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sparrow.command_line.command import Parser, WrongUsage
from sparrow.command_line.options import add_help_settings
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.fields import NAME_PATTERN
from sparrow.protocol.ranges import Ranges, read_ranges
from sparrow.protocol.settings import FederationSettings

from .errors import BadArgument

MIB = 2**20


def budget(text: str) -> float:
    """Parse a budget: share of each layer's neurons to train, in (0, 1]."""
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")


def count(text: str) -> int:
    """Parse a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")


def natural(text: str) -> int:
    """Parse a whole number of 0 or more."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")


def mebibytes(text: str) -> int:
    """Parse a number of MiB and return bytes."""
    return count(text) * MIB


def read_setting(text: str) -> tuple[str, str]:
    """Parse ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give a setting as KEY=VALUE; --help-settings lists them")
    return key.strip().replace("-", "_"), value.strip()


def add_pairs(parser: argparse._ActionsContainer, option: str, meaning: str) -> None:
    """Add a repeatable option that takes KEY=VALUE."""
    parser.add_argument(option, type=read_setting, action="append", default=[], metavar="KEY=VALUE", help=meaning)


def add_settings(parser: Parser, more: str = "") -> None:
    """Add the arguments KEY=VALUE, see ``settings_of``, and ``--help-settings``. more: end of the help text."""
    meaning = f"settings of the federation or its method, such as rounds=50{more}"
    parser.add_argument("settings", nargs="*", type=read_setting, metavar="KEY=VALUE", help=meaning)
    parser.settings = FederationSettings.model_fields
    add_help_settings(parser, FederationSettings, "all settings")


def settings_of(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return fields of ``FederationSettings``. Raises WrongUsage if a setting occurs twice."""
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise WrongUsage(f"{name} is set twice; set it once")
        found[name] = value
    fields = FederationSettings.model_fields.keys() - {"method_settings"}
    common: dict[str, Any] = {name: value for name, value in found.items() if name in fields}
    own = {name: value for name, value in found.items() if name not in fields}
    return {**common, "method_settings": own} if own else common


def add_federation(parser: argparse.ArgumentParser, *, optional: str | None = None) -> None:
    """Add the argument FEDERATION. optional: its help text if it may be omitted."""
    parser.add_argument(
        "federation",
        type=federation,
        nargs=None if optional is None else "?",
        metavar="FEDERATION",
        help=optional or "the federation's name",
    )


def add_federation_to_join(parser: argparse.ArgumentParser, default: str | None = "default") -> None:
    """Add the option --federation. default: its value if it is left out."""
    parser.add_argument(
        "--federation",
        type=federation,
        default=default,
        metavar="NAME",
        help="federation to join (default: default)",
    )


def federation(text: str) -> str:
    """Parse a federation's name."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is an address; give it as --server {text}")
    try:
        check_federation_name(text)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def check_federation_name(name: object) -> None:
    """Raise BadArgument unless ``name`` is a valid federation name."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise BadArgument(
            f"{name!r} cannot be a federation's name; use up to 64 letters, digits, dots, dashes and underscores, "
            f"and begin with a letter or digit"
        )


def check_ranges(texts: Iterable[str], argument: str) -> Ranges:
    """Parse ranges of settings such as ``cohort>=10``. Raises BadArgument, naming ``argument``."""
    try:
        return read_ranges(texts)
    except ProtocolError as error:
        raise BadArgument(f"{argument}: {error}") from None
