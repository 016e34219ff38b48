"""A device's state on disk, which survives a crash at any point.

    state/
      identity.json       federation, name, enrolment key, device id, token; readable only by the owner
      model.safetensors   personal model by name, with its ``Progress`` as JSON, the method's arrays, and the rounding
                          residual (``quantization``)
      best.safetensors    best personal model on validation data: a link to an earlier model.safetensors, or a mixture
      progress.json       later ``Progress``, if it changed without the model
      outbox.bundle       the update to send, until it is acknowledged
      owed.safetensors    rounding residual before that update, in case it is not accepted
      federation.json     the federation's settings, this device's name and budget, at its last start
      manifest.json  skeleton.onnx  step.onnx  evaluation.onnx  frozen.values
      first.values  mask.bits
      lock

All files are checked against digests before use. A damaged model, progress, outbox or identity stops the device; other
files are made again.

Files are replaced atomically. Model and progress share a file, because a new model with an old counter would train a
round twice. The outbox is written first and counts when the progress names it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparrow.places import user_folder
from sparrow.protocol import checkpoint, personal
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.messages import Evaluation, Kind, Moved, Phase, UploadCost

from ..errors import StateError
from . import difference

OUTBOX = "outbox.bundle"
OWED = "owed.safetensors"

# Suffix of incomplete files.
PARTIAL = ".partial"


@dataclass(frozen=True)
class Reference:
    """A model from which others are stored as differences."""

    tensors: Tensors
    digest: str

    @classmethod
    def of(cls, tensors: Tensors) -> Reference:
        """Make a reference from tensors."""
        return cls(tensors, hashlib.sha256(checkpoint.save(tensors)).hexdigest())


class Identity(BaseModel):
    """The identity of this device at its coordinator."""

    model_config = ConfigDict(frozen=True)

    federation: str
    federation_uid: str
    name: str
    enrolment_key: str
    # Private key of secure rounds.
    identity_key: str
    # From enrolment.
    device_id: str | None = None
    token: str | None = None
    # The old token, until the coordinator has accepted the new one.
    previous: str | None = None
    # Identifiers of the last starts, newest last.
    starts: tuple[str, ...] = ()


class Pending(BaseModel):
    """An update in the outbox."""

    model_config = ConfigDict(frozen=True)

    assignment_id: str
    kind: Kind
    sha256: str


class Totals(BaseModel):
    """Accumulated costs."""

    model_config = ConfigDict(frozen=True)

    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    joules_measured: float = 0.0
    joules_estimated: float = 0.0
    seconds_without_joules: float = 0.0
    paused_seconds: float = 0.0
    # None if never measured.
    throttled_seconds: float | None = None
    celsius_peak: float | None = None

    @property
    def joules(self) -> float:
        """Measured plus estimated joules; only for limits."""
        return self.joules_measured + self.joules_estimated

    def plus(self, phase: Phase) -> Totals:
        """Add a phase."""
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
    return join(one, other) if one is not None and other is not None else other if one is None else one


class Best(BaseModel):
    """The best personal model so far."""

    model_config = ConfigDict(frozen=True)

    round: int
    # Evaluation of the kept model.
    validation: Evaluation
    # Lowest loss of all models so far.
    lowest_loss: float
    # Global share of the global model in it.
    global_share: float = 0.0
    # The candidate's name, if all devices chose together (``protocol.evidence``).
    taken: str = ""
    # Digests of the manifest and of the validation data with which it was evaluated.
    manifest: str = ""
    data: str = ""


class NewData(BaseModel):
    """The best model, of ``round``, on old and new validation data; ``after`` is None if its loss is not finite."""

    model_config = ConfigDict(frozen=True)

    round: int
    before: Evaluation
    after: Evaluation | None


class Progress(BaseModel):
    """The progress of a device."""

    model_config = ConfigDict(frozen=True)

    rounds: int = 0
    last_round: int = 0
    steps: int = 0
    stopped_round: int | None = None
    adapted: bool = False
    # Multiplier of local noise -> number of sent updates.
    updates: dict[float, int] = Field(default_factory=dict)
    # Number of failed rounds.
    failures: int = 0
    # Number of rounds whose update the coordinator refused.
    refused: int = 0
    # Reason of the last failure or refusal.
    failure: str | None = None
    # Set if the validation data changed.
    new_data: NewData | None = None
    accuracy_before: float | None = None
    # Accuracy of the last evaluated local-only model.
    accuracy_alone: float | None = None
    # Memory of the method.
    memory: dict[str, Any] = Field(default_factory=dict)
    # Digest of the global model that the method can rebuild.
    model: str | None = None
    # Evaluation of the first received model.
    validation_before: Evaluation | None = None
    # Evaluation of the last evaluated global model.
    validation_global: Evaluation | None = None
    best: Best | None = None
    training: Totals = Totals()
    evaluation: Totals = Totals()
    everything: Moved = Moved()
    pending: Pending | None = None
    upload_cost: UploadCost | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the coordinator has accepted an update, or may still accept one."""
        return self.rounds > self.refused


class FolderLock:
    """Lock a folder for this process, creating it if missing; a context manager.

    Raises StateError if the folder is unusable or locked.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        # Innermost first.
        self.made = [each for each in (path, *path.parents) if not each.is_dir()]
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
        """Release the lock. Remove the folders that it created if they hold nothing else."""
        with suppress(OSError):
            if self.made and os.listdir(self._path) == ["lock"]:
                (self._path / "lock").unlink()
                for folder in self.made:
                    folder.rmdir()
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_folder(path: Path, *, durable: bool) -> None:
    """Create a folder and its parents, readable only by the owner. durable: flush them to disk."""
    if path.is_dir():
        return
    make_folder(path.parent, durable=durable)
    path.mkdir(exist_ok=True, mode=0o700)
    if durable:
        _flush_folder(path.parent)


def _close_to_others(path: Path) -> None:
    # Folders of older versions were readable by other users.
    found = path.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid() and (path / "identity.json").exists():
        path.chmod(0o700)


def default_root(server: str, federation: str) -> Path:
    """Return the default folder for the state of a federation's devices."""
    address = urlsplit(server)
    place = re.sub(r"[^A-Za-z0-9.-]+", "_", address.netloc + address.path.rstrip("/"))
    return state_home() / place / federation


def state_home() -> Path:
    """Return Sparrow's folder in the user's state folder (XDG)."""
    return user_folder("XDG_STATE_HOME")


class StateFolder:
    """One device's state folder, locked by one process. Raises StateError if it is unusable, locked or damaged.

    durable: flush files, to survive a power cut. reference: fixed model from which the personal one is stored as a
    difference.
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
        """Release the lock, and remove the folder if it is new and nothing was stored."""
        self._lock.close()

    def discard_new(self) -> None:
        """Remove the files of a folder that this object created."""
        if self._lock.made:
            for file in self.path.iterdir():
                if file.name != "lock":
                    file.unlink()

    @property
    def enrolled(self) -> bool:
        """Whether the folder belongs to a device that has enrolled."""
        identity = self.known_identity()
        return identity is not None and identity.device_id is not None

    def known_identity(self) -> Identity | None:
        """Return the stored identity; None in a new folder."""
        path = self.path / "identity.json"
        return _read_identity(path) if path.exists() else None

    def identity(self, federation: str, federation_uid: str, name: str) -> Identity:
        """Return the stored identity; in a new folder, create one with new keys."""
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
                f"{self.path} belongs to another federation called {federation}: on another coordinator, or created "
                f"before this one was reset; use another --state-dir, or move this one away to start again"
            )
        return identity

    def save_identity(self, identity: Identity) -> None:
        """Store the identity."""
        kept = {"sha256": personal.UNSIGNED, **identity.model_dump()}
        self._write("identity.json", personal.sign(json.dumps(kept, indent=1).encode()))

    def load(self, manifest: Manifest) -> tuple[Tensors | None, Progress]:
        """Return the personal model, if any, and its progress; set ``own`` and ``feedback``."""
        saved = self._read(personal.MODEL)
        digest = manifest.values_digest
        tensors = None
        if saved is not None:
            digest = saved.file.manifest
            self._saves = saved.file.save
            self.own = saved.file.own
            self.feedback = saved.file.feedback
            tensors = saved.model
        progress = self._progress(saved)
        self._check(manifest, digest, tensors)
        # Repeated in case of a crash before it was done.
        if saved is not None and saved.file.best and progress.best == saved.progress.best:
            self.keep_as_best()
        return tensors, progress

    def forget_model(self) -> None:
        """Remove the personal model and its progress; keep the accumulated costs."""
        before = self.progress()
        spent = {name: getattr(before, name) for name in ("training", "evaluation", "everything", "updates")}
        kept = Progress().model_copy(update=spent)
        for name in (personal.BEST, personal.MODEL, OUTBOX, OWED, personal.OWN):
            (self.path / name).unlink(missing_ok=True)
        self._saves = 0
        self.own = {}
        self.feedback = {}
        self.save_progress(kept)

    def progress(self) -> Progress:
        """Return the stored progress, for any model. Raises StateError if the file is damaged."""
        return self._progress(self._read(personal.MODEL))

    def _progress(self, saved: _Read | None) -> Progress:
        path = self.path / personal.PROGRESS
        saves = self._saves if saved is None else saved.file.save
        try:
            later = personal.read_progress(path.read_bytes(), saves) if path.exists() else None
            if later is not None:
                return Progress.model_validate(later)
        except (ProtocolError, ValidationError, ValueError) as error:
            raise _damaged(path, error, "resume from its last round") from None
        return Progress() if saved is None else saved.progress

    def best(self, manifest: Manifest) -> Tensors | None:
        """Return the best personal model, or None. Raises StateError if the file is damaged."""
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
                        f"{self.path} holds a difference from a model that is missing: only the fleet that wrote it "
                        f"can open it, together with its reference.safetensors"
                    )
                tensors = difference.add(tensors, self._reference or {})
        except (ProtocolError, ValidationError, ValueError) as error:
            raise _damaged(path, error, "start this device again from the beginning") from None
        return _Read(saved, progress, tensors if saved.model else None)

    def _check(self, manifest: Manifest, digest: str, tensors: Tensors | None) -> None:
        if digest != manifest.values_digest:
            raise StateError(
                f"{self.path} holds a model of another manifest; use another --state-dir for this federation"
            )
        if tensors is not None:
            manifest.check_tensors(tensors, what=f"the tensors in {self.path}")

    def keep_as_best(self) -> None:
        """Keep the current model as the best one, by a hard link or a copy."""
        model = self.path / personal.MODEL
        best = self.path / personal.BEST
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
        """Store model, progress, the method's arrays and the rounding residual in one step.

        own, feedback: None keeps the stored ones. best: also keep the model as the best one.
        """
        own = self.own if own is None else own
        feedback = self.feedback if feedback is None else feedback
        saved = self._saved(manifest, model, progress, self._saves + 1, best)
        self._write(personal.MODEL, personal.write(replace(saved, own=own, feedback=feedback)))
        # Only now, because writing fails if the disk is full.
        self._saves += 1
        self.own = own
        self.feedback = feedback
        if best:
            self.keep_as_best()

    def save_best(self, manifest: Manifest, model: Tensors, progress: Progress) -> None:
        """Store ``model`` as the best one, separately from the model in training."""
        self._write(personal.BEST, personal.write(self._saved(manifest, model, progress, self._saves, best=True)))

    def _saved(
        self, manifest: Manifest, model: Tensors | None, progress: Progress, save: int, best: bool
    ) -> personal.Saved:
        stored = model or {}
        reference = None
        if model is not None and self._reference is not None:
            stored = difference.subtract(model, self._reference)
            reference = self._reference_digest
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
        """Store progress without changing the model."""
        self._write(personal.PROGRESS, personal.write_progress(self._saves, progress.model_dump(mode="json")))

    def put_outbox(self, assignment_id: str, kind: Kind, body: bytes) -> Pending:
        """Store an update to send; it counts once stored progress names it."""
        self._write(OUTBOX, body)
        return Pending(assignment_id=assignment_id, kind=kind, sha256=hashlib.sha256(body).hexdigest())

    def outbox(self, pending: Pending) -> bytes:
        """Return the update that ``pending`` names. Raises StateError if it is missing or damaged."""
        body = self.cached(OUTBOX) or b""
        if hashlib.sha256(body).hexdigest() != pending.sha256:
            raise StateError(f"{self.path / OUTBOX} is missing or damaged; use another --state-dir")
        return body

    def put_owed(self, pending: Pending) -> None:
        """Store the rounding residual until ``pending`` is accepted; call before ``save``."""
        note = json.dumps({"sha256": personal.UNSIGNED, "update": pending.sha256})
        self._write(OWED, personal.sign(checkpoint.save(self.feedback, note)))

    def owed_before(self, pending: Pending) -> Tensors | None:
        """Return the rounding residual before the update ``pending``; None if the current one stays.

        Empty if the file is damaged: an unknown residual must not be sent.
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
        """Remove the residual stored by ``put_owed``."""
        (self.path / OWED).unlink(missing_ok=True)

    def cached(self, name: str) -> bytes | None:
        """Return a file of the folder, or None."""
        path = self.path / name
        return path.read_bytes() if path.exists() else None

    def cache(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file of the folder. durable: False if it can be downloaded again."""
        write_atomically(self.path / name, data, durable=durable and self._durable)

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, data, durable=self._durable)


@dataclass(frozen=True)
class _Read:
    """A model's file, its progress and its model."""

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
        raise StateError(f"{path} cannot be read ({error.error_count()} errors); use another --state-dir") from None
    except ProtocolError as error:
        raise StateError(f"{path} is damaged ({error}); use another --state-dir") from None
    return identity


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically, readable only by the owner. durable: flush it to disk."""
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
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
