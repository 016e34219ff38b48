"""Options shared by commands, and the question before an irreversible action."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .command import WrongUsage, drop_output

SERVER_VARIABLE = "SPARROW_SERVER"
LOOPBACK = "http://127.0.0.1:8000"


def default_server() -> str:
    """Return the default address of the coordinator: SPARROW_SERVER, or this machine."""
    return os.environ.get(SERVER_VARIABLE) or LOOPBACK


def add_server(parser: argparse._ActionsContainer) -> None:
    """Add the option ``--server``."""
    parser.add_argument(
        "--server",
        default=default_server(),
        metavar="URL",
        help=f"the coordinator's address (default: {SERVER_VARIABLE}, or {LOOPBACK})",
    )


def add_wait(parser: argparse.ArgumentParser, default: float | None = 0.0) -> None:
    """Add the option ``--wait``: seconds to wait for a silent coordinator. default: None for no limit."""
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=default,
        metavar="SECONDS",
        help=f"give up after this time without an answer (default: {'never' if default is None else f'{default:g}'})",
    )


def add_skip_unreadable(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--skip-unreadable``; see ``with_skipped``."""
    parser.add_argument("--skip-unreadable", action="store_true", help="skip pictures and sounds that cannot be read")


def with_skipped(data: str | None, options: argparse.Namespace) -> str | None:
    """Return the value of ``--data``, extended if ``--skip-unreadable`` is given."""
    if not options.skip_unreadable:
        return data
    if data is None:
        raise WrongUsage("--skip-unreadable needs your own files: add --data")
    return f"{data},unreadable=skip"


def add_json(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the option ``--json``. more: end of its help text."""
    parser.add_argument("--json", action="store_true", help=f"print the result as one JSON document{more}")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--yes`` for commands that call ``sure``."""
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def sure(options: argparse.Namespace, question: str, otherwise: str) -> None:
    """Ask for confirmation unless ``--yes`` is given.

    otherwise: the effect, for the message without a terminal. Raises WrongUsage without a terminal, KeyboardInterrupt
    for an answer other than yes.
    """
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"{otherwise}; to confirm without a terminal, give --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt("nothing was changed")


def add_help_settings(parser: argparse._ActionsContainer, model: Any, what: str, prefix: str = "") -> None:
    """Add the option ``--help-settings``, which prints settings and exits.

    model: a pydantic model. what: their name in the help text. prefix: prefix of their environment variables.
    """

    class Print(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            try:
                print(_described(model, prefix), flush=True)
            # the reader of a pipe closed it
            except BrokenPipeError:
                drop_output()
            parser.exit()

    parser.add_argument("--help-settings", action=Print, nargs=0, help=f"print {what} with defaults and descriptions")


def _described(model: Any, prefix: str) -> str:
    """Return the name, default and description of each setting as text."""
    parts = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        # nested settings: only those that differ from their own defaults
        if hasattr(default, "model_dump_json"):
            default = default.model_dump_json(exclude_defaults=True)
        shown = "unset" if default is None else default if str(default) else "empty"
        parts.append(f"{prefix}{name.upper() if prefix else name} ({shown})")
        parts.append(textwrap.fill(field.description, 100, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(parts)


def coloured() -> bool:
    """Return True if standard output is a terminal and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")
