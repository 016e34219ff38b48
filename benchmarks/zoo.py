"""Publish popular models, small and with random weights, and write the results.

    python -m benchmarks.zoo            describes and compiles each, writes the table in docs/own-model.md; 5 minutes
    python -m benchmarks.zoo --times    prints the processor seconds that compiling each takes, on one thread
    python -m benchmarks.zoo --times --against FOLDER [NAME ...]    in turn with another working tree, and the ratio

Needs the extra ``zoo``; it downloads no weights.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.markdown import markdown_table
from edge_sdk.methods.describing import describe_for
from edge_sdk.publishing.graph import UnsupportedLayer
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.translations import CannotCompile
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks.loading import cross_entropy
from sparrow.graphs.checking import check_graphs
from sparrow.protocol.errors import GraphError

PAGE = Path("docs/own-model.md")
BEGIN = "<!-- made by python -m benchmarks.zoo -->"
END = "<!-- end -->"
WORDS = 1000

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) -> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, "
    "int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int batch_size, int channels, int height, int width, int sampling_ratio, bool aligned) -> Tensor",
)
"""Of torchvision, which it expects at import and PyTorch's CPU wheel does not load; no model here calls one."""
_declared: list[torch.library.Library] = []


def torchvision() -> Any:
    """Return ``torchvision.models``; import it before timm and transformers, which import torchvision."""
    if not _declared:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        _declared.append(library)
        for operator in _OPERATORS:
            library.define(operator)  # type: ignore[no-untyped-call]
    import torchvision as package

    return package.models


class Picked(nn.Module):
    """A model that returns more than one tensor, and the one that is wanted."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch."""
        return self.pick(self.model(x))


class Recurrent(nn.Module):
    """Words [N, T] -> [N, 10], by two recurrent layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.cells = kind(32, 64, num_layers=2, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        scores: Tensor = self.out(self.cells(self.words(x))[0][:, -1])
        return scores


class TCN(nn.Module):
    """A temporal convolutional network, [N, 6, T] -> [N, 4]: causal, dilated, residual."""

    def __init__(self) -> None:
        super().__init__()
        widths = (6, 32, 32, 64)
        pairs = list(itertools.pairwise(widths))
        self.first = nn.ModuleList(nn.Conv1d(a, b, 3, dilation=2**i) for i, (a, b) in enumerate(pairs))
        self.second = nn.ModuleList(nn.Conv1d(b, b, 3, dilation=2**i) for i, (_, b) in enumerate(pairs))
        self.across = nn.ModuleList(nn.Conv1d(a, b, 1) for a, b in pairs)
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        for place, (first, second, across) in enumerate(zip(self.first, self.second, self.across, strict=True)):
            pad = (2 * 2**place, 0)
            y = F.relu(second(F.pad(F.relu(first(F.pad(x, pad))), pad)))
            x = F.relu(y + across(x))
        scores: Tensor = self.out(x[..., -1])
        return scores


class UNet(nn.Module):
    """Images [N, 3, H, W] -> a class for every pixel, [N, 3, H, W]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            layers: list[nn.Module] = []
            for channels in (inputs, outputs):
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        self.down1 = block(3, width)
        self.down2 = block(width, 2 * width)
        self.down3 = block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = block(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of every pixel."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.down3(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(third), second], 1))
        scores: Tensor = self.out(self.join1(torch.cat([self.up1(x), first], 1)))
        return scores


def _timm(name: str, **more: Any) -> nn.Module:
    torchvision()
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **more)
    return model


def _huggingface(name: str, config: str, pick: Callable[[Any], Tensor], **more: Any) -> nn.Module:
    torchvision()
    import transformers

    return Picked(getattr(transformers, name)(getattr(transformers, config)(**more)), pick)


def _logits(answer: Any) -> Any:
    return answer.logits


_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_SMALL_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False, "vocab_size": WORDS}
_TEXT = {"vocab_size": WORDS, "max_position_embeddings": 64, "num_labels": 5}


def _whisper() -> nn.Module:
    torchvision()
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=20,
        max_source_positions=50,
    )
    encoder = Picked(WhisperEncoder(config), lambda answer: answer.last_hidden_state.mean(1))
    return nn.Sequential(encoder, nn.Linear(64, 5))


def _residual() -> nn.Module:
    models = torchvision()
    model: nn.Module = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    return model


def _mixer() -> nn.Module:
    torchvision()
    from timm.models.mlp_mixer import MlpMixer

    model: nn.Module = MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=3, embed_dim=64)
    return model


IMAGES = (3, 32, 32)
WORD = (16,)


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. build: makes it, with random weights. shape: of one sample; words where it is (T,)."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGES

    def samples(self, count: int, seed: int = 0) -> Tensor:
        """Return random inputs [count, ...]."""
        generator = torch.Generator().manual_seed(seed)
        if len(self.shape) == 1:
            return torch.randint(1, WORDS, (count, *self.shape), generator=generator)
        return torch.randn(count, *self.shape, generator=generator)

    def model(self) -> nn.Module:
        """Return the model, always the same one."""
        torch.manual_seed(0)
        return self.build()


ZOO: dict[str, Entry] = {
    "torchvision: resnet (10 layers)": Entry(_residual),
    "torchvision: mobilenet_v3_small": Entry(lambda: torchvision().mobilenet_v3_small(num_classes=10)),
    "torchvision: shufflenet_v2_x0_5": Entry(lambda: torchvision().shufflenet_v2_x0_5(num_classes=10)),
    "torchvision: squeezenet1_1": Entry(lambda: torchvision().squeezenet1_1(num_classes=10)),
    "torchvision: efficientnet_b0": Entry(lambda: torchvision().efficientnet_b0(num_classes=10)),
    "torchvision: regnet_y_400mf": Entry(lambda: torchvision().regnet_y_400mf(num_classes=10)),
    "torchvision: densenet (16 layers)": Entry(lambda: torchvision().DenseNet(12, (2, 3, 4, 3), 24, num_classes=10)),
    "torchvision: VisionTransformer": Entry(
        lambda: torchvision().VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
        )
    ),
    "timm: vit_tiny": Entry(lambda: _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4)),
    "timm: deit_tiny": Entry(lambda: _timm("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=4)),
    "timm: swin_tiny": Entry(
        lambda: _timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(1, 2, 1, 1))
    ),
    "timm: mobilenetv4_conv_small": Entry(lambda: _timm("mobilenetv4_conv_small")),
    "timm: mobilevit_xxs": Entry(lambda: _timm("mobilevit_xxs"), (3, 64, 64)),
    "timm: convnext_atto": Entry(lambda: _timm("convnext_atto")),
    "timm: efficientformer": Entry(
        lambda: _timm("efficientformer_l1", embed_dims=(16, 32, 64, 96), depths=(1, 1, 2, 2)), (3, 224, 224)
    ),
    "timm: mixer": Entry(_mixer),
    "transformers: BERT": Entry(
        lambda: _huggingface("BertForSequenceClassification", "BertConfig", _logits, **_BERT, **_TEXT), WORD
    ),
    "transformers: DistilBERT": Entry(
        lambda: _huggingface(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            _logits,
            dim=64,
            n_layers=2,
            n_heads=4,
            hidden_dim=128,
            **_TEXT,
        ),
        WORD,
    ),
    "transformers: GPT-2, classes": Entry(
        lambda: _huggingface(
            "GPT2ForSequenceClassification", "GPT2Config", _logits, num_labels=5, pad_token_id=0, **_SMALL_GPT
        ),
        WORD,
    ),
    "transformers: GPT-2, next word": Entry(
        lambda: _huggingface("GPT2LMHeadModel", "GPT2Config", lambda answer: answer.logits[:, -1], **_SMALL_GPT), WORD
    ),
    "transformers: Llama": Entry(
        lambda: _huggingface(
            "LlamaForSequenceClassification",
            "LlamaConfig",
            _logits,
            **_BERT,
            **_TEXT,
            num_key_value_heads=2,
            pad_token_id=0,
            use_cache=False,
        ),
        WORD,
    ),
    "transformers: ViT": Entry(
        lambda: _huggingface(
            "ViTForImageClassification", "ViTConfig", _logits, image_size=32, patch_size=8, num_labels=10, **_BERT
        )
    ),
    "transformers: Whisper's encoder": Entry(_whisper, (20, 100)),
    "LSTM": Entry(lambda: Recurrent(nn.LSTM), WORD),
    "GRU": Entry(lambda: Recurrent(nn.GRU), WORD),
    "TCN": Entry(TCN, (6, 50)),
    "U-Net": Entry(UNet),
}
"""Name -> model. At most 5 million parameters each."""


LARGER: dict[str, Entry] = {
    "timm: ghostnet_050": Entry(lambda: _timm("ghostnet_050"), (3, 64, 64)),
    "timm: lcnet_050": Entry(lambda: _timm("lcnet_050"), (3, 64, 64)),
    "timm: resnet10t": Entry(lambda: _timm("resnet10t"), (3, 64, 64)),
    "timm: edgenext_xx_small": Entry(lambda: _timm("edgenext_xx_small"), (3, 64, 64)),
}
"""Name -> model of many layers, only timed."""


def seconds(entry: Entry) -> float:
    """Return the processor seconds that compiling a model takes. Raises CannotCompile."""
    model = entry.model()
    inputs = entry.samples(16)
    targets = _targets(model, inputs)
    begun = time.process_time()
    compile_step(model.train(), cross_entropy, inputs, targets)
    return time.process_time() - begun


def seconds_in(tree: Path, name: str) -> float:
    """Return the processor seconds with the code of a working tree, in its own process.

    Raises CalledProcessError if the model does not compile.
    """
    # The first compilation imports libraries.
    code = (
        "import runpy, sys; zoo = runpy.run_path(sys.argv[1]); zoo['torch'].set_num_threads(1); "
        "zoo['seconds'](zoo['ZOO']['TCN']); print(zoo['seconds']({**zoo['ZOO'], **zoo['LARGER']}[sys.argv[2]]))"
    )
    found = os.pathsep.join(filter(None, (str(tree.resolve()), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).resolve()), name],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def compare(names: list[str], other: Path) -> None:
    """Print the processor seconds of each model with another working tree and with this one, and their ratio."""
    for number, name in enumerate(names):
        trees = [other, Path(__file__).parents[1]]
        taken: dict[Path, float] = {}
        # In turn, so that neither always runs first.
        for tree in trees if number % 2 == 0 else reversed(trees):
            try:
                taken[tree] = seconds_in(tree, name)
            except subprocess.CalledProcessError as error:
                print(f"{name}: not compiled in {tree}: {error.stderr.splitlines()[-1][:200]}", flush=True)
        if len(taken) == len(trees):
            before, now = (taken[tree] for tree in trees)
            print(f"{name}: before {before:.1f} s, now {now:.1f} s, ratio {now / before:.2f}", flush=True)


def _targets(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        answer = model.eval()(inputs)
    return torch.zeros((len(inputs), *answer.shape[2:]), dtype=torch.long)


def row(name: str) -> list[str]:
    """Return the result for a model: its parameters, the share under FedSPU's masks, the engines that train it."""
    entry = ZOO[name]
    model = entry.model()
    inputs = entry.samples(16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        manifest = describe_for("fedspu", model, inputs[:2], task="zoo")
        masked = sum(spec.size for spec in manifest.tensors if spec.trainable and any(spec.axes))
        share = f"{masked / manifest.trainable_values:.0%} in {len(manifest.groups)} groups"
    except UnsupportedLayer as error:
        share = f"refused: {error}"
    targets = _targets(model, inputs)
    try:
        graphs = compile_step(model.train(), cross_entropy, inputs, targets)
        # Devices check graphs in the same way.
        check_graphs(graphs, describe_whole(model, inputs, task="zoo"))
        engine = "ONNX Runtime or PyTorch"
    except (CannotCompile, GraphError) as error:
        engine = f"PyTorch ({error})"
    return [name, f"{parameters / 1e6:.2f}", share, engine]


def main() -> int:
    """Write the table, or print the times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Describe and compile each model.")
    parser.add_argument("--times", action="store_true", help="print processor seconds of compiling, write no table")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="with --times: the other working tree")
    parser.add_argument("names", nargs="*", metavar="NAME", help="with --times: models (default: all)")
    options = parser.parse_args()
    timed = {**ZOO, **LARGER}
    names = options.names or list(timed)
    if options.times and options.against is not None:
        compare(names, options.against)
        return 0
    if options.times:
        torch.set_num_threads(1)
        for name in names:
            print(f"{name}: {seconds(timed[name]):.1f} s", flush=True)
        return 0
    rows = []
    for name in ZOO:
        rows.append(row(name))
        print("; ".join(rows[-1]), flush=True)
    table = markdown_table(["model", "parameters, millions", "weights under FedSPU's masks", "trained by"], rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, behind = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{behind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
