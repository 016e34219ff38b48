"""A device's personal model as the smallest ONNX file that predicts the same, and what that gains.

    sparrow export ~/.local/state/sparrow/HOST/FEDERATION/NAME --output model.onnx --data mine.npz

Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from sparrow.command_line.command import Command, Parser, add_json
from sparrow.export.build import ACCURACY_LIMIT, Built, Mode, Precision, build, dense
from sparrow.export.errors import ExportError
from sparrow.export.ort_format import write_ort
from sparrow.export.report import MEASUREMENTS, Report, judge, measure, picture_maker
from sparrow.export.running import runtime
from sparrow.export.samples import parity_inputs, read_samples
from sparrow.export.source import read_source

PICTURES = (".png", ".svg", ".pdf")


def _run(options: argparse.Namespace) -> None:
    report = _export(options)
    print(report.json() if options.json else report.table())


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, help="a device's state folder, or a model.safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the ONNX file to write")
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="compact: without what cannot influence the output; packed: and without storing zeros; dynamic: with "
        "pFedGate's gate, or both of DM-PFL's models (default: the smallest that is exact)",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="of the weights; auto measures which of fp32 and int8 is faster here (default fp32, which is exact)",
    )
    parser.add_argument("--data", type=Path, help="npz with inputs and labels, or x_test, y_test and x_train")
    parser.add_argument(
        "--accuracy-limit",
        type=float,
        default=ACCURACY_LIMIT,
        metavar="SHARE",
        help=f"refuse a rounded export whose accuracy on --data falls by more (default {ACCURACY_LIMIT})",
    )
    parser.add_argument("--manifest", type=Path, help="manifest.json of the model (default: beside it)")
    parser.add_argument("--skeleton", type=Path, help="skeleton.onnx of the model (default: beside it)")
    parser.add_argument("--budget", type=_share, help="of a dynamic pFedGate model (default: the device's)")
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
    if options.output.suffix == ".ort":
        raise ExportError(f"{options.output}: name it .onnx; --ort-format writes an .ort beside it")
    steps = 6 + (0 if options.quick else MEASUREMENTS)
    with tqdm(total=steps, disable=options.quiet, unit="step") as bar:

        def doing(what: str) -> None:
            bar.set_description(what)
            bar.update()

        doing("reading")
        source = read_source(options.source, options.manifest, options.skeleton)
        plain = dense(source)
        samples = None if options.data is None else read_samples(options.data, plain)
        mode: Mode = options.mode or "packed"
        built = build(
            source,
            plain,
            mode,
            options.precision,
            samples,
            budget=options.budget,
            accuracy_limit=options.accuracy_limit,
            doing=doing,
        )
        for path in filter(None, (options.output, options.picture)):
            path.parent.mkdir(parents=True, exist_ok=True)
        # beside the output, so that it can be moved into place in one step
        with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".export-") as folder:
            export, reference = Path(folder) / "export.onnx", Path(folder) / "dense.onnx"
            export.write_bytes(built.model.SerializeToString(deterministic=True))
            reference.write_bytes(plain.SerializeToString(deterministic=True))
            inputs = parity_inputs(plain, samples)
            doing("comparing")
            exact = built.precision == "fp32" and mode != "dynamic"
            parity, mine, theirs = judge(export, reference, inputs, samples, exact=exact)
            report = Report(
                path=str(options.output),
                mode=mode,
                precision=built.precision,
                steps=built.steps,
                properties={entry.key: entry.value for entry in built.model.metadata_props},
                parity=parity,
                samples=0 if samples is None or samples.labels is None else len(samples.labels),
                export=mine,
                dense=theirs,
                notes=built.notes,
            )
            _check_accuracy(report, built, options.accuracy_limit)
            if not options.quick:
                bar.set_description("measuring")
                costs = measure(export, reference, inputs[:1], bar.update)
                report = replace(report, export=replace(mine, costs=costs[0]), dense=replace(theirs, costs=costs[1]))
            if options.ort_format:
                report = replace(report, ort=write_ort(export, options.output.with_suffix(".ort")))
            os.replace(export, options.output)
        bar.set_description("done")
        bar.n = steps  # what had nothing to do counts as well
        bar.refresh()
    if options.picture is not None:
        report.draw(options.picture)
    return report


def _check_accuracy(report: Report, built: Built, limit: float) -> None:
    before, after = report.dense.accuracy, report.export.accuracy
    if built.precision == "fp32" or before is None or after is None:
        return
    if before - after > limit:
        raise ExportError(
            f"--precision {built.precision} takes the accuracy on {report.samples} samples from {before:.2%} to "
            f"{after:.2%}, more than --accuracy-limit {limit:g}; nothing was written: leave it at fp32"
        )


COMMAND = Command("sparrow export", "Export a personal model to ONNX, and report what that gains.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
