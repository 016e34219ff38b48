"""LG-FedAvg, the device half: personal features under a shared head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, arXiv:2001.01523. The reverse of FedPer: the device
keeps its representation, both parts are trained together, and the server averages the head. With initial FedAvg rounds,
the manifest has a block for each tensor of the representation, which is shared until the models part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import merge_in_place, pack

from . import DeviceMethod, DeviceState, Job, Trained, Update
from .merging import is_whole, whole_model
from .parts import adapt_own_part, adapt_part, evaluate_tuned, train_together
from .rounds import conclude, train_loaded


def train(job: Job) -> Trained:
    """Train both parts together for one round; send both in FedAvg's rounds, otherwise the head."""
    if not job.manifest.blocks or not job.planned("apart", 1):
        return train_together(job)
    received = _newest(job)
    own = job.state.personal
    if job.state.model is not None and own is not None:
        job.engine.load(_with_head(job, own, received))
    else:
        job.engine.load({**(own or {}), **received})
    result = train_loaded(job)
    personal = job.engine.read()
    head = BlockMask(np.zeros(len(job.manifest.blocks), bool))
    # Running statistics travel with any blocks: the body's stay local, so the received ones go back.
    update = Update(pack(job.manifest, _with_head(job, received, personal), head), head)
    body = sum(sum(sizes) for sizes in job.manifest.blocks.values())
    trained = conclude(job, result, personal=personal, update=update, counts={"private_values": body})
    state = replace(trained.state, model=job.assignment.model_sha256)
    return replace(trained, state=state, flops=training_flops(job.manifest, result.samples))


def _newest(job: Job) -> Tensors:
    if job.received is None or job.state.personal is None or is_whole(job.manifest, job.received):
        return whole_model(job.manifest, job.received)
    newest = {name: np.array(tensor) for name, tensor in job.state.personal.items()}
    merge_in_place(job.manifest, newest, job.received.values, job.received.mask)
    return newest


def _with_head(job: Job, body: Tensors, head: Tensors) -> Tensors:
    """Return one model's body under another's head."""
    return {**body, **{name: head[name] for name in job.manifest.uncut}}


def adapt(job: Job) -> DeviceState:
    """Train the personal part for the finished head, which stays fixed."""
    return adapt_part(job, job.manifest.blocks) if job.manifest.blocks else adapt_own_part(job)


LGFEDAVG = DeviceMethod(train=train, evaluate=evaluate_tuned, adapt=adapt, acts=("private_values",), sums=True)
