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
    Exit.DONE: "success",
    Exit.FAILED: "another failure; read the message on stderr",
    Exit.USAGE: "usage error: correct the option, argument, address or setting",
    Exit.CANNOT: "this machine cannot run the command: a package is missing, or memory is too small",
    Exit.UNREACHABLE: "the coordinator or its database does not answer; try again later",
    Exit.REFUSED: "a token is missing, invalid or of the wrong kind; set a valid token",
    Exit.NOT_FOUND: "a file, federation, task, method, model or token does not exist",
    Exit.FULL: "the disk of this machine or of the coordinator is full; free some space and run the command again",
    Exit.INTERRUPTED: "interrupted by Ctrl-C or SIGTERM, or not confirmed; state is kept",
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
