"""The software of a device: federated rounds, local training and a personal model.

This package must not import torch: ``sparrow.protocol`` and ``edge_sdk.predict`` run without it.
"""
