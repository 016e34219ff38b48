"""``python -m coordinator.evaluate``: have a running coordinator judge its global model on a test file of one's own.

    python -m coordinator.evaluate --server http://HOST:8000 --federation digits --data test.npz

The file is what numpy.savez wrote: samples as the model takes them, scaled as in training, and their classes. Exit
status: 0 done; 1 the file or the coordinator's answer is no good, with the reason on stderr; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from zipfile import BadZipFile

import httpx
import numpy as np

from edge_sdk.protocol import checkpoint, tls
from edge_sdk.protocol.messages import Evaluation, Problem

SECONDS = 600.0


def evaluate(
    server: str,
    federation: str,
    data: Path,
    inputs: str,
    targets: str,
    token: str | None,
    trust: tls.Tls | None = None,
) -> Evaluation:
    """What the coordinator finds. trust: certificates for https.

    Raises ValueError, which says what is wrong with the file or the call.
    """
    try:
        with data.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            tensors = {"inputs": arrays[inputs], "targets": arrays[targets]}
    except FileNotFoundError:
        raise ValueError(f"there is no file {data}") from None
    except KeyError as missing:
        raise ValueError(f"{data}: {missing}; name its arrays with --inputs and --targets") from None
    except (OSError, ValueError, EOFError, TypeError, BadZipFile) as error:
        raise ValueError(f"{data} is not a file that numpy.savez wrote: {error}") from None
    headers = {"Content-Type": checkpoint.MEDIA_TYPE, **({"Authorization": f"Bearer {token}"} if token else {})}
    url = f"{server.rstrip('/')}/v1/federations/{federation}/model/evaluation"
    try:
        verify = trust.context() if trust else True
        answer = httpx.post(url, content=checkpoint.save(tensors), headers=headers, timeout=SECONDS, verify=verify)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"{server} does not answer: {tls.explain(error) or tls.hint(error, server)}") from None
    if answer.is_error:
        try:
            raise ValueError(Problem.model_validate_json(answer.content).detail)
        except ValueError as error:
            raise ValueError(f"{answer.status_code} {error}") from None
    return Evaluation.model_validate_json(answer.content)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.evaluate", description="Judge a global model.")
    parser.add_argument("--server", required=True, help="the coordinator's address, http://HOST:PORT")
    parser.add_argument("--federation", default="default", help="the federation's name (default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="test file, as numpy.savez writes it")
    parser.add_argument("--inputs", default="inputs", help="its array of samples (default: %(default)s)")
    parser.add_argument("--targets", default="targets", help="its array of classes (default: %(default)s)")
    tls.add_options(parser)
    parser.epilog = "SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one."
    options = parser.parse_args(arguments)
    token = os.environ.get("SPARROW_ADMIN_TOKEN")
    try:
        found = evaluate(
            options.server,
            options.federation,
            options.data,
            options.inputs,
            options.targets,
            token,
            tls.from_options(options),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{found.num_examples} samples: accuracy {found.accuracy:.4f}, loss {found.loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
