"""A running coordinator from Python: its federations, rounds, devices, reports and models.

    with Client("http://127.0.0.1:8000") as client:
        for record in client.rounds("default"):
            print(record.round, record.accuracy_personal)
        client.model("default", "global.onnx")

Answers are the messages of the HTTP contract (``sparrow.protocol.messages``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from edge_sdk.arguments import check_federation_name
from edge_sdk.device.connection import connect, token_of
from edge_sdk.device.transport import Transport
from edge_sdk.errors import BadArgument, NotFound, translated

from .command_line.faults import faults
from .protocol import tls
from .protocol.messages import (
    ChangeDevice,
    ChangeFederation,
    DeviceHistory,
    DeviceInfo,
    DeviceReport,
    FederationInfo,
    ModelInfo,
    RoundRecord,
)
from .protocol.overview import Overview

FORMATS: dict[str, Literal["model", "model.onnx"]] = {".onnx": "model.onnx", ".safetensors": "model"}
"""The endings of a model's file, and what the coordinator calls the model in this format."""

Change = TypeVar("Change", bound=BaseModel)
Found = TypeVar("Found")


class Client:
    """Calls to one coordinator. Several threads may share it; ``with``, or ``close``, ends its connections.

    server: http://HOST:PORT or https://HOST. token: of an observer, or of an admin, which changes need; without, that
    of SPARROW_ADMIN_TOKEN or SPARROW_OBSERVER_TOKEN. trust: certificates for https. patience_seconds: how long each
    call waits for a coordinator that does not answer; None: for ever.

    Every method raises SdkError: NotFound for a federation or device that is not there, NotAuthenticated and NotAllowed
    for the token, Unreachable where nobody answers (``edge_sdk/errors.py``).
    """

    def __init__(
        self,
        server: str = "http://127.0.0.1:8000",
        token: str | None = None,
        *,
        trust: tls.Tls | None = None,
        patience_seconds: float | None = 0.0,
    ) -> None:
        self._http = connect(server, trust)
        self._calls = Transport(self._http, patience_seconds=patience_seconds)
        self._calls.token = token or token_of("admin", "observer")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def _about(self, name: str, call: Callable[[str], Found]) -> Found:
        """Return what is found of a federation. Raises NotFound, naming those that there are."""
        check_federation_name(name)
        try:
            return call(name)
        except NotFound:
            self._calls.federation(name)  # raises; or else it is there, and something in it is not
            raise

    def federations(self) -> list[FederationInfo]:
        """Return every federation."""
        return self._calls.federations()

    def federation(self, name: str) -> FederationInfo:
        """Return where a federation stands, with its settings."""
        return self._about(name, self._calls.federation)

    def overview(self, name: str) -> Overview:
        """Return what the coordinator's page shows of a federation: what needs attention, costs, when it ends."""
        return self._about(name, self._calls.overview)

    def rounds(self, name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last: accuracies, losses, bytes, joules, seconds."""
        return self._about(name, self._calls.rounds)

    def reports(self, name: str, number: int) -> list[DeviceReport]:
        """Return what each device reported in a round and in the evaluation after it."""
        return self._about(name, lambda name: self._calls.reports(name, number))

    def devices(self, name: str) -> list[DeviceInfo]:
        """Return the devices of a federation."""
        return self._about(name, self._calls.devices)

    def device(self, device_id: str) -> DeviceHistory:
        """Return a device and what it did, the newest first. device_id: as ``devices`` has it."""
        return self._calls.device(_id(device_id))

    def models(self, name: str) -> list[ModelInfo]:
        """Return the global models that the coordinator keeps, the oldest first."""
        return self._about(name, self._calls.models)

    @translated()
    def model(self, name: str, path: Path | str) -> Path:
        """Write the newest global model to ``path``, which ends in .onnx or .safetensors, and return the path.

        Raises NoGlobalModel where the method has none that can be used alone.
        """
        path = Path(path)
        if path.suffix not in FORMATS:
            raise BadArgument(f"{path} is to end in {' or '.join(FORMATS)}")
        path.write_bytes(self._about(name, lambda name: self._calls.model_file(name, FORMATS[path.suffix])))
        return path

    def change(self, name: str, **what: Any) -> FederationInfo:
        """Change or steer a federation, and return where it stands: ``rounds=80``, ``cohort=20``, ``action="pause"``.

        what: fields of ``ChangeFederation``. Raises WrongState where its status forbids that now.
        """
        change = _checked(ChangeFederation, what)
        return self._about(name, lambda name: self._calls.change_federation(name, change))

    def delete(self, name: str) -> None:
        """Delete a federation for good, with its records, devices and models. Raises WrongState while it runs."""
        self._about(name, self._calls.delete_federation)

    def revoke(self, device_id: str) -> None:
        """Take a device's right to take part."""
        self._calls.change_device(_id(device_id), ChangeDevice(revoked=True))


def _id(device_id: str) -> str:
    """Return the id of a device. Raises BadArgument for what cannot be one."""
    if not isinstance(device_id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", device_id):
        raise BadArgument(f"{device_id!r} is not a device's id; give the device_id of one of devices(federation)")
    return device_id


def _checked(kind: type[Change], fields: dict[str, Any]) -> Change:
    """Return the message of these fields. Raises BadArgument."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = faults(error, kind.model_fields)
        raise BadArgument("; ".join(f"{name}: {text}" if name else text for name, text in found)) from None
