"""``sparrow publish``: create a federation on a running coordinator.

For your own ``Task``, it sends the manifest, the ONNX skeleton, the compiled training step (``publishing.step``) and
the weights; if the model is ``tasks.Seeded``, the weights of the federation's seed. A built-in task is sent by name and
needs no PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .device.trainable import CannotTrain

__all__ = ["PublishOptions", "publish"]

import numpy as np
from pydantic import ValidationError

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.faults import faults
from sparrow.command_line.options import (
    add_json,
    add_server,
    add_skip_unreadable,
    add_wait,
    with_skipped,
)
from sparrow.command_line.table import printable
from sparrow.protocol import checkpoint
from sparrow.protocol.auto import chosen
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.errors import MissingPart, ProtocolError
from sparrow.protocol.fields import Digest, Name
from sparrow.protocol.manifest import GraphName, Manifest, Tensors, initial_values
from sparrow.protocol.messages import CompareFederation, CreateFederation, FederationInfo
from sparrow.protocol.preparation import Targets
from sparrow.protocol.publication import Terms, digests_of
from sparrow.protocol.ranges import Ranges
from sparrow.protocol.settings import AUTO, FederationSettings
from sparrow.protocol.signatures import Publication, fingerprint
from sparrow.transport import connect, httpx, refuse_foreign, tls

from . import arguments as read
from .arguments import add_federation, check_federation_name, check_ranges
from .device.connection import token_of
from .device.label_prior import LabelPrior
from .device.transport import Transport
from .errors import BadArgument, NameTaken, translated
from .methods import load_method
from .publishing import FrozenPrecision, RunningStatistics
from .publishing.signing import Publisher, terms_of
from .tasks import OWN, Task, load_task, own
from .tasks.metrics import METRICS

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Name of a tensor -> SHA-256 of its values.
Digests = Mapping[Name, Digest]

PATIENCE_SECONDS = 30.0

# Samples of the first batch used to trace the model and to compare graphs with PyTorch. A batch norm of two samples
# would hide differences.
SAMPLES = 8

# Validation batches used to measure the effect of float16 on frozen parameters.
FROZEN_BATCHES = 4

# Arguments of ``publish`` that are no settings, to suggest for a misspelt name.
ARGUMENTS = ("exist_ok", "replace", "client", "options")


def _on_terminal(doing: str) -> None:
    if sys.stderr.isatty():
        print(f"{doing} ...", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class PublishOptions:
    """How a model is published. Raises BadArgument for an invalid value.

    running_statistics: ``shared``: average those of batch norms over devices; ``personal``: keep them on the device.
    frozen_precision: the number format of parameters with ``requires_grad`` False; ``auto``: float16 if outputs on
    validation data change by at most 1 %. blocks: parameter -> rows of each of its blocks, in order (attention heads,
    groups of filters), for methods that use blocks; the method cuts other parameters. compiled: also publish the
    training step, without which devices need PyTorch; this takes seconds.

    allow: ranges of settings, such as ``cohort>=10``, signed with the model; devices refuse rounds outside them. A
    setting without a range keeps its value or becomes more private; two devices are enough for a cohort. publisher:
    signing key, or its file, which is created if missing; None: the user's key (``publishing.signing``).

    admin_token: default: SPARROW_ADMIN_TOKEN. trust: certificates for https. patience_seconds: longest wait for a
    coordinator that does not answer; None: no limit. progress: called with a description of each phase; default: print
    it on a terminal.
    """

    running_statistics: RunningStatistics = "shared"
    frozen_precision: FrozenPrecision = "auto"
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    compiled: bool = True
    allow: Sequence[str] = ()
    publisher: Publisher | Path | None = None
    admin_token: str | None = None
    trust: tls.Tls | None = None
    patience_seconds: float | None = PATIENCE_SECONDS
    progress: Callable[[str], object] = _on_terminal

    def __post_init__(self) -> None:
        if self.running_statistics not in get_args(RunningStatistics):
            raise BadArgument(f"running_statistics={self.running_statistics!r} is invalid; give shared or personal")
        if self.frozen_precision not in get_args(FrozenPrecision):
            raise BadArgument(f"frozen_precision={self.frozen_precision!r} is invalid; give auto, float32 or float16")


USUAL = PublishOptions()


@translated()
def publish(
    server: str,
    name: str,
    task: Task | str,
    *,
    exist_ok: bool = False,
    replace: bool = False,
    client: httpx.Client | None = None,
    options: PublishOptions = USUAL,
    **settings: Any,
) -> FederationInfo:
    """Create the federation ``name`` for ``task``, a Task or the name of a built-in one.

    settings: fields of ``FederationSettings``. exist_ok: return an existing federation with the same method, settings
    and model, compared without initial weights and an operator's later changes; needs only an enrolment token. replace:
    replace forward pass, loss and dropout of the existing federation's model, between rounds, and keep its weights.
    client: replaces a new HTTP client for ``server``.

    Raises SdkError, among them BadArgument for an unknown setting or an inconsistent task (``training.checking``),
    UnsupportedLayer, UnknownMethod, NameTaken, and DifferentFederation if an existing federation differs (exist_ok) or
    its tensors, inputs or outputs do (replace).
    """
    refuse_foreign(client)
    asked = read_settings(settings, known=ARGUMENTS)
    check_federation_name(name)
    if not isinstance(task, str | Task):
        raise BadArgument(
            f"task is a {type(task).__name__}; give a Task, or the name of a built-in one, such as digits"
        )
    if isinstance(task, str) and options.blocks:
        raise BadArgument(f"blocks: the task {task!r} is built in, and the method cuts it; publish a Task of your own")
    if replace and (isinstance(task, str) or settings or exist_ok):
        raise BadArgument(
            "replace=True: give a Task of your own, no settings and no exist_ok; the federation's settings stay"
        )
    ranges = check_ranges(options.allow, "allow")
    with nullcontext(client) if client else connect(server, options.trust) as own:
        transport = Transport(own, patience_seconds=options.patience_seconds)
        transport.token = options.admin_token or token_of("admin", "enrolment", "observer")
        if replace:
            assert isinstance(task, Task), "checked above"
            return _replace(transport, name, task, ranges, options)
        create: Callable[[Publisher], FederationInfo]
        if isinstance(task, str):
            wanted = CompareFederation(task=task, settings=asked)
            create = partial(_create_built_in, transport, name, task, asked, ranges)
        else:
            model = _Model(task.seeded(asked.seed), asked.method, options)
            asked = chosen(asked, model.manifest, classes=asked.method == AUTO and model.adjusts())
            digest = model.manifest.model_digest
            wanted = CompareFederation(task=task.name, model_digest=digest, settings=asked)
            create = partial(_create_own, transport, name, model, asked, ranges)
        if exist_ok and (info := transport.compare_federation(name, wanted)) is not None:
            return info
        try:
            # The key is loaded here: returning an existing federation needs none. Compiling, the longest part, follows.
            return create(_signer(options.publisher))
        except NameTaken:
            # Another device may have created it in the meantime.
            if exist_ok and (info := transport.compare_federation(name, wanted)) is not None:
                return info
            raise


def _replace(transport: Transport, name: str, task: Task, ranges: Ranges, options: PublishOptions) -> FederationInfo:
    there = transport.federation(name)
    before = None if there.publisher is None else transport.publication(name).publication
    model = _Model(task.seeded(there.settings.seed), there.settings.method, options)
    signer = _signer(options.publisher)
    vectors = model.described()
    signed = signer.sign(_next_terms(name, model, there.settings, before, ranges))
    return transport.replace_model(name, checkpoint.save({**vectors, **_as_vector(signed)}, ""))


def _create_built_in(
    transport: Transport, name: str, task: str, asked: FederationSettings, ranges: Ranges, signer: Publisher
) -> FederationInfo:
    request = CreateFederation(name=name, task=task, settings=asked)
    # The coordinator answers an unknown task with a list of tasks.
    if task in builtin_tasks():
        known = load_builtin(task)
        # Devices receive the settings that the coordinator completes, so these are signed.
        settings = transport.completed(chosen(asked, known.manifest, classes=True))
        first = _first_digests(known.manifest, settings, {})
        signed = signer.sign(_terms(name, known.manifest, known.graphs, settings, ranges, first))
        request = request.model_copy(update={"settings": settings, "publication": signed})
    return transport.create_federation(request.as_given().encode(), "application/json")


def _create_own(
    transport: Transport, name: str, model: _Model, asked: FederationSettings, ranges: Ranges, signer: Publisher
) -> FederationInfo:
    settings = transport.completed(asked)
    request = CreateFederation(name=name, task=None, settings=asked).model_copy(update={"settings": settings})
    vectors = model.described()
    weights = model.weights()
    first = _first_digests(model.manifest, settings, weights)
    signed = signer.sign(model.terms(name, settings, ranges, first))
    body = checkpoint.save({**vectors, **weights, **_as_vector(signed)}, request.as_given())
    size = len(body)
    model.progress(f"sending {size / 1e6:.1f} MB" if size >= 1e6 else f"sending {size / 1e3:.0f} kB")
    return transport.create_federation(body, checkpoint.MEDIA_TYPE)


class _Model:
    """A task's model, described for a method. Raises BadArgument if data, model and loss do not fit together."""

    def __init__(self, task: Task, method: str, options: PublishOptions) -> None:
        from .publishing.frozen import freeze
        from .publishing.preparation import described as described_behind
        from .publishing.preparation import prepare_to_publish
        from .training.checking import check_task
        from .training.local import as_tensors

        self.progress = progress = options.progress
        self._compiled = options.compiled
        self._graphs: dict[GraphName, bytes] = {}
        if task.preparation is not None:
            progress("preparing the samples")
        task, self._preparation = prepare_to_publish(task)
        progress("describing the model")
        check_task(task)
        inputs, targets = as_tensors(next(iter(task.train)))
        self._task = task
        self._example = (inputs[:SAMPLES], targets[:SAMPLES])
        described = _manifest(task, self._example[0], method, options)
        if self._preparation is not None:
            described = described_behind(described, self._preparation)
        samples = [as_tensors(batch)[0] for batch in islice(task.validation, FROZEN_BATCHES)]
        self.manifest, self._frozen = freeze(task.model, described, options.frozen_precision, samples)

    def adjusts(self) -> bool:
        """Return whether class frequencies can be added to the model's outputs."""
        from .training.engine import TorchEngine

        spec = self.manifest.output_bias
        if spec is None or not self._task.classification:
            return False
        some = LabelPrior(self.manifest, spec.name, np.linspace(-1, 1, spec.shape[0], dtype=np.float32))
        try:
            some.check(TorchEngine(self._task, self.manifest), self._task.train)
        except CannotTrain:
            return False
        return True

    def described(self) -> Tensors:
        """Return the manifest and the graphs it names, as byte vectors."""
        from .publishing.skeleton import make_skeleton

        self.progress("compiling the forward pass")
        skeleton = make_skeleton(self._task.model, self._example[0], self.manifest)
        graphs: dict[GraphName, bytes] = {"skeleton": skeleton}
        if self._preparation is not None:
            graphs["preparation"] = self._preparation.graph
        if self._compiled:
            graphs |= _compiled(self._task, self._example, self.manifest, self.progress)
        self._graphs = graphs
        vectors: dict[str, bytes] = {
            "manifest": self.manifest.with_graphs(graphs).model_dump_json().encode(),
            **{str(name): graphs[name] for name in graphs},
        }
        return {f"sparrow.{name}": np.frombuffer(vector, dtype=np.uint8) for name, vector in vectors.items()}

    def terms(self, name: str, settings: FederationSettings, ranges: Ranges, first: Digests, edition: int = 1) -> Terms:
        """Return the model's terms; call ``described`` first. first: digests of the initial weights."""
        manifest = self.manifest.with_graphs(self._graphs)
        return _terms(name, manifest, self._graphs, settings, ranges, first, edition)

    def weights(self) -> Tensors:
        """Return the trained weights and the file of frozen ones."""
        from .training.local import get_tensors

        everything = get_tensors(self._task.model, self.manifest, "published")
        frozen = {"sparrow.frozen": np.frombuffer(self._frozen, dtype=np.uint8)} if self._frozen else {}
        return {**everything, **frozen}


def _signer(publisher: Publisher | Path | None) -> Publisher:
    return publisher if isinstance(publisher, Publisher) else Publisher.load(publisher)


def _as_vector(signed: Publication) -> Tensors:
    return {"sparrow.publication": np.frombuffer(signed.model_dump_json().encode(), np.uint8)}


def _first_digests(manifest: Manifest, settings: FederationSettings, weights: Tensors) -> Digests:
    if load_method(settings.method).compose is not None:
        return {}
    return digests_of(initial_values(manifest, settings.seed, weights))


def _terms(
    name: str,
    manifest: Manifest,
    graphs: Mapping[GraphName, bytes],
    settings: FederationSettings,
    ranges: Ranges,
    first: Digests,
    edition: int = 1,
) -> Terms:
    """Return the terms to sign. graphs: the published ones."""
    compose = load_method(settings.method).compose
    made = dict(graphs) if compose is None else compose(manifest, graphs, settings)[1]
    try:
        return terms_of(
            name,
            manifest,
            settings,
            graphs={graph: hashlib.sha256(content).hexdigest() for graph, content in made.items()},
            weights=dict(first),
            ranges=ranges,
            edition=edition,
        )
    except ProtocolError as error:
        raise BadArgument(f"allow: {error}") from None


def _next_terms(
    name: str, model: _Model, settings: FederationSettings, before: Publication | None, ranges: Ranges
) -> Terms:
    """Return the terms of a replaced model: the initial weights stay, and ranges unless given.

    before: None if the model is unsigned.
    """
    if before is None:
        return model.terms(name, settings, ranges, {})
    old = Terms.of(before)
    return model.terms(name, settings, {**old.settings, **ranges}, old.weights, old.edition + 1)


def _targets(task: Task, outputs: tuple[int, ...]) -> Targets | None:
    from .publishing.targets import ignored_label

    # Scores per pixel or character are classes, too, although a sample has no single label.
    classes = task.classification or len(outputs) > 1
    found = task.targets or Targets(kind="classes" if classes else "numbers")
    ignored = ignored_label(task.loss)
    names = found.names or tuple(map(str, task.class_names))
    if names and not task.classification:
        raise BadArgument("class_names: the task is not a classification; leave them out")
    spare = outputs[0] - len(names) if names and len(outputs) == 1 else found.spare
    if spare < 0:
        raise BadArgument(
            f"class_names: {len(names)} names, but the model has {outputs[0]} outputs; give one name per output"
        )
    numbered = found.numbered or bool(names and not found.names)
    said = {"names": names, "spare": spare if names else 0, "ignored": ignored, "numbered": numbered}
    try:
        found = Targets.model_validate({**found.model_dump(), **said})
    except ValidationError as error:
        raise BadArgument(f"class_names: {error.errors()[0]['msg']}") from None
    return None if found == Targets() else found


def _manifest(task: Task, example: Tensor, method: str, options: PublishOptions) -> Manifest:
    from .methods.describing import describe_for

    blocks = options.blocks
    statistics = options.running_statistics
    manifest = describe_for(method, task.model, example, task=task.name, running_statistics=statistics)
    known = tuple(name for name, metric in task.measured.items() if METRICS.get(name) is metric)
    targets = _targets(task, manifest.output_shape)
    said = {"metrics": known, "targets": None if targets is None else targets.model_dump()}
    manifest = Manifest.model_validate({**manifest.model_dump(), **said})
    rows = {spec.name: spec.size // spec.shape[0] for spec in manifest.shared if spec.shape}
    unknown = sorted(set(blocks) - set(rows))
    if unknown:
        raise BadArgument(f"blocks: the model has no parameter {unknown[0]!r}")
    return manifest.with_blocks({name: [count * rows[name] for count in counts] for name, counts in blocks.items()})


def _compiled(
    task: Task, example: tuple[Tensor, Tensor], manifest: Manifest, progress: Callable[[str], object]
) -> dict[GraphName, bytes]:
    """Return the graphs of training step and evaluation; none, with a warning, if compiling fails."""
    try:
        # Imported here: a built-in task needs no onnx, and other versions of PyTorch may lack the private parts used.
        import torch

        from sparrow.graphs.checking import check_graphs

        from .publishing.step import compile_step

        with torch.random.fork_rng(devices=[]):
            graphs = compile_step(task.model, task.loss, *example, progress)
        check_graphs(graphs, manifest)
    except MissingPart:
        raise
    # The exporter's exceptions share no base class.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        log.warning(
            "%s is published without its training step, so devices need PyTorch: %s",
            printable(task.name),
            printable(reason),
        )
        return {}
    return {"step": graphs.step, "evaluation": graphs.evaluation}


def load_to_publish(
    task: str, data: str | None, settings: Mapping[str, Any], *, device: str, publishing: own.Publishing | None = None
) -> Task | str:
    """Return the argument of ``publish`` for a named task: the name if it is built in, else the loaded Task.

    data: a sample of the devices' data. publishing: options for a user's own files. Raises BadArgument for wrong
    settings, UnknownTask, DataError.
    """
    if task in builtin_tasks():
        return task
    wanted = read_settings(settings)
    if task == OWN:
        publishing = publishing or own.Publishing()
        return own.load(data, device=device, seed=wanted.seed, batch_size=wanted.batch_size, publishing=publishing)
    return load_task(task, data, device=device, seed=wanted.seed, batch_size=wanted.batch_size)


def read_settings(given: Mapping[str, Any], known: Iterable[str] = ()) -> FederationSettings:
    """Check and return the settings of a federation. Raises BadArgument, naming each wrong one.

    known: other names to suggest for a misspelt one.
    """
    try:
        return FederationSettings.model_validate(dict(given))
    except ValidationError as error:
        found = faults(error, (*FederationSettings.model_fields, *known))
        raise BadArgument("; ".join(f"{name}: {text}" if name else text for name, text in found)) from None


def _run(options: argparse.Namespace) -> None:
    settings = read.settings_of(options.settings)
    read_settings(settings)
    name = options.task or (OWN if options.data else "digits")
    classes = tuple(each.strip() for each in (options.classes or "").split(",") if each.strip())
    standardises = options.standardise == "device"
    publishing = own.Publishing(classes, options.spare_classes, standardises, options.picture_size)
    if name != OWN and publishing != own.Publishing():
        raise WrongUsage(
            "--classes, --spare-classes, --standardise and --picture-size are for your own files (--data FILE), "
            f"not for {name}"
        )
    task = load_to_publish(
        name, with_skipped(options.data, options), settings, device="publisher", publishing=publishing
    )
    if isinstance(task, Task):
        for text in task.said:
            print(printable(text), file=sys.stderr)
    info = publish(
        options.server,
        options.federation,
        task,
        exist_ok=options.exist_ok,
        options=PublishOptions(
            running_statistics=options.running_statistics,
            frozen_precision=options.frozen_precision,
            allow=options.allow,
            trust=tls.from_options(options),
            patience_seconds=options.wait,
            progress=lambda doing: print(f"{doing} ...", file=sys.stderr, flush=True),
        ),
        **settings,
    )
    if info.notice:
        print(f"warning: {printable(info.notice)}", file=sys.stderr)
    owns = isinstance(task, Task)
    least = info.settings.min_devices
    signed = None if info.publisher is None else fingerprint(info.publisher)
    said = [
        f"federation {info.name}: task {info.task}, method {info.method}, {info.parameters:,} parameters, starts with "
        f"{least} device{'' if least == 1 else 's'}"
    ]
    if signed is not None:
        said.append(f"signed by {signed}; devices can pin it with --publisher")
    said.append(f"join it with: sparrow join --server {options.server} --federation {info.name}{' --data PATH' * owns}")
    print(info.model_dump_json() if options.json else "\n".join(map(printable, said)))


def _side(text: str) -> int:
    if text.isdecimal() and 8 <= int(text) <= 512:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of pixels from 8 to 512")


def _statistics(text: str) -> str:
    if text in ("publisher", "device"):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: give publisher, to publish your statistics, or device")


def _options(parser: Parser) -> None:
    add_federation(parser)
    read.add_settings(parser)
    add_server(parser)
    parser.add_argument("--task", help="built-in or installed task (default: digits)")
    parser.add_argument(
        "--data", metavar="PATH", help="your own samples: a file or folder, such as FILE,label=activity"
    )
    add_skip_unreadable(parser)
    parser.add_argument("--classes", metavar="A,B", help="all classes, in the order of the outputs")
    parser.add_argument(
        "--spare-classes", type=read.natural, default=0, metavar="N", help="extra outputs for devices' own classes"
    )
    parser.add_argument("--picture-size", type=_side, metavar="N", help="side in pixels, 8 to 512 (default: 64)")
    parser.add_argument(
        "--standardise",
        type=_statistics,
        default="publisher",
        metavar="WHOSE",
        help="with the statistics of the publisher (default) or of each device",
    )
    parser.add_argument(
        "--running-statistics",
        choices=get_args(RunningStatistics),
        default="shared",
        metavar="WHOSE",
        help="batch norm statistics: shared (default), or personal, kept on each device",
    )
    parser.add_argument(
        "--frozen-precision",
        choices=get_args(FrozenPrecision),
        default="auto",
        metavar="TYPE",
        help="type of frozen parameters: float32, float16 or auto (default)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="RANGE",
        help="sign a range of a setting: cohort>=10, local_steps>=5; may be repeated",
    )
    parser.add_argument("--exist-ok", action="store_true", help="accept an existing federation if it is the same")
    add_wait(parser, PATIENCE_SECONDS)
    add_json(parser)
    tls.add_options(parser)


COMMAND = Command(
    "sparrow publish",
    "Create a federation on a running coordinator.",
    _options,
    _run,
    usage="FEDERATION [KEY=VALUE ...] [--server URL] [options]",
    epilog="Set SPARROW_ADMIN_TOKEN if the coordinator requires an admin token.",
)
main = COMMAND.main
