"""What a tier counts of its own work, and what it refuses before it tries."""

import threading
from collections import Counter
from collections.abc import Sequence

from kvbench.core.units import format_bytes
from kvbench.tiers.base import Block, Outcome, Result, TierStats, Wanted

_LOAD_COUNTS: dict[Result, str] = {
    "miss": "misses",
    "corrupt": "corrupt",
    "timeout": "timeouts",
    "failed": "failures",
}


class TierCounters:
    """Counters of one tier, safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def stored(self, blocks: Sequence[Block], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Counts a store and returns its outcomes."""
        done = [block.data.nbytes for block, outcome in zip(blocks, outcomes, strict=True) if outcome.result == "ok"]
        with self._lock:
            self._counts["stored_blocks"] += len(done)
            self._counts["stored_bytes"] += sum(done)
            for outcome in outcomes:
                if outcome.result in ("timeout", "failed"):
                    self._counts[_LOAD_COUNTS[outcome.result]] += 1
        return list(outcomes)

    def loaded(self, wanted: Sequence[Wanted], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Counts a load and returns its outcomes."""
        done = [want.into.nbytes for want, outcome in zip(wanted, outcomes, strict=True) if outcome.result == "ok"]
        with self._lock:
            self._counts["loaded_blocks"] += len(done)
            self._counts["loaded_bytes"] += sum(done)
            for outcome in outcomes:
                if outcome.result in _LOAD_COUNTS:
                    self._counts[_LOAD_COUNTS[outcome.result]] += 1
        return list(outcomes)

    def evicted(self, num_blocks: int) -> None:
        """Counts blocks that the owner let go."""
        with self._lock:
            self._counts["evicted_blocks"] += num_blocks

    def corrupted(self, num_blocks: int) -> None:
        """Counts damaged blocks found outside a load, such as when a tier is opened."""
        with self._lock:
            self._counts["corrupt"] += num_blocks

    def stats(self, *, blocks: int, used_bytes: int, capacity_bytes: int | None) -> TierStats:
        """The counters with what the tier holds now."""
        with self._lock:
            counts = dict(self._counts)
        return TierStats(blocks=blocks, used_bytes=used_bytes, capacity_bytes=capacity_bytes, **counts)


def unfit(block: Block, block_bytes: int) -> Outcome | None:
    """Why a tier of such blocks cannot take this one."""
    size = block.data.nbytes
    if size == 0:
        return Outcome("failed", "an empty block")
    if size > block_bytes:
        return Outcome("failed", f"a block of {format_bytes(size)} where the largest is {format_bytes(block_bytes)}")
    return None


def wrong_buffer(into: memoryview, num_bytes: int) -> Outcome | None:
    """Why a block of so many bytes does not go into this buffer."""
    if into.nbytes == num_bytes:
        return None
    return Outcome("failed", f"a buffer of {into.nbytes} bytes for a block of {num_bytes}")
