"""Axes of arrays: from an option or the federation, or from type and shape if these are unambiguous."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..protocol.preparation import Preparation
from .errors import DataError
from .samples import some

# Channels of grey, colour, and colour with transparency.
_PLANES = (1, 3, 4)


def axes_of(
    called: str,
    array: NDArray[Any],
    given: str | None,
    preparation: Preparation | None,
    said: list[str],
    *,
    shape: tuple[int, ...] | None = None,
) -> str:
    """Return the letters of one sample's axes; "" for rows, or if they need not be known.

    given: the option ``axes``. shape: shape of the model's inputs, in a federation without a preparation. Raises
    DataError if the option and the file do not match.
    """
    if given is not None and len(given) != array.ndim:
        raise DataError(f"{called} has shape {array.shape}, but axes={given} names {len(given)} axes; name each once")
    if preparation is not None:
        return _of_federation(called, array, given, preparation, said)
    if array.ndim == 1:
        raise DataError(
            f"{called} has shape {array.shape}; give a row of features for each sample, as x.reshape(-1, 1)"
        )
    if array.ndim == 2 or (given is None and shape is not None and _alike(array.shape[1:], shape)):
        return ""
    if given is not None:
        return given[1:]
    if array.ndim == 3 and array.dtype == "uint8":
        said.append(f"samples of shape {array.shape[1:]} in bytes were read as grey images, axes=NHW")
        return "HW"
    if array.ndim == 4 and array.shape[1] in _PLANES and min(array.shape[2:]) > max(_PLANES):
        said.append(f"samples of shape {array.shape[1:]} were read as images with the channels first, axes=NCHW")
        return "CHW"
    raise DataError(f"{called} has shape {array.shape}; {_question(array)}")


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes differ only in axes of length 1."""
    return [length for length in one if length != 1] == [length for length in other if length != 1]


def _question(array: NDArray[Any]) -> str:
    if array.ndim == 3:
        return "name its axes: axes=NCT (channels, then time), axes=NTC (time, then channels) or axes=NHW"
    if array.ndim == 4 and array.shape[3] in _PLANES:
        return "name its axes: axes=NHWC for images with the channels last, or axes=NCHW"
    if array.ndim == 4:
        return "name its axes: axes=NCHW for images with the channels first, or axes=NHWC"
    return "name its axes, N (samples) first, as in axes=NTCHW (time, channels, height, width)"


def _of_federation(
    called: str, array: NDArray[Any], given: str | None, preparation: Preparation, said: list[str]
) -> str:
    wanted = f" with axes=N{preparation.axes}" if preparation.axes else ""
    if given is not None and preparation.axes and given[1:] != preparation.axes:
        raise DataError(
            f"{called}: axes={given}, but the federation's samples have axes=N{preparation.axes}; transpose the array"
        )
    columns = [column.name for column in preparation.columns]
    if columns and array.shape[1:] != preparation.shape:
        raise DataError(
            f"{called} has samples of shape {array.shape[1:]}, the federation's are rows of the {len(columns)} columns "
            f"{some(columns)}, in this order"
        )
    if not _fits(array.shape[1:], preparation):
        swap = ""
        if array.ndim > 2 and sorted(array.shape[1:]) == sorted(preparation.shape):
            swap = "; its axes seem to be in another order: transpose it with numpy.transpose"
        raise DataError(
            f"{called} has samples of shape {array.shape[1:]}, the federation's have {preparation.shape}{wanted}{swap}"
        )
    if columns:
        said.append(f"{called} was read as the columns {some(columns)}, in this order")
    return preparation.axes


def _fits(shape: tuple[int, ...], preparation: Preparation) -> bool:
    """Return whether samples have the federation's shape; free axes may be shorter."""
    return len(shape) == len(preparation.shape) and all(
        length == wanted or (axis in preparation.free and length < wanted)
        for axis, (length, wanted) in enumerate(zip(shape, preparation.shape, strict=True))
    )
