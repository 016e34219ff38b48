"""The manifest of an ``nn.Module`` without neurons, for methods that train and send whole tensors.

The model runs once on an example in evaluation mode; hooks record its layers with their number of positions, and the
parameters used outside of layers. ``forward`` may therefore contain anything that can be exported to ONNX. Weights that
are also used outside their layer are never pruned. ``edge_sdk.publishing.coupling`` finds manifests with neurons.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sparrow.protocol.manifest import Layer, Manifest

from . import RunningStatistics
from .graph import UnsupportedLayer
from .layers import PARAMETER, channels_of
from .modes import frozen_names
from .specs import names_of, refuse_types, specs_of


def describe_whole(
    model: nn.Module,
    example: torch.Tensor,
    *,
    task: str,
    running_statistics: RunningStatistics = "shared",
) -> Manifest:
    """Return the manifest of ``model`` without neurons, found by running it on ``example`` [N, ...], N >= 1.

    Integers and buffers of one number cannot be averaged and stay personal. Raises UnsupportedLayer for types that
    cannot be sent, and for a model whose output is not one tensor, batch first.
    """
    refuse_types(model)
    frozen = frozen_names(model, example)
    model = copy.deepcopy(model).eval()
    names, aliases = names_of(model)
    with torch.no_grad(), _Watch(model, names, len(example)) as watch:
        try:
            output = model(example.clone())
        # The user's code may raise anything.
        except Exception as error:
            raise UnsupportedLayer(
                f"the model fails on the first samples of its training data ({type(error).__name__}: {error}); make "
                "forward take only the batch of inputs, batch first"
            ) from error
    if not isinstance(output, torch.Tensor) or output.shape[:1] != example.shape[:1]:
        found = f"shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise UnsupportedLayer(
            f"the model's output for {len(example)} samples is {found}; make forward return one tensor, batch first"
        )
    specs = specs_of(
        model,
        aliases,
        statistics=_statistics(model, frozen),
        running_statistics=running_statistics,
        frozen=frozen,
        read=watch.read,
        found={},
    )
    return Manifest(
        task=task,
        input_shape=tuple(example.shape[1:]),
        output_shape=tuple(output.shape[1:]),
        tensors=tuple(specs),
        layers=tuple(watch.layers()),
        coupling=False,
        aliases=aliases,
    )


def _statistics(model: nn.Module, frozen: Collection[str]) -> set[str]:
    found: set[str] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) or tensor.dtype != torch.float32 or not tensor.dim():
            continue
        if name not in frozen and not torch.isfinite(tensor).all():
            raise UnsupportedLayer(
                f"{name}: this buffer contains NaN or infinity, as a diverged model would; register it with "
                "persistent=False"
            )
        found.add(name)
    return found


_LOOKS = {"__get__", "__len__", "size", "dim", "numel"}
"""Functions that read a parameter's shape, type or device, not its values."""


class _Watch(TorchFunctionMode):
    """Mode that records the layers that run."""

    def __init__(self, model: nn.Module, names: Mapping[int, str], samples: int) -> None:
        super().__init__()
        self._names = names
        self._samples = samples
        self._parameters = {id(parameter): names[id(parameter)] for parameter in model.parameters()}
        # Depth of running layers, whose own use of their parameters is not recorded.
        self._within = 0
        self._found: dict[str, Layer] = {}
        self._positions: dict[str, int] = {}
        self._hooks: list[Any] = []
        for path, module in model.named_modules():
            if type(module).__module__.startswith("torch.nn.modules.") and any(True for _ in module.parameters(False)):
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._ended(path)))

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @property
    def read(self) -> set[str]:
        """The parameters of layers that have run, and parameters used outside of layers."""
        return {name for layer in self._found.values() for name in layer.tensors}

    def layers(self) -> Iterator[Layer]:
        """Yield the layers that have run, in the order of their first run."""
        for name, layer in self._found.items():
            positions = max(1, math.ceil(self._positions.get(name, 0) / self._samples))
            yield layer.model_copy(update={"positions": positions})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and record the parameters that it reads outside of a layer."""
        if not self._within and getattr(func, "__name__", "") not in _LOOKS:
            for value in tree_leaves((args, kwargs)):
                name = self._parameters.get(id(value))
                if name is not None:
                    self._found.setdefault(f"{name}:", Layer(name=name, kind=PARAMETER, tensors=(name,)))
        return func(*args, **(kwargs or {}))

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._within += 1

    def _ended(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self._within -= 1
            if not self._within:
                tensors = tuple(self._names[id(parameter)] for parameter in module.parameters())
                kind = type(module).__name__.lower()
                self._found.setdefault(path, Layer(name=path or kind, kind=kind, tensors=tensors))
                self._positions[path] = self._positions.get(path, 0) + _positions(module, inputs, output)

        return note


def _positions(module: Any, inputs: Any, output: Any) -> int:
    """Return the number of positions, over all samples, at which a layer applied its weights."""
    counted = output
    channels = channels_of(module, next(module.parameters(recurse=False)))
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        counted = inputs
        channels = module.input_size
    elif isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        counted = inputs
        channels = module.in_channels
    elif isinstance(module, nn.EmbeddingBag):
        channels = module.embedding_dim
    tensor = next((each for each in tree_leaves(counted) if isinstance(each, torch.Tensor)), torch.empty(0))
    return tensor.numel() // channels
