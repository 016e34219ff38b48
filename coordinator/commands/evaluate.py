"""``sparrow evaluate``: have a running coordinator judge its global model on a test file of one's own.

    sparrow evaluate --server http://HOST:8000 --federation digits --data test.npz

The file is what numpy.savez wrote: samples as the model takes them, scaled as in training, and their classes. Exit
codes: docs/cli.md.
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
from sparrow.command_line.command import Command, Parser, WrongUsage, add_json
from sparrow.command_line.exits import Exit, of_status
from sparrow.coordinator.errors import CoordinatorError

SECONDS = 600.0


class BadFile(CoordinatorError):
    """The test file cannot be used; the text says why."""


class NoAnswer(CoordinatorError):
    """No coordinator answers at this address."""

    exit_code = Exit.UNREACHABLE


class Refused(CoordinatorError):
    """The coordinator answered no, with this HTTP status; the text says what to do."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.status = status
        self.exit_code = of_status(status)


def evaluate(
    server: str,
    federation: str,
    data: Path,
    inputs: str,
    targets: str,
    token: str | None = None,
    trust: tls.Tls | None = None,
) -> Evaluation:
    """What the coordinator finds. token: an admin's; without, that of SPARROW_ADMIN_TOKEN. trust: certificates for
    https.

    Raises FileNotFoundError, BadFile, WrongUsage for an address that is none, NoAnswer, Refused, tls.BadCertificate.
    """
    if not data.is_file():
        raise FileNotFoundError(f"there is no file {data}")
    try:
        with data.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            tensors = {"inputs": arrays[inputs], "targets": arrays[targets]}
    except KeyError as missing:
        raise BadFile(f"{data}: {missing}; name its arrays with --inputs and --targets") from None
    except (OSError, ValueError, EOFError, TypeError, BadZipFile) as error:
        raise BadFile(f"{data} is not a file that numpy.savez wrote: {error}") from None
    token = token or os.environ.get("SPARROW_ADMIN_TOKEN")
    headers = {"Content-Type": checkpoint.MEDIA_TYPE, **({"Authorization": f"Bearer {token}"} if token else {})}
    url = f"{server.rstrip('/')}/v1/federations/{federation}/model/evaluation"
    try:
        verify = trust.context() if trust else True
        answer = httpx.post(url, content=checkpoint.save(tensors), headers=headers, timeout=SECONDS, verify=verify)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise WrongUsage(f"{server} is no address ({error}); give it as http://HOST:PORT or https://HOST") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"{server} does not answer: {tls.explain(error) or tls.hint(error, server)}") from None
    if answer.is_error:
        try:
            detail = Problem.model_validate_json(answer.content).detail
        except ValueError:
            raise NoAnswer(f"{server} answers {answer.status_code}, and is no coordinator") from None
        raise Refused(answer.status_code, detail)
    return Evaluation.model_validate_json(answer.content)


def _options(parser: Parser) -> None:
    parser.add_argument("--server", required=True, help="the coordinator's address, http://HOST:PORT")
    parser.add_argument("--federation", default="default", help="the federation's name (default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="test file, as numpy.savez writes it")
    parser.add_argument("--inputs", default="inputs", help="its array of samples (default: %(default)s)")
    parser.add_argument("--targets", default="targets", help="its array of classes (default: %(default)s)")
    add_json(parser)
    tls.add_options(parser)


def _run(options: argparse.Namespace) -> None:
    found = evaluate(
        options.server,
        options.federation,
        options.data,
        options.inputs,
        options.targets,
        trust=tls.from_options(options),
    )
    text = f"{found.num_examples} samples: accuracy {found.accuracy:.4f}, loss {found.loss:.4f}"
    print(found.model_dump_json() if options.json else text)


COMMAND = Command(
    "sparrow evaluate",
    "Have a running coordinator judge its global model on a test file.",
    _options,
    _run,
    epilog="SPARROW_ADMIN_TOKEN holds the admin token where the coordinator asks for one.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
