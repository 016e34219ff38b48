"""The kind, the energy and the condition of a device, read from the device itself.

This package knows nothing of federated learning and needs only the standard library. `devices.board` says what it is,
`devices.conditions` what it is like, and `sparrow devices` prints all of it for a person. `EnergyMeter` measures a
phase of work, `PowerModel` stands in where no sensor exists, and every figure carries its `Quality`: measured, derived
from measured values, estimated by a model, or unavailable with the reason. It only ever reads: it changes no setting of
the device it runs on.
"""

from .energy import Energy, EnergyMeter, Phase
from .estimate import PowerModel
from .readings import Files, Quality, Reading, Reason
from .system import System

__all__ = ["Energy", "EnergyMeter", "Files", "Phase", "PowerModel", "Quality", "Reading", "Reason", "System"]
