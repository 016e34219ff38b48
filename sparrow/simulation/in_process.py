"""Call an ASGI application without a socket: the coordinator runs in the devices' process.

Unlike over HTTP, answers arrive complete, and the application's exceptions reach the caller.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from ..transport import httpx

ADDRESS = "http://in-process"


class InProcess(httpx.BaseTransport):
    """A transport that passes requests to ``app`` on ``loop``, which runs in another thread."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = httpx.ASGITransport(app, client=("127.0.0.1", 0))
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for its complete answer."""
        request.read()
        # the body is complete, so it has a length and no chunks
        request.headers.pop("Transfer-Encoding", None)
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._calls.handle_async_request(request)
        assert isinstance(answer.stream, httpx.AsyncByteStream), "the transport is asynchronous"
        body = b"".join([part async for part in answer.stream])
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(body))


@contextmanager
def running(app: Any) -> Iterator[httpx.Client]:
    """Context manager: start a Starlette or FastAPI application, yield a client of it, stop it on exit.

    Raises the errors of its start and stop.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    ended: Future[None] = Future()

    async def live() -> None:
        over = asyncio.Event()
        # one task enters and leaves, since lifespans may depend on it
        async with app.router.lifespan_context(app):
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
