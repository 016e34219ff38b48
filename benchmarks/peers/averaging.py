"""``.venv-peers/bin/python -m benchmarks.peers.averaging SHAPES UPDATES``: Flower's average of whole models.

For every line of input it averages UPDATES models of these shapes (JSON: lists of integers) in memory, and prints the
milliseconds of processor time per model.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.server.strategy.aggregate import aggregate


def main() -> None:
    """Answer until the input ends."""
    chance = np.random.Generator(np.random.PCG64(0))
    shapes = json.loads(sys.argv[1])
    count = int(sys.argv[2])
    updates = [([chance.standard_normal(shape, dtype=np.float32) for shape in shapes], 100 + n) for n in range(count)]
    for _ in sys.stdin:
        begin = time.thread_time_ns()
        aggregate(updates)
        print((time.thread_time_ns() - begin) / 1e6 / count, flush=True)


if __name__ == "__main__":
    main()
