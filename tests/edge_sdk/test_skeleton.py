import hashlib
import logging

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.graph import UnsupportedLayer
from edge_sdk.publishing.skeleton import export_forward, make_skeleton
from sparrow.protocol.errors import ManifestError

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.out = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Linear(4, 3)

    def forward(self, samples):
        maps = torch.relu(self.bn(self.conv1(samples)))
        return self.out((maps + self.conv2(maps)).mean((2, 3)))


EXAMPLE = torch.zeros(1, 2, 6, 6)


@pytest.fixture(scope="module")
def model():
    model = Residual().train()
    model.bn.eval()
    return model


@pytest.fixture(scope="module")
def manifest(model):
    return describe(model, EXAMPLE, task="test")


@pytest.fixture(scope="module")
def skeleton(model, manifest):
    return make_skeleton(model, EXAMPLE, manifest)


def test_every_kept_tensor_is_an_initializer_without_data(skeleton, manifest):
    initializers = {tensor.name: tensor for tensor in onnx.load_from_string(skeleton).graph.initializer}
    assert set(initializers) == {spec.name for spec in manifest.kept}
    for spec in manifest.kept:
        assert tuple(initializers[spec.name].dims) == spec.shape
        assert not initializers[spec.name].raw_data


def test_input_output_and_versions(skeleton):
    proto = onnx.load_from_string(skeleton)
    assert [value.name for value in proto.graph.input] == ["input"]
    assert [value.name for value in proto.graph.output] == ["output"]
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, [dim.dim_value for dim in dims[1:]]) == ("batch", [2, 6, 6])
    assert (proto.ir_version, [(opset.domain, opset.version) for opset in proto.opset_import]) == (10, [("", 21)])


def test_nothing_of_the_machine_or_the_exporter_is_in_it(skeleton):
    proto = onnx.load_from_string(skeleton)
    for word in (b".py", b"site-packages", b"pytorch", b"nn_module", b"stack"):
        assert word not in skeleton
    assert not proto.producer_name
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)


def test_the_same_model_gives_the_same_bytes_whatever_its_weights(skeleton, manifest):
    other = Residual()
    assert make_skeleton(other, EXAMPLE.repeat(3, 1, 1, 1), manifest) == skeleton


def test_the_model_is_left_as_it_was_and_nothing_is_printed(model, manifest, capfd):
    level = logging.getLogger("torch.onnx").level
    make_skeleton(model, EXAMPLE, manifest)
    assert model.training
    assert not model.bn.training
    assert logging.getLogger("torch.onnx").level == level
    assert capfd.readouterr() == ("", "")


def test_a_tensor_that_the_forward_pass_does_not_read_is_named():
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("extra", torch.ones(2))
    example = torch.zeros(1, 3)
    with pytest.raises(ManifestError, match=r"\bextra: .*persistent=False"):
        make_skeleton(model, example, describe(model, example, task="test"))


def test_another_model_is_refused(manifest):
    model = Residual()
    model.out = nn.Linear(4, 5)
    with pytest.raises(ManifestError, match=r"out\.weight: .*\(5, 4\)"):
        make_skeleton(model, EXAMPLE, manifest)


def test_what_torch_cannot_export_is_refused(manifest):
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedLayer, match="Branch cannot be exported to ONNX"):
        make_skeleton(Branch(), EXAMPLE, manifest)


class Counted(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use, self.out = use, nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.use(x))


COUNTS = {
    "zeros": lambda x: x + torch.zeros(len(x), 4),
    "expand": lambda x: x * torch.ones(1, 4).expand(len(x), -1),
    "view": lambda x: x.view(len(x), 2, 2).flatten(1),
}


@pytest.mark.parametrize("how", COUNTS)
def test_a_batch_size_by_len_stays_free(how):
    model = Counted(COUNTS[how])
    proto = export_forward(model, torch.zeros(2, 4))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    samples = torch.randn(5, 4)
    (found,) = session.run(None, {"input": samples.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(samples).detach())


@pytest.mark.parametrize("use", [lambda x: x.reshape(2, 4), lambda x: x + torch.zeros(2, 4)])
def test_a_fixed_batch_size_is_refused(use):
    with pytest.raises(UnsupportedLayer, match=r"batch size is fixed.*x\.shape\[0\]"):
        export_forward(Counted(use), torch.zeros(2, 4))


def test_the_digest_is_written_into_a_new_manifest(manifest, skeleton):
    before = manifest.digest
    named = manifest.with_graphs({"skeleton": skeleton})
    assert named.skeleton_sha256 == hashlib.sha256(skeleton).hexdigest()
    assert named.digest != before == manifest.digest
    assert named.tensors == manifest.tensors
