"""How calls are taken in and answered: bodies, limits, threads, signals, problems; none is a call of its own."""
