"""The class and the bandwidth of every pair of devices, as `nvidia-smi topo -m` shows them, with rates beside."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.core.graph import Graph, Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair's class, and the rate of its narrowest link in one direction; None where no link has one.

    `at_most`: some link on the way has no known rate, so the pair may be slower.
    """

    cell: str
    rate: Rate | None
    at_most: bool = False


def pair(graph: Graph, a: str, b: str) -> Pair:
    """NVLink or xGMI where the pair has one, else the tree between them."""
    cell = graph.pair_cell(a, b)
    if a == b:
        return Pair(cell="X", rate=None)
    if cell == "?":  # what lies between the two is not known, so neither is what it carries
        return Pair(cell=cell, rate=None)
    if cell.startswith(("NV", "XGMI")):
        rates = list(_peer_rates(graph, a, b))
    else:
        hops = [hop for hop in graph.path(a, b) if graph.links[hop.link].kind != "internal"]
        rates = [graph.links[hop.link].rates(hop.direction).expected for hop in hops]
    known = [rate for rate in rates if rate is not None]
    least = min(known, key=lambda rate: rate.bytes_per_s, default=None)
    return Pair(cell=cell, rate=least, at_most=least is not None and len(known) < len(rates))


def _peer_rates(graph: Graph, a: str, b: str) -> Iterator[Rate | None]:
    direct = graph.between(a, b, "nvlink", "xgmi")
    if direct:
        for link in direct:
            yield link.rates("forward" if link.a == a else "backward").expected
        return
    for end, leaving in ((a, True), (b, False)):
        into = [link for link in graph.across(end, "nvlink") if "nvswitch" in _ends(graph, link.a, link.b)]
        rates = [link.rates("forward" if (link.a == end) == leaving else "backward").expected for link in into]
        known = [rate for rate in rates if rate is not None]
        if known:
            yield Rate(bytes_per_s=sum(rate.bytes_per_s for rate in known), origin=known[0].origin)


def _ends(graph: Graph, *ids: str) -> set[str]:
    return {graph.nodes[node].kind for node in ids}
