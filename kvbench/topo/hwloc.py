"""Reads hwloc XML, version 2.x and 3.x, as `lstopo --of xml` writes it.

    <object type="Package" os_index="0" cpuset="0x03" nodeset="0x1" ...>
      <object type="NUMANode" os_index="0" local_memory="810234351616" .../>
      <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[2b-3b]">
        <object type="PCIDev" pci_busid="0000:34:00.0" pci_type="0302 [10de:1db8] [10de:131d] a1 00"
                pci_link_speed="15.753846">
          <object type="OSDev" name="nvml0" osdev_type="12">

`pci_link_speed` is the link's rate now, in GB/s and one direction.
"""

import re
from dataclasses import dataclass, field, replace

from kvbench.core.errors import KvbenchError
from kvbench.topo.bounded_xml import Element, parse_xml
from kvbench.topo.facts import DiskFact, Facts, NumaFact, NvlinkFact, PciFact, bus_id
from kvbench.topo.numbers import bits, ranges, whole

_GIGA = 1e9
_MEGA = 1e6
_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]")
_NVLINK_SELF = 1_000_000  # hwloc's value for a device and itself


@dataclass(slots=True)
class _Found:
    pci: dict[str, PciFact] = field(default_factory=dict)
    numa: dict[int, NumaFact] = field(default_factory=dict)
    packages: dict[int, str] = field(default_factory=dict)
    disks: list[DiskFact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: dict[str, str] = field(default_factory=dict)  # "OSDev:802" or "PCIDev:449" to a bus id or package

    def near(self, nodeset: str) -> tuple[int, ...]:
        """The nodes of a set, without those that are GPU memory: a device is near CPUs and DRAM."""
        gpu_memory = {index for index, numa in self.numa.items() if numa.gpu_memory}
        return tuple(index for index in bits(nodeset) if index not in gpu_memory)


def read_hwloc(text: str, source: str) -> Facts:
    """Packages, NUMA nodes, PCI devices with their host bridge, disks, distances and NVLink bandwidths."""
    root, truncated = parse_xml(text, source)
    version = root.get("version") or "1.x"
    if root.tag != "topology" or not version.startswith(("2", "3")):
        raise KvbenchError(
            f"{source}: <{root.tag} version={version!r}> is not hwloc XML 2.x or 3.x; write it again with lstopo "
            "--of xml"
        )
    found = _Found()
    for top in root.children:
        if top.tag == "object":
            _visit(top, found, package=None, nodeset="", parent=None, bitmask=version.startswith("3"))
    if not found.numa and not found.pci:
        raise KvbenchError(f"{source}: no NUMANode and no PCIDev object; write it with lstopo --whole-io --of xml")
    _distances(root, found)
    vendor = next((info.get("value") for info in root.walk() if info.get("name") == "CPUModel"), None)
    return Facts(
        format=f"hwloc XML {version}",
        source=source,
        pci=tuple(found.pci.values()),
        numa=tuple(found.numa.values()),
        packages=tuple(found.packages.items()),
        nvlinks=_nvlinks(root, found),
        disks=tuple(found.disks),
        cpu_model=vendor,
        truncated=truncated,
        notes=tuple(found.notes),
    )


def _visit(
    element: Element, found: _Found, *, package: int | None, nodeset: str, parent: str | None, bitmask: bool
) -> None:
    kind = element.get("type")
    nodeset = element.get("nodeset") or nodeset
    if kind == "Package":
        package = whole(element.get("os_index")) or 0
        found.packages[package] = _info(element, "CPUModel") or ""
        found.reference[f"Package:{element.get('gp_index')}"] = f"package:{package}"
    elif kind == "NUMANode":
        _numa(element, found, package)
    elif kind == "Bridge":
        parent = _bridge(element, found, parent, nodeset)
    elif kind == "PCIDev":
        parent = _device(element, found, parent, nodeset)
    elif kind == "OSDev":
        _os_device(element, found, parent, nodeset, bitmask)
    for child in element.children:
        if child.tag == "object":
            _visit(child, found, package=package, nodeset=nodeset, parent=parent, bitmask=bitmask)


def _numa(element: Element, found: _Found, package: int | None) -> None:
    index = whole(element.get("os_index")) or 0
    cpus = bits(element.get("cpuset") or "0x0")
    found.numa[index] = NumaFact(
        index=index,
        cpus=ranges(cpus),
        memory_bytes=whole(element.get("local_memory")),
        package=package,
        has_cpus=bool(cpus),
        gpu_memory=element.get("subtype") == "GPUMemory",
    )


def _bridge(element: Element, found: _Found, parent: str | None, nodeset: str) -> str | None:
    if element.get("bridge_type") == "0-1":
        match = re.match(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})", element.get("bridge_pci"))
        return f"pci{match[1]}:{match[2]}" if match else parent
    return _device(element, found, parent, nodeset)


def _device(element: Element, found: _Found, parent: str | None, nodeset: str) -> str | None:
    address = bus_id(element.get("pci_busid"))
    if address is None:
        found.notes.append(f"PCI device {element.get('pci_busid')!r} has no readable address; left out")
        return parent
    key = address
    while key in found.pci:
        key = f"{key}#"
    if key != address:
        found.notes.append(f"PCI address {address} occurs twice; the second is {key}")
    match = _TYPE.match(element.get("pci_type"))
    speed = (
        float(element.get("pci_link_speed") or 0)
        if re.fullmatch(r"[\d.]{1,12}", element.get("pci_link_speed") or "0")
        else 0.0
    )
    near = found.near(nodeset)
    found.pci[key] = PciFact(
        bus_id=key,
        parent=parent,
        class_code=0x0680 if element.get("subtype") == "NVSwitch" else int(match[1], 16) if match else None,
        vendor=int(match[2], 16) if match else None,
        device=int(match[3], 16) if match else None,
        name=_info(element, "PCIDevice") or "",
        numa=near[0] if len(near) == 1 else None,
        near_numa=near,
        link_bytes_per_s=speed * _GIGA if speed > 0 else None,
    )
    found.reference[f"PCIDev:{element.get('gp_index')}"] = key
    return key


def _os_device(element: Element, found: _Found, parent: str | None, nodeset: str, bitmask: bool) -> None:
    name, kind = element.get("name"), whole(element.get("osdev_type"))
    found.reference[f"OSDev:{element.get('gp_index')}"] = parent or ""
    storage = kind is not None and (bool(kind & 1) if bitmask else kind == 0)
    if storage and name != "sr0":
        size = whole(_info(element, "Size"))
        near = found.near(nodeset)
        found.disks.append(
            DiskFact(
                name=name,
                bus_id=parent if parent in found.pci else None,
                model=_info(element, "Model") or element.get("subtype"),
                size_bytes=size * 1024 if size else None,
                numa=near[0] if len(near) == 1 else None,
            )
        )
    if parent not in found.pci:
        parent = _gpu_without_address(name, found, nodeset)
        if parent is None:
            return
        found.reference[f"OSDev:{element.get('gp_index')}"] = parent
    device = found.pci[parent]
    model = _info(element, "GPUModel")
    memory = whole(_info(element, "CUDAGlobalMemorySize"))
    index = re.fullmatch(r"nvml(\d{1,3})", name)
    found.pci[parent] = replace(
        device,
        os_names=(*device.os_names, name),
        name=model or device.name,
        is_gpu=device.is_gpu or (bool(model) and re.match(r"(cuda|nvml|rsmi|opencl)", name) is not None),
        memory_bytes=memory * 1024 if memory else device.memory_bytes,
        tool_index=int(index[1]) if index else device.tool_index,
    )


def _gpu_without_address(name: str, found: _Found, nodeset: str) -> str | None:
    """A made-up key for a GPU that the XML shows as an OS device below no PCI device; each number is one GPU."""
    match = re.fullmatch(r"(?:cuda|nvml|rsmi)(\d{1,3})", name)
    if match is None:
        return None
    near = found.near(nodeset)
    key = f"gpu-without-address-{match[1]}"
    numa = near[0] if len(near) == 1 else None
    found.pci.setdefault(key, PciFact(bus_id=key, is_gpu=True, numa=numa, near_numa=near))
    return key


def _info(element: Element, name: str) -> str | None:
    return next(
        (child.get("value") for child in element.children if child.tag == "info" and child.get("name") == name), None
    )


def _distances(root: Element, found: _Found) -> None:
    for block in root.children:
        if block.tag == "distances2" and block.get("name") == "NUMALatency":
            indexes = [int(word) for word in _words(block, "indexes") if word.isdigit()]
            values = [int(word) for word in _words(block, "u64values") if word.isdigit()]
            if len(values) == len(indexes) ** 2:
                for row, index in enumerate(indexes):
                    if index in found.numa:
                        line = values[row * len(indexes) : (row + 1) * len(indexes)]
                        found.numa[index] = replace(found.numa[index], distances=tuple(zip(indexes, line, strict=True)))


def _nvlinks(root: Element, found: _Found) -> tuple[NvlinkFact, ...]:
    """Each pair once; the matrix is in MB/s, and an NVSwitch is an end like any other device."""
    links = []
    for block in root.children:
        if block.tag not in {"distances2hetero", "distances2"} or block.get("name") != "NVLinkBandwidth":
            continue
        ends = [found.reference.get(word) or found.reference.get(f"OSDev:{word}") for word in _words(block, "indexes")]
        values = [int(word) for word in _words(block, "u64values") if word.isdigit()]
        if len(values) != len(ends) ** 2:
            found.notes.append("the NVLink bandwidth matrix is incomplete; left out")
            continue
        for row, a in enumerate(ends):
            for column in range(row + 1, len(ends)):
                rate, b = values[row * len(ends) + column], ends[column]
                if rate and rate < _NVLINK_SELF and a and b:
                    links.append(NvlinkFact(a=a, b=b, bytes_per_s=rate * _MEGA))
    return tuple(links)


def _words(block: Element, tag: str) -> list[str]:
    return [word for child in block.children if child.tag == tag for word in child.text.split()]
