"""``simulate`` and ``sparrow fleet``: many simulated devices, each a real session of its own.

    simulate("http://127.0.0.1:8000", "digits", devices=1000, budgets=(0.2, 1.0), rounds=20)

They run in a few processes of this machine (``fleet``), in one process with the coordinator, or on a Ray cluster
(``cluster``).
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
from edge_sdk.publish import PATIENCE_SECONDS, PublishOptions, add_method_set, load_to_publish, publish, read_settings
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks import Task
from sparrow.devices.simulation import BOARDS, Board, load_boards

from ..command_line.command import Command, Parser, WrongUsage
from ..command_line.options import add_help_settings, add_json, add_server, add_wait
from ..protocol import tls
from ..protocol.settings import FederationSettings
from . import in_process
from .cluster import run_on_ray
from .fleet import Access, connect_to, run_fleet
from .host import Plan
from .result import Result, installed


@dataclass(frozen=True)
class SimulationOptions:
    """The way devices are simulated.

    new: how many more devices only adapt the finished model. boards: the boards whose seconds and joules the devices
    report (``load_boards``); the first devices have the first one, and so on, in equal parts. engine: what trains
    (``fleet.run_fleet``). accelerator, bfloat16, local_noise, local_clip, patience_seconds, trust: as in
    ``JoinOptions``. processes: how many devices work at once, in threads with ONNX Runtime and in processes with
    PyTorch; one per core by default. ray: the address of a Ray cluster that hosts them instead, with this number of
    workers. in_memory: keep the devices' state in memory, and forget it in the end. adapt: let devices that end without
    a model of their own fetch the finished one.
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
    """Simulate ``devices`` devices until their federation has ended, and return what they did.

    server: the coordinator's address; without, and with a task, one runs in this process and is gone afterwards, as are
    its models, and the devices' state unless state_dir is given. Or app: its ASGI application, or its name, such as
    ``sparrow.coordinator.main:app``, which runs in this process with its data in ``COORDINATOR_DATA_DIR``. task:
    creates the federation unless there is the same one already: the name of an installed task, or a function from a
    device's number to its Task. Without it the federation must be there. settings: of that federation, fields of
    ``FederationSettings``; ``min_devices`` is ``devices`` and ``draws`` "seed" unless given. data: the data of a task
    known by name, as ``--data`` of ``sparrow fleet`` has it. budgets: shares of a full training step; the first devices
    have the first one, and so on, in equal parts; empty for what each device's board can afford. state_dir: where
    devices keep their state; a second call with the same folder continues.

    Raises SdkError; KeyboardInterrupt once every device has finished the step it was in.
    """
    _check_task(task, data, settings, server)
    if not isinstance(devices, int) or devices < 0:
        raise BadArgument(f"devices: {devices!r} cannot work; give a whole number")
    if isinstance(budgets, str) or not all(isinstance(each, int | float) for each in _several(budgets)):
        raise BadArgument(f"budgets={budgets!r} cannot work; give shares of a full step, such as (0.3, 1.0)")
    if server is not None and app is not None:
        raise BadArgument("give the coordinator's address or its application, and not both")
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
                raise BadArgument(
                    "give a task, and a coordinator runs in this process; or the address of one that runs"
                )
            app = _own_coordinator(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-"))))
            in_memory = in_memory or state_dir is None
        elif isinstance(app, str):
            app = _load_app(app)
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
            raise BadArgument("adapt=False is of a fleet on this machine; leave it out, or ray")
        if server is None:
            raise BadArgument(
                "the nodes of a cluster need the coordinator's address; give it in place of an application"
            )
        return run_on_ray(server, plan, address=options.ray, workers=options.workers, **common)


def _check_task(task: object, data: str | None, settings: dict[str, Any], server: str | None) -> None:
    """Raise BadArgument for a task that cannot be one, and for what does not go together with it."""
    if isinstance(task, Task) or not (task is None or isinstance(task, str) or callable(task)):
        raise BadArgument("task: give the name of a task, or a function from a device's number to its Task")
    if data is not None and callable(task):
        raise BadArgument("data belongs to a task known by name; the function given as task makes each device's data")
    if server is not None and server.isidentifier() and task is None:
        raise BadArgument(f"{server!r} is no address (http://HOST:PORT); where it is a task, give task={server!r}")
    if task is None and settings:
        raise BadArgument(f"{', '.join(settings)}: settings belong to a new federation; give a task as well")
    read_settings(settings, known=("state_dir", "options"))


def _create(
    server: str | None,
    app: Any,
    plan: Plan,
    task: str | Callable[[int], Task],
    given: dict[str, Any],
    options: SimulationOptions,
) -> None:
    """Create the federation, unless there is the same one already; a task that is not built in is that of device 0."""
    settings = {"min_devices": plan.devices, "draws": "seed", **given}
    made = load_to_publish(task, plan.data_of(0), settings, device=plan.name(0)) if isinstance(task, str) else task(0)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect_to(server, app, options.trust))
        left_out = [name for name in ("min_devices", "draws") if name not in given]
        if left_out:  # a further fleet joins the federation that the first one has created
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
    """Return several values as they are, and one that is not in a sequence as something that is no number."""
    return values if isinstance(values, Sequence) else (None,)


def _own_coordinator(folder: Path) -> Any:
    """Return the application of a coordinator with its data in ``folder`` and no federation. Raises MissingPart."""
    main, settings = (installed(f"sparrow.coordinator.{name}", "coordinator") for name in ("main", "settings"))
    return main.create_app(settings.Settings(data_dir=folder, default_task="", log_level="ERROR"))


def _as_json(result: Result) -> dict[str, Any]:
    """Return what the command prints of a fleet's work: not what the coordinator's records have."""
    found = asdict(replace(result, rounds=(), devices=()))
    del found["rounds"], found["devices"]
    return {"devices": found.pop("hosted"), **found}


def _load_app(text: str) -> Any:
    """Return the ASGI application at ``module:attribute``."""
    module, _, attribute = text.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute or "app")
    except (Exception, SystemExit) as error:  # a file of the caller's that has the same name may do anything
        raise BadArgument(
            f"the application {text} cannot be loaded ({type(error).__name__}: {error}); give "
            f"sparrow.coordinator.main:app"
        ) from error


# --- the command -----------------------------------------------------------------------------------------------------


def _command(options: argparse.Namespace) -> None:
    _check(options)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = {"method_settings": dict(options.method_set), **dict(options.set)} if options.task else {}
    read_settings(settings, "--set ")
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
        gone, stays = "its devices lay in memory and are gone", "the same command goes on where the devices were"
        raise KeyboardInterrupt(f"interrupted; {gone if options.memory else stays}") from None
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
    raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0 and up to 1, such as 0.2,0.4,0.6,0.8,1, or auto")


def _boards(text: str) -> tuple[Board, ...]:
    try:
        return load_boards(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(options: argparse.Namespace) -> None:
    """Raise WrongUsage for options that do not go together."""
    if options.ray is None and options.workers is not None:
        raise WrongUsage("--workers are those of a cluster: give --ray, or --processes")
    if options.ray is not None and (options.app or options.processes):
        raise WrongUsage(
            "--ray is for a coordinator with a --server address, and takes --workers instead of --processes"
        )
    if options.ray is not None and options.accelerator != "cpu":
        if options.accelerator == "cuda":
            raise WrongUsage("--accelerator cuda: the workers of a cluster train on their processors; leave --ray out")
        options.accelerator = "cpu"


def _options(parser: Parser) -> None:
    where = parser.add_mutually_exclusive_group()
    add_server(where)
    where.add_argument("--app", metavar="MODULE:APP", help="or its application, run in this process")
    read.add_federation_to_join(parser)
    parser.add_argument("--devices", type=int, required=True, help="how many devices train")
    parser.add_argument("--new", type=int, default=0, help="how many more only adapt the finished model")
    parser.add_argument("--task", help="create the federation for this task, unless it is there already")
    read.add_pairs(parser, "--set", "its settings, with --task")
    add_method_set(parser)
    add_help_settings(parser, FederationSettings, "all settings")
    parser.add_argument("--data", help="their data, with {index}, {of} or {name} in it")
    parser.add_argument("--partition", metavar="RULE", help="how it is dealt: dirichlet,alpha=0.3, ...")
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=(1.0,),
        help="0.2,0.6,1: a third has each; auto: by their boards",
    )
    parser.add_argument(
        "--boards", type=_boards, default=(), help=f"boards whose seconds and joules are reported: {', '.join(BOARDS)}"
    )
    add_compute(parser)
    parser.add_argument(
        "--processes",
        type=int,
        help="how many work at once (default: one per core)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="host them on a Ray cluster: HOST:PORT, auto, or local for one started here",
    )
    parser.add_argument("--workers", type=int, help="with --ray: on so many cores (default: all)")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="where the devices keep their state, to go on later"
    )
    keep.add_argument("--memory", action="store_true", help="keep it in memory and forget it in the end")
    add_wait(parser, None)
    tls.add_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--verbose", action="store_true", help="say more")
    add_json(parser)


COMMAND = Command(
    "sparrow fleet",
    "Many simulated devices, each a real session of its own.",
    _options,
    _command,
    usage="[--server URL | --app MODULE:APP] --devices N [options]",
    epilog="SPARROW_ENROLMENT_TOKEN, SPARROW_OBSERVER_TOKEN and SPARROW_ADMIN_TOKEN hold tokens where the "
    "coordinator asks for them.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
