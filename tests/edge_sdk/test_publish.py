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
