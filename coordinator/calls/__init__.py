"""Handle calls: bodies, limits, threads, signals, problems."""
