"""Accelerator, threads, memory format and precision of this device; by default PyTorch's own."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadArgument

ACCELERATORS = ("auto", "cpu", "cuda")
PROCESSOR = "cpu"

# Device nodes of GPU drivers: NVIDIA's, on a Jetson, in WSL, and AMD's.
DRIVERS = ("nvidiactl", "nvhost-gpu", "nvgpu", "dxg", "kfd")


@dataclass(frozen=True)
class Compute:
    """The settings with which this device trains and evaluates a task's model."""

    # Cpu or cuda.
    device: str = PROCESSOR
    # Threads of the processor; None keeps the process's.
    threads: int | None = None
    # Memory format of convolutions; None lets ``layout`` choose.
    channels_last: bool | None = None
    # Forward pass under torch's autocast; weights and optimiser stay float32.
    bfloat16: bool = False

    def precision(self) -> AbstractContextManager[object]:
        """Return the context manager for a forward pass and its loss."""
        if not self.bfloat16:
            return nullcontext()
        import torch

        return torch.autocast(self.device, dtype=torch.bfloat16)

    def wait(self) -> None:
        """Synchronise with the device, for timing."""
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
    """Return the device, cpu or cuda, for ``accelerator``, one of ACCELERATORS.

    deterministic: bitwise equal results. nodes: folder of device nodes. Raises BadArgument, also for CUDA if it is
    missing or ``deterministic`` is set.
    """
    if accelerator not in ACCELERATORS:
        raise BadArgument(f"unknown accelerator {accelerator!r}; choose from {', '.join(ACCELERATORS)}")
    if accelerator == "cpu" or (accelerator == "auto" and deterministic):
        return PROCESSOR
    if deterministic:
        raise BadArgument("bitwise equal results are guaranteed only on a processor; give --accelerator cpu")
    # Importing PyTorch takes seconds and is useless without a GPU's driver.
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
