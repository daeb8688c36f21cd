"""A tier that keeps no bytes: for what the rest of a path costs, and for models of slower places around it."""

import threading
from collections.abc import Iterator, Sequence

from kvbench.core.block_key import BlockKey
from kvbench.core.units import MIB
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.counters import TierCounters, unfit, wrong_buffer
from kvbench.tiers.spec import TierSpec

_ZEROS = bytes(MIB)


def open_null(spec: TierSpec, *, block_bytes: int, name: str) -> "NullTier":
    """The tier that `null:` spells."""
    del spec
    return NullTier(name=name, block_bytes=block_bytes)


class NullTier:
    """Takes every block and keeps only its name. A block of zeros loads again; any other is a miss.

    So it is `/dev/null` and `/dev/zero` in one, and still never returns a byte that was not stored.
    """

    def __init__(self, *, name: str = "null", block_bytes: int) -> None:
        self.name, self.description, self.block_bytes = name, "keeps no bytes", block_bytes
        self._lock = threading.Lock()
        self._zeros: dict[BlockKey, int] = {}
        self._counters = TierCounters()

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Looks whether a block is zeros."""
        return self._counters.stored(blocks, [self._store(block) for block in blocks])

    def _store(self, block: Block) -> Outcome:
        refusal = unfit(block, self.block_bytes)
        if refusal is not None:
            return refusal
        zeros = _all_zero(block.data.cast("B"))
        with self._lock:
            if block.key in self._zeros:
                return EXISTS
            if zeros:
                self._zeros[block.key] = block.data.nbytes
        return OK

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Zeros, or a miss."""
        return self._counters.loaded(wanted, [self._load(want) for want in wanted])

    def _load(self, want: Wanted) -> Outcome:
        with self._lock:
            size = self._zeros.get(want.key)
        if size is None:
            return MISS
        refusal = wrong_buffer(want.into, size)
        if refusal is not None:
            return refusal
        into = want.into.cast("B")
        for start in range(0, size, len(_ZEROS)):
            piece = into[start : start + len(_ZEROS)]
            copy_bytes(piece, memoryview(_ZEROS)[: len(piece)])
        return OK

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Blocks of zeros that were stored."""
        with self._lock:
            return [key in self._zeros for key in keys]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Forgets names."""
        with self._lock:
            found = [self._zeros.pop(key, None) is not None for key in keys]
        self._counters.evicted(sum(found))
        return found

    def entries(self) -> Iterator[Entry]:
        """Blocks of zeros that were stored."""
        with self._lock:
            return iter([Entry(key, size) for key, size in self._zeros.items()])

    def stats(self) -> TierStats:
        """Counters; nothing takes room."""
        with self._lock:
            blocks = len(self._zeros)
        return self._counters.stats(blocks=blocks, used_bytes=0, capacity_bytes=None)

    def close(self) -> None:
        """Forgets all."""
        with self._lock:
            self._zeros.clear()


def _all_zero(data: memoryview) -> bool:
    import numpy as np

    return not np.frombuffer(data, dtype=np.uint8).max()
