"""Keep a child on the CPUs next to what it moves bytes to: a GPU's or a disk's NUMA node."""

import os
from pathlib import Path


def stay_on_node(node: int | None, *, root: Path = Path("/")) -> str:
    """Binds this process to the node's CPUs that it may use, and says in words where it runs."""
    nodes = sorted(
        int(path.name[4:]) for path in root.glob("sys/devices/system/node/node[0-9]*") if path.name[4:].isdigit()
    )
    if not hasattr(os, "sched_setaffinity"):
        return "not bound to CPUs: this system cannot"
    if len(nodes) < 2:
        return "not bound: one NUMA node"
    if node is None:
        return f"not bound: {len(nodes)} NUMA nodes, and nobody knows which is near"
    allowed = os.sched_getaffinity(0)
    near = cpu_list(_text(root / f"sys/devices/system/node/node{node}/cpulist")) & allowed
    if not near:
        return f"not bound: none of NUMA node {node}'s CPUs may be used by this process"
    os.sched_setaffinity(0, near)
    return f"bound to the {len(near)} CPUs of NUMA node {node}"


def cpu_list(text: str) -> set[int]:
    """The CPUs in a list of the kernel such as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first.strip().isdigit():
            found |= set(range(int(first), int(last if dash else first) + 1))
    return found


def disk_numa_node(directory: Path, *, root: Path = Path("/")) -> int | None:
    """The NUMA node of the disk under a directory, or None where the system does not say."""
    try:
        device = directory.stat().st_dev
    except OSError:
        return None
    # a partition has no node of its own; the disk or the controller above it has
    link = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    place = link.resolve() if link.exists() else None
    while place is not None and place != place.parent:
        text = _text(place / "numa_node") or _text(place / "device/numa_node")
        if text.strip().lstrip("-").isdigit():
            return int(text) if int(text) >= 0 else None
        place = place.parent
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
