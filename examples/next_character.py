"""Next character: a device for each speaking role. python examples/next_character.py shakespeare.npz"""

import sys

import numpy as np
import torch
from torch import nn

from edge_sdk.tasks import Task
from sparrow.simulation.simulate import simulate


class Text(nn.Module):
    """A network of causal convolutions."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(65, width)
        self.head = nn.Conv1d(width, 65, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(4))

    def forward(self, x):
        """Return logits [N, 65, length] of characters [N, length]."""
        x = self.embedding(x).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = x + layer(nn.functional.pad(x, (2**i, 0))).relu()
        return self.head(x)


def role(number: int) -> Task:
    """Return what one of the roles that speak most says; the last tenth is held out."""
    # text holds the numbers of characters. Speech i, by role[i], is text[start[i]:start[i + 1]].
    file = np.load(sys.argv[1])
    mine = np.flatnonzero(file["role"] == np.argsort(-np.bincount(file["role"], np.diff(file["start"])))[number])
    text = np.concatenate([file["text"][file["start"][i] : file["start"][i + 1]] for i in mine]).astype(np.int64)
    windows = text[: len(text) // 33 * 33].reshape(-1, 33)
    batches = [(windows[i : i + 32, :-1], windows[i : i + 32, 1:]) for i in range(0, len(windows), 32)]
    torch.manual_seed(0)
    told = {"classification": False, "metrics": ("top1",)}
    return Task("speech", Text(), nn.CrossEntropyLoss(), batches[:-3], batches[-3:], **told)


if __name__ == "__main__":
    settings = {"method": "fedavg", "rounds": 6, "learning_rate": 0.01, "optimizer": "adam"}
    print(simulate(app="sparrow.coordinator.main:app", federation="speech", task=role, devices=6, **settings).ended)
