"""Records as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from fastapi import Response
from pydantic import BaseModel


def as_csv(form: type[BaseModel], records: Iterable[BaseModel]) -> Response:
    """Return records of one form as a CSV file, a line each. Lists and objects are JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(form.model_fields))
    writer.writeheader()
    for record in records:
        writer.writerow({name: _cell(value) for name, value in record.model_dump(mode="json").items()})
    return Response(text.getvalue(), media_type="text/csv")


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value)
    # Spreadsheets would compute a text from a device as a formula.
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
