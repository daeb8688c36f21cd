"""The loads that matter for a KV cache, as flows over a machine: what one GPU and what all together can get.

Each scenario is computed twice: with wire rates (`theory`) and with the best-founded rate of each link (`expected`:
measured, else typical, else the wire rate). Links inside a package have no published rate and never limit here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.core.ceilings import Flow, FlowShare, RateOf, expected, mixed_both_ways, share_flows, theory
from kvbench.core.graph import Graph, Hop, Link, Node

Basis = Literal["theory", "expected"]
BASES: tuple[tuple[Basis, RateOf], ...] = (("theory", theory), ("expected", expected))
_CLASS_ORDER = ("X", "PIX", "PXB", "PHB", "NODE", "SYS", "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """What one GPU gets in a scenario, and the link that stops it; None where no rate on its paths is known."""

    gpu: str
    bytes_per_s: float | None
    limited_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One scenario on one basis.

    `limits` are the links that stop the flows, the one that stops most bytes first. `unknown` are links on the paths
    without a rate, `at_most` limits of which only a bound is known (the wire rate, or one direction's rate while both
    are in use): the figures are then upper bounds. `reason` says why there is no total.
    """

    scenario: str
    title: str
    basis: Basis
    shares: tuple[GpuShare, ...]
    total_bytes_per_s: float | None
    limits: tuple[str, ...]
    unknown: tuple[str, ...]
    reason: str = ""
    at_most: tuple[str, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Whether the figures are upper bounds."""
        return bool(self.unknown or self.at_most)

    @property
    def slowest(self) -> GpuShare | None:
        known = [share for share in self.shares if share.bytes_per_s is not None]
        return min(known, key=lambda share: share.bytes_per_s or 0.0, default=None)


def load_ceilings(graph: Graph) -> tuple[Ceiling, ...]:
    """Every scenario that this machine has the parts for, on both bases."""
    found: list[Ceiling] = []
    for scenario, title, flows in _scenarios(graph):
        found += [_ceiling(graph, scenario, title, flows, basis, rate_of) for basis, rate_of in BASES]
    return tuple(found)


def near_drams(graph: Graph, device: str) -> tuple[Node, ...]:
    """The memory next to a device: of its NUMA node, of its group where it is close to several, or the only memory."""
    drams = graph.of_kind("dram")
    for above in graph.ancestors(device):
        if above.kind in {"numa", "group", "machine"}:
            below = tuple(dram for dram in drams if above in graph.ancestors(dram.id))
            if above.kind != "machine" or len(drams) == 1:
                return below
    return ()


def _scenarios(graph: Graph) -> Iterable[tuple[str, str, tuple[Flow, ...]]]:
    gpus = graph.of_kind("gpu")
    near = {gpu.id: found[0].id for gpu in gpus if (found := near_drams(graph, gpu.id))}
    loads = tuple(_flow(graph, near[gpu.id], gpu.id) for gpu in gpus if gpu.id in near)
    for flow in loads:
        yield f"one:{flow.target}", f"{_short(graph, flow.target)} alone, from its near DRAM", (flow,)
    if not loads:
        return
    every = {1: "the GPU", 2: "both GPUs"}.get(len(loads), f"all {len(loads)} GPUs")
    yield "all-near", f"{every}, {'each ' if len(loads) > 1 else ''}from its near DRAM", loads
    drams = sorted(set(near.values()))
    if len(drams) > 1 or len(graph.of_kind("dram")) > 1:
        for dram in drams:
            mine = tuple(flow for flow in loads if flow.source == dram)
            count = f"the {len(mine)} GPUs" if len(mine) > 1 else "the GPU"
            yield f"socket:{dram}", f"{count} next to {_short(graph, dram)}, from it", mine
        for dram in drams:
            yield (
                f"from:{dram}",
                f"{every}, from {_short(graph, dram)} alone",
                tuple(_flow(graph, dram, gpu.id) for gpu in gpus),
            )
    back = tuple(_flow(graph, flow.target, flow.source) for flow in loads)
    yield "both-ways", f"{every}, loading and storing at once (near DRAM)", (*loads, *back)
    yield from _storage(graph, gpus, near)
    yield from _network(graph, gpus)


def _storage(graph: Graph, gpus: Sequence[Node], near: dict[str, str]) -> Iterable[tuple[str, str, tuple[Flow, ...]]]:
    disks = [disk for disk in graph.of_kind("disk") if disk.medium == "NVMe"]
    if not disks:
        return
    pairs = [(disk.id, gpu.id) for disk in disks for gpu in gpus]
    count = f"{len(disks)} NVMe"
    staged = []
    for disk, gpu in pairs:
        memory = near_drams(graph, disk)
        middle = memory[0].id if memory else near.get(gpu)
        if middle is not None:
            hops = (*graph.path(disk, middle), *graph.path(middle, gpu))
            staged.append(Flow(source=disk, target=gpu, hops=hops))
    if len(staged) == len(pairs):
        yield "disks-staged", f"every GPU from {count}, staged in DRAM", tuple(staged)
    yield (
        "disks-direct",
        f"every GPU from {count}, directly (GPUDirect Storage)",
        tuple(_flow(graph, disk, gpu) for disk, gpu in pairs),
    )


def _network(graph: Graph, gpus: Sequence[Node]) -> Iterable[tuple[str, str, tuple[Flow, ...]]]:
    nics = [nic for nic in graph.of_kind("nic") if nic.line_rate is not None]
    if not nics:
        return
    flows = []
    for gpu in gpus:
        for nic in nearest(graph, gpu.id, nics):
            port = graph.across(nic.id, "network")[0]
            flows.append(
                Flow(
                    source=nic.id,
                    target=gpu.id,
                    hops=(Hop(link=port.id, direction="backward"), *graph.path(nic.id, gpu.id)),
                )
            )
    yield "nics", "every GPU from its nearest NICs (GPUDirect RDMA)", tuple(flows)


def nearest(graph: Graph, device: str, others: Sequence[Node]) -> tuple[Node, ...]:
    """Those of `others` that are closest to the device, by path class."""
    if not others:
        return ()
    distance = {other.id: _CLASS_ORDER.index(graph.path_class(device, other.id)) for other in others}
    best = min(distance.values())
    return tuple(other for other in others if distance[other.id] == best)


def _flow(graph: Graph, source: str, target: str) -> Flow:
    return Flow(source=source, target=target, hops=graph.path(source, target))


def _short(graph: Graph, node_id: str) -> str:
    node = graph.nodes[node_id]
    return node_id.upper() if node.kind == "gpu" else node.name


def _ceiling(graph: Graph, scenario: str, title: str, flows: Sequence[Flow], basis: Basis, rate_of: RateOf) -> Ceiling:
    shares = share_flows(graph, flows, rate_of=rate_of)
    gpus = {node.id for node in graph.of_kind("gpu")}
    names = dict.fromkeys(flow.target if flow.target in gpus else flow.source for flow in flows)
    per_gpu = tuple(_summed(gpu, [share for share in shares if gpu in (share.source, share.target)]) for gpu in names)
    complete = bool(per_gpu) and all(share.bytes_per_s is not None for share in per_gpu)
    both = _both_ways(flows) if rate_of is expected else frozenset()
    unclear = [link.id for link in _links(graph, flows, lambda link: link.id in both and mixed_both_ways(link))]
    without = [link.id for link in _links(graph, flows, lambda link: _is_open(link, rate_of))]
    unknown = tuple(dict.fromkeys((*without, *unclear)))
    return Ceiling(
        scenario=scenario,
        title=title,
        basis=basis,
        shares=per_gpu,
        total_bytes_per_s=sum(share.bytes_per_s or 0.0 for share in per_gpu) if complete else None,
        limits=_by_bytes(shares),
        unknown=unknown,
        reason="" if complete else _no_total(graph, unknown, unclear),
        at_most=tuple(dict.fromkeys(share.limited_by for share in shares if share.at_most and share.limited_by)),
    )


def _both_ways(flows: Sequence[Flow]) -> frozenset[str]:
    ways: dict[str, set[str]] = {}
    for flow in flows:
        for hop in flow.hops:
            ways.setdefault(hop.link, set()).add(hop.direction)
    return frozenset(link for link, used in ways.items() if len(used) > 1)


def _summed(gpu: str, shares: Sequence[FlowShare]) -> GpuShare:
    known = [share for share in shares if share.bytes_per_s is not None]
    if len(known) < len(shares) or not known:
        return GpuShare(gpu=gpu, bytes_per_s=None, limited_by=None)
    by_limit = _by_bytes(known)
    return GpuShare(
        gpu=gpu,
        bytes_per_s=sum(share.bytes_per_s or 0.0 for share in known),
        limited_by=by_limit[0] if by_limit else None,
    )


def _by_bytes(shares: Iterable[FlowShare]) -> tuple[str, ...]:
    stopped: dict[str, float] = {}
    for share in shares:
        if share.limited_by is not None:
            stopped[share.limited_by] = stopped.get(share.limited_by, 0.0) + (share.bytes_per_s or 0.0)
    return tuple(sorted(stopped, key=lambda name: -stopped[name]))


def _links(graph: Graph, flows: Sequence[Flow], wanted: Callable[[Link], bool]) -> Iterable[Link]:
    for flow in flows:
        for hop in flow.hops:
            if wanted(graph.links[hop.link]):
                yield graph.links[hop.link]


def _is_open(link: Link, rate_of: RateOf) -> bool:
    return link.kind != "internal" and rate_of(link.forward) is None and rate_of(link.backward) is None


def _no_total(graph: Graph, unknown: Sequence[str], unclear: Sequence[str]) -> str:
    if unclear:
        return f"no figure for both directions at once on {graph.links[unclear[0]].label}"
    named = ", ".join(graph.links[link].label for link in unknown[:3]) + (" …" if len(unknown) > 3 else "")
    return f"no rate is known for {named}" if unknown else "no flow crosses a link with a known rate"
