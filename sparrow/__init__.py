"""Sparse personalised federated learning on real devices: the command ``sparrow``, and the functions behind it.

    from sparrow import Client, DeviceProgress, Seeded, Task, SdkError, join, publish, simulate

Names are imported on first use: importing this package loads neither torch nor httpx. These functions report expected
errors as ``SdkError`` (``edge_sdk/errors.py``).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_sdk.device.embedding import DeviceProgress
    from edge_sdk.errors import SdkError
    from edge_sdk.join import JoinOptions, join
    from edge_sdk.publish import PublishOptions, publish
    from edge_sdk.tasks import Seeded, Task

    from .client import Client
    from .simulation.simulate import SimulationOptions, simulate

__all__ = [
    "Client",
    "DeviceProgress",
    "JoinOptions",
    "PublishOptions",
    "SdkError",
    "Seeded",
    "SimulationOptions",
    "Task",
    "join",
    "publish",
    "simulate",
]

_MODULES = {
    "Client": "sparrow.client",
    "DeviceProgress": "edge_sdk.device.embedding",
    "JoinOptions": "edge_sdk.join",
    "PublishOptions": "edge_sdk.publish",
    "SdkError": "edge_sdk.errors",
    "Seeded": "edge_sdk.tasks",
    "SimulationOptions": "sparrow.simulation.simulate",
    "Task": "edge_sdk.tasks",
    "join": "edge_sdk.join",
    "publish": "edge_sdk.publish",
    "simulate": "sparrow.simulation.simulate",
}


LIGHT = ("Client", "DeviceProgress", "SdkError")
"""Names that are available on a device that cannot train."""


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` from its module. Raises CannotTrain if this device lacks the packages to train."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in LIGHT:
        from edge_sdk.device import trainable

        trainable.check(module="torch" if name in ("publish", "PublishOptions") else None)
    return getattr(importlib.import_module(_MODULES[name]), name)
