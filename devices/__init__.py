"""Board, energy and conditions of a device, read from the device itself.

The package knows nothing of federated learning, needs only the standard library and changes no setting of the device.
Every figure carries its `Quality`: measured, derived, estimated, or unavailable with a reason.
"""

from .energy import Energy, EnergyMeter, Phase
from .estimate import PowerModel
from .readings import Files, Quality, Reading, Reason
from .system import System

__all__ = ["Energy", "EnergyMeter", "Files", "Phase", "PowerModel", "Quality", "Reading", "Reason", "System"]
