"""Pieces of installed packages: one that cannot be imported is named, with what to do, wherever it is asked for."""

from __future__ import annotations

import pytest

from edge_sdk.errors import SdkError
from edge_sdk.methods import load_method
from edge_sdk.tasks import load_task
from edge_sdk.tasks.dealing import find_partition
from sparrow.coordinator import methods as coordinator_methods
from sparrow.coordinator.errors import UnknownMethod
from sparrow.devices.power import installed_sources
from sparrow.export.passes import installed_passes

BROKEN = "nothing_there:X"
GROUPS = ("coordinator_methods", "device_methods", "tasks", "partitions", "power_sources", "export_passes")


@pytest.fixture
def _broken_package(tmp_path, monkeypatch):
    """An installed package whose every entry point names a module that is not there."""
    about = tmp_path / "broken-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("".join(f"[sparrow.{group}]\nbroken = {BROKEN}\n" for group in GROUPS))
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_sources.cache_clear()
    yield
    installed_sources.cache_clear()


@pytest.mark.usefixtures("_broken_package")
@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: coordinator_methods.load_method("broken"), UnknownMethod),
        (lambda: load_method("broken"), SdkError),
        (lambda: load_task("broken", None, device="d", seed=0, batch_size=4), SdkError),
        (lambda: find_partition("broken"), SdkError),
        (installed_sources, SdkError),
        (lambda: installed_passes(None), SdkError),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(use, error):
    with pytest.raises(error, match=r"'broken'.*nothing_there:X.*nothing_there"):
        use()
