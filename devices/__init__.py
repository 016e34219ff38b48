"""Hardware, energy use and operating conditions of this device.

The package is independent of federated learning, uses only the standard library and never changes the device's
settings. Every value has a `Quality`: measured, derived, estimated, or unavailable with a reason.
"""

from .energy import Energy, EnergyMeter, Phase
from .estimate import PowerModel
from .readings import Files, Quality, Reading, Reason
from .system import System

__all__ = ["Energy", "EnergyMeter", "Files", "Phase", "PowerModel", "Quality", "Reading", "Reason", "System"]
