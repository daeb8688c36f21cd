"""What the tiered store answers: look-ups, loads, tickets of stores, what was cleared or drained, counters."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.tiers.base import Outcome, TierStats


@dataclass(frozen=True, slots=True)
class Lookup:
    """Per key the nearest enabled tier where the block is ready, or None; and how many leading keys are ready."""

    tiers: tuple[str | None, ...]
    ready_prefix: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Per key what became of it and which tier served it. `seconds` is the caller's wait, promotion included."""

    outcomes: tuple[Outcome, ...]
    tiers: tuple[str | None, ...]
    bytes_by_tier: Mapping[str, int]
    seconds: float

    @property
    def loaded_prefix(self) -> int:
        """How many leading keys were loaded: what a caller may use without a hole."""
        for count, outcome in enumerate(self.outcomes):
            if outcome.result != "ok":
                return count
        return len(self.outcomes)


class StoreTicket:
    """A store on its way. `outcomes` are those of the top tier, known at return; `results` fills as tiers finish.

    Results of a tier are those of `Outcome`, and besides: `dropped` (the queue was full), `cancelled` (cleared),
    `disabled` (the tier was disabled meanwhile).
    """

    def __init__(self, outcomes: tuple[Outcome, ...]) -> None:
        self.outcomes = outcomes
        self._condition = threading.Condition()
        self._open = 0
        self._results: dict[str, dict[str, int]] = {}

    @property
    def done(self) -> bool:
        """Whether every tier has finished."""
        with self._condition:
            return self._open == 0

    @property
    def results(self) -> dict[str, dict[str, int]]:
        """Blocks per tier and result so far."""
        with self._condition:
            return {tier: dict(counts) for tier, counts in self._results.items()}

    def wait(self, timeout_s: float) -> bool:
        """Waits until every tier has finished; False after `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: self._open == 0, timeout_s)

    def expect(self, blocks: int) -> None:
        """The store announces results to come."""
        with self._condition:
            self._open += blocks

    def settle(self, tier: str, result: str, *, expected: bool = True) -> None:
        """The store reports one block's result in a tier."""
        with self._condition:
            counts = self._results.setdefault(tier, {})
            counts[result] = counts.get(result, 0) + 1
            if expected:
                self._open -= 1
                if not self._open:
                    self._condition.notify_all()


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a clear really removed from a tier."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """What a drain did. Every block of the store is counted once: copied, already there, or failed."""

    to: str
    copied_blocks: int
    copied_bytes: int
    present_blocks: int
    failed_blocks: int
    failures: tuple[str, ...]
    flushed: bool
    seconds: float


@dataclass(slots=True)
class EdgeFigures:
    """What moved from one place to another. `seconds` sums the calls; `results` counts blocks."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    results: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TierFigures:
    """One tier of the store: what it holds, and what happened to it since the store was opened.

    `queries` and `hits` are of look-ups: a key asks a tier when no nearer one had it; hits count in the ready prefix.
    `stored` and `loaded` are what really moved. `evicted`: to make room. `dirty_evicted`: of these, written to the tier
    below first. `lost`: of these, written nowhere although the policy wanted it (read error or full queue).
    """

    name: str
    tier: TierStats
    enabled: bool
    capacity_bytes: int | None = None
    ready_blocks: int = 0
    ready_bytes: int = 0
    pending_blocks: int = 0
    pending_bytes: int = 0
    cooling_bytes: int = 0
    queued_bytes: int = 0
    queries: int = 0
    hits: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    promoted_blocks: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    dirty_evicted_blocks: int = 0
    lost_blocks: int = 0
    expired_blocks: int = 0
    dropped_blocks: int = 0
    full_blocks: int = 0
    timeouts: int = 0
    late_blocks: int = 0
    corrupt: int = 0
    failures: int = 0
    vanished: int = 0
    recovered_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters per tier in order, and per edge (from, to); `request` is the caller's memory."""

    tiers: Mapping[str, TierFigures]
    edges: Mapping[tuple[str, str], EdgeFigures]
    lookups: int
    lookup_blocks: int
    ready_prefix_blocks: int
    remembered_blocks: int
