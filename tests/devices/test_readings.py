import errno
from pathlib import Path

import pytest

from sparrow.devices.readings import Files, Quality, ReadError, Reading, Reason


def files_with(content: bytes | Exception) -> Files:
    def read(_path: Path) -> bytes:
        if isinstance(content, Exception):
            raise content
        return content

    return Files(Path("/"), read)


@pytest.mark.parametrize(
    ("content", "value"),
    [(b"6012000\n", 6012000), (b"-812000\n", -812000), (b"32760 ma\n", 32760), (b"81%", 81), (b"42\x00", 42)],
)
def test_numbers_are_found_among_what_kernels_print_around_them(content, value):
    assert files_with(content).number("x") == value


@pytest.mark.parametrize("content", [b"", b"\n", b"unknown\n", b"0x50005\n", b"1 2\n", b"\xff\xfe"])
def test_what_is_no_number_is_a_parse_failure(content):
    reading = files_with(content).reading("x", "W", "device", 1.0)
    assert (reading.value, reading.reason) == (None, Reason.PARSE)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(), Reason.ABSENT),
        (NotADirectoryError(), Reason.ABSENT),
        (PermissionError(), Reason.PERMISSION),
        (OSError(errno.EIO, "I/O error"), Reason.POWERED_DOWN),
        (OSError(errno.ENODEV, "no such device"), Reason.POWERED_DOWN),
    ],
)
def test_a_failed_read_says_why_and_is_never_zero(error, reason):
    reading = files_with(error).reading("x", "J", "package", 3.0)
    assert reading == Reading(None, "J", "package", Quality.UNAVAILABLE, "x", 3.0, reason)


def test_lists_of_the_device_tree_are_split_at_nul():
    assert files_with(b"raspberrypi,4-model-b\x00brcm,bcm2711\x00").strings("x") == [
        "raspberrypi,4-model-b",
        "brcm,bcm2711",
    ]


def test_a_missing_folder_is_absent(tmp_path):
    with pytest.raises(ReadError) as failure:
        Files(tmp_path).children("sys/class/powercap")
    assert failure.value.reason is Reason.ABSENT


@pytest.mark.parametrize(
    ("value", "quality", "reason"),
    [
        (None, Quality.MEASURED, None),
        (None, Quality.UNAVAILABLE, None),
        (0.0, Quality.UNAVAILABLE, Reason.ABSENT),
        (1.0, Quality.MEASURED, Reason.STALE),
    ],
)
def test_a_reading_does_not_contradict_itself(value, quality, reason):
    with pytest.raises(ValueError, match="either a value, or a reason"):
        Reading(value, "W", "board", quality, "x", 0.0, reason)


def test_labels_print_as_words():
    assert (f"{Quality.MEASURED}", f"{Reason.POWERED_DOWN}") == ("measured", "powered_down")
