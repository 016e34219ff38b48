"""``sparrow web``: download the packages with which pages in browsers train, once per coordinator.

The packages come from the npm registry in NPM_CONFIG_REGISTRY, or the public one, or from files made with ``npm pack``.
They are kept beside the installation (``coordinator/web/runtime.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tqdm import tqdm

from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.protocol.errors import BadArgument
from sparrow.transport import connect, httpx, tls

from ..errors import BadRuntime, OperatorError
from ..web import runtime

PUBLIC_REGISTRY = "https://registry.npmjs.org"
LARGEST_PACKAGE = 128 * 1024 * 1024


def _options(parser: Parser) -> None:
    parser.add_argument("--file", type=Path, nargs="+", help="package files to use instead of downloads")


def _run(options: argparse.Namespace) -> None:
    if options.file is None:
        for package in runtime.missing():
            runtime.keep(_download(package))
    for path in options.file or ():
        try:
            runtime.keep(path.read_bytes())
        except (BadRuntime, OSError) as error:
            raise BadRuntime(f"{path}: {error}") from None
    missing = runtime.missing()
    if missing:
        raise BadRuntime(f"{' and '.join(map(str, missing))} is still missing; give it with --file as well")
    for package in runtime.PACKAGES:
        size = sum((package.folder / f"{name}.gz").stat().st_size for name in package.files)
        print(f"{package} is installed: {size:,} bytes in {package.folder}")
    print("pages can train now, and verify signed models")


def _download(package: runtime.Package) -> bytes:
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or PUBLIC_REGISTRY
    url = f"{registry.rstrip('/')}/{package.path}"
    body = bytearray()
    try:
        client = connect(registry)
    except BadArgument as error:
        raise WrongUsage(f"the npm registry cannot be used: {error}; or correct NPM_CONFIG_REGISTRY") from None
    try:
        with client, client.stream("GET", f"/{package.path}", follow_redirects=True) as answer:
            answer.raise_for_status()
            size = int(answer.headers.get("content-length", 0)) or None
            with tqdm(total=size, disable=None, unit="B", unit_scale=True, desc=package.name) as bar:
                for part in answer.iter_bytes():
                    body += part
                    bar.update(len(part))
                    if len(body) > LARGEST_PACKAGE:
                        raise BadRuntime(f"{url} has more than {LARGEST_PACKAGE:,} bytes; check NPM_CONFIG_REGISTRY")
    except httpx.HTTPError as error:
        through = "" if client.through is None else f", through the proxy {client.through}"
        raise OperatorError(
            f"{url} cannot be downloaded ({tls.explain(error) or error}{through}); download it on another machine and "
            f"give it with --file"
        ) from None
    return bytes(body)


COMMAND = Command(
    name="sparrow web",
    description="Download the packages with which pages in browsers train.",
    options=_options,
    run=_run,
)

main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
