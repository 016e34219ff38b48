"""Popular models, as they come: each is published, trained by two devices, exported, and takes masks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from benchmarks.zoo import ZOO, torchvision
from edge_sdk.join import JoinOptions, join
from edge_sdk.methods.describing import describe_for
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.optimisation import Optimisation
from sparrow.bench.server import coordinator
from sparrow.protocol import bundle
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, pack
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import httpx

from ..kinds import chosen
from .conftest import environment
from .test_examples import write_text

KINDS = (
    "torchvision: resnet (10 layers)",
    "torchvision: mobilenet_v3_small",
    "timm: swin_tiny",
    "transformers: BERT",
    "transformers: GPT-2, next word",
    "U-Net",
    "LSTM",
)
"""A model of each kind: CI tests these alone, which takes a fifth of the time, and ``make test-zoo ALL=1`` all."""

TESTED = chosen(ZOO, KINDS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("torchvision", "timm", "transformers")),
        reason="the extra zoo is not installed",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with coordinator(tmp_path_factory.mktemp("zoo")) as address:
        yield address


def task_of(name, model, device):
    entry = ZOO[name]
    with torch.no_grad():
        answer = model.eval()(entry.samples(2))
    generator = torch.Generator().manual_seed(device)

    def batch(seed):
        targets = torch.randint(answer.shape[1], (4, *answer.shape[2:]), generator=generator)
        return entry.samples(4, seed), targets

    batches = [batch(10 * device), batch(10 * device + 1)]
    return Task(name, model, torch.nn.CrossEntropyLoss(), batches, batches[:1], classification=answer.dim() == 2)


@pytest.mark.parametrize("name", TESTED)
def test_a_model_is_published_trained_by_two_devices_and_exported(name, server, tmp_path):
    federation = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    tasks = [task_of(name, ZOO[name].model(), device) for device in range(2)]
    settings = {"rounds": 2, "min_devices": 2, "local_epochs": 1, "learning_rate": 0.01, "early_stopping": "off"}
    publish(server, federation, tasks[0], method="fedavg", **settings)

    def work(device):
        return join(
            server,
            tasks[device],
            federation=federation,
            name=f"device-{device}",
            state_dir=tmp_path / str(device),
            export=tmp_path / f"{device}.onnx",
        )

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for device, result in enumerate(results):
        assert result.rounds == 2
        session = onnxruntime.InferenceSession(tmp_path / f"{device}.onnx")
        inputs = ZOO[name].samples(3, seed=9).numpy()
        (answer,) = session.run(None, {session.get_inputs()[0].name: inputs})
        assert len(answer) == 3
        assert np.isfinite(answer).all()
        assert result.export.max_difference < 1e-4 * max(1, np.abs(answer).max()), "PyTorch's answer"


@pytest.mark.parametrize("name", TESTED)
def test_masks_leave_out_most_weights_freeze_them_and_cost_what_they_count(name):
    model, inputs = ZOO[name].model(), ZOO[name].samples(8)
    manifest = describe_for("fedspu", model, inputs, task="zoo")
    masked = sum(spec.size for spec in manifest.tensors if spec.trainable and any(spec.axes))
    assert masked >= 0.6 * manifest.trainable_values
    mask = draw_neurons(manifest, NeuronDraw("key", 0.5))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = FederationSettings(learning_rate=0.1)
    freezing = Freezing(model.train(), manifest, mask)
    with Optimisation(freezing, settings, learning_rate=0.1, proximal_weight=0.0) as optimisation:
        optimisation.forget_gradients()
        answer = model(inputs)
        torch.nn.functional.cross_entropy(answer, torch.zeros(8, *answer.shape[2:], dtype=torch.long)).backward()
        optimisation.step()
    values = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    moved = sum(
        int((values[spec.name] != before[spec.name].numpy()).sum()) for spec in manifest.shared if spec.trainable
    )
    packed = pack(manifest, values, mask)
    assert 0 < moved <= count_values(manifest, mask) == len(packed) < 0.8 * manifest.shared_values
    body = bundle.encode(manifest, packed, mask, draw=NeuronDraw("key", 0.5))
    assert bundle.decode(body, manifest).sizes["values"] == 4 * count_values(manifest, mask)


# --- adapters of peft -----------------------------------------------------------------------------------------------

LORA = {
    "transformers: BERT": ["query", "value"],
    "transformers: GPT-2, next word": ["c_attn", "c_fc"],
    "transformers: Llama": ["q_proj", "v_proj", "down_proj"],
    "transformers: ViT": "all-linear",
    "timm: vit_tiny": ["qkv", "fc1"],
}
"""Models, and the layers that get an adapter; classifiers, where they have one, are trained as well."""

ADAPTED = chosen(LORA, ["transformers: BERT"])
"""Likewise: one model with a classifier."""

HEADS = {"transformers: BERT": ["classifier"], "transformers: ViT": ["classifier"], "timm: vit_tiny": ["head"]}


def adapted(name):
    model = ZOO[name].model()
    torchvision()  # its operators are declared before transformers, which peft imports, imports it
    peft = pytest.importorskip("peft", reason="the extra adapters is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=LORA[name], modules_to_save=HEADS.get(name))
    return peft.get_peft_model(model, config)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_all_that_travels_and_are_merged_in_the_export(
    name, engine, server, compiling, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    federation = "lora-" + "".join(letter if letter.isalnum() else "-" for letter in name.lower()) + engine
    task = task_of(name, adapted(name), 0)
    trained = sum(each.numel() for each in task.model.parameters() if each.requires_grad)
    settings = {"rounds": 2, "min_devices": 1, "local_epochs": 1, "learning_rate": 0.01, "early_stopping": "off"}
    info = publish(server, federation, task, method="fedavg", **settings)
    assert info.parameters == trained < 0.35 * (trained + info.frozen_parameters)
    result = join(
        server,
        task,
        federation=federation,
        name="one",
        options=JoinOptions(engine=engine),
        state_dir=tmp_path / "state",
        export=tmp_path / "model.onnx",
    )
    for record in httpx.get(f"{server}/v1/federations/{federation}/rounds").json():
        for way in ("bytes_down", "bytes_up"):
            assert abs(record[way] - 4 * trained) <= 0.03 * 4 * trained + 2048
    assert "merged" in result.export.steps
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert not any("lora" in tensor.name and min(tensor.dims) <= 4 for tensor in graph.initializer)
    inputs = ZOO[name].samples(3, seed=9)
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"input": inputs.numpy()})
    assert result.export.max_difference < 1e-4 * max(1, np.abs(found).max())
    assert describe_for("fedspu", task.model, ZOO[name].samples(4), task="zoo").group_sizes, "ranks are neurons"


@pytest.mark.timeout(300)
def test_the_example_of_adapters_runs(tmp_path):
    torchvision()
    pytest.importorskip("peft", reason="the extra adapters is not installed")
    write_text(tmp_path / "text.npz")
    script = Path(__file__).parents[2] / "examples" / "adapters.py"
    found = [str(script.parent), str(script.parents[1])]
    declared = "from benchmarks.zoo import torchvision; torchvision(); import runpy, sys; "
    done = subprocess.run(
        [sys.executable, "-c", f"{declared}sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
         str(script), str(tmp_path / "text.npz")],
        cwd=tmp_path, env=environment(COORDINATOR_DATA_DIR=str(tmp_path / "data"), PYTHONPATH=os.pathsep.join(found)),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"top1 ([\d.]+) \(personal\)", done.stdout)[1]) > 0.15
