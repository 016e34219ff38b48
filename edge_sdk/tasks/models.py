"""The networks of the built-in tasks, with the scale on which each wants its inputs.

``MODELS[task]`` maps the name of a model to its ``Choice``; the first is the task's default, so that ``mnist`` means
``mnist:small``. Every network takes a batch first and gives class scores before softmax. A name such as ``fedsgc`` is
the paper whose experiments used the network; parameter counts are those that the papers or their code give, and are
tested. ReLU and max-pooling commute exactly, so pooling comes first: same function, a quarter of the ReLUs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Choice:
    """A network and its inputs: samples of ``shape``, of which each channel is scaled to (x - mean) / deviation.

    ``mean`` and ``deviation`` have one entry per channel, in the units of the stored samples (grey levels 0..255, or
    the sensor's own). ``parameters`` counts the trainable values, biases and norms included.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    parameters: int


def mnist_small() -> nn.Module:
    """[N,1,28,28] -> [N,10]: two convolutions of 5 x 5 and 50 hidden units, PyTorch's old MNIST example."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 10, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(320, 50),
            relu3=nn.ReLU(),
            out=nn.Linear(50, 10),
        )
    )


def mnist_fedsgc() -> nn.Module:
    """[N,1,28,28] -> [N,10]: FedSGC's MNIST network; its pooling of 3 x 3 in steps of 1 hardly shrinks the maps."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 10, kernel_size=5),
            pool1=nn.MaxPool2d(3, stride=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, kernel_size=5),
            pool2=nn.MaxPool2d(3, stride=1),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(5120, 50),
            relu3=nn.ReLU(),
            out=nn.Linear(50, 10),
        )
    )


def mnist_leaf() -> nn.Module:
    """[N,1,28,28] -> [N,10]: LEAF's FEMNIST network without padding, as pFedGate uses it, with ten outputs."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(1024, 2048),
            relu3=nn.ReLU(),
            out=nn.Linear(2048, 10),
        )
    )


def cifar10_fedspu() -> nn.Module:
    """[N,3,32,32] -> [N,10]: FedSPU's CIFAR-10 network, batch norm and hidden linear layers without biases."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, kernel_size=3, padding=1),
            bn1=nn.BatchNorm2d(6),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(6, 16, kernel_size=3, padding=1),
            bn2=nn.BatchNorm2d(16),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(1024, 120, bias=False),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84, bias=False),
            relu4=nn.ReLU(),
            out=nn.Linear(84, 10),
        )
    )


def cifar10_fedsgc() -> nn.Module:
    """[N,3,32,32] -> [N,10]: FedSGC's CIFAR-10 network; the third convolution leaves one pixel."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 32, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(64, 64, kernel_size=5),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64, 1024),
            relu4=nn.ReLU(),
            out=nn.Linear(1024, 10),
        )
    )


def cifar10_dmpfl() -> nn.Module:
    """[N,3,32,32] -> [N,10]: the network that DM-PFL's costs on CIFAR-10 imply."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(64, 64, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(1600, 384),
            relu3=nn.ReLU(),
            fc2=nn.Linear(384, 192),
            relu4=nn.ReLU(),
            out=nn.Linear(192, 10),
        )
    )


def cifar10_pfedgate() -> nn.Module:
    """[N,3,32,32] -> [N,10]: pFedGate's CIFAR-10 network, without the ReLU that its code puts on the class scores."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 32, kernel_size=5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(1600, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            out=nn.Linear(84, 10),
        )
    )


def har_small() -> nn.Module:
    """[N,6,64] windows of accelerometer and gyroscope -> [N,5]: three convolutions in time and 64 hidden units.

    Group norm, because people differ and batch norm's running statistics would mix them.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(6, 32, kernel_size=5, padding=2),
            norm1=nn.GroupNorm(4, 32),
            pool1=nn.MaxPool1d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv1d(32, 64, kernel_size=5, padding=2),
            norm2=nn.GroupNorm(4, 64),
            pool2=nn.MaxPool1d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv1d(64, 64, kernel_size=3, padding=1),
            norm3=nn.GroupNorm(4, 64),
            pool3=nn.MaxPool1d(2),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(512, 64),
            relu4=nn.ReLU(),
            out=nn.Linear(64, 5),
        )
    )


def _grey_levels(*shares: float) -> tuple[float, ...]:
    """Shares of full brightness, as papers give them, in grey levels."""
    return tuple(255 * share for share in shares)


_MNIST = ((1, 28, 28), _grey_levels(0.1307), _grey_levels(0.3081))
_CIFAR = ((3, 32, 32), _grey_levels(0.4914, 0.4822, 0.4465), _grey_levels(0.2023, 0.1994, 0.2010))
_CIFAR_HALF = ((3, 32, 32), _grey_levels(0.5, 0.5, 0.5), _grey_levels(0.5, 0.5, 0.5))

# Over all 7,226 windows of the public set: m/s^2 along x, y, z (gravity included, hence the means), then rad/s.
_HAR = (
    (6, 64),
    (-5.0153, -1.5459, 0.2286, -0.0026, 0.0153, 0.0223),
    (5.2587, 6.4453, 4.0262, 1.3970, 1.2346, 1.0315),
)

MODELS: dict[str, dict[str, Choice]] = {
    "mnist": {
        "small": Choice(mnist_small, *_MNIST, parameters=21_840),
        "fedsgc": Choice(mnist_fedsgc, *_MNIST, parameters=261_840),
        "leaf": Choice(mnist_leaf, *_MNIST, parameters=2_171_786),
    },
    "cifar10": {
        "fedspu": Choice(cifar10_fedspu, *_CIFAR_HALF, parameters=134_902),
        "fedsgc": Choice(cifar10_fedsgc, *_CIFAR, parameters=232_970),
        "dmpfl": Choice(cifar10_dmpfl, *_CIFAR, parameters=797_962),
        "pfedgate": Choice(cifar10_pfedgate, *_CIFAR, parameters=256_830),
    },
    "har": {"small": Choice(har_small, *_HAR, parameters=57_125)},
}
"""Task -> name of the model -> the model; the first is the default."""


def full_name(task: str, model: str) -> str:
    """Return the full name of a task: the default model is left out, as in ``mnist`` and ``mnist:leaf``."""
    return task if model == next(iter(MODELS[task])) else f"{task}:{model}"
