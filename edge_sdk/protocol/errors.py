"""Errors of data that crosses the network, and the base of all errors of this SDK.

SdkError                 whatever leaves join, publish, predict, simulate or export

ProtocolError            the data breaks the contract; its text says what was met, what was wanted, what to do
├── ManifestError        a model's description is inconsistent, or does not fit the tensors beside it
└── BundleError          a bundle's bytes are not a bundle of this manifest
"""

from __future__ import annotations

from typing import ClassVar

from sparrow.command_line.exits import Exit


class SdkError(Exception):
    """Base of the errors that a caller of this SDK can catch; each class has the exit code of a command it ends."""

    exit_code: ClassVar[Exit] = Exit.FAILED


class ProtocolError(ValueError):
    """The data breaks the contract between device and coordinator."""


class ManifestError(ProtocolError):
    """A model's description is inconsistent, or does not fit the tensors beside it."""


class BundleError(ProtocolError):
    """Bytes that are not a bundle, or not one of this manifest."""
