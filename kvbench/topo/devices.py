"""Tells from a PCI function what it is, and what to call it."""

import re
from collections.abc import Sequence

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import (
    Node,
    NodeKind,
)
from kvbench.topo.facts import DiskFact, MatrixFact, PciFact

NVME = 0x0108
_GPU_CLASSES = frozenset({0x0302, 0x1200})
_DISPLAYS = frozenset({0x0300, 0x0380})  # AMD Instinct and some NVIDIA cards are display controllers
_GPU_VENDORS = frozenset({0x10DE, 0x1002})
_NIC_CLASSES = frozenset({0x0200, 0x0207})
_NVSWITCH, _NVIDIA = 0x0680, 0x10DE
_RDMA = re.compile(r"(mlx|bnxt_re|irdma|efa|hfi|qib|roce|ibp|rdma)")


def device_kind(fact: PciFact, disks: dict[str, list[DiskFact]]) -> NodeKind | None:
    """GPU, NIC, disk, NVSwitch, a device of unknown kind with a link, or None for what the graph leaves out."""
    if fact.is_gpu or fact.class_code in _GPU_CLASSES:
        return "gpu"
    if fact.class_code in _DISPLAYS and fact.vendor in _GPU_VENDORS:
        return "gpu"
    if fact.class_code == _NVSWITCH and fact.vendor in {None, 0, _NVIDIA}:
        return "nvswitch"
    if fact.class_code in _NIC_CLASSES or any(_RDMA.match(name) for name in fact.os_names):
        return "nic"
    if fact.bus_id in disks or fact.class_code == NVME:
        return "disk"
    if fact.class_code is None and fact.state is not None:
        return "device"
    return None


def device_order(fact: PciFact) -> tuple[int, str]:
    """Sorts GPUs by their number in the vendor's tool, everything else by bus id."""
    return (fact.tool_index if fact.is_gpu and fact.tool_index is not None else 1 << 30, fact.bus_id)


def device_names(
    pci: dict[str, PciFact], wanted: dict[str, NodeKind], disks: dict[str, list[DiskFact]]
) -> dict[str, tuple[str, str]]:
    """Node id and shown name of each device: GPUs by the tool's index or in bus order, others by what the system calls
    them.
    """
    found = {}
    counts: dict[str, int] = {}
    for address, kind in sorted(wanted.items(), key=lambda item: device_order(pci[item[0]])):
        fact = pci[address]
        number = counts[kind] = counts.get(kind, -1) + 1
        if kind == "gpu":
            found[address] = (f"gpu{number}", f"GPU{number} {fact.name}".strip())
        elif kind == "disk":
            names = ", ".join(disk.name for disk in disks.get(address, ())) or address.removeprefix("0000:")
            found[address] = (f"disk{number}", names)
        elif kind == "nic":
            rdma = [name for name in fact.os_names if _RDMA.match(name)]
            names = (rdma or list(fact.os_names) or [address.removeprefix("0000:")])[0]
            found[address] = (f"nic{number}", names)
        else:
            label = "NVSwitch" if kind == "nvswitch" else "device"
            found[address] = (f"{kind}{number}", f"{label} {address.removeprefix('0000:')} {fact.name}".strip())
    return found


def gpus_by_label(matrix: MatrixFact, gpus: Sequence[PciFact], notes: list[str]) -> dict[str, PciFact]:
    """GPU labels to devices. nvidia-smi counts in bus order; a mismatch in number means two different machines."""
    if not gpus:
        return {}
    for vendor in _GPU_VENDORS:  # a tool counts its own vendor's GPUs; a graphics unit in the CPU is none of them
        same = [gpu for gpu in gpus if gpu.vendor == vendor]
        if len(gpus) != len(matrix.gpus) == len(same):
            gpus = same
    if len(gpus) != len(matrix.gpus):
        raise KvbenchError(
            f"the matrix has {len(matrix.gpus)} GPUs and the other inputs have {len(gpus)}; "
            "give files that were captured on the same machine"
        )
    ordered = sorted(gpus, key=device_order)
    labels = sorted(matrix.gpus, key=lambda label: int(label[3:]))
    notes.append("GPU numbers of the matrix are matched to PCI addresses in bus order, as nvidia-smi counts")
    return dict(zip(labels, ordered, strict=True))


def medium(fact: PciFact, disks: Sequence[DiskFact]) -> str:
    """`NVMe`, or what little the kernel tells of another disk."""
    if fact.class_code == NVME:
        return "NVMe"
    kinds = {disk.rotational for disk in disks}
    return "rotating or virtual" if kinds == {True} else "block device"


def short_name(node: Node) -> str:
    """The name without product and remark, for the labels of links."""
    return node.name.split(" ")[0] if node.kind == "gpu" else node.name.removesuffix(" (inferred)")
