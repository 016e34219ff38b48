"""The OpenAPI document: FastAPI's, completed with schemas of bodies that handlers read themselves, media types of
files, and problem documents (``calls.problems``) for every error status.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from sparrow.protocol.messages import CreateFederation, Problem

from ..calls.problems import MEDIA_TYPE, STATUS

FILES = ("get_payload", "get_model", "get_model_onnx", "get_frozen", "get_first", "get_fast_step", "get_graph")
"""Calls answered with a file."""
TEXTS = {"get_events": "text/event-stream", "metrics": "text/plain; version=0.0.4; charset=utf-8"}
"""Calls answered with text other than JSON."""
MANIFEST = "Manifest of the model; sparrow/protocol/manifest.py lists its fields"
OPEN = ("healthz",)
"""Calls that never need a token."""


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Complete FastAPI's document in place, and return it."""
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for message in (CreateFederation, Problem):
        schemas[message.__name__] = message.model_json_schema(ref_template="#/components/schemas/{model}")
    for part in list(_dictionaries(document)):
        schemas |= {name: schema for name, schema in part.pop("$defs", {}).items() if name not in schemas}
    for part in _dictionaries(document):
        if isinstance(part.get("$ref"), str):
            part["$ref"] = part["$ref"].replace("#/$defs/", "#/components/schemas/")
    document["components"]["responses"] = {
        str(int(status)): {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*STATUS.values(), 500})
    }
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "Token of a device (from its enrolment) or of an operator (sparrow token create)",
        }
    }
    for path in document["paths"].values():
        for call in path.values():
            _complete_call(call)
    return document


def _complete_call(call: dict[str, Any]) -> None:
    name = call["operationId"]
    answers = call["responses"]
    if name in FILES:
        answers["200"]["content"] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    elif name in TEXTS:
        answers["200"]["content"] = {TEXTS[name]: {"schema": {"type": "string"}}}
    elif name == "get_manifest":
        answers["200"]["content"] = {"application/json": {"schema": {"type": "object", "description": MANIFEST}}}
    elif name == "get_rounds":
        answers["200"]["content"]["text/csv"] = {"schema": {"type": "string"}}
    for status in sorted({*STATUS.values(), 500}):
        answers[str(int(status))] = {"$ref": f"#/components/responses/{int(status)}"}
    call["security"] = [] if name in OPEN else [{}, {"token": []}]


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dictionary in a JSON value, the outer ones first."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dictionaries(each)
