"""The tree of errors that leave ``join``, ``publish``, ``simulate``, ``Client``, ``predict`` and ``export``.

Each class has an ``exit_code``, with which a command ends that meets it (docs/cli.md). A class that is not defined here
stands in the module that is named beside it; a test compares this drawing with the classes.

SdkError
├── Unreachable                  the coordinator does not answer: try again later
│   ├── CoordinatorFull          it answers that its disk is full: have its operator make room
│   └── TooManyRequests          it answers that this caller calls too often: wait longer between calls
├── Refused                      it answers no: the text says what to do
│   ├── NotAuthenticated         the token is missing or unknown: set the right one
│   │   └── TokenExpired         the device's token is too old: enrol again
│   ├── NotAllowed               the token is valid, but not for this: use another kind of token
│   ├── NotFound                 there is no such federation, device or assignment: correct the name
│   │   └── NoGlobalModel        the method has no global model that can be used alone: use a personal one
│   ├── NameTaken                a federation or device of this name exists: choose another name
│   ├── DifferentFederation      the federation of this name has other settings: take them, or another name
│   ├── WrongState               the federation's status forbids this now: change its status first
│   ├── RoundOver                the assignment takes no update any more: ask for the next one
│   │   └── DifferentUpdate      another update was accepted for it before
│   ├── FederationOver           the federation is finished and has nothing left for this device
│   ├── FederationDeleted        the device's federation was deleted by its operator
│   ├── BadContent               what was sent breaks the contract: correct it
│   │   └── NotInstalled         the method or task is not installed at the coordinator
│   └── NoCoordinator            what answers there is not a coordinator: check the address
├── BadArgument                  an argument cannot work: found before anything was done
│   ├── WrongSettings            a federation cannot be created with these settings: correct them
│   └── DoesNotFit               the budget needs more memory than there is (``budget.preparation``)
├── BadCertificate               a certificate or key cannot be used (``protocol.tls``)
├── DataError                    the device's data cannot be used (``reading.errors``)
│   ├── BadOption                what was said of the data cannot work, whatever the data are
│   └── NoData                   there is no such file or folder
├── UnknownTask                  the task is not installed on this device (``tasks``)
├── UnknownMethod                the method is not installed on this device (``methods``)
├── UnsupportedLayer             the method cannot train a layer of the model (``publishing.graph``)
├── ProtocolError                data on the wire breaks the contract (``protocol.errors``, as MissingPart)
│   ├── ManifestError            a model's description is inconsistent, or does not fit the tensors beside it
│   │   ├── CannotCompile        a training step cannot be written as a graph (``publishing.translations``)
│   │   ├── CannotNarrow         the model cannot be cut to its active neurons (``protocol.neurons``)
│   │   ├── NoCurvature          the loss cannot be differentiated twice (``engines.training``)
│   │   └── CannotGate           the model cannot compute gated blocks (``training.gates.network``)
│   ├── GraphError               a graph that is not the manifest's, or that a device must not run
│   │   ├── TooCostly            it takes more time or memory than this device gives it (``engines.affordable``)
│   │   └── ImplausibleStep      its gradients are not those of its loss (``engines.plausibility``)
│   ├── BadPublication           a federation is not as the author of its model has signed it (``protocol.signatures``)
│   ├── BundleError              bytes that are not a bundle of this manifest
│   ├── BadSecret                a secure round would give an update away, or its keys are not who they say
│   ├── CannotOpen               the sum of a cell does not come out (``protocol.secure.opening``)
│   ├── UnknownWork              the method has no work of this kind (``methods``)
│   └── BudgetTooSmall           the budget is smaller than the model's smallest part (``methods``)
├── TrainingDiverged             a loss or weight is not finite (``engines.training``): the round is handed back
│   └── UnsoundModel             the model received gives no finite loss, before any training (``engines.training``)
├── ModelReplaced                the model has a new version, and the device's code is the old: start it with the new
├── NothingTrained               a device comes to its end without a model of its own; its text says why
├── OutOfMemory                  training needs more memory than the device has: give a smaller budget
├── Damaged                      a download never matches its digest: a device hands its work back, and goes on
├── StateError                   the state folder is in use, belongs to another device, or cannot be read
├── SystemFailed                 the operating system refuses a file, folder or connection; the text names it
│   └── NoSuchPath               a file or folder does not exist
├── PredictError                 a model file or sample cannot be used (``predict``)
│   └── NoSuchFile               there is no such file
├── ExportError                  a model cannot be exported as asked (``sparrow.export.errors``)
│   ├── NotThere                 a file of the model does not exist
│   ├── SkeletonError            the forward pass published with the federation cannot be used
│   └── NotTheSame               the exported file predicts something else than the model; it was not written
├── BadFigures              a board's description or a meter's file cannot be used (``sparrow.devices.readings``)
├── CannotTrain                  this device cannot train (``device.trainable``)
└── MissingPart                  a package or program is not installed

Three more never leave the functions above, because their callers go on without: ``ReadError``
(``sparrow.devices.readings``), ``Paused`` (``device.watchdog``) and ``Unpredictable`` (``engines.rehearsal``). Nor
does ``Stopped`` (``device.embedding``), which ends a device as Ctrl-C does, and is no ``Exception``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparrow.command_line.exits import Exit, of_status
from sparrow.protocol.errors import SdkError as SdkError
from sparrow.protocol.failures import Failure, program_error

__all__ = [
    "BadArgument",
    "BadContent",
    "CoordinatorFull",
    "Damaged",
    "DifferentFederation",
    "DifferentUpdate",
    "FederationDeleted",
    "FederationOver",
    "ModelReplaced",
    "NameTaken",
    "NoCoordinator",
    "NoGlobalModel",
    "NoSuchPath",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "NotInstalled",
    "NothingTrained",
    "OutOfMemory",
    "Refused",
    "RoundOver",
    "SdkError",
    "StateError",
    "SystemFailed",
    "TokenExpired",
    "TooManyRequests",
    "Unreachable",
    "WrongSettings",
    "WrongState",
]


class Unreachable(SdkError):
    """The coordinator does not answer."""

    exit_code = Exit.UNREACHABLE


class CoordinatorFull(Unreachable):
    """The coordinator has answered for longer than the caller's patience that it has no room left."""

    exit_code = Exit.FULL


class TooManyRequests(Unreachable):
    """The coordinator has answered for longer than the caller's patience that this caller calls too often."""


class Refused(SdkError):
    """The coordinator refused the call. ``status`` is HTTP's; ``detail`` the text of the problem document."""

    failure = Failure("coordinator-fault")

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.status = status
        self.detail = detail

    @property
    def exit_code(self) -> Exit:  # type: ignore[override]
        """The exit code that belongs to the status."""
        return of_status(self.status)

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str]]:
        """Make it again from its own arguments, so that it can be sent between the processes of a fleet."""
        return type(self), (self.status, self.detail)


class NotAuthenticated(Refused):
    """The token is missing or unknown."""


class TokenExpired(NotAuthenticated):
    """The device's token is too old."""


class NotAllowed(Refused):
    """The token is valid, but not for this call."""


class NotFound(Refused):
    """There is no such federation, device or assignment."""


class NoGlobalModel(NotFound):
    """The method has no global model that can be used alone."""


class NameTaken(Refused):
    """A federation or device of this name exists."""


class DifferentFederation(Refused):
    """The federation of this name has another method, model or other settings; the text names each difference."""


class WrongState(Refused):
    """The federation's status forbids this now."""


class RoundOver(Refused):
    """The assignment takes no update any more."""


class DifferentUpdate(RoundOver):
    """Another update was accepted for this assignment before."""


class FederationOver(Refused):
    """The federation is finished and has nothing left for this device."""


class FederationDeleted(Refused):
    """The device's federation was deleted by its operator."""


class BadContent(Refused):
    """The content of a request breaks the contract."""


class NotInstalled(BadContent):
    """The method or task that was named is not installed at the coordinator."""

    exit_code = Exit.NOT_FOUND


class NoCoordinator(Refused):
    """The server at the address speaks HTTP, but is not a coordinator."""

    exit_code = Exit.UNREACHABLE


class BadArgument(SdkError):
    """An argument, option or setting cannot work."""

    exit_code = Exit.USAGE


class WrongSettings(BadArgument):
    """A federation cannot be created with these settings."""


class ModelReplaced(SdkError):
    """The federation's model has a new version, and the device trains with code of the one before."""

    failure = Failure("model-replaced")


class NothingTrained(SdkError):
    """A device has trained in no round, or could not make its personal model in the end."""

    failure = Failure("nothing-trained")


class OutOfMemory(SdkError):
    """Training needs more memory than the device, or its accelerator, has."""

    exit_code = Exit.CANNOT
    failure = Failure("no-memory")


class Damaged(SdkError):
    """A download does not match its announced digest."""

    failure = Failure("bad-payload/damaged")


class StateError(SdkError):
    """The state folder cannot be used."""


class SystemFailed(SdkError):
    """The operating system refuses a file, folder or connection."""


class NoSuchPath(SystemFailed):
    """A file or folder does not exist."""

    exit_code = Exit.NOT_FOUND


@contextmanager
def translated() -> Iterator[None]:
    """Raise SdkErrors in place of the errors of the operating system and of missing memory that leave the block.

    Errors of a task's own code leave it as they are: they are bugs, and their traceback says where.
    """
    try:
        yield
    except OSError as error:
        kind = NoSuchPath if isinstance(error, FileNotFoundError) else SystemFailed
        raise kind(_of_system(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        raise OutOfMemory(
            f"there is not enough memory to train ({error}); give a smaller --budget, or another --accelerator"
        ) from error


def failure_of(error: BaseException) -> Failure:
    """Return what a device reports of an error: never its text, which may hold names of files or data."""
    if isinstance(error, SdkError):
        # A class from outside may have set anything.
        return error.failure if isinstance(error.failure, Failure) else SdkError.failure
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted/user")
    if _lacks_memory(error):
        return OutOfMemory.failure
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure("no-space")
    kind = type(error)
    return program_error(kind.__name__ if kind.__module__ == "builtins" else "other")


def _lacks_memory(error: BaseException) -> bool:
    """Return whether memory was missing, of the processor or of PyTorch's accelerator."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _of_system(error: OSError) -> str:
    said: Any = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename and error.strerror else str(said)
