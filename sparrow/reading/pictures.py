"""Read picture files as uint8 [height, width, 3], RGB and upright.

16-bit pictures are scaled to 8 bits: value / 257, rounded; floats up to 1 are multiplied by 255. Transparency is
ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import MissingPart
from ..protocol.preparation import Preparation
from .decoded import Decoded, fingerprint
from .errors import DataError
from .looking import look_at_each
from .options import ReadOptions
from .samples import plural

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
KINDS = "PNG, JPEG, WebP, BMP, GIF or TIFF"

# Of each side.
MOST_PIXELS = 4_096

# EXIF's number of the tag.
_ORIENTATION = 0x0112

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class _Picture:
    """deep: the file has 16 or more bits. clear: it has transparency."""

    pixels: Pixels
    deep: bool
    clear: bool


def read_pictures(
    paths: Sequence[Path], options: ReadOptions, preparation: Preparation | None
) -> tuple[Decoded, NDArray[np.intp], list[str]]:
    """Return the readable pictures, their positions among ``paths``, and remarks. Each is decoded once.

    Raises DataError; MissingPart without Pillow.
    """
    deep = clear = 0
    shapes: list[tuple[int, ...]] = []

    def look(path: Path) -> None:
        nonlocal deep, clear
        found = _read(str(path))
        _check_shape(path, found.pixels.shape, preparation)
        deep += found.deep
        clear += found.clear
        shapes.append(found.pixels.shape)

    with warnings.catch_warnings():
        # Pillow warns of repairs, such as damaged EXIF data; pictures that are too large are refused below.
        warnings.simplefilter("ignore")
        kept, said = look_at_each(paths, look, "picture", options)
    if deep:
        said.append(f"{plural(deep, 'picture')} of 16 bit {'was' if deep == 1 else 'were'} scaled to 8")
    if clear:
        said.append(f"transparency is left out ({plural(clear, 'picture')})")
    largest = tuple(map(max, zip(*shapes, strict=True)))
    free = (0, 1) if len(set(shapes)) > 1 else ()
    chosen = [paths[place] for place in kept.tolist()]
    places = tuple(map(str, chosen))
    return Decoded(places, decode_picture, "uint8", largest, free, fingerprint("pictures", chosen)), kept, said


def decode_picture(path: str) -> Pixels:
    """Return a file's pixels, [height, width, 3]. Raises DataError; MissingPart without Pillow."""
    return _read(path).pixels


def _check_shape(path: Path, shape: tuple[int, ...], preparation: Preparation | None) -> None:
    if preparation is None:
        return
    height, width = preparation.shape[:2]
    if not preparation.free and shape[:2] != (height, width):
        raise DataError(
            f"{path}: has {shape[1]} x {shape[0]} pixels, the federation's pictures have {width} x {height}; scale it"
        )
    if shape[0] > height or shape[1] > width:
        raise DataError(
            f"{path}: has {shape[1]} x {shape[0]} pixels, the federation takes at most {width} x {height}; make it "
            "smaller"
        )


def _read(path: str) -> _Picture:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingPart(f"{path}: pictures need Pillow: pip install 'sparrow-fl[data]'") from None
    try:
        if Path(path).stat().st_size == 0:
            raise DataError(f"{path}: is empty; copy the picture again")
        with Image.open(path, formats=FORMATS) as image:
            if max(image.size) > MOST_PIXELS:
                raise DataError(
                    f"{path}: has {image.size[0]:,} x {image.size[1]:,} pixels; it must have at most "
                    f"{MOST_PIXELS:,} x {MOST_PIXELS:,}: make it smaller"
                )
            # Pillow reduces 16-bit colours when it loads them.
            deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
            image.load()
            turned = _upright(image)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: is not a picture ({KINDS})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(
            f"{path}: has far more than {MOST_PIXELS:,} x {MOST_PIXELS:,} pixels, the most that are read; make it "
            "smaller"
        ) from None
    # Pillow's decoders raise many errors for damaged files: OSError, SyntaxError, struct.error.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a picture ({_reason(error)})") from None
    if turned.mode[0] in "IF":
        return _Picture(_scaled(path, np.asarray(turned)), True, False)
    clear = turned.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in turned.info
    # The entry names a colour, whose conversion may fail or warn.
    turned.info.pop("transparency", None)
    try:
        if turned.mode in ("RGBa", "La"):
            turned = turned.convert(turned.mode.upper())
        pixels = np.asarray(turned if turned.mode == "RGB" else turned.convert("RGB"))
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}: its colours, {turned.mode}, cannot be converted to RGB ({_reason(error)}); save it as PNG"
        ) from None
    return _Picture(np.ascontiguousarray(pixels), deep, clear)


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def _upright(image: Any) -> Any:
    """Return the image, turned by its EXIF orientation."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    # Damaged EXIF data may raise any error; the picture is usable without them.
    except Exception:
        turn = None
    return image.copy() if turn is None else image.transpose(turn)


def _scaled(path: str, values: NDArray[Any]) -> Pixels:
    """Return grey values of 16 bits, or floats, in 8 bits and three channels."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{path}: has pixels that are infinite or not a number; save it in 8 or 16 bits")
    least = values.min()
    most = values.max()
    if least < 0 or most > 65_535:
        raise DataError(f"{path}: has values from {least:g} to {most:g}; save it in 8 or 16 bits, 0 to 65535")
    if values.dtype.kind == "f":
        grey = np.rint(values * 255 if most <= 1 else values / 257)
    else:
        grey = (values.astype(np.uint32) + 128) // 257
    return np.ascontiguousarray(np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2))
