"""``sparrow completion bash|zsh|fish``: a script that makes the shell complete commands, options and choices.

It is made once, from the parsers of all parts that are installed here, so completing imports nothing.
"""

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
    """Return the whole parser of a command; none where its part is not installed: its name is completed
    all the same."""
    if name == "completion":
        return (COMMAND.parser("sparrow completion", brief=False),)
    try:
        return (COMMANDS[name].load().parser(f"sparrow {name}", brief=False),)
    except (MissingPart, CannotTrain) as reason:
        sys.stderr.write(f"sparrow {name}: completed by its name only: {reason}\n")
        return ()


def _options(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which shell reads it")


def _run(options: argparse.Namespace) -> None:
    print(shtab.complete(build(parsers), options.shell))


COMMAND = Command(
    "sparrow completion",
    "Print a script that makes your shell complete sparrow's commands and options.",
    _options,
    _run,
    epilog="bash: sparrow completion bash > ~/.local/share/bash-completion/completions/sparrow; "
    "zsh: sparrow completion zsh > a folder of $fpath, as _sparrow; "
    "fish: sparrow completion fish > ~/.config/fish/completions/sparrow.fish.",
)
