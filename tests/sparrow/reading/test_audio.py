"""Folders of sounds as people have them, windows of long ones, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile

from sparrow.protocol.preparation import Preparation
from sparrow.reading import Decoded
from sparrow.reading.errors import BadOption, DataError
from sparrow.reading.sounds import resampled_length


def tone(seconds=0.5, rate=8_000, pitch=440.0, loud=0.5):
    return (loud * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.fixture
def save(tmp_path):
    def save(name, samples=None, rate=8_000, **more):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone(rate=rate) if samples is None else samples, rate, **more)
        return path

    return save


def said(raw):
    return "; ".join(raw.said)


def test_folders_of_classes_are_read(save, read):
    save("yes/1.wav", tone(0.25))
    save("no/1.WAV", tone(0.5))
    raw = read()[""]
    assert isinstance(raw.inputs, Decoded)
    assert raw.labels.tolist() == ["no", "yes"]
    assert (raw.axes, raw.reader, raw.rate, raw.step, raw.runs) == ("T", "audio", 8_000, None, None)
    assert (raw.inputs.dtype, raw.inputs.shape, raw.inputs.free) == ("float32", (4_000,), (0,))
    assert np.abs(raw.inputs[1] - tone(0.25)).max() < 1e-4
    assert raw.inputs[1].dtype == np.float32
    assert raw.inputs[1].flags.c_contiguous


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        ("a.wav", "PCM_U8"),
        ("a.wav", "PCM_16"),
        ("a.wav", "PCM_24"),
        ("a.wav", "FLOAT"),
        ("a.wav", "ULAW"),
        ("a.flac", "PCM_24"),
        ("a.ogg", "VORBIS"),
        ("a.aiff", "PCM_16"),
        ("a.mp3", "MPEG_LAYER_III"),
    ],
)
def test_all_formats_are_read(save, read, name, subtype):
    save(f"x/{name}", subtype=subtype)
    raw = read()[""]
    assert raw.inputs[0].shape == raw.inputs.shape
    assert abs(np.std(raw.inputs[0]) - np.std(tone())) < 0.02


def test_channels_are_averaged_and_said(save, read):
    save("x/1.flac", np.stack([tone(), np.zeros_like(tone())], 1))
    raw = read()[""]
    assert np.abs(raw.inputs[0] - tone() / 2).max() < 1e-4
    assert "channels of 1 sound were averaged" in said(raw)


def test_the_commonest_rate_is_taken(save, read):
    save("x/1.wav", rate=8_000)
    save("x/2.wav", rate=8_000)
    save("x/3.wav", rate=11_025)
    raw = read()[""]
    assert raw.rate == 8_000
    assert "1 sound of 11,025 Hz" in said(raw)
    assert np.abs(raw.inputs[2][100:-100] - tone()[100 : raw.inputs[2].size - 100]).max() < 0.01


def test_high_rates_are_brought_down(save, read):
    save("x/1.wav", rate=44_100)
    raw = read()[""]
    assert raw.rate == 16_000
    assert raw.inputs.shape == (8_000,)
    assert "44,100 Hz" in said(raw)
    assert read({"rate": 44_100.0})[""].inputs.shape == (22_050,)


@pytest.mark.parametrize("own", [7_999, 8_000, 11_025, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("frames", [481, 12_345, 8_001])
def test_lengths_are_those_of_decoding(save, read, own, frames):
    save("x/1.wav", np.full(frames, 0.5, np.float32), own)
    inputs = read({"rate": 16_000.0})[""].inputs
    assert inputs[0].shape == inputs.shape == (resampled_length(frames, own, 16_000),)


def test_samples_stay_within_1(save, read):
    square = np.sign(tone(rate=11_025))
    save("x/1.wav", square, 11_025)
    assert np.abs(read({"rate": 8_000.0})[""].inputs[0]).max() <= 1


def test_silent_sounds_are_kept_and_said(save, read):
    save("x/1.wav", np.zeros(800, np.float32))
    save("x/2.wav")
    raw = read()[""]
    assert len(raw.inputs) == 2
    assert "1 sound is silent" in said(raw)


# --- broken ones


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "aiff"])
def test_truncated_sounds_are_named(save, read, refused, suffix):
    save("x/good.wav")
    _cut(save(f"x/bad.{suffix}", tone(4)))
    refused(f"bad.{suffix}", "--skip-unreadable")
    raw = read({"unreadable": "skip"})[""]
    assert len(raw.inputs) == 1
    assert "1 sound file left out" in said(raw)


def test_a_header_of_a_pipe_is_no_truncation(save, read):
    path = save("x/1.wav")
    content = bytearray(path.read_bytes())
    at = content.index(b"data") + 4
    content[at : at + 4] = content[4:8] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert read()[""].inputs.shape == (4_000,)


def test_a_text_is_no_sound(refused, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/1.wav").write_text("words")
    refused("1.wav", "is not a sound")
    (tmp_path / "x/1.wav").write_text("")
    refused("1.wav", "is empty")


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.zeros(0), ["0 ms", "10 ms"]),
        (np.zeros(79), ["9.88 ms", "10 ms"]),
        (np.zeros(8_000 * 30 + 1), ["30.0 s", "window="]),
        (np.array([0, np.nan] * 100), ["not a number"]),
        (np.array([0, 32_768.0] * 100), ["32768", "scale"]),
    ],
)
def test_sounds_that_cannot_be_samples_are_named(save, refused, samples, words):
    save("x/1.wav", samples, subtype="FLOAT")
    refused("1.wav", *words)


def test_a_sound_that_changes_later_is_named(save, read):
    save("x/1.wav")
    raw = read()[""]
    save("x/1.wav", tone(0.1))
    with pytest.raises(DataError, match=r"1\.wav.*start again"):
        raw.inputs[0]


# --- the federation


def federation(**more):
    return Preparation(**{"reader": "audio", "axes": "T", "shape": (8_000,), "free": (0,), "rate": 16_000.0, **more})


def test_the_federation_fixes_the_rate(save, read, refused):
    save("x/1.wav")
    raw = read(preparation=federation())[""]
    assert (raw.rate, raw.inputs.shape) == (16_000, (8_000,))
    refused("rate=8000", "16000", error=BadOption, options={"rate": 8_000.0}, preparation=federation())
    refused("window=", error=BadOption, options={"window": 1.0}, preparation=federation())
    save("x/2.wav", tone(0.6))
    refused("2.wav", "0.600 s", "at most 0.500 s", preparation=federation())
    refused("2.wav", "0.600 s", preparation=federation(free=()))


def test_one_sound_can_be_read_without_labels(save, read, refused):
    save("1.wav")
    assert len(read(name="1.wav", labelled=False, preparation=federation())[""].inputs) == 1
    refused("without a class", name="1.wav")


def test_a_federation_of_pictures_refuses_sounds(save, refused):
    save("x/1.wav")
    refused("pictures", preparation=Preparation(reader="images", dtype="uint8", shape=(2, 2, 3), axes="HWC"))


# --- windows


def test_folders_of_long_sounds_are_cut(save, read):
    long = tone(2, pitch=50)
    save("a/1.wav", long)
    save("b/1.wav", tone(0.3))
    save("b/2.wav", tone(0.5))
    raw = read({"window": 0.5})[""]
    assert (raw.reader, raw.axes, raw.rate, raw.step) == ("recordings", "T", 8_000, 0.25)
    assert (raw.inputs.shape, raw.inputs.free) == ((4_000,), ())
    assert raw.labels.tolist() == ["a"] * 7 + ["b"]
    assert raw.runs.tolist() == [0] * 7 + [2]
    assert np.abs(raw.inputs[3] - long[6_000:10_000]).max() < 1e-4
    assert "2 recordings, 8 windows (a 1 with 7, b 1 with 1); 1 recording shorter than a window was left out" in said(
        raw
    )


def test_windows_of_resampled_sounds_have_one_length(save, read):
    save("a/1.wav", tone(40, 11_025, pitch=50), 11_025)
    raw = read({"window": 1_000, "step": 777, "rate": 8_000.0})[""]
    assert raw.inputs.shape == (1_000,)
    wanted = tone(41, pitch=50)
    for place in (0, 1, 7, len(raw.inputs) - 1):
        sample = raw.inputs[place]
        assert sample.shape == (1_000,)
        assert np.abs(sample - wanted[777 * place : 777 * place + 1_000])[50:-50].max() < 0.02


def test_a_table_says_parts_of_sounds(save, read, refused, tmp_path):
    long = tone(4)
    save("r.wav", long)
    table = tmp_path / "t.csv"
    table.write_text("file,start,end,label,person\nr.wav,0,1,a,al\nr.wav,1,2.5,b,bo\nr.wav,3,3.2,a,al\n")
    raw = read({"window": 0.5, "step": 0.5}, name="t.csv")[""]
    assert raw.labels.tolist() == ["a", "a", "b", "b", "b"]
    assert raw.people.tolist() == ["al", "al", "bo", "bo", "bo"]
    assert raw.runs.tolist() == [0, 0, 1, 1, 1]
    assert np.abs(raw.inputs[2] - long[8_000:12_000]).max() < 1e-4
    whole = read(name="t.csv")[""]
    assert (whole.reader, [len(sample) for sample in whole.inputs]) == ("audio", [8_000, 12_000, 1_600])
    for row, words in (
        ("r.wav,3,4.5,a", ["r.wav", "4.000 s", "4.5"]),
        ("r.wav,3,2,a", ["line 2", "empty"]),
        ("r.wav,x,2,a", ["line 2", "start", "'x'"]),
    ):
        table.write_text(f"file,start,end,label\n{row}\n")
        refused(*words, name="t.csv")
    table.write_text("file,start,label\nr.wav,1,a\n")
    refused("start", "end", name="t.csv")


def test_the_federation_fixes_windows(save, read, refused):
    save("a/1.wav", tone(2))
    known = Preparation(reader="recordings", axes="T", shape=(4_000,), rate=8_000.0, step=0.5)
    raw = read(preparation=known)[""]
    assert (len(raw.inputs), raw.step) == (4, 0.5)
    assert len(read({"window": 0.5}, preparation=known)[""].inputs) == 4
    refused("window=1.0s", "4,000 samples", error=BadOption, options={"window": 1.0}, preparation=known)
    refused("step=10,", "4,000 samples", error=BadOption, options={"step": 10}, preparation=known)


def test_a_step_needs_a_window(save, refused):
    save("a/1.wav")
    refused("step=0.5", "window=", error=BadOption, options={"step": 0.5})


def test_no_window_is_said(save, refused):
    save("a/1.wav")
    refused("none of 1 recording", options={"window": 3.0})
