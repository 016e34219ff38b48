import pytest

from sparrow.devices.estimate import BOARDS, Estimate, PowerModel, board_model
from sparrow.devices.readings import Files, Quality

CPU = "sys/devices/system/cpu"


def stat(busy_jiffies):
    return f"cpu  {busy_jiffies} 0 0 1241600 2160 0 0 0 0 0\ncpu0 0\n"


def values(estimate):
    return tuple(reading.value for reading in estimate.read(0.0))


def test_full_load_of_a_known_board(tree, expected):
    pi = tree("raspberry-pi-4/root")
    want = expected("raspberry-pi-4")["power_estimate_full_load"]
    model = board_model(pi.files)
    assert (model.coefficients, model.idle_watts, model.max_watts) == (
        want["coefficients"],
        want["idle_w"],
        want["max_w"],
    )
    estimate = Estimate(pi.files, model, lambda: 0.0)
    pi.over = {"proc/stat": stat(1000)}
    before = values(estimate)
    pi.over = {"proc/stat": stat(1000 + 4 * 10 * 100)}  # four cores busy for ten seconds
    assert estimate.joules(before, values(estimate), 10.0) == pytest.approx(10 * want["max_w"])
    assert estimate.quality is Quality.ESTIMATED
    assert "util-linear-v1 pi4b ±30%" in estimate.name


def test_an_idle_board_draws_its_idle_watts(tree, expected):
    pi = tree("raspberry-pi-zero-2-w/root")
    estimate = Estimate(pi.files, board_model(pi.files), lambda: 0.0)
    state = values(estimate)
    assert estimate.joules(state, state, 10.0) == pytest.approx(
        10 * expected("raspberry-pi-zero-2-w")["power_estimate_idle_w"]
    )


def test_a_lower_clock_draws_less(tree):
    pi = tree("raspberry-pi-4/root")
    pi.over = {f"{CPU}/cpu{core}/cpufreq/scaling_cur_freq": "750000" for core in range(4)}
    share = values(Estimate(pi.files, board_model(pi.files), lambda: 0.0))[2]
    assert share == pytest.approx(0.5)
    assert BOARDS["raspberrypi,4-model-b"].watts(1.0, share) == pytest.approx(2.31 + 4.49 * 0.5**1.7)


def test_cores_that_are_offline_do_not_count(tree):
    pi = tree("raspberry-pi-4/root")
    pi.over = {f"{CPU}/online": "0,2-3"}
    assert values(Estimate(pi.files, board_model(pi.files), lambda: 0.0))[1] == 3


def test_a_phone_is_estimated_from_its_own_process(tree, denied, expected):
    phone = tree("phone-termux/root")
    phone.over = dict(denied)
    cpu = iter([10.0, 14.0])
    estimate = Estimate(phone.files, PowerModel.parse("1:5"), lambda: next(cpu))
    before, after = values(estimate), values(estimate)
    assert after[1] == expected("phone-termux")["online_cpus"]
    assert estimate.joules(before, after, 1.0) == pytest.approx(1 + 4 * 0.5)  # four of eight cores
    assert "this process only" in estimate.name


@pytest.mark.parametrize("text", ["garbled", "cpu  1 2", "intr 0 1 2 3 4 5 6 7"])
def test_a_garbled_stat_file_falls_back_to_the_process(tree, text):
    pi = tree("raspberry-pi-4/root")
    pi.over = {"proc/stat": text}
    assert "this process only" in Estimate(pi.files, board_model(pi.files), lambda: 0.0).name


def test_unknown_boards_are_not_guessed(tmp_path, tree):
    assert board_model(Files(tmp_path)) is None
    pi = tree("raspberry-pi-4/root")
    pi.over = {"proc/device-tree/compatible": "raspberrypi,4-compute-module\0brcm,bcm2711\0"}
    assert board_model(pi.files) is None


def test_a_given_model_is_parsed_and_leaves_the_clock_out():
    model = PowerModel.parse(" 2.3:6.4 ")
    assert (model.idle_watts, model.max_watts, model.coefficients) == (2.3, 6.4, "given 2.3:6.4")
    assert model.watts(0.5, clock_share=0.3) == pytest.approx(4.35)


@pytest.mark.parametrize("text", ["", "5", "2.3-6.4", "2.3:6.4:9", "two:six", "2,3:6,4"])
def test_what_is_no_model_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"IDLE:MAX.*2\.3:6\.4"):
        PowerModel.parse(text)


@pytest.mark.parametrize("text", ["6.4:2.3", "-1:5", "0:0", "nan:5", "2:nan", "1:inf"])
def test_impossible_watts_are_refused(text):
    with pytest.raises(ValueError, match="idle at least 0 and not above full load"):
        PowerModel.parse(text)
