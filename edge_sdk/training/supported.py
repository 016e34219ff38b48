"""Check that a model consists of modules that can be copied, compiled and used on single samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import BadArgument


def check_model(model: nn.Module) -> None:
    """Raise BadArgument, naming the module and the remedy, for a model that cannot be published."""
    for path, module in model.named_modules():
        place = f"the module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise BadArgument(
                f"{place} is scripted or traced by torch.jit, which has no Python code to compile; give the nn.Module "
                "from which it was made"
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise BadArgument(
                f"{place} is a {type(module).__name__} without running statistics, so a prediction depends on the "
                "other samples of its batch; set track_running_stats=True, or use GroupNorm"
            )
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise BadArgument(f"{place}: {name} is computed from other tensors by a hook; {_remedy(module, name)}")


def _remedy(module: nn.Module, name: str) -> str:
    if hasattr(module, f"{name}_mask") and hasattr(module, f"{name}_orig"):
        return f"call torch.nn.utils.prune.remove(module, {name!r}), and use a method that prunes, such as prunefl"
    kind = "spectral_norm" if hasattr(module, f"{name}_orig") else "weight_norm"
    return f"use torch.nn.utils.parametrizations.{kind} in place of torch.nn.utils.{kind}"
