"""``sparrow export``: write a device's personal model as a small ONNX file with the same predictions.

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
"""Steps of the progress bar without measurements."""


def _run(options: argparse.Namespace) -> None:
    report = _export(options)
    print(report.json() if options.json else report.table())


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, help="a device's state folder, or a model.safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the ONNX file to write")
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="dense: as trained; compact: without neurons that do not influence the output; packed: compact, without "
        "stored zeros; dynamic: with the method's choice for each sample (default: the smallest file with the same "
        "predictions)",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="type of the weights; auto takes the faster of fp32 and int8 on this machine (default fp32, exact)",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="samples of the device: a table or npz file; raw if there is a preparation"
    )
    parser.add_argument(
        "--accuracy-limit",
        type=float,
        default=ACCURACY_LIMIT,
        metavar="SHARE",
        help=f"largest accepted fall of accuracy on --data in fp16 or int8 (default {ACCURACY_LIMIT})",
    )
    parser.add_argument("--manifest", type=Path, help="manifest.json of the model (default: beside it)")
    parser.add_argument("--skeleton", type=Path, help="skeleton.onnx of the model (default: beside it)")
    parser.add_argument("--budget", type=_share, help="budget of a dynamic model (default: the device's)")
    parser.add_argument(
        "--without-preparation", action="store_true", help="omit the preparation: the file takes prepared inputs"
    )
    parser.add_argument("--ort-format", action="store_true", help="also write an .ort file for minimal builds")
    parser.add_argument("--picture", type=Path, help="draw the report to this .png, .svg or .pdf file")
    parser.add_argument("--quick", action="store_true", help="do not measure load time, memory and latency")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_json(parser)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _export(options: argparse.Namespace) -> Report:
    runtime()
    if options.picture is not None:
        picture_maker()
        if options.picture.suffix not in PICTURES:
            raise ExportError(f"{options.picture}: give a picture's name that ends with one of {', '.join(PICTURES)}")
        options.picture.parent.mkdir(parents=True, exist_ok=True)
    if options.output.suffix == ".ort":
        raise ExportError(f"{options.output}: name it .onnx; --ort-format also writes the .ort file")
    steps = STEPS + (0 if options.quick else MEASUREMENTS)
    with tqdm(total=steps, disable=options.quiet or None, unit="step") as bar:

        def doing(step: str) -> None:
            bar.set_description(step)
            bar.update()

        doing("reading")
        source = read_source(options.source, options.manifest, options.skeleton)
        plain = dense(source)
        samples = None
        if options.data is not None and source.preparation is not None:
            samples = read_raw_samples(options.data, source.manifest, source.class_names)
        elif options.data is not None:
            samples = read_samples(Path(options.data), plain)
        wanted = Options(
            options.mode,
            options.precision,
            options.budget,
            options.accuracy_limit,
            options.ort_format,
            measured=not options.quick,
            with_preparation=not options.without_preparation,
        )
        report = export_model(source, plain, options.output, wanted, samples=samples, doing=doing)
        bar.set_description("done")
        # include skipped steps
        bar.n = steps
        bar.refresh()
    if options.picture is not None:
        report.draw(options.picture)
    return report


COMMAND = Command("sparrow export", "Export a personal model to ONNX and report the savings.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
