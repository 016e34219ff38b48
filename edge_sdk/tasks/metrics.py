"""Metrics of a task in addition to its loss, in numpy.

A metric takes all outputs [N, ...] and all targets [N, ...] of held-out data and returns one number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Metric = Callable[[NDArray[Any], NDArray[Any]], float]


def top1(outputs: NDArray[Any], targets: NDArray[Any], ignored: int | None = None) -> float:
    """Return the share of targets whose class has the highest score. Targets are samples, characters or pixels.

    outputs: [N, C] or [N, C, ...], targets [N] or [N, ...]; for sequences, outputs [N, T, C] and targets [N, T].
    ignored: label of targets that do not count.
    """
    axis = 1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else outputs.ndim - 1
    right = outputs.argmax(axis) == targets
    return float((right if ignored is None else right[targets != ignored]).mean())


def mae(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    """Return the mean absolute error."""
    return float(np.abs(outputs.astype(np.float64) - targets.reshape(outputs.shape)).mean())


def rmse(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    """Return the root of the mean squared error."""
    return float(np.sqrt(np.square(outputs.astype(np.float64) - targets.reshape(outputs.shape)).mean()))


def r2(outputs: NDArray[Any], targets: NDArray[Any]) -> float:
    """Return the explained share of the targets' variance, at most 1; 0 if they have no variance."""
    wanted = targets.astype(np.float64)
    rest = np.square(outputs.reshape(wanted.shape) - wanted).sum()
    variance = np.square(wanted - wanted.mean(0)).sum()
    return float(1 - rest / variance) if variance > 0 else 0.0


def iou(outputs: NDArray[Any], targets: NDArray[Any], ignored: int | None = None) -> float:
    """Return the intersection over union of a segmentation, averaged over the classes that occur.

    outputs: scores [N, C, ...] of C classes, or [N, 1, ...] or [N, ...] of one class, predicted if above 0. targets:
    class indices [N, ...], 0 and 1 for one class. ignored: label of targets that do not count.
    """
    shape = targets.shape
    known = np.ones(shape, np.bool_) if ignored is None else targets != ignored
    one = outputs.shape == shape or outputs.shape[1] == 1
    if one:
        pairs = [(outputs.reshape(shape) > 0, targets > 0.5)]
    else:
        found = outputs.argmax(1).reshape(shape)
        pairs = [(found == each, targets == each) for each in range(outputs.shape[1])]
    unions = [(float((one & other & known).sum()), float(((one | other) & known).sum())) for one, other in pairs]
    shares = [both / either for both, either in unions if either]
    return float(np.mean(shares)) if shares else 1.0


# The metrics that a task may name.
METRICS: dict[str, Metric] = {"top1": top1, "mae": mae, "rmse": rmse, "r2": r2, "iou": iou}


def measure(
    metrics: Mapping[str, Metric], pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]], ignored: int | None = None
) -> dict[str, float]:
    """Return each metric by name, over all batches of outputs and targets; empty without batches.

    A metric that fails or is not finite is logged and left out. ignored: label that ``top1`` and ``iou`` leave out.
    """
    found: dict[str, float] = {}
    of_classes = {"ignored": ignored}
    if not pairs:
        return found
    outputs, targets = (np.concatenate(each) for each in zip(*pairs, strict=True))
    for name, metric in metrics.items():
        try:
            value = float(metric(outputs, targets, **(of_classes if metric in (top1, iou) else {})))
        # The user's code; the loss is known nevertheless.
        except Exception as error:
            log.warning("metric %s fails on outputs %s and targets %s: %s", name, outputs.shape, targets.shape, error)
            continue
        if math.isfinite(value):
            found[name] = value
        else:
            log.warning("metric %s is %s on held-out data; left out", name, value)
    return found
