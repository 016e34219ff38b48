"""``python -m benchmarks small --data DIR --output DIR``: write eight small data sets, as users have them.

Each is an npz file for ``bench run auto --data FILE``, made from the data of experiments or from a formula, with a
fixed seed. Each device has 48 to 400 samples. Three of them were not used while ``auto`` was designed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_sdk import tasks
from sparrow.reading.errors import DataError

Arrays = Mapping[str, NDArray[np.generic]]
Chance = np.random.Generator


def write_sets(data: Path, out: Path, names: tuple[str, ...] = ()) -> Iterator[Path]:
    """Write the sets of these names, by default all, and yield each file. Raises DataError for missing data."""
    out.mkdir(parents=True, exist_ok=True)
    for name, make in SETS.items():
        if names and name not in names:
            continue
        path = out / f"{name}.npz"
        arrays = make(data, np.random.Generator(np.random.PCG64(48)))
        np.savez_compressed(path, allow_pickle=False, **arrays)
        yield path


def activity(data: Path, chance: Chance) -> Arrays:
    """Return 60 windows of each of 30 people that do not overlap, every fourth reading of nine channels (UCI HAR)."""
    found = _load(data / "har_uci.npz")
    return _of_people(
        (subject, _some(chance, np.flatnonzero(found["subject"] == subject)[::2], 60)) for subject in range(1, 31)
    )(x=found["x"][:, :, ::4].astype(np.float32), y=found["y"].astype(np.int64))


def pictures(data: Path, chance: Chance) -> Arrays:
    """Return 80 pictures of letters and digits of each of 20 writers (FEMNIST)."""
    found = _load(data / "femnist.npz")
    writers = [writer for writer in range(184) if np.count_nonzero(found["writer"] == writer) >= 100][:20]
    return _of_people((writer, _some(chance, np.flatnonzero(found["writer"] == writer), 80)) for writer in writers)(
        x=found["x"], y=found["y"].astype(np.int64)
    )


def roles(data: Path, chance: Chance) -> Arrays:
    """Return the first 400 characters of each of 20 roles of Shakespeare's, in lower case, each to be predicted from
    the eight before it, one-hot [characters, 8].
    """
    found = _load(data / "shakespeare.npz")
    alphabet = [str(character) for character in found["alphabet"]]
    lower = np.array(
        [alphabet.index(each.lower()) if each.lower() in alphabet else i for i, each in enumerate(alphabet)]
    )
    texts: dict[int, list[NDArray[np.generic]]] = {}
    for role, start, stop in zip(found["role"], found["start"][:-1], found["start"][1:], strict=True):
        texts.setdefault(int(role), []).append(found["text"][start:stop])
    longest = sorted(texts, key=lambda role: -sum(map(len, texts[role])))[20:40]
    said = {role: lower[np.concatenate(texts[role])[:408]] for role in longest}
    used = np.unique(np.concatenate(list(said.values())))
    windows = np.concatenate([np.lib.stride_tricks.sliding_window_view(text[:-1], 8) for text in said.values()])
    x = (windows[:, None, :] == used[None, :, None]).astype(np.float32)
    y = np.searchsorted(used, np.concatenate([text[8:] for text in said.values()]))
    return {"x": x, "y": y, "person": np.repeat(list(said), [len(text) - 8 for text in said.values()])}


def voices(data: Path, chance: Chance) -> Arrays:
    """Return 80 sounds of each of six synthetic voices that say eight words: energies of 24 bands over 32 frames. A
    word is a way of two formants; voices differ in pitch, in the length of their throats and in how they say it."""
    xs = []
    ys = []
    people = []
    words = chance.uniform(300, 2400, (8, 2, 4))
    for voice, pitch in enumerate((95, 120, 150, 190, 235, 290)):
        throat = chance.uniform(0.75, 1.3)
        manner = chance.normal(0, 250, (8, 2, 4))
        for _ in range(80):
            word = int(chance.integers(8))
            xs.append(_sound(chance, pitch, throat * (words[word] + manner[word])))
            ys.append(word)
            people.append(voice)
    return {"x": np.stack(xs), "y": np.array(ys), "person": np.array(people)}


def digits(data: Path, chance: Chance) -> Arrays:
    """Return scikit-learn's 1,797 digits of 8 x 8, to be dealt by a Dirichlet partition."""
    found = _load(Path(tasks.__file__).with_name("digits.npz"))
    return {"x": (found["pixels"] * 15).astype(np.uint8), "y": found["labels"].astype(np.int64)}


def writers(data: Path, chance: Chance) -> Arrays:
    """Return 60 digits of each of 20 writers (MNIST, by QMNIST's writers)."""
    found = _load(data / "mnist.npz")
    written = _load(data / "mnist_writers.npz")["writer_train"]
    counts = np.bincount(written)
    chosen = _some(chance, np.flatnonzero(counts >= 100), 20)
    return _of_people((writer, _some(chance, np.flatnonzero(written == writer), 60)) for writer in chosen)(
        x=found["x_train"], y=found["y_train"].astype(np.int64)
    )


def cifar(data: Path, chance: Chance) -> Arrays:
    """Return 5,000 pictures of CIFAR-10, to be dealt by a Dirichlet partition."""
    from PIL import Image

    found = _load(data / "cifar10.npz")
    chosen = _some(chance, np.arange(50_000), 5_000)
    ends = found["offset_train"]
    files = (found["jpeg_train"][ends[i] : ends[i + 1]].tobytes() for i in chosen)
    x = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    return {"x": x, "y": found["y_train"][chosen].astype(np.int64)}


def regression(data: Path, chance: Chance) -> Arrays:
    """Return 60 windows of each of 23 people: the variation of the acceleration, in m/s², to be predicted from rotation
    (three channels of 64 readings).
    """
    found = _load(data / "har_watch_phone.npz")
    moved = np.linalg.norm(found["x"][:, :3].astype(np.float32), axis=1).std(axis=1)
    return _of_people(
        (subject, _some(chance, np.flatnonzero(found["subject"] == subject)[::2], 60)) for subject in range(1, 24)
    )(x=found["x"][:, 3:, ::2].astype(np.float32), y=moved.astype(np.float32))


SETS: Mapping[str, Callable[[Path, Chance], Arrays]] = {
    "activity": activity,
    "pictures": pictures,
    "roles": roles,
    "voices": voices,
    "digits": digits,
    "writers": writers,
    "cifar": cifar,
    "regression": regression,
}


def _sound(chance: Chance, pitch: float, formants: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return log energies [24, 32] of a sound: two formants [2, 4] on their way, and the harmonics of a pitch."""
    bands = np.linspace(100, 3000, 24)[:, None]
    times = np.linspace(0, 3, 32)
    ways = np.stack([np.interp(times, range(4), way) for way in formants + chance.normal(0, 60, formants.shape)])
    energy = sum(np.exp(-(((bands - way[None]) / 180) ** 2)) for way in ways)
    harmonic = 0.4 + 0.6 * np.cos(np.pi * bands / (pitch * chance.uniform(0.94, 1.06))) ** 2
    sound: NDArray[np.float32] = np.log(0.02 + energy * harmonic + 0.05 * chance.random((24, 32))).astype(np.float32)
    return sound


def _of_people(chosen: Iterator[tuple[int, NDArray[np.intp]]]) -> Callable[..., Arrays]:
    """Return a function that selects the chosen samples of an array, and the person of each."""
    every = list(chosen)
    index = np.concatenate([positions for _, positions in every])
    person = np.concatenate([np.full(len(positions), who) for who, positions in every])
    return lambda **arrays: {**{name: array[index] for name, array in arrays.items()}, "person": person}


def _some(chance: Chance, positions: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Return at most ``most`` positions, in order."""
    return np.sort(chance.choice(positions, min(count, len(positions)), replace=False))


def _load(path: Path) -> Mapping[str, NDArray[np.generic]]:
    try:
        return dict(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); --data is the folder with the data of experiments") from None
