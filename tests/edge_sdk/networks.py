"""Small networks of any size, each with the shape of its inputs."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


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
