"""Demands of the device's owner on rounds, checked before the device sends values of its model (docs/privacy.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparrow.protocol.ranges import Ranges
from sparrow.protocol.secure.messages import SecureWork

from ..errors import BadArgument

_LINE = re.compile(r"^(\S+)\s+([0-9a-f]{64})$")


@dataclass(frozen=True)
class SecureOnly:
    """Send only masked updates."""

    # Smallest number that rounds must tolerate.
    colluders: int = 0
    # Name -> identity key of the devices allowed in a round; None: any enrolled device.
    known: Mapping[str, str] | None = None

    def fault(self, work: SecureWork, name: str) -> str | None:
        """Return the reason why the device ``name`` refuses a round, or None."""
        if work.colluders < self.colluders:
            return (
                f"the round tolerates {work.colluders} colluders, this device demands {self.colluders} "
                f"(--require-secure)"
            )
        if self.known is not None:
            unknown = [other for other, key in work.cohort.items() if other != name and self.known.get(other) != key]
            if unknown:
                return f"{', '.join(sorted(unknown)[:5])}: not in --known-devices, or with another identity key"
        return None


@dataclass(frozen=True)
class Demands:
    """All demands of an owner; see ``JoinOptions``."""

    # None: unmasked updates are allowed.
    secure: SecureOnly | None = None
    # Fingerprint of the only accepted one; None: the first one met.
    publisher: str | None = None
    pin_model: bool = False
    # Ranges of settings.
    ranges: Ranges = field(default_factory=dict)
    plain_metrics: bool = False
    own_frozen: bool = False


def read_known(path: Path | str) -> dict[str, str]:
    """Read a file of lines ``NAME KEY``: name -> identity key. Raises BadArgument if it is unreadable or malformed."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"--known-devices: {path} cannot be read: {error}") from None
    known = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise BadArgument(
                f"--known-devices: {path}, line {number}: write a device's name and the identity key that sparrow join "
                f"prints, 64 hexadecimal digits"
            )
        known[found[1]] = found[2]
    return known
