"""Boards by what their makers wrote into them, also where a container or a carrier's maker hides half of it."""

import pytest

from sparrow.devices.board import find_board
from sparrow.devices.readings import Files
from sparrow.devices.system import System

COMPATIBLE = "proc/device-tree/compatible"


@pytest.fixture
def device(tmp_path):
    """Makes a device of a few files, the device tree's entries as a list."""

    def make(files=None, compatible=None, **options):
        for path, text in (files or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        if compatible:
            (tmp_path / COMPATIBLE).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / COMPATIBLE).write_bytes("\x00".join([*compatible, ""]).encode())
        return System(Files(tmp_path), **options)

    return make


def revision(code):
    return {"proc/cpuinfo": f"processor\t: 0\n\nHardware\t: BCM2835\nRevision\t: {code}\nModel\t\t: Some Pi\n"}


@pytest.mark.parametrize(
    ("code", "name", "soc", "gigabytes"),
    [
        ("902120", "raspberry-pi-zero-2-w", "bcm2837", 0.5),
        ("9000c1", "raspberry-pi-zero-w", "bcm2835", 0.5),
        ("a02082", "raspberry-pi-3", "bcm2837", 1),
        ("a020d3", "raspberry-pi-3-plus", "bcm2837", 1),
        ("9020e0", "raspberry-pi-3a-plus", "bcm2837", 0.5),
        ("a02100", "raspberry-pi-cm3-plus", "bcm2837", 1),
        ("d03114", "raspberry-pi-4", "bcm2711", 8),
        ("c03130", "raspberry-pi-400", "bcm2711", 4),
        ("b03140", "raspberry-pi-cm4", "bcm2711", 2),
        ("e04171", "raspberry-pi-5", "bcm2712", 16),
        ("d04180", "raspberry-pi-cm5", "bcm2712", 8),
        ("e041a0", "raspberry-pi-cm5-lite", "bcm2712", 16),
        ("d04190", "raspberry-pi-500", "bcm2712", 8),
        ("2a02082", "raspberry-pi-3", "bcm2837", 1),  # warranty bit
    ],
)
def test_a_pi_in_a_container_is_known_by_its_revision_code(device, code, name, soc, gigabytes):
    board = find_board(device(revision(code)))
    assert (board.name, board.kind, board.soc, board.model) == (name, "raspberry-pi", soc, "Some Pi")
    assert board.ram_code_bytes == gigabytes * 2**30


@pytest.mark.parametrize("code", ["0010", "zz", ""])
def test_a_code_without_bits_to_read_is_no_board(device, code):
    board = find_board(device(revision(code)))
    assert (board.name, board.revision, board.ram_code_bytes) == ("linux", "", None)


@pytest.mark.parametrize(
    ("compatible", "name", "module", "cuda"),
    [
        (["nvidia,p3768-0000+p3767-0005-super", "nvidia,tegra234"], "jetson-orin-nano", "p3767-0005", "8.7"),
        (["nvidia,p3768-0000+p3767-0000", "nvidia,tegra234", "nvidia,tegra23x"], "jetson-orin-nx", "p3767-0000", "8.7"),
        (["nvidia,p3737-0000+p3701-0005", "nvidia,tegra234"], "jetson-agx-orin", "p3701-0005", "8.7"),
        (["nvidia,p3509-0000+p3668-0001", "nvidia,tegra194"], "jetson-xavier-nx", "p3668-0001", "7.2"),
        (["nvidia,galen", "nvidia,tegra194"], "jetson-agx-xavier", "", "7.2"),
        (["nvidia,p3509-0000+p3636-0001", "nvidia,tegra186"], "jetson-tx2-nx", "p3636-0001", "6.2"),
        (["nvidia,quill", "nvidia,tegra186"], "jetson-tx2", "", "6.2"),
        (["nvidia,p3971-0000+p3834-0008", "nvidia,tegra264"], "jetson-agx-thor", "p3834-0008", "11.0"),
        (["vendor,box", "nvidia,tegra234"], "jetson-orin", "", "8.7"),
        (["nvidia,jetson-nano", "nvidia,tegra210"], "jetson-nano", "", "5.3"),
        (["nvidia,tegra210"], "jetson", "", "5.3"),  # a Nano or a TX1: not guessed
    ],
)
def test_a_jetson_is_known_by_its_module_or_else_its_chip(device, compatible, name, module, cuda):
    board = find_board(device({"proc/device-tree/model": "Somebody's box\x00"}, compatible))
    assert (board.name, board.kind, board.module, board.cuda) == (name, "jetson", module, cuda)
    assert (board.model, board.super_mode) == ("Somebody's box", compatible[0].endswith("-super"))


@pytest.mark.parametrize(
    ("release", "l4t", "jetpack"),
    [
        ("# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic", "36.4.7", "6.2.1"),
        ("# R36 (release), REVISION: 3, GCID: 1", "36.3.0", "6.0"),
        ("# R35 (release), REVISION: 4.1, GCID: 1, BOARD: t186ref", "35.4.1", "5.1.2"),
        ("# R32 (release), REVISION: 7.6, GCID: 1", "32.7.6", "4.6.6"),
        ("# R99 (release), REVISION: 1.2, GCID: 1", "99.1.2", ""),  # of tomorrow: no error
        ("something else", "", ""),
    ],
)
def test_known_fields_of_a_jetsons_system_are_reported(device, release, l4t, jetpack):
    board = find_board(device({"etc/nv_tegra_release": release}, ["nvidia,tegra234"]))
    assert (board.l4t, board.jetpack) == (l4t, jetpack)


def test_without_its_release_file_a_jetson_asks_the_package(tree):
    orin = tree("jetson-orin-nano-jp6/root")
    orin.over = {"etc/nv_tegra_release": FileNotFoundError()}
    assert find_board(orin.system).l4t == ""
    orin.commands["dpkg_query_showformat=${Version}_show_nvidia_l4t_core"] = "36.4.3-20250107174145"
    assert (find_board(orin.system).l4t, find_board(orin.system).jetpack) == ("36.4.3", "6.2")


def test_a_jetson_in_a_container_is_known_by_its_kernel(device):
    board = find_board(device({"proc/sys/kernel/osrelease": "6.8.12-tegra\n"}))
    assert (board.name, board.kind) == ("jetson", "jetson")


def test_its_wrong_dmi_does_not_make_a_jetson_an_x86(trees):
    assert find_board(System.at(trees / "jetson-orin-nano-jp6")).kind == "jetson"


@pytest.mark.parametrize(("chassis", "kind"), [("10", "laptop"), ("31", "laptop"), ("3", "linux"), ("", "linux")])
def test_a_laptop_is_one_by_its_chassis(device, chassis, kind):
    dmi = "sys/devices/virtual/dmi/id"
    files = {f"{dmi}/sys_vendor": "LENOVO", f"{dmi}/product_name": "Default string", f"{dmi}/chassis_type": chassis}
    board = find_board(device(files))
    assert (board.name, board.kind, board.model) == ("x86", kind, "LENOVO")


def test_a_machine_with_a_battery_is_a_laptop_and_a_board_with_one_is_not(device, trees):
    assert find_board(System.at(trees / "laptop-battery/root-charging")).kind == "laptop"
    battery = "sys/class/power_supply/axp20x-battery"
    board = find_board(device({f"{battery}/type": "Battery", f"{battery}/status": "Discharging"}, ["vendor,sbc"]))
    assert (board.name, board.kind) == ("linux", "linux")


def test_a_phone_tells_its_model(tree):
    phone = tree("phone-termux/root")
    phone.environment["PREFIX"] = "/data/data/com.termux/files/usr"
    phone.commands["getprop_ro.product.model"] = "Pixel 9"
    board = find_board(phone.system)
    assert (board.name, board.kind, board.model) == ("phone", "phone", "Pixel 9")


def test_a_64_bit_kernel_under_a_32_bit_system_has_no_wheels(trees):
    system = System.at(trees / "raspberry-pi-4")
    assert find_board(system).has_wheels
    here = System(system.files, pointer_bits=32)
    assert (find_board(here).bits, find_board(here).has_wheels) == (32, False)


def test_big_and_little_cores_are_all_told(device):
    each = "processor\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"
    text = each.format(0, "0xd05") + each.format(1, "0xd0b") + each.format(2, "0xd0b") + each.format(3, "0xfff")
    assert find_board(device({"proc/cpuinfo": text})).cpu_core == "cortex-a55+cortex-a76+0x41/0xfff"


def test_this_machine_is_found_without_an_error():
    board = find_board(System.here())
    assert board.name
    assert board.bits in (32, 64)
    assert board.cores >= 1
