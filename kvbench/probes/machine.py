"""What bounds a measurement on this machine: free memory, the last-level cache, and what a directory is stored on."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.errors import UsageError
from kvbench.core.units import KIB, parse_bytes


def available_memory_bytes(*, root: Path = Path("/")) -> int | None:
    """Memory this process could still take: the kernel's estimate, or what its cgroup leaves if that is less."""
    candidates = list(_meminfo_bytes(root)) + list(_cgroup_bytes(root))
    return min(candidates) if candidates else None


def last_level_cache_bytes(*, root: Path = Path("/")) -> int | None:
    """Size of CPU 0's largest cache, or None where the kernel does not say (many virtual machines and most Arm)."""
    sizes = []
    for index in sorted(root.glob("sys/devices/system/cpu/cpu0/cache/index*/size")):
        text = _text(index)  # 32768K
        try:
            sizes.append(parse_bytes(f"{text.removesuffix('K')}KiB" if text.endswith("K") else f"{text}B"))
        except UsageError:
            continue
    return max(sizes, default=None)


def huge_page_bytes(*, root: Path = Path("/")) -> int:
    """Private memory of this process that the kernel keeps in huge pages; 0 where it does not say."""
    for line in _text(root / "proc/self/smaps_rollup").splitlines():
        if line.startswith("AnonHugePages:"):  # AnonHugePages:     65536 kB
            return int(line.split()[1]) * KIB
    return 0


def filesystem_kind(directory: Path, *, root: Path = Path("/")) -> str:
    """Filesystem type under a directory (`ext4`, `tmpfs`, `nfs4`), or `unknown filesystem`.

    Reads lines such as `36 25 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw`.
    """
    real = os.path.realpath(directory)
    best_mount, kind = "", "unknown filesystem"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        mount = fields[4].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best_mount):  # the later of two mounts on one directory hides the earlier
            best_mount, kind = mount, right.split()[0]
    return kind


def runs_in_a_virtual_machine(*, root: Path = Path("/")) -> bool:
    """True when the CPU says that a hypervisor runs below; its caches cannot be seen from here."""
    return any(line.startswith("flags") and " hypervisor" in line for line in _text(root / "proc/cpuinfo").splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds since start-up that this machine's CPUs worked, were taken by the hypervisor, and had in all."""

    busy_s: float
    stolen_s: float
    total_s: float


def cpu_times(*, root: Path = Path("/")) -> CpuTimes | None:
    """What the kernel has counted up to now, or None where it does not say.

    Reads `cpu  user nice system idle iowait irq softirq steal guest guest_nice`, in ticks; guest time is in user time.
    """
    fields = _text(root / "proc/stat").partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[1:9]]
    idle_s, stolen_s = ticks[3] + ticks[4], ticks[7]
    return CpuTimes(busy_s=sum(ticks) - idle_s - stolen_s, stolen_s=stolen_s, total_s=sum(ticks))


def taken_by_others_ratio(before: CpuTimes, after: CpuTimes, *, own_s: float) -> float:
    """Share of the CPU time between two readings that went to other programs and other guests."""
    elapsed_s = after.total_s - before.total_s
    taken_s = after.busy_s - before.busy_s - own_s + after.stolen_s - before.stolen_s
    return min(max(taken_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else 0.0


def _meminfo_bytes(root: Path) -> Iterable[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):  # MemAvailable:   23070084 kB
            yield int(line.split()[1]) * KIB


def _cgroup_bytes(root: Path) -> Iterable[int]:
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        maximum, current = _text(root / limit), _text(root / used)
        if maximum.isdigit() and current.isdigit():  # "max" where there is no limit
            yield max(int(maximum) - int(current), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def load_average() -> tuple[float, ...]:
    """The one-minute load, alone in a tuple; empty where the system does not say."""
    return (os.getloadavg()[0],) if hasattr(os, "getloadavg") else ()
