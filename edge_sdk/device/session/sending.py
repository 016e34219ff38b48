"""Storage and sending of results: masks, the outbox, and their costs."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress

from sparrow.protocol import bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronMask, same_mask
from sparrow.protocol.messages import (
    JUDGING,
    Assignment,
    ChangeDevice,
    Conditions,
    Kind,
    PauseReason,
    Phase,
    UploadCost,
)
from sparrow.protocol.neurons import mask_digest, mask_from_file, mask_to_file

from ...errors import Blocked, NotAllowed, NotAuthenticated, NotFound, Refused, RoundOver
from ...methods import DeviceState
from ..local_noise import WITHHELD
from ..state import Pending, StateFolder, Totals
from .judging import Judging
from .options import Device, SessionOptions

log = logging.getLogger(__name__)

JSON_TYPE = "application/json"
# File of the held mask: the last received one of elements, or the neurons that this device chose.
MASK = "mask.bits"


def load_mask(folder: StateFolder, manifest: Manifest) -> ElementMask | NeuronMask | None:
    """Return the mask that a device holds; None if the file is missing or damaged."""
    data = folder.cached(MASK) or b""
    try:
        return mask_from_file(manifest, data[32:]) if data[:32] == hashlib.sha256(data[32:]).digest() else None
    except ProtocolError:
        return None


class Sending(Judging):
    """A device that stores results until the coordinator has accepted them."""

    def __init__(self, device: Device, options: SessionOptions) -> None:
        super().__init__(device, options)
        self.mask = load_mask(self.folder, self.manifest)
        # Seconds of the last upload.
        self._uploading = 0.0
        # The assignment in the answer to the last update.
        self._next: Assignment | None = None
        # The coordinator's reason for refusing the update of the current work.
        self._refusal: str | None = None

    def _holding(self) -> tuple[str | None, str | None]:
        return mask_digest(self.manifest, self.mask) if self.mask else None, self.progress.model

    def _keep_mask(self, mask: ElementMask | NeuronMask | None) -> None:
        if mask is not None and not same_mask(mask, self.mask):
            data = mask_to_file(self.manifest, mask)
            self.folder.cache(MASK, hashlib.sha256(data).digest() + data)
            self.mask = mask

    def _hand_back(self, assignment_id: str, reason: PauseReason | Failure) -> None:
        if self._options.local_noise is not None and not isinstance(reason, PauseReason):
            reason = WITHHELD
        # The round may be over, or the assignment withdrawn.
        with suppress(RoundOver, NotFound):
            self.transport.hand_back(assignment_id, reason)

    def _keep_and_send(
        self,
        assignment: Assignment,
        body: bytes,
        state: DeviceState,
        feedback: Tensors | None = None,
        **changed: object,
    ) -> Phase:
        # First: after a crash, the same mask is chosen again from the same model.
        self._keep_mask(state.neurons)
        pending = self.folder.put_outbox(assignment.assignment_id, assignment.kind, body)
        if feedback is not None:
            self.folder.put_owed(pending)
        changed |= {"memory": dict(state.memory), "model": state.model, "pending": pending, "everything": self.moved}
        if state.personal is self.personal and state.own is self.folder.own and feedback is None:
            self._save_progress(**changed)
        else:
            before = self.progress.best
            self.personal = state.personal
            self.progress = self.progress.model_copy(update=changed)
            best = changed.get("best") not in (None, before)
            self._personal_is = self.progress.best if best else None
            self.folder.save(self.manifest, self.personal, self.progress, state.own, feedback, best=best)
        return self._send(pending, body)

    def _send(self, pending: Pending, body: bytes | None = None) -> Phase:
        if body is None:
            body = self.folder.outbox(pending)
        media_type = bundle.MEDIA_TYPE if pending.kind in (Kind.train, Kind.prepare) else JSON_TYPE
        # A host opens a new session for the next assignment.
        hosted = self._options.hosted
        mask, model = (None, None) if hosted else self._holding()
        with self._telemetry.phase("upload") as upload:
            try:
                self._next = self.transport.update(
                    pending.assignment_id,
                    body,
                    media_type,
                    self.progress.upload_cost,
                    mask,
                    model,
                    goes_on=not hosted,
                )
            except RoundOver as error:
                # Late, or already answered: the device keeps its local step.
                log.info("the update was no longer needed: %s", error.detail)
                self._owe_as_before(pending)
                self._say_what_stays(pending)
            except (NotAuthenticated, NotAllowed, Blocked):
                raise
            except Refused as refusal:
                # It would be refused again: keep the local step, and release the round.
                log.warning("the update was refused: %s", refusal.detail)
                self._owe_as_before(pending)
                self._refusal = f"the coordinator refused the update: {refusal.detail}"
                counted = pending.kind in (Kind.train, Kind.personalise)
                refused = {"refused": self.progress.refused + 1, "failure": self._refusal} if counted else {}
                self._save_progress(pending=None, **refused)
                self._hand_back(pending.assignment_id, Failure("update-refused"))
                self._say_what_stays(pending)
                return Phase()
        self._uploading = upload.cost.seconds
        account = "evaluation" if pending.kind in JUDGING else "training"
        totals: Totals = getattr(self.progress, account)
        cost = UploadCost(assignment_id=pending.assignment_id, upload=upload.cost, everything=self.moved)
        self._save_progress(pending=None, upload_cost=cost, **{account: totals.plus(upload.cost)})
        self.folder.forget_owed()
        return upload.cost

    def _owe_as_before(self, pending: Pending) -> None:
        """Restore the rounding residual of an update that was not accepted."""
        owed = self.folder.owed_before(pending)
        if owed is not None:
            self.folder.save(self.manifest, self.personal, self.progress, feedback=owed)

    def _say_what_stays(self, pending: Pending) -> None:
        holds = pending.kind in (Kind.train, Kind.personalise) and self.personal is not None
        # The coordinator may have marked a late device absent.
        self._tell(ChangeDevice(holds_model=True if holds else None, conditions=Conditions()))
