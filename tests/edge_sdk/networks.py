"""Small networks of any size, each with the shape of its inputs; and a zoo of all kinds, with a batch for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.tasks.models import DigitsNet
from edge_sdk.tasks.public import BY_DEVICES, MODELS, full_name

N = 6


def perceptron(*widths):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), (widths[0],)


def convolutions(channels, kernel, hidden, *, dropout=False):
    size = 7 - kernel
    return nn.Sequential(
        nn.Conv2d(2, channels, kernel, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 3, 1),
        *([nn.Dropout(0.2)] if dropout else []),
        nn.Flatten(),
        nn.Linear(3 * size * size, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 4),
    ), (2, 6, 6)


@dataclass
class Kind:
    """A model, its loss, and samples."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor = field(default_factory=lambda: torch.arange(N) % 3)
    loss: object = F.cross_entropy


class Residual(nn.Module):
    """Two blocks with a sum; batch norm; the second strided, with a projection."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.one = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.two = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12))
        self.short = nn.Conv2d(8, 12, 1, stride=2)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.one(x))
        x = F.relu(self.two(x) + self.short(x))
        return self.out(x.mean((2, 3)))


class Beside(nn.Module):
    """Layers beside each other that read the same value, as SqueezeNet's."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Conv2d(3, 6, 1)
        self.small, self.large = nn.Conv2d(6, 8, 1), nn.Conv2d(6, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return self.last(torch.cat([F.relu(self.small(x)), F.relu(self.large(x))], 1)).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.cells = kind(6, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.cells(self.words(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.places = nn.Parameter(torch.randn(7, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(self.words(x) + self.places).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Heads(nn.Module):
    """Attention of two heads by torch's own operator, without dropout, as transformers and timm have it."""

    def __init__(self):
        super().__init__()
        self.words, self.dropout = nn.Embedding(20, 8), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        x = self.dropout(self.words(x))
        query, key, value = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.out(x.transpose(1, 2).reshape(x.shape[0], -1, 8).mean(1))


class Turned(nn.Module):
    """Weights with a row for each input: a transposed convolution, and GPT-2's layers."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 2, stride=2), nn.ConvTranspose2d(6, 8, 2, 2)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 10) / 3), nn.Parameter(torch.zeros(10))
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        x = F.relu(self.up(F.relu(self.down(x)))).mean((2, 3))
        return self.out(F.relu(torch.addmm(self.bias, x, self.weight)))


class UNet(nn.Module):
    """Down, up by nearest neighbours, and the two joined: a class for every pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 10, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.join = nn.Conv2d(16, 6, 3, padding=1)
        self.out = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        first = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(first, 2)))
        return self.out(F.relu(self.join(torch.cat([self.up(deep), first], 1))))


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1)

    def forward(self, x):
        return torch.sigmoid(self.up(torch.tanh(self.down(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.words(x).mean(1))))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(10, 8), nn.Linear(4, 10)

    def forward(self, x):
        mean, deviation = self.down(x).chunk(2, 1)
        return self.up(mean + torch.randn_like(mean) * deviation.exp())


class Weighted(nn.Module):
    """A loss with weights of its own, smoothed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets, weight=self.weights, label_smoothing=0.1)


def images(channels=3, size=8):
    return torch.randn(N, channels, size, size)


def words(length=7):
    return torch.randint(0, 20, (N, length))


def convolutional(*more, channels=8):
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *more, nn.Flatten(), nn.LazyLinear(3))


def lazy(model, inputs):
    model(inputs)
    return model


def zoo():
    """name -> a function that makes the kind, always the same one. Those of built-in tasks have their names."""
    built_in = {
        "digits": lambda: Kind(DigitsNet(), images(1)),
        **{
            full_name(task, model): lambda c=choice: Kind(c.build(), torch.randn(N, *c.shape), torch.arange(N) % 5)
            for task, choices in MODELS.items()
            for model, choice in choices.items()
            if task not in BY_DEVICES  # deep, or recurrent over 80 steps: minutes to compile
        },
    }
    made = {
        "residual": lambda: Kind(Residual(), images()),
        "beside": lambda: Kind(Beside(), images()),
        "depthwise": lambda: Kind(
            nn.Sequential(
                nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.ReLU6(), nn.Flatten(), nn.Linear(384, 3)
            ),
            images(),
        ),
        "grouped": lambda: Kind(
            nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.Hardswish(), nn.Flatten(), nn.Linear(72, 3)),
            images(4),
        ),
        "1-D": lambda: Kind(
            nn.Sequential(
                nn.Conv1d(6, 8, 5, stride=2, dilation=2, padding=3), nn.LeakyReLU(), nn.MaxPool1d(3, 2),
                nn.Conv1d(8, 4, 3), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(12, 3),
            ),
            torch.randn(N, 6, 40),
        ),
        "GRU": lambda: Kind(Recurrent(nn.GRU), words(3)),
        "LSTM": lambda: Kind(Recurrent(nn.LSTM), words(3)),
        "transformer": lambda: Kind(Transformer(0.1), words()),
        "embedding": lambda: Kind(
            nn.Sequential(nn.Embedding(20, 5), nn.Flatten(), nn.Linear(35, 3)), words()
        ),
        "U-Net": lambda: Kind(UNet(), images(), torch.randint(0, 3, (N, 8, 8))),
        "autoencoder": lambda: Kind(Autoencoder(), images(1), torch.rand(N, 1, 8, 8), F.mse_loss),
        "batch norm": lambda: Kind(
            nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(N, 10)
        ),
        "group norm": lambda: Kind(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
                          nn.Linear(32, 3)), images()),
        "layer norm": lambda: Kind(
            nn.Sequential(nn.Linear(10, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), torch.randn(N, 10)
        ),
        "instance norm": lambda: Kind(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
                          nn.Flatten(), nn.Linear(72, 3)), images()),
        "dropout": lambda: Kind(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.2), nn.ELU(), nn.Flatten(), nn.Dropout(0.5),
                          nn.Linear(288, 3)), images()),
        "GELU and SiLU": lambda: Kind(
            nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GELU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.AvgPool2d(1),
                          nn.Flatten(), nn.Linear(8, 3)), images()),
        "tied weights": lambda: Kind(Tied(), words(), torch.arange(N)),
        "MultiheadAttention": lambda: Kind(Attention(), torch.randn(N, 7, 8)),
        "turned": lambda: Kind(Turned(), images()),
        "heads": lambda: Kind(Heads(), words()),
        "custom loss": lambda: Kind(
            nn.Sequential(nn.Linear(10, 8), nn.Softplus(), nn.Linear(8, 3)), torch.randn(N, 10), loss=Weighted()
        ),
        "variational": lambda: Kind(Variational(), torch.randn(N, 10), torch.rand(N, 10), F.smooth_l1_loss),
    }  # fmt: skip

    def seeded(make):
        def made():
            torch.manual_seed(0)
            return make()

        return made

    return {name: seeded(make) for name, make in {**built_in, **made}.items()}
