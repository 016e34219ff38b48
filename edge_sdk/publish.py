"""``python -m edge_sdk.publish``: create a federation on a running coordinator.

As a library: ``publish(server, name, task, ...)`` creates one for a ``Task`` of one's own: its manifest is found on the
traced graph, its ONNX skeleton made by torch's exporter, and both are sent with the model's weights as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Literal, get_args

import httpx
import numpy as np
from pydantic import ValidationError

from edge_sdk.errors import Refused, SdkError
from edge_sdk.protocol import checkpoint
from edge_sdk.protocol.builtin import builtin_tasks
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.messages import CreateFederation, FederationInfo, FederationSettings
from edge_sdk.skeleton import make_skeleton
from edge_sdk.tasks import Task, UnknownTask, load_task
from edge_sdk.tasks.loading import DataError
from edge_sdk.tracing import UnsupportedLayer, describe
from edge_sdk.training.local import get_tensors
from edge_sdk.transport import TIMEOUT, Transport

RunningStatistics = Literal["shared", "personal"]


def publish(
    server: str,
    name: str,
    task: Task | str,
    *,
    running_statistics: RunningStatistics = "shared",
    exist_ok: bool = False,
    admin_token: str | None = None,
    client: httpx.Client | None = None,
    **settings: Any,
) -> FederationInfo:
    """Create the federation ``name`` for ``task``, a Task or the name of a built-in one, and return where it stands.

    settings: fields of ``FederationSettings``. running_statistics: whether batch-norm's are averaged over devices or
    stay personal. exist_ok: return the one that exists instead of raising Refused (HTTP 409). Raises UnsupportedLayer,
    naming the layer, for a model that cannot be handled; SdkError when the coordinator refuses or does not answer.
    """
    request = CreateFederation(
        name=name, task=task if isinstance(task, str) else None, settings=FederationSettings.model_validate(settings)
    )
    if isinstance(task, str):
        body, media_type = request.model_dump_json().encode(), "application/json"
    else:
        body, media_type = _checkpoint(request, task, running_statistics), checkpoint.MEDIA_TYPE
    own = client or httpx.Client(base_url=server, timeout=TIMEOUT)
    try:
        transport = Transport(own, patience_seconds=30.0)
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


def _checkpoint(request: CreateFederation, task: Task, running_statistics: RunningStatistics) -> bytes:
    example = next(iter(task.train))[0][:2]
    manifest = describe(task.model, example, task=task.name, running_statistics=running_statistics)
    skeleton = make_skeleton(task.model, example, manifest)
    manifest = manifest.with_skeleton(skeleton)
    everything = get_tensors(task.model, manifest)
    tensors = {spec.name: everything[spec.name] for spec in manifest.shared}
    tensors["sparrow.manifest"] = np.frombuffer(manifest.model_dump_json().encode(), dtype=np.uint8)
    tensors["sparrow.skeleton"] = np.frombuffer(skeleton, dtype=np.uint8)
    return checkpoint.save(tensors, request.model_dump_json())


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options, settings = _parse(arguments)
    try:
        task: Task | str = options.task
        if options.task not in builtin_tasks():
            batch_size = int(settings.get("batch_size", FederationSettings().batch_size))
            task = load_task(
                options.task, options.data, device="publisher", seed=int(settings.get("seed", 0)), batch_size=batch_size
            )
        info = publish(
            options.server,
            options.name,
            task,
            running_statistics=options.running_statistics,
            admin_token=os.environ.get("SPARROW_ADMIN_TOKEN"),
            **settings,
        )
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            option = "-".join(map(str, fault["loc"])).replace("_", "-")
            where = f"--{option}: " if option else ""
            print(f"edge_sdk.publish: {where}{fault['msg']}", file=sys.stderr)
        return 2
    except (SdkError, ProtocolError, UnknownTask, DataError, UnsupportedLayer) as error:
        print(f"edge_sdk.publish: {error}", file=sys.stderr)
        return 1
    print(
        f"federation {info.name}: task {info.task}, method {info.method}, {info.parameters:,} parameters, "
        f"starts with {info.settings.min_devices} devices\n"
        f"join it with: python -m edge_sdk.join --server {options.server} --federation {info.name}"
    )
    return 0


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Options, and the federation's settings that were given; each field of FederationSettings is an option."""
    parser = argparse.ArgumentParser(
        prog="python -m edge_sdk.publish", description="Create a federation on a running coordinator."
    )
    parser.add_argument("--server", required=True, help="the coordinator's address, http://HOST:PORT")
    parser.add_argument("--name", required=True, help="the federation's name")
    parser.add_argument("--task", default="digits", help="a built-in task, or npz (default: %(default)s)")
    parser.add_argument("--data", help="for tasks that build their model from data: a sample file, as a device has it")
    parser.add_argument("--running-statistics", choices=get_args(RunningStatistics), default="shared")
    parser.epilog = "SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one."
    group = parser.add_argument_group("settings of the federation (docs/settings.md)")
    for field, description in FederationSettings.model_fields.items():
        group.add_argument(
            f"--{field.replace('_', '-')}", metavar="X", help=f"{description.description} ({description.default})"
        )
    options = parser.parse_args(arguments)
    given = {field: getattr(options, field) for field in FederationSettings.model_fields}
    return options, {field: text for field, text in given.items() if text is not None}


if __name__ == "__main__":
    sys.exit(main())
