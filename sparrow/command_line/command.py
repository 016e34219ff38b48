"""Commands: options, work, errors and exit codes.

The module of a command has a ``COMMAND``. Errors with an ``exit_code``, and errors of the operating system, end a
command with one line and a documented code. Any other error is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NoReturn

from .exits import Exit
from .nearest import nearest
from .signals import handled

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TRACEBACK_VARIABLE = "SPARROW_TRACEBACK"


# beginnings of argparse's messages
UNKNOWN = "unrecognized arguments: "
REQUIRED = "the following arguments are required: "
SETTING = "argument KEY=VALUE: "


class WrongUsage(Exception):
    """Wrong usage of a command: the message names the option, argument or setting and the fault."""

    exit_code: ClassVar[Exit] = Exit.USAGE


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors and the option ``--traceback``.

    traceable: add ``--traceback``. settings: names that are given as KEY=VALUE, for the error of who gives an option.
    """

    settings: Collection[str] = ()

    def __init__(self, *arguments: Any, traceable: bool = True, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._words: list[str] = []
        if traceable:
            # No default: a sub-command's would overwrite a value given before it.
            self.add_argument(
                "--traceback", action="store_true", default=argparse.SUPPRESS, help="print an error's traceback"
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse known arguments, also positional ones with ``nargs="*"`` that follow an option."""
        self._words = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(self._words, namespace)
        # Before Python 3.12.7 a positional argument with nargs="*" stays empty if an option precedes its words.
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
        # argparse's own message depends on Python's version and suggests no choice
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value!r}{nearest(str(value), choices)}; choose one of {', '.join(choices)}"
            )

    def error(self, message: str) -> NoReturn:
        """Exit with the error and the command for help, in one line."""
        # The required option may be a misspelt one, and a wrong setting the value of an option that does not exist.
        if message.startswith((UNKNOWN, REQUIRED, SETTING)):
            words = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else self._words
            known = [option for parser in _parsers(self) for option in parser._option_string_actions]
            options = (word.partition("=")[0] for word in words if word.startswith("--") and word != "--")
            wrong = next((each for each in options if not any(name.startswith(each) for name in known)), "")
            if wrong:
                setting = wrong.removeprefix("--").replace("-", "_")
                is_setting = any(setting in parser.settings for parser in _parsers(self))
                hint = f"; give the setting as {setting}=VALUE" if is_setting else nearest(wrong, known)
                message = f"there is no option {wrong}{hint}"
        self.exit(Exit.USAGE, f"{short(self.prog)}: {_one_line(message)}; see {self.prog} --help\n")


@dataclass(frozen=True)
class Command:
    """A command."""

    # Name of its module.
    name: str
    description: str
    # Adds the options to a parser.
    options: Callable[[Parser], None]
    # Does the work; returns an exit code, None for success; prints the result on stdout and messages on stderr.
    run: Callable[[argparse.Namespace], int | None]
    # The main options, if there are many.
    usage: str | None = None
    epilog: str | None = None

    def parser(self, prog: str | None = None) -> Parser:
        """Return the argument parser. prog: the program's name, by default ``python -m`` and the module."""
        prog = prog or f"python -m {self.name}"
        parser = Parser(
            prog=prog,
            usage=None if self.usage is None else f"{prog} {self.usage}",
            description=self.description,
            epilog=self.epilog,
        )
        self.options(parser)
        return parser

    def main(self, arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run the command and return its exit code. Raises SystemExit for --help and wrong usage."""
        open_streams()
        parser = self.parser(prog)
        words = sys.argv[1:] if arguments is None else list(arguments)
        # A noun by itself, such as "sparrow federation", shows what can be done with it.
        if not words and len(list(_parsers(parser))) > 1:
            words = ["--help"]
        options = parser.parse_args(words)
        return ended(parser.prog, lambda: self.run(options), shown=getattr(options, "traceback", False))


def open_streams() -> None:
    """Open closed standard streams on the null device, and escape characters that the output cannot encode."""
    # In this order, because each takes the lowest free descriptor: no other file becomes a standard stream.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def ended(prog: str, work: Callable[[], int | None], *, shown: bool = False) -> int:
    """Do ``work`` and return its exit code; print errors as one line on stderr. SIGTERM acts as Ctrl-C.

    shown: also print tracebacks, as ``SPARROW_TRACEBACK=1`` does.
    """
    try:
        with interruptible():
            code = work() or Exit.DONE
        # report a full disk here, not when the interpreter exits
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        # the reader of a pipe closed it, such as head
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return Exit.DONE
        _give_up_output()
        bug = _exit_code(error) is None
        if bug or shown or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error)
        code, text = explain(error)
        sys.stderr.write(f"{short(prog)}: {text}\n")
    return int(code)


@contextmanager
def interruptible(line: str | None = None) -> Iterator[None]:
    """Context manager: let SIGTERM act as Ctrl-C, unless this process has another handler.

    line: if given, both signals write it and end the process at once. It is for imports, in which some packages hide
    exceptions.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if line is None:
            raise KeyboardInterrupt
        sys.stderr.write(line)
        sys.stderr.flush()
        os._exit(Exit.INTERRUPTED)

    usual = {signal.SIGTERM: signal.SIG_DFL, **({} if line is None else {signal.SIGINT: signal.default_int_handler})}
    ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    with handled(dict.fromkeys(ours, interrupt)):
        yield


def explain(error: BaseException) -> tuple[Exit, str]:
    """Return an error's exit code and its message in one line."""
    text = _one_line(str(error))
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED, text or "interrupted"
    code = _exit_code(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if any(isinstance(cause, OSError) and cause.errno in NO_ROOM for cause in _causes(error)):
        return Exit.FULL, f"{text}; free some space and run the command again"
    if code is None:
        return Exit.FAILED, f"{type(error).__name__}: {text}; this is a bug: please report it with the lines above"
    return code, text or type(error).__name__


def short(prog: str) -> str:
    """Return the name of a command without ``python -m``."""
    return prog.removeprefix("python -m ")


def _parsers(parser: Parser) -> Iterator[Parser]:
    """Yield a parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _parsers(part)


def _exit_code(error: BaseException) -> Exit | None:
    """Return the exit code of an expected error, None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, OSError):
        return Exit.NOT_FOUND if isinstance(error, FileNotFoundError) else Exit.FAILED
    code: Exit | None = getattr(error, "exit_code", None)
    return code


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reader_gone() -> bool:
    """Return whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        # errors are always reported
        poll.register(sys.stdout.fileno(), 0)
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    # not a file
    except (OSError, ValueError):
        return False
    if gone:
        drop_output()
    return gone


def _give_up_output() -> None:
    """Discard buffered output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard the rest of the output, which the interpreter could not write at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
