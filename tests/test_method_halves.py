"""Each method is a pair of records that agree, in two files that need no other method."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from edge_sdk import methods as device
from sparrow.coordinator import methods as server

ROOT = Path(__file__).parents[1]
NAMES = sorted(
    entry.name for entry in entry_points(group="sparrow.device_methods") if entry.value.startswith("edge_sdk.methods.")
)


def imported(path: Path) -> set[str]:
    """The last names of the modules that a file imports."""
    tree = ast.walk(ast.parse(path.read_text()))
    return {str(node.module).rsplit(".", 1)[-1] for node in tree if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("name", NAMES)
def test_reading_a_method_needs_no_other_method(name):
    for folder in ("edge_sdk", "coordinator"):
        path = ROOT / folder / "methods" / f"{name}.py"
        others = imported(path) & (set(NAMES) - {"local"})  # edge_sdk.training.local is no method
        assert not others, f"{path} needs {others}; move what they share into a helper"


@pytest.mark.parametrize("name", NAMES)
def test_both_halves_declare_the_same(name):
    ours, theirs = device.load_method(name), server.load_method(name)
    assert ours.mixes_global == theirs.mixes_global
    assert (ours.active is None) == (theirs.active is None)
    assert ours.narrow == (theirs.active is not None and theirs.active.narrow)
    assert (theirs.payload_parts is None) == (ours.payload_parts == ())
    assert (theirs.compose is None) == (ours.network is None)
    assert theirs.prepares == (ours.prepare is not device.hand_back)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_reads_settings_that_the_server_has(name):
    module = import_module(f"edge_sdk.methods.{name}")
    known = server.load_method(name).settings_type.model_fields
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, device.MethodSettings):
            assert each.model_fields.keys() <= known.keys()


def test_what_is_no_record_is_refused_by_name(monkeypatch):
    class Entry:
        name, value = "odd", "mylab.device:Odd"

        def load(self):
            return object

    monkeypatch.setattr("sparrow.command_line.installed.entry_points", lambda group: [Entry()])
    for module, record in ((device, "DeviceMethod"), (server, "CoordinatorMethod")):
        with pytest.raises(module.UnknownMethod, match=rf"mylab\.device:Odd\b.*\b{record}"):
            module.load_method.__wrapped__("odd")
