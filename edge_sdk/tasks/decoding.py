"""Images, decoded once into a memory-mapped file in the shared cache folder.

The cache, ``$XDG_CACHE_HOME/sparrow`` or ``~/.cache/sparrow``, may be deleted at any time.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sparrow.places import user_folder
from sparrow.protocol.manifest import Array
from sparrow.reading.decoded import fingerprint
from sparrow.reading.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg")


def decode_images(
    sources: Sequence[Path],
    images: Callable[[], Iterator[tuple[str, bytes]]],
    count: int,
    shape: tuple[int, ...],
    *,
    name: str,
) -> Array:
    """Return ``count`` images, [count, *shape] uint8, mapped.

    images: yields name and bytes of each; called only if the pixels are not cached. sources: files whose sizes and time
    stamps identify the images. Raises DataError if an image cannot be decoded or has another shape.
    """

    def fill(pixels: Array) -> None:
        shown = tqdm(images(), total=count, desc="decoding images, once", unit="image", disable=None)
        for row, (source, content) in enumerate(shown):
            pixels[row] = _decode(content, source, shape)

    digest = fingerprint("images", sources, shape)[:16]
    return kept_array(f"{name}-{digest}", np.dtype(np.uint8), (count, *shape), "decoded images", fill)


def cache_folder() -> Path:
    """Return the cache folder."""
    return user_folder("XDG_CACHE_HOME")


def kept_array(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], content: str, fill: Callable[[Array], None]
) -> Array:
    """Return the cached array of this ``name``, mapped; ``fill`` makes it if it is missing.

    content: description for messages. Raises DataError if the cache folder cannot be written.
    """
    path = cache_folder() / f"{name}.npy"
    if not path.exists():
        try:
            _write(path, dtype, shape, fill)
        except OSError as error:
            megabytes = dtype.itemsize * math.prod(shape) / 1e6
            raise DataError(
                f"{path.parent}: {megabytes:.0f} MB of {content} cannot be stored there ({error}); set "
                "XDG_CACHE_HOME to a folder with room"
            ) from None
    # torch wants writable arrays; copy on write keeps the pages shared, as no process writes.
    return np.load(path, mmap_mode="c")  # type: ignore[no-any-return]


def _write(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], fill: Callable[[Array], None]) -> None:
    # A draft that is renamed: a killed or a concurrent process leaves no partial file.
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    try:
        made = np.lib.format.open_memmap(draft, mode="w+", dtype=dtype, shape=shape)
        fill(made)
        made.flush()
        del made
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
