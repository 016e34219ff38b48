"""What can go wrong on a device, by what its user can do about it.

SdkError
├── Unreachable        the coordinator does not answer; try again later
│   └── CoordinatorFull  it answers that its disk is full
├── Refused            it answered no: its text says what to do
│   ├── RoundOver      this assignment takes no update any more (409): ask for the next one
│   ├── FederationOver nothing is left to do (410)
│   ├── FederationDeleted  its federation is there no more (410)
│   ├── TokenExpired   this device must enrol again (401)
│   ├── WrongSettings  a federation cannot be created with these settings (422): correct them
│   ├── NotInstalled   the method is not installed at the coordinator (422)
│   └── NoCoordinator  what answers there is something else
├── BadArgument        something the user gave cannot work, found before anything was done
├── TrainingDiverged   a loss or weight is not finite (``training.local``): the round is handed back
├── NothingTrained     a device comes to its end without a model of its own; its text says why
├── Damaged            what was downloaded is not what was announced, repeatedly
└── StateError         the state folder is in use, belongs to another device, or cannot be read
"""

from __future__ import annotations

from edge_sdk.protocol.errors import SdkError as SdkError


class Unreachable(SdkError):
    """The coordinator does not answer."""


class CoordinatorFull(Unreachable):
    """The coordinator answers that it has no room left, for longer than one wanted to wait."""


class Refused(SdkError):
    """The coordinator refused the call. ``status`` is HTTP's; the text is the problem document's detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.status = status
        self.detail = detail

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str]]:
        """Made again from its own arguments, not from its text: so that it reaches whoever runs a fleet's processes."""
        return type(self), (self.status, self.detail)


class RoundOver(Refused):
    """The assignment takes no update any more."""


class FederationOver(Refused):
    """The federation is finished and has nothing left for this device."""


class FederationDeleted(Refused):
    """The device's federation was deleted by its operator."""


class TokenExpired(Refused):
    """The device's token is too old."""


class WrongSettings(Refused):
    """A federation cannot be created with these settings."""


class NotInstalled(Refused):
    """The method that was named is not installed at the coordinator."""


class NoCoordinator(Refused):
    """What answers at the address speaks HTTP, but is no coordinator."""


class BadArgument(SdkError):
    """Something the user gave cannot work."""


class NothingTrained(SdkError):
    """A device has trained in no round, or could not make its personal model in the end."""


class Damaged(SdkError):
    """A download that does not match its announced digest."""


class StateError(SdkError):
    """The state folder cannot be used."""
