"""Gates per sample in one forward pass.

Row r of W ⊛ M' gives M'_r times the output of row r of W. Layers therefore run once with whole weights, and each
sample's output is scaled by its gates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from sparrow.protocol.blocks import BlockTable

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ScaledRows:
    """A model whose parameters all scale outputs by rows; a call takes inputs [N, ...] and gates [N, L]."""

    def __init__(self, model: nn.Module, rows: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._rows = rows
        self._layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]

    @classmethod
    def of(cls, model: nn.Module, table: BlockTable) -> ScaledRows | None:
        """Return the model in this form, or None for unsupported layers and blocks."""
        rows: dict[str, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if not isinstance(module, _LAYERS) or name not in table.tensors:
                    return None
                sizes = np.array(table.tensors[name])
                row = parameter[0].numel()
                if (sizes % row).any():
                    return None
                place = table.places[name]
                rows[name] = torch.from_numpy(np.repeat(np.arange(place.start, place.stop), sizes // row))
        return cls(model, rows)

    def __call__(self, inputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor | None:
        """Return the outputs; None if a layer's output is not one per sample."""
        fits = True

        def scale(name: str, module: Any, outputs: torch.Tensor) -> torch.Tensor:
            nonlocal fits
            if len(outputs) != len(gates):
                fits = False
                return outputs
            axis = -1 if isinstance(module, nn.Linear) else 1
            shape = [len(gates), *(1,) * (outputs.dim() - 1)]
            shape[axis] = outputs.shape[axis]
            wide = [1] * outputs.dim()
            wide[axis] = -1
            prefix = f"{name}." if name else ""
            if module.bias is not None:
                outputs = outputs - module.bias.view(wide)
            if module.weight is not None:
                outputs = outputs * gates[:, self._rows[f"{prefix}weight"]].view(shape)
            if module.bias is not None:
                outputs = outputs + gates[:, self._rows[f"{prefix}bias"]].view(shape) * module.bias.view(wide)
            return outputs

        handles = [
            module.register_forward_hook(lambda module, _, outputs, name=name: scale(name, module, outputs))
            for name, module in self._layers
        ]
        try:
            outputs: torch.Tensor = self._model(inputs)
        finally:
            for handle in handles:
                handle.remove()
        return outputs if fits else None
