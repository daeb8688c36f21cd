from pathlib import Path

from kvbench.probes.machine import (
    CpuTimes,
    available_memory_bytes,
    cpu_times,
    filesystem_kind,
    last_level_cache_bytes,
    runs_in_a_virtual_machine,
    taken_by_others_ratio,
)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_free_memory_is_what_the_cgroup_leaves_when_that_is_less(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   8000 kB\n")
    assert available_memory_bytes(root=tmp_path) == 8000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "5000000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "1000000\n")
    assert available_memory_bytes(root=tmp_path) == 4000000
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert available_memory_bytes(root=tmp_path) == 8000 * 1024


def test_a_machine_that_says_nothing_gives_none(tmp_path: Path) -> None:
    assert available_memory_bytes(root=tmp_path) is None
    assert last_level_cache_bytes(root=tmp_path) is None
    assert cpu_times(root=tmp_path) is None
    assert filesystem_kind(tmp_path, root=tmp_path) == "unknown filesystem"
    assert not runs_in_a_virtual_machine(root=tmp_path)


def test_the_last_level_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "32K", "512K", "32768K")):
        write(tmp_path, f"sys/devices/system/cpu/cpu0/cache/index{index}/size", size + "\n")
    assert last_level_cache_bytes(root=tmp_path) == 32768 * 1024


def test_a_directory_belongs_to_its_deepest_mount(tmp_path: Path) -> None:
    write(
        tmp_path,
        "proc/self/mountinfo",
        "36 25 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
        "40 36 0:30 / /mnt/fast\\040disk rw - xfs /dev/nvme0n1 rw\n"
        "41 36 0:31 / /mnt rw - tmpfs tmpfs rw\n"
        "half a li\n",
    )
    assert filesystem_kind(Path("/var"), root=tmp_path) == "ext4"
    assert filesystem_kind(Path("/mnt/other"), root=tmp_path) == "tmpfs"
    assert filesystem_kind(Path("/mnt/fast disk/cache"), root=tmp_path) == "xfs"
    assert filesystem_kind(Path("/mntx"), root=tmp_path) == "ext4"


def test_cpu_time_of_others_is_what_is_busy_and_not_ours(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", "cpu  100 0 50 800 20 0 10 20 0 0\ncpu0 1 2 3\n")
    before = cpu_times(root=tmp_path)
    assert before is not None
    after = CpuTimes(busy_s=before.busy_s + 6, stolen_s=before.stolen_s + 1, total_s=before.total_s + 20)
    assert taken_by_others_ratio(before, after, own_s=5) == 0.1
    assert taken_by_others_ratio(before, after, own_s=50) == 0.0
    assert taken_by_others_ratio(before, before, own_s=0) == 0.0
