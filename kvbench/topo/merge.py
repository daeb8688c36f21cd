"""Merges what several inputs say about the same PCI function, NUMA node or disk; the earlier input wins."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import PcieState
from kvbench.topo.facts import DiskFact, Facts, MatrixFact, NumaFact, PciFact


def merged_pci(inputs: Sequence[Facts]) -> dict[str, PciFact]:
    """Every PCI function by bus id."""
    found: dict[str, PciFact] = {}
    for facts in inputs:
        for fact in facts.pci:
            old = found.get(fact.bus_id)
            found[fact.bus_id] = fact if old is None else _merge_pci(old, fact)
    return found


def with_port_rates(pci: dict[str, PciFact], inputs: Sequence[Facts]) -> dict[str, PciFact]:
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


def merged_numa_node(old: NumaFact | None, new: NumaFact) -> NumaFact:
    """What both say of one NUMA node."""
    if old is None:
        return new
    return replace(
        old,
        cpus=old.cpus or new.cpus,
        memory_bytes=old.memory_bytes if old.memory_bytes is not None else new.memory_bytes,
        package=old.package if old.package is not None else new.package,
        distances=old.distances or new.distances,
        firmware_read_bytes_per_s=old.firmware_read_bytes_per_s or new.firmware_read_bytes_per_s,
        firmware_write_bytes_per_s=old.firmware_write_bytes_per_s or new.firmware_write_bytes_per_s,
    )


def check_matrices_agree(inputs: Sequence[Facts]) -> None:
    """Refuses matrices that contradict each other: texts of two machines, or of one before and after a change."""
    told: dict[tuple[str, ...], tuple[str, str]] = {}
    for facts in inputs:
        for what, value in _told(facts.matrix) if facts.matrix is not None else ():
            first, source = told.setdefault(what, (value, facts.source))
            if first != value:
                raise KvbenchError(
                    f"{facts.source}: {' '.join(what)} is {value}, but {source} says {first}; give texts of one "
                    "machine, captured together"
                )


def _told(matrix: MatrixFact) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every printed cell and affinity with what it belongs to; NICs by name, because their numbers may differ."""
    names = dict(matrix.nic_names)
    for at, a in enumerate(matrix.labels):
        for b, cell in zip(matrix.labels[:at], matrix.cells[at][:at], strict=True):
            if cell is not None:
                low, high = sorted((names.get(a, a), names.get(b, b)))
                yield (low, "to", high), cell
    for row in matrix.affinity:
        for what, value in (("CPU affinity", row.cpus), ("NUMA affinity", row.numa)):
            if value is not None and not row.cut:
                yield ("the", what, "of", row.label), value


def merged_disks(inputs: Sequence[Facts]) -> dict[str, list[DiskFact]]:
    """Disks by bus id; those without one under the empty name."""
    seen: dict[str, DiskFact] = {}
    for facts in inputs:
        for disk in facts.disks:
            seen.setdefault(disk.name, disk)
    found: dict[str, list[DiskFact]] = {}
    for disk in seen.values():
        found.setdefault(disk.bus_id or "", []).append(disk)
    return found
