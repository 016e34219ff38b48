"""``sparrow join --server URL``: take part in a federation until it is finished.

After an interruption, the same command resumes.
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
from sparrow.command_line.table import printable
from sparrow.devices import EnergyMeter, PowerModel
from sparrow.devices.conditions import Conditions, ConditionsReader
from sparrow.devices.system import System
from sparrow.export.errors import ExportError
from sparrow.export.source import Source
from sparrow.protocol import personal
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.failures import Failure, nothing_trained
from sparrow.protocol.fields import NAME_PATTERN
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Assignment, FederationInfo, FederationStatus
from sparrow.protocol.signatures import is_fingerprint
from sparrow.protocol.tags import BadSelection, check_form
from sparrow.reading.errors import DataError
from sparrow.transport import connect, httpx, refuse_foreign, tls

from . import arguments as read
from .arguments import check_federation_name, check_ranges
from .budget.preparation import DoesNotFit, Preparation, check_budget
from .budget.search import read_learned
from .device.connection import token_of
from .device.embedding import DeviceProgress, ProgressReporter, Settable, Stop, Stopped
from .device.local_noise import LocalNoise
from .device.opening import add_compute, choose_compute
from .device.policy import Policy, policy_here, read_policy
from .device.result import Result, as_json, failed, refused, report, result_before, result_of
from .device.session import FAILURES, Outcome, Session, SessionOptions
from .device.state import StateFolder, default_root
from .device.telemetry import Telemetry
from .device.transport import Transport
from .device.watchdog import Watchdog, read_spent
from .engines import EngineChoice
from .errors import (
    BadArgument,
    FederationDeleted,
    NotFound,
    NothingTrained,
    SdkError,
    failure_of,
    translated,
)
from .tasks import Task, is_module, load_data_of

if TYPE_CHECKING:
    from .device.exporting import Export

LONG_POLL_SECONDS = 30.0
# Used if a program may stop this device: a request to stop is seen only after the coordinator has answered.
STOPPABLE_POLL_SECONDS = 2.0

DEFAULT = "default"
# Federations whose data are compared if no name was given.
MOST_TRIED = 10

# Files in the state folder: corrections of the budget's predictions, and today's spending.
LEARNED = "learned.json"
SPENT = "spent.json"


@dataclass(frozen=True)
class JoinOptions:
    """How a device trains, and the rounds it accepts. Raises BadArgument for an invalid value.

    budget: share of each layer's neurons to train, in (0, 1] (docs/budget.md); None: determine an affordable one before
    every round (``edge_sdk.budget.search``). policy: when to work; None: always. conditions: default: this machine's
    sensors. watts: power model, to estimate joules on a board without a sensor.

    engine: ``torch``; ``onnx``: ONNX Runtime, for federations with a training step; ``auto``: ONNX Runtime if
    federation and method allow it and there is no GPU. accelerator: one of ``compute.ACCELERATORS``. bfloat16: in
    forward passes, under torch's autocast. deterministic: bit-reproducible training on the CPU. memory_limit: bytes for
    this process; None: all available memory.

    require_secure: send only masked updates, in rounds that tolerate this many colluders (docs/privacy.md).
    known_devices: the same, and only with the devices in this file of lines ``NAME KEY``. publisher: fingerprint of the
    only trusted publisher; None: trust the first one met, and remember it. pin_model: refuse replacements of the model.
    require: ranges that a round's settings must keep, such as ``cohort>=10``. plain_metrics: report unmasked losses and
    accuracies if a secure federation asks for them. own_frozen: do not share frozen values with this user's other
    federations, so that downloads do not reveal them. local_noise: standard deviation of Gaussian noise added to each
    sent value, in multiples of local_clip; losses are not reported. local_clip: largest 2-norm of an update before
    noise; None: 1.

    enrolment_token: default: SPARROW_ENROLMENT_TOKEN. patience_seconds: longest wait for a coordinator that does not
    answer; None: no limit. first_seconds: the same before its first answer; None: patience_seconds. take_over: continue
    with a copied or restored state folder, and refuse its other copies. tags: the device's, such as board=orin; None:
    those that it gave before. trust: certificates for https.
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
    first_seconds: float | None = None
    take_over: bool = False
    tags: Mapping[str, str] | None = None
    trust: tls.Tls | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)
        for name in ("threads", "memory_limit"):
            value = getattr(self, name)
            if value is not None and not _is_whole(value, 1):
                raise BadArgument(f"{name}={value!r} is invalid; give a positive integer, or None")
        for name in ("patience_seconds", "first_seconds"):
            patience = getattr(self, name)
            if patience is not None and not (isinstance(patience, int | float) and patience >= 0):
                raise BadArgument(f"{name}={patience!r} is invalid; use seconds of at least 0, or None")
        if self.require_secure is not None and not _is_whole(self.require_secure, 0):
            raise BadArgument(
                f"require_secure={self.require_secure!r} is invalid; give the number of devices that may collude, 0 "
                f"or more, or None"
            )
        if self.publisher is not None and not (isinstance(self.publisher, str) and is_fingerprint(self.publisher)):
            raise BadArgument(
                f"publisher={self.publisher!r} is not a fingerprint; give the eight groups of four hexadecimal digits "
                f"that sparrow publish printed"
            )
        if self.tags is not None:
            try:
                check_form(self.tags)
            except BadSelection as error:
                raise BadArgument(str(error)) from None

    def demands(self) -> Demands:
        """Return the demands on rounds. Raises BadArgument for an invalid range or an unreadable file."""
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
    federation: str | None = None,
    name: str | None = None,
    state_dir: Path | str | None = None,
    export: Path | str | None = None,
    options: JoinOptions = USUAL,
    client: httpx.Client | None = None,
    on_progress: Callable[[DeviceProgress], None] | None = None,
    stop: Settable | Callable[[], bool] | None = None,
    quiet: bool = False,
) -> Result:
    """Take part in ``federation`` (None: ``default``) until it is finished.

    task: a Task, a function that makes one from the federation's settings, or the name of the federation's task (None:
    that task). data: this device's data for a named task, as in ``sparrow join --data``. name: unique in the
    federation; default: the host's name. state_dir: folder of the personal model and the identity; the same folder
    resumes. export: ONNX file for the personal model. client: replaces a new HTTP client for ``server``.

    on_progress: called on this thread after each training step and in each phase, replacing the progress bar and
    messages; an exception it raises ends the work. stop: an Event, or a function that returns True to stop. Stopping
    returns open work, keeps the personal model of the last complete round, and sets ``interrupted`` in the result.

    Raises SdkError, among them BadArgument for an invalid argument or task, DoesNotFit if the budget needs more memory,
    and NothingTrained if the device ends without a personal model, or if its first ``FAILURES`` rounds fail in a row.
    """
    refuse_foreign(client)
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
    chosen = DEFAULT if federation is None else federation
    check_federation_name(chosen)
    # Without a name, data that do not fit ``default`` may be for another federation.
    forgotten = federation is None and (task is None or isinstance(task, str))
    unnamed = name is None
    name = default_name() if name is None else name
    check_name(name)
    make_task = _task_maker(task, data, name)
    if export is not None:
        check_writable(Path(export))
    bar = Bar(quiet)
    tell = ProgressReporter(on_progress or bar.show, quiet=quiet)
    tell.phase("opening")
    with ExitStack() as stack:
        own = client or stack.enter_context(connect(server, options.trust))
        transport = Transport(
            own,
            patience_seconds=options.patience_seconds,
            first_seconds=options.first_seconds,
            on_wait=partial(tell.unreachable, server),
            on_answer=tell.connected_again,
            sleep=halt.sleep,
        )
        transport.token = options.enrolment_token or token_of("enrolment")
        if not state_dir:
            root = default_root(server, chosen)
            if unnamed:
                _check_renamed(root, name)
            state_dir = root / name
        folder = StateFolder(Path(state_dir))
        stack.callback(folder.close)
        stack.callback(bar.close)
        meter = stack.enter_context(EnergyMeter(model=options.watts))
        try:
            halt.check()
            session = Session(
                transport,
                folder,
                federation=chosen,
                name=name,
                make_task=lambda info, manifest: replace(make_task(info, manifest), compute=compute),
                options=replace(
                    _session_options(options, folder, meter, tell, halt, demands, noise, engine),
                    report_failure=not forgotten,
                ),
            )
        except (NotFound, BadArgument, DataError, ManifestError) as error:
            if not forgotten or folder.enrolled or isinstance(error, DoesNotFit):
                raise
            folder.discard_new()
            raise _naming_fitting(error, transport, make_task, given=data is not None) from None
        except Stopped:
            return result_before(folder.progress(), name, 1.0 if options.budget is None else options.budget, noise)
        tell.hint(f"{name} keeps its state in {folder.path}")
        tell.begin(session)
        _say_terms(session, noise, tell)
        export_now = partial(_export, session, name, export)
        interrupted = _work_until_over(session, tell, halt, export_now)
        result = result_of(session, name, export_now(), interrupted, noise)
        for text in result.warnings:
            tell.say(text)
        return result


def _naming_fitting(
    error: SdkError, transport: Transport, make_task: Callable[[FederationInfo, Manifest], Task], *, given: bool
) -> SdkError:
    """Return the error for a federation that was not named, with the names that this device's data fit.

    error: the federation ``default`` is missing or does not fit. given: whether the user gave data.
    """
    missing = isinstance(error, NotFound)
    if not missing and not given:
        return error
    try:
        there = transport.federations()
        others = [info for info in there if info.name != DEFAULT]
        # The missing thing may be another than the federation.
        if missing and len(others) < len(there):
            return error
        fitting = [info.name for info in others[:MOST_TRIED] if _fits(transport, info, make_task)]
    except (SdkError, Stopped):
        return error
    if not fitting:
        return error
    named = f"--federation {' or '.join(fitting)}"
    if missing:
        return NotFound(404, f"there is no federation {DEFAULT!r}; this device's data fit {named}")
    return BadArgument(f"this device's data fit {named}, and not the federation {DEFAULT!r} ({error})")


def _fits(transport: Transport, info: FederationInfo, make_task: Callable[[FederationInfo, Manifest], Task]) -> bool:
    try:
        make_task(info, transport.manifest(info.name))
    except SdkError:
        return False
    return True


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
        # After the last step, the update is sent before the device stops.
        if done < total:
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
        take_over=options.take_over,
        tags=None if options.tags is None else dict(options.tags),
    )


def _say_terms(session: Session, noise: LocalNoise | None, tell: ProgressReporter) -> None:
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


def _say_awaited(session: Session, tell: ProgressReporter) -> None:
    """Say once why the federation opens no round yet."""
    if tell.quiet:
        return
    try:
        info = session.transport.federation(session.info.name)
    except SdkError:
        # The next call reports it.
        return
    missing = info.settings.min_devices - info.devices
    if info.status is FederationStatus.waiting and missing > 0:
        tell.hint(f"waiting for {missing} more device{'s' * (missing > 1)} (min_devices={info.settings.min_devices})")
    elif info.status is FederationStatus.paused:
        tell.hint(f"waiting: the federation {info.name} is paused")
    elif info.waiting_for:
        tell.hint(f"waiting for {printable(info.waiting_for)}")


def _work_until_over(session: Session, tell: ProgressReporter, halt: Stop, export: Callable[[], Export | None]) -> bool:
    """Take part until the federation is over; return True if stopped before."""
    try:
        # Stored now, so that the personal model can be exported without the coordinator later.
        with suppress(SdkError):
            session.skeleton()
        _say_awaited(session, tell)
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
    except BadArgument:
        # A batch that was not checked at the start is invalid.
        session.leave(Failure("data-unusable"))
        raise
    except SdkError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        # Report the failure, so that the round does not wait for this device.
        session.leave(failure_of(error))
        raise
    return False


def _task_maker(task: Any, data: str | None, device: str) -> Callable[[FederationInfo, Manifest], Task]:
    named = task is None or isinstance(task, str)
    if data is not None and not named:
        raise BadArgument("data needs a task known by name; leave it out if the task has its own data")
    if not named and not isinstance(task, Task) and (is_module(task) or not callable(task)):
        raise BadArgument(
            f"task is a {type(task).__name__}; give a Task: Task(name, model, loss, train, validation), or a function "
            f"that makes one from the federation's settings, or the name of the federation's task"
        )

    def make(info: FederationInfo, manifest: Manifest) -> Task:
        if named and task not in (None, info.task):
            raise BadArgument(f"the federation {info.name} trains {info.task!r}, not {task!r}; use {info.task!r}")
        if named:
            settings = info.settings
            return load_data_of(manifest, data, device=device, seed=settings.seed, batch_size=settings.batch_size)
        made = task if isinstance(task, Task) else task(info)
        if not isinstance(made, Task):
            raise BadArgument(f"the task function returns a {type(made).__name__}; return a Task")
        return made

    return make


def _nothing_trained(session: Session, name: str) -> NothingTrained:
    rounds = session.progress.rounds
    if session.progress.refused:
        did = f"{name} took part in {rounds} rounds, but the coordinator accepted none of its updates"
    elif rounds:
        did = f"{name} took part in {rounds} rounds, but has no personal model"
    else:
        did = f"{name} has trained nothing"
    if session.last_failure is None:
        return NothingTrained(
            f"{did}: the federation is finished; join one that runs, or ask its operator to reopen it"
        )
    failed_rounds = session.failed_rounds
    tries = "the last round failed" if failed_rounds < FAILURES else f"{failed_rounds} rounds in a row failed"
    return NothingTrained(f"{did}: {tries}: {session.last_failure}")


def _watchdog(
    policy: Policy,
    read: Callable[[], Conditions],
    folder: StateFolder,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> Watchdog:
    watchdog = Watchdog(
        policy,
        read,
        sleep=sleep,
        say=say,
        spent=read_spent(folder.cached(SPENT)),
        keep=lambda spent: folder.cache(SPENT, spent.model_dump_json().encode()),
    )
    # Predictions of round times depend on whether the temperature can be read.
    watchdog.look()
    return watchdog


def run_session(session: Session, tell: ProgressReporter, halt: Stop, export: Callable[[], Export | None]) -> None:
    """Take steps until the federation is over, with an export after early stopping.

    Raises Stopped if the program asks the device to stop.
    """
    stopped = session.progress.stopped_round
    wait = STOPPABLE_POLL_SECONDS if halt.possible else LONG_POLL_SECONDS
    while True:
        halt.check()
        step = session.step(wait)
        if step.outcome is Outcome.over:
            return
        tell.between(paused=step.paused is not None)
        if session.failed_rounds >= FAILURES and not session.progress.succeeded:
            session.leave(nothing_trained(session.reported_failure))
            raise _nothing_trained(session, session.name)
        if session.progress.stopped_round not in (None, stopped):
            stopped = session.progress.stopped_round
            try:
                exported = export()
            except (OSError, ExportError) as error:
                exported = None
                tell.say(f"the personal model could not be exported yet: {error}")
            saved = f"; its personal model is {exported.path}" if exported else ""
            tell.say(
                f"training stopped early in round {session.progress.stopped_round}{saved}. The device stays to answer "
                f"evaluations; press Ctrl-C to leave"
            )
        if step.outcome is Outcome.idle:
            # Not rounded: the coordinator spreads the devices' calls over time.
            halt.sleep(step.pause_seconds)


def _export(session: Session, name: str, path: Path | str | None) -> Export | None:
    tensors = None if path is None else session.best
    if path is None or tensors is None:
        return None
    # Imported here, because most devices do not export.
    from .device.exporting import export_personal

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
    exported = export_personal(Path(path), source, session.engine, session.task)
    session.note_exported()
    return exported


def default_name() -> str:
    """Return the host's name as a valid device name."""
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return name.strip("._-")[:64] or "device"


def _check_renamed(root: Path, name: str) -> None:
    """Raise BadArgument if only devices of other names have their state in ``root``."""
    others = sorted(path.parent.name for path in root.glob("*/identity.json"))
    if others and name not in others:
        raise BadArgument(
            f"this machine has the state of {', '.join(others[:5])}, and its host name is {name}; give --device-name: "
            f"{others[0]} continues with that state, {name} joins as a new device"
        )


def check_name(name: str) -> None:
    """Raise BadArgument unless ``name`` is a valid device name."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise BadArgument(
            f"{name!r} cannot be a device's name; give a --device-name of up to 64 letters, digits, dots, dashes and "
            f"underscores that begins with a letter or digit"
        )


def check_writable(path: Path) -> None:
    """Create the parent folder of ``path``, and raise BadArgument if the file cannot be written."""
    if path.is_dir():
        raise BadArgument(f"{path} is a folder; give --export a file in it, such as {path / 'model.onnx'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadArgument(f"{path} cannot be written ({error.strerror}); give another --export") from None


# Seconds for the first answer, on a terminal.
FIRST_SECONDS = 60.0


def _command(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger(httpx.__name__).setLevel(logging.WARNING)
    allocator.give_back()
    given = {each.name: getattr(options, each.name) for each in fields(JoinOptions) if hasattr(options, each.name)}
    given["policy"] = _policy(options.policy, dict(options.limit))
    given["tags"] = dict(options.tag) or None
    # A person sees that nothing happens and can correct the address; a service waits for its coordinator.
    first = FIRST_SECONDS if options.wait is None and sys.stderr.isatty() else None
    chosen = JoinOptions(**given, patience_seconds=options.wait, first_seconds=first, trust=tls.from_options(options))
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
        raise KeyboardInterrupt("left the federation; run the same command to resume") from None
    with EnergyMeter(model=options.watts) as meter:
        print((as_json if options.json else report)(result, meter.describe()))
    if result.interrupted:
        return
    if result.trained_nothing:
        raise NothingTrained(
            f"{result.name} has trained nothing: {failed(result.failures)}; the last error: {result.failure}"
        )
    if result.nothing_accepted:
        raise NothingTrained(f"{result.name}: {refused(result)}; the last refusal: {result.failure}")


def _options(parser: Parser) -> None:
    add_server(parser)
    read.add_federation_to_join(parser, None)
    parser.add_argument("--device-name", metavar="NAME", help="unique in the federation (default: the host's name)")
    parser.add_argument("--data", help="this device's data: a file, a folder, or index=0,of=5, as its task expects")
    add_skip_unreadable(parser)
    parser.add_argument("--state-dir", type=Path, help="folder for the device's model and identity")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="continue with a copied or restored state folder, and refuse its other copies",
    )
    read.add_pairs(parser, "--tag", "tag this device, such as board=orin; may be repeated")
    parser.add_argument(
        "--budget",
        type=_budget,
        help="share of each layer's neurons to train, 0 < B <= 1; auto: what this device can afford (default: auto)",
    )
    parser.add_argument(
        "--policy",
        default="auto",
        metavar="FILE",
        help="when to work: a TOML file, none, or auto: depends on the kind of device (default: %(default)s)",
    )
    read.add_pairs(parser, "--limit", "set a limit of the policy, such as hours=22:00-07:00; may be repeated")
    add_help_settings(parser, Policy, "the limits of a policy")
    parser.add_argument("--export", type=Path, help="write the personal model to this ONNX file")
    parser.add_argument(
        "--watts", type=_watts, help="IDLE:MAX watts of this board, to estimate energy without a sensor"
    )
    add_wait(parser, None)
    add_compute(parser)
    parser.add_argument("--threads", type=read.count, help="CPU threads (default: the fastest number)")
    parser.add_argument(
        "--deterministic", action="store_true", help="train on the CPU and reproduce the same bits on every run"
    )
    parser.add_argument(
        "--memory-limit",
        type=read.mebibytes,
        metavar="MIB",
        help="memory for this process (default: all available memory)",
    )
    parser.add_argument(
        "--require-secure",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="send only masked updates, in rounds that tolerate N colluding devices",
    )
    parser.add_argument(
        "--known-devices",
        type=Path,
        metavar="FILE",
        help="send only masked updates, with the devices in FILE: lines NAME KEY",
    )
    parser.add_argument(
        "--publisher",
        metavar="FINGERPRINT",
        help="train only a model signed by this publisher (default: the first publisher seen)",
    )
    parser.add_argument("--pin-model", action="store_true", help="refuse replacements of the model")
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
        help="report losses unmasked if a secure federation asks for them",
    )
    parser.add_argument(
        "--own-frozen",
        action="store_true",
        help="download frozen values for this federation only; do not share them with others on this machine",
    )
    parser.add_argument(
        "--local-noise",
        type=float,
        metavar="Z",
        help="add noise of Z times --local-clip to every sent value, and do not report losses",
    )
    parser.add_argument(
        "--local-clip", type=float, metavar="C", help="largest 2-norm of an update before noise (default: 1)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--verbose", action="store_true", help="log more")
    add_json(parser)
    tls.add_options(parser)


def _budget(text: str) -> float | None:
    return None if text == "auto" else read.budget(text)


def _policy(text: str, limits: Mapping[str, str]) -> Policy:
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
    epilog="Set SPARROW_ENROLMENT_TOKEN if the coordinator requires an enrolment token.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
