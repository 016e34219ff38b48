"""The software of a device: one conversation with a coordinator, local training, a personal model.

The root stays light on purpose: ``sparrow.protocol`` and ``edge_sdk.predict`` import no torch, so nothing here may.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # pip refuses such a Python, but sources can be run as they lie there
    from .device.trainable import exit_unless_trainable

    exit_unless_trainable("edge_sdk")
