"""PruneFL's device half, and the choice of both halves; federations of it are in tests/coordinator/test_prepared.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.prunefl import PRUNEFL, squared_gradients
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, build_seeded
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import get_tensors, set_tensors, train_locally
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import growth_flops, training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.parts import Expected
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import readjust, weight_budget

OWN = {
    "density": 0.5,
    "prepare_rounds": 40,
    "adjust_interval": 2,
    "share": 0.3,
    "half_life": 10_000.0,
    "fixed_cost": 0.05,
    "proximal_weight": 0.0,
}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.hidden = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1))))


MANIFEST = describe(Small(), torch.zeros(1, 1, 3, 3), task="small")
SIZES = {"conv.weight": 8, "hidden.weight": 48, "out.weight": 18}


def batches_of(sizes=(6, 4), scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return [(scale * torch.randn(size, 1, 3, 3, generator=generator), torch.arange(size) % 3) for size in sizes]


def sparse_mask(seed=1):
    random = np.random.default_rng(seed)
    return ElementMask({spec.name: random.random(spec.shape) < 0.5 for spec in MANIFEST.maskable})


def job_of(
    *, kind="prepare", mask=None, sizes=(6, 4), scale=1.0, number=0, plan=None, learning_rate=0.1, epochs=1, **own
):
    model = build_seeded(Small, 0)
    task = Task("small", model, F.cross_entropy, batches_of(sizes, scale), batches_of())
    settings = FederationSettings(
        method="prunefl",
        learning_rate=learning_rate,
        learning_rate_decay=0.5,
        local_epochs=epochs,
        early_stopping="off",
        method_settings={**OWN, **own},
    )
    assignment = Assignment(
        assignment_id="a", kind=kind, round=number, deadline_seconds=60, settings=settings, plan=plan or {}
    )
    values = pack(MANIFEST, get_tensors(build_seeded(Small, 7), MANIFEST), mask)
    received = decode(encode(MANIFEST, values, mask), MANIFEST)
    return Job(
        assignment, MANIFEST, task, TorchEngine(task, MANIFEST), DeviceState(), received, federation="f", device="pi"
    )


def flat(arrays):
    return np.concatenate([np.asarray(array).reshape(-1) for array in arrays.values()])


def slow_squares(mask, batches):
    """Mean over batches of the squared gradient of each, in float64."""
    model = build_seeded(Small, 7).double().train()
    weights = [dict(model.named_parameters())[name] for name in SIZES]
    with torch.no_grad():
        for weight, exists in zip(weights, mask.exists.values(), strict=True):
            weight.mul_(torch.from_numpy(exists))
    total = 0.0
    for inputs, targets in batches:
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs.double()), targets), weights)
        total = total + torch.cat([gradient.reshape(-1) for gradient in gradients]).square()
    return (total / len(batches)).numpy()


# --- the choice --------------------------------------------------------------------------------------------------


def test_the_budget_is_a_count_for_the_whole_network():
    assert weight_budget(MANIFEST, 0.5) == 37
    assert weight_budget(MANIFEST, 0.29) == 21
    assert weight_budget(MANIFEST, 1.0) == sum(SIZES.values())
    assert weight_budget(MANIFEST, 0.001) == 3, "one in every layer"


def choose(importance, *, weights=None, mask=None, density=1.0, share=0.5, fixed_cost=0.0):
    shapes = {spec.name: spec.shape for spec in MANIFEST.maskable}
    weights = weights or {name: np.arange(1.0, SIZES[name] + 1).reshape(shape) for name, shape in shapes.items()}
    importance = {name: np.full(shape, importance[name]) for name, shape in shapes.items()}
    mask = mask or everything(MANIFEST)
    return readjust(MANIFEST, weights, importance, mask, density=density, share=share, fixed_cost=fixed_cost)


def test_a_convolutions_weight_costs_as_many_flops_as_it_has_positions():
    """conv answers at four positions: for the time of one of its weights four of a linear layer's can be had."""
    fixed = {name: size // 2 for name, size in SIZES.items()}
    # Fixed cost 4·4 + 24 + 9 = 49 for a gain of 4·3 + 24 + 9 = 45, 0.92 each: 3 in 4 is too little, 1 in 1 is not.
    assert choose({"conv.weight": 3.0, "hidden.weight": 1.0, "out.weight": 1.0}).counts == {
        "conv.weight": fixed["conv.weight"],
        "hidden.weight": 48,
        "out.weight": 18,
    }
    # 4·8 + 24 + 9 = 65 in 49 units, 1.33: 8 in 4 is worth it, and leaves the others too little.
    assert choose({"conv.weight": 8.0, "hidden.weight": 1.0, "out.weight": 1.0}).counts == {
        **fixed,
        "conv.weight": 8,
    }


def test_a_fixed_cost_is_a_share_of_the_dense_networks():
    """Dense: 4·8 + 48 + 18 = 98. Kept in any case: 65 in 49 units. All of conv: 97 in 65."""
    importance = {"conv.weight": 8.0, "hidden.weight": 1.0, "out.weight": 1.0}
    assert choose(importance, fixed_cost=0.3).counts["hidden.weight"] == 24, "97 in 65 + 29 is more than 1 in 1"
    assert choose(importance, fixed_cost=0.4).counts["hidden.weight"] == 48, "97 in 65 + 39 is less"


# --- squared gradients -------------------------------------------------------------------------------------------


def test_squared_gradients_are_those_of_each_batch_whether_a_weight_exists_or_not():
    mask = sparse_mask()
    job = job_of(kind="train", mask=mask)
    set_tensors(
        job.engine.model, {name: array * mask.exists[name] for name, array in received(7).items() if name in SIZES}
    )
    set_tensors(job.engine.model, {name: array for name, array in received(7).items() if name not in SIZES})
    before = {name: tensor.clone() for name, tensor in job.engine.model.state_dict().items()}
    squares, samples = squared_gradients(job, "gradients")
    assert list(squares) == list(SIZES)
    np.testing.assert_allclose(flat(squares), slow_squares(mask, job.task.train), rtol=1e-3, atol=1e-9)
    assert samples == 10
    missing = ~flat(mask.exists)
    assert np.count_nonzero(flat(squares)[missing]) > missing.sum() / 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.engine.model.state_dict().items())
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())


def received(seed):
    return get_tensors(build_seeded(Small, seed), MANIFEST)


def test_squares_that_are_not_finite_fail():
    job = job_of(scale=1e30)
    job.task.train[0][0][:] = float("inf")
    with pytest.raises(TrainingDiverged, match=r"conv\.weight: .*not finite"):
        squared_gradients(job, "gradients")


# --- a round -----------------------------------------------------------------------------------------------------


def test_a_round_that_wants_gradients_trains_as_any_other():
    mask = sparse_mask()
    usual = PRUNEFL.train(job_of(kind="train", mask=mask, number=3))
    asked = PRUNEFL.train(job_of(kind="train", mask=mask, number=3, plan={"gradients": True}))
    fedavg = FEDAVG.train(job_of(kind="train", mask=mask, number=3))
    assert usual.update.parts == {}
    np.testing.assert_array_equal(usual.update.values, fedavg.update.values)
    np.testing.assert_array_equal(asked.update.values, usual.update.values)
    assert asked.update.parts["gradients"].dtype == np.float32
    np.testing.assert_allclose(asked.update.parts["gradients"], slow_squares(mask, batches_of()), rtol=1e-3, atol=1e-9)
    assert usual.flops == training_flops(MANIFEST, 10, weight_gradients=mask)
    assert asked.flops == usual.flops + growth_flops(MANIFEST, 10, mask)
    sent = encode(MANIFEST, asked.update.values, mask, known=mask, parts=asked.update.parts)
    np.testing.assert_array_equal(
        decode(sent, MANIFEST, mask, parts={"gradients": Expected("float32", mask.size)}).parts["gradients"],
        asked.update.parts["gradients"],
    )


def test_gradients_of_a_model_without_a_mask_are_refused():
    with pytest.raises(BundleError, match="no mask of elements"):
        PRUNEFL.train(job_of(kind="train", plan={"gradients": True}))


def test_a_proximal_weight_pulls():
    mask = sparse_mask()
    free, pulled = (
        PRUNEFL.train(job_of(kind="train", mask=mask, proximal_weight=weight, epochs=4)).update.values
        for weight in (0.0, 1.0)
    )
    start = pack(MANIFEST, received(7), mask)
    moved = [
        np.linalg.norm(values[: sum(mask.counts.values())] - start[: sum(mask.counts.values())])
        for values in (pulled, free)
    ]
    assert moved[0] < moved[1]


# --- preparing ---------------------------------------------------------------------------------------------------


def outside(job, mask):
    """The model's weights where nothing exists."""
    parameters = dict(job.engine.model.named_parameters())
    return flat({name: parameters[name].detach().numpy()[~exists] for name, exists in mask.exists.items()})


def test_the_first_choice_is_made_of_the_dense_model_that_was_trained():
    """Two rounds by hand: local training twice, the squared gradients, the rule."""
    trained = PRUNEFL.prepare(job_of(prepare_rounds=2, adjust_interval=50))
    other = job_of()
    set_tensors(other.engine.model, received(7))
    for number in (1, 2):
        result = train_locally(
            other.engine.model,
            other.task,
            other.assignment.settings,
            learning_rate=0.1,
            freezing=Freezing(other.engine.model, MANIFEST, None),
            seed=other.seed(f"prepare {number}"),
        )
    dense = get_tensors(other.engine.model, MANIFEST)
    squares, _ = squared_gradients(other, "gradients 2")
    mask = readjust(MANIFEST, dense, squares, everything(MANIFEST), density=0.5, share=0.3, fixed_cost=0.05)
    assert trained.update.mask.digest == mask.digest
    assert mask.count == 37
    np.testing.assert_array_equal(trained.update.values, pack(MANIFEST, dense, mask))
    assert (trained.train_loss, trained.steps, trained.num_examples) == (result.train_loss, 4, 10)
    whole = everything(MANIFEST)
    assert trained.flops == training_flops(MANIFEST, 20, weight_gradients=whole) + growth_flops(MANIFEST, 10, whole)


def test_preparing_ends_when_five_choices_in_a_row_change_little():
    job = job_of()
    trained = PRUNEFL.prepare(job)
    rounds = trained.counts["prepare_rounds"]
    assert rounds % 2 == 0
    assert 12 <= rounds < 40, "from all to 37 is no small change, then five are"
    assert trained.steps == 2 * rounds
    assert trained.update.mask.count <= 37
    assert not outside(job, trained.update.mask).any()
    inside = ElementMask({name: ~exists for name, exists in trained.update.mask.exists.items()})
    assert np.median(np.abs(outside(job, inside))) > 0.05
    assert trained.state == job.state
    assert not trained.stopped


def test_choices_that_change_much_go_on(monkeypatch):
    """Half the weights, then all of them, and again: never steady."""
    counts = iter([20, 37] * 20)

    def readjust_in_turns(manifest, weights, importance, mask, **rule):
        left = next(counts)
        flags = np.arange(74) < left
        return ElementMask(
            {
                name: part.reshape(mask.exists[name].shape)
                for name, part in zip(SIZES, np.split(flags, np.cumsum(list(SIZES.values()))[:-1]), strict=True)
            }
        )

    monkeypatch.setattr("edge_sdk.methods.prunefl.readjust", readjust_in_turns)
    trained = PRUNEFL.prepare(job_of(prepare_rounds=30))
    assert trained.counts["prepare_rounds"] == 30
    assert trained.update.mask.count == 20


@pytest.mark.parametrize(("rounds", "interval"), [(1, 50), (3, 2)])
def test_preparing_ends_with_a_choice_whatever_the_interval(rounds, interval):
    job = job_of(prepare_rounds=rounds, adjust_interval=interval, density=0.2)
    trained = PRUNEFL.prepare(job)
    update = trained.update
    assert trained.counts["prepare_rounds"] == rounds
    assert update.mask.count <= 14
    assert not outside(job, update.mask).any()


def test_training_alone_learns_and_reports_its_progress():
    steps, losses = [], []

    def progress(done, total, loss):
        steps.append((done, total))
        losses.append(loss)

    job = dataclasses.replace(job_of(prepare_rounds=6, density=0.8, epochs=2), progress=progress)
    trained = PRUNEFL.prepare(job)
    assert steps == [(done, 24) for done in range(1, 25)]
    assert trained.train_loss < losses[0]


def test_one_batch_is_enough():
    trained = PRUNEFL.prepare(job_of(sizes=(9,), prepare_rounds=4, density=0.3))
    assert trained.update.mask.count <= 22
    assert trained.num_examples == 9


def test_preparing_again_prepares_the_same():
    one, other = (PRUNEFL.prepare(job_of(prepare_rounds=4)).update for _ in range(2))
    assert one.mask.digest == other.mask.digest
    np.testing.assert_array_equal(one.values, other.values)


def test_training_that_diverges_fails():
    with pytest.raises(TrainingDiverged):
        PRUNEFL.prepare(job_of(learning_rate=100.0, scale=1e20, prepare_rounds=20))


def test_the_method_is_found_by_its_name():
    assert load_method("prunefl") is PRUNEFL
