"""Log lines with fields: federation, round, device, request.

``about`` sets fields for every line logged within, in any module; a line's ``extra`` adds to them. In text they follow
the message as key=value; in JSON each line is one object.

Callers' text may be part of any line, so line breaks, terminal codes and marks that change the direction of text are
escaped. A traceback is indented, so that it cannot imitate other lines.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal

from sparrow.command_line.table import printable

FIELDS = ("federation", "round", "device", "request")

# The default is never changed in place.
_about: ContextVar[dict[str, Any]] = ContextVar("about", default={})  # noqa: B039


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Context manager: add these fields, except those that are None, to every line logged within."""
    token = _about.set({**_about.get(), **{key: value for key, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return a line's fields, in the context that logs it."""
    known = {**_about.get(), **{key: getattr(record, key) for key in FIELDS if hasattr(record, key)}}
    return {key: known[key] for key in FIELDS if key in known}


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a traceback cached in the record by another formatter."""
        record = copy.copy(record)
        record.exc_text = None
        return super().format(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return a traceback, indented."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """Return a stack, indented."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))


class TextFormatter(_Formatter):
    """Time, level, logger, message, and the fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without its traceback."""
        fields = "".join(f" {key}={value}" for key, value in fields_of(record).items())
        return printable(super().formatMessage(record) + fields)


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname, "logger": record.name}
        line["message"] = printable(record.getMessage())
        fields = fields_of(record).items()
        line |= {key: printable(value) if isinstance(value, str) else value for key, value in fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def install(level: str, format: Literal["text", "json"]) -> None:
    """Log to stderr in this format, unless logging is already set up."""
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        root.addHandler(handler)
        root.setLevel(level)
    if format == "json":
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
    # These log every migration and every call of a client in this process.
    for name in ("alembic", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
