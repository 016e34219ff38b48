"""``sparrow model``: list and download the global models of a federation.

sparrow model list lab
sparrow model download lab --output lab.onnx
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge_sdk.arguments import add_federation

from .client import FORMATS
from .command_line.command import Command, Parser, WrongUsage
from .command_line.table import percent, table
from .operating import add_coordinator, connected
from .protocol.messages import ModelInfo


def _options(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in {
        "list": "list the stored versions of the global model",
        "download": "download the newest version as ONNX or safetensors",
    }.items():
        part = parts.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_federation(part)
        if name == "download":
            part.add_argument(
                "--output", type=Path, help="write FILE.onnx or FILE.safetensors (default: FEDERATION.onnx)"
            )
        add_coordinator(part)


def _run(options: argparse.Namespace) -> None:
    with connected(options) as transport:
        # if it does not exist, the error lists the federations
        transport.federation(options.federation)
        if options.command == "list":
            models = transport.models(options.federation)
            found = [each.model_dump(mode="json") for each in models]
            print(json.dumps(found) if options.json else as_table(models))
            return
        out = options.output or Path(f"{options.federation}.onnx")
        if out.suffix not in FORMATS:
            raise WrongUsage(f"--output {out}: give a name that ends in {' or '.join(FORMATS)}")
        data = transport.model_file(options.federation, FORMATS[out.suffix])
        out.write_bytes(data)
        print(json.dumps({"path": str(out), "bytes": len(data)}) if options.json else f"{out}, {len(data):,} B")


def as_table(models: list[ModelInfo]) -> str:
    """Return a table of models."""
    head = ("version", "round", "accuracy", "loss", "devices", "bytes", "sha256", "")
    rows = [
        (
            str(model.version),
            "-" if model.round is None else str(model.round),
            "-" if model.accuracy is None else percent(model.accuracy),
            "-" if model.loss is None else f"{model.loss:.4g}",
            str(model.devices or "-"),
            f"{model.bytes:,}",
            (model.model_sha256 or "-")[:16],
            ", ".join(word for word in ("current", "undone", "best") if getattr(model, word)),
        )
        for model in models
    ]
    return table(head, rows)


COMMAND = Command(
    "sparrow model",
    "List and download the global models of a federation.",
    _options,
    _run,
    epilog="Set SPARROW_OBSERVER_TOKEN to the observer token if the coordinator requires one.",
)
