"""``python -m benchmarks.peers.install``: the peers' own environment, ``.venv-peers`` beside ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def main() -> int:
    """Create or update the environment."""
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
