"""HeteroFL, the device half: a narrow network of each layer's first neurons, trained to be part of a wider one.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, arXiv:2010.01264, after pFedGate's method card, section 5:

- a device of width ratio r has the first ceil(r n_l) neurons of each hidden layer, all inputs and all classes;
- *scaler*: what a hidden layer answers is divided by r while the narrow network trains and is judged for early
  stopping, so that the next layer sees about what all neurons would give it. The global model is not scaled;
- *masked loss*: scores of classes that a device has no training sample of count as 0 in the training loss, so that it
  unlearns nothing of them. Other tasks than classification train with their own loss;
- batch norm knows no running averages while it trains. Running statistics for evaluation the paper asks the devices
  for, with the finished global model; here each round ends with one pass over the device's data without gradients, and
  the means of its batches' statistics are sent and averaged like weights, so that every round's global model can be
  judged. They are taken behind the scaler, whose outputs are what the whole network will see.

What is judged, and adapted after the end, is the whole global model, as in FedAvg. A device keeps nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from edge_sdk.methods import ActiveNeurons, DeviceMethod, Job, Trained
from edge_sdk.methods.narrow import drawn, train_narrow
from edge_sdk.methods.rounds import conclude, train_loaded
from edge_sdk.methods.whole import adapt_global, evaluate_global
from edge_sdk.protocol.flops import forward_flops
from edge_sdk.protocol.manifest import MULTIPLYING, Manifest
from edge_sdk.protocol.masks import FULL_RATIO, NeuronMask
from edge_sdk.protocol.neurons import active_count_up, first_neurons
from edge_sdk.tasks import Task
from edge_sdk.tracing.modes import evaluating
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import device_of


def train(job: Job) -> Trained:
    """Train one round. Raises BundleError for a payload that does not fit, CannotNarrow for a model that does not run
    with fewer neurons, TrainingDiverged when the round failed."""
    ratio = drawn(job).ratio
    mask = first_neurons(job.manifest, ratio, active_count_up)
    trained = train_narrow(job, mask, train=partial(_train, ratio=1.0 if ratio >= FULL_RATIO else ratio))
    return replace(trained, state=replace(trained.state, personal=None))


def neurons(manifest: Manifest, budget: float) -> NeuronMask:
    """Return the first neurons of each group, their number rounded up; the budget is the width ratio."""
    return first_neurons(manifest, budget, active_count_up)


def _train(job: Job, ratio: float) -> Trained:
    """Train the narrow network that is loaded."""
    with ExitStack() as scaled:
        specs = {spec.name: spec for spec in job.manifest.tensors}
        for layer in job.manifest.layers:
            if layer.kind in MULTIPLYING and any(specs[name].axes and specs[name].axes[0] for name in layer.tensors):
                hook = job.model.get_submodule(layer.name).register_forward_hook(partial(_divided, ratio))
                scaled.callback(hook.remove)
        masked = replace(job, task=_masked(job.task) if job.task.classification else job.task)
        result = train_loaded(masked, Freezing(job.model, job.manifest, None))
        passed = _take_statistics(job.model, job.task)
        trained = conclude(job, result, personal=None, update=None)
    return replace(trained, flops=trained.flops + passed * forward_flops(job.manifest))


def _divided(ratio: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output / ratio


def _masked(task: Task) -> Task:
    """Return the task whose loss does not see the scores of classes without a training sample."""
    present = torch.unique(torch.cat([targets.reshape(-1) for _, targets in task.train]))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        absent = torch.ones(outputs.shape[1], dtype=torch.bool, device=outputs.device)
        absent[present.to(outputs.device)] = False
        return task.loss(outputs.masked_fill(absent.view(-1, *(1,) * (outputs.dim() - 2)), 0.0), targets)

    return replace(task, loss=loss)


def _take_statistics(model: nn.Module, task: Task) -> int:
    """Give batch norms the means of the training batches' statistics; return how many samples that took."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    passed, device = 0, device_of(model)
    with evaluating(model), torch.no_grad(), task.compute.precision():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all, in PyTorch's words
            norm.train()
        for inputs, targets in task.train if norms else ():
            model(inputs.to(device))
            passed += len(targets)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return passed


HETEROFL = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    active=ActiveNeurons(sample=neurons, narrow=True),
)
