"""Ways to bring one cached prefix back to g ranks that each need the same bytes, and what each costs.

D: bytes of one replica; g: ranks that hold identical replicas; n: chunks (layers) of a pipelined restore;
α_h: fixed cost of a batched host-to-device copy; α_c: of a collective. Pipelined two-stage work takes
P(t_h, t_c) = α_h + t_h + t_c + (n-1)·max(t_h, t_c). Source: the first seed's table, SGLang #26691 (broadcast), #29421
(layer split); derivation in docs/load-vs-recompute.md. Ignored: imbalance of page sizes, NUMA-remote latency.
"""

from dataclasses import dataclass
from math import log, sqrt

from kvbench.core.links import LinkLimits, TierSpeed, rank_rate, shared_buffer_rate

STRATEGIES = (
    "per_rank_host_copies",
    "shared_memory_direct",
    "fixed_source_broadcast_serial",
    "fixed_source_broadcast_pipelined",
    "hashed_source_broadcast_pipelined",
    "sharded_h2d_allgather_pipelined",
    "native_sequence_sharding",
    "layer_split",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Time and traffic of one strategy.

    Copies and bytes are per group of g ranks: `host_copies` replicas kept in host memory, `node_h2d_bytes` and
    `node_d2h_bytes` over PCIe for one load and one store, `gpu_gpu_bytes` received over the GPU fabric,
    `l1_rank_ratio` of a rank's whole cache kept on its GPU. `t_s` is None where a rate is unknown, with the reason.
    """

    name: str
    t_s: float | None
    reason: str | None
    limited_by: str | None
    host_copies: int
    node_d2h_bytes: int
    node_h2d_bytes: int
    gpu_gpu_bytes: int
    l1_rank_ratio: float


def hashed_imbalance(ranks: int, blocks: int) -> float:
    """Load of the busiest of g sources when m blocks are spread by hash, over the mean: 1 + sqrt(2·g·ln g / m)."""
    return 1.0 if ranks <= 1 or blocks <= 0 else 1 + sqrt(2 * ranks * log(ranks) / blocks)


def pipelined_s(alpha_s: float, load_s: float, collective_s: float, chunks: int) -> float:
    """P(t_h, t_c) = α_h + t_h + t_c + (n-1)·max(t_h, t_c), times per chunk."""
    return alpha_s + load_s + collective_s + (chunks - 1) * max(load_s, collective_s)


def restore_options(
    *,
    replica_bytes: int,
    ranks: int,
    limits: LinkLimits,
    chunks: int,
    concurrent_ranks: int | None = None,
    tier: TierSpeed | None = None,
    imbalance: float = 1.0,
    private_bytes: int = 0,
) -> tuple[Restore, ...]:
    """Every strategy for `ranks` identical replicas of `replica_bytes`, in the order of `STRATEGIES`.

    `concurrent_ranks` load at the same time over shared links (default: the ranks of this group). `private_bytes` are
    what every rank loads for itself beside the replica, whatever the strategy (recurrent state sharded by TP).
    """
    g, d, n = ranks, replica_bytes, chunks
    at_once = max(concurrent_ranks or g, g)
    every = rank_rate(limits, concurrent_ranks=at_once, tier=tier)
    single = rank_rate(limits, concurrent_ranks=-(-at_once // g), tier=tier)  # one source per group like this one
    shared = shared_buffer_rate(limits, ranks=at_once, tier=tier)
    alpha = limits.alpha_h2d_s + private_bytes / every.bytes_per_s
    b_r, b_1 = every.bytes_per_s, single.bytes_per_s
    b_c, alpha_c = limits.collective, limits.alpha_collective_s
    per_chunk = d / n
    missing = "the GPU-to-GPU rate is not known; give --limit collective=BANDWIDTH"

    def option(
        name: str, t_s: float | None, limited_by: str, *, host: int, h2d: int, gpu: int, l1: float = 1
    ) -> Restore:
        return Restore(
            name=name,
            t_s=t_s,
            reason=missing if t_s is None else None,
            limited_by=limited_by if t_s is not None else None,
            host_copies=host,
            node_d2h_bytes=host * d + g * private_bytes,
            node_h2d_bytes=h2d * d + g * private_bytes,
            gpu_gpu_bytes=gpu * d,
            l1_rank_ratio=(l1 * d + private_bytes) / (d + private_bytes),
        )

    def collective(t_load_s: float, received_bytes: float) -> float | None:
        return None if b_c is None else pipelined_s(alpha, t_load_s, alpha_c + received_bytes / b_c, n)

    serial = None if b_c is None else alpha + d / b_1 + n * alpha_c + d / b_c
    broadcast = collective(per_chunk / b_1, per_chunk)
    hashed = collective(imbalance * per_chunk / (g * b_r), per_chunk)
    gathered = collective(per_chunk / (g * b_r), per_chunk * (g - 1) / g)
    split = None if b_c is None else alpha + max(d / (g * b_r), n * (alpha_c + per_chunk / b_c)) + per_chunk / b_c
    return (
        option(STRATEGIES[0], alpha + d / b_r, every.limited_by, host=g, h2d=g, gpu=0),
        option(STRATEGIES[1], alpha + d / shared.bytes_per_s, shared.limited_by, host=1, h2d=g, gpu=0),
        option(STRATEGIES[2], serial, single.limited_by, host=1, h2d=1, gpu=g - 1),
        option(STRATEGIES[3], broadcast, single.limited_by, host=1, h2d=1, gpu=g - 1),
        option(STRATEGIES[4], hashed, every.limited_by, host=1, h2d=1, gpu=g - 1),
        option(STRATEGIES[5], gathered, every.limited_by, host=1, h2d=1, gpu=g - 1),
        option(STRATEGIES[6], alpha + d / (g * b_r), every.limited_by, host=1, h2d=1, gpu=0, l1=1 / g),
        option(STRATEGIES[7], split, every.limited_by, host=1, h2d=1, gpu=g - 1, l1=1 / g),
    )
