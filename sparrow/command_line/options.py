"""Options that mean the same in every command: the coordinator's address, how long it is waited for, how the result is
printed; and the question before something that cannot be undone."""

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
    """Return the coordinator's address where none is given: that of SPARROW_SERVER, or of this machine."""
    return os.environ.get(SERVER_VARIABLE) or LOOPBACK


def add_server(parser: argparse._ActionsContainer) -> None:
    """Add the option ``--server``, the coordinator's address."""
    parser.add_argument(
        "--server",
        default=default_server(),
        metavar="URL",
        help=f"the coordinator's address (default: that of {SERVER_VARIABLE}, or {LOOPBACK})",
    )


def add_wait(parser: argparse.ArgumentParser, default: float | None = 0.0) -> None:
    """Add the option ``--wait``, which says how long a coordinator may be silent, s; a default of None: for ever."""
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=default,
        metavar="SECONDS",
        help=f"give up when it is silent this long (default: {'never' if default is None else f'{default:g}'})",
    )


def add_skip_unreadable(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--skip-unreadable``, for which ``with_skipped`` stands."""
    parser.add_argument(
        "--skip-unreadable", action="store_true", help="leave out pictures and sounds that cannot be read"
    )


def with_skipped(data: str | None, options: argparse.Namespace) -> str | None:
    """Return the text of ``--data`` with the reading option that ``--skip-unreadable`` asks for, if it was given."""
    if not options.skip_unreadable:
        return data
    if data is None:
        raise WrongUsage("--skip-unreadable is for files of your own: add --data")
    return f"{data},unreadable=skip"


def add_json(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the option ``--json``. more: what else there is to say of it."""
    parser.add_argument("--json", action="store_true", help=f"print the result as one JSON document{more}")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--yes``, for commands that ask by ``sure``."""
    parser.add_argument("--yes", action="store_true", help="do not ask")


def sure(options: argparse.Namespace, question: str, otherwise: str) -> None:
    """Have a person say yes, unless ``--yes`` is given.

    otherwise: what would happen, told where nobody can be asked. Raises WrongUsage there, KeyboardInterrupt for any
    other answer.
    """
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"{otherwise}, and nobody can be asked here: give --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt("nothing was changed")


def add_help_settings(parser: argparse._ActionsContainer, model: Any, what: str, prefix: str = "") -> None:
    """Add the option ``--help-settings``, which prints settings and ends.

    model: pydantic's model of them. what: whose they are. prefix: what their names begin with, in capitals, where they
    are environment variables.
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
            except BrokenPipeError:  # whoever read along has seen enough
                drop_output()
            parser.exit()

    parser.add_argument("--help-settings", action=Print, nargs=0, help=f"print {what} with defaults and meaning")


def _described(model: Any, prefix: str) -> str:
    """Return the settings of a model as text: name, default and meaning of each."""
    parts = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if hasattr(default, "model_dump_json"):  # settings within settings: those that are not as usual
            default = default.model_dump_json(exclude_defaults=True)
        shown = "unset" if default is None else default if str(default) else "empty"
        parts.append(f"{prefix}{name.upper() if prefix else name} ({shown})")
        parts.append(textwrap.fill(field.description, 100, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(parts)


def coloured() -> bool:
    """Return whether standard output may be coloured: it is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
