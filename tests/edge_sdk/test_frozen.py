"""What nobody trains: it travels once, is shared on a device's disk, and stays as it was published."""

from __future__ import annotations

import hashlib
import shutil
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.device.values import shared_folder
from edge_sdk.errors import StateError
from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.modes import begin_training, frozen_names
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.tasks import Task
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.export.source import read_source
from sparrow.protocol import checkpoint, values
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest
from sparrow.simulation import in_process
from sparrow.simulation.simulate import SimulationOptions, simulate

pytestmark = pytest.mark.integration  # plays whole federations


class Backbone(nn.Module):
    """Inverted residuals with batch norm, as MobileNet's, a buffer that is a constant, and integers."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.wide, self.deep = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.norm, self.plain = nn.BatchNorm2d(24), nn.BatchNorm2d(24, affine=False)
        self.register_buffer("scale", torch.full((24, 1, 1), 1.5))
        self.register_buffer("order", torch.arange(24).flip(0))

    def forward(self, x):
        x = F.relu(self.first(self.stem(x)))
        x = self.plain(F.hardswish(self.norm(self.deep(self.wide(x)))))
        return (x * self.scale)[:, self.order].mean((2, 3))


class Tuned(nn.Module):
    """A frozen backbone, and a head of one hidden layer that is trained."""

    def __init__(self, classes=3, hidden=16):
        super().__init__()
        torch.manual_seed(4)
        self.body = Backbone()
        for norm in (self.body.first, self.body.norm, self.body.plain):
            norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
        self.body.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(24, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.head(self.body(x))


def task_of(model, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(24, 1, 8, 8, generator=generator), torch.randint(0, classes, (24,), generator=generator)
    return Task("tuned", model, F.cross_entropy, [(x[:8], y[:8]), (x[8:16], y[8:16])], [(x[16:], y[16:])])


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    with in_process.running(create_app(Settings(data_dir=tmp_path / "data", default_task=""))) as client:
        client.event_hooks["request"].append(lambda request: asked.append(request))
        asked.clear()
        yield client


asked = []


def create(client, name, model=None, *, classes=3, precision="auto", **settings):
    settings = {"method": "fedavg", "rounds": 2, "min_devices": 1, "cohort": 1, **settings}
    task = task_of(model or Tuned(classes), classes)
    return publish(
        in_process.ADDRESS, name, task, client=client, options=PublishOptions(frozen_precision=precision), **settings
    )


def take_part(client, name, folder, *, model=None, classes=3, engine="torch", budget=1.0, export=None, **more):
    task = task_of(model or Tuned(classes), classes)
    return join(
        in_process.ADDRESS, task, client=client, federation=name, name="one", state_dir=folder / name, export=export,
        options=JoinOptions(engine=engine, budget=budget, patience_seconds=20, **more), quiet=True,
    )  # fmt: skip


def downloads():
    return [request for request in asked if request.url.path.endswith("/frozen")]


def model_of(client, name):
    tensors, _ = checkpoint.load(client.get(f"/v1/federations/{name}/model").content)
    return tensors


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_a_round_costs_the_head_alone_and_the_backbone_stays(client, tmp_path, compiling, engine):
    info = create(client, "a")
    head = sum(each.numel() for each in Tuned().head.parameters())
    assert info.parameters == head
    assert info.frozen_parameters > 600
    result = take_part(client, "a", tmp_path, engine=engine, model=scrambled())
    for record in client.get("/v1/federations/a/rounds").json():
        for way in ("bytes_down", "bytes_up"):
            assert abs(record[way] - 4 * head) <= 0.03 * 4 * head + 2048
    assert result.everything.frozen_down == info.frozen_bytes
    published, now = Tuned().state_dict(), model_of(client, "a")
    for name in ("body.stem.weight", "body.deep.weight"):
        assert np.array_equal(now[name], published[name].numpy().astype(np.float16)), "stored in half"
    for name in ("body.first.running_mean", "body.norm.running_var", "body.plain.running_mean", "body.order"):
        assert np.array_equal(now[name], published[name].numpy()), "frozen norms do not move"
    assert not np.array_equal(now["head.0.weight"], published["head.0.weight"].numpy())


def scrambled():
    """A model of the same kind on a device that lacks the pretrained weights, and that froze nothing."""
    model = Tuned()
    with torch.no_grad():
        for each in model.body.parameters():
            each.copy_(torch.randn_like(each))
    return model.requires_grad_(True)


def test_both_engines_train_the_same_head(client, tmp_path, compiling):
    heads = []
    for engine in ("onnx", "torch"):
        create(client, engine, optimizer="sgd", method_settings={})
        take_part(client, engine, tmp_path, engine=engine)
        heads.append(model_of(client, engine)["head.0.weight"])
    assert np.abs(heads[0] - heads[1]).max() < 1e-4
    assert len(downloads()) == 1


def test_the_second_federation_with_that_backbone_downloads_none_of_it(client, tmp_path):
    create(client, "three")
    create(client, "five", classes=5)
    first = take_part(client, "three", tmp_path)
    assert (first.everything.frozen_down, len(downloads())) == (create_size(client), 1)
    second = take_part(client, "five", tmp_path, classes=5)
    assert second.everything.frozen_down == 0
    assert len(downloads()) == 1
    kept = list(shared_folder().iterdir())
    assert [each.name for each in kept] == [manifest_of(client, "five").frozen_sha256]
    shutil.rmtree(tmp_path / "home")  # may be emptied at any time: each device has a link of its own
    assert take_part(client, "five", tmp_path, classes=5).everything.frozen_down == 0


def test_a_device_that_keeps_frozen_values_to_itself_leaves_none(client, tmp_path):
    create(client, "three")
    result = take_part(client, "three", tmp_path, own_frozen=True)
    assert result.everything.frozen_down == create_size(client)
    assert not shared_folder().exists()


def create_size(client):
    return values.size(manifest_of(client, "three"), "frozen")


def manifest_of(client, name):
    return Manifest.model_validate_json(client.get(f"/v1/federations/{name}/manifest").content)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_download_goes_on_where_it_was_broken_off(client, tmp_path, damaged):
    info = create(client, "a")
    body = client.get("/v1/federations/a/frozen").content
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "frozen.values.partial").write_bytes(bytes([body[0] ^ damaged]) + body[1:1000])
    asked.clear()
    result = take_part(client, "a", tmp_path)
    assert [request.headers.get("Range") for request in downloads()] == ["bytes=1000-", *[None] * damaged]
    assert result.everything.frozen_down == info.frozen_bytes - 1000 + damaged * info.frozen_bytes
    assert (tmp_path / "a" / "frozen.values").read_bytes() == body


def test_what_is_damaged_on_the_disk_is_downloaded_anew(client, tmp_path):
    create(client, "a")
    take_part(client, "a", tmp_path)
    file = tmp_path / "a" / "frozen.values"
    body = file.read_bytes()
    file.write_bytes(b"x" + body[1:])  # and so is the shared one, of which it is a link
    take_part(client, "a", tmp_path)
    assert file.read_bytes() == body


def test_a_download_that_would_fill_the_disk_is_not_begun(client, tmp_path, monkeypatch):
    create(client, "a")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000_000))
    with pytest.raises(StateError, match="100,000,000"):
        take_part(client, "a", tmp_path)
    assert not downloads()


def test_half_precision_is_taken_where_the_answers_stay(client):
    class Steep(Tuned):
        def forward(self, x):
            return super().forward(x) + 1e4 * (self.body.stem.weight.sum() - 1)

    steep = Steep()
    with torch.no_grad():
        steep.body.stem.weight.div_(steep.body.stem.weight.sum())
    large = Tuned()
    with torch.no_grad():
        large.body.wide.weight[0, 0] = 1e6
    found = {}
    for name, model in (("harmless", Tuned()), ("steep", steep), ("large", large)):
        create(client, name, model)
        found[name] = manifest_of(client, name).frozen_precision
    assert found == {"harmless": "float16", "steep": "float32", "large": "float32"}
    with pytest.raises(ManifestError, match=r"body\.wide\.weight: .*float16"):
        create(client, "b", large, precision="float16")


def test_the_export_is_the_whole_model(client, tmp_path, compiling):
    create(client, "a", precision="float32")
    take_part(client, "a", tmp_path, engine="onnx", export=tmp_path / "model.onnx")
    model, x = Tuned(), task_of(None).validation[0][0]
    personal = read_source(tmp_path / "a")
    model.load_state_dict({name: torch.tensor(each) for name, each in personal.tensors.items()}, strict=False)
    wanted = model.eval()(x).detach().numpy()
    whole = onnxruntime.InferenceSession(client.get("/v1/federations/a/model.onnx").content)
    assert whole.run(None, {"input": x.numpy()})[0].shape == wanted.shape
    (found,) = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"input": x.numpy()})
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("method", ["fedspu", "heterofl", "fedsgc", "fedper", "ditto"])
def test_methods_work_on_what_is_trained(client, tmp_path, method):
    create(client, "a", method=method)
    manifest = manifest_of(client, "a")
    assert set(manifest.group_sizes.values()) <= {3, 16}, "of the head alone"
    take_part(client, "a", tmp_path)
    assert all(spec.policy == "frozen" for spec in manifest.tensors if spec.name.startswith("body.stem"))


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_a_fleet_fetches_it_once(tmp_path, compiling, engine):
    app = create_app(Settings(data_dir=tmp_path / "data", default_task=""))

    @app.middleware("http")
    async def watch(request, answer):
        asked.append(request)
        return await answer(request)

    asked.clear()
    result = simulate(
        app=app,
        task=lambda number: task_of(Tuned(), seed=number),
        devices=3,
        options=SimulationOptions(engine=engine, in_memory=True, processes=1),
        quiet=True,
        method="fedavg",
        rounds=2,
    )
    assert result.device_rounds == 6
    assert len(downloads()) == 1


def test_what_is_frozen_follows_from_the_model():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False))
    x = torch.randn(4, 1, 6, 6)
    assert frozen_names(model, x) == set()
    model[1].requires_grad_(False)
    statistics = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert frozen_names(model, x) == statistics, "a norm without parameters goes with what is around it"
    model.requires_grad_(False)
    assert {"2.running_mean", "0.weight"} <= frozen_names(model, x)
    begin_training(model)
    assert model.training
    assert not model[1].training
    assert not model[2].training


def test_a_published_file_is_compared_with_its_digest(client):
    model = Tuned()
    manifest = describe(model, torch.zeros(2, 1, 8, 8), task="tuned")
    tensors = {spec.name: model.state_dict()[spec.name].numpy() for spec in manifest.tensors}
    file = values.pack(manifest, "frozen", tensors)
    named = manifest.with_values("frozen", file)
    assert values.size(named, "frozen") == len(file)
    assert named.frozen_sha256 == hashlib.sha256(file).hexdigest()
    assert all(np.array_equal(each, tensors[name]) for name, each in values.unpack(named, "frozen", file).items())
    with pytest.raises(ManifestError, match="download it again"):
        values.unpack(named, "frozen", file[:-1])
    shared = {spec.name: tensors[spec.name] for spec in manifest.shared}
    skeleton = make_skeleton(model, torch.zeros(2, 1, 8, 8), named)
    named = named.with_graphs({"skeleton": skeleton})
    body = {
        **shared,
        "sparrow.skeleton": np.frombuffer(skeleton, np.uint8),
        "sparrow.manifest": np.frombuffer(named.model_dump_json().encode(), np.uint8),
        "sparrow.frozen": np.frombuffer(b"x" + file[1:], np.uint8),
    }
    note = '{"name": "a", "settings": {"method": "fedavg"}}'
    answer = client.post(
        "/v1/federations/from-model",
        content=checkpoint.save(body, note),
        headers={"Content-Type": checkpoint.MEDIA_TYPE},
    )
    assert answer.status_code == 422
    assert "the file of frozen values has" in answer.json()["detail"]
    client.post("/v1/federations", json={"name": "plain", "task": "digits"})
    assert client.get("/v1/federations/plain/frozen").status_code == 404
