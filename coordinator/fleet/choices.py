"""The choices for a new federation of a built-in task."""

from __future__ import annotations

from collections.abc import Iterable

from sparrow.command_line.installed import installed
from sparrow.protocol.builtin import builtin_tasks
from sparrow.protocol.messages import Choices, OfferedMethod
from sparrow.protocol.settings import AUTO, FederationSettings

from ..errors import UnknownMethod
from ..methods import METHODS, load_method
from .checks import completed


def choices() -> Choices:
    """Return the built-in tasks and the installed methods, without those that cannot be loaded."""
    return Choices(tasks=builtin_tasks(), methods=tuple(_methods()))


def _methods() -> Iterable[OfferedMethod]:
    yield OfferedMethod(name=AUTO, secure=True)
    for name in installed(METHODS):
        try:
            method = load_method(name)
        except UnknownMethod:
            continue
        settings = completed(FederationSettings(method=name, secure=True))
        yield OfferedMethod(name=name, secure=method.why_not_secure(settings) is None)
