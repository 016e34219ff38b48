"""docs/contract.md says what the coordinator answers: its calls are those that there are, its example is a bundle."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import safetensors.numpy

from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()


def test_the_calls_are_all_there_are(tmp_path):
    table = PAGE.split("## Calls")[1].split("\n## ")[0]
    told = {(method, shape(path)) for method, path in re.findall(r"`([A-Z]+) (/v1/[^`?]*)", table)}
    document = create_app(Settings(data_dir=tmp_path)).openapi()
    assert told == {(method.upper(), shape(path)) for path, ways in document["paths"].items() for method in ways} - {
        ("GET", path) for path in ("/healthz", "/readyz", "/metrics")
    }


def shape(path):
    return re.sub(r"{\w+}", "{}", path)


def test_the_example_is_a_bundle():
    (header,) = re.findall(r"^```json\n(.*)\n```$", PAGE, re.MULTILINE)
    length, data = (bytes.fromhex(re.search(rf"{before} `([0-9a-f]+)`", PAGE)[1]) for before in ("8 bytes", "12 bytes"))
    body = length + header.encode() + data
    assert struct.unpack("<Q", length) == (len(header),)
    assert safetensors.numpy.load(body)["values"].tolist() == [0.5, -1.0, 0.25]

    parsed = json.loads(header)
    digest = parsed["__metadata__"].pop("sha256")
    signed = json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode() + data
    assert digest == hashlib.sha256(signed).hexdigest()
    assert np.frombuffer(data, "<f4").tolist() == [0.5, -1.0, 0.25]
