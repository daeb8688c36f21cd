"""The ceilings that `load-vs-recompute --topo` takes: one GPU's link, its uplink, the node, the sockets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvbench.core.ceilings import expected
from kvbench.core.findings import shared_uplink
from kvbench.core.graph import Graph, Link, LinkRates, Rate
from kvbench.core.load_ceilings import Ceiling
from kvbench.core.provenance import Origin, Provenance
from kvbench.results.host_paths import Limit, LimitName
from kvbench.results.topology import GroupMeasurement

_ORDER: tuple[Provenance, ...] = ("measured", "spec", "modelled", "synthetic")


def machine_limits(
    graph: Graph, ceilings: Sequence[Ceiling], groups: Sequence[GroupMeasurement] = ()
) -> tuple[Limit, ...]:
    """Limits in the load direction on the best-founded rates; what is not known gets no limit.

    A measured all-gather replaces the sum of NVLinks as the rate of a collective.
    """
    found = list(_limits(graph, {found.scenario: found for found in ceilings if found.basis == "expected"}))
    gathers = [group for group in groups if "all_gather_perf" in group.what]
    if gathers:
        best = max(gathers, key=lambda group: group.bytes_per_s)
        found = [limit for limit in found if limit.name != "collective"]
        found.append(Limit(name="collective", value=best.bytes_per_s, origin=best.origin))
    return tuple(found)


def _limits(graph: Graph, found: dict[str, Ceiling]) -> Iterator[Limit]:
    singles = [ceiling for name, ceiling in found.items() if name.startswith("one:")]
    alone = [ceiling for ceiling in singles if ceiling.total_bytes_per_s is not None]
    if singles and len(alone) == len(singles):
        slowest = min(alone, key=lambda ceiling: ceiling.total_bytes_per_s or 0.0)
        yield _from_ceiling(graph, "pcie", slowest, "single-GPU ceiling, the slowest GPU alone")
    yield from _uplink(graph)
    every = found.get("all-near")
    if every is not None and every.total_bytes_per_s is not None:
        yield _from_ceiling(graph, "host_total", every, "node ceiling: all GPUs at once, each from its near DRAM")
    elif (total := _dram_total(graph)) is not None:
        yield total
    yield from _sockets(graph)
    storage = found.get("disks-staged") or found.get("disks-direct")
    if storage is not None and storage.total_bytes_per_s is not None:
        yield _from_ceiling(graph, "storage_total", storage, storage.title)
    elif (disks := _disks_total(graph)) is not None:
        yield disks
    collective = _collective(graph)
    if collective is not None:
        yield collective


def _from_ceiling(graph: Graph, name: LimitName, ceiling: Ceiling, what: str) -> Limit:
    by = [graph.links[link] for link in ceiling.limits]
    labels = ", ".join(link.label for link in by[:2]) + (" …" if len(by) > 2 else "")
    bound = "; an upper bound, some links have no rate" if ceiling.unknown else ""
    bound = bound or ("; an upper bound, only their wire rate is known" if ceiling.at_most else "")
    return Limit(
        name=name,
        value=ceiling.total_bytes_per_s or 0.0,
        origin=Origin(
            provenance=_weakest(by),
            source=f"kvbench topo: {what}; limited by {labels}{bound}",
            formula="progressive filling",
        ),
    )


def _weakest(links: Iterable[Link]) -> Provenance:
    found = [_provenance(rates) for link in links for rates in (link.forward, link.backward) if rates.expected]
    return max(found, key=_ORDER.index, default="modelled")


def _provenance(rates: LinkRates) -> Provenance:
    """Of the expected rate. A wire rate of a link state that was read is a data sheet's: no traffic was measured."""
    rate = rates.expected
    if rate is None:
        return "modelled"
    wire = rates.measured is None and rates.typical is None
    return "spec" if wire and rate.origin.provenance == "measured" else rate.origin.provenance


def _uplink(graph: Graph) -> Iterator[Limit]:
    """The switch uplink that carries most GPUs, where any carries more than one."""
    per_uplink = Counter(uplink for gpu in graph.of_kind("gpu") if (uplink := shared_uplink(graph, gpu.id)) is not None)
    if not per_uplink:
        return
    name, ranks = per_uplink.most_common(1)[0]
    link = graph.uplink(name)
    rate = expected(link.backward) if link is not None else None
    if link is not None and rate is not None and ranks > 1:
        named = replace(_named(rate, f"kvbench topo: {link.label}"), provenance=_provenance(link.backward))
        yield Limit(name="uplink", value=rate.bytes_per_s, origin=named)
        origin = Origin(
            provenance="modelled" if graph.nodes[name].inferred else "measured",
            source=f"kvbench topo: GPUs below {graph.nodes[name].name}",
        )
        yield Limit(name="ranks_per_uplink", value=float(ranks), origin=origin)


def _named(rate: Rate, what: str) -> Origin:
    return Origin(
        provenance=rate.origin.provenance, source=f"{what} ({rate.origin.source})", formula=rate.origin.formula
    )


def _summed(rates: Sequence[Rate], what: str) -> Origin:
    """The origin of a sum: that of the part which is founded least."""
    return _named(max(rates, key=lambda rate: _ORDER.index(rate.origin.provenance)), what)


def _dram_rates(graph: Graph) -> list[Rate]:
    rates = [graph.uplink(dram.id) for dram in graph.of_kind("dram")]
    known = [expected(link.forward) for link in rates if link is not None]
    return [rate for rate in known if rate is not None] if all(known) else []


def _dram_total(graph: Graph) -> Limit | None:
    rates = _dram_rates(graph)
    if not rates:
        return None
    return Limit(
        name="host_total",
        value=sum(rate.bytes_per_s for rate in rates),
        origin=_summed(rates, f"kvbench topo: {len(rates)} DRAM node{'s' if len(rates) > 1 else ''}"),
    )


def _sockets(graph: Graph) -> Iterator[Limit]:
    """One socket's memory, the link to the others, and their number.

    Where no input names sockets, NUMA nodes stand in for them, `modelled`. Their number does only while there are no
    more than two: others may be parts of one socket, and the input names only those with a device.
    """
    sockets = graph.of_kind("socket")
    homes = sockets or graph.homes()
    inferred = " (inferred)" if any(home.inferred for home in homes) else ""
    what = "sockets" if sockets else f"NUMA homes of devices{inferred}, taken as sockets: no input names sockets"
    rates = _dram_rates(graph)
    if rates and homes:
        per_home = sum(rate.bytes_per_s for rate in rates) / len(homes)
        origin = _summed(rates, f"kvbench topo: DRAM of one of {len(homes)} {what}")
        yield Limit(name="home_socket", value=per_home, origin=origin if sockets else _modelled(origin))
    links = [link for link in graph.machine.links if link.kind == "socket"]
    between = [rate for link in links if (rate := expected(link.forward)) is not None]
    if between:
        slowest = min(between, key=lambda rate: rate.bytes_per_s)
        origin = _named(slowest, f"kvbench topo: link between {what}")
        yield Limit(name="inter_socket", value=slowest.bytes_per_s, origin=origin if sockets else _modelled(origin))
    if sockets or {home.numa for home in homes} in ({0}, {0, 1}):
        yield Limit(
            name="sockets",
            value=float(len(homes)),
            origin=Origin(
                provenance="measured" if sockets else "modelled", source=f"kvbench topo: {what} in the input"
            ),
        )


def _modelled(origin: Origin) -> Origin:
    return replace(origin, provenance="modelled")


def _disks_total(graph: Graph) -> Limit | None:
    links = [graph.uplink(disk.id) for disk in graph.of_kind("disk")]
    rates = [rate for link in links if link is not None and (rate := expected(link.forward)) is not None]
    if not rates or len(rates) < len(links):
        return None
    return Limit(
        name="storage_total",
        value=sum(rate.bytes_per_s for rate in rates),
        origin=_summed(rates, f"kvbench topo: {len(rates)} disk{'s' if len(rates) > 1 else ''}"),
    )


def _collective(graph: Graph) -> Limit | None:
    """The NVLink or xGMI rate of the GPU that has least of it, over all its links in one direction."""
    per_gpu: list[Rate] = []
    for gpu in graph.of_kind("gpu"):
        links = [link for link in graph.across(gpu.id, "nvlink", "xgmi") if _to_peer(graph, link, gpu.id)]
        rates = [expected(link.rates("forward" if link.a == gpu.id else "backward")) for link in links]
        known = [rate for rate in rates if rate is not None]
        if not known or len(known) < len(rates):
            return None
        worst = max(known, key=lambda rate: _ORDER.index(rate.origin.provenance))
        per_gpu.append(Rate(bytes_per_s=sum(rate.bytes_per_s for rate in known), origin=worst.origin))
    if len(per_gpu) < 2:
        return None
    least = min(per_gpu, key=lambda rate: rate.bytes_per_s)
    return Limit(
        name="collective",
        value=least.bytes_per_s,
        origin=_named(least, "kvbench topo: all GPU-to-GPU links of one GPU"),
    )


def _to_peer(graph: Graph, link: Link, gpu: str) -> bool:
    return graph.nodes[link.b if link.a == gpu else link.a].kind in {"gpu", "nvswitch"}
