"""Corrupted test images: eleven kinds of CIFAR-10-C are computed, the others read from published files.

Hendrycks and Dietterich, ICLR 2019, arXiv:1903.12261. Each kind is a pure function of bytes [N, H, W, C], a severity
from 1 to 5 and a generator, with the constants of the published generator for CIFAR-10 (``make_cifar_c.py``). Only the
random draws of the noises differ from the published arrays.

Eight more kinds need photographs, ImageMagick or OpenCV's warps. They are read from a folder ``CIFAR-10-C`` with one
file per kind: uint8 [50000, 32, 32, 3], by severity, each with all 10,000 published test images in their order.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Array
from sparrow.reading.errors import BadOption, DataError

if TYPE_CHECKING:
    from PIL import Image

Images = NDArray[np.uint8]
Values = NDArray[np.float64]
Corruption = Callable[[Images, int, np.random.RandomState], Images]

SEVERITIES = 5
# Name of the folder with the published arrays.
FOLDER = "CIFAR-10-C"


def corrupt(images: Images, name: str, severity: int, *, seed: int, device: int) -> Images:
    """Return a corrupted copy of ``images`` [N, H, W, C], C of 1 (grey) or 3.

    Raises BadOption for an unknown kind or severity, and for images that the kind does not apply to.
    """
    if name not in CORRUPTIONS:
        raise BadOption(f"--data: {_unknown(name)}")
    check_severity(severity)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[3] not in (1, 3):
        raise BadOption(
            f"--data: corruption={name} needs images of bytes, grey or in colour; these samples are {images.dtype} "
            f"of shape {images.shape[1:]}; leave it out"
        )
    random = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, device, severity, zlib.crc32(name.encode())])
    return CORRUPTIONS[name](images, severity, random)


def check_corruption(name: str, *, published: bool) -> None:
    """Raise BadOption unless ``name`` is available. published: whether the published test images are used."""
    if name in PUBLISHED and not published:
        raise BadOption(
            f"--data: corruption={name} exists only for the published test images; add test=published, or choose "
            f"one of {', '.join(CORRUPTIONS)}"
        )
    if name not in PUBLISHED and name not in CORRUPTIONS:
        raise BadOption(f"--data: {_unknown(name)}")


def check_severity(severity: int) -> None:
    """Raise BadOption for an unknown severity."""
    if not 1 <= severity <= SEVERITIES:
        raise BadOption(f"--data: severity={severity}; choose 1 to {SEVERITIES}")


def _unknown(name: str) -> str:
    return (
        f"unknown corruption {name!r}; choose from {', '.join(CORRUPTIONS)}, or with test=published from "
        f"{', '.join(PUBLISHED)}"
    )


# --- noise -------------------------------------------------------------------------------------------------------


def gaussian_noise(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """x + Normal(0, c) per value."""
    deviation = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return _bytes(_values(images) + random.normal(scale=deviation, size=images.shape))


def shot_noise(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Poisson(c x) / c per value: c falls with the severity."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return _bytes(random.poisson(_values(images) * photons) / photons)


def impulse_noise(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Set each value of each channel to 0 or 255 with probability c, even odds."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    drawn = random.random_sample(images.shape)
    return np.where(drawn < share, np.where(drawn < share / 2, np.uint8(0), np.uint8(255)), images)


def speckle_noise(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """x + x * Normal(0, c) per value."""
    deviation = (0.06, 0.10, 0.12, 0.16, 0.20)[severity - 1]
    values = _values(images)
    return _bytes(values + values * random.normal(scale=deviation, size=images.shape))


# --- blur --------------------------------------------------------------------------------------------------------


def gaussian_blur(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Gaussian of deviation c pixels, cut off at 4 c; border pixels are repeated."""
    deviation = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    weights = gaussian_weights(deviation, int(4 * deviation + 0.5))
    down = _correlated(_values(images), weights[:, None], mode="edge")
    return _bytes(_correlated(down, weights[None, :], mode="edge"))


def defocus_blur(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Disk of radius r, its edge softened by a 3 x 3 gaussian; mirrored at the border."""
    radius, softening = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    return _bytes(_correlated(_values(images), disk(radius, softening), mode="reflect"))


def gaussian_weights(deviation: float, radius: int) -> Values:
    """Return exp(-i² / 2 deviation²) for i from -radius to radius, with sum 1."""
    weights = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * deviation**2))
    normalised: Values = weights / weights.sum()
    return normalised


def disk(radius: float, softening: float) -> Values:
    """Return equal weights for i² + j² <= radius², blurred by a 3 x 3 gaussian, with sum 1."""
    reach = math.floor(radius) + 1
    offsets = np.arange(-reach, reach + 1) ** 2
    flat = (offsets[:, None] + offsets[None, :] <= radius**2).astype(np.float64)
    edge = gaussian_weights(softening, 1)
    padded = np.pad(flat / flat.sum(), 1)
    side = len(flat)
    shifts = [(row, column) for row in range(3) for column in range(3)]
    parts = [edge[row] * edge[column] * padded[row : row + side, column : column + side] for row, column in shifts]
    return np.sum(parts, axis=0)  # type: ignore[no-any-return]


def _correlated(values: Values, weights: Values, *, mode: str) -> Values:
    """Correlate every channel of [N, H, W, C] with ``weights`` of odd sides; ``mode``: padding of np.pad."""
    rows, columns = weights.shape
    height, width = values.shape[1:3]
    around = [(0, 0), (rows // 2, rows // 2), (columns // 2, columns // 2), (0, 0)]
    padded = np.pad(values, around, mode=mode)  # type: ignore[call-overload]
    total = np.zeros_like(values)
    for row, column in np.argwhere(weights):
        total += weights[row, column] * padded[:, row : row + height, column : column + width]
    return total


# --- light and colour --------------------------------------------------------------------------------------------


def brightness(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """V' = min(V + c, 1) with V the largest channel, hue and saturation kept; black becomes grey."""
    added = (0.05, 0.10, 0.15, 0.20, 0.30)[severity - 1]
    values = _values(images)
    value = values.max(axis=3, keepdims=True)
    brighter = np.minimum(value + added, 1.0)
    scaled = values * np.divide(brighter, value, out=np.zeros_like(value), where=value > 0)
    return _bytes(np.where(value > 0, scaled, brighter))


def contrast(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """(x - mean) c + mean, with each channel's mean over its image."""
    kept = (0.75, 0.50, 0.40, 0.30, 0.15)[severity - 1]
    values = _values(images)
    mean = values.mean(axis=(1, 2), keepdims=True)
    return _bytes((values - mean) * kept + mean)


def saturate(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Saturation s becomes clip(a s + b), hue and value kept; BadOption for grey images."""
    # A grey pixel counts as red, as in the published generator, so greys turn reddish if b > 0.
    if images.shape[3] != 3:
        raise BadOption("--data: corruption=saturate needs images in colour, these are grey; choose another")
    factor, added = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    values = _values(images)
    value = values.max(axis=3, keepdims=True)
    # V s f(hue): at a given hue it grows with s.
    depth = value - values
    largest = depth.max(axis=3, keepdims=True)
    saturation = np.divide(largest, value, out=np.zeros_like(value), where=value > 0)
    wanted = np.clip(saturation * factor + added, 0.0, 1.0)
    red = value * np.array([0.0, 1.0, 1.0])
    unit = np.divide(depth, saturation, out=np.broadcast_to(red, depth.shape).copy(), where=saturation > 0)
    return _bytes(value - unit * wanted)


# --- computed by Pillow ------------------------------------------------------------------------------------------


def pixelate(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """Scaled to the share c of each side and back."""
    from PIL import Image

    share = (0.95, 0.90, 0.85, 0.75, 0.65)[severity - 1]
    height, width = images.shape[1:3]
    small = (max(1, int(width * share)), max(1, int(height * share)))

    def make(image: Image.Image) -> Image.Image:
        return image.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BOX)

    return _each(images, make)


def jpeg_compression(images: Images, severity: int, random: np.random.RandomState) -> Images:
    """JPEG coding of quality c and decoding, colours at half the resolution."""
    from PIL import Image

    quality = (80, 65, 58, 50, 40)[severity - 1]

    def make(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file, formats=("JPEG",))

    return _each(images, make)


def _each(images: Images, make: Callable[[Image.Image], Image.Image]) -> Images:
    from PIL import Image

    def made() -> Iterator[Array]:
        for image in images:
            with make(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)) as result:
                yield np.asarray(result).reshape(image.shape)

    return np.stack(list(made()))


def _values(images: Images) -> Values:
    return images / 255.0


def _bytes(values: Values) -> Images:
    return (np.clip(values, 0.0, 1.0) * 255).astype(np.uint8)


CORRUPTIONS: Mapping[str, Corruption] = {
    each.__name__: each
    for each in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        speckle_noise,
        gaussian_blur,
        defocus_blur,
        brightness,
        contrast,
        saturate,
        pixelate,
        jpeg_compression,
    )
}
"""The computed kinds, by their published names."""

# --- read from files ---------------------------------------------------------------------------------------------

PUBLISHED = ("glass_blur", "motion_blur", "zoom_blur", "snow", "frost", "fog", "spatter", "elastic_transform")
"""The kinds read from the published arrays."""


def read_published(folder: Path, name: str, severity: int, targets: Array, *, shape: tuple[int, ...]) -> Images:
    """Return the published images of one kind and severity [N, *shape], mapped, in the order of ``targets`` [N].

    ``CIFAR-10-C`` is in ``folder``, or next to it if it is a file. Raises DataError, also if its ``labels.npy`` differs
    from ``targets``.
    """
    place = (folder if folder.is_dir() else folder.parent) / FOLDER
    images, labels = (_mapped(place / f"{each}.npy") for each in (name, "labels"))
    count = len(targets)
    wanted = (SEVERITIES * count, *shape)
    if images.dtype != np.uint8 or images.shape != wanted:
        raise DataError(
            f"{place / name}.npy: contains {images.dtype} of shape {images.shape}; the published test part has {count} "
            f"images, so give uint8 {wanted}, severity after severity"
        )
    part = slice((severity - 1) * count, severity * count)
    if labels.shape != wanted[:1] or not np.array_equal(labels[part], targets):
        raise DataError(
            f"{place / 'labels.npy'}: its labels differ from those of the published test images of --data; give the "
            f"data in their published order, and all of {FOLDER}"
        )
    return cast(Images, images[part])


def _mapped(path: Path) -> Array:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(
            f"{path}: {why}; put {FOLDER} (zenodo.org/records/2535967) beside the data, unpacked, with its labels.npy"
        ) from None
