"""What simultaneous flows get from a graph of shared links: progressive filling, and the link that stops each flow.

All flows grow together until a link is full; the flows over it stop there, the rest go on growing. This is the max-min
fair share (Bertsekas and Gallager, Data Networks, 6.5.2). It ignores packet overheads beyond the rates given, queueing,
and unfair arbiters.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Direction, Graph, Hop, Link, LinkRates, Rate

_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes from `source` to `target`. A hop that occurs twice (staging in DRAM) costs twice the link's budget."""

    source: str
    target: str
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowShare:
    """What one flow gets, and the link that stopped it; None for both where no link on its path has a known rate.

    `at_most`: the rate of that link is only a bound for this use.
    """

    source: str
    target: str
    bytes_per_s: float | None
    limited_by: str | None
    at_most: bool = False


def fair_shares(capacities: Mapping[str, float], uses: Sequence[Mapping[str, float]]) -> tuple[tuple[float, str], ...]:
    """Rate and limiting resource of each flow, given what one unit of each flow takes from each resource.

    Rate 0 and an empty name mean that the flow uses no resource with a capacity. Of resources that fill at the same
    moment (to one part in 10⁹) the first in the order of `capacities` is named.
    """
    if any(capacity <= 0 for capacity in capacities.values()):
        worst = min(capacities, key=lambda name: capacities[name])
        raise KvbenchError(f"link {worst!r} has capacity {capacities[worst]}; it must be above zero")
    known = [{name: share for name, share in use.items() if name in capacities and share > 0} for use in uses]
    rates: list[tuple[float, str]] = [(0.0, "")] * len(uses)
    left = dict(capacities)
    active = {index for index, use in enumerate(known) if use}
    level = 0.0
    while active:
        load = dict.fromkeys(left, 0.0)
        for index in active:
            for name, share in known[index].items():
                load[name] += share
        steps = {name: left[name] / total for name, total in load.items() if total > 0}
        step = min(steps.values())
        full = next(name for name, needed in steps.items() if needed <= step * (1 + _SAME))
        level += step
        for name, total in load.items():
            left[name] = max(left[name] - step * total, 0.0)
        stopped = {index for index in active if full in known[index]}
        for index in stopped:
            rates[index] = (level, full)
        active -= stopped
    return tuple(rates)


RateOf = Callable[[LinkRates], Rate | None]


def theory(rates: LinkRates) -> Rate | None:
    """The wire rate."""
    return rates.theory


def expected(rates: LinkRates) -> Rate | None:
    """Measured, else typical, else the wire rate."""
    return rates.expected


def share_flows(graph: Graph, flows: Sequence[Flow], *, rate_of: RateOf) -> tuple[FlowShare, ...]:
    """What each flow gets when all run at once, with the rates that `rate_of` picks.

    Where a GPU's own link and the uplink above it fill together, the less shared one is named.
    """
    used = _directions_in_use(flows)
    crossing = Counter(hop.link for flow in flows for hop in flow.hops)
    capacities: dict[str, float] = {}
    for link_id, directions in sorted(used.items(), key=lambda item: crossing[item[0]]):
        link = graph.links[link_id]
        for direction in sorted(directions):
            rate = _capacity(link, direction, len(directions) == 2, rate_of)
            if rate is not None:
                name = _resource(link, direction)  # one budget for both directions of a half-duplex link: the lower
                capacities[name] = min(rate, capacities.get(name, rate))
    uses = [_uses(graph, flow) for flow in flows]
    shares = fair_shares(capacities, uses)
    return tuple(
        FlowShare(
            source=flow.source,
            target=flow.target,
            bytes_per_s=rate or None,
            limited_by=name.partition("|")[0] or None,
            at_most=bool(name) and rate_of is expected and _is_bound(graph, name, used),
        )
        for flow, (rate, name) in zip(flows, shares, strict=True)
    )


def _directions_in_use(flows: Sequence[Flow]) -> dict[str, set[Direction]]:
    used: dict[str, set[Direction]] = {}
    for flow in flows:
        for hop in reversed(flow.hops):  # a load's last hop is the device's own link
            used.setdefault(hop.link, set()).add(hop.direction)
    return used


def _capacity(link: Link, direction: Direction, both: bool, rate_of: RateOf) -> float | None:
    rates = link.rates(direction)
    rate = rate_of(rates)
    if both and rate is not None and rate_of is expected and rates.while_both is not None and not rates.measured:
        rate = rates.while_both
    elif both and rate_of is expected and mixed_both_ways(link):
        return None
    return None if rate is None else rate.bytes_per_s


def mixed_both_ways(link: Link) -> bool:
    """Whether one direction of a full-duplex link has a typical or measured rate and the other only its wire rate.

    Without a figure for both at once their sum would be no figure of anything: it is not known.
    """
    known = [rates for rates in (link.forward, link.backward) if rates.expected is not None]
    mixed = len({_is_wire(rates) for rates in known}) > 1
    return mixed and not link.half_duplex and not all(_tells_both(rates) for rates in known)


def _tells_both(rates: LinkRates) -> bool:
    return rates.while_both is not None and rates.measured is None


def _is_wire(rates: LinkRates) -> bool:
    return rates.measured is None and rates.typical is None


def _is_bound(graph: Graph, resource: str, used: Mapping[str, set[Direction]]) -> bool:
    """Whether a link's figure is an upper bound: it is the wire rate, or one direction's while both are in use."""
    link_id, _, direction = resource.partition("|")
    link = graph.links[link_id]
    rates = [link.rates(way) for way in sorted(used[link_id]) if direction in ("", way)]
    if not link.half_duplex and len(used[link_id]) == 2:
        return not all(_tells_both(side) for side in rates)
    return any(_is_wire(side) for side in rates)


def _resource(link: Link, direction: Direction) -> str:
    return link.id if link.half_duplex else f"{link.id}|{direction}"


def _uses(graph: Graph, flow: Flow) -> dict[str, float]:
    uses: dict[str, float] = {}
    for hop in flow.hops:
        name = _resource(graph.links[hop.link], hop.direction)
        uses[name] = uses.get(name, 0.0) + 1.0
    return uses
