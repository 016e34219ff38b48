"""Simulated boards: seconds and joules from counted work, and files that describe boards of one's own."""

from __future__ import annotations

import pytest

from sparrow.devices.estimate import PowerModel
from sparrow.devices.simulation import BOARDS, SHARE_OF_HPL, Board, load_boards

TABLE = """
[[board]]
name = "mine"
gflops = 2.0
idle_watts = 1.0
max_watts = 3.0
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="boards.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_known_boards_are_found_by_name_in_the_order_asked():
    assert load_boards("pi5, pizero2w,pi5") == (BOARDS["pi5"], BOARDS["pizero2w"], BOARDS["pi5"])


def test_known_boards_follow_their_published_rates_and_power_models():
    published = {"pizero2w": 0.37e9, "pi4b": 11.9e9, "pi5": 35.2e9}
    assert set(BOARDS) == set(published)
    for name, board in BOARDS.items():
        assert board.name == name
        assert board.flops_per_second == published[name] * SHARE_OF_HPL
        assert 0 < board.power.idle_watts < board.power.max_watts


def test_computing_costs_full_load_and_transfer_what_a_board_draws_at_rest():
    board = Board("b", 2e9, PowerModel(1.0, 3.0, "b"), 4, 1024, bytes_per_second=1000.0)
    assert board.computing_seconds(4_000_000_000) == 2.0
    assert board.transfer_seconds(500) == 0.5
    assert board.joules(2.0, 0.5) == 2.0 * 3.0 + 0.5 * 1.0
    assert board.joules(0.0, 0.0) == 0.0


def test_a_file_describes_boards_of_ones_own(file):
    second = '[[board]]\nname = "fast"\ngflops = 9\nidle_watts = 0\nmax_watts = 5\ncores = 8\nmemory_mib = 2048\n'
    plain, fast = load_boards(file(TABLE + second + "mbit_per_second = 80\n"))
    assert plain == Board("mine", 2e9, PowerModel(1.0, 3.0, "mine"), 1, 1024 * 2**20, 10e6 / 8)
    assert fast == Board("fast", 9e9, PowerModel(0.0, 5.0, "fast"), 8, 2048 * 2**20, 80e6 / 8)


@pytest.mark.parametrize("text", ["pi3", "pi4b,", "", "PI5"])
def test_an_unknown_name_is_told_with_those_there_are(text):
    with pytest.raises(ValueError, match="pi4b, pi5, pizero2w"):
        load_boards(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"no \[\[board\]\] table; add one"),
        ("[[boards]]\nname = 'x'\n", r"no \[\[board\]\] table"),
        ("board = 3\n", r"write \[\[board\]\]; each .*board.* needs a name"),
        ("[board]\nname = 'x'\n", r"write \[\[board\]\]; each .*board.* needs a name"),
        ("[[board]]\n", "'name'; each .*board.* needs a name, and the numbers gflops, idle_watts and max_watts"),
        ("[[board\n", "each .*board.* needs a name"),
        (TABLE.replace("2.0", "'two'"), "could not convert"),
        (TABLE.replace("2.0", "0"), "board mine: its rates must be finite and above 0"),
        (TABLE.replace("2.0", "nan"), "board mine: its rates must be finite and above 0"),
        (TABLE.replace("2.0", "inf"), "board mine: its rates must be .*finite"),
        (TABLE + "mbit_per_second = -1\n", "board mine: its rates must be finite and above 0"),
        (TABLE + "cores = 0\n", "board mine: .*cores"),
        (TABLE + "memory_mib = -5\n", "board mine: .*memory"),
        (TABLE + "watts = 3\n", "watts"),
        (TABLE.replace("idle_watts = 1.0", "idle_watts = 4.0"), "power model mine: 4.0 W idle and 3.0 W at full load"),
    ],
)
def test_a_file_that_describes_no_board_is_told_with_its_name(file, text, said):
    path = file(text)
    with pytest.raises(ValueError, match=said) as refused:
        load_boards(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read_is_told_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: No such file"):
        load_boards(str(tmp_path / "none.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match=r"folder\.toml: Is a directory"):
        load_boards(str(tmp_path / "folder.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.toml: "):
        load_boards(str(tmp_path / "bytes.toml"))
