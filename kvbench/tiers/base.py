"""The protocol of tiers: batches of whole KV blocks in and out of one place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbench.core.block_key import BlockKey

# ok: done (a store: the tier has the block, and with durability on it survives a crash). exists: it had the block
# already. miss: not there. full: no room, the owner may evict and try again. corrupt: the bytes are not those that were
# stored (checksum, length or name differ); the tier has dropped the block. timeout, failed: the place did not do it.
Result = Literal["ok", "exists", "miss", "full", "corrupt", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one block of a batch."""

    result: Result
    reason: str = ""


OK = Outcome("ok")
EXISTS = Outcome("exists")
MISS = Outcome("miss")


@dataclass(frozen=True, slots=True)
class Block:
    """A block to store. `data` is C-contiguous bytes that do not change during the call; `crc32c` is of `data`.

    None: the tier computes it where it keeps one.
    """

    key: BlockKey
    data: memoryview
    crc32c: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to load into the caller's buffer, whose length is the block's.

    What the buffer holds after anything but ok is undefined.
    """

    key: BlockKey
    into: memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that a tier holds, as it is found when a tier is opened again."""

    key: BlockKey
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters since the tier was opened, and what it holds now. `capacity_bytes=None`: unbounded or unknown."""

    blocks: int
    used_bytes: int
    capacity_bytes: int | None
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    misses: int = 0
    corrupt: int = 0
    timeouts: int = 0
    failures: int = 0


class Tier(Protocol):
    """One place for KV blocks. Every method may be called from several threads.

    Outcomes come in the order of the batch; one block's failure never fails another, and no method raises because the
    place is slow, full, damaged or gone. A tier does not choose what to evict: its owner does.
    """

    @property
    def name(self) -> str:
        """What tables and metrics call it: `hbm`, `dram`, `file`, `s3` and so on."""
        ...

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Keeps blocks: ok, exists, full, timeout or failed each."""
        ...

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Fills the buffers: ok, miss, corrupt, timeout or failed each."""
        ...

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks a load would find; a place that does not answer has none."""
        ...

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Lets go of blocks; True where one was there."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Every block held now; after opening, what survived."""
        ...

    def stats(self) -> TierStats:
        """Counters and fill."""
        ...

    def close(self) -> None:
        """Ends the use; what is durable stays."""
        ...
