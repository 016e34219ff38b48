"""Rounds: cohorts, assignments, and the aggregation of updates into the next model."""
