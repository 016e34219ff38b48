"""``uvicorn coordinator.main:app``: with no configuration, a federation called ``default`` for two devices and more."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from sparrow.coordinator import logs
from sparrow.coordinator.api import devices, federations, pages, problems, status
from sparrow.coordinator.api.access import OpenHouseWarning
from sparrow.coordinator.api.bodies import SmallBodies
from sparrow.coordinator.api.door import Door
from sparrow.coordinator.api.parts import House
from sparrow.coordinator.api.slow import SlowBodies
from sparrow.coordinator.commands import allocator, starting
from sparrow.coordinator.commands.starting import Listening
from sparrow.coordinator.settings import Settings

log = logging.getLogger(__name__)


def create_app(settings: Settings | None = None, listening: Listening | None = None) -> FastAPI:
    """The application over the given settings, or those of the environment.

    listening: where its server does, to say how a device joins; by default as uvicorn's command line says.
    """
    settings = settings or Settings()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        allocator.give_back()
        logs.install(settings.log_level, settings.log_format)
        house = House(settings)
        app.state.house = house
        try:
            await house.open()
            former = starting.forgotten(settings)
            if former is not None:
                log.warning("%s", former)
            guarded = await run_in_threadpool(house.tokens.guarded)
            house.tokens.forget()  # so that a token made meanwhile is in force with the first call
            where = listening or starting.by_uvicorn(sys.argv)
            for line in starting.introduction(settings, where, enrolment_guarded="enrolment" in guarded):
                log.info("%s", line)
            with _before_stop(house.leave):
                yield
        finally:
            await house.close()

    app = FastAPI(
        title="Sparrow coordinator",
        version="1",
        description="Sparse personalised federated learning on real devices.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(SmallBodies)
    app.add_middleware(SlowBodies, settings=settings)
    app.add_middleware(OpenHouseWarning, settings=settings)
    app.add_middleware(Door)  # the last one added is the first to see a call
    for part in (devices, federations, status, pages):  # looked through in this order: devices call most often
        app.include_router(part.router)
    problems.install(app)
    return app


@contextmanager
def _before_stop(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` when the process is asked to stop, before the server waits for its open calls to end.

    uvicorn waits for running requests, and a long poll or event stream would run on for a minute.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        action()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = create_app()
