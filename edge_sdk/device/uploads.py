"""Calls whose bodies may be sent in parts."""

from __future__ import annotations

from dataclasses import dataclass

# Updates of at least this size resume after an interruption.
RESUMED = 1024 * 1024
# Bytes of the smallest part in which a body is sent.
SMALLEST_PART = 16 * 1024


@dataclass(frozen=True)
class Upload:
    """A call whose body may be sent in parts. resumable: whether the server reports the number of received bytes."""

    method: str
    digest_header: str
    resumable: bool = False

    def resumes(self, size: int) -> bool:
        """Return True if a body of this size resumes after an interruption."""
        return self.resumable and size >= RESUMED


UPDATE = Upload("PUT", "Sparrow-Update-SHA256", resumable=True)
PUBLICATION = Upload("POST", "Sparrow-Body-SHA256")
REPLACEMENT = Upload("PATCH", "Sparrow-Body-SHA256")
