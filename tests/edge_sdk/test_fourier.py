"""Fourier transforms and resizes in a user's own preparation and model: compiled, and equal to PyTorch."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.onnx import Network, Sessions, Training
from edge_sdk.engines.optimiser import Rule
from edge_sdk.errors import BadArgument
from edge_sdk.publishing.preparation import prepare_to_publish
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.translations import CannotCompile, Complex, Fourier
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from sparrow.export.preparation import Preparer, check_preparation
from sparrow.graphs.checking import check_graphs
from sparrow.graphs.skeleton import fill
from sparrow.protocol.manifest import Manifest, TensorSpec


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- what stands for PyTorch's own -----------------------------------------------------------------------------------

STFT = {
    "usual": {"hop_length": 16},
    "a hop that divides nothing": {"hop_length": 13},
    "a quarter": {},
    "a short window": {"hop_length": 16, "win_length": 40, "window": torch.hann_window(40)},
    "no window but its length": {"hop_length": 16, "win_length": 41},
    "not centred": {"hop_length": 20, "center": False, "window": torch.hann_window(64)},
    "zeros around": {"hop_length": 16, "pad_mode": "constant"},
    "normalised": {"hop_length": 16, "normalized": True},
    "both sides": {"hop_length": 16, "onesided": False},
}


def close(found, wanted):
    scale = float(torch.view_as_real(wanted).abs().max())
    for part in ("real", "imag"):
        torch.testing.assert_close(getattr(found, part), getattr(wanted, part), rtol=0, atol=2e-6 * scale)


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("case", STFT)
def test_frames_are_those_of_pytorch(case):
    for x in (draw(3, 400), draw(400)):
        wanted = torch.stft(x, 64, return_complex=True, **STFT[case])
        with Fourier() as transforms:
            found = torch.stft(x, 64, return_complex=True, **STFT[case])
            method = x.stft(64, return_complex=True, **STFT[case])
        assert transforms.used
        assert isinstance(found, Complex)
        assert found.shape == wanted.shape
        close(found, wanted)
        close(method, wanted)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 256, 257, 400, 509, 512, 1000, 2048, 16_000, 22_050])
def test_spectra_of_any_length_are_those_of_pytorch(length):
    x = draw(2, length)
    for name in ("rfft", "fft"):
        wanted = getattr(torch.fft, name)(x)
        with Fourier():
            found = getattr(torch.fft, name)(x)
        close(found, wanted)


@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [None, 20, 50])
def test_spectra_along_another_axis_are_cut_padded_and_scaled(n, norm):
    x = draw(2, 30, 3)
    wanted = torch.fft.rfft(x, n, 1, norm)
    with Fourier():
        found = torch.fft.rfft(x, n=n, dim=1, norm=norm)
    close(found, wanted)


USES = {
    "abs": lambda z: z.abs(),
    "builtin abs": abs,
    "torch.abs": torch.abs,
    "power": lambda z: z.real**2 + z.imag**2,
    "pairs": torch.view_as_real,
    "product with its conjugate": lambda z: (z * z.conj()).real,
    "square": lambda z: torch.view_as_real(torch.square(z)),
    "moved": lambda z: z.transpose(1, 2).unsqueeze(1).abs(),
    "cut": lambda z: z[:, 1:, ::2].abs(),
    "sums": lambda z: torch.view_as_real(1 - z + 2 * z - z / 3 + (1 + 2j) * z + 1j),
    "by a real": lambda z: torch.view_as_real(z * z.abs() + z.real - z.real * z),
    "ratio": lambda z: torch.view_as_real(z / (z + 10)),
    "joined": lambda z: torch.cat([z, -z], 1).abs().sum(1),
    "mean": lambda z: z.mean(-1).abs(),
    "shape": lambda z: z.abs().reshape(z.shape[0], z.size(1) * z.shape[-1]) * len(z) * z.dim(),
}


@pytest.mark.parametrize("use", USES)
def test_spectra_are_used_as_complex_numbers_are_and_so_are_their_gradients(use):
    x = draw(2, 200)
    x[1] = 0
    answers = []
    for transforms in (None, Fourier()):
        leaf = x.clone().requires_grad_()
        if transforms is None:
            found = USES[use](torch.stft(leaf, 32, 8, window=torch.hann_window(32), return_complex=True))
        else:
            with transforms:
                found = USES[use](torch.stft(leaf, 32, 8, window=torch.hann_window(32), return_complex=True))
        weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
        (gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
        answers.append((found.detach(), gradient))
    for wanted, found in zip(*answers, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x: torch.stft(x, 32, return_complex=True).angle(), "torch.angle of complex numbers"),
        (lambda x: torch.fft.irfft(torch.fft.rfft(x)), "torch.fft.irfft cannot be compiled"),
        (lambda x: torch.fft.rfft2(x), "torch.fft.rfft2 cannot be compiled"),
        (lambda x: torch.stft(x, 32, return_complex=True, pad_mode="replicate"), "pad_mode='replicate'"),
        (lambda x: torch.fft.rfft(x, n=2 * 521), "product of two numbers up to 512"),
    ],
)
@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_what_has_no_product_is_refused_by_name(what, said):
    with Fourier(), pytest.raises(CannotCompile, match=said):
        what(draw(2, 200))


# --- preparations -----------------------------------------------------------------------------------------------------


class Mel(nn.Module):
    """Log energies of bands, [N, frames, bands]."""

    def __init__(self, length=400, hop=160, bands=20):
        super().__init__()
        self.length, self.hop = length, hop
        self.register_buffer("window", torch.hann_window(length))
        self.register_buffer("bands", draw(length // 2 + 1, bands).abs())

    def forward(self, x):
        spectrum = torch.stft(x, self.length, self.hop, window=self.window, return_complex=True).abs()
        return torch.log(torch.clamp(spectrum.transpose(1, 2) @ self.bands, min=1e-5))


class Applied(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


def bilinear(x):
    return F.interpolate(x.float() / 255, (9, 12), mode="bilinear")


def antialiased(x):
    return F.interpolate(x.float() / 255, (9, 12), mode="bilinear", antialias=True)


SOUND = draw(24, 4000).numpy()
PICTURE = np.random.default_rng(0).integers(0, 255, (24, 3, 20, 30)).astype(np.uint8)
PREPARATIONS = {
    "mel": (Mel(), SOUND),
    "mel of a power of two": (Mel(512, 128), SOUND),
    "spectrum": (Applied(lambda x: torch.fft.rfft(x).abs()), SOUND),
    "two axes": (Applied(lambda x: torch.fft.rfft2(x.reshape(-1, 50, 80)).abs()), SOUND),
    "bilinear": (Applied(bilinear), PICTURE),
    "antialiased": (Applied(antialiased), PICTURE),
    "bicubic": (Applied(lambda x: F.interpolate(x.float(), (9, 12), mode="bicubic")), PICTURE),
}


def built_of(module, raw):
    train = ArrayBatches(Arrays(raw, np.arange(len(raw)) % 2), 8)
    return prepare_to_publish(Task("t", nn.Identity(), F.cross_entropy, train, train, preparation=module))[1]


@pytest.mark.integration
@pytest.mark.parametrize("case", PREPARATIONS)
def test_a_preparation_is_compiled_accepted_and_equal_to_pytorch(case):
    module, raw = PREPARATIONS[case]
    built = built_of(module, raw)
    with torch.no_grad():
        wanted = module(torch.from_numpy(raw)).numpy()
    manifest = Manifest(
        task="t",
        input_shape=wanted.shape[1:],
        output_shape=(2,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=built.description,
        preparation_sha256=hashlib.sha256(built.graph).hexdigest(),
    )
    check_preparation(built.graph, manifest)
    preparer = Preparer(built.graph)
    scale = max(1.0, np.abs(wanted).max())
    for count in (1, 2, 7):
        np.testing.assert_allclose(preparer(raw[:count]), wanted[:count], atol=2e-5 * scale)


@pytest.mark.integration
def test_a_transform_that_runtimes_compute_otherwise_is_refused():
    """It has no product, and ONNX Runtime's own is inexact where the length is no power of two."""
    module = Applied(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[1]) * 100)
    with pytest.raises(BadArgument, match="differ from PyTorch's"):
        built_of(module, SOUND)


# --- models -----------------------------------------------------------------------------------------------------------


class Listener(nn.Module):
    """Raw sounds [N, 640] -> classes [N, 3]. filtered: a layer that is trained lies before the transform."""

    def __init__(self, *, filtered):
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2) if filtered else None
        self.register_buffer("window", torch.hann_window(80), persistent=False)
        self.conv, self.out = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4 * 20 * 16, 3)

    def forward(self, x):
        if self.filter is not None:
            x = self.filter(x.unsqueeze(1)).squeeze(1)
        spectrum = torch.stft(x, 80, 19, window=self.window, return_complex=True)
        picture = torch.log1p(spectrum.abs()).unsqueeze(1)
        return self.out(F.relu(self.conv(picture)).flatten(1))


@pytest.mark.integration
@pytest.mark.parametrize("filtered", [False, True])
def test_a_model_that_listens_is_published_and_trains_without_pytorch(filtered):
    torch.manual_seed(0)
    model, inputs, targets = Listener(filtered=filtered), draw(6, 640), torch.arange(6) % 3
    graphs = compile_step(model, F.cross_entropy, inputs, targets)
    manifest = describe_whole(model, inputs[:2], task="t")
    step, evaluation = check_graphs(graphs, manifest)
    # Two matrices [80, 41] meet 34 frames.
    assert evaluation.seconds(1) > 2e-11 * 2 * 2 * 80 * 41 * 34
    assert step.seconds(1) > evaluation.seconds(1)

    network = Network(manifest, Sessions(graphs))
    network.load({name: value.numpy() for name, value in model.state_dict().items()})
    training = Training(network, Rule("sgd", learning_rate=0.05))
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(6):
        rows = slice(0, 6 if number % 2 else 4)
        found = training.step(inputs[rows].numpy(), targets[rows].numpy())
        optimiser.zero_grad()
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        optimiser.step()
        assert found == pytest.approx(loss.item(), rel=1e-4)
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(network.tensors[name], value.numpy(), atol=1e-4)

    skeleton = make_skeleton(model, inputs, manifest)
    filled = fill(
        skeleton, manifest.with_graphs({"skeleton": skeleton}), {k: v.numpy() for k, v in model.state_dict().items()}
    )
    assert not {node.op_type for node in onnx.load_from_string(filled).graph.node} & {"STFT", "DFT"}
    session = onnxruntime.InferenceSession(filled, providers=["CPUExecutionProvider"])
    for count in (1, 2, 6):
        (output,) = session.run(None, {"input": inputs[:count].numpy()})
        np.testing.assert_allclose(output, model(inputs[:count]).detach().numpy(), atol=1e-4)
