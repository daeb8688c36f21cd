"""What a remote tier knows of itself: counters, and the blocks that it has seen in the store."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import Outcome, TierStats

_COUNTED = {"miss": "misses", "corrupt": "corrupt", "timeout": "timeouts", "failed": "failures"}


class Ledger:
    """Counters and known blocks of one tier. Others may write to the same store, so `used_bytes` is what this client
    stored or met, and `size=` limits that.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._known: dict[BlockKey, int] = {}
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._counts: Counter[str] = Counter()

    def reserve(self, sizes: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """Whether each of the blocks has room, which is then kept for it until `stored`."""
        rooms = []
        with self._lock:
            for key, num_bytes in sizes:
                added = num_bytes - self._known.get(key, 0)
                full = (
                    self._capacity_bytes is not None
                    and self._used_bytes + self._reserved_bytes + added > self._capacity_bytes
                )
                rooms.append(not full)
                self._reserved_bytes += 0 if full else num_bytes
        return rooms

    def stored(self, results: Iterable[tuple[BlockKey, int, Outcome]]) -> None:
        """Counts blocks for which room was reserved."""
        with self._lock:
            for key, num_bytes, outcome in results:
                self._reserved_bytes -= num_bytes
                self._count(outcome, "stored", num_bytes)
                if outcome.result in ("ok", "exists"):
                    self._learn(key, num_bytes)

    def loaded(self, results: Iterable[tuple[BlockKey, int, Outcome]]) -> None:
        with self._lock:
            for key, num_bytes, outcome in results:
                self._count(outcome, "loaded", num_bytes)
                if outcome.result == "ok":
                    self._learn(key, num_bytes)
                elif outcome.result in ("miss", "corrupt"):
                    self._learn(key, None)

    def evicted(self, results: Iterable[tuple[BlockKey, Outcome]]) -> None:
        """Counts removals: ok, miss (none was there), timeout or failed."""
        with self._lock:
            for key, outcome in results:
                if outcome.result == "ok":
                    self._counts["evicted_blocks"] += 1
                elif outcome.result != "miss":
                    self._count(outcome, "", 0)
                if outcome.result in ("ok", "miss"):
                    self._learn(key, None)

    def asked(self, outcomes: Iterable[Outcome]) -> None:
        """Counts what went wrong when the store was only asked."""
        with self._lock:
            for outcome in outcomes:
                if outcome.result not in ("ok", "miss"):
                    self._count(outcome, "", 0)

    def listed(self, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        """Takes a whole listing of the store as what is known."""
        with self._lock:
            self._known = dict(blocks)
            self._used_bytes = sum(self._known.values())

    def known(self) -> list[tuple[BlockKey, int]]:
        with self._lock:
            return list(self._known.items())

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                blocks=len(self._known),
                used_bytes=self._used_bytes,
                capacity_bytes=self._capacity_bytes,
                **self._counts,
            )

    def _count(self, outcome: Outcome, done: str, num_bytes: int) -> None:
        if outcome.result == "ok":
            self._counts[f"{done}_blocks"] += 1
            self._counts[f"{done}_bytes"] += num_bytes
        elif outcome.result in _COUNTED:
            self._counts[_COUNTED[outcome.result]] += 1

    def _learn(self, key: BlockKey, num_bytes: int | None) -> None:
        self._used_bytes -= self._known.pop(key, 0)
        if num_bytes is not None:
            self._known[key] = num_bytes
            self._used_bytes += num_bytes
