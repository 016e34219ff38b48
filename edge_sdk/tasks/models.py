"""The networks of the built-in tasks, in PyTorch.

A name such as ``fedsgc`` is the paper whose experiments used the network; parameter counts are those of the papers or
their code.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

# Channels of the first convolutions; further ones keep the last width.
WIDTHS = (16, 32, 64)


class DigitsNet(nn.Module):
    """Two convolutions with batch norm and two linear layers: [N,1,8,8] pixels in [0,1] -> [N,10] class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores, before softmax."""
        maps = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        maps = F.max_pool2d(F.relu(self.bn2(self.conv2(maps))), 2)
        return self.out(F.relu(self.fc1(torch.flatten(maps, 1))))  # type: ignore[no-any-return]


def _convolutional(
    channels: Sequence[int],
    linear: Sequence[int],
    *,
    kernel: int = 5,
    padding: int = 0,
    pool: tuple[int, int] = (2, 2),
    norm: bool = False,
    bias: bool = True,
) -> nn.Module:
    """Return convolutions and linear layers between these sizes, each with ReLU.

    pool: size and stride of the max-pooling after each of the first two convolutions. bias: whether hidden linear
    layers have biases.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, (before, after) in enumerate(pairwise(channels), 1):
        layers[f"conv{stage}"] = nn.Conv2d(before, after, kernel, padding=padding)
        if norm:
            layers[f"bn{stage}"] = nn.BatchNorm2d(after)
        # Max-pooling commutes with ReLU; first, it saves three quarters of the ReLUs.
        if stage <= 2:
            layers[f"pool{stage}"] = nn.MaxPool2d(*pool)
        layers[f"relu{stage}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    for stage, (before, after) in enumerate(pairwise(linear[:-1]), 1):
        layers[f"fc{stage}"] = nn.Linear(before, after, bias=bias)
        layers[f"relu{len(channels) - 1 + stage}"] = nn.ReLU()
    layers["out"] = nn.Linear(linear[-2], linear[-1])
    return nn.Sequential(layers)


def mnist_small() -> nn.Module:
    """[N,1,28,28] -> [N,10]: two convolutions of 5 x 5 and 50 hidden units, PyTorch's old MNIST example."""
    return _convolutional((1, 10, 20), (320, 50, 10))


def mnist_fedsgc() -> nn.Module:
    """[N,1,28,28] -> [N,10]: FedSGC's MNIST network; pooling of 3 x 3 with stride 1 hardly shrinks the maps."""
    return _convolutional((1, 10, 20), (5120, 50, 10), pool=(3, 1))


def mnist_dmpfl() -> nn.Module:
    """[N,1,28,28] -> [N,10]: the network of McMahan et al. (arXiv:1602.05629), similar to DM-PFL's."""
    return _convolutional((1, 32, 64), (3136, 512, 10), padding=2)


def mnist_leaf() -> nn.Module:
    """[N,1,28,28] -> [N,10]: LEAF's FEMNIST network without padding, as pFedGate uses it."""
    return _convolutional((1, 32, 64), (1024, 2048, 10))


def emnist_leaf() -> nn.Module:
    """[N,1,28,28] -> [N,62]: ``mnist_leaf`` for 62 classes."""
    return _convolutional((1, 32, 64), (1024, 2048, 62))


def emnist_fedspu() -> nn.Module:
    """[N,1,28,28] -> [N,62]: FedSPU's EMNIST network."""
    return _convolutional((1, 20, 20), (980, 62), kernel=3, padding=1, norm=True)


def cifar10_fedspu() -> nn.Module:
    """[N,3,32,32] -> [N,10]: FedSPU's CIFAR-10 network, batch norm and hidden linear layers without biases."""
    return _convolutional((3, 6, 16), (1024, 120, 84, 10), kernel=3, padding=1, norm=True, bias=False)


def cifar10_fedsgc() -> nn.Module:
    """[N,3,32,32] -> [N,10]: FedSGC's CIFAR-10 network; the third convolution leaves one pixel."""
    return _convolutional((3, 32, 64, 64), (64, 1024, 10))


def cifar10_dmpfl() -> nn.Module:
    """[N,3,32,32] -> [N,10]: the network that DM-PFL's costs on CIFAR-10 imply."""
    return _convolutional((3, 64, 64), (1600, 384, 192, 10))


def cifar10_pfedgate() -> nn.Module:
    """[N,3,32,32] -> [N,10]: pFedGate's CIFAR-10 network, without its code's ReLU on the class scores."""
    return _convolutional((3, 32, 64), (1600, 120, 84, 10))


def cifar100_pfedgate() -> nn.Module:
    """[N,3,32,32] -> [N,100]: pFedGate's CIFAR-100 network of two linear layers."""
    return _convolutional((3, 32, 64), (1600, 2048, 100))


def uci_har_small() -> nn.Module:
    """[N,9,128] windows -> [N,6]: ``har_small`` for UCI HAR."""
    return har_small(9, 128, 6)


def uci_har_dmpfl() -> nn.Module:
    """[N,9,128] windows -> [N,6]: DM-PFL's HAR network, assumed to have hidden layers of 256 and 128.

    The paper uses 561 features of these windows.
    """
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(1152, 256),
            relu1=nn.ReLU(),
            fc2=nn.Linear(256, 128),
            relu2=nn.ReLU(),
            out=nn.Linear(128, 6),
        )
    )


def har_small(channels: int = 6, steps: int = 64, classes: int = 5) -> nn.Module:
    """[N,6,64] windows of accelerometer and gyroscope -> [N,5]: three convolutions in time and 64 hidden units."""
    # Group norm, because batch norm's running statistics would mix different people.
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, (before, after, kernel) in enumerate(((channels, 32, 5), (32, 64, 5), (64, 64, 3)), 1):
        layers[f"conv{stage}"] = nn.Conv1d(before, after, kernel, padding=kernel // 2)
        layers[f"norm{stage}"] = nn.GroupNorm(4, after)
        layers[f"pool{stage}"] = nn.MaxPool1d(2)
        layers[f"relu{stage}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(64 * (steps // 8), 64)
    layers["relu4"] = nn.ReLU()
    layers["out"] = nn.Linear(64, classes)
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al., arXiv:1512.03385): [N,inputs,H,W] -> [N,outputs,H/...]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=convolution, bn=nn.BatchNorm2d(outputs)))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Return the block's maps."""
        inner = F.relu(self.bn1(self.conv1(maps)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(maps))


def pacs_resnet18() -> nn.Module:
    """[N,3,64,64] -> [N,7]: ResNet-18 (He et al., arXiv:1512.03385) with random weights; FedSGC's PACS network."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(3, stride=2, padding=1),
    )
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512), start=1):
        layers[f"block{stage}a"] = ResidualBlock(inputs, outputs, stride=1 if stage == 1 else 2)
        layers[f"block{stage}b"] = ResidualBlock(outputs, outputs, stride=1)
        inputs = outputs
    return nn.Sequential(
        OrderedDict(**layers, pool5=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), out=nn.Linear(512, 7))
    )


def pacs_small() -> nn.Module:
    """[N,3,64,64] -> [N,7]: three convolutions and 128 hidden units, a seventieth of the ResNet-18's parameters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, (before, after, kernel, stride) in enumerate(((3, 16, 5, 2), (16, 32, 3, 1), (32, 64, 3, 1)), 1):
        layers[f"conv{stage}"] = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2)
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
        layers[f"relu{stage}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(1024, 128)
    layers["relu4"] = nn.ReLU()
    layers["out"] = nn.Linear(128, 7)
    return nn.Sequential(layers)


class CharacterLSTM(nn.Module):
    """[N,T] character codes -> [N,characters] scores of the next character."""

    def __init__(self, characters: int, embedded: int, units: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, embedded)
        self.lstm = nn.LSTM(embedded, units, layers, batch_first=True)
        self.out = nn.Linear(units, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return class scores, before softmax."""
        return self.out(self.lstm(self.embed(characters.long()))[0][:, -1])  # type: ignore[no-any-return]


def shakespeare_small() -> nn.Module:
    """[N,80] -> [N,65]: one LSTM layer of 128 units, a tenth of LEAF's parameters."""
    return CharacterLSTM(65, embedded=8, units=128, layers=1)


def shakespeare_leaf() -> nn.Module:
    """[N,80] -> [N,65]: LEAF's network, two LSTM layers of 256 units (McMahan et al., arXiv:1602.05629)."""
    return CharacterLSTM(65, embedded=8, units=256, layers=2)


class Rescale(nn.Module):
    """Outputs in the unit of a regression's targets: deviation · x + mean, without parameters."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean = mean
        self.deviation = deviation

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, rescaled."""
        return outputs * self.deviation + self.mean


class Broadcast(nn.Module):
    """A block of broadcasted residual learning, [N,C,F,T] -> the same (BC-ResNet: Kim et al., arXiv:2106.04140, Eq. 2).

    y = x + f2(x) + f1(mean over F of f2(x)): f2 is a depthwise convolution along frequency, f1 a depthwise one along
    time and a pointwise one, broadcast along frequency. Group norm replaces batch and sub-spectral norm, whose running
    statistics fit no single device.
    """

    def __init__(self, channels: int, dilation: int = 1) -> None:
        super().__init__()
        self.frequency = nn.Conv2d(channels, channels, (3, 1), padding=(1, 0), groups=channels, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)
        self.time = nn.Conv2d(
            channels, channels, (1, 3), padding=(0, dilation), dilation=(1, dilation), groups=channels, bias=False
        )
        self.norm1 = nn.GroupNorm(4, channels)
        self.point = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        along = self.norm2(self.frequency(x))
        pooled = along.mean(2, keepdim=True)
        return F.relu(x + along + self.point(F.silu(self.norm1(self.time(pooled)))))


def keyword_spotter(bands: int, outputs: int) -> nn.Module:
    """[N,1,bands,frames] -> [N,outputs]: a small BC-ResNet over log-mel energies."""
    wide = 32
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(1, wide, 5, stride=(2, 2), padding=2, bias=False), norm0=nn.GroupNorm(4, wide), relu0=nn.ReLU()
    )
    for number, dilation in enumerate((1, 2, 4), 1):
        layers[f"block{number}"] = Broadcast(wide, dilation)
        if number < 3:
            layers[f"pool{number}"] = nn.MaxPool2d((2, 1))
    # The stem's stride rounds up, pooling down.
    left = (bands + 1) // 2 // 4
    layers["head"] = nn.Conv2d(wide, 64, (left, 1), bias=True)
    layers["relu1"] = nn.ReLU()
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["out"] = nn.Linear(64, outputs)
    return nn.Sequential(layers)


def build_model(
    shape: tuple[int, ...], outputs: int, scale: tuple[float, float] | None = None, *, sounds: bool = False
) -> nn.Module:
    """Return a small network for samples of ``shape``; only its initial weights are random.

    scale: mean and standard deviation of a regression's targets, to rescale outputs. sounds: samples are log-mel
    energies [1,bands,frames] (``keyword_spotter``). [C,T] with T of at least 8: convolutions of 5 along time with group
    norm, ReLU and pooling by 2, mean over time, 64 hidden units. [C,H,W] with H and W of at least 8: 3 x 3
    convolutions with group norm, ReLU and 2 x 2 pooling until a side is shorter than 4, 64 hidden units. Otherwise two
    hidden layers of 64.
    """
    if sounds and scale is None:
        return keyword_spotter(shape[1], outputs)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, *sides = shape
    if len(sides) in (1, 2) and min(sides) >= 8:
        convolution, pooling, kernel = (nn.Conv1d, nn.MaxPool1d, 5) if len(sides) == 1 else (nn.Conv2d, nn.MaxPool2d, 3)
        stage = 0
        while min(sides) >= 4 and (len(sides) == 2 or stage < len(WIDTHS)):
            wide = WIDTHS[min(stage, len(WIDTHS) - 1)]
            stage += 1
            layers[f"conv{stage}"] = convolution(channels, wide, kernel, padding=kernel // 2)
            layers[f"norm{stage}"] = nn.GroupNorm(4, wide)
            layers[f"relu{stage}"] = nn.ReLU()
            layers[f"pool{stage}"] = pooling(2)
            channels = wide
            sides = [side // 2 for side in sides]
        if len(sides) == 1:
            layers["mean"] = nn.AdaptiveAvgPool1d(1)
            sides = [1]
        layers["flatten"] = nn.Flatten()
        features = channels * math.prod(sides)
    else:
        layers["flatten"] = nn.Flatten()
        layers["fc0"] = nn.Linear(math.prod(shape), 64)
        layers["act0"] = nn.ReLU()
        features = 64
    layers["fc1"] = nn.Linear(features, 64)
    layers["act1"] = nn.ReLU()
    layers["out"] = nn.Linear(64, outputs)
    if scale is not None:
        layers["unit"] = Rescale(*scale)
    return nn.Sequential(layers)
