"""The work of an assignment: receive, train or evaluate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sparrow.protocol import bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import BundleError, ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.fields import MOST_COUNT, MOST_FLOPS, bounded
from sparrow.protocol.flops import forward_flops, nonzero_flops
from sparrow.protocol.manifest import Array, Tensors
from sparrow.protocol.masks import Mask, NeuronMask, pack
from sparrow.protocol.messages import Assignment, ChangeDevice, Kind, Payload, Phase, Receipt, Telemetry, UpdateReport
from sparrow.protocol.parts import expected
from sparrow.protocol.quantization import Quantised
from sparrow.protocol.secure.messages import Statement
from sparrow.protocol.skew import LabelSketch

from ...engines.training import VALUES, TrainingDiverged, count_steps
from ...errors import Damaged
from ...methods import DeviceState, Job, Trained, Update
from ...methods.early_stopping import anew
from ...methods.merging import is_whole, whole_model
from ...tasks import count_examples
from ..candidates import Candidates
from ..label_prior import asks_for_labels
from ..local_noise import count_update, withhold
from ..rounding import round_update
from ..state import Best
from ..watchdog import WatchedWork
from .sending import Sending

if TYPE_CHECKING:
    from ..secure import SecureRound

log = logging.getLogger(__name__)

# Minimum time before a deadline, reserved for evaluating and sending.
RESERVE_SECONDS = 5.0


class Working(Sending):
    """A device that works on assignments."""

    @cached_property
    def _secure(self) -> SecureRound:
        # Imported here, because it needs cryptography, an extra.
        from ..secure import SecureRound

        identity = bytes.fromhex(self.identity.identity_key)
        return SecureRound(self.folder, self.identity.name, identity, self._options.demands.secure, self.trust)

    def _watched_work(self, assignment: Assignment) -> WatchedWork | None:
        if self._options.watchdog is None:
            return None
        # Adapting, after the federation's end, has no deadline.
        waits = assignment.kind is not Kind.adapt
        return WatchedWork(
            self._options.watchdog,
            self._options.watchdog.clock() + assignment.deadline_seconds if waits else None,
            reserve=max(RESERVE_SECONDS, 2 * self._uploading),
            on_pause=self._telemetry.pause,
        )

    def _work(self, assignment: Assignment, watched: WatchedWork | None) -> None:
        if assignment.kind in (Kind.train, Kind.personalise) and self.progress.stopped_round is not None:
            # It had stopped early; now the coordinator, after new data or a reopening, lets it train again.
            self._save_progress(stopped_round=None, memory=anew(self.progress.memory))

        def after_step(done: int, total: int, loss: float) -> None:
            self._options.progress(assignment, done, total, loss)
            self._telemetry.sample()
            if watched is not None:
                watched.after_step(done, total)

        with self._telemetry.phase("download") as download:
            received = None
            if assignment.payload is not None:
                received = self._receive(assignment, assignment.payload)
                self._keep_mask(_elements(received.mask))
        job = Job(
            assignment=assignment,
            manifest=self.manifest,
            task=self.task,
            engine=self.engine,
            state=DeviceState(
                self.personal,
                self.progress.memory,
                self.folder.own,
                self.progress.model,
                self.mask if isinstance(self.mask, NeuronMask) else None,
            ),
            received=received,
            progress=after_step,
            federation=self.info.name,
            device=self.identity.name,
            budget=self.budget,
        )
        match assignment.kind:
            case Kind.train:
                self._train(job, self._method.train, download.cost)
            case Kind.prepare:
                self._train(job, self._method.prepare, download.cost)
            case Kind.personalise:
                self._personalise(self._adjusted(job), download.cost)
            case Kind.evaluate:
                self._evaluate(self._adjusted(job), download.cost)
            case Kind.compare:
                self._compare(self._adjusted(job), download.cost)
            case Kind.adapt:
                self._adapt(self._adjusted(job), download.cost)
            case Kind.keys | Kind.shares | Kind.agree | Kind.unmask:
                self._keep_and_send(assignment, self._secure.answer(assignment), job.state)
            case other:
                log.warning("%s does not support work of kind %s on this device", self.info.method, other.value)
                self._hand_back(assignment.assignment_id, Failure("unknown-work"))

    def _adjusted(self, job: Job) -> Job:
        return job if self._prior is None else self._prior.received(job)

    def _receive(self, assignment: Assignment, payload: Payload) -> bundle.Bundle:
        parts = expected(self._method.payload_parts, self.manifest, assignment.plan)
        largest = bundle.largest_payload(self.manifest, parts)
        if payload.bytes > largest:
            raise Damaged(
                f"a payload of {payload.bytes:,} bytes is announced, this model's payloads have at most {largest:,}",
                failure=Failure("bad-payload/size"),
            )
        body = self.transport.payload(assignment.assignment_id, payload)
        try:
            return bundle.decode(body, self.manifest, _elements(self.mask), parts=parts)
        except BundleError as error:
            raise Damaged(f"the payload cannot be used: {error}", failure=error.failure) from error

    def _train(self, job: Job, work: Callable[[Job], Trained], download: Phase) -> None:
        self._check_training(job)
        self._check_step(job)
        adjusted = self._adjusted(job)
        first = self._judge_first(adjusted)
        with self._telemetry.phase("train") as train:
            trained = work(adjusted)
            best = self._find_best(job, trained)
            train.flops = trained.flops
        if self._options.local_noise is not None:
            trained = withhold(trained)
        trained = self._within_joules(job, trained, download, train.cost)
        assert trained.update is not None, "training ends with values to send"
        update = trained.update if self._prior is None else self._prior.sent(job, trained.update)
        if self._options.local_noise is not None:
            update = self._options.local_noise.hide(job, update)
        statement: Statement | None = None
        if job.assignment.settings.secure and job.assignment.kind is Kind.train:
            with self._telemetry.phase("evaluate") as measured:
                metrics = self._metrics(adjusted, trained, best) if job.assignment.settings.masks_metrics else None
            first["evaluation"] = self.progress.evaluation.plus(measured.cost)
            hidden = self._secure.mask(job, update, metrics)
            update = replace(update, values=hidden.values, extras=hidden.extras)
            statement = hidden.statement
            trained = replace(trained, counts={**trained.counts, "clipped_values": hidden.clipped})
        trained = replace(trained, counts={**trained.counts, **self._carried(job, update)})
        report = _report(
            trained,
            job,
            download,
            train.cost,
            statement,
            tells=self._tells(job.assignment),
            labels=None if job.assignment.settings.secure else self._labels(job),
        )
        body, feedback = self._pack(job, update, report)
        self._keep_round(job, trained, body, {**first, "best": best}, download, train.cost, feedback)

    def _check_training(self, job: Job) -> None:
        """Raise ProtocolError for a round that would reveal more than the agreed settings."""
        assignment = job.assignment
        secure = assignment.settings.secure
        if self._options.demands.secure is not None and not (secure and assignment.kind is Kind.train):
            raise ProtocolError(
                "the coordinator asks for an unmasked update, but this device sends only masked "
                "updates (--require-secure)",
                failure=Failure("bad-work/unmasked"),
            )
        if secure and not (self._method.sums and assignment.kind is Kind.train):
            raise ProtocolError(
                f"{assignment.settings.method} on this device has no secure work of kind {assignment.kind.value}: its "
                f"updates are not only sums; this device sends no update",
                failure=Failure("secure-refused/parts"),
            )
        if secure:
            self._secure.check_round(job)
        self.trust.check_steps(count_steps(assignment.settings, self.task.train))
        if assignment.round == 1 and self._begins_as_published(job):
            self.trust.check_first_weights(whole_model(self.manifest, job.received))

    def _begins_as_published(self, job: Job) -> bool:
        """Return True if the first round's payload must be exactly the published model."""
        received = job.received
        settings = job.assignment.settings
        exact = settings.precision_of("down", job.assignment.kind) == "fp32"
        # With a buffer, a device may receive a later round's model.
        plain = received is not None and received.mask is None and settings.buffer is None
        return exact and plain and self.manifest.outputs is None

    def _labels(self, job: Job) -> LabelSketch | None:
        if self._options.local_noise is not None or self._prior is None or not asks_for_labels(job):
            return None
        return self._prior.sketch

    def _tells(self, assignment: Assignment) -> bool:
        """Return True if losses and accuracies may be sent unmasked."""
        settings = assignment.settings
        if self._options.local_noise is not None:
            return False
        if not settings.secure:
            return True
        return self._options.demands.plain_metrics and not settings.masks_metrics

    def _personalise(self, job: Job, download: Phase) -> None:
        first = self._judge_first(job)
        with self._telemetry.phase("train") as train:
            trained = self._method.personalise(job)
            best = self._find_best(job, trained)
            train.flops = trained.flops
        trained = self._within_joules(job, trained, download, train.cost)
        body = _report(trained, job, download, train.cost, tells=self._tells(job.assignment)).encode()
        self._keep_round(job, trained, body, {**first, "best": best}, download, train.cost)

    def _within_joules(self, job: Job, trained: Trained, download: Phase, train: Phase) -> Trained:
        """Return a round's outcome, marked as the last if the joules are spent."""
        limit = job.assignment.settings.joules_per_device
        spent = self.progress.training.plus(download).plus(train)
        if limit is None or job.assignment.kind is Kind.prepare or spent.joules < limit:
            return trained
        return replace(trained, stopped=True)

    def _keep_round(
        self,
        job: Job,
        trained: Trained,
        body: bytes,
        judged: Mapping[str, object],
        download: Phase,
        train: Phase,
        feedback: Tensors | None = None,
    ) -> None:
        controller = self._prepared.controller if job.assignment.kind is Kind.train else None
        if controller is not None:
            # Before sending: the update may close the round, and the next one should use the new budget.
            controller.after_training(download, train)
            self._reassess(job.assignment)
        number = job.assignment.round
        upload = self._keep_and_send(
            job.assignment,
            body,
            trained.state,
            feedback,
            rounds=self.progress.rounds + (job.assignment.kind is not Kind.prepare),
            last_round=number,
            steps=self.progress.steps + trained.steps,
            # Counted before sending, so that it is not lost in a crash.
            updates=count_update(self.progress.updates, self._options.local_noise, trained.update),
            stopped_round=number if trained.stopped else None,
            **judged,
            training=self.progress.training.plus(download).plus(train),
        )
        if self._options.watchdog is not None:
            spent = [download, train, upload]
            joules = [phase.joules for phase in spent if phase.joules is not None]
            self._options.watchdog.count(sum(phase.seconds - phase.paused_seconds for phase in spent), sum(joules))
        if controller is not None:
            controller.after_upload(upload)

    def _metrics(self, job: Job, trained: Trained, best: Best | None) -> dict[str, float | None]:
        if self._options.local_noise is not None:
            return {}
        found: dict[str, float | None] = {"train_loss": trained.train_loss}
        if (labels := self._labels(job)) is not None:
            found |= labels.told()
        settings = job.assignment.settings
        number = job.assignment.round
        interval = settings.evaluation_interval
        if number != settings.rounds and not (interval and number % interval == 0):
            return found
        changed = best is not None and best.round == number
        models = {"personal": trained.state.personal if changed or self.best is None else self.best}
        if job.received is not None and is_whole(self.manifest, job.received) and self.info.global_model_usable:
            models["global"] = whole_model(self.manifest, job.received)
        for name, tensors in models.items():
            if tensors is not None:
                judged = self.evaluate({**self.engine.read(), **tensors})
                found |= {f"loss_{name}": judged.loss, f"accuracy_{name}": judged.accuracy}
        if number == settings.rounds and settings.personal_model == "fleet" and self._method.mixes_global:
            candidates = Candidates.of(self._method, replace(job, state=trained.state))
            evidence = candidates.evidence(self.engine, self.task.validation)
            found |= {} if evidence is None else evidence.told()
        return found

    def _inference_flops(self, tensors: Tensors) -> int:
        # With local noise, report 0: which weights are zero depends on the data.
        return nonzero_flops(self.manifest, tensors) if self._options.local_noise is None else 0

    def _carried(self, job: Job, update: Update) -> dict[str, int]:
        owed = self.folder.feedback
        settings = job.assignment.settings
        if settings.precision_of("up", job.assignment.kind) != "int8" or settings.secure:
            return {}
        return {"carried_values": int(np.count_nonzero(pack(self.manifest, owed, update.mask))) if owed else 0}

    def _pack(self, job: Job, update: Update, report: str) -> tuple[bytes, Tensors | None]:
        """Return the update as a bundle, and its rounding residual, None unless int8."""
        assignment = job.assignment
        precision = assignment.settings.precision_of("up", assignment.kind)
        values: Array | Quantised = update.values
        feedback = None
        if precision == "int8" and not assignment.settings.secure:
            values, feedback = round_update(job, update, self.folder.feedback)
        try:
            body = bundle.encode(
                self.manifest,
                values,
                update.mask,
                draw=update.draw,
                precision=precision,
                report=report,
                known=None if job.received is None else _elements(job.received.mask),
                parts=update.parts,
                extras=update.extras,
            )
        # A value is not finite.
        except BundleError as error:
            raise TrainingDiverged(str(error).partition(": training diverged")[0], failure=VALUES) from error
        return body, feedback

    def _evaluate(self, job: Job, download: Phase) -> None:
        with self._telemetry.phase("evaluate") as measured:
            ending = self._mix_with_global(job)
            best = self.best
            evaluated = self._method.evaluate(replace(job, state=replace(job.state, personal=best)))
            answers = self.engine.read() if best is None else best
            shared = self._validate_global(job, evaluated)
            others = {**evaluated.others, **(ending.others or self._evaluate_alone(job))}
            ours = [evaluation for name, evaluation in others.items() if name not in evaluated.others]
            found = (evaluated.personal, evaluated.global_model, evaluated.validation, shared, *ours)
            judged = [each.num_examples for each in found if each]
            exists = _elements(job.received.mask) if job.received else None
            trained = evaluated.flops + ending.flops
            measured.flops = forward_flops(self.manifest, exists) * sum(judged) + trained
        tells = self._tells(job.assignment)
        receipt = Receipt(
            personal=evaluated.personal if tells else None,
            global_model=evaluated.global_model if tells else None,
            validation=evaluated.validation if tells else None,
            others=others if tells else {},
            finetune_flops=min(trained, MOST_FLOPS),
            inference_flops=self._inference_flops(answers),
            taken=ending.taken if tells else None,
            usual=ending.usual if tells else None,
            state_bytes=_bytes_of(job.state),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        evaluation = self.progress.evaluation.plus(download).plus(measured.cost)
        shared = shared or self.progress.validation_global
        alone = others["alone"].accuracy if "alone" in others else None
        self._send_receipt(
            job, receipt, job.state, validation_global=shared, accuracy_alone=alone, evaluation=evaluation
        )

    def _compare(self, job: Job, download: Phase) -> None:
        """Report the gains of candidates over the finished global model."""
        with self._telemetry.phase("evaluate") as measured:
            candidates = Candidates.of(self._method, job)
            evidence = candidates.evidence(self.engine, self.task.validation)
            judging = len(candidates.models) * forward_flops(self.manifest) * count_examples(self.task.validation)
            measured.flops = candidates.flops + judging
        receipt = Receipt(
            evidence=evidence if self._tells(job.assignment) else None,
            finetune_flops=min(candidates.flops, MOST_FLOPS),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        evaluation = self.progress.evaluation.plus(download).plus(measured.cost)
        self._send_receipt(job, receipt, job.state, evaluation=evaluation)

    def _adapt(self, job: Job, download: Phase) -> None:
        first = self._judge_first(job)
        with self._telemetry.phase("adapt") as measured:
            state = self._method.adapt(job)
        assert state.personal is not None, "adapting ends with a personal model"
        held_out, validation = self._judge(state.personal)
        best = self._best_of(job, validation) if self._keeps_best else None
        receipt = Receipt(
            personal=held_out if self._tells(job.assignment) else None,
            inference_flops=self._inference_flops(state.personal),
            state_bytes=_bytes_of(state),
            telemetry=Telemetry(download=download, train=measured.cost),
        )
        training = self.progress.training.plus(download).plus(measured.cost)
        self._send_receipt(job, receipt, state, adapted=True, best=best, **first, training=training)

    def _send_receipt(self, job: Job, receipt: Receipt, state: DeviceState, **changed: object) -> None:
        body = receipt.model_dump_json(exclude_defaults=True).encode()
        self._keep_and_send(job.assignment, body, state, None, **changed)

    def _reassess(self, assignment: Assignment) -> None:
        """Choose the budget of the next rounds."""
        controller = self._prepared.controller
        hot = self._options.watchdog is not None and self._options.watchdog.hot
        if controller is None or assignment.kind is not Kind.train:
            return
        if self._options.watchdog is not None:
            self._options.watchdog.hot = False
        before = controller.budget
        if controller.reassess(assignment.settings.deadline_seconds, hot=hot):
            log.info("from budget %g: %s", before, controller.choice)
            self._note_membership()
            self._tell(ChangeDevice(budget=controller.budget, limited_by=controller.choice.limited_by))


def _elements(mask: Mask | None) -> ElementMask | None:
    return mask if isinstance(mask, ElementMask) else None


def _report(
    trained: Trained,
    job: Job,
    download: Phase,
    train: Phase,
    statement: Statement | None = None,
    *,
    tells: bool,
    labels: LabelSketch | None = None,
) -> str:
    """Return the report of a round's training as JSON. tells: include losses."""
    report = UpdateReport(
        num_examples=trained.num_examples,
        status="stopped" if trained.stopped else "active",
        steps=trained.steps,
        training_flops=min(trained.flops, MOST_FLOPS),
        train_loss=bounded(trained.train_loss) if tells else None,
        validation_loss=trained.validation.loss if tells and trained.validation else None,
        stop_loss=bounded(trained.stop_loss) if tells and trained.stop_loss is not None else None,
        counts={name: min(count, MOST_COUNT) for name, count in trained.counts.items()},
        received=dict(job.received.sizes) if job.received else {},
        secure=statement,
        labels=labels,
        telemetry=Telemetry(download=download, train=train),
    )
    return report.model_dump_json(exclude_defaults=True)


def _bytes_of(state: DeviceState) -> int:
    """Return the bytes of stored models."""
    return sum(tensor.nbytes for tensor in (*(state.personal or {}).values(), *state.own.values()))
