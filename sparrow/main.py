"""The command ``sparrow``: it imports the module of one command, and runs that.

Each command is the ``COMMAND`` of its module. Nothing of a part is imported
before it is called, so a device that predicts needs no torch, and a server nothing of a device.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from edge_sdk.device import trainable

from .command_line.command import Command, Parser, ended, interruptible
from .command_line.exits import Exit
from .command_line.nearest import nearest
from .protocol.errors import MissingPart

OURS = ("coordinator", "devices", "edge_sdk", "export", "sparrow")
DISTRIBUTION = "sparrow-fl"


@dataclass(frozen=True)
class Source:
    """The place of a command: its module, the extra that installs its packages, whether it trains, and whether that
    needs PyTorch."""

    module: str
    help: str
    extra: str | None = None
    trains: bool = False
    torch: bool = True

    def load(self) -> Command:
        """Return the command. Raises MissingPart, CannotTrain."""
        if self.trains:
            trainable.check(module="torch" if self.torch else None)
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in OURS and missing != self.module.partition(".")[0]:
                raise
            if missing in OURS:
                raise MissingPart(
                    f"{self.module} is not part of this installation; install {DISTRIBUTION} whole"
                ) from None
            wanted = DISTRIBUTION if self.extra is None else f"{DISTRIBUTION}[{self.extra}]"
            raise MissingPart(f"{missing} is not installed, which this needs: pip install '{wanted}'") from error
        found: Command = module.COMMAND
        return found


COMMANDS = {
    "serve": Source("sparrow.coordinator.commands.serve", "run the coordinator", "coordinator"),
    "status": Source("sparrow.status", "what a running coordinator's federations do"),
    "track": Source("sparrow.track", "a federation's curves, for TensorBoard or MLflow"),
    "token": Source("sparrow.coordinator.commands.tokens", "create, list and revoke tokens", "coordinator"),
    "web": Source("sparrow.coordinator.commands.web", "what pages in browsers need to train", "coordinator"),
    "backup": Source("sparrow.coordinator.commands.backup", "copy a coordinator, running or not", "coordinator"),
    "restore": Source("sparrow.coordinator.commands.restore", "bring such a copy back", "coordinator"),
    "evaluate": Source("sparrow.coordinator.commands.evaluate", "judge a global model on your test file"),
    "publish": Source("edge_sdk.publish", "create a federation", "device,publish", trains=True),
    "federation": Source("sparrow.federation", "list, create, steer and delete federations"),
    "device": Source("sparrow.device", "list, look at and revoke devices"),
    "model": Source("sparrow.model", "list and download global models"),
    "data": Source("sparrow.data", "look at a file of samples before it is used", "device"),
    "join": Source("edge_sdk.join", "take part in a federation, as a device", "device", trains=True, torch=False),
    "trust": Source("sparrow.trust", "accept another publisher of a model", "device"),
    "fleet": Source("sparrow.simulation.simulate", "many simulated devices", "device", trains=True, torch=False),
    "profile": Source("edge_sdk.profile", "what a training step takes at a budget", "device,publish", trains=True),
    "devices": Source("sparrow.devices.__main__", "what this device is, its sensors"),
    "export": Source("sparrow.export.__main__", "a personal model as the smallest ONNX file", "export"),
    "predict": Source("edge_sdk.predict", "run an exported model", "predict"),
    "bench": Source("sparrow.bench.__main__", "comparisons of methods", "bench", trains=True),
    "completion": Source("sparrow.completion", "print what makes a shell complete these", "completion"),
}


class _Listing(argparse.HelpFormatter):
    """Lists commands without a line for their place in the usage: all of them fit a screen."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text

    def format_help(self) -> str:
        """Return the help, without the empty line before the list."""
        return super().format_help().replace("\n\ncommands:", "\ncommands:")


def build(parents: Callable[[str], Sequence[Parser]] = lambda name: ()) -> Parser:
    """Return the parser of ``sparrow`` itself. parents: of each command, where its options are wanted as well."""
    parser = Parser(
        prog="sparrow",
        usage="sparrow COMMAND [options]; sparrow COMMAND --help says more",
        traceable=False,
        add_help=False,
        formatter_class=_Listing,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=_version(), help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [...]", parser_class=argparse.ArgumentParser)
    for name, source in COMMANDS.items():
        commands.add_parser(name, help=source.help, parents=list(parents(name)), add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sparrow``; returns its exit code. Raises SystemExit where argparse does."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        parser = build()
        if words and not words[0].startswith("-"):
            parser.error(f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)}")
        parser.parse_args(words or ["--help"])
        return Exit.USAGE  # not reached: help, version and options that there are not end above
    name, rest = words[0], words[1:]
    prog = f"sparrow {name}"
    loaded: list[Command] = []
    with interruptible(f"{prog}: interrupted\n"):
        code = ended(prog, lambda: loaded.append(COMMANDS[name].load()), shown="--traceback" in rest)
    return loaded[0].main(rest, prog) if loaded else code


def _version() -> str:
    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return f"{DISTRIBUTION}, not installed"
