"""A manifest refuses what cannot be a model, and its draw of initial weights never changes."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import (
    Constant,
    Data,
    Layer,
    Manifest,
    NeuronGroup,
    Segment,
    TensorSpec,
    Uniform,
    initial_values,
)


def model(*tensors, groups=(("h", 4),), layers=()):
    return Manifest(
        task="test",
        input_shape=(3,),
        output_shape=(2,),
        tensors=tensors,
        groups=tuple(NeuronGroup(name=name, size=size) for name, size in groups),
        layers=layers,
    )


W = TensorSpec(name="fc.weight", shape=(4, 3), axes=((Segment(group="h"),), ()))
B = TensorSpec(name="fc.bias", shape=(4,), axes=((Segment(group="h"),),))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: model(W, W), "tensor 'fc.weight' occurs twice"),
        (lambda: model(W, groups=(("h", 4), ("h", 4))), "neuron group 'h' occurs twice"),
        (lambda: model(W, groups=()), "fc.weight: axis 0 names the unknown neuron group 'h'"),
        (lambda: model(W, groups=(("h", 5),)), "fc.weight: axis 0 has length 4, its segments add to 5"),
        (
            lambda: model(W, layers=(Layer(name="fc", kind="linear", tensors=("fc.wieght",)),)),
            "layer fc: the manifest has no tensor 'fc.wieght'",
        ),
        (
            lambda: TensorSpec(name="fc.weight", shape=(4, 3), axes=((Segment(group="h"),),)),
            "fc.weight: 1 axes described, its shape has 2",
        ),
        (
            lambda: TensorSpec(name="bn.num_batches_tracked", shape=(), dtype="int64"),
            "bn.num_batches_tracked: dtype int64 cannot be averaged; give it the policy personal, frozen or dropped",
        ),
        (lambda: TensorSpec(name="fc.weight", shape=(4, 0)), "greater than or equal to 1"),
        (lambda: Manifest.model_validate({**model(W).model_dump(), "lyers": ()}), "Extra inputs are not permitted"),
        (lambda: Uniform(bound=float("inf")), "finite"),
    ],
)
def test_what_cannot_be_a_model_is_refused_by_name(make, said):
    with pytest.raises(ValidationError) as refused:
        make()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("fc.bias"), "the update lack 'fc.bias'; give every tensor of the manifest"),
        (lambda t: t.update(extra=np.zeros(1)), "have 'extra', which is not in the manifest; remove it"),
        (
            lambda t: t.update({"fc.weight": np.zeros((3, 4), np.float32)}),
            "fc.weight: the update have shape (3, 4) of float32, the manifest has (4, 3) of float32; publish",
        ),
        (lambda t: t.update({"fc.bias": np.zeros(4)}), "fc.bias: the update have shape (4,) of float64"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_advice(change, said):
    tensors = {"fc.weight": np.zeros((4, 3), np.float32), "fc.bias": np.zeros(4, np.float32)}
    model(W, B).check_tensors(tensors, what="the update")
    change(tensors)
    with pytest.raises(ManifestError) as refused:
        model(W, B).check_tensors(tensors, what="the update")
    assert said in str(refused.value)


def test_kept_and_shared_tensors_differ_by_policy():
    local = TensorSpec(name="bn.running_mean", shape=(4,), policy="personal", trainable=False, init=Constant(value=0))
    counter = TensorSpec(name="bn.num_batches_tracked", shape=(), dtype="int64", policy="dropped", trainable=False)
    manifest = model(W, local, counter)
    assert [spec.name for spec in manifest.shared] == ["fc.weight"]
    assert [spec.name for spec in manifest.kept] == ["fc.weight", "bn.running_mean"]
    assert (manifest.shared_values, manifest.trainable_values) == (12, 12)
    manifest.check_tensors({"fc.weight": np.zeros((4, 3), np.float32)}, what="the weights", which="published")


def test_recipes_decide_how_weights_begin(small):
    values = initial_values(small, seed=3)
    assert set(values) == {spec.name for spec in small.shared}
    assert all(tensor.dtype == np.float32 for tensor in values.values())
    assert values["bn.weight"].tolist() == [1, 1, 1]
    assert values["out.bias"].tolist() == [0, 0]
    weights = values["fc.weight"]
    assert weights.shape == (6, 12)
    assert weights.min() >= -0.5
    assert weights.max() < 0.5
    assert len(np.unique(weights)) == 72
    small.check_tensors(values, what="the initial values")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small):
    first, again, other = (initial_values(small, seed) for seed in (3, 3, 4))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert first["fc.weight"].tobytes() != other["fc.weight"].tobytes()


def test_each_tensor_has_a_stream_of_its_own(small):
    """Adding or removing a layer leaves the others as they were."""
    drawn = tuple(spec for spec in small.tensors if spec.name != "conv.weight")
    without = initial_values(small.model_copy(update={"tensors": drawn}), seed=3)
    whole = initial_values(small, seed=3)
    assert all(without[name].tobytes() == whole[name].tobytes() for name in without)
    twins = model(*(TensorSpec(name=name, shape=(6,), init=Uniform(bound=1)) for name in ("a", "b")))
    values = initial_values(twins, seed=0)
    assert values["a"].tolist() != values["b"].tolist()


def test_the_draw_of_digits_never_changes():
    """Golden: a change of the draw would make old federations irreproducible."""
    values = initial_values(load_builtin("digits").manifest, seed=0)
    whole = hashlib.sha256()
    for name in sorted(values):
        whole.update(name.encode() + values[name].astype("<f4").tobytes())
    assert whole.hexdigest() == "1546320719722b8506d87c3da55f0f6c8abb980ecfeea1a1c8214cabff59c03b"


def test_published_values_are_taken_where_the_recipe_says_so():
    spec = TensorSpec(name="fc.bias", shape=(4,), init=Data())
    published = {"fc.bias": np.arange(4, dtype=np.float32)}
    values = initial_values(model(spec), 0, published)
    assert values["fc.bias"].tolist() == [0, 1, 2, 3]
    published["fc.bias"][0] = 9
    assert values["fc.bias"][0] == 0, "a copy, not the caller's array"
    with pytest.raises(ManifestError, match=r"\bfc\.bias: "):
        initial_values(model(spec), 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    with pytest.raises((ManifestError, ValidationError), match=r"fc\.bias|finite"):
        initial_values(model(TensorSpec(name="fc.bias", shape=(4,), init=Constant(value=value))), 0)
    published = {"fc.bias": np.array([0, 1, 2, value])}
    with pytest.raises(ManifestError, match=r"fc\.bias: .*finite"):
        initial_values(model(TensorSpec(name="fc.bias", shape=(4,))), 0, published)


def test_the_digest_names_the_model(small):
    again = Manifest.model_validate_json(small.model_dump_json())
    assert again == small
    assert again.digest == small.digest
    assert small.model_copy(update={"task": "other"}).model_dump() != small.model_dump()
    renamed = Manifest.model_validate({**small.model_dump(), "task": "other"})
    assert renamed.digest != small.digest


def test_a_skeleton_changes_the_digest(small):
    digest = small.digest
    named = small.with_graphs({"skeleton": b"graph"})
    assert named.skeleton_sha256 == hashlib.sha256(b"graph").hexdigest()
    assert named.digest != digest
    assert named.with_graphs({"skeleton": b"other graph"}).digest != named.digest
    assert named.tensors == small.tensors
    assert Manifest.model_validate_json(named.model_dump_json()).digest == named.digest


def test_names_that_stand_twice_are_found_in_one_pass():
    names = [f"t{number}" for number in range(2_000)]
    tensors = [{"name": name, "shape": [1]} for name in (*names, *names)]
    counted = 0

    def count(frame, event, called):
        nonlocal counted
        counted += event == "c_call" and called.__name__ == "count"

    sys.setprofile(count)
    try:
        with pytest.raises(ValidationError, match="the tensor 't0' occurs twice"):
            Manifest.model_validate({"task": "x", "input_shape": [1], "output_shape": [1], "tensors": tensors})
    finally:
        sys.setprofile(None)
    assert counted == 0, "each such call looks through all names"


PERSONAL = [
    {"name": f"w{each}", "shape": [2**30], "policy": "personal", "init": {"kind": "constant", "value": 0}}
    for each in range(16)
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensors": PERSONAL}, "tensors: 68,719,476,736 bytes in total; the maximum is 4,294,967,296"),
        ({"tensors": [{**PERSONAL[0], "policy": "dropped", "shape": [2**31]}]}, "publish a smaller model"),
        ({"tensors": [{**PERSONAL[0], "policy": "frozen", "trainable": False, "shape": [2**31]}]}, "bytes in total"),
        ({"outputs": [{"name": "scores", "shape": [2**31, 2]}]}, "or have its method exchange less"),
        ({"input_shape": [2**31]}, "input_shape: 2,147,483,648 values for one sample have more than 268,435,456 bytes"),
        ({"output_shape": [2**16, 2**16]}, "output_shape: 4,294,967,296 values"),
        (
            {"preparation": {"dtype": "uint8", "shape": [2**15, 2**15]}, "preparation_sha256": "0" * 64},
            "preparation.shape: 1,073,741,824 values",
        ),
        (
            {"tensors": [{"name": "w", "shape": [2**21]}], "groups": [{"name": "g", "size": 2**21}]},
            "2,097,152 neurons in total; the maximum is 1,048,576",
        ),
    ],
)
def test_no_manifest_describes_more_than_either_side_is_to_hold(change, said):
    manifest = {"task": "x", "input_shape": [4], "output_shape": [4], "tensors": [{"name": "w", "shape": [4, 4]}]}
    Manifest.model_validate(manifest)
    with pytest.raises(ValidationError) as refused:
        Manifest.model_validate({**manifest, **change})
    assert said in str(refused.value)


def test_there_are_no_more_neurons_than_rows_and_columns():
    """A line of text would else make a mask of gigabytes."""
    tensors, groups = [{"name": "w", "shape": [4, 4]}], [{"name": "g", "size": 2**31}]
    with pytest.raises(ValidationError, match="more than all rows and columns"):
        Manifest.model_validate(
            {"task": "x", "input_shape": [4], "output_shape": [4], "tensors": tensors, "groups": groups}
        )
