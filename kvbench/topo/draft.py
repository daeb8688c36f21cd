"""The machine while it is put together: nodes and links by id, and what every part of the join needs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvbench.core.graph import (
    GpuTraits,
    Link,
    LinkKind,
    LinkRates,
    Node,
    NodeKind,
    PcieState,
    Rate,
)
from kvbench.core.provenance import Origin
from kvbench.topo.anchors import (
    DramSpec,
    GpuAnchor,
    gpu_anchor,
)
from kvbench.topo.devices import NVME, medium, short_name
from kvbench.topo.facts import DiskFact, Facts, NumaFact, PciFact
from kvbench.topo.link_figures import bit_rate, pcie_sides, with_port

INTERNAL = LinkRates(absent="inside the package; no figure is published")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a person adds to inputs that do not tell: the GPU product and the memory of one socket."""

    gpu: GpuAnchor | None = None
    dram: DramSpec | None = None


NOTHING_ASSUMED = Assumed()


@dataclass(slots=True)
class Draft:
    """Nodes and links so far. `node_of` maps bus ids and matrix labels to nodes, `products` GPUs to their anchors."""

    inputs: Sequence[Facts]
    assumed: Assumed
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pci: dict[str, PciFact] = field(default_factory=dict)
    node_of: dict[str, str] = field(default_factory=dict)
    products: dict[str, GpuAnchor] = field(default_factory=dict)

    def add(self, node: Node) -> str:
        """Adds a node unless its id is there already; returns the id."""
        self.nodes.setdefault(node.id, node)
        return node.id

    def link(self, link: Link) -> None:
        """Adds a link unless its id is there already."""
        self.links.setdefault(link.id, link)

    def tree_link(
        self,
        child: str,
        kind: LinkKind,
        forward: LinkRates,
        backward: LinkRates,
        *,
        half_duplex: bool = False,
        shared_group: str | None = None,
        pcie: PcieState | None = None,
    ) -> None:
        """The link of a node to its parent."""
        parent = self.nodes[child].parent or "machine"
        self.link(
            Link(
                id=f"{child}-{parent}",
                kind=kind,
                a=child,
                b=parent,
                label=f"{short_name(self.nodes[child])} to {short_name(self.nodes[parent])}",
                forward=forward,
                backward=backward,
                half_duplex=half_duplex,
                shared_group=shared_group,
                pcie=pcie,
            )
        )

    def numa_node(self, index: int, parent: str, fact: NumaFact | None = None, *, inferred: bool = False) -> str:
        """The id of a NUMA node, made with its DRAM if it is not there yet."""
        node_id = f"numa{index}"
        if node_id in self.nodes:
            return node_id
        remark = " (GPU memory)" if fact and fact.gpu_memory else " (inferred)" if inferred else ""
        self.add(
            Node(
                id=node_id,
                kind="numa",
                name=f"NUMA node {index}{remark}",
                parent=parent,
                numa=index,
                inferred=inferred,
                cpus=fact.cpus if fact else None,
                memory_bytes=fact.memory_bytes if fact else None,
            )
        )
        self.tree_link(node_id, "internal", INTERNAL, INTERNAL)
        if fact is None or (not fact.gpu_memory and (fact.memory_bytes is None or fact.memory_bytes > 0)):
            self.dram(index, fact)
        return node_id

    def dram(self, index: int, fact: NumaFact | None = None) -> None:
        """The memory of a NUMA node, with what the firmware says it carries: reads leave it, writes enter it."""
        node = self.add(Node(id=f"dram{index}", kind="dram", name=f"DRAM {index}", parent=f"numa{index}", numa=index))
        rates = LinkRates(absent="not measured; kvbench topo --measure reads it, --dram 8xDDR5-4800 gives the theory")
        reads = replace(rates, typical=_firmware(fact.firmware_read_bytes_per_s if fact else None))
        writes = replace(rates, typical=_firmware(fact.firmware_write_bytes_per_s if fact else None))
        self.tree_link(node, "dram", reads, writes, half_duplex=True, shared_group=f"DRAM of NUMA node {index}")

    def device(
        self,
        node_id: str,
        kind: NodeKind,
        name: str,
        fact: PciFact,
        parent: str,
        disks: Sequence[DiskFact],
        port: str | None = None,
    ) -> Node:
        size = sum(disk.size_bytes or 0 for disk in disks) or None
        return Node(
            id=node_id,
            kind=kind,
            name=name,
            parent=parent,
            bus_id=fact.bus_id if re.match(r"[0-9a-f]{4,8}:", fact.bus_id) else None,
            numa=fact.numa,
            cpus=fact.cpus,
            gpu=self.traits(node_id, fact) if kind == "gpu" else None,
            memory_bytes=size if kind == "disk" else None,
            port_bus_id=port,
            line_rate=bit_rate(fact.line_rate_bit_per_s, "the port's rate now"),
            port_rate=bit_rate(fact.port_rate_bit_per_s, "the port's highest rate"),
            state=fact.nic_state,
            medium=medium(fact, disks) if kind == "disk" else None,
        )

    def traits(self, node_id: str, fact: PciFact) -> GpuTraits:
        product = gpu_anchor(fact.name) or self.assumed.gpu
        if product is not None:
            self.products[node_id] = product
        hbm = None
        if product is not None and product.hbm is not None:
            hbm = Rate(bytes_per_s=product.hbm, origin=Origin(provenance=product.provenance, source=product.source))
        return GpuTraits(
            memory_bytes=fact.memory_bytes,
            hbm=hbm,
            copy_engines=fact.copy_engines or (product.copy_engines if product else None),
            nvlinks=product.links if product else None,
            numa_id=fact.gpu_numa_id,
            busy=fact.busy,
        )

    def device_link(self, node_id: str, kind: NodeKind, fact: PciFact, port: str | None) -> None:
        state = with_port(fact.state, self.pci.get(port or ""))
        link_kind: LinkKind = "pcie"
        if fact.class_code == NVME and kind == "disk":
            link_kind = "nvme"
        elif state is None and fact.link_bytes_per_s is None and self.on_root_bus(node_id):
            link_kind = "virtual"
        up, down = pcie_sides(self.products.get(node_id), state, fact, link_kind, is_gpu=kind == "gpu")
        shared = f"uplink of {self.nodes[node_id].name}" if kind == "switch" else None
        self.tree_link(node_id, link_kind, up, down, pcie=state, shared_group=shared)
        if self.nodes[node_id].line_rate is not None:
            self.network(node_id)

    def on_root_bus(self, node_id: str) -> bool:
        """Whether a device is part of the root complex, as virtual devices are: it has no link."""
        parent = self.nodes[self.nodes[node_id].parent or "machine"]
        return parent.kind == "host_bridge" and not parent.inferred

    def network(self, node_id: str) -> None:
        node = self.nodes[node_id]
        self.add(Node(id="network", kind="network", name="network", parent=None))
        rates = LinkRates(theory=node.line_rate)
        self.link(
            Link(
                id=f"{node_id}-network",
                kind="network",
                a=node_id,
                b="network",
                label=f"{node.name} to network",
                forward=rates,
                backward=rates,
            )
        )

    def above(self, node_id: str) -> Iterable[Node]:
        node = self.nodes[node_id]
        while node.parent is not None:
            node = self.nodes[node.parent]
            yield node


def _firmware(bytes_per_s: float | None) -> Rate | None:
    if bytes_per_s is None:
        return None
    origin = Origin(provenance="spec", source="the firmware's HMAT table, as the kernel shows it")
    return Rate(bytes_per_s=bytes_per_s, origin=origin)
