"""The accelerator, threads, memory format and precision that this device computes with.

Travels with the task, because model and task go everywhere together. The default changes nothing: the processor, as
many threads as the process has, the format that ``layout`` takes for the model, float32.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadArgument

ACCELERATORS = ("auto", "cpu", "cuda")
PROCESSOR = "cpu"

DRIVERS = ("nvidiactl", "nvhost-gpu", "nvgpu", "dxg", "kfd")
"""Device nodes of the drivers of GPUs that PyTorch computes on: NVIDIA's, on a Jetson, in WSL, and AMD's."""


@dataclass(frozen=True)
class Compute:
    """The settings with which a task's model is trained and judged on this device.

    device: cpu or cuda. threads: of the processor; None leaves the process's. channels_last: whether convolutions run
    in that memory format, where the model takes it; None lets the model decide (``layout``). bfloat16: the forward pass
    in bfloat16 where torch's autocast thinks it safe; weights and optimiser stay float32.
    """

    device: str = PROCESSOR
    threads: int | None = None
    channels_last: bool | None = None
    bfloat16: bool = False

    def precision(self) -> AbstractContextManager[object]:
        """Entered around a forward pass and its loss."""
        if not self.bfloat16:
            return nullcontext()
        import torch

        return torch.autocast(self.device, dtype=torch.bfloat16)

    def wait(self) -> None:
        """Until the device has done what it was given, so that a clock can be read."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def __str__(self) -> str:
        format_ = {None: "the model's usual memory format", True: "channels last", False: "channels first"}
        torch = sys.modules.get("torch")
        threads = self.threads or (torch.get_num_threads() if torch else 1)
        processor = f"cpu, {threads} thread{'s' * (threads > 1)}, {format_[self.channels_last]}"
        where = processor if self.device == PROCESSOR else self.device
        return f"{where}, {'bfloat16 by autocast' if self.bfloat16 else 'float32'}"


USUAL = Compute()


def choose_device(accelerator: str, *, deterministic: bool = False, nodes: Path = Path("/dev")) -> str:
    """Return the device, cpu or cuda, that ``accelerator`` (one of ACCELERATORS) stands for; ``auto`` is CUDA where
    there is one and PyTorch is installed, which alone computes on it.

    deterministic: results are to be the same bit for bit, which is promised on a processor only. nodes: the folder of
    device nodes; without a GPU's driver in it, ``auto`` does not import PyTorch, which takes seconds. Raises
    BadArgument where CUDA is asked for and absent, or both are asked for, and for a word that is none of them.
    """
    if accelerator not in ACCELERATORS:
        raise BadArgument(f"accelerator={accelerator!r} is not known; give one of {', '.join(ACCELERATORS)}")
    if accelerator == "cpu" or (accelerator == "auto" and deterministic):
        return PROCESSOR
    if deterministic:
        raise BadArgument("the same bits are promised on a processor only; give --accelerator cpu")
    if accelerator == "auto" and not any((nodes / driver).exists() for driver in DRIVERS):
        return PROCESSOR
    try:
        import torch
    except ImportError:
        if accelerator == "auto":
            return PROCESSOR
        raise BadArgument(
            "--accelerator cuda needs PyTorch, which is not installed; install it, or give auto or cpu"
        ) from None
    if torch.cuda.is_available():
        return "cuda"
    if accelerator == "cuda":
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise BadArgument(f"--accelerator cuda, but this PyTorch ({torch.__version__}) {built}; give auto or cpu")
    return PROCESSOR
