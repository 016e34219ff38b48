"""One shape for all commands: options, work, and an end in one line with a documented code.

A module that is a command has a ``COMMAND``, which ``sparrow`` runs, and some modules too. An error that has an
``exit_code`` ends its command with that code and one line; so do errors of the operating system. Any other error is a
bug, and shows its traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NoReturn

from .exits import Exit
from .nearest import nearest

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TRACEBACK_VARIABLE = "SPARROW_TRACEBACK"


UNKNOWN, REQUIRED = "unrecognized arguments: ", "the following arguments are required: "
"""Beginnings of argparse's messages."""


class WrongUsage(Exception):
    """An option, argument or setting cannot work; the text says which and why."""

    exit_code: ClassVar[Exit] = Exit.USAGE


class Parser(argparse.ArgumentParser):
    """A parser of argparse whose mistakes end in one line, with an option that shows where an error comes from.

    traceable: False where nothing is done that could fail. ``brief``: whether its help is to fit a screen; a command
    with many options leaves some to the page that it names.
    """

    brief = True

    def __init__(self, *arguments: Any, traceable: bool = True, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._words: list[str] = []
        if traceable:
            # No default: a sub-command's would overwrite what was given before it.
            self.add_argument(
                "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and tell what was not understood apart."""
        self._words = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(self._words, namespace)
        # Before Python 3.12.7 an argument of any number takes nothing where an option stands before its words.
        many = [each for each in self._actions if each.nargs == argparse.ZERO_OR_MORE and not each.option_strings]
        if many and left and not any(word.startswith("-") for word in left):
            try:
                before = getattr(found, many[0].dest) or []
                setattr(found, many[0].dest, [*before, *self._get_values(many[0], left)])
            except argparse.ArgumentError as error:
                self.error(str(error))
            left = []
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is no choice, with the nearest one. (argparse's own, of each Python's
        own wording, tells no nearest one.)"""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value!r}{nearest(str(value), choices)}; choose one of {', '.join(choices)}"
            )

    def error(self, message: str) -> NoReturn:
        """End with the mistake and where to read on, in one line."""
        if message.startswith((UNKNOWN, REQUIRED)):  # a misspelt option may be the one that is required
            words = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else self._words
            known = list(_options_of(self))
            options = (word.partition("=")[0] for word in words if word.startswith("--") and word != "--")
            wrong = next((each for each in options if not any(name.startswith(each) for name in known)), "")
            message = f"there is no option {wrong}{nearest(wrong, known)}" if wrong else message
        self.exit(Exit.USAGE, f"{short(self.prog)}: {_one_line(message)}; see {self.prog} --help\n")


@dataclass(frozen=True)
class Command:
    """A command: its module's ``name``, what it is for, its options, its work, and how its errors end it.

    options: adds them to a parser. run: does the work with what was parsed; returns an exit code, None for done; prints
    its result on stdout and all else on stderr. usage: the options that matter, where there are too many to list.
    """

    name: str
    description: str
    options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int | None]
    usage: str | None = None
    epilog: str | None = None

    def parser(self, prog: str | None = None, *, brief: bool = True) -> Parser:
        """Return its command line. prog: how it was called, ``python -m`` of its module by default."""
        prog = prog or f"python -m {self.name}"
        parser = Parser(
            prog=prog,
            usage=None if self.usage is None else f"{prog} {self.usage}",
            description=self.description,
            epilog=self.epilog,
        )
        parser.brief = brief
        self.options(parser)
        return parser

    def main(self, arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run it; returns its exit code. Raises SystemExit where argparse does: for --help and for wrong usage."""
        parser = self.parser(prog)
        options = parser.parse_args(arguments)
        return ended(parser.prog, lambda: self.run(options), shown=getattr(options, "traceback", False))


def ended(prog: str, work: Callable[[], int | None], *, shown: bool = False) -> int:
    """Do ``work`` and return its exit code; an error is one line on stderr, and SIGTERM ends it as Ctrl-C does.

    shown: whether its traceback is, too; ``SPARROW_TRACEBACK=1`` asks for that as well.
    """
    try:
        with interruptible():
            code = work() or Exit.DONE
        sys.stdout.flush()  # a full disk is noticed now, not when the interpreter ends
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return Exit.DONE  # whoever read along has seen enough
        _give_up_output()
        bug = _exit_code(error) is None
        if bug or shown or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error)
        code, text = explain(error)
        sys.stderr.write(f"{short(prog)}: {text}\n")
    return int(code)


@contextmanager
def interruptible(line: str | None = None) -> Iterator[None]:
    """Let SIGTERM within do what Ctrl-C does, unless whoever runs this process handles it.

    line: given while packages are imported, where nothing is begun yet: then both write it and end the process at once.
    Some packages turn an exception that is raised while they are imported into another error.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if line is None:
            raise KeyboardInterrupt
        sys.stderr.write(line)
        sys.stderr.flush()
        os._exit(Exit.INTERRUPTED)

    usual = {signal.SIGTERM: signal.SIG_DFL, **({} if line is None else {signal.SIGINT: signal.default_int_handler})}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    ours = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def explain(error: BaseException) -> tuple[Exit, str]:
    """Return an error's exit code, and one line that says what is wrong."""
    text = _one_line(str(error))
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED, text or "interrupted"
    code = _exit_code(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if any(isinstance(cause, OSError) and cause.errno in NO_ROOM for cause in _causes(error)):
        return Exit.FULL, f"{text}; make room, and give the same command again"
    if code is None:
        return Exit.FAILED, f"{type(error).__name__}: {text}; this is a bug: please report it with the lines above"
    return code, text or type(error).__name__


def short(prog: str) -> str:
    """Return the name of a command without ``python -m``."""
    return prog.removeprefix("python -m ")


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of the commands within it."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _options_of(part)


def _exit_code(error: BaseException) -> Exit | None:
    """Return the exit code of an error that its user can do something about; None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, OSError):
        return Exit.NOT_FOUND if isinstance(error, FileNotFoundError) else Exit.FAILED
    code: Exit | None = getattr(error, "exit_code", None)
    return code


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and those that it came from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reader_gone() -> bool:
    """Return whether nobody reads standard output any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are told unasked
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # it is no file
        return False
    if gone:
        drop_output()
    return gone


def _give_up_output() -> None:
    """Drop the content of standard output if it takes no more."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard the rest of the output, over which the interpreter would fail when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
