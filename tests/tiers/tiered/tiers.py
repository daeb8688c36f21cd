"""For tests of the tiered store: a tier that is a dictionary with switches, a clock set by hand, numbered blocks."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvbench.core.block_key import BlockKey, KvIdentity
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, Result, TierStats, Wanted

BLOCK_BYTES = 64
IDENTITY = KvIdentity(
    model="m", model_version="1", tokenizer_version="1", dtype="bf16", page_tokens=16, layers=(0, 2), attention="gqa"
)


def key_of(number: int, identity: KvIdentity = IDENTITY) -> BlockKey:
    return BlockKey(identity.fingerprint, sha256(number.to_bytes(8, "little")).digest())


def content(key: BlockKey, num_bytes: int = BLOCK_BYTES) -> bytes:
    """The only bytes that are right for a key."""
    seed = sha256(key.identity + key.prefix).digest()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def views(keys: Sequence[BlockKey], num_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(content(key, num_bytes)) for key in keys]


def buffers(count: int, num_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


@dataclass
class HandClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class DictTier:
    """Keeps blocks in a dictionary that outlives it, so that a second one over it is the tier opened again."""

    name: str = "dram"
    blocks: dict[BlockKey, bytes] = field(default_factory=dict)
    capacity_bytes: int | None = None
    store_result: Result | None = None
    load_result: Result | None = None
    before_store: Callable[[Sequence[Block]], None] | None = None
    before_load: Callable[[Sequence[Wanted]], None] | None = None
    log: list[tuple[str, tuple[BlockKey, ...]]] = field(default_factory=list)
    crcs: dict[BlockKey, int | None] = field(default_factory=dict)
    corrupt: set[BlockKey] = field(default_factory=set)
    closed: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        if self.before_store:
            self.before_store(blocks)
        self.log.append(("store", tuple(block.key for block in blocks)))
        return [self._store(block) for block in blocks]

    def _store(self, block: Block) -> Outcome:
        if self.store_result is not None:
            return Outcome(self.store_result, "as told")
        with self._lock:
            if block.key in self.blocks:
                return EXISTS
            used = sum(len(data) for data in self.blocks.values()) if self.capacity_bytes is not None else 0
            if self.capacity_bytes is not None and used + len(block.data) > self.capacity_bytes:
                return Outcome("full")
            self.blocks[block.key] = bytes(block.data)
            self.corrupt.discard(block.key)
            self.crcs[block.key] = block.crc32c
        return OK

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        if self.before_load:
            self.before_load(wanted)
        self.log.append(("load", tuple(each.key for each in wanted)))
        return [self._load(each) for each in wanted]

    def _load(self, wanted: Wanted) -> Outcome:
        if self.load_result is not None:
            if self.load_result == "corrupt":
                self.blocks.pop(wanted.key, None)
            wanted.into[:] = b"\xee" * len(wanted.into)
            return Outcome(self.load_result, "as told")
        with self._lock:
            if wanted.key in self.corrupt:
                self.corrupt.discard(wanted.key)
                self.blocks.pop(wanted.key, None)
                return Outcome("corrupt", "as told")
            data = self.blocks.get(wanted.key)
        if data is None:
            return MISS
        wanted.into[:] = data
        return OK

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.log.append(("evict", tuple(keys)))
        with self._lock:
            return [self.blocks.pop(key, None) is not None for key in keys]

    def entries(self) -> Iterator[Entry]:
        with self._lock:
            held = list(self.blocks.items())
        yield from (Entry(key, len(data)) for key, data in held)

    def stats(self) -> TierStats:
        with self._lock:
            used = sum(len(data) for data in self.blocks.values())
        return TierStats(blocks=len(self.blocks), used_bytes=used, capacity_bytes=self.capacity_bytes)

    def close(self) -> None:
        self.closed = True
