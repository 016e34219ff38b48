"""Segmentation: a U-Net that finds each camera's discs among squares. python examples/segmentation.py"""

import numpy as np
import torch
from torch import nn

from edge_sdk.tasks import Task
from sparrow.simulation.simulate import simulate


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = ((1, 8), (8, 16), (16, 32), (48, 16), (24, 8))
        blocks = [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in sizes]
        self.top, self.middle, self.bottom, self.rise, self.end = blocks
        self.down = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        """Return logits of the shape of x, [N, 1, 32, 32], above 0 inside a disc."""
        middle = self.middle(self.down(top := self.top(x)))
        x = self.rise(torch.cat([self.up(self.bottom(self.down(middle))), middle], 1))
        return self.head(self.end(torch.cat([self.up(x), top], 1)))


def camera(number: int) -> Task:
    """Return pictures of a disc and a square in the camera's own light, and where the disc is."""
    chance = np.random.default_rng(number)
    place = chance.uniform(6, 26, (160, 4, 1, 1))
    row, column = np.mgrid[:32, :32]
    disc = (row - place[:, 0]) ** 2 + (column - place[:, 1]) ** 2 < 25
    square = np.maximum(abs(row - place[:, 2]), abs(column - place[:, 3])) < 5
    light = chance.uniform(0.5, 1)
    dark = chance.uniform(0, 0.3)
    x = (dark + (light - dark) * (disc | square) + 0.1 * chance.normal(size=disc.shape)).astype(np.float32)[:, None]
    pairs = [(x[i : i + 16], disc[i : i + 16, None].astype(np.float32)) for i in range(0, 160, 16)]
    torch.manual_seed(0)
    return Task("discs", UNet(), nn.BCEWithLogitsLoss(), pairs[:8], pairs[8:], classification=False, metrics=("iou",))


if __name__ == "__main__":
    settings = {"rounds": 8, "learning_rate": 0.01, "optimizer": "adam", "local_epochs": 2}
    print(simulate(app="sparrow.coordinator.main:app", federation="discs", task=camera, devices=4, **settings).ended)
