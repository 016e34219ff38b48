"""The personal model of a device: the last round's, and the best on validation data."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from sparrow.protocol.evidence import Pool, choice
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import merge_in_place
from sparrow.protocol.messages import Evaluation, Moved

from ...engines import evaluate_held_out
from ...engines.training import TrainingDiverged, UnsoundModel
from ...methods import Evaluated, Job, Trained
from ...methods.alone import alone_of
from ...methods.early_stopping import gives_way
from ...methods.merging import GLOBAL_SHARES, is_whole, mixed, whole_model
from ..candidates import SHARE, SHARES, Candidates, Ending
from ..local_noise import check_history
from ..state import Best, NewData
from .learning import Learning
from .options import Device, SessionOptions

log = logging.getLogger(__name__)


class Judging(Learning):
    """A device with a personal model, and the progress that belongs to it."""

    def __init__(self, device: Device, options: SessionOptions) -> None:
        super().__init__(device, options)
        self.personal, self.progress = self.folder.load(self.manifest)
        check_history(options.local_noise, self.progress, self.folder.path)
        # Set if the personal model in memory is also the best one; any other best one is only on disk.
        self._personal_is: Best | None = None
        self._moved_before = self.progress.everything
        self._as_new = {} if self.personal is not None else self._never_sent()

    def _take_new_version(self) -> None:
        before = self.manifest.preparation_sha256
        super()._take_new_version()
        if self.manifest.preparation_sha256 != before:
            self.personal, self.progress = self.folder.load(self.manifest)
            self._personal_is = None
            self._as_new = self._never_sent()

    @property
    def moved(self) -> Moved:
        """Bytes of all HTTP bodies of this device so far."""
        traffic = self.transport.traffic
        return self._moved_before.plus(traffic.down, traffic.up, traffic.frozen)

    def _save_progress(self, **changed: object) -> None:
        self.progress = self.progress.model_copy(update={**changed, "everything": self.moved})
        self.folder.save_progress(self.progress)

    @property
    def best(self) -> Tensors | None:
        """The personal model to use: the best on validation data if it is tracked, else the last one, if any."""
        best = self.progress.best
        if best is None:
            return self.personal
        if self._personal_is == best:
            return self.personal
        found = self.folder.best(self.manifest)
        if found is None:
            log.warning("%s has lost best.safetensors; the last round's model is used", self.folder.path)
            self.progress = self.progress.model_copy(update={"best": None})
            return self.personal
        return found

    def _judge_first(self, job: Job) -> dict[str, Any]:
        """Evaluate the model before any local training, and return the changes to progress; empty if already known."""
        if self.progress.rounds or self.progress.accuracy_before is not None:
            return {}
        tensors = self.engine.read() if self.personal is None else dict(self.personal)
        if job.received is None or self.manifest.outputs:
            # No model was received.
            pass
        elif is_whole(self.manifest, job.received):
            tensors |= whole_model(self.manifest, job.received)
        else:
            # The present shared values are not the federation's.
            tensors |= {spec.name: np.zeros(spec.shape, np.float32) for spec in self.manifest.shared}
            merge_in_place(self.manifest, tensors, job.received.values, job.received.mask)
        try:
            held_out, validation = self._judge(tensors)
        except TrainingDiverged:
            raise UnsoundModel(
                "before any training, the model received has no finite loss on this device's held-out data",
                "check that the data are scaled as the task expects; if they are, ask the operator to roll back to an "
                "older model, and to bound each device's update (update_clip)",
            ) from None
        return {"accuracy_before": held_out.accuracy, "validation_before": validation}

    @property
    def _keeps_best(self) -> bool:
        return self._method.picks_best and self.info.settings.keeps_best

    def _find_best(self, job: Job, trained: Trained) -> Best | None:
        """Return the best personal model after a round: the new one, unless it is worse on validation data."""
        state = trained.state
        before = self.progress.best
        if state.personal is None or not self._keeps_best:
            return before
        found = trained.personal_validation or self._validate(state.personal)
        newest = self._best_of(job, found)
        return before if before and gives_way(found, newest.lowest_loss) else newest

    def _best_of(self, job: Job, found: Evaluation, global_share: float = 0.0) -> Best:
        before = self.progress.best
        return Best(
            round=job.assignment.round,
            validation=found,
            lowest_loss=min(found.loss, before.lowest_loss) if before else found.loss,
            global_share=global_share,
            manifest=self.manifest.digest,
            data=self._data,
        )

    @property
    def _has_new_data(self) -> bool:
        """Whether the validation data have changed since the last round."""
        return self.progress.best is not None and self.progress.best.data != self._data

    def _judge_best_again(self) -> None:
        """Evaluate the best model again if the federation's model or the validation data changed."""
        best = self.progress.best
        if best is None or (best.manifest, best.data) == (self.manifest.digest, self._data):
            return
        tensors = self.best
        if tensors is None:
            return
        found = self._validate_sound(tensors)
        changed = dict[str, object]()
        choice = None if found is None else self._judged_now(best, best.round, found)
        if self._has_new_data:
            new = NewData(round=best.round, before=best.validation, after=found)
            changed = {"new_data": new, "accuracy_before": None, "validation_before": None, "validation_global": None}
            last = None if self.personal is None or self.personal is tensors else self._validate_sound(self.personal)
            if last is not None and (found is None or last.loss < found.loss):
                assert self.personal is not None, "it was evaluated"
                choice = self._judged_now(Best(round=0, validation=last, lowest_loss=0), self.progress.last_round, last)
                self.progress = self.progress.model_copy(update={"best": choice})
                self.folder.save_best(self.manifest, self.personal, self.progress)
                self._personal_is = choice
        if self._personal_is == best and choice is not None:
            self._personal_is = choice
        self._save_progress(best=choice, **changed)

    def _judged_now(self, best: Best, number: int, found: Evaluation) -> Best:
        """Return ``best`` with round ``number`` and a new evaluation."""
        now = {"validation": found, "lowest_loss": found.loss, "manifest": self.manifest.digest, "data": self._data}
        return best.model_copy(update={"round": number, **now})

    def _validate_sound(self, tensors: Tensors) -> Evaluation | None:
        try:
            return self._validate(tensors)
        except TrainingDiverged:
            return None

    def _mix_with_global(self, job: Job) -> Ending:
        """At the end, keep a mixture of the personal and the global model if it is better on validation data.

        With ``finetune_epochs``, also try one that is trained once more, within the budget.
        """
        if not job.assignment.plan.get("finished") or not self._method.mixes_global:
            return Ending()
        if job.received is None or self.personal is None or self.progress.best is None:
            return Ending()
        if job.assignment.settings.personal_model == "fleet":
            return self._take_by_evidence(job)
        received = whole_model(self.manifest, job.received)
        for share in GLOBAL_SHARES:
            self._keep_if_better(job, mixed(self.personal, received, share), share)
        if self._method.finish is None or not job.assignment.settings.finetune_epochs:
            return Ending()
        try:
            tensors, flops = self._method.finish(job, mixed(self.personal, received, SHARE))
        except TrainingDiverged as error:
            log.warning("the final fine-tuning failed: %s", error)
            return Ending()
        self._keep_if_better(job, tensors, SHARE)
        return Ending(flops)

    def _take_by_evidence(self, job: Job) -> Ending:
        """Keep the candidate chosen by all devices' validation data, and report all candidates."""
        candidates = Candidates.of(self._method, job)
        pool = Pool.from_plan(job.assignment.plan)
        evidence = candidates.evidence(self.engine, self.task.validation)
        name = choice(pool, evidence, candidates.models)
        ending = Ending(
            candidates.flops,
            candidates.judged(self.engine, self.task.held_out),
            name,
            choice(pool, None, candidates.models),
        )
        tensors = candidates.models[name]
        found = self._validate_sound(tensors)
        if found is None:
            log.warning("the loss of the chosen final model (%s) is not finite; the best round's model stays", name)
            return replace(ending, taken=None)
        best = self._best_of(job, found, SHARES.get(name, 0.0)).model_copy(update={"taken": name})
        self.progress = self.progress.model_copy(update={"best": best})
        self.folder.save_best(self.manifest, tensors, self.progress)
        return ending

    def _keep_if_better(self, job: Job, tensors: Tensors, share: float) -> None:
        try:
            found = self._validate(tensors)
        except TrainingDiverged:
            return
        if self.progress.best is None or found.loss < self.progress.best.validation.loss:
            self.progress = self.progress.model_copy(update={"best": self._best_of(job, found, share)})
            self.folder.save_best(self.manifest, tensors, self.progress)

    def _evaluate_alone(self, job: Job) -> dict[str, Evaluation]:
        alone = alone_of(job.state)
        if alone is None:
            return {}
        self.engine.load(alone)
        try:
            return {"alone": self.engine.evaluate(self.task.held_out, metrics=True)}
        except TrainingDiverged:
            return {}

    def _validate_global(self, job: Job, evaluated: Evaluated) -> Evaluation | None:
        if evaluated.personal is None or evaluated.global_model is None or not self.info.global_model_usable:
            return None
        if self.task.test is None:
            return evaluated.global_model
        return self._validate(self.engine.read() | whole_model(self.manifest, job.received))

    def _judge(self, tensors: Tensors) -> tuple[Evaluation, Evaluation]:
        """Evaluate a model on held-out and on validation data."""
        self.engine.load(tensors)
        return evaluate_held_out(self.engine, self.task.validation, self.task.test)

    def _validate(self, tensors: Tensors) -> Evaluation:
        self.engine.load(tensors)
        return self.engine.evaluate(self.task.validation)

    def evaluate(self, tensors: Tensors) -> Evaluation:
        """Evaluate a model on this device's held-out data."""
        self.engine.load(tensors)
        return self.engine.evaluate(self.task.held_out, metrics=True)
