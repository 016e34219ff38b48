"""Sound files to mono float32 in [-1, 1], whole or in windows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import MissingPart
from ..protocol.preparation import Preparation
from .decoded import Decoded, fingerprint
from .errors import VALUES, BadOption, DataError
from .looking import look_at_each
from .options import ReadOptions
from .samples import plural, some
from .windows import cut_of, is_recordings, rate_of, remark, starts

KINDS = "WAV, FLAC, OGG, AIFF or MP3"

# Length of a sound, in seconds.
LONGEST = 30.0
SHORTEST = 0.01

# Sounds of a higher rate are resampled, unless an option or the federation sets a rate.
HIGHEST_RATE = 16_000

# Frames in memory while a file is checked.
_BLOCK = 1 << 20

# Lossy decoders exceed 1 a little, floats on another scale by far.
_LOUDEST = 2.0

_CUT_SHORT = re.compile(r"(?:data|SSND) : ([0-9]+) \(should be ([0-9]+)\)")

# Programs that write to a pipe put at least this into the header.
_UNKNOWN_SIZE = 1 << 31

Span = tuple[float, float]
"""Start and end of a part of a file, s."""


class Place(NamedTuple):
    """Part of a file, in its own frames."""

    path: str
    start: int
    frames: int

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Hear:
    """Decode a place at ``rate`` samples per second, to ``length`` samples if it is a window."""

    rate: float
    length: int | None = None

    def __call__(self, place: Place) -> NDArray[np.float32]:
        """Return samples, [T]. Raises DataError; MissingPart without soundfile or soxr."""
        with _opened(place.path) as file:
            file.seek(place.start)
            samples = _mono(file.read(place.frames, dtype="float32", always_2d=True))
            own = float(file.samplerate)
        if len(samples) < place.frames:
            raise DataError(f"{place.path}: is shorter than when the data were read; start again")
        length = resampled_length(place.frames, own, self.rate) if self.length is None else self.length
        if own != self.rate:
            samples = _soxr(place.path).resample(samples, own, self.rate)
        # Resampling may give one sample more or fewer.
        samples = np.pad(samples[:length], (0, max(0, length - len(samples))))
        return np.ascontiguousarray(np.clip(samples, -1, 1), np.float32)


@dataclass(frozen=True)
class _Sound:
    """A decoded file."""

    rate: float
    # Frames at its own rate.
    frames: int
    channels: int
    silent: bool


@dataclass(frozen=True)
class Sounds:
    """Samples of files."""

    samples: Decoded
    # Each sample's file.
    positions: NDArray[np.intp]
    rate: float
    step: float | None
    # Each window's recording.
    runs: NDArray[np.int64] | None
    said: tuple[str, ...]


def resampled_length(frames: int, own: float, rate: float) -> int:
    """Return the number of samples of ``frames`` after resampling."""
    return max(1, math.floor(frames * rate / own + 0.5))


def read_sounds(
    source: str,
    paths: Sequence[Path],
    spans: Sequence[Span] | None,
    labels: NDArray[Any] | None,
    options: ReadOptions,
    preparation: Preparation | None,
) -> Sounds:
    """Return the readable sounds, or their windows. Each file is decoded once.

    spans: part of each file; None for whole files. labels: label of each file, for remarks. Raises DataError;
    MissingPart without soundfile or soxr.
    """
    windowed = is_recordings(options, preparation)
    wanted = rate_of(source, options, preparation)
    sounds: dict[Path, _Sound] = {}

    def look(path: Path) -> None:
        sounds[path] = _look(path, whole=spans is None and not windowed)

    distinct = list(dict.fromkeys(paths))
    _, said = look_at_each(distinct, look, "sound", options)
    kept = [place for place, path in enumerate(paths) if path in sounds]
    found = list(sounds.values())
    rate = wanted if wanted is not None else _commonest(found)
    said += _remarks(found, rate, chosen=wanted is None)
    parts = []
    for place in kept:
        sound = sounds[paths[place]]
        whole = (0.0, sound.frames / sound.rate)
        start, end = whole if spans is None else _inside(paths[place], spans[place], whole[1])
        parts.append(Part(paths[place], sound, start, end))
    if windowed:
        return _windows(source, parts, kept, labels, rate, options, preparation, said)
    places = []
    for part in parts:
        first = round(part.start * part.sound.rate)
        last = min(part.sound.frames, round(part.end * part.sound.rate))
        _check_length(part.path, (last - first) / part.sound.rate, spans is not None)
        places.append(Place(str(part.path), first, last - first))
    lengths = [resampled_length(place.frames, part.sound.rate, rate) for place, part in zip(places, parts, strict=True)]
    _check_federation(parts, lengths, rate, preparation)
    free = (0,) if len(set(lengths)) > 1 else ()
    digest = fingerprint("sounds", [part.path for part in parts], rate, spans)
    samples = Decoded(tuple(places), Hear(rate), "float32", (max(lengths),), free, digest)
    return Sounds(samples, np.array(kept, np.intp), rate, None, None, tuple(said))


class Part(NamedTuple):
    """Part of a sound, from ``start`` to ``end`` in seconds."""

    path: Path
    sound: _Sound
    start: float
    end: float


def _windows(
    source: str,
    parts: Sequence[Part],
    kept: Sequence[int],
    labels: NDArray[Any] | None,
    rate: float,
    options: ReadOptions,
    preparation: Preparation | None,
    said: list[str],
) -> Sounds:
    window, step = cut_of(source, options, preparation).samples(source, rate)
    if window < SHORTEST * rate:
        raise BadOption(
            f"{source}: window={options.window} is {window / rate:.3g} s at {rate:g} samples per second, at least "
            f"{SHORTEST:g} s are needed; for seconds write the unit, as in window=1s"
        )
    places: list[Place] = []
    positions: list[int] = []
    runs: list[int] = []
    counts: list[int] = []
    for run, (part, place) in enumerate(zip(parts, kept, strict=True)):
        own = part.sound.rate
        begins = starts(math.floor((part.end - part.start) * rate + 1e-6), window, step)
        counts.append(len(begins))
        for begin in begins:
            first = round((part.start + begin / rate) * own)
            frames = min(math.ceil(window * own / rate), part.sound.frames - first)
            places.append(Place(str(part.path), first, frames))
            positions.append(place)
            runs.append(run)
    said.append(remark(source, counts, None if labels is None else labels[list(kept)]))
    digest = fingerprint("windows", [part.path for part in parts], rate, window, places)
    return Sounds(
        Decoded(tuple(places), Hear(rate, window), "float32", (window,), (), digest),
        np.array(positions, np.intp),
        rate,
        step / rate,
        np.array(runs, np.int64),
        tuple(said),
    )


# --- one file


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Yield a soundfile.SoundFile, whose errors become a DataError."""
    try:
        import soundfile
    # OSError: the library libsndfile is missing.
    except (ImportError, OSError):
        raise MissingPart(f"{path}: sounds need soundfile: pip install 'sparrow-fl[data]'") from None
    try:
        if Path(path).stat().st_size == 0:
            raise DataError(f"{path}: is empty; copy the sound again")
        file = soundfile.SoundFile(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"Error opening {path!r}: ")
        if "not recognised" in reason or isinstance(error, (TypeError, ValueError)):
            raise DataError(f"{path}: is not a sound ({KINDS})") from None
        raise DataError(f"{path}: cannot be read as a sound ({reason})") from None
    with file:
        try:
            yield file
        except NotImplementedError:
            raise
        except RuntimeError as error:
            raise DataError(f"{path}: cannot be read as a sound ({error}); copy it again") from None


def _soxr(path: str) -> Any:
    try:
        import soxr
    except ImportError:
        raise MissingPart(f"{path}: sounds of another rate need soxr: pip install 'sparrow-fl[data]'") from None
    return soxr


def _mono(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    return frames[:, 0] if frames.shape[1] == 1 else frames.mean(axis=1, dtype=np.float32)


def _look(path: Path, *, whole: bool) -> _Sound:
    """Decode a file in blocks. whole: the file is one sample. Raises DataError if it cannot be decoded."""
    frames = 0
    loudest = 0.0
    silent = True
    with _opened(str(path)) as file:
        promised = file.frames
        rate = float(file.samplerate)
        channels = file.channels
        extra = file.extra_info
        if whole and promised / rate > LONGEST:
            _check_length(path, promised / rate, False)
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            if not np.isfinite(block).all():
                raise DataError(
                    f"{path}: has samples that are infinite or not a number; write it again", failure=VALUES
                )
            frames += len(block)
            loudest = max(loudest, float(np.abs(block).max()))
            silent = silent and not block.any()
    cut = _CUT_SHORT.search(extra)
    truncated = frames < promised or "File ended unexpectedly" in extra
    if cut is not None:
        truncated = truncated or int(cut[2]) < int(cut[1]) < _UNKNOWN_SIZE
    if truncated:
        raise DataError(f"{path}: is truncated, it ends after {frames / rate:.3g} s; copy it again")
    if loudest > _LOUDEST:
        raise DataError(f"{path}: has samples up to {loudest:g}, beyond 1; scale them to -1 to 1")
    if whole:
        _check_length(path, frames / rate, False)
    return _Sound(rate, frames, channels, silent)


def _check_length(path: Path, seconds: float, span: bool) -> None:
    subject = "its part " if span else ""
    if seconds > LONGEST:
        raise DataError(
            f"{path}: {subject}lasts {seconds:.1f} s; one sample must last at most {LONGEST:g} s: window=2.56s cuts "
            "it into windows"
        )
    if seconds < SHORTEST:
        raise DataError(f"{path}: {subject}lasts {seconds * 1e3:.3g} ms; it must last at least {SHORTEST * 1e3:g} ms")


def _inside(path: Path, span: Span, seconds: float) -> Span:
    start, end = span
    if end > seconds + 0.01:
        raise DataError(f"{path}: lasts {seconds:.3f} s, but a part of it ends at {end:g} s; correct the table")
    return start, min(end, seconds)


# --- all files


def _commonest(sounds: Sequence[_Sound]) -> float:
    counts = Counter(sound.rate for sound in sounds)
    most = max(counts.values())
    return min(HIGHEST_RATE, *(rate for rate, times in counts.items() if times == most))


def _remarks(sounds: Sequence[_Sound], rate: float, *, chosen: bool) -> list[str]:
    said = []
    others = [sound.rate for sound in sounds if sound.rate != rate]
    if others:
        rates = some(f"{other:,.6g}" for other in sorted(set(others)))
        remedy = "; rate= keeps another rate" if chosen else ""
        were = "was" if len(others) == 1 else "were"
        said.append(f"{plural(len(others), 'sound')} of {rates} Hz {were} resampled to {rate:,.6g} Hz{remedy}")
    elif chosen:
        said.append(f"sounds have {rate:,.6g} samples per second")
    several = sum(sound.channels > 1 for sound in sounds)
    if several:
        said.append(f"the channels of {plural(several, 'sound')} were averaged")
    silent = sum(sound.silent for sound in sounds)
    if silent:
        said.append(f"{plural(silent, 'sound')} {'is' if silent == 1 else 'are'} silent")
    return said


def _check_federation(
    parts: Sequence[Part], lengths: Sequence[int], rate: float, preparation: Preparation | None
) -> None:
    if preparation is None:
        return
    wanted = preparation.shape[0]
    for part, length in zip(parts, lengths, strict=True):
        if length > wanted or (length < wanted and not preparation.free):
            most = "at most " if preparation.free else ""
            raise DataError(
                f"{part.path}: lasts {length / rate:.3f} s, the federation's sounds last {most}{wanted / rate:.3f} s; "
                "cut it"
            )
