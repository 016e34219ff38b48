"""``sparrow export``: a device's personal model as the smallest ONNX file that predicts the same, and the gain.

    sparrow export ~/.local/state/sparrow/HOST/FEDERATION/NAME --output model.onnx --data mine.npz

Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from sparrow.command_line.command import Command, Parser
from sparrow.command_line.options import add_json

from .build import ACCURACY_LIMIT, Mode, Precision, dense
from .errors import ExportError
from .exporter import Options, export_model
from .report import MEASUREMENTS, Report, picture_maker
from .running import runtime
from .samples import read_raw_samples, read_samples
from .source import read_source

PICTURES = (".png", ".svg", ".pdf")
STEPS = 5
"""Steps of an export that its progress counts, beside measurements."""


def _run(options: argparse.Namespace) -> None:
    report = _export(options)
    print(report.json() if options.json else report.table())


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, help="a device's state folder, or a model.safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the ONNX file to write")
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="dense: as trained; compact: without what cannot influence the output; packed: and without storing zeros; "
        "dynamic: with the method's choice for each sample (default: the smallest that predicts the same)",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="of the weights; auto measures which of fp32 and int8 is faster here (default fp32, which is exact)",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="the device's own samples: a table or npz file, raw if there is a preparation"
    )
    parser.add_argument(
        "--accuracy-limit",
        type=float,
        default=ACCURACY_LIMIT,
        metavar="SHARE",
        help=f"refuse a rounded export whose accuracy on --data falls by more (default {ACCURACY_LIMIT})",
    )
    parser.add_argument("--manifest", type=Path, help="manifest.json of the model (default: beside it)")
    parser.add_argument("--skeleton", type=Path, help="skeleton.onnx of the model (default: beside it)")
    parser.add_argument("--budget", type=_share, help="of a dynamic model (default: the device's)")
    parser.add_argument(
        "--without-preparation", action="store_true", help="leave out the preparation: the file takes prepared inputs"
    )
    parser.add_argument("--ort-format", action="store_true", help="write .ort for minimal builds as well")
    parser.add_argument("--picture", type=Path, help="draw the report to this .png, .svg or .pdf")
    parser.add_argument("--quick", action="store_true", help="leave load time, memory and latency out")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json(parser)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 1")
    return value


def _export(options: argparse.Namespace) -> Report:
    runtime()
    if options.picture is not None:
        picture_maker()
        if options.picture.suffix not in PICTURES:
            raise ExportError(f"{options.picture}: a picture's name ends with one of {', '.join(PICTURES)}")
        options.picture.parent.mkdir(parents=True, exist_ok=True)
    if options.output.suffix == ".ort":
        raise ExportError(f"{options.output}: name it .onnx; --ort-format writes an .ort beside it")
    steps = STEPS + (0 if options.quick else MEASUREMENTS)
    with tqdm(total=steps, disable=options.quiet or None, unit="step") as bar:

        def doing(what: str) -> None:
            bar.set_description(what)
            bar.update()

        doing("reading")
        source = read_source(options.source, options.manifest, options.skeleton)
        plain = dense(source)
        samples = None
        if options.data is not None and source.preparation is not None:
            samples = read_raw_samples(options.data, source.manifest, source.class_names)
        elif options.data is not None:
            samples = read_samples(Path(options.data), plain)
        wishes = Options(
            options.mode,
            options.precision,
            options.budget,
            options.accuracy_limit,
            options.ort_format,
            measured=not options.quick,
            with_preparation=not options.without_preparation,
        )
        report = export_model(source, plain, options.output, wishes, samples=samples, doing=doing)
        bar.set_description("done")
        bar.n = steps  # what had nothing to do counts as well
        bar.refresh()
    if options.picture is not None:
        report.draw(options.picture)
    return report


COMMAND = Command("sparrow export", "Export a personal model to ONNX, and report what that gains.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
