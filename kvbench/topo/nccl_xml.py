"""Reads the topology that NCCL dumps with NCCL_TOPO_DUMP_FILE, or that a cloud ships for NCCL_TOPO_FILE.

    <cpu numaid="0" affinity="00ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
      <pci busid="0000:16:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
        <pci busid="0000:18:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
          <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:07:00.0" count="5" tclass="0x068000"/></gpu>

NCCL draws a switch as one `pci` and leaves root ports out.
"""

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import PcieState
from kvbench.core.provenance import Origin
from kvbench.topo.bounded_xml import Element, parse_xml
from kvbench.topo.facts import Facts, NumaFact, NvlinkFact, PciFact, bus_id
from kvbench.topo.numbers import cpu_list, lane_rate, whole

_ORIGIN = Origin(provenance="measured", source="NCCL topology XML: link_speed, link_width")
_NVSWITCH = 0x068000
_MBIT = 1e6
_MB = 1e6

# The NVLink generation of each compute capability, by which NCCL too chooses a link's rate (ncclTopoNVLinkBw).
_NVLINK_OF_SM = {60: 1, 70: 2, 80: 3, 86: 3, 90: 4, 100: 5, 103: 5}

# Families and models as in NCCL's own tables (src/graph/topo.cc); an empty name leaves the socket link unknown.
_CPUS = {("GenuineIntel", 6, 79): "intel broadwell", ("GenuineIntel", 6, 85): "intel skylake"}
_CPUS |= {("GenuineIntel", 6, 143): "intel sapphire rapids", ("GenuineIntel", 6, 207): "intel emerald rapids"}


def read_nccl(text: str, source: str) -> Facts:
    """PCI devices below each CPU, NVLinks, C2C and port rates."""
    root, truncated = parse_xml(text, source)
    if root.tag != "system":
        raise KvbenchError(f"{source}: the root is <{root.tag}>, not <system>; is this a topology NCCL wrote?")
    reader = _Reader(source)
    for cpu in root.children:
        if cpu.tag == "cpu":
            reader.cpu(cpu)
    if not reader.pci:
        raise KvbenchError(f"{source}: no <pci> below a <cpu>; give the file that NCCL_TOPO_DUMP_FILE wrote")
    return Facts(
        format="NCCL topology XML",
        source=source,
        pci=tuple(reader.pci.values()),
        numa=tuple(reader.numa),
        nvlinks=tuple(reader.nvlinks),
        cpu_model=reader.model,
        truncated=truncated,
        notes=tuple(reader.notes),
    )


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.pci: dict[str, PciFact] = {}
        self.numa: list[NumaFact] = []
        self.nvlinks: list[NvlinkFact] = []
        self.notes: list[str] = []
        self.model: str | None = None

    def cpu(self, cpu: Element) -> None:
        index = whole(cpu.get("numaid"))
        numa = index if index is not None and index >= 0 else None
        if numa is not None:
            self.numa.append(NumaFact(index=numa, cpus=cpu_list(cpu.get("affinity"))))
        self.model = self.model or _cpu_model(cpu)
        for child in cpu.children:
            if child.tag == "pci":
                self.device(child, f"pci-numa{'?' if numa is None else numa}", numa)
            elif child.tag == "nic":
                self.notes.append(
                    f"{', '.join(net.get('name') for net in child.children)} has no PCI address; left out"
                )

    def device(self, pci: Element, parent: str, numa: int | None) -> None:
        address = bus_id(pci.get("busid"))
        if address is None:
            raise KvbenchError(f"{self.source}: busid {pci.get('busid')!r} is not like 0000:18:00.0; check the file")
        inner = [child for child in pci.children if child.tag == "pci"]
        gpu = next((child for child in pci.children if child.tag == "gpu"), None)
        nets = [net for nic in pci.children if nic.tag == "nic" for net in nic.children if net.tag == "net"]
        speeds = [speed for speed in (whole(net.get("speed")) for net in nets) if speed]
        class_code = whole(pci.get("class"))
        self.pci[address] = PciFact(
            bus_id=address,
            parent=parent,
            class_code=None if class_code is None else class_code >> 8,
            vendor=whole(pci.get("vendor")),
            device=whole(pci.get("device")),
            numa=numa,
            state=_state(pci),
            os_names=tuple(net.get("name") for net in nets if net.get("name")),
            tool_index=whole(gpu.get("dev")) if gpu else None,
            is_gpu=gpu is not None,
            line_rate_bit_per_s=max(speeds) * _MBIT if speeds else None,
            is_switch=bool(inner),
        )
        version = _NVLINK_OF_SM.get(whole(gpu.get("sm")) or 0) if gpu else None
        for link in gpu.children if gpu else ():
            self.gpu_link(address, link, numa, version)
        for child in inner:
            self.device(child, address, numa)

    def gpu_link(self, address: str, link: Element, numa: int | None, version: int | None) -> None:
        count = whole(link.get("count")) or 1
        if link.tag == "nvlink":
            switch = whole(link.get("tclass")) == _NVSWITCH
            target = "nvswitch" if switch else bus_id(link.get("target"))
            if target is not None:
                self.nvlinks.append(NvlinkFact(a=address, b=target, count=count, version=version))
        elif link.tag == "c2c" and numa is not None:
            each = whole(link.get("bw"))
            rate = each * count * _MB if each else None  # MB/s per link, as NCCL reads it from NVML
            self.nvlinks.append(NvlinkFact(a=address, b=f"numa:{numa}", count=count, bytes_per_s=rate, kind="c2c"))


def _state(pci: Element) -> PcieState | None:
    rate, width = lane_rate(pci.get("link_speed")), whole(pci.get("link_width"))
    if rate is None or not width:  # width 0: a virtual machine hides it
        return None
    return PcieState(lane_gt_per_s=rate, width=width, max_lane_gt_per_s=None, max_width=None, origin=_ORIGIN)


def _cpu_model(cpu: Element) -> str | None:
    vendor = cpu.get("vendor")
    if vendor in {"AuthenticAMD", "IBM"}:
        return {"AuthenticAMD": "amd epyc", "IBM": "power9"}[vendor]
    if cpu.get("arch") == "arm64":
        return "arm"
    return _CPUS.get((vendor, whole(cpu.get("familyid")) or 0, whole(cpu.get("modelid")) or 0))
