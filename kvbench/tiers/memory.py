"""A tier over any pool of memory: an index, room for blocks, and copies that nobody has to wait for."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.counters import TierCounters, unfit, wrong_buffer
from kvbench.tiers.slots import Parts

_FULL = Outcome("full", "no room; evict blocks and try again")
_CLOSED = Outcome("failed", "the tier is closed")


class PoolError(KvbenchError):
    """The memory did not take or give a block: a GPU that has failed."""


class Pool(Protocol):
    """Memory that blocks lie in. `allocate` and `free` are called under the tier's lock, copies are not.

    Copies raise `PoolError` and nothing else.
    """

    @property
    def description(self) -> str:
        """What the memory is, in words."""
        ...

    def allocate(self, num_bytes: int) -> Parts | None:
        """Room for a block, or None."""
        ...

    def free(self, parts: Parts) -> None:
        """Gives room back."""
        ...

    def write(self, parts: Parts, data: memoryview) -> None:
        """Copies a block into its room."""
        ...

    def read(self, parts: Parts, into: memoryview) -> None:
        """Copies a block out."""
        ...

    def shrink(self) -> int:
        """Gives memory that nothing lies in back to the system; returns bytes."""
        ...

    def shrink_idle(self) -> int:
        """Gives back what nothing has lain in for long enough; returns bytes."""
        ...

    def close(self) -> None:
        """Gives all memory back; may be called again."""
        ...


class _Held:
    """A block in the pool. Its room is free again once it is gone from the index and nobody copies from it."""

    __slots__ = ("gone", "num_bytes", "parts", "users")

    def __init__(self, parts: Parts, num_bytes: int) -> None:
        self.parts, self.num_bytes, self.users, self.gone = parts, num_bytes, 0, False


class MemoryTier:
    """Blocks in a pool of this process. `capacity_bytes` bounds the blocks' own bytes."""

    def __init__(self, pool: Pool, *, name: str, block_bytes: int, capacity_bytes: int) -> None:
        self.name, self.description = name, pool.description
        self.block_bytes, self._capacity_bytes = block_bytes, capacity_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._index: dict[BlockKey, _Held] = {}
        self._used_bytes = 0
        self._copying = 0
        self._counters = TierCounters()
        self._closed = False

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Blocks become visible one by one, each after its last byte."""
        return self._counters.stored(blocks, [self._store(block) for block in blocks])

    def _store(self, block: Block) -> Outcome:
        refusal = unfit(block, self.block_bytes)
        if refusal is not None:
            return refusal
        size = block.data.nbytes
        with self._lock:
            if self._closed:
                return _CLOSED
            if block.key in self._index:
                return EXISTS
            parts = self._pool.allocate(size) if self._used_bytes + size <= self._capacity_bytes else None
            if parts is None:
                return _FULL
            self._used_bytes += size
            self._copying += 1
        held = _Held(parts, size)
        try:
            self._pool.write(parts, block.data)
        except BaseException as error:
            with self._lock:
                self._copying -= 1
                self._release(held)
            if isinstance(error, PoolError):
                return Outcome("failed", str(error))
            raise
        with self._lock:
            self._copying -= 1
            return self._publish(block.key, held)

    def _publish(self, key: BlockKey, held: _Held) -> Outcome:
        if not self._closed and key not in self._index:
            self._index[key] = held
            return OK
        self._release(held)  # closed, or stored by another thread meanwhile
        return _CLOSED if self._closed else EXISTS

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Copies out; a block that is evicted meanwhile keeps its room until the copy has ended."""
        return self._counters.loaded(wanted, [self._load(want) for want in wanted])

    def _load(self, want: Wanted) -> Outcome:
        with self._lock:
            held = self._index.get(want.key)
            if held is None:
                return MISS
            refusal = wrong_buffer(want.into, held.num_bytes)
            if refusal is not None:
                return refusal
            held.users += 1
        try:
            self._pool.read(held.parts, want.into)
        except PoolError as error:
            return Outcome("failed", str(error))
        finally:
            self._let_go(held)
        return OK

    @contextmanager
    def held_parts(self, key: BlockKey) -> Iterator[Parts | None]:
        """Where in the pool a block lies, or None; its room stays as it is until the end of the `with`."""
        with self._lock:
            held = self._index.get(key)
            if held is not None:
                held.users += 1
        try:
            yield None if held is None else held.parts
        finally:
            if held is not None:
                self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            if held.gone and not held.users:
                self._release(held)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """By the index."""
        with self._lock:
            return [key in self._index for key in keys]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Drops blocks from the index, and their room as soon as no copy uses it."""
        found = []
        with self._lock:
            for key in keys:
                held = self._index.pop(key, None)
                found.append(held is not None)
                if held is not None:
                    held.gone = True
                    if not held.users:
                        self._release(held)
        self._counters.evicted(sum(found))
        return found

    def _release(self, held: _Held) -> None:
        self._used_bytes -= held.num_bytes
        self._pool.free(held.parts)
        self._close_pool()

    def entries(self) -> Iterator[Entry]:
        """What is held at this moment."""
        with self._lock:
            found = [Entry(key, held.num_bytes) for key, held in self._index.items()]
        return iter(found)

    def stats(self) -> TierStats:
        """Counters and fill; bytes are those of the blocks."""
        with self._lock:
            self._pool.shrink_idle()
            blocks, used_bytes = len(self._index), self._used_bytes
        return self._counters.stats(blocks=blocks, used_bytes=used_bytes, capacity_bytes=self._capacity_bytes)

    def shrink(self) -> int:
        """Gives memory that nothing lies in back to the system now, and says how much."""
        with self._lock:
            return self._pool.shrink()

    def close(self) -> None:
        """Drops everything; memory goes when the last copy has ended."""
        with self._lock:
            self._closed = True
            index, self._index = self._index, {}
            for held in index.values():
                held.gone = True
                if not held.users:
                    self._used_bytes -= held.num_bytes
            self._close_pool()

    def _close_pool(self) -> None:
        if self._closed and not self._copying and not self._used_bytes:
            self._pool.close()
