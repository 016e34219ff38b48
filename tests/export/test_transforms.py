"""Transforms and resizes in a preparation: at each version of the operators, within bounds, or refused."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sparrow.export.errors import ExportError, SkeletonError
from sparrow.export.preparation import Preparer, check_preparation
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.preparation import Preparation

RANDOM = np.random.default_rng(0)
KINDS = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}


def graph_of(nodes, shape, made, *, opset=21, kind="float32", **constants):
    """A preparation of raw samples of this shape whose nodes make ``output``."""
    graph = helper.make_graph(
        nodes,
        "p",
        [helper.make_tensor_value_info("input", KINDS[kind], ["batch", *shape])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", *made])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return model.SerializeToString()


def described(graph, shape, made, kind="float32"):
    return Manifest(
        task="t",
        input_shape=made,
        output_shape=(2,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=Preparation(dtype=kind, shape=shape),
        preparation_sha256=hashlib.sha256(graph).hexdigest(),
    )


def node(kind, inputs, output="output", **attributes):
    return helper.make_node(kind, inputs.split(" "), [output], **attributes)


def whole(value):
    return np.array(value, np.int64)


def single(value):
    return np.array(value, np.float32)


def stft(step=16, length=64, size=200, window=None, onesided=1):
    """Nodes, constants and shape of frames of a signal."""
    nodes = [
        node("Unsqueeze", "input two", "x"),
        node("STFT", f"x step {'' if window is None else 'window'} length", "made", onesided=onesided),
    ]
    constants = {"two": whole([2]), "step": whole(step), "length": whole(length)}
    return nodes, constants | ({} if window is None else {"window": np.ones(window, np.float32)}), (size,)


def dft(opset, axis=1, length=None, shape=(32, 1), onesided=0, inverse=0):
    named = "input" if length is None else "input length"
    constants = {} if length is None else {"length": whole(length)}
    if opset < 20:
        nodes = [node("DFT", named, "made", axis=axis, onesided=onesided, inverse=inverse)]
    else:
        named += " axis" if length is not None else "  axis"
        nodes = [node("DFT", named, "made", onesided=onesided, inverse=inverse)]
        constants["axis"] = whole(axis)
    return nodes, constants, shape


def mel(bands=8, length=64, rate=16000, lowest=20.0, highest=8000.0):
    nodes = [node("MelWeightMatrix", "bands length rate lowest highest", "w"), node("MatMul", "input w", "made")]
    constants = {"bands": whole(bands), "length": whole(length), "rate": whole(rate)}
    return nodes, constants | {"lowest": single(lowest), "highest": single(highest)}, (max(1, length // 2 + 1),)


def resize(shape=(3, 8, 9), scales=None, sizes=None, **attributes):
    named = "input  scales" if sizes is None else "input   sizes"
    constants = {"scales": single(scales)} if sizes is None else {"sizes": whole(sizes)}
    return [node("Resize", named, "made", **attributes)], constants, shape


def largest_of(case, *, opset=21, kind="float32"):
    """The graph of the largest number that the case makes of a sample, and its manifest."""
    nodes, constants, shape = case
    axes = {"axes": [1]} if opset == 17 else {}
    more = [
        node("Flatten", "made", "flat"),
        node("ReduceMax", "flat" if axes else "flat last", "most", **axes),
        node("Cast", "most", to=1),
    ]
    graph = graph_of([*nodes, *more], shape, (1,), opset=opset, kind=kind, last=whole([1]), **constants)
    return graph, described(graph, shape, (1,), kind)


def raw_of(shape, count, kind="float32"):
    if kind == "uint8":
        return RANDOM.integers(0, 255, (count, *shape)).astype(np.uint8)
    return RANDOM.normal(size=(count, *shape)).astype(np.float32)


GOOD = {
    "frames": stft(),
    "frames of a window": stft(window=64),
    "whole spectra": stft(onesided=0),
    "frames of another length": stft(length=50),
    "bands": mel(),
    "linear": resize(scales=[1, 1, 0.5, 2.0], mode="linear"),
    "linear with axes": resize(sizes=[4, 5], axes=[2, 3], mode="linear", antialias=1),
    "channels last": resize((8, 9, 3), sizes=[4, 5], axes=[1, 2], mode="linear", antialias=1),
    "cubic": resize(sizes=[4, 5], axes=[2, 3], mode="cubic"),
}


def run(graph, manifest, shape, kind="float32"):
    check_preparation(graph, manifest)
    preparer = Preparer(graph)
    raw = raw_of(shape, 7, kind)
    together = preparer(raw)
    for count in (1, 2):
        np.testing.assert_allclose(preparer(raw[:count]), together[:count], rtol=1e-5)
    return raw, together


@pytest.mark.parametrize("opset", [17, 18, 19, 20, 21])
@pytest.mark.parametrize("case", GOOD)
def test_a_free_batch_is_accepted_at_every_version(case, opset):
    named = {each.name for part in GOOD[case][0] for each in part.attribute}
    if opset == 17 and named & {"antialias", "axes"}:
        pytest.skip("Resize has these attributes from version 18 on")
    _, made = run(*largest_of(GOOD[case], opset=opset), GOOD[case][2])
    assert made.shape == (7, 1)


@pytest.mark.parametrize("opset", [17, 19, 20, 21])
def test_the_axis_of_a_transform_is_an_attribute_first_and_an_input_later(opset):
    nodes, constants, shape = dft(opset, onesided=1)
    graph = graph_of([*nodes, node("Identity", "made")], shape, (17, 2), opset=opset, **constants)
    raw, made = run(graph, described(graph, shape, (17, 2)), shape)
    wanted = np.fft.rfft(raw[..., 0])
    np.testing.assert_allclose(made[..., 0] + 1j * made[..., 1], wanted, atol=1e-4)


HOSTILE = {
    "a step of 0": (stft(step=0), "input 1 must be one constant from 1"),
    "a step back": (stft(step=-3), "input 1 must be one constant from 1"),
    "frames longer than the signal": (stft(length=201), "at most the signal's"),
    "huge frames": (stft(length=2**40), "input 3 must be one constant"),
    "another window": (stft(window=80), "window has the shape"),
    "a huge spectrum": (dft(21, length=2**40), "input 1 must be one constant"),
    "too much at once": (dft(21, length=2**20 - 1, shape=(8, 1), onesided=1), "bytes of values would be alive"),
    "an endless transform": (stft(step=1, length=2**16 + 1, size=2**17), "FLOPs for one sample|bytes of values"),
    "the last axis": (dft(21, axis=2), "axis must be a constant"),
    "an axis far away": (dft(19, axis=7), "axis must be a constant"),
    "neither real nor complex": (dft(21, shape=(32, 3)), "must be 1, for real values, or 2"),
    "the samples' axis": (dft(21, axis=0, onesided=1), "the preparation returns"),
    "countless bands": (mel(bands=2**40), "input 0 must be one constant"),
    "many bands": (mel(bands=2**20, length=2**16), "predicted to take"),
    "bands beyond the spectrum": (mel(highest=16000.0), "do not lie within the spectrum"),
    "bands at no frequency": (mel(highest=np.nan), "do not lie within the spectrum"),
    "bands below 0": (mel(lowest=-700.0), "do not lie within the spectrum"),
    "bands upside down": (mel(lowest=8000.0, highest=20.0), "do not lie within the spectrum"),
    "no rate": (mel(rate=0), "input 2 must be one constant"),
    "huge sizes": (resize(sizes=[1, 3, 2**20, 2**20], mode="linear"), "the node"),
    "huge scales": (resize(scales=[1, 1, 1e9, 1e9]), "the node"),
    "scales that are none": (resize(scales=[1, 1, np.nan, 1]), "is not above 0"),
    "nothing": (resize(scales=[1, 1, 0, 0]), "is not above 0"),
    "less than nothing": (resize(sizes=[1, 3, -4, 4]), "is not above 0"),
    "more samples": (resize(scales=[2, 1, 1, 1]), "the preparation returns"),
    "one side as the other": (
        resize(sizes=[4, 4], axes=[2, 3], keep_aspect_ratio_policy="not_smaller"),
        "keeps an aspect ratio",
    ),
    "a crop": (
        resize(sizes=[1, 3, 4, 4], coordinate_transformation_mode="tf_crop_and_resize"),
        "slice before it",
    ),
    "a square on the way": (
        resize((1, 16_000, 2), sizes=[2, 16_000], axes=[2, 3], mode="linear", antialias=1),
        "bytes of values would be alive",
    ),
    "a long axis": (resize((1, 1, 4), sizes=[2**23], axes=[3], mode="linear"), "bytes of values would be alive"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_transform_is_refused_by_what_is_wrong_with_it(case):
    built, message = HOSTILE[case]
    opset = 19 if case == "an axis far away" else 21
    with pytest.raises(SkeletonError, match=message):
        check_preparation(*largest_of(built, opset=opset))


def test_bytes_are_not_resized_by_a_cubic():
    cubic = resize(sizes=[4, 5], axes=[2, 3], mode="cubic")
    with pytest.raises(SkeletonError, match="cast to float first"):
        check_preparation(*largest_of(cubic, kind="uint8"))
    linear = resize(sizes=[4, 5], axes=[2, 3], mode="linear")
    run(*largest_of(linear, kind="uint8"), (3, 8, 9), "uint8")


def test_sizes_that_the_data_decide_are_refused():
    nodes = [
        node("ReduceMax", "input", "top", keepdims=0),
        node("Cast", "top", "size", to=7),
        node("Reshape", "size line", "sizes"),
        node("Resize", "input   sizes", "made", axes=[3]),
    ]
    for kind, data in (("Resize", nodes), ("STFT", [*nodes[:3], *stft()[0]])):
        constants = {"line": whole([1])}
        shape = (3, 8, 9)
        if kind == "STFT":
            constants, shape = constants | stft()[1], (200,)
            data[-1].input[1] = "size"
            constants.pop("step")
        with pytest.raises(SkeletonError, match="constant"):
            check_preparation(*largest_of((data, constants, shape)))


# --- axes that are free -----------------------------------------------------------------------------------------------

LONGEST = 100_000
ENDS = [node("ReduceMax", "big last", "most"), node("Concat", "input most", "both", axis=1)]
PLACES = {"last": whole([1]), "many": whole([1, 10**7]), "one": whole([1])}
SHRINKING = {
    "a slice from its end to its beginning": (
        [node("Slice", "input start end last", "part"), node("Tile", "part many", "big")],
        {"start": whole([-100]), "end": whole([50])},
    ),
    "a slice backwards": (
        [node("Slice", "input start end last back", "part"), node("Tile", "part many", "big")],
        {"start": whole([50]), "end": whole([-100]), "back": whole([-1])},
    ),
    "what is left": (
        [
            node("Shape", "input", "length", start=1),
            node("Sub", "longest length", "left"),
            node("ConstantOfShape", "left", "zeros"),
            node("Unsqueeze", "zeros first", "big"),
        ],
        {"longest": whole([LONGEST + 1]), "first": whole([0])},
    ),
    "a last piece": (
        [
            helper.make_node("Split", ["input"], ["a", "b", "part"], axis=1, num_outputs=3),
            node("Tile", "part many", "big"),
        ],
        {},
    ),
    "a transform as long as the sample": (
        [node("Unsqueeze", "input two", "x"), node("DFT", "x  last1", "y"), node("Flatten", "y", "big")],
        {"two": whole([2]), "last1": whole(1)},
    ),
}


def of_free_samples(nodes, constants):
    graph = helper.make_graph(
        [*nodes, *ENDS, node("ReduceMax", "both last")],
        "p",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", "samples"])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 1])],
        [numpy_helper.from_array(value, name) for name, value in (PLACES | constants).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    manifest = described(model, (LONGEST,), (1,))
    described_free = manifest.preparation.model_copy(
        update={"reader": "audio", "free": (0,), "rate": 16_000, "axes": "T"}
    )
    return model, manifest.model_copy(update={"preparation": described_free})


@pytest.mark.parametrize("case", SHRINKING)
def test_what_may_be_larger_for_a_short_sample_is_refused(case):
    with pytest.raises(SkeletonError, match=r"shorter samples|not known"):
        check_preparation(*of_free_samples(*SHRINKING[case]))


def test_what_grows_with_a_free_axis_is_accepted():
    nodes = [
        node("Pad", "input more", "padded"),
        node("Slice", "padded start end last", "cut"),
        node("Unsqueeze", "cut two", "x"),
        node("STFT", "x step  length", "spectra"),
        node("Flatten", "spectra", "big"),
    ]
    constants = {"more": whole([0, 0, 0, 400]), "start": whole([0]), "end": whole([400]), "two": whole([2])}
    graph, manifest = of_free_samples(nodes, constants | {"step": whole(100), "length": whole(64)})
    check_preparation(graph, manifest)
    made = Preparer(graph)([single(np.ones(length)) for length in (1, 64, 5000)])
    assert made.shape == (3, 1)


# --- any numbers ------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-(2**40), -3, -1, 0, 1, 2, 3, 5, 7, 16, 64, 100, 199, 200, 201, 4096, 2**20, 2**31, 2**40])
FACTORS = st.sampled_from([-1.0, 0.0, 1e-9, 0.25, 0.5, 1.0, 1.5, 3.0, 1e4, 1e9, 3e38, float("inf"), float("nan")])
HERTZ = st.sampled_from([-700.0, -1.0, 0.0, 20.0, 4000.0, 8000.0, 8001.0, 1e9, float("inf"), float("nan")])
CHOICES = {
    "mode": ["nearest", "linear", "cubic", "spline"],
    "antialias": [0, 1],
    "coordinate_transformation_mode": ["half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize", "none"],
    "keep_aspect_ratio_policy": ["stretch", "not_larger", "not_smaller"],
    "exclude_outside": [0, 1],
}


@st.composite
def cases(draw):
    """An operator that would run, some of whose numbers are others: wrong or huge."""

    def some(right, others):
        return draw(others) if draw(st.integers(0, 5)) == 0 else right

    opset = draw(st.sampled_from([17, 18, 19, 20, 21]))
    kind = draw(st.sampled_from(["STFT", "DFT", "MelWeightMatrix", "Resize"]))
    flag = st.sampled_from([0, 1])
    if kind == "STFT":
        length = draw(st.sampled_from([1, 50, 64]))
        window = some(draw(st.sampled_from([None, length])), st.sampled_from([0, 1, 64, 100]))
        step = draw(st.sampled_from([1, 16, 300]))
        return opset, stft(some(step, NUMBERS), some(length, NUMBERS), 200, window, draw(flag))
    if kind == "DFT":
        shape = some(draw(st.sampled_from([(32, 1), (30, 2), (4, 9, 1)])), st.sampled_from([(5, 3), (7,), (1, 1)]))
        length = some(draw(st.sampled_from([None, 7, 64])), NUMBERS)
        return opset, dft(opset, some(1, st.integers(-5, 5)), length, shape, some(0, flag), some(0, flag))
    if kind == "MelWeightMatrix":
        length = some(64, st.sampled_from([1, 2, 3, 63, 4096]))
        numbers = some(8, NUMBERS), length, some(16000, NUMBERS)
        return opset, mel(*numbers, some(20.0, HERTZ), some(8000.0, HERTZ))
    shape = draw(st.sampled_from([(3, 8, 9), (3, 20, 6), (40, 5), (2, 4, 4, 4)]))
    names = sorted(some(set(), st.sets(st.sampled_from(sorted(CHOICES)))))
    attributes = {name: draw(st.sampled_from(CHOICES[name])) for name in names}
    attributes.setdefault("mode", draw(st.sampled_from(["nearest", "linear", "cubic"])))
    last = len(shape)
    if opset > 17 and draw(st.booleans()):
        axes = some([last - 1, last], st.lists(st.integers(-3, 6), min_size=1, max_size=3))
        return opset, resize(shape, sizes=[some(4, NUMBERS) for _ in range(2)], axes=axes, **attributes)
    factors = [some(1.0, FACTORS) for _ in range(last - 1)] + [some(draw(st.sampled_from([0.5, 2.0])), FACTORS)] * 2
    return opset, resize(shape, scales=factors[: some(last + 1, st.integers(0, 3))], **attributes)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(case=cases(), kind=st.sampled_from(["float32", "float32", "uint8"]))
def test_any_numbers_are_refused_or_run(case, kind):
    opset, built = case
    graph, manifest = largest_of(built, opset=opset, kind=kind)
    try:
        check_preparation(graph, manifest)
        preparer = Preparer(graph)
    except (SkeletonError, ExportError):
        return
    for count in (1, 3):
        try:
            made = preparer(raw_of(built[2], count, kind))
        except ExportError:
            # Layouts that ONNX Runtime does not resize are found when they run.
            continue
        assert made.shape == (count, 1)


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = {
    "frames": (stft(step=64, length=1000, size=200_000), "float32"),
    "a long transform": (dft(21, length=2**18 - 1, shape=(1000, 1), onesided=1), "float32"),
    "a long power of two": (dft(21, length=2**20, shape=(1000, 1), onesided=1), "float32"),
    "down": (resize((2000, 2000, 3), sizes=[100, 100], axes=[1, 2], mode="linear", antialias=1), "float32"),
    "a long way": (resize((1, 4000, 2), sizes=[2, 4000], axes=[2, 3], mode="linear", antialias=1), "float32"),
    "cubic": (resize((3, 500, 500), sizes=[1000, 1000], axes=[2, 3], mode="cubic"), "float32"),
    "a long line": (resize((1, 1, 4), sizes=[2**20], axes=[3], mode="linear"), "float32"),
}

MEASURE = """
import resource, sys
import numpy as np, onnx, onnxruntime
from onnx import ModelProto
from sparrow.graphs.bounds import Walk
data = sys.stdin.buffer.read()
options = onnxruntime.SessionOptions()
options.enable_cpu_mem_arena = False
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
shape = [1 if isinstance(each, str) else each for each in session.get_inputs()[0].shape]
raw = np.ones(shape, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, {"input": raw})
taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(taken, Walk(ModelProto.FromString(data), samples=1).run())
"""


@pytest.mark.integration
@pytest.mark.parametrize("case", LARGE)
def test_what_an_operator_takes_is_within_what_is_counted(case):
    built, kind = LARGE[case]
    graph, manifest = largest_of(built, kind=kind)
    check_preparation(graph, manifest)
    done = subprocess.run([sys.executable, "-c", MEASURE], input=graph, capture_output=True, check=True)
    taken, counted = (int(each) for each in done.stdout.split())
    assert taken <= counted + 4 * 2**20
