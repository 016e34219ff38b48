"""The errors of data that a user named."""

from sparrow.command_line.exits import Exit
from sparrow.protocol.errors import SdkError
from sparrow.protocol.failures import Failure


class DataError(SdkError):
    """The data that the user named cannot be used; the text names the fault and a remedy."""

    failure = Failure("data-unusable")


class BadOption(DataError):
    """An option of the data cannot work, whatever the data are."""

    exit_code = Exit.USAGE


class NoData(DataError):
    """There is no such file or folder."""

    exit_code = Exit.NOT_FOUND
