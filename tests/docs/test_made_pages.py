import importlib.util
from pathlib import Path

from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.settings import Settings

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
