"""Files of npm packages that pages need, pinned by digest, beside the installation.

onnxruntime-web trains: 14 MB, a quarter of it compressed. @noble/ed25519 checks the signatures of publications, for
which browsers have nothing over plain HTTP. Neither this package nor its repository has them: ``sparrow web`` downloads
them once.
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
    """An npm package. files: names in its folder ``inside`` -> SHA-256."""

    name: str
    version: str
    inside: str
    files: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def slug(self) -> str:
        """Name and version as in the file that ``npm pack`` saves, and in addresses of the page."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"

    @property
    def path(self) -> str:
        """Its path in a registry."""
        return f"{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"

    @property
    def folder(self) -> Path:
        """The folder of its files, each compressed, beside the installation."""
        return Path(sys.prefix) / "share" / "sparrow" / self.slug

    def is_there(self) -> bool:
        """Return whether all its files are kept."""
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
"""How long a browser may keep a file whose address names its version."""


def missing() -> list[Package]:
    """Return the packages of which a file is not kept."""
    return [package for package in PACKAGES if not package.is_there()]


def why_not_there() -> str | None:
    """Return which command an operator has yet to run, and why; None if no package is missing."""
    lacks = missing()
    if not lacks:
        return None
    if TRAINING in lacks:
        return "Pages cannot train here yet: run sparrow web on the coordinator's machine"
    return (
        f"Pages here cannot check who has signed a model, and take part in no signed federation: this version needs "
        f"{', '.join(map(str, lacks))}, too; run sparrow web again on the coordinator's machine"
    )


def keep(archive: bytes) -> None:
    """Keep the files of an npm package (a .tgz). Raises BadRuntime unless each has its digest."""
    package, found = _read(archive)
    package.folder.mkdir(parents=True, exist_ok=True)
    for name, data in found.items():
        path = package.folder / f"{name}.gz"
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(gzip.compress(data, 9, mtime=0))
        partial.replace(path)


def _read(archive: bytes) -> tuple[Package, dict[str, bytes]]:
    """Return which package an archive is, and its pinned files."""
    try:
        members = dict(_members(archive))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadRuntime(f"it cannot be read as an npm package ({error}); download it again") from None
    try:
        name = json.loads(members["package/package.json"])["name"]
    except (KeyError, ValueError, TypeError):
        raise BadRuntime("it is no npm package; give one as npm pack saves it") from None
    package = next((each for each in PACKAGES if each.name == name), None)
    if package is None:
        raise BadRuntime(f"it is the package {name}; pages need {' and '.join(map(str, PACKAGES))}")
    found = {file: members.get(f"{package.inside}{file}", b"") for file in package.files}
    for file, digest in package.files.items():
        if hashlib.sha256(found[file]).hexdigest() != digest:
            raise BadRuntime(f"its {file} is not the one of {package}, which is pinned; give that version")
    return package, found


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive that are in some package of the table."""
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
        raise Unavailable(f"{package} is not here yet, which pages need: the operator runs sparrow web") from None
    if hashlib.sha256(gzip.decompress(packed)).hexdigest() != package.files[name]:
        raise Unavailable(f"{name} is damaged: the operator runs sparrow web again")
    return File(packed, MEDIA_TYPES[Path(name).suffix])
