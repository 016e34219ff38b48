"""Python client of a coordinator: federations, rounds, devices, reports and models.

    with Client("http://127.0.0.1:8000") as client:
        for record in client.rounds("default"):
            print(record.round, record.accuracy_personal)
        client.model("default", "global.onnx")

Methods return messages of the HTTP contract (``sparrow.protocol.messages``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from edge_sdk.arguments import check_federation_name
from edge_sdk.device.connection import token_of
from edge_sdk.device.transport import Transport
from edge_sdk.errors import BadArgument, NotFound, translated

from .command_line.faults import faults
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
from .transport import connect, tls

FORMATS: dict[str, Literal["model", "model.onnx"]] = {".onnx": "model.onnx", ".safetensors": "model"}
"""File suffix -> name of the format in the coordinator's URLs."""

Change = TypeVar("Change", bound=BaseModel)
Found = TypeVar("Found")


class Client:
    """A thread-safe client of one coordinator, usable in a ``with`` statement.

    server: http://HOST:PORT or https://HOST. token: an observer's, or an admin's for changes; by default
    SPARROW_ADMIN_TOKEN or SPARROW_OBSERVER_TOKEN. trust: certificates for https. patience_seconds: how long a call
    retries if the coordinator does not answer; None for no limit.

    Methods raise SdkError: NotFound, NotAuthenticated, NotAllowed, Unreachable and others (``edge_sdk/errors.py``).
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
        """Close the connections."""
        self._http.close()

    def _about(self, name: str, call: Callable[[str], Found]) -> Found:
        check_federation_name(name)
        try:
            return call(name)
        except NotFound:
            # raises an error that lists them, unless only a part of the federation was not found
            self._calls.federation(name)
            raise

    def federations(self) -> list[FederationInfo]:
        """Return all federations."""
        return self._calls.federations()

    def federation(self, name: str) -> FederationInfo:
        """Return a federation's state and settings."""
        return self._about(name, self._calls.federation)

    def overview(self, name: str) -> Overview:
        """Return the overview of the coordinator's page: notices, costs and the expected end."""
        return self._about(name, self._calls.overview)

    def rounds(self, name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last."""
        return self._about(name, self._calls.rounds)

    def reports(self, name: str, number: int) -> list[DeviceReport]:
        """Return the devices' reports of a round and of the evaluation after it."""
        return self._about(name, lambda name: self._calls.reports(name, number))

    def devices(self, name: str) -> list[DeviceInfo]:
        """Return the devices of a federation."""
        return self._about(name, self._calls.devices)

    def device(self, device_id: str) -> DeviceHistory:
        """Return a device and its work, newest first. device_id: an id from ``devices``."""
        return self._calls.device(_id(device_id))

    def models(self, name: str) -> list[ModelInfo]:
        """Return the stored global models, oldest first."""
        return self._about(name, self._calls.models)

    @translated()
    def model(self, name: str, path: Path | str) -> Path:
        """Write the newest global model to ``path``, .onnx or .safetensors, and return the path.

        Raises NoGlobalModel if the method has no usable global model.
        """
        path = Path(path)
        if path.suffix not in FORMATS:
            raise BadArgument(f"{path}: give a name that ends in {' or '.join(FORMATS)}")
        path.write_bytes(self._about(name, lambda name: self._calls.model_file(name, FORMATS[path.suffix])))
        return path

    def change(self, name: str, **fields: Any) -> FederationInfo:
        """Change a federation and return its state: ``rounds=80``, ``cohort=20``, ``action="pause"``.

        fields: fields of ``ChangeFederation``. Raises WrongState if its status does not allow the change.
        """
        change = _checked(ChangeFederation, fields)
        return self._about(name, lambda name: self._calls.change_federation(name, change))

    def delete(self, name: str) -> None:
        """Delete a federation with its records, devices and models. Raises WrongState if it is running."""
        self._about(name, self._calls.delete_federation)

    def revoke(self, device_id: str) -> None:
        """Revoke a device's token."""
        self._calls.change_device(_id(device_id), ChangeDevice(revoked=True))


def _id(device_id: str) -> str:
    """Check a device's id. Raises BadArgument if it is malformed."""
    if not isinstance(device_id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", device_id):
        raise BadArgument(f"{device_id!r} is not a device's id; give the device_id of one of devices(federation)")
    return device_id


def _checked(kind: type[Change], fields: dict[str, Any]) -> Change:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = faults(error, kind.model_fields)
        raise BadArgument("; ".join(f"{name}: {text}" if name else text for name, text in found)) from None
