"""onnxruntime-web, with which pages train: two files of its npm package, pinned by digest, beside the installation.

They take 14 MB, a quarter of it compressed, so that neither this package nor its repository has them: ``sparrow web``
downloads them once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from functools import cache
from pathlib import Path

from sparrow.coordinator.errors import BadRuntime, NotFound, Unavailable
from sparrow.coordinator.web import MEDIA_TYPES, File

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
FILES = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""Names in the package's folder ``dist`` -> SHA-256."""

LARGEST_FILE = 32 * 1024 * 1024
FOR_GOOD = "public, max-age=31536000, immutable"
"""How long a browser may keep a file whose address names its version."""


def folder() -> Path:
    """Return where the files are kept, each compressed: beside the installation, whoever runs it."""
    return Path(sys.prefix) / "share" / "sparrow" / f"{PACKAGE}-{VERSION}"


def is_there() -> bool:
    """Return whether all files are kept."""
    return all((folder() / f"{name}.gz").is_file() for name in FILES)


def keep(package: bytes) -> list[Path]:
    """Keep the files of an npm package (a .tgz), and return them. Raises BadRuntime unless each has its digest."""
    found = _members(package)
    folder().mkdir(parents=True, exist_ok=True)
    kept = []
    for name, data in found.items():
        path = folder() / f"{name}.gz"
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(gzip.compress(data, 9, mtime=0))
        kept.append(partial.replace(path))
    return kept


def _members(package: bytes) -> dict[str, bytes]:
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
            for member in archive:
                name = member.name.removeprefix("package/dist/")
                if name in FILES and member.isreg() and member.size <= LARGEST_FILE:
                    data = archive.extractfile(member)
                    assert data is not None, "a regular file"
                    found[name] = data.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadRuntime(f"it cannot be read as an npm package ({error}); download it again") from None
    for name, digest in FILES.items():
        if hashlib.sha256(found.get(name, b"")).hexdigest() != digest:
            raise BadRuntime(f"its {name} is not the one of {PACKAGE} {VERSION}, which is pinned; give that version")
    return found


@cache
def load(version: str, name: str) -> File:
    """Return a file of the runtime. Raises NotFound, and Unavailable where it is not kept here or damaged."""
    if version != VERSION or name not in FILES:
        raise NotFound(f"pages train with {PACKAGE} {VERSION}: {', '.join(FILES)}")
    try:
        packed = (folder() / f"{name}.gz").read_bytes()
    except OSError:
        raise Unavailable(
            "pages cannot train here yet: the operator runs sparrow web, which downloads them a runtime"
        ) from None
    if hashlib.sha256(gzip.decompress(packed)).hexdigest() != FILES[name]:
        raise Unavailable(f"{name} is damaged: the operator runs sparrow web again")
    return File(packed, MEDIA_TYPES[Path(name).suffix])
