"""Context managers for evaluation, and training mode with frozen parts kept in evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, such as running statistics, on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def begin_training(model: nn.Module) -> None:
    """Set training mode, except for frozen norms, whose statistics stay fixed."""
    model.train()
    for norm in frozen_norms(model):
        norm.eval()


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms whose running statistics are frozen.

    A norm is frozen if its parameters are; a norm without parameters, if all parameters of the smallest enclosing
    module with parameters are.
    """
    found: list[nn.Module] = []
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            around = path
            while around and next(model.get_submodule(around).parameters(), None) is None:
                around = around.rpartition(".")[0]
            parameters = list(model.get_submodule(around).parameters())
            if parameters and not any(each.requires_grad for each in parameters):
                found.append(module)
    return found


def frozen_names(model: nn.Module, example: torch.Tensor) -> set[str]:
    """Return the state-dict names of tensors that training does not change.

    These are parameters with ``requires_grad`` False, statistics of frozen norms, and buffers that a pass over
    ``example`` in training mode leaves unchanged.
    """
    model = copy.deepcopy(model)
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    still = {id(buffer) for norm in frozen_norms(model) for buffer in norm.buffers(recurse=False)}
    moving = {
        id(buffer)
        for norm in model.modules()
        if isinstance(norm, _NormBase)
        for buffer in norm.buffers(recurse=False)
        if id(buffer) not in still
    }
    asked = {name: each.clone() for name, each in buffers.items() if id(each) not in still | moving}
    if asked:
        begin_training(model)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model(example.clone())
        # The user's code may raise anything; tracing reports it later.
        except Exception:
            asked = {}
        now = dict(model.named_buffers(remove_duplicate=False))
        still |= {id(buffers[name]) for name, before in asked.items() if name in now and torch.equal(now[name], before)}
    return frozen | {name for name, each in buffers.items() if id(each) in still}
