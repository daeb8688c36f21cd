"""Joins the facts of all inputs on the PCI bus id into one machine: nodes, links, and what is known of each link."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import (
    GpuTraits,
    Link,
    LinkKind,
    LinkRates,
    Machine,
    Node,
    NodeKind,
    PcieState,
    PeerAccess,
    Rate,
    ReportedPair,
)
from kvbench.core.pcie import pcie_bytes_per_s
from kvbench.core.provenance import Origin
from kvbench.topo.anchors import (
    LANE_GT,
    DramSpec,
    GpuAnchor,
    c2c_rates,
    gpu_anchor,
    nvlink_rates,
    nvme_read,
    pcie_rates,
    socket_rates,
    xgmi_rates,
)
from kvbench.topo.facts import Affinity, DiskFact, Facts, MatrixFact, NumaFact, NvlinkFact, PciFact

_GPU_CLASSES = frozenset({0x0302, 0x1200})
_DISPLAY = 0x0300
_GPU_VENDORS = frozenset({0x10DE, 0x1002})
_NIC_CLASSES = frozenset({0x0200, 0x0207})
_NVME, _STORAGE, _BRIDGE, _NVSWITCH = 0x0108, 0x01, 0x0604, 0x0680
_NVIDIA = 0x10DE
_MOST_DIRECT_NVLINKS = 18  # no GPU has more links than that without an NVSwitch
_BITS = 8
_RDMA = re.compile(r"(mlx|bnxt_re|irdma|efa|hfi|qib|roce|ibp|rdma)")
_MOST_UNNAMED = 256
INTERNAL = LinkRates(absent="inside the package; no figure is published")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a person adds to inputs that do not tell: the GPU product and the memory of one socket."""

    gpu: GpuAnchor | None = None
    dram: DramSpec | None = None


def build_machine(inputs: Sequence[Facts], assumed: Assumed = Assumed()) -> tuple[Machine, tuple[str, ...]]:
    """The machine, and remarks about what was joined or left out."""
    builder = _Builder(inputs, assumed)
    return builder.machine(), tuple(builder.notes)


@dataclass(slots=True)
class _Builder:
    inputs: Sequence[Facts]
    assumed: Assumed
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pci: dict[str, PciFact] = field(default_factory=dict)
    node_of: dict[str, str] = field(default_factory=dict)  # bus id or matrix label to node id
    products: dict[str, GpuAnchor] = field(default_factory=dict)  # gpu node id to its product

    def machine(self) -> Machine:
        self.pci = _with_port_rates(_merged_pci(self.inputs), self.inputs)
        matrices = [facts.matrix for facts in self.inputs if facts.matrix is not None]
        disks = _merged_disks(self.inputs)
        self.add(Node(id="machine", kind="machine", name="machine", parent=None))
        self.memory()
        gpus = [fact for fact in self.pci.values() if _kind(fact, disks) == "gpu"]
        if matrices and not any(fact.parent for fact in gpus):
            self.inferred_tree(matrices[0], gpus)
        else:
            self.pci_tree(disks)
            for matrix in matrices:
                self.join_matrix(matrix)
        self.loose_disks(disks)
        self.peers_only()
        self.gpu_links(matrices)
        self.sockets()
        return Machine(
            nodes=tuple(self.nodes.values()),
            links=tuple(self.links.values()),
            peers=tuple(self.peers()),
            reported=tuple(self.reported(matrices)),
            iommu=next((facts.iommu for facts in self.inputs if facts.iommu is not None), None),
            cpu_affinity_reported=any(matrix.has_cpu_column for matrix in matrices),
        )

    def add(self, node: Node) -> str:
        self.nodes.setdefault(node.id, node)
        return node.id

    def link(self, link: Link) -> None:
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
                label=f"{_short(self.nodes[child])} to {_short(self.nodes[parent])}",
                forward=forward,
                backward=backward,
                half_duplex=half_duplex,
                shared_group=shared_group,
                pcie=pcie,
            )
        )

    # -- memory -----------------------------------------------------------------------------------------------------

    def memory(self) -> None:
        """Sockets, NUMA nodes and their DRAM, as far as an input names them."""
        merged: dict[int, NumaFact] = {}
        for facts in self.inputs:
            for node in facts.numa:
                merged[node.index] = _merge_numa(merged.get(node.index), node)
        near = [fact.near_numa for fact in self.pci.values() if len(fact.near_numa) > 1]
        groups = {numa: f"group{min(group)}" for group in near if len(group) < len(merged) for numa in group}
        for numa in merged.values():
            parent = "machine"
            if numa.index in groups:
                parent = self.add(
                    Node(id=groups[numa.index], kind="group", name=f"group of {groups[numa.index]}", parent="machine")
                )
            if numa.package is not None:
                name = f"socket {numa.package}"
                parent_is = parent
                parent = self.add(Node(id=f"socket{numa.package}", kind="socket", name=name, parent=parent_is))
            self.numa_node(numa.index, parent, numa)

    def numa_node(self, index: int, parent: str, fact: NumaFact | None = None, *, inferred: bool = False) -> str:
        node_id = f"numa{index}"
        if node_id in self.nodes:
            return node_id
        self.add(
            Node(
                id=node_id,
                kind="numa",
                name=f"NUMA node {index}{' (GPU memory)' if fact and fact.gpu_memory else ''}",
                parent=parent,
                numa=index,
                inferred=inferred,
                cpus=fact.cpus if fact else None,
                memory_bytes=fact.memory_bytes if fact else None,
            )
        )
        self.tree_link(node_id, "internal", INTERNAL, INTERNAL)
        if fact is None or (not fact.gpu_memory and (fact.memory_bytes is None or fact.memory_bytes > 0)):
            self.dram(index)
        return node_id

    def dram(self, index: int) -> None:
        node = self.add(Node(id=f"dram{index}", kind="dram", name=f"DRAM {index}", parent=f"numa{index}", numa=index))
        rates = LinkRates(absent="not measured; kvbench topo --measure reads it, --dram 8xDDR5-4800 gives the theory")
        self.tree_link(node, "dram", rates, rates, half_duplex=True, shared_group=f"DRAM of NUMA node {index}")

    # -- PCIe, from addresses ---------------------------------------------------------------------------------------

    def pci_tree(self, disks: dict[str, list[DiskFact]]) -> None:
        wanted: dict[str, NodeKind] = {}
        for fact in self.pci.values():
            kind = _kind(fact, disks)
            if kind is not None:
                wanted[fact.bus_id] = kind
        if not wanted:  # `lspci -t` alone names no classes: show what hangs below the bridges
            bridges = {fact.parent for fact in self.pci.values()}
            below = [fact for fact in self.pci.values() if fact.parent in self.pci and fact.bus_id not in bridges]
            wanted = {fact.bus_id: "device" for fact in below[:_MOST_UNNAMED] if fact.class_code is None}
        names = _device_names(self.pci, wanted, disks)
        for address, kind in sorted(wanted.items(), key=lambda item: _order(self.pci[item[0]])):
            fact = self.pci[address]
            parent, port = self.place(fact)
            node_id, name = names[address]
            self.node_of[address] = node_id
            self.add(self.device(node_id, kind, name, fact, parent, disks.get(address, []), port))
            self.device_link(node_id, kind, fact, port)

    def place(self, fact: PciFact) -> tuple[str, str | None]:
        """The node above a device, made together with all that is above it, and the bus id of the port it hangs on."""
        chain = self.chain(fact)
        if chain[-1] in self.pci:  # the chain ends at a bridge whose host bridge no input names
            chain.append(f"pci-of-{chain[-1]}")
        parent = self.host_bridge(chain[-1], [self.pci[address] for address in chain[:-1] if address in self.pci])
        bridges = list(reversed(chain[1:-1]))
        port: str | None = None
        for depth, address in enumerate(bridges):
            bridge = self.pci.get(address) or PciFact(bus_id=address)
            if bridge.is_switch or (depth % 2 == 1 and not any(self.is_switch(above) for above in bridges)):
                parent = self.bridge_node("switch", address, bridge, parent, port)
                port = None
            elif depth == 0:
                parent = self.bridge_node("root_port", address, bridge, parent, None)
                port = address
            else:
                port = address
        return parent, port

    def is_switch(self, address: str) -> bool:
        return address in self.pci and self.pci[address].is_switch

    def chain(self, fact: PciFact) -> list[str]:
        found = [fact.bus_id]
        parent = fact.parent
        while parent is not None and parent not in found and len(found) < 64:
            found.append(parent)
            parent = self.pci[parent].parent if parent in self.pci else None
        if len(found) == 1:
            found.append(f"pci-unknown-{fact.bus_id}")
        return found

    def bridge_node(self, kind: NodeKind, address: str, fact: PciFact, parent: str, port: str | None) -> str:
        node_id = f"{'sw' if kind == 'switch' else 'port'}-{address}"
        if node_id not in self.nodes:
            name = f"{'switch' if kind == 'switch' else 'root port'} {address.removeprefix('0000:')}"
            self.add(
                Node(
                    id=node_id,
                    kind=kind,
                    name=name,
                    parent=parent,
                    bus_id=address,
                    acs_redirect=self.acs(address),
                    port_bus_id=port,
                )
            )
            if kind == "root_port":
                self.tree_link(node_id, "internal", INTERNAL, INTERNAL)
            else:
                self.device_link(node_id, kind, fact, port)
        return node_id

    def acs(self, address: str) -> bool | None:
        """Redirection at a bridge or at any port right below it (the downstream ports of a switch)."""
        told = [
            fact.acs_redirect
            for fact in self.pci.values()
            if address in (fact.bus_id, fact.parent) and fact.acs_redirect is not None
        ]
        return any(told) if told else None

    def host_bridge(self, name: str, facts: Iterable[PciFact]) -> str:
        if name in self.nodes:
            return name
        below = [fact for fact in self.pci.values() if fact.parent == name]
        told = [fact for fact in (*facts, *below) if fact.numa is not None]
        shared = next((fact.near_numa for fact in (*facts, *below) if len(fact.near_numa) > 1), ())
        parent = self.memory_parent(told[0].numa if told else None, shared)
        plain = name.removeprefix("pci").removeprefix("0000:")
        label = f"host bridge {plain}" if re.fullmatch(r"pci[0-9a-f:]+", name) else "host bridge (not in the input)"
        numa = told[0].numa if told else None
        self.add(Node(id=name, kind="host_bridge", name=label, parent=parent, numa=numa, inferred="not in" in label))
        self.tree_link(name, "internal", INTERNAL, INTERNAL)
        return name

    def memory_parent(self, numa: int | None, shared: Sequence[int] = ()) -> str:
        nodes = [node for node in self.nodes.values() if node.kind == "numa"]
        if numa is not None:
            return self.numa_node(numa, "machine")
        group = f"group{min(shared)}" if shared else ""
        if group in self.nodes:
            return group
        with_cpus = [node for node in nodes if node.cpus]
        return with_cpus[0].id if len(with_cpus) == 1 else "machine"

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
            line_rate=_bit_rate(fact.line_rate_bit_per_s, "the port's rate now"),
            port_rate=_bit_rate(fact.port_rate_bit_per_s, "the port's highest rate"),
            state=fact.nic_state,
            medium=_medium(fact, disks) if kind == "disk" else None,
        )

    def traits(self, node_id: str, fact: PciFact) -> GpuTraits:
        product = gpu_anchor(fact.name) or self.assumed.gpu
        if product is not None:
            self.products[node_id] = product
        hbm = None
        if product is not None and product.hbm is not None:
            hbm = Rate(bytes_per_s=product.hbm, origin=Origin(provenance="spec", source=product.source))
        return GpuTraits(
            memory_bytes=fact.memory_bytes,
            hbm=hbm,
            copy_engines=fact.copy_engines or (product.copy_engines if product else None),
            nvlinks=product.links if product else None,
            numa_id=fact.gpu_numa_id,
            busy=fact.busy,
        )

    def device_link(self, node_id: str, kind: NodeKind, fact: PciFact, port: str | None) -> None:
        state = _with_port(fact.state, self.pci.get(port or ""))
        link_kind: LinkKind = "pcie"
        if fact.class_code == _NVME and kind == "disk":
            link_kind = "nvme"
        elif state is None and fact.link_bytes_per_s is None and self.is_virtual(fact, node_id):
            link_kind = "virtual"
        up, down = self.pcie_sides(node_id, state, fact, link_kind)
        shared = f"uplink of {self.nodes[node_id].name}" if kind == "switch" else None
        self.tree_link(node_id, link_kind, up, down, pcie=state, shared_group=shared)
        if self.nodes[node_id].line_rate is not None:
            self.network(node_id)

    def is_virtual(self, fact: PciFact, node_id: str) -> bool:
        del fact
        parent = self.nodes[self.nodes[node_id].parent or "machine"]
        return parent.kind == "host_bridge" and not parent.inferred

    def pcie_sides(
        self, node_id: str, state: PcieState | None, fact: PciFact, kind: LinkKind
    ) -> tuple[LinkRates, LinkRates]:
        """Rates towards the CPU and towards the device."""
        product = self.products.get(node_id)
        both = product.both if product else None
        if state is not None and (running := _running(state, busy=fact.busy)) is not None:
            lane, width = running
            sides = tuple(
                pcie_rates(lane, width, origin=state.origin, both=both, toward_cpu=up) for up in (True, False)
            )
            if kind == "nvme":
                return replace(sides[0], typical=nvme_read(lane, width)), replace(sides[1], typical=None)
            return sides[0], sides[1]
        if fact.link_bytes_per_s is not None:
            origin = Origin(provenance="measured", source="hwloc XML: pci_link_speed")
            rate = Rate(bytes_per_s=fact.link_bytes_per_s, origin=origin)
            return LinkRates(theory=rate), LinkRates(theory=rate)
        if product is not None and product.pcie is not None:
            source = f"{product.name} data sheet, x16; the link itself is not in the input ({product.source})"
            origin = Origin(provenance="modelled", source=source)
            lane = LANE_GT[product.pcie]
            sides = tuple(pcie_rates(lane, 16, origin=origin, both=both, toward_cpu=up) for up in (True, False))
            return sides[0], sides[1]
        if kind == "virtual":
            gone = LinkRates(absent="a virtual or built-in device: the kernel reports no link")
        elif self.nodes[node_id].kind == "gpu":
            gone = LinkRates(absent="not measured, and neither link speed nor GPU model is in the input; see --gpu")
        else:
            gone = LinkRates(absent="not measured, and the link speed is not in the input")
        return gone, gone

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

    # -- PCIe, inferred from a matrix -------------------------------------------------------------------------------

    def inferred_tree(self, matrix: MatrixFact, gpus: Sequence[PciFact]) -> None:
        from kvbench.topo.cluster import clusters

        by_label = self.label_facts(matrix, gpus)
        known_numa = {row.label: row for row in matrix.affinity}
        names = dict(matrix.nic_names)
        for number, cluster in enumerate(clusters(matrix)):
            parent = "machine"
            if cluster.numa is not None:
                parent = self.numa_node(cluster.numa, "machine", inferred=cluster.numa_inferred)
                self.numa_cpus(parent, cluster.trees, known_numa)
            bridge = self.add(
                Node(
                    id=f"bridge{number}",
                    kind="host_bridge",
                    name=f"host bridge {number} (inferred)",
                    parent=parent,
                    numa=cluster.numa,
                    inferred=True,
                )
            )
            self.tree_link(bridge, "internal", INTERNAL, INTERNAL)
            for at, tree in enumerate(cluster.trees):
                self.inferred_switches(bridge, f"{number}.{at}", tree, by_label, names)
        if any("NV" in (cell or "") for row in matrix.cells for cell in row):
            self.notes.append(
                "NV# cells hide the PCIe path between GPUs: GPUs that share an uplink show only through a common NIC; "
                "add lspci -t and lspci -vv"
            )

    def numa_cpus(self, node_id: str, trees: Sequence[Sequence[Sequence[str]]], known: Mapping[str, Affinity]) -> None:
        node = self.nodes[node_id]
        for tree in trees:
            for group in tree:
                for label in group:
                    cpus = known[label].cpus if label in known else None
                    if cpus and node.cpus is None:
                        self.nodes[node_id] = node = replace(node, cpus=cpus)

    def label_facts(self, matrix: MatrixFact, gpus: Sequence[PciFact]) -> dict[str, PciFact]:
        """What is known of each label: an address where another input has one, NUMA nodes, the product."""
        names = {index: name for facts in self.inputs for index, name in facts.gpu_names}
        by_address = _gpu_by_index(matrix, gpus, self.notes)
        affinity = {row.label: row for row in matrix.affinity}
        found = {}
        for label in matrix.labels:
            fact = by_address.get(label) or PciFact(bus_id=label, is_gpu=label.startswith("GPU"))
            row = affinity.get(label)
            own = re.fullmatch(r"\d+", row.gpu_numa or "") if row else None
            index = int(label[3:]) if re.fullmatch(r"GPU\d+", label) else None
            found[label] = replace(
                fact,
                numa=row.numa_node if row else None,
                cpus=row.cpus if row else None,
                gpu_numa_id=int(own[0]) if own else None,
                name=fact.name or names.get(index, "") if index is not None else fact.name,
            )
        return found

    def inferred_switches(
        self,
        bridge: str,
        number: str,
        tree: Sequence[Sequence[str]],
        facts: dict[str, PciFact],
        names: dict[str, str],
    ) -> None:
        """One switch per group of several devices; a switch above them where several groups are PXB apart."""
        top = bridge
        if len(tree) > 1:
            top = self.inferred_switch(f"sw{number}", bridge, tree[0], facts)
        for at, group in enumerate(tree):
            parent = top
            if len(group) > 1 or len(tree) > 1:
                only_nics = not any(facts[label].is_gpu for label in group) and len(group) > 1 and len(tree) == 1
                name = f"{'card' if only_nics else 'sw'}{number}.{at}"
                parent = self.inferred_switch(name, top, group, facts, card=only_nics)
            for label in group:
                kind: NodeKind = "gpu" if facts[label].is_gpu else "nic"
                node_id = label.lower() if label.startswith(("GPU", "NIC")) else f"nic-{label}"
                shown = names.get(label, label)
                name = facts[label].name if kind == "gpu" else shown
                self.node_of[label] = node_id
                if facts[label].bus_id != label:
                    self.node_of[facts[label].bus_id] = node_id
                title = f"{label} {name}".strip() if kind == "gpu" else shown
                self.add(self.device(node_id, kind, title, facts[label], parent, ()))
                self.device_link(node_id, kind, facts[label], None)

    def inferred_switch(
        self, node_id: str, parent: str, labels: Sequence[str], facts: dict[str, PciFact], *, card: bool = False
    ) -> str:
        kind: NodeKind = "root_port" if card else "switch"
        name = f"{'card' if card else 'switch'} {node_id.removeprefix('card').removeprefix('sw')} (inferred)"
        self.add(Node(id=node_id, kind=kind, name=name, parent=parent, inferred=True))
        if card:
            self.tree_link(node_id, "internal", INTERNAL, INTERNAL)
            return node_id
        product = self.assumed.gpu or next(
            (found for label in labels if (found := gpu_anchor(facts[label].name)) is not None), None
        )
        if product is not None and product.pcie is not None:
            source = f"assumed x16 of the generation of its GPUs ({product.name}); not in the input"
            origin = Origin(provenance="modelled", source=source)
            lane = LANE_GT[product.pcie]
            up = pcie_rates(lane, 16, origin=origin, both=product.both, toward_cpu=True)
            down = pcie_rates(lane, 16, origin=origin, both=product.both)
        else:
            up = down = LinkRates(absent="an inferred switch; its uplink is not in the input")
        self.tree_link(node_id, "pcie", up, down, shared_group=f"uplink of {name}")
        return node_id

    def join_matrix(self, matrix: MatrixFact) -> None:
        """Finds the PCI device of each label: GPUs in the order of their tool, NICs by name."""
        gpus = [fact for fact in self.pci.values() if self.nodes.get(self.node_of.get(fact.bus_id, ""), None)]
        gpus = [fact for fact in gpus if self.nodes[self.node_of[fact.bus_id]].kind == "gpu"]
        for label, fact in _gpu_by_index(matrix, gpus, self.notes).items():
            node_id = self.node_of[label] = self.node_of[fact.bus_id]
            row = next((row for row in matrix.affinity if row.label == label), None)
            if row is not None and row.cpus is not None:
                self.nodes[node_id] = replace(self.nodes[node_id], cpus=row.cpus)
        names = dict(matrix.nic_names)
        by_name = {name: fact.bus_id for fact in self.pci.values() for name in fact.os_names}
        for label in matrix.nics:
            address = by_name.get(names.get(label, label))
            if address in self.node_of:
                self.node_of[label] = self.node_of[address]
            else:
                self.notes.append(f"{label} ({names.get(label, 'no legend')}) of the matrix is on no PCI device read")

    def loose_disks(self, disks: dict[str, list[DiskFact]]) -> None:
        """Disks without a PCI function, such as persistent memory, hang on their NUMA node."""
        for disk in disks.get("", []):
            parent = f"numa{disk.numa}" if f"numa{disk.numa}" in self.nodes else "machine"
            node_id = self.add(
                Node(
                    id=f"disk-{disk.name}",
                    kind="disk",
                    name=disk.name,
                    parent=parent,
                    numa=disk.numa,
                    memory_bytes=disk.size_bytes,
                    medium=disk.model or None,
                )
            )
            gone = LinkRates(absent="not measured; it is on no PCI link")
            self.tree_link(node_id, "virtual", gone, gone)

    # -- GPU to GPU -------------------------------------------------------------------------------------------------

    def gpu_links(self, matrices: Sequence[MatrixFact]) -> None:
        explicit = [link for facts in self.inputs for link in facts.nvlinks]
        for fact in explicit:
            self.explicit_link(fact)
        for matrix in matrices if not explicit else ():
            self.matrix_links(matrix)
        for node_id, product in self.products.items():
            if product.c2c is not None and not any(
                link.kind == "c2c" and link.a == node_id for link in self.links.values()
            ):
                numa = next((node for node in self.above(node_id) if node.kind == "numa"), None)
                if numa is not None:
                    self.across(node_id, numa.id, "c2c", 1, product)

    def above(self, node_id: str) -> Iterable[Node]:
        node = self.nodes[node_id]
        while node.parent is not None:
            node = self.nodes[node.parent]
            yield node

    def explicit_link(self, fact: NvlinkFact) -> None:
        a = self.node_of.get(fact.a) or self.end(fact.a)
        b = self.node_of.get(fact.b) or self.end(fact.b)
        if fact.b == "near-numa" and a is not None:
            b = next((node.id for node in self.above(a) if node.kind == "numa"), None)
        if a is None or b is None or a == b:
            self.notes.append(f"{fact.kind} from {fact.a} to {fact.b}: an end is no device read; left out")
            return
        if self.nodes[a].kind != "gpu" and self.nodes[b].kind == "gpu":
            a, b = b, a
        product = self.products.get(a)
        count = fact.count
        if count is None and fact.bytes_per_s is not None:
            per_link = nvlink_rates(product.nvlink if product else None, 1).theory
            count = max(1, round(fact.bytes_per_s / per_link.bytes_per_s)) if per_link else 1
        kind: LinkKind = "c2c" if fact.kind == "c2c" else "nvlink"
        self.across(a, b, kind, count or 1, product, rate=fact.bytes_per_s)

    def end(self, name: str) -> str | None:
        if name == "nvswitch":
            return self.fabric()
        kind, _, index = name.partition(":")
        if kind == "package":
            return f"socket{index}" if f"socket{index}" in self.nodes else None
        if kind == "numa":
            return f"numa{index}" if f"numa{index}" in self.nodes else None
        return None

    def fabric(self) -> str:
        return self.add(Node(id="nvswitch", kind="nvswitch", name="NVSwitch fabric", parent="machine", inferred=True))

    def across(
        self, a: str, b: str, kind: LinkKind, count: int, product: GpuAnchor | None, *, rate: float | None = None
    ) -> None:
        up, down = self.across_sides(kind, count, product)
        if rate is not None and (up.theory is None or kind == "c2c"):
            told = Rate(bytes_per_s=rate, origin=Origin(provenance="measured", source="the link rate in the input"))
            up, down = replace(up, theory=told), replace(down, theory=told)
        node_id = f"{a}={b}" if kind != "c2c" else f"{a}=c2c={b}"
        if node_id in self.links:  # NCCL prints one line per link group
            old = self.links[node_id]
            del self.links[node_id]
            self.across(a, b, kind, count + old.count, product)
            return
        self.link(
            Link(
                id=node_id,
                kind=kind,
                a=a,
                b=b,
                label=f"{_short(self.nodes[a])} to {_short(self.nodes[b])}",
                forward=up,
                backward=down,
                count=count,
            )
        )

    def across_sides(self, kind: LinkKind, count: int, product: GpuAnchor | None) -> tuple[LinkRates, LinkRates]:
        if kind == "c2c":
            if product is not None and product.c2c is not None:
                return c2c_rates(product.c2c, toward_cpu=True), c2c_rates(product.c2c, toward_cpu=False)
            gone = LinkRates(absent="not measured, and the GPU model is not in the input; see --gpu")
            return gone, gone
        if kind == "xgmi":
            rates = xgmi_rates(product.xgmi if product else None)
            return rates, rates
        rates = nvlink_rates(product.nvlink if product else None, count)
        return rates, rates

    def matrix_links(self, matrix: MatrixFact) -> None:
        counts = {
            (a, b): int(cell[2:])
            for a, b in combinations(matrix.gpus, 2)
            if (cell := matrix.cell(a, b)) is not None and re.fullmatch(r"NV\d+", cell)
        }
        total = {gpu: sum(count for pair, count in counts.items() if gpu in pair) for gpu in matrix.gpus}
        switched = any(links > _MOST_DIRECT_NVLINKS for links in total.values())
        for gpu in matrix.gpus if switched else ():
            own = [count for pair, count in counts.items() if gpu in pair]
            if own and gpu in self.node_of:
                node = self.node_of[gpu]
                self.across(node, self.fabric(), "nvlink", max(own), self.products.get(node))
        for (a, b), count in counts.items() if not switched else ():
            if a in self.node_of and b in self.node_of:
                node = self.node_of[a]
                self.across(node, self.node_of[b], "nvlink", count, self.products.get(node))
        for a, b in combinations(matrix.gpus, 2):
            if matrix.cell(a, b) == "XGMI" and a in self.node_of and b in self.node_of:
                node = self.node_of[a]
                self.across(node, self.node_of[b], "xgmi", 1, self.products.get(node))

    # -- the rest ---------------------------------------------------------------------------------------------------

    def sockets(self) -> None:
        """Links between sockets (or NUMA nodes where no input names sockets), and DRAM theory from --dram."""
        model = next((facts.cpu_model for facts in self.inputs if facts.cpu_model), None)
        sockets = [node for node in self.nodes.values() if node.kind == "socket"]
        numa = [node for node in self.nodes.values() if node.kind == "numa" and node.parent == "machine"]
        loose = [node for node in numa if node.cpus is not None or node.memory_bytes is None]
        for node in sockets:
            self.tree_link(node.id, "internal", INTERNAL, INTERNAL)
        for node in [node for node in self.nodes.values() if node.kind == "group"]:
            self.tree_link(node.id, "internal", INTERNAL, INTERNAL)
        pairs = list(combinations([*sockets, *loose], 2))
        rates = socket_rates(model) if pairs else INTERNAL
        for a, b in pairs:
            self.link(
                Link(
                    id=f"{a.id}={b.id}",
                    kind="socket",
                    a=a.id,
                    b=b.id,
                    label=f"{a.name} to {b.name}",
                    forward=rates,
                    backward=rates,
                    shared_group="socket link",
                )
            )
        if self.assumed.dram is not None:
            self.dram_theory(sockets)

    def dram_theory(self, sockets: Sequence[Node]) -> None:
        spec = self.assumed.dram
        assert spec is not None
        for node in [node for node in self.nodes.values() if node.kind == "dram"]:
            numa = self.nodes[node.parent or ""]
            beside = [other for other in self.nodes.values() if other.kind == "numa" and other.parent == numa.parent]
            share = len(beside) if sockets else 1
            origin = Origin(provenance="spec", source=f"--dram {spec.text}", formula=f"channels · MT/s · 8 B / {share}")
            rate = Rate(bytes_per_s=spec.bytes_per_s / share, origin=origin)
            link = self.links[f"{node.id}-{numa.id}"]
            rates = LinkRates(theory=rate, absent="not measured; kvbench topo --measure reads it")
            self.links[link.id] = replace(link, forward=rates, backward=rates)

    def peers(self) -> Iterable[PeerAccess]:
        for facts in self.inputs:
            matrix = facts.peers
            if matrix is None:
                continue
            known = {label: self.node_of.get(label) or self.gpu_at(label) for label in matrix.labels}
            for a, b in combinations(matrix.labels, 2):
                status, node_a, node_b = matrix.cell(a, b), known[a], known[b]
                if status is not None and node_a is not None and node_b is not None:
                    yield PeerAccess(a=node_a, b=node_b, status=status)

    def peers_only(self) -> None:
        """GPUs that only a peer-access matrix names: they are there, and nothing is known of their place."""
        labels = [label for facts in self.inputs if facts.peers is not None for label in facts.peers.labels]
        if not labels or any(node.kind == "gpu" for node in self.nodes.values()):
            return
        bridge = self.host_bridge("pci-not-in-the-input", ())
        for label in labels:
            fact = PciFact(bus_id=label, is_gpu=True)
            self.node_of[label] = self.add(self.device(label.lower(), "gpu", label, fact, bridge, ()))
            self.device_link(label.lower(), "gpu", fact, None)

    def gpu_at(self, label: str) -> str | None:
        node_id = label.lower()
        return node_id if node_id in self.nodes else None

    def reported(self, matrices: Sequence[MatrixFact]) -> Iterable[ReportedPair]:
        for matrix in matrices:
            for a, b in combinations(matrix.labels, 2):
                cell = matrix.cell(a, b)
                if cell is not None and a in self.node_of and b in self.node_of:
                    yield ReportedPair(a=self.node_of[a], b=self.node_of[b], cell=cell)


def _short(node: Node) -> str:
    """The name without product and remark, for the labels of links."""
    return node.name.split(" ")[0] if node.kind == "gpu" else node.name.removesuffix(" (inferred)")


def _merged_pci(inputs: Sequence[Facts]) -> dict[str, PciFact]:
    found: dict[str, PciFact] = {}
    for facts in inputs:
        for fact in facts.pci:
            old = found.get(fact.bus_id)
            found[fact.bus_id] = fact if old is None else _merge_pci(old, fact)
    return found


def _with_port_rates(pci: dict[str, PciFact], inputs: Sequence[Facts]) -> dict[str, PciFact]:
    """Adds what ethtool says to the function that carries the device's name."""
    rates = {name: (now, most) for facts in inputs for name, now, most in facts.port_rates}
    for address, fact in pci.items() if rates else ():
        for name in fact.os_names:
            if name in rates:
                now, most = rates[name]
                pci[address] = replace(
                    fact,
                    line_rate_bit_per_s=fact.line_rate_bit_per_s or now,
                    port_rate_bit_per_s=most or fact.port_rate_bit_per_s,
                )
    return pci


def _merge_pci(old: PciFact, new: PciFact) -> PciFact:
    """The older input wins; the newer fills what it left open. A switch drawn whole is kept whole."""
    changes = {
        name: getattr(new, name)
        for name in PciFact.__dataclass_fields__
        if _is_open(getattr(old, name)) and not _is_open(getattr(new, name))
    }
    if old.parent is not None:
        changes.pop("is_switch", None)
    if old.state is not None and new.state is not None:
        gaps = {
            name: getattr(new.state, name)
            for name in PcieState.__dataclass_fields__
            if getattr(old.state, name) is None and getattr(new.state, name) is not None
        }
        changes["state"] = replace(old.state, **gaps)
    changes["os_names"] = tuple(dict.fromkeys((*old.os_names, *new.os_names)))
    return replace(old, **changes)


def _is_open(value: object) -> bool:
    """Whether a fact says nothing; NUMA node 0 does say something."""
    return value is None or value is False or (isinstance(value, str | tuple) and not value)


def _merge_numa(old: NumaFact | None, new: NumaFact) -> NumaFact:
    if old is None:
        return new
    return replace(
        old,
        cpus=old.cpus or new.cpus,
        memory_bytes=old.memory_bytes if old.memory_bytes is not None else new.memory_bytes,
        package=old.package if old.package is not None else new.package,
        distances=old.distances or new.distances,
    )


def _merged_disks(inputs: Sequence[Facts]) -> dict[str, list[DiskFact]]:
    """Disks by bus id; those without one under the empty name."""
    seen: dict[str, DiskFact] = {}
    for facts in inputs:
        for disk in facts.disks:
            seen.setdefault(disk.name, disk)
    found: dict[str, list[DiskFact]] = {}
    for disk in seen.values():
        found.setdefault(disk.bus_id or "", []).append(disk)
    return found


def _kind(fact: PciFact, disks: dict[str, list[DiskFact]]) -> NodeKind | None:
    if fact.is_gpu or fact.class_code in _GPU_CLASSES:
        return "gpu"
    if fact.class_code == _DISPLAY and fact.vendor in _GPU_VENDORS:
        return "gpu"
    if fact.class_code == _NVSWITCH and fact.vendor in {None, 0, _NVIDIA}:
        return "nvswitch"
    if fact.class_code in _NIC_CLASSES or any(_RDMA.match(name) for name in fact.os_names):
        return "nic"
    if fact.bus_id in disks or fact.class_code == _NVME:
        return "disk"
    if fact.class_code is None and fact.state is not None:
        return "device"
    return None


def _order(fact: PciFact) -> tuple[int, str]:
    return (fact.tool_index if fact.is_gpu and fact.tool_index is not None else 1 << 30, fact.bus_id)


def _device_names(
    pci: dict[str, PciFact], wanted: dict[str, NodeKind], disks: dict[str, list[DiskFact]]
) -> dict[str, tuple[str, str]]:
    """Node id and shown name of each device: GPUs by the tool's index or in bus order, others by what the system calls
    them.
    """
    found = {}
    counts: dict[str, int] = {}
    for address, kind in sorted(wanted.items(), key=lambda item: _order(pci[item[0]])):
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


def _gpu_by_index(matrix: MatrixFact, gpus: Sequence[PciFact], notes: list[str]) -> dict[str, PciFact]:
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
    ordered = sorted(gpus, key=_order)
    labels = sorted(matrix.gpus, key=lambda label: int(label[3:]))
    notes.append("GPU numbers of the matrix are matched to PCI addresses in bus order, as nvidia-smi counts")
    return dict(zip(labels, ordered, strict=True))


def _running(state: PcieState, *, busy: bool | None) -> tuple[float, int] | None:
    """Lane rate and width to count with. An idle link clocks its lanes down, so the highest rate counts unless busy."""
    most = _least(state.max_lane_gt_per_s, state.port_max_lane_gt_per_s)
    lane = state.lane_gt_per_s if busy or most is None else most
    width = state.width or _least_width(state.max_width, state.port_max_width)
    lane = lane if lane is not None else state.lane_gt_per_s
    if lane is None or not width or pcie_bytes_per_s(lane, width) <= 0:
        return None
    return lane, width


def _least(a: float | None, b: float | None) -> float | None:
    known = [value for value in (a, b) if value]
    return min(known) if known else None


def _least_width(a: int | None, b: int | None) -> int | None:
    known = [value for value in (a, b) if value]
    return min(known) if known else None


def _with_port(state: PcieState | None, port: PciFact | None) -> PcieState | None:
    """The device's state with what the port above it can do at most."""
    if state is None or port is None or port.state is None:
        return state
    return replace(
        state,
        port_max_lane_gt_per_s=state.port_max_lane_gt_per_s or port.state.max_lane_gt_per_s,
        port_max_width=state.port_max_width or port.state.max_width,
    )


def _bit_rate(bit_per_s: float | None, source: str) -> Rate | None:
    if not bit_per_s:
        return None
    return Rate(bytes_per_s=bit_per_s / _BITS, origin=Origin(provenance="measured", source=source))


def _medium(fact: PciFact, disks: Sequence[DiskFact]) -> str:
    if fact.class_code == _NVME:
        return "NVMe"
    kinds = {disk.rotational for disk in disks}
    return "rotating or virtual" if kinds == {True} else "block device"
