"""Provenance of trials: commit, packages and processor.

Results are bit-identical if all of these are equal.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")
OTHERS = ("benchmarks/rows", "benchmarks/queue.toml", "docs/results", "sparrow/bench/experiments/tuned.json")
"""Files of results and of the order of trials, whose changes do not affect computations."""
VECTORS = {
    *("amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512bw", "avx512f"),
    *("asimd", "asimddp", "avx_vnni", "bf16", "fma", "i8mm", "sse4_2", "sve"),
}
"""Instructions that determine the runtimes' kernels, and with them the order of additions."""


@dataclass(frozen=True)
class Provenance:
    """The software and the machine that computed a trial."""

    # Commit of the clone, "" outside of one.
    commit: str
    # Number of files that differ from it.
    changes: int
    # Name -> version, including Python's.
    packages: Mapping[str, str]
    processor: str
    # Vector instructions.
    flags: tuple[str, ...]
    # Threads per training device.
    threads: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Provenance:
        """Read the provenance of a row."""
        return cls(**{**row, "flags": tuple(row["flags"])})


def provenance(threads: int) -> Provenance:
    """Return the provenance of this process. threads: number of threads of a training device."""
    commit, changes = state_of(ROOT)
    processor, flags = _of_processor()
    return Provenance(commit, changes, _packages(), processor, flags, threads)


@cache
def state_of(root: Path) -> tuple[str, int]:
    """Return a clone's commit and its number of changed files; "" and 0 outside of a clone."""
    # Cached, since a process runs the code it has imported, regardless of later changes.
    commit = _git(root, "rev-parse", "HEAD")
    return commit, len(_changes(root)) if commit else 0


def _changes(root: Path) -> list[str]:
    others = (f":!{path}" for path in OTHERS)
    return _git(root, "status", "--porcelain", "--", ".", *others).splitlines()


def _git(root: Path, *arguments: str) -> str:
    if not (root / ".git").exists():
        # An installed package may be inside another project's clone.
        return ""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


@cache
def _packages() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _of_processor() -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and its vector instructions, () if unknown."""
    fields: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    known = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name") or platform.processor() or platform.machine(), tuple(
        flag for flag in sorted(VECTORS) if flag in known
    )
