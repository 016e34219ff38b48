"""Publishing a model that its owner has cut into blocks."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coordinator.main import create_app
from coordinator.settings import Settings
from edge_sdk import inprocess
from edge_sdk.errors import BadArgument
from edge_sdk.publish import publish
from edge_sdk.tasks import Task


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
    publish(inprocess.ADDRESS, "cut", two_layers, client=client, blocks={"body.weight": (1, 2, 3)}, **settings)
    blocks = client.get("/v1/federations/cut/manifest").json()["blocks"]
    assert blocks["body.weight"] == [4, 8, 12]
    assert {name: sum(sizes) for name, sizes in blocks.items()} == {
        name: parameter.numel() for name, parameter in two_layers.model.named_parameters()
    }


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"body.weight": (1, 2)}, "'body.weight' has blocks of 12 values; cut shared, trainable tensors, and whole"),
        ({"tail.weight": (1,)}, "the model has no parameter 'tail.weight'"),
    ],
)
def test_blocks_that_do_not_add_up_are_refused(client, two_layers, blocks, message):
    with pytest.raises((ValueError, BadArgument), match=message):
        publish(inprocess.ADDRESS, "cut", two_layers, client=client, blocks=blocks)


def test_a_built_in_task_is_cut_by_the_method(client):
    with pytest.raises(BadArgument, match="publish a Task of your own"):
        publish(inprocess.ADDRESS, "cut", "digits", client=client, blocks={"fc1.weight": (1,)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rouds": 3}, r"rouds: there is no such setting; did you mean rounds\?"),
        ({"exists_ok": True}, r"exists_ok: there is no such setting; did you mean exist_ok\?"),
        ({"rounds": -1}, r"rounds: -1 cannot work; give a number of at least 1"),
        ({"optimizer": "adma"}, r"optimizer: adma cannot work; give 'sgd', 'adam' or 'adamw'"),
        ({"method": "fedspuu"}, r"method: 'fedspuu' is not installed .*; did you mean fedspu\?"),
        (
            {"method": "fedprox", "method_settings": {"proximal_wieght": 1}},
            r"method_settings\.proximal_wieght: there is no such setting; did you mean proximal_weight\?",
        ),
        ({"running_statistics": "peronal"}, "give shared or personal"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum belongs to the optimizer sgd"),
    ],
)
def test_a_wrong_setting_names_the_nearest_one_or_what_can_work(client, two_layers, wrong, said):
    with pytest.raises(BadArgument, match=said):
        publish(inprocess.ADDRESS, "cut", two_layers, client=client, **wrong)


def test_only_a_task_with_a_fitting_name_is_published(client, two_layers):
    with pytest.raises(BadArgument, match="cannot be a federation's name"):
        publish(inprocess.ADDRESS, "two words", two_layers, client=client)
    with pytest.raises(BadArgument, match="task is a Sequential; give a Task"):
        publish(inprocess.ADDRESS, "cut", two_layers.model, client=client)
