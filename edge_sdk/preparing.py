"""Before a device enrols: how it will compute, and whether its budget fits into its memory."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass

from edge_sdk.arguments import MIB
from edge_sdk.errors import BadArgument
from edge_sdk.methods import DeviceMethod, load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationInfo
from edge_sdk.tasks import Task
from edge_sdk.training.compute import Compute
from edge_sdk.training.footprint import Unpredictable, held, predict_evaluation, predict_training, room, whole_round
from edge_sdk.training.local import TrainingDiverged
from edge_sdk.training.quickest import quickest
from edge_sdk.training.rehearsal import Rehearsal

log = logging.getLogger(__name__)

PLENTY = 16
"""Where there is this many times what weights and layers' outputs take, training fits without a try."""


class DoesNotFit(BadArgument):
    """The device has not the memory that training at its budget takes."""


@dataclass(frozen=True)
class Preparation:
    """What a device's user wants of its training.

    deterministic: nothing is chosen by its speed, which differs from start to start. memory_limit: bytes that the
    process, or on an accelerator its tensors, may take; what there is by default.
    """

    budget: float
    compute: Compute
    deterministic: bool = False
    memory_limit: int | None = None

    def __call__(self, task: Task, manifest: Manifest, info: FederationInfo) -> Task:
        """``task``, computed so. Raises DoesNotFit, which names a budget that does."""
        task = task.on(self.compute)
        method = load_method(info.method)
        rehearsal = Rehearsal(task, manifest, info.settings, narrow=method.narrow)
        try:
            self._check(rehearsal, manifest, method)
            if self.deterministic:
                return task
            return task.on(quickest(rehearsal, info.settings, method.sample_mask(manifest, self.budget)))
        except (TrainingDiverged, Unpredictable) as error:
            log.warning("what training takes on this device could not be tried beforehand: %s", error)
            return task

    def _check(self, rehearsal: Rehearsal, manifest: Manifest, method: DeviceMethod) -> None:
        device = self.compute.device
        limit = self.memory_limit or room(device)
        samples = max(rehearsal.samples, rehearsal.held_out)
        if held(device) + PLENTY * (rehearsal.model_bytes + samples * _outputs_bytes(manifest)) < limit:
            return

        evaluation = predict_evaluation(rehearsal)

        def needed(budget: float) -> int:
            training = predict_training(rehearsal, method.sample_mask(manifest, budget))
            return held(device) + whole_round(rehearsal, training, evaluation)

        wanted = needed(self.budget)
        if wanted <= limit:
            return
        said = (
            f"a budget of {self.budget:g} needs {wanted / MIB:,.0f} MiB of memory (predicted, of which "
            f"{held(device) / MIB:,.0f} are held already), and there are {limit / MIB:,.0f}"
        )
        smaller = [tenths / 10 for tenths in range(1, 10) if tenths / 10 < self.budget]
        fitting = bisect_right(smaller, limit, key=needed)  # the larger the budget, the more it needs
        if fitting:
            raise DoesNotFit(
                f"{said}; a budget of {smaller[fitting - 1]:g} fits: give --budget {smaller[fitting - 1]:g}"
            )
        if held(device) + whole_round(rehearsal, 0, evaluation) > limit:
            raise DoesNotFit(
                f"{said}; no budget fits, for judging the model on {rehearsal.held_out} samples at once takes more by "
                f"itself: free memory, or join a federation with a smaller model"
            )
        raise DoesNotFit(
            f"{said}; no budget fits: free memory, or join a federation with smaller batches (here "
            f"{rehearsal.samples} samples) or a smaller model"
        )


def _outputs_bytes(manifest: Manifest) -> int:
    """Bytes of what the layers that have weights answer to one sample."""
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    return sum(4 * layer.positions * shapes[layer.tensors[0]][0] for layer in manifest.layers if layer.tensors)
