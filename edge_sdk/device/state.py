"""The state that a device keeps on disk between rounds, so that it survives a crash at any point.

    state/
      identity.json       federation, name, enrolment key, device id, token; readable by its owner alone
      model.safetensors   the personal model by name, and beside it, as JSON, ``Progress`` as of when it was saved; also
                          the method's own arrays, and what rounding took from updates (``quantization``)
      best.safetensors    the personal model to use, the best on validation data: a second link to the file above as it
                          was after a round, or a file with a mixture of the personal and the finished global model
      progress.json       the ``Progress`` since then, where it went on and the model stayed
      outbox.bundle       the update being sent, until it is acknowledged
      owed.safetensors    what rounding had taken before that update, should it not count
      federation.json     the federation's settings, this device's name and budget, as of its last start
      manifest.json  skeleton.onnx  step.onnx  evaluation.onnx  frozen.values
      first.values  mask.bits
      lock

Model, progress, outbox and identity are compared with their digests before they are used, masks and the caches, too:
what was damaged on the disk is neither trained from nor sent. Of the first four that ends the device with a line that
says what to move away; the others are fetched or chosen again.

Every file is written under another name, flushed and renamed, so it is always whole. The personal model and the
progress that belongs to it share one file, because a new model with an old counter would train a round twice; later
progress has a file of its own, which names the save that it belongs to. The outbox is written before them and counts
only once they name it: killed in between, the device trains the round again, from the same model, to the same update.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparrow.protocol import checkpoint, personal
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.messages import Evaluation, Kind, Moved, Phase, UploadCost

from ..errors import StateError
from . import difference

OUTBOX, OWED = "outbox.bundle", "owed.safetensors"

PARTIAL = ".partial"
"""The end of the name of a file that is not whole yet."""


@dataclass(frozen=True)
class Reference:
    """A model that others are stored as differences from, and what tells it from another."""

    tensors: Tensors
    digest: str

    @classmethod
    def of(cls, tensors: Tensors) -> Reference:
        """Return the reference of these tensors."""
        return cls(tensors, hashlib.sha256(checkpoint.save(tensors)).hexdigest())


class Identity(BaseModel):
    """The identity of this device at its coordinator. ``identity_key`` is the private one of secure rounds.
    ``device_id`` and ``token`` come with enrolment; ``previous`` is the token of before, as long as it is not known
    whether the coordinator takes the new one.
    """

    model_config = ConfigDict(frozen=True)

    federation: str
    federation_uid: str
    name: str
    enrolment_key: str
    identity_key: str
    device_id: str | None = None
    token: str | None = None
    previous: str | None = None


class Pending(BaseModel):
    """An update in the outbox."""

    model_config = ConfigDict(frozen=True)

    assignment_id: str
    kind: Kind
    sha256: str


class Totals(BaseModel):
    """The costs of a device so far. Measured and estimated joules stay apart; of throttling and heat the sum and the
    peak of what was seen, None where nothing was."""

    model_config = ConfigDict(frozen=True)

    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    joules_measured: float = 0.0
    joules_estimated: float = 0.0
    seconds_without_joules: float = 0.0
    paused_seconds: float = 0.0
    throttled_seconds: float | None = None
    celsius_peak: float | None = None

    @property
    def joules(self) -> float:
        """Measured and estimated joules together, for a limit only."""
        return self.joules_measured + self.joules_estimated

    def plus(self, phase: Phase) -> Totals:
        """Return the totals after one more phase."""
        joules = phase.joules or 0.0
        estimated = phase.quality == "estimated"
        return Totals(
            seconds=self.seconds + phase.seconds,
            bytes_down=self.bytes_down + phase.bytes_down,
            bytes_up=self.bytes_up + phase.bytes_up,
            joules_measured=self.joules_measured + (0.0 if estimated else joules),
            joules_estimated=self.joules_estimated + (joules if estimated else 0.0),
            seconds_without_joules=self.seconds_without_joules + (phase.seconds if phase.joules is None else 0.0),
            paused_seconds=self.paused_seconds + phase.paused_seconds,
            throttled_seconds=_known(lambda one, other: one + other, self.throttled_seconds, phase.throttled_seconds),
            celsius_peak=_known(max, self.celsius_peak, phase.celsius_peak),
        )


def _known(join: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    """Both joined, or the one that is there."""
    return join(one, other) if one is not None and other is not None else other if one is None else one


class Best(BaseModel):
    """The personal model that is the best so far: the round it is of, that model on validation data, the lowest loss
    there of all models so far, the share of the global model that was mixed into it, which candidate it is if the fleet
    helped to choose (``protocol.evidence``), the digest of the manifest whose graphs judged it, and that of the
    validation data (``device.session.learning``)."""

    model_config = ConfigDict(frozen=True)

    round: int
    validation: Evaluation
    lowest_loss: float
    global_share: float = 0.0
    taken: str = ""
    manifest: str = ""
    data: str = ""


class NewData(BaseModel):
    """The best model, of ``round``, on the validation data that it was chosen by, and on others that came since; None
    if its loss there is not finite."""

    model_config = ConfigDict(frozen=True)

    round: int
    before: Evaluation
    after: Evaluation | None


class Progress(BaseModel):
    """The progress of a device. ``memory`` is the method's own; ``training`` and ``evaluation`` are what each cost,
    and ``everything`` counts all bodies, whatever they were for; ``model`` names the global model that the state lets
    the method rebuild. ``validation_before`` is the model as first received, ``validation_global`` the global model as
    last judged, both on validation data; None where that was not measured. ``failures`` are rounds in which training
    failed, ``failure`` says why the last of them did. ``new_data``: the validation data changed. ``updates``: how many
    were sent, by the multiplier of their local noise, 0 without any.
    """

    model_config = ConfigDict(frozen=True)

    rounds: int = 0
    last_round: int = 0
    steps: int = 0
    stopped_round: int | None = None
    adapted: bool = False
    updates: dict[float, int] = Field(default_factory=dict)
    failures: int = 0
    failure: str | None = None
    new_data: NewData | None = None
    accuracy_before: float | None = None
    memory: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    validation_before: Evaluation | None = None
    validation_global: Evaluation | None = None
    best: Best | None = None
    training: Totals = Totals()
    evaluation: Totals = Totals()
    everything: Moved = Moved()
    pending: Pending | None = None
    upload_cost: UploadCost | None = None


class FolderLock:
    """Holds a folder, made where it is missing, for this process; a context manager. Raises StateError.

    durable: flush the names of the folders that are made, so that a power cut takes none of them."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        try:
            make_folder(path, durable=durable)
            _close_to_others(path)
            self._file = os.fdopen(os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w")
        except OSError as error:
            raise StateError(f"{path} cannot be used ({error.strerror}); give another --state-dir") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StateError(
                f"another process uses {path}; stop it, or give this device a --device-name or --state-dir of its own"
            ) from None

    def close(self) -> None:
        """Let another process have the folder."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_folder(path: Path, *, durable: bool) -> None:
    """Make a folder and those around it, for its owner alone. durable: so that a power cut takes none of them."""
    if path.is_dir():
        return
    make_folder(path.parent, durable=durable)
    path.mkdir(exist_ok=True, mode=0o700)
    if durable:
        _flush_folder(path.parent)


def _close_to_others(path: Path) -> None:
    """Take the rights of others from a folder of before that a device has used; a new one has none."""
    found = path.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid() and (path / "identity.json").exists():
        path.chmod(0o700)


def default_root(server: str, federation: str) -> Path:
    """Return the default folder of devices' state, under the user's state folder (XDG)."""
    address = urlsplit(server)
    place = re.sub(r"[^A-Za-z0-9.-]+", "_", address.netloc + address.path.rstrip("/"))
    return state_home() / place / federation


def state_home() -> Path:
    """Return the user's folder of state (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sparrow"


class StateFolder:
    """One device's state folder, held by one process at a time. Raises StateError when it cannot be used.

    durable: flush every file to the disk, so that it survives a power cut and not only a killed process. reference: a
    model that stays the same as long as the folder is used, and its digest; the personal one is stored as its
    difference from it.
    """

    def __init__(self, path: Path, *, durable: bool = True, reference: Reference | None = None) -> None:
        self.path = path
        self._durable = durable
        self._reference = reference.tensors if reference else None
        self._reference_digest = reference.digest if reference else None
        self._saves = 0
        self.own: Tensors = {}
        self.feedback: Tensors = {}
        self._lock = FolderLock(path, durable=durable)

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def known_identity(self) -> Identity | None:
        """Return the identity of this device, or None in a new folder."""
        path = self.path / "identity.json"
        return _read_identity(path) if path.exists() else None

    def identity(self, federation: str, federation_uid: str, name: str) -> Identity:
        """Return the identity of this device; in a new folder, make one with a fresh enrolment key."""
        identity = self.known_identity()
        if identity is None:
            identity = Identity(
                federation=federation,
                federation_uid=federation_uid,
                name=name,
                enrolment_key=secrets.token_urlsafe(32),
                identity_key=secrets.token_hex(32),
            )
            self.save_identity(identity)
            return identity
        if (identity.federation, identity.name) != (federation, name):
            raise StateError(
                f"{self.path} belongs to {identity.name} in {identity.federation}, not to {name} in {federation}; use "
                f"another --state-dir"
            )
        if identity.federation_uid != federation_uid:
            raise StateError(
                f"{self.path} belongs to another federation called {federation}: on another coordinator, or of before "
                f"this one was set up anew; use another --state-dir, or move this one away to start afresh"
            )
        return identity

    def save_identity(self, identity: Identity) -> None:
        """Keep who this device is."""
        kept = {"sha256": personal.UNSIGNED, **identity.model_dump()}
        self._write("identity.json", personal.sign(json.dumps(kept, indent=1).encode()))

    def load(self, manifest: Manifest) -> tuple[Tensors | None, Progress]:
        """Return the personal model, None before the first download, and the progress that belongs to it.

        From then on ``own`` are the method's arrays beside it, by name, and ``feedback`` what rounding took from
        updates: name -> float32; empty where there are none.
        """
        saved = self._read(personal.MODEL)
        digest, tensors = manifest.values_digest, None
        if saved is not None:
            digest = saved.file.manifest
            self._saves, self.own, self.feedback = saved.file.save, saved.file.own, saved.file.feedback
            tensors = saved.model
        progress = self._progress(saved)
        self._check(manifest, digest, tensors)
        if saved is not None and saved.file.best and progress.best == saved.progress.best:
            self.keep_as_best()  # killed before this was done, it is done now
        return tensors, progress

    def forget_model(self) -> None:
        """Remove the personal model and what belongs to it; keep what the device has spent so far."""
        before = self.progress()
        spent = {name: getattr(before, name) for name in ("training", "evaluation", "everything", "updates")}
        kept = Progress().model_copy(update=spent)
        for name in (personal.BEST, personal.MODEL, OUTBOX, OWED, personal.OWN):
            (self.path / name).unlink(missing_ok=True)
        self._saves = 0
        self.own, self.feedback = {}, {}
        self.save_progress(kept)

    def progress(self) -> Progress:
        """Return the progress that is kept, whatever the federation's model is now. Raises StateError."""
        return self._progress(self._read(personal.MODEL))

    def _progress(self, saved: _Read | None) -> Progress:
        path, saves = self.path / personal.PROGRESS, self._saves if saved is None else saved.file.save
        try:
            later = personal.read_progress(path.read_bytes(), saves) if path.exists() else None
            if later is not None:
                return Progress.model_validate(later)
        except (ProtocolError, ValidationError, ValueError) as error:
            raise _damaged(path, error, "go on from its last round") from None
        return Progress() if saved is None else saved.progress

    def best(self, manifest: Manifest) -> Tensors | None:
        """Return the personal model that was the best on validation data, None where none was kept. Raises StateError
        for a file that is damaged or of another model."""
        saved = self._read(personal.BEST)
        if saved is None:
            return None
        self._check(manifest, saved.file.manifest, saved.model)
        return saved.model

    def _read(self, name: str) -> _Read | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            saved = personal.read(path.read_bytes())
            progress = Progress.model_validate(saved.progress)
            tensors = saved.stored
            if saved.reference is not None:
                if saved.reference != self._reference_digest:
                    raise StateError(
                        f"{self.path} holds a difference from a model that is not at hand: only the fleet that wrote "
                        f"it can open it, beside its reference.safetensors"
                    )
                tensors = difference.add(tensors, self._reference or {})
        except (ProtocolError, ValidationError, ValueError) as error:
            raise _damaged(path, error, "start this device anew") from None
        return _Read(saved, progress, tensors if saved.model else None)

    def _check(self, manifest: Manifest, digest: str, tensors: Tensors | None) -> None:
        if digest != manifest.values_digest:
            raise StateError(
                f"{self.path} holds a model of another manifest; use another --state-dir for this federation"
            )
        if tensors is not None:
            manifest.check_tensors(tensors, what=f"the tensors in {self.path}")

    def keep_as_best(self) -> None:
        """Keep the model as it is now under its other name: a second link to the file, or a copy on a file system
        without links."""
        model, best = self.path / personal.MODEL, self.path / personal.BEST
        if best.exists() and best.samefile(model):
            return
        partial = best.with_name(best.name + ".partial")
        partial.unlink(missing_ok=True)
        try:
            os.link(model, partial)
        except OSError:
            self._write(personal.BEST, model.read_bytes())
            return
        partial.replace(best)
        if self._durable:
            _flush_folder(self.path)

    def save(
        self,
        manifest: Manifest,
        model: Tensors | None,
        progress: Progress,
        own: Tensors | None = None,
        feedback: Tensors | None = None,
        *,
        best: bool = False,
    ) -> None:
        """Keep personal model, progress, the method's arrays and what rounding took, durably, in one step.

        The last two stay as they were where None is given. best: the model is also kept as the best one.
        """
        own, feedback = self.own if own is None else own, self.feedback if feedback is None else feedback
        saved = self._saved(manifest, model, progress, self._saves + 1, best)
        self._write(personal.MODEL, personal.write(replace(saved, own=own, feedback=feedback)))
        self._saves, self.own, self.feedback = self._saves + 1, own, feedback  # not before: the disk may be full
        if best:
            self.keep_as_best()

    def save_best(self, manifest: Manifest, model: Tensors, progress: Progress) -> None:
        """Keep ``model`` as the best one, durably, beside the model that training goes on from."""
        self._write(personal.BEST, personal.write(self._saved(manifest, model, progress, self._saves, best=True)))

    def _saved(
        self, manifest: Manifest, model: Tensors | None, progress: Progress, save: int, best: bool
    ) -> personal.Saved:
        stored, reference = model or {}, None
        if model is not None and self._reference is not None:
            stored, reference = difference.subtract(model, self._reference), self._reference_digest
        return personal.Saved(
            stored=stored,
            own={},
            feedback={},
            manifest=manifest.values_digest,
            save=save,
            model=model is not None,
            reference=reference,
            progress=progress.model_dump(mode="json"),
            best=best,
        )

    def save_progress(self, progress: Progress) -> None:
        """Keep later progress, durably, beside the model that was saved last."""
        self._write(personal.PROGRESS, personal.write_progress(self._saves, progress.model_dump(mode="json")))

    def put_outbox(self, assignment_id: str, kind: Kind, body: bytes) -> Pending:
        """Lay an update out for sending; it counts once ``save`` has kept a progress that names it."""
        self._write(OUTBOX, body)
        return Pending(assignment_id=assignment_id, kind=kind, sha256=hashlib.sha256(body).hexdigest())

    def outbox(self, pending: Pending) -> bytes:
        """Return the update that ``pending`` names. Raises StateError when it is not there whole."""
        body = self.cached(OUTBOX) or b""
        if hashlib.sha256(body).hexdigest() != pending.sha256:
            raise StateError(f"{self.path / OUTBOX} is not the update it should be; use another --state-dir")
        return body

    def put_owed(self, pending: Pending) -> None:
        """Keep what is owed now until the update that ``pending`` names has counted; before ``save`` keeps what is owed
        after it."""
        note = json.dumps({"sha256": personal.UNSIGNED, "update": pending.sha256})
        self._write(OWED, personal.sign(checkpoint.save(self.feedback, note)))

    def owed_before(self, pending: Pending) -> Tensors | None:
        """Return what was owed before the update that ``pending`` names was made, None where it changes nothing.

        Where the file is damaged nothing is owed: what is not known must not be sent.
        """
        body = self.cached(OWED)
        if body is None:
            return None
        try:
            tensors, note = checkpoint.load(body)
            kept = json.loads(note)
            personal.check_signed(body, kept["sha256"])
        except (ProtocolError, ValueError, KeyError, TypeError):
            return {}
        return tensors if kept["update"] == pending.sha256 else None

    def forget_owed(self) -> None:
        """Forget what was owed before an update that has counted."""
        (self.path / OWED).unlink(missing_ok=True)

    def cached(self, name: str) -> bytes | None:
        """Return a downloaded file kept beside the state, or None."""
        path = self.path / name
        return path.read_bytes() if path.exists() else None

    def cache(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Keep a downloaded file beside the state. durable: False for one that its reader compares with a digest, and
        downloads again if the power was cut before it was on the disk."""
        write_atomically(self.path / name, data, durable=durable and self._durable)

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, data, durable=self._durable)


@dataclass(frozen=True)
class _Read:
    """A model's file as read: its content, the progress in it, and the model, None where there is none in it."""

    file: personal.Saved
    progress: Progress
    model: Tensors | None


def _damaged(path: Path, error: Exception, what: str) -> StateError:
    return StateError(f"{path} is damaged ({error}); move it away to {what}")


def _read_identity(path: Path) -> Identity:
    body = path.read_bytes()
    try:
        identity = Identity.model_validate_json(body)
        personal.check_signed(body, json.loads(body).get("sha256"))
    except ValidationError as error:
        raise StateError(f"{path} cannot be read ({error.error_count()} faults); use another --state-dir") from None
    except ProtocolError as error:
        raise StateError(f"{path} is damaged ({error}); use another --state-dir") from None
    return identity


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file, for its owner alone, so that it is there whole or as it was before.

    durable: flushed to the disk as well."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if durable:
        _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    """Flush to the disk which files the folder has."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
