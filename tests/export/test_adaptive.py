"""DM-PFL+ in one file, against PyTorch: a device that has trained its masks and its own weights, a thousand inputs."""

import copy
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.adaptive import BaseEntropies, entropy, prefers_personal
from edge_sdk.methods.dmpfl import DMPFL
from edge_sdk.methods.dual import Dual
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.tasks.public import MODELS
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors, set_tensors
from sparrow.coordinator.fleet.checks import completed
from sparrow.export.adaptive import MARGIN, PERSONAL, adaptive_model
from sparrow.export.errors import ExportError
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, random_mask

INPUTS = 1000
LARGEST = 1e-4

NETWORKS = {
    "digits": (DigitsNet, (1, 8, 8)),
    "mnist": (MODELS["mnist"]["small"].build, MODELS["mnist"]["small"].shape),
    "cifar10:dmpfl": (MODELS["cifar10"]["dmpfl"].build, MODELS["cifar10"]["dmpfl"].shape),
}

SIZES = [pytest.param(name, marks=pytest.mark.integration) if name == "cifar10:dmpfl" else name for name in NETWORKS]


class Device:
    """A device of DM-PFL after a round of the stage ``masks`` and one of the stage ``personal``."""

    def __init__(self, name="digits", *, drop=0.1, replaces=0.3, stages=("masks", "personal"), **own):
        network, shape = NETWORKS[name]
        known = load_builtin(name)
        self.manifest, self.skeleton = known.manifest, known.skeleton
        torch.manual_seed(0)
        self.model = network()
        settings = FederationSettings(
            method="dmpfl",
            method_settings={"density": 0.4, **own},
            local_epochs=5,
            learning_rate=0.05,
            early_stopping="off",
        )
        self.settings = completed(settings)
        rules = self.settings.method_settings
        draw = torch.Generator().manual_seed(0)
        centres = torch.randn(10, *shape, generator=draw)
        self.inputs = (centres[:, None] + torch.randn(10, INPUTS // 10, *shape, generator=draw)).flatten(0, 1)

        def task(classes):
            labels = torch.arange(80) % classes
            inputs = centres[labels] + torch.randn(80, *shape, generator=draw)
            data = [(inputs[at : at + 16], labels[at : at + 16]) for at in range(0, 80, 16)]
            return Task(name, self.model, nn.functional.cross_entropy, data, data[:1])

        counts = layer_counts(self.manifest, rules["density"], rules["layer_sparsity"])
        mask = random_mask(self.manifest, counts, 0)
        everybody, few = task(10), task(4)
        noise = np.random.default_rng(0)
        self.state = DeviceState()
        start = get_tensors(self.model, self.manifest)
        tensors = {spec.name: start[spec.name] for spec in self.manifest.shared}
        for number, stage in enumerate(("global", *stages)):
            assignment = Assignment(
                assignment_id="a",
                kind="personalise" if stage == "personal" else "train",
                round=number + 1,
                deadline_seconds=9,
                settings=self.settings,
                plan={"stage": stage, "replace": replaces, "epochs": 3},
            )
            received = decode(encode(self.manifest, pack(self.manifest, tensors, mask), mask), self.manifest)
            data = everybody if stage == "global" else few
            job = Job(
                assignment,
                self.manifest,
                data,
                TorchEngine(data, self.manifest),
                self.state,
                received,
                federation="f",
                device="pi",
            )
            if stage == "global":  # what all devices have made together
                DMPFL.train(job)
                tensors = {name: get_tensors(self.model, self.manifest)[name] for name in tensors}
                continue
            self.state = (DMPFL.personalise(job) if stage == "personal" else DMPFL.train(job)).state
            mask = others(mask, drop)
            tensors = {
                name: tensor + noise.normal(scale=0.002, size=tensor.shape).astype(np.float32) ** 2
                for name, tensor in tensors.items()
            }

    def export(self, **more):
        given = {"own": self.state.own, "memory": self.state.memory, "personal": self.state.personal, **more}
        return adaptive_model(
            self.skeleton, self.manifest, settings={**self.settings.method_settings, **given.pop("rules", {})}, **given
        )

    @property
    def dual(self):
        return Dual.load(self.manifest, self.state.personal, self.state.own)

    def scores(self):
        """z_c and z_g of all inputs."""
        found = []
        self.model.eval()
        for tensors in (self.state.personal, self.dual.global_model()):
            set_tensors(self.model, tensors)
            with torch.inference_mode():
                found.append(self.model(self.inputs))
        return found


def others(mask, share):
    """The mask with ``share`` of each layer's weights elsewhere."""
    chance, exists = np.random.default_rng(1), {}
    for name, flags in mask.exists.items():
        flat = flags.reshape(-1).copy()
        count = min(int(share * flat.sum()), int((~flat).sum()))
        gone = chance.choice(np.flatnonzero(flat), count, replace=False)
        come = chance.choice(np.flatnonzero(~flat), count, replace=False)
        flat[gone], flat[come] = False, True
        exists[name] = flat.reshape(flags.shape)
    return ElementMask(exists)


def session(model, path=None):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if path is not None:
        options.optimized_model_filepath = str(path)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def compare(device, model, similarity="logits"):
    """Assert that the file predicts as PyTorch does; the choices of the personal model."""
    onnx.checker.check_model(model, full_check=True)
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.append(onnx.helper.make_empty_tensor_value_info(PERSONAL))
    found, chosen = session(shown).run(None, {"input": device.inputs.numpy()})
    own, shared = (each.numpy() for each in device.scores())
    memory = device.state.memory
    base = BaseEntropies(memory["entropy_personal"], memory["entropy_global"])
    wanted = prefers_personal(own, shared, base, similarity)
    flipped = wanted != chosen
    scores = np.where(chosen[:, None], own, shared)
    np.testing.assert_allclose(found, scores, atol=LARGEST * max(1, np.abs(scores).max()))
    if flipped.any():
        assert (np.abs(gap(own, shared, base, similarity))[flipped] < MARGIN).all()
    (alone,) = session(model).run(None, {"input": device.inputs[:1].numpy()})
    np.testing.assert_allclose(alone, found[:1], atol=LARGEST)
    assert flipped.sum() <= INPUTS // 200
    return chosen


def gap(own, shared, base, similarity):
    """By how much the rule decides, nats."""
    one, other = (torch.from_numpy(each) for each in (own, shared))
    one, other = (one, other) if similarity == "logits" else (one.softmax(1), other.softmax(1))
    doubt = 1 - torch.cosine_similarity(one, other).numpy()
    return entropy(own) - doubt * base.personal - entropy(shared) + doubt * base.global_model


@pytest.mark.parametrize("name", SIZES)
def test_every_sample_is_answered_by_the_model_that_knows_it(name):
    device = Device(name)
    assert device.dual.private.count > 0
    chosen = compare(device, device.export())
    assert 0 < chosen.sum() < INPUTS, "both models answer some"


def test_models_compared_by_probabilities():
    device = Device(similarity="probabilities")
    memory = {"entropy_personal": 0.1, "entropy_global": 1.4}
    device.state = replace(device.state, memory=memory)
    chosen = compare(device, device.export(), "probabilities")
    assert 0 < chosen.sum() < INPUTS, "both models answer some"


def test_the_rule_is_the_one_of_the_card():
    """Its vectors 8.5, as the biases of a layer whose weights are 0."""
    layer, shapes = nn.Sequential(nn.Linear(2, 3)), {"weight": [3, 2], "bias": [3]}
    manifest = describe(layer, torch.zeros(2, 2), task="t")
    weights = [onnx.TensorProto(name=f"0.{name}", dims=dims, data_type=1) for name, dims in shapes.items()]
    values = [onnx.helper.make_tensor_value_info(*value) for value in (("input", 1, ["n", 2]), ("output", 1, ["n", 3]))]
    node = onnx.helper.make_node("Gemm", ["input", "0.weight", "0.bias"], ["output"], transB=1)
    graph = onnx.helper.make_graph([node], "model", values[:1], values[1:], weights)
    opset = onnx.helper.make_opsetid("", 21)
    skeleton = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()
    vectors = [
        ([4, 0, 0], [2, 0, 0], True),
        ([4, 0, 0], [0, 2, 0], False),
        ([1, 0.5, 0], [0, 3, 0], False),
        ([2, 1, 0], [2, 1, 0], False),
        ([3, -3, 0], [-3, 3, 0], False),
        ([0, 0, 0], [1, 0, 0], False),
    ]
    mask = ElementMask({"0.weight": np.ones((3, 2), dtype=bool)})
    memory = {"entropy_personal": 0.2, "entropy_global": 0.8}
    for own, shared, personal in vectors:
        tensors, other = (
            {"0.weight": np.zeros((3, 2), np.float32), "0.bias": np.array(scores, np.float32)}
            for scores in (own, shared)
        )
        arrays = Dual.of(manifest, tensors, mask, other, mask).stored()
        model = adaptive_model(skeleton, manifest, arrays, memory, {"similarity": "logits"}, personal=tensors)
        (found,) = session(model).run(None, {"input": np.zeros((2, 2), np.float32)})
        assert found.tolist() == [own if personal else shared] * 2


@pytest.mark.integration
@pytest.mark.parametrize(("drop", "replaces"), [(0.0, 0.0), (0.0, 0.3), (0.5, 0.3)])
def test_whatever_the_masks_share(drop, replaces):
    compare(Device(drop=drop, replaces=replaces), Device(drop=drop, replaces=replaces).export())


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_whatever_the_density(density):
    device = Device(density=density)
    compare(device, device.export())


@pytest.mark.parametrize("name", SIZES)
def test_what_both_have_is_stored_once(name):
    device = Device(name)
    dual = device.dual
    either = dual.mask.count + dual.global_mask.without(dual.mask).count
    unmasked = sum(np.prod(spec.shape) for spec in device.manifest.kept if spec.name not in dual.mask.exists)
    bound = 4 * either + 2 * dual.mask.size / 8 + 2 * 4 * unmasked + 2 * len(device.skeleton) + 12_000
    size = len(device.export().SerializeToString())
    assert size < bound
    if name == "cifar10:dmpfl":
        assert size < 0.6 * 4 * device.manifest.trainable_values, "two models in less than a dense one"


def test_inference_meets_plain_weights(tmp_path):
    device = Device()
    session(device.export(), tmp_path / "optimised.onnx")
    kinds = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert {"Conv", "Gemm"} <= kinds
    assert not kinds & {"BitShift", "CumSum", "Gather"}


def test_the_same_state_gives_the_same_bytes_and_stays_as_it_was():
    device = Device()
    before = copy.deepcopy({**device.state.personal, **device.state.own})
    first, second = (device.export().SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    after = {**device.state.personal, **device.state.own}
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_other_states_are_refused():
    device = Device()
    own = device.state.own
    with pytest.raises(ExportError, match="not with DM-PFL"):
        device.export(own={})
    with pytest.raises(ExportError, match="no base entropies"):
        device.export(memory=Device(stages=("masks",)).state.memory)
    with pytest.raises(ExportError, match="another model"):
        device.export(own={**own, "mask": own["mask"][:-1]})
    with pytest.raises(ExportError, match="only in the global mask"):
        device.export(own={**own, "rest": own["rest"][:-1]})
    with pytest.raises(ExportError, match="its values are missing"):
        device.export(personal={})
    with pytest.raises(ExportError, match=r"out.bias: the state's global tensor"):
        device.export(own={**own, "global:out.bias": own["global:out.bias"][:-1]})
