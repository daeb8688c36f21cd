"""What a remote tier knows of itself: counters, and the blocks that it has seen in the store."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import Block, Outcome, TierStats, Wanted
from kvbench.tiers.counters import unfit

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

    def admit(
        self, blocks: Sequence[Block], block_bytes: int, place: str
    ) -> tuple[list[Outcome | None], list[Block], int]:
        """Why each block is refused, None for those that may be stored; these; and the room kept for them in all."""
        refusals: list[Outcome | None] = []
        taken: list[Block] = []
        room = 0
        with self._lock:
            for block in blocks:
                refusal = unfit(block, block_bytes)
                added = max(block.data.nbytes - self._known.get(block.key, 0), 0)
                most = self._capacity_bytes
                if refusal is None and most is not None and self._used_bytes + self._reserved_bytes + added > most:
                    refusal = Outcome("full", f"{place}: size= is reached")
                refusals.append(refusal)
                if refusal is None:
                    taken.append(block)
                    self._reserved_bytes += added
                    room += added
                else:
                    self._count(refusal, "stored", 0)
        return refusals, taken, room

    def stored(self, results: Iterable[tuple[Block, Outcome]], room: int) -> None:
        """Counts the outcomes of blocks that were admitted, and gives their room back."""
        with self._lock:
            self._reserved_bytes -= room
            for block, outcome in results:
                self._count(outcome, "stored", block.data.nbytes)
                if outcome.result in ("ok", "exists"):
                    self._learn(block.key, block.data.nbytes)

    def loaded(self, results: Iterable[tuple[Wanted, Outcome]]) -> None:
        """Counts the outcomes of a load."""
        with self._lock:
            for want, outcome in results:
                self._count(outcome, "loaded", want.into.nbytes)
                if outcome.result == "ok":
                    self._learn(want.key, want.into.nbytes)
                elif outcome.result in ("miss", "corrupt"):
                    self._learn(want.key, None)

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
