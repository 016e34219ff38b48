"""Sums of a round's updates, without access to the records."""
