"""A check that this device can train.

Training needs a 64-bit Python with ONNX Runtime or PyTorch; other devices can still run an exported model. ``uname`` is
not used: a 64-bit kernel often runs a 32-bit system.
"""

from __future__ import annotations

import importlib
import struct
import sysconfig

from sparrow.command_line.exits import Exit
from sparrow.protocol.errors import SdkError
from sparrow.protocol.failures import Failure

INSTALL = {
    "onnxruntime": "pip install 'sparrow-fl[device]' installs it",
    "torch": (
        "pip install torch --extra-index-url https://download.pytorch.org/whl/cpu "
        "and then pip install 'sparrow-fl[device-torch]' install it"
    ),
}
ADVICE = (
    "it can predict with an exported model: sparrow predict, with your own build of ONNX Runtime if there is no wheel"
)


class CannotTrain(SdkError):
    """This device cannot train."""

    exit_code = Exit.CANNOT
    failure = Failure("cannot-train")


def check(
    *,
    pointer_bytes: int = struct.calcsize("P"),
    platform: str = sysconfig.get_platform(),
    module: str | None = "torch",
) -> None:
    """Raise CannotTrain unless a Python, by default this one, can train. module: imported, if given."""
    if pointer_bytes < 8:
        raise CannotTrain(
            f"this device cannot train, because its Python has {8 * pointer_bytes} bits ({platform}), and PyTorch and "
            f"ONNX Runtime need 64; {ADVICE}"
        )
    if module is None:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        lacks = isinstance(error, ModuleNotFoundError) and error.name == module
        how = f"{INSTALL.get(module, INSTALL['torch'])}; without, " if lacks else ""
        why = "is not installed" if lacks else f"does not load ({error})"
    # A system library is missing, or is for another kind of processor.
    except OSError as error:
        how = ""
        why = f"does not load ({error})"
    else:
        return
    package = "ONNX Runtime" if module == "onnxruntime" else "PyTorch"
    raise CannotTrain(f"this device cannot train, because {package} {why} (Python of {platform}); {how}{ADVICE}")
