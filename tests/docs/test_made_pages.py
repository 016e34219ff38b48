import importlib.util
import inspect
from pathlib import Path

import sparrow
from sparrow.coordinator.settings import Settings
from sparrow.protocol.settings import FederationSettings

DOCS = Path(__file__).parents[2] / "docs"


def maker(name):
    """The module that makes a page."""
    spec = importlib.util.spec_from_file_location(f"{name}_page", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_settings_are():
    assert (DOCS / "settings.md").read_text() == maker("settings").page(), "run: python docs/settings.py"


def test_the_tables_say_what_the_methods_declare():
    text = (DOCS / "methods.md").read_text()
    assert text == maker("methods").page(text), "run: python docs/methods.py"


def test_every_setting_is_described():
    for model in (Settings, FederationSettings):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} needs a description"


def test_the_reference_is_made_of_the_public_names():
    assert (DOCS / "api.md").read_text() == maker("api").page(), "run: python docs/api.py"


def test_every_public_name_has_a_docstring_of_its_own():
    made, missing = maker("api"), []
    for module in made.public_modules():
        assert module.__doc__, f"{module.__name__} needs a docstring"
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                missing += [] if made.docstring(found) else [f"{module.__name__}.{name}"]
            if inspect.isclass(found):
                missing += [f"{name}.{each}" for each, member in made.members(found) if not made.docstring(member)]
    assert not missing


def test_a_name_is_public_once_all_lists_it(monkeypatch):
    def wave(times: int = 2) -> str:
        """Return a greeting, said ``times`` times."""

    monkeypatch.setattr(sparrow, "wave", wave, raising=False)
    monkeypatch.setattr(sparrow, "__all__", [*sparrow.__all__, "wave"])
    assert "### sparrow.wave\n\n```pyi\ndef wave(times: int = 2) -> str\n```\n" in maker("api").page()
