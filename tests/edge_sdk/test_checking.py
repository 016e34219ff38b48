"""A task is looked at before it is published or a device enrols, and nothing of it is moved by that."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from edge_sdk.errors import BadArgument
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task
from edge_sdk.training.checking import check_task

CE = nn.CrossEntropyLoss()
SEED = torch.Generator().manual_seed(1)
X = torch.randn(200, 8, generator=SEED)
Y = (X[:, 0] > 0).long()


def loader(inputs=X, targets=Y, size=20, **more):
    return DataLoader(TensorDataset(inputs, targets), size, **more)


def net(outputs=2):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def task(model=None, loss=CE, train=None, validation=None, **more):
    held_out = loader() if validation is None else validation
    return Task("own", model or net(), loss, loader() if train is None else train, held_out, **more)


class Pictures(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"pixel": X[index], "label": Y[index]}


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 2, batch_first=True)

    def forward(self, inputs):
        return self.cell(inputs[:, None])


BROKEN = X.clone()
BROKEN[177, 3] = float("nan")
NORMED = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"train": DataLoader(Pictures(), 10)}, r"train data: its batches are dictionaries of 'pixel', 'label'; give"),
        (
            {"train": loader(X, Y, 10, collate_fn=lambda b: (1, 2, 3))},
            r"train data: its batches are a tuple of 3; give",
        ),
        (
            {"validation": loader(X[:0], Y[:0])},
            r"validation data: there is no batch in it; give it at least one sample",
        ),
        (
            {"test": loader(X[:5], Y[:5], drop_last=True)},
            r"test data: there is no batch .*drop_last=True drops the only",
        ),
        ({"train": DataLoader(Stream(), 10)}, r"train data: a DataLoader over a Stream has no length; give"),
        ({"train": ((X, Y) for _ in range(2))}, r"train data: a generator has no length"),
        ({"train": loader(BROKEN)}, r"train data: a value of the inputs is NaN or infinite; replace or leave out"),
        ({"train": loader(X, Y + 1)}, r"label 2 lies outside 0 to 1, .* 2 outputs; the labels count from 1: subtract"),
        ({"train": loader(X, torch.arange(200) % 9)}, r"labels 2, 3, 4, 5, 6, \.\.\. lie outside 0 to 1"),
        ({"train": loader(X, Y.float())}, r"targets are \[200\] float32; a classification needs class indices"),
        ({"train": loader(X, nn.functional.one_hot(Y).float())}, r"targets are rows of 2 \(one-hot\?\).*argmax\(1\)"),
        (
            {"train": loader(X[:, :7])},
            r"the model fails on inputs \[16, 7\] float32: mat1 and mat2 shapes cannot be mul",
        ),
        ({"train": loader(X.double())}, r"float64: .*the weights are float32: give inputs\.float\(\)"),
        ({"model": Recurrent()}, r"the model returns a tuple; make forward return one tensor, its scores"),
        ({"model": net().requires_grad_(False)}, r"model has no parameter to train: .*requires_grad=True"),
        ({"model": NORMED, "train": loader(X[:41], Y[:41])}, r"batch norm cannot train on one sample.*drop_last=True"),
        (
            {"loss": nn.CrossEntropyLoss(reduction="sum")},
            r"the loss doubles with the batch .*: it is a sum; give the mean",
        ),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"the loss returns \[16\] float32; give the mean"),
        ({"loss": lambda scores, labels: CE(scores.detach(), labels)}, r"no gradient .*without \.detach\(\)"),
        ({"loss": lambda scores, labels: CE(scores, labels) * float("inf")}, r"the loss of its first batch is inf"),
        (
            {"model": net(1), "loss": nn.BCEWithLogitsLoss(), "train": loader(X, Y[:, None].float())},
            r"the model returns \[16, 1\] float32; .* one output per class, .*or set Task\(\.\.\., class",
        ),
        (
            {"model": net(1), "loss": nn.MSELoss(), "train": loader(X, X[:, 0]), "classification": False},
            r"the loss fails on outputs \[16, 1\] float32 and targets \[16\] float32: Using a target size",
        ),
    ],
)
def test_an_invalid_task_is_refused_with_place_and_remedy(wrong, said):
    with pytest.raises(BadArgument, match=said) as refused:
        check_task(task(**wrong))
    assert "\n" not in str(refused.value)


def test_samples_of_another_shape_than_the_federation_s_are_refused():
    good = task()
    manifest = describe(good.model, X[:2], task="own")
    check_task(good, manifest)
    narrow = task(train=loader(X[:, :7]))
    with pytest.raises(BadArgument, match=r"\[7\].*\[8\]"):
        check_task(narrow, manifest)


def test_what_works_is_left_as_it_was():
    """Weights, running statistics, modes and all random numbers, those of a loader's own generator too."""
    own = torch.Generator().manual_seed(5)
    model = NORMED.train()
    train = loader(shuffle=True, generator=own)
    held_out = random_split(TensorDataset(X, Y), [150, 50])[1]
    subject = task(model, train=train, validation=DataLoader(held_out, 25, shuffle=True))
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), own.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    check_task(subject)
    after = torch.get_rng_state(), own.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(states[0], after[0])
    assert torch.equal(states[1], after[1])
    assert states[2:] == after[2:]


def test_other_ways_to_be_right_are_not_refused():
    regression = task(net(1), nn.MSELoss(), loader(X, X[:, :1]), loader(X, X[:, :1]), classification=False)
    for good in (
        regression,
        replace(regression, loss=nn.BCEWithLogitsLoss()),
        task(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]), label_smoothing=0.1)),
        task(train=[(X[:9], Y[:9])], test=loader()),
        task(NORMED, train=loader(X[:41], Y[:41], drop_last=True)),
    ):
        check_task(good)


def _pruned():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(torch.randn(2, 6))
    return model


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: torch.jit.trace(nn.Linear(6, 2), torch.randn(2, 6)), "nn.Module"),
        (
            lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            "track_running_stats=True",
        ),
        (_pruned, "prune.remove"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_cannot_be_published_is_named_with_the_remedy(build, remedy):
    samples = [(torch.randn(4, 6), torch.arange(4) % 2)]
    with pytest.raises(BadArgument, match=re.escape(remedy)):
        check_task(Task("odd", build(), nn.CrossEntropyLoss(), samples, samples))
