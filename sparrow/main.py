"""The command ``sparrow``, which imports and runs the module of one command.

Each module imports only its own packages, so ``sparrow predict`` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from edge_sdk.device import trainable

from .command_line.command import Command, Parser, ended, interruptible, open_streams
from .command_line.exits import Exit
from .command_line.nearest import nearest
from .protocol.errors import MissingPart

OURS = ("coordinator", "devices", "edge_sdk", "export", "sparrow")
DISTRIBUTION = "sparrow-fl"


@dataclass(frozen=True)
class Source:
    """The module of a command, and the extra that installs its packages."""

    module: str
    help: str
    extra: str | None = None
    trains: bool = False
    torch: bool = True

    def load(self) -> Command:
        """Return the command. Raises MissingPart if a package is not installed, CannotTrain if none can train."""
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
                    f"{self.module} is missing from this installation; install {DISTRIBUTION} again"
                ) from None
            wanted = DISTRIBUTION if self.extra is None else f"{DISTRIBUTION}[{self.extra}]"
            raise MissingPart(f"{missing} is not installed, which this needs: pip install '{wanted}'") from error
        found: Command = module.COMMAND
        return found


COMMANDS = {
    "serve": Source("sparrow.coordinator.commands.serve", "run the coordinator", "coordinator"),
    "status": Source("sparrow.status", "show the federations of a coordinator"),
    "track": Source("sparrow.track", "send a federation's metrics to TensorBoard or MLflow"),
    "token": Source("sparrow.tokens", "create, list and revoke tokens"),
    "web": Source("sparrow.coordinator.commands.web", "fetch the runtime for training in browsers", "coordinator"),
    "backup": Source("sparrow.coordinator.commands.backup", "back up a coordinator", "coordinator"),
    "restore": Source("sparrow.coordinator.commands.restore", "restore a backup", "coordinator"),
    "evaluate": Source("sparrow.evaluate", "evaluate a global model on your test file"),
    "publish": Source("edge_sdk.publish", "create a federation", "device,publish", trains=True),
    "federation": Source("sparrow.federation", "list, create, control and delete federations"),
    "device": Source("sparrow.device", "list, inspect, tag, revoke and remove devices"),
    "model": Source("sparrow.model", "list and download global models"),
    "data": Source("sparrow.data", "check a file of samples", "device"),
    "join": Source("edge_sdk.join", "take part in a federation as a device", "device", trains=True, torch=False),
    "trust": Source("sparrow.trust", "accept another publisher of a model", "device"),
    "fleet": Source("sparrow.simulation.simulate", "simulate many devices", "device", trains=True, torch=False),
    "profile": Source("edge_sdk.profile", "measure a training step at a budget", "device,publish", trains=True),
    "devices": Source("sparrow.devices.__main__", "show this device and its sensors"),
    "export": Source("sparrow.export.__main__", "export a personal model to ONNX", "export"),
    "predict": Source("edge_sdk.predict", "run an exported model", "predict"),
    "bench": Source("sparrow.bench.__main__", "compare methods", "bench", trains=True),
    "completion": Source("sparrow.completion", "print a script for completion in your shell", "completion"),
}


class _Listing(argparse.HelpFormatter):
    """A formatter that omits the metavar's line above the commands."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text

    def format_help(self) -> str:
        """Return the help without the empty line before the commands."""
        return super().format_help().replace("\n\ncommands:", "\ncommands:")


def build(parents: Callable[[str], Sequence[Parser]] = lambda name: ()) -> Parser:
    """Return the parser of ``sparrow``. parents: parsers whose options to add to a command."""
    parser = Parser(
        prog="sparrow",
        usage="sparrow COMMAND [options]; see sparrow COMMAND --help",
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
    """Run ``sparrow`` and return its exit code. Raises SystemExit for help and wrong usage."""
    open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = ["--version"] if words == ["version"] else words
    if not words or words[0] not in COMMANDS:
        parser = build()
        if words and not words[0].startswith("-"):
            parser.error(f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)}")
        parser.parse_args(words or ["--help"])
        # not reached: the parser exits for help, version and unknown options
        return Exit.USAGE
    name, *rest = words
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
