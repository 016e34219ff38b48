"""FedAvg's, FedProx's and Local's device halves; whole federations of them are in tests/coordinator/test_methods.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.methods import DeviceState, Job, UnknownWork, load_method
from edge_sdk.methods.fedavg import FEDAVG
from edge_sdk.methods.fedprox import FEDPROX
from edge_sdk.methods.fedspu import FEDSPU
from edge_sdk.methods.local import LOCAL
from edge_sdk.methods.merging import mixed, whole_model
from edge_sdk.methods.rounds import fine_tune
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, build_seeded
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.local import as_tensor, evaluate, get_tensors, set_tensors
from sparrow.protocol.bundle import decode, encode
from sparrow.protocol.errors import BundleError, ProtocolError
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.masks import NeuronDraw, draw_neurons, pack
from sparrow.protocol.messages import Assignment, Work
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import layer_counts, random_mask


@pytest.fixture(scope="module")
def manifest():
    return describe(DigitsNet(), torch.zeros(1, 1, 8, 8), task="digits")


def job_of(manifest, *, kind="train", state=None, number=1, whole=True, work=None, mask=None, test=True, **settings):
    """A round over random images; the payload holds the weights that follow from seed 7, another than the model's."""
    generator = torch.Generator().manual_seed(0)
    model = build_seeded(DigitsNet, 0)
    arrays, other = (
        Arrays(torch.rand(size, 1, 8, 8, generator=generator), torch.arange(size) % 10) for size in (30, 20)
    )
    task = classification("digits", model, arrays, other, arrays if test else None, batch_size=8)
    settings = {"local_epochs": 2, "early_stopping": "off", **settings}
    assignment = Assignment(
        assignment_id="a",
        kind=kind,
        round=number,
        deadline_seconds=60,
        settings=FederationSettings(**settings),
        work=work,
    )
    values = pack(manifest, get_tensors(build_seeded(DigitsNet, 7), manifest), mask)
    received = decode(encode(manifest, values, mask), manifest) if whole else None
    return Job(
        assignment,
        manifest,
        task,
        TorchEngine(task, manifest),
        state or DeviceState(),
        received,
        federation="f",
        device="pi",
    )


def received_by(job):
    return {spec.name: values for spec, values in zip(job.manifest.shared, _parts(job), strict=True)}


def _parts(job):
    ends = np.cumsum([spec.size for spec in job.manifest.shared])[:-1]
    return [
        part.reshape(spec.shape)
        for part, spec in zip(np.split(job.received.values, ends), job.manifest.shared, strict=True)
    ]


def same(one, other):
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


# --- FedAvg ------------------------------------------------------------------------------------------------------


def test_a_round_starts_from_what_is_received_sends_everything_and_keeps_nothing(manifest):
    job = job_of(manifest)
    trained = FEDAVG.train(job)
    assert trained.state.personal is None
    assert (trained.update.mask, trained.update.draw) == (None, None)
    again = FEDAVG.train(job_of(manifest, state=DeviceState({"left": np.zeros(1)}, {})))
    np.testing.assert_array_equal(trained.update.values, again.update.values)
    moved = np.abs(trained.update.values - job.received.values)
    assert 0 < np.median(moved) < 0.05
    assert trained.flops == training_flops(manifest, 60)


def test_a_round_is_fedspus_of_a_device_that_trains_everything(manifest):
    whole = Work(key="0" * 32, ratio=1.0)
    settings = {"number": 3, "learning_rate": 0.1, "early_stopping": "paper", "momentum": 0.5}
    fedavg = FEDAVG.train(job_of(manifest, **settings))
    fedspu = FEDSPU.train(job_of(manifest, work=whole, **settings))
    np.testing.assert_array_equal(fedavg.update.values, fedspu.update.values)
    assert fedavg.state.memory == fedspu.state.memory
    assert fedavg.flops == fedspu.flops


@pytest.mark.parametrize("method", [FEDAVG, FEDPROX, LOCAL, FEDSPU], ids=lambda method: type(method).__name__)
def test_other_devices_and_rounds_draw_other_batches(manifest, method):
    job = job_of(manifest, method_settings={"proximal_weight": 0.1})
    work = method.personalise if method is LOCAL else method.train

    def loss(**changes):
        number = changes.pop("number", 1)
        assignment = job.assignment.model_copy(update={"round": number})
        return work(dataclasses.replace(job, assignment=assignment, **changes)).train_loss

    assert loss() == loss()
    assert len({loss(), loss(device="other"), loss(number=2), loss(federation="g")}) == 4


@pytest.mark.parametrize("received", ["nothing", "a part"])
def test_a_payload_that_is_not_the_whole_model_is_refused(manifest, received):
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.4)) if received == "a part" else None
    job = job_of(manifest, whole=received != "nothing", mask=mask)
    for work in (FEDAVG.train, FEDAVG.evaluate, FEDAVG.adapt, LOCAL.personalise, LOCAL.adapt):
        with pytest.raises(BundleError):
            work(job)


def test_evaluation_judges_the_global_model_alone_unless_it_is_fine_tuned(manifest):
    job = job_of(manifest, kind="evaluate")
    found = FEDAVG.evaluate(job)
    set_tensors(job.engine.model, received_by(job))
    assert found.personal is None
    assert found.global_model == evaluate(job.engine.model, job.task, job.task.test)
    assert found.validation == evaluate(job.engine.model, job.task, job.task.validation)
    assert found.validation.num_examples != found.global_model.num_examples


def test_a_fine_tuned_copy_is_judged_and_forgotten(manifest):
    state = DeviceState({"kept": np.ones(2)}, {"last_loss": 1.0, "increases": 0})
    settings = {"finetune_epochs": 8, "learning_rate": 0.1, "personal_model": "last"}
    job = job_of(manifest, kind="evaluate", state=state, number=4, **settings)
    found = FEDAVG.evaluate(job)
    assert state.personal["kept"].tolist() == [1, 1]
    assert state.memory == {"last_loss": 1.0, "increases": 0}
    assert found.global_model == FEDAVG.evaluate(job_of(manifest, kind="evaluate")).global_model
    assert found.personal.loss < found.global_model.loss, "test data are the training data here"
    assert found.flops == training_flops(manifest, 8 * 30), "eight epochs"
    assert FEDAVG.evaluate(job_of(manifest, kind="evaluate")).flops == 0, "nothing was trained"
    assert FEDAVG.evaluate(job) == found
    adapted = FEDAVG.adapt(job_of(manifest, kind="adapt", number=4, **settings))
    set_tensors(job.engine.model, adapted.personal)
    assert evaluate(job.engine.model, job.task, job.task.test) == found.personal
    assert evaluate(job.engine.model, job.task, job.task.validation) == found.validation


@pytest.mark.parametrize(("rate", "chosen"), [(0.05, 0.0), (3.0, 0.75), (100.0, 1.0)])
def test_of_copy_global_model_and_mixtures_the_one_is_kept_that_validation_data_prefer(manifest, rate, chosen):
    """Validation data are the training data here; large rates spoil the copy."""
    job = job_of(manifest, kind="evaluate", number=4, finetune_epochs=8, learning_rate=rate, clip=5.0)
    job = dataclasses.replace(job, task=dataclasses.replace(job.task, validation=job.task.train))
    set_tensors(job.engine.model, received_by(job))
    fine_tune(job, purpose="finetune")
    copy, losses = get_tensors(job.engine.model, manifest), {}
    models = {share: mixed(copy, received_by(job), share) for share in (0.0, 0.25, 0.5, 0.75)} | {1.0: received_by(job)}
    for share, model in models.items():
        set_tensors(job.engine.model, model)
        losses[share] = evaluate(job.engine.model, job.task, job.task.validation).loss
    assert min(losses, key=losses.get) == chosen

    found, kept = FEDAVG.evaluate(job), FEDAVG.adapt(job).personal
    assert all(np.allclose(kept[name], tensor, atol=1e-6) for name, tensor in models[chosen].items())
    assert found.validation.loss == pytest.approx(losses[chosen], rel=1e-5)
    assert ("copy" in found.others) == (chosen != 0.0), "the copy is reported where it is not what is kept"
    assert (found.personal == found.global_model) == (chosen == 1.0)


def test_fine_tuning_has_a_learning_rate_of_its_own(manifest):
    def moved(**settings):
        settings |= {"finetune_epochs": 2, "personal_model": "last"}
        job = job_of(manifest, kind="adapt", number=4, **settings)
        received, personal = received_by(job), FEDAVG.adapt(job).personal
        return max(np.abs(personal[name] - received[name]).max() for name, _ in job.engine.model.named_parameters())

    assert moved(learning_rate=0.1, finetune_learning_rate=1e-9) < 1e-6
    own = moved(learning_rate=0.1, learning_rate_decay=0.5, finetune_learning_rate=0.2)
    assert own == moved(learning_rate=0.2), "it does not decay"
    assert own > moved(learning_rate=0.1)


@pytest.mark.parametrize("sparse", [False, True], ids=["FedAvg+FT+", "FedDST+FT+"])
def test_a_fine_tuned_copy_and_the_global_model_are_chosen_between_sample_by_sample(manifest, sparse):
    """DM-PFL+'s rule, computed anew: personal where H_c - (1 - Sim) BE_c < H_g - (1 - Sim) BE_g."""
    mask = random_mask(manifest, layer_counts(manifest, 0.5), 0) if sparse else None
    settings = {"finetune_epochs": 4, "learning_rate": 0.1, "personal_model": "last"}
    job = job_of(manifest, kind="evaluate", mask=mask, **settings)
    method = load_method("feddst" if sparse else "fedavg")
    found = method.evaluate(job)
    adapted = method.adapt(job_of(manifest, kind="adapt", mask=mask, **settings)).personal
    scores, bases = [], []
    for tensors in (adapted, whole_model(manifest, job.received)):
        set_tensors(job.engine.model, tensors)
        job.engine.model.eval()
        with torch.no_grad():
            scores.append(torch.cat([job.engine.model(as_tensor(inputs)) for inputs, _ in job.task.test]))
            bases.append(
                torch.cat([_entropy(job.engine.model(as_tensor(inputs))) for inputs, _ in job.task.train]).mean()
            )
    doubt = 1 - F.cosine_similarity(*scores)
    personal, whole = (_entropy(each) - doubt * base for each, base in zip(scores, bases, strict=True))
    assert 0 < int((personal < whole).sum()) <= 30
    chosen = torch.where((personal < whole)[:, None], *scores)
    right = int((chosen.argmax(1) == torch.cat([as_tensor(targets) for _, targets in job.task.test])).sum())
    assert found.others.keys() == {"adaptive"}
    assert found.others["adaptive"].accuracy == right / 30
    if sparse:
        assert all(not adapted[name][~exists].any() for name, exists in mask.exists.items())
    assert found.flops == training_flops(manifest, 4 * 30, weight_gradients=mask)


def _entropy(scores):
    return torch.distributions.Categorical(logits=scores).entropy()


def test_without_fine_tuning_there_is_one_model_and_nothing_else_is_computed(manifest):
    found = FEDAVG.evaluate(job_of(manifest, kind="evaluate"))
    assert (found.others, found.flops) == ({}, 0)


def test_without_test_data_validation_serves_for_both(manifest):
    found = FEDAVG.evaluate(job_of(manifest, kind="evaluate", test=False))
    assert found.validation == found.global_model


def test_adapting_without_fine_tuning_takes_the_model_as_it_is(manifest):
    job = job_of(manifest, kind="adapt")
    state = FEDAVG.adapt(job)
    assert same(received_by(job), {spec.name: state.personal[spec.name] for spec in manifest.shared})
    assert all(tensor.flags.writeable and tensor.flags.owndata for tensor in state.personal.values())


def test_early_stopping_keeps_its_notes_without_a_model(manifest):
    settings = {"early_stopping": "paper", "stop_weight": 0.0, "learning_rate": 1e-6}
    first = FEDAVG.train(job_of(manifest, **settings))
    assert first.state.memory == {"last_loss": first.stop_loss, "increases": 0}
    lower = DeviceState(None, {"last_loss": first.stop_loss / 2, "increases": 0, "mine": 5})
    second = FEDAVG.train(job_of(manifest, state=lower, **settings))
    assert second.stopped
    assert second.state.memory["mine"] == 5, "another's notes stay"


# --- FedProx -----------------------------------------------------------------------------------------------------


class Weight(nn.Module):
    """y = w·x."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x


WEIGHT = Manifest(task="w", input_shape=(1,), output_shape=(1,), tensors=(TensorSpec(name="w", shape=(1,)),))


def test_two_steps_by_hand():
    """F = ½(w - 3)², w^t = 1, η = 0.1, μ = 0.5: 1 + 0.1·2 = 1.2; then 1.2 - 0.1(1.2 - 3 + 0.5·0.2) = 1.37."""
    batches = [(torch.ones(1, 1), torch.full((1, 1), 3.0))]
    model = Weight()
    task = Task("w", model, lambda y, target: 0.5 * F.mse_loss(y, target), batches, batches, classification=False)
    settings = FederationSettings(
        method="fedprox",
        learning_rate=0.1,
        local_steps=2,
        early_stopping="off",
        method_settings={"proximal_weight": 0.5},
    )
    assignment = Assignment(assignment_id="a", kind="train", round=1, deadline_seconds=9, settings=settings)
    received = decode(encode(WEIGHT, np.ones(1, dtype=np.float32), None), WEIGHT)
    trained = FEDPROX.train(Job(assignment, WEIGHT, task, TorchEngine(task, WEIGHT), DeviceState(), received))
    np.testing.assert_allclose(trained.update.values, [1.37], rtol=1e-6)
    assert trained.train_loss == pytest.approx((2.0 + 0.5 * 1.8**2) / 2), "the loss is F's, without the pull"


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}, {"optimizer": "adam"}])
def test_a_weight_of_zero_is_fedavg_bit_for_bit(manifest, optimizer):
    fedavg = FEDAVG.train(job_of(manifest, **optimizer))
    fedprox = FEDPROX.train(job_of(manifest, method_settings={"proximal_weight": 0}, **optimizer))
    np.testing.assert_array_equal(fedprox.update.values, fedavg.update.values)
    pulled = FEDPROX.train(job_of(manifest, method_settings={"proximal_weight": 1.0}, **optimizer))
    assert not np.array_equal(pulled.update.values, fedavg.update.values)


# --- Local -------------------------------------------------------------------------------------------------------


def test_local_training_starts_from_what_is_received_and_goes_on_from_its_own(manifest):
    first = LOCAL.personalise(job_of(manifest, kind="personalise"))
    assert first.update is None
    np.testing.assert_array_equal(
        pack(manifest, first.state.personal, None), FEDAVG.train(job_of(manifest)).update.values
    )
    second = LOCAL.personalise(job_of(manifest, kind="personalise", state=first.state, number=2, whole=False))
    sent_again = LOCAL.personalise(job_of(manifest, kind="personalise", state=first.state, number=2))
    assert same(second.state.personal, sent_again.state.personal), "a payload does not move a model that there is"
    assert second.train_loss < first.train_loss
    assert not same(first.state.personal, second.state.personal)


def test_local_evaluation_has_no_global_model(manifest):
    job = job_of(manifest, kind="evaluate", whole=False)
    assert LOCAL.evaluate(job) == type(LOCAL.evaluate(job))(None, None, None)
    trained = LOCAL.personalise(job_of(manifest, kind="personalise"))
    found = LOCAL.evaluate(job_of(manifest, kind="evaluate", state=trained.state, whole=False))
    assert found.global_model is None
    assert (found.personal.num_examples, found.validation.num_examples) == (30, 20)


def test_a_late_device_trains_for_a_round_or_the_set_epochs(manifest):
    def steps(**settings):
        done = []
        job = job_of(manifest, kind="adapt", **settings)
        LOCAL.adapt(dataclasses.replace(job, progress=lambda step, total, loss: done.append(step)))
        return len(done)

    assert steps() == 2 * 4
    assert steps(finetune_epochs=5) == 5 * 4


# --- all ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), [("fedavg", FEDAVG), ("fedprox", FEDPROX), ("local", LOCAL)])
def test_the_methods_are_found_by_their_names(name, method):
    assert load_method(name) is method


def test_work_that_a_method_does_not_have_is_a_reason_to_hand_it_back(manifest):
    assert issubclass(UnknownWork, ProtocolError)
    for method, work in ((FEDAVG, "personalise"), (FEDAVG, "prepare"), (LOCAL, "train")):
        with pytest.raises(UnknownWork, match=r"kind train\b"):
            getattr(method, work)(job_of(manifest))
