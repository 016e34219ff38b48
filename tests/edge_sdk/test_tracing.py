import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.graph import UnsupportedLayer
from sparrow.protocol.manifest import Constant, Data, Manifest, Uniform
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, count_values, draw_neurons


class Boundary(nn.Module):
    """Two convolutions, a flatten of 2x2 maps, two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc1, self.out = nn.Linear(16, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.out(F.relu(self.fc1(x.view(x.size(0), -1))))


class Cifar(nn.Module):
    """The CIFAR-10 network of FedSPU's code."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(1024, 120, bias=False), nn.Linear(120, 84, bias=False)
        self.out = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.pool(torch.relu(self.bn2(self.conv2(x))))
        x = torch.flatten(x, 1)
        return self.out(self.fc2(self.fc1(x).relu()).relu())


def emnist():
    def block(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)

    return nn.Sequential(*block(1, 20), *block(20, 20), nn.Flatten(), nn.Linear(980, 62))


def speech():
    def block(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 2, 2, padding=2), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)

    return nn.Sequential(*block(1, 50), *block(50, 50), nn.Flatten(), nn.Linear(450, 35))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(nn.Module):
    """ResNet-18 in small: a stem, two stages of two blocks, global average pooling."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 6, 2), Block(6, 6, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Concat(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 3, 3, padding=1)
        self.mix, self.out = nn.Conv2d(5, 4, 1), nn.Linear(9 * 4, 2)

    def forward(self, x):
        both = torch.cat([self.left(x).relu(), self.right(x).tanh()], dim=1)
        return self.out(torch.cat((both, self.mix(both)), 1).flatten(1))


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.bn, self.point, self.out = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), nn.Linear(4, 2)

    def forward(self, x):
        x = self.point(F.hardswish(self.bn(self.depth(F.relu6(self.expand(x))))))
        return self.out(x.mean((2, 3)))


class Squeeze(nn.Module):
    """Squeeze-and-excitation: a gate per channel, broadcast over the map."""

    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.conv(x)
        gate = torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)))))
        return self.out((x * gate[:, :, None, None]).amax(dim=(2, 3)))


class Sequence(nn.Module):
    """Sensor windows [N, channels, time]: convolution, then a linear layer per time step, all steps flattened."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.step, self.prelu, self.out = nn.Linear(4, 5), nn.PReLU(), nn.Linear(6 * 5, 2)

    def forward(self, x):
        x = F.avg_pool1d(F.gelu(self.norm(self.conv(x))), 2)
        x = self.prelu(self.step(x.transpose(1, 2)))
        return self.out(x.reshape(x.shape[0], -1))


class Values(nn.Module):
    """Attention of one head, as products of matrices: positions mix, the features of the values do not."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        scores = torch.einsum("nid, njd -> nij", self.q(x), self.k(x)).softmax(-1)
        return self.out(torch.bmm(scores, self.v(x))).mean(1)


def group_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.Flatten(),
        nn.Linear(144, 6),
        nn.LayerNorm(6),
        nn.GELU(),
        nn.Linear(6, 2),
    )


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.embed(x).mean(dim=1))


NETS = {
    "boundary": (Boundary, (1, 4, 4)),
    "resnet": (ResNet, (3, 8, 8)),
    "concat": (Concat, (1, 2, 2)),
    "depthwise": (Depthwise, (2, 5, 5)),
    "squeeze": (Squeeze, (1, 5, 5)),
    "sequence": (Sequence, (3, 12)),
    "values": (Values, (5, 3)),
}


def manifest_of(model, *shape, **options) -> Manifest:
    return describe(model, torch.randn(2, *shape), task="test", **options)


def axes(manifest: Manifest, name: str) -> list[list[tuple[str, int]]]:
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    return [[(segment.group, segment.repeat) for segment in axis] for axis in spec.axes]


def mask_of(**active: list[int]) -> NeuronMask:
    return NeuronMask({name: np.array(index) for name, index in active.items()})


def groups(manifest: Manifest) -> dict[str, int]:
    return manifest.group_sizes


# --- numbers worked out by hand


def test_v1_masks_of_an_mlp():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    manifest = manifest_of(model, 3)
    mask = NeuronMask({"0": np.array([0, 2])})
    assert groups(manifest) == {"0": 4}
    assert count_values(manifest, mask) == 14
    assert manifest.trainable_values == 26


def test_v2_flatten_boundary():
    manifest = manifest_of(Boundary(), 1, 4, 4)
    mask = mask_of(conv1=[1], conv2=[0, 3], fc1=[2, 4])
    sizes = {spec.name: block_of(manifest, spec, mask).size for spec in manifest.shared}
    assert sizes["conv1.weight"] == 9
    assert sizes["conv2.weight"] == 18
    assert sizes["fc1.weight"] == 16
    assert sizes["out.weight"] == 4
    assert sum(sizes[spec.name] for spec in manifest.shared if spec.trainable) == 60
    assert manifest.trainable_values == 253
    assert count_values(manifest, mask) == 66
    assert manifest.shared_values == 267
    assert sum(groups(manifest).values()) == 12
    fc1 = next(spec for spec in manifest.shared if spec.name == "fc1.weight")
    marks = np.zeros(fc1.shape)
    block_of(manifest, fc1, mask).add(marks, 1.0)
    assert np.flatnonzero(marks.any(axis=1)).tolist() == [2, 4]
    assert np.flatnonzero(marks.any(axis=0)).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_v7_wire_size_of_the_cifar_network():
    manifest = manifest_of(Cifar(), 3, 32, 32)
    mask = draw_neurons(manifest, NeuronDraw("dev-7-3", 0.4))
    assert [len(index) for index in mask.active.values()] == [2, 6, 48, 33]
    assert manifest.trainable_values == 134_902
    assert count_values(manifest, mask) == 20_558
    personal = manifest_of(Cifar(), 3, 32, 32, running_statistics="personal")
    assert count_values(personal, mask) == 20_542


@pytest.mark.parametrize(
    ("build", "shape", "payloads"),
    [
        (Cifar, (3, 32, 32), (20_944, 82_232, 183_864, 325_840, 539_784)),
        (emnist, (1, 28, 28), (49_736, 100_376, 152_168, 205_112, 259_208)),
        (speech, (1, 32, 32), (14_900, 32_860, 54_020, 78_380, 105_940)),
    ],
)
def test_payload_table_of_section_3_3(build, shape, payloads):
    manifest = manifest_of(build(), *shape)
    for ratio, payload in zip((0.2, 0.4, 0.6, 0.8, 1.0), payloads, strict=True):
        mask = draw_neurons(manifest, NeuronDraw("device", ratio))
        assert 4 * count_values(manifest, mask) == payload


def test_v8_draw_names_the_layers_as_the_card_does():
    manifest = manifest_of(Cifar(), 3, 32, 32)
    mask = draw_neurons(manifest, NeuronDraw("dev-7-3", 0.4))
    assert mask.active["conv1"].tolist() == [0, 1]
    assert mask.active["conv2"].tolist() == [0, 3, 5, 6, 8, 10]


# --- coupling


def test_a_residual_network_shares_groups():
    manifest = manifest_of(ResNet(), 3, 8, 8)
    assert groups(manifest) == {
        "conv1": 4,
        "layer1.0.conv1": 4,
        "layer1.1.conv1": 4,
        "layer2.0.conv1": 6,
        "layer2.0.conv2": 6,
        "layer2.1.conv1": 6,
    }
    for name in ("layer1.0.conv2.weight", "layer1.1.conv2.weight"):
        assert axes(manifest, name)[0] == [("conv1", 1)]
    assert axes(manifest, "layer2.0.shortcut.0.weight")[:2] == [[("layer2.0.conv2", 1)], [("conv1", 1)]]
    assert axes(manifest, "layer2.1.bn2.running_var") == [[("layer2.0.conv2", 1)]]
    assert axes(manifest, "fc.weight") == [[], [("layer2.0.conv2", 1)]]
    assert axes(manifest, "fc.bias") == []


def test_concatenation_joins_segments():
    manifest = manifest_of(Concat(), 1, 2, 2)
    assert axes(manifest, "mix.weight")[1] == [("left", 1), ("right", 1)]
    assert axes(manifest, "out.weight")[1] == [("left", 4), ("right", 4), ("mix", 4)]


def test_a_depthwise_filter_follows_its_channel():
    manifest = manifest_of(Depthwise(), 2, 5, 5)
    assert groups(manifest) == {"expand": 3, "point": 4}
    assert axes(manifest, "depth.weight") == [[("expand", 2)], [], [], []]
    assert axes(manifest, "bn.weight") == [[("expand", 2)]]
    assert axes(manifest, "point.weight")[1] == [("expand", 2)]


def test_a_gate_shares_the_group_of_what_it_gates():
    manifest = manifest_of(Squeeze(), 1, 5, 5)
    assert groups(manifest) == {"conv": 4, "down": 2}
    assert axes(manifest, "up.weight") == [[("conv", 1)], [("down", 1)]]


def test_time_steps_repeat_the_features():
    manifest = manifest_of(Sequence(), 3, 12)
    assert groups(manifest) == {"conv": 4, "step": 5}
    assert axes(manifest, "out.weight")[1] == [("step", 1)] * 6
    assert {layer.name: layer.positions for layer in manifest.layers} == {
        "conv": 12,
        "norm": 12,
        "step": 6,
        "prelu": 30,
        "out": 1,
    }


def test_norms_follow_their_channel():
    manifest = manifest_of(group_norm(), 1, 8, 8)
    assert axes(manifest, "1.weight") == axes(manifest, "2.weight") == [[("0", 1)]]
    assert axes(manifest, "4.weight") == [[("4", 1)], [("0", 36)]]
    assert axes(manifest, "5.bias") == [[("4", 1)]]


def test_an_embedding_has_its_neurons_in_columns():
    manifest = describe(Words(), torch.zeros(2, 5, dtype=torch.int64), task="words")
    assert axes(manifest, "embed.weight") == [[], [("embed", 1)]]
    assert axes(manifest, "out.weight") == [[], [("embed", 1)]]


class AddInput(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.conv, self.out = how, nn.Conv2d(2, 2, 3, padding=1), nn.LazyLinear(3)

    def forward(self, x):
        return self.out(self.how(x, self.conv(x)).flatten(1))


@pytest.mark.parametrize("how", [torch.add, lambda x, y: y.cumsum(1)])
def test_what_cannot_be_described_is_complete(how):
    model = AddInput(how)
    model(torch.zeros(1, 2, 4, 4))
    manifest = manifest_of(model, 2, 4, 4)
    assert groups(manifest) == {}
    assert axes(manifest, "conv.weight") == []


def test_the_complete_part_of_a_concatenation_is_a_neuron_that_is_always_active():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.out = nn.Linear(3, 4), nn.Linear(3, 3), nn.Linear(7, 5), nn.Linear(5, 2)

        def forward(self, x):
            b = self.b(x)
            return self.out(self.c(torch.cat([self.a(x), b], 1)) + (x + b).sum(1, keepdim=True))

    manifest = manifest_of(Net(), 3)
    assert groups(manifest) == {"always": 1, "a": 4, "c": 5}
    assert axes(manifest, "c.weight") == [[("c", 1)], [("a", 1), ("always", 3)]]
    mask = draw_neurons(manifest, NeuronDraw("key", 0.25))
    assert [len(mask.active[group]) for group in ("always", "a", "c")] == [1, 1, 1]


def test_constants_belong_to_nobody():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return self.out(1 - self.hidden(x) * self.scale + self.scale.sum())

    manifest = manifest_of(Net(), 3)
    assert groups(manifest) == {"hidden": 4}
    assert next(spec for spec in manifest.tensors if spec.name == "scale").policy == "frozen"


@pytest.mark.integration
@pytest.mark.parametrize("name", NETS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ratio=st.floats(0.2, 0.8))
def test_inactive_neurons_reach_the_output_through_their_columns_alone(name, seed, ratio):
    """With the columns of inactive neurons at zero, nothing in their rows may change the output."""
    build, shape = NETS[name]
    torch.manual_seed(seed)
    model = build().eval()
    x = torch.randn(2, *shape)
    manifest = describe(model, x, task="test")
    mask = draw_neurons(manifest, NeuronDraw(str(seed), ratio))
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    for spec in manifest.shared:
        if len(spec.axes) > 1 and spec.axes[1]:
            columns = block_of(manifest, spec.model_copy(update={"axes": ((), *spec.axes[1:])}), mask)
            kept = columns.take(state[spec.name]).copy()
            state[spec.name][...] = 0
            columns.put(state[spec.name], kept)
    before = model(x)
    for spec in manifest.shared:
        if spec.axes and spec.axes[0]:
            rows = block_of(
                manifest, spec.model_copy(update={"axes": (spec.axes[0], *((),) * (len(spec.shape) - 1))}), mask
            )
            kept = rows.take(state[spec.name]).copy()
            state[spec.name][...] = 7.5
            rows.put(state[spec.name], kept)
    torch.testing.assert_close(model(x), before)


@pytest.mark.integration
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_active_values_are_those_between_active_neurons(data):
    """Count and place against the definition, value by value, with the neurons written down by hand."""
    manifest = manifest_of(Boundary(), 1, 4, 4)
    active = {
        name: sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
        for name, size in {"conv1": 3, "conv2": 4, "fc1": 5}.items()
    }
    rows = {"conv1": "conv1", "bn1": "conv1", "conv2": "conv2", "bn2": "conv2", "fc1": "fc1"}
    columns = {"conv2": ("conv1", 1), "fc1": ("conv2", 4), "out": ("fc1", 1)}
    mask, total = mask_of(**active), 0
    for spec in manifest.shared:
        layer = spec.name.split(".")[0]
        marks = np.zeros(spec.shape)
        block_of(manifest, spec, mask).add(marks, 1.0)
        for place, mark in np.ndenumerate(marks):
            wanted = layer not in rows or place[0] in active[rows[layer]]
            if layer in columns and len(place) > 1:
                group, repeat = columns[layer]
                wanted = wanted and place[1] // repeat in active[group]
            assert mark == wanted
            total += wanted
    assert count_values(manifest, mask) == total


# --- everything else a manifest says


def test_policies_recipes_and_layers():
    manifest = manifest_of(Boundary(), 1, 4, 4, recipes=True, running_statistics="personal")
    spec = {spec.name: spec for spec in manifest.tensors}
    assert list(spec) == list(Boundary().state_dict())
    assert manifest.input_shape == (1, 4, 4)
    assert manifest.output_shape == (2,)
    assert (spec["bn1.num_batches_tracked"].policy, spec["bn1.num_batches_tracked"].dtype) == ("dropped", "int64")
    assert (spec["bn1.running_var"].policy, spec["bn1.running_var"].trainable) == ("personal", False)
    assert spec["bn1.running_var"].init == spec["bn1.weight"].init == Constant(value=1)
    assert spec["conv2.weight"].init == spec["conv2.bias"].init == Uniform(bound=27**-0.5)
    assert spec["fc1.bias"].init == Uniform(bound=0.25)
    assert [(layer.name, layer.kind, layer.positions) for layer in manifest.layers] == [
        ("conv1", "conv2d", 16),
        ("bn1", "batchnorm2d", 16),
        ("conv2", "conv2d", 16),
        ("bn2", "batchnorm2d", 16),
        ("fc1", "linear", 1),
        ("out", "linear", 1),
    ]
    assert manifest.layers[0].tensors == ("conv1.weight", "conv1.bias")
    assert all(one.init == Data() for one in manifest_of(Boundary(), 1, 4, 4).tensors)


@pytest.mark.parametrize("build", [Boundary, group_norm])
def test_recipes_are_pytorchs_own_initialisation(build):
    torch.manual_seed(0)
    model = build()
    for spec in manifest_of(model, 1, *((4, 4) if build is Boundary else (8, 8)), recipes=True).shared:
        values = model.state_dict()[spec.name]
        if isinstance(spec.init, Uniform):
            assert 0.3 * spec.init.bound < values.abs().max() <= spec.init.bound
        else:
            assert isinstance(spec.init, Constant)
            assert bool((values == spec.init.value).all())


def test_the_model_is_left_as_it_was():
    model = Boundary().train()
    model.bn2.eval()
    x = torch.randn(1, 1, 4, 4)
    before, example = copy.deepcopy(model.state_dict()), x.clone()
    describe(model, x, task="test")
    assert model.training
    assert not model.bn2.training
    assert torch.equal(x, example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_sample_describes_the_same_model_as_many():
    model = Sequence()
    one, many = (describe(model, torch.zeros(count, 3, 12), task="test") for count in (1, 6))
    assert one == many


def test_neurons_of_frozen_parameters_are_complete():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)
    manifest = manifest_of(model, 3)
    spec = manifest.tensors[0]
    assert (spec.policy, spec.trainable, spec.axes) == ("frozen", False, ())
    assert groups(manifest) == {"1": 5}


# --- refusals


class Calls(nn.Module):
    """A model whose forward is the function given, over one linear layer and whatever parts it is given."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.how = forward
        self.hidden = nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.how(self, x)


REFUSED = {
    "convolution without a batch": (
        lambda: Calls(lambda self, x: self.conv(x), conv=nn.Conv1d(3, 6, 1)),
        "Calls cannot be traced: .*expected input.* Make forward take only the batch",
    ),
    "control flow": (
        lambda: Calls(lambda self, x: x if x.sum() > 0 else -x),
        "Calls cannot be traced: .*decisions that depend on data out of it",
    ),
    "half precision": (
        lambda: Calls(lambda self, x: self.hidden(x)).half(),
        r"hidden\.weight: .*float16.*model\.float",
    ),
    "wrong example": (
        lambda: Calls(lambda self, x: self.hidden(self.wide(x)), wide=nn.Linear(4, 5)),
        "Calls cannot be traced: .*must have same reduction dim",
    ),
    "several outputs": (lambda: Calls(lambda self, x: (self.hidden(x), x)), "does not return one tensor"),
    "no batch": (lambda: Calls(lambda self, x: self.hidden(x).sum(0)), "first axis must be the batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_layer_and_the_way_out(case):
    build, message = REFUSED[case]
    with pytest.raises(UnsupportedLayer, match=message):
        describe(build(), torch.randn(3, 4), task="test")


def test_a_model_of_two_inputs_is_refused():
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    with pytest.raises(UnsupportedLayer, match="missing a required argument: 'y'"):
        manifest_of(Two(), 4)


def test_a_model_with_too_few_droppable_weights_is_refused():
    model = Calls(
        lambda self, x: self.small(self.hidden(x).cumsum(1)), small=nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    )
    assert groups(manifest_of(model, 4)) == {"small.0": 2}
    with pytest.raises(
        UnsupportedLayer,
        match=r"41 % .*50 % .*hidden\.weight \(16 values, by .*cumsum",
    ):
        describe(model, torch.randn(2, 4), task="test", least=0.5)


# --- whatever runs is described: neurons may change places


class Scaled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def heads(x, count):
    return x.view(len(x), -1, count, x.shape[-1] // count).transpose(1, 2)


def joined(self, x):
    query, key, value = self.qkv(x).view(len(x), 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)).mean(1)


def shuffled(x):
    return x.view(len(x), 2, 3, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def stepped(self, x):
    """A recurrent cell over time, from a state of zeros."""
    state = x.new_zeros(len(x), 4)
    if isinstance(self.rnn, nn.LSTMCell):
        state = (state, state)
    for step in x.unbind(1):
        state = self.rnn(step, state)
    return self.out(state[0] if isinstance(state, tuple) else state)


def between(self, x):
    """The values of a hidden layer that lie in a range."""
    hidden = self.hidden(x)
    return self.out(hidden * ((hidden > -0.5) & (hidden < 0.5)))


def convolved(self, x):
    """A convolutional recurrent cell over time: input and state are concatenated."""
    state = x.new_zeros(len(x), 4, x.shape[-1])
    for step in x.unbind(1):
        gate, new = self.cell(torch.cat([step, state], 1)).chunk(2, 1)
        state = state + torch.sigmoid(gate) * torch.tanh(new)
    return self.out(state.mean(2))


ANY = {
    "convolutional cell": (
        lambda: Calls(convolved, cell=nn.Conv1d(2 + 4, 8, 3, padding=1), out=nn.Linear(4, 2)),
        (3, 2, 5),
        {"always": 1, "cat": 4},
    ),
    "input beside": (
        lambda: Calls(
            lambda self, x: self.out(torch.cat([x, self.conv(x)], 1).flatten(1)),
            conv=nn.Conv1d(2, 3, 1),
            out=nn.Linear(20, 2),
        ),
        (2, 4),
        {"always": 1, "conv": 3},
    ),
    "graph": (
        lambda: Calls(
            lambda self, x: self.out((self.edges @ self.hidden(x).relu()).mean(1)),
            edges=torch.rand(5, 5),
            out=nn.Linear(4, 2),
        ),
        (5, 4),
        {"hidden": 4},
    ),
    "LSTM cell": (lambda: Calls(stepped, rnn=nn.LSTMCell(3, 4), out=nn.Linear(4, 2)), (5, 3), {"rnn": 4}),
    "GRU cell": (lambda: Calls(stepped, rnn=nn.GRUCell(3, 4), out=nn.Linear(4, 2)), (5, 3), {"rnn": 4}),
    "RNN cell": (lambda: Calls(stepped, rnn=nn.RNNCell(3, 4, bias=False), out=nn.Linear(4, 2)), (5, 3), {"rnn": 4}),
    "weight norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.ReLU(), weight_norm(nn.Linear(4, 2))),
        (3,),
        {"0.parametrizations.weight": 4},
    ),
    "weight norm of a convolution": (
        lambda: Calls(
            lambda self, x: self.out(self.conv(x).mean(2)), conv=weight_norm(nn.Conv1d(2, 4, 3)), out=nn.Linear(4, 2)
        ),
        (2, 6),
        {"conv.parametrizations.weight": 4},
    ),
    "range": (lambda: Calls(between, hidden=nn.Linear(3, 4), out=nn.Linear(4, 2)), (3,), {"hidden": 4}),
    "LSTM": (
        lambda: Calls(
            lambda self, x: self.out(self.rnn(x)[0][:, -1]), rnn=nn.LSTM(3, 4, 2, batch_first=True), out=nn.Linear(4, 2)
        ),
        (5, 3),
        {"rnn": 4, "rnn:2": 4},
    ),
    "both ways": (
        lambda: Calls(
            lambda self, x: self.out(self.rnn(x)[0][:, -1]),
            rnn=nn.GRU(3, 4, batch_first=True, bidirectional=True),
            out=nn.Linear(8, 2),
        ),
        (5, 3),
        {"rnn": 4, "rnn:2": 4},
    ),
    "last state": (
        lambda: Calls(
            lambda self, x: self.out(self.rnn(x)[1][-1]), rnn=nn.RNN(3, 4, 2, batch_first=True), out=nn.Linear(4, 2)
        ),
        (5, 3),
        {"rnn": 4},
    ),
    "transposed": (
        lambda: Calls(
            lambda self, x: self.out(self.up(self.down(x)).mean(2)),
            down=nn.Conv1d(2, 3, 2),
            up=nn.ConvTranspose1d(3, 5, 2),
            out=nn.Linear(5, 2),
        ),
        (2, 6),
        {"down": 3, "up": 5},
    ),
    "gain": (
        lambda: Calls(
            lambda self, x: self.out(self.hidden(x) * self.gain), gain=nn.Parameter(torch.rand(4)), out=nn.Linear(4, 2)
        ),
        (4,),
        {"hidden": 4},
    ),
    "functional": (
        lambda: Calls(lambda self, x: self.out(F.linear(x, self.hidden.weight)), out=nn.Linear(4, 2)),
        (4,),
        {"hidden": 4},
    ),
    "bare": (lambda: nn.Linear(4, 2), (4,), {}),
    "unused": (
        lambda: Calls(lambda self, x: self.out(self.hidden(x)), spare=nn.Linear(4, 4), out=nn.Linear(4, 2)),
        (4,),
        {"hidden": 4},
    ),
    "twice": (
        lambda: Calls(
            lambda self, x: self.out(self.hidden(self.hidden(self.into(x)))), into=nn.Linear(3, 4), out=nn.Linear(4, 2)
        ),
        (3,),
        {"into": 4},
    ),
    "of its own": (lambda: nn.Sequential(Scaled(4, 3), nn.Linear(3, 2)), (4,), {"0": 3}),
    "heads": (
        lambda: Calls(
            lambda self, x: self.out(
                F.scaled_dot_product_attention(heads(self.hidden(x), 2), heads(self.k(x), 2), heads(self.v(x), 2))
                .transpose(1, 2)
                .flatten(2)
            ).mean(1),
            k=nn.Linear(4, 4),
            v=nn.Linear(4, 4),
            out=nn.Linear(4, 2),
        ),
        (5, 4),
        {"hidden": 2},
    ),
    "heads of one product": (lambda: Calls(joined, qkv=nn.Linear(3, 24), out=nn.Linear(8, 2)), (4, 3), {"qkv": 2}),
    "torch's attention": (
        lambda: Calls(
            lambda self, x: self.out(self.attend(x, x, x)[0].mean(1)),
            attend=nn.MultiheadAttention(8, 2, batch_first=True),
            out=nn.Linear(8, 2),
        ),
        (5, 8),
        {"attend": 2, "attend.out_proj": 8},
    ),
    "shuffle": (
        lambda: Calls(
            lambda self, x: self.out(shuffled(self.conv(x)).mean(2)), conv=nn.Conv1d(2, 6, 2), out=nn.Linear(6, 2)
        ),
        (2, 6),
        {"conv": 3},
    ),
    "halves": (
        lambda: Calls(
            lambda self, x: self.out(torch.mul(*self.wide(x).chunk(2, 1))), wide=nn.Linear(4, 6), out=nn.Linear(3, 2)
        ),
        (4,),
        {"wide": 3},
    ),
    "glu": (
        lambda: Calls(lambda self, x: self.out(F.glu(self.wide(x))), wide=nn.Linear(4, 6), out=nn.Linear(3, 2)),
        (4,),
        {"wide": 3},
    ),
    "parts": (
        lambda: Calls(
            lambda self, x: self.out(self.hidden(x)[:, :3]) + self.end(self.hidden(x)[:, 3:]),
            out=nn.Linear(3, 2),
            end=nn.Linear(1, 2),
        ),
        (4,),
        {"hidden": 3, "hidden:2": 1},
    ),
    "tied": (
        lambda: Calls(
            lambda self, x: self.out(self.words(x).mean(1)) @ self.words.weight.T,
            words=nn.Embedding(7, 4),
            out=nn.Linear(4, 4),
        ),
        None,
        {"words": 4},
    ),
    "of a constant": (
        lambda: Calls(
            lambda self, x: self.out(self.hidden(x) + self.place(torch.arange(3.0))),
            place=nn.Linear(3, 4),
            out=nn.Linear(4, 2),
        ),
        (4,),
        {"hidden": 4},
    ),
    "a bias for each head": (
        lambda: Calls(
            lambda self, x: self.out(
                F.scaled_dot_product_attention(
                    heads(self.hidden(x), 2), heads(self.k(x), 2), heads(self.v(x), 2), self.bias.T[:, :, None]
                )
                .transpose(1, 2)
                .flatten(2)
            ).mean(1),
            k=nn.Linear(4, 4),
            v=nn.Linear(4, 4),
            out=nn.Linear(4, 2),
            bias=nn.Parameter(torch.rand(5, 2)),
        ),
        (5, 4),
        {"hidden": 2},
    ),
    "norm by hand": (
        lambda: Calls(
            lambda self, x: self.out((lambda h: h * (h.square().mean(-1, keepdim=True) + 1).rsqrt())(self.hidden(x))),
            out=nn.Linear(4, 2),
        ),
        (4,),
        {"hidden": 4},
    ),
    "einsum": (
        lambda: Calls(lambda self, x: self.out(torch.einsum("ni,oi->no", x, self.hidden.weight)), out=nn.Linear(4, 2)),
        (4,),
        {"hidden": 4},
    ),
}
"""Models, what they take (None: seven words), and the groups that are found."""


@pytest.mark.integration
@pytest.mark.parametrize("case", ANY)
def test_neurons_of_a_group_may_change_places(case):
    """A model computes the same when the neurons of a group are put in another order wherever they are named."""
    build, shape, wanted = ANY[case]
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(2, *shape) if shape else torch.randint(7, (2, 5))
    manifest = describe(model, x, task="test")
    assert groups(manifest) == wanted
    before = model(x)
    for group, size in wanted.items():
        order = torch.arange(size).roll(1)
        state = model.state_dict()
        for spec in manifest.tensors:
            for place, axis in enumerate(spec.axes):
                index, start = [], 0
                for segment in axis:
                    count = wanted[segment.group]
                    neurons = order if segment.group == group else torch.arange(count)
                    index.append((start + neurons[:, None] * segment.repeat + torch.arange(segment.repeat)).flatten())
                    start += count * segment.repeat
                if index:
                    state[spec.name].copy_(state[spec.name].index_select(place, torch.cat(index)).clone())
        torch.testing.assert_close(model(x), before)


def test_a_learned_position_is_trained_whole():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.zeros(1, 5, 4))
            self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out((self.into(x) + self.place).relu().mean(1))

    manifest = manifest_of(Placed(), 5, 3)
    assert groups(manifest) == {"into": 4}
    assert axes(manifest, "place") == []


def test_what_is_learned_from_constants_alone_gets_its_error():
    """A table of positions passes two layers: the second's input is no data, though no sample reaches it."""

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1, 6), nn.Linear(6, 4)
            self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.into(x) + self.second(self.first(torch.ones(1, 1)).relu()))

    errors = {layer.name: layer.input_error for layer in manifest_of(Placed(), 3).layers}
    assert errors == {"into": "none", "first": "none", "second": "all", "out": "all"}
