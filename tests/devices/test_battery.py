import pytest

from sparrow.devices.battery import find_batteries
from sparrow.devices.readings import Quality, Reason

SUPPLY = "sys/class/power_supply"


@pytest.mark.parametrize("root", ["root", "root-charge"])
def test_a_discharging_battery_tells_the_power_of_the_device(tree, expected, root):
    want = expected("laptop-battery")[root]
    (reading,) = find_batteries(tree(f"laptop-battery/{root}").files).read(0.0)
    assert reading.value == pytest.approx(want["power_w"])
    assert (reading.quality, reading.unit, reading.scope) == (want["quality"], "W", "device")


def test_a_charging_battery_tells_nothing_about_the_device(tree, expected):
    want = expected("laptop-battery")["root-charging"]
    (reading,) = find_batteries(tree("laptop-battery/root-charging").files).read(0.0)
    assert (reading.value, reading.reason) == (want["power_w"], want["reason"])


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"AC/online": "1"}, Reason.CHARGING),  # "Discharging" on a weak charger is part of the truth only
        ({"ucsi-source-psy-USBC000:001/online": "2"}, Reason.CHARGING),
        ({"BAT0/status": "Full"}, Reason.CHARGING),
        ({"BAT0/status": "Not charging"}, Reason.CHARGING),
        ({"BAT0/status": "Unknown"}, Reason.STALE),
        ({"BAT0/power_now": "0"}, Reason.STALE),
        ({"BAT0/power_now": "n/a"}, Reason.PARSE),
        ({"BAT0/power_now": PermissionError()}, Reason.PERMISSION),
        ({"BAT0/status": OSError(5, "I/O error")}, Reason.POWERED_DOWN),
        ({"BAT0": FileNotFoundError()}, Reason.ABSENT),
    ],
)
def test_every_other_state_is_unavailable_and_never_zero(tree, over, reason):
    laptop = tree("laptop-battery/root")
    batteries = find_batteries(laptop.files)
    laptop.over = {f"{SUPPLY}/{path}": value for path, value in over.items()}
    (reading,) = batteries.read(0.0)
    assert (reading.value, reading.quality, reading.reason) == (None, Quality.UNAVAILABLE, reason)


def test_the_sign_of_the_power_does_not_matter(tree):
    laptop = tree("laptop-battery/root")
    laptop.over = {f"{SUPPLY}/BAT0/power_now": "-6012000"}
    assert find_batteries(laptop.files).read(0.0)[0].value == pytest.approx(6.012)


def test_a_mouse_alone_is_no_battery_of_the_device(tree):
    laptop = tree("laptop-battery/root")
    laptop.over = {f"{SUPPLY}/BAT0/type": "Mains"}
    assert find_batteries(laptop.files) is None


def test_a_second_battery_that_rests_does_not_hide_the_one_in_use(tree):
    laptop = tree("laptop-battery/root")
    laptop.over = {f"{SUPPLY}/hidpp_battery_0/scope": "System", f"{SUPPLY}/hidpp_battery_0/status": "Not charging"}
    assert find_batteries(laptop.files).read(0.0)[0].value == pytest.approx(6.012)


def test_power_is_integrated_by_the_trapezoid_rule(tree):
    assert find_batteries(tree("laptop-battery/root").files).joules((4.0,), (8.0,), 10.0) == 60
