"""The version of a build, which differs by commit; all else is in pyproject.toml."""

import os
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

BASE = "0.1.0"
HERE = Path(__file__).resolve().parent


def git(*arguments: str) -> str:
    """Return what git says about this folder, or nothing if it cannot."""
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version() -> str:
    """Return ``BASE`` in ``make release``, and otherwise ``BASE.devN+gHASH``, where N commits led to this one.

    N is 0 if it cannot be known: in a shallow clone, and in a copy without git. An archive of the sources keeps the
    version with which it was made.
    """
    archived = HERE / "PKG-INFO"
    if archived.exists():
        return HeaderParser().parsestr(archived.read_text(encoding="utf-8"))["Version"]
    if os.environ.get("SPARROW_RELEASE"):
        return BASE
    if git("rev-parse", "--show-toplevel") != str(HERE):
        return f"{BASE}.dev0"
    count = git("rev-list", "--count", "HEAD") if git("rev-parse", "--is-shallow-repository") == "false" else "0"
    return f"{BASE}.dev{count}+g{git('rev-parse', '--short=10', 'HEAD')}"


setup(version=version())
