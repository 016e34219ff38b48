"""A coordinator that is asked to stop while it evaluates the global model."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from sparrow.protocol import checkpoint
from sparrow.protocol.builtin import load_builtin

from .conftest import Coordinator, wait_until

pytestmark = pytest.mark.integration


def test_a_coordinator_that_is_asked_to_stop_ends_its_evaluation(coordinator: Coordinator) -> None:
    count, shape = 100_000, load_builtin("digits").manifest.input_shape
    tensors = {"inputs": np.zeros((count, *shape), np.float32), "targets": np.zeros(count, np.int64)}
    headers = {"Content-Type": checkpoint.MEDIA_TYPE}
    coordinator.create("lab")
    process = psutil.Process(coordinator.pid)
    with ThreadPoolExecutor(1) as pool:
        path, body = "/v1/federations/lab/model/evaluation", checkpoint.save(tensors)
        answer = pool.submit(coordinator.http.post, path, content=body, headers=headers, timeout=60)
        (child,) = wait_until(process.children, "the process of the evaluation")
        coordinator.signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert "is stopping; retry after its restart" in answer.result().json()["detail"]
    wait_until(lambda: not coordinator.runs, "the end of the coordinator")
    assert not child.is_running()
