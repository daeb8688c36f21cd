"""Infers a tree from a printed matrix, which holds distances and no addresses.

Devices that are PIX apart share a switch or a card, PXB a tree of switches, PHB a host bridge, NODE a NUMA node. Nested
groups of these make the smallest tree in which the printed distances come out again. A pair with NV# or XGMI hides its
PCIe distance, so it joins nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.topo.facts import MatrixFact

_LEVELS = ("PIX", "PXB", "PHB", "NODE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One host bridge of the inferred tree: groups of groups of labels, the outer sharing a switch tree, the inner a
    switch or card.
    """

    trees: tuple[tuple[tuple[str, ...], ...], ...]
    numa: int | None
    numa_inferred: bool


def clusters(matrix: MatrixFact) -> tuple[Cluster, ...]:
    """The host bridges in the order of their first device."""
    members = {level: _groups(matrix, _LEVELS[: at + 1]) for at, level in enumerate(_LEVELS)}
    known = {row.label: row.numa_node for row in matrix.affinity}
    if not any(number is not None for number in known.values()):
        members["NODE"] = _joined_by_cpus(matrix, members["NODE"])
    node_of = {label: group for group in members["NODE"] for label in group}
    numbers = _numbers(members["NODE"], known)
    found = []
    for bridge in members["PHB"]:
        own = next((known[label] for label in bridge if known.get(label) is not None), None)
        number, inferred = (own, False) if own is not None else numbers[node_of[bridge[0]]]
        trees = tuple(
            tuple(inner for inner in members["PIX"] if inner[0] in tree) for tree in members["PXB"] if tree[0] in bridge
        )
        found.append(Cluster(trees=trees, numa=number, numa_inferred=inferred))
    return tuple(found)


def _joined_by_cpus(matrix: MatrixFact, groups: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Groups with identical CPU lists as one: they share a NUMA node unless a cell between them says SYS."""
    cpus = {row.label: row.cpus for row in matrix.affinity if row.cpus}
    joined: list[tuple[str, ...]] = []
    for group in groups:
        own = {cpus[label] for label in group if label in cpus}
        for at, other in enumerate(joined):
            same = own and own == {cpus[label] for label in other if label in cpus}
            if same and not any(matrix.cell(a, b) == "SYS" for a in group for b in other):
                joined[at] = (*other, *group)
                break
        else:
            joined.append(group)
    return tuple(joined)


def _numbers(
    groups: Sequence[tuple[str, ...]], known: dict[str, int | None]
) -> dict[tuple[str, ...], tuple[int | None, bool]]:
    """The NUMA number of each group; where no row tells, the next free number, marked as inferred."""
    taken = {number for number in known.values() if number is not None}
    numbers: dict[tuple[str, ...], tuple[int | None, bool]] = {}
    free = 0
    for group in groups:
        own = next((known[label] for label in group if known.get(label) is not None), None)
        if own is not None:
            numbers[group] = (own, False)
            continue
        if taken:  # some rows tell, this group's do not: say that it is unknown
            numbers[group] = (None, True)
            continue
        numbers[group] = (free, True)
        free += 1
    return numbers


def _groups(matrix: MatrixFact, joined: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Labels joined by cells of these classes, each group in the order of the labels."""
    parent = list(range(len(matrix.labels)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    wanted = frozenset(joined)
    for row, cells in enumerate(matrix.cells):
        for column in range(row):
            if cells[column] in wanted:
                parent[max(root(row), root(column))] = min(root(row), root(column))
    groups: dict[int, list[str]] = {}
    for at, label in enumerate(matrix.labels):
        groups.setdefault(root(at), []).append(label)
    return tuple(tuple(group) for group in groups.values())
