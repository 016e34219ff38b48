"""FedPer, LG-FedAvg and FedRep on one device: what trains when, and what an update holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedper import FEDPER
from edge_sdk.methods.fedrep import FEDREP
from edge_sdk.methods.lgfedavg import LGFEDAVG
from edge_sdk.methods.parts import only
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training import local
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import evaluate, get_tensors, set_tensors
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

HEAD = ("2.weight", "2.bias")


def job_of(*, state=None, moved=0.0, **given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    inputs = torch.randn(20, 6)
    manifest = describe(model, inputs[:2], task="t").with_private(HEAD)
    arrays = Arrays(inputs, torch.arange(20) % 3)
    task = classification("t", model, arrays, arrays, None, batch_size=8)
    tensors = {name: tensor + np.float32(moved) for name, tensor in get_tensors(model, manifest).items()}
    body = encode(manifest, pack(manifest, tensors, None), None)
    settings = FederationSettings(**{"local_epochs": 2, "early_stopping": "off", "learning_rate": 0.1, **given})
    assignment = Assignment(assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=settings)
    state = state or DeviceState()
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state,
        decode(body, manifest),
        federation="f",
        device="pi",
    )


def test_an_update_holds_what_is_shared_alone():
    for method in (FEDPER, LGFEDAVG, FEDREP):
        job = job_of()
        trained = method.train(job)
        assert job.manifest.maskable[0].name == "0.weight"
        assert trained.update.values.size == job.manifest.shared_values == 6 * 9 + 9
        np.testing.assert_array_equal(trained.update.values[:54], trained.state.personal["0.weight"].reshape(-1))


def test_a_round_starts_from_the_shared_part_received_and_ones_own():
    first = FEDPER.train(job_of())
    job = job_of(state=first.state, moved=0.5, learning_rate=1e-30)
    second = FEDPER.train(job)
    for name in HEAD:
        assert second.state.personal[name].tobytes() == first.state.personal[name].tobytes()
    np.testing.assert_array_equal(second.update.values, job.received.values)


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adamw"}])
def test_fedrep_freezes_the_other_part_bit_for_bit(monkeypatch, more):
    seen = []
    trains = local.train_locally

    def watched(model, *args, **kwargs):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        result = trains(model, *args, **kwargs)
        seen.append({name: torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()})
        return result

    monkeypatch.setattr("edge_sdk.training.engine.train_locally", watched)
    job = job_of(**more)
    trained = FEDREP.train(job)
    head_moves, body_moves = seen
    assert head_moves == {name: name not in HEAD for name in head_moves}
    assert body_moves == {name: name in HEAD for name in body_moves}
    assert trained.steps == 2 * 2 * 3
    assert trained.num_examples == 20
    assert trained.flops == 2 * FEDPER.train(job_of(**more)).flops


@pytest.mark.parametrize("method", [FEDPER, LGFEDAVG, FEDREP])
def test_a_device_is_judged_by_its_model_as_a_round_has_left_it(method):
    state = method.train(job_of()).state
    job = dataclasses.replace(job_of(state=state), received=None)
    found = method.evaluate(job)
    set_tensors(job.engine.model, state.personal)
    assert found.personal == evaluate(job.engine.model, job.task, job.task.held_out)
    assert found.global_model is None


@pytest.mark.parametrize("method", [FEDPER, LGFEDAVG, FEDREP])
def test_a_late_device_trains_its_own_part_alone(method):
    job = job_of(moved=0.2, finetune_epochs=3)
    start = get_tensors(job_of().engine.model, job.manifest)
    state = method.adapt(job)
    np.testing.assert_array_equal(
        np.concatenate([state.personal[name].reshape(-1) for name in ("0.weight", "0.bias")]), job.received.values
    )
    assert all(not np.array_equal(state.personal[name], start[name]) for name in HEAD)


def test_no_payload_is_refused():
    with pytest.raises(BundleError):
        FEDPER.train(dataclasses.replace(job_of(), received=None))


def test_parts_are_all_or_nothing_and_each_others_rest():
    manifest = job_of().manifest
    shared, own = only(manifest, shared=True), only(manifest, shared=False)
    assert shared.keys() == own.keys() == {spec.name for spec in manifest.tensors}
    for name in shared:
        assert bool(shared[name].all()) == (name not in HEAD)
        np.testing.assert_array_equal(own[name], ~shared[name])


@pytest.mark.parametrize("method", [FEDPER, LGFEDAVG, FEDREP])
def test_a_last_local_stage_comes_before_judging_and_is_thrown_away(method):
    state = method.train(job_of()).state
    kept = {name: tensor.copy() for name, tensor in state.personal.items()}
    plain = method.evaluate(dataclasses.replace(job_of(state=state), received=None))
    job = dataclasses.replace(job_of(state=state, finetune_epochs=3), received=None)
    found = method.evaluate(job)
    assert (plain.others, plain.flops) == ({}, 0)
    assert found.others == {"untuned": plain.personal}
    assert found.personal.loss < plain.personal.loss, "what it is judged on it has trained on here"
    after = get_tensors(job.engine.model, job.manifest)
    assert all(not np.array_equal(after[name], kept[name]) for name in after), "both parts"
    assert found.flops == training_flops(job.manifest, 3 * 20)
    assert all(np.array_equal(state.personal[name], kept[name]) for name in kept)
    assert method.evaluate(job).personal == found.personal, "the same copy whenever it is asked for"
