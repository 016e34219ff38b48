"""``sparrow completion bash|zsh|fish``: print a script that completes commands, options and choices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shtab

from edge_sdk.device.trainable import CannotTrain

from .command_line.command import Command, Parser
from .main import COMMANDS, build
from .protocol.errors import MissingPart

SHELLS = ("bash", "zsh", "fish")


def parsers(name: str) -> Sequence[Parser]:
    """Return the complete parser of a command; empty if its packages are not installed."""
    if name == "completion":
        return (COMMAND.parser("sparrow completion"),)
    try:
        return (COMMANDS[name].load().parser(f"sparrow {name}"),)
    except (MissingPart, CannotTrain) as reason:
        sys.stderr.write(f"sparrow {name}: completed without its options: {reason}\n")
        return ()


def _options(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def _run(options: argparse.Namespace) -> None:
    print(shtab.complete(build(parsers), options.shell))


COMMAND = Command(
    "sparrow completion",
    "Print a script that completes sparrow's commands and options in your shell.",
    _options,
    _run,
    epilog="bash: sparrow completion bash > ~/.local/share/bash-completion/completions/sparrow; "
    "zsh: sparrow completion zsh > a folder of $fpath, as _sparrow; "
    "fish: sparrow completion fish > ~/.config/fish/completions/sparrow.fish.",
)
