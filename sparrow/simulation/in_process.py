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
        self._calls = httpx.ASGITransport(app, client=("127.0.0.1", 0))
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and wait for its whole answer."""
        request.read()
        request.headers.pop("Transfer-Encoding", None)  # the body is whole: announced by its length, never as chunks
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._calls.handle_async_request(request)
        assert isinstance(answer.stream, httpx.AsyncByteStream), "of an asynchronous transport"
        body = b"".join([part async for part in answer.stream])
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(body))


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
