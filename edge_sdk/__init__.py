"""The software of a device: one conversation with a coordinator, local training, a personal model.

The root stays light on purpose: ``sparrow.protocol`` and ``edge_sdk.predict`` import no torch, so nothing here may.
"""
