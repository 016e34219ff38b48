"""Specifications of a model's tensors for its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sparrow.protocol.manifest import TensorSpec

from .graph import UnsupportedLayer

_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


def refuse_types(model: nn.Module) -> None:
    """Raise UnsupportedLayer for a type that cannot be sent or stored."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UnsupportedLayer(
                f"{name}: a parameter of {parameter.dtype}; convert the model with model.float(). "
                "Half precision is chosen for the wire only, with the setting precision"
            )
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedLayer(f"{name}: a buffer of {tensor.dtype}; make it float32 or int64")
        if tensor.numel() == 0:
            raise UnsupportedLayer(f"{name}: a tensor without values; remove it from the model")


def names_of(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return the first name of each state-dict tensor by identity, and aliases: other name -> first name."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
    return names, aliases


def specs_of(
    model: nn.Module,
    aliases: Mapping[str, str],
    *,
    statistics: Collection[str],
    running_statistics: str,
    frozen: Collection[str],
    read: Collection[str],
    found: Mapping[str, Mapping[str, Any]],
) -> Iterator[TensorSpec]:
    """Yield the specifications in state-dict order, tied tensors under their first name.

    statistics: buffers with the policy ``running_statistics``; other buffers stay personal, because integers and
    counters cannot be averaged. read: parameters that the model reads. found: tensor -> further fields of its
    specification.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        if name in aliases:
            continue
        parameter = parameters.get(name)
        policy = "personal" if parameter is None else "shared"
        if name.rpartition(".")[2] == "num_batches_tracked":
            policy = "dropped"
        elif name in frozen:
            policy = "frozen" if name in read or parameter is None else "dropped"
        elif name in statistics:
            policy = running_statistics
        described = {
            "name": name,
            "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "policy": policy,
            "trainable": parameter is not None and parameter.requires_grad,
            **found.get(name, {}),
        }
        if name in frozen:
            described["axes"] = ()
        yield TensorSpec.model_validate(described)
