"""A device that uses the whole contract and does not train: it adds a little to every value each round.

``python -m benchmarks.coordinator.client SERVER FEDERATION NUMBER [--marks FILE]``. It uses the SDK's transport and
protocol, without PyTorch. With ``--marks`` it writes a line when work of a new round arrives, as the end of the
previous round.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

import numpy as np

from edge_sdk.device.transport import Transport
from edge_sdk.errors import FederationOver
from edge_sdk.methods import load_method
from sparrow.protocol import bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Assignment, Enrol, Kind, UpdateReport
from sparrow.protocol.neurons import mask_digest
from sparrow.protocol.parts import expected
from sparrow.transport import connect

WAIT_SECONDS = 30.0
EXAMPLES = 100


class Device:
    """One device of a federation, enrolled at its creation."""

    def __init__(self, transport: Transport, federation: str, manifest: Manifest, number: int) -> None:
        self._transport = transport
        self._federation = federation
        self._manifest = manifest
        self._step = np.float32(1e-3 * (1 + number))
        self._mask: ElementMask | None = None
        self._digest: str | None = None
        self._next: Assignment | None = None
        request = Enrol(name=f"device-{number}", enrolment_key=secrets.token_hex(32), num_examples=EXAMPLES)
        transport.token = None
        self._token = transport.enrol(federation, request).token

    def ask(self, wait_seconds: float) -> Assignment | None:
        """Return the next assignment when there is one. Raises FederationOver."""
        if self._next is not None:
            following = self._next
            self._next = None
            return following
        self._transport.token = self._token
        assignment, pause = self._transport.assignment(self._federation, wait_seconds, None, self._digest)
        if assignment is None:
            time.sleep(pause)
        return assignment

    def work(self, assignment: Assignment) -> None:
        """Download, change and upload the values."""
        self._transport.token = self._token
        assert assignment.payload is not None, "training starts from what the coordinator sends"
        body = self._transport.payload(assignment.assignment_id, assignment.payload)
        declared = load_method(assignment.settings.method).payload_parts
        parts = expected(declared, self._manifest, assignment.plan)
        received = bundle.decode(body, self._manifest, self._mask, parts=parts)
        if isinstance(received.mask, ElementMask) and received.mask is not self._mask:
            self._mask = received.mask
            self._digest = mask_digest(self._manifest, received.mask)
        report = UpdateReport(num_examples=EXAMPLES, steps=1, train_loss=1.0)
        update = bundle.encode(
            self._manifest,
            received.values + self._step,
            received.mask,
            draw=received.draw,
            report=report.model_dump_json(exclude_defaults=True),
            known=self._mask,
        )
        self._next = self._transport.update(
            assignment.assignment_id,
            update,
            bundle.MEDIA_TYPE,
            mask=self._digest,
            goes_on=True,
        )


def take_part(transport: Transport, federation: str, number: int, marks: Path | None) -> None:
    """Work until the federation has no more training for this device."""
    device = Device(transport, federation, transport.manifest(federation), number)
    while True:
        try:
            assignment = device.ask(WAIT_SECONDS)
        except FederationOver:
            return
        if assignment is None:
            continue
        if marks is not None and assignment.round > 1:
            with marks.open("a") as file:
                file.write(f"{time.time()}\n")
        if assignment.kind is not Kind.train:
            return
        device.work(assignment)


def main(arguments: list[str] | None = None) -> int:
    """Run one device until it has no more work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.client")
    parser.add_argument("server")
    parser.add_argument("federation")
    parser.add_argument("number", type=int)
    parser.add_argument("--marks", type=Path)
    options = parser.parse_args(arguments)
    with connect(options.server) as client:
        take_part(Transport(client), options.federation, options.number, options.marks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
