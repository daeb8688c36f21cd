"""A machine's links as one graph, its ceilings under contention, and what is wrong with it."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.findings import Finding
from kvbench.core.graph import Direction, Machine, Rate
from kvbench.core.load_ceilings import Ceiling
from kvbench.core.provenance import Origin
from kvbench.results.host_paths import Limit, MeasuredPath, TransferSample


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRead:
    """One input: its format as found by content, its name, whether it ends early, and remarks."""

    format: str
    source: str
    truncated: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Something that is not in the result, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """The class of a pair, and what the pair's narrowest link carries one way; None where no rate is known.

    `at_most`: another link of the pair has no known rate.
    """

    cell: str
    bytes_per_s: float | None
    at_most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The familiar matrix over node ids, GPUs first."""

    nodes: tuple[str, ...]
    rows: tuple[tuple[MatrixCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One imported or measured figure, the link it was put on, and how it was made.

    `samples` are the raw readings of a measurement made now; an import has none, because its tool kept them.
    """

    link: str
    direction: Direction
    rate: Rate
    what: str
    samples: tuple[TransferSample, ...] = ()

    @property
    def spread_ratio(self) -> float | None:
        """(slowest - fastest) / median of the samples' times; None without samples."""
        times = sorted(sample.seconds for sample in self.samples)
        return (times[-1] - times[0]) / times[len(times) // 2] if times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeasurement:
    """A figure that belongs to several links at once, such as a collective's bus bandwidth."""

    what: str
    bytes_per_s: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyResult:
    """What `kvbench topo` found. `limits` and `paths` are what `load-vs-recompute --topo` takes."""

    KIND: ClassVar[str] = "topology"
    SCHEMA_VERSION: ClassVar[int] = 1

    inputs: tuple[InputRead, ...]
    machine: Machine
    matrix: Matrix
    ceilings: tuple[Ceiling, ...]
    findings: tuple[Finding, ...]
    measurements: tuple[LinkMeasurement, ...]
    groups: tuple[GroupMeasurement, ...]
    absent: tuple[Absent, ...]
    limits: tuple[Limit, ...]
    paths: tuple[MeasuredPath, ...] = ()
