"""``sparrow evaluate``: evaluate a running coordinator's global model on a test file.

    sparrow evaluate digits --server http://HOST:8000 --data test.npz

The file is made with numpy.savez: the model's inputs, scaled as in training, and their classes. Exit codes:
docs/cli.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from urllib.parse import quote
from zipfile import BadZipFile

import httpx
import numpy as np

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.nearest import nearest
from sparrow.command_line.options import add_json, add_server
from sparrow.protocol import checkpoint, tls
from sparrow.protocol.messages import Evaluation, Problem

from ..errors import EvaluationRefused, NoAnswer, OperatorError

SECONDS = 600.0


def evaluate(
    server: str,
    federation: str,
    data: Path,
    inputs: str,
    targets: str,
    token: str | None = None,
    trust: tls.Tls | None = None,
) -> Evaluation:
    """Return the coordinator's evaluation of its global model.

    token: an admin's; by default SPARROW_ADMIN_TOKEN. trust: certificates for https.

    Raises FileNotFoundError, OperatorError, NoAnswer, EvaluationRefused; WrongUsage for an invalid address or
    certificate.
    """
    if not data.is_file():
        raise FileNotFoundError(f"there is no file {data}")
    try:
        with data.open("rb") as file, np.lib.npyio.NpzFile(file) as arrays:
            tensors = {"inputs": arrays[inputs], "targets": arrays[targets]}
    except KeyError as missing:
        raise OperatorError(f"{data}: {missing}; give the arrays' names with --inputs and --targets") from None
    except (OSError, ValueError, EOFError, TypeError, BadZipFile) as error:
        raise OperatorError(f"{data} is not an npz file ({error}); make one with numpy.savez") from None
    token = token or os.environ.get("SPARROW_ADMIN_TOKEN")
    allowed = {"Authorization": f"Bearer {token}"} if token else {}
    headers = {"Content-Type": checkpoint.MEDIA_TYPE, **allowed}
    federations = f"{server.rstrip('/')}/v1/federations"
    url = f"{federations}/{quote(federation, safe='')}/model/evaluation"
    try:
        verify = trust.context() if trust else True
        answer = httpx.post(url, content=checkpoint.save(tensors), headers=headers, timeout=SECONDS, verify=verify)
    except tls.BadCertificate as error:
        raise WrongUsage(str(error)) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise WrongUsage(f"{server} is not an address ({error}); give it as http://HOST:PORT or https://HOST") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"{server} does not answer: {tls.explain(error) or tls.hint(error, server)}") from None
    if answer.is_error:
        try:
            detail = Problem.model_validate_json(answer.content).detail
        except ValueError:
            raise NoAnswer(
                f"the server at {server} is not a coordinator (HTTP {answer.status_code}); check --server"
            ) from None
        if answer.status_code == httpx.codes.NOT_FOUND:
            there = httpx.get(federations, headers=allowed, timeout=SECONDS, verify=verify)
            names = [each["name"] for each in there.json()] if there.is_success else []
            if names and federation not in names:
                detail = (
                    f"there is no federation {federation!r}; there are {', '.join(names)}{nearest(federation, names)}"
                )
        raise EvaluationRefused(answer.status_code, detail)
    return Evaluation.model_validate_json(answer.content)


def _options(parser: Parser) -> None:
    parser.add_argument("federation", metavar="FEDERATION", help="the federation's name")
    add_server(parser)
    parser.add_argument("--data", type=Path, required=True, help="test file, made with numpy.savez")
    parser.add_argument("--inputs", default="inputs", help="array of samples in the file (default: %(default)s)")
    parser.add_argument("--targets", default="targets", help="array of classes in the file (default: %(default)s)")
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
    "Evaluate a running coordinator's global model on a test file.",
    _options,
    _run,
    epilog="Set SPARROW_ADMIN_TOKEN if the coordinator requires an admin token.",
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
