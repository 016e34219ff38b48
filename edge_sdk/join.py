"""``sparrow join --server URL``: this device takes part in a federation until it is finished.

As a library: ``join(server, task, ...)`` with a ``Task`` of one's own.

Interrupted, the same command goes on where the device was. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .device.demands import Demands, SecureOnly, read_known
from .device.trainable import exit_unless_trainable

__all__ = ["Result", "join"]

if __name__ == "__main__":
    exit_unless_trainable("edge_sdk.join", None)  # before what follows imports what needs 64 bits

import httpx
from tqdm import tqdm

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
from sparrow.protocol.messages import Assignment, Evaluation, FederationInfo, Moved
from sparrow.protocol.signatures import is_fingerprint

from . import arguments as read
from .arguments import check_federation_name, check_ranges, read_setting
from .budget.preparation import Preparation, check_budget
from .budget.search import Choice, read_learned
from .device.embedding import DeviceProgress, ProgressReporter, Settable, Stop, Stopped
from .device.local_noise import DELTA, LocalNoise, epsilon
from .device.opening import choose_compute
from .device.policy import Policy, policy_here, read_policy
from .device.session import FAILURES, Outcome, Session
from .device.state import Progress, StateFolder, Totals, default_root
from .device.telemetry import Telemetry
from .device.transport import Transport, connect, token_of
from .device.watchdog import Watchdog, read_spent
from .engines import EngineChoice
from .errors import BadArgument, FederationDeleted, NothingTrained, SdkError, failure_of, translated
from .tasks import Task, is_module, load_data_of
from .tasks.compute import ACCELERATORS

if TYPE_CHECKING:
    from .device.exporting import Export

LONG_POLL_SECONDS = 30.0
STOPPABLE_POLL_SECONDS = 2.0
"""The same where a program may ask this device to stop, which is not seen before the coordinator has answered."""

BETWEEN = ("waiting", "paused", "stopped")
"""Phases in which no round of the device is open."""

LEARNED, SPENT = "learned.json", "spent.json"
"""Files of the state folder: what rounds have taught about the budget, and what was spent today."""


@dataclass(frozen=True)
class Result:
    """The record of a device's work in a federation. Accuracies are on its held-out data, None where there are none.

    ``best_round``: the round whose personal model is kept and exported, the best on validation data, with
    ``global_share`` of the global model mixed into it; None where it is the last one. ``taken``: which of its
    candidates it is, where all devices chose together (``protocol.evidence``); else "". ``adapted``: it came after the
    end, and its personal model is the global one, fine-tuned on its data. ``training`` and ``evaluation`` are what each
    cost; ``everything`` counts the bodies of all calls, these included. ``budget`` is the last one, ``choice`` how the
    device came to it; None where it was given. ``engine`` trained. ``metrics`` are the task's, of the model that is
    kept. ``warnings`` say what its user should know of the personal model. ``interrupted``: its program has stopped it
    before the federation was over, and a further call goes on from here; ``engine`` is empty, and nothing is judged or
    exported, where that was before the coordinator had answered. ``failures``: rounds in which training failed, and
    ``failure`` why in the last of them. ``local_epsilon``: of all updates sent so far, at a delta of 1e-5
    (``device.local_noise``); None without local noise.
    """

    name: str
    rounds: int
    steps: int
    stopped_round: int | None
    best_round: int | None
    global_share: float
    adapted: bool
    accuracy_before: float | None
    accuracy_after: float | None
    training: Totals
    evaluation: Totals
    everything: Moved
    export: Export | None
    engine: str
    budget: float = 1.0
    choice: Choice | None = None
    warnings: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False
    failures: int = 0
    failure: str | None = None
    local_epsilon: float | None = None
    taken: str = ""

    @property
    def trained_nothing(self) -> bool:
        """True if this device was given rounds and training failed in all of them."""
        return self.failures > 0 and not self.rounds


@translated()
def join(
    server: str,
    task: Task | str | Callable[[FederationInfo], Task] | None = None,
    *,
    data: str | None = None,
    federation: str = "default",
    name: str | None = None,
    state_dir: Path | str | None = None,
    budget: float | None = None,
    policy: Policy | None = None,
    conditions: Callable[[], Conditions] | None = None,
    export: Path | str | None = None,
    enrolment_token: str | None = None,
    patience_seconds: float | None = None,
    watts: PowerModel | None = None,
    accelerator: str = "auto",
    threads: int | None = None,
    bfloat16: bool = False,
    deterministic: bool = False,
    engine: EngineChoice = "auto",
    memory_limit: int | None = None,
    require_secure: int | None = None,
    known_devices: Path | str | None = None,
    publisher: str | None = None,
    pin_model: bool = False,
    require: Sequence[str] = (),
    plain_metrics: bool = False,
    own_frozen: bool = False,
    local_noise: float | None = None,
    local_clip: float | None = None,
    trust: tls.Tls | None = None,
    client: httpx.Client | None = None,
    on_progress: Callable[[DeviceProgress], None] | None = None,
    stop: Settable | Callable[[], bool] | None = None,
    quiet: bool = False,
) -> Result:
    """Take part in ``federation`` until it is finished, and return what this device did.

    task: the learning problem, or a function that makes it from the federation's settings, or the name of the
    federation's task, which is also what None means. data: this device's data, of a task known by name, as ``--data``
    of ``sparrow join`` has it. name: unique in the federation, the host's name by default. state_dir: where the device
    keeps its personal model and identity; a second call with the same folder goes on where the first was. budget: share
    of each layer's neurons that it trains, in (0, 1], which bounds bytes more than time (docs/budget.md); None has it
    find out what it can afford, and look again after every round (``edge_sdk.budget.search``). policy: when it may
    work; None: always. conditions: what it is like now, this machine's sensors by default. export: where to write the
    personal model as ONNX. enrolment_token: where the coordinator asks for one; without, that of
    SPARROW_ENROLMENT_TOKEN. patience_seconds: how long to wait for a coordinator that does not answer; None: for ever.
    watts: power model for estimated joules on a board without a sensor. accelerator: one of ``compute.ACCELERATORS``.
    threads: of the processor. bfloat16: forward passes in bfloat16 where torch's autocast thinks it safe.
    deterministic: on the processor, and in the memory format that follows from the model, not in what was measured to
    be fastest. engine: what trains: ``torch``; ``onnx``, ONNX Runtime, which needs the task's data alone, no PyTorch,
    and a federation with a training step; or ``auto``: ONNX Runtime where federation and method allow it and there is
    no GPU. memory_limit: bytes that training may take, all that the process holds included; by default what there is.
    require_secure: send updates under masks alone, in rounds that bear so many colluders (docs/privacy.md).
    known_devices: likewise, and with no others than those of this file of lines ``NAME KEY``. publisher: the
    fingerprint of the only publisher whose model is trained; None: the first one that this device meets in the
    federation, which it remembers. pin_model: accept no replacement of the model. require: ranges of settings that
    rounds must keep to, such as ``cohort>=10``. plain_metrics: report losses and accuracies in clear where a secure
    federation asks for that. own_frozen: neither take frozen values from other federations of this user nor leave them
    for others, so that downloads do not reveal in which federations this user takes part (docs/privacy.md).
    local_noise: add Gaussian noise to each value that is sent, of this many times local_clip, and report no losses
    (docs/privacy.md). local_clip: the largest 2-norm of an update before the noise; None: 1. trust: certificates for
    https. on_progress: called on this thread, in place of the bar and the lines that this function writes otherwise,
    after each step of training and with each phase; what it raises ends the work, as Ctrl-C does. stop: a
    threading.Event, or a function that returns whether to stop; looked at between two steps of training and, while the
    device waits, every few seconds. The work is handed back then, the personal model stays as the last whole round has
    left it, and the result is ``interrupted``. quiet: no progress bar.

    Raises SdkError: BadArgument among them for an argument, or a task, that cannot work (``tasks.checking``),
    DoesNotFit where the budget needs more memory, NothingTrained where the device has no model of its own in the end,
    or ``FAILURES`` rounds in a row have failed and none has been trained. When something else ends it, such as Ctrl-C,
    it says goodbye to the coordinator first.
    """
    halt = Stop(stop)
    if on_progress is not None and not callable(on_progress):
        raise BadArgument(f"on_progress is a {type(on_progress).__name__}; give a function of one DeviceProgress")
    _check_numbers(budget, threads, memory_limit, patience_seconds)
    demands = Demands(
        _secure_only(require_secure, known_devices),
        _fingerprint(publisher),
        pin_model,
        check_ranges(require, "require"),
        plain_metrics,
        own_frozen,
    )
    noise = LocalNoise.asked(local_noise, local_clip)
    engine, compute = choose_compute(engine, accelerator, threads, bfloat16=bfloat16, deterministic=deterministic)
    check_federation_name(federation)
    name = default_name() if name is None else name
    check_name(name)
    make_task = _task_maker(task, data, name)
    if export is not None:
        check_writable(Path(export))
    bar = _Bar(quiet)
    tell = ProgressReporter(on_progress or bar.show)
    tell.phase("opening")

    def progressed(assignment: Assignment, done: int, total: int, loss: float) -> None:
        tell.training(assignment, done, total, loss)
        if done < total:  # a whole round is sent before the device stops
            halt.check()

    with ExitStack() as stack:
        own = client or stack.enter_context(connect(server, trust))
        folder = StateFolder(Path(state_dir) if state_dir else default_root(server, federation) / name)
        stack.callback(folder.close)
        stack.callback(bar.close)
        if not quiet:
            tell.say(f"{name} keeps its state in {folder.path}")
        with EnergyMeter(model=watts) as meter:
            transport = Transport(own, patience_seconds=patience_seconds, on_wait=tell.unreachable, sleep=halt.sleep)
            transport.token = enrolment_token or token_of("enrolment")
            read_conditions = conditions or ConditionsReader(System.here(), storage=folder.path).read
            asked = policy if policy is not None and policy.asks else None
            watchdog = _watchdog(asked, read_conditions, folder, tell.say, halt.sleep) if asked else None
            try:
                halt.check()
                session = Session(
                    transport,
                    folder,
                    federation=federation,
                    name=name,
                    make_task=lambda info, manifest: replace(make_task(info, manifest), compute=compute),
                    budget=1.0 if budget is None else budget,
                    engine=engine,
                    telemetry=lambda traffic: Telemetry(meter, traffic, read=read_conditions, on_phase=tell.phase),
                    progress=progressed,
                    prepare=Preparation(
                        budget,
                        deterministic,
                        memory_limit,
                        duty=(lambda: watchdog.duty) if watchdog else lambda: 1.0,
                        learned=read_learned(folder.cached(LEARNED)),
                        keep=lambda learned: folder.cache(LEARNED, learned.model_dump_json().encode()),
                    ),
                    watchdog=watchdog,
                    demands=demands,
                    local_noise=noise,
                    memory_limit=memory_limit,
                )
            except Stopped:
                return _result_before(folder.progress(), name, 1.0 if budget is None else budget, noise)
            tell.begin(session)
            tell.say(session.trust.line)
            if session.identity_key is not None:
                tell.say(f"the identity key of {name} in secure rounds is {session.identity_key}")
            if noise is not None:
                tell.say(noise.described(session.progress.updates))
            for text in (*session.task.said, *(f"warning: {here}" for here, _ in session.differences)):
                tell.say(text)
            _say_budget(session.choice, tell)
            interrupted = False
            try:
                with suppress(SdkError):  # so that the personal model can be exported later, away from the coordinator
                    session.skeleton()
                run_session(session, tell, halt, lambda: _export(session, name, export))
                if session.personal is None:
                    raise _nothing_trained(session, name)
            except Stopped:
                interrupted = True
                session.leave(Failure("interrupted/program"))
            except FederationDeleted:
                if (exported := _export(session, name, export)) is not None:
                    tell.say(f"the personal model is {exported.path}")
                raise
            except BadArgument:  # of a batch that was not looked at before
                session.leave(Failure("data-unusable"))
                raise
            except SdkError:
                raise
            except KeyboardInterrupt as error:
                bar.close()
                session.leave(failure_of(error))
                raise
            except Exception as error:
                # Out of memory, a loss that raises: this device cannot go on, but nobody need wait for it.
                session.leave(failure_of(error))
                raise
            exported = _export(session, name, export)
            result = _result(session, name, exported, interrupted, noise)
            for text in result.warnings:
                tell.say(text)
            return result


def _fingerprint(text: object) -> str | None:
    """Return the fingerprint of a publisher. Raises BadArgument."""
    if text is None or (isinstance(text, str) and is_fingerprint(text)):
        return text
    raise BadArgument(
        f"publisher={text!r} is no fingerprint; give the eight groups of four hexadecimal digits that sparrow publish "
        f"has printed"
    )


def _secure_only(require_secure: object, known_devices: Path | str | None) -> SecureOnly | None:
    """Return what this device demands of rounds. Raises BadArgument."""
    if require_secure is None and known_devices is None:
        return None
    least = 0 if require_secure is None else require_secure
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise BadArgument(
            f"require_secure={least!r} cannot work; give how many devices may collude, from 0 on, or None"
        )
    return SecureOnly(least, None if known_devices is None else read_known(known_devices))


def _task_maker(task: object, data: str | None, device: str) -> Callable[[FederationInfo, Manifest], Task]:
    """Return the function that makes the task. Raises BadArgument for any other object."""
    if task is None or isinstance(task, str):
        return _named_task_maker(task, data, device)
    if data is not None:
        raise BadArgument("data belongs to a task known by name; leave it out where the task has its data")
    if isinstance(task, Task):
        return lambda info, manifest: task
    if is_module(task) or not callable(task):
        raise BadArgument(
            f"task is a {type(task).__name__}; give a Task: Task(name, model, loss, train, validation), or a function "
            f"that makes one from the federation's settings, or the name of the federation's task"
        )

    def make(info: FederationInfo, manifest: Manifest) -> Task:
        made = task(info)
        if not isinstance(made, Task):
            raise BadArgument(f"the function given as task returns a {type(made).__name__}; have it return a Task")
        return made

    return make


def _named_task_maker(task: str | None, data: str | None, device: str) -> Callable[[FederationInfo, Manifest], Task]:
    """Return the function that makes the federation's task over ``data``. task: its name, where it is given."""

    def make(info: FederationInfo, manifest: Manifest) -> Task:
        if task not in (None, info.task):
            raise BadArgument(f"the federation {info.name} trains {info.task!r}, not {task!r}; give that, or no task")
        settings = info.settings
        return load_data_of(manifest, data, device=device, seed=settings.seed, batch_size=settings.batch_size)

    return make


def _check_numbers(budget: object, threads: object, memory_limit: object, patience_seconds: object) -> None:
    """Raise BadArgument, naming the argument, for a number that cannot be meant."""
    if budget is not None:
        check_budget(budget)
    for what, value in (("threads", threads), ("memory_limit", memory_limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadArgument(f"{what}={value!r} cannot work; give a whole number above 0, or None")
    if patience_seconds is not None and not (isinstance(patience_seconds, int | float) and patience_seconds >= 0):
        raise BadArgument(
            f"patience_seconds={patience_seconds!r} cannot work; give seconds of at least 0, or None to wait for ever"
        )


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


def _say_budget(choice: Choice | None, tell: ProgressReporter) -> None:
    if choice is not None and (choice.limited_by is not None or choice.advice):
        for text in (str(choice), *choice.advice):
            tell.say(text)


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


def _result(
    session: Session, name: str, exported: Export | None, interrupted: bool, noise: LocalNoise | None
) -> Result:
    best = session.best
    judged = session.evaluate(best) if best is not None else None
    return replace(
        _result_before(session.progress, name, session.budget, noise),
        accuracy_after=judged.accuracy if judged else None,
        metrics=judged.metrics if judged else {},
        everything=session.moved,
        export=exported,
        engine=session.engine.title,
        choice=session.choice,
        warnings=tuple(_warnings(session.progress, tuned=bool(session.info.settings.finetune_epochs))),
        interrupted=interrupted,
    )


def _result_before(progress: Progress, name: str, budget: float, noise: LocalNoise | None) -> Result:
    """Return the result of a device that was stopped before the coordinator had answered."""
    return Result(
        name=name,
        rounds=progress.rounds,
        steps=progress.steps,
        stopped_round=progress.stopped_round,
        best_round=progress.best.round if progress.best else None,
        global_share=progress.best.global_share if progress.best else 0.0,
        taken=progress.best.taken if progress.best else "",
        adapted=progress.adapted,
        failures=progress.failures,
        failure=progress.failure,
        local_epsilon=None if noise is None else epsilon(progress.updates),
        accuracy_before=progress.accuracy_before,
        accuracy_after=None,
        training=progress.training,
        evaluation=progress.evaluation,
        everything=progress.everything,
        export=None,
        engine="",
        budget=budget,
        interrupted=True,
    )


def _warnings(progress: Progress, *, tuned: bool = False) -> Iterator[str]:
    """Yield warnings about the personal model, judged on validation data. tuned: it is trained once more at the end."""
    if progress.failures and not progress.rounds:
        yield (
            f"warning: this device has trained nothing: {_failed(progress.failures)}, the last so: {progress.failure}. "
            f"Its model is the global one, {'fine-tuned on its data' if tuned else 'as received'}"
        )
    yield from _of_new_data(progress)
    if progress.best is None:
        return
    found = progress.best.validation
    if progress.validation_before is not None and _worse(found, progress.validation_before):
        yield (
            f"warning: the personal model predicts worse than the model that this device began with "
            f"({_judged(found)}, {_judged(progress.validation_before)} before, on validation data); give this "
            f"device more data, or the federation more rounds or another learning_rate"
        )
    if progress.best.taken:  # with all devices' samples, which tell more than these
        return
    if progress.validation_global is not None and _worse(found, progress.validation_global):
        yield (
            f"warning: the global model predicts better here than the personal one "
            f"({_judged(progress.validation_global)}, {_judged(found)} personal, on validation data); let the "
            f"federation train for more rounds, give this device a larger budget, or use the global model"
        )


def _of_new_data(progress: Progress) -> Iterator[str]:
    """Yield a warning if the model that was the best is worse on the validation data that came since."""
    new = progress.new_data
    if new is None or (new.after is not None and not _worse(new.after, new.before)):
        return
    now = "no finite loss" if new.after is None else _judged(new.after)
    best = progress.best
    if best is not None and best.round != new.round:
        use = f"the model of round {best.round} is used now ({_judged(best.validation)})"
    else:
        use = "no better one is known; let the federation train for more rounds with the new data"
    yield (
        f"warning: the validation data changed: the model of round {new.round} had {_judged(new.before)} on those "
        f"before, and has {now} on these; {use}"
    )


def _failed(rounds: int) -> str:
    return "its one round failed" if rounds == 1 else f"all of its {rounds} rounds failed"


def _worse(found: Evaluation, than: Evaluation) -> bool:
    """Return whether a model is worse than another in its loss, and no better in its accuracy."""
    return than.loss < found.loss and (than.accuracy or 0.0) >= (found.accuracy or 0.0)


def _judged(found: Evaluation) -> str:
    loss = f"loss {found.loss:.3f}"
    return loss if found.accuracy is None else f"accuracy {found.accuracy:.1%}, {loss}"


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


class _Bar:
    """A progress bar over rounds, with the steps of the current one beside it; without a terminal a line a round. Lines
    of text are shown where progress is hidden, too."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None
        self._round: int | None = None
        self._loss = ""

    def show(self, moment: DeviceProgress) -> None:
        """Show a moment of the device's work."""
        if moment.text is not None:
            tqdm.write(moment.text, file=sys.stderr)
        elif self._bar is not None:
            self._move(self._bar, moment)
        elif moment.rounds and not self._quiet:
            if sys.stderr.isatty():
                self._bar = tqdm(total=moment.rounds, initial=moment.round, unit="round", desc=moment.phase, leave=True)
            else:
                self._line(moment)

    def _move(self, bar: tqdm[Any], moment: DeviceProgress) -> None:
        if moment.steps:
            bar.set_description(f"{moment.phase} {moment.step}/{moment.steps}", refresh=False)
            bar.set_postfix(loss=f"{moment.loss:.3f}", refresh=moment.step == moment.steps)
        elif moment.phase in BETWEEN:
            bar.n = max(bar.n, moment.round)
            bar.set_description(moment.phase)

    def _line(self, moment: DeviceProgress) -> None:
        if moment.loss is not None:
            self._loss = f", loss {moment.loss:.3f}"
        if moment.phase in BETWEEN:
            if self._round is not None and moment.round > self._round:
                tqdm.write(f"round {moment.round} of {moment.rounds}{self._loss}", file=sys.stderr)
            self._round = moment.round

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


TAKEN = {
    "global": "the federation's, as it is",
    "personal": "its own, of its last round",
    "mixture": "half its own, half the federation's",
    "finished": "half its own, half the federation's, trained once more",
    "alone": "the one that it has trained alone",
}
"""Candidate -> words for it."""


def _kept(result: Result) -> str:
    """Return which model a device keeps, behind a comma; nothing where there is but one."""
    if result.taken:
        return f", keeps of its models {TAKEN.get(result.taken, result.taken)}: all devices chose together"
    share = f" with {result.global_share:.0%} of the global model in it" if result.global_share else ""
    return f", best in round {result.best_round}{share}" if result.best_round and not result.adapted else share


def report(result: Result, energy: str) -> str:
    """Return a device's result as text for a person."""
    lines = [
        f"{result.name}: {result.rounds} rounds, {result.steps} local steps"
        + (f", stopped early in round {result.stopped_round}" if result.stopped_round else "")
        + _kept(result)
        + (f", trained nothing: {_failed(result.failures)}" if result.trained_nothing else "")
        + (", adapted the finished global model" if result.adapted and not result.trained_nothing else ""),
        *_accuracy_lines(result),
        *(f"  {name + ', held-out data':<27}{value:.4g} after" for name, value in result.metrics.items()),
        f"  training                   {_cost(result.training)}",
        f"  evaluation                 {_cost(result.evaluation)}",
        f"  bytes                      training {_both(result.training)}; everything {_both(result.everything)}"
        + (f", of which {result.everything.frozen_down:,} frozen, once" if result.everything.frozen_down else ""),
        f"  engine                     {result.engine}",
        f"  energy source              {energy}",
        f"  energy per update          {_joules_per(result.training, result.rounds)}",
        f"  energy per point           {_joules_per(result.training, _points(result))}",
        f"  heat                       {_heat(result.training)}",
        *_noise_lines(result),
        f"  budget                     {result.choice or f'{result.budget:g}, as given'}",
    ]
    lines += [f"                             {text}" for text in (result.choice.advice if result.choice else ())]
    if result.export:
        lines.append(
            f"  ONNX                       {result.export.path}: {result.export.bytes:,} bytes "
            f"({', '.join(result.export.steps) or 'dense'}; {result.export.dense_bytes:,} dense), "
            f"{result.export.latency_ms:.2f} ms a sample (p50), largest difference from {result.export.engine} "
            f"{result.export.max_difference:.1e} on {result.export.samples} samples"
        )
    return "\n".join(lines)


def _noise_lines(result: Result) -> list[str]:
    if result.local_epsilon is None:
        return []
    return [f"  local noise                epsilon {result.local_epsilon:.4g} at delta {DELTA:g}, of all updates sent"]


def _accuracy_lines(result: Result) -> list[str]:
    """Return the line of the accuracies; none for a regression, whose metrics say more."""
    if result.accuracy_after is None and result.metrics:
        return []
    before, after = _percent(result.accuracy_before), _percent(result.accuracy_after)
    return [f"  accuracy, held-out data    {before} before, {after} after"]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _points(result: Result) -> float:
    """Percentage points of accuracy that training has won."""
    if result.accuracy_before is None or result.accuracy_after is None:
        return 0.0
    return 100 * (result.accuracy_after - result.accuracy_before)


def _joules_per(totals: Totals, count: float) -> str:
    """Return joules of each kind by ``count``; what was measured and what was estimated stay apart."""
    kinds = (("measured", totals.joules_measured), ("estimated", totals.joules_estimated))
    known = [f"{joules / count:.2f} J {kind}" for kind, joules in kinds if joules and count > 0]
    return ", ".join(known) or "unknown"


def _heat(totals: Totals) -> str:
    peak = "no temperature known" if totals.celsius_peak is None else f"at most {totals.celsius_peak:.0f} °C"
    throttled = totals.throttled_seconds
    slow = "throttling unknown" if throttled is None else f"throttled for {throttled:.0f} s"
    return f"{peak}, {slow}, paused for {totals.paused_seconds:.0f} s"


def _both(moved: Totals | Moved) -> str:
    return f"{moved.bytes_down:,} down and {moved.bytes_up:,} up"


def _cost(totals: Totals) -> str:
    joules = []
    if totals.joules_measured:
        joules.append(f"{totals.joules_measured:.1f} J measured")
    if totals.joules_estimated:
        joules.append(f"{totals.joules_estimated:.1f} J estimated")
    if totals.seconds_without_joules or not joules:
        joules.append(f"joules unavailable for {totals.seconds_without_joules:.1f} s")
    return (
        f"{totals.seconds:.1f} s, {totals.bytes_down:,} bytes down, {totals.bytes_up:,} bytes up, {', '.join(joules)}"
    )


def as_json(result: Result, energy: str) -> str:
    """Return a device's result as JSON: seconds, bytes, joules, and shares of samples."""
    totals = {name: getattr(result, name).model_dump() for name in ("training", "evaluation", "everything")}
    more = {"trained_nothing": result.trained_nothing, "energy_source": energy}
    return json.dumps({**asdict(result), **totals, **more}, default=str)


def _command(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    allocator.give_back()
    try:
        policy = _policy(options.policy, dict(options.limit))
        result = join(
            options.server,
            data=with_skipped(options.data, options),
            federation=options.federation,
            name=options.device_name,
            state_dir=options.state_dir,
            budget=options.budget,
            policy=policy,
            export=options.export,
            patience_seconds=options.wait,
            watts=options.watts,
            accelerator=options.accelerator,
            threads=options.threads,
            bfloat16=options.bfloat16,
            deterministic=options.deterministic,
            engine=options.engine,
            memory_limit=options.memory_limit,
            require_secure=options.require_secure,
            known_devices=options.known_devices,
            publisher=options.publisher,
            pin_model=options.pin_model,
            require=options.require,
            plain_metrics=options.plain_metrics,
            own_frozen=options.own_frozen,
            local_noise=options.local_noise,
            local_clip=options.local_clip,
            trust=tls.from_options(options),
            quiet=options.quiet,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("left the federation; the same command goes on where this device was") from None
    with EnergyMeter(model=options.watts) as meter:
        print((as_json if options.json else report)(result, meter.describe()))
    if result.trained_nothing and not result.interrupted:
        raise NothingTrained(
            f"{result.name} has trained nothing: {_failed(result.failures)}, the last so: {result.failure}"
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
    parser.add_argument(
        "--limit",
        type=read_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a limit of the policy, such as hours=22:00-07:00; may be repeated",
    )
    add_help_settings(parser, Policy, "the limits of a policy")
    parser.add_argument("--export", type=Path, help="write the personal model here, as the smallest ONNX file")
    parser.add_argument(
        "--watts", type=_watts, help="IDLE:MAX watts of this board, to estimate joules without a sensor"
    )
    add_wait(parser, None)
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default="auto", help="where to train (default: a GPU where there is one)"
    )
    parser.add_argument(
        "--engine",
        choices=get_args(EngineChoice),
        default="auto",
        metavar="NAME",
        help="onnx, which needs no PyTorch; torch; auto: onnx where it can and there is no GPU (default: auto)",
    )
    parser.add_argument("--threads", type=read.count, help="CPU threads (default: what is fastest)")
    parser.add_argument("--bfloat16", action="store_true", help="forward passes in bfloat16, by torch's autocast")
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
        chosen = Policy().changed(read_policy(Path(text)))
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
