"""Errors in the user's data."""

from ..command_line.exits import Exit
from ..protocol.errors import SdkError
from ..protocol.failures import Failure

VALUES = Failure("data-unusable/values")
"""The failure of data with values that are NaN or infinite."""


class DataError(SdkError):
    """Raised if the user's data cannot be used; the text names the fault and a remedy."""

    failure = Failure("data-unusable")


class BadOption(DataError):
    """Raised for a wrong or missing option of the data, and for a column that is not there."""

    exit_code = Exit.USAGE


class NoData(DataError):
    """Raised for a missing file or folder."""

    exit_code = Exit.NOT_FOUND
