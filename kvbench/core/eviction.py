"""Which block leaves a full tier first: LRU, LFU, or frequency and recency in one score; how candidates cool down."""

import heapq
from collections import deque
from dataclasses import dataclass
from math import log2
from typing import Generic, Literal, Protocol, TypeVar

Eviction = Literal["lru", "lfu", "score"]

# The score halves in this time without an access: four accesses half a minute ago weigh as much as two now.
SCORE_HALF_LIFE_S = 30.0
_COMPACT = 1024


@dataclass(slots=True)
class Usage:
    """How a block was used. `sequence` numbers its last access among all accesses of the store.

    `weight` is log2 of Σ 2^(t/h) over the access times t, h the half-life: at any moment `now`, 2^(weight - now/h) is
    the number of accesses, each halved for every h since, so an order by weight is an order by that score.
    """

    accesses: int = 0
    sequence: int = 0
    weight: float = float("-inf")

    def access(self, sequence: int, now_s: float, *, half_life_s: float = SCORE_HALF_LIFE_S) -> None:
        """Counts one more access."""
        self.accesses += 1
        self.sequence = sequence
        new = now_s / half_life_s
        high, low = max(self.weight, new), min(self.weight, new)
        self.weight = high + log2(1 + 2 ** (low - high))

    def touch(self, sequence: int) -> None:
        """Renews the recency alone."""
        self.sequence = sequence


def priority(eviction: Eviction, usage: Usage) -> tuple[float, int]:
    """Smaller leaves first; an access never makes it smaller."""
    if eviction == "lru":
        return (0.0, usage.sequence)
    if eviction == "lfu":
        return (float(usage.accesses), usage.sequence)
    return (usage.weight, usage.sequence)


class Evictable(Protocol):
    """A block in one tier, as the order of eviction sees it."""

    @property
    def usage(self) -> Usage: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def resident(self) -> bool:
        """Whether it is still in the tier, whole."""
        ...

    @property
    def busy(self) -> bool:
        """Whether it is being read now."""
        ...

    @property
    def kept(self) -> bool:
        """Whether it stays as long as another can go."""
        ...


B = TypeVar("B", bound=Evictable)


class EvictionOrder(Generic[B]):
    """The blocks of one tier in the order in which they leave.

    A heap with one entry per block. Priorities only grow, so an access costs nothing here: an entry that comes up with
    an outdated priority goes back in with the present one. Candidates that cool down stand in a queue of their own.
    """

    def __init__(self, eviction: Eviction, *, cooldown_s: float = 0.0) -> None:
        self._eviction = eviction
        self._cooldown_s = cooldown_s
        self._heap: list[tuple[tuple[float, int], int, B]] = []
        self._entries = 0
        self._compact_at = _COMPACT
        self._cooling: deque[tuple[float, tuple[float, int], B]] = deque()
        self.cooling_bytes = 0

    def add(self, block: B) -> None:
        """Takes in a block that is now whole in the tier."""
        self._entries += 1
        heapq.heappush(self._heap, (priority(self._eviction, block.usage), self._entries, block))
        if len(self._heap) >= self._compact_at:  # blocks that left by another way would stay for ever
            self._heap = [entry for entry in self._heap if entry[2].resident]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _COMPACT

    def take(self, num_bytes: int, *, before: int | None = None) -> list[B] | None:
        """Blocks of at least `num_bytes` in all that leave at once; None, and nothing changes, if there are too few.

        Cooling blocks go first, oldest mark first, then the others by priority, then kept ones. Blocks that are being
        read stay, and so do those accessed after `before`; kept blocks do not leave in the place of such a one.
        """
        chosen: list[B] = []
        size = 0
        stay: list[B] = []
        spared = False  # whether a block that is not kept stays because it was accessed after `before`
        while size < num_bytes and self._cooling:
            if (candidate := self._next_cooling()) is None:
                continue
            if _free_to_go(candidate, before) and not candidate.kept:
                chosen.append(candidate)
                size += candidate.num_bytes
            else:
                stay.append(candidate)
                spared |= not (candidate.busy or candidate.kept)
        kept: list[B] = []
        while size < num_bytes and (block := self._pop()) is not None:
            if not _free_to_go(block, before):
                stay.append(block)
                spared |= not (block.busy or block.kept)
                if self._eviction == "lru" and not (block.busy or block.kept):
                    break  # all others were accessed later still
            elif block.kept:
                kept.append(block)
            else:
                chosen.append(block)
                size += block.num_bytes
        for block in kept:
            if size < num_bytes and not spared:
                chosen.append(block)
                size += block.num_bytes
            else:
                stay.append(block)
        if size < num_bytes:
            stay += chosen
            chosen = []
        for block in stay:
            self.add(block)
        return chosen if size >= num_bytes else None

    def mark(self, num_bytes: int, now_s: float) -> None:
        """Lets blocks of `num_bytes` in all begin to cool, as far as there are any."""
        stay: list[B] = []
        marked = 0
        while marked < num_bytes and (block := self._pop()) is not None:
            if block.busy or block.kept:
                stay.append(block)
                continue
            self._cooling.append((now_s, priority(self._eviction, block.usage), block))
            self.cooling_bytes += block.num_bytes
            marked += block.num_bytes
        for block in stay:
            self.add(block)

    def cooled(self, now_s: float) -> list[B]:
        """Takes out the blocks whose cooldown is over; one accessed meanwhile is an ordinary block again."""
        gone = []
        while self._cooling and now_s - self._cooling[0][0] >= self._cooldown_s:
            if (block := self._next_cooling()) is None:
                continue
            if block.busy or block.kept:
                self.add(block)
            else:
                gone.append(block)
        return gone

    def _next_cooling(self) -> B | None:
        """The oldest candidate, unless it left or was accessed meanwhile."""
        _, marked_priority, block = self._cooling.popleft()
        self.cooling_bytes -= block.num_bytes
        if not block.resident:
            return None
        if priority(self._eviction, block.usage) != marked_priority:
            self.add(block)
            return None
        return block

    def _pop(self) -> B | None:
        while self._heap:
            known, _, block = heapq.heappop(self._heap)
            if not block.resident:
                continue
            if known != (present := priority(self._eviction, block.usage)):
                self._entries += 1
                heapq.heappush(self._heap, (present, self._entries, block))
                continue
            return block
        return None


def _free_to_go(block: Evictable, before: int | None) -> bool:
    return not block.busy and (before is None or block.usage.sequence < before)
