"""What a case of tiers drives: tiers with their sizes, blocks and their bytes, and callers that begin together."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB, format_bytes, seconds_from_ns
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.scratch_file import usable_file_bytes
from kvbench.tiers.base import Tier
from kvbench.tiers.spec import TierSpec
from kvbench.tiers.tiered import StoreStats, TieredStore, TierSettings, WritePolicy

T = TypeVar("T")

DIRECTORIES = ("file", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWork:
    """What to drive. `specs` and `names` are the tiers of the stack, nearest first; `model` names the blocks.

    `tier`: the number of the one tier to measure by itself (case "tier-alone"); `policy` is that of every tier but the
    first (case "tier-policy").
    """

    specs: Sequence[str]
    names: Sequence[str]
    tier: int
    policy: WritePolicy
    model: str
    page_tokens: int
    block_bytes: int
    blocks: int
    batches: Sequence[int]
    mixed_batch: int
    concurrency: int
    load_share_ratio: float
    queue_bytes: int
    threshold: int
    repeats: int
    warmups: int
    pool_bytes: int
    file_bytes: int
    time_s: float
    wait_s: float


def opened_store(settings: Sequence[TierSettings], work: TierWork) -> TieredStore:
    """The store of a case; a store that finds a queue full drops after a second, so that no phase waits long.

    A batch takes at most an eighth of the smallest tier: room for a larger one would be made at the cost of blocks that
    are about to be loaded.
    """
    smallest = min(one.capacity_bytes for one in settings if one.capacity_bytes is not None)
    return TieredStore(
        settings,
        store_queue_bytes=work.queue_bytes,
        batch_bytes=max(min(4 * MIB, smallest // 8), work.block_bytes),
        store_wait_s=1.0,
    )


def tier_settings(tier: Tier, spec: TierSpec, work: TierWork) -> TierSettings:
    """No watermarks, no promotion: what moves is what the case moves. Blocks of other runs stay out of it."""
    bound = work.file_bytes if innermost_spec(spec).scheme in DIRECTORIES else work.pool_bytes
    return TierSettings(
        tier=tier,
        capacity_bytes=innermost_spec(spec).size_bytes or bound,
        write=work.policy,
        threshold=work.threshold,
        high_watermark=1,
        low_watermark=1,
        promote=False,
        recover=False,
    )


def innermost_spec(spec: TierSpec) -> TierSpec:
    """The tier inside every wrapper."""
    while spec.inner is not None:
        spec = spec.inner
    return spec


def sized_spec(spec: TierSpec, work: TierWork) -> TierSpec:
    """The tier with a size, so that it cannot grow without bound; files take at most half of what is free."""
    if spec.inner is not None:
        return replace(spec, inner=sized_spec(spec.inner, work))
    if spec.scheme in ("hbm", "dram"):
        return replace(spec, size_bytes=spec.size_bytes or work.pool_bytes)
    if spec.scheme == "file" or spec.plugin == "posix":
        # the directory itself is a new one; its parent is the one that was named
        size = usable_file_bytes(Path(spec.location).parent, spec.size_bytes or work.file_bytes)
        return replace(spec, size_bytes=size)
    return spec


def capacity_blocks(stats: StoreStats, name: str, work: TierWork) -> int:
    """Whole blocks that fit; a file's slots are whole pages, so a tenth is left alone."""
    capacity = stats.tiers[name].capacity_bytes
    blocks = work.blocks if capacity is None else capacity * 9 // 10 // work.block_bytes
    if blocks < work.concurrency:
        raise KvbenchError(
            f"tier {name} of {format_bytes(capacity or 0)} holds {blocks} blocks of {format_bytes(work.block_bytes)}; "
            "give it a larger size, or smaller pages with --page-tokens"
        )
    return blocks


class ProbeBlocks:
    """Keys and bytes of distinct blocks: random, or zeros where a tier keeps nothing else."""

    def __init__(self, work: TierWork, count: int, *, zeros: bool) -> None:
        from crc32c import crc32c

        self.count, self.zeros = count, zeros
        self._work = work
        self._crc32c: Callable[[memoryview], int] = crc32c
        self._identity = KvIdentity(
            model=work.model,
            model_version="",
            tokenizer_version="",
            dtype="bf16",
            page_tokens=work.page_tokens,
            layers=(0, 1),
            attention="gqa",
            extra=f"kvbench probe {random.SystemRandom().getrandbits(64):016x}",
        )
        self.keys = block_keys(range(count * work.page_tokens), self._identity)
        memory = memoryview(bytearray(count * work.block_bytes))
        if not zeros:
            random_bytes_into(memory, seed=3)
        self.data = [memory[at * work.block_bytes : (at + 1) * work.block_bytes] for at in range(count)]
        self._checksums = [crc32c(view) for view in self.data]

    def new_keys(self, number: int, count: int) -> tuple[BlockKey, ...]:
        """Keys of a prompt that nobody has stored yet."""
        return block_keys([1 << 31 | number] * (count * self._work.page_tokens), self._identity)

    def buffers(self, count: int) -> list[memoryview]:
        """Memory to load into, touched already."""
        memory = memoryview(bytearray(b"\xff") * (count * self._work.block_bytes))
        return [memory[at * self._work.block_bytes : (at + 1) * self._work.block_bytes] for at in range(count)]

    def check(self, index: int, view: memoryview, name: str) -> None:
        """Refuses a block that is not the one that was stored."""
        if self._crc32c(view) != self._checksums[index]:
            raise KvbenchError(
                f"a block came back from {name} with other bytes; do not trust this tier, and check memory and disk"
            )

    def checksum_bytes_per_s(self, views: Sequence[memoryview]) -> float:
        """CRC32C by itself, best of five passes over some blocks."""
        best = float("inf")
        for _ in range(5):
            begin_ns = time.perf_counter_ns()
            for view in views:
                self._crc32c(view)
            best = min(best, seconds_from_ns(time.perf_counter_ns() - begin_ns))
        return sum(map(len, views)) / max(best, 1e-9)


class Callers:
    """Threads that begin a call together; one caller is this thread itself."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count = count
        self._wait_s = wait_s
        self._barrier = threading.Barrier(count)
        self._pool = ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "Callers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def together(self, calls: Sequence[Callable[[], T]]) -> tuple[float, list[float], list[T]]:
        """Seconds from the first begin to the last end, seconds of each call, and what they returned."""
        if self._pool is None:
            spans = [self._timed(call) for call in calls]
        else:
            futures = [self._pool.submit(self._timed, call) for call in calls]
            spans = [future.result(self._wait_s) for future in futures]
        begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
        return (
            seconds_from_ns(end - begin),
            [seconds_from_ns(stop - start) for start, stop, _ in spans],
            [result for _, _, result in spans],
        )

    def _timed(self, call: Callable[[], T]) -> tuple[int, int, T]:
        if self._pool is not None:
            self._barrier.wait(self._wait_s)
        begin = time.perf_counter_ns()
        result = call()
        return begin, time.perf_counter_ns(), result
