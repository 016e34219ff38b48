"""A page checks a preparation's description, runs its graph as the SDK does, and puts it in front of its exports."""

from __future__ import annotations

import base64
import hashlib
import json

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime
import pytest
from onnx import TensorProto

from edge_sdk.tasks.preparing import BuiltPreparation, prepare_array, prepare_rows, statistics_of
from sparrow.coordinator.web import runtime
from sparrow.export.preparation import Preparer, compose_bytes, draw_raw
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.preparation import Column, Preparation, Targets

pytestmark = pytest.mark.integration

needs_runtime = pytest.mark.skipif(runtime.missing(), reason="no runtime for pages here: run sparrow web")

# --- the description ---------------------------------------------------------------------------------------------

COLUMNS = (Column(name="heat"), Column(name="fuel", categories=("gas", "wood", "Öl")), Column(name="load"))
DESCRIBED = Manifest(
    task="own",
    input_shape=(5,),
    output_shape=(3,),
    tensors=(TensorSpec(name="w", shape=(1,)),),
    preparation=Preparation(shape=(3,), columns=COLUMNS, steps=("one-hot",)),
    preparation_sha256="ab" * 32,
    targets=Targets(column="room", names=("hall", "kitchen"), spare=1),
)

READ = """({ Manifest }, text) => {
  try {
    const { preparation, targets, valuesDigest, samplesDigest } = new Manifest(text);
    return { preparation, targets, valuesDigest, samplesDigest };
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
}"""


def test_a_description_is_kept(modules):
    found = modules(READ, module="manifest.js", argument=DESCRIBED.text)
    assert found["preparation"] == {
        "reader": "arrays",
        "free": [],
        "rate": None,
        "step": None,
        "dtype": "float32",
        "shape": [3],
        "axes": "",
        "own": False,
        "columns": [{"name": column.name, "categories": list(column.categories)} for column in COLUMNS],
    }
    assert found["targets"] == {
        "kind": "classes",
        "column": "room",
        "names": ["hall", "kitchen"],
        "spare": 1,
        "numbered": False,
    }
    assert found["valuesDigest"] == DESCRIBED.values_digest
    bare = Manifest.model_validate(
        DESCRIBED.model_dump() | {"preparation": None, "preparation_sha256": None, "targets": None}
    )
    plain = modules(READ, module="manifest.js", argument=bare.text)
    assert plain == {"preparation": None, "targets": None, "samplesDigest": None, "valuesDigest": bare.values_digest}


def test_how_samples_are_read_is_kept(modules):
    sounds = Preparation(reader="audio", shape=(480_000,), free=(0,), rate=16_000, axes="T")
    described = DESCRIBED.model_dump(mode="json") | {"preparation": sounds.model_dump(mode="json")}
    found = modules(READ, module="manifest.js", argument=Manifest.model_validate(described).text)["preparation"]
    assert [found[key] for key in ("reader", "shape", "free", "rate", "step")] == [
        "audio",
        [480_000],
        [0],
        16_000,
        None,
    ]


def test_what_browsers_keep_of_rows_and_arrays_stays_theirs(modules):
    """Their digest is that of a page which did not know readers yet."""
    found = modules(READ, module="manifest.js", argument=DESCRIBED.text)
    columns = [{"name": column.name, "categories": list(column.categories)} for column in COLUMNS]
    before = {"dtype": "float32", "shape": [3], "axes": "", "own": False, "columns": columns}
    text = json.dumps([before, found["targets"]], separators=(",", ":"), ensure_ascii=False)
    assert found["samplesDigest"] == hashlib.sha256(text.encode()).hexdigest()


HOSTILE = {
    "another type": ("preparation", "dtype", "float64"),
    "a type of JavaScript's": ("preparation", "dtype", "constructor"),
    "no shape": ("preparation", "shape", None),
    "an endless shape": ("preparation", "shape", [2**31, 2**31]),
    "a negative shape": ("preparation", "shape", [-3]),
    "half a column": ("preparation", "shape", [2.5]),
    "many axes": ("preparation", "shape", [1] * 8),
    "odd axes": ("preparation", "axes", "<script>"),
    "axes that are no text": ("preparation", "axes", ["C"]),
    "another width than columns": ("preparation", "shape", [4]),
    "columns that are none": ("preparation", "columns", "heat"),
    "columns of numbers": ("preparation", "columns", [1, 2, 3]),
    "a column twice": ("preparation", "columns", [{"name": "a"}, {"name": "a"}, {"name": "b"}]),
    "a column without a name": ("preparation", "columns", [{"name": "a"}, {"name": ""}, {"name": "b"}]),
    "a long name": ("preparation", "columns", [{"name": "a"}, {"name": "b" * 201}, {"name": "c"}]),
    "categories of numbers": (
        "preparation",
        "columns",
        [{"name": "a", "categories": [1]}, {"name": "b"}, {"name": "c"}],
    ),
    "a category twice": (
        "preparation",
        "columns",
        [{"name": "a", "categories": ["x", "x"]}, {"name": "b"}, {"name": "c"}],
    ),
    "too many categories": (
        "preparation",
        "columns",
        [{"name": "a", "categories": [str(n) for n in range(1001)]}, {"name": "b"}, {"name": "c"}],
    ),
    "another reader": ("preparation", "reader", "films"),
    "a reader that is none": ("preparation", "reader", ["images"]),
    "a free axis beyond": ("preparation", "free", [1]),
    "a free axis below": ("preparation", "free", [-1]),
    "a free axis twice": ("preparation", "free", [0, 0]),
    "free axes that are none": ("preparation", "free", 0),
    "half a free axis": ("preparation", "free", [0.5]),
    "no samples a second": ("preparation", "rate", 0),
    "samples a second without end": ("preparation", "rate", 1e7),
    "a rate that is a list": ("preparation", "rate", [16000]),
    "a step backwards": ("preparation", "step", -1),
    "a step of days": ("preparation", "step", 1e6),
    "own that is no truth": ("preparation", "own", "maybe"),
    "a preparation that is a list": ("preparation", None, []),
    "a preparation that is a text": ("preparation", None, "graph"),
    "no description": ("preparation", None, None),
    "no digest": ("preparation_sha256", None, None),
    "another kind": ("targets", "kind", "scores"),
    "numbers with names": ("targets", "kind", "numbers"),
    "a name twice": ("targets", "names", ["hall", "hall"]),
    "too few names": ("targets", "names", ["hall"]),
    "names that are numbers": ("targets", "names", [1, 2]),
    "a name with a zero": ("targets", "names", ["hall", "\0"]),
    "spare outputs without end": ("targets", "spare", 2**31),
    "half a spare output": ("targets", "spare", 0.5),
    "a column that is none": ("targets", "column", {"a": 1}),
    "targets that are a list": ("targets", None, ["hall"]),
}


LARGE = [{"name": f"large.{number}", "shape": [2**30], "policy": "personal"} for number in range(16)]
TOO_LARGE = {
    "tensors": lambda said: said["tensors"].extend(LARGE),
    "frozen tensors": lambda said: said["tensors"].extend(
        [{**each, "policy": "frozen", "trainable": False} for each in LARGE]
    ),
    "inputs": lambda said: said.update(input_shape=[2**31]),
    "outputs": lambda said: said.update(output_shape=[*said["output_shape"], 2**28]),
    "raw samples": lambda said: said["preparation"].update(columns=[], shape=[2**15, 2**14]),
    "neurons": lambda said: (
        said["tensors"].append({"name": "large", "shape": [2**21]}),
        said["groups"].append({"name": "large", "size": 2**21}),
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_model_that_is_too_large_is_refused_by_both(modules, what):
    said = json.loads(DESCRIBED.text)
    TOO_LARGE[what](said)
    usual = {"axes": [], "trainable": True, "dtype": "float32", "policy": "shared", "init": {"kind": "data"}}
    said["tensors"] = [{**usual, **each} for each in said["tensors"]]
    with pytest.raises(ValueError, match=r"publish a (smaller )?model"):
        Manifest.model_validate_json(json.dumps(said))
    found = modules(READ, module="manifest.js", argument=json.dumps(said))
    assert found.startswith("ProtocolError: the manifest describes a model that is too large")


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_descriptions_are_refused_by_both(modules, case):
    part, key, value = HOSTILE[case]
    said = json.loads(DESCRIBED.text)
    if key is None:
        said[part] = value
    else:
        said[part][key] = value
    with pytest.raises(ValueError, match="validation error"):
        Manifest.model_validate_json(json.dumps(said))
    found = modules(READ, module="manifest.js", argument=json.dumps(said))
    assert isinstance(found, str)
    assert found.startswith("ProtocolError: the manifest")


# --- running it --------------------------------------------------------------------------------------------------

PREPARED = """async ({ Engine }, [text, graph, raw, count]) => {
  const { Manifest } = await import("/web/manifest.js"), { RAW } = await import("/web/raw.js");
  const bytes = (content) => Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const manifest = new Manifest(text);
  try {
    const engine = new Engine(manifest, { preparation: async () => bytes(graph) }, new Map(), new Map());
    const inputs = new RAW[manifest.preparation.dtype](bytes(raw).buffer);
    const made = await engine.prepare({ inputs, count });
    const one = await engine.prepare({ inputs: inputs.subarray(0, inputs.length / count), count: 1 });
    return [made.constructor.name, Array.from(made, Number), Array.from(one, Number)];
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
}"""


def in_base64(content):
    return base64.b64encode(content).decode()


def some_rows(count=40):
    chance = np.random.default_rng(3)
    rows = chance.normal(5, 3, (count, 3)).astype(np.float32)
    rows[:, 1] = chance.integers(-1, 3, count)
    return rows


def built(kind):
    """A preparation, and the shape that it makes."""
    if kind == "rows":
        return prepare_rows(COLUMNS, statistics_of([some_rows()], 0, COLUMNS)), (5,)
    if kind == "colours":
        return prepare_array("uint8", (6, 5, 3), "HWC", None), (3, 6, 5)
    if kind == "grey":
        return prepare_array("uint8", (8, 8), "HW", None), (1, 8, 8)
    dtype = kind
    raw = draw_raw(Preparation(dtype=dtype, shape=(4, 7), axes="TC"), 20)
    return prepare_array(dtype, (4, 7), "TC", statistics_of([raw], 1)), (7, 4)


def manifest_of(preparation, shape):
    return Manifest(
        task="own",
        input_shape=shape,
        output_shape=(2,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=preparation.description,
        preparation_sha256="ab" * 32,
    )


def on_the_page(modules, manifest, graph, raw):
    argument = [manifest.text, in_base64(graph), in_base64(np.ascontiguousarray(raw).tobytes()), len(raw)]
    return modules(PREPARED, module="engine.js", argument=argument)


@needs_runtime
@pytest.mark.parametrize("kind", ["rows", "colours", "grey", "float32", "int16", "uint16", "int32", "int64", "int8"])
def test_samples_are_prepared_as_by_the_sdk(modules, kind):
    preparation, shape = built(kind)
    raw = draw_raw(preparation.description, 300)
    name, found, one = on_the_page(modules, manifest_of(preparation, shape), preparation.graph, raw)
    wanted = Preparer(preparation.graph)(raw)
    assert name == "Float32Array"
    np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.ravel(one), wanted[0].ravel(), rtol=1e-6, atol=1e-6)


def graph_of(inputs, outputs, nodes):
    values = [
        [onnx.helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in some]
        for some in (inputs, outputs)
    ]
    made = onnx.helper.make_graph(nodes, "preparation", *values)
    opset = onnx.helper.make_opsetid("", 21)
    return onnx.helper.make_model(made, opset_imports=[opset], ir_version=10).SerializeToString()


FLOAT, BYTES = TensorProto.FLOAT, TensorProto.UINT8
IDENTITY = [onnx.helper.make_node("Identity", ["input"], ["output"])]
TWO_INPUTS = [onnx.helper.make_node("Add", ["input", "more"], ["output"])]
WRONG_GRAPHS = {
    "two inputs": ([("input", FLOAT, ["n", 3]), ("more", FLOAT, ["n", 3])], [("output", FLOAT, ["n", 3])], TWO_INPUTS),
    "another name": (
        [("image", FLOAT, ["n", 3])],
        [("output", FLOAT, ["n", 3])],
        [onnx.helper.make_node("Identity", ["image"], ["output"])],
    ),
    "another type": ([("input", BYTES, ["n", 3])], [("output", BYTES, ["n", 3])], IDENTITY),
    "another shape": ([("input", FLOAT, ["n", 4])], [("output", FLOAT, ["n", 4])], IDENTITY),
    "another rank": ([("input", FLOAT, ["n", 3, 1])], [("output", FLOAT, ["n", 3, 1])], IDENTITY),
    "one batch size": ([("input", FLOAT, [2, 3])], [("output", FLOAT, [2, 3])], IDENTITY),
    "two outputs": (
        [("input", FLOAT, ["n", 3])],
        [("output", FLOAT, ["n", 3]), ("more", FLOAT, ["n", 3])],
        [*IDENTITY, onnx.helper.make_node("Identity", ["input"], ["more"])],
    ),
}


@needs_runtime
@pytest.mark.parametrize("case", WRONG_GRAPHS)
def test_other_graphs_than_the_described_one_are_refused(modules, case):
    manifest = manifest_of(BuiltPreparation(b"", Preparation(shape=(3,))), (3,))
    found = on_the_page(modules, manifest, graph_of(*WRONG_GRAPHS[case]), np.zeros((2, 3), np.float32))
    assert found == "ProtocolError: the preparation's graph does not match the manifest"


@needs_runtime
def test_what_is_no_graph_is_refused(modules):
    manifest = manifest_of(BuiltPreparation(b"", Preparation(shape=(3,))), (3,))
    found = on_the_page(modules, manifest, b"no graph at all", np.zeros((2, 3), np.float32))
    assert found.startswith("ProtocolError: this browser cannot load the model (preparation)")


# --- what is drawn, photographed and recorded ------------------------------------------------------------------------

GIVEN = """({ givenShape, rawSample }, [raw, values]) => {
  const sample = rawSample(Float32Array.from(values), raw);
  return [givenShape({ raw, inputShape: [7] }), sample.constructor.name, Array.from(sample)];
}"""


@pytest.mark.parametrize(
    ("axes", "shape", "order"),
    [
        ("HW", (2, 3), None),
        ("CHW", (3, 2, 2), None),
        ("HWC", (2, 4, 3), (1, 2, 0)),
        ("CT", (2, 3), None),
        ("TC", (3, 2), (1, 0)),
    ],
)
def test_pictures_and_records_become_raw_samples_in_their_axes(modules, axes, shape, order):
    dtype = "uint8" if "H" in axes else "float32"
    given = tuple(shape) if order is None else tuple(shape[place] for place in np.argsort(order))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(given) + np.float32(0.25)
    raw = {"dtype": dtype, "shape": list(shape), "axes": axes, "free": []}
    found = modules(GIVEN, module="raw.js", argument=[raw, values.ravel().tolist()])
    wanted = values if order is None else values.transpose(order)
    wanted = np.rint(wanted) if dtype == "uint8" else wanted
    named = [1, *shape] if axes == "HW" else list(given)
    assert found == [named, "Uint8Array" if dtype == "uint8" else "Float32Array", wanted.ravel().tolist()]


@pytest.mark.parametrize(
    ("dtype", "axes", "shape"), [("float32", "HW", [8, 8]), ("uint8", "", [9]), ("int16", "CT", [6, 64])]
)
def test_samples_of_an_unknown_scale_are_not_drawn(modules, dtype, axes, shape):
    raw = {"dtype": dtype, "shape": shape, "axes": axes, "free": []}
    assert (
        modules("({ givenShape }, raw) => givenShape({ raw, inputShape: [7] })", module="raw.js", argument=raw) is None
    )


# --- the exported file -------------------------------------------------------------------------------------------

COMPOSED = """({ compose }, [model, preparation, properties]) => {
  const bytes = (content) => content && Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  try {
    const made = compose(bytes(model), bytes(preparation), properties);
    return btoa(Array.from(made, (byte) => String.fromCharCode(byte)).join(""));
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
}"""


def linear(width, opset=21):
    """A model with weights, of ``width`` inputs."""
    weights = onnx.numpy_helper.from_array(np.random.default_rng(5).normal(size=(width, 2)).astype(np.float32), "w")
    made = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Flatten", ["input"], ["flat"]),
            onnx.helper.make_node("MatMul", ["flat", "w"], ["output"]),
        ],
        "model",
        [onnx.helper.make_tensor_value_info("input", FLOAT, ["batch", width])],
        [onnx.helper.make_tensor_value_info("output", FLOAT, ["batch", 2])],
        [weights],
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    model.producer_name = "sparrow"
    onnx.helper.set_model_props(model, {"task": "own"})
    return model.SerializeToString()


def composed(modules, model, preparation, **properties):
    argument = [in_base64(model), preparation and in_base64(preparation), properties]
    return modules(COMPOSED, module="onnx.js", argument=argument)


def answers(model, raw):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input"]
    return session.run(["output"], {"input": raw})[0]


def test_the_preparation_is_put_in_front_as_the_sdk_does(modules):
    preparation, model = built("rows")[0].graph, linear(5)
    made = base64.b64decode(composed(modules, model, preparation, class_names='["hall", "Öl"]'))
    onnx.checker.check_model(onnx.ModelProto.FromString(made), full_check=True)
    raw = some_rows()
    wanted = compose_bytes(model, preparation)
    np.testing.assert_array_equal(answers(made, raw), answers(wanted, raw))
    found, theirs = onnx.ModelProto.FromString(made), onnx.ModelProto.FromString(wanted)
    names = [
        {value.name for value in (*each.graph.initializer, *each.graph.input, *each.graph.output)}
        | {name for node in each.graph.node for name in (node.name, *node.input, *node.output)}
        for each in (found, theirs)
    ]
    assert names[0] == names[1]
    assert any(name.startswith("prepare/") for name in names[0])
    assert {each.key: each.value for each in found.metadata_props} == {"task": "own", "class_names": '["hall", "Öl"]'}


def test_values_inside_of_branches_are_renamed_too(modules):
    def branch(name, scale):
        factor = onnx.helper.make_node("Constant", [], [f"{name}.by"], value_float=scale)
        scaled = onnx.helper.make_node("Mul", ["input", f"{name}.by"], [f"{name}.out"])
        return onnx.helper.make_graph(
            [factor, scaled], name, [], [onnx.helper.make_tensor_value_info(f"{name}.out", FLOAT, None)]
        )

    nodes = [
        onnx.helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True))),
        onnx.helper.make_node("If", ["yes"], ["output"], then_branch=branch("a", 2.0), else_branch=branch("b", 3.0)),
    ]
    preparation = graph_of([("input", FLOAT, ["n", 5])], [("output", FLOAT, ["n", 5])], nodes)
    model, raw = linear(5), np.ones((3, 5), np.float32)
    made = base64.b64decode(composed(modules, model, preparation))
    np.testing.assert_array_equal(answers(made, raw), answers(model, 2 * raw))


def test_a_model_without_preparation_gets_its_properties(modules):
    made = base64.b64decode(composed(modules, linear(5), None, targets="{}"))
    assert {each.key: each.value for each in onnx.ModelProto.FromString(made).metadata_props} == {
        "task": "own",
        "targets": "{}",
    }


def test_what_cannot_be_one_model_is_refused(modules):
    preparation = built("rows")[0].graph
    assert composed(modules, linear(5, opset=18), preparation) == (
        "ProtocolError: preparation and model use different versions of operators"
    )
    assert composed(modules, linear(5), b"\x3a\x05ab") == "ProtocolError: the model's ONNX file cannot be read"
