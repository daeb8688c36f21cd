"""Joins the facts of all inputs on the PCI bus id into one machine: nodes, links, and what is known of each link."""

from collections.abc import Sequence

from kvbench.core.graph import (
    Machine,
    Node,
)
from kvbench.topo.devices import device_kind
from kvbench.topo.draft import NOTHING_ASSUMED, Assumed, Draft
from kvbench.topo.facts import Facts
from kvbench.topo.gpu_links import add_gpu_links
from kvbench.topo.matrix_tree import add_inferred_tree, add_peers_only, join_matrix, peer_access, reported_pairs
from kvbench.topo.memory import add_memory, add_sockets
from kvbench.topo.merge import check_matrices_agree, merged_disks, merged_pci, with_port_rates
from kvbench.topo.pci_tree import add_loose_disks, add_pci_tree


def build_machine(inputs: Sequence[Facts], assumed: Assumed = NOTHING_ASSUMED) -> tuple[Machine, tuple[str, ...]]:
    """The machine, and remarks about what was joined or left out."""
    draft = Draft(inputs, assumed)
    return _machine(draft), tuple(draft.notes)


def _machine(draft: Draft) -> Machine:
    draft.pci = with_port_rates(merged_pci(draft.inputs), draft.inputs)
    check_matrices_agree(draft.inputs)
    matrices = [facts.matrix for facts in draft.inputs if facts.matrix is not None]
    disks = merged_disks(draft.inputs)
    draft.add(Node(id="machine", kind="machine", name="machine", parent=None))
    add_memory(draft)
    gpus = [fact for fact in draft.pci.values() if device_kind(fact, disks) == "gpu"]
    if matrices and not any(fact.parent for fact in gpus):
        add_inferred_tree(draft, matrices[0], gpus)
    else:
        add_pci_tree(draft, disks)
        for matrix in matrices:
            join_matrix(draft, matrix)
    add_loose_disks(draft, disks)
    add_peers_only(draft)
    add_gpu_links(draft, matrices)
    add_sockets(draft)
    return Machine(
        nodes=tuple(draft.nodes.values()),
        links=tuple(draft.links.values()),
        peers=tuple(peer_access(draft)),
        reported=tuple(reported_pairs(draft, matrices)),
        iommu=next((facts.iommu for facts in draft.inputs if facts.iommu is not None), None),
        cpu_affinity_reported=any(matrix.has_cpu_column for matrix in matrices),
        cut=tuple(
            draft.node_of[row.label]
            for matrix in matrices[:1]
            for row in matrix.affinity
            if row.cut and row.label in draft.node_of
        ),
    )
