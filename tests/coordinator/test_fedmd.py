"""FedMD: what travels are scores on samples that all devices have, and devices learn from their mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import BadArgument
from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedmd import FEDMD
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, load_task
from edge_sdk.tasks.digits import load_images
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from edge_sdk.training.engine import TorchEngine
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import load_method
from sparrow.protocol import bundle
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.manifest import Manifest, TensorSpec, initial_values, own_initial_values
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings
from sparrow.reading.errors import BadOption

DIGITS = load_builtin("digits").manifest
METHOD = load_method("fedmd")


def manifest_of(published, **own):
    return METHOD.manifest(published, FederationSettings(method="fedmd", method_settings=own))


# --- one device ------------------------------------------------------------------------------------------------------


def job_of(mean=None, *, loss=None, state=None, **own):
    """A round of a linear model, which learns nothing of its own samples: its loss there is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    inputs = torch.randn(8, 3)
    own = {"public_samples": 4, "public_epochs": 0, "digest_epochs": 1, "temperature": 2.0, **own}
    manifest = manifest_of(describe(model, inputs[:2], task="t"), **own)
    batches = ArrayBatches(Arrays(inputs.numpy(), (np.arange(8) % 2)), 8)
    task = Task("t", model, loss or (lambda outputs, targets: 0 * outputs.sum()), batches, batches, public=batches)
    values = np.zeros(8, np.float32) if mean is None else np.asarray(mean, np.float32).reshape(-1)
    settings = FederationSettings(
        early_stopping="off", personal_model="last", learning_rate=0.5, local_epochs=1, method_settings=own
    )
    assignment = Assignment(assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=settings)
    state, received = state or DeviceState(), bundle.decode(bundle.encode(manifest, values, None), manifest)
    return Job(assignment, manifest, task, TorchEngine(task, manifest), state, received, federation="f", device="pi")


def softmax(scores):
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def test_a_device_digests_the_mean_scores_and_sends_its_own():
    """One step along T (softmax(z/T) - softmax(z'/T)) / N, of z = Wx + b."""
    mean = np.array([[3, -1], [0, 2], [-2, 1], [1, 1]], np.float32)
    job = job_of(mean)
    weight, bias = own_initial_values(job.manifest, 0, job.engine.read()).values()
    inputs = job.task.public.arrays.take(slice(0, 4))[0]
    slope = 2.0 * (softmax((inputs @ weight.T + bias) / 2) - softmax(mean / 2)) / 4
    trained = FEDMD.train(job)
    personal = trained.state.personal
    np.testing.assert_allclose(personal["0.weight"], weight - 0.5 * slope.T @ inputs, atol=1e-6)
    np.testing.assert_allclose(personal["0.bias"], bias - 0.5 * slope.sum(axis=0), atol=1e-6)
    scores = inputs @ personal["0.weight"].T + personal["0.bias"]
    np.testing.assert_allclose(trained.update.values.reshape(4, 2), scores, atol=1e-6)
    assert trained.counts == {"digested": 4}
    assert trained.flops == training_flops(job.manifest, 4 + 8) + 4 * forward_flops(job.manifest)


def test_the_zeros_before_the_first_mean_are_not_digested():
    job = job_of()
    before = own_initial_values(job.manifest, 0, job.engine.read())
    trained = FEDMD.train(job)
    assert trained.counts == {"digested": 0}
    assert all(np.array_equal(trained.state.personal[name], before[name]) for name in before)


def test_a_device_begins_with_the_public_samples_once():
    loss = nn.CrossEntropyLoss()
    first = FEDMD.train(job_of(loss=loss, public_epochs=3))
    assert first.flops == training_flops(job_of().manifest, 3 * 4 + 8) + 4 * forward_flops(job_of().manifest)
    again = FEDMD.train(job_of(loss=loss, public_epochs=3, state=first.state))
    assert again.flops == training_flops(job_of().manifest, 8) + 4 * forward_flops(job_of().manifest)


# --- the public set --------------------------------------------------------------------------------------------------


def rows(batches):
    return [each.tobytes() for inputs, _ in batches for each in np.asarray(inputs)]


def test_every_device_has_the_public_samples_and_nobody_has_them_for_its_own():
    tasks = [load_task("digits", f"index={i},of=3,public=0.1", device="d", seed=0, batch_size=16) for i in range(3)]
    public = rows(tasks[0].public)
    assert len(public) == 179
    assert all(rows(task.public) == public for task in tasks)
    dealt = [row for task in tasks for part in (task.train, task.validation, task.test) for row in rows(part)]
    assert len(dealt) == 1797 - 179
    images = load_images()
    everything = rows(ArrayBatches(Arrays(images.inputs, images.targets), 64))
    assert sorted([*public, *dealt]) == sorted(everything)
    other = load_task("digits", "index=0,of=3,public=0.1,seed=1", device="d", seed=0, batch_size=16)
    assert rows(other.public) != public


def test_a_file_of_a_devices_own_may_bring_public_samples(tmp_path):
    arrays = {"x_train": np.arange(40, dtype=np.float32).reshape(20, 2), "y_train": np.arange(20) % 2}
    np.savez(tmp_path / "own.npz", **arrays, x_public=np.ones((5, 2), np.float32), y_public=np.zeros(5, int))
    task = load_task("npz", str(tmp_path / "own.npz"), device="d", seed=0, batch_size=4)
    assert len(rows(task.public)) == 5
    assert load_task("digits", "index=0,of=3", device="d", seed=0, batch_size=16).public is None


@pytest.mark.parametrize("public", ["1", "-0.1"])
def test_a_share_that_is_none_is_refused(public):
    with pytest.raises(BadOption, match="from 0 to below 1"):
        load_task("digits", f"index=0,of=3,public={public}", device="d", seed=0, batch_size=16)


# --- the server ------------------------------------------------------------------------------------------------------


def test_scores_are_all_that_is_shared():
    manifest = manifest_of(DIGITS, public_samples=7)
    assert [(spec.name, spec.shape) for spec in manifest.shared] == [("public.scores", (7, 10))]
    assert [spec.name for spec in manifest.kept] == [spec.name for spec in DIGITS.kept], "of the model nothing else is"
    assert manifest.maskable == ()
    assert not initial_values(manifest, 0)["public.scores"].any()
    assert Manifest.model_validate_json(manifest.text) == manifest
    assert "outputs" not in DIGITS.text


def test_what_cannot_work_is_refused():
    with pytest.raises(BadContent, match=r"shape \[10, 4\]"):
        manifest_of(DIGITS.model_copy(update={"output_shape": (10, 4)}))
    assert "set secure_range to 16" in METHOD.why_not_secure(FederationSettings(method="fedmd"))
    assert METHOD.why_not_secure(FederationSettings(method="fedmd", secure_range=16.0)) is None
    with pytest.raises(ValueError, match="an output is shared"):
        DIGITS.with_outputs([TensorSpec(name="scores", shape=(2,), policy="personal")])
    with pytest.raises(ValueError, match=r"'out\.weight' occurs twice"):
        DIGITS.with_outputs([TensorSpec(name="out.weight", shape=(2,))])


# --- whole federations -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_scores_travel_and_come_back_as_their_mean(coordinator):
    coordinator.create("fedmd", rounds=3, method_settings={"public_samples": 20})
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    manifest = coordinator.served.manifest("f")
    up, down = (
        [[bundle.decode(body, manifest).values for body in bodies[:3]] for bodies in found]
        for found in (
            [session.transport.sent for session in sessions],
            [session.transport.received for session in sessions],
        )
    )
    assert {each.size for bodies in (*up, *down) for each in bodies} == {20 * 10}, "and nothing else"
    shares = np.array([session.task.train.num_examples for session in sessions], np.float64)
    for number in (0, 1):
        mean = (shares @ np.array([bodies[number] for bodies in up], np.float64) / shares.sum()).astype(np.float32)
        assert all(bodies[number + 1].tobytes() == mean.tobytes() for bodies in down)
    assert not any(bodies[0].any() for bodies in down)
    assert [record.counts["digested"] for record in coordinator.records.rounds("f")] == [0, 40, 40]
    weights = {session.personal["fc1.weight"].tobytes() for session in sessions}
    assert len(weights) == 2
    for session in sessions:
        wire = session.transport
        for name, tensor in session.personal.items():
            if tensor.size >= 8:
                assert not any(np.ravel(tensor)[:8].tobytes() in body for body in wire.sent), name


@pytest.mark.integration
def test_a_device_without_enough_public_samples_is_told_before_it_enrols(coordinator):
    coordinator.create("fedmd", rounds=1, method_settings={"public_samples": 1000})
    with pytest.raises(BadArgument, match=r"1000 .*\b179\b.*public=0\.1"):
        coordinator.open_device("a")
    assert coordinator.info().devices == 0


@pytest.mark.integration
def test_a_late_device_learns_from_the_last_mean(coordinator):
    coordinator.create("fedmd", rounds=2, finetune_epochs=1)
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    late = coordinator.open_device("c")
    assert [[each.kind.value for each in worked] for worked in coordinator.play(late)] == [["adapt"]]
    assert late.personal is not None
