"""The modes of a model's modules: evaluation, without leaving a trace, and training, with what is frozen left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the block; every module then has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Forward passes in training mode move running statistics; they are then what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def begin_training(model: nn.Module) -> None:
    """Set training mode, but for frozen norms, which go on with the statistics that they have."""
    model.train()
    for norm in frozen_norms(model):
        norm.eval()


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms with running statistics of which nothing is trained.

    Those are norms whose parameters are frozen; of norms without parameters, those in the smallest part of the model
    that has some, if all of them are.
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
    """Return the names, as in the state dict, of what training does not change: parameters with ``requires_grad``
    False, the statistics of frozen norms, and buffers that a pass in training mode over ``example`` leaves as they
    are."""
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
        except Exception:  # the user's code; what is wrong with it is said elsewhere
            asked = {}
        now = dict(model.named_buffers(remove_duplicate=False))
        still |= {id(buffers[name]) for name, before in asked.items() if name in now and torch.equal(now[name], before)}
    return frozen | {name for name, each in buffers.items() if id(each) in still}
