"""``sparrow evaluate``: evaluate a running coordinator's global model on a test file.

    sparrow evaluate digits --server http://HOST:8000 --data test.npz

The file is made with numpy.savez: the model's inputs, scaled as in training, and their classes. Exit codes:
docs/cli.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from edge_sdk.arguments import add_federation

from .command_line.command import Command, Parser
from .operating import add_coordinator, connected
from .protocol import checkpoint
from .reading.errors import DataError


def read(data: Path, inputs: str, targets: str) -> bytes:
    """Return the body of an evaluation.

    inputs, targets: the arrays' names. Raises FileNotFoundError if the file is missing, DataError if it is no npz file
    or lacks an array.
    """
    if not data.is_file():
        raise FileNotFoundError(f"there is no file {data}")
    try:
        with data.open("rb") as file, np.lib.npyio.NpzFile(file) as arrays:
            return checkpoint.save({"inputs": arrays[inputs], "targets": arrays[targets]})
    except KeyError as missing:
        raise DataError(f"{data}: {missing}; give the arrays' names with --inputs and --targets") from None
    except (OSError, ValueError, EOFError, TypeError, BadZipFile) as error:
        raise DataError(f"{data} is not an npz file ({error}); make one with numpy.savez") from None


def _options(parser: Parser) -> None:
    add_federation(parser)
    parser.add_argument("--data", type=Path, required=True, help="test file, made with numpy.savez")
    parser.add_argument("--inputs", default="inputs", help="array of samples in the file (default: %(default)s)")
    parser.add_argument("--targets", default="targets", help="array of classes in the file (default: %(default)s)")
    add_coordinator(parser)


def _run(options: argparse.Namespace) -> None:
    body = read(options.data, options.inputs, options.targets)
    with connected(options, ("admin",)) as transport:
        # if it does not exist, the error lists the federations
        transport.federation(options.federation)
        found = transport.evaluation(options.federation, body)
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
