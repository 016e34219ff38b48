"""Training a physically small network: of the active neurons alone, the others being gone and not frozen.

What is dropped contributes nothing: a ``Narrow`` network computes what the whole one does whose dropped neurons have
weights, biases, scales and shifts of zero, in a share of its time and memory. Parameters and buffers are cut along the
axes that the manifest describes:

- linear layers, convolutions and embeddings have fewer rows and columns; a depthwise convolution has fewer channels;
- batch and instance norm treat channels apart, and have fewer of them;
- group and layer norm take their mean over several neurons. They see zeros in place of the dropped ones, as in the
  whole network, so that what was trained narrow and is kept whole gives the same answers.

Grouped convolutions, whose columns are other channels in each of their groups, are refused where rows are dropped.
What a model's code does between its layers cannot be seen in the manifest: ``x.view(-1, 320)`` means something else in
a narrow network, and so does a softmax over neurons. So the two networks are compared on a few samples, once for each
model and widths, and one that answers differently is refused: FedSPU trains the whole network and takes any model.
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
"""Answers may differ by this share of the largest: rounding. What the comparison is for differs by more."""

SAMPLES = 2
"""That they are compared on: one alone would hide code that mixes samples."""

_compared: WeakKeyDictionary[nn.Module, set[tuple[int, ...]]] = WeakKeyDictionary()
"""Models that have been compared with their narrow networks, and the widths of these."""


class Narrow:
    """The network of the active neurons of ``model``, whose dropped ones must be zero.

    model: a copy that holds what is active, or the whole model itself where that is everything. manifest: its own.
    batches: on whose first samples the two are compared; None leaves that out, and then nothing need be zero.
    Raises CannotNarrow, which says what to do.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, mask: NeuronMask, batches: Iterable[Batch] | None) -> None:
        self._whole, self._narrowing = model, Narrowing.of(manifest, mask)
        self.model, self.manifest = model, self._narrowing.manifest
        if self.manifest is manifest:
            return
        # The copy takes these in place of what they are cut from, which so is never copied.
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
        """Bring what the narrow network has become into the whole model; what is dropped stays as it is."""
        if self.model is self._whole:
            return
        whole, narrow = self._whole.state_dict(), self.model.state_dict()
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
    """Return a copy, C-contiguous."""
    return np.array(tensor.detach().cpu().numpy(), order="C")


def _adjusted(path: str, module: Any, kept: torch.Tensor | None) -> Any:
    """Return the module, which has its narrow weight already, with its sizes put right; or what takes its place."""
    shape = module.weight.shape
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if module.groups == module.in_channels > 1:  # depthwise
            module.groups = module.groups * shape[0] // module.out_channels
        elif module.groups > 1 and shape[0] < module.out_channels:
            raise CannotNarrow(
                f"{path}: a grouped convolution cannot do without some of its neurons; use depthwise or ordinary ones, "
                f"or a method that trains the whole network, such as fedspu"
            )
        module.out_channels, module.in_channels = shape[0], shape[1] * module.groups
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
    """Group norm of ``norm``'s channels ``kept``, zeros standing for the others."""

    kept: torch.Tensor

    def __init__(self, norm: nn.GroupNorm, kept: torch.Tensor) -> None:
        super().__init__(norm.num_groups, norm.num_channels, norm.eps, affine=False)
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("kept", kept.to(norm.weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what group norm does."""
        whole = x.new_zeros(len(x), self.num_channels, *x.shape[2:]).index_copy(1, self.kept, x)
        narrow = F.group_norm(whole, self.num_groups, eps=self.eps).index_select(1, self.kept)
        return (narrow.transpose(1, -1) * self.weight + self.bias).transpose(1, -1)


class _LayerNorm(nn.LayerNorm):
    """Layer norm of ``norm``'s entries ``kept`` of its one axis, zeros standing for the others."""

    kept: torch.Tensor

    def __init__(self, norm: nn.LayerNorm, kept: torch.Tensor) -> None:
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("kept", kept.to(norm.weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what layer norm does."""
        whole = x.new_zeros(*x.shape[:-1], *self.normalized_shape).index_copy(-1, self.kept, x)
        narrow = F.layer_norm(whole, self.normalized_shape, eps=self.eps).index_select(-1, self.kept) * self.weight
        return narrow if self.bias is None else narrow + self.bias


def check_narrow(model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
    """Raise CannotNarrow unless ``model`` runs on ``example`` [N, ...] with half of its neurons; it stays as it is."""
    mask = first_neurons(manifest, 0.5)
    tensors: Tensors = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in manifest.shared}
    merge_in_place(manifest, tensors, pack(manifest, get_tensors(model, manifest), mask), mask)
    whole = copy.deepcopy(model)
    set_tensors(whole, tensors)
    Narrow(whole, manifest, mask, [(example, example)])


def _compare(whole: nn.Module, narrow: nn.Module, samples: torch.Tensor) -> None:
    running: list[str] = []  # the layer that fails is the last that has begun
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
        raise _refusal(f"without the dropped neurons it answers {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if not torch.allclose(found, wanted, rtol=0.0, atol=_CLOSE * float(wanted.abs().max())):
        raise _refusal("without the dropped neurons it answers something else than with weights of zero in their place")


def _refusal(met: str) -> CannotNarrow:
    return CannotNarrow(
        f"this model cannot be trained with fewer neurons: {met}; let its code take sizes from its tensors "
        f"(x.flatten(1), not x.view(-1, 320)) and mix neurons in its layers alone, or choose a method that trains the "
        f"whole network, such as fedspu"
    )
