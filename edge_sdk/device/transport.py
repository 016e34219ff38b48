"""The calls of the HTTP contract, for devices and operators."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

import numpy as np
from pydantic import BaseModel, ValidationError

from sparrow.command_line.nearest import nearest
from sparrow.protocol import checkpoint, messages, values
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import MAX_GRAPH, MAX_MANIFEST, GraphName, Manifest, Tensors, Values
from sparrow.protocol.overview import Overview
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import MAX_STATEMENT, Published
from sparrow.transport import httpx

from ..errors import BadContent, Damaged, NoCoordinator, NotFound, NotInstalled, Refused, WrongSettings
from .answers import Message, detail_of, is_problem, message_of, passes, pause_of
from .connection import LARGEST_LIST, Connection
from .uploads import PUBLICATION, REPLACEMENT, UPDATE, Upload

# Doubled, because JSON within JSON escapes quotes.
LARGEST_PUBLICATION = 2 * (MAX_MANIFEST + MAX_STATEMENT)
# Bytes of a downloaded global model.
MAX_FILE = 8 * 1024**3
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0)
EVALUATION_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class _Brought:
    assignment_id: str
    body: bytes
    seconds: float


class Transport(Connection):
    """The calls of one device or operator. renewal_due: the coordinator asks this device to renew its token."""

    renewal_due = False
    _brought: _Brought | None = None

    def federation(self, name: str) -> messages.FederationInfo:
        """Return the state of a federation. Raises NotFound, naming the visible federations."""
        try:
            return self.ask(messages.FederationInfo, "GET", f"/v1/federations/{name}")
        except NotFound as refusal:
            try:
                there = sorted(info.name for info in self.federations())
            except Refused:
                raise refusal from None
        said = f"there are {', '.join(there)}{nearest(name, there)}" if there else "publish one first"
        raise NotFound(404, f"there is no federation {name!r}; {said}")

    def federations(self) -> list[messages.FederationInfo]:
        """Return all federations of the coordinator."""
        return self.ask_all(messages.FederationInfo, "/v1/federations")

    def overview(self, name: str) -> Overview:
        """Return the overview that a federation's page shows."""
        return self.ask(Overview, "GET", f"/v1/federations/{name}/overview")

    def rounds(self, name: str) -> list[messages.RoundRecord]:
        """Return a record per round, the open one last."""
        return self.ask_all(messages.RoundRecord, f"/v1/federations/{name}/rounds")

    def reports(self, name: str, number: int) -> list[messages.DeviceReport]:
        """Return the devices' reports of a round and of the evaluation after it."""
        return self.ask_all(messages.DeviceReport, f"/v1/federations/{name}/rounds/{number}/reports")

    def devices(self, name: str, where: str = "") -> list[messages.DeviceInfo]:
        """Return the devices of a federation, or those with these tags."""
        chosen = f"?where={quote(where)}" if where else ""
        return self.ask_all(messages.DeviceInfo, f"/v1/federations/{name}/devices{chosen}")

    def device(self, device_id: str) -> messages.DeviceHistory:
        """Return a device and its history. Raises NotFound if there is no such device."""
        return self.ask(messages.DeviceHistory, "GET", f"/v1/devices/{device_id}")

    def models(self, name: str) -> list[messages.ModelInfo]:
        """Return the stored global models of a federation."""
        return self.ask_all(messages.ModelInfo, f"/v1/federations/{name}/models")

    def model_file(self, name: str, path: Literal["model", "model.onnx"]) -> bytes:
        """Return the newest global model as a file. Raises NoGlobalModel if there is none."""
        return self.call("GET", f"/v1/federations/{name}/{path}", most=MAX_FILE).content

    def evaluation(self, name: str, body: bytes) -> messages.Evaluation:
        """Return the coordinator's evaluation of its global model. body: inputs and targets as safetensors."""
        path = f"/v1/federations/{name}/model/evaluation"
        return self.send(messages.Evaluation, PUBLICATION, path, body, timeout=EVALUATION_TIMEOUT)

    def send(self, kind: type[Message], call: Upload, path: str, body: bytes, **arguments: Any) -> Message:
        """Send a file of tensors, in parts if necessary, and return the answer's message."""
        headers = {"Content-Type": checkpoint.MEDIA_TYPE}
        return self.upload(call, path, body, headers, lambda answer: message_of(kind, answer), **arguments)

    def trouble(self) -> str | None:
        """Return the reason why the coordinator is not ready, or None. Does not retry."""
        try:
            answer = self.exchange("GET", "/readyz")
        except httpx.TransportError as error:
            raise self.silent(str(error)) from error
        return None if answer.is_success else detail_of(answer)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a federation's model."""
        return self.ask(Manifest, "GET", f"/v1/federations/{name}/manifest", most=MAX_MANIFEST)

    def publication(self, name: str) -> Published:
        """Return a federation's publication; the caller checks its signature."""
        return self.ask(Published, "GET", f"/v1/federations/{name}/publication", most=LARGEST_PUBLICATION)

    def completed(self, settings: FederationSettings) -> FederationSettings:
        """Return settings with the method's defaults filled in. Raises WrongSettings if they are invalid."""
        try:
            # The coordinator completes only settings that are not given.
            given = _json(settings, exclude_unset=True)
            return self.ask(FederationSettings, "POST", "/v1/settings", **given)
        except NotInstalled:
            raise
        except BadContent as refused:
            raise WrongSettings(refused.detail) from refused

    def graph(self, name: str, graph: GraphName) -> bytes:
        """Return an ONNX graph of a federation's model; the caller checks its digest."""
        return self.call("GET", f"/v1/federations/{name}/{graph}.onnx", most=MAX_GRAPH).content

    def values(self, name: str, manifest: Manifest, which: Values, into: BinaryIO) -> None:
        """Write a file of values to ``into``, resuming after bytes it already holds; the caller checks the digest."""
        begin = self.traffic.down
        path = f"/v1/federations/{name}/{which}"
        try:
            self.download(path, values.size(manifest, which), into, etag=f'"{manifest.files[which]}"')
        finally:
            self.traffic.frozen += (self.traffic.down - begin) * (which == "frozen")

    def create_federation(self, body: bytes, media_type: str) -> messages.FederationInfo:
        """Create a federation.

        Raises WrongSettings if the coordinator refuses it, NotInstalled if it lacks method or task, NameTaken.
        """
        headers = {"Content-Type": media_type}
        try:
            if media_type == checkpoint.MEDIA_TYPE:
                return self.send(messages.FederationInfo, PUBLICATION, "/v1/federations/from-model", body)
            return self.ask(messages.FederationInfo, "POST", "/v1/federations", content=body, headers=headers)
        except NotInstalled:
            raise
        except BadContent as refused:
            raise WrongSettings(refused.detail) from refused

    def replace_model(self, name: str, body: bytes) -> messages.FederationInfo:
        """Replace the graphs of a federation's model. Raises DifferentFederation if its tensors differ."""
        return self.send(messages.FederationInfo, REPLACEMENT, f"/v1/federations/{name}/model", body)

    def compare_federation(self, name: str, wanted: messages.CompareFederation) -> messages.FederationInfo | None:
        """Return the federation if it matches ``wanted``; None if it does not exist.

        Raises DifferentFederation if it differs.
        """
        try:
            # Only given fields are compared, as in ``CreateFederation.as_given``.
            body = _json(wanted, exclude_unset=True)
            return self.ask(messages.FederationInfo, "POST", f"/v1/federations/{name}/comparison", **body)
        except NotFound:
            return None

    def change_federation(self, name: str, change: messages.ChangeFederation) -> messages.FederationInfo:
        """Change a federation's settings or status."""
        return self.ask(messages.FederationInfo, "PATCH", f"/v1/federations/{name}", **_json(change))

    def pin_model(self, name: str, version: int) -> None:
        """Keep a stored global model for two minutes. Raises NotFound if it has been removed."""
        self.call("PUT", f"/v1/federations/{name}/models/{version}/pin")

    def delete_federation(self, name: str) -> None:
        """Delete a federation permanently."""
        self.call("DELETE", f"/v1/federations/{name}")

    def join_link(self, name: str, wanted: messages.MakeJoinLink) -> messages.JoinLink:
        """Return the link by which a browser joins. Raises NotFound if browsers cannot join, NotAllowed."""
        return self.ask(messages.JoinLink, "POST", f"/v1/federations/{name}/join-link", **_json(wanted))

    def create_token(self, wanted: messages.CreateToken) -> messages.MadeToken:
        """Create an operator's token. Raises NotFound for its federation."""
        return self.ask(messages.MadeToken, "POST", "/v1/tokens", **_json(wanted))

    def tokens(self) -> list[messages.TokenInfo]:
        """Return all operators' tokens, newest first."""
        return self.ask_all(messages.TokenInfo, "/v1/tokens")

    def revoke_token(self, token_id: str, *, made: bool) -> tuple[str, ...]:
        """Revoke a token; with ``made`` also the tokens made with it.

        Return their ids. Raises NotFound if there is no such token.
        """
        path = f"/v1/tokens/{quote(token_id, safe='')}"
        return self.ask(messages.RevokedTokens, "DELETE", path, params={"made": made}).revoked

    def enrol(self, federation: str, request: messages.Enrol) -> messages.Enrolled:
        """Enrol this device."""
        return self.ask(messages.Enrolled, "POST", f"/v1/federations/{federation}/devices", **_json(request))

    def assignment(
        self,
        federation: str,
        wait_seconds: float,
        cost: messages.UploadCost | None,
        mask: str | None = None,
        model: str | None = None,
    ) -> tuple[messages.Assignment | None, float]:
        """Wait up to ``wait_seconds`` for work. Return the assignment, or None and the requested pause in seconds.

        mask, model: digests of the mask that this device holds and of the global model that it can rebuild. Raises
        FederationOver after the last round.
        """

        def read(answer: httpx.Response) -> tuple[messages.Assignment | None, float]:
            self.renewal_due = "Sparrow-Renew-Token" in answer.headers
            if answer.status_code == 204:
                return None, pause_of(answer, 1.0)
            found, payload = self._read_with_payload(messages.Assignment, answer)
            self._keep_brought(found, payload)
            return found, 0.0

        # A repeated call does not wait: its answer shows at once that the coordinator is back.
        waits = iter((wait_seconds,))

        def attempt() -> httpx.Response:
            return self.exchange(
                "GET",
                f"/v1/federations/{federation}/assignment",
                params={"wait": next(waits, 0), **_holding(mask, model)},
                headers={"Accept": messages.ASSIGNMENT_TYPE, **_costing(cost)},
                timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
            )

        return self._patiently(attempt, read)

    def open_work(self, federation: str, wait_seconds: float, etag: str) -> tuple[messages.OpenWork | None, str]:
        """Return the open assignments and the ETag; None if unchanged for ``wait_seconds``."""

        def read(answer: httpx.Response) -> tuple[messages.OpenWork | None, str]:
            if answer.status_code == 304:
                return None, etag
            return message_of(messages.OpenWork, answer), answer.headers.get("ETag", "")

        return self.call(
            "GET",
            f"/v1/federations/{federation}/assignments",
            read=read,
            most=LARGEST_LIST,
            params={"wait": wait_seconds},
            headers={"If-None-Match": etag} if etag else {},
            timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
        )

    def model(self, federation: str, manifest: Manifest) -> Tensors:
        """Return the global model by name. Raises NoGlobalModel if there is none."""
        most = checkpoint.MAX_HEADER + sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manifest.whole)
        tensors, _ = checkpoint.load(self.call("GET", f"/v1/federations/{federation}/model", most=most).content)
        return tensors

    def hand_back(self, assignment_id: str, reason: messages.PauseReason | Failure) -> None:
        """Return an assignment unfinished."""
        self.call("DELETE", f"/v1/assignments/{assignment_id}", **_json(messages.HandBack(reason=_listed(reason))))

    def heartbeat(self, assignment_id: str) -> bool:
        """Report once, without retries, that this device works on an assignment; thread-safe.

        Return False if the coordinator no longer waits for the assignment.
        """
        try:
            answer = self.exchange("POST", f"/v1/assignments/{assignment_id}/heartbeat", timeout=HEARTBEAT_TIMEOUT)
        # httpx raises RuntimeError if the client was closed in the meantime.
        except (httpx.HTTPError, NoCoordinator, RuntimeError):
            return True
        return passes(answer) or answer.is_success or not is_problem(answer)

    def change_device(self, device_id: str, change: messages.ChangeDevice) -> None:
        """Report a new budget or changed conditions."""
        if change.conditions is not None and change.conditions.reason:
            _listed(change.conditions.reason)
        self.call("PATCH", f"/v1/devices/{device_id}", **_json(change))

    def remove_device(self, device_id: str) -> None:
        """Revoke a device and remove it from lists and counts."""
        self.call("DELETE", f"/v1/devices/{device_id}")

    def new_token(self, device_id: str, enrolment_key: str) -> str:
        """Return a new token. The old one stays valid until its first use."""
        request = messages.RenewToken(enrolment_key=enrolment_key)
        return self.ask(messages.NewToken, "POST", f"/v1/devices/{device_id}/token", **_json(request)).token

    def update(
        self,
        assignment_id: str,
        body: bytes,
        media_type: str,
        cost: messages.UploadCost | None = None,
        mask: str | None = None,
        model: str | None = None,
        *,
        goes_on: bool = False,
    ) -> messages.Assignment | None:
        """Send an update; repeating it is harmless. Raises RoundOver if it is too late.

        goes_on: return the next assignment if there is one already. mask, model: digests, as for ``assignment``.
        """
        headers = {"Content-Type": media_type, **_costing(cost)}

        def read(answer: httpx.Response) -> messages.Assignment | None:
            if not goes_on:
                return None
            self.renewal_due = "Sparrow-Renew-Token" in answer.headers
            accepted, payload = self._read_with_payload(messages.UpdateAccepted, answer)
            self._keep_brought(accepted.next, payload)
            return accepted.next

        path = f"/v1/assignments/{assignment_id}/update"
        params = {}
        if goes_on:
            headers["Accept"] = messages.ASSIGNMENT_TYPE
            params = _holding(mask, model)
        return self.upload(UPDATE, path, body, headers, read, params=params)

    def payload(self, assignment_id: str, payload: messages.Payload) -> bytes:
        """Return an assignment's bundle, sent with the assignment or downloaded.

        Raises Damaged if its digest is wrong.
        """
        brought = self._take_brought()
        if brought is not None and brought.assignment_id == assignment_id and _is(payload, brought.body):
            return brought.body
        path = f"/v1/assignments/{assignment_id}/payload"
        for _ in range(3):
            into = io.BytesIO()
            self.download(path, payload.bytes, into)
            body = into.getvalue()
            if _is(payload, body):
                return body
        raise Damaged(
            "three downloads of the payload did not match its digest; check proxies between this device "
            "and the coordinator"
        )

    def _read_with_payload(self, kind: type[Message], answer: httpx.Response) -> tuple[Message, bytes | None]:
        """Return an answer's message, and its payload, if any."""
        if answer.headers.get("Content-Type") != messages.ASSIGNMENT_TYPE:
            return message_of(kind, answer), None
        line, _, payload = answer.content.partition(b"\n")
        try:
            return kind.model_validate_json(line), payload or None
        except ValidationError:
            raise NoCoordinator(answer.status_code, "the assignment cannot be read") from None

    def _keep_brought(self, assignment: messages.Assignment | None, payload: bytes | None) -> None:
        """Keep a payload; its bytes count when it is taken."""
        self._take_brought()
        if assignment is not None and payload is not None:
            self.traffic.down -= len(payload)
            self._brought = _Brought(assignment.assignment_id, payload, self.body_seconds)

    def _take_brought(self) -> _Brought | None:
        brought = self._brought
        self._brought = None
        if brought is not None:
            self.traffic.down += len(brought.body)
            self.traffic.earlier_seconds += brought.seconds
        return brought


def _is(payload: messages.Payload, body: bytes) -> bool:
    return len(body) == payload.bytes and hashlib.sha256(body).hexdigest() == payload.sha256


def _holding(mask: str | None, model: str | None) -> dict[str, str]:
    return {**({"mask": mask} if mask else {}), **({"model": model} if model else {})}


def _costing(cost: messages.UploadCost | None) -> dict[str, str]:
    return {"Sparrow-Upload-Cost": json.dumps(cost.model_dump(mode="json"))} if cost else {}


def _listed(reason: messages.PauseReason | str) -> messages.PauseReason | Failure:
    """Return a reason that may be sent. Raises ValueError for free text, which may contain names of files or data."""
    return reason if isinstance(reason, messages.PauseReason) else Failure(reason)


def _json(message: BaseModel, *, exclude_unset: bool = False) -> dict[str, Any]:
    body = message.model_dump_json(exclude_unset=exclude_unset).encode()
    return {"content": body, "headers": {"Content-Type": "application/json"}}
