"""A device's place in its federation: name, keys and token.

A new token is stored before its first use, so that the disk always has a valid one. The old token is kept until then,
because a coordinator restored from a backup may have only the old one.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from sparrow.protocol.failures import Failure
from sparrow.protocol.messages import MOST_STARTS, ChangeDevice, Conditions, DeviceProfile, Enrol, Start

from ...errors import NotAuthenticated, Refused, SdkError, TokenExpired, Unreachable, failure_of
from ..local_noise import WITHHELD
from ..state import Identity
from ..trainable import CannotTrain
from .options import Device, SessionOptions

log = logging.getLogger(__name__)

# Longest wait for a coordinator that does not answer a report of a device that ends, seconds.
BRIEFLY = 3.0


class Identified:
    """A device with a name, keys and possibly a token.

    Raises StateError, Refused if the coordinator rejects it, Unreachable.
    """

    def __init__(self, device: Device, options: SessionOptions) -> None:
        transport = device.transport
        folder = device.folder
        federation = device.federation
        self.transport = transport
        self.folder = folder
        self._options = options
        self._federation = federation
        self._enrolment_token = transport.token
        self._telemetry = options.telemetry(transport.traffic)
        before = folder.known_identity()
        if before is not None and before.token is not None:
            transport.token = before.token
            if before.previous is not None:
                self._settle_token(before)
        try:
            self.info = options.known.info if options.known else transport.federation(federation)
        except TokenExpired:
            transport.token = self._enrolment_token
            self.info = transport.federation(federation)
        self.identity = folder.identity(federation, self.info.uid, device.name)
        if self.identity.starts:
            transport.start = self.identity.starts[-1]
        transport.register = self._register

    @property
    def name(self) -> str:
        """The name of this device in its federation."""
        return self.identity.name

    def _begin(self) -> Start:
        """Store a new start of this device, by which the coordinator detects copies of the folder."""
        start = secrets.token_hex(16)
        before = self.identity.starts
        # Stored first: the coordinator may know it although its answer is lost.
        self.identity = self.identity.model_copy(update={"starts": (*before[1 - MOST_STARTS :], start)})
        self.folder.save_identity(self.identity)
        self.transport.start = start
        return Start(id=start, after=before, take_over=self._options.take_over)

    def _register(self) -> None:
        """Register this start again. Raises StateCopied if another copy has started since."""
        *before, start = self.identity.starts
        self._tell(ChangeDevice(start=Start(id=start, after=tuple(before), again=True)))

    def _renew_token(self) -> None:
        before = self.identity
        if before.device_id is not None:
            token = self.transport.new_token(before.device_id, before.enrolment_key)
            self.identity = self.identity.model_copy(update={"token": token, "previous": before.token})
            self.folder.save_identity(self.identity)
            self.identity = self._settle_token(self.identity)

    def _settle_token(self, identity: Identity) -> Identity:
        """Use a new token for the first time; return to the old one if it is refused."""
        assert identity.device_id is not None, "a token comes with a device id"
        token = self.transport.token = identity.token
        try:
            self.transport.change_device(identity.device_id, ChangeDevice())
        except NotAuthenticated:
            token = self.transport.token = identity.previous
        settled = identity.model_copy(update={"token": token, "previous": None})
        self.folder.save_identity(settled)
        return settled

    def _tell(self, change: ChangeDevice) -> None:
        if self.identity.device_id is not None:
            self.transport.change_device(self.identity.device_id, change)

    @contextmanager
    def _briefly(self, what: str) -> Iterator[None]:
        """Context manager: limit the time of a report at the end of a device."""
        before = self.transport.patience_seconds
        self.transport.patience_seconds = BRIEFLY
        try:
            yield
        except SdkError as error:
            log.warning("this device could not report %s: %s", what, error)
        finally:
            self.transport.patience_seconds = before

    def _profile(self) -> DeviceProfile:
        return self._options.profile or own_profile(self._telemetry.describe())

    @contextmanager
    def _reporting_why_not(self) -> Iterator[None]:
        """Context manager: report the device's own errors to the operator."""
        try:
            yield
        except (Refused, Unreachable):
            raise
        except Exception as error:
            # A device that demands masks sends nothing to other federations.
            if self._options.demands.secure is None or self.info.settings.secure:
                self._report_why_not(_failure_of_opening(error) if self._options.local_noise is None else WITHHELD)
            raise

    def _report_why_not(self, failure: Failure) -> None:
        with self._briefly("why it cannot join"):
            if self.identity.token is not None:
                self.transport.token = self.identity.token
                self._tell(ChangeDevice(conditions=Conditions(available=False, reason=failure)))
                return
            if not self._options.report_failure:
                return
            self.transport.enrol(
                self._federation,
                Enrol(
                    name=self.identity.name,
                    enrolment_key=self.identity.enrolment_key,
                    budget=self._options.budget,
                    hosted=self._options.hosted,
                    profile=self._profile(),
                    failure=failure,
                ),
            )

    def _public_identity(self) -> str | None:
        if not self.info.settings.secure:
            if self._options.demands.secure is not None:
                raise CannotTrain(
                    f"{self._federation} is not a secure federation, and this device sends only masked updates "
                    f"(--require-secure); ask its operator for one with secure=true"
                )
            return None
        if find_spec("cryptography") is None:
            raise CannotTrain("a secure federation needs cryptography: pip install 'sparrow-fl[secure]'")
        from sparrow.protocol.secure.pads import public_identity

        return public_identity(bytes.fromhex(self.identity.identity_key)).hex()

    @property
    def identity_key(self) -> str | None:
        """The public key of this device in secure rounds; None in other federations."""
        return self._public_identity() if self.info.settings.secure else None


def _failure_of_opening(error: Exception) -> Failure:
    """Return the failure of opening a task, whose files are the device's data."""
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return Failure("data-unusable")
    return failure_of(error)


def own_profile(energy: str) -> DeviceProfile:
    """Return this machine's profile for enrolment."""
    try:
        sdk_version = version("sparrow-fl")
    except PackageNotFoundError:
        sdk_version = "unknown"
    return DeviceProfile(
        board=platform.machine(),
        system=f"{platform.system()} {platform.release()}"[:200],
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        sensors=(energy[:300],),
        sdk_version=sdk_version,
    )
