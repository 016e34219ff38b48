"""Rows compared between runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sparrow.bench.rows import Recorded


def without_timing(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Return the rows without values that vary between runs: seconds, joules, provenance, and uploaded bytes.

    An update has its seconds as text, so its size varies.
    """
    energy = {"joules_measured", "joules_estimated", "seconds_without_joules"}
    timing = {"seconds", "wall_seconds", "machine", "provenance", "bytes_up", "evaluation_bytes_up"} | energy
    return [
        {
            "trial": each.trial.model_dump(mode="json"),
            "points": [
                {key: item for key, item in asdict(point).items() if key not in timing} for point in each.points
            ],
            "shifts": [asdict(shift) for shift in each.shifts],
            "result": {key: item for key, item in asdict(each.result).items() if key not in timing},
        }
        for each in recorded
    ]
