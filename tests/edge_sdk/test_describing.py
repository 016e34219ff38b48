"""Models that nobody traces: what is found by running them once, and whole federations of them."""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.opening import check_model
from edge_sdk.errors import BadArgument
from edge_sdk.join import JoinOptions, join
from edge_sdk.methods import load_method
from edge_sdk.methods.describing import describe_for
from edge_sdk.predict import Predictor
from edge_sdk.publish import publish
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.graph import UnsupportedLayer
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import Seeded, Task, build_seeded
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.main import create_app
from sparrow.coordinator.methods import load_method as coordinator_half
from sparrow.coordinator.settings import Settings
from sparrow.protocol import checkpoint
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.flops import forward_flops
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation import in_process as inprocess

from ..kinds import chosen

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

WORDS, CLASSES = 30, 3


class Recurrent(nn.Module):
    """Words as numbers of any type, one after the other."""

    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.words, self.reader, self.out = nn.Embedding(WORDS, 6), kind(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, words, mask=None):
        return self.out(self.reader(self.words(words.long()))[0][:, -1])


class Tied(nn.Module):
    """The next word, scored by the table that the words were looked up in."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.scores = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)
        self.scores.weight = self.words.weight

    def forward(self, words):
        return self.scores(torch.tanh(self.mix(self.words(words).mean(1))))


class Odd(nn.Module):
    """What a trace does not take, or no layer owns."""

    def __init__(self):
        super().__init__()
        self.norm, self.body, self.out = nn.BatchNorm1d(6), nn.Linear(16 + 4, 8), nn.Linear(8, CLASSES)
        self.positions, self.scale = nn.Parameter(torch.ones(16)), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.ones(6))

    def forward(self, x, mask=None, *, temperature=1.0):
        sizes = F.one_hot(x[:, 0].abs().int().clamp(max=3).long(), 4).float()
        wide = F.interpolate(self.norm(x + self.offset)[:, None], size=16)[:, 0] + self.positions
        hidden = torch.relu(self.body(torch.cat([wide, sizes], 1)))
        return F.linear(hidden, self.out.weight, self.out.bias) * self.scale / temperature


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.into, self.encoder, self.out = nn.Linear(4, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(self.encoder(self.into(x)).mean(1))


class Last(nn.Module):
    def forward(self, outputs):
        return outputs[0]


def words_of(samples=60):
    return torch.randint(0, WORDS, (samples, 7), generator=torch.Generator().manual_seed(1))


def task_of(model, inputs, classes=CLASSES):
    targets = inputs.flatten(1).sum(1).long().abs() % classes
    batches = list(zip(inputs.split(20), targets.split(20), strict=True))
    return Task("own", model, F.cross_entropy, batches, batches[:1])


@pytest.fixture
def client(tmp_path):
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "server", default_task=""))) as client:
        yield client


def play(client, folder, task, **settings):
    """A federation of one device, two rounds; what ``join`` returns."""
    settings = {"rounds": 2, "min_devices": 1, "cohort": 1, "finetune_epochs": 1, "early_stopping": "off", **settings}
    publish(inprocess.ADDRESS, "own", task, client=client, **settings)
    return join(
        inprocess.ADDRESS,
        task,
        federation="own",
        client=client,
        name="pi",
        state_dir=folder,
        options=JoinOptions(budget=1.0),
        quiet=True,
        export=folder / "m.onnx",
    )


@pytest.mark.parametrize(
    ("model", "inputs", "classes"),
    [
        (Recurrent(), words_of().float(), CLASSES),
        (Recurrent(nn.LSTM), words_of(), CLASSES),
        (Tied(), words_of(), WORDS),
        (Odd(), torch.randn(60, 6), CLASSES),
    ],
    ids=["gru", "lstm", "tied", "odd"],
)
def test_models_that_cannot_be_traced_train_and_predict_as_onnx(client, tmp_path, model, inputs, classes):
    result = play(client, tmp_path / "pi", task_of(model, inputs, classes), method="fedavg")
    assert (result.rounds, result.adapted) == (2, True)
    assert result.export.max_difference < 1e-4
    with torch.no_grad():
        for few in (1, 3):  # the batch is free
            wanted = model.eval()(inputs[:few]).numpy()
            found = Predictor(result.export.path)(inputs[:few].numpy())
            np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    chosen(["fedprox", "ditto", "apfl", "fedem", "pfedme", "perfedavg", "fedper", "fedrep", "lgfedavg", "local"]),
)
def test_methods_of_whole_tensors_take_a_recurrent_model(client, tmp_path, method):
    result = play(client, tmp_path / "pi", task_of(Recurrent(), words_of()), method=method)
    assert result.rounds == 2
    assert result.export.max_difference < 1e-4


@pytest.mark.parametrize("method", chosen(["fedsgc", "feddst", "votedst", "grasp", "dmpfl", "prunefl", "pfedgate"]))
@pytest.mark.parametrize(("model", "classes"), [(Recurrent(), CLASSES), (Tied(), WORDS)], ids=["gru", "tied"])
def test_methods_that_prune_weights_leave_alone_what_no_layer_owns(client, tmp_path, method, model, classes):
    often = {"adjust_interval": 1}
    rules = {"prunefl": {"prepare_rounds": 2}, "fedsgc": often, "feddst": often, "votedst": often}
    settings = {"method": method, "method_settings": rules.get(method, {}), "rounds": 8}
    result = play(client, tmp_path / "pi", task_of(model, words_of(), classes), **settings)
    assert result.rounds >= 6
    assert result.export.max_difference < 1e-4


def test_a_tied_tensor_is_sent_once_and_moves_once():
    model = Tied()
    manifest = describe_whole(model, words_of(2), task="t")
    assert manifest.aliases == {"scores.weight": "words.weight"}
    assert "scores.weight" not in [spec.name for spec in manifest.tensors]
    assert manifest.trainable_values == sum(parameter.numel() for parameter in model.parameters())
    assert [spec.name for spec in manifest.maskable] == ["mix.weight"]
    untied = Tied()
    untied.scores.weight = nn.Parameter(untied.words.weight.detach().clone())
    check_model(model, manifest)
    with pytest.raises(ManifestError, match=r"^scores\.weight: .*words\.weight"):
        check_model(untied, manifest)


def test_layers_are_those_that_run_with_the_positions_they_run_at():
    found = {layer.name: layer for layer in describe_whole(Recurrent(), words_of(2), task="t").layers}
    assert [(layer.kind, layer.positions) for layer in found.values()] == [("embedding", 7), ("gru", 7), ("linear", 1)]
    odd = describe_whole(Odd(), torch.randn(2, 6), task="t")
    assert {layer.name for layer in odd.layers if layer.kind == "parameter"} == {
        *("positions", "scale", "out.weight", "out.bias")
    }
    assert [spec.name for spec in odd.maskable] == ["body.weight"]
    assert {spec.name: spec.policy for spec in odd.tensors if not spec.trainable} == {
        **dict.fromkeys(("norm.running_mean", "norm.running_var"), "shared"),
        "offset": "frozen",
        "norm.num_batches_tracked": "dropped",
    }


def test_flops_are_counted_by_shapes():
    recurrent = describe_whole(Recurrent(), words_of(2), task="t")
    assert forward_flops(recurrent) == 2 * (7 * 3 * 8 * (6 + 8) + 8 * CLASSES)
    model, example = Attention(), torch.randn(2, 5, 4)
    assert forward_flops(describe_whole(model, example, task="t")) == forward_flops(describe(model, example, task="t"))


def test_a_layer_that_is_called_twice_counts_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    (layer,) = describe_whole(Twice(), torch.randn(3, 4), task="t").layers
    assert layer.positions == 2


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda self, x: (self.body(x), x),
            "the model's output for 2 samples is tuple; make forward return one tensor",
        ),
        (lambda self, x: self.body(x).sum(), r"is shape \(\); make forward return one tensor, batch first"),
        (lambda self, x: self.body(x[:, :3]), "the model fails on the first samples of its training data"),
    ],
)
def test_a_model_that_does_not_answer_with_one_tensor_is_refused(forward, message):
    model = type("Wrong", (nn.Module,), {"forward": forward})()
    model.body = nn.Linear(4, 2)
    with pytest.raises(UnsupportedLayer, match=message):
        describe_whole(model, torch.randn(2, 4), task="t")


def test_both_halves_of_every_method_ask_for_coupling_alike():
    names = [entry.name for entry in entry_points(group="sparrow.device_methods")]
    assert {name: load_method(name).needs_coupling for name in names} == {
        name: coordinator_half(name).active is not None for name in names
    }
    assert all(load_method(name).needs_coupling for name in names if load_method(name).narrow)


NARROW = ["feddrop", "fedmp", "fjord", "hermes", "heterofl", "prunefl_neurons"]


@pytest.mark.parametrize("method", NARROW)
def test_a_method_that_cuts_neurons_refuses_attention_when_it_is_published(client, method):
    message = rf"{method}: .*encoder\.layers\.0\.self_attn.*Methods that take any model: .*fedavg"
    with pytest.raises(UnsupportedLayer, match=message):
        publish(inprocess.ADDRESS, "own", task_of(Attention(), torch.randn(20, 5, 4)), client=client, method=method)
    assert client.get("/v1/federations/own").status_code == 404


@pytest.mark.parametrize("method", NARROW)
def test_a_method_that_cuts_neurons_names_itself_and_the_layer_it_cannot_follow(method):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.GRU(6, 3), Last())
    with pytest.raises(UnsupportedLayer, match=rf"{method}: .*\b2\b.*fedavg"):
        describe_for(method, model, torch.randn(2, 4), task="t")


def test_fedspu_takes_attention(client, tmp_path):
    assert play(client, tmp_path / "pi", task_of(Attention(), torch.randn(60, 5, 4)), method="fedspu").rounds == 2


def test_pfedgate_refuses_what_it_cannot_run_block_by_block():
    class Deciding(Odd):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(UnsupportedLayer, match=r"pfedgate: "):
        describe_for("pfedgate", Deciding(), torch.randn(2, 6), task="t")


def test_default_arguments_of_forward_are_traced():
    class Masked(nn.Sequential):
        def forward(self, x, mask=None, scale=2.0):
            return super().forward(x if mask is None else x * mask) * scale

    manifest = describe_for("fjord", Masked(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4), task="t")
    assert manifest.group_sizes == {"0": 6}


def test_the_coordinator_wants_coupling_for_methods_that_need_it(client, monkeypatch):
    monkeypatch.setattr(type(load_method("fjord")), "needs_coupling", False)
    monkeypatch.setattr(type(load_method("fjord")), "narrow", False)
    with pytest.raises(BadArgument, match=r"\bfjord\b.*coupling"):
        publish(inprocess.ADDRESS, "own", task_of(nn.Sequential(nn.Linear(4, 3)), torch.randn(20, 4)),
                client=client, method="fjord")  # fmt: skip


@pytest.mark.parametrize("method", ["fedper", "lgfedavg"])
def test_a_head_that_is_tied_to_the_body_cannot_stay_on_the_device(method):
    manifest = describe_whole(Tied(), words_of(2), task="t")
    with pytest.raises(BadContent, match=r"words\.weight .*\bwords\b.*tied weights"):
        coordinator_half(method).manifest(manifest, FederationSettings(method=method))


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES))


@pytest.mark.parametrize("model", [Seeded(network), network()], ids=["seeded", "pretrained"])
def test_the_seed_decides_the_weights_of_a_seeded_model_and_of_no_other(client, model):
    torch.manual_seed(7)
    task = task_of(model, torch.randn(20, 4))
    publish(inprocess.ADDRESS, "own", task, client=client, method="fedavg", seed=3)
    sent = checkpoint.load(client.get("/v1/federations/own/model").content)[0]
    wanted = build_seeded(network, 3) if isinstance(model, Seeded) else model
    for name, tensor in wanted.state_dict().items():
        np.testing.assert_array_equal(sent[name], tensor.numpy())


def test_devices_make_what_is_never_sent_from_the_seed():
    """FedPer's head, say: whatever torch's own generator has given meanwhile."""
    task = task_of(Seeded(network), torch.randn(20, 4))
    one = task.seeded(3).model.state_dict()
    torch.manual_seed(8)
    other = task.seeded(3).model.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not torch.equal(one["2.weight"], task.seeded(4).model.state_dict()["2.weight"])


def test_a_class_is_no_model():
    with pytest.raises(BadArgument, match=r"^model: Recurrent\b.*Seeded\(Recurrent\)"):
        task_of(Recurrent, words_of())
