"""Exit codes of all commands, also listed in docs/cli.md."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes, grouped by what the user can do; see ``MEANINGS``."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CANNOT = 3
    UNREACHABLE = 4
    REFUSED = 5
    NOT_FOUND = 6
    FULL = 7
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "failed for another reason; read the line on stderr",
    Exit.USAGE: "wrong usage: an option, argument, address or setting cannot work; correct it",
    Exit.CANNOT: "this machine cannot do it: a package is not installed, or its memory is too small",
    Exit.UNREACHABLE: "no coordinator answers, or its database does not; try again later",
    Exit.REFUSED: "a token is missing, wrong or of another kind; set a valid one",
    Exit.NOT_FOUND: "a file, federation, task, method, model or token does not exist",
    Exit.FULL: "the disk is full, here or at the coordinator; free some space and run the command again",
    Exit.INTERRUPTED: "interrupted by Ctrl-C or SIGTERM, or answered with no; state is kept",
}


def of_status(status: int) -> Exit:
    """Return the exit code for an HTTP error status."""
    if status in (401, 403):
        return Exit.REFUSED
    if status == 422:
        return Exit.USAGE
    if status == 507:
        return Exit.FULL
    if status in (408, 429) or status >= 500:
        return Exit.UNREACHABLE
    return Exit.NOT_FOUND if status in (404, 410) else Exit.FAILED
