"""What `kvbench probe` measured: samples per case, the fit of each, and the paths and ceilings that others read."""

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, stdev
from typing import ClassVar, Literal

from kvbench.core.bootstrap import median_interval
from kvbench.core.provenance import Origin, Warning_
from kvbench.results.host_paths import Limit, MeasuredPath

ProbeDirection = Literal["h2h", "h2d", "d2h", "duplex", "load", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSample:
    """One timed transfer of `segments` segments, `bytes` in all.

    `seconds` is what a caller pays, from the call to the end ("call"). `wire_s` hides the cost of launching; None where
    the two cannot be told apart, as in a copy that runs inside the call.
    """

    bytes: int
    segments: int
    seconds: float
    wire_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFit:
    """`t = fixed_s + segments·per_segment_s + bytes·s_per_byte`, and the median of |measured - fitted| / measured.

    A coefficient is None where the sizes and segments of the case cannot tell it from the others.
    """

    fixed_s: float | None
    per_segment_s: float | None
    s_per_byte: float | None
    residual_ratio: float

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of the wire alone; None where the samples hold none."""
        return 1 / self.s_per_byte if self.s_per_byte else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """The samples of one transfer size and segment size: median time with its 95 % interval, and bandwidths."""

    bytes: int
    segments: int
    count: int
    median_s: float
    low_s: float
    high_s: float
    cv_ratio: float | None
    wire_s: float | None

    @property
    def segment_bytes(self) -> int:
        return self.bytes // self.segments if self.segments else self.bytes

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.median_s

    @property
    def wire_bytes_per_s(self) -> float | None:
        return None if self.wire_s is None else self.bytes / self.wire_s


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """One way to move bytes, swept over sizes, and what became of it.

    `method` is an execution (`host-gather`, `cuda-batch`) or a file engine. `stands_in_for` names what this host
    cannot run and this case was measured instead of. `concurrency` counts copiers, or requests in flight. `bytes` of a
    sample are those of all copiers together. `load_average` is the one-minute load before and after.
    `beside_slowdown_ratio` says how much slower the work beside the copies went.
    """

    name: str
    path: str
    direction: ProbeDirection
    method: str
    layout: str
    concurrency: int
    direct: bool | None = None
    fsync: str | None = None
    huge_pages: bool = False
    beside: str = "nothing"
    stands_in_for: str | None = None
    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    elapsed_s: float
    source: str
    destination: str
    cold: bool | None
    cold_evidence: str
    placement: str
    load_average: tuple[float, ...] = ()
    beside_slowdown_ratio: float | None = None
    setup_s: float | None = None
    samples: tuple[ProbeSample, ...] = ()
    fit: ProbeFit | None = None
    warnings: tuple[Warning_, ...] = ()

    @cached_property
    def points(self) -> tuple[SizePoint, ...]:
        """One point per transfer size and segment size, in the order of both."""
        groups: dict[tuple[int, int], list[ProbeSample]] = {}
        for sample in self.samples:
            groups.setdefault((sample.bytes, sample.segments), []).append(sample)
        return tuple(_point(*key, groups[key]) for key in sorted(groups, key=lambda key: (key[0], -key[1])))

    def best_point(self) -> SizePoint | None:
        """The point with the highest bandwidth."""
        return max(self.points, key=lambda point: point.bytes_per_s, default=None)

    def curve(self) -> tuple[SizePoint, ...]:
        """Bandwidth over segment size: the points of the largest transfer that was swept over most segment sizes."""
        sizes: dict[int, list[SizePoint]] = {}
        for point in self.points:
            sizes.setdefault(point.bytes, []).append(point)
        if not sizes:
            return ()
        most = max(len(points) for points in sizes.values())
        widest = max(size for size, points in sizes.items() if len(points) == most)
        return tuple(sorted(sizes[widest], key=lambda point: point.segment_bytes))


def _point(num_bytes: int, segments: int, samples: list[ProbeSample]) -> SizePoint:
    seconds = [sample.seconds for sample in samples]
    wires = [sample.wire_s for sample in samples if sample.wire_s is not None]
    low, high = median_interval(seconds)
    return SizePoint(
        bytes=num_bytes,
        segments=segments,
        count=len(seconds),
        median_s=median(seconds),
        low_s=low,
        high_s=high,
        cv_ratio=stdev(seconds) / fmean(seconds) if len(seconds) > 1 else None,
        wire_s=median(wires) if wires else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Below this segment size one method is faster, above it the other."""

    segment_bytes: float
    bytes_per_s: float
    faster_below: str
    faster_above: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What a link is known to carry elsewhere: a line to hold the measurement against; `direction` None suits all."""

    name: str
    bytes_per_s: float
    origin: Origin
    direction: ProbeDirection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The cases of one plan. `paths` and `limits` are the seam for whoever reads measured rates."""

    KIND: ClassVar[str] = "probe"
    SCHEMA_VERSION: ClassVar[int] = 1

    plan: str
    question: str
    cases: tuple[ProbeCase, ...]
    crossovers: tuple[Crossover, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    paths: tuple[MeasuredPath, ...] = ()
    limits: tuple[Limit, ...] = ()
    interrupted: bool = False
    elapsed_s: float = 0.0
    warnings: tuple[Warning_, ...] = ()
