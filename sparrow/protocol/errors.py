"""The base of all errors of Sparrow's SDK, and the errors of data that crosses the wire."""

from __future__ import annotations

from typing import ClassVar

from ..command_line.exits import Exit
from .failures import Failure


class SdkError(Exception):
    """Base of every error that a caller can do something about. exit_code: of a command that ends with it. failure:
    what a device reports to its coordinator in place of the text."""

    exit_code: ClassVar[Exit] = Exit.FAILED
    failure = Failure("other")

    def __init__(self, *args: object, failure: Failure | None = None) -> None:
        super().__init__(*args)
        if failure is not None:
            self.failure = failure


class MissingPart(SdkError):
    """A package or program that is needed is not installed; the text says how to install it."""

    exit_code = Exit.CANNOT


class ProtocolError(SdkError, ValueError):  # pydantic takes a ValueError of a validator for a fault of the data
    """The data breaks the contract between device and coordinator."""

    failure = Failure("bad-work")


class ManifestError(ProtocolError):
    """A model's description is inconsistent, or does not fit the tensors beside it."""

    failure = Failure("bad-work/manifest")


class BundleError(ProtocolError):
    """Bytes that are not a bundle, or not one of this manifest."""

    failure = Failure("bad-payload")


class GraphError(ProtocolError):
    """A graph that is not the one that the manifest names, or that a device must not run."""

    failure = Failure("bad-work/graph")
