import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_say_what_the_methods_declare():
    spec = importlib.util.spec_from_file_location("methods_page", DOCS / "methods.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (DOCS / "methods.md").read_text()
    assert text == module.page(text), "run: python docs/methods.py"
