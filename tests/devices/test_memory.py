"""What a process holds and could still get, read from made-up trees of /proc and control groups."""

import pytest

from sparrow.devices import memory
from sparrow.devices.readings import Files

MIB = 2**20


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:  1000000 kB\nMemAvailable:  409600 kB\n")
    (folder / "self/status").write_text("Name:\tpython\nVmHWM:\t  307200 kB\nVmRSS:\t  204800 kB\n")
    return folder


@pytest.fixture
def group(tmp_path, proc):
    """Makes a control group, with what files it has cached and not used lately."""
    (proc / "self/cgroup").write_text("1:name=systemd:/elsewhere\n0::/system.slice/sparrow.service\n")

    def make(path, limit, used, cached=0):
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 3\n")

    return make


def available(tmp_path, proc):
    return memory.available(Files(tmp_path))


def test_what_is_held_and_was_at_most(proc):
    assert memory.resident(proc) == 200 * MIB
    assert memory.peak_resident(proc) == 300 * MIB


def test_without_proc_the_peak_is_all_there_is(tmp_path):
    assert memory.resident(tmp_path) == memory.peak_resident(tmp_path) > 0
    assert not memory.forget_peak(tmp_path)


def test_without_limits_it_is_what_the_machine_has(tmp_path, proc):
    assert available(tmp_path, proc) == 400 * MIB


def test_a_units_limit_counts_and_what_it_has_only_cached_does_not(tmp_path, proc, group):
    group("system.slice/sparrow.service", 300 * MIB, 250 * MIB, cached=30 * MIB)
    assert available(tmp_path, proc) == 80 * MIB


def test_the_tightest_of_the_groups_around_it_counts(tmp_path, proc, group):
    group("system.slice/sparrow.service", "max", 250 * MIB)
    group("system.slice", 500 * MIB, 490 * MIB)
    group("", 700 * MIB, 490 * MIB)
    assert available(tmp_path, proc) == 10 * MIB


def test_a_limit_beyond_the_machine_is_none(tmp_path, proc, group):
    group("system.slice", 5000 * MIB, 250 * MIB)
    assert available(tmp_path, proc) == 400 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path, proc, group):
    group("system.slice", 100 * MIB, 250 * MIB)
    assert available(tmp_path, proc) == 0


def test_in_a_container_its_own_group_is_the_root(tmp_path, proc, group):
    (proc / "self/cgroup").write_text("0::/\n")
    group("", 300 * MIB, 200 * MIB)
    assert available(tmp_path, proc) == 100 * MIB


def test_what_was_held_for_a_moment_stays_the_peak_until_it_is_forgotten():
    block = bytearray(64 * MIB)
    held = memory.resident()
    del block
    memory.give_back()
    if not memory.forget_peak():
        pytest.skip("this system cannot")
    assert memory.peak_resident() < held - 32 * MIB


def test_a_soft_limit_counts_as_one(tmp_path, proc, group):
    group("system.slice/sparrow.service", "max", 250 * MIB)
    (tmp_path / "sys/fs/cgroup/system.slice/sparrow.service/memory.high").write_text(f"{300 * MIB}\n")
    assert available(tmp_path, proc) == 50 * MIB


def test_the_older_control_groups_limit_too(tmp_path, proc):
    (proc / "self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    for path, limit in {"docker/abc": 300 * MIB, "": 9223372036854771712}.items():
        folder = tmp_path / "sys/fs/cgroup/memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{250 * MIB}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n")
    assert available(tmp_path, proc) == 60 * MIB
    limit = memory.memory_limit(Files(tmp_path), 0.0)
    assert (limit.value, limit.unit) == (300 * MIB, "B")
    (tmp_path / "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory.memory_limit(Files(tmp_path), 0.0).reason == "absent"
    assert available(tmp_path, proc) == 400 * MIB
