"""Places devices in a tree inferred from a matrix, or finds the devices of a matrix in the PCI tree."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from kvbench.core.graph import (
    LinkRates,
    Node,
    NodeKind,
    PeerAccess,
    ReportedPair,
)
from kvbench.core.provenance import Origin
from kvbench.topo.anchors import (
    LANE_GT,
    gpu_anchor,
    pcie_rates,
)
from kvbench.topo.devices import gpus_by_label
from kvbench.topo.draft import INTERNAL, Draft
from kvbench.topo.facts import Affinity, MatrixFact, PciFact


def add_inferred_tree(draft: Draft, matrix: MatrixFact, gpus: Sequence[PciFact]) -> None:
    """Adds the smallest tree that has the printed distances; `gpus` are addresses that another input gave."""
    from kvbench.topo.cluster import clusters

    by_label = _label_facts(draft, matrix, gpus)
    known_numa = {row.label: row for row in matrix.affinity}
    names = dict(matrix.nic_names)
    for number, cluster in enumerate(clusters(matrix)):
        parent = "machine"
        if cluster.numa is not None:
            parent = draft.numa_node(cluster.numa, "machine", inferred=cluster.numa_inferred)
            _numa_cpus(draft, parent, cluster.trees, known_numa)
        bridge = draft.add(
            Node(
                id=f"bridge{number}",
                kind="host_bridge",
                name=f"host bridge {number} (inferred)",
                parent=parent,
                numa=cluster.numa,
                inferred=True,
            )
        )
        draft.tree_link(bridge, "internal", INTERNAL, INTERNAL)
        for at, tree in enumerate(cluster.trees):
            _inferred_switches(draft, bridge, f"{number}.{at}", tree, by_label, names)
    if any("NV" in (cell or "") for row in matrix.cells for cell in row):
        draft.notes.append(
            "NV# cells hide the PCIe path between GPUs: GPUs that share an uplink show only through a common NIC; "
            "add lspci -t and lspci -vv"
        )


def _numa_cpus(
    draft: Draft, node_id: str, trees: Sequence[Sequence[Sequence[str]]], known: Mapping[str, Affinity]
) -> None:
    node = draft.nodes[node_id]
    for tree in trees:
        for group in tree:
            for label in group:
                cpus = known[label].cpus if label in known else None
                if cpus and node.cpus is None:
                    draft.nodes[node_id] = node = replace(node, cpus=cpus)


def _label_facts(draft: Draft, matrix: MatrixFact, gpus: Sequence[PciFact]) -> dict[str, PciFact]:
    """What is known of each label: an address where another input has one, NUMA nodes, the product."""
    names = {index: name for facts in draft.inputs for index, name in facts.gpu_names}
    by_address = gpus_by_label(matrix, gpus, draft.notes)
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


def _inferred_switches(
    draft: Draft,
    bridge: str,
    number: str,
    tree: Sequence[Sequence[str]],
    facts: dict[str, PciFact],
    names: dict[str, str],
) -> None:
    """One switch per group of several devices; a switch above them where several groups are PXB apart."""
    top = bridge
    if len(tree) > 1:
        top = _inferred_switch(draft, f"sw{number}", bridge, tree[0], facts)
    for at, group in enumerate(tree):
        parent = top
        if len(group) > 1 or len(tree) > 1:
            only_nics = not any(facts[label].is_gpu for label in group) and len(group) > 1 and len(tree) == 1
            name = f"{'card' if only_nics else 'sw'}{number}.{at}"
            parent = _inferred_switch(draft, name, top, group, facts, card=only_nics)
        for label in group:
            kind: NodeKind = "gpu" if facts[label].is_gpu else "nic"
            node_id = label.lower() if label.startswith(("GPU", "NIC")) else f"nic-{label}"
            shown = names.get(label, label)
            name = facts[label].name if kind == "gpu" else shown
            draft.node_of[label] = node_id
            if facts[label].bus_id != label:
                draft.node_of[facts[label].bus_id] = node_id
            title = f"{label} {name}".strip() if kind == "gpu" else shown
            draft.add(draft.device(node_id, kind, title, facts[label], parent, ()))
            draft.device_link(node_id, kind, facts[label], None)


def _inferred_switch(
    draft: Draft, node_id: str, parent: str, labels: Sequence[str], facts: dict[str, PciFact], *, card: bool = False
) -> str:
    kind: NodeKind = "root_port" if card else "switch"
    name = f"{'card' if card else 'switch'} {node_id.removeprefix('card').removeprefix('sw')} (inferred)"
    draft.add(Node(id=node_id, kind=kind, name=name, parent=parent, inferred=True))
    if card:
        draft.tree_link(node_id, "internal", INTERNAL, INTERNAL)
        return node_id
    product = draft.assumed.gpu or next(
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
    draft.tree_link(node_id, "pcie", up, down, shared_group=f"uplink of {name}")
    return node_id


def join_matrix(draft: Draft, matrix: MatrixFact) -> None:
    """Finds the PCI device of each label: GPUs in the order of their tool, NICs by name."""
    gpus = [fact for fact in draft.pci.values() if draft.nodes.get(draft.node_of.get(fact.bus_id, ""), None)]
    gpus = [fact for fact in gpus if draft.nodes[draft.node_of[fact.bus_id]].kind == "gpu"]
    for label, fact in gpus_by_label(matrix, gpus, draft.notes).items():
        node_id = draft.node_of[label] = draft.node_of[fact.bus_id]
        row = next((row for row in matrix.affinity if row.label == label), None)
        if row is not None and row.cpus is not None:
            draft.nodes[node_id] = replace(draft.nodes[node_id], cpus=row.cpus)
    names = dict(matrix.nic_names)
    by_name = {name: fact.bus_id for fact in draft.pci.values() for name in fact.os_names}
    for label in matrix.nics:
        address = by_name.get(names.get(label, label))
        if address in draft.node_of:
            draft.node_of[label] = draft.node_of[address]
        else:
            draft.notes.append(f"{label} ({names.get(label, 'no legend')}) of the matrix is on no PCI device read")


def reported_pairs(draft: Draft, matrices: Sequence[MatrixFact]) -> Iterable[ReportedPair]:
    """The printed cells, by node; of several matrices the first that has the pair."""
    seen: set[frozenset[str]] = set()
    for matrix in matrices:
        for a, b in combinations(matrix.labels, 2):
            cell = matrix.cell(a, b)
            if cell is not None and a in draft.node_of and b in draft.node_of:
                pair = frozenset((draft.node_of[a], draft.node_of[b]))
                if pair in seen:
                    continue
                seen.add(pair)
                yield ReportedPair(a=draft.node_of[a], b=draft.node_of[b], cell=cell)


def peer_access(draft: Draft) -> Iterable[PeerAccess]:
    """The printed peer statuses, by node."""
    for facts in draft.inputs:
        matrix = facts.peers
        if matrix is None:
            continue
        known = {label: draft.node_of.get(label) or _gpu_at(draft, label) for label in matrix.labels}
        for a, b in combinations(matrix.labels, 2):
            status, node_a, node_b = matrix.cell(a, b), known[a], known[b]
            if status is not None and node_a is not None and node_b is not None:
                yield PeerAccess(a=node_a, b=node_b, status=status)


def add_peers_only(draft: Draft) -> None:
    """GPUs that only a peer-access matrix names: they are there, and nothing is known of their place."""
    labels = [label for facts in draft.inputs if facts.peers is not None for label in facts.peers.labels]
    if not labels or any(node.kind == "gpu" for node in draft.nodes.values()):
        return
    draft.notes.append("peer access does not tell where the GPUs are: add nvidia-smi topo -m")
    for label in labels:
        fact = PciFact(bus_id=label, is_gpu=True)
        draft.node_of[label] = draft.add(draft.device(label.lower(), "gpu", label, fact, "machine", ()))
        draft.device_link(label.lower(), "gpu", fact, None)


def _gpu_at(draft: Draft, label: str) -> str | None:
    node_id = label.lower()
    return node_id if node_id in draft.nodes else None
