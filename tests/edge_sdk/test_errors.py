"""One tree of errors; each class has an exit code, and each problem of a coordinator a class."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import edge_sdk
import sparrow.devices
import sparrow.export
import sparrow.graphs
import sparrow.protocol
import sparrow.simulation
from edge_sdk import errors
from edge_sdk.device.answers import PROBLEMS
from edge_sdk.errors import Refused, SdkError, SystemFailed, Unreachable, translated
from sparrow.command_line.exits import Exit
from sparrow.coordinator.calls import problems
from sparrow.protocol.failures import Failure

API = Path(problems.__file__).parent


def modules():
    for package in (edge_sdk, sparrow.protocol, sparrow.simulation, sparrow.devices, sparrow.export, sparrow.graphs):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


@pytest.fixture(scope="module")
def defined():
    """Every exception class that devices, export and what both sides share define."""
    return {
        thing
        for module in modules()
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Exception) and thing.__module__ == module.__name__
    }


def test_every_class_is_in_the_tree_with_an_exit_code(defined):
    outside = {kind.__name__ for kind in defined if not issubclass(kind, SdkError)}
    assert outside == set()
    for kind in defined:
        assert isinstance(kind.exit_code, Exit | property), kind
        assert isinstance(kind.failure, Failure), kind


def test_each_problem_of_the_coordinator_has_its_class():
    def raised(kind):
        """Its name and those of its subclasses, but for what devices alone define."""
        own = {kind.__name__} if kind.__module__.startswith("sparrow.") else set()
        return own.union(*map(raised, kind.__subclasses__()))

    met = set().union(*map(raised, problems.STATUS))
    for file in API.glob("*.py"):
        met |= set(re.findall(r"problem\(\s*\w+, \"(\w+)\"", file.read_text()))
    assert met
    assert met <= set(PROBLEMS)


def test_what_may_pass_is_unreachable_and_all_else_refused():
    for name, kind in PROBLEMS.items():
        of_the_coordinator = {"Unavailable", "NotReady", "Unreadable", "Damaged", "InternalError"}
        passes = name in {"TooManyRequests", "DiskFull", *of_the_coordinator}
        assert issubclass(kind, Unreachable if passes else Refused), name


@pytest.mark.parametrize(("status", "code"), [(401, Exit.REFUSED), (404, Exit.NOT_FOUND), (409, Exit.FAILED)])
def test_the_code_of_a_refusal_is_that_of_its_status(status, code):
    refusal = Refused(status, "no")
    assert refusal.exit_code is code
    again = copy.copy(refusal)  # by __reduce__, as pickle does
    assert (again.status, again.detail, str(again)) == (status, "no", "no")


def test_a_name_that_is_taken_is_an_argument_to_correct():
    assert errors.NameTaken(409, "another device is called pi").exit_code is Exit.USAGE


def test_the_operating_systems_errors_are_translated(tmp_path):
    with pytest.raises(errors.NoSuchPath, match="gone: No such file or directory") as missing, translated():
        (tmp_path / "gone").read_text()
    assert isinstance(missing.value.__cause__, FileNotFoundError)
    assert missing.value.exit_code is Exit.NOT_FOUND
    with pytest.raises(SystemFailed, match="Is a directory"), translated():
        tmp_path.read_text()
    with pytest.raises(errors.OutOfMemory, match="smaller --budget"), translated():
        raise MemoryError("2 GiB")
    with pytest.raises(RuntimeError, match="the task's own"), translated():
        raise RuntimeError("the task's own")
