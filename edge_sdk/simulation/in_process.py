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
        self._asgi = httpx.ASGITransport(app=app)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and wait for its whole answer."""
        return asyncio.run_coroutine_threadsafe(self._handle(request.method, request), self._loop).result()

    async def _handle(self, method: str, request: httpx.Request) -> httpx.Response:
        body = b"".join(request.stream)  # type: ignore[arg-type]
        # The body is whole by now: announced by its length, never as chunks.
        headers = [(key, value) for key, value in request.headers.raw if key.lower() != b"transfer-encoding"]
        answer = await self._asgi.handle_async_request(
            httpx.Request(method, request.url, headers=headers, stream=httpx.ByteStream(body))
        )
        whole = httpx.ByteStream(await answer.aread())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=whole)


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
