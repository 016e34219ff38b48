import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.devices.rapl import Zone, find_packages, find_psys
from sparrow.devices.readings import Files, Reason

POWERCAP = "sys/class/powercap"


def joules(source, tree, before, after, seconds):
    """Energy between two states of the tree."""
    values = []
    for state in (before, after):
        tree.over = state
        values.append(tuple(reading.value for reading in source.read(0.0)))
    return source.joules(*values, seconds)


def powercap(root, zones):
    """A tree with these zones: folder -> name, counter in microjoules[, more files]."""
    for folder, (name, counter, more) in zones.items():
        path = root / POWERCAP / folder
        path.mkdir(parents=True)
        texts = {"name": name, "energy_uj": counter, "max_energy_range_uj": 262143328850, **more}
        for file, text in texts.items():
            (path / file).write_text(f"{text}\n")
    return Files(root)


def test_every_interval_has_the_expected_watts(tree, expected, rapl_rows):
    laptop = tree("laptop-rapl/root")
    psys, packages = find_psys(laptop.files), find_packages(laptop.files)
    for interval, (t0, before), (t1, after) in zip(
        expected("laptop-rapl")["intervals"], rapl_rows, rapl_rows[1:], strict=False
    ):
        watts, seconds = interval["watts"], t1 - t0
        assert joules(psys, laptop, before, after, seconds) == pytest.approx(watts["psys"] * seconds)
        # Cores and uncore are inside the package, and the mmio copy is the package once more.
        assert joules(packages, laptop, before, after, seconds) == pytest.approx(
            (watts["package-0"] + watts["dram"]) * seconds
        )


def test_names_and_scopes_say_what_is_covered(tree):
    laptop = tree("laptop-rapl/root").files
    psys, packages = find_psys(laptop), find_packages(laptop)
    assert (psys.name, psys.scope) == ("RAPL psys", "board")
    assert (packages.name, packages.scope) == ("RAPL package-0 + dram", "package+dram")


def test_without_memory_counters_the_scope_is_the_package(tmp_path):
    files = powercap(tmp_path, {"intel-rapl:0": ("package-0", 5, {})})
    assert find_packages(files).scope == "package"
    assert find_psys(files) is None


def test_a_machine_without_powercap_has_no_source(tmp_path):
    assert (find_psys(Files(tmp_path)), find_packages(Files(tmp_path))) == (None, None)


@given(st.floats(0, 1000), st.floats(0, 999), st.floats(1, 100))
def test_one_wrap_around_is_undone(start, drawn, seconds):
    zone = Zone("x", "package-0", 1000.0, 1000.0)
    after = (start + drawn) % 1000.0
    assert zone.step(start, after, seconds) == pytest.approx(drawn, abs=1e-6)


def test_a_counter_that_was_reset_is_refused():
    zone = Zone("x", "package-0", 262143.0, 250.0)
    assert zone.step(130000.0, 5.0, 1.0) is None


def test_a_very_short_interval_may_hold_one_step_of_the_counter():
    zone = Zone("x", "package-0", 262143.0, 250.0)
    assert zone.step(100.0, 100.1, 0.0002) == pytest.approx(0.1)


def test_rated_watts_of_the_processor_set_what_is_plausible(tmp_path):
    server = {"constraint_0_max_power_uw": 280000000}
    files = powercap(tmp_path, {"intel-rapl:0": ("package-0", 0, server)})
    assert find_packages(files).joules((0.0,), (839.0,), 1.0) == pytest.approx(839)
    assert find_packages(files).joules((0.0,), (841.0,), 1.0) is None


def test_dies_that_mirror_one_counter_count_once(tmp_path):
    zones = {f"intel-rapl:{die}": (f"package-0-die-{die}", 7000000, {}) for die in (0, 1)}
    dies = find_packages(powercap(tmp_path, zones))
    assert dies.joules((7.0, 7.0), (17.0, 17.0), 1.0) == pytest.approx(10)
    assert dies.joules((7.0, 700.0), (17.0, 720.0), 1.0) == pytest.approx(30)


def test_two_sockets_count_twice_even_when_they_read_alike(tmp_path):
    zones = {f"intel-rapl:{socket}": (f"package-{socket}", 7000000, {}) for socket in (0, 1)}
    assert find_packages(powercap(tmp_path, zones)).joules((7.0, 7.0), (17.0, 17.0), 1.0) == pytest.approx(20)


def test_zones_that_only_show_inside_their_package_are_found(tmp_path):
    zones = {"intel-rapl:0": ("package-0", 0, {}), "intel-rapl:0/intel-rapl:0:2": ("dram", 0, {})}
    assert find_packages(powercap(tmp_path, zones)).scope == "package+dram"


def test_without_permission_there_is_no_value_but_a_way_to_get_one(tree, expected):
    laptop = tree("laptop-rapl/root")
    source = find_packages(laptop.files)
    laptop.over = {f"{POWERCAP}/intel-rapl:0/energy_uj": PermissionError()}
    denied = source.read(0.0)[0]
    assert {"value": denied.value, "reason": denied.reason} == expected("laptop-rapl")["permission_denied"]
    assert "chmod 0440" in source.advice[Reason.PERMISSION]


def test_counters_are_read_well_before_they_could_wrap_twice(tree):
    assert find_packages(tree("laptop-rapl/root").files).longest_gap_seconds(1.0) == pytest.approx(65.7, abs=0.1)
