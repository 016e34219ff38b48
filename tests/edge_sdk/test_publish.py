"""Publishing one's own model: cut into blocks, again, and by whom."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.errors import BadArgument, DifferentFederation, Refused
from edge_sdk.join import JoinOptions, join
from edge_sdk.methods import UnknownMethod
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.graphs import Graphs
from sparrow.graphs.checking import check_graphs
from sparrow.protocol.manifest import Manifest
from sparrow.simulation import in_process as inprocess

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models


@pytest.fixture
def client(tmp_path):
    with inprocess.running(create_app(Settings(data_dir=tmp_path, default_task=""))) as client:
        yield client


@pytest.fixture
def two_layers():
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), head=nn.Linear(6, 2)))
    data = [(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))]
    return Task("two layers", model, F.cross_entropy, data, data)


def test_who_publishes_may_cut_the_model_into_blocks(client, two_layers):
    settings = {"method": "pfedgate", "method_settings": {"smallest_budget": 0.5}}
    publish(
        inprocess.ADDRESS,
        "cut",
        two_layers,
        client=client,
        options=PublishOptions(blocks={"body.weight": (1, 2, 3)}),
        **settings,
    )
    blocks = client.get("/v1/federations/cut/manifest").json()["blocks"]
    assert blocks["body.weight"] == [4, 8, 12]
    assert {name: sum(sizes) for name, sizes in blocks.items()} == {
        name: parameter.numel() for name, parameter in two_layers.model.named_parameters()
    }


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"body.weight": (1, 2)}, "'body.weight' has blocks of 12 values; cut whole, shared, trainable tensors"),
        ({"tail.weight": (1,)}, "the model has no parameter 'tail.weight'"),
    ],
)
def test_blocks_that_do_not_add_up_are_refused(client, two_layers, blocks, message):
    with pytest.raises((ValueError, BadArgument), match=message):
        publish(inprocess.ADDRESS, "cut", two_layers, client=client, options=PublishOptions(blocks=blocks))


def test_a_built_in_task_is_cut_by_the_method(client):
    with pytest.raises(BadArgument, match="publish a Task of your own"):
        publish(inprocess.ADDRESS, "cut", "digits", client=client, options=PublishOptions(blocks={"fc1.weight": (1,)}))


# --- a method that the coordinator chooses ---------------------------------------------------------------------------


def published_for(client, model, **settings):
    """The federation of a model of inputs [N, 4]."""
    data = [(torch.randn(6, 4), torch.arange(6) % 3)]
    task = Task("own", model, F.cross_entropy, data, data)
    return publish(inprocess.ADDRESS, "auto", task, client=client, **settings)


def chosen_for(client, model, **settings):
    """The method, logit adjustment and epochs of fine-tuning that ``auto`` becomes for it."""
    info = published_for(client, model, **settings)
    return info.method, info.settings.logit_adjustment, info.settings.finetune_epochs


AUTO = {"method": "auto", "options": PublishOptions(compiled=False)}


def with_neurons():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


class Sorting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs).sort(1).values)


class Colder(nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs) / 3.0


def test_auto_is_fedspu_with_class_frequencies_and_a_last_training(client):
    assert chosen_for(client, with_neurons(), **AUTO) == ("fedspu", 1.0, 3)
    task = publish(inprocess.ADDRESS, "known", "digits", client=client, method="auto")
    assert (task.method, task.settings.logit_adjustment, task.settings.finetune_epochs) == ("fedspu", 1.0, 3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Sorting(), ("fedavg", 1.0, 3)),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), ("fedspu", 0.0, 3)),
        (lambda: Colder(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), ("fedspu", 0.0, 3)),
    ],
    ids=["no neurons to leave out", "no bias of classes", "outputs that do not follow the bias"],
)
def test_auto_leaves_out_what_a_model_does_not_allow(client, model, expected):
    assert chosen_for(client, model(), **AUTO) == expected


@pytest.mark.parametrize(
    ("model", "asked", "averaged"),
    [
        (with_neurons, {"rounds": 60}, 20),
        (with_neurons, {"rounds": 59}, 0),
        (with_neurons, {"rounds": 60, "method_settings": {"averaged_rounds": 1}}, 1),
        (Sorting, {"rounds": 60}, 0),
    ],
    ids=["a third of the rounds", "too few rounds", "as asked", "not under FedAvg"],
)
def test_auto_averages_the_models_of_the_last_rounds(client, model, asked, averaged):
    info = published_for(client, model(), **AUTO, **asked)
    assert info.settings.method_settings["averaged_rounds"] == averaged


def test_auto_sends_int8_stops_nobody_and_has_devices_choose_together(client):
    settings = published_for(client, with_neurons(), **AUTO).settings
    assert (settings.precision, settings.early_stopping, settings.personal_model) == ("int8", "off", "fleet")
    assert settings.method_settings["alone"] is True
    assert 0 < settings.logit_adjustment_from < 0.1


def test_auto_leaves_out_what_secure_sums_and_privacy_do_not_allow(client):
    asked = {"secure": True, "min_devices": 3, "cohort": 3}
    assert published_for(client, with_neurons(), **AUTO, **asked).settings.precision == "fp32"


def test_auto_keeps_what_was_asked_for(client):
    assert chosen_for(client, with_neurons(), **AUTO, logit_adjustment=0.5, finetune_epochs=1) == (
        "fedspu",
        0.5,
        1,
    )


def test_auto_keeps_explicit_settings_equal_to_defaults(client):
    given = {"precision": "fp32", "early_stopping": "validation", "logit_adjustment": 0.0, "finetune_epochs": 0}
    settings = published_for(client, with_neurons(), **AUTO, **given).settings
    assert {name: getattr(settings, name) for name in given} == given
    assert settings.logit_adjustment_from == 0.0
    info = publish(inprocess.ADDRESS, "known", "digits", client=client, method="auto", precision="fp32")
    assert (info.settings.precision, info.settings.early_stopping) == ("fp32", "off")
    again = {"client": client, "method": "auto", "exist_ok": True}
    assert publish(inprocess.ADDRESS, "known", "digits", precision="fp32", **again).uid == info.uid
    with pytest.raises(DifferentFederation, match="precision"):
        publish(inprocess.ADDRESS, "known", "digits", **again)


def test_auto_adjusts_no_outputs_that_are_not_of_classes(client):
    data = [(torch.randn(6, 4), torch.randn(6, 2))]
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    task = Task("own", model, F.mse_loss, data, data, classification=False)
    info = publish(inprocess.ADDRESS, "numbers", task, client=client, **AUTO)
    assert (info.method, info.settings.logit_adjustment) == ("fedspu", 0.0)


def test_auto_asked_for_again_is_the_same_federation(client, two_layers):
    first = publish(inprocess.ADDRESS, "own", two_layers, client=client, **AUTO)
    assert publish(inprocess.ADDRESS, "own", two_layers, client=client, exist_ok=True, **AUTO).uid == first.uid
    first = publish(inprocess.ADDRESS, "known", "digits", client=client, method="auto")
    assert publish(inprocess.ADDRESS, "known", "digits", client=client, exist_ok=True, method="auto").uid == first.uid


# --- the training step -----------------------------------------------------------------------------------------------


def said_by_publish(caplog):
    return [record.message for record in caplog.records if record.name == "edge_sdk.publish"]


def test_the_training_step_is_compiled_and_published(client, two_layers, compiling, caplog):
    before = torch.random.get_rng_state()
    publish(inprocess.ADDRESS, "own", two_layers, client=client)
    assert torch.equal(torch.random.get_rng_state(), before), "what a script draws afterwards is as without"
    assert not said_by_publish(caplog)
    manifest = Manifest.model_validate_json(client.get("/v1/federations/own/manifest").content)
    served = {graph: client.get(f"/v1/federations/own/{graph}.onnx").content for graph in manifest.graphs}
    assert manifest.with_graphs(served) == manifest
    check_graphs(Graphs(served["step"], served["evaluation"]), manifest)


def test_a_step_need_not_be_compiled(client, two_layers, compiling, caplog):
    publish(inprocess.ADDRESS, "own", two_layers, client=client, options=PublishOptions(compiled=False))
    assert not said_by_publish(caplog)
    assert list(Manifest.model_validate_json(client.get("/v1/federations/own/manifest").content).graphs) == ["skeleton"]


def nothing_like_it(model, loss, inputs, targets, progress):
    return Graphs(b"another", b"another")


def out_of_its_depth(model, loss, inputs, targets, progress):
    raise RuntimeError("aten.frobnicate has no translation\nhere is where")


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (None, "0: running statistics need a momentum"),
        (nothing_like_it, "the step's graph is refused"),
        (out_of_its_depth, "PyTorch: aten.frobnicate has no translation"),
    ],
)
def test_a_step_that_cannot_be_compiled_is_left_out_and_why_is_said(
    client, compiling, caplog, monkeypatch, compiled, reason
):
    if compiled is not None:
        monkeypatch.setattr("edge_sdk.publishing.step.compile_step", compiled)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    data = [(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))]
    publish(inprocess.ADDRESS, "own", Task("mine", model, F.cross_entropy, data, data), client=client)
    (line,) = said_by_publish(caplog)
    assert "without its training step" in line
    assert reason in line
    assert "\n" not in line
    assert list(Manifest.model_validate_json(client.get("/v1/federations/own/manifest").content).graphs) == ["skeleton"]


# --- again, and by whom ----------------------------------------------------------------------------------------------


def wide(seed):
    """A task whose model takes 28 kB, its weights drawn from this seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 1000), act=nn.ReLU(), head=nn.Linear(1000, 2)))
    data = [(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))]
    return Task("wide", model, F.cross_entropy, data, data)


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """A client of a coordinator whose doors are all shut, and the bytes of bodies that went through it."""
    for kind in ("ADMIN", "OBSERVER", "ENROLMENT"):
        monkeypatch.delenv(f"SPARROW_{kind}_TOKEN", raising=False)
    tokens = {f"{kind}_token": f"{kind}-secret-0123456789" for kind in ("admin", "observer", "enrolment")}
    with inprocess.running(create_app(Settings(data_dir=tmp_path / "data", default_task="", **tokens))) as client:
        client.moved = 0

        def count(message):
            client.moved += int(message.headers.get("Content-Length", 0))

        client.event_hooks = {"request": [count], "response": [count]}
        yield client


def test_only_the_first_device_of_a_script_needs_an_admin_token(guarded, monkeypatch, tmp_path):
    def script(name, seed):
        settings = {"method": "fedavg", "rounds": 1, "min_devices": 1, "local_epochs": 1, "finetune_epochs": 1}
        publish(inprocess.ADDRESS, "wide", wide(seed), exist_ok=True, client=guarded, **settings)
        return join(
            inprocess.ADDRESS,
            wide(seed),
            federation="wide",
            name=name,
            options=JoinOptions(budget=1.0),
            state_dir=tmp_path / name,
            client=guarded,
            quiet=True,
        )

    monkeypatch.setenv("SPARROW_ENROLMENT_TOKEN", "enrolment-secret-0123456789")
    with pytest.raises(Refused, match="needs an admin token"):
        script("first", 0)
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", "admin-secret-0123456789")
    assert script("first", 0).rounds == 1
    monkeypatch.delenv("SPARROW_ADMIN_TOKEN")
    assert script("second", 1).adapted, "it came after the end"


def test_what_is_there_already_is_not_uploaded_again(guarded, monkeypatch):
    monkeypatch.setenv("SPARROW_ADMIN_TOKEN", "admin-secret-0123456789")
    first = publish(inprocess.ADDRESS, "wide", wide(0), exist_ok=True, client=guarded, rounds=2)
    assert guarded.moved > 28_000
    guarded.moved = 0
    assert publish(inprocess.ADDRESS, "wide", wide(1), exist_ok=True, client=guarded, rounds=2).uid == first.uid
    assert 0 < guarded.moved < 5_000
    guarded.moved = 0
    with pytest.raises(Refused, match=r"method: .*\bfedavg\b.*\bfedspu\b.*rounds: .*\b50\b.*\b2\b"):
        publish(inprocess.ADDRESS, "wide", wide(1), exist_ok=True, client=guarded, method="fedavg", rounds=50)
    assert guarded.moved < 5_000
    narrow = Task("wide", nn.Sequential(nn.Linear(4, 2)), F.cross_entropy, wide(0).train, wide(0).train)
    with pytest.raises(Refused, match="model: its layers, shapes"):
        publish(inprocess.ADDRESS, "wide", narrow, exist_ok=True, client=guarded, rounds=2)


def test_of_two_that_publish_at_once_the_second_is_given_the_first_ones(client, monkeypatch):
    from edge_sdk.device.transport import Transport

    compare, asked = Transport.compare_federation, []

    def late(self, name, wanted):
        found = compare(self, name, wanted)
        if not asked:
            asked.append(publish(inprocess.ADDRESS, name, wide(0), client=client, rounds=2))
        return found

    monkeypatch.setattr(Transport, "compare_federation", late)
    assert publish(inprocess.ADDRESS, "wide", wide(1), exist_ok=True, client=client, rounds=2).uid == asked[0].uid


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rouds": 3}, r"rouds: there is no such setting \(did you mean rounds\?\)"),
        ({"exists_ok": True}, r"exists_ok: there is no such setting \(did you mean exist_ok\?\)"),
        ({"rounds": -1}, r"rounds: -1 is invalid; give a number of at least 1"),
        ({"optimizer": "adma"}, r"optimizer: adma is invalid; give 'sgd', 'adam' or 'adamw'"),
        ({"method": "fedspuu"}, r"method: 'fedspuu' is not installed .* \(did you mean fedspu\?\)"),
        (
            {"method": "fedprox", "method_settings": {"proximal_wieght": 1}},
            r"method_settings\.proximal_wieght: there is no such setting \(did you mean proximal_weight\?\)",
        ),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum belongs to the optimizer sgd"),
    ],
)
def test_a_wrong_setting_names_the_nearest_one_or_what_can_work(client, two_layers, wrong, said):
    with pytest.raises((BadArgument, UnknownMethod), match=said):
        publish(inprocess.ADDRESS, "cut", two_layers, client=client, **wrong)


def test_only_known_kinds_of_running_statistics_are_published():
    with pytest.raises(BadArgument, match="give shared or personal"):
        PublishOptions(running_statistics="peronal")


def test_only_a_task_with_a_fitting_name_is_published(client, two_layers):
    with pytest.raises(BadArgument, match="cannot be a federation's name"):
        publish(inprocess.ADDRESS, "two words", two_layers, client=client)
    with pytest.raises(BadArgument, match="task is a Sequential; give a Task"):
        publish(inprocess.ADDRESS, "cut", two_layers.model, client=client)
