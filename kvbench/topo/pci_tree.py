"""Places devices in the PCI tree that addresses give: host bridges, root ports, switches."""

import re
from collections.abc import Iterable, Sequence

from kvbench.core.graph import (
    UNNAMED_BRIDGE,
    LinkRates,
    Node,
    NodeKind,
)
from kvbench.topo.devices import device_kind, device_names, device_order
from kvbench.topo.draft import INTERNAL, Draft
from kvbench.topo.facts import DiskFact, PciFact

_MOST_UNNAMED = 256


def add_pci_tree(draft: Draft, disks: dict[str, list[DiskFact]]) -> None:
    """Adds GPUs, NICs, disks and NVSwitches with all bridges above them."""
    wanted: dict[str, NodeKind] = {}
    for fact in draft.pci.values():
        kind = device_kind(fact, disks)
        if kind is not None:
            wanted[fact.bus_id] = kind
    if not wanted:  # `lspci -t` alone names no classes: show what hangs below the bridges
        bridges = {fact.parent for fact in draft.pci.values()}
        below = [fact for fact in draft.pci.values() if fact.parent in draft.pci and fact.bus_id not in bridges]
        wanted = {fact.bus_id: "device" for fact in below[:_MOST_UNNAMED] if fact.class_code is None}
    names = device_names(draft.pci, wanted, disks)
    for address, kind in sorted(wanted.items(), key=lambda item: device_order(draft.pci[item[0]])):
        fact = draft.pci[address]
        parent, port = _place(draft, fact)
        node_id, name = names[address]
        draft.node_of[address] = node_id
        draft.add(draft.device(node_id, kind, name, fact, parent, disks.get(address, []), port))
        draft.device_link(node_id, kind, fact, port)


def _place(draft: Draft, fact: PciFact) -> tuple[str, str | None]:
    """The node above a device, made together with all that is above it, and the bus id of the port it hangs on."""
    chain = _chain(draft, fact)
    if chain[-1] in draft.pci:  # the chain ends at a bridge whose host bridge no input names
        chain.append(f"pci-of-{chain[-1]}")
    parent = host_bridge(draft, chain[-1], [draft.pci[address] for address in chain[:-1] if address in draft.pci])
    bridges = list(reversed(chain[1:-1]))
    port: str | None = None
    for depth, address in enumerate(bridges):
        bridge = draft.pci.get(address) or PciFact(bus_id=address)
        if bridge.is_switch or (depth % 2 == 1 and not any(_is_switch(draft, above) for above in bridges)):
            parent = _bridge_node(draft, "switch", address, bridge, parent, port)
            port = None
        elif depth == 0:
            parent = _bridge_node(draft, "root_port", address, bridge, parent, None)
            port = address
        else:
            port = address
    return parent, port


def _is_switch(draft: Draft, address: str) -> bool:
    return address in draft.pci and draft.pci[address].is_switch


def _chain(draft: Draft, fact: PciFact) -> list[str]:
    found = [fact.bus_id]
    parent = fact.parent
    while parent is not None and parent not in found and len(found) < 64:
        found.append(parent)
        parent = draft.pci[parent].parent if parent in draft.pci else None
    if len(found) == 1:
        found.append(f"pci-unknown-{fact.bus_id}")
    return found


def _bridge_node(draft: Draft, kind: NodeKind, address: str, fact: PciFact, parent: str, port: str | None) -> str:
    node_id = f"{'sw' if kind == 'switch' else 'port'}-{address}"
    if node_id not in draft.nodes:
        name = f"{'switch' if kind == 'switch' else 'root port'} {address.removeprefix('0000:')}"
        draft.add(
            Node(
                id=node_id,
                kind=kind,
                name=name,
                parent=parent,
                bus_id=address,
                acs_redirect=_acs(draft, address),
                port_bus_id=port,
            )
        )
        if kind == "root_port":
            draft.tree_link(node_id, "internal", INTERNAL, INTERNAL)
        else:
            draft.device_link(node_id, kind, fact, port)
    return node_id


def _acs(draft: Draft, address: str) -> bool | None:
    """Redirection at a bridge or at any port right below it (the downstream ports of a switch)."""
    told = [
        fact.acs_redirect
        for fact in draft.pci.values()
        if address in (fact.bus_id, fact.parent) and fact.acs_redirect is not None
    ]
    return any(told) if told else None


def host_bridge(draft: Draft, name: str, facts: Iterable[PciFact]) -> str:
    """The id of a host bridge, placed on the NUMA node that `facts` or anything below it names."""
    if name in draft.nodes:
        return name
    below = [fact for fact in draft.pci.values() if fact.parent == name]
    told = [fact for fact in (*facts, *below) if fact.numa is not None]
    shared = next((fact.near_numa for fact in (*facts, *below) if len(fact.near_numa) > 1), ())
    parent = _memory_parent(draft, told[0].numa if told else None, shared)
    plain = name.removeprefix("pci").removeprefix("0000:")
    label = f"host bridge {plain}" if re.fullmatch(r"pci[0-9a-f:]+", name) else UNNAMED_BRIDGE
    numa = told[0].numa if told else None
    draft.add(Node(id=name, kind="host_bridge", name=label, parent=parent, numa=numa, inferred=label == UNNAMED_BRIDGE))
    draft.tree_link(name, "internal", INTERNAL, INTERNAL)
    return name


def _memory_parent(draft: Draft, numa: int | None, shared: Sequence[int] = ()) -> str:
    nodes = [node for node in draft.nodes.values() if node.kind == "numa"]
    if numa is not None:
        return draft.numa_node(numa, "machine")
    group = f"group{min(shared)}" if shared else ""
    if group in draft.nodes:
        return group
    with_cpus = [node for node in nodes if node.cpus]
    return with_cpus[0].id if len(with_cpus) == 1 else "machine"


def add_loose_disks(draft: Draft, disks: dict[str, list[DiskFact]]) -> None:
    """Disks without a PCI function, such as persistent memory, hang on their NUMA node."""
    for disk in disks.get("", []):
        parent = f"numa{disk.numa}" if f"numa{disk.numa}" in draft.nodes else "machine"
        node_id = draft.add(
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
        draft.tree_link(node_id, "virtual", gone, gone)
