"""A device's part in secure rounds: its secrets on disk, and its answers to the phases.

    secure.json   secrets of the current round, readable only by the owner
    peers.json    name -> identity key of known devices; a changed key is refused

Both are written before an answer is sent, so that it is the same after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, same_mask
from sparrow.protocol.messages import Assignment, Kind
from sparrow.protocol.neurons import mask_digest
from sparrow.protocol.secure import device, pads
from sparrow.protocol.secure.consistency import digest_in, model_digest, round_digest
from sparrow.protocol.secure.device import RoundSecrets
from sparrow.protocol.secure.fine import hide_extras, statistics
from sparrow.protocol.secure.messages import SecureWork, Statement
from sparrow.protocol.secure.numbers import Scale, Words
from sparrow.protocol.secure.pads import BadSecret
from sparrow.protocol.settings import FederationSettings

from ..methods import Job, Update, load_method
from ..methods.merging import is_whole, sent_values
from ..tasks import count_examples
from .demands import SecureOnly
from .state import StateFolder
from .trust import Trust

SECRETS = "secure.json"
PEERS = "peers.json"


@dataclass(frozen=True)
class Hidden:
    """A masked update."""

    values: Words
    # Words after the values (``secure.fine``).
    extras: Words
    # The round's facts, signed by the device.
    statement: Statement
    # Number of clipped values.
    clipped: int


class SecureRound:
    """The secure rounds of one device. identity: its private key, 32 bytes."""

    def __init__(
        self, folder: StateFolder, name: str, identity: bytes, demands: SecureOnly | None, trust: Trust
    ) -> None:
        self._folder = folder
        self._name = name
        self._identity = identity
        self._demands = demands or SecureOnly()
        self._trust = trust

    def answer(self, assignment: Assignment) -> bytes:
        """Return the JSON answer to a phase. Raises BadSecret for a request that would reveal this device's update."""
        work = told(assignment)
        match assignment.kind:
            case Kind.keys:
                return self._keys(work)
            case Kind.shares:
                return self._shares(work)
            case Kind.agree:
                kept, agreed = device.agree(self._kept(work), self._name, work, self._identity)
                self._keep(kept)
                return agreed.model_dump_json().encode()
            case Kind.unmask:
                kept, said = device.unmask(self._kept(work), self._name, work)
                self._keep(kept)
                return said.model_dump_json().encode()
        raise ProtocolError(f"a secure round has no phase {assignment.kind.value}; update this SDK")

    def mask(self, job: Job, update: Update, metrics: Mapping[str, float | None] | None) -> Hidden:
        """Return the rounded and masked difference of an update from the received model, and of metrics if any. Raises
        BadSecret if the coordinator breaks the protocol.
        """
        work = told(job.assignment)
        settings = job.assignment.settings
        kept = self._kept(work)
        if kept.work is None:
            raise BadSecret("the coordinator asks for an update before shares were exchanged")
        check_alone(job, update)
        scale = Scale(work.bits, len(kept.work.cell), work.value_range, work.largest_weight)
        own = min(float(count_examples(job.task.train)), work.largest_weight)
        if work.weight != own:
            raise BadSecret(
                f"the coordinator gives this update a weight of {work.weight:g}, instead of {own:g} for its samples",
                failure=Failure("secure-refused/weight"),
            )
        base = np.ascontiguousarray(sent_values(job.manifest, job.received, update.mask), "<f4")
        change = _clipped(np.asarray(update.values, np.float32) - base, settings, scale)
        places = statistics(job.manifest, update.mask)
        moved = change[places].astype(np.float64)
        change[places] = 0.0
        chance = np.random.Generator(np.random.PCG64(job.seed("secure")))
        words, clipped = scale.round(change, work.weight, chance)
        extras, beyond = hide_extras(moved, base[places], metrics, scale, work.weight, chance)
        mask = mask_digest(job.manifest, update.mask) if isinstance(update.mask, NeuronMask) else ""
        kept, masked = device.mask(kept, self._name, work, np.concatenate([words, extras]), mask)
        self._keep(kept)
        count = len(words)
        return Hidden(masked[:count], masked[count:], device.state(kept, self._identity), clipped + beyond)

    def check_round(self, job: Job) -> None:
        """Raise BadSecret unless a round's model, settings and plan match the digest that its devices signed."""
        received = job.received
        if received is None or not is_whole(job.manifest, received):
            raise BadSecret(
                "the coordinator sends only a part of the model; a secure round needs all of it",
                failure=Failure("secure-refused/model"),
            )
        assignment = job.assignment
        model = model_digest(received.values, received.mask)
        found = round_digest(job.manifest, model, assignment.settings, assignment.plan, assignment.round)
        if found != digest_in(self._kept(told(assignment)).context):
            raise BadSecret(
                "the model, settings or plan of this round differ from those that its devices signed; this device does "
                "not train",
                failure=Failure("secure-refused/model"),
            )

    def _keys(self, work: SecureWork) -> bytes:
        kept = self._read()
        # Repeat the answer after a crash.
        if kept is not None and kept.context == work.context:
            return device.public_keys(kept, self._identity).model_dump_json().encode()
        kept, keys = device.begin(work.context, self._identity)
        self._keep(kept)
        return keys.model_dump_json().encode()

    def _shares(self, work: SecureWork) -> bytes:
        fault = self._demands.fault(work, self._name)
        if fault is not None:
            raise BadSecret(
                f"{fault}; this device sends neither shares nor an update", failure=Failure("secure-refused/demands")
            )
        self._trust.check_cohort(len(work.cohort))
        own = {self._name: pads.public_identity(self._identity).hex()}
        known = json.loads(self._folder.cached(PEERS) or b"{}") | own
        kept, shares = device.share(self._kept(work), self._name, work, known)
        self._keep(kept)
        met = known | work.cohort
        if met != known:
            self._folder.cache(PEERS, json.dumps(met).encode())
        return shares.model_dump_json().encode()

    def _kept(self, work: SecureWork) -> RoundSecrets:
        kept = self._read()
        if kept is None or kept.context != work.context:
            raise BadSecret(
                "this device has no keys for this round: it lost its state, or was not asked for keys",
                failure=Failure("secure-refused/state"),
            )
        return kept

    def _read(self) -> RoundSecrets | None:
        data = self._folder.cached(SECRETS)
        return RoundSecrets.from_json(data.decode()) if data else None

    def _keep(self, kept: RoundSecrets) -> None:
        self._folder.cache(SECRETS, kept.to_json().encode())


def _clipped(change: NDArray[np.float32], settings: FederationSettings, scale: Scale) -> NDArray[np.float32]:
    """Return the change clipped to ``update_clip`` (2-norm), with differential privacy also after rounding.

    Raises BadSecret if rounding alone exceeds the bound.
    """
    longest = settings.update_clip
    if longest is None:
        return change
    if settings.noise_multiplier is not None:
        longest -= scale.most_rounded(len(change))
        if longest <= 0:
            raise BadSecret(
                "rounding alone lengthens an update beyond update_clip; the federation needs secure_bits 32",
                failure=Failure("secure-refused/rounding"),
            )
    norm = float(np.linalg.norm(change.astype(np.float64)))
    return change if norm <= longest else (change * (longest / norm * (1 - 1e-6))).astype(np.float32)


def check_alone(job: Job, update: Update) -> None:
    """Raise BadSecret for an update with more than values, or with a mask that depends on the data."""
    if update.parts:
        raise BadSecret(
            f"the coordinator asks for {', '.join(update.parts)} in addition to masked values; this device sends no "
            f"update",
            failure=Failure("secure-refused/parts"),
        )
    if not _follows(job, update):
        raise BadSecret(
            "this device chose the mask of its update itself, and the mask would be sent unencrypted",
            failure=Failure("secure-refused/parts"),
        )


def _follows(job: Job, update: Update) -> bool:
    """Return True if a mask follows from the assignment or the payload."""
    mask = update.mask
    if mask is None:
        return True
    if isinstance(mask, ElementMask):
        return job.received is not None and same_mask(mask, job.received.mask)
    if isinstance(mask, BlockMask):
        # All blocks, or only the tensors without blocks.
        return bool(mask.on.all()) or not mask.on.any()
    work = job.assignment.work
    if work is None:
        return False
    if same_mask(mask, draw_neurons(job.manifest, NeuronDraw(work.key, work.ratio))):
        return True
    active = load_method(job.assignment.settings.method).active
    return active is not None and same_mask(mask, active.sample(job.manifest, work.ratio))


def told(assignment: Assignment) -> SecureWork:
    """Return an assignment's secure round. Raises ProtocolError if it has none."""
    if assignment.secure is None:
        raise ProtocolError("the assignment does not describe its secure round; update the coordinator")
    return assignment.secure
