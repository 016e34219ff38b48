"""Demands of the owner of a device on rounds, before it sends anything of its model (docs/privacy.md).

A coordinator says itself that a federation is secure, how many devices may collude, and who takes part. A device that
takes none of it on trust is told by its owner.
"""

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
    """Updates go up under masks alone. colluders: the least c; known: identity keys of all devices that may be in a
    round with this one, by name; None: whoever has enrolled."""

    colluders: int = 0
    known: Mapping[str, str] | None = None

    def fault(self, work: SecureWork, name: str) -> str | None:
        """Return what of a round this device, called ``name``, does not accept."""
        if work.colluders < self.colluders:
            return f"the round bears {work.colluders} colluders, this device demands {self.colluders} (require_secure)"
        if self.known is not None:
            unknown = [other for other, key in work.cohort.items() if other != name and self.known.get(other) != key]
            if unknown:
                return f"{', '.join(sorted(unknown)[:5])}: not among the known devices, or with another identity key"
        return None


@dataclass(frozen=True)
class Demands:
    """All that an owner demands.

    secure: of secure rounds; None: updates may go without masks. publisher: the fingerprint of the only accepted
    publisher; None: the first one met. pin_model: accept no replacement of the model. ranges: of settings.
    plain_metrics: report losses and accuracies of secure rounds in clear if the federation asks for that, too.
    own_frozen: neither take frozen values from other federations of this user nor leave them for others.
    """

    secure: SecureOnly | None = None
    publisher: str | None = None
    pin_model: bool = False
    ranges: Ranges = field(default_factory=dict)
    plain_metrics: bool = False
    own_frozen: bool = False


def read_known(path: Path | str) -> dict[str, str]:
    """Return identity keys by name from a file of lines ``NAME KEY``. Raises BadArgument."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"known_devices: {path} cannot be read: {error}") from None
    known = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise BadArgument(
                f"known_devices: {path}, line {number}: write a device's name and its identity key, 64 hexadecimal "
                f"digits, as join prints it"
            )
        known[found[1]] = found[2]
    return known
