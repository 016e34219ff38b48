"""ONNX Runtime's ``.ort`` format, for minimal builds (https://onnxruntime.ai/docs/build/custom.html).

A minimal build reads only ``.ort`` files and contains only the operators given by ``--include_ops_by_config``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ExportError
from .running import runtime


@dataclass(frozen=True)
class OrtFile:
    """A written .ort file, the build's operator list, and the operators: domain -> sorted names."""

    path: Path
    config: Path
    bytes: int
    operators: Mapping[str, tuple[str, ...]]


def write_ort(model: Path, path: Path) -> OrtFile:
    """Convert an ONNX file to ``path`` (``.ort``) and write its operators next to it. Raises ExportError.

    The list's suffix is ``.required_operators.config``.
    """
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ORT")
    config = path.with_suffix(".required_operators.config")
    try:
        from onnxruntime.tools.ort_format_model import create_config_from_models

        # NchwcTransformer: a layout for x86 only
        onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
        )
        logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            # the tool does not close the file
            warnings.simplefilter("ignore", ResourceWarning)
            create_config_from_models([path], config, False)
    # ONNX Runtime's exceptions share no public base class
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot write {path}: {error}; leave --ort-format out") from None
    return OrtFile(path, config, path.stat().st_size, _operators(config.read_text(encoding="utf-8")))


def _operators(config: str) -> dict[str, tuple[str, ...]]:
    """Parse lines ``domain;version;name,name``; a domain may have several versions."""
    found: dict[str, set[str]] = {}
    for line in config.splitlines():
        if line.startswith("#") or line.count(";") != 2:
            continue
        domain, _, names = line.split(";")
        found.setdefault(domain or "ai.onnx", set()).update(names.split(","))
    return {domain: tuple(sorted(names)) for domain, names in sorted(found.items())}
