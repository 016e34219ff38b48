"""The base of all errors of Sparrow's SDK, and the errors of data that crosses the wire.

``edge_sdk/errors.py`` draws the whole tree. This file must load in Python 3.6, as ``edge_sdk/device/trainable.py``.
"""

from typing import ClassVar

from sparrow.command_line.exits import Exit


class SdkError(Exception):
    """Base of every error that a caller can do something about; its text says what.

    exit_code: how a command ends that meets it.
    """

    exit_code: ClassVar[Exit] = Exit.FAILED


class MissingPart(SdkError):
    """A package or program that is needed is not installed; the text says how to install it."""

    exit_code = Exit.CANNOT


class ProtocolError(SdkError, ValueError):  # pydantic takes a ValueError of a validator for a fault of the data
    """The data breaks the contract between device and coordinator."""


class ManifestError(ProtocolError):
    """A model's description is inconsistent, or does not fit the tensors beside it."""


class BundleError(ProtocolError):
    """Bytes that are not a bundle, or not one of this manifest."""


class GraphError(ProtocolError):
    """A graph that is not the one that the manifest names, or that a device must not run."""
