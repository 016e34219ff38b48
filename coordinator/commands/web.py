"""``sparrow web``: what pages in browsers need to train, downloaded once for a coordinator.

    sparrow web
    sparrow web --file onnxruntime-web-1.30.0.tgz

The package comes from the npm registry that NPM_CONFIG_REGISTRY names, or the public one, or is given as a file, as
``npm pack`` saves it. It is kept beside the installation (``coordinator/web/runtime.py``); a coordinator that runs
finds it. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import httpx
from tqdm import tqdm

from sparrow.command_line.command import Command, Parser
from sparrow.coordinator.errors import BadRuntime, StartFailed
from sparrow.coordinator.web import runtime

PUBLIC_REGISTRY = "https://registry.npmjs.org"
LARGEST_PACKAGE = 128 * 1024 * 1024


def _options(parser: Parser) -> None:
    parser.add_argument("--file", type=Path, help="the package, where this machine cannot download it")


def _run(options: argparse.Namespace) -> None:
    if options.file is None and runtime.is_there():
        print(f"{runtime.PACKAGE} {runtime.VERSION} is there: {runtime.folder()}")
        return
    package = _download() if options.file is None else options.file.read_bytes()
    files = runtime.keep(package)
    print(f"pages can train now: {sum(path.stat().st_size for path in files):,} bytes in {runtime.folder()}")


def _download() -> bytes:
    """Return the package from the registry. Raises StartFailed."""
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or PUBLIC_REGISTRY
    url = f"{registry.rstrip('/')}/{runtime.PACKAGE}/-/{runtime.PACKAGE}-{runtime.VERSION}.tgz"
    body = bytearray()
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=30) as answer:
            answer.raise_for_status()
            size = int(answer.headers.get("content-length", 0)) or None
            with tqdm(total=size, disable=None, unit="B", unit_scale=True, desc=runtime.PACKAGE) as bar:
                for part in answer.iter_bytes():
                    body += part
                    bar.update(len(part))
                    if len(body) > LARGEST_PACKAGE:
                        raise BadRuntime(f"it has more than {LARGEST_PACKAGE:,} bytes, so it is another package")
    except httpx.HTTPError as error:
        raise StartFailed(
            f"{url} cannot be downloaded ({error}); where another machine can, save it there and give it as --file"
        ) from None
    return bytes(body)


COMMAND = Command(
    name="sparrow web",
    description="Download what pages in browsers need to train, once.",
    options=_options,
    run=_run,
)

main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
