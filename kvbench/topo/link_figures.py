"""What is known of the PCIe link of a device: its state, what a tool printed, its product, or why nothing."""

from dataclasses import replace

from kvbench.core.graph import (
    LinkKind,
    LinkRates,
    PcieState,
    Rate,
)
from kvbench.core.pcie import generation, pcie_bytes_per_s
from kvbench.core.provenance import Origin
from kvbench.topo.anchors import (
    LANE_GT,
    GpuAnchor,
    nvme_read,
    pcie_rates,
)
from kvbench.topo.facts import PciFact

_BITS = 8


def pcie_sides(
    product: GpuAnchor | None, state: PcieState | None, fact: PciFact, kind: LinkKind, *, is_gpu: bool
) -> tuple[LinkRates, LinkRates]:
    """Rates towards the CPU and towards the device."""
    both = product.both if product else None
    if state is not None and (running := _running(state, may_idle=is_gpu and not fact.busy)) is not None:
        lane, width = running
        sides = tuple(pcie_rates(lane, width, origin=state.origin, both=both, toward_cpu=up) for up in (True, False))
        if kind == "nvme":
            return replace(sides[0], typical=nvme_read(lane, width)), replace(sides[1], typical=None)
        return sides[0], sides[1]
    if fact.link_bytes_per_s is not None:
        return _nominal_sides(fact.link_bytes_per_s, kind, both)
    if product is not None and product.pcie is not None:
        source = f"{product.name} data sheet, x16; the link itself is not in the input ({product.source})"
        origin = Origin(provenance="modelled", source=source)
        lane = LANE_GT[product.pcie]
        sides = tuple(pcie_rates(lane, 16, origin=origin, both=both, toward_cpu=up) for up in (True, False))
        return sides[0], sides[1]
    if kind == "virtual":
        gone = LinkRates(absent="a virtual or built-in device: the kernel reports no link")
    elif is_gpu:
        gone = LinkRates(absent="not measured, and neither link speed nor GPU model is in the input; see --gpu")
    else:
        gone = LinkRates(absent="not measured, and the link speed is not in the input")
    return gone, gone


def _nominal_sides(bytes_per_s: float, kind: LinkKind, both: str | None) -> tuple[LinkRates, LinkRates]:
    """Sides of a link of which hwloc prints lanes times lane rate: the widest link of that rate gives its typical.

    15.753846 GB/s is Gen3 x16 or Gen4 x8; a disk has four lanes at most.
    """
    origin = Origin(provenance="spec", source="nominal rate of the link: pci_link_speed in the hwloc XML")
    found = next((link for link in _SHAPES if _is_rate(bytes_per_s, link) and (kind != "nvme" or link[1] <= 4)), None)
    if found is None:
        rate = Rate(bytes_per_s=bytes_per_s, origin=origin)
        return LinkRates(theory=rate), LinkRates(theory=rate)
    lane, width = found
    read = replace(origin, source=f"{origin.source}, taken as Gen{generation(lane)} x{width}")
    up, down = (pcie_rates(lane, width, origin=read, both=both, toward_cpu=cpu) for cpu in (True, False))
    return (replace(up, typical=nvme_read(lane, width)), replace(down, typical=None)) if kind == "nvme" else (up, down)


_SHAPES = tuple((lane, width) for width in (16, 8, 4, 2, 1) for lane in LANE_GT.values())


def _is_rate(bytes_per_s: float, link: tuple[float, int]) -> bool:
    return abs(pcie_bytes_per_s(*link) - bytes_per_s) < 0.001 * bytes_per_s


def _running(state: PcieState, *, may_idle: bool) -> tuple[float, int] | None:
    """Lane rate and width to count with: those of now. A GPU clocks its lanes down while it is idle, so unless it is
    known to work the highest rate of both ends counts.
    """
    most = _least(state.max_lane_gt_per_s, state.port_max_lane_gt_per_s)
    lane = most if most is not None and (may_idle or state.lane_gt_per_s is None) else state.lane_gt_per_s
    width = state.width or _least_width(state.max_width, state.port_max_width)
    lane = lane if lane is not None else state.lane_gt_per_s
    if lane is None or not width or pcie_bytes_per_s(lane, width) <= 0:
        return None
    return lane, width


def _least(a: float | None, b: float | None) -> float | None:
    known = [value for value in (a, b) if value]
    return min(known) if known else None


def _least_width(a: int | None, b: int | None) -> int | None:
    known = [value for value in (a, b) if value]
    return min(known) if known else None


def with_port(state: PcieState | None, port: PciFact | None) -> PcieState | None:
    """The device's state with what the port above it can do at most."""
    if state is None or port is None or port.state is None:
        return state
    return replace(
        state,
        port_max_lane_gt_per_s=state.port_max_lane_gt_per_s or port.state.max_lane_gt_per_s,
        port_max_width=state.port_max_width or port.state.max_width,
    )


def bit_rate(bit_per_s: float | None, source: str) -> Rate | None:
    """A rate in bits per second, as ports have it, in bytes per second."""
    if not bit_per_s:
        return None
    return Rate(bytes_per_s=bit_per_s / _BITS, origin=Origin(provenance="measured", source=source))
