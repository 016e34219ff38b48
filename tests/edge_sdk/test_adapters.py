"""Low-rank adapters beside frozen layers: shared, of a device's own, of a rank that follows from its budget; merged."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.errors import WrongSettings
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.methods.hetlora import AdapterSums, adapters
from sparrow.coordinator.settings import Settings
from sparrow.export.merging import merge
from sparrow.graphs.skeleton import fill
from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronMask, pack
from sparrow.simulation import in_process
from sparrow.simulation.simulate import SimulationOptions, simulate

pytestmark = pytest.mark.integration  # plays whole federations


class Lora(nn.Module):
    """W x + s B A x, for several adapters (arXiv:2106.09685, equation 3)."""

    def __init__(self, base, **ranks):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), 2.0
        self.down = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False) for name, rank in ranks.items()})
        self.up = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False) for name, rank in ranks.items()})
        for each in self.up.values():
            nn.init.zeros_(each.weight)

    def forward(self, x):
        y = self.base(x)
        for name in self.down:
            y = y + self.up[name](self.down[name](x)) * self.scale
        return y


class Tuned(nn.Module):
    """A frozen network with adapters in both of its layers."""

    def __init__(self, **ranks):
        super().__init__()
        torch.manual_seed(3)
        ranks = ranks or {"shared": 4}
        self.first, self.second = Lora(nn.Linear(12, 20), **ranks), Lora(nn.Linear(20, 3), **ranks)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def task_of(seed=0, **ranks):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 12, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return Task("tuned", Tuned(**ranks), F.cross_entropy, [(x[:8], y[:8]), (x[8:16], y[8:16])], [(x[16:], y[16:])])


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    with in_process.running(create_app(Settings(data_dir=tmp_path / "data", default_task=""))) as client:
        yield client


def create(client, method, **more):
    settings = {"method": method, "rounds": 2, "min_devices": 1, "cohort": 1, "learning_rate": 0.1, **more}
    return publish(in_process.ADDRESS, method, task_of(**settings.pop("ranks", {})), client=client, **settings)


def take_part(client, method, folder, *, engine="onnx", budget=1.0, export=None, **ranks):
    return join(
        in_process.ADDRESS, task_of(**ranks), client=client, federation=method, name="one", state_dir=folder / method,
        options=JoinOptions(engine=engine, budget=budget, patience_seconds=20), export=export, quiet=True,
    )  # fmt: skip


def records_of(client, method):
    return client.get(f"/v1/federations/{method}/rounds").json()


def model_of(client, method):
    return checkpoint.load(client.get(f"/v1/federations/{method}/model").content)[0]


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_a_device_trains_the_ranks_that_its_budget_allows(client, tmp_path, compiling, engine):
    create(client, "hetlora")
    before = model_of(client, "hetlora")
    take_part(client, "hetlora", tmp_path, engine=engine, budget=0.5)
    after, half = model_of(client, "hetlora"), 2 * ((12 + 20) + (20 + 3))
    for record in records_of(client, "hetlora"):
        assert record["parts_up"]["values"] == record["parts_down"]["values"] == 4 * half
        assert record["counts"]["neurons_left_out"] == 4
    for layer in ("first", "second"):
        down, up = f"{layer}.down.shared.weight", f"{layer}.up.shared.weight"
        assert not np.array_equal(after[down][:2], before[down][:2])
        assert np.abs(after[up][:, :2]).min() > 0
        assert not after[down][2:].any(), "what nobody has counts as zero: HetLoRA pads"
        assert np.array_equal(after[f"{layer}.base.weight"], before[f"{layer}.base.weight"])


def test_adapters_are_weighted_by_their_norms():
    model = Tuned()
    manifest = describe(model, torch.zeros(2, 12), task="tuned")
    pairs = adapters(manifest)
    assert set(pairs.values()) == {(f"{at}.down.shared.weight", f"{at}.up.shared.weight") for at in ("first", "second")}
    rng, sums = np.random.default_rng(1), AdapterSums(manifest)
    wanted = {spec.name: np.zeros(spec.shape) for spec in manifest.shared}
    weights = dict.fromkeys(wanted, 0.0)
    for ranks, examples in ((4, 10), (2, 30)):
        tensors = {spec.name: rng.normal(size=spec.shape).astype(np.float32) for spec in manifest.shared}
        mask = NeuronMask({name: np.arange(ranks) for name in manifest.group_sizes})
        for down, up in pairs.values():
            tensors[down][ranks:], tensors[up][:, ranks:] = 0, 0
            weight = examples * np.linalg.norm(tensors[up].astype(np.float64) @ tensors[down])
            for name in (down, up):
                wanted[name] += weight * tensors[name]
                weights[name] += weight
        sums.fold_in_place(pack(manifest, tensors, mask), mask, examples)
    found = sums.mean({name: np.zeros(each.shape, np.float32) for name, each in wanted.items()})
    for name, each in found.items():
        np.testing.assert_allclose(each, wanted[name] / weights[name], rtol=1e-5, atol=1e-7)


def test_nothing_moves_while_no_adapter_has_learned_anything():
    manifest = describe(Tuned(), torch.zeros(2, 12), task="tuned")
    tensors = {spec.name: np.ones(spec.shape, np.float32) * ("down" in spec.name) for spec in manifest.shared}
    sums = AdapterSums(manifest)
    sums.fold_in_place(pack(manifest, tensors, None), None, 5)
    old = {name: np.full(each.shape, 7, np.float32) for name, each in tensors.items()}
    assert all((each == 7).all() for each in sums.mean(old).values())


def test_a_model_without_adapters_is_refused(client):
    x, y = torch.randn(8, 12), torch.zeros(8, dtype=torch.long)
    task = Task("plain", nn.Sequential(nn.Linear(12, 2)), F.cross_entropy, [(x, y)], [(x, y)])
    with pytest.raises(WrongSettings, match="hetlora: "):
        publish(in_process.ADDRESS, "plain", task, client=client, method="hetlora")


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_a_device_keeps_an_adapter_of_its_own(client, tmp_path, compiling, method):
    ranks = {"shared": 4, "own": 2}
    create(client, method, ranks=ranks, method_settings={"private": "*.own.weight"})
    manifest = Manifest.model_validate_json(client.get(f"/v1/federations/{method}/manifest").content)
    assert {spec.name.split(".")[2] for spec in manifest.shared} == {"shared"}
    assert {spec.name.split(".")[2] for spec in manifest.first} == {"own"}
    exported = tmp_path / "model.onnx"
    result = take_part(client, method, tmp_path, export=exported, **ranks)
    assert result.engine == "ONNX Runtime"
    shared = sum(spec.size for spec in manifest.shared)
    assert all(record["parts_up"]["values"] == 4 * shared for record in records_of(client, method))
    graph = onnx.load(exported).graph
    assert sum(node.op_type in ("MatMul", "Gemm") for node in graph.node) == 2, "adapters are merged"
    assert "merged" in result.export.steps
    begun = Tuned(**ranks).state_dict()["first.down.own.weight"].numpy()
    kept, _ = checkpoint.load((tmp_path / method / "model.safetensors").read_bytes())
    assert 0 < np.abs(kept["first.down.own.weight"] - begun).max() < 0.5, "it began as it was published"


@pytest.mark.parametrize(
    ("private", "said"),
    [("*.mine.*", "'\\*.mine.\\*' matches no trained parameter"), ("*", "every trained parameter would stay")],
)
def test_patterns_that_name_nothing_or_all_are_refused(client, private, said):
    with pytest.raises(WrongSettings, match=said):
        create(client, "fedper", method_settings={"private": private})


def test_a_frozen_head_cannot_be_private(client):
    x, y = torch.randn(8, 12), torch.zeros(8, dtype=torch.long)
    model = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2).requires_grad_(False))
    task = Task("plain", model, F.cross_entropy, [(x, y)], [(x, y)])
    with pytest.raises(WrongSettings, match="the last linear layer is frozen"):
        publish(in_process.ADDRESS, "plain", task, client=client, method="fedper")


@pytest.mark.parametrize("ranks", [{"shared": 4}, {"shared": 4, "own": 2, "third": 1}])
def test_the_merged_model_answers_alike_with_one_product_a_layer(ranks):
    model = Tuned(**ranks)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each) / 3)
    x = torch.randn(5, 12)
    manifest = describe_whole(model, x, task="tuned")
    tensors = {name: each.numpy() for name, each in model.state_dict().items()}
    dense = onnx.load_from_string(fill(make_skeleton(model, x, manifest), manifest, tensors))
    merged = merge(dense)
    products = [sum(node.op_type in ("MatMul", "Gemm") for node in each.graph.node) for each in (dense, merged)]
    assert products == [2 + 4 * len(ranks), 2]
    assert merged.ByteSize() < dense.ByteSize()
    (found,) = onnxruntime.InferenceSession(merged.SerializeToString()).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_sums_of_other_values_are_left_alone():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x) + self.other(F.relu(x))

    model, x = Apart(), torch.randn(3, 4)
    manifest = describe_whole(model, x, task="apart")
    tensors = {name: each.numpy() for name, each in model.state_dict().items()}
    dense = onnx.load_from_string(fill(make_skeleton(model, x, manifest), manifest, tensors))
    assert merge(dense) is dense


def test_a_fleet_of_mixed_budgets_trains_adapters(tmp_path, compiling):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task=""))
    result = simulate(
        app=app, task=task_of, devices=4, budgets=(1.0, 0.25), quiet=True, method="hetlora",
        options=SimulationOptions(in_memory=True), rounds=15, learning_rate=0.3, local_epochs=5, early_stopping="off",
    )  # fmt: skip
    assert result.engine == "onnx"
    assert result.ended.accuracy_global > 0.5
