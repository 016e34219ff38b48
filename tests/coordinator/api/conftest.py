"""Whole applications in this process, called without sockets."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation import in_process as inprocess


@pytest.fixture
def open_app(request, tmp_path):
    """Starts the application with these settings, the default federation's being the module's ``SETTINGS``; answers a
    client of it."""
    with ExitStack() as stack:

        def start(**changes):
            federation = request.module.SETTINGS
            usual = {"data_dir": tmp_path / "data", "default_settings": federation, "tick_seconds": 0.05}
            client = stack.enter_context(inprocess.running(create_app(Settings(**{**usual, **changes}))))
            stack.callback(client.get, "/readyz")  # the last fact is taken up before it is stopped
            return client

        yield start
