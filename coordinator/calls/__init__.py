"""Handling of calls: bodies, limits, threads, signals, problems."""
