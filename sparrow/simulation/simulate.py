"""``simulate`` and ``sparrow fleet``: simulate many devices, each with its own session.

    simulate("http://127.0.0.1:8000", "digits", devices=1000, budgets=(0.2, 1.0), rounds=20)

They run on this machine or on a Ray cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["SimulationOptions", "simulate"]

from edge_sdk import arguments as read
from edge_sdk.device.connection import token_of
from edge_sdk.device.local_noise import LocalNoise
from edge_sdk.device.opening import add_compute, choose_compute
from edge_sdk.device.transport import Transport
from edge_sdk.engines import EngineChoice
from edge_sdk.errors import BadArgument, Refused, translated
from edge_sdk.publish import PATIENCE_SECONDS, PublishOptions, load_to_publish, publish, read_settings
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks import Task, load_task
from sparrow.devices.simulation import BOARDS, Board, load_boards

from ..command_line.command import Command, Parser, WrongUsage
from ..command_line.options import add_json, add_server, add_wait
from ..transport import httpx, tls
from . import in_process
from .cluster import run_on_ray
from .fleet import Access, check_run, connect_to, run_fleet
from .host import Plan
from .result import Result, installed


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation.

    new: number of additional devices that only adapt the finished model. boards: boards whose seconds and joules the
    devices report, assigned in equal parts, in order. engine: auto, torch or onnx. accelerator, bfloat16, local_noise,
    local_clip, patience_seconds, trust: the options of ``JoinOptions``. processes: number of devices that work at once,
    by default one per core. ray, workers: address of a Ray cluster, and its number of workers. in_memory: keep state in
    memory and discard it at the end. adapt: let devices without a personal model fetch the finished one.
    """

    new: int = 0
    boards: Sequence[Board] = ()
    engine: EngineChoice = "auto"
    accelerator: str = "auto"
    bfloat16: bool = False
    local_noise: float | None = None
    local_clip: float | None = None
    processes: int | None = None
    ray: str | None = None
    workers: int | None = None
    in_memory: bool = False
    adapt: bool = True
    patience_seconds: float | None = None
    trust: tls.Tls | None = None


USUAL = SimulationOptions()


@translated()
def simulate(
    server: str | None = None,
    task: str | Callable[[int], Task] | None = None,
    *,
    devices: int,
    federation: str = "default",
    app: Any = None,
    data: str | None = None,
    budgets: Sequence[float] = (1.0,),
    state_dir: Path | str | None = None,
    options: SimulationOptions = USUAL,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Simulate devices until their federation ends, and return the results.

    server: the coordinator's address. app: alternatively its ASGI application, or the name of one such as
    ``sparrow.coordinator.main:app``, run in this process with its data in ``COORDINATOR_DATA_DIR``. Without both, a
    temporary coordinator runs in this process.

    task: name of an installed task, or a function from a device's number to its Task; creates the federation unless the
    same one exists. settings: fields of ``FederationSettings`` for it; ``min_devices`` is ``devices`` and ``draws``
    "seed" by default. data: data of a named task, as for ``sparrow fleet --data``. budgets: shares of a full training
    step, assigned in equal parts, in order; empty for the largest that each device's board can afford. state_dir:
    folder of the devices' state; a second call with it continues.

    Raises SdkError, and KeyboardInterrupt after every device has finished its step.
    """
    _check_task(task, data, settings, server)
    if not isinstance(devices, int) or devices < 0:
        raise BadArgument(f"devices: {devices!r} is invalid; give an integer from 0")
    if isinstance(budgets, str) or not all(isinstance(each, int | float) for each in _several(budgets)):
        raise BadArgument(f"budgets={budgets!r} is invalid; give shares of a full step, such as (0.3, 1.0)")
    if server is not None and app is not None:
        raise BadArgument("give either the coordinator's address or its application")
    engine, compute = choose_compute(options.engine, options.accelerator, None, bfloat16=options.bfloat16)
    plan = Plan(
        federation,
        devices,
        new=options.new,
        data=data,
        budgets=tuple(budgets),
        boards=tuple(options.boards),
        compute=compute,
        local_noise=LocalNoise.asked(options.local_noise, options.local_clip),
        make_task=(lambda index, info: task(index)) if callable(task) else None,
    )
    with contextlib.ExitStack() as stack:
        in_memory = options.in_memory
        if server is None and app is None:
            if task is None:
                raise BadArgument("give a task, to run a coordinator in this process, or a coordinator's address")
            app = _own_coordinator(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-"))))
            in_memory = in_memory or state_dir is None
        elif isinstance(app, str):
            app = _load_app(app)
        check_run(engine, plan, options.processes)
        if task is not None:
            _create(server, app, plan, task, settings, options)
        common: dict[str, Any] = {
            "engine": engine,
            "state_dir": None if state_dir is None else Path(state_dir),
            "in_memory": in_memory,
            "access": Access(patience_seconds=options.patience_seconds, trust=options.trust),
            "quiet": quiet,
        }
        if options.ray is None:
            return run_fleet(server, plan, app=app, processes=options.processes, adapt=options.adapt, **common)
        if not options.adapt:
            raise BadArgument("adapt=False works only without a cluster; leave adapt or ray out")
        if server is None:
            raise BadArgument("a cluster needs the coordinator's address; give it instead of an application")
        return run_on_ray(server, plan, address=options.ray, workers=options.workers, **common)


def _check_task(task: object, data: str | None, settings: dict[str, Any], server: str | None) -> None:
    """Raise BadArgument for an invalid task, and for arguments that do not fit it."""
    if isinstance(task, Task) or not (task is None or isinstance(task, str) or callable(task)):
        raise BadArgument("task: give the name of a task, or a function from a device's number to its Task")
    if data is not None and callable(task):
        raise BadArgument("data needs a task known by name; a function given as task makes each device's data")
    if server is not None and server.isidentifier() and task is None:
        raise BadArgument(f"{server!r} is not an address (http://HOST:PORT); if it is a task, give task={server!r}")
    if task is None and settings:
        raise BadArgument(f"{', '.join(settings)}: settings need a new federation; give a task, too")
    read_settings(settings, known=("state_dir", "options"))


def _create(
    server: str | None,
    app: Any,
    plan: Plan,
    task: str | Callable[[int], Task],
    given: dict[str, Any],
    options: SimulationOptions,
) -> None:
    """Create the federation unless the same one exists. A task that is not built in is published from device 0."""
    settings = {"min_devices": plan.devices, "draws": "seed", **given}
    data = plan.data_of(0)
    name = plan.name(0)
    made = load_to_publish(task, data, settings, device=name) if isinstance(task, str) else task(0)
    if isinstance(made, str):
        # Before the federation exists: wrong data must not leave one behind.
        wanted = read_settings(settings)
        load_task(made, data, device=name, seed=wanted.seed, batch_size=wanted.batch_size)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect_to(server, app, options.trust))
        left_out = [name for name in ("min_devices", "draws") if name not in given]
        # a second fleet takes these settings from the existing federation
        if left_out:
            patience = PATIENCE_SECONDS if options.patience_seconds is None else options.patience_seconds
            transport = Transport(client, patience_seconds=patience)
            transport.token = token_of("admin", "observer", "enrolment")
            with contextlib.suppress(Refused):
                has = transport.federation(plan.federation).settings
                settings |= {name: getattr(has, name) for name in left_out}
        # A simulation leaves no key behind.
        signer = Publisher.new() if server is None else None
        address = server or in_process.ADDRESS
        publishing = PublishOptions(publisher=signer)
        publish(address, plan.federation, made, exist_ok=True, client=client, options=publishing, **settings)


def _several(values: Any) -> Sequence[Any]:
    # a value that is no sequence becomes an element that is no number
    return values if isinstance(values, Sequence) else (None,)


def _own_coordinator(folder: Path) -> Any:
    """Return a coordinator's application without federations.

    Raises MissingPart if the coordinator's packages are not installed.
    """
    main, settings = (installed(f"sparrow.coordinator.{name}", "coordinator") for name in ("main", "settings"))
    return main.create_app(settings.Settings(data_dir=folder, default_task="", log_level="ERROR"))


def _as_json(result: Result) -> dict[str, Any]:
    # without the coordinator's records
    found = asdict(replace(result, rounds=(), devices=()))
    del found["rounds"], found["devices"]
    return {"devices": found.pop("hosted"), **found}


def _load_app(text: str) -> Any:
    """Return the ASGI application at ``module:attribute``."""
    module, _, attribute = text.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute or "app")
    # a file of the caller's with the same name may raise anything
    except (Exception, SystemExit) as error:
        raise BadArgument(
            f"the application {text} cannot be loaded ({type(error).__name__}: {error}); give "
            f"sparrow.coordinator.main:app"
        ) from error


# --- the command -----------------------------------------------------------------------------------------------------


def _command(options: argparse.Namespace) -> None:
    _check(options)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger(httpx.__name__).setLevel(logging.WARNING)
    settings = read.settings_of(options.settings)
    if settings and not options.task:
        raise WrongUsage(f"{next(iter(settings))}: settings need --task, for a federation that does not exist yet")
    read_settings(settings)
    try:
        result = simulate(
            None if options.app else options.server,
            options.task,
            devices=options.devices,
            federation=options.federation,
            app=options.app,
            data=_data(options.data, options.partition),
            budgets=options.budgets,
            state_dir=options.state_dir,
            options=SimulationOptions(
                new=options.new,
                boards=options.boards,
                engine=options.engine,
                accelerator=options.accelerator,
                bfloat16=options.bfloat16,
                processes=options.processes,
                ray=options.ray,
                workers=options.workers,
                in_memory=options.memory,
                patience_seconds=options.wait,
                trust=tls.from_options(options),
            ),
            quiet=options.quiet,
            **settings,
        )
    except KeyboardInterrupt:
        advice = "its devices' state was in memory and is lost" if options.memory else "repeat the command to continue"
        raise KeyboardInterrupt(f"interrupted; {advice}") from None
    if options.json:
        print(json.dumps({"federation": options.federation, **_as_json(result)}))
        return
    rate = result.device_rounds / result.seconds if result.seconds else 0.0
    print(
        f"{result.hosted} devices, {result.device_rounds} device-rounds and {result.evaluations} evaluations in "
        f"{result.seconds:.1f} s ({rate:.1f} device-rounds/s); the federation is {result.status.value}"
    )
    if result.ended is not None:
        print(result.ended)


def _data(data: str | None, partition: str | None) -> str | None:
    return data if partition is None else f"{data or ''},partition={partition}".lstrip(",")


def _budgets(text: str) -> tuple[float, ...]:
    if text == "auto":
        return ()
    with contextlib.suppress(ValueError):
        budgets = tuple(float(part) for part in text.split(","))
        if all(0 < budget <= 1 for budget in budgets):
            return budgets
    raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0 and at most 1, such as 0.2,0.6,1, or auto")


def _boards(text: str) -> tuple[Board, ...]:
    try:
        return load_boards(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(options: argparse.Namespace) -> None:
    """Raise WrongUsage for options that exclude each other."""
    if options.ray is None and options.workers is not None:
        raise WrongUsage("--workers needs a cluster: give --ray, or use --processes")
    if options.ray is not None and (options.app or options.processes):
        raise WrongUsage("--ray needs a coordinator's --server, and --workers instead of --processes")
    if options.ray is not None and options.accelerator != "cpu":
        if options.accelerator == "cuda":
            raise WrongUsage("--accelerator cuda: workers of a cluster train only on the CPU; leave --ray out")
        options.accelerator = "cpu"


def _options(parser: Parser) -> None:
    where = parser.add_mutually_exclusive_group()
    add_server(where)
    where.add_argument("--app", metavar="MODULE:APP", help="its application, to run in this process instead")
    read.add_federation_to_join(parser)
    parser.add_argument("--devices", type=int, required=True, help="number of devices that train")
    parser.add_argument("--new", type=int, default=0, help="number of devices that only adapt the finished model")
    parser.add_argument("--task", help="create the federation for this task unless it exists")
    read.add_settings(parser, more="; with --task")
    parser.add_argument("--data", help="the devices' data; may contain {index}, {of} and {name}")
    parser.add_argument("--partition", metavar="RULE", help="distribution of the data: dirichlet,alpha=0.3, ...")
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=(1.0,),
        help="budgets in equal parts, such as 0.2,0.6,1; auto: by board",
    )
    parser.add_argument("--boards", type=_boards, default=(), help=f"boards to simulate: {', '.join(BOARDS)}")
    add_compute(parser)
    parser.add_argument(
        "--processes",
        type=int,
        help="number of devices that work at once (default: one per core)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster: HOST:PORT, auto, or local to start one",
    )
    parser.add_argument("--workers", type=int, help="number of cores, with --ray (default: all)")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="keep the devices' state in this folder, so that a later run can continue",
    )
    keep.add_argument("--memory", action="store_true", help="keep state in memory and discard it at the end")
    add_wait(parser, None)
    tls.add_options(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--verbose", action="store_true", help="log more")
    add_json(parser)


COMMAND = Command(
    "sparrow fleet",
    "Simulate many devices, each with a session of its own.",
    _options,
    _command,
    usage="[--server URL | --app MODULE:APP] --devices N [options]",
    epilog="Set SPARROW_ENROLMENT_TOKEN, SPARROW_OBSERVER_TOKEN and SPARROW_ADMIN_TOKEN if the coordinator requires "
    "tokens.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
