"""A check that this device can train.

Training takes a 64-bit Python, with ONNX Runtime or PyTorch. A device without can still run an exported model, and that
is what it is told, in one line. Decided by the Python that runs, not by ``uname``: a 64-bit kernel often runs a 32-bit
system, and neither is made for those.
"""

from __future__ import annotations

import importlib
import struct
import sysconfig

from sparrow.command_line.exits import Exit
from sparrow.protocol.errors import SdkError

INSTALL = {
    "onnxruntime": "pip install 'sparrow-fl[device]' brings it",
    "torch": (
        "pip install torch --extra-index-url https://download.pytorch.org/whl/cpu "
        "and then pip install 'sparrow-fl[device-torch]' bring it"
    ),
}
ADVICE = (
    "it can predict with an exported model: sparrow predict, or where ONNX Runtime has no wheel, one that you build"
)


class CannotTrain(SdkError):
    """This device cannot train; the text says why and what it can do."""

    exit_code = Exit.CANNOT


def check(
    *,
    pointer_bytes: int = struct.calcsize("P"),
    platform: str = sysconfig.get_platform(),
    module: str | None = "torch",
) -> None:
    """Raise CannotTrain unless a Python can train.

    pointer_bytes, platform: what ``struct.calcsize("P")`` and ``sysconfig.get_platform()`` say of it; by default of
    this one. module: imported, to see that it is there and loads; None: not asked for.
    """
    if pointer_bytes < 8:
        raise CannotTrain(
            f"this device cannot train, because its Python is one of {8 * pointer_bytes} bits ({platform}) and PyTorch "
            f"and ONNX Runtime are made for 64; {ADVICE}"
        )
    if module is None:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        lacks = isinstance(error, ModuleNotFoundError) and error.name == module
        how = f"{INSTALL.get(module, INSTALL['torch'])}; without, " if lacks else ""
        why = "is not installed" if lacks else f"does not load ({error})"
    except OSError as error:  # a library of the system's that is not there, or is of another kind of processor
        how, why = "", f"does not load ({error})"
    else:
        return
    package = "ONNX Runtime" if module == "onnxruntime" else "PyTorch"
    raise CannotTrain(f"this device cannot train, because {package} {why} (Python of {platform}); {how}{ADVICE}")
