"""Sockets, NUMA nodes, their DRAM, and the links between sockets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from kvbench.core.errors import UsageError
from kvbench.core.graph import (
    Link,
    LinkRates,
    Node,
    Rate,
)
from kvbench.core.provenance import Origin
from kvbench.topo.anchors import DramSpec, socket_rates
from kvbench.topo.draft import INTERNAL, Draft
from kvbench.topo.facts import NumaFact
from kvbench.topo.merge import merged_numa_node

_MOST_SOCKETS = 2  # where no input names sockets, more NUMA nodes than these may be parts of one


def add_memory(draft: Draft) -> None:
    """Sockets, NUMA nodes and their DRAM, as far as an input names them."""
    merged: dict[int, NumaFact] = {}
    for facts in draft.inputs:
        for node in facts.numa:
            merged[node.index] = merged_numa_node(merged.get(node.index), node)
    near = [fact.near_numa for fact in draft.pci.values() if len(fact.near_numa) > 1]
    groups = {numa: f"group{min(group)}" for group in near if len(group) < len(merged) for numa in group}
    for numa in merged.values():
        parent = "machine"
        if numa.index in groups:
            parent = draft.add(
                Node(id=groups[numa.index], kind="group", name=f"group of {groups[numa.index]}", parent="machine")
            )
        if numa.package is not None:
            name = f"socket {numa.package}"
            parent_is = parent
            parent = draft.add(Node(id=f"socket{numa.package}", kind="socket", name=name, parent=parent_is))
        draft.numa_node(numa.index, parent, numa)


def add_sockets(draft: Draft) -> None:
    """Links between sockets (or NUMA nodes where no input names sockets), and DRAM theory from --dram."""
    model = next((facts.cpu_model for facts in draft.inputs if facts.cpu_model), None)
    sockets = [node for node in draft.nodes.values() if node.kind == "socket"]
    numa = [node for node in draft.nodes.values() if node.kind == "numa" and node.parent == "machine"]
    loose = [node for node in numa if node.cpus is not None or node.memory_bytes is None]
    for node in sockets:
        draft.tree_link(node.id, "internal", INTERNAL, INTERNAL)
    for node in [node for node in draft.nodes.values() if node.kind == "group"]:
        draft.tree_link(node.id, "internal", INTERNAL, INTERNAL)
    pairs = list(combinations([*sockets, *loose], 2))
    rates = socket_rates(model) if pairs else INTERNAL
    for a, b in pairs:
        draft.link(
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
    if draft.assumed.dram is not None:
        _dram_theory(draft, sockets)


def _require_one_node_per_socket(draft: Draft, spec: DramSpec) -> None:
    """Up to two NUMA nodes are probably a socket each; the highest number tells of nodes that no device is next to."""
    numbers = [node.numa for node in draft.nodes.values() if node.kind == "dram" and node.numa is not None]
    count = max(len(numbers), max(numbers, default=0) + 1)
    if count > _MOST_SOCKETS:
        raise UsageError(
            f"--dram {spec.text}: the input has at least {count} NUMA nodes and names no socket; say how many nodes "
            f"share one socket's channels, such as --dram {spec.text}/4 (or /1)"
        )


def _dram_theory(draft: Draft, sockets: Sequence[Node]) -> None:
    spec = draft.assumed.dram
    assert spec is not None
    if not sockets and spec.nodes is None:
        _require_one_node_per_socket(draft, spec)
    drams = [node for node in draft.nodes.values() if node.kind == "dram"]
    for node in drams:
        numa = draft.nodes[node.parent or ""]
        beside = [other for other in drams if draft.nodes[other.parent or ""].parent == numa.parent]
        if sockets and spec.nodes not in {None, len(beside)}:
            raise UsageError(
                f"--dram {spec.text}: the input has {len(beside)} NUMA nodes with DRAM on {numa.parent}, not "
                f"{spec.nodes}; leave out /{spec.nodes}"
            )
        share = spec.nodes or (len(beside) if sockets else 1)
        origin = Origin(provenance="spec", source=f"--dram {spec.text}", formula=f"channels · MT/s · 8 B / {share}")
        rate = Rate(bytes_per_s=spec.bytes_per_s / share, origin=origin)
        link = draft.links[f"{node.id}-{numa.id}"]
        rates = LinkRates(theory=rate, absent="not measured; kvbench topo --measure reads it")
        draft.links[link.id] = replace(
            link,
            forward=replace(rates, typical=link.forward.typical),
            backward=replace(rates, typical=link.backward.typical),
        )
