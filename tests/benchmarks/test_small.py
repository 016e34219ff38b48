"""Small sets of samples are made of a formula, or of data that may be missing, the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.small import SETS, write_sets
from sparrow.reading.errors import DataError


def test_sets_that_need_no_data_are_the_same_each_time(tmp_path):
    first, again = (
        {path.stem: dict(np.load(path)) for path in write_sets(tmp_path, folder, ("voices", "digits"))}
        for folder in (tmp_path / "a", tmp_path / "b")
    )
    assert list(first) == ["voices", "digits"]
    for name, arrays in first.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(again[name][key], array)
    voices = first["voices"]
    assert voices["x"].shape == (480, 24, 32)
    assert np.bincount(voices["person"]).tolist() == [80] * 6
    assert len(np.unique(voices["y"])) == 8
    assert np.isfinite(voices["x"]).all()


def test_a_word_is_told_from_others_within_a_voice_and_less_between_voices(tmp_path):
    """A nearest mean finds most words of the voice that it was made of, and few of another's."""
    (path,) = write_sets(tmp_path, tmp_path, ("voices",))
    found = dict(np.load(path))

    def right(of, judged):
        here, there = found["person"] == of, found["person"] == judged
        means = np.stack([found["x"][here & (found["y"] == word)].mean(axis=0) for word in range(8)])
        distances = ((found["x"][there][:, None] - means[None]) ** 2).sum(axis=(2, 3))
        return np.mean(distances.argmin(axis=1) == found["y"][there])

    own = np.mean([right(voice, voice) for voice in range(6)])
    other = np.mean([right(voice, (voice + 3) % 6) for voice in range(6)])
    assert own > 0.9
    assert other < 0.7 * own


def test_missing_data_are_named(tmp_path):
    for name in sorted({*SETS} - {"voices", "digits"}):
        with pytest.raises(DataError, match=r"--data is the folder"):
            list(write_sets(tmp_path / "nowhere", tmp_path, (name,)))
