"""The ASGI application for ``uvicorn coordinator.main:app``; with default settings it has a federation ``default``."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sparrow.command_line import allocator
from sparrow.command_line.signals import handled
from sparrow.coordinator import logs
from sparrow.coordinator.api import (
    connections,
    device_calls,
    devices,
    document,
    federations,
    pages,
    sign_in,
    status,
    tokens,
)
from sparrow.coordinator.api.headers import below_root
from sparrow.coordinator.api.middleware.authentication import Authentication, UnknownCallers
from sparrow.coordinator.api.middleware.body_limits import SlowBodies, SmallBodies
from sparrow.coordinator.api.middleware.cross_site import CrossSite
from sparrow.coordinator.api.middleware.open_calls import MissingTokenWarning
from sparrow.coordinator.api.middleware.plain_text import PlainText
from sparrow.coordinator.api.middleware.rate_limits import AddressLimits, CallerLimits, CallsAtOnce
from sparrow.coordinator.api.middleware.request_ids import RequestIds
from sparrow.coordinator.api.middleware.versions import Versions
from sparrow.coordinator.app import Coordinator
from sparrow.coordinator.calls import problems
from sparrow.coordinator.commands import starting
from sparrow.coordinator.commands.starting import Listening
from sparrow.coordinator.settings import Settings
from sparrow.protocol.addresses import is_loopback

log = logging.getLogger(__name__)


class _Application(FastAPI):
    """FastAPI application that installs the connection limits in its server."""

    def __init__(self, settings: Settings, **named: Any) -> None:
        super().__init__(**named)
        self._settings = settings

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            self.openapi_schema = document.complete(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            connections.install(receive, self._settings)
        else:
            scope = below_root(scope)
        await super().__call__(scope, receive, send)


def create_app(settings: Settings | None = None, listening: Listening | None = None) -> FastAPI:
    """Return the application with the given settings, or those of the environment.

    listening: the address of ``sparrow serve``, for the lines about joining, and for making tokens if other machines
    can reach it.
    """
    settings = settings or Settings()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        allocator.give_back()
        logs.install(settings.log_level, settings.log_format)
        coordinator = Coordinator(settings)
        app.state.coordinator = coordinator
        try:
            await run_in_threadpool(coordinator.open)
            if listening is not None and not is_loopback(listening.host):
                keep = partial(starting.keep_tokens, settings.data_dir)
                secrets = await run_in_threadpool(coordinator.tokens.make_first, keep)
                for line in starting.first_join(settings, listening, secrets) if secrets else ():
                    # Others may read the log, so secrets do not go there.
                    sys.stderr.write(f"{line}\n")
            guarded = await run_in_threadpool(coordinator.tokens.guarded)
            # A token made meanwhile applies to the first call.
            coordinator.tokens.forget()
            for line in starting.introduction(settings, listening, enrolment_guarded="enrolment" in guarded):
                log.info("%s", line)
            # A full collection over all modules would stop every call for 0.1 s.
            gc.freeze()
            with _before_stop(coordinator.leave):
                yield
        finally:
            gc.unfreeze()
            await run_in_threadpool(coordinator.close)

    app = _Application(
        settings,
        title="Sparrow coordinator",
        version="1",
        description="Sparse personalised federated learning on real devices.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    # From the inside out: the last one added is the first to see a call.
    for middleware in (
        SmallBodies,
        SlowBodies,
        MissingTokenWarning,
        CallsAtOnce,
        UnknownCallers,
        CallerLimits,
        Authentication,
        AddressLimits,
        CrossSite,
        PlainText,
        Versions,
        RequestIds,
    ):
        app.add_middleware(middleware)
    # Routes are matched in this order; devices call most often.
    for module in (device_calls, devices, federations, tokens, status, pages, sign_in):
        app.include_router(module.router)
    app.include_router(federations.settings_router)
    app.include_router(federations.summaries_router)
    problems.install(app)
    return app


@contextmanager
def _before_stop(action: Callable[[], None]) -> Iterator[None]:
    """Context manager: call ``action`` at SIGINT and SIGTERM, before the server waits for open calls."""
    # uvicorn waits for running requests, and a long poll or event stream may run for a minute.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        action()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    with handled(dict.fromkeys(before, handle)):
        yield


app = create_app()
