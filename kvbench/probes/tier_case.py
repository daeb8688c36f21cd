"""Cases "tier-alone" and "tier-policy": drive a tiered store over real tiers; run in the child."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.core.errors import KvbenchError
from kvbench.core.units import format_bytes, seconds_from_ns
from kvbench.probes.affinity import disk_numa_node, stay_on_node
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.machine import filesystem_kind, runs_in_a_virtual_machine
from kvbench.probes.scratch_file import MEMORY_FILESYSTEMS, usable_file_bytes
from kvbench.probes.turns import monotonic, turns
from kvbench.tiers.base import Tier
from kvbench.tiers.file.tier import FileTier
from kvbench.tiers.page_cache import PageCache
from kvbench.tiers.registry import default_name, open_tier
from kvbench.tiers.spec import TierSpec, parse_tier_spec
from kvbench.tiers.tiered import CALLER, LoadResult, StoreStats, TieredStore, TierSettings, WritePolicy

Emit = Callable[[dict[str, Any]], None]
T = TypeVar("T")

_CHECKSUMMING = ("file", "s3", "redis", "mooncake", "nixl")
_DIRECTORIES = ("file", "nixl")
_FEEDERS = 2
_ROUNDS = 4
_FULL_RATIO = 0.75
_FILL_S = 3.0
_LOOKS_AT_CACHE_EVERY = 32  # a look at a large file takes milliseconds
_MOST_CACHED_RATIO = 0.02  # headers of blocks go through the cache


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


def measure_alone(case: dict[str, Any], emit: Emit) -> None:
    """Stores into one tier and loads from it; a lower tier stands behind a disabled one, so that its queue is used."""
    work = TierWork(**case)
    spec = _sized(parse_tier_spec(work.specs[work.tier]), work)
    name = work.names[work.tier]
    innermost = _innermost(spec)
    placement = stay_on_node(
        disk_numa_node(Path(innermost.location).parent) if innermost.scheme in _DIRECTORIES else None
    )
    emit({"record": "stage", "text": f"opening {name}"})
    tier = open_tier(spec, block_bytes=work.block_bytes, name=name)
    above = [TierSettings(tier=open_tier("null:", block_bytes=work.block_bytes, name="disabled above"), enabled=False)]
    settings = [*(above if work.tier else []), _settings(tier, spec, work)]
    store = _opened_store(settings, work)
    capacity = _capacity_blocks(store.stats(), name, work)
    blocks = _Blocks(work, min(work.blocks, capacity), zeros=innermost.scheme == "null")
    with ExitStack() as stack:
        callers = stack.enter_context(_Callers(work.concurrency, work.wait_s))
        alone = _Alone(work, store, tier, name, blocks, callers, emit)
        alone.warn_zeros()
        alone.store()
        cache = stack.enter_context(_Cache(tier, innermost))
        alone.load(cache, placement)
    store.clear()
    store.close(timeout_s=work.wait_s)


def measure_policy(case: dict[str, Any], emit: Emit) -> None:
    """Stores new blocks into the whole stack, checks the bytes of every edge, then loads beside queued stores."""
    work = TierWork(**case)
    specs = [_sized(parse_tier_spec(text), work) for text in work.specs]
    emit({"record": "stage", "text": "opening the stack"})
    settings = [
        _settings(open_tier(spec, block_bytes=work.block_bytes, name=name), spec, work)
        for spec, name in zip(specs, work.names, strict=True)
    ]
    store = _opened_store(settings, work)
    blocks = _Blocks(work, work.blocks, zeros=any(_innermost(spec).scheme == "null" for spec in specs))
    with _Callers(work.concurrency, work.wait_s) as callers:
        stack = _Stack(work, store, blocks, callers, emit)
        for each in settings:
            file = _file_tier(each.tier)
            if file is not None and not file.direct:
                stack.warn_warm(each.tier.name)
        stack.store_phase()
        for number, name in enumerate(work.names):
            stack.mixed_phase(number, name)
    store.clear()
    store.close(timeout_s=work.wait_s)


def _opened_store(settings: Sequence[TierSettings], work: TierWork) -> TieredStore:
    return TieredStore(settings, store_queue_bytes=work.queue_bytes, store_wait_s=1.0)


def _settings(tier: Tier, spec: TierSpec, work: TierWork) -> TierSettings:
    """No watermarks, no promotion: what moves is what the case moves. Blocks of other runs stay out of it."""
    bound = work.file_bytes if _innermost(spec).scheme in _DIRECTORIES else work.pool_bytes
    return TierSettings(
        tier=tier,
        capacity_bytes=_innermost(spec).size_bytes or bound,
        write=work.policy,
        threshold=work.threshold,
        high_watermark=1,
        low_watermark=1,
        promote=False,
        recover=False,
    )


def _innermost(spec: TierSpec) -> TierSpec:
    while spec.inner is not None:
        spec = spec.inner
    return spec


def _sized(spec: TierSpec, work: TierWork) -> TierSpec:
    """The tier with a size, so that it cannot grow without bound; files take at most half of what is free."""
    if spec.inner is not None:
        return replace(spec, inner=_sized(spec.inner, work))
    if spec.scheme in ("hbm", "dram"):
        return replace(spec, size_bytes=spec.size_bytes or work.pool_bytes)
    if spec.scheme == "file" or spec.plugin == "posix":
        # the directory itself is a new one; its parent is the one that was named
        size = usable_file_bytes(Path(spec.location).parent, spec.size_bytes or work.file_bytes)
        return replace(spec, size_bytes=size)
    return spec


def _capacity_blocks(stats: StoreStats, name: str, work: TierWork) -> int:
    """Whole blocks that fit; a file's slots are whole pages, so a tenth is left alone."""
    capacity = stats.tiers[name].capacity_bytes
    blocks = work.blocks if capacity is None else capacity * 9 // 10 // work.block_bytes
    if blocks < work.concurrency:
        raise KvbenchError(
            f"tier {name} of {format_bytes(capacity or 0)} holds {blocks} blocks of {format_bytes(work.block_bytes)}; "
            "give it a larger size, or smaller pages with --page-tokens"
        )
    return blocks


def _file_tier(tier: Tier) -> FileTier | None:
    """The file tier inside every wrapper, if it is one."""
    while hasattr(tier, "inner"):
        tier = tier.inner
    return tier if isinstance(tier, FileTier) else None


class _Blocks:
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


class _Callers:
    """Threads that begin a call together; one caller is this thread itself."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count = count
        self._wait_s = wait_s
        self._barrier = threading.Barrier(count)
        self._pool = ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "_Callers":
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


class _Cache:
    """The page cache of a file tier, if the tier is one: dropped before loads, or looked at after direct ones."""

    def __init__(self, tier: Tier, innermost: TierSpec) -> None:
        file = _file_tier(tier)
        self._scheme = innermost.scheme
        self._directory = file.directory if file is not None else None
        self.direct = file is not None and file.direct
        self._stack = ExitStack()
        self._cache: PageCache | None = None
        self._num_bytes = self._looks = 0

    def __enter__(self) -> "_Cache":
        if self._directory is not None:
            from kvbench.tiers.file.directory import FILE_NAME

            file = self._stack.enter_context((self._directory / FILE_NAME).open("r+b"))
            self._num_bytes = file.seek(0, 2)
            self._cache = PageCache(file.fileno(), self._num_bytes)
            self._cache.drop()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def buffered(self) -> bool:
        """Whether it is a file tier whose blocks go through the page cache."""
        return self._directory is not None and not self.direct

    def before_load(self) -> None:
        """Makes a buffered load cold."""
        if self._cache is not None and self.buffered:
            self._cache.drop_and_note(0, self._num_bytes)

    def after_load(self) -> None:
        """Sees now and then whether direct loads went through the cache after all."""
        if self._cache is not None and self.direct:
            if self._looks % _LOOKS_AT_CACHE_EVERY == 0:
                self._cache.note(0, self._num_bytes)
            self._looks += 1

    def coldness(self) -> dict[str, Any]:
        """Whether loads were cold, and how that was seen."""
        if self._cache is None or self._directory is None:
            memory = self._scheme in ("hbm", "dram", "null")
            why = "memory has no cold state" if memory else "what the store keeps in memory cannot be seen from here"
            return {"cold": None, "cold_evidence": why}
        kind = filesystem_kind(self._directory)
        if kind in MEMORY_FILESYSTEMS:
            return {"cold": False, "cold_evidence": f"{kind} keeps its files in memory"}
        how = "O_DIRECT bypasses the page cache" if self.direct else "the page cache was dropped before every load"
        ratio = self._cache.most_resident_ratio
        if ratio is None:
            return {"cold": None, "cold_evidence": f"{how}; not seen, this system cannot tell (no mincore)"}
        when = "after" if self.direct else "before"
        evidence = f"{how}; mincore saw at most {ratio:.1%} of the file cached {when} a load, headers included"
        if runs_in_a_virtual_machine():
            evidence += "; caches of the hypervisor below cannot be seen"
        return {"cold": ratio < _MOST_CACHED_RATIO, "cold_evidence": evidence}


class _Driver:
    """What both cases share: timed stores and loads of blocks, checked outside the clock."""

    def __init__(self, work: TierWork, store: TieredStore, blocks: _Blocks, callers: _Callers, emit: Emit) -> None:
        self._work, self._store, self._blocks, self._callers, self._emit = work, store, blocks, callers, emit
        self.verified = self.failed = 0
        self._last_failure = ""
        self._random = random.Random(5)
        self._into: dict[int, list[list[memoryview]]] = {}

    def _stage(self, text: str) -> None:
        self._emit({"record": "stage", "text": text})

    def _warn(self, code: str, message: str, remedy: str) -> None:
        self._emit({"record": "warning", "code": code, "message": message, "remedy": remedy})

    def warn_zeros(self) -> None:
        """null: keeps only blocks of zeros."""
        if self._blocks.zeros:
            self._warn(
                "zeros", "blocks are all zeros, since null: keeps nothing else", "read it as a model, not as a medium"
            )

    def _store_from(self, first: int, batch: int, waited_for: Sequence[str]) -> bool:
        """Stores the next blocks, one batch per caller; emits the sample if all of them arrived."""
        ranges = [range(first + at * batch, first + (at + 1) * batch) for at in range(self._callers.count)]
        seconds, calls, results = self._callers.together([self._storing(one) for one in ranges])
        bad: dict[str, int] = {}
        for _, counts in results:
            for tier in waited_for:
                for result, count in counts.get(tier, {}).items():
                    if result not in ("ok", "exists"):
                        bad[result] = bad.get(result, 0) + count
        if bad:
            self.failed += sum(bad.values())
            self._last_failure = ", ".join(f"{count} {result}" for result, count in bad.items())
            return False
        blocks = batch * len(ranges)
        self._sample("store", blocks, seconds, calls, call_s=median([call for call, _ in results]))
        return True

    def _storing(self, indexes: range) -> Callable[[], tuple[float, Mapping[str, Mapping[str, int]]]]:
        keys, data = [self._blocks.keys[i] for i in indexes], [self._blocks.data[i] for i in indexes]

        def call() -> tuple[float, Mapping[str, Mapping[str, int]]]:
            begin_ns = time.perf_counter_ns()
            ticket = self._store.store(keys, data)
            call_s = seconds_from_ns(time.perf_counter_ns() - begin_ns)
            if not ticket.wait(self._work.wait_s):
                raise KvbenchError(f"a store was not ready within {self._work.wait_s:g} s; give the case more timeout")
            return call_s, ticket.results

        return call

    def _sample(
        self,
        phase: str,
        blocks: int,
        seconds: float,
        calls: Sequence[float],
        *,
        call_s: float | None = None,
        queue_ratio: float | None = None,
        tier: str = "",
    ) -> None:
        self._emit(
            {
                "record": "sample",
                "phase": phase,
                "tier": tier,
                "bytes": blocks * self._work.block_bytes,
                "blocks": blocks,
                "seconds": seconds,
                "call_s": call_s,
                "calls_s": list(calls) if len(calls) > 1 else [],
                "queue_ratio": queue_ratio,
            }
        )

    def _load(self, batch: int, among: Sequence[int], tier: str) -> tuple[float, list[float]] | None:
        """Loads random blocks, one batch per caller, and checks them after the clock; None when any was missing."""
        count = self._callers.count
        if batch not in self._into:
            self._into[batch] = [self._blocks.buffers(batch) for _ in range(count)]
        chosen = [self._random.sample(among, batch) for _ in range(count)]
        seconds, calls, results = self._callers.together(
            [self._loading(indexes, into) for indexes, into in zip(chosen, self._into[batch], strict=True)]
        )
        missing = [outcome for result in results for outcome in result.outcomes if outcome.result != "ok"]
        strayed = [name for result in results for name in result.tiers if name not in (None, tier)]
        if strayed:
            raise KvbenchError(f"a load meant for {tier} came from {strayed[0]}; please report this")
        for indexes, into, result in zip(chosen, self._into[batch], results, strict=True):
            for index, view, outcome in zip(indexes, into, result.outcomes, strict=True):
                if outcome.result == "ok":
                    self._blocks.check(index, view, tier)
                    self.verified += 1
        if missing:
            self.failed += len(missing)
            self._last_failure = f"{missing[0].result}: {missing[0].reason}".rstrip(": ")
            return None
        return seconds, calls

    def _loading(self, indexes: Sequence[int], into: Sequence[memoryview]) -> Callable[[], LoadResult]:
        keys = [self._blocks.keys[i] for i in indexes]
        return lambda: self._store.load(keys, into)

    def _flush(self) -> None:
        if not self._store.flush(self._work.wait_s):
            raise KvbenchError(f"queued stores were not done within {self._work.wait_s:g} s; give more timeout")


class _Alone(_Driver):
    """One tier: stores in turns of batch sizes, then loads."""

    def __init__(
        self,
        work: TierWork,
        store: TieredStore,
        tier: Tier,
        name: str,
        blocks: _Blocks,
        callers: _Callers,
        emit: Emit,
    ) -> None:
        super().__init__(work, store, blocks, callers, emit)
        self._tier, self._name = tier, name
        self._batches = [batch for batch in work.batches if batch * callers.count <= blocks.count]
        dropped = [batch for batch in work.batches if batch not in self._batches]
        if not self._batches:
            raise KvbenchError(
                f"tier {name} holds {blocks.count} blocks, fewer than one call of {work.batches[0]} by each caller; "
                "give it a larger size, or --set batch=1"
            )
        if dropped:
            self._warn(
                "sizes-dropped",
                f"calls of {', '.join(map(str, dropped))} blocks do not fit a tier of {blocks.count} blocks",
                "give the tier a larger size, or read the bandwidth as that of smaller calls",
            )

    def store(self) -> None:
        """The tier is emptied, outside the clock, whenever the distinct blocks are used up."""
        work, count = self._work, self._blocks.count
        self._stage(f"storing into {self._name}")
        for _ in range(max(work.warmups, 1)):
            self._fill()
            self._store.clear(self._name)
        at = good = 0
        for batch in turns(self._batches, repeats=work.repeats, time_s=work.time_s, clock=monotonic):
            if at + batch * self._callers.count > count:
                self._flush()
                self._store.clear(self._name)
                at = 0
            good += self._store_from(at, batch, [self._name])
            at += batch * self._callers.count
        if not good:
            raise KvbenchError(f"no store into {self._name} succeeded ({self._last_failure}); see what its place says")
        self._flush()
        self._store.clear(self._name)

    def _fill(self) -> None:
        step = max(self._batches)
        for first in range(0, self._blocks.count, step):
            indexes = range(first, min(first + step, self._blocks.count))
            self._storing(indexes)()
        self._flush()

    def load(self, cache: _Cache, placement: str) -> None:
        """Loads random blocks, in turns of batch sizes."""
        work = self._work
        self._stage(f"loading from {self._name}")
        self._fill()
        found = self._store.lookup(self._blocks.keys).tiers
        among = [index for index, name in enumerate(found) if name == self._name]
        batches = [batch for batch in self._batches if batch <= len(among)]
        if not batches:
            raise KvbenchError(
                f"{self._name} kept {len(among)} of {len(found)} blocks ({self._last_failure or 'no reason given'}); "
                "see what its place says"
            )
        for _ in range(work.warmups):
            for batch in batches:
                self._load(batch, among, self._name)
        good = 0
        for batch in turns(batches, repeats=work.repeats, time_s=work.time_s, clock=monotonic):
            cache.before_load()
            loaded = self._load(batch, among, self._name)
            cache.after_load()
            if loaded is not None:
                good += 1
                self._sample("load", batch * self._callers.count, loaded[0], loaded[1])
        if self.failed:
            self._warn(
                "failed-blocks",
                f"{self.failed} blocks were not stored or loaded ({self._last_failure}); their calls are no samples",
                "see what the tier's place says; an engine would have recomputed them",
            )
        if not good:
            raise KvbenchError(f"no load from {self._name} succeeded ({self._last_failure}); see what its place says")
        views = [view for callers in self._into[batches[-1]] for view in callers]
        scheme = default_name(parse_tier_spec(work.specs[work.tier]))
        self._emit(
            {
                "record": "facts",
                "placement": placement,
                "description": getattr(self._tier, "description", self._name),
                "blocks": self._blocks.count,
                "verified_blocks": self.verified,
                "failed_blocks": self.failed,
                "checksum_bytes_per_s": self._blocks.checksum_bytes_per_s(views),
                "checked_on_load": scheme in _CHECKSUMMING,
                **cache.coldness(),
            }
        )
        if cache.buffered:
            self._warn(
                "page-cache",
                f"{self._name} goes through the page cache: a store is ready when the cache has it, not the disk",
                "write direct=1 where the filesystem can, or fsync=fdatasync",
            )


class _Stack(_Driver):
    """All tiers under one policy."""

    def warn_warm(self, name: str) -> None:
        """Nobody drops the page cache while stores go through it."""
        self._warn(
            "page-cache",
            f"{name} goes through the page cache, which serves the loads beside stores",
            "read its cold loads where it is measured alone; write direct=1 where the filesystem can",
        )

    def store_phase(self) -> None:
        """Stores every block once, the last of them twice, and counts what crossed each edge."""
        work, names = self._work, tuple(self._work.names)
        self._stage(f"storing under {work.policy}")
        self.warn_zeros()
        step = min(work.mixed_batch, max(self._blocks.count // self._callers.count, 1))
        stored = 0
        for first in range(0, self._blocks.count - step * self._callers.count + 1, step * self._callers.count):
            self._store_from(first, step, names)
            stored += step * self._callers.count
        self._flush()
        stats = self._store.stats()
        room = [figures.capacity_bytes for figures in stats.tiers.values() if figures.capacity_bytes is not None]
        repeated = min(stored // 2, min(room) // 2 // work.block_bytes)
        for first in range(stored - repeated, stored, step):
            self._storing(range(first, min(first + step, stored)))()
        self._flush()
        stats = self._store.stats()
        self._emit(
            {
                "record": "facts",
                "about": "edges",
                "blocks": stored,
                "repeated_blocks": repeated,
                "edges": list(self._edges(stats, stored, repeated)),
            }
        )
        if self.failed:
            self._warn(
                "failed-blocks",
                f"{self.failed} blocks were not stored in some tier ({self._last_failure})",
                "see the bytes per edge, and the tier by itself",
            )

    def _edges(self, stats: StoreStats, stored: int, repeated: int) -> Iterator[dict[str, Any]]:
        """Counted and expected: all blocks, the repeated ones, or those that the tier above could not keep."""
        moving, above = stored, CALLER
        for number, name in enumerate(self._work.names):
            if number and self._work.policy == "write-through-selective":
                moving = {1: stored, 2: repeated}.get(self._work.threshold, 0)
            elif number and self._work.policy == "write-back":
                moving = max(moving - stats.tiers[above].ready_blocks, 0)
            figures = stats.edges.get((above, name))
            yield {
                "source": above,
                "target": name,
                "blocks": figures.blocks if figures else 0,
                "bytes": figures.bytes if figures else 0,
                "expected_blocks": moving,
                "expected_bytes": moving * self._work.block_bytes,
                "seconds": figures.seconds if figures else 0.0,
            }
            above = name

    def mixed_phase(self, number: int, name: str) -> None:
        """Loads from one tier in rounds, idle and saturated by turns; its blocks are pinned, so that they stay."""
        work, store = self._work, self._store
        self._stage(f"loads from {name} beside stores")
        store.clear()
        for other, tier in enumerate(work.names):
            store.set_enabled(tier, other >= number)
        capacity = _capacity_blocks(store.stats(), name, work)
        among = range(min(self._blocks.count, max(capacity // 2, 1)))
        batch = min(work.mixed_batch, len(among))
        keys = [self._blocks.keys[i] for i in among]
        store.pin(keys, [name])
        self.failed = 0
        for first in range(0, len(among), work.mixed_batch):
            self._storing(range(first, min(first + work.mixed_batch, len(among))))()
        self._flush()
        ready = [i for i, where in enumerate(store.lookup(keys).tiers) if where == name]
        if len(ready) < batch:
            self._warn(
                "no-mixed-loads",
                f"{name} kept {len(ready)} of {len(keys)} blocks, too few to load from it beside stores",
                "see the tier by itself",
            )
        else:
            self._mixed_rounds(name, batch, ready)
        store.unpin(keys)
        for tier in work.names:
            store.set_enabled(tier, True)

    def _mixed_rounds(self, name: str, batch: int, among: Sequence[int]) -> None:
        work = self._work
        feed = _Feed(work, self._store, self._blocks)
        stored_bytes, stored_s = 0, 0.0
        counts = {"idle": 0, "saturated": 0}
        try:
            for _ in range(_ROUNDS):
                for phase in ("idle", "saturated"):
                    if phase == "saturated":
                        feed.start()
                        feed.wait_until_full()
                    else:
                        self._flush()
                    before, begin = self._store.stats().tiers[name].stored_bytes, time.monotonic()
                    counts[phase] += self._round(phase, name, batch, among, feed, work.repeats - counts[phase])
                    if phase == "saturated":
                        stored_bytes += self._store.stats().tiers[name].stored_bytes - before
                        stored_s += time.monotonic() - begin
                        feed.pause()
        finally:
            feed.close()
        self._emit(
            {
                "record": "facts",
                "about": "mixed",
                "tier": name,
                "stored_bytes": stored_bytes,
                "stored_s": stored_s,
                "failed_blocks": self.failed,
            }
        )
        self._flush()

    def _round(self, phase: str, name: str, batch: int, among: Sequence[int], feed: "_Feed", most: int) -> int:
        """Loads until the round's time is over; each caller loads for a share of the time and pauses for the rest."""
        share = self._work.load_share_ratio
        end = time.monotonic() + self._work.time_s / _ROUNDS
        done = 0
        while done < most and (done == 0 or time.monotonic() < end):
            begin = time.monotonic()
            loaded = self._load(batch, among, name)
            if loaded is None:
                if time.monotonic() >= end:
                    break
                continue
            queue_ratio = feed.fill_ratio() if phase == "saturated" else None
            self._sample(phase, batch * self._callers.count, loaded[0], loaded[1], queue_ratio=queue_ratio, tier=name)
            done += 1
            pause = loaded[0] * (1 / share - 1) - (time.monotonic() - begin - loaded[0])
            if pause > 0:
                time.sleep(pause)
        return done


class _Feed:
    """Threads that store new blocks as fast as the store takes them, while they are let."""

    def __init__(self, work: TierWork, store: TieredStore, blocks: _Blocks) -> None:
        self._work, self._store, self._blocks = work, store, blocks
        self._go, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_FEEDERS)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Stores begin."""
        self._go.set()

    def pause(self) -> None:
        """No further store begins."""
        self._go.clear()

    def close(self) -> None:
        """Ends the threads after the store they are in."""
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join(self._work.wait_s)

    def fill_ratio(self) -> float:
        """How full the fullest queue is."""
        queued = [figures.queued_bytes for figures in self._store.stats().tiers.values()]
        return min(max(queued) / self._work.queue_bytes, 1.0)

    def wait_until_full(self) -> None:
        """Returns when a queue is nearly full, or after a while: a fast tier never lets it fill."""
        deadline = time.monotonic() + min(_FILL_S, self._work.time_s)
        while time.monotonic() < deadline and self.fill_ratio() < _FULL_RATIO:
            time.sleep(0.005)

    def _run(self) -> None:
        batch = min(self._work.mixed_batch, self._blocks.count)
        again = self._work.threshold if self._work.policy == "write-through-selective" else 1
        while not self._stop.is_set():
            if not self._go.wait(0.05) or self._stop.is_set():
                continue
            with self._lock:
                self._next += 1
                number = self._next
            first = number * batch % max(self._blocks.count - batch, 1)
            keys = self._blocks.new_keys(number, batch)
            for _ in range(again):
                self._store.store(keys, self._blocks.data[first : first + batch])
