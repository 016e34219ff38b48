"""What a device draws, read from the device itself: joules, with how they were come by.

This package knows nothing of federated learning and needs only the standard library. `EnergyMeter` measures a phase of
work, `PowerModel` stands in where no sensor exists, and every figure carries its `Quality`: measured, derived from
measured values, estimated by a model, or unavailable with the reason. It only ever reads: it changes no setting of the
device it runs on.
"""

from devices.energy import Energy, EnergyMeter, EnergyTotal, Phase
from devices.estimate import PowerModel
from devices.readings import Files, Quality, Reading, Reason

__all__ = ["Energy", "EnergyMeter", "EnergyTotal", "Files", "Phase", "PowerModel", "Quality", "Reading", "Reason"]
