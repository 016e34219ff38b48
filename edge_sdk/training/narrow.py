"""Train a physically smaller network with only the active neurons.

A ``Narrow`` network computes the same as the whole one with zero weights, biases, scales and shifts of the dropped
neurons. Group and layer norm average over neurons, with zeros for the dropped ones. Grouped convolutions are refused if
rows are dropped. The manifest does not show code between layers, such as ``x.view(-1, 320)`` or a softmax over neurons,
so both networks are compared on a few samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from sparrow.protocol.manifest import Array, Manifest, Tensors, TensorSpec
from sparrow.protocol.masks import NeuronMask, merge_in_place, pack
from sparrow.protocol.neurons import CannotNarrow, Narrowing, first_neurons

from ..engines.training import Batch
from ..publishing.modes import evaluating
from .local import as_tensor, device_of, get_tensors, set_tensors

_CLOSE = 1e-3
"""Largest difference of outputs by rounding, as a share of the largest output."""

SAMPLES = 2
"""Samples for the comparison; one would hide code that mixes samples."""

_compared: WeakKeyDictionary[nn.Module, set[tuple[int, ...]]] = WeakKeyDictionary()
"""Models that have been compared with narrow networks, and the widths of these networks."""


class Narrow:
    """The network of the active neurons of ``model``, whose dropped neurons must be zero.

    model: a smaller copy, or the full model if all neurons are active. batches: samples for the comparison. Raises
    CannotNarrow if the results differ or a layer cannot be narrowed.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, mask: NeuronMask, batches: Iterable[Batch] | None) -> None:
        self._whole = model
        self._narrowing = Narrowing.of(manifest, mask)
        self.model = model
        self.manifest = self._narrowing.manifest
        if self.manifest is manifest:
            return
        # The copy takes these tensors in place of whole ones, which are never copied.
        cut: dict[int, Any] = {}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for spec, narrow in zip(manifest.tensors, self.manifest.tensors, strict=True):
            tensor = tensors[spec.name]
            part = torch.from_numpy(self._narrowing.take(narrow, _array(tensor))).to(tensor.device)
            cut[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
        self.model = copy.deepcopy(model, cut)
        specs = {spec.name: spec for spec in manifest.tensors}
        for path, module in list(self.model.named_modules()):
            name = f"{path}.weight".lstrip(".")
            if name in specs and (made := _adjusted(path, module, self._kept(specs[name]))) is not module:
                parent, _, child = path.rpartition(".")
                setattr(self.model.get_submodule(parent), child, made)
        widths = tuple(len(index) for index in mask.active.values())
        if batches is not None and widths not in _compared.setdefault(model, set()):
            _compare(model, self.model, as_tensor(next(iter(batches))[0])[:SAMPLES].to(device_of(model)))
            _compared[model].add(widths)

    def write_back(self) -> None:
        """Copy the narrow network's values into the full model."""
        if self.model is self._whole:
            return
        whole = self._whole.state_dict()
        narrow = self.model.state_dict()
        with torch.no_grad():
            for name, block in self._narrowing.blocks.items():
                array = _array(whole[name])
                block.put(array, _array(narrow[name]))
                whole[name].copy_(torch.from_numpy(array))

    def _kept(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return the active positions of a vector."""
        if len(spec.shape) != 1:
            return None
        return torch.from_numpy(self._narrowing.blocks[spec.name].take(np.arange(spec.size)).reshape(-1))


def _array(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().cpu().numpy(), order="C")


def _adjusted(path: str, module: Any, kept: torch.Tensor | None) -> Any:
    """Correct the sizes of a module with a narrow weight, or replace it."""
    shape = module.weight.shape
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        # A depthwise convolution.
        if module.groups == module.in_channels > 1:
            module.groups = module.groups * shape[0] // module.out_channels
        elif module.groups > 1 and shape[0] < module.out_channels:
            raise CannotNarrow(
                f"{path}: a grouped convolution cannot drop neurons; use depthwise or ordinary convolutions, "
                f"or a method that trains the whole network, such as fedspu"
            )
        module.out_channels = shape[0]
        module.in_channels = shape[1] * module.groups
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = shape[1]
    elif isinstance(module, nn.GroupNorm) and kept is not None and len(kept) < module.num_channels:
        return _GroupNorm(module, kept)
    elif isinstance(module, nn.LayerNorm) and kept is not None and len(kept) < module.normalized_shape[0]:
        return _LayerNorm(module, kept)
    elif hasattr(module, "num_features"):
        module.num_features = shape[0]
    return module


class _GroupNorm(nn.GroupNorm):
    """Group norm with zeros for the channels that are not ``kept``."""

    kept: torch.Tensor

    def __init__(self, norm: nn.GroupNorm, kept: torch.Tensor) -> None:
        super().__init__(norm.num_groups, norm.num_channels, norm.eps, affine=False)
        self.weight = norm.weight
        self.bias = norm.bias
        self.register_buffer("kept", kept.to(norm.weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised channels."""
        whole = x.new_zeros(len(x), self.num_channels, *x.shape[2:]).index_copy(1, self.kept, x)
        narrow = F.group_norm(whole, self.num_groups, eps=self.eps).index_select(1, self.kept)
        return (narrow.transpose(1, -1) * self.weight + self.bias).transpose(1, -1)


class _LayerNorm(nn.LayerNorm):
    """Layer norm with zeros for the entries that are not ``kept``."""

    kept: torch.Tensor

    def __init__(self, norm: nn.LayerNorm, kept: torch.Tensor) -> None:
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.weight = norm.weight
        self.bias = norm.bias
        self.register_buffer("kept", kept.to(norm.weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised entries."""
        whole = x.new_zeros(*x.shape[:-1], *self.normalized_shape).index_copy(-1, self.kept, x)
        narrow = F.layer_norm(whole, self.normalized_shape, eps=self.eps).index_select(-1, self.kept) * self.weight
        return narrow if self.bias is None else narrow + self.bias


def check_narrow(model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
    """Raise CannotNarrow if ``model`` does not run on ``example`` [N, ...] with half of its neurons."""
    mask = first_neurons(manifest, 0.5)
    tensors: Tensors = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in manifest.shared}
    merge_in_place(manifest, tensors, pack(manifest, get_tensors(model, manifest), mask), mask)
    whole = copy.deepcopy(model)
    set_tensors(whole, tensors)
    Narrow(whole, manifest, mask, [(example, example)])


def _compare(whole: nn.Module, narrow: nn.Module, samples: torch.Tensor) -> None:
    # The layer that fails is the last that has begun.
    running: list[str] = []
    with evaluating(whole), evaluating(narrow), torch.inference_mode(), ExitStack() as hooks:
        wanted = whole(samples)
        for path, module in narrow.named_modules():
            hook = module.register_forward_pre_hook(lambda module, inputs, path=path: running.append(path))
            hooks.callback(hook.remove)
        try:
            found = narrow(samples)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise _refusal(f"without the dropped neurons {running[-1] or 'forward'} fails ({error})") from None
    if found.shape != wanted.shape:
        raise _refusal(f"without the dropped neurons it returns {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if not torch.allclose(found, wanted, rtol=0.0, atol=_CLOSE * float(wanted.abs().max())):
        raise _refusal("without the dropped neurons it returns other values than with weights of zero for them")


def _refusal(met: str) -> CannotNarrow:
    return CannotNarrow(
        f"this model cannot be trained with fewer neurons: {met}; make its code take sizes from its tensors "
        f"(x.flatten(1), not x.view(-1, 320)) and mix neurons only in its layers, or choose a method that trains the "
        f"whole network, such as fedspu"
    )
