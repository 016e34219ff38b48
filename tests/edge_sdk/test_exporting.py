from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge_sdk.device import exporting
from edge_sdk.device.exporting import export_personal
from edge_sdk.tasks import Task
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from sparrow.export import compact as compacting
from sparrow.export.errors import ExportError, NotTheSame
from sparrow.export.source import Source
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values

DIGITS = load_builtin("digits")


def task(model: nn.Module) -> Task:
    torch.manual_seed(0)
    data = [(torch.rand(7, 1, 8, 8), torch.randint(10, (7,)))]
    return Task("digits", model, nn.CrossEntropyLoss(), train=data, validation=data)


def engine(model):
    return TorchEngine(task(model), DIGITS.manifest)


def export(path, model, tensors=None):
    source = Source(DIGITS.manifest, DIGITS.skeleton, tensors or initial_values(DIGITS.manifest, 3))
    return export_personal(path, source, engine(model), task(model))


def sparse():
    """Weights of which a fifth is left."""
    rng = np.random.default_rng(0)
    tensors = initial_values(DIGITS.manifest, 3)
    for spec in DIGITS.manifest.maskable:
        tensors[spec.name] = np.where(rng.random(spec.shape) < 0.2, tensors[spec.name], np.float32(0))
    return tensors


def test_an_export_predicts_like_pytorch_and_says_so(tmp_path):
    exported = export(tmp_path / "deep" / "model.onnx", DigitsNet())
    assert exported.samples == 7
    assert 0 <= exported.max_difference < 1e-5
    assert exported.bytes == exported.path.stat().st_size
    properties = {entry.key: entry.value for entry in onnx.load(exported.path).metadata_props}
    assert properties.items() >= {"task": "digits", "mode": "packed", "precision": "fp32"}.items()


def test_a_sparse_model_becomes_a_smaller_file_and_its_zeros_are_not_stored(tmp_path):
    exported = export(tmp_path / "model.onnx", DigitsNet(), sparse())
    assert exported.steps == ("compact", "packed")
    assert exported.bytes < 0.4 * exported.dense_bytes
    assert exported.max_difference < 1e-5


@pytest.mark.parametrize("change", ["fails", "differs"])
def test_where_a_pass_does_not_work_the_dense_model_is_written(tmp_path, monkeypatch, change):
    def wrong(model):
        if change == "fails":
            raise ExportError("an operator that the pass does not know")
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        (bias,) = [tensor for tensor in changed.graph.initializer if tensor.name == "out.bias"]
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, bias.name))
        return changed

    monkeypatch.setattr(compacting, "compact", wrong)
    exported = export(tmp_path / "model.onnx", DigitsNet(), sparse())
    assert (exported.steps, exported.bytes) == ((), exported.dense_bytes)
    assert exported.max_difference < 1e-5


def test_a_comparison_ends_after_some_samples_or_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SAMPLES", 5)
    assert export(tmp_path / "model.onnx", DigitsNet()).samples == 5
    longer = replace(task(DigitsNet()), validation=task(DigitsNet()).validation * 3)
    monkeypatch.setattr(exporting, "SAMPLES", 1000)
    monkeypatch.setattr(exporting, "SECONDS", 0.0)
    assert len(exporting.reference_of(engine(DigitsNet()), longer).inputs) == 7


class Shifted(DigitsNet):
    def forward(self, inputs):
        return super().forward(inputs) + 1.0


def test_a_file_that_would_predict_something_else_is_not_written(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")
    with pytest.raises(NotTheSame, match="publish the federation again"):
        export(path, Shifted())
    assert path.read_bytes() == b"the old one"
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


def test_the_model_is_left_in_the_mode_it_was_in(tmp_path):
    model = DigitsNet().train()
    export(tmp_path / "model.onnx", model)
    assert model.training
    assert np.isfinite(model.out.weight.detach().numpy()).all()


def test_the_smaller_file_is_written_and_both_sizes_are_those_of_files(tmp_path, monkeypatch):
    def longer(model):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.doc_string = "x" * 1000
        return changed

    exported = export(tmp_path / "small.onnx", DigitsNet())
    assert exported.bytes < exported.dense_bytes
    monkeypatch.setattr(compacting, "compact", longer)
    exported = export(tmp_path / "model.onnx", DigitsNet())
    assert (exported.steps, exported.bytes) == ((), exported.dense_bytes)
    properties = {entry.key: entry.value for entry in onnx.load(exported.path).metadata_props}
    assert properties["mode"] == "dense"
