"""What one rank's load can get from the links it shares: min of PCIe, uplink, sockets, DRAM and storage."""

from dataclasses import dataclass

from kvbench.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Ceilings on the way from a tier to GPU memory, bytes per second in the load direction; None: not known, no limit.

    `pcie` is per GPU, `uplink` is shared by `ranks_per_uplink` GPUs, `host_total` and `storage_total` by all ranks that
    load at once, `home_socket` is the DRAM of the one socket that holds a shared buffer, `inter_socket` the link to the
    others. `collective` is the GPU-to-GPU rate a broadcast or all-gather gets.
    """

    pcie: float | None = None
    uplink: float | None = None
    ranks_per_uplink: int = 1
    host_total: float | None = None
    storage_total: float | None = None
    home_socket: float | None = None
    inter_socket: float | None = None
    sockets: int = 1
    collective: float | None = None
    alpha_h2d_s: float = 0.0
    alpha_collective_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Bytes per second one rank gets, and the limit that set it."""

    bytes_per_s: float
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """Bytes per second a tier delivers: to each rank, or (`shared`) to all ranks that load at once together."""

    bytes_per_s: float
    shared: bool = False

    def limit(self, ranks: int) -> tuple[str, float]:
        """Its name as a limit, and what one of `ranks` ranks gets."""
        return (_shared("tier", ranks), self.bytes_per_s / ranks) if self.shared else ("tier", self.bytes_per_s)


def rank_rate(limits: LinkLimits, *, concurrent_ranks: int, tier: TierSpeed | None = None) -> Rate:
    """Rate of one of `concurrent_ranks` ranks that load from private buffers at the same time.

    B_r = min(tier, pcie, uplink / ranks on it, host_total / k, storage_total / k). Ignores queueing: `queue_time_s`.
    """
    on_uplink = min(limits.ranks_per_uplink, concurrent_ranks)
    return _slowest(
        {
            **dict([tier.limit(concurrent_ranks)] if tier else []),
            "pcie": limits.pcie,
            _shared("uplink", on_uplink): _divided(limits.uplink, on_uplink),
            _shared("host memory", concurrent_ranks): _divided(limits.host_total, concurrent_ranks),
            _shared("storage", concurrent_ranks): _divided(limits.storage_total, concurrent_ranks),
        }
    )


def shared_buffer_rate(limits: LinkLimits, *, ranks: int, tier: TierSpeed | None = None) -> Rate:
    """Rate of one of `ranks` ranks that read the same buffer on one socket.

    min(tier, pcie, uplink / r_u, home_socket / g, inter_socket / (g·(s-1)/s)): g·(s-1)/s ranks sit on other sockets.
    """
    on_uplink = min(limits.ranks_per_uplink, ranks)
    remote = ranks * (limits.sockets - 1) / limits.sockets
    home_name, home = ("home socket", limits.home_socket) if limits.home_socket else ("host memory", limits.host_total)
    return _slowest(
        {
            **dict([tier.limit(ranks)] if tier else []),
            "pcie": limits.pcie,
            _shared("uplink", on_uplink): _divided(limits.uplink, on_uplink),
            _shared(home_name, ranks): _divided(home, ranks),
            _shared("inter-socket link", remote): _divided(limits.inter_socket, remote) if remote else None,
            _shared("storage", ranks): _divided(limits.storage_total, ranks),
        }
    )


def _shared(link: str, sharers: float) -> str:
    return link if sharers <= 1 else f"{link} shared by {sharers:g}"


def _divided(rate: float | None, sharers: float) -> float | None:
    return None if rate is None else rate / sharers


def _slowest(candidates: dict[str, float | None]) -> Rate:
    known = {name: rate for name, rate in candidates.items() if rate is not None}
    if not known:
        raise UsageError("no bandwidth is known for this load; give --tier NAME=BANDWIDTH, like --tier dram=50GB/s")
    name = min(known, key=lambda key: known[key])
    return Rate(bytes_per_s=known[name], limited_by=name)


def utilisation(*, loads_per_s: float, service_s: float) -> float:
    """ρ = λ·S: the share of time that one rank's path is busy with this traffic."""
    return loads_per_s * service_s


def queue_time_s(*, loads_per_s: float, service_s: float) -> float:
    """Mean wait in an M/D/1 queue of equal loads: λ·S² / (2(1-ρ)); infinite from ρ = 1 on.

    One server stands for the one copy engine per direction. Loads of mixed sizes wait longer, by 1 + cv² of S.
    """
    rho = utilisation(loads_per_s=loads_per_s, service_s=service_s)
    return loads_per_s * service_s**2 / (2 * (1 - rho)) if rho < 1 else float("inf")
