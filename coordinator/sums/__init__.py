"""Sums: what adds the updates of a round, and reads no records."""
