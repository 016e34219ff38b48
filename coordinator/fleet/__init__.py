"""Federations, their devices, and permissions."""
