"""ONNX Runtime's own file format, for builds of it that hold only the operators a model needs.

A device that has no room for all of ONNX Runtime runs a minimal build
(https://onnxruntime.ai/docs/build/custom.html): it reads ``.ort`` files alone, optimised beforehand, and is compiled
with ``--include_ops_by_config`` and the list of operators that is written beside the file.
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
    """An .ort file as written: the file, the list for the build, and the operators in it: domain -> names, sorted."""

    path: Path
    config: Path
    bytes: int
    operators: Mapping[str, tuple[str, ...]]


def write_ort(model: Path, path: Path) -> OrtFile:
    """Convert the ONNX file ``model`` to ``path`` (``.ort``), and list its operators in ``.required_operators.config``.

    Optimised for any processor: without the layout that only x86 has use for. Raises ExportError.
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

        onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
        )
        logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves the file to the garbage collector
            create_config_from_models([path], config, False)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise ExportError(f"ONNX Runtime cannot write {path}: {error}; leave --ort-format out") from None
    return OrtFile(path, config, path.stat().st_size, _operators(config.read_text(encoding="utf-8")))


def _operators(config: str) -> dict[str, tuple[str, ...]]:
    """Return the operators of lines ``domain;version;name,name``; one domain may have several versions."""
    found: dict[str, set[str]] = {}
    for line in config.splitlines():
        if line.startswith("#") or line.count(";") != 2:
            continue
        domain, _, names = line.split(";")
        found.setdefault(domain or "ai.onnx", set()).update(names.split(","))
    return {domain: tuple(sorted(names)) for domain, names in sorted(found.items())}
