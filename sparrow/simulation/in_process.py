"""Calls of an ASGI application without a socket: for research, the coordinator in the devices' own process.

Sessions are synchronous and an application runs on an event loop, so the loop has a thread of its own and each call is
handed over to it. Everything between, requests, answers and the application's own start and stop, is as over HTTP, but
for two things: an answer arrives when it is whole, and what the application fails with is raised where it was called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx

ADDRESS = "http://in-process"


class InProcess(httpx.BaseTransport):
    """Hands each request to ``app`` on ``loop``, which runs in another thread."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and wait for its whole answer."""
        call = _Call(request.read())
        asyncio.run_coroutine_threadsafe(call.run(self._app, _scope(request)), self._loop).result()
        return httpx.Response(call.status, headers=call.headers, stream=httpx.ByteStream(b"".join(call.parts)))


def _scope(request: httpx.Request) -> dict[str, Any]:
    """Return a request's head as ASGI has it. Its body is whole: announced by its length, never as chunks."""
    path, _, query = request.url.raw_path.partition(b"?")
    headers = [(key.lower(), value) for key, value in request.headers.raw]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [each for each in headers if each[0] != b"transfer-encoding"],
        "client": ("127.0.0.1", 0),
        "server": (request.url.host, request.url.port),
    }


class _Call:
    """One call: the request's body for the application, and its answer's ``status``, ``headers`` and ``parts``."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._answered = asyncio.Event()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []

    async def run(self, app: Any, scope: dict[str, Any]) -> None:
        """Let the application answer. Raises what it raises."""
        await app(scope, self._receive, self._send)
        self._answered.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:  # who asks again learns that the caller has gone once it has its answer
            await self._answered.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            return
        self.parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            self._answered.set()


@contextmanager
def running(app: Any) -> Iterator[httpx.Client]:
    """Start a Starlette or FastAPI application in this process; yields a client of it, and stops it in the end.

    Raises what the application's start or stop raises.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    ended: Future[None] = Future()

    async def live() -> None:
        over = asyncio.Event()
        async with app.router.lifespan_context(app):  # entered and left by one task, as lifespans may rely on
            started.set_result((asyncio.get_running_loop(), over))
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(live())
            ended.set_result(None)
        except BaseException as error:
            (ended if started.done() else started).set_exception(error)

    thread = threading.Thread(target=run, name="asgi", daemon=True)
    thread.start()
    try:
        loop, over = started.result()
        try:
            with httpx.Client(transport=InProcess(app, loop), base_url=ADDRESS) as client:
                yield client
        finally:
            loop.call_soon_threadsafe(over.set)
            ended.result()
    finally:
        thread.join()
