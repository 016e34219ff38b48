"""Messages of devices and coordinator in a round of secure aggregation. Bytes are hexadecimal.

keys      the device answers with its public keys of this round           Keys
shares    it is told its peers, and answers with shares sealed for each   Shares
train     it is given the shares sealed for it, and sends a masked update (a bundle) with a Statement
agree     it is told who is left, and signs that                          Agree
unmask    it is shown that most have signed the same, and answers with shares   Unmask
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
        """Return what the signature is of."""
        return self.model_dump(exclude={"signature"})


class Shares(_Said):
    """Shares of a device's two secrets, sealed for each neighbour, by name."""

    sealed: dict[Name, Sealed] = Field(max_length=MOST_PEERS)


class Statement(_Said):
    """A device's signed account of what it was told when it hid its update: SHA-256 of the devices of its cell that
    shared, the cohort and the colluders; and of the scale of the cell's numbers, and its mask."""

    present: Key32
    scale: Key32
    signature: Signature

    def said(self) -> dict[str, str]:
        """Return what the signature is of."""
        return self.model_dump(exclude={"signature"})


class Agree(_Said):
    """A device's signature of who is left and who has vanished."""

    signature: Signature


class Unmask(_Said):
    """Shares that a device keeps: of the self-mask of who is left, and of the pads of who has vanished, by name."""

    seeds: dict[Name, Share] = Field(default_factory=dict, max_length=MOST_PEERS)
    pads: dict[Name, Share] = Field(default_factory=dict, max_length=MOST_PEERS)


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Peer(_Told):
    """A device of the same round: its identity key, its keys, and the point at which it keeps shares."""

    name: Name
    identity: Key32
    keys: Keys
    point: int = Field(ge=1, le=2**31)


class SecureWork(_Told):
    """All that a device is told of a round, as far as it concerns it.

    context: of this round alone; it ends with a digest (``secure.consistency``). neighbours: keep its shares, threshold
    of which suffice. cell: devices with which it has pads; cells: those of the whole round. bits, value_range,
    largest_weight: the scale of its cell (``numbers.Scale``), weight: its own. sealed: by sender, shares for this
    device. left: in training who of its cell has shared, in unmasking who of the round sent an update; gone: who shared
    and did not. cohort: all devices that sent keys, with their identity keys. statements: of those left; signatures: of
    those who agree.
    """

    context: str = Field(max_length=200)
    colluders: int = Field(default=1, ge=0, le=1000)
    threshold: int = Field(default=0, ge=0, le=MOST_PEERS)
    neighbours: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    cell: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    cells: tuple[tuple[Name, ...], ...] = Field(default=(), max_length=MOST_PEERS)
    cohort: dict[Name, Key32] = Field(default_factory=dict, max_length=MOST_PEERS)
    statements: dict[Name, Statement] = Field(default_factory=dict, max_length=MOST_PEERS)
    signatures: dict[Name, Signature] = Field(default_factory=dict, max_length=MOST_PEERS)
    peers: tuple[Peer, ...] = Field(default=(), max_length=MOST_PEERS)
    bits: Literal[16, 32] = 16
    value_range: float = Field(default=1.0, gt=0, le=LARGEST_RANGE)
    largest_weight: float = Field(default=1.0, gt=0, le=2.0**40)
    weight: float = Field(default=1.0, gt=0, le=2.0**40)
    sealed: dict[Name, Sealed] = Field(default_factory=dict, max_length=MOST_PEERS)
    left: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
    gone: tuple[Name, ...] = Field(default=(), max_length=MOST_PEERS)
