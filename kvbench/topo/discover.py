"""One call from inputs to the result: read, join, put measurements on links, compute ceilings, findings and limits."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.errors import UsageError
from kvbench.core.findings import findings
from kvbench.core.graph import Graph, Link, Machine, Node, NodeKind
from kvbench.core.load_ceilings import load_ceilings
from kvbench.core.pair_matrix import pair
from kvbench.core.provenance import Origin, Warning_
from kvbench.results.topology import (
    Absent,
    GroupMeasurement,
    InputRead,
    LinkMeasurement,
    Matrix,
    MatrixCell,
    TopologyResult,
)
from kvbench.topo.anchors import named_gpu, parse_dram
from kvbench.topo.build import build_machine
from kvbench.topo.draft import Assumed
from kvbench.topo.facts import Facts
from kvbench.topo.limits import machine_limits
from kvbench.topo.nvml import read_nvml
from kvbench.topo.sysfs import read_root

if TYPE_CHECKING:
    from kvbench.topo.link_probe import LinkProbe

_SPREAD = 0.1  # of the median, as everywhere in kvbench

Report = Callable[[str, float | None], None]
Imported = tuple[tuple[LinkMeasurement, ...], tuple[GroupMeasurement, ...], tuple[Absent, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where to read: captured files, a captured /sys tree, or this machine where both are empty; and measurements."""

    files: tuple[Path, ...] = ()
    root: Path | None = None
    imports: tuple[Path, ...] = ()

    @property
    def live(self) -> bool:
        return not self.files and self.root is None


def discover(
    sources: Sources = Sources(),
    *,
    gpu: str | None = None,
    dram: str | None = None,
    probe: "LinkProbe | None" = None,
    driver: Callable[[], Facts] = read_nvml,
    report: Report = lambda _step, _done_ratio: None,
) -> TopologyResult:
    """The topology of what `sources` names; `gpu` and `dram` fill in what captured texts leave out."""
    if probe is not None and not sources.live:
        raise UsageError(
            "--measure reads this machine; leave out --from and --root, or import the numbers with --import"
        )
    report("reading", None)
    inputs = _read(sources, driver)
    assumed = Assumed(gpu=named_gpu(gpu) if gpu else None, dram=parse_dram(dram) if dram else None)
    machine, notes = build_machine(inputs, assumed)
    found, groups, absent = _imported(sources.imports, Graph(machine))
    if probe is not None:
        measured = probe.measure(Graph(machine), report)
        found, absent = (*found, *measured.found), (*absent, *measured.absent)
    machine = with_measurements(machine, found)
    return _result(machine, inputs, notes, found, groups, absent, sources)


def _imported(paths: Sequence[Path], graph: Graph) -> Imported:
    if not paths:
        return (), (), ()
    from kvbench.topo.measured import read_measurements

    return read_measurements(paths, graph)


def _read(sources: Sources, driver: Callable[[], Facts]) -> tuple[Facts, ...]:
    if sources.live:
        return (read_root(Path("/")), driver())
    from kvbench.topo.read import read_inputs

    captured = (read_root(sources.root),) if sources.root is not None else ()
    return (*captured, *read_inputs(sources.files))


def with_measurements(machine: Machine, found: Sequence[LinkMeasurement]) -> Machine:
    """The machine with each measured rate on its link and direction; of several the highest, as capacity."""
    best: dict[tuple[str, str], LinkMeasurement] = {}
    for measurement in found:
        key = (measurement.link, measurement.direction)
        if key not in best or measurement.rate.bytes_per_s > best[key].rate.bytes_per_s:
            best[key] = measurement
    return replace(machine, links=tuple(_measured(link, best) for link in machine.links)) if best else machine


def _measured(link: Link, best: dict[tuple[str, str], LinkMeasurement]) -> Link:
    forward, backward = best.get((link.id, "forward")), best.get((link.id, "backward"))
    if forward is not None:
        link = replace(link, forward=replace(link.forward, measured=forward.rate, absent=""))
    if backward is not None:
        link = replace(link, backward=replace(link.backward, measured=backward.rate, absent=""))
    return link


def _result(
    machine: Machine,
    inputs: Sequence[Facts],
    notes: Sequence[str],
    found: Sequence[LinkMeasurement],
    groups: Sequence[GroupMeasurement],
    absent: Sequence[Absent],
    sources: Sources,
) -> TopologyResult:
    graph = Graph(machine)
    ceilings = load_ceilings(graph)
    return TopologyResult(
        inputs=tuple(_input(facts) for facts in inputs),
        machine=machine,
        matrix=_matrix(graph),
        ceilings=ceilings,
        findings=findings(graph),
        measurements=tuple(found),
        groups=tuple(groups),
        absent=(*_missing(graph, inputs, sources), *(Absent(what="join", reason=note) for note in notes), *absent),
        limits=machine_limits(graph, ceilings, groups),
    )


def _input(facts: Facts) -> InputRead:
    return InputRead(format=facts.format, source=facts.source, truncated=facts.truncated, notes=facts.notes)


def _matrix(graph: Graph) -> Matrix:
    nodes = tuple(node.id for kind in ("gpu", "nic") for node in _numbered(graph, kind))
    pairs = {(a, b): pair(graph, a, b) for a in nodes for b in nodes}
    return Matrix(
        nodes=nodes,
        rows=tuple(
            tuple(
                MatrixCell(
                    cell=pairs[a, b].cell,
                    bytes_per_s=rate.bytes_per_s if (rate := pairs[a, b].rate) else None,
                    at_most=pairs[a, b].at_most,
                )
                for b in nodes
            )
            for a in nodes
        ),
    )


def _numbered(graph: Graph, kind: NodeKind) -> list[Node]:
    """GPUs or NICs by their number, whatever place in the tree they have."""
    return sorted(graph.of_kind(kind), key=lambda node: (int(re.sub(r"\D", "", node.id) or 0), node.id))


def doubts(result: TopologyResult) -> tuple[Warning_, ...]:
    """What a reader must know before believing the figures."""
    found = []
    assumed = [link for link in result.machine.links if link.kind == "pcie" and _is_assumed(link)]
    if assumed:
        found.append(
            Warning_(
                code="pcie-assumed",
                message=f"{len(assumed)} PCIe links are taken as x16 of the GPU's generation: no input tells their "
                "speed",
                remedy="add lspci -vv, nvidia-smi --query-gpu or the archive of probes/capture/topology.sh with --from",
            )
        )
    if any(node.name.endswith("(inferred)") for node in result.machine.nodes):
        found.append(
            Warning_(
                code="tree-inferred",
                message="switches and host bridges are inferred from printed distances; a matrix holds no addresses",
                remedy="add lspci -t and lspci -vv, or hwloc XML, to see the real ones",
            )
        )
    found += [
        Warning_(
            code="spread",
            message=f"{measured.what}: the times differ by {measured.spread_ratio:.0%} of their median",
            remedy="stop what else runs on this machine and measure again",
        )
        for measured in result.measurements
        if measured.direction == "forward" and (measured.spread_ratio or 0.0) > _SPREAD
    ]
    found += [
        Warning_(
            code="input-truncated",
            message=f"{cut.source} ends early: {'; '.join(cut.notes) or 'its end is missing'}",
            remedy="give the whole output; what it held is kept",
        )
        for cut in result.inputs
        if cut.truncated
    ]
    return tuple(found)


def _is_assumed(link: Link) -> bool:
    return link.pcie is None and link.forward.theory is not None and link.forward.theory.origin.provenance == "modelled"


def _missing(graph: Graph, inputs: Sequence[Facts], sources: Sources) -> Iterable[Absent]:
    if not graph.of_kind("gpu"):
        told = next((facts.gpu_absent for facts in inputs if facts.gpu_absent), None)
        where = "on this host" if sources.live else "in the input"
        reason = f"no GPU {where}" + (f" ({told}; no PCI device of a GPU class)" if told else "")
        yield Absent(what="GPUs", reason=reason)
    for facts in inputs:
        if facts.truncated:
            yield Absent(what=f"part of {facts.source}", reason="; ".join(facts.notes) or "the file ends early")
    if not any(node.memory_bytes for node in graph.of_kind("numa")):
        yield Absent(what="DRAM sizes", reason="not in the input; /sys, hwloc XML and --dram tell")
    if not graph.of_kind("nic"):
        yield Absent(what="NICs", reason="none in the input" if not sources.live else "the kernel lists none")
    if not graph.of_kind("disk"):
        yield Absent(what="disks", reason="none in the input" if not sources.live else "the kernel lists none")


_READ = Origin(provenance="measured", source="read from the input: what the kernel or the tool reported")
_TIMED = Origin(provenance="measured", source="timed on this host by kvbench topo --measure")
_NARROWEST = Origin(
    provenance="modelled",
    source="the narrowest link of the pair, expected rate",
    formula="min over the links on the path",
)
_FILLED = Origin(
    provenance="modelled",
    source="the rates of the links, see each link's origin",
    formula="max-min fair share: progressive filling",
)
PROVENANCE: Mapping[str, Origin] = {
    "nodes.numa": _READ,
    "nodes.memory_bytes": _READ,
    "nodes.gpu.memory_bytes": _READ,
    "nodes.gpu.copy_engines": _READ,
    "nodes.gpu.numa_id": _READ,
    "nodes.gpu.nvlinks": Origin(provenance="spec", source="the product's row in kvbench/topo/anchors.yaml"),
    "links.count": _READ,
    "matrix.rows.bytes_per_s": _NARROWEST,
    "samples.bytes": _TIMED,
    "samples.seconds": _TIMED,
    "shares.bytes_per_s": _FILLED,
    "ceilings.total_bytes_per_s": _FILLED,
}
"""Where the numbers of a topology come from that do not carry an origin of their own."""
