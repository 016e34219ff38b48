"""A device's five answers in a round of secure aggregation, each from what it keeps and what it is told.

    begin     makes secrets, and signs the public keys
    share     shares the secrets among neighbours
    mask      hides an update: its self-mask is added, and a pad for each device of its cell that shared
    agree     signs who is left and who has vanished, once in a round
    unmask    tells shares, of each peer of one kind alone, where most of the round have signed the same

The device trusts the coordinator as far as ``docs/privacy.md`` says. It refuses keys that are not signed by the
identity that it knows; one device under two names; a threshold that lets a coordinator ask for both kinds of shares; a
cell of too few, or whose devices were told different things; and to answer twice in different ways. Of two stories of
who is left at most one has the signatures of more than (n + c) / 2 of n devices, since the c that collude sign two
(Bonawitz et al., section 7.2). That holds among devices told of one cohort and one c, which all who are left state,
signed. Shares are sealed together with what their writer was told.
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
    """All that a device keeps of a round, and tells nobody.

    Secrets: of its pads' keys, of those that seal shares, and of its self-mask. work: its peers and neighbours.
    present, masked: the devices of its cell that its update is hidden with, and the SHA-256 of what it sent. scale: of
    its numbers, its SHA-256. story: what it has signed. told: its answer with shares, given again byte for byte.
    """

    context: str
    pads_secret: bytes
    shares_secret: bytes
    seed: bytes
    work: SecureWork | None = None
    shared: Shares | None = None
    sealed: Mapping[str, str] = field(default_factory=dict)
    present: Sequence[str] = ()
    masked: str = ""
    scale: str = ""
    story: str = ""
    told: Unmask | None = None

    def to_json(self) -> str:
        """Return it as text, to be kept where nobody else can read it."""
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
        """Return what ``to_json`` was given."""
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
    """Return new secrets for a round, and the public keys that follow from them, signed."""
    kept = RoundSecrets(context, pads.new_secret(), pads.new_secret(), pads.new_secret())
    return kept, public_keys(kept, identity)


def public_keys(kept: RoundSecrets, identity: bytes) -> Keys:
    """Return the public keys of a round, signed."""
    said = {
        PADS: public_key(kept.pads_secret, kept.context, PADS),
        SHARES: public_key(kept.shares_secret, kept.context, SHARES),
        COMMITMENT: commitment(kept.seed, kept.context),
    }
    return Keys(**said, signature=pads.sign(identity, kept.context, said).hex())


def public_key(secret: bytes, context: str, use: str) -> str:
    """Return the public key that follows from a secret."""
    return pads.pair_of(secret, context, use).public_key().public_bytes_raw().hex()


def commitment(seed: bytes, context: str) -> str:
    """Return what tells a self-mask's seed from any other, and nothing of it."""
    return pads.derive(seed, context, COMMITMENT).hex()


def share(kept: RoundSecrets, name: str, work: SecureWork, known: Mapping[str, str]) -> tuple[RoundSecrets, Shares]:
    """Return shares of the secrets, sealed for each neighbour. known: identity keys of devices from earlier rounds.
    Raises BadSecret for peers that are not who they say, or numbers that protect nobody."""
    if kept.shared is not None and kept.work is not None and _as_told(kept.work) == _as_told(work):
        return kept, kept.shared
    if kept.shared is not None:
        raise BadSecret("the coordinator asks for shares twice, of different peers; nothing is told")
    check_work(kept, name, work, known)
    peers = {peer.name: peer for peer in work.peers}
    points = {peer.name: peer.point for peer in work.peers if peer.name in set(work.neighbours)}
    split_of = {
        PADS: split(int.from_bytes(kept.pads_secret, "big"), work.threshold, list(points.values())),
        SEEDS: split(int.from_bytes(kept.seed, "big"), work.threshold, list(points.values())),
    }
    own, whole = pads.pair_of(kept.shares_secret, kept.context, SHARES), whole_of(work.cohort, work.colluders)
    sealed = {}
    for other in work.neighbours:
        message = b"".join(split_of[kind][points[other]].to_bytes(SHARE_BYTES, "big") for kind in (PADS, SEEDS))
        key = pads.agree(own, bytes.fromhex(peers[other].keys.shares), kept.context, SHARES)
        sealed[other] = pads.seal(key, message, about_shares(name, other, work.cell, whole)).hex()
    shared = Shares(sealed=sealed)
    return replace(kept, work=work, shared=shared), shared


def about_shares(writer: str, reader: str, cell: Sequence[str], whole: str) -> str:
    """Return what the reader of shares must know as their writer does, or cannot read them. whole: ``whole_of``."""
    return json.dumps([writer, reader, sorted(cell), whole])


def whole_of(cohort: Mapping[str, str], colluders: int) -> str:
    """Return the SHA-256 of what all devices of a round must have been told alike: its cohort, and the colluders it
    bears."""
    return _digest(dict(sorted(cohort.items())), colluders)


def _as_told(work: SecureWork) -> SecureWork:
    return work.model_copy(update={"sealed": {}, "left": (), "gone": ()})


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_work(kept: RoundSecrets, name: str, work: SecureWork, known: Mapping[str, str]) -> None:
    """Raise BadSecret unless what a device is told of its peers keeps its update from everybody."""
    _check_context(kept, work)
    peers = {peer.name: peer for peer in work.peers}
    _check_names(name, work, peers)
    _check_different(kept, work, peers)
    _check_hidden(work)
    for other, identity in work.cohort.items():
        if known.get(other, identity) != identity:
            raise BadSecret(
                f"{other}: its identity key is not the one of rounds before", failure=Failure("secure-refused/keys")
            )
    for peer in peers.values():
        check_keys(peer.keys, peer.identity, kept.context, peer.name)


def _check_names(name: str, work: SecureWork, peers: Mapping[str, Peer]) -> None:
    """Raise BadSecret unless a device is told once of everybody with whom it has to do."""
    neighbours, cell = set(work.neighbours), set(work.cell)
    if name not in cell or name in neighbours or not (neighbours | cell - {name}) <= peers.keys():
        raise BadSecret("the coordinator does not tell of all neighbours, or not of the cell of this device")
    if len(peers) < len(work.peers) or len(neighbours) < len(work.neighbours):
        raise BadSecret("the coordinator tells of a device twice")
    if len(set(work.cohort.values())) < len(work.cohort) or name in peers or not {name, *peers} <= work.cohort.keys():
        raise BadSecret("the coordinator tells of a device under two names, or not of the whole cohort")


def _check_different(kept: RoundSecrets, work: SecureWork, peers: Mapping[str, Peer]) -> None:
    """Raise BadSecret unless every device has an identity, a key of pads and a share of its own."""
    own = public_key(kept.pads_secret, kept.context, PADS)
    if any(peer.identity != work.cohort[peer.name] for peer in peers.values()):
        raise BadSecret("the coordinator has two identity keys of one device")
    if len({own, *(peer.keys.pads for peer in peers.values())}) < len(peers) + 1:
        raise BadSecret("two devices have the same key of pads; pads with them would hide nothing")
    if len({peer.point for peer in peers.values()}) < len(peers):
        raise BadSecret("the coordinator has two devices keep the same share")


def _check_hidden(work: SecureWork) -> None:
    """Raise BadSecret where colluders could open a secret, or too few devices hide one another."""
    neighbours, cell = set(work.neighbours), set(work.cell)
    if not work.threshold > (len(neighbours) + work.colluders) / 2 or work.threshold > len(neighbours):
        raise BadSecret(
            f"{work.threshold} of {len(neighbours)} shares give a secret: with {work.colluders} colluders a "
            f"coordinator could ask for both kinds"
        )
    if len(cell) < least_cell(work.colluders):
        raise BadSecret(f"the cell has {len(cell)} devices, at least {least_cell(work.colluders)} hide one another")


def _check_context(kept: RoundSecrets, work: SecureWork) -> None:
    if work.context != kept.context:
        raise BadSecret("the coordinator speaks of another round; the work is handed back")


def check_keys(keys: Keys, identity: str, context: str, name: str) -> None:
    """Raise BadSecret unless these are a device's keys of this round, with which others can agree on keys."""
    for public in (keys.pads, keys.shares):
        pads.check_public(bytes.fromhex(public), name)
    pads.check_signature(bytes.fromhex(identity), bytes.fromhex(keys.signature), context, keys.said(), name)


def mask(
    kept: RoundSecrets, name: str, work: SecureWork, words: Words, neurons: str = ""
) -> tuple[RoundSecrets, Words]:
    """Return a device's numbers modulo 2^b, hidden. work: ``left`` are those of its cell who shared. neurons: the
    digest of the mask of neurons, one for all of the cell. Raises BadSecret for a second update, or other pads, in one
    round: the difference of two would show what one hides."""
    _check_context(kept, work)
    if kept.work is None:
        raise BadSecret("the coordinator asks for an update before shares were told")
    cell, neighbours = set(kept.work.cell), set(kept.work.neighbours)
    present = set(work.left) & cell
    if name not in present or len(present) < least_cell(kept.work.colluders):
        raise BadSecret(f"{len(present)} of the cell have shared, at least {least_cell(kept.work.colluders)} must")
    wrote = set(work.sealed) & neighbours
    if len(wrote) < kept.work.threshold:
        raise BadSecret("too few neighbours have sent shares for anybody to be unmasked")
    if wrote & cell != (present - {name}) & neighbours:
        raise BadSecret("the coordinator hands over shares of others of the cell than it says have shared")
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
        raise BadSecret("the coordinator asks for an update twice, and it is not the same; nothing is sent")
    return kept, masked


def seed_key(seed: bytes, context: str) -> bytes:
    """Return the key of a self-mask."""
    return pads.derive(seed, context, SEEDS)


def pad_key(own: Any, other: str, context: str) -> bytes:
    """Return the key of the pad of two devices: of one's key pair and the other's public key."""
    return pads.agree(own, bytes.fromhex(other), context, PADS)


def state(kept: RoundSecrets, identity: bytes) -> Statement:
    """Return what this device was told when it hid its update, signed."""
    if kept.work is None or not kept.masked:
        raise BadSecret("there is no update to state anything of")
    whole = whole_of(kept.work.cohort, kept.work.colluders)
    said = {"present": present_of(kept.present, whole), "scale": kept.scale}
    return Statement(**said, signature=pads.sign(identity, kept.context, said).hex())


def present_of(names: Collection[str], whole: str) -> str:
    """Return the SHA-256 of the devices of a cell that are said to have shared, in such a round."""
    return _digest(sorted(names), whole)


def check_statement(statement: Statement, identity: str, context: str, name: str) -> None:
    """Raise BadSecret unless a device has stated this in a round."""
    public, signature = bytes.fromhex(identity), bytes.fromhex(statement.signature)
    pads.check_signature(public, signature, context, statement.said(), name)


def agree(kept: RoundSecrets, name: str, work: SecureWork, identity: bytes) -> tuple[RoundSecrets, Agree]:
    """Return a signature of who is left and who has vanished. Raises BadSecret for a second or a wrong story in one
    round."""
    _check_context(kept, work)
    if kept.work is None or not kept.sealed:
        raise BadSecret("the coordinator asks for shares before an update was sent")
    if kept.work.cohort[name] != pads.public_identity(identity).hex():
        raise BadSecret("the coordinator tells of another identity key of this device than it has; nothing is signed")
    found = story(kept.context, whole_of(kept.work.cohort, kept.work.colluders), work)
    if kept.story not in ("", found):
        raise BadSecret("the coordinator tells two stories of who is left; nothing is signed")
    _check_story(kept, kept.work, name, work)
    said = {STORY: found}
    return replace(kept, story=found), Agree(signature=pads.sign(identity, kept.context, said).hex())


def story(context: str, whole: str, work: SecureWork) -> str:
    """Return the SHA-256 of who is in a round, in which cells, who is left, and who has vanished."""
    cells = sorted(sorted(cell) for cell in work.cells)
    return _digest(context, whole, cells, sorted(work.left), sorted(work.gone))


def check_agreement(agreed: Agree, identity: str, context: str, told: str, name: str) -> None:
    """Raise BadSecret unless a device has signed this story."""
    public, signature = bytes.fromhex(identity), bytes.fromhex(agreed.signature)
    pads.check_signature(public, signature, context, {STORY: told}, name)


def _check_story(kept: RoundSecrets, before: SecureWork, name: str, work: SecureWork) -> None:
    """Raise BadSecret unless the coordinator's story fits what this device was told ``before``, and what all left
    state."""
    left, gone, cohort = set(work.left), set(work.gone), before.cohort
    if left & gone:
        raise BadSecret("the coordinator asks for both kinds of shares of one device; nothing is told")
    known = set().union(*map(set, work.cells)) if work.cells else set[str]()
    if name not in left or not (left | gone) <= known or sum(map(len, work.cells)) > len(known):
        raise BadSecret("the coordinator's cells do not hold each device once; nothing is told")
    if not known <= cohort.keys() or set(before.cell) not in [set(cell) for cell in work.cells]:
        raise BadSecret("the coordinator has changed the cell of this device; nothing is told")
    if (left | gone) & set(before.cell) != set(kept.present):
        raise BadSecret("the coordinator speaks of other devices of the cell than this update is hidden with")
    if left != work.statements.keys():
        raise BadSecret("the coordinator does not show what everybody who is left has stated")
    whole = whole_of(cohort, before.colluders)
    for cell in work.cells:
        present, scales = present_of((left | gone) & set(cell), whole), set[str]()
        for other in sorted(left & set(cell)):
            statement = work.statements[other]
            check_statement(statement, cohort[other], kept.context, other)
            if statement.present != present:
                raise BadSecret(f"{other} was told of other devices than are said to be in its cell, or in the round")
            scales.add(statement.scale)
        if len(scales) > 1:
            raise BadSecret("devices of one cell were told of different numbers or masks; nothing is told")
        if name in cell and kept.scale not in scales:
            raise BadSecret("the coordinator has changed what this device has stated")


def unmask(kept: RoundSecrets, name: str, work: SecureWork) -> tuple[RoundSecrets, Unmask]:
    """Return the shares that the coordinator asks for: of self-masks of who is left, of pads of who has vanished.

    None of a cell of which too few are left, nor of a device that sealed its shares wrongly or for another cell. Raises
    BadSecret for questions that would give a single update away.
    """
    _check_context(kept, work)
    if kept.told is not None:
        return kept, kept.told
    if kept.work is None or not kept.sealed:
        raise BadSecret("the coordinator asks for shares before an update was sent")
    cohort, left, gone = kept.work.cohort, set(work.left), set(work.gone)
    whole = whole_of(cohort, kept.work.colluders)
    if not kept.story or story(kept.context, whole, work) != kept.story:
        raise BadSecret("the coordinator tells another story of who is left than was signed; nothing is told")
    signed = 0
    for other, signature in work.signatures.items():
        if other in cohort:
            check_agreement(Agree(signature=signature), cohort[other], kept.context, kept.story, other)
            signed += 1
    if signed < most_of(len(cohort), kept.work.colluders):
        raise BadSecret(f"{signed} of {len(cohort)} devices have signed who is left, which others may not have")
    least = least_cell(kept.work.colluders)
    open_cells = [set(cell) for cell in work.cells if len(left & set(cell)) >= least]
    own = pads.pair_of(kept.shares_secret, kept.context, SHARES)
    peers = {peer.name: peer for peer in kept.work.peers}
    cell_of = {other: cell for cell in open_cells for other in cell}
    seeds, pad_shares = {}, {}
    for other, sealed in kept.sealed.items():
        if other not in peers or other not in cell_of:
            continue
        key = pads.agree(own, bytes.fromhex(peers[other].keys.shares), kept.context, SHARES)
        try:
            about = about_shares(other, name, sorted(cell_of[other]), whole)
            message = pads.unseal(key, bytes.fromhex(sealed), about, other)
        except BadSecret:
            continue  # one device that seals nonsense does not end the round of others
        if other in left:
            seeds[other] = message[SHARE_BYTES:].hex()
        elif other in gone:
            pad_shares[other] = message[:SHARE_BYTES].hex()
    told = Unmask(seeds=seeds, pads=pad_shares)
    return replace(kept, told=told), told
