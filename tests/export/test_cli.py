import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.device.state import Progress, Reference, StateFolder
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.dual import Dual
from edge_sdk.predict import Predictor
from edge_sdk.tasks import Task
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.command_line.exits import Exit
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import load_method as load_server_half
from sparrow.export import compact as compacting
from sparrow.export import report
from sparrow.export.__main__ import main
from sparrow.export.samples import draw_inputs, read_samples
from sparrow.graphs.skeleton import fill
from sparrow.protocol import checkpoint, personal
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import Bundle
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment, FederationInfo
from sparrow.protocol.settings import FederationSettings

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

DIGITS = load_builtin("digits")


def pruned(keep=0.2):
    """Digits' first weights, most of them zero, and half of the hidden neurons without any."""
    rng = np.random.default_rng(0)
    tensors = initial_values(DIGITS.manifest, 0)
    for spec in DIGITS.manifest.maskable:
        tensors[spec.name] = np.where(rng.random(spec.shape) < keep, tensors[spec.name], np.float32(0))
    return tensors


def info(settings):
    return FederationInfo(
        uid="u",
        name="kitchen",
        method=settings.method,
        task="digits",
        status="running",
        round=4,
        rounds=9,
        devices=2,
        devices_stopped=0,
        model_version=1,
        model_sha256="0" * 64,
        parameters=1,
        manifest_digest=DIGITS.manifest.digest,
        global_model_usable=True,
        settings=settings,
    )


def save_state(path, tensors, *, method="fedspu", reference=None, manifest=DIGITS.manifest, own=None, **memory):
    """A state folder as a device leaves it after round 3."""
    folder = StateFolder(path, durable=False, reference=reference)
    folder.cache(personal.MANIFEST, manifest.model_dump_json().encode())
    folder.cache(personal.graph_file("skeleton"), DIGITS.skeleton)
    settings = completed(FederationSettings(method=method))
    member = personal.Membership(device="pi", budget=0.5, federation=info(settings))
    folder.cache(personal.MEMBERSHIP, member.model_dump_json().encode())
    own = {"own": np.ones(2, np.float32)} if own is None else own
    folder.save(manifest, tensors, Progress(last_round=3, memory=memory), own=own)
    folder.close()
    return path


@pytest.fixture
def state(tmp_path):
    return save_state(tmp_path / "state", pruned())


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "data.npz"
    inputs = rng.random((40, 1, 8, 8), dtype=np.float32)
    np.savez(path, inputs=inputs, labels=scores(fill_dense(tmp_path), inputs).argmax(1))
    return path


def fill_dense(tmp_path):
    return fill_with(tmp_path, pruned())


def fill_with(tmp_path, tensors):
    path = tmp_path / "dense.onnx"
    path.write_bytes(fill(DIGITS.skeleton, DIGITS.manifest, tensors))
    return path


def scores(path, inputs):
    return onnxruntime.InferenceSession(str(path)).run(None, {"input": inputs})[0]


def export(source, output, *more):
    return main([str(part) for part in (source, "--output", output, "--quiet", "--quick", *more)])


def properties(path):
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_a_state_folder_becomes_a_smaller_file_that_predicts_the_same(state, data, tmp_path, capsys):
    output = tmp_path / "deep" / "m.onnx"
    assert export(state, output, "--data", data, "--json") == 0
    inputs = np.random.default_rng(2).random((30, 1, 8, 8), dtype=np.float32)
    dense = fill_dense(tmp_path)
    np.testing.assert_allclose(scores(output, inputs), scores(dense, inputs), atol=1e-5)
    assert output.stat().st_size < 0.4 * dense.stat().st_size
    found = properties(output)
    assert (
        found.items()
        >= {
            "method": "fedspu",
            "federation": "kitchen",
            "device": "pi",
            "task": "digits",
            "round": "3",
            "classes": "10",
            "mode": "packed",
            "precision": "fp32",
        }.items()
    )
    assert 0.15 < float(found["density"]) < 0.25
    assert len(found["digest"]) == 64
    written = json.loads(capsys.readouterr().out)
    assert written["export"]["bytes"] == output.stat().st_size
    assert written["parity"]["inputs"] == 1000
    assert written["parity"]["max_difference"] < 1e-5
    assert (written["samples"], written["export"]["accuracy"], written["dense"]["accuracy"]) == (40, 1.0, 1.0)
    assert export(state, output, "--data", data) == 0
    table = capsys.readouterr().out
    assert "parity over 1000 inputs" in table
    assert "accuracy on 40" in table
    assert [entry.name for entry in output.parent.iterdir()] == ["m.onnx"]


def test_the_same_state_gives_the_same_bytes(state, tmp_path):
    assert export(state, tmp_path / "a.onnx") == export(state, tmp_path / "b.onnx") == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_what_it_costs_stands_beside_the_dense_export(state, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "LOADS", 1)
    output, picture = tmp_path / "m.onnx", tmp_path / "m.png"
    command = [str(part) for part in (state, "--output", output, "--picture", picture, "--mode", "compact")]
    assert main([*command, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    captured = capsys.readouterr()
    for row in ("file", "load", "memory at most", "one sample, 1 thread, p50", "one sample, all threads, p95"):
        assert any(line.strip().startswith(row) for line in captured.out.splitlines()), row
    assert captured.err == "", "no progress without a terminal"
    assert picture.read_bytes().startswith(b"\x89PNG")
    for side in ("export", "dense"):
        costs = written[side]["costs"]
        assert costs["load"]["load_seconds"] > 0
        assert costs["load"]["peak"] > 0
        assert 0 < costs["one_thread"]["p50"] <= costs["one_thread"]["p95"]


def test_modes_and_precisions_by_size(state, data, tmp_path):
    sizes = {}
    for mode in ("compact", "packed"):
        for precision in ("fp32", "fp16", "int8"):
            output = tmp_path / f"{mode}-{precision}.onnx"
            more = ("--data", data, "--mode", mode, "--precision", precision, "--accuracy-limit", "1")
            assert export(state, output, *more) == 0
            assert properties(output)["precision"] == precision
            sizes[mode, precision] = output.stat().st_size
    assert sizes["packed", "fp32"] < sizes["compact", "fp32"]
    assert sizes["packed", "fp16"] < sizes["packed", "fp32"]
    assert sizes["packed", "int8"] < sizes["compact", "int8"] < sizes["compact", "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "compact", "packed"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_an_old_runtime_predicts_the_same_in_each_form(state, data, tmp_path, mode, precision, old_runtime):
    output = tmp_path / "m.onnx"
    more = ("--data", data, "--mode", mode, "--precision", precision, "--accuracy-limit", "1")
    assert export(state, output, *more) == 0
    check_old(output, np.load(data)["inputs"], old_runtime)


def check_old(output, inputs, old_runtime):
    model = onnx.load(output)
    assert (model.opset_import[0].version, model.ir_version) == (17, 8)
    np.testing.assert_allclose(old_runtime(output, inputs), scores(output, inputs), atol=1e-4)


def test_auto_says_what_it_has_tried(state, data, tmp_path, capsys):
    output = tmp_path / "m.onnx"
    assert export(state, output, "--data", data, "--precision", "auto") == 0
    assert properties(output)["precision"] in ("fp32", "int8")
    assert "tried fp32: " in capsys.readouterr().out


def test_a_bare_checkpoint_with_its_manifest(tmp_path, capsys):
    model, manifest, output = tmp_path / "w.safetensors", tmp_path / "other.json", tmp_path / "m.onnx"
    model.write_bytes(checkpoint.save(pruned()))
    assert export(model, output) == Exit.NOT_FOUND
    assert "--manifest" in capsys.readouterr().err
    manifest.write_text(DIGITS.manifest.model_dump_json())
    assert export(model, output, "--manifest", manifest) == 0  # a built-in task: its skeleton is at hand
    assert "method" not in properties(output)
    assert properties(output)["task"] == "digits"
    manifest.write_text(DIGITS.manifest.model_copy(update={"skeleton_sha256": None}).model_dump_json())
    assert export(model, output, "--manifest", manifest) == Exit.NOT_FOUND
    assert "give it with --skeleton" in capsys.readouterr().err
    (tmp_path / "s.onnx").write_bytes(DIGITS.skeleton)
    assert export(model, output, "--manifest", manifest, "--skeleton", tmp_path / "s.onnx") == 0


def test_later_progress_counts(state, tmp_path):
    folder = StateFolder(state, durable=False)
    folder.load(DIGITS.manifest)
    folder.save_progress(Progress(last_round=7))
    folder.close()
    assert export(state, tmp_path / "m.onnx") == 0
    assert properties(tmp_path / "m.onnx")["round"] == "7"


def test_a_state_of_before_the_federation_was_noted(state, tmp_path):
    (state / personal.MEMBERSHIP).unlink()
    assert export(state, tmp_path / "m.onnx") == 0
    assert "method" not in properties(tmp_path / "m.onnx")


def break_state(state, tmp_path, how):
    """Spoil the state folder, and return what to export."""
    if how == "empty":
        (state / "model.safetensors").unlink()
    elif how == "damaged":
        (state / "model.safetensors").write_bytes(b"x" * 40)
    elif how == "not trained":
        return save_state(tmp_path / "new", None)
    elif how == "simulated":
        reference = Reference.of(initial_values(DIGITS.manifest, 0))
        return save_state(tmp_path / "simulated", pruned(), reference=reference)
    elif how == "other manifest":
        other = DIGITS.manifest.model_copy(update={"task": "other"})
        (state / "manifest.json").write_text(type(other).model_validate(other.model_dump()).model_dump_json())
    elif how == "no manifest":
        (state / "manifest.json").write_text("{}")
    elif how == "other skeleton":
        (state / "skeleton.onnx").write_bytes(b"no model")
    elif how == "federation":
        (state / "federation.json").write_text("{}")
    elif how == "progress":
        (state / "progress.json").write_text("[]")
    elif how == "tensor":
        tensors = pruned()
        tensors.pop("out.bias")
        (state / "model.safetensors").write_bytes(checkpoint.save(tensors))
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "no model.safetensors; give the state folder of a device that has trained"),
        ("damaged", "cannot be read"),
        ("not trained", "has no personal model yet"),
        ("simulated", "a simulated device's difference"),
        ("other manifest", "was trained with another manifest"),
        ("no manifest", "is not a manifest"),
        ("other skeleton", "the manifest names"),
        ("federation", "run sparrow join again"),
        ("progress", "is damaged"),
        ("tensor", "lack 'out.bias'"),
    ],
)
def test_a_source_that_cannot_be_used_is_told(state, tmp_path, capsys, how, message):
    source = break_state(state, tmp_path, how)
    assert export(source, tmp_path / "m.onnx") == (Exit.NOT_FOUND if how == "empty" else Exit.FAILED)
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "m.onnx").exists()


def write_arrays(path, **arrays):
    np.savez(path, **arrays)
    return path


IMAGES = np.zeros((4, 1, 8, 8), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, "has no 'inputs' and no 'x_test'"),
        ({"inputs": IMAGES[:, :, :4]}, "the model expects (samples, 1, 8, 8)"),
        ({"inputs": IMAGES[:0]}, "the model expects (samples, 1, 8, 8)"),
        ({"inputs": IMAGES.astype(str)}, "the model expects float32"),
        ({"inputs": IMAGES, "labels": np.zeros(3, int)}, "must be 4 integers"),
        ({"inputs": IMAGES, "labels": np.zeros(4)}, "must be 4 integers"),
    ],
)
def test_data_that_does_not_fit_is_told(state, tmp_path, capsys, arrays, message):
    path = write_arrays(tmp_path / "d.npz", **arrays)
    assert export(state, tmp_path / "m.onnx", "--data", path) == 1
    assert message in capsys.readouterr().err


def test_data_as_the_task_npz_has_it(tmp_path):
    model = onnx.load_from_string(DIGITS.skeleton)
    arrays = {"x_train": np.full((3, 8, 8), 255, np.uint8), "x_test": np.zeros((2, 8, 8), np.uint8)}
    samples = read_samples(write_arrays(tmp_path / "d.npz", y_test=np.array([1, 2]), **arrays), model)
    assert samples.inputs.shape == (2, 1, 8, 8)
    assert samples.calibration.shape == (3, 1, 8, 8)
    assert samples.calibration.dtype == np.float32
    assert samples.calibration.max() == 1.0
    assert samples.labels.tolist() == [1, 2]


def test_inputs_that_are_indices_are_drawn_within_their_table():
    table = onnx.numpy_helper.from_array(np.zeros((7, 2), np.float32), "table")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gather", ["table", "input"], ["output"])],
        "model",
        [onnx.helper.make_tensor_value_info("input", onnx.TensorProto.INT64, ["batch", 5])],
        [onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", 5, 2])],
        [table],
    )
    drawn = draw_inputs(onnx.helper.make_model(graph), 100)
    assert (drawn.shape, drawn.dtype) == ((100, 5), np.int64)
    assert set(drawn.reshape(-1)) == set(range(7))


def test_an_export_that_would_predict_something_else_is_not_written(state, tmp_path, capsys, monkeypatch):
    def wrong(model):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        (bias,) = [tensor for tensor in changed.graph.initializer if tensor.name == "out.bias"]
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, bias.name))
        return changed

    monkeypatch.setattr(compacting, "compact", wrong)
    (tmp_path / "m.onnx").write_bytes(b"the old one")
    assert export(state, tmp_path / "m.onnx", "--mode", "packed") == 1
    assert "differs from the dense model by 1" in capsys.readouterr().err
    assert (tmp_path / "m.onnx").read_bytes() == b"the old one"
    assert export(state, tmp_path / "m.onnx") == 0
    assert "tried packed: the ONNX file differs from the dense model by 1" in capsys.readouterr().out
    assert properties(tmp_path / "m.onnx")["mode"] == "dense"


def test_rounding_that_costs_too_much_is_refused(state, tmp_path, capsys):
    inputs = np.random.default_rng(1).standard_normal((100, 1, 8, 8), dtype=np.float32) * np.float32(50)
    labels = scores(fill_dense(tmp_path), inputs).argmax(1)
    assert len(set(labels)) > 1
    # ranges measured on inputs that are far smaller than those that come
    path = write_arrays(tmp_path / "d.npz", x_train=inputs * np.float32(1e-3), x_test=inputs, y_test=labels)
    code = export(state, tmp_path / "m.onnx", "--data", path, "--precision", "int8")
    assert code == 1
    assert "more than --accuracy-limit" in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "int8"), "give them with --data"),
        (("--precision", "auto"), "give them with --data"),
        (("--mode", "dynamic"), "is for dmpfl and pfedgate"),
        (("--mode", "dynamic", "--precision", "fp16"), "leave --precision out"),
        (("--output", "m.ort"), "name it .onnx"),
        (("--picture", "m.txt"), "ends with one of .png, .svg, .pdf"),
    ],
)
def test_what_does_not_go_together_is_told(state, tmp_path, capsys, arguments, message):
    assert export(state, tmp_path / "m.onnx", *arguments) == 1
    assert message in capsys.readouterr().err


def test_the_gate_of_a_device_of_pfedgate_goes_into_the_file(data, tmp_path, capsys):
    state, batch = gated_state(tmp_path)
    output = tmp_path / "m.onnx"
    assert export(state, output, "--mode", "dynamic", "--data", data) == 0
    assert "dynamic" in capsys.readouterr().out
    assert properties(output).items() >= {"mode": "dynamic", "method": "pfedgate", "selection": "exact"}.items()
    inputs = batch[0][0].numpy()
    one = np.concatenate([scores(output, inputs[number : number + 1]) for number in range(16)])
    np.testing.assert_allclose(scores(output, inputs), one, atol=1e-5)  # the choice is each sample's own
    assert export(state, tmp_path / "more.onnx", "--mode", "dynamic", "--budget", "1") == 0
    assert np.abs(scores(tmp_path / "more.onnx", inputs) - one).max() > 1e-3


def gated_state(tmp_path):
    """The state of a device of pFedGate, and the batches that it trained on."""
    settings = completed(FederationSettings(method="pfedgate", local_epochs=1, early_stopping="off"))
    manifest = load_server_half("pfedgate").manifest(DIGITS.manifest, settings)
    torch.manual_seed(0)
    model, batch = DigitsNet(), [(torch.rand(16, 1, 8, 8), torch.randint(10, (16,)))]
    task = Task("digits", model, nn.functional.cross_entropy, batch, batch)
    received = Bundle(np.asarray(pack(manifest, get_tensors(model, manifest), None)), None, None, "fp32", "")
    assignment = Assignment(assignment_id="a", kind="train", round=1, deadline_seconds=9.0, settings=settings)
    job = Job(assignment, manifest, task, TorchEngine(task, manifest), DeviceState(), received, budget=0.5)
    trained = load_method("pfedgate").train(job).state
    state = save_state(tmp_path / "state", trained.personal, method="pfedgate", manifest=manifest, own=trained.own)
    return state, batch


def dual_state(tmp_path):
    """The state of a device of DM-PFL, and its two models."""
    own, shared = pruned(), initial_values(DIGITS.manifest, 1)
    mask = ElementMask({spec.name: own[spec.name] != 0 for spec in DIGITS.manifest.maskable})
    every = ElementMask({name: np.ones_like(flags) for name, flags in mask.exists.items()})
    dual = Dual.of(DIGITS.manifest, own, mask, shared, every)
    bases = {"entropy_personal": 2.0, "entropy_global": 2.0}
    state = save_state(tmp_path / "state", dual.personal, method="dmpfl", own=dual.stored(), **bases)
    return state, (dual.personal, dual.global_model())


def test_both_models_of_a_device_of_dmpfl_go_into_the_file(tmp_path):
    state, models = dual_state(tmp_path)
    output = tmp_path / "m.onnx"
    assert export(state, output, "--mode", "dynamic") == 0
    inputs = np.random.default_rng(3).random((50, 1, 8, 8), dtype=np.float32)
    found = scores(output, inputs)
    sides = [scores(fill_with(tmp_path, tensors), inputs) for tensors in models]
    chosen = [np.isclose(found, side, atol=1e-5).all(1) for side in sides]
    assert (chosen[0] | chosen[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("make", [gated_state, dual_state])
def test_an_old_runtime_predicts_the_same_with_a_dynamic_file(make, tmp_path, old_runtime):
    state, _ = make(tmp_path)
    output = tmp_path / "m.onnx"
    assert export(state, output, "--mode", "dynamic") == 0
    check_old(output, np.random.default_rng(3).random((50, 1, 8, 8), dtype=np.float32), old_runtime)


def test_a_dynamic_export_needs_the_settings(tmp_path, capsys):
    state = save_state(tmp_path / "state", pruned(), method="pfedgate")
    (state / personal.MEMBERSHIP).unlink()
    assert export(state, tmp_path / "m.onnx", "--mode", "dynamic") == 1
    assert "federation.json" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told(state, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert export(state, tmp_path / "file" / "m.onnx") == 1
    assert f"{tmp_path / 'file'}: " in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_written(state, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert export(state, tmp_path / "m.onnx", "--picture", tmp_path / "m.png") == Exit.CANNOT
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "m.onnx").exists()


def test_without_onnx_runtime_the_install_command_is_given(state, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert export(state, tmp_path / "m.onnx") == Exit.CANNOT
    assert "pip install 'sparrow-fl[export]'" in capsys.readouterr().err


def test_the_format_of_minimal_builds_and_the_operators_they_need(state, tmp_path, capsys):
    assert export(state, tmp_path / "m.onnx", "--ort-format") == 0
    inputs = np.random.default_rng(2).random((3, 1, 8, 8), dtype=np.float32)
    np.testing.assert_allclose(
        scores(tmp_path / "m.ort", inputs), scores(tmp_path / "m.onnx", inputs), rtol=1e-4, atol=1e-5
    )
    assert Predictor(tmp_path / "m.ort").properties["method"] == "fedspu"
    config = (tmp_path / "m.required_operators.config").read_text()
    assert "MaxPool" in config
    assert "MaxPool" in capsys.readouterr().out


def test_as_a_program(state, tmp_path):
    command = [sys.executable, "-m", "sparrow.export", str(state), "--output", str(tmp_path / "m.onnx"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compact" in done.stdout
    assert done.stderr == ""
