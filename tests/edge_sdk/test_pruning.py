"""What makes Hermes, FedMP and neuron-wise PruneFL themselves, on the device: a gate of accuracy, the network that the
coordinator has pruned, and importance gathered over rounds. Federations are in tests/coordinator/test_pruning.py."""

from __future__ import annotations

import dataclasses
import math
from itertools import islice

import numpy as np
import pytest
import torch

from edge_sdk.device.rounding import round_update
from edge_sdk.methods import DeviceState, Job, UnknownWork, load_method
from edge_sdk.methods.prunefl_neurons import IMPORTANCE
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import build_seeded, passes
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensors, get_tensors
from edge_sdk.training.rehearsal import TorchRehearsal
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.masks import NeuronMask, count_values, merge_in_place, pack, same_mask
from sparrow.protocol.messages import Assignment, Work
from sparrow.protocol.neurons import best_neurons, counts_at, first_neurons, is_within, narrowed, norm_scores
from sparrow.protocol.settings import FederationSettings

MANIFEST = describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits")
SIZES = MANIFEST.group_sizes
GRADUAL = {"pruning": "gradual", "prune_rate": 0.2, "accuracy_threshold": 0.9}
EXAMPLES, EPOCHS = 20, 1


def model_of(seed=7):
    return build_seeded(DigitsNet, seed)


def answers(model, inputs):
    with torch.no_grad():
        return model.eval()(inputs).argmax(1)


def zeroed(mask, seed=7):
    """The model of a seed with zeros for the neurons that a mask leaves out."""
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in MANIFEST.shared}
    merge_in_place(MANIFEST, tensors, pack(MANIFEST, get_tensors(model_of(seed), MANIFEST), mask), mask)
    model = model_of(seed)
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)
    return model


def job_of(own, ratio=0.3, *, state=None, mask=None, wrong=0, seed=7, number=1, kind="train", **settings):
    """A round on random images. The payload holds the values of ``mask``, or of the whole model, of a seed; that
    network is right about all validation samples but the first ``wrong``."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(EXAMPLES, 1, 8, 8, generator=generator), torch.arange(EXAMPLES) % 10
    right = answers(model_of(seed) if mask is None else zeroed(mask, seed), inputs)
    right[:wrong] = (right[:wrong] + 1) % 10
    task = classification("digits", model_of(0), Arrays(inputs, targets), Arrays(inputs, right), None, batch_size=8)
    values = pack(MANIFEST, get_tensors(model_of(seed), MANIFEST), mask)
    assignment = Assignment(
        assignment_id="a",
        kind=kind,
        round=number,
        deadline_seconds=60,
        settings=FederationSettings(local_epochs=EPOCHS, early_stopping="off", method_settings=own, **settings),
        work=Work(key=f"{number:032x}", ratio=ratio),
    )
    received = decode(encode(MANIFEST, values, mask), MANIFEST)
    return Job(
        assignment,
        MANIFEST,
        task,
        TorchEngine(task, MANIFEST),
        state or DeviceState(),
        received,
        federation="f",
        device="pi",
    )


def sizes(mask):
    return [len(index) for index in mask.active.values()]


# --- Hermes ----------------------------------------------------------------------------------------------------------

HERMES = load_method("hermes")
EVERYTHING = first_neurons(MANIFEST, 1.0)


def test_hermes_prunes_while_accuracy_holds_and_a_step_is_rejected_when_it_falls():
    first = HERMES.train(job_of(GRADUAL, wrong=0))
    assert sizes(first.update.mask) == [math.floor(0.8 * size) for size in SIZES.values()]
    gone = sum(SIZES.values()) - sum(sizes(first.update.mask))
    assert first.counts.items() >= {"pruning_steps": 1, "pruning_steps_rejected": 0, "neurons_pruned": gone}.items()
    assert same_mask(first.state.neurons, first.update.mask)

    fallen = HERMES.train(job_of(GRADUAL, state=first.state, mask=first.update.mask, wrong=3, number=2))
    assert fallen.counts.items() >= {"pruning_steps": 0, "pruning_steps_rejected": 1, "neurons_pruned": 0}.items()
    assert same_mask(fallen.update.mask, first.update.mask)

    second = HERMES.train(job_of(GRADUAL, state=fallen.state, mask=fallen.update.mask, wrong=2, number=3))
    assert second.counts["pruning_steps"] == 1
    assert sizes(second.update.mask) == [math.floor(0.8 * size) for size in sizes(first.update.mask)]
    assert is_within(second.update.mask, first.update.mask)


def test_hermes_trains_and_counts_the_whole_network_until_it_prunes():
    job = job_of(GRADUAL, wrong=20)
    trained = HERMES.train(job)
    assert trained.update.values.size == MANIFEST.shared_values
    judged = EXAMPLES * forward_flops(MANIFEST)
    assert trained.flops == training_flops(MANIFEST, EPOCHS * EXAMPLES) + judged
    rehearsal = TorchRehearsal(job.task, MANIFEST, job.assignment.settings, narrow=True)
    assert HERMES.at_budget(rehearsal, 0.3).values == MANIFEST.shared_values, "what a device must be able to afford"
    once = job_of({**GRADUAL, "pruning": "once"}).assignment.settings
    rehearsal = TorchRehearsal(job.task, MANIFEST, once, narrow=True)
    assert HERMES.at_budget(rehearsal, 0.3).values == count_values(MANIFEST, first_neurons(MANIFEST, 0.3))


def test_hermes_prunes_the_neurons_of_the_smallest_norms_that_it_has_left():
    mask = NeuronMask({name: np.arange(0, size, 2) for name, size in SIZES.items()})
    trained = HERMES.train(job_of({**GRADUAL, "prune_rate": 0.5}, 0.2, state=DeviceState(neurons=mask), mask=mask))
    weights = get_tensors(zeroed(mask), MANIFEST)
    for group, size in SIZES.items():
        norms = np.sqrt((weights[f"{group}.weight"].reshape(size, -1).astype(np.float64) ** 2).sum(1))
        kept = trained.update.mask.active[group]
        left = np.setdiff1d(mask.active[group], kept)
        assert len(kept) == size // 4
        assert norms[kept].min() > norms[left].max()


def test_hermes_ends_at_the_budget():
    state, mask, steps = None, None, []
    for number in range(1, 12):
        trained = HERMES.train(job_of(GRADUAL, 0.3, state=state, mask=mask, number=number, local_steps=1))
        state, mask = trained.state, trained.update.mask
        steps.append(trained.counts["pruning_steps"])
    assert sizes(mask) == [math.floor(0.3 * size) for size in SIZES.values()]
    assert steps[0] == 1
    assert steps[-1] == 0
    assert trained.flops == training_flops(narrowed(MANIFEST, mask), EXAMPLES - 12), "nobody judges what is not pruned"
    wider = HERMES.train(job_of(GRADUAL, 0.6, state=state, number=12))
    assert sizes(wider.update.mask) == list(SIZES.values()), "a budget that has grown begins anew"


def test_hermes_killed_after_it_kept_its_neurons_makes_the_same_update():
    """The rest of its state is that of before; the coordinator, which does not know these neurons, sends everything."""
    before = HERMES.train(job_of(GRADUAL, wrong=20))
    second = job_of(GRADUAL, state=before.state, mask=before.update.mask, number=2)
    trained = HERMES.train(second)
    assert trained.counts["pruning_steps"] == 1
    state = dataclasses.replace(before.state, neurons=trained.state.neurons)
    again = HERMES.train(job_of(GRADUAL, state=state, number=2))
    assert same_mask(again.update.mask, trained.update.mask)
    np.testing.assert_array_equal(again.update.values, trained.update.values)


def test_hermes_rounds_the_difference_from_what_it_was_sent():
    state = DeviceState(neurons=EVERYTHING)
    job = job_of(GRADUAL, state=state, mask=EVERYTHING, precision="int8")
    trained = HERMES.train(job)
    assert trained.counts["pruning_steps"] == 1
    numbers, left = round_update(job, trained.update, {})
    sent = pack(MANIFEST, get_tensors(model_of(), MANIFEST), trained.update.mask)
    assert numbers.numbers.size == sent.size
    lost = pack(MANIFEST, left, trained.update.mask)
    assert np.abs(lost).max() < np.abs(trained.update.values - sent).max() / 20


def test_hermes_needs_accuracy_to_prune_by():
    job = job_of(GRADUAL)
    job = dataclasses.replace(job, task=dataclasses.replace(job.task, classification=False))
    with pytest.raises(UnknownWork, match="pruning = once"):
        HERMES.train(job)


def test_hermes_adapts_the_finished_model_at_its_budget():
    state = HERMES.adapt(job_of(GRADUAL, kind="adapt"))
    assert sizes(state.neurons) == [math.floor(0.3 * size) for size in SIZES.values()]


# --- FedMP -----------------------------------------------------------------------------------------------------------

FEDMP = load_method("fedmp")
BANDIT = {"ratios": "bandit"}


def test_fedmp_trains_the_network_that_was_pruned_for_it():
    mask = best_neurons(norm_scores(MANIFEST, get_tensors(model_of(), MANIFEST), 1), counts_at(MANIFEST, 0.4))
    trained = FEDMP.train(job_of(BANDIT, 0.4, mask=mask))
    assert same_mask(trained.update.mask, mask)
    lacks = sum(SIZES.values()) - sum(sizes(mask))
    assert trained.counts.items() >= {"neurons_pruned": lacks, "ratio_changes": 0}.items()
    assert trained.flops == training_flops(narrowed(MANIFEST, mask), EPOCHS * EXAMPLES)
    other = first_neurons(MANIFEST, 0.7)
    again = FEDMP.train(job_of(BANDIT, 0.7, mask=other, state=trained.state, number=2))
    assert again.counts["ratio_changes"] == 1
    same = FEDMP.train(job_of(BANDIT, 0.7, mask=first_neurons(MANIFEST, 0.7), state=again.state, number=3))
    assert same.counts["ratio_changes"] == 0


def test_fedmp_refuses_neurons_of_another_ratio():
    with pytest.raises(BundleError, match=r"active ratio of 0\.3\b"):
        FEDMP.train(job_of(BANDIT, 0.3, mask=first_neurons(MANIFEST, 0.4)))


def test_fedmp_adapts_what_the_l1_norm_keeps_of_the_finished_model():
    state = FEDMP.adapt(job_of(BANDIT, 0.4, kind="adapt"))
    weights = get_tensors(model_of(), MANIFEST)
    norms = np.abs(weights["fc1.weight"]).sum(1)
    dropped = np.flatnonzero(~state.personal["fc1.weight"].any(1))
    assert len(dropped) == SIZES["fc1"] - math.floor(0.4 * SIZES["fc1"])
    assert norms[dropped].max() < np.delete(norms, dropped).min()


# --- PruneFL by neurons ----------------------------------------------------------------------------------------------

PRUNEFL = load_method("prunefl_neurons")
GATHERED = {"importance": "gathered"}


def squares(job):
    """Mean over mini-batches of the squared gradients of each neuron's weights, by plain torch."""
    model = model_of(7)
    found = {group: torch.zeros(size, dtype=torch.float64) for group, size in SIZES.items()}
    batches = list(islice(passes(job.task.train, job.seed("score")), len(job.task.train)))
    for inputs, targets in map(as_tensors, batches):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model.train()(inputs), targets).backward()
        for group in found:
            found[group] += model.get_parameter(f"{group}.weight").grad.square().flatten(1).sum(1) / len(batches)
    return torch.cat(list(found.values())).numpy()


def test_prunefl_gathers_the_squares_of_every_neurons_gradients():
    job = job_of(GATHERED, 0.4)
    first = PRUNEFL.train(job)
    np.testing.assert_allclose(first.state.own[IMPORTANCE], squares(job), rtol=1e-3)
    assert first.counts.items() >= {"adjustments": 0, "neurons_replaced": 0, "neurons_pruned": 0}.items()
    mask = first.update.mask
    narrow = PRUNEFL.train(job_of(GATHERED, 0.4, state=first.state, mask=mask, number=2))
    assert narrow.flops == training_flops(narrowed(MANIFEST, mask), EXAMPLES)
    assert same_mask(narrow.state.neurons, mask)
    np.testing.assert_array_equal(narrow.state.own[IMPORTANCE], first.state.own[IMPORTANCE])
    due = job_of(GATHERED, 0.4, state=narrow.state, number=5)
    again = PRUNEFL.train(due)
    np.testing.assert_allclose(again.state.own[IMPORTANCE], first.state.own[IMPORTANCE] + squares(due), rtol=1e-3)
    assert again.counts["adjustments"] == 1
    assert again.flops == training_flops(narrowed(MANIFEST, again.update.mask), EXAMPLES) + training_flops(
        MANIFEST, EXAMPLES
    )


def test_importance_that_changed_over_rounds_changes_the_neurons():
    """What was gathered outweighs one round's; where it does not, a round replaces neurons."""
    fresh = PRUNEFL.train(job_of(GATHERED, 0.4)).update.mask
    others = {name: np.setdiff1d(np.arange(SIZES[name]), index)[: len(index)] for name, index in fresh.active.items()}
    held = NeuronMask(others)

    def played(weight):
        gathered = np.concatenate([np.isin(np.arange(size), others[name]) for name, size in SIZES.items()]) * weight
        state = DeviceState(neurons=held, own={IMPORTANCE: gathered})
        return PRUNEFL.train(job_of(GATHERED, 0.4, state=state))

    kept, replaced = played(1e9), played(0.0)
    assert same_mask(kept.update.mask, held)
    assert kept.counts.items() >= {"adjustments": 1, "neurons_replaced": 0, "neurons_pruned": 0}.items()
    assert same_mask(replaced.update.mask, fresh)
    count = sum(sizes(fresh))
    assert replaced.counts.items() >= {"adjustments": 1, "neurons_replaced": count, "neurons_pruned": count}.items()


def test_prunefl_at_the_whole_budget_measures_nothing():
    trained = PRUNEFL.train(job_of(GATHERED, 1.0))
    assert trained.flops == training_flops(MANIFEST, EXAMPLES)
    assert sizes(trained.update.mask) == list(SIZES.values())
