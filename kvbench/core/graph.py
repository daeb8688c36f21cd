"""One machine as a graph: sockets, memory, PCIe, GPUs, NICs and disks, the links between them, and paths over them.

The nodes form a tree, `device → switch … → root port → host bridge → NUMA node → socket → machine`, as the kernel and
people draw it. NVLink, xGMI, C2C, DRAM and socket links lie across that tree. A tree link runs from the child (`a`) to
the parent (`b`), so `forward` is towards the CPU and `backward` towards the device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.provenance import Origin

NodeKind = Literal[
    "machine",
    "group",
    "socket",
    "numa",
    "dram",
    "host_bridge",
    "root_port",
    "switch",
    "gpu",
    "nic",
    "disk",
    "nvswitch",
    "network",
    "device",
]
LinkKind = Literal["pcie", "nvme", "nvlink", "xgmi", "c2c", "dram", "socket", "network", "virtual", "internal"]
Direction = Literal["forward", "backward"]
PathClass = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS", "?"]
"""How far apart two devices are, in the words of `nvidia-smi topo -m`; `?` where no input tells a place."""

DEVICE_KINDS: tuple[NodeKind, ...] = ("gpu", "nic", "disk", "nvswitch", "device")

UNNAMED_BRIDGE = "host bridge (not in the input)"
"""Stands above a device of which no input tells the host bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Bytes per second in one direction, and where the figure comes from."""

    bytes_per_s: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What is known of one direction of a link.

    `theory` is the wire rate, `typical` what a named source measured or plans with on the same kind of link, and
    `measured` this machine. `while_both` is what the direction keeps while the opposite one is saturated, where a
    source says that it is less. `absent` says why there is no measured value.
    """

    theory: Rate | None = None
    typical: Rate | None = None
    measured: Rate | None = None
    while_both: Rate | None = None
    absent: str = "not measured"

    @property
    def expected(self) -> Rate | None:
        """The best-founded figure: measured, else typical, else the wire rate."""
        return self.measured or self.typical or self.theory


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieState:
    """Generation and width that a link runs at, and the most that both ends and the slot can do; None: not reported."""

    lane_gt_per_s: float | None
    width: int | None
    max_lane_gt_per_s: float | None
    max_width: int | None
    origin: Origin
    port_max_lane_gt_per_s: float | None = None
    port_max_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link. `count` bonded lanes or links; `shared_group` names what the bandwidth is shared with, if anything.

    With `half_duplex` both directions draw on one budget, as DRAM does.
    """

    id: str
    kind: LinkKind
    a: str
    b: str
    label: str
    forward: LinkRates
    backward: LinkRates
    count: int = 1
    half_duplex: bool = False
    shared_group: str | None = None
    pcie: PcieState | None = None

    def rates(self, direction: Direction) -> LinkRates:
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTraits:
    """What belongs to a GPU and not to one link: memory, copy engines, its own memory node on a Grace board."""

    memory_bytes: int | None = None
    hbm: Rate | None = None
    copy_engines: int | None = None
    nvlinks: int | None = None
    numa_id: int | None = None
    busy: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One part of the machine. `inferred` marks what no input named but the reported distances require."""

    id: str
    kind: NodeKind
    name: str
    parent: str | None
    bus_id: str | None = None
    numa: int | None = None
    inferred: bool = False
    cpus: str | None = None
    memory_bytes: int | None = None
    acs_redirect: bool | None = None
    port_bus_id: str | None = None
    gpu: GpuTraits | None = None
    line_rate: Rate | None = None
    port_rate: Rate | None = None
    state: str | None = None
    medium: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """What the driver says about direct access between two GPUs: `OK`, `CNS`, `GNS`, `TNS`, `NS`, `DR` or `U`."""

    a: str
    b: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPair:
    """A cell of a printed matrix: a path class, or `NV4` and the like."""

    a: str
    b: str
    cell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The whole graph. `iommu` is None where no input tells; `cut` are devices before whose row an input ends."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    peers: tuple[PeerAccess, ...] = ()
    reported: tuple[ReportedPair, ...] = ()
    iommu: str | None = None
    cpu_affinity_reported: bool = False
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One link of a path and the direction in which the bytes cross it."""

    link: str
    direction: Direction


@dataclass(frozen=True)
class Graph:
    """Look-ups over a machine; built once, because a machine is only a value."""

    machine: Machine

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        return {node.id: node for node in self.machine.nodes}

    @cached_property
    def links(self) -> Mapping[str, Link]:
        return {link.id: link for link in self.machine.links}

    @cached_property
    def _up(self) -> Mapping[str, Link]:
        return {link.a: link for link in self.machine.links if self.nodes[link.a].parent == link.b}

    @cached_property
    def _across(self) -> Mapping[str, tuple[Link, ...]]:
        found: dict[str, list[Link]] = {}
        for link in self.machine.links:
            if self.nodes[link.a].parent != link.b:
                found.setdefault(link.a, []).append(link)
                found.setdefault(link.b, []).append(link)
        return {name: tuple(links) for name, links in found.items()}

    def of_kind(self, *kinds: NodeKind) -> tuple[Node, ...]:
        return tuple(node for node in self.machine.nodes if node.kind in kinds)

    def homes(self) -> tuple[Node, ...]:
        """NUMA nodes with CPUs; one of which no input tells CPUs or memory counts. Memory-only nodes do not."""
        return tuple(node for node in self.of_kind("numa") if node.cpus is not None or node.memory_bytes is None)

    def children(self, node_id: str) -> tuple[Node, ...]:
        return self._children.get(node_id, ())

    @cached_property
    def _children(self) -> Mapping[str, tuple[Node, ...]]:
        found: dict[str, list[Node]] = {}
        for node in self.machine.nodes:
            if node.parent is not None:
                found.setdefault(node.parent, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def ancestors(self, node_id: str) -> tuple[Node, ...]:
        """The node itself, then its parent, and so on up to the machine."""
        known = self._ancestors.get(node_id)
        if known is None:
            node = self.nodes[node_id]
            above = self._above(node)
            known = self._ancestors[node_id] = (node, *above)
        return known

    @cached_property
    def _ancestors(self) -> dict[str, tuple[Node, ...]]:
        return {}

    def _above(self, node: Node) -> tuple[Node, ...]:
        found: list[Node] = []
        while node.parent is not None:
            node = self.nodes[node.parent]
            found.append(node)
            if len(found) > len(self.nodes):
                raise KvbenchError(f"the topology has a loop above {found[0].id}; check the captured files")
        return tuple(found)

    def uplink(self, node_id: str) -> Link | None:
        """The link to the parent in the tree."""
        return self._up.get(node_id)

    def numa_of(self, node_id: str) -> Node | None:
        """The NUMA node above a device, if any input said or implied one."""
        return next((node for node in self.ancestors(node_id) if node.kind == "numa"), None)

    def between(self, a: str, b: str, *kinds: LinkKind) -> tuple[Link, ...]:
        """Links across the tree that join exactly these two nodes."""
        return tuple(
            link for link in self._across.get(a, ()) if {link.a, link.b} == {a, b} and (not kinds or link.kind in kinds)
        )

    def across(self, node_id: str, *kinds: LinkKind) -> tuple[Link, ...]:
        """Links across the tree that end at this node."""
        return tuple(link for link in self._across.get(node_id, ()) if not kinds or link.kind in kinds)

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """The hops from one node to another: up the tree, over a socket link where the sides differ, and down.

        A GPU with a link of its own to the CPU (C2C, NVLink on POWER) uses that one. NVLink and xGMI between GPUs are
        left out: a load from the host does not cross them.
        """
        for end, other in ((source, target), (target, source)):
            link = self.cpu_link(end) if self.nodes[other].kind != "gpu" else None
            if link is not None:
                at = link.b if link.a == end else link.a
                direct = Hop(link=link.id, direction="forward" if (link.a == end) == (end == source) else "backward")
                rest = self._tree_path(at, target) if end == source else self._tree_path(source, at)
                return (direct, *rest) if end == source else (*rest, direct)
        return self._tree_path(source, target)

    def cpu_link(self, gpu: str) -> Link | None:
        """A GPU's link of its own to the CPU: C2C on a Grace board, NVLink on POWER."""
        if self.nodes[gpu].kind == "gpu":
            for link in self.across(gpu, "c2c", "nvlink"):
                if self._kinds(link) & {"numa", "socket"}:
                    return link
        return None

    def host_link(self, node_id: str) -> Link | None:
        """The link a device exchanges bytes with the host over: its own to the CPU, else its uplink in the tree."""
        return self.cpu_link(node_id) or self.uplink(node_id)

    def _tree_path(self, source: str, target: str) -> tuple[Hop, ...]:
        up, down = self.ancestors(source), self.ancestors(target)
        common = {node.id for node in up} & {node.id for node in down}
        rising = [node for node in up if node.id not in common]
        falling = [node for node in down if node.id not in common]
        crossing: list[Hop | None] = []
        joined = self._socket_links
        for (at_up, high), (at_down, low) in product(enumerate(rising), enumerate(falling)):
            link = joined.get((high.id, low.id))
            if link is not None:
                crossing = [Hop(link=link.id, direction="forward" if link.a == high.id else "backward")]
                rising, falling = rising[:at_up], falling[:at_down]
                break
        hops = [self._hop(node.id, "forward") for node in rising] + crossing
        hops += [self._hop(node.id, "backward") for node in reversed(falling)]
        return tuple(hop for hop in hops if hop is not None)

    @cached_property
    def _socket_links(self) -> Mapping[tuple[str, str], Link]:
        links = [link for link in self.machine.links if link.kind == "socket"]
        return {pair: link for link in links for pair in ((link.a, link.b), (link.b, link.a))}

    def _hop(self, node_id: str, direction: Direction) -> Hop | None:
        link = self.uplink(node_id)
        return None if link is None else Hop(link=link.id, direction=direction)

    def path_class(self, a: str, b: str) -> PathClass:
        """PIX below one switch or on one card, PXB over several, then PHB, NODE, SYS, by the lowest shared parent."""
        if a == b:
            return "X"
        above_a, above_b = self.ancestors(a), self.ancestors(b)
        ids = {node.id: depth for depth, node in enumerate(above_b)}
        depth_a, meeting = next((depth, node) for depth, node in enumerate(above_a) if node.id in ids)
        if meeting.kind in {"switch", "root_port"}:
            return "PIX" if depth_a == 1 and ids[meeting.id] == 1 else "PXB"
        if meeting.kind == "host_bridge":
            return "PHB"
        if meeting.kind == "machine" and not (_is_placed(above_a) and _is_placed(above_b)):
            return "?"
        return "NODE" if meeting.kind in {"numa", "group"} else "SYS"

    def pair_cell(self, a: str, b: str) -> str:
        """The cell of the familiar matrix: what a driver printed, else `NVn`, `XGMI`, else the path class."""
        reported = self._reported.get(frozenset((a, b)))
        if reported is not None:
            return reported
        bonded = sum(link.count for link in self.between(a, b, "nvlink"))
        if bonded:
            return f"NV{bonded}"
        if self.between(a, b, "xgmi"):
            return "XGMI"
        through = self.switched_nvlinks(a, b)
        return f"NV{through}" if through else self.path_class(a, b)

    def switched(self, gpu: str) -> bool:
        """Whether the GPU has NVLinks into an NVSwitch."""
        return any("nvswitch" in self._kinds(link) for link in self.across(gpu, "nvlink"))

    def switched_nvlinks(self, a: str, b: str) -> int:
        """Links that both GPUs have into the NVSwitch fabric; 0 where either has none."""
        counts = [
            sum(link.count for link in self.across(gpu, "nvlink") if "nvswitch" in self._kinds(link)) for gpu in (a, b)
        ]
        return min(counts)

    def _kinds(self, link: Link) -> set[NodeKind]:
        return {self.nodes[link.a].kind, self.nodes[link.b].kind}

    @cached_property
    def _reported(self) -> Mapping[frozenset[str], str]:
        return {frozenset((pair.a, pair.b)): pair.cell for pair in self.machine.reported}

    def walk(self, node_id: str | None = None, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """The tree from the top, each node with its depth."""
        roots = (
            [node for node in self.machine.nodes if node.parent is None] if node_id is None else [self.nodes[node_id]]
        )
        stack = [(depth, root) for root in reversed(roots)]
        while stack:
            level, node = stack.pop()
            yield level, node
            stack.extend((level + 1, child) for child in reversed(self.children(node.id)))


def _is_placed(above: tuple[Node, ...]) -> bool:
    """Whether an input tells where a device is: its NUMA node, its socket, or at least its host bridge."""
    return any(
        node.kind in {"numa", "group", "socket"} or (node.kind == "host_bridge" and node.name != UNNAMED_BRIDGE)
        for node in above
    )
