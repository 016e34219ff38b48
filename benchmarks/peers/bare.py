"""``python -m benchmarks.peers.bare``: federated averaging without a framework.

Forked processes take the devices of a round from one queue, read the global model from shared memory and write theirs
there; the parent averages in float64. They share the data that the parent loaded before it forked.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing import connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.peers import report


def run(data: Path, rounds: int, processes: int, seed: int) -> dict[str, Any]:
    """Run the whole experiment."""
    clock = report.Clock()
    # Imported here, because the watching process does not need torch.
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from benchmarks.peers import work

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    samples = work.load(data)
    shares = work.deal(len(samples), seed)
    model = work.Net()
    # The first optimiser imports many modules: make it before the fork, so that all processes share them.
    torch.optim.SGD(model.parameters())
    shared = parameters_to_vector(model.parameters()).detach().clone()
    trained = torch.zeros(peers.COHORT, len(shared))
    for tensor in (shared, trained):
        tensor.share_memory_()  # type: ignore[no-untyped-call]

    def serve(jobs: SimpleQueue[tuple[int, int, int] | None], results: connection.Connection) -> None:
        while (job := jobs.get()) is not None:
            slot, device, number = job
            vector_to_parameters(shared.clone(), model.parameters())
            processor = work.train(model, samples, shares[device], hash((seed, number, device)))
            trained[slot] = parameters_to_vector(model.parameters()).detach()
            results.send((slot, time.time(), processor))

    context = multiprocessing.get_context("fork")
    jobs: SimpleQueue[tuple[int, int, int] | None] = context.SimpleQueue()
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    workers = [context.Process(target=serve, args=(jobs, pipe[1]), daemon=True) for pipe in pipes]
    for worker in workers:
        worker.start()
    readers = [pipe[0] for pipe in pipes]
    sentinels = [worker.sentinel for worker in workers]
    draw = np.random.default_rng(seed)
    for number in range(rounds):
        cohort = draw.choice(peers.DEVICES, peers.COHORT, replace=False).tolist()
        for slot, device in enumerate(cohort):
            jobs.put((slot, device, number))
        waiting = set(range(peers.COHORT))
        while waiting:
            for ready in connection.wait([*readers, *sentinels]):
                if not isinstance(ready, connection.Connection):
                    raise SystemExit("a process of the bare loop died")
                slot, at, processor = ready.recv()
                waiting.discard(slot)
                clock.device_trained(at, processor)
        weights = torch.tensor([len(shares[device]) for device in cohort], dtype=torch.float64)
        shared.copy_((trained.double() * weights[:, None]).sum(0) / weights.sum())
        clock.round_ended()
    for _ in workers:
        jobs.put(None)
    for worker in workers:
        worker.join()
    clock.stopped = time.time()
    vector_to_parameters(shared.clone(), model.parameters())
    judged = work.accuracy(model, work.load(data, "test"))
    return report.outcome("bare", f"torch {torch.__version__}", clock, peers.COHORT, judged)


def main(arguments: list[str] | None = None) -> int:
    """Print one run as one line."""
    options = report.parser("bare").parse_args(arguments)
    if not options.unwatched:
        return report.watch("benchmarks.peers.bare", options)
    print(json.dumps(run(options.data, options.rounds, options.processes, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
