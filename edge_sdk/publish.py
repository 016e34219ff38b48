"""``python -m edge_sdk.publish``: create a federation on a running coordinator.

As a library: ``publish(server, name, task, ...)`` creates one for a ``Task`` of one's own: its manifest is found by
running the model, its ONNX skeleton made by torch's exporter, and both are sent with the model's weights: as they are,
or where the model is ``tasks.Seeded`` those of the federation's seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from edge_sdk.trainable import exit_unless_trainable

if __name__ == "__main__":
    exit_unless_trainable("edge_sdk.publish")  # before what follows imports torch

import httpx
import numpy as np
from pydantic import ValidationError

from command_line.command import Command, Exits, Parser, WrongUsage, add_json
from command_line.exits import Exit
from edge_sdk.describing import RunningStatistics, describe_for
from edge_sdk.errors import Refused
from edge_sdk.protocol import checkpoint, tls
from edge_sdk.protocol.builtin import builtin_tasks
from edge_sdk.protocol.messages import CreateFederation, FederationInfo, FederationSettings
from edge_sdk.skeleton import make_skeleton
from edge_sdk.tasks import Task, load_task
from edge_sdk.tasks.exits import EXITS as TASKS
from edge_sdk.tracing import UnsupportedLayer
from edge_sdk.training.local import get_tensors
from edge_sdk.transport import Transport, connect

PATIENCE_SECONDS = 30.0

EXITS: Exits = {
    **TASKS,
    UnsupportedLayer: Exit.FAILED,
}


def publish(
    server: str,
    name: str,
    task: Task | str,
    *,
    running_statistics: RunningStatistics = "shared",
    blocks: Mapping[str, Sequence[int]] | None = None,
    exist_ok: bool = False,
    admin_token: str | None = None,
    trust: tls.Tls | None = None,
    client: httpx.Client | None = None,
    patience_seconds: float | None = PATIENCE_SECONDS,
    **settings: Any,
) -> FederationInfo:
    """Create the federation ``name`` for ``task``, a Task or the name of a built-in one, and return where it stands.

    settings: fields of ``FederationSettings``. running_statistics: whether batch-norm's are averaged over devices or
    stay personal. blocks: for methods that use blocks of a model, name of a parameter -> how many rows each of its
    blocks has, in order (heads of an attention, groups of filters); other parameters are cut as the method does.
    exist_ok: return the one that exists instead of raising Refused (HTTP 409). trust: certificates for https.
    patience_seconds: how long to wait for a coordinator that does not answer; None: for ever. Raises UnsupportedLayer,
    naming method and layer, for a model that the method cannot train; UnknownMethod; ValueError for blocks that do not
    add up to the model; SdkError when the coordinator refuses or does not answer.
    """
    request = CreateFederation(
        name=name, task=task if isinstance(task, str) else None, settings=FederationSettings.model_validate(settings)
    )
    if isinstance(task, str):
        if blocks:
            raise ValueError(
                f"blocks: the task {task!r} is built in, and cut by the method; publish a Task of your own"
            )
        body, media_type = request.model_dump_json().encode(), "application/json"
    else:
        body, media_type = _checkpoint(request, task, running_statistics, blocks or {}), checkpoint.MEDIA_TYPE
    own = client or connect(server, trust)
    try:
        transport = Transport(own, patience_seconds=patience_seconds)
        transport.token = admin_token
        try:
            return transport.create_federation(body, media_type)
        except Refused as refusal:
            if refusal.status == 409 and exist_ok:
                return transport.federation(name)
            raise
    finally:
        if client is None:
            own.close()


def _checkpoint(
    request: CreateFederation, task: Task, running_statistics: RunningStatistics, blocks: Mapping[str, Sequence[int]]
) -> bytes:
    task = task.seeded(request.settings.seed)
    example = next(iter(task.train))[0][:2]
    method = request.settings.method
    manifest = describe_for(method, task.model, example, task=task.name, running_statistics=running_statistics)
    skeleton = make_skeleton(task.model, example, manifest)
    rows = {spec.name: spec.size // spec.shape[0] for spec in manifest.shared if spec.shape}
    unknown = sorted(set(blocks) - set(rows))
    if unknown:
        raise ValueError(f"blocks: the model has no parameter {unknown[0]!r}")
    cut = {name: [count * rows[name] for count in counts] for name, counts in blocks.items()}
    manifest = manifest.with_blocks(cut).with_skeleton(skeleton)
    everything = get_tensors(task.model, manifest)
    tensors = {spec.name: everything[spec.name] for spec in manifest.shared}
    tensors["sparrow.manifest"] = np.frombuffer(manifest.model_dump_json().encode(), dtype=np.uint8)
    tensors["sparrow.skeleton"] = np.frombuffer(skeleton, dtype=np.uint8)
    return checkpoint.save(tensors, request.model_dump_json())


def load_to_publish(task: str, data: str | None, settings: Mapping[str, Any], *, device: str) -> Task | str:
    """What ``publish`` wants of a task known by name: the name where it is built in, or else the task itself.

    data: a sample, as ``device`` has it. Raises ValidationError for wrong settings, UnknownTask, DataError.
    """
    if task in builtin_tasks():
        return task
    wanted = FederationSettings.model_validate(dict(settings))
    return load_task(task, data, device=device, seed=wanted.seed, batch_size=wanted.batch_size)


def read_setting(text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of the command line. Raises ArgumentTypeError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give a setting as KEY=VALUE; docs/settings.md lists them")
    return key.strip().replace("-", "_"), value.strip()


def add_method_set(parser: argparse._ActionsContainer) -> None:
    """The option ``--method-set``, whose pairs are the setting ``method_settings``."""
    parser.add_argument(
        "--method-set",
        type=read_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that only the method knows, such as proximal_weight=0.1; may be given again",
    )


def wrong_settings(error: ValidationError, prefix: str = "") -> WrongUsage:
    """What is wrong with a federation's settings, each fault after its option: ``prefix`` and the field's name."""
    faults = []
    for fault in error.errors(include_url=False):
        name = "-".join(map(str, fault["loc"])).replace("_", "-")
        faults.append(f"{prefix}{name}: {fault['msg']}" if name else fault["msg"])
    return WrongUsage("; ".join(faults))


def _run(options: argparse.Namespace) -> None:
    given = {field: getattr(options, field) for field in _fields()}
    settings = {field: text for field, text in given.items() if text is not None}
    settings["method_settings"] = dict(options.method_set)
    try:
        task = load_to_publish(options.task, options.data, settings, device="publisher")
        info = publish(
            options.server,
            options.name,
            task,
            running_statistics=options.running_statistics,
            admin_token=os.environ.get("SPARROW_ADMIN_TOKEN"),
            trust=tls.from_options(options),
            patience_seconds=options.wait,
            **settings,
        )
    except ValidationError as error:
        raise wrong_settings(error, "--") from None
    print(
        info.model_dump_json()
        if options.json
        else f"federation {info.name}: task {info.task}, method {info.method}, {info.parameters:,} parameters, "
        f"starts with {info.settings.min_devices} devices\n"
        f"join it with: sparrow join --server {options.server} --federation {info.name}"
    )


def _fields() -> dict[str, str]:
    """Field of FederationSettings -> its meaning and default; method_settings are the pairs of ``--method-set``."""
    fields = FederationSettings.model_fields.items()
    return {name: f"{field.description} ({field.default})" for name, field in fields if name != "method_settings"}


def _options(parser: Parser) -> None:
    """Each field of FederationSettings is an option, too; a brief help only names them."""
    parser.add_argument("--server", required=True, help="the coordinator's address, http://HOST:PORT")
    parser.add_argument("--name", required=True, help="the federation's name")
    parser.add_argument("--task", default="digits", help="a task built in or installed (default: %(default)s)")
    parser.add_argument("--data", help="for tasks that build their model from data: a sample file, as a device has it")
    parser.add_argument(
        "--running-statistics",
        choices=get_args(RunningStatistics),
        default="shared",
        help="of batch norm: averaged, or kept by each device (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="give up when the coordinator is silent this long (default: %(default)g)",
    )
    add_json(parser)
    tls.add_options(parser)
    fields = _fields()
    names = ", ".join(f"--{field.replace('_', '-')}" for field in fields)
    group = parser.add_argument_group(
        "settings of the federation, each with a value (docs/settings.md)", names if parser.brief else None
    )
    for field, meaning in fields.items():
        text = argparse.SUPPRESS if parser.brief else meaning
        group.add_argument(f"--{field.replace('_', '-')}", metavar="X", help=text)
    add_method_set(group)


COMMAND = Command(
    "edge_sdk.publish",
    "Create a federation on a running coordinator.",
    _options,
    _run,
    EXITS,
    usage="--server URL --name NAME [--task TASK] [settings]",
    epilog="SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
