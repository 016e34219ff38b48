"""Files of npm packages for pages, pinned by digest and kept beside the installation.

onnxruntime-web (14 MB, a quarter of it compressed) trains. @noble/ed25519 checks signatures, for which browsers have no
function over plain HTTP. ``sparrow web`` downloads both.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import BadRuntime, NotFound, Unavailable
from . import MEDIA_TYPES, File


@dataclass(frozen=True)
class Package:
    """An npm package."""

    name: str
    version: str
    inside: str
    # SHA-256 by name within the folder ``inside``.
    files: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def slug(self) -> str:
        """Name and version as in the file name of ``npm pack`` and in URLs of the page."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"

    @property
    def path(self) -> str:
        """The path in a registry."""
        return f"{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"

    @property
    def folder(self) -> Path:
        """The folder of the compressed files."""
        return Path(sys.prefix) / "share" / "sparrow" / self.slug

    def is_there(self) -> bool:
        """Return whether all files are present."""
        return all((self.folder / f"{name}.gz").is_file() for name in self.files)


TRAINING = Package(
    "onnxruntime-web",
    "1.30.0",
    "package/dist/",
    {
        "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
        "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    },
)
SIGNATURES = Package(
    "@noble/ed25519",
    "3.2.0",
    "package/",
    {"index.js": "a4f631d1876b5d9e43a86cd71194ca27b5e1451edf4ba4db9a418f40a475569a"},
)
PACKAGES = (TRAINING, SIGNATURES)

LARGEST_FILE = 32 * 1024 * 1024
FOR_GOOD = "public, max-age=31536000, immutable"
"""Cache-Control of a file whose address contains its version."""


def missing() -> list[Package]:
    """Return the packages with a missing file."""
    return [package for package in PACKAGES if not package.is_there()]


def why_not_there() -> str | None:
    """Return the reason why pages are limited, with the remedy, or None."""
    lacks = missing()
    if not lacks:
        return None
    if TRAINING in lacks:
        return "Pages cannot train here yet: run sparrow web on the coordinator's machine"
    return (
        f"Pages cannot verify signed models, so they cannot join signed federations: {', '.join(map(str, lacks))} is "
        f"missing; run sparrow web again on the coordinator's machine"
    )


def keep(archive: bytes) -> None:
    """Store the files of an npm package (.tgz). Raises BadRuntime if a digest differs."""
    package, found = _read(archive)
    package.folder.mkdir(parents=True, exist_ok=True)
    for name, data in found.items():
        path = package.folder / f"{name}.gz"
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(gzip.compress(data, 9, mtime=0))
        partial.replace(path)


def _read(archive: bytes) -> tuple[Package, dict[str, bytes]]:
    """Return the package of an archive, and its pinned files."""
    try:
        members = dict(_members(archive))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadRuntime(f"the file cannot be read as an npm package ({error}); download it again") from None
    try:
        name = json.loads(members["package/package.json"])["name"]
    except (KeyError, ValueError, TypeError):
        raise BadRuntime("the file is not an npm package; make one with npm pack") from None
    package = next((each for each in PACKAGES if each.name == name), None)
    if package is None:
        raise BadRuntime(f"the package is {name}; give {' and '.join(map(str, PACKAGES))}")
    found = {file: members.get(f"{package.inside}{file}", b"") for file in package.files}
    for file, digest in package.files.items():
        if hashlib.sha256(found[file]).hexdigest() != digest:
            raise BadRuntime(f"its {file} differs from that of {package}; give that version")
    return package, found


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the pinned files and the ``package.json`` of an archive."""
    wanted = {f"{package.inside}{name}" for package in PACKAGES for name in package.files} | {"package/package.json"}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        for member in opened:
            if member.name in wanted and member.isreg() and member.size <= LARGEST_FILE:
                data = opened.extractfile(member)
                assert data is not None, "a regular file"
                yield member.name, data.read()


@cache
def load(slug: str, name: str) -> File:
    """Return a file of a package. Raises NotFound, and Unavailable if it is missing or damaged."""
    package = next((each for each in PACKAGES if each.slug == slug), None)
    if package is None or name not in package.files:
        raise NotFound(f"pages of this version need {' and '.join(map(str, PACKAGES))}: reload the page")
    try:
        packed = (package.folder / f"{name}.gz").read_bytes()
    except OSError:
        raise Unavailable(
            f"{package} is not installed on the coordinator; ask its operator to run sparrow web"
        ) from None
    if hashlib.sha256(gzip.decompress(packed)).hexdigest() != package.files[name]:
        raise Unavailable(f"{name} is damaged on the coordinator; ask its operator to run sparrow web again")
    return File(packed, MEDIA_TYPES[Path(name).suffix])
