"""A client of Flower's old gRPC API that does not train: ``grpc_client ADDRESS NUMBER``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from flwr.client import NumPyClient, start_client


class Plain(NumPyClient):  # type: ignore[misc]
    """A client that adds a little to every value, by another amount in every client."""

    def __init__(self, number: int) -> None:
        self._step = np.float32(1e-3 * (1 + number))

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return [array + self._step for array in parameters], 100, {}


if __name__ == "__main__":
    start_client(server_address=sys.argv[1], client=Plain(int(sys.argv[2])).to_client())
