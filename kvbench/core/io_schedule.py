"""What one tier does next: loads overtake stores, and stores go in small batches."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

L = TypeVar("L")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StoreBatch(Generic[S]):
    """Stores that go to the tier in one call."""

    items: tuple[S, ...]
    num_bytes: int


class IoSchedule(Generic[L, S]):
    """Waiting loads and stores of one tier, and the rule that orders them.

    A waiting load goes next, in order of arrival. A batch of stores begins only when no load waits or runs, so a load
    finds at most `max_store_batches` batches in its way, each of at most `batch_bytes` (or one block, if larger).
    Unbroken loads would starve the stores: a batch that was held back for `patience_s` goes, one per such interval.
    """

    def __init__(
        self, *, queue_bytes: int, batch_bytes: int, max_store_batches: int = 1, patience_s: float = 1.0
    ) -> None:
        self.queue_bytes = queue_bytes
        self.patience_s = patience_s
        self._batch_bytes = batch_bytes
        self._max_store_batches = max_store_batches
        self._loads: deque[L] = deque()
        self._stores: deque[tuple[int, S]] = deque()
        self._held_since_s: float | None = None
        self.loads_running = 0
        self.store_batches_running = 0
        self.stored_bytes_held = 0

    @property
    def idle(self) -> bool:
        """Whether no store waits or runs."""
        return not self._stores and not self.store_batches_running

    @property
    def empty(self) -> bool:
        """Whether nothing waits, load or store."""
        return not self._stores and not self._loads

    @property
    def stores_waiting(self) -> int:
        return len(self._stores)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a store of `num_bytes` may join: bytes count until their batch has ended; one store always may."""
        return not self.stored_bytes_held or self.stored_bytes_held + num_bytes <= self.queue_bytes

    def add_load(self, load: L) -> None:
        """Queues a load."""
        self._loads.append(load)

    def remove_load(self, load: L) -> bool:
        """Takes back a load that has not begun."""
        if load in self._loads:
            self._loads.remove(load)
            return True
        return False

    def add_store(self, store: S, num_bytes: int) -> None:
        """Queues a store; the caller has asked `has_room`."""
        self._stores.append((num_bytes, store))
        self.stored_bytes_held += num_bytes

    def take_back_stores(self) -> list[S]:
        """Empties the queue of stores that have not begun."""
        taken = [store for _, store in self._stores]
        self.stored_bytes_held -= sum(num_bytes for num_bytes, _ in self._stores)
        self._stores.clear()
        return taken

    def begin_load(self) -> None:
        """Counts a load that runs beside the queue."""
        self.loads_running += 1

    def end_load(self) -> None:
        """Ends a load, of the queue or beside it."""
        self.loads_running -= 1

    def next_load(self) -> L | None:
        """The load that begins now, or None."""
        if not self._loads:
            return None
        self.loads_running += 1
        return self._loads.popleft()

    def next_stores(self, now_s: float) -> StoreBatch[S] | None:
        """The batch of stores that begins now, or None."""
        if not self._stores or self.store_batches_running >= self._max_store_batches:
            return None
        if self._loads or self.loads_running:
            if self._held_since_s is None:
                self._held_since_s = now_s
            if now_s - self._held_since_s < self.patience_s:
                return None
        self._held_since_s = None
        items: list[S] = []
        size = 0
        while self._stores and (not items or size + self._stores[0][0] <= self._batch_bytes):
            num_bytes, store = self._stores.popleft()
            items.append(store)
            size += num_bytes
        self.store_batches_running += 1
        return StoreBatch(tuple(items), size)

    def end_stores(self, batch: StoreBatch[S]) -> None:
        """Ends a batch and frees its bytes."""
        self.store_batches_running -= 1
        self.stored_bytes_held -= batch.num_bytes
