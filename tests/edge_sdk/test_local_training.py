from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edge_sdk.engines.training import TrainingDiverged, derive_seed
from edge_sdk.tasks import Task, count_examples, passes
from edge_sdk.tasks.loading import ArrayBatches, Arrays, classification
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import evaluate, get_tensors, set_tensors, train_locally
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.settings import FederationSettings

MANIFEST = Manifest(
    task="line",
    input_shape=(2,),
    output_shape=(2,),
    tensors=(TensorSpec(name="weight", shape=(2, 2)), TensorSpec(name="bias", shape=(2,))),
)


def line():
    model = nn.Linear(2, 2)
    set_tensors(model, {"weight": np.eye(2, dtype=np.float32), "bias": np.zeros(2, dtype=np.float32)})
    return model


def task_of(model, count=5, batch_size=2):
    inputs = torch.arange(2.0 * count).reshape(count, 2) / 10
    arrays = Arrays(inputs, torch.arange(count) % 2)
    return classification("line", model, arrays, arrays, None, batch_size=batch_size)


def train(task, *, learning_rate=0.1, seed=0, progress=lambda *_: None, **settings):
    return train_locally(
        task.model,
        task,
        FederationSettings(**settings),
        learning_rate=learning_rate,
        freezing=Freezing(task.model, MANIFEST, None),
        seed=seed,
        progress=progress,
    )


def test_training_is_that_of_a_plain_loop_bit_for_bit():
    task = task_of(line(), count=7, batch_size=3)
    result = train(task, local_epochs=3, momentum=0.9, weight_decay=0.01, clip=0.2, seed=5)

    plain = line()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    torch.manual_seed(5)
    losses, counts = [], []
    for batch in islice(passes(task.train, 5), 3 * len(task.train)):
        inputs, targets = map(torch.from_numpy, batch)
        loss = F.cross_entropy(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        optimizer.step()
        losses.append(loss.item())
        counts.append(len(targets))
    assert torch.equal(task.model.weight, plain.weight)
    assert torch.equal(task.model.bias, plain.bias)
    assert (result.num_examples, result.samples, result.steps) == (
        7,
        21,
        6,
    )  # 3 + 4: the seventh sample joins the second batch
    assert result.train_loss == pytest.approx(np.average(losses, weights=counts))


class Net(nn.Module):
    """A convolution, batch norm, and a layer that the forward pass leaves out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.05}, {"clip": 0.1}, {"weight_decay": 0.05, "clip": 0.1}], ids=str
)
def test_plain_sgd_is_torchs_bit_for_bit(settings):
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    arrays = Arrays(torch.rand(20, 2, 6, 6), torch.arange(20) % 3)
    task = classification("net", model, arrays, arrays, None, batch_size=6)
    tensors = tuple(TensorSpec(name=name, shape=tuple(each.shape)) for name, each in model.named_parameters())
    nothing_frozen = Freezing(model, MANIFEST.model_copy(update={"tensors": tensors}), None)
    train_locally(
        model, task, FederationSettings(local_epochs=3, **settings), learning_rate=0.3, freezing=nothing_frozen, seed=1
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, weight_decay=settings.get("weight_decay", 0))
    torch.manual_seed(1)
    for batch in islice(passes(task.train, 1), 3 * len(task.train)):
        inputs, targets = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs.to(memory_format=torch.channels_last)), targets).backward()
        if "clip" in settings:
            nn.utils.clip_grad_norm_(plain.parameters(), settings["clip"])
        optimizer.step()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert all(parameter.grad is None for parameter in model.parameters()), "gradients are as large as the model"


PROCESS = """
import hashlib, sys, torch
from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedavg import FEDAVG
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings
from edge_sdk.tasks.digits import load
from edge_sdk.training.engine import TorchEngine
torch.set_num_threads(1)
manifest = load_builtin("digits").manifest
task = load("index=0,of=8", device="a", seed=0, batch_size=16).seeded(0)
settings = FederationSettings(method="fedavg", weight_decay=0.01, clip=1.0, local_steps=8)
assignment = Assignment(assignment_id="a", kind="train", round=1, deadline_seconds=9, settings=settings)
received = decode(encode(manifest, pack(manifest, initial_values(manifest, 0), None), None), manifest)
digests = []
for _ in range(2):
    engine = TorchEngine(task, manifest)
    job = Job(assignment, manifest, task, engine, DeviceState(), received, federation="f", device="a")
    digests.append(hashlib.sha256(FEDAVG.train(job).update.values.tobytes()).hexdigest())
assert digests[0] == digests[1]
print(digests[0], "torch._dynamo" in sys.modules)
"""


@pytest.mark.integration
def test_plain_training_imports_no_compiler_and_every_process_gives_the_same_bits():
    """The compiler takes longer to import than a small device trains in a round."""
    said = {subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(said) == 1
    assert re.fullmatch(r"[0-9a-f]{64} False\n", said.pop())


def test_steps_wrap_round_the_data():
    seen = []
    result = train(task_of(line()), local_steps=7, progress=lambda done, total, loss: seen.append((done, total)))
    assert result.steps == 7
    assert result.num_examples == 5
    assert result.samples == 5 * 3 + 2
    assert seen == [(step, 7) for step in range(1, 8)]


def test_equal_seeds_give_equal_weights():
    def weights(seed):
        task = task_of(line())
        train(task, local_epochs=1, seed=seed)
        return task.model.weight

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(5))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_other_optimisers_learn(optimizer):
    task = task_of(line())
    before = evaluate(task.model, task, task.validation).loss
    train(task, local_epochs=5, optimizer=optimizer)
    assert evaluate(task.model, task, task.validation).loss < before


def test_a_loss_that_is_not_finite_fails_the_round():
    task = task_of(line())
    with torch.no_grad():
        task.model.bias.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match=r"\bnan\b.*step 1 of 2\b.*\b0\.1\b"):
        train(task, local_epochs=1)
    with pytest.raises(TrainingDiverged, match="held-out"):
        evaluate(task.model, task, task.validation)


def test_a_weight_that_is_not_finite_fails_the_round():
    task = dataclasses.replace(task_of(line()), loss=lambda outputs, targets: 100 * F.cross_entropy(outputs, targets))
    with pytest.raises(TrainingDiverged, match="weight is not finite after 1 steps"):
        train(task, learning_rate=3e38, local_steps=1)


def test_nothing_to_train_or_evaluate_on():
    task = dataclasses.replace(task_of(line()), train=[], validation=[])
    with pytest.raises(ValueError, match="at least one sample"):
        train(task)
    with pytest.raises(ValueError, match="validation data"):
        evaluate(task.model, task, task.validation)


def test_evaluation_is_the_mean_over_samples_and_changes_nothing():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    model[2].eval()  # a user's frozen batch norm stays frozen
    inputs, targets = torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1])
    batches = ArrayBatches(Arrays(inputs, targets), 2)
    task = Task("line", model, F.cross_entropy, batches, batches)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = evaluate(model, task, batches)
    modes = [module.training for module in model]
    assert modes == [True, True, False, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    outputs = model.eval()(inputs)
    assert found.num_examples == 5
    assert found.loss == pytest.approx(F.cross_entropy(outputs, targets).item(), rel=1e-5)
    assert found.accuracy == pytest.approx((outputs.argmax(1) == targets).float().mean().item())


def test_a_task_that_is_no_classification_has_no_accuracy():
    batches = [(torch.ones(3, 2), torch.zeros(3, 2))]
    task = Task("line", line(), F.mse_loss, batches, batches, classification=False)
    assert evaluate(task.model, task, batches).accuracy is None
    assert evaluate(task.model, task, batches).loss == 1.0


def test_examples_are_counted_in_any_kind_of_batches():
    dataset = TensorDataset(torch.zeros(5, 2), torch.zeros(5))
    assert count_examples(DataLoader(dataset, batch_size=2)) == 5
    assert count_examples([(torch.zeros(2, 2), torch.zeros(2)), (torch.zeros(1, 2), torch.zeros(1))]) == 3


def test_a_data_loader_will_do():
    dataset = TensorDataset(torch.rand(5, 2), torch.arange(5) % 2)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    task = Task("line", line(), F.cross_entropy, loader, loader)
    assert train(task, local_epochs=2).steps == 6


def test_seeds_follow_from_their_parts():
    assert derive_seed("job", "pi", 3, "train") == derive_seed("job", "pi", "3", "train")
    assert derive_seed("a", "bc") != derive_seed("ab", "c")
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert all(0 <= derive_seed(number) < 2**63 for number in range(100))


def test_tensors_go_in_and_come_out_as_copies():
    model = line()
    tensors = get_tensors(model, MANIFEST)
    tensors["bias"][0] = 7
    assert model.bias[0] == 0
    tensors["bias"].flags.writeable = False
    set_tensors(model, tensors)  # read-only arrays, such as payloads are, make torch.from_numpy warn
    assert model.bias.tolist() == [7, 0]
    assert not np.shares_memory(model.bias.detach().numpy(), tensors["bias"])
    assert get_tensors(model, MANIFEST)["bias"].tolist() == [7, 0]


def test_tensors_of_another_model_are_refused():
    with pytest.raises(ManifestError, match=r"\bbias: .*\(3,\).*\(2,\)"):
        set_tensors(line(), {"bias": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ManifestError, match=r"scale: .* does not exist"):
        set_tensors(line(), {"scale": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ManifestError, match=r"\bbias: "):
        get_tensors(nn.Linear(2, 2, bias=False), MANIFEST)
