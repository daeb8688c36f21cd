"""What is wrong or notable about a machine's links: rules with stable ids, each with evidence and remedy."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from kvbench.core.graph import Graph, Link, Node, PcieState
from kvbench.core.pcie import generation
from kvbench.core.units import format_bandwidth

Severity = Literal["problem", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "info")
_FAR_BELOW = 0.7  # a measurement under this share of a typical figure asks for an explanation
_ASYMMETRY = 1.25
_NEAR = frozenset({"PIX", "PXB"})
_CLASSES = frozenset({"PIX", "PXB", "PHB", "NODE", "SYS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: `rule` never changes its meaning, `subjects` are node or link ids."""

    rule: str
    severity: Severity
    subjects: tuple[str, ...]
    evidence: str
    remedy: str


Rule = Callable[[Graph], Iterable[Finding]]


def findings(graph: Graph) -> tuple[Finding, ...]:
    """All findings, the worst first, each rule in the order of RULES."""
    found = [finding for rule in RULES for finding in rule(graph)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _names(graph: Graph, ids: Iterable[str], most: int = 6) -> str:
    listed = [_short(graph.nodes[node]) if node in graph.nodes else graph.links[node].label for node in ids]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _short(node: Node) -> str:
    return node.name.split(" ")[0] if node.kind == "gpu" else node.name


def _generation(lane_gt_per_s: float) -> str:
    number = generation(lane_gt_per_s)
    return f"Gen{number}" if number is not None else f"{lane_gt_per_s:g} GT/s"


def _with_state(graph: Graph) -> Iterator[tuple[Link, Node, PcieState]]:
    for link in graph.machine.links:
        if link.pcie is not None:
            yield link, graph.nodes[link.a], link.pcie


def _least(*values: float | None) -> float | None:
    known = [value for value in values if value]
    return min(known) if known else None


def _who(port_known: bool) -> str:
    return "both ends" if port_known else "the device"


def _port_note(port_known: bool) -> str:
    return "" if port_known else "; the port is not in the input and may be the lesser end"


def link_generation(graph: Graph) -> Iterator[Finding]:
    """A link runs below the generation that both ends can do."""
    for link, node, state in _with_state(graph):
        most = _least(state.max_lane_gt_per_s, state.port_max_lane_gt_per_s)
        if state.lane_gt_per_s is None or most is None or state.lane_gt_per_s >= most:
            continue
        known = state.port_max_lane_gt_per_s is not None
        evidence = f"{link.label} runs at {_generation(state.lane_gt_per_s)}, {_who(known)} can do {_generation(most)}"
        busy = node.gpu.busy if node.gpu else None
        if node.kind in {"gpu", "device"} and not busy:
            name = "GPU" if node.kind == "gpu" else "device (perhaps a GPU: its class is not in the input)"
            yield Finding(
                rule="link-generation-idle",
                severity="info",
                subjects=(link.id,),
                evidence=f"{evidence}{_port_note(known)}; the {name} was "
                f"{'idle' if busy is False else 'perhaps idle'}, and idle links slow down",
                remedy="read it again while the GPU copies; only then is the slot to blame",
            )
        else:
            yield Finding(
                rule="link-slow-while-busy" if busy else "link-generation-downgraded",
                severity="problem" if known else "warning",
                subjects=(link.id,),
                evidence=evidence + (" while the GPU is busy" if busy else "") + _port_note(known),
                remedy="reseat the card or its riser, then check the slot's speed setting in the BIOS and the AER "
                "counters",
            )


def link_width(graph: Graph) -> Iterator[Finding]:
    """A link uses fewer lanes than both ends have."""
    for link, _node, state in _with_state(graph):
        most = _least(state.max_width, state.port_max_width)
        if state.width is not None and most is not None and state.width < most:
            known = state.port_max_width is not None
            yield Finding(
                rule="link-width-downgraded",
                severity="problem" if known else "warning",
                subjects=(link.id,),
                evidence=f"{link.label} uses x{state.width}, {_who(known)} {'have' if known else 'has'} x{most:g}"
                + _port_note(known),
                remedy="reseat the card, check for a bifurcated or x8-wired slot and for a riser with missing lanes",
            )


def slot_below_device(graph: Graph) -> Iterator[Finding]:
    """The slot has fewer lanes or a lower generation than the device."""
    for link, node, state in _with_state(graph):
        narrow = state.port_max_width and state.max_width and state.port_max_width < state.max_width
        old = (
            state.port_max_lane_gt_per_s
            and state.max_lane_gt_per_s
            and state.port_max_lane_gt_per_s < state.max_lane_gt_per_s
        )
        if node.kind in {"gpu", "nic", "disk"} and (narrow or old):
            here = f"x{state.port_max_width} {_generation(state.port_max_lane_gt_per_s or 0)}"
            own = f"x{state.max_width} {_generation(state.max_lane_gt_per_s or 0)}"
            yield Finding(
                rule="slot-below-device",
                severity="warning",
                subjects=(link.id,),
                evidence=f"{_short(node)} can do {own}, its slot {here}",
                remedy="move the card to a slot that matches it",
            )


def _far(graph: Graph, rule: str, others: tuple[Node, ...], what: str, remedy: str) -> Iterator[Finding]:
    gpus = graph.of_kind("gpu")
    far = [
        gpu
        for gpu in gpus
        if others and all(graph.pair_cell(gpu.id, other.id) in {"SYS"} for other in others) and _placed(graph, gpu)
    ]
    if far and not any(_placed(graph, other) for other in others):
        yield Finding(
            rule=rule,
            severity="info",
            subjects=tuple(gpu.id for gpu in far),
            evidence=f"{what} placement not reported: every {what} is SYS from {_which(graph, far, gpus)}, and no "
            "input tells a NUMA node of one",
            remedy=f"read /sys/class/…/device/numa_node of each {what} on the host, or give lspci -vv or hwloc XML",
        )
    elif far and len(graph.homes()) > 1:
        yield Finding(
            rule=rule,
            severity="warning",
            subjects=tuple(gpu.id for gpu in far),
            evidence=f"{_which(graph, far, gpus)} reach every {what} only over the link between sockets or NUMA nodes "
            "(SYS)",
            remedy=remedy,
        )


def _which(graph: Graph, some: Sequence[Node], every: Sequence[Node]) -> str:
    if len(some) == len(every):
        return f"all {len(every)} GPUs"
    return f"{len(some)} of {len(every)} GPUs ({_names(graph, [gpu.id for gpu in some], 8)})"


def _placed(graph: Graph, node: Node) -> bool:
    return graph.numa_of(node.id) is not None or any(above.kind == "group" for above in graph.ancestors(node.id))


def gpu_far_from_nic(graph: Graph) -> Iterator[Finding]:
    """A GPU has every NIC on another socket."""
    remedy = "give the GPU a NIC on its own socket, or run the ranks that use the network on the near GPUs"
    yield from _far(graph, "gpu-far-from-nic", graph.of_kind("nic"), "NIC", remedy)


def gpu_far_from_disk(graph: Graph) -> Iterator[Finding]:
    """A GPU has every NVMe disk on another socket."""
    disks = tuple(disk for disk in graph.of_kind("disk") if disk.medium == "NVMe")
    remedy = "spread the NVMe disks over the sockets, or keep the file tier on the disks next to each rank"
    yield from _far(graph, "gpu-far-from-nvme", disks, "NVMe disk", remedy)


def _unreported(graph: Graph, node: Node) -> bool:
    """Whether the text of this node ends early, or no input is one that tells places."""
    return node.id in graph.machine.cut or not any(above.kind == "host_bridge" for above in graph.ancestors(node.id))


def numa_unknown(graph: Graph) -> Iterator[Finding]:
    """The kernel or the tool does not say which NUMA node a device is on."""
    nodes = graph.homes()
    unknown = [node for node in graph.of_kind("gpu", "nic", "disk") if node.numa is None and node.bus_id is not None]
    unplaced = [node for node in graph.of_kind("gpu") if node.numa is None and node.bus_id is None]
    unknown += [node for node in unplaced if not _placed(graph, node)]
    unknown = [node for node in unknown if not _unreported(graph, node)]
    told_by_group = [node for node in unknown if any(above.kind == "group" for above in graph.ancestors(node.id))]
    unknown = [node for node in unknown if node not in told_by_group]
    if not unknown:
        return
    one = len(nodes) == 1
    yield Finding(
        rule="numa-unknown",
        severity="info" if one else "warning",
        subjects=tuple(node.id for node in unknown),
        evidence=f"no NUMA node is reported for {_names(graph, [node.id for node in unknown])}"
        + ("; with one NUMA node it makes no difference" if one else ""),
        remedy="nothing to do"
        if one
        else "check the firmware's SRAT and _PXM tables, or in a virtual machine ask for a NUMA-aware PCI topology",
    )


def acs_redirect(graph: Graph) -> Iterator[Finding]:
    """ACS makes a bridge send peer traffic up to the CPU."""
    bad = []
    for bridge in graph.of_kind("switch", "root_port"):
        below = [node for _, node in graph.walk(bridge.id) if node.kind in {"gpu", "nic", "disk"}]
        if bridge.acs_redirect and len(below) > 1:
            bad.append(bridge)
    if bad:
        yield Finding(
            rule="acs-redirect",
            severity="warning",
            subjects=tuple(bridge.id for bridge in bad),
            evidence="ACS redirects peer requests or completions at "
            f"{_names(graph, [bridge.id for bridge in bad])}: GPUs, "
            "NICs and disks below talk to one another through the CPU",
            remedy="on bare metal turn ACS off for these bridges (setpci ECAP_ACS+6.w=0000, or in the BIOS); with "
            "virtual "
            "machines use ATS instead",
        )


def iommu(graph: Graph) -> Iterator[Finding]:
    """The IOMMU translates device addresses, or may do so."""
    kind = graph.machine.iommu
    if kind == "translating":
        yield Finding(
            rule="iommu-translation",
            severity="warning",
            subjects=(),
            evidence="the IOMMU translates DMA addresses (group type DMA): every transfer pays for look-ups, and peer "
            "transfers may go up to the CPU",
            remedy="boot with iommu=pt (pass-through) if no device is given to a virtual machine",
        )
    elif kind == "groups":
        yield Finding(
            rule="iommu-groups",
            severity="info",
            subjects=(),
            evidence="IOMMU groups exist; whether it translates or passes through is not in the input",
            remedy="read /sys/kernel/iommu_groups/*/type; pass-through (iommu=pt) is what transfers want",
        )


_REFUSED = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}


def peer_access(graph: Graph) -> Iterator[Finding]:
    """The driver refuses direct access between two GPUs; under an NVLink that is a fault."""
    under: list[tuple[str, str]] = []
    plain: list[tuple[str, str]] = []
    statuses: dict[tuple[str, str], str] = {}
    for peer in graph.machine.peers:
        if peer.status in _REFUSED:
            pair = (peer.a, peer.b)
            statuses[pair] = peer.status
            (under if graph.pair_cell(*pair).startswith("NV") else plain).append(pair)
    for pairs, rule, severity, more in (
        (under, "p2p-not-ok-under-nvlink", "problem", " although NVLinks join them"),
        (plain, "p2p-refused", "warning", "; copies between them go through host memory"),
    ):
        if pairs:
            kinds = ", ".join(f"{kind} ({_REFUSED[kind]})" for kind in sorted({statuses[pair] for pair in pairs}))
            names = ", ".join(f"{a.upper()}-{b.upper()}" for a, b in pairs[:6])
            yield Finding(
                rule=rule,
                severity="problem" if severity == "problem" else "warning",
                subjects=tuple(dict.fromkeys(node for pair in pairs for node in pair)),
                evidence=f"peer access is {kinds} for {len(pairs)} pair{'s' if len(pairs) > 1 else ''} ({names}"
                f"{' …' if len(pairs) > 6 else ''}){more}",
                remedy="check the fabric manager, the driver version and NVreg peer settings"
                if rule == "p2p-not-ok-under-nvlink"
                else "expected on GeForce and on some chipsets; else check ACS, IOMMU and the driver",
            )


def gpu_off_fabric(graph: Graph) -> Iterator[Finding]:
    """Some GPUs of a machine have NVLinks, this one has none."""
    gpus = graph.of_kind("gpu")
    off = [gpu for gpu in gpus if not _peer_links(graph, gpu.id)]
    if off and len(gpus) - len(off) >= 2:
        yield Finding(
            rule="gpu-off-fabric",
            severity="problem",
            subjects=tuple(gpu.id for gpu in off),
            evidence=f"{_names(graph, [gpu.id for gpu in off])} has no NVLink, the other {len(gpus) - len(off)} "
            "GPUs do",
            remedy="look for NVLink errors (nvidia-smi nvlink -s, dmesg Xid), restart the fabric manager, reset "
            "the GPU",
        )


def _peer_links(graph: Graph, gpu: str) -> tuple[Link, ...]:
    return tuple(
        link
        for link in graph.across(gpu, "nvlink", "xgmi")
        if graph.nodes[link.b if link.a == gpu else link.a].kind in {"gpu", "nvswitch"}
    )


def nvlink_count(graph: Graph) -> Iterator[Finding]:
    """A GPU has fewer NVLinks up than its product has, or none at all."""
    for gpu in graph.of_kind("gpu"):
        full = gpu.gpu.nvlinks if gpu.gpu else None
        have = sum(link.count for link in _peer_links(graph, gpu.id) if link.kind == "nvlink")
        others = len(graph.of_kind("gpu")) > 1 and bool(graph.machine.reported)
        if full and 0 < have < full and graph.across(gpu.id, "nvlink") and graph.switched(gpu.id):
            yield Finding(
                rule="nvlink-links-missing",
                severity="problem",
                subjects=(gpu.id,),
                evidence=f"{_short(gpu)} has {have} NVLinks up, its product has {full}",
                remedy="look at nvidia-smi nvlink -s and the fabric manager's log for the links that are down",
            )
        elif full and have == 0 and others and not any(_peer_links(graph, other.id) for other in graph.of_kind("gpu")):
            yield Finding(
                rule="nvlink-absent",
                severity="warning",
                subjects=(gpu.id,),
                evidence=f"{_short(gpu)} is a product with {full} NVLinks, and none is up",
                remedy="check that it is the SXM version, that the fabric manager runs and that the VM passes "
                "NVLink on",
            )


def nic_rate(graph: Graph) -> Iterator[Finding]:
    """A NIC runs below what its port can do, below its equals, or behind a slower PCIe link."""
    nics = graph.of_kind("nic")
    fastest = max((nic.line_rate.bytes_per_s for nic in nics if nic.line_rate and _is_rdma(nic)), default=0.0)
    for nic in nics:
        if nic.line_rate is None:
            continue
        rate = nic.line_rate.bytes_per_s
        port = nic.port_rate.bytes_per_s if nic.port_rate else None
        if port is not None and rate < port:
            yield Finding(
                rule="nic-below-port-rate",
                severity="problem",
                subjects=(nic.id,),
                evidence=f"{nic.name} runs at {_gbit(rate)}, its port can do {_gbit(port)}",
                remedy="check cable, transceiver and switch port, then auto-negotiation and FEC",
            )
        elif _is_rdma(nic) and rate < fastest and sum(1 for other in nics if _same_rate(other, fastest)) >= 2:
            yield Finding(
                rule="nic-below-its-peers",
                severity="info",
                subjects=(nic.id,),
                evidence=f"{nic.name} runs at {_gbit(rate)}, other NICs of this machine at {_gbit(fastest)}",
                remedy="if it should be an equal, check cable, transceiver and switch port; keep KV traffic off it",
            )
        link = graph.uplink(nic.id)
        wire = link.backward.theory if link else None
        if link is not None and wire is not None and wire.bytes_per_s < rate:
            yield Finding(
                rule="nic-pcie-below-port-rate",
                severity="warning",
                subjects=(nic.id, link.id),
                evidence=f"{nic.name} has a {_gbit(rate)} port ({format_bandwidth(rate)}) behind a PCIe link of "
                f"{format_bandwidth(wire.bytes_per_s)}",
                remedy="move it to a slot with more lanes or a newer generation",
            )


def _is_rdma(nic: Node) -> bool:
    return not nic.name.startswith(("eth", "en"))


def _same_rate(nic: Node, rate: float) -> bool:
    return nic.line_rate is not None and nic.line_rate.bytes_per_s == rate


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:g} Gbit/s"


def nic_down(graph: Graph) -> Iterator[Finding]:
    """An RDMA port is not active."""
    down = [
        nic
        for nic in graph.of_kind("nic")
        if _is_rdma(nic) and nic.state and ("DOWN" in nic.state or nic.state == "down")
    ]
    if down:
        yield Finding(
            rule="nic-down",
            severity="warning",
            subjects=tuple(nic.id for nic in down),
            evidence=f"the port of {_names(graph, [nic.id for nic in down])} is down",
            remedy="plug it in or bring it up; until then it carries nothing",
        )


def nps_spread(graph: Graph) -> Iterator[Finding]:
    """One socket is split into several NUMA nodes, so near memory is a fraction of the socket's."""
    sockets = graph.of_kind("socket")
    numa = [node for node in graph.of_kind("numa") if node.cpus]
    gpus = graph.of_kind("gpu")
    homes = {home.id for gpu in gpus if (home := graph.numa_of(gpu.id)) is not None}
    split = len(sockets) > 0 and len(numa) > len(sockets)
    if split or (not sockets and len(homes) > 2 and not graph.machine.cut):
        per = f"{len(numa)} NUMA nodes on {len(sockets)} socket{'s' if len(sockets) > 1 else ''}" if split else ""
        spread = f"the GPUs are spread over {len(homes)} NUMA nodes" if homes else ""
        yield Finding(
            rule="nps-spread",
            severity="info",
            subjects=tuple(sorted(homes)) or tuple(node.id for node in numa),
            evidence="; ".join(part for part in (per, spread) if part)
            + ": each rank's near DRAM is only that node's channels (NPS2/NPS4 or SNC)",
            remedy="bind every rank and its host buffer to the GPU's own node, or set NPS1 if ranks share one buffer",
        )


def cpu_affinity(graph: Graph) -> Iterator[Finding]:
    """The CPU column of the matrix is blank for a GPU."""
    rows = [gpu for gpu in graph.of_kind("gpu") if gpu.id not in graph.machine.cut]
    blank = [gpu for gpu in rows if gpu.cpus is None and graph.machine.cpu_affinity_reported]
    if blank and graph.machine.reported:
        yield Finding(
            rule="cpu-affinity-missing",
            severity="warning",
            subjects=tuple(gpu.id for gpu in blank),
            evidence=f"no CPU affinity is reported for {_names(graph, [gpu.id for gpu in blank], 8)}: the cpuset "
            "of this job "
            "or container holds none of the near CPUs",
            remedy="ask the scheduler for CPUs on the GPU's socket (Slurm: --gpu-bind, --cpus-per-gpu), then look "
            "again",
        )


def gds_path(graph: Graph) -> Iterator[Finding]:
    """Whether GPUDirect Storage can stay below a switch, or must cross the CPU."""
    disks = [disk for disk in graph.of_kind("disk") if disk.medium == "NVMe"]
    gpus = graph.of_kind("gpu")
    if not disks or not gpus:
        return
    shared = [gpu for gpu in gpus if any(graph.path_class(gpu.id, disk.id) in _NEAR for disk in disks)]
    if shared:
        yield Finding(
            rule="gds-behind-switch",
            severity="info",
            subjects=tuple(gpu.id for gpu in shared),
            evidence=f"{_names(graph, [gpu.id for gpu in shared], 8)} share a PCIe switch with an NVMe disk: "
            "direct reads stay "
            "below it and leave the uplink to DRAM loads",
            remedy="use GPUDirect Storage there, and check with /proc/driver/nvidia-fs/stats that it is not in "
            "compat mode",
        )
    told = [gpu for gpu in gpus if any(graph.path_class(gpu.id, disk.id) != "?" for disk in disks)]
    through = [gpu for gpu in told if gpu not in shared]
    if through:
        yield Finding(
            rule="gds-through-root-complex",
            severity="info" if not shared else "warning",
            subjects=tuple(gpu.id for gpu in through),
            evidence=f"no NVMe disk shares a switch with {_names(graph, [gpu.id for gpu in through], 8)}: direct "
            "reads cross the "
            "CPU's root complex, which some platforms slow down",
            remedy="measure GPUDirect Storage against staging in DRAM before choosing it",
        )


def unbalanced_uplinks(graph: Graph) -> Iterator[Finding]:
    """Some uplinks or sockets carry more GPUs than others; not told where the input ends before some GPUs' rows."""
    gpus = graph.of_kind("gpu")
    if any(gpu.id in graph.machine.cut and not _has_address(graph, gpu) for gpu in gpus):
        return
    per_uplink = Counter(uplink for gpu in gpus if (uplink := shared_uplink(graph, gpu.id)) is not None)
    alone = [gpu for gpu in gpus if shared_uplink(graph, gpu.id) is None]
    counts = set(per_uplink.values()) | ({1} if alone and per_uplink else set())
    if len(counts) > 1:
        busiest = [name for name, count in per_uplink.items() if count == max(counts)]
        yield Finding(
            rule="unbalanced-uplinks",
            severity="warning",
            subjects=tuple(busiest),
            evidence=f"{_names(graph, busiest)} carries {max(counts)} GPUs, other uplinks {min(counts)}: the ranks "
            "on it load "
            "slower and the others wait for them",
            remedy="spread tensor-parallel ranks evenly over the uplinks, or leave out GPUs of the fuller one",
        )
    homes = Counter(home.id for gpu in gpus if (home := graph.numa_of(gpu.id)) is not None)
    if len(homes) > 1 and len(set(homes.values())) > 1:
        listed = ", ".join(f"{graph.nodes[name].name}: {count}" for name, count in sorted(homes.items()))
        yield Finding(
            rule="unbalanced-sockets",
            severity="info",
            subjects=tuple(sorted(homes)),
            evidence=f"GPUs per NUMA node differ ({listed})",
            remedy="the fuller side shares DRAM and socket link among more ranks; size host tiers per node",
        )


def _has_address(graph: Graph, node: Node) -> bool:
    """Whether an input with addresses places the device, so that a cut matrix leaves nothing open."""
    return any(above.kind == "host_bridge" and not above.inferred for above in graph.ancestors(node.id))


def shared_uplink(graph: Graph, gpu: str) -> str | None:
    """The topmost switch above a GPU: its uplink is what all GPUs below share."""
    switches = [node for node in graph.ancestors(gpu) if node.kind == "switch"]
    return switches[-1].id if switches else None


def matrix_contradicts_numa(graph: Graph) -> Iterator[Finding]:
    """The printed distances and the NUMA column disagree."""
    bad = [
        pair
        for pair in graph.machine.reported
        if pair.cell in _CLASSES
        and (here := graph.path_class(pair.a, pair.b)) in _CLASSES
        and graph.numa_of(pair.a) is not None
        and graph.numa_of(pair.b) is not None
        and (pair.cell == "SYS") != (here == "SYS")
    ]
    if bad:
        first = bad[0]
        yield Finding(
            rule="matrix-contradicts-numa",
            severity="warning",
            subjects=tuple(dict.fromkeys(node for pair in bad for node in (pair.a, pair.b))),
            evidence=f"{len(bad)} pairs such as {_names(graph, [first.a, first.b])} are "
            f"{first.cell} "
            f"apart, but on NUMA nodes {_numa(graph, first.a)} and {_numa(graph, first.b)}",
            remedy="the container or VM hides part of the topology; read it on the host before pinning ranks",
        )


def _numa(graph: Graph, node_id: str) -> int | None:
    home = graph.numa_of(node_id)
    return home.numa if home is not None else None


def hidden_by_vm(graph: Graph) -> Iterator[Finding]:
    """GPUs of a server and NICs are all PHB from one another: a virtual machine hides switches and sockets."""
    devices = graph.of_kind("gpu", "nic")
    pairs = [(a.id, b.id) for a, b in combinations(devices, 2)]
    cells = {graph.pair_cell(a, b) for a, b in pairs}
    plain = {cell for cell in cells if not cell.startswith("NV")}
    server = cells != plain or any("SXM" in gpu.name for gpu in graph.of_kind("gpu"))  # a desktop has one host bridge
    if len(graph.of_kind("gpu")) and graph.of_kind("nic") and server and len(devices) > 3 and plain == {"PHB"}:
        yield Finding(
            rule="paths-hidden",
            severity="info",
            subjects=tuple(node.id for node in devices),
            evidence=f"all {len(devices)} GPUs and NICs are PHB apart: most likely a virtual machine without the "
            "host's PCI tree",
            remedy="ask for the provider's NCCL topology file and give it with --from; pairs of GPU and NIC are "
            "unknown here",
        )


def measured_rates(graph: Graph) -> Iterator[Finding]:
    """A measurement is far below what such a link reaches elsewhere, or one direction far below the other."""
    for link in graph.machine.links:
        for direction, rates in (("forward", link.forward), ("backward", link.backward)):
            usual = rates.typical or rates.theory
            if rates.measured is None or usual is None or rates.measured.bytes_per_s >= _FAR_BELOW * usual.bytes_per_s:
                continue
            way = f"{link.a} to {link.b}" if direction == "forward" else f"{link.b} to {link.a}"
            yield Finding(
                rule="measured-below-typical",
                severity="warning",
                subjects=(link.id,),
                evidence=f"{link.label} carried {format_bandwidth(rates.measured.bytes_per_s)} from {way}; "
                f"{format_bandwidth(usual.bytes_per_s)} is usual ({usual.origin.source})",
                remedy="check NUMA binding, pinned memory and the link's width, then measure again with nothing "
                "else running",
            )
        there, back = link.forward.measured, link.backward.measured
        if there is not None and back is not None and link.kind != "dram":
            low, high = sorted((there.bytes_per_s, back.bytes_per_s))
            if high > _ASYMMETRY * low:
                yield Finding(
                    rule="measured-asymmetric",
                    severity="warning",
                    subjects=(link.id,),
                    evidence=f"{link.label} carried {format_bandwidth(there.bytes_per_s)} one way and "
                    f"{format_bandwidth(back.bytes_per_s)} the other",
                    remedy="measure each direction alone and both together; A100 hosts are known for a slow H2D "
                    "under D2H",
                )


RULES: tuple[Rule, ...] = (
    link_width,
    link_generation,
    slot_below_device,
    gpu_off_fabric,
    nvlink_count,
    peer_access,
    nic_rate,
    nic_down,
    gpu_far_from_nic,
    gpu_far_from_disk,
    numa_unknown,
    cpu_affinity,
    acs_redirect,
    iommu,
    unbalanced_uplinks,
    gds_path,
    nps_spread,
    matrix_contradicts_numa,
    hidden_by_vm,
    measured_rates,
)
