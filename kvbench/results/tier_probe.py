"""What `kvbench probe tiers` measured: each tier of a stack by itself, and the stack under each write policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import ClassVar, Literal

from kvbench.core.percentiles import Percentile, least_samples, percentile_with_interval
from kvbench.core.provenance import Warning_
from kvbench.results.host_paths import MeasuredPath
from kvbench.results.probe import ProbeFit

TierPhase = Literal["store", "load", "idle", "saturated"]
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSample:
    """One timed call, or several that began together.

    `seconds` lasts until the last block was there: in the buffers of a load, ready in every tier of a store that takes
    it. `call_s` is how long a store held its caller, the median of several. `calls_s` are the calls that began
    together, one by one, where there were several. `queue_ratio`, of a load beside stores: how full the fullest store
    queue was right after.
    """

    phase: TierPhase
    bytes: int
    blocks: int
    seconds: float
    call_s: float | None = None
    calls_s: tuple[float, ...] = ()
    queue_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """The calls of one phase that moved the same number of blocks: bandwidth, and those percentiles they suffice for.

    `percentiles` holds P50 always and others from `least_samples` on; without P99, `maximum_s` stands for the tail.
    """

    blocks: int
    count: int
    bytes_per_s: float
    median_call_s: float | None
    maximum_s: float
    percentiles: tuple[Percentile, ...]

    def at(self, quantile: float) -> Percentile | None:
        """The percentile, or None where too few calls were timed for it."""
        return next((found for found in self.percentiles if found.quantile == quantile), None)


def call_times(samples: Iterable[TierSample]) -> list[float]:
    """Seconds of every single call."""
    return [seconds for sample in samples for seconds in sample.calls_s or (sample.seconds,)]


def latency_points(samples: tuple[TierSample, ...], phase: TierPhase) -> tuple[LatencyPoint, ...]:
    """One point per number of blocks of a call, in order."""
    groups: dict[int, list[TierSample]] = {}
    for sample in samples:
        if sample.phase == phase:
            groups.setdefault(sample.blocks // max(len(sample.calls_s), 1), []).append(sample)
    return tuple(_point(blocks, groups[blocks]) for blocks in sorted(groups))


def _point(blocks: int, samples: list[TierSample]) -> LatencyPoint:
    calls = call_times(samples)
    waits = [sample.call_s for sample in samples if sample.call_s is not None]
    return LatencyPoint(
        blocks=blocks,
        count=len(calls),
        bytes_per_s=samples[0].bytes / median([sample.seconds for sample in samples]),
        median_call_s=median(waits) if waits else None,
        maximum_s=max(calls),
        percentiles=tuple(
            percentile_with_interval(calls, quantile)
            for quantile in QUANTILES
            if quantile == 0.5 or len(calls) >= least_samples(quantile)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TierCase:
    """One tier of a stack, all others disabled: stores until the blocks are ready, loads into host memory.

    `synchronous`: the first tier of a stack is written before the call returns, the others from a queue.
    `checksum_bytes_per_s` is CRC32C alone over blocks as they were loaded; `checked_on_load` says whether the tier
    computes it in every load. A store computes it in any case.
    """

    name: str
    stack: str
    spec: str
    tier: str
    concurrency: int
    synchronous: bool
    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    elapsed_s: float
    description: str = ""
    blocks: int = 0
    checksum_bytes_per_s: float | None = None
    checked_on_load: bool | None = None
    cold: bool | None = None
    cold_evidence: str = ""
    verified_blocks: int = 0
    failed_blocks: int = 0
    load_average: tuple[float, ...] = ()
    samples: tuple[TierSample, ...] = ()
    store_fit: ProbeFit | None = None
    load_fit: ProbeFit | None = None
    warnings: tuple[Warning_, ...] = ()

    @cached_property
    def stores(self) -> tuple[LatencyPoint, ...]:
        """Stores by blocks of a call."""
        return latency_points(self.samples, "store")

    @cached_property
    def loads(self) -> tuple[LatencyPoint, ...]:
        """Loads by blocks of a call."""
        return latency_points(self.samples, "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCheck:
    """What moved from one place to the next while the store phase ran, counted, and what the policy says must move."""

    source: str
    target: str
    blocks: int
    bytes: int
    expected_blocks: int
    expected_bytes: int
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether the counters are blocks × bytes of a block, and as many as the policy says."""
        return (self.blocks, self.bytes) == (self.expected_blocks, self.expected_bytes)


@dataclass(frozen=True, kw_only=True)
class MixedLoads:
    """Loads from one tier, those above it disabled, while the store is idle and while its queues are kept full.

    `stored_bytes` entered the store beside the loads; `stored_s` is how long that took.
    """

    tier: str
    stored_bytes: int
    stored_s: float
    failed_blocks: int = 0
    samples: tuple[TierSample, ...] = ()

    @cached_property
    def idle(self) -> LatencyPoint | None:
        """Loads while no store is queued or running."""
        return next(iter(latency_points(self.samples, "idle")), None)

    @cached_property
    def saturated(self) -> LatencyPoint | None:
        """Loads while stores are queued."""
        return next(iter(latency_points(self.samples, "saturated")), None)

    @property
    def queue_ratio(self) -> float | None:
        """Median fill of the fullest queue at the saturated loads."""
        fills = [sample.queue_ratio for sample in self.samples if sample.queue_ratio is not None]
        return median(fills) if fills else None

    def slowdown_ratio(self, quantile: float) -> float | None:
        """Saturated over idle latency at a quantile; None where either side has too few loads for it."""
        idle = self.idle.at(quantile) if self.idle else None
        saturated = self.saturated.at(quantile) if self.saturated else None
        return saturated.value / idle.value if idle and saturated and idle.value > 0 else None


@dataclass(frozen=True, kw_only=True)
class PolicyCase:
    """The whole stack under one write policy: stores of new blocks, bytes per edge, and loads beside stores.

    In the store phase `blocks` distinct blocks are stored once, and the last `repeated_blocks` of them a second time.
    """

    name: str
    stack: str
    policy: str
    concurrency: int
    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    elapsed_s: float
    blocks: int = 0
    repeated_blocks: int = 0
    load_average: tuple[float, ...] = ()
    samples: tuple[TierSample, ...] = ()
    edges: tuple[EdgeCheck, ...] = ()
    mixed: tuple[MixedLoads, ...] = ()
    warnings: tuple[Warning_, ...] = ()

    @cached_property
    def store(self) -> LatencyPoint | None:
        """The stores of new blocks: the call, and until every tier that takes them has them."""
        return next(iter(latency_points(self.samples, "store")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierProbeResult:
    """Stacks of tiers, tier by tier and policy by policy; `paths` is the seam for whoever reads measured rates."""

    KIND: ClassVar[str] = "tier-probe"
    SCHEMA_VERSION: ClassVar[int] = 1

    plan: str
    question: str
    model: str
    tp: int
    page_tokens: int
    block_bytes: int
    block_shape: str
    load_share_ratio: float
    queue_bytes: int
    tiers: tuple[TierCase, ...]
    policies: tuple[PolicyCase, ...]
    paths: tuple[MeasuredPath, ...] = ()
    interrupted: bool = False
    elapsed_s: float = 0.0
    warnings: tuple[Warning_, ...] = ()
