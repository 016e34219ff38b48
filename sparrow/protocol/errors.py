"""The base of all errors of Sparrow's SDK, and the errors of data in transit."""

from __future__ import annotations

from typing import ClassVar

from ..command_line.exits import Exit
from .failures import Failure


class SdkError(Exception):
    """Base class of all errors that a caller can handle. exit_code: exit code of a command that ends with it. failure:
    what a device reports to its coordinator instead of the text.
    """

    exit_code: ClassVar[Exit] = Exit.FAILED
    failure = Failure("other")

    def __init__(self, *args: object, failure: Failure | None = None) -> None:
        super().__init__(*args)
        if failure is not None:
            self.failure = failure


class BadArgument(SdkError):
    """An argument, option, setting or environment variable is invalid."""

    exit_code = Exit.USAGE


class MissingPart(SdkError):
    """A required package or program is not installed; the text says how to install it."""

    exit_code = Exit.CANNOT


# pydantic reports a validator's ValueError as a fault of the data.
class ProtocolError(SdkError, ValueError):
    """Data violates the contract between device and coordinator."""

    failure = Failure("bad-work")


class ManifestError(ProtocolError):
    """A manifest is inconsistent, or does not match the tensors."""

    failure = Failure("bad-work/manifest")


class BundleError(ProtocolError):
    """Invalid bundle, or a bundle for another manifest."""

    failure = Failure("bad-payload")


class GraphError(ProtocolError):
    """A graph is not in the manifest, or is not safe to run."""

    failure = Failure("bad-work/graph")
