"""Graphs of models that tests publish again and again, compiled once in each process.

Tracing a model takes seconds, and depends on nothing but its arguments. These are recognised by their pickled form,
with tensors by their values. What cannot be pickled, such as a class inside a function, is compiled each time.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

_made: dict[tuple[Any, ...], Any] = {}


class _Values(pickle.Pickler):
    """Pickles tensors by their values; PyTorch's own form has addresses."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            return str, (repr((type(value).__name__, value.shape, value.dtype, value.requires_grad, data)),)
        return NotImplemented


def once(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which does its work once for the same arguments."""

    @functools.wraps(compile_)
    def made(*arguments: Any) -> Any:
        written = io.BytesIO()
        try:
            _Values(written, protocol=5).dump(arguments)
        except Exception:
            return compile_(*arguments)
        key = compile_.__name__, hashlib.sha256(written.getvalue()).hexdigest()
        if key not in _made:
            _made[key] = compile_(*arguments)
        return _made[key]

    return made
