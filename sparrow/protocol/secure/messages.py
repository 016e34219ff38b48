"""Messages of devices and coordinator in a round of secure aggregation. Bytes are hexadecimal.

The phases of a device:

keys      sends its public keys of this round                                       Keys
shares    receives its peers, and sends shares sealed for each                      Shares
train     receives the shares sealed for it, and sends a masked update (a bundle) with a Statement
agree     receives the list of remaining devices, and signs it                      Agree
unmask    receives signatures of most devices on the same list, and sends shares    Unmask
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .shamir import SHARE_BYTES

MOST_PEERS = 10_000
LARGEST_RANGE = 1e6

Key32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Share = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SHARE_BYTES}}}$")]
Sealed = Annotated[str, Field(pattern=r"^[0-9a-f]{2,400}$")]
Name = Annotated[str, Field(max_length=64)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Keys(_Said):
    """A device's public keys of a round, and a commitment to its self-mask, signed by its identity key."""

    pads: Key32
    shares: Key32
    commitment: Key32
    signature: Signature

    def said(self) -> dict[str, str]:
        """Return the signed fields."""
        return self.model_dump(exclude={"signature"})


class Shares(_Said):
    """Shares of a device's two secrets: neighbour -> sealed shares."""

    sealed: dict[Name, Sealed] = Field(max_length=MOST_PEERS)


class Statement(_Said):
    """A device's signed account of its data when it masked its update."""

    # SHA-256 of the cell's devices with shares, the cohort and the colluders.
    present: Key32
    # SHA-256 of the cell's number scale and mask.
    scale: Key32
    signature: Signature

    def said(self) -> dict[str, str]:
        """Return the signed fields."""
        return self.model_dump(exclude={"signature"})


class Agree(_Said):
    """A device's signature of the remaining and lost devices."""

    signature: Signature


class Unmask(_Said):
    """Shares that a device keeps: name -> shares of self-masks of remaining devices, and of pads of lost ones."""

    seeds: dict[Name, Share] = Field(default_factory=dict, max_length=MOST_PEERS)
    pads: dict[Name, Share] = Field(default_factory=dict, max_length=MOST_PEERS)


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Peer(_Told):
    """A device of the same round: its identity key, its keys, and its point for shares."""

    name: Name
    identity: Key32
    keys: Keys
    point: int = Field(ge=1, le=2**31)


class SecureWork(_Told):
    """The data of a round for one device."""

    # Context of this round, ending with a digest (``secure.consistency``).
    context: str = Field(max_length=200)
    colluders: int = Field(default=1, ge=0, le=1000)
    threshold: int = Field(default=0, ge=0, le=MOST_PEERS)
    # Keepers of its shares; threshold of these suffice.
    neighbours: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    # Devices with common pads.
    cell: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    # Cells of the whole round.
    cells: tuple[tuple[Name, ...], ...] = Field(default=(), max_length=MOST_PEERS)
    # All devices that sent keys, with their identity keys.
    cohort: dict[Name, Key32] = Field(default_factory=dict, max_length=MOST_PEERS)
    # Statements of devices left.
    statements: dict[Name, Statement] = Field(default_factory=dict, max_length=MOST_PEERS)
    # Signatures of those that agree.
    signatures: dict[Name, Signature] = Field(default_factory=dict, max_length=MOST_PEERS)
    peers: tuple[Peer, ...] = Field(default=(), max_length=MOST_PEERS)
    # The cell's scale (``numbers.Scale``).
    bits: Literal[16, 32] = 16
    value_range: float = Field(default=1.0, gt=0, le=LARGEST_RANGE)
    largest_weight: float = Field(default=1.0, gt=0, le=2.0**40)
    # The device's own.
    weight: float = Field(default=1.0, gt=0, le=2.0**40)
    # Shares for this device, by sender.
    sealed: dict[Name, Sealed] = Field(default_factory=dict, max_length=MOST_PEERS)
    # Left in training the cell's devices that sent shares, in unmasking the round's devices that sent an update.
    left: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    # Devices that sent shares but no update.
    gone: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
