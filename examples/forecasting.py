"""Forecasting: each household's next hour of power from its last eight, by an LSTM. python examples/forecasting.py"""

import numpy as np
import torch
from torch import nn

from edge_sdk.tasks import Task
from sparrow.simulation.simulate import simulate

HOURS = 8


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(3, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        """Forecast from [N, hours, 3]: the power, and the hour as a point on a circle."""
        return self.head(self.memory(x)[0][:, -1])


def household(number: int) -> Task:
    """Two weeks in which a household of its own habits uses power; the last days are held out."""
    chance = np.random.default_rng(number)
    hours = np.arange(24 * 14)
    morning = chance.uniform(6, 9)
    evening = chance.uniform(17, 22)
    power = sum(np.exp(-(((hours % 24 - peak) / 2) ** 2)) for peak in (morning, evening))
    power = power + 0.1 * chance.random(len(hours))
    rows = np.stack([power, np.sin(hours * np.pi / 12), np.cos(hours * np.pi / 12)], 1).astype(np.float32)
    x = np.stack([rows[i : i + HOURS] for i in range(len(rows) - HOURS)])
    y = rows[HOURS:, :1]
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, len(x) - 72, 16)]
    torch.manual_seed(0)
    told = {"classification": False, "metrics": ("mae", "r2")}
    return Task("power", Forecast(), nn.MSELoss(), batches, [(x[-72:], y[-72:])], **told)


if __name__ == "__main__":
    settings = {"rounds": 8, "learning_rate": 0.1}
    print(simulate(app="sparrow.coordinator.main:app", federation="power", task=household, devices=4, **settings).ended)
