"""What a device keeps of its work and sends: masks, the outbox, and the cost of both."""

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

from ...errors import NotAllowed, NotAuthenticated, NotFound, Refused, RoundOver
from ...methods import DeviceState
from ..local_noise import WITHHELD
from ..state import Pending, StateFolder, Totals
from .judging import Judging
from .options import Device, SessionOptions

log = logging.getLogger(__name__)

JSON_TYPE = "application/json"
MASK = "mask.bits"
"""The file of the mask that this device holds: of elements, as last received, or of the neurons that it has chosen."""


def load_mask(folder: StateFolder, manifest: Manifest) -> ElementMask | NeuronMask | None:
    """Return the mask that a device holds. A file that cannot be read counts as none: it is sent, or chosen, again."""
    data = folder.cached(MASK) or b""
    try:
        return mask_from_file(manifest, data[32:]) if data[:32] == hashlib.sha256(data[32:]).digest() else None
    except ProtocolError:
        return None


class Sending(Judging):
    """A device that keeps results until the coordinator has them."""

    def __init__(self, device: Device, options: SessionOptions) -> None:
        super().__init__(device, options)
        self.mask = load_mask(self.folder, self.manifest)
        self._uploading = 0.0  # seconds that the last upload took
        self._next: Assignment | None = None  # what came with the answer to the last update

    def _holding(self) -> tuple[str | None, str | None]:
        """Return the digests of the mask and of the global model that this device holds."""
        return mask_digest(self.manifest, self.mask) if self.mask else None, self.progress.model

    def _keep_mask(self, mask: ElementMask | NeuronMask | None) -> None:
        if mask is not None and not same_mask(mask, self.mask):
            data = mask_to_file(self.manifest, mask)
            self.folder.cache(MASK, hashlib.sha256(data).digest() + data)
            self.mask = mask

    def _hand_back(self, assignment_id: str, reason: PauseReason | Failure) -> None:
        if self._options.local_noise is not None and not isinstance(reason, PauseReason):
            reason = WITHHELD
        # It is over, or was withdrawn, as a preparation that took too long.
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
        """Keep the new state and the update together, then send it; returns what sending cost."""
        self._keep_mask(state.neurons)  # first: without the rest it is chosen again, from the same model
        pending = self.folder.put_outbox(assignment.assignment_id, assignment.kind, body)
        if feedback is not None:
            self.folder.put_owed(pending)
        changed |= {"memory": dict(state.memory), "model": state.model, "pending": pending, "everything": self.moved}
        if state.personal is self.personal and state.own is self.folder.own and feedback is None:
            self._save_progress(**changed)
        else:
            before, self.personal = self.progress.best, state.personal
            self.progress = self.progress.model_copy(update=changed)
            best = changed.get("best") not in (None, before)
            self._personal_is = self.progress.best if best else None
            self.folder.save(self.manifest, self.personal, self.progress, state.own, feedback, best=best)
        return self._send(pending, body)

    def _send(self, pending: Pending, body: bytes | None = None) -> Phase:
        if body is None:
            body = self.folder.outbox(pending)
        media_type = bundle.MEDIA_TYPE if pending.kind in (Kind.train, Kind.prepare) else JSON_TYPE
        with self._telemetry.phase("upload") as upload:
            try:
                # A host opens the session anew for whatever comes next.
                self._next = self.transport.update(
                    *(pending.assignment_id, body, media_type, self.progress.upload_cost),
                    *((None, None) if self._options.hosted else self._holding()),
                    goes_on=not self._options.hosted,
                )
            except RoundOver as error:
                # Too late, or answered already: the local step stays.
                log.info("the update was not needed any more: %s", error.detail)
                self._owe_as_before(pending)
                self._say_what_stays(pending)
            except (NotAuthenticated, NotAllowed):
                raise
            except Refused as refusal:
                # It would be refused again. The local step stays, and the round need not wait for this device.
                log.warning("the update was refused: %s", refusal.detail)
                self._owe_as_before(pending)
                self._save_progress(pending=None)
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
        """Without an update the coordinator cannot know that this device holds a model, and would send it all again."""
        holds = pending.kind in (Kind.train, Kind.personalise) and self.personal is not None
        # The coordinator may have marked a late device absent.
        self._tell(ChangeDevice(holds_model=True if holds else None, conditions=Conditions()))
