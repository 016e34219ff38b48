"""``python -m benchmarks.peers.install [NAME ...]``: install each peer in a separate environment.

Without names, it installs all. Their requirements may conflict with ours and with each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """One environment. title: what an error calls it; requirements: as pip takes them, torch first and alone: together
    with the others, pip would choose a build with gigabytes of CUDA.
    """

    title: str
    folder: Path
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Return its interpreter."""
        return self.folder / "bin" / "python"

    def version(self, package: str) -> str:
        """Return the pinned version of a package."""
        pins = dict(each.split("==") for each in self.requirements if "==" in each)
        return next(version for name, version in pins.items() if name.partition("[")[0] == package)

    def check(self) -> None:
        """Raise SystemExit if it is not installed."""
        if not self.python.exists():
            raise SystemExit(f"{self.title} is not installed: python -m benchmarks.peers.install")

    def call(self, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> None:
        """Run one of its commands, found in the path of ``environment``, which adds to this process's.

        Raises SystemExit with its output if it fails or takes too long.
        """
        name = " ".join(command[:2])
        with tempfile.TemporaryFile("w+") as out:
            try:
                code = subprocess.call(
                    command, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
                )
                failed = f"{name} ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                failed = f"{name} took more than {seconds:g} s"
            if failed:
                out.seek(0)
                raise SystemExit(f"{failed}:\n{out.read()[-5000:]}")

    def install(self) -> None:
        """Create or update the environment."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        for torch in [each for each in self.requirements if each.startswith("torch==")]:
            subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, *self.requirements], check=True)


def _peer(title: str, name: str, *requirements: str) -> Peer:
    return Peer(title, ROOT / f".venv-{name}", requirements)


PEERS = {
    "peers": _peer("Flower with its old gRPC API", "peers", "torch==2.13.0", "numpy>=1.26", "flwr[simulation]==1.32.0"),
    "flower": _peer("Flower", "flower", "flwr==1.42.0", "numpy==2.4.6"),
    "flare": _peer("NVIDIA FLARE", "flare", "nvflare==2.9.0", "numpy==2.4.6"),
}
"""By the name of the environment, ``.venv-NAME``. ``peers`` has torch and the last Flower with the old gRPC API, which
is also the one of the simulations."""
PYTHON = PEERS["peers"].python


def main(arguments: list[str] | None = None) -> int:
    """Create or update the environments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description="Install the peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all without one")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.names or PEERS:
        PEERS[name].install()
    return 0


if __name__ == "__main__":
    sys.exit(main())
