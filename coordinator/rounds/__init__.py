"""Rounds: cohorts, assignments, and the way from updates to the next model."""
