"""Tables of long recordings: times, breaks, rates and windows."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from sparrow.protocol.preparation import Preparation, Targets
from sparrow.reading import ReadOptions, read_file, read_options
from sparrow.reading.errors import BadOption
from sparrow.reading.times import unit_found, unit_named


def table(times, labels="a", name="time", **more):
    """Return a table with the channels x, counting rows, and v."""
    count = len(times)
    columns = {name: times, "x": range(count), "v": [0.5] * count}
    columns |= {key: [value] * count if isinstance(value, str) else value for key, value in more.items()}
    columns["label"] = [labels] * count if isinstance(labels, str) else labels
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(",".join(map(str, row)) for row in rows) + "\n"


def regular(count=100, rate=50, start=0.0):
    return [round(start + row / rate, 6) for row in range(count)]


@pytest.fixture
def read(tmp_path):
    def read(content, window=10, **more):
        path = tmp_path / "t.csv"
        path.write_text(content)
        options = {"window": window, **more.pop("options", {})}
        return read_file(path, ReadOptions(**options), **more)[""]

    return read


@pytest.fixture
def refused(refused):
    return lambda content, *words, **more: refused(*words, content=content, **more)


def said(raw):
    return "; ".join(raw.said)


def firsts(raw):
    return raw.inputs[:, 0, 0].tolist()


def test_windows_are_cut_from_a_recording(read):
    raw = read(table(regular(30)))
    assert (raw.inputs.shape, raw.inputs.dtype) == ((5, 10, 2), np.float32)
    assert raw.inputs.flags.c_contiguous
    assert firsts(raw) == [0, 5, 10, 15, 20]
    assert raw.inputs[1, :, 0].tolist() == list(range(5, 15))
    assert (raw.axes, raw.reader, raw.rate, raw.step, raw.columns) == ("TC", "recordings", 50, 0.1, ())
    assert raw.labels.tolist() == ["a"] * 5
    assert raw.runs.tolist() == [0] * 5
    assert raw.label == "label"
    for words in ("50 per second", "1 recording, 5 windows (a 1 with 5)", "channels: x, v"):
        assert words in said(raw)


@pytest.mark.parametrize(
    ("window", "step", "shape", "count"), [(0.2, None, 10, 5), (0.2, 0.2, 10, 3), (8, 3, 8, 8), (0.2, 7, 10, 3)]
)
def test_lengths_are_seconds_or_samples(read, window, step, shape, count):
    raw = read(table(regular(30)), window, options={"step": step})
    assert raw.inputs.shape[:2] == (count, shape)


def test_a_new_label_begins_a_recording(read):
    labels = ["a"] * 25 + ["b"] * 12 + ["a"] * 8 + ["b"] * 10
    raw = read(table(regular(55), labels))
    assert firsts(raw) == [0, 5, 10, 15, 25, 45]
    assert raw.labels.tolist() == ["a"] * 4 + ["b"] * 2
    assert raw.runs.tolist() == [0, 0, 0, 0, 1, 3]
    assert "3 recordings, 6 windows (a 1 with 4, b 2 with 2); 1 recording shorter than a window was left out" in said(
        raw
    )


def test_gaps_and_steps_back_begin_a_recording(read):
    times = regular(20) + regular(20, start=1.0) + regular(20, start=0.3)
    raw = read(table(times), options={"step": 10})
    assert raw.runs.tolist() == [0, 0, 1, 1, 2, 2]
    assert firsts(raw) == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("column", ["recording", "Run", "session", "file", "person", "Subject"])
def test_columns_begin_a_recording(read, column):
    raw = read(table(regular(40), **{column: ["1"] * 15 + ["2"] * 25}), options={"step": 10})
    assert raw.runs.tolist() == [0, 1, 1]
    assert firsts(raw) == [0, 15, 25]
    assert raw.inputs.shape[2] == 2
    if column in ("person", "Subject"):
        assert raw.people.tolist() == ["1", "2", "2"]


def test_jitter_is_borne(read):
    chance = np.random.default_rng(0)
    times = np.arange(1_000) / 50 + chance.uniform(-0.004, 0.004, 1_000)
    raw = read(table([f"{time:.6f}" for time in times]))
    assert set(raw.runs.tolist()) == {0}
    assert abs(raw.rate - 50) < 1


@pytest.mark.parametrize(
    ("name", "factor", "start"),
    [
        ("time", 1, 0),
        ("timestamp", 1_000, 1.7e9),
        ("t", 1_000_000, 0),
        ("time", 1_000_000_000, 1.7e9),
        ("time_ms", 1_000, 0),
        ("Timestamp (us)", 1_000_000, 0),
        ("ms", 1_000, 5),
        ("elapsed time [s]", 1, 0),
        ("seconds", 1, 0),
    ],
)
def test_units_are_found(read, name, factor, start):
    times = [round((start + row / 50) * factor, 3) for row in range(40)]
    raw = read(table(times, name=name))
    assert raw.rate == pytest.approx(50, rel=1e-4)
    assert (len(raw.inputs), set(raw.runs.tolist())) == (7, {0})
    assert ("was read as" in said(raw)) == (unit_named(name) is None)


def test_a_step_of_seconds_or_milliseconds_is_asked_for(read, refused):
    content = table([20 * row for row in range(40)])
    refused(content, "time_ms", "rate=50")
    assert read(content, options={"rate": 50.0}).rate == 50
    refused(table(list(range(40))), "seconds or milliseconds")


def test_times_that_are_rounded_have_the_rate_on_average(read):
    times = [round(1_000 * row / 64) for row in range(400)]
    assert read(table(times, name="time_ms")).rate == 64


def test_a_window_without_its_unit_is_too_short(refused):
    refused(table(regular(40)), "window=2s", options={"window": 2})


@pytest.mark.parametrize(
    ("first", "step", "wanted", "unit"),
    [
        (0, 0.02, None, "s"),
        (0, 20, None, None),
        (0, 1, None, None),
        (0, 20, 50.0, "ms"),
        (0, 1, 1.0, "s"),
        (0, 3_600, 1 / 3_600, "s"),
        (0, 20_000, None, "us"),
        (0, 2e7, None, "ns"),
        (1.7e9, 1, None, "s"),
        (1.7e12, 1, None, "ms"),
    ],
)
def test_units_follow_size_and_rate(first, step, wanted, unit):
    assert unit_found(first, step, wanted) == unit


@pytest.mark.parametrize("form", ["{}", "{}Z", "{}+02:00", "{} UTC"])
@pytest.mark.parametrize("blank", ["T", " "])
def test_dates_are_read(read, form, blank):
    first = datetime.datetime(2026, 5, 1, 23, 59, 59, 900_000)  # noqa: DTZ001  a text without a zone
    moments = [first + datetime.timedelta(milliseconds=10 * row) for row in range(40)]
    raw = read(table([form.format(moment.isoformat(blank)) for moment in moments], name="timestamp"))
    assert (raw.rate, len(raw.inputs)) == (100, 7)


def test_dates_of_parquet_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    first = datetime.datetime(2026, 5, 1)  # noqa: DTZ001
    times = [first + datetime.timedelta(milliseconds=20 * row) for row in range(40)]
    columns = {"time": times, "x": list(range(40)), "label": ["a"] * 40}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    raw = read_file(tmp_path / "t.parquet", ReadOptions(window=10))[""]
    assert (raw.rate, raw.inputs.shape) == (50, (7, 10, 1))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["0", "0.02", "noon", *map(str, regular(20, start=0.1))], ["line 4", "time", "'noon'"]),
        (["2026-01-01", "2026-13-01"] * 10, ["line 3", "2026-13-01"]),
        (["0", "0.02", "", *map(str, regular(20, start=0.1))], ["line 4", "missing", "missing=drop"]),
        ([0] * 20, ["does not increase"]),
        ([0] * 20 + [1] * 20, ["digits"]),
        (list(range(40, 0, -1)), ["sort"]),
    ],
)
def test_times_that_do_not_help_are_refused(refused, cells, words):
    refused(table(cells), *words)


def test_unsorted_rows_are_refused(refused):
    times = np.random.default_rng(0).permutation(regular(100)).tolist()
    refused(table(times), "in order of time")


def test_axes_x_y_and_z_are_no_labels(read):
    raw = read(table(regular(30), y=range(30), z=range(30)))
    assert (raw.label, raw.inputs.shape[2]) == ("label", 4)


def test_another_column_of_times_is_named(read, refused):
    content = table(regular(30), name="clock")
    refused(content, "time=NAME", "clock")
    assert len(read(content, options={"time": "clock"}).inputs) == 5
    refused(content, "did you mean clock", options={"time": "clok"})
    both = table(regular(30), timestamp="3")
    refused(both, "time and timestamp", "drop=")
    assert len(read(both, options={"drop": ("timestamp",)}).inputs) == 5


def test_lost_rows_are_interpolated_and_means_stay_open(read, refused):
    content = table(regular(40)).replace("\n0.3,15,", "\n0.3,?,")
    refused(content, "line 17", "missing=drop")
    raw = read(content, options={"missing": "drop", "step": 5})
    assert firsts(raw) == [0, 5, 10, 15, 20, 25, 30]
    assert np.allclose(raw.inputs[1, :, 0], np.arange(5, 15))
    assert "1 missing reading" in said(raw)
    assert np.isnan(read(content, options={"missing": "mean"}).inputs[2, 5, 0])


def test_rows_without_a_time_are_left_out_on_demand(read):
    content = table(regular(40)).replace("\n0.3,15,", "\n,15,")
    raw = read(content, options={"missing": "drop", "step": 5})
    assert firsts(raw) == [0, 5, 10, 15, 20, 25, 30]


def test_a_recording_ends_where_many_readings_are_missing(read):
    times = [time for time in regular(60) if not 0.4 < float(time) < 0.52]
    assert set(read(table(times), options={"step": 5}).runs.tolist()) == {0, 1}


def test_channels_are_found_by_name(read, refused):
    content = table(regular(40), z=range(40, 80))
    names = read(content).channels
    assert names[-1] == "z"
    turned = {"shape": (10, len(names)), "channel": 1, "channels": names[::-1]}
    raw = read(content, None, preparation=federation(**turned))
    assert raw.inputs[0, 0, 0] == 40
    refused(content, "depth", preparation=federation(**{**turned, "channels": ("depth", *names[1:])}), options={})


@pytest.mark.parametrize(
    ("more", "labels", "word"),
    [({"z": ["a", "b"] * 50}, "a", "drop=z"), ({}, [row / 2 + 0.25 for row in range(100)], "target=class")],
)
def test_channels_are_numbers_and_labels_classes(refused, more, labels, word):
    refused(table(regular(100), labels, **more), word)


# --- rates and the federation


def federation(**more):
    return Preparation(**{"reader": "recordings", "axes": "TC", "shape": (10, 2), "rate": 50.0, "step": 0.1, **more})


def test_the_federation_fixes_rate_and_windows(read):
    raw = read(table(regular(60, 100)), None, preparation=federation())
    assert (raw.rate, raw.inputs.shape) == (50, (5, 10, 2))
    assert raw.inputs[0, :, 0].tolist() == list(range(0, 20, 2))
    assert "100 per second and were resampled to 50" in said(raw)
    slower = read(table(regular(20, 25)), None, preparation=federation())
    assert np.allclose(slower.inputs[0, :, 0], np.arange(10) / 2)


def test_almost_the_same_rate_is_taken_as_it_is(read):
    raw = read(table(regular(30, 50.3)), None, preparation=federation())
    assert raw.inputs[0, :, 0].tolist() == list(range(10))
    assert "resampled" not in said(raw)


def test_a_rate_can_be_asked_for(read):
    assert read(table(regular(60, 100)), options={"rate": 50.0}).inputs.shape == (5, 10, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0.3}, ["window=0.3s", "10 samples", "0.2 s"]),
        ({"step": 4}, ["step=4", "5 samples"]),
        ({"rate": 25.0}, ["rate=25", "50"]),
    ],
)
def test_contradictions_are_refused(refused, options, words):
    refused(table(regular(30)), *words, error=BadOption, preparation=federation(), window=None, options=options)


def test_other_channels_are_refused(refused):
    content = table(regular(30), z=range(30))
    refused(content, "3 channels (x, v, z)", "have 2", window=None, preparation=federation())
    refused(table(regular(30)), "recordings", window=None, preparation=federation(axes="T", shape=(10,)))


def test_windows_to_predict_need_no_labels(read):
    content = table(regular(30), ["a"] * 15 + ["b"] * 15)
    raw = read(content, None, preparation=federation(), labelled=False, targets=Targets(column="label"))
    assert raw.labels is None
    assert len(raw.inputs) == 5
    without = "\n".join(line.rpartition(",")[0] for line in content.split("\n"))
    assert len(read(without, None, preparation=federation(), labelled=False).inputs) == 5


def test_a_table_without_windows_is_one_of_rows(tmp_path, refused):
    path = tmp_path / "t.csv"
    path.write_text(table(regular(30)))
    raw = read_file(path)[""]
    assert (raw.reader, raw.inputs.shape) == ("rows", (30, 3))
    refused(table(regular(30)), "window=", window=None, options={"time": "time"})
    refused(table(regular(30)), "rate=", error=BadOption, window=None, options={"rate": 3.0})


# --- options


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ("window=2.56s,step=1.28s", ReadOptions(window=2.56, step=1.28)),
        ("window=2560ms", ReadOptions(window=2.56)),
        ("window=128,step=64", ReadOptions(window=128, step=64)),
        ("rate=16000,time=clock,unreadable=skip", ReadOptions(rate=16_000, time="clock", unreadable="skip")),
    ],
)
def test_options_are_read(entries, options):
    found = read_options(f"t.csv,{entries}")[1]
    assert found == options
    assert isinstance(found.window, type(options.window))


@pytest.mark.parametrize(
    "entry", ["window=2.5", "window=0", "window=0s", "step=-1", "rate=0", "rate=1e9", "window=2min", "unreadable=no"]
)
def test_options_that_cannot_work_are_refused(entry):
    with pytest.raises(BadOption, match=entry.split("=")[0]):
        read_options(f"t.csv,{entry}")
