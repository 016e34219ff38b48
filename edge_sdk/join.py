"""``sparrow join --server URL``: this device takes part in a federation until it is finished.

As a library: ``join(server, task, ...)`` with a ``Task`` of one's own.

Interrupted, the same command goes on where the device was. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import logging
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .device.bar import Bar
from .device.demands import Demands, SecureOnly, read_known

__all__ = ["JoinOptions", "Result", "join"]

import httpx

from sparrow.command_line import allocator
from sparrow.command_line.command import Command, Parser
from sparrow.command_line.options import (
    add_help_settings,
    add_json,
    add_server,
    add_skip_unreadable,
    add_wait,
    with_skipped,
)
from sparrow.devices import EnergyMeter, PowerModel
from sparrow.devices.conditions import Conditions, ConditionsReader
from sparrow.devices.system import System
from sparrow.export.errors import ExportError
from sparrow.export.source import Source
from sparrow.protocol import personal, tls
from sparrow.protocol.failures import Failure, nothing_trained
from sparrow.protocol.fields import NAME_PATTERN
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Assignment, FederationInfo
from sparrow.protocol.signatures import is_fingerprint

from . import arguments as read
from .arguments import check_federation_name, check_ranges
from .budget.preparation import Preparation, check_budget
from .budget.search import read_learned
from .device.connection import connect, token_of
from .device.embedding import DeviceProgress, ProgressReporter, Settable, Stop, Stopped
from .device.local_noise import LocalNoise
from .device.opening import add_compute, choose_compute
from .device.policy import Policy, policy_here, read_policy
from .device.result import Result, as_json, failed, report, result_before, result_of
from .device.session import FAILURES, Outcome, Session, SessionOptions
from .device.state import StateFolder, default_root
from .device.telemetry import Telemetry
from .device.transport import Transport
from .device.watchdog import Watchdog, read_spent
from .engines import EngineChoice
from .errors import BadArgument, FederationDeleted, NothingTrained, SdkError, failure_of, translated
from .tasks import Task, is_module, load_data_of

if TYPE_CHECKING:
    from .device.exporting import Export

LONG_POLL_SECONDS = 30.0
STOPPABLE_POLL_SECONDS = 2.0
"""The same where a program may ask this device to stop, which is not seen before the coordinator has answered."""

LEARNED, SPENT = "learned.json", "spent.json"
"""Files of the state folder: what rounds have taught about the budget, and what was spent today."""


@dataclass(frozen=True)
class JoinOptions:
    """The way a device trains, and the rounds in which it takes part. Raises BadArgument for a value that cannot work.

    budget: share of each layer's neurons that it trains, in (0, 1], which bounds bytes more than time (docs/budget.md);
    None has it find out what it can afford, and look again after every round (``edge_sdk.budget.search``). policy: when
    it may work; None: always. conditions: returns the conditions now, by default from this machine's sensors. watts:
    power model for estimated joules on a board without a sensor.

    engine: ``torch``; ``onnx``, ONNX Runtime, which needs only the task's data, no PyTorch, and a federation with a
    training step; or ``auto``: ONNX Runtime if federation and method allow it and there is no GPU. accelerator: one of
    ``compute.ACCELERATORS``. threads: of the processor. bfloat16: forward passes in bfloat16 where torch's autocast
    finds it safe. deterministic: on the processor, with nothing chosen by its speed. memory_limit: bytes that the
    process may hold; by default what there is.

    require_secure: send updates only under masks, in rounds that bear so many colluders (docs/privacy.md).
    known_devices: the same, and only with the devices in this file of lines ``NAME KEY``. publisher: the fingerprint of
    the only publisher whose model is trained; None: the first one that this device meets in the federation, which it
    remembers. pin_model: accept no replacement of the model. require: ranges of settings that rounds must keep to, such
    as ``cohort>=10``. plain_metrics: report losses and accuracies in clear if a secure federation asks for that.
    own_frozen: neither take frozen values from other federations of this user nor leave them for others, so that
    downloads do not reveal in which federations this user takes part. local_noise: add Gaussian noise to each value
    that is sent, of this many times local_clip, and report no losses. local_clip: the largest 2-norm of an update
    before the noise; None: 1.

    enrolment_token: by default that of SPARROW_ENROLMENT_TOKEN. patience_seconds: how long to wait for a coordinator
    that does not answer; None: for ever. trust: certificates for https.
    """

    budget: float | None = None
    policy: Policy | None = None
    conditions: Callable[[], Conditions] | None = None
    watts: PowerModel | None = None
    engine: EngineChoice = "auto"
    accelerator: str = "auto"
    threads: int | None = None
    bfloat16: bool = False
    deterministic: bool = False
    memory_limit: int | None = None
    require_secure: int | None = None
    known_devices: Path | str | None = None
    publisher: str | None = None
    pin_model: bool = False
    require: Sequence[str] = ()
    plain_metrics: bool = False
    own_frozen: bool = False
    local_noise: float | None = None
    local_clip: float | None = None
    enrolment_token: str | None = None
    patience_seconds: float | None = None
    trust: tls.Tls | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)
        for name in ("threads", "memory_limit"):
            value = getattr(self, name)
            if value is not None and not _is_whole(value, 1):
                raise BadArgument(f"{name}={value!r} cannot work; give a whole number above 0, or None")
        patience = self.patience_seconds
        if patience is not None and not (isinstance(patience, int | float) and patience >= 0):
            raise BadArgument(
                f"patience_seconds={patience!r} cannot work; give seconds of at least 0, or None to wait for ever"
            )
        if self.require_secure is not None and not _is_whole(self.require_secure, 0):
            raise BadArgument(
                f"require_secure={self.require_secure!r} cannot work; give how many devices may collude, from 0 on, or "
                f"None"
            )
        if self.publisher is not None and not (isinstance(self.publisher, str) and is_fingerprint(self.publisher)):
            raise BadArgument(
                f"publisher={self.publisher!r} is no fingerprint; give the eight groups of four hexadecimal digits "
                f"that sparrow publish has printed"
            )

    def demands(self) -> Demands:
        """Return the demands on rounds. Raises BadArgument for ranges or a file that cannot be read."""
        secure = None
        if self.require_secure is not None or self.known_devices is not None:
            known = None if self.known_devices is None else read_known(self.known_devices)
            secure = SecureOnly(self.require_secure or 0, known)
        ranges = check_ranges(self.require, "require")
        return Demands(secure, self.publisher, self.pin_model, ranges, self.plain_metrics, self.own_frozen)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


USUAL = JoinOptions()


@translated()
def join(
    server: str,
    task: Task | str | Callable[[FederationInfo], Task] | None = None,
    *,
    data: str | None = None,
    federation: str = "default",
    name: str | None = None,
    state_dir: Path | str | None = None,
    export: Path | str | None = None,
    options: JoinOptions = USUAL,
    client: httpx.Client | None = None,
    on_progress: Callable[[DeviceProgress], None] | None = None,
    stop: Settable | Callable[[], bool] | None = None,
    quiet: bool = False,
) -> Result:
    """Take part in ``federation`` until it is finished, and return what this device did.

    task: the learning problem, or a function that makes it from the federation's settings, or the name of the
    federation's task, which is also what None means. data: this device's data, of a task known by name, as ``--data``
    of ``sparrow join`` has it. name: unique in the federation, the host's name by default. state_dir: where the device
    keeps its personal model and identity; a second call with the same folder goes on where the first was. export: where
    to write the personal model as ONNX. client: of the coordinator, in place of one for ``server``. on_progress: called
    on this thread, in place of the bar and the lines that this function writes otherwise, after each step of training
    and with each phase; what it raises ends the work, as Ctrl-C does. stop: a threading.Event, or a function that
    returns whether to stop; looked at between two steps of training and, while the device waits, every few seconds. The
    work is handed back then, the personal model stays as the last whole round has left it, and the result is
    ``interrupted``. quiet: no progress bar.

    Raises SdkError: BadArgument among them for an argument, or a task, that cannot work (``tasks.checking``),
    DoesNotFit if the budget needs more memory, NothingTrained if the device has no model of its own in the end, or
    ``FAILURES`` rounds in a row have failed and none has been trained. If something else ends it, such as Ctrl-C, it
    first hands its work back.
    """
    halt = Stop(stop)
    if on_progress is not None and not callable(on_progress):
        raise BadArgument(f"on_progress is a {type(on_progress).__name__}; give a function of one DeviceProgress")
    noise = LocalNoise.asked(options.local_noise, options.local_clip)
    demands = options.demands()
    engine, compute = choose_compute(
        options.engine,
        options.accelerator,
        options.threads,
        bfloat16=options.bfloat16,
        deterministic=options.deterministic,
    )
    check_federation_name(federation)
    name = default_name() if name is None else name
    check_name(name)
    make_task = _task_maker(task, data, name)
    if export is not None:
        check_writable(Path(export))
    bar = Bar(quiet)
    tell = ProgressReporter(on_progress or bar.show)
    tell.phase("opening")
    with ExitStack() as stack:
        own = client or stack.enter_context(connect(server, options.trust))
        folder = StateFolder(Path(state_dir) if state_dir else default_root(server, federation) / name)
        stack.callback(folder.close)
        stack.callback(bar.close)
        if not quiet:
            tell.say(f"{name} keeps its state in {folder.path}")
        meter = stack.enter_context(EnergyMeter(model=options.watts))
        transport = Transport(
            own, patience_seconds=options.patience_seconds, on_wait=tell.unreachable, sleep=halt.sleep
        )
        transport.token = options.enrolment_token or token_of("enrolment")
        try:
            halt.check()
            session = Session(
                transport,
                folder,
                federation=federation,
                name=name,
                make_task=lambda info, manifest: replace(make_task(info, manifest), compute=compute),
                options=_session_options(options, folder, meter, tell, halt, demands, noise, engine),
            )
        except Stopped:
            return result_before(folder.progress(), name, 1.0 if options.budget is None else options.budget, noise)
        tell.begin(session)
        _say_terms(session, noise, tell)
        export_now = partial(_export, session, name, export)
        interrupted = _work_until_over(session, tell, halt, export_now)
        result = result_of(session, name, export_now(), interrupted, noise)
        for text in result.warnings:
            tell.say(text)
        return result


def _session_options(
    options: JoinOptions,
    folder: StateFolder,
    meter: EnergyMeter,
    tell: ProgressReporter,
    halt: Stop,
    demands: Demands,
    noise: LocalNoise | None,
    engine: EngineChoice,
) -> SessionOptions:
    read_conditions = options.conditions or ConditionsReader(System.here(), storage=folder.path).read
    asked = options.policy if options.policy is not None and options.policy.asks else None
    watchdog = _watchdog(asked, read_conditions, folder, tell.say, halt.sleep) if asked else None

    def progressed(assignment: Assignment, done: int, total: int, loss: float) -> None:
        tell.training(assignment, done, total, loss)
        if done < total:  # a whole round is sent before the device stops
            halt.check()

    return SessionOptions(
        budget=1.0 if options.budget is None else options.budget,
        engine=engine,
        telemetry=lambda traffic: Telemetry(meter, traffic, read=read_conditions, on_phase=tell.phase),
        progress=progressed,
        prepare=Preparation(
            options.budget,
            options.deterministic,
            options.memory_limit,
            duty=(lambda: watchdog.duty) if watchdog else lambda: 1.0,
            learned=read_learned(folder.cached(LEARNED)),
            keep=lambda learned: folder.cache(LEARNED, learned.model_dump_json().encode()),
        ),
        watchdog=watchdog,
        demands=demands,
        local_noise=noise,
        memory_limit=options.memory_limit,
    )


def _say_terms(session: Session, noise: LocalNoise | None, tell: ProgressReporter) -> None:
    """Say whose model is trained, and what limits this device."""
    tell.say(session.trust.line)
    if session.identity_key is not None:
        tell.say(f"the identity key of {session.name} in secure rounds is {session.identity_key}")
    if noise is not None:
        tell.say(noise.described(session.progress.updates))
    for text in (*session.task.said, *(f"warning: {here}" for here, _ in session.differences)):
        tell.say(text)
    choice = session.choice
    if choice is not None and (choice.limited_by is not None or choice.advice):
        for text in (str(choice), *choice.advice):
            tell.say(text)


def _work_until_over(session: Session, tell: ProgressReporter, halt: Stop, export: Callable[[], Export | None]) -> bool:
    """Take part until the federation is over, or return True if the program has stopped the device before."""
    try:
        with suppress(SdkError):  # so that the personal model can be exported later, away from the coordinator
            session.skeleton()
        run_session(session, tell, halt, export)
        if session.personal is None:
            raise _nothing_trained(session, session.name)
    except Stopped:
        session.leave(Failure("interrupted/program"))
        return True
    except FederationDeleted:
        if (exported := export()) is not None:
            tell.say(f"the personal model is {exported.path}")
        raise
    except BadArgument:  # of a batch that was not looked at before
        session.leave(Failure("data-unusable"))
        raise
    except SdkError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        # Out of memory, a loss that raises: this device cannot go on, but nobody need wait for it.
        session.leave(failure_of(error))
        raise
    return False


def _task_maker(task: Any, data: str | None, device: str) -> Callable[[FederationInfo, Manifest], Task]:
    """Return the function that makes the task, or loads its data if it is known by name. Raises BadArgument."""
    named = task is None or isinstance(task, str)
    if data is not None and not named:
        raise BadArgument("data belongs to a task known by name; leave it out where the task has its data")
    if not named and not isinstance(task, Task) and (is_module(task) or not callable(task)):
        raise BadArgument(
            f"task is a {type(task).__name__}; give a Task: Task(name, model, loss, train, validation), or a function "
            f"that makes one from the federation's settings, or the name of the federation's task"
        )

    def make(info: FederationInfo, manifest: Manifest) -> Task:
        if named and task not in (None, info.task):
            raise BadArgument(f"the federation {info.name} trains {info.task!r}, not {task!r}; give that, or no task")
        if named:
            settings = info.settings
            return load_data_of(manifest, data, device=device, seed=settings.seed, batch_size=settings.batch_size)
        made = task if isinstance(task, Task) else task(info)
        if not isinstance(made, Task):
            raise BadArgument(f"the function given as task returns a {type(made).__name__}; have it return a Task")
        return made

    return make


def _nothing_trained(session: Session, name: str) -> NothingTrained:
    """Return why this device comes to its end without a model of its own."""
    rounds = session.progress.rounds
    did = f"{name} took part in {rounds} rounds, but has no personal model" if rounds else f"{name} has trained nothing"
    if session.last_failure is None:
        return NothingTrained(
            f"{did}: the federation was over before; join one that runs, or ask its operator to reopen it"
        )
    where = "its last try ended so" if session.failed_rounds < FAILURES else f"{session.failed_rounds} times in a row"
    return NothingTrained(f"{did}: {where}: {session.last_failure}")


def _watchdog(
    policy: Policy,
    read: Callable[[], Conditions],
    folder: StateFolder,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> Watchdog:
    """Return the watchdog of ``policy``, which continues to count today's spending after a restart."""
    watchdog = Watchdog(
        policy,
        read,
        sleep=sleep,
        say=say,
        spent=read_spent(folder.cached(SPENT)),
        keep=lambda spent: folder.cache(SPENT, spent.model_dump_json().encode()),
    )
    watchdog.look()  # whether the temperature can be read decides how long rounds take
    return watchdog


def run_session(session: Session, tell: ProgressReporter, halt: Stop, export: Callable[[], Export | None]) -> None:
    """Take steps until the federation is over. A device that stops early has its model exported then, and stays to
    answer evaluations. Raises Stopped."""
    stopped = session.progress.stopped_round is not None
    wait = STOPPABLE_POLL_SECONDS if halt.possible else LONG_POLL_SECONDS
    while True:
        halt.check()
        step = session.step(wait)
        if step.outcome is Outcome.over:
            return
        tell.between(paused=step.paused is not None)
        if session.failed_rounds >= FAILURES and not session.progress.rounds:
            session.leave(nothing_trained(session.reported_failure))
            raise _nothing_trained(session, session.name)
        if session.progress.stopped_round is not None and not stopped:
            stopped = True
            try:
                exported = export()
            except (OSError, ExportError) as error:
                exported = None
                tell.say(f"the personal model could not be exported yet: {error}")
            where = f"; its personal model is {exported.path}" if exported else ""
            tell.say(
                f"training stopped early in round {session.progress.stopped_round}{where}. Staying to answer "
                f"evaluations; Ctrl-C leaves"
            )
        if step.outcome is Outcome.idle:
            halt.sleep(step.pause_seconds)  # to the second: the coordinator gives each device a moment of its own


def _export(session: Session, name: str, path: Path | str | None) -> Export | None:
    tensors = None if path is None else session.best
    if path is None or tensors is None:
        return None
    from .device.exporting import export_personal  # here, because most devices export nothing

    progress = session.progress
    source = Source(
        session.manifest,
        session.skeleton(),
        {**session.frozen, **tensors},
        progress={"last_round": progress.best.round if progress.best else progress.last_round},
        membership=personal.Membership(device=name, budget=session.budget, federation=session.info),
        preparation=session.task.prepared.preparer.graph if session.task.prepared else None,
        class_names=tuple(session.task.class_names),
    )
    return export_personal(Path(path), source, session.engine, session.task)


def default_name() -> str:
    """Return the host's name, in which characters that a device name may not hold are replaced."""
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return name.strip("._-")[:64] or "device"


def check_name(name: str) -> None:
    """Raise BadArgument unless ``name`` can be a device's."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise BadArgument(
            f"{name!r} cannot be a device's name: up to 64 letters, digits, dots, dashes and underscores, the first a "
            f"letter or digit; choose another --device-name"
        )


def check_writable(path: Path) -> None:
    """Raise BadArgument unless a file can be written at ``path``: better now than after the training."""
    if path.is_dir():
        raise BadArgument(f"{path} is a folder; give --export a file in it, such as {path / 'model.onnx'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadArgument(f"{path} cannot be written ({error.strerror}); give another --export") from None


def _command(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    allocator.give_back()
    given = {each.name: getattr(options, each.name) for each in fields(JoinOptions) if hasattr(options, each.name)}
    given["policy"] = _policy(options.policy, dict(options.limit))
    chosen = JoinOptions(**given, patience_seconds=options.wait, trust=tls.from_options(options))
    try:
        result = join(
            options.server,
            data=with_skipped(options.data, options),
            federation=options.federation,
            name=options.device_name,
            state_dir=options.state_dir,
            export=options.export,
            options=chosen,
            quiet=options.quiet,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("left the federation; the same command goes on where this device was") from None
    with EnergyMeter(model=options.watts) as meter:
        print((as_json if options.json else report)(result, meter.describe()))
    if result.trained_nothing and not result.interrupted:
        raise NothingTrained(
            f"{result.name} has trained nothing: {failed(result.failures)}, the last so: {result.failure}"
        )


def _options(parser: Parser) -> None:
    add_server(parser)
    read.add_federation_to_join(parser)
    parser.add_argument("--device-name", metavar="NAME", help="unique in the federation (default: the host's name)")
    parser.add_argument("--data", help="this device's data, as its task wants it: a file or folder, or index=0,of=5")
    add_skip_unreadable(parser)
    parser.add_argument("--state-dir", type=Path, help="where the device keeps its model and identity")
    parser.add_argument(
        "--budget",
        type=_budget,
        help="share of each layer's neurons to train, 0 < B <= 1: bounds bytes more than time; auto: what "
        "this device can afford (default: auto)",
    )
    parser.add_argument(
        "--policy",
        default="auto",
        metavar="FILE",
        help="when this device may work: a TOML file, none, or auto: as suits its kind (default: %(default)s)",
    )
    read.add_pairs(parser, "--limit", "a limit of the policy, such as hours=22:00-07:00; may be repeated")
    add_help_settings(parser, Policy, "the limits of a policy")
    parser.add_argument("--export", type=Path, help="write the personal model here, as the smallest ONNX file")
    parser.add_argument(
        "--watts", type=_watts, help="IDLE:MAX watts of this board, to estimate joules without a sensor"
    )
    add_wait(parser, None)
    add_compute(parser)
    parser.add_argument("--threads", type=read.count, help="CPU threads (default: what is fastest)")
    parser.add_argument(
        "--deterministic", action="store_true", help="on the CPU, nothing chosen by speed: same bits again"
    )
    parser.add_argument(
        "--memory-limit",
        type=read.mebibytes,
        metavar="MIB",
        help="what this process may hold (default: what there is)",
    )
    parser.add_argument(
        "--require-secure",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="send updates under masks alone, where N devices may collude",
    )
    parser.add_argument(
        "--known-devices",
        type=Path,
        metavar="FILE",
        help="likewise, and with these devices alone: lines NAME KEY",
    )
    parser.add_argument(
        "--publisher",
        metavar="FINGERPRINT",
        help="train only a model signed by this publisher (default: the first one met)",
    )
    parser.add_argument("--pin-model", action="store_true", help="accept no replacement of the model")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="RANGE",
        help="train only in rounds such as cohort>=10 or local_steps>=5; may be repeated",
    )
    parser.add_argument(
        "--plain-metrics",
        action="store_true",
        help="report losses in clear where a secure federation asks for that",
    )
    parser.add_argument(
        "--own-frozen",
        action="store_true",
        help="do not share frozen values with other federations on this machine: download them for this one",
    )
    parser.add_argument(
        "--local-noise",
        type=float,
        metavar="Z",
        help="add noise to every value sent, Z times the clip, and report no losses",
    )
    parser.add_argument(
        "--local-clip", type=float, metavar="C", help="with it, the largest 2-norm of an update (default: 1)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--verbose", action="store_true", help="say more")
    add_json(parser)
    tls.add_options(parser)


def _budget(text: str) -> float | None:
    return None if text == "auto" else read.budget(text)


def _policy(text: str, limits: Mapping[str, str]) -> Policy:
    """Return the policy that the options ask for. Raises BadArgument."""
    if text == "none":
        chosen = Policy()
    elif text == "auto":
        chosen = policy_here(System.here())
    else:
        chosen = read_policy(Path(text))
    return chosen.changed(limits)


def _watts(text: str) -> PowerModel:
    try:
        return PowerModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


COMMAND = Command(
    "edge_sdk.join",
    "Take part in a federation until it is finished, as a device.",
    _options,
    _command,
    usage="[--server URL] [--federation NAME] [options]",
    epilog="SPARROW_ENROLMENT_TOKEN holds the enrolment token where the coordinator asks for one.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
