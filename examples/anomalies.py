"""Anomalies: an autoencoder learns without labels how each machine sounds. python examples/anomalies.py"""

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from edge_sdk.tasks import Task
from sparrow.simulation.simulate import simulate


def auc(outputs, targets):
    """Return how often a fault is reproduced worse than a sound sample: 1 always, 0.5 no better than by chance."""
    error = np.square(outputs - targets[:, :-1]).mean(1)
    fault = targets[:, -1] > 0
    return (error[fault][:, None] > error[~fault]).mean()


def machine(number: int) -> Task:
    """Return spectra of a machine with tones of its own; held out are sound ones, and such with a tone too many."""
    chance = np.random.default_rng(number)
    lines = np.arange(64)
    fault = np.arange(400) >= 350
    tones = np.exp(-(((lines - chance.uniform(0, 64, (5, 1))) / 1.5) ** 2)).sum(0)
    x = tones * chance.uniform(0.5, 1.5, (400, 1)) + 0.1 * chance.normal(size=(400, 64))
    x[fault] += 0.6 * np.exp(-(((lines - chance.uniform(0, 64, (50, 1))) / 1.5) ** 2))
    # Only the metric uses the last column.
    y = np.concatenate([x, fault[:, None]], 1).astype(np.float32)
    pairs = [(y[i : i + 25, :-1], y[i : i + 25]) for i in range(0, 400, 25)]
    torch.manual_seed(0)
    sizes = (64, 32, 4, 32, 64)
    layers = [each for i, o in pairwise(sizes) for each in (nn.Linear(i, o), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    loss = nn.MSELoss()
    samples = {"train": pairs[:12], "validation": pairs[12:14], "test": pairs[12:]}
    told = {"classification": False, "metrics": {"auc": auc}}
    return Task("machines", model, lambda x, y: loss(x, y[:, :-1]), **samples, **told)


if __name__ == "__main__":
    settings = {"rounds": 10, "learning_rate": 0.003, "optimizer": "adam", "local_epochs": 3}
    result = simulate(app="sparrow.coordinator.main:app", federation="machines", task=machine, devices=4, **settings)
    print(result.ended)
