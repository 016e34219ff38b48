"""An S3-compatible server of the tests' own, in this process, on a port of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sparrow.transport import httpx

KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}
BUCKET = "sparrow"


@contextmanager
def serving() -> Iterator[str]:
    """The server's address; it has one empty bucket."""
    pytest.importorskip("obstore", reason="needs sparrow-fl[s3]")
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer("127.0.0.1", 0)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it would print every call
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        httpx.post(f"{address}/moto-api/reset").raise_for_status()
        httpx.put(f"{address}/{BUCKET}").raise_for_status()
        yield address
    finally:
        server.stop()
