"""The user's folders, also for a user without a home."""

from __future__ import annotations

import pytest

from sparrow.places import BELOW_HOME, expanded, user_folder
from sparrow.protocol.errors import BadArgument


@pytest.fixture
def _homeless(monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr("os.path.expanduser", str)


@pytest.mark.parametrize("variable", BELOW_HOME)
def test_a_variable_comes_before_the_home_folder(monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, str(tmp_path))
    assert user_folder(variable) == tmp_path / "sparrow"
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder(variable) == tmp_path / BELOW_HOME[variable] / "sparrow"


@pytest.mark.parametrize("variable", BELOW_HOME)
@pytest.mark.usefixtures("_homeless")
def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch, variable):
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BadArgument, match=variable):
        user_folder(variable)


@pytest.mark.usefixtures("_homeless")
def test_a_path_below_an_unknown_home_is_named():
    with pytest.raises(BadArgument, match="~/samples"):
        expanded("~/samples.npz")
