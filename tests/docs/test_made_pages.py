import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import FunctionType

from sparrow.coordinator.settings import Settings
from sparrow.protocol.settings import FederationSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def public_modules():
    """The modules whose ``__all__`` says what is public, in the packages that users import."""
    packages = {"edge_sdk": "edge_sdk", "export": "sparrow.export", "devices": "sparrow.devices", "sparrow": "sparrow"}
    for folder, package in packages.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            linked = any((ROOT / folder / part).is_symlink() for part in inside.parts[:1])
            if not linked and "\n__all__ = " in path.read_text():
                names = [*inside.parts[:-1], *([] if inside.stem == "__init__" else [inside.stem])]
                yield ".".join([package, *names])


def test_the_reference_has_every_public_module():
    shown = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(public_modules())


def test_every_public_name_has_a_docstring_of_its_own():
    missing = []
    for each in public_modules():
        module = importlib.import_module(each)
        assert module.__doc__, f"{each} needs a docstring"
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                missing += [] if described(found) else [f"{each}.{name}"]
            if inspect.isclass(found):
                missing += [f"{name}.{member}" for member, plain in members(found) if not plain.__doc__]
    assert not missing


def described(found):
    """Whether it has a docstring of its own, and not the one that a dataclass makes of its fields."""
    text = inspect.cleandoc(found.__doc__ or "")
    return bool(text) and not (inspect.isclass(found) and text.startswith(f"{found.__name__}("))


def members(kind):
    """The public methods and properties that a class defines itself."""
    fields = getattr(kind, "__dataclass_fields__", ())
    for name, found in vars(kind).items():
        plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if not name.startswith("_") and name not in fields and isinstance(plain, FunctionType | property):
            yield name, plain
