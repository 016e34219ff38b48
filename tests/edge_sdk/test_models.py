"""Common architectures: what is found in them, and that training under FedSPU's masks touches active values alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import har_small
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import get_tensors, train_locally
from sparrow.protocol.manifest import Constant, Manifest, TensorSpec, Uniform
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from sparrow.protocol.settings import FederationSettings

pytestmark = pytest.mark.integration  # traces many models


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """All 18 layers in their order, 8 channels wide where the original has 64."""

    def __init__(self, width=8):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages = []
        for inputs, outputs in zip([width, *widths], widths, strict=False):
            stages.append(
                nn.Sequential(Residual(inputs, outputs, 1 + (inputs != outputs)), Residual(outputs, outputs, 1))
            )
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(widths[-1], 5)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Inverted(nn.Module):
    """MobileNetV2's block: expand, a depthwise convolution, project; added to its input where the shapes allow."""

    def __init__(self, inputs, outputs, stride, expand=2):
        super().__init__()
        hidden = inputs * expand
        self.added = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x):
        return x + self.conv(x) if self.added else self.conv(x)


def mobilenet():
    """A stem, MobileNetV2's first block without expansion, three inverted residuals, a wide last convolution."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6)),
        *(Inverted(6, 10, 2), Inverted(10, 10, 1), Inverted(10, 10, 1)),
        *(nn.Conv2d(10, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5)),
    )


def grouped():
    """A 1-D network of grouped convolutions, as ResNeXt has them in two dimensions."""
    return nn.Sequential(
        *(nn.Conv1d(6, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(8, 12, 3, padding=1, groups=4), nn.BatchNorm1d(12), nn.ReLU()),
        *(nn.Conv1d(12, 10, 1), nn.ReLU(), nn.Flatten(), nn.Linear(10 * 16, 5)),
    )


def volumes():
    return nn.Sequential(
        *(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(4, 6, 3, padding=1), nn.InstanceNorm3d(6, affine=True), nn.Flatten(), nn.Linear(6 * 8, 5)),
    )


class Dense(nn.Module):
    """Concatenation as in DenseNet and Inception, flattened into a linear layer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 6, 1), nn.Conv2d(1, 4, 3, padding=1)
        self.bn, self.mix, self.fc, self.out = (
            nn.BatchNorm2d(10),
            nn.Conv2d(10, 8, 3),
            nn.Linear(72, 12),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        x = torch.cat([F.relu(self.left(x)), torch.tanh(self.right(x))], dim=1)
        return self.out(F.relu(self.fc(torch.flatten(F.relu(self.mix(self.bn(x))), 1))))


class Attention(nn.Module):
    """Attention written by hand, in one of the ways that people do."""

    def __init__(self, width, heads, how):
        super().__init__()
        self.heads, self.how = heads, how
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)
        if how in ("chunk", "unbind"):
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        n, length, width = x.shape
        if self.how == "unbind":
            q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = self.qkv(x).chunk(3, dim=-1) if self.how == "chunk" else (self.q(x), self.k(x), self.v(x))
            q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        if self.how == "matmul":
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(width // self.heads)
            x = torch.softmax(scores.masked_fill(self.later, -math.inf), dim=-1) @ v
        elif self.how == "einsum":
            x = torch.einsum("nhls,nhsd->nhld", torch.einsum("nhld,nhsd->nhls", q, k).softmax(-1), v)
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """A transformer block that norms first."""

    def __init__(self, width, hidden, attention):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), attention, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TorchAttention(nn.Module):
    """torch's own attention in a block's clothes."""

    def __init__(self, width, heads, *, batch_first, need_weights=False):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x):
        if self.batch_first:
            return self.attn(x, x, x, need_weights=self.need_weights)[0]
        x = x.transpose(0, 1)
        return self.attn(x, x, x)[0].transpose(0, 1)


class Transformer(nn.Module):
    """Windows [N, 6, 16] of 6 sensors as 16 tokens, with learned positions; the mean over time is classified."""

    def __init__(self, *blocks, width=8):
        super().__init__()
        self.embed, self.position = nn.Linear(6, width), nn.Embedding(16, width)
        self.blocks, self.norm, self.out = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2)) + self.position(torch.arange(16))
        return self.out(self.norm(self.blocks(x)).mean(dim=1))


def by_hand(how):
    return Transformer(*(Block(8, 20, Attention(8, 2, how)) for _ in range(2)))


def by_torch(**options):
    return Transformer(Block(8, 20, TorchAttention(8, 2, **options)))


def encoder(*, norm_first, batch_first=True):
    layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=batch_first, norm_first=norm_first)
    return Transformer(nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16), persistent=False)

    def forward(self, x):
        return self.layer(x, src_mask=self.mask, is_causal=True)


MODELS = {
    "resnet18": (ResNet18, (3, 32, 32)),
    "mobilenet": (mobilenet, (3, 32, 32)),
    "har": (har_small, (6, 64)),
    "grouped": (grouped, (6, 32)),
    "volumes": (volumes, (1, 4, 4, 4)),
    "concatenation": (Dense, (1, 5, 5)),
    "transformer": (lambda: by_hand("sdpa"), (6, 16)),
    "transformer, matmul": (lambda: by_hand("matmul"), (6, 16)),
    "transformer, einsum": (lambda: by_hand("einsum"), (6, 16)),
    "transformer, chunk": (lambda: by_hand("chunk"), (6, 16)),
    "transformer, unbind": (lambda: by_hand("unbind"), (6, 16)),
    "transformer, torch": (lambda: by_torch(batch_first=True), (6, 16)),
    "transformer, torch, weights": (lambda: by_torch(batch_first=True, need_weights=True), (6, 16)),
    "transformer, torch, sequence first": (lambda: by_torch(batch_first=False), (6, 16)),
    "encoder": (lambda: encoder(norm_first=False), (6, 16)),
    "encoder, norm first": (lambda: encoder(norm_first=True), (6, 16)),
    "encoder, causal": (lambda: Transformer(Causal()), (6, 16)),
}


def make(name) -> tuple[nn.Module, Manifest, torch.Tensor]:
    """The model, its manifest and four samples."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build(), torch.randn(4, *shape)
    return model, describe(model, inputs, task="test"), inputs


def draw(manifest: Manifest, ratio=0.5) -> NeuronMask:
    return draw_neurons(manifest, NeuronDraw("pi", ratio))


def active_along(manifest: Manifest, spec: TensorSpec, axis: int, mask: NeuronMask) -> np.ndarray:
    """Which entries of an axis are active, written down from the definition: bool [length]."""
    parts = []
    for segment in spec.axes[axis] if spec.axes else ():
        flags = np.isin(np.arange(manifest.group_sizes[segment.group]), mask.active[segment.group])
        parts.append(np.repeat(flags, segment.repeat))
    return np.concatenate(parts) if parts else np.ones(spec.shape[axis], dtype=bool)


def active_values(manifest: Manifest, spec: TensorSpec, mask: NeuronMask) -> np.ndarray:
    """Which values of a tensor are active: those all of whose axes are."""
    result = np.ones((), dtype=bool)
    for axis in range(len(spec.shape)):
        result = result[..., None] & active_along(manifest, spec, axis, mask)
    return result


def axes(manifest: Manifest, name: str) -> list[list[tuple[str, int]]]:
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    return [[(segment.group, segment.repeat) for segment in axis] for axis in spec.axes]


# --- what is found


def test_resnet18_has_a_group_for_each_stage_and_each_block():
    model, manifest, _ = make("resnet18")
    stages = {"conv1": 8, "layer2.0.conv2": 16, "layer3.0.conv2": 32, "layer4.0.conv2": 64}
    blocks = {f"layer{stage}.{block}.conv1": 4 * 2**stage for stage in (1, 2, 3, 4) for block in (0, 1)}
    assert manifest.group_sizes == stages | blocks
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules()) == 18 + 3
    for name in ("layer2.0.downsample.0.weight", "layer2.1.conv2.weight"):
        assert axes(manifest, name)[0] == [("layer2.0.conv2", 1)]
    assert axes(manifest, "fc.weight") == [[], [("layer4.0.conv2", 1)]]


def test_mobilenet_keeps_a_depthwise_filter_with_its_channel():
    _, manifest, _ = make("mobilenet")
    assert manifest.group_sizes == {"0": 8, "6": 6, "8.conv.0": 12, "8.conv.6": 10} | {
        "9.conv.0": 20,
        "10.conv.0": 20,
        "11": 16,
    }
    assert axes(manifest, "9.conv.3.weight") == [[("9.conv.0", 1)], [], [], []]
    assert axes(manifest, "10.conv.6.weight")[:2] == [[("8.conv.6", 1)], [("10.conv.0", 1)]]


def test_a_grouped_convolution_has_neurons_of_its_own_and_columns_of_nobody():
    _, manifest, _ = make("grouped")
    assert manifest.group_sizes == {"0": 8, "4": 12, "7": 10}
    assert axes(manifest, "4.weight") == [[("4", 1)], [], []]
    assert axes(manifest, "7.weight") == [[("7", 1)], [("4", 1)], []]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("transformer", "encoder"))])
def test_a_transformer_masks_its_residual_stream_its_heads_and_the_hidden_neurons_of_its_mlps(name):
    _, manifest, _ = make(name)
    hidden, heads = ([spec for spec in manifest.groups if spec.size == size] for size in (20, 2))
    assert manifest.group_sizes == {"embed": 8} | {group.name: group.size for group in (*hidden, *heads)}
    assert len(hidden) == len(heads) == (1 if "torch" in name or "causal" in name else 2)
    for group in hidden:
        assert axes(manifest, f"{group.name}.weight") == [[(group.name, 1)], [("embed", 1)]]
    projections = [spec for spec in manifest.tensors if any(key in spec.name for key in ("in_proj_w", "qkv.w", ".q.w"))]
    assert len(projections) == len(heads)
    for spec, group in zip(projections, heads, strict=True):
        rows = [(group.name, 4)] * (1 if ".q.w" in spec.name else 3)
        assert axes(manifest, spec.name) == [rows, [("embed", 1)]], "a head's rows of query, key and value"
    assert axes(manifest, "position.weight") == [[], [("embed", 1)]]
    assert axes(manifest, "norm.bias") == [[("embed", 1)]]


def test_attention_of_one_head_keeps_the_neurons_of_its_values():
    """A sum over positions mixes no features: what the values' rows make, the next layer's columns read."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))).mean(1)

    manifest = describe(Net(), torch.randn(2, 7, 6), task="test")
    assert manifest.group_sizes == {"v": 8}
    assert axes(manifest, "out.weight") == [[], [("v", 1)]]


def test_attention_between_two_sequences_has_columns_of_each():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(8, 5)
            self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)

        def forward(self, x):
            b = self.b(x)
            return self.out(self.cross(key=b, value=b, query=self.a(x))[0].mean(1))

    manifest = describe(Net(), torch.randn(2, 7, 6), task="test")
    assert manifest.group_sizes == {"a": 8, "b": 4, "cross": 2, "cross.out_proj": 8}
    assert axes(manifest, "cross.q_proj_weight") == [[("cross", 4)], [("a", 1)]]
    assert axes(manifest, "cross.v_proj_weight") == [[("cross", 4)], [("b", 1)]]
    assert axes(manifest, "cross.out_proj.weight") == [[("cross.out_proj", 1)], [("cross", 4)]]


def test_attention_weights_are_always_active():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6 + 7, 5)

        def forward(self, x):
            x, weights = self.attn(x, x, x)
            return self.out(torch.cat([x.mean(1), weights.mean(1)], 1))

    manifest = describe(Net(), torch.randn(2, 7, 6), task="test")
    assert manifest.group_sizes == {"always": 1, "attn.out_proj": 6}
    assert axes(manifest, "out.weight") == [[], [("attn.out_proj", 1), ("always", 7)]]


def test_sequence_first_counts_the_same_positions():
    layers = [make(f"transformer, torch{order}")[1].layers for order in ("", ", sequence first")]
    assert layers[0] == layers[1]
    assert {layer.name: layer.positions for layer in layers[0]}["blocks.0.attention.attn"] == 16


def test_recipes_of_attention_are_pytorchs_own():
    torch.manual_seed(0)
    model = by_torch(batch_first=True)
    specs = describe(model, torch.randn(2, 6, 16), task="test", recipes=True).tensors
    for spec in (spec for spec in specs if ".attn." in spec.name):
        values = model.state_dict()[spec.name]
        if isinstance(spec.init, Uniform):
            assert 0.9 * spec.init.bound < values.abs().max() <= spec.init.bound
        else:
            assert spec.init == Constant(value=0)
            assert not values.any()


# --- counts and training


@pytest.mark.parametrize("name", MODELS)
def test_the_active_values_are_as_many_as_the_manifest_says(name):
    model, manifest, _ = make(name)
    for ratio in (0.3, 0.7):
        mask = draw(manifest, ratio)
        wanted = sum(int(active_values(manifest, spec, mask).sum()) for spec in manifest.shared)
        assert len(pack(manifest, get_tensors(model, manifest), mask)) == count_values(manifest, mask) == wanted
    assert manifest.trainable_values == sum(parameter.numel() for parameter in model.parameters())


OPTIMISERS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_moves_active_values_and_no_bit_of_the_others(name, optimiser):
    model, manifest, inputs = make(name)
    mask = draw(manifest)
    task = classification("test", model, *(Arrays(inputs, torch.arange(4)),) * 2, None, batch_size=2)
    before = get_tensors(model, manifest)
    settings = FederationSettings(local_steps=2, **OPTIMISERS[optimiser])
    freezing = Freezing(model, manifest, mask)
    train_locally(model, task, settings, learning_rate=0.05, freezing=freezing, seed=1)
    after = get_tensors(model, manifest)
    for spec in manifest.tensors:
        if spec.trainable:
            active = active_values(manifest, spec, mask)
            moved = before[spec.name].view(np.uint32) != after[spec.name].view(np.uint32)
            assert not moved[~active].any(), spec.name
            # Some gradients are zero: behind a ReLU, and of a key's bias, which softmax does not see.
            assert moved[active].any() or not active.any(), spec.name


# --- input_error


class Gate(nn.Module):
    """A map of one channel broadcast over the channels of another: each entry of it hears from all of them."""

    def __init__(self):
        super().__init__()
        self.gate, self.conv, self.mix, self.out = (
            nn.Conv2d(3, 1, 1),
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 4, 1),
            nn.Linear(4, 5),
        )

    def forward(self, x):
        return self.out(self.mix(torch.sigmoid(self.gate(x)) * self.conv(x)).mean((2, 3)))


class Outer(nn.Module):
    """Two layers on data, whose neurons lie along two axes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.mix, self.out = nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(28, 5)

    def forward(self, x):
        return self.out(torch.relu(self.mix(torch.relu(self.a(x)[:, :, None] + self.b(x)[:, None]))).flatten(1))


class Joined(nn.Module):
    """Two layers on data, added; and a third beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 4)
        self.mix, self.out = nn.Linear(12, 7), nn.Linear(7, 5)

    def forward(self, x):
        return self.out(self.mix(torch.cat([torch.relu(self.a(x) + self.b(x)), self.c(x).tanh()], 1)))


def over(norm):
    """conv -> norm -> conv on 8 channels."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 5))


def chain(*middle, flattened=8):
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(flattened, 7), nn.ReLU(), nn.Linear(7, 5))


ERRORS = {
    "three convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1)),
            *(nn.Flatten(), nn.Linear(6 * 4, 5)),
        ),
        (3, 6, 6),
        {"0": "none", "2": "active", "4": "all", "6": "all"},
    ),
    "batch norm": (lambda: over(nn.BatchNorm2d(8)), (3, 6, 6), {"1": "active", "3": "active", "5": "all"}),
    "instance norm": (lambda: over(nn.InstanceNorm2d(8, affine=True)), (3, 6, 6), {"3": "active"}),
    "group norm": (lambda: over(nn.GroupNorm(2, 8)), (3, 6, 6), {"1": "active", "3": "all"}),
    "depthwise": (lambda: over(nn.Conv2d(8, 8, 1, groups=8)), (3, 6, 6), {"1": "all", "3": "active"}),
    "grouped": (lambda: over(nn.Conv2d(8, 8, 1, groups=4)), (3, 6, 6), {"1": "all", "3": "all"}),
    "prelu": (lambda: over(nn.PReLU(8)), (3, 6, 6), {"3": "active"}),
    "one prelu for all": (lambda: chain(nn.PReLU()), (6,), {"2": "all"}),
    "flatten": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 7), nn.Linear(7, 5)),
        (3, 6, 6),
        {"3": "active", "4": "all"},
    ),
    "norm of the data": (lambda: nn.Sequential(nn.BatchNorm2d(3), over(nn.ReLU())), (3, 6, 6), {"1.0": "all"}),
    "norm without weights": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3), over(nn.ReLU())),
        (3, 6, 6),
        {"1.0": "none", "1.3": "active"},
    ),
    "softmax": (lambda: chain(nn.Softmax(dim=1)), (6,), {"0": "none", "2": "all"}),
    "layer norm": (lambda: chain(nn.LayerNorm(8)), (6,), {"2": "all"}),
    "dropout": (lambda: chain(nn.Dropout(0.5), nn.GELU()), (6,), {"3": "active", "5": "all"}),
    "joined": (Joined, (6,), {"a": "none", "mix": "active", "out": "all"}),
    "gate": (Gate, (3, 4, 4), {"gate": "none", "conv": "none", "mix": "all"}),
    "outer": (Outer, (6,), {"mix": "all", "out": "all"}),
    "resnet18": (ResNet18, (3, 32, 32), {"conv1": "none", "layer1.0.conv1": "active", "layer1.0.conv2": "all"}),
    "transformer": (lambda: by_hand("sdpa"), (6, 16), {"embed": "none", "blocks.0.attention.q": "all"}),
    "encoder": (lambda: encoder(norm_first=False), (6, 16), {"blocks.0.layers.0.self_attn": "all"}),
}

CHANGES = {
    "three convolutions": "4",
    "group norm": "3",
    "grouped": "3",
    "one prelu for all": "2",
    "softmax": "2",
    "layer norm": "2",
    "gate": "mix",
    "outer": "mix",
    "transformer": "blocks.0.mlp.0",
}
"""Net -> a layer whose input's error at inactive neurons changes what active weights learn."""


@pytest.mark.parametrize("name", ERRORS)
def test_input_error_by_autograd(name):
    """Zero a layer's contribution to the error at its inactive inputs, and see what active parameters still learn."""
    build, shape, wanted = ERRORS[name]
    torch.manual_seed(0)
    model, inputs = build(), torch.randn(4, *shape)
    manifest = describe(model, inputs, task="test")
    specs = {spec.name: spec for spec in manifest.tensors}
    mask, errors = draw(manifest), {layer.name: layer.input_error for layer in manifest.layers}
    assert wanted.items() <= errors.items()
    before = active_gradients(model, manifest, mask, inputs)
    changed = {}
    for layer in manifest.layers:
        module, spec = model.get_submodule(layer.name), specs.get(f"{layer.name}.weight")
        if layer.input_error == "none":
            assert gradient_of_input(model, module, inputs) is None
        elif isinstance(module, (nn.Linear, nn.Conv2d)) and module.__dict__.get("groups", 1) == 1:
            flags = torch.from_numpy(active_along(manifest, spec, 1, mask))
            after = active_gradients(model, manifest, mask, inputs, module, flags)
            changed[layer.name] = any(not torch.allclose(after[key], before[key], atol=1e-7) for key in before)
            if layer.input_error == "active":
                assert not flags.all(), "an axis without neurons has no active ones"
                assert not changed[layer.name], layer.name
    if name in CHANGES:
        assert changed[CHANGES[name]]


def active_gradients(model, manifest, mask, inputs, module=None, flags=None) -> dict[str, torch.Tensor]:
    """Gradients of the active parameters; what of ``module``'s input ``flags`` leaves out gets no error from it."""

    def cut(_, arguments):
        (x,) = arguments
        axis = x.dim() - 1 if isinstance(module, nn.Linear) else 1
        kept = flags.view(-1, *(1,) * (x.dim() - 1 - axis))
        x = x.view_as(x)  # what others read of the same value keeps its error
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * kept)
        return (x,)

    handle = None if module is None else module.register_forward_pre_hook(cut)
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    F.cross_entropy(model.train()(inputs), torch.arange(len(inputs))).backward()
    if handle is not None:
        handle.remove()
    specs = {spec.name: spec for spec in manifest.tensors}
    return {
        name: parameter.grad[torch.from_numpy(active_values(manifest, specs[name], mask))].clone()
        for name, parameter in model.named_parameters()
    }


def gradient_of_input(model, module, inputs):
    """What autograd records of the value that enters ``module``; None where nothing below learns."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].grad_fn))
    model(inputs)
    handle.remove()
    return seen[0]
