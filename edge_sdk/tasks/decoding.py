"""Images decoded once: the pixels lie in a file of the cache folder that all processes map, and so share in memory.

The cache is ``$XDG_CACHE_HOME/sparrow`` or ``~/.cache/sparrow``; its files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sparrow.protocol.manifest import Array

from ..reading.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg")
"""Endings of the image files that are read."""


def decode_jpegs(
    path: Path, read: Callable[[], list[Array]], offsets: list[Array], shape: tuple[int, ...], *, name: str
) -> Array:
    """Images that lie end to end in arrays of bytes: [N, *shape] uint8, mapped.

    ``read`` gives the arrays, asked only where the cache has not got the pixels; image i of an array is
    ``bytes[offset[i]:offset[i+1]]``. ``path``, its size and time stamp name the source. Raises DataError.
    """

    def images() -> Iterator[tuple[str, bytes]]:
        for content, offset in zip(read(), offsets, strict=True):
            for number, (start, stop) in enumerate(pairwise(offset)):
                yield f"{path}, image {number}", content[start:stop].tobytes()

    return _decoded([path], images, sum(len(offset) - 1 for offset in offsets), shape, name)


def decode_files(root: Path, files: Sequence[Path], shape: tuple[int, ...], *, name: str) -> Array:
    """Image files in this order: [N, *shape] uint8, mapped. Raises DataError."""

    def images() -> Iterator[tuple[str, bytes]]:
        for path in files:
            yield str(path), path.read_bytes()

    return _decoded([root, *files], images, len(files), shape, name)


def _decoded(
    sources: Sequence[Path],
    images: Callable[[], Iterator[tuple[str, bytes]]],
    count: int,
    shape: tuple[int, ...],
    name: str,
) -> Array:
    digest = hashlib.sha256(repr(shape).encode())
    for source in sources:
        stat = source.stat()
        digest.update(f"|{source}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    folder = cache_folder()
    path = folder / f"{name}-{digest.hexdigest()[:16]}.npy"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, images(), count, shape)
        except OSError as error:
            raise DataError(
                f"{folder}: the decoded images cannot be kept there ({error}); set XDG_CACHE_HOME to a folder with "
                f"{count * int(np.prod(shape)) / 1e6:.0f} MB to spare"
            ) from None
    # Copy on write, so that it is writable, as torch wants arrays; as nobody writes, processes share the pages.
    return np.load(path, mmap_mode="c")  # type: ignore[no-any-return]


def cache_folder() -> Path:
    """Return the folder of files that may be made again: ``$XDG_CACHE_HOME/sparrow`` or ``~/.cache/sparrow``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparrow"


def _write(path: Path, images: Iterator[tuple[str, bytes]], count: int, shape: tuple[int, ...]) -> None:
    """Under another name first: a process that is killed, or that decodes at the same time, leaves no half a file."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    try:
        pixels = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=(count, *shape))
        shown = tqdm(images, total=count, desc="decoding images, once", unit="image", disable=None)
        for row, (source, content) in enumerate(shown):
            pixels[row] = _decode(content, source, shape)
        pixels.flush()
        del pixels
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _decode(content: bytes, source: str, shape: tuple[int, ...]) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{source}: reading images needs Pillow: pip install 'sparrow-fl[data]'") from None
    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
            width, height = image.size
            fits = (height, width) == shape[1:]
            pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB")) if fits else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{source}: cannot be read as PNG or JPEG ({error})") from None
    if pixels is None:
        raise DataError(f"{source}: has {height} x {width} pixels; scale it to {shape[1]} x {shape[2]}")
    return pixels[None] if shape[0] == 1 else np.moveaxis(pixels, 2, 0)
