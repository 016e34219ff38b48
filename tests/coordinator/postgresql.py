"""A PostgreSQL server of the tests' own, where its programs are installed: in a folder, on a socket, then gone."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEBIAN = Path("/usr/lib/postgresql")  # its programs are not on the PATH there
USER = "postgres"


class Missing(Exception):
    """There is no PostgreSQL here; the text says what."""


class Server:
    """A running server; ``new_database`` makes an empty database and gives its URL."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._count = itertools.count()

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs, as another user where this is root: it refuses to serve as root."""
        user = USER if os.geteuid() == 0 else None
        # Not into pipes: the server inherits them, and reading them would not end before it does.
        with (self._folder / "log").open("ab") as log:
            command = [str(self._programs / program), *arguments]
            status = subprocess.run(command, user=user, stdout=log, stderr=log, cwd=self._folder).returncode
        assert status == 0, f"{program}: {(self._folder / 'log').read_text()[-2000:]}"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self._folder}' -c fsync=off"
        self.run("pg_ctl", "--pgdata", str(self._folder / "data"), "--wait", "-o", options, "start")

    def stop(self) -> None:
        """As a crash does: connections break in the middle of what they do."""
        self.run("pg_ctl", "--pgdata", str(self._folder / "data"), "--wait", "--mode", "immediate", "stop")

    def new_database(self) -> str:
        name = f"sparrow{next(self._count)}"
        self.run("createdb", "--host", str(self._folder), "--username", USER, name)
        return f"postgresql://{USER}@/{name}?host={self._folder}"


def find_programs() -> Path:
    """The folder of PostgreSQL's programs. Raises Missing."""
    known = [Path(found).resolve().parent] if (found := shutil.which("initdb")) else []
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda path: float(path.parent.name))[-1:]
    for folder in (*known, *newest):
        if (folder / "initdb").exists():
            break
    else:
        raise Missing("no PostgreSQL server is installed: apt-get install postgresql")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            raise Missing(f"PostgreSQL does not serve as root, and there is no user {USER!r}") from None
    return folder


@contextmanager
def serving() -> Iterator[Server]:
    """A server, stopped and removed at the end. Raises Missing."""
    programs = find_programs()
    folder = Path(tempfile.mkdtemp(prefix="sparrow-postgresql-", dir="/tmp"))  # a socket's path is short
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    server = Server(programs, folder)
    data = str(folder / "data")
    try:
        server.run("initdb", "--pgdata", data, "--username", USER, "--auth", "trust", "--encoding", "UTF8", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
