import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge_sdk.device.exporting import NotTheSame, export_personal
from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.manifest import initial_values
from edge_sdk.tasks import Task
from edge_sdk.tasks.digits import DigitsNet

DIGITS = load_builtin("digits")


def task(model: nn.Module) -> Task:
    torch.manual_seed(0)
    data = [(torch.rand(7, 1, 8, 8), torch.randint(10, (7,)))]
    return Task("digits", model, nn.CrossEntropyLoss(), train=data, validation=data)


def export(path, model):
    return export_personal(
        path,
        skeleton=DIGITS.skeleton,
        manifest=DIGITS.manifest,
        tensors=initial_values(DIGITS.manifest, 3),
        task=task(model),
        metadata={"device": "pi"},
    )


def test_an_export_predicts_like_pytorch_and_says_so(tmp_path):
    exported = export(tmp_path / "deep" / "model.onnx", DigitsNet())
    assert exported.samples == 7
    assert 0 <= exported.max_difference < 1e-5
    assert exported.bytes == exported.path.stat().st_size
    properties = {entry.key: entry.value for entry in onnx.load(exported.path).metadata_props}
    assert properties == {"device": "pi"}


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
