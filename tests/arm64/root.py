"""A Debian arm64 root to run programs in on an x86-64 machine: debootstrap, user-mode QEMU and wheels for aarch64.

The root is an ordinary folder. The kernel hands its aarch64 programs to QEMU (binfmt_misc), and each command runs in a
mount namespace of its own, so that nothing stays mounted and the host keeps nothing but that registration. Wheels are
installed from outside by the host's pip, which takes seconds where an emulated pip takes minutes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SUITE = "bookworm"
PYTHON = "3.11"
"""Of that suite. Raspberry Pi OS Bookworm has the same."""

QEMU = Path("/usr/bin/qemu-aarch64-static")
RULE = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
"""How the kernel tells an aarch64 program and what it runs it with; comes with QEMU."""

BINFMT = Path("/proc/sys/fs/binfmt_misc")

PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_26_aarch64", "manylinux_2_17_aarch64")
"""Newest first; the last is also called manylinux2014. Bookworm has glibc 2.36."""

ENTER = """
set -e
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
root=$1
shift
exec chroot "$root" "$@"
"""
"""Run by ``unshare --mount``: what is mounted here vanishes with the command."""


class CannotEmulate(Exception):
    """This machine cannot run the root; the text says what to install or do."""


def check_host() -> None:
    """Raise CannotEmulate, naming all that is missing."""
    if platform.machine() != "x86_64":
        raise CannotEmulate(f"this machine is {platform.machine()}, not x86_64: on aarch64 run `make test` itself")
    missing = [
        package
        for package, program in (
            ("debootstrap", "debootstrap"),
            ("qemu-user-static", str(QEMU)),
            ("util-linux", "unshare"),
        )
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    if missing:
        raise CannotEmulate(f"not installed: {', '.join(missing)}; apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise CannotEmulate("debootstrap, chroot and binfmt_misc need root: sudo make test-arm64")


def register_emulator() -> None:
    """Have the kernel run aarch64 programs by QEMU, until the next boot. Raises CannotEmulate."""
    if not (BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT)], check=False)
    if (BINFMT / "qemu-aarch64").exists():
        return
    try:
        (BINFMT / "register").write_text(RULE.read_text().strip())
    except OSError as error:
        raise CannotEmulate(
            f"{error.filename} cannot be used ({error.strerror}): the kernel needs CONFIG_BINFMT_MISC, and a container "
            f"--privileged"
        ) from error


class Root:
    """The root at ``path``, with a log of how it was made beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path.with_suffix(".log")
        self._packages = path / f"usr/local/lib/python{PYTHON}/dist-packages"

    def make(self) -> bool:
        """Make the root unless it is there as a whole; returns whether it had to. Raises CannotEmulate."""
        ready = self.path / ".ready"
        if ready.exists():
            return False
        if self.path.exists():
            shutil.rmtree(self.path)  # a try that was broken off: debootstrap does not resume
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = ["debootstrap", "--arch=arm64", "--variant=minbase", "--include=python3", "--foreign", SUITE]
        self._logged([*first, str(self.path)], "debootstrap's first stage")
        self._logged(["chroot", str(self.path), "/debootstrap/debootstrap", "--second-stage"], "its second stage")
        ready.touch()
        return True

    def install(self, requirements: Path) -> bool:
        """Install the wheels that ``requirements`` lists, unless they are there; returns whether it had to."""
        mark = self._packages / ".requirements"
        wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
        if mark.exists() and mark.read_text() == wanted:
            return False
        shutil.rmtree(self._packages, ignore_errors=True)
        tags = [part for name in PLATFORMS for part in ("--platform", name)]
        version = ["--implementation", "cp", "--python-version", PYTHON, "--only-binary", ":all:"]
        self._pip([*tags, *version, "--requirement", str(requirements)])
        mark.write_text(wanted)
        return True

    def install_project(self, repository: Path) -> None:
        """Install the project as it lies in ``repository`` and put its tests into ``/sparrow``."""
        sources = self.path.parent / "sources"
        shutil.rmtree(sources, ignore_errors=True)
        sources.mkdir()
        # From a copy: setuptools leaves folders where it builds, and would put what lies there into the next wheel.
        for name in ("sparrow", "edge_sdk", "coordinator", "export", "devices"):
            shutil.copytree(repository / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy2(repository / name, sources / name)
        self._pip(["--upgrade", "--no-build-isolation", str(sources)])
        inside = self.path / "sparrow"
        shutil.rmtree(inside, ignore_errors=True)
        shutil.copytree(repository / "tests", inside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(repository / "pyproject.toml", inside)

    def command(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs ``arguments`` inside, in ``/sparrow``, with nothing of the host's environment."""
        kept = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **(environment or {})}
        settings = [f"{key}={text}" for key, text in kept.items()]
        inside = ["/usr/bin/env", "--ignore-environment", "--chdir=/sparrow", *settings, *arguments]
        return ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.path), *inside]

    def _pip(self, arguments: Sequence[str]) -> None:
        # --no-deps: pip would read the conditions of dependencies ("platform_machine == ...") as of this machine.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(self._packages)]
        self._logged([*command, *arguments], "pip install")

    def _logged(self, command: Sequence[str], what: str) -> None:
        with self._log.open("ab") as log:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode
        if status != 0:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise CannotEmulate(f"{what} failed with status {status} (all of it: {self._log}):\n{last}")
