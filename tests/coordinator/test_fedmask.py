"""FedMask: weights stay, bits travel, and the server's mean is where at least two devices have a weight in common."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.methods import DeviceState, Job
from edge_sdk.methods.fedmask import FEDMASK, Masks
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import get_tensors
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import Situation, load_method
from sparrow.protocol import bundle
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.parts import Expected
from sparrow.protocol.settings import FederationSettings

DIGITS = load_builtin("digits").manifest
MASKED = ["fc1.weight", "out.weight"]
WEIGHTS = sum(spec.size for spec in DIGITS.shared if spec.name in MASKED)
METHOD = load_method("fedmask")


def digest(tensors):
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in MASKED)).hexdigest()


def manifest_of(published, **own):
    return METHOD.manifest(published, FederationSettings(method="fedmask", method_settings=own))


SIGNS = {"signs": Expected("sign", WEIGHTS)}


# --- one device ------------------------------------------------------------------------------------------------------


def job_of(*, state=None, signs=None, first_score=0.5, density=0.5, known=False, **given):
    """A round of one batch; known: of a device that has the weights already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randn(8, 3)
    manifest = manifest_of(describe(model, inputs[:2], task="t"))
    arrays = Arrays(inputs, torch.arange(8) % 2)
    task = classification("t", model, arrays, arrays, None, batch_size=8)
    tensors = get_tensors(model, manifest)
    mask = BlockMask(np.zeros(2, bool)) if known else None
    signs = np.zeros(20, np.int8) if signs is None else np.array(signs, np.int8)
    body = bundle.encode(manifest, pack(manifest, tensors, mask), mask, parts={"signs": signs})
    own = {"first_score": first_score, "density": density}
    settings = FederationSettings(
        **{"early_stopping": "off", "learning_rate": 0.7, "local_epochs": 1, "method_settings": own, **given}
    )
    assignment = Assignment(
        assignment_id="a", kind="train", round=3, deadline_seconds=9, settings=settings, model_sha256="f" * 64
    )
    state, received = state or DeviceState(), bundle.decode(body, manifest, parts=SIGNS)
    return Job(assignment, manifest, task, TorchEngine(task, manifest), state, received, federation="f", device="pi")


def test_scores_move_by_the_straight_through_gradient():
    """As autograd has it of ŵ = w (b + σ(s) - sg(σ(s))), of which b is all that the network sees."""
    job = job_of(first_score=0.3)
    first, second = (get_tensors(job.engine.model, job.manifest)[name].copy() for name in ("0.weight", "2.weight"))
    biases = [job.engine.model[place].bias.detach().clone() for place in (0, 2)]
    scores = [torch.full(weight.shape, 0.3, requires_grad=True) for weight in (first, second)]
    seen = [
        torch.from_numpy(weight) * ((score >= 0).float() + torch.sigmoid(score) - torch.sigmoid(score).detach())
        for weight, score in zip((first, second), scores, strict=True)
    ]
    (inputs, targets), *others = job.task.validation
    assert not others
    inputs, targets = torch.as_tensor(inputs), torch.as_tensor(targets)
    outputs = torch.tanh(inputs @ seen[0].T + biases[0]) @ seen[1].T + biases[1]
    F.cross_entropy(outputs, targets).backward()
    wanted = [(score - 0.7 * score.grad).detach().numpy() for score in scores]
    assert all(np.abs(score.grad.numpy()).max() > 1e-4 for score in scores)
    trained = FEDMASK.train(job)
    found = trained.state.own["scores"]
    np.testing.assert_allclose(found, np.concatenate([each.reshape(-1) for each in wanted]), rtol=0, atol=1e-6)


def test_a_device_prunes_once_to_the_density_and_sends_what_it_keeps():
    trained = FEDMASK.train(job_of())
    assert trained.update.values.size == 0
    assert [np.count_nonzero(trained.update.parts["signs"][part]) for part in (slice(12), slice(12, 20))] == [6, 4]
    assert trained.counts["pruned"] == 10
    scores, kept = trained.state.own["scores"], trained.update.parts["signs"] != 0
    for part in (slice(12), slice(12, 20)):
        assert scores[part][kept[part]].min() >= scores[part][~kept[part]].max(), "the largest scores stay"
    signs = np.where(np.arange(20) % 3, 0, -1)
    again = FEDMASK.train(job_of(state=trained.state, known=True, density=0.1, signs=signs))
    assert again.counts["pruned"] == 0
    np.testing.assert_array_equal(again.update.parts["signs"] != 0, kept)
    assert set(again.update.parts["signs"][kept]) == {-1, 1}, "so that bits turn"
    np.testing.assert_array_equal(again.state.own["scores"][~kept], scores[~kept])
    np.testing.assert_array_equal(again.state.own["weights"], trained.state.own["weights"])
    personal = np.concatenate([again.state.personal[name].reshape(-1) for name in ("0.weight", "2.weight")])
    np.testing.assert_array_equal(personal, np.where(again.update.parts["signs"] > 0, again.state.own["weights"], 0))


def test_the_servers_sign_is_taken_with_the_magnitude_that_was_learned():
    weights = {"w": np.ones((1, 6), np.float32)}
    kept = np.array([[True, True, True, True, True, False]])
    masks = Masks(weights, {"w": np.array([[0.5, -0.25, 0.125, -2, 0, 3]], np.float32)}, {"w": kept})
    assert masks.take(np.array([-1, 1, 0, -1, -1, -1], np.int8)) == 3
    np.testing.assert_array_equal(masks.bits("w"), [[False, True, True, False, False, False]])
    np.testing.assert_allclose(masks.scores["w"], [[-0.5, 0.25, 0.125, -2, 0, 3]], atol=1e-6)


def test_the_bits_received_are_where_a_round_starts():
    first = FEDMASK.train(job_of(density=1.0, learning_rate=1e-6))
    assert set(first.update.parts["signs"]) == {1}
    signs = np.where(np.arange(20) % 2, -1, 0)
    second = FEDMASK.train(job_of(state=first.state, signs=signs, known=True, learning_rate=1e-6))
    np.testing.assert_array_equal(second.update.parts["signs"], np.where(np.arange(20) % 2, -1, 1))
    assert second.counts["bits_taken"] == 10


def test_a_device_without_weights_refuses_a_payload_without_them():
    with pytest.raises(BundleError, match="weights"):
        FEDMASK.train(job_of(known=True))


# --- the server ------------------------------------------------------------------------------------------------------


def test_bits_are_averaged_over_two_devices_or_keep_their_mean():
    manifest = manifest_of(DIGITS)
    situation = Situation(manifest, FederationSettings(method="fedmask"), 1)
    model = METHOD.start(initial_values(manifest, 0), situation)
    for round_, given, wanted, overlapping in (
        #        weight of one sample      of three             of two
        (1, ([1, 1, 1, -1, 0, 0], [0, 1, -1, -1, 1, 0], [0, 0, 1, 1, 0, 0]), [0, 1, 1, -1, 0, 0], 3),
        (2, ([-1, -1, 0, 1, 1, 0], [0, 0, -1, 0, -1, 0], [-1, 0, 0, 0, 0, 0]), [-1, 1, 1, -1, -1, 0], 2),
    ):
        sums = METHOD.aggregation.sums(model, situation)
        for signs, weight in zip(given, (1, 3, 2), strict=True):
            sums.fold_in_place(np.zeros(0, np.float32), BlockMask(np.zeros(2, bool)), weight)
            sums.fold_signs_in_place(np.pad(np.array(signs, np.int8), (0, WEIGHTS - 6)), weight)
        closed = METHOD.aggregation.close(model, sums, situation)
        np.testing.assert_array_equal(
            METHOD.payload_parts(closed, situation)["signs"], np.pad(wanted, (0, WEIGHTS - 6)), f"{round_}"
        )
        assert closed.notes == {"overlapping": overlapping}
        assert closed.tensors is model.tensors
        model = closed


@pytest.mark.parametrize("layers", [1, 2, 3, 50])
def test_the_last_layers_are_masked_and_all_else_is_private(layers):
    manifest = manifest_of(DIGITS, masked_layers=layers)
    wanted = [spec.name for spec in DIGITS.maskable][-layers:]
    assert [spec.name for spec in manifest.shared] == wanted == [spec.name for spec in manifest.maskable]
    assert all(len(manifest.blocks[name]) == 1 for name in wanted)


def test_what_cannot_work_is_refused():
    with pytest.raises(BadContent, match="no layer of the model can be masked"):
        manifest_of(DIGITS.model_copy(update={"layers": ()}))
    manifest = manifest_of(DIGITS)
    settings = FederationSettings(method="fedmask", outlier_mads=3.0)
    with pytest.raises(BadContent, match=r"^outlier_mads: "):
        METHOD.start(initial_values(manifest, 0), Situation(manifest, settings))
    with pytest.raises(BadContent, match="weights are fixed"):
        METHOD.masks.check(None, BlockMask(np.ones(2, bool)), Situation(manifest, settings))
    assert "signs" in METHOD.why_not_secure(settings)


# --- whole federations -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_weights_never_move_and_a_round_sends_two_bits_of_each_at_most(coordinator):
    coordinator.create("fedmask", rounds=4, method_settings={"density": 0.25, "first_score": 0.001})
    start = initial_values(DIGITS, 0)
    sessions = [coordinator.open_device(name) for name in "ab"]
    coordinator.play(*sessions)
    manifest = coordinator.served.manifest("f")
    assert digest(coordinator.model().tensors) == digest(start)
    whole = sum(start[name].size for name in MASKED)
    kept = sum(round(0.25 * start[name].size) for name in MASKED)
    overlap = np.ones(whole, bool)
    for session in sessions:
        wire = session.transport
        down = [bundle.decode(body, manifest, parts=SIGNS) for body in wire.received]
        up = [bundle.decode(body, manifest, parts=SIGNS) for body in wire.sent[:4]]
        assert [each.values.size for each in up] == [0] * 4
        assert {each.sizes["signs"] for each in up} == {4 + whole // 8 + -(-kept // 8)}
        assert max(len(body) for body in wire.sent[:4]) < 0.25 * whole + 1300, "two bits of each, and a report"
        # The records know the models that rounds have made, not the first one: after it, weights come once more.
        assert [each.values.size for each in down] == [whole, whole, 0, 0]
        assert not down[0].parts["signs"].any()
        supports = {(each.parts["signs"] != 0).tobytes() for each in up}
        assert len(supports) == 1, "pruned once"
        overlap &= up[0].parts["signs"] != 0
        own = session.folder.own
        np.testing.assert_array_equal(own["weights"], pack(manifest, start, None))
        personal = pack(manifest, session.personal, None)
        np.testing.assert_array_equal(personal, np.where(up[-1].parts["signs"] > 0, own["weights"], 0))
        for spec in DIGITS.shared:
            if spec.trainable and spec.name not in MASKED:
                assert session.personal[spec.name].tobytes() == start[spec.name].tobytes()
        np.testing.assert_array_equal(down[-1].parts["signs"] != 0, down[1].parts["signs"] != 0)
    assert 0 < np.count_nonzero(overlap) < kept
    np.testing.assert_array_equal(coordinator.model().own["bits"] != 0, overlap)
    notes = [record.notes["overlapping"] for record in coordinator.records.rounds("f")]
    assert notes == [np.count_nonzero(overlap)] * 4


@pytest.mark.integration
@pytest.mark.parametrize("signs", [np.zeros(0, np.int8), np.ones(WEIGHTS - 1, np.int8)])
def test_an_update_without_a_sign_of_each_weight_is_refused(coordinator, monkeypatch, caplog, signs):
    coordinator.create("fedmask", rounds=1, min_devices=1)
    session = coordinator.open_device("a")
    monkeypatch.setattr("edge_sdk.methods.fedmask.Masks.signs", lambda masks: signs)
    coordinator.rounds.advance()
    session.step()
    assert f"{WEIGHTS} signs" in caplog.text


@pytest.mark.integration
def test_signs_are_refused_where_a_method_has_none(coordinator, monkeypatch, caplog):
    coordinator.create("fedavg", rounds=1, min_devices=1)
    session = coordinator.open_device("a")
    usual = bundle.encode
    monkeypatch.setattr(
        "sparrow.protocol.bundle.encode",
        lambda *given, **named: usual(*given, **{**named, "parts": {"signs": np.ones(3, np.int8)}}),
    )
    coordinator.rounds.advance()
    session.step()
    assert "'signs' is not a part of this message" in caplog.text


@pytest.mark.integration
def test_a_late_device_makes_a_mask_of_its_own(coordinator):
    coordinator.create("fedmask", rounds=2, finetune_epochs=1)
    coordinator.play(coordinator.open_device("a"), coordinator.open_device("b"))
    late = coordinator.open_device("c")
    assert [[each.kind.value for each in worked] for worked in coordinator.play(late)] == [["adapt"]]
    start = initial_values(DIGITS, 0)
    for name in MASKED:
        on = late.personal[name] != 0
        np.testing.assert_array_equal(late.personal[name][on], start[name][on])
        assert 0 < np.count_nonzero(on) <= 0.5 * on.size
