"""Preparations of a user's own files, as ONNX graphs.

Each graph maps raw samples [N, *raw] to inputs of a model [N, *shape], float32. Constants come from the publisher's
training samples; with ``own`` each device inserts its own. A column or channel whose standard deviation is at most
``FLAT`` times its mean is only centred. A missing number (NaN) becomes the mean, an unknown category (-1) zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Array
from sparrow.protocol.preparation import OWN_DEVIATION, OWN_MEAN, Column, Preparation

if TYPE_CHECKING:
    from sparrow.graphs.building import Building

# As in skeletons, so that both form one model.
OPSET = 21
IR_VERSION = 10

# Smallest ratio of standard deviation to mean that is not rounding: float32 has 24 bits.
FLAT = 1e-6

BYTE = 255.0

MELS = 40
FRAMES = 100
# Bounds of a hop in seconds; within them, a sound has about ``FRAMES`` hops.
SHORTEST_HOP = 0.01
LONGEST_HOP = 0.02
# Hops of a frame.
FRAME = 2.5
# Smallest energy of a mel band before its logarithm.
QUIETEST = 1e-5


@dataclass(frozen=True)
class BuiltPreparation:
    """A preparation to publish: the graph, serialised ONNX, and its description."""

    graph: bytes
    description: Preparation


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each column or channel, float64 [entries]; 0 and 1 for categories.

    flat [entries]: True if all values are the same; the deviation is then 1.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    flat: NDArray[np.bool_]


def statistics_of(batches: Iterable[Array], channel: int, columns: Sequence[Column] = ()) -> Statistics:
    """Return the statistics of raw samples along their axis ``channel``, without NaN.

    batches: arrays [N, *raw], read once.
    """
    count: Any = 0.0
    total: Any = 0.0
    squares: Any = 0.0
    origin: Any = None
    for batch in batches:
        values = np.moveaxis(batch, channel + 1, -1).astype(np.float64).reshape(-1, batch.shape[channel + 1])
        known = ~np.isnan(values)
        if origin is None:
            # Differences from the first batch's means keep the squares of large offsets precise.
            with np.errstate(invalid="ignore", divide="ignore"):
                origin = np.nan_to_num(np.where(known, values, 0).sum(0) / known.sum(0))
        shifted = np.where(known, values - origin, 0)
        count = count + known.sum(0)
        total = total + shifted.sum(0)
        squares = squares + np.square(shifted).sum(0)
    seen = np.maximum(count, 1)
    mean = origin + total / seen
    deviation = np.sqrt(np.maximum(squares / seen - np.square(total / seen), 0))
    flat = deviation <= FLAT * np.abs(mean)
    deviation = np.where(flat, 1.0, deviation)
    named = [place for place, column in enumerate(columns) if column.categories]
    mean[named] = 0.0
    deviation[named] = 1.0
    return Statistics(mean, deviation, flat)


def own_constants(found: Statistics, columns: Sequence[Column]) -> dict[str, NDArray[np.float32]]:
    """Return a device's statistics by the names of the initialisers."""
    kept = [place for place in range(len(found.mean)) if not (columns and columns[place].categories)]
    return {OWN_MEAN: found.mean[kept].astype(np.float32), OWN_DEVIATION: found.deviation[kept].astype(np.float32)}


def prepare_rows(columns: Sequence[Column], found: Statistics, *, own: bool = False) -> BuiltPreparation:
    """Return the preparation of a table: standardised numbers, then one output per category, in this order."""
    numbers = [place for place, column in enumerate(columns) if not column.categories]
    graph = _new_graph()
    parts = []
    if numbers:
        values = "input"
        if len(numbers) < len(columns):
            values = graph.add("Gather", "input", graph.whole(*numbers), axis=1)
        parts.append(_standardised(graph, values, found, numbers, (len(numbers),), own=own))
    for place, column in enumerate(columns):
        if column.categories:
            value = graph.add("Gather", "input", graph.whole(place), axis=1)
            named = graph.constant(np.arange(len(column.categories), dtype=np.float32))
            parts.append(graph.add("Cast", graph.add("Equal", value, named), to=1))
    width = len(numbers) + sum(len(column.categories) for column in columns)
    graph.add("Concat", *parts, axis=1, output="output")
    steps = ["standardise"] * bool(numbers) + ["one-hot"] * (len(numbers) < len(columns))
    shape = (len(columns),)
    more: dict[str, Any] = {"own": own and bool(numbers), "columns": tuple(columns), "reader": "rows"}
    description = _describe("float32", shape, steps, found, **more)
    return BuiltPreparation(_model(graph, "float32", shape, (width,)), description)


def prepare_array(
    dtype: str, shape: tuple[int, ...], axes: str, found: Statistics | None, *, own: bool = False
) -> BuiltPreparation:
    """Return the preparation of arrays with sample axes ``axes``: channels first, then scaled or standardised.

    axes: "" or F for rows, HW, CHW, HWC, CT or TC. found: statistics by channel (by column of rows) to standardise
    with; None divides by 255.
    """
    graph = _new_graph()
    order = sorted(range(len(axes)), key=lambda place: "CHWT".find(axes[place]) if axes not in ("", "F") else place)
    value = "input"
    made = tuple(shape)
    steps: list[str] = []
    if dtype != "float32":
        value = graph.add("Cast", value, to=1)
    if order != list(range(len(axes))):
        value = graph.add("Transpose", value, perm=[0, *(place + 1 for place in order)])
        made = tuple(shape[place] for place in order)
        steps.append(f"axes {axes} to {''.join(axes[place] for place in order)}")
    if axes == "HW":
        value = graph.add("Unsqueeze", value, graph.whole(1))
        made = (1, *made)
    channel = 0 if axes in ("", "F") else max(axes.find("C"), 0)
    if axes == "HW":
        entries: tuple[int, ...] = (1, 1, 1)
    else:
        entries = (made[0], *(1,) * (len(made) - 1))
    if found is None:
        graph.add("Div", value, graph.constant(np.array(BYTE, np.float32)), output="output")
        steps.append("scale by 1/255")
    else:
        value = _standardised(graph, value, found, range(len(found.mean)), entries, own=own)
        graph.add("Identity", value, output="output")
        steps.append("standardise")
    description = _describe(dtype, shape, steps, found, own=own, axes=axes, channel=channel)
    return BuiltPreparation(_model(graph, dtype, shape, made), description)


@dataclass(frozen=True)
class Hearing:
    """Framing of sounds for log-mel energies."""

    # Samples per second.
    rate: int
    # Samples of a sound that are used; shorter sounds are padded with silence.
    clip: int
    # Samples of a frame.
    frame: int
    # Samples between the starts of two frames.
    hop: int

    @classmethod
    def of(cls, rate: int, longest: int) -> Hearing:
        """Return frames for sounds of up to ``longest`` samples."""
        hop = round(min(max(longest / FRAMES, SHORTEST_HOP * rate), LONGEST_HOP * rate))
        frame = round(FRAME * hop)
        return cls(rate, max(longest, 1 << (frame - 1).bit_length()), frame, hop)

    @property
    def frames(self) -> int:
        """Frames of a clip."""
        return 1 + (self.clip - self.bins) // self.hop

    @property
    def bins(self) -> int:
        """Samples of a Fourier transform: the next power of two."""
        return 1 << (self.frame - 1).bit_length()


def mel_weights(rate: int, bins: int) -> NDArray[np.float32]:
    """Return triangular filters, float32 [bins // 2 + 1, MELS], evenly spaced in mel from 20 Hz to half the rate.

    mel(f) = 2595 log10(1 + f / 700).
    """
    frequencies = np.linspace(0, rate / 2, bins // 2 + 1)
    lowest, highest = (2595 * np.log10(1 + each / 700) for each in (20.0, rate / 2))
    edges = 700 * (10 ** (np.linspace(lowest, highest, MELS + 2) / 2595) - 1)
    rising = (frequencies[:, None] - edges[None, :-2]) / np.diff(edges)[None, :-1]
    falling = (edges[None, 2:] - frequencies[:, None]) / np.diff(edges)[None, 1:]
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


def prepare_sounds(
    hearing: Hearing, longest: int, found: Statistics | None, *, step: float | None = None
) -> BuiltPreparation:
    """Return the preparation of mono sounds [N, T] of up to ``longest`` samples: log-mel energies [1, MELS, frames].

    found: statistics by mel band; None leaves the energies unscaled. step: seconds between two windows of a recording;
    None for whole sounds of various lengths.
    """
    graph = _new_graph()
    clip = hearing.clip
    bins = hearing.bins
    padded = graph.add("Pad", "input", graph.whole(0, 0, 0, clip))
    cut = graph.slice(padded, 1, 0, clip)
    column = graph.add("Unsqueeze", cut, graph.whole(2))
    window = np.zeros(bins, np.float32)
    window[: hearing.frame] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(hearing.frame) / hearing.frame)
    spectrum = graph.add(
        "STFT",
        column,
        graph.constant(np.array(hearing.hop, np.int64)),
        graph.constant(window),
        graph.constant(np.array(bins, np.int64)),
        onesided=1,
    )
    squares = graph.add("Mul", spectrum, spectrum)
    power = graph.add("ReduceSum", squares, graph.whole(3), keepdims=0)
    mels = graph.add("MatMul", power, graph.constant(mel_weights(hearing.rate, bins)))
    logs = graph.add("Log", graph.add("Max", mels, graph.constant(np.array(QUIETEST, np.float32))))
    steps = [f"{MELS} log-mel bands of {hearing.frame} samples every {hearing.hop}"]
    if found is not None:
        logs = _standardised(graph, logs, found, range(MELS), (MELS,), own=False)
        steps.append("standardise")
    turned = graph.add("Transpose", logs, perm=[0, 2, 1])
    graph.add("Unsqueeze", turned, graph.whole(1), output="output")
    windows = step is not None
    description = Preparation(
        reader="recordings" if windows else "audio",
        dtype="float32",
        shape=(longest,),
        free=() if windows else (0,),
        rate=hearing.rate,
        step=step,
        axes="T",
        steps=tuple(steps),
    )
    taken: tuple[int | str, ...] = (longest,) if windows else ("samples",)
    return BuiltPreparation(_model(graph, "float32", taken, (1, MELS, hearing.frames)), description)


def prepare_pictures(size: tuple[int, int], shape: tuple[int, ...], free: tuple[int, ...]) -> BuiltPreparation:
    """Return the preparation of pictures [N, H, W, 3] of bytes: resized to ``size``, channels first, in [0, 1]."""
    graph = _new_graph()
    value = "input"
    steps = []
    if free or shape[:2] != size:
        # Resized as bytes: a picture of 4096 x 4096 takes 50 MB, as floats 250 MB. Rounding is at most half a level.
        sizes = graph.whole(*size)
        value = graph.add("Resize", value, "", "", sizes, mode="linear", antialias=1, axes=[1, 2])
        steps.append(f"resize to {size[0]} x {size[1]}")
    value = graph.add("Transpose", graph.add("Cast", value, to=1), perm=[0, 3, 1, 2])
    graph.add("Div", value, graph.constant(np.array(BYTE, np.float32)), output="output")
    description = Preparation(
        reader="images",
        dtype="uint8",
        shape=(*shape[:2], 3),
        free=free,
        axes="HWC",
        steps=(*steps, "axes HWC to CHW", "scale by 1/255"),
    )
    names = tuple(f"axis_{axis}" if axis in free else length for axis, length in enumerate((*shape[:2], 3)))
    return BuiltPreparation(_model(graph, "uint8", names, (3, *size)), description)


def _describe(
    dtype: str, shape: tuple[int, ...], steps: Sequence[str], found: Statistics | None, *, own: bool, **more: Any
) -> Preparation:
    published = found is not None and not own and found.mean.size == (shape[more.get("channel", 0)] if shape else 0)
    return Preparation.model_validate(
        {
            "dtype": dtype,
            "shape": shape,
            "steps": (*steps, *("by each device's own statistics",) * own),
            "mean": tuple(found.mean.tolist()) if published and found is not None else (),
            "deviation": tuple(found.deviation.tolist()) if published and found is not None else (),
            "own": own,
            "missing": found is not None and dtype == "float32",
            **more,
        }
    )


def _standardised(
    graph: Building, value: str, found: Statistics, kept: Iterable[int], shape: tuple[int, ...], *, own: bool
) -> str:
    """Add (x - mean) / deviation, with 0 for missing values."""
    places = list(kept)
    mean, deviation = (each[places].astype(np.float32).reshape(shape) for each in (found.mean, found.deviation))
    names = (
        (_open(graph, OWN_MEAN, shape), _open(graph, OWN_DEVIATION, shape))
        if own
        else (graph.constant(mean), graph.constant(deviation))
    )
    scaled = graph.add("Div", graph.add("Sub", value, names[0]), names[1])
    missing = graph.add("IsNaN", scaled)
    return graph.add("Where", missing, graph.constant(np.array(0, np.float32)), scaled)


def _new_graph() -> Building:
    # Imported here, because it imports onnx.
    from sparrow.graphs.building import Building

    return Building("")


def _open(graph: Building, name: str, shape: tuple[int, ...]) -> str:
    # An initialiser with type and shape, but without data.
    import onnx

    graph.initializers.append(onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=shape))
    return name


def _model(graph: Building, dtype: str, shape: tuple[int | str, ...], made: tuple[int, ...]) -> bytes:
    import onnx.helper

    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    whole = onnx.helper.make_graph(
        graph.nodes,
        "preparation",
        [onnx.helper.make_tensor_value_info("input", kind, ["batch", *shape])],
        [onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", *made])],
        graph.initializers,
    )
    opset = onnx.helper.make_opsetid("", OPSET)
    model = onnx.helper.make_model(whole, opset_imports=[opset], ir_version=IR_VERSION)
    serialised: bytes = model.SerializeToString(deterministic=True)
    return serialised
