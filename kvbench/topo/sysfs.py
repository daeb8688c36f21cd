"""Reads what the kernel reports under /sys and /proc, live or from a captured tree: never guesses, never writes."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import PcieState
from kvbench.core.provenance import Origin
from kvbench.core.units import KIB
from kvbench.topo.facts import DiskFact, Facts, NumaFact, PciFact, bus_id
from kvbench.topo.numbers import lane_rate, whole

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ORIGIN = Origin(provenance="measured", source="kernel: current_link_speed, current_link_width, max_link_…")
_MBIT = 1e6
_MEGA = 1e6
_GBIT = 1e9
_SECTOR_BYTES = 512
_MOST_FILE_BYTES = 1 << 16
_VIRTUAL_DISKS = ("loop", "zram", "ram", "dm-", "md", "sr", "fd")


def looks_like_root(folder: Path) -> bool:
    """Whether the folder is a captured `/sys`, or holds one as `sys`."""
    return _sys(folder) is not None


def _sys(folder: Path) -> Path | None:
    for candidate in (folder / "sys", folder):
        if (candidate / "devices").is_dir() and ((candidate / "bus").is_dir() or (candidate / "class").is_dir()):
            return candidate
    return None


def read_root(root: Path, *, name: str | None = None) -> Facts:
    """Everything under `root`: `/` for this machine, else a captured tree; `name` is shown as the source."""
    sys = _sys(root)
    if sys is None:
        raise KvbenchError(f"{root}: holds no /sys tree (no devices and bus folder); name the folder that was captured")
    proc = root / "proc"
    names = _network_names(sys)
    pci = tuple(_devices(sys, names))
    return Facts(
        format="sysfs",
        source=name or str(root),
        pci=pci,
        numa=tuple(_numa_nodes(sys)),
        packages=_packages(sys),
        disks=tuple(_disks(sys)),
        cpu_model=_cpu_model(proc),
        iommu=_iommu(sys, pci),
        notes=() if pci else ("the kernel lists no PCI device",),
    )


def _read(path: Path) -> str | None:
    """The text of a small regular file; None where it is absent or refuses to be read (as a NIC that is down does)."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            return file.read(_MOST_FILE_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return None


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _devices(sys: Path, names: dict[str, list[tuple[str, PciFact]]]) -> Iterator[PciFact]:
    folder = sys / "bus/pci/devices"
    listed = set(_listed(folder))
    for name in sorted(listed):
        address, path = bus_id(name), folder / name
        if address is None or (path / "physfn").exists():  # a virtual function shares its card's link
            continue
        parent = _parent(path)
        port = folder / parent if parent in listed else None
        numa = whole(_read(path / "numa_node"))
        class_code = whole(_read(path / "class"))
        nets = names.get(address, [])
        rates = [fact.line_rate_bit_per_s for _, fact in nets if fact.line_rate_bit_per_s]
        ports = [fact.port_rate_bit_per_s for _, fact in nets if fact.port_rate_bit_per_s]
        states = [fact.nic_state for _, fact in nets if fact.nic_state]
        yield PciFact(
            bus_id=address,
            parent=parent,
            class_code=None if class_code is None else class_code >> 8,
            vendor=whole(_read(path / "vendor")),
            device=whole(_read(path / "device")),
            numa=numa if numa is not None and numa >= 0 else None,
            numa_unknown=numa == -1,
            state=_state(path, port),
            os_names=tuple(net for net, _ in nets),
            acs_redirect=_acs_redirect(path / "config") if _is_bridge(class_code) else None,
            line_rate_bit_per_s=max(rates) if rates else None,
            port_rate_bit_per_s=max(ports) if ports else None,
            nic_state=states[0] if states else None,
        )


def _is_bridge(class_code: int | None) -> bool:
    return class_code is not None and class_code >> 8 == 0x0604


def _parent(path: Path) -> str | None:
    """The bridge or host bridge above, from where the link in bus/pci/devices points."""
    try:
        target = str(path.readlink())
    except OSError:
        return None
    parts = target.split("/")
    above = parts[-2] if len(parts) > 1 else ""
    return above if _ADDRESS.fullmatch(above) or above.startswith("pci") else None


def _state(path: Path, port: Path | None) -> PcieState | None:
    speed, width = lane_rate(_read(path / "current_link_speed")), whole(_read(path / "current_link_width"))
    most_speed, most_width = lane_rate(_read(path / "max_link_speed")), whole(_read(path / "max_link_width"))
    if speed is None and most_speed is None:
        return None
    return PcieState(
        lane_gt_per_s=speed,
        width=width or None,
        max_lane_gt_per_s=most_speed,
        max_width=_lanes(most_width),
        port_max_lane_gt_per_s=lane_rate(_read(port / "max_link_speed")) if port else None,
        port_max_width=_lanes(whole(_read(port / "max_link_width"))) if port else None,
        origin=_ORIGIN,
    )


def _lanes(width: int | None) -> int | None:
    return width if width and width < 64 else None  # 255: the kernel cannot tell


_ACS_CAPABILITY = 0x000D
_ACS_CONTROL = 6
_REQUEST_REDIRECT, _COMPLETION_REDIRECT = 1 << 2, 1 << 3


def _acs_redirect(config: Path) -> bool | None:
    """Whether ACS sends peer traffic up to the CPU; None without root, who alone reads beyond the first 64 bytes."""
    try:
        data = config.read_bytes()[:4096]
    except OSError:
        return None
    at = 0x100
    for _ in range(64):
        if at < 0x100 or at + 8 > len(data):
            break
        header = int.from_bytes(data[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(data[at + _ACS_CONTROL : at + _ACS_CONTROL + 2], "little")
            return bool(control & (_REQUEST_REDIRECT | _COMPLETION_REDIRECT))
        at = header >> 20
    return False if len(data) > 0x100 else None


def _network_names(sys: Path) -> dict[str, list[tuple[str, PciFact]]]:
    """RDMA and network interfaces by the PCI function they sit on, RDMA names first."""
    found: dict[str, list[tuple[str, PciFact]]] = {}
    for name in _listed(sys / "class/infiniband"):
        path = sys / "class/infiniband" / name
        ports = [path / "ports" / port for port in _listed(path / "ports")]
        rates = [rate for rate in (_infiniband_rate(_read(port / "rate")) for port in ports) if rate]
        states = [state for state in (_read(port / "state") for port in ports) if state]
        _add(found, path / "device", name, max(rates) if rates else None, states[0] if states else None)
    for name in _listed(sys / "class/net"):
        path = sys / "class/net" / name
        speed = whole(_read(path / "speed"))
        _add(found, path / "device", name, speed * _MBIT if speed and speed > 0 else None, _read(path / "operstate"))
    return found


def _add(
    found: dict[str, list[tuple[str, PciFact]]], device: Path, name: str, rate: float | None, state: str | None
) -> None:
    address = _pci_above(device)
    if address is not None:
        fact = PciFact(bus_id=address, line_rate_bit_per_s=rate, nic_state=state)
        found.setdefault(address, []).append((name, fact))


def _infiniband_rate(text: str | None) -> float | None:
    """Bits per second of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"(\d{1,5}(?:\.\d)?) Gb/sec", text or "")
    return float(match[1]) * _GBIT if match else None


def _pci_above(path: Path) -> str | None:
    """The last PCI address in where a link leads: the function that a virtio or NVMe device sits on."""
    try:
        target = os.path.realpath(path)
    except OSError:
        return None
    found = [part for part in target.split("/") if _ADDRESS.fullmatch(part)]
    return found[-1] if found else None


def _disks(sys: Path) -> Iterator[DiskFact]:
    for name in _listed(sys / "block"):
        path = sys / "block" / name
        address = _pci_above(path)
        if name.startswith(_VIRTUAL_DISKS) or (address is None and "/virtual/" in os.path.realpath(path)):
            if name.startswith("nvme") and "nvme-subsystem" in os.path.realpath(path):
                address = _nvme_controller(sys, name)
            if address is None:
                continue
        sectors = whole(_read(path / "size"))
        rotational = _read(path / "queue/rotational")
        yield DiskFact(
            name=name,
            bus_id=address,
            model=_read(path / "device/model") or "",
            size_bytes=sectors * _SECTOR_BYTES if sectors else None,
            rotational=rotational == "1" if rotational in {"0", "1"} else None,
        )


def _nvme_controller(sys: Path, block: str) -> str | None:
    """The PCI function of a multipath NVMe disk, whose block device hangs below a virtual subsystem."""
    match = re.match(r"nvme\d+", block)
    text = _read(sys / "class/nvme" / match[0] / "address") if match else None
    return bus_id(text) if text else None


def _numa_nodes(sys: Path) -> Iterator[NumaFact]:
    folder = sys / "devices/system/node"
    indexes = sorted(int(name[4:]) for name in _listed(folder) if re.fullmatch(r"node\d{1,4}", name))
    for index in indexes:
        path = folder / f"node{index}"
        cpus = _read(path / "cpulist")
        total = re.search(r"MemTotal:\s+(\d{1,15}) kB", _read(path / "meminfo") or "")
        words = (_read(path / "distance") or "").split()
        yield NumaFact(
            index=index,
            cpus=cpus or None,
            memory_bytes=int(total[1]) * KIB if total else None,
            package=_package(sys, cpus),
            distances=tuple((other, int(word)) for other, word in zip(indexes, words, strict=False) if word.isdigit()),
            has_cpus=bool(cpus) if cpus is not None else True,
            firmware_read_bytes_per_s=_hmat(path, "read_bandwidth"),
            firmware_write_bytes_per_s=_hmat(path, "write_bandwidth"),
        )


def _hmat(node: Path, name: str) -> float | None:
    """Bytes per second that the firmware's HMAT table gives for a node from its nearest CPUs; the file is in MB/s."""
    value = whole(_read(node / "access0/initiators" / name))
    return value * _MEGA if value and value > 0 else None


def _package(sys: Path, cpus: str | None) -> int | None:
    first = re.match(r"\d{1,5}", cpus or "")
    if first is None:
        return None
    package = whole(_read(sys / f"devices/system/cpu/cpu{first[0]}/topology/physical_package_id"))
    return package if package is not None and package >= 0 else None


def _packages(sys: Path) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, "") for index in sorted({node.package for node in _numa_nodes(sys) if node.package is not None})
    )


def _cpu_model(proc: Path) -> str | None:
    match = re.search(r"^model name\s*:\s*(.{1,120})$", _read(proc / "cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match else None


def _iommu(sys: Path, pci: tuple[PciFact, ...]) -> str | None:
    """`off`, `passthrough`, `translating`, or `groups` where old kernels do not tell; None if /sys lacks it."""
    folder = sys / "kernel/iommu_groups"
    if not folder.is_dir():
        return None
    if not _listed(folder):
        return "off"
    kinds = set()
    for fact in pci:
        try:
            group = (sys / "bus/pci/devices" / fact.bus_id / "iommu_group").readlink().name
        except OSError:
            continue
        if fact.class_code is not None and fact.class_code >> 8 in {0x01, 0x02, 0x03, 0x12}:
            kinds.add(_read(folder / group / "type") or "")
    if any(kind.startswith("DMA") for kind in kinds):
        return "translating"
    return "passthrough" if kinds == {"identity"} else "groups"
