"""A device's five answers in a round of secure aggregation, each from its stored secrets and the coordinator's data.

    begin     makes secrets, and signs the public keys
    share     shares the secrets among neighbours
    mask      hides an update: adds its self-mask, and a pad for each device of its cell that sent shares
    agree     signs the lists of remaining and lost devices, once per round
    unmask    sends shares, one kind per peer, if most devices of the round have signed the same lists

``docs/privacy.md`` describes how far the device trusts the coordinator. It refuses keys without a signature by the
known identity; one device under two names; a threshold with which a coordinator could request both kinds of shares; a
cell that is too small, or whose devices received different data; and a second, different request. At most one version
of the lists has signatures of more than (n + c) / 2 of n devices, since the c colluders may sign two (Bonawitz et al.,
section 7.2). That holds among devices with one cohort and one c, which all remaining devices state and sign. Shares are
sealed together with their writer's data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..failures import Failure
from . import pads
from .groups import least_cell, most_of
from .messages import Agree, Keys, Peer, SecureWork, Shares, Statement, Unmask
from .numbers import Words
from .pads import BadSecret as BadSecret
from .shamir import SHARE_BYTES, split

PADS, SHARES, SEEDS, COMMITMENT, STORY = "pads", "shares", "seeds", "commitment", "story"


@dataclass(frozen=True)
class RoundSecrets:
    """A device's secret state of a round.

    Secrets: of its pads' keys, of keys that seal shares, and of its self-mask.
    """

    context: str
    pads_secret: bytes
    shares_secret: bytes
    seed: bytes
    # Its peers and neighbours.
    work: SecureWork | None = None
    shared: Shares | None = None
    sealed: Mapping[str, str] = field(default_factory=dict)
    # The devices of its cell that hide its update, and the SHA-256 of the masked update.
    present: Sequence[str] = ()
    masked: str = ""
    # SHA-256 of its numbers' scale.
    scale: str = ""
    # The signed lists.
    story: str = ""
    # Its answer with shares, repeated byte for byte.
    told: Unmask | None = None

    def to_json(self) -> str:
        """Return it as text, which must be stored in private."""
        said: dict[str, Any] = {
            "context": self.context,
            "secrets": [each.hex() for each in (self.pads_secret, self.shares_secret, self.seed)],
            "work": self.work and self.work.model_dump(mode="json"),
            "shared": self.shared and self.shared.model_dump(),
            "sealed": dict(self.sealed),
            "present": list(self.present),
            "masked": self.masked,
            "scale": self.scale,
            "story": self.story,
            "told": self.told and self.told.model_dump(),
        }
        return json.dumps(said)

    @classmethod
    def from_json(cls, text: str) -> RoundSecrets:
        """Return the inverse of ``to_json``."""
        said = json.loads(text)
        pads_secret, shares_secret, seed = (bytes.fromhex(each) for each in said["secrets"])
        return cls(
            said["context"],
            pads_secret,
            shares_secret,
            seed,
            work=said["work"] and SecureWork.model_validate(said["work"]),
            shared=said["shared"] and Shares.model_validate(said["shared"]),
            sealed=said["sealed"],
            present=said["present"],
            masked=said["masked"],
            scale=said["scale"],
            story=said["story"],
            told=said["told"] and Unmask.model_validate(said["told"]),
        )


def begin(context: str, identity: bytes) -> tuple[RoundSecrets, Keys]:
    """Return new secrets for a round, and their signed public keys."""
    kept = RoundSecrets(context, pads.new_secret(), pads.new_secret(), pads.new_secret())
    return kept, public_keys(kept, identity)


def public_keys(kept: RoundSecrets, identity: bytes) -> Keys:
    """Return the signed public keys of a round."""
    said = {
        PADS: public_key(kept.pads_secret, kept.context, PADS),
        SHARES: public_key(kept.shares_secret, kept.context, SHARES),
        COMMITMENT: commitment(kept.seed, kept.context),
    }
    return Keys(**said, signature=pads.sign(identity, kept.context, said).hex())


def public_key(secret: bytes, context: str, use: str) -> str:
    """Return the public key of a secret."""
    return pads.pair_of(secret, context, use).public_key().public_bytes_raw().hex()


def commitment(seed: bytes, context: str) -> str:
    """Return a commitment to a self-mask's seed, which does not reveal it."""
    return pads.derive(seed, context, COMMITMENT).hex()


def share(kept: RoundSecrets, name: str, work: SecureWork, known: Mapping[str, str]) -> tuple[RoundSecrets, Shares]:
    """Return shares of the secrets, sealed for each neighbour. known: identity keys from earlier rounds. Raises
    BadSecret.
    """
    if kept.shared is not None and kept.work is not None and _as_told(kept.work) == _as_told(work):
        return kept, kept.shared
    if kept.shared is not None:
        raise BadSecret("the coordinator asks for shares twice, with different peers; no shares are sent")
    check_work(kept, name, work, known)
    peers = {peer.name: peer for peer in work.peers}
    points = {peer.name: peer.point for peer in work.peers if peer.name in set(work.neighbours)}
    split_of = {
        PADS: split(int.from_bytes(kept.pads_secret, "big"), work.threshold, list(points.values())),
        SEEDS: split(int.from_bytes(kept.seed, "big"), work.threshold, list(points.values())),
    }
    own = pads.pair_of(kept.shares_secret, kept.context, SHARES)
    whole = whole_of(work.cohort, work.colluders)
    sealed = {}
    for other in work.neighbours:
        message = b"".join(split_of[kind][points[other]].to_bytes(SHARE_BYTES, "big") for kind in (PADS, SEEDS))
        key = pads.agree(own, bytes.fromhex(peers[other].keys.shares), kept.context, SHARES)
        sealed[other] = pads.seal(key, message, about_shares(name, other, work.cell, whole)).hex()
    shared = Shares(sealed=sealed)
    return replace(kept, work=work, shared=shared), shared


def about_shares(writer: str, reader: str, cell: Sequence[str], whole: str) -> str:
    """Return the associated data of sealed shares, on which writer and reader must agree.

    whole: the result of ``whole_of``.
    """
    return json.dumps([writer, reader, sorted(cell), whole])


def whole_of(cohort: Mapping[str, str], colluders: int) -> str:
    """Return the SHA-256 of the data that all devices of a round must have in common: cohort and colluders."""
    return _digest(dict(sorted(cohort.items())), colluders)


def _as_told(work: SecureWork) -> SecureWork:
    return work.model_copy(update={"sealed": {}, "left": (), "gone": ()})


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_work(kept: RoundSecrets, name: str, work: SecureWork, known: Mapping[str, str]) -> None:
    """Raise BadSecret unless a device's data of its peers protect its update."""
    _check_context(kept, work)
    peers = {peer.name: peer for peer in work.peers}
    _check_names(name, work, peers)
    _check_different(kept, work, peers)
    _check_hidden(work)
    for other, identity in work.cohort.items():
        if known.get(other, identity) != identity:
            raise BadSecret(
                f"{other}: its identity key differs from earlier rounds", failure=Failure("secure-refused/keys")
            )
    for peer in peers.values():
        check_keys(peer.keys, peer.identity, kept.context, peer.name)


def _check_names(name: str, work: SecureWork, peers: Mapping[str, Peer]) -> None:
    """Raise BadSecret unless every device concerned is listed exactly once."""
    neighbours = set(work.neighbours)
    cell = set(work.cell)
    if name not in cell or name in neighbours or not (neighbours | cell - {name}) <= peers.keys():
        raise BadSecret("the coordinator does not list all neighbours, or not the cell of this device")
    if len(peers) < len(work.peers) or len(neighbours) < len(work.neighbours):
        raise BadSecret("the coordinator lists a device twice")
    if len(set(work.cohort.values())) < len(work.cohort) or name in peers or not {name, *peers} <= work.cohort.keys():
        raise BadSecret("the coordinator lists a device under two names, or not the whole cohort")


def _check_different(kept: RoundSecrets, work: SecureWork, peers: Mapping[str, Peer]) -> None:
    """Raise BadSecret unless identities, pad keys and share points are unique."""
    own = public_key(kept.pads_secret, kept.context, PADS)
    if any(peer.identity != work.cohort[peer.name] for peer in peers.values()):
        raise BadSecret("the coordinator lists two identity keys of one device")
    if len({own, *(peer.keys.pads for peer in peers.values())}) < len(peers) + 1:
        raise BadSecret("two devices have the same pad key, so their pads would not hide updates")
    if len({peer.point for peer in peers.values()}) < len(peers):
        raise BadSecret("the coordinator sent two devices the same share")


def _check_hidden(work: SecureWork) -> None:
    """Raise BadSecret if colluders could open a secret, or the cell is too small."""
    neighbours = set(work.neighbours)
    cell = set(work.cell)
    if not work.threshold > (len(neighbours) + work.colluders) / 2 or work.threshold > len(neighbours):
        raise BadSecret(
            f"{work.threshold} of {len(neighbours)} shares reveal a secret: with {work.colluders} colluders a "
            f"coordinator could ask for both kinds"
        )
    if len(cell) < least_cell(work.colluders):
        raise BadSecret(f"the cell has {len(cell)} devices, but needs at least {least_cell(work.colluders)}")


def _check_context(kept: RoundSecrets, work: SecureWork) -> None:
    if work.context != kept.context:
        raise BadSecret("the coordinator refers to another round; the work is returned")


def check_keys(keys: Keys, identity: str, context: str, name: str) -> None:
    """Raise BadSecret unless these are a device's signed, valid keys of this round."""
    for public in (keys.pads, keys.shares):
        pads.check_public(bytes.fromhex(public), name)
    pads.check_signature(bytes.fromhex(identity), bytes.fromhex(keys.signature), context, keys.said(), name)


def mask(
    kept: RoundSecrets, name: str, work: SecureWork, words: Words, neurons: str = ""
) -> tuple[RoundSecrets, Words]:
    """Return a device's masked numbers modulo 2^b. work: ``left`` has the devices of its cell with shares. neurons:
    digest of the cell's mask of neurons. Raises BadSecret for a second update, or other pads, in one round, because the
    difference of two could reveal one."""
    _check_context(kept, work)
    if kept.work is None:
        raise BadSecret("the coordinator asks for an update before shares were sent")
    cell = set(kept.work.cell)
    neighbours = set(kept.work.neighbours)
    present = set(work.left) & cell
    if name not in present or len(present) < least_cell(kept.work.colluders):
        raise BadSecret(f"{len(present)} of the cell sent shares, but at least {least_cell(kept.work.colluders)} must")
    wrote = set(work.sealed) & neighbours
    if len(wrote) < kept.work.threshold:
        raise BadSecret("too few neighbours have sent shares to unmask any device")
    if wrote & cell != (present - {name}) & neighbours:
        raise BadSecret("the coordinator delivers shares of other devices of the cell than it lists")
    own = pads.pair_of(kept.pads_secret, kept.context, PADS)
    peers = {peer.name: peer for peer in kept.work.peers}
    keys = [(pad_key(own, peers[other].keys.pads, kept.context), name < other) for other in sorted(present - {name})]
    masked = words.copy()
    pads.add_streams(masked, [(seed_key(kept.seed, kept.context), True), *keys])
    digest = hashlib.sha256(masked.data).hexdigest()
    if not kept.masked:
        scale = _digest(work.bits, work.value_range, work.largest_weight, neurons)
        sealed = dict(work.sealed)
        return replace(kept, sealed=sealed, present=sorted(present), masked=digest, scale=scale), masked
    if kept.masked != digest:
        raise BadSecret("the coordinator asked for a second, different update in one round; it is not sent")
    return kept, masked


def seed_key(seed: bytes, context: str) -> bytes:
    """Return the key of a self-mask."""
    return pads.derive(seed, context, SEEDS)


def pad_key(own: Any, other: str, context: str) -> bytes:
    """Return the key of the pad of two devices, from one's key pair and the other's public key."""
    return pads.agree(own, bytes.fromhex(other), context, PADS)


def state(kept: RoundSecrets, identity: bytes) -> Statement:
    """Return this device's signed statement of its data when it masked its update."""
    if kept.work is None or not kept.masked:
        raise BadSecret("there is no masked update to sign a statement about")
    whole = whole_of(kept.work.cohort, kept.work.colluders)
    said = {"present": present_of(kept.present, whole), "scale": kept.scale}
    return Statement(**said, signature=pads.sign(identity, kept.context, said).hex())


def present_of(names: Collection[str], whole: str) -> str:
    """Return the SHA-256 of a cell's devices with shares, and of the round."""
    return _digest(sorted(names), whole)


def check_statement(statement: Statement, identity: str, context: str, name: str) -> None:
    """Raise BadSecret unless a device has signed this statement in a round."""
    public = bytes.fromhex(identity)
    signature = bytes.fromhex(statement.signature)
    pads.check_signature(public, signature, context, statement.said(), name)


def agree(kept: RoundSecrets, name: str, work: SecureWork, identity: bytes) -> tuple[RoundSecrets, Agree]:
    """Return a signature of the lists of remaining and lost devices. Raises BadSecret for second or wrong lists."""
    _check_context(kept, work)
    if kept.work is None or not kept.sealed:
        raise BadSecret("the coordinator asks for agreement before an update was sent")
    if kept.work.cohort[name] != pads.public_identity(identity).hex():
        raise BadSecret("the coordinator listed another identity key for this device; no statement is signed")
    found = story(kept.context, whole_of(kept.work.cohort, kept.work.colluders), work)
    if kept.story not in ("", found):
        raise BadSecret("the coordinator sent two different lists of remaining devices; no statement is signed")
    _check_story(kept, kept.work, name, work)
    said = {STORY: found}
    return replace(kept, story=found), Agree(signature=pads.sign(identity, kept.context, said).hex())


def story(context: str, whole: str, work: SecureWork) -> str:
    """Return the SHA-256 of a round's cells, remaining and lost devices."""
    cells = sorted(sorted(cell) for cell in work.cells)
    return _digest(context, whole, cells, sorted(work.left), sorted(work.gone))


def check_agreement(agreed: Agree, identity: str, context: str, told: str, name: str) -> None:
    """Raise BadSecret unless a device has signed these lists, ``told``."""
    public = bytes.fromhex(identity)
    signature = bytes.fromhex(agreed.signature)
    pads.check_signature(public, signature, context, {STORY: told}, name)


def _check_story(kept: RoundSecrets, before: SecureWork, name: str, work: SecureWork) -> None:
    """Raise BadSecret unless the lists fit this device's data from ``before``, and the statements of all remaining
    devices."""
    left = set(work.left)
    gone = set(work.gone)
    cohort = before.cohort
    if left & gone:
        raise BadSecret("the coordinator asks for both kinds of shares of one device; no shares are sent")
    known = set().union(*map(set, work.cells)) if work.cells else set[str]()
    if name not in left or not (left | gone) <= known or sum(map(len, work.cells)) > len(known):
        raise BadSecret("the coordinator's cells do not list each device once; no shares are sent")
    if not known <= cohort.keys() or set(before.cell) not in [set(cell) for cell in work.cells]:
        raise BadSecret("the coordinator changed the cell of this device; no shares are sent")
    if (left | gone) & set(before.cell) != set(kept.present):
        raise BadSecret("the coordinator's list of the cell differs from the devices that hide this update")
    if left != work.statements.keys():
        raise BadSecret("the coordinator does not send the statements of all remaining devices")
    whole = whole_of(cohort, before.colluders)
    for cell in work.cells:
        present = present_of((left | gone) & set(cell), whole)
        scales = set[str]()
        for other in sorted(left & set(cell)):
            statement = work.statements[other]
            check_statement(statement, cohort[other], kept.context, other)
            if statement.present != present:
                raise BadSecret(f"{other} was sent other devices of its cell or round than the coordinator lists")
            scales.add(statement.scale)
        if len(scales) > 1:
            raise BadSecret("devices of one cell got different scales or masks; no shares are sent")
        if name in cell and kept.scale not in scales:
            raise BadSecret("the coordinator changed the statement of this device")


def unmask(kept: RoundSecrets, name: str, work: SecureWork) -> tuple[RoundSecrets, Unmask]:
    """Return the requested shares: of remaining devices' self-masks, and of lost devices' pads.

    Shares of a cell with too few remaining devices, and shares sealed wrongly or for another cell, are left out. Raises
    BadSecret for requests that would reveal a single update.
    """
    _check_context(kept, work)
    if kept.told is not None:
        return kept, kept.told
    if kept.work is None or not kept.sealed:
        raise BadSecret("the coordinator asks for shares before an update was sent")
    cohort = kept.work.cohort
    left = set(work.left)
    gone = set(work.gone)
    whole = whole_of(cohort, kept.work.colluders)
    if not kept.story or story(kept.context, whole, work) != kept.story:
        raise BadSecret("the coordinator sends other lists of remaining devices than were signed; no shares are sent")
    signed = 0
    for other, signature in work.signatures.items():
        if other in cohort:
            check_agreement(Agree(signature=signature), cohort[other], kept.context, kept.story, other)
            signed += 1
    if signed < most_of(len(cohort), kept.work.colluders):
        raise BadSecret(f"only {signed} of {len(cohort)} devices have signed these lists, too few to send shares")
    least = least_cell(kept.work.colluders)
    open_cells = [set(cell) for cell in work.cells if len(left & set(cell)) >= least]
    own = pads.pair_of(kept.shares_secret, kept.context, SHARES)
    peers = {peer.name: peer for peer in kept.work.peers}
    cell_of = {other: cell for cell in open_cells for other in cell}
    seeds: dict[str, str] = {}
    pad_shares: dict[str, str] = {}
    for other, sealed in kept.sealed.items():
        if other not in peers or other not in cell_of:
            continue
        key = pads.agree(own, bytes.fromhex(peers[other].keys.shares), kept.context, SHARES)
        try:
            about = about_shares(other, name, sorted(cell_of[other]), whole)
            message = pads.unseal(key, bytes.fromhex(sealed), about, other)
        except BadSecret:
            # A wrong share of one device must not end the round of others.
            continue
        if other in left:
            seeds[other] = message[SHARE_BYTES:].hex()
        elif other in gone:
            pad_shares[other] = message[:SHARE_BYTES].hex()
    told = Unmask(seeds=seeds, pads=pad_shares)
    return replace(kept, told=told), told
