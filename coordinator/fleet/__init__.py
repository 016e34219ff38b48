"""Federations, their devices, and who may do what."""
