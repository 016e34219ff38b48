"""Rounds: who takes part, what is asked, how updates become the next model."""
