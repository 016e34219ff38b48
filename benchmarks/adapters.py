"""``python -m benchmarks.adapters --data DIR``: compare LoRA with full fine-tuning of a text model.

    python -m benchmarks.adapters --data DIR         every trial that is not recorded, and the page; DIR:
    shakespeare.npz python -m benchmarks.adapters page               write the page of the recorded results

A small transformer is pre-trained centrally on separate roles. Then FedAvg fine-tunes it on devices with one role each,
fully or by adapters (LoRA of ``peft`` on every linear layer). The learning rates were chosen from ``RATES`` on
validation data, in half as many rounds. Accuracy is of the next character in the last tenth of each role. Rows:
``benchmarks/rows/adapters.jsonl``. Needs the extra ``adapters``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS, write_section
from benchmarks.zoo import torchvision
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.simulation.simulate import SimulationOptions, simulate

CHARACTERS = 65
LENGTH = 32
WIDTH = 64
LAYERS = 2
HEADS = 4
RANK = 2
DEVICES = 20
COHORT = 10
ROUNDS = 16
STEPS = 40
BATCH = 16
SEEDS = (0, 1, 2)
RATES = {"whole": (1e-4, 3e-4, 1e-3, 3e-3), "lora": (3e-4, 1e-3, 3e-3, 1e-2)}
PRETRAINING_STEPS = 3000


class Block(nn.Module):
    """A layer of a transformer: causal attention, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, length, width]."""
        normed = self.norm1(x)
        query, key, value = (
            each(normed).view(x.shape[0], LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        made: Tensor = x + self.back(F.gelu(self.hidden(self.norm2(x))))
        return made


class Text(nn.Module):
    """Scores of the next character at every place: [N, length] -> [N, characters, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embedding(x) + self.places)))
        return scores.transpose(1, 2)


def tuned(model: nn.Module, how: str) -> nn.Module:
    """Return the model to fine-tune, unchanged or with adapters at each linear layer of its blocks."""
    if how == "whole":
        return model
    if find_spec("torchvision") is not None:
        # peft imports torchvision, so its operators must be declared first.
        torchvision()
    from peft import LoraConfig, get_peft_model

    targets = ["query", "key", "value", "out", "hidden", "back"]
    torch.manual_seed(0)
    found: Any = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
    adapted: nn.Module = found.base_model.model
    return adapted


@cache
def _roles(path: Path) -> list[NDArray[np.int64]]:
    """Return the text of each role, the longest first."""
    file = np.load(path)
    text, start, role = (file[name] for name in ("text", "start", "role"))
    spoken = np.bincount(role, np.diff(start))
    return [
        np.concatenate([text[start[each] : start[each + 1]] for each in np.flatnonzero(role == number)]).astype(
            np.int64
        )
        for number in np.argsort(-spoken)
    ]


def _windows(text: NDArray[np.int64]) -> NDArray[np.int64]:
    return text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def _batches(windows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    return [(windows[i : i + BATCH, :-1], windows[i : i + BATCH, 1:]) for i in range(0, len(windows), BATCH)]


def pretrained(path: Path) -> dict[str, Tensor]:
    """Return the weights of the model after its training at one place, on the roles that are no device's."""
    file = Path("runs") / "adapters" / "pretrained.pt"
    if file.exists():
        weights: dict[str, Tensor] = torch.load(file, weights_only=True)
        return weights
    torch.manual_seed(0)
    text = np.concatenate(_roles(path)[DEVICES:])
    model = Text()
    chance = np.random.default_rng(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, PRETRAINING_STEPS)
    for _ in tqdm(range(PRETRAINING_STEPS), desc="pre-training", mininterval=5, disable=None):
        places = chance.integers(0, len(text) - LENGTH - 1, 32)
        batch = torch.from_numpy(np.stack([text[each : each + LENGTH + 1] for each in places]))
        optimiser.zero_grad()
        F.cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        plan.step()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.state_dict()


def trial(path: Path, how: str, engine: str, rate: float, seed: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the result of one federation."""
    weights = pretrained(path)

    def task(number: int) -> Task:
        windows = _windows(_roles(path)[number])
        rest = max(2, len(windows) // 10)
        train, validation, test = np.split(windows, [len(windows) - 2 * rest, len(windows) - rest])
        model = Text()
        model.load_state_dict(weights)
        # The runs that choose the settings do not see the test data.
        held_out = None if rounds < ROUNDS else _batches(test)
        parts = (_batches(train), _batches(validation), held_out)
        return Task("speech", tuned(model, how), nn.CrossEntropyLoss(), *parts, classification=False, metrics=("top1",))

    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(
            app=create_app(Settings(data_dir=Path(folder), default_task="")),
            task=task,
            devices=DEVICES,
            options=SimulationOptions(engine=engine, in_memory=True, adapt=False),  # type: ignore[arg-type]
            quiet=True,
            method="fedavg",
            rounds=rounds,
            cohort=COHORT,
            local_steps=STEPS,
            optimizer="adam",
            learning_rate=rate,
            seed=seed,
            early_stopping="off",
            evaluation_interval=rounds,
        )
    ended = result.ended
    assert ended is not None
    row = {"how": how, "engine": engine, "rate": rate, "seed": seed, "rounds": rounds}
    updates = COHORT * rounds
    return row | {
        "top1": ended.metrics_global["top1"],
        "up": ended.bytes_up / updates,
        "down": ended.bytes_down / updates,
        "seconds": time.process_time() - begin,
    }


def untuned(path: Path) -> float:
    """Return the accuracy of the pre-trained model on the devices' test data, mean over devices."""
    model = Text()
    model.load_state_dict(pretrained(path))
    found = []
    for number in range(DEVICES):
        windows = _windows(_roles(path)[number])
        test = torch.from_numpy(windows[-max(2, len(windows) // 10) :])
        with torch.no_grad():
            found.append(float((model.eval()(test[:, :-1]).argmax(1) == test[:, 1:]).double().mean()))
    return float(np.mean(found))


def _recorded() -> list[dict[str, Any]]:
    file = ROWS / "adapters.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _run(path: Path) -> None:
    if not any(row["how"] == "none" for row in _recorded()):
        _record({"how": "none", "engine": "torch", "rate": 0.0, "seed": 0, "rounds": 0, "top1": untuned(path)})
    keys = ("how", "engine", "rate", "seed", "rounds")
    # Choose the learning rates first.
    plans = [(how, "torch", rate, 100, ROUNDS // 2) for how, rates in RATES.items() for rate in rates]
    known = {tuple(row[key] for key in keys): row for row in _recorded()}
    for plan in plans:
        known.setdefault(plan, {})
    for plan in list(known):
        if not known[plan]:
            known[plan] = _record(trial(path, *plan))
    best = _chosen(_recorded())
    for engine in ("torch", "onnx"):
        for seed, how in product(SEEDS, RATES):
            if (how, engine, best[how], seed, ROUNDS) not in known:
                _record(trial(path, how, engine, best[how], seed))


def _record(row: dict[str, Any]) -> dict[str, Any]:
    with (ROWS / "adapters.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row)
    return row


def _page() -> None:
    everything = [row for row in _recorded() if row["rounds"] == ROUNDS]
    best = _chosen(_recorded())
    rows = [row for row in everything if row["rate"] == best[row["how"]]]
    table = []
    for how in RATES:
        for engine in ("torch", "onnx"):
            found = [row for row in rows if (row["how"], row["engine"]) == (how, engine)]
            if found:
                accuracies = [100 * row["top1"] for row in found]
                up, down = (float(np.mean([row[way] for row in found])) for way in ("up", "down"))
                each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
                cells = [how, engine, f"{np.mean(accuracies):.2f}", each, f"{up / 1e3:.1f}", f"{down / 1e3:.1f}"]
                table.append([*cells, f"{found[0]['rate']:g}", f"{np.mean([row['seconds'] for row in found]):.0f}"])
    before = next(row["top1"] for row in _recorded() if row["how"] == "none")
    heads = ["fine-tuned", "engine", "top1, %", "seeds", "kB up a device-round", "kB down", "rate", "processor s"]
    text = f"""# LoRA against whole fine-tuning

A transformer of {LAYERS} layers and width {WIDTH} is pre-trained here for {PRETRAINING_STEPS} steps on roles of
Shakespeare that do not take part. FedAvg with Adam then fine-tunes it on {DEVICES} roles, {COHORT} per round, for
{ROUNDS} rounds of {STEPS} steps: either whole, or with LoRA of rank {RANK} on every linear layer of its blocks and
frozen base weights. The accuracy is that of the next character, on the last tenth of each device's text, averaged over
devices; before fine-tuning it is {before:.2%}. The learning rates were chosen on the second-to-last tenths, with seed
100 and {ROUNDS // 2} rounds, from {_grid("whole")} for whole fine-tuning and {_grid("lora")} for LoRA.

{markdown_table(heads, table)}

{_said(rows, [row for row in everything if row not in rows])}

Made by `python -m benchmarks.adapters --data DIR`; rows in [adapters.jsonl](../../benchmarks/rows/adapters.jsonl).
"""
    write_section("speed", "adapters", text)


def _grid(how: str) -> str:
    return ", ".join(f"{rate:g}" for rate in RATES[how])


def _chosen(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the rate of each that was best on validation data."""
    tried = [row for row in rows if row["rounds"] == ROUNDS // 2]
    return {
        how: max((row for row in tried if row["how"] == how), key=lambda row: float(row["top1"]))["rate"]
        for how in RATES
    }


def _said(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """Return sentences about the rows: the comparison by seed, rates at the edge of the grid, runs at other rates."""
    found = {(row["how"], row["engine"], row["seed"]): row for row in rows}
    lines = []
    for engine in ("torch", "onnx"):
        seeds = [seed for seed in SEEDS if all((how, engine, seed) in found for how in RATES)]
        pairs = [(found["lora", engine, seed], found["whole", engine, seed]) for seed in seeds]
        if pairs:
            apart = ", ".join(f"{100 * (lora['top1'] - whole['top1']):+.2f}" for lora, whole in pairs)
            share = float(np.mean([lora["up"] / whole["up"] for lora, whole in pairs]))
            lines.append(f"LoRA minus whole fine-tuning, points, {engine}: {apart}, at {share:.1%} of its upload.")
    for how, rates in RATES.items():
        rate = next(row["rate"] for row in rows if row["how"] == how)
        if rate in (rates[0], rates[-1]):
            lines.append(f"The learning rate of *{how}* is at the edge of the grid.")
    lines += [
        f"A run at another learning rate, not counted: {row['how']}, {row['rate']:g}, seed {row['seed']}, "
        f"{row['engine']}: {row['top1']:.2%}."
        for row in others
    ]
    return "\n".join(f"- {line}" for line in lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--data", type=Path, help="a folder with shakespeare.npz")
    options = parser.parse_args()
    if options.what == "run":
        _run(options.data / "shakespeare.npz")
    _page()


if __name__ == "__main__":
    main()
