"""The HTTP library: httpx2 if it is installed, otherwise httpx."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("httpx2") is None:
    import httpx as httpx
else:
    httpx = import_module("httpx2")
