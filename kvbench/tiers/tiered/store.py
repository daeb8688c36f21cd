"""The tiered store: finds KV blocks in the nearest tier, and keeps them where the write policies say."""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.heat import HotPrefixes, SlidingShares
from kvbench.core.io_schedule import IoSchedule, StoreBatch
from kvbench.core.units import MIB
from kvbench.tiers.base import EXISTS, MISS, Block, Outcome, Tier, Wanted
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.metadata.base import Location, Metadata
from kvbench.tiers.tiered.index import Record, Slot, TierIndex
from kvbench.tiers.tiered.lane import DaemonPool, Lane, QueuedStore, TimedLoad
from kvbench.tiers.tiered.results import (
    Cleared,
    DrainResult,
    EdgeFigures,
    LoadResult,
    Lookup,
    StoreStats,
    StoreTicket,
    TierFigures,
)
from kvbench.tiers.tiered.settings import NO_REQUEST, Request, TierSettings, WhenFull
from kvbench.tiers.tiered.spans import Span, SpanEvent, SpanSink

CALLER = "request"
_MAX_TIERS = 8
_FULL_RETRIES = 3
_LEAVING_WAIT_S = 5.0
_CLEAR_WAIT_S = 10.0
_EVICT_BATCH = 256
_ASYNC_LOADS = 4


@dataclass(eq=False, slots=True)
class _Item:
    """A block at hand, to be written wherever it belongs. `source`: the tier it came from, -1 for the caller."""

    record: Record
    view: memoryview
    crc32c: int | None
    source: int


class TieredStore:
    """Several tiers as one store of KV blocks; every method may be called from several threads.

    The first tier is written before `store` returns, the others from queues of at most `store_queue_bytes` each. When
    a queue is full, `when_full` says whether `store` waits (at most `store_wait_s`) or drops the write with a count.
    `workers` is the number of threads per tier; with 0 nothing moves by itself: `step` and `flush` run the queues in
    the caller's thread, in a fixed order.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        *,
        store_queue_bytes: int = 256 * MIB,
        batch_bytes: int = 4 * MIB,
        workers: int = 2,
        when_full: WhenFull = "block",
        store_wait_s: float = 30.0,
        store_patience_s: float = 1.0,
        hot: HotPrefixes | None = None,
        remembered_blocks: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
        spans: SpanSink | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        if not 1 <= len(tiers) <= _MAX_TIERS:
            raise UsageError(f"a tiered store has 1 to {_MAX_TIERS} tiers, got {len(tiers)}")
        names = [settings.tier.name for settings in tiers]
        if repeated := next((name for name, times in Counter(names).items() if times > 1), None):
            raise UsageError(f"two tiers are named {repeated!r}; give each a name of its own")
        if hot is not None and (unknown := set(hot.tiers) - set(names)):
            raise UsageError(f"hot prefixes belong into {sorted(unknown)[0]!r}, which is not one of {', '.join(names)}")
        self.tiers = tuple(names)
        self._clock = clock
        self._spans = spans
        self._metadata = metadata
        self._workers = workers
        self._batch_bytes = batch_bytes
        self._when_full = when_full
        self._store_wait_s = store_wait_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._records: dict[bytes, Record] = {}
        self._remembered: OrderedDict[bytes, Record] = OrderedDict()
        self._remembered_limit = remembered_blocks
        self._sequence = 0
        self._index = [TierIndex(number, settings) for number, settings in enumerate(tiers)]
        self._figures = [
            TierFigures(name=tier.name, tier=tier.settings.tier.stats(), enabled=tier.enabled) for tier in self._index
        ]
        self._edges: dict[tuple[str, str], EdgeFigures] = {}
        self._lookups = self._lookup_blocks = self._ready_prefix_blocks = 0
        self._leaving: deque[Slot] = deque()
        self._hot = hot
        self._hot_mask = sum(1 << names.index(name) for name in hot.tiers) if hot else 0
        self._shares: SlidingShares[bytes] = SlidingShares(hot.window_s if hot else 1.0)
        self._hot_records: dict[bytes, Record] = {}
        self._hot_checked_s = clock()
        self._last_request = ""
        self._draining = self._closed = False
        self._pool: DaemonPool[LoadResult] = DaemonPool("kvbench load", _ASYNC_LOADS)
        self._lanes = [self._lane(tier, store_queue_bytes, store_patience_s) for tier in self._index]
        self._nearest: list[str | None] = []
        self._set_nearest()
        self._recover()

    # Look-up and load

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        """Where each block is ready, nearest tier first; blocks on their way are not there.

        With metadata, shared tiers are asked for the blocks that this store does not know of.
        """
        if self._metadata is not None:
            self._find_shared(self._metadata, keys)
        with self._lock:
            found = self._where(keys)
            prefix = found.index(None) if None in found else len(found)
            self._lookups += 1
            self._lookup_blocks += len(found)
            self._ready_prefix_blocks += prefix
            hits = Counter(found[:prefix])
            asked = len(found)
            for tier, figures in zip(self._index, self._figures, strict=True):
                if tier.enabled:
                    figures.queries += asked
                    figures.hits += hits[tier.name]
                    asked -= hits[tier.name]
        return Lookup(tuple(found), prefix)

    def _where(self, keys: Sequence[BlockKey]) -> list[str | None]:
        self._expire()
        get, nearest = self._records.get, self._nearest
        return [None if (record := get(key.identity + key.prefix)) is None else nearest[record.ready] for key in keys]

    def _find_shared(self, metadata: Metadata, keys: Sequence[BlockKey]) -> None:
        """Learns of blocks that others wrote to shared tiers; what the service does not say in time is a miss."""
        with self._lock:
            shared = {tier.name: tier for tier in self._index if tier.settings.shared and tier.enabled}
            asked = [key for key, where in zip(keys, self._where(keys), strict=True) if where is None]
        if not shared or not asked:
            return
        locations = metadata.find(asked)
        with self._lock:
            now = self._clock()
            for key, location in zip(asked, locations, strict=True):
                tier = None if location is None or location.instance else shared.get(location.tier)
                if tier is None or location is None:
                    continue
                record = self._record(key, location.num_bytes)
                if record.num_bytes != location.num_bytes or record.slots[tier.number] is not None:
                    continue
                self._adopt(tier, record, now)
                self._figures[tier.number].found_blocks += 1

    def load(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, request: Request = NO_REQUEST
    ) -> LoadResult:
        """Fills the buffers from the nearest tiers that have the blocks, and promotes what came from below.

        A block that a tier has lost, damaged or fails to deliver comes from the next tier that has it, else it is a
        miss. A tier slower than its load timeout ends the matter as `timeout`: the caller recomputes, and nothing is
        written to its buffers any more. Buffers are as long as their blocks; after anything but ok their content is
        undefined.
        """
        began = self._clock()
        views = _flat(keys, into)
        with self._lock:
            self._expire()
            records = [self._records.get(key.identity + key.prefix) for key in keys]
        outcomes, served, crcs = self._fetch(records, views, request)
        items = [
            _Item(record, views[i], crcs[i], source.number)
            for i, (record, source) in enumerate(zip(records, served, strict=True))
            if record is not None and source is not None
        ]
        self._access([item.record for item in items], request)
        self._spread(items, request, None)
        self._tidy()
        by_tier: Counter[str] = Counter()
        names = tuple(None if source is None else source.name for source in served)
        for view, name in zip(views, names, strict=True):
            if name is not None:
                by_tier[name] += len(view)
        return LoadResult(
            outcomes=tuple(outcomes), tiers=names, bytes_by_tier=dict(by_tier), seconds=self._clock() - began
        )

    def load_async(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, request: Request = NO_REQUEST
    ) -> "Future[LoadResult]":
        """The same load in a thread; the caller leaves the buffers alone until the future is done."""
        if self._workers == 0:
            future: Future[LoadResult] = Future()
            future.set_result(self.load(keys, into, request=request))
            return future
        return self._pool.submit(lambda: self.load(keys, into, request=request))

    # Store

    def store(
        self, keys: Sequence[BlockKey], data: Sequence[memoryview], *, request: Request = NO_REQUEST
    ) -> StoreTicket:
        """Writes blocks to the first tier, and queues copies for those below as their policies say.

        The caller may reuse its memory at once. Give a request's blocks in order of the prefix: they are ranked so that
        the head leaves last. Blocks that are there already are not written again, only accessed.
        """
        views = _flat(keys, data)
        with self._lock:
            if self._closed:
                raise KvbenchError("the store is closed; open it again before storing")
            refused = "draining" if self._draining else ""
        if refused:
            ticket = StoreTicket((Outcome("failed", "the store is draining and takes no new blocks"),) * len(keys))
            for _ in keys:
                ticket.settle(self.tiers[0], "failed", expected=False)
            return ticket
        with self._lock:
            self._expire()
            records = [self._record(key, len(view)) for key, view in zip(keys, views, strict=True)]
            fits = [record.num_bytes == len(view) for record, view in zip(records, views, strict=True)]
            before = [bool(record.ready & 1) for record in records]
            writable = self._index[0].writable
        items = [_Item(record, view, None, -1) for record, view, fit in zip(records, views, fits, strict=True) if fit]
        self._access([item.record for item in items], request)
        ticket = StoreTicket(())
        top = self._spread(items, request, ticket)
        outcomes = []
        for record, view, fit, there in zip(records, views, fits, before, strict=True):
            if not fit:
                outcomes.append(Outcome("failed", f"the block has {record.num_bytes} bytes, not {len(view)}"))
            elif there:
                outcomes.append(EXISTS)
            elif not writable:
                outcomes.append(Outcome("failed", f"{self.tiers[0]} is disabled or read-only"))
            elif record.name in top:
                outcomes.append(top.pop(record.name))
            else:
                slot = record.slots[0]  # another thread writes it now, or it is just being evicted
                writing = slot is not None and slot.state != "leaving"
                outcomes.append(EXISTS if writing else Outcome("failed", f"it was leaving {self.tiers[0]} just then"))
        ticket.outcomes = tuple(outcomes)
        self._tidy()
        return ticket

    def flush(self, timeout_s: float) -> bool:
        """Waits until no store is queued or running; False after `timeout_s`."""
        if self._workers == 0:
            deadline = self._clock() + timeout_s
            while any(lane.step() for lane in self._lanes):
                if self._clock() > deadline:
                    return False
            return True
        with self._lock:
            return self._changed.wait_for(lambda: all(lane.schedule.idle for lane in self._lanes), timeout_s)

    def step(self, tier: str | None = None) -> bool:
        """Runs one queued batch in this thread, of one tier or of the first that has any; False when none may begin."""
        lanes = self._lanes if tier is None else [self._lanes[self._number(tier)]]
        return any(lane.step() for lane in lanes)

    def maintain(self) -> None:
        """Lets go of what has expired or cooled; every store and load does this too."""
        with self._lock:
            self._expire()
        self._tidy()

    # Control

    def clear(self, tier: str | None = None, *, timeout_s: float = _CLEAR_WAIT_S) -> dict[str, Cleared]:
        """Empties one tier or all, and says what was really removed; writes on their way are cancelled.

        Also removes blocks that a tier of its own holds without the store's knowledge; in a shared tier, only blocks
        that this store knows of. Clearing all forgets accesses too.
        """
        chosen = self._index if tier is None else [self._index[self._number(tier)]]
        cleared = {each.name: self._clear(each, timeout_s) for each in chosen}
        if tier is None:
            with self._lock:
                self._remembered.clear()
                idle = [n for n, record in self._records.items() if not any(record.slots) and not record.pinned]
                for name in idle:
                    del self._records[name]
                for record in self._records.values():
                    record.hot = 0
                self._hot_records.clear()
                if self._hot is not None:
                    self._shares = SlidingShares(self._hot.window_s)
        return cleared

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """A disabled tier is neither read nor written; it keeps its blocks, and serves them again when enabled."""
        number = self._number(tier)
        with self._lock:
            self._index[number].enabled = enabled
            self._set_nearest()
            self._lanes[number].wake()

    def pin(self, keys: Sequence[BlockKey], tiers: Sequence[str]) -> None:
        """Keeps blocks, present or to come, in `tiers` as long as anything else can leave."""
        mask = sum(1 << self._number(name) for name in tiers)
        with self._lock:
            for key in keys:
                record = self._record(key, None)
                record.pinned |= mask
                self._remembered.pop(record.name, None)  # a pin is not forgotten

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Ends the pinning of blocks."""
        with self._lock:
            for key in keys:
                if record := self._records.get(key.identity + key.prefix):
                    record.pinned = 0
                    self._remember(record)

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and what is in it now."""
        own = [tier.settings.tier.stats() for tier in self._index]
        with self._lock:
            for tier, lane, figures, stats in zip(self._index, self._lanes, self._figures, own, strict=True):
                figures.tier = stats
                figures.enabled = tier.enabled
                figures.capacity_bytes = tier.capacity_bytes
                figures.ready_blocks, figures.ready_bytes = tier.ready_blocks, tier.ready_bytes
                figures.pending_blocks, figures.pending_bytes = tier.pending_blocks, tier.pending_bytes
                figures.cooling_bytes = tier.order.cooling_bytes
                figures.queued_bytes = lane.schedule.stored_bytes_held
            return StoreStats(
                tiers={figures.name: _copy_tier(figures) for figures in self._figures},
                edges={edge: _copy_edge(figures) for edge, figures in self._edges.items()},
                lookups=self._lookups,
                lookup_blocks=self._lookup_blocks,
                ready_prefix_blocks=self._ready_prefix_blocks,
                remembered_blocks=len(self._remembered),
                metadata=None if self._metadata is None else self._metadata.stats(),
            )

    def drain(self, to: Tier | None = None, *, timeout_s: float = 600.0) -> DrainResult:
        """Refuses new blocks, keeps serving old ones, and copies every block that `to` lacks into it.

        Without `to`, into the store's last writable tier. Queued writes are finished first. `resume` ends the refusal.
        """
        began = self._clock()
        with self._lock:
            self._draining = True
            last = next((tier for tier in reversed(self._index) if tier.writable), None)
        if to is not None:
            target = to
        elif last is not None:
            target = last.settings.tier
        else:
            raise KvbenchError(
                "no tier of the store can be written, so nothing can be drained; name a tier to drain to"
            )
        flushed = self.flush(timeout_s)
        with self._lock:
            records = [record for record in self._records.values() if self._nearest[record.ready] is not None]
        present = copied = copied_bytes = 0
        failures: list[str] = []
        for batch in _batches(records, self._batch_bytes):
            if self._clock() - began > timeout_s:
                failures += [f"{record.key}: no time left" for record in batch]
                continue
            there = target.contains([record.key for record in batch])
            present += sum(there)
            new = [record for record, has in zip(batch, there, strict=True) if not has]
            done, problems = self._drain_batch(new, target, last if to is None else None)
            copied += len(done)
            copied_bytes += sum(record.num_bytes for record in done)
            failures += problems
        return DrainResult(
            to=target.name,
            copied_blocks=copied,
            copied_bytes=copied_bytes,
            present_blocks=present,
            failed_blocks=len(failures),
            failures=tuple(failures[:20]),
            flushed=flushed,
            seconds=self._clock() - began,
        )

    def resume(self) -> None:
        """Takes new blocks again after a drain."""
        with self._lock:
            self._draining = False

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Finishes queued writes for at most `timeout_s`, then closes the tiers, the metadata and the spans.

        True when all writes were finished; what was not counts as dropped.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        finished = self.flush(timeout_s)
        with self._lock:
            for lane, tier in zip(self._lanes, self._index, strict=True):
                for entry in lane.schedule.take_back_stores():
                    self._settle_store(tier, entry, "dropped", reserved=False)
                    finished = False
                lane.close()
            self._changed.notify_all()
        self._pool.close()
        with ExitStack() as closing:  # each is closed, whatever another one says
            if self._spans is not None:
                closing.callback(self._spans.close)
            if self._metadata is not None:
                closing.callback(self._metadata.close)
            for tier in reversed(self._index):
                closing.callback(tier.settings.tier.close)
        return finished

    # Reading

    def _fetch(
        self, records: Sequence[Record | None], views: list[memoryview], request: Request
    ) -> tuple[list[Outcome], list[TierIndex | None], list[int | None]]:
        """Reads blocks tier by tier: per block the outcome, the tier that served it, and its checksum."""
        outcomes = [MISS] * len(records)
        served: list[TierIndex | None] = [None] * len(records)
        crcs: list[int | None] = [None] * len(records)
        missing = [i for i, record in enumerate(records) if record is not None]
        for tier in self._index:
            taken: list[tuple[int, Slot]] = []
            with self._lock:
                for i in missing if tier.enabled else ():
                    slot = _slot(records[i], tier.number)
                    if slot is None or slot.state != "ready":
                        continue
                    if slot.num_bytes != len(views[i]):
                        reason = f"the block has {slot.num_bytes} bytes, the buffer {len(views[i])}"
                        outcomes[i] = Outcome("miss", reason)
                        continue
                    slot.readers += 1
                    taken.append((i, slot))
            if not taken:
                continue
            results = self._read(tier, [slot for _, slot in taken], [views[i] for i, _ in taken], request)
            for (i, slot), outcome in zip(taken, results, strict=True):
                if outcome.result == "ok":
                    outcomes[i], served[i], crcs[i] = outcome, tier, slot.crc32c
                elif outcome.result == "timeout":
                    outcomes[i] = outcome
                else:
                    reason = f": {outcome.reason}" if outcome.reason else ""
                    outcomes[i] = Outcome("miss", f"{tier.name}: {outcome.result}{reason}")
            finished = {i for i, _ in taken if outcomes[i].result in ("ok", "timeout")}
            missing = [i for i in missing if i not in finished]
        return outcomes, served, crcs

    def _read(self, tier: TierIndex, slots: list[Slot], views: list[memoryview], request: Request) -> list[Outcome]:
        """Loads blocks whose readers were counted, and settles what the outcomes mean for the index."""
        began = self._clock()
        lane = self._lanes[tier.number]
        if (timeout_s := tier.settings.load_timeout_s) is None:
            with self._lock:
                lane.schedule.begin_load()
            try:
                wanted = [Wanted(slot.record.key, view) for slot, view in zip(slots, views, strict=True)]
                outcomes = tier.settings.tier.load(wanted)
            finally:
                self._end_reading(tier, slots)
        else:
            outcomes = self._read_timed(tier, slots, views, timeout_s)
        outcomes = self._checked(tier, slots, views, outcomes)
        seconds = self._clock() - began
        damaged = []
        with self._lock:
            figures = self._figures[tier.number]
            figures.loaded_seconds += seconds
            for slot, outcome in zip(slots, outcomes, strict=True):
                ended = outcome.result
                self._count_edge(tier.name, CALLER, slot.num_bytes if ended == "ok" else 0, ended)
                if ended == "ok":
                    figures.loaded_blocks += 1
                    figures.loaded_bytes += slot.num_bytes
                elif ended == "timeout":
                    figures.timeouts += 1
                elif ended in ("corrupt", "miss"):
                    figures.corrupt += ended == "corrupt"
                    figures.vanished += ended == "miss"
                    if slot.state == "ready":
                        tier.leave(slot)
                        damaged.append(slot)
                else:
                    figures.failures += 1
            self._edges[tier.name, CALLER].seconds += seconds
        if (
            damaged
        ):  # the tier has dropped them, or the store has found out by itself: either way they are gone after this
            self._withdraw(tier, damaged)
            tier.settings.tier.evict([slot.record.key for slot in damaged])
            with self._lock:
                self._gone(tier, damaged)
        for result, group in _grouped(slots, outcomes):
            event: SpanEvent = "mismatch" if result == "corrupt" else "timeout" if result == "timeout" else "load"
            self._span(event, tier.name, CALLER, group, seconds, result, request)
        return outcomes

    def _checked(
        self, tier: TierIndex, slots: list[Slot], views: list[memoryview], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Compares checksums where the tier does not, and learns those of recovered blocks."""
        checked = list(outcomes)
        for i, (slot, view, outcome) in enumerate(zip(slots, views, outcomes, strict=True)):
            if outcome.result != "ok":
                continue
            if slot.crc32c is None:
                slot.crc32c = crc32c_of(view)
            elif tier.settings.verify and (found := crc32c_of(view)) != slot.crc32c:
                checked[i] = Outcome("corrupt", f"CRC32C is {found:08x}, stored as {slot.crc32c:08x}")
        return checked

    def _read_timed(
        self, tier: TierIndex, slots: list[Slot], views: list[memoryview], timeout_s: float
    ) -> list[Outcome]:
        lane = self._lanes[tier.number]
        load = TimedLoad(slots, [memoryview(bytearray(slot.num_bytes)) for slot in slots])
        if self._workers == 0:
            with self._lock:
                lane.schedule.begin_load()
            self._run_load(tier, load, self._clock() + timeout_s)
        else:
            with self._lock:
                lane.schedule.add_load(load)
                lane.wake()
                self._changed.wait_for(lambda: load.done, timeout_s)
                if not load.done:
                    load.abandoned = True
                    if lane.schedule.remove_load(load):
                        self._release(slots)
        with self._lock:
            arrived = list(load.outcomes)
        for view, staged, outcome in zip(views, load.staging, arrived, strict=False):
            if outcome.result == "ok":
                view[:] = staged
        late = Outcome("timeout", f"{tier.name} did not deliver within {timeout_s:g} s")
        return arrived + [late] * (len(slots) - len(arrived))

    def _run_load(self, tier: TierIndex, load: TimedLoad, deadline_s: float | None = None) -> None:
        """Loads into the staging buffers, a batch at a time, until done or abandoned."""
        try:
            begin = 0
            while begin < len(load.slots):
                end = begin + _batch_length(load.slots[begin:], self._batch_bytes)
                outcomes = tier.settings.tier.load(
                    [
                        Wanted(slot.record.key, into)
                        for slot, into in zip(load.slots[begin:end], load.staging[begin:end], strict=True)
                    ]
                )
                with self._lock:
                    if load.abandoned or (deadline_s is not None and self._clock() > deadline_s):
                        self._figures[tier.number].late_blocks += len(outcomes)
                        break
                    load.outcomes += outcomes
                begin = end
        finally:
            with self._lock:
                load.done = True
            self._end_reading(tier, load.slots)

    def _end_reading(self, tier: TierIndex, slots: list[Slot]) -> None:
        lane = self._lanes[tier.number]
        with self._lock:
            lane.schedule.end_load()
            self._release(slots)
            if lane.schedule.stores_waiting:
                lane.wake()

    def _release(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.readers -= 1
        self._changed.notify_all()

    # Writing

    def _wanted_by(self, tier: TierIndex, record: Record, source: int, first: int) -> bool:
        """Whether a block at hand is to be written into `tier`; `first` is the uppermost tier that can be written."""
        if not tier.writable or record.slots[tier.number] is not None:
            return False
        if record.hot >> tier.number & 1:
            return True
        if tier.number < source and not tier.settings.promote:
            return False
        if tier.number == first:
            return True
        write = tier.settings.write
        if write == "write-back":
            return False
        return write == "write-through" or record.usage.accesses >= tier.settings.threshold

    def _spread(self, items: list[_Item], request: Request, ticket: StoreTicket | None) -> dict[bytes, Outcome]:
        """Writes blocks at hand to every tier that wants them; returns the outcomes of the top tier by name."""
        plan: dict[int, list[tuple[Slot, _Item]]] = {}
        with self._lock:
            first = next((tier.number for tier in self._index if tier.writable), -1)
            for item in items:  # another thread may have forgotten the record since
                item.record = self._records.setdefault(item.record.name, item.record)
            for tier in self._index:
                chosen = [
                    (tier.pend(item.record, None), item)
                    for item in items
                    if item.record.num_bytes == len(item.view)  # another thread may have come with another size
                    and self._wanted_by(tier, item.record, item.source, first)
                ]
                if chosen:
                    plan[tier.number] = chosen
            for chosen in plan.values():
                for _, item in chosen:
                    self._remembered.pop(item.record.name, None)
        if not plan:
            return {}
        copies: dict[int, memoryview] = {}
        for number, chosen in plan.items():
            for _, item in chosen:
                if item.crc32c is None:
                    item.crc32c = crc32c_of(item.view)
                if number and id(item) not in copies:
                    copies[id(item)] = memoryview(bytes(item.view))
        top: dict[bytes, Outcome] = {}
        for number, chosen in plan.items():
            entries = [
                QueuedStore(
                    slot=slot,
                    data=copies[id(item)] if number else item.view,
                    crc32c=item.crc32c or 0,
                    request=request,
                    from_tier=self._from(number, item.source),
                    event="store" if item.source < number else "promote",
                    ticket=ticket,
                )
                for slot, item in chosen
            ]
            if ticket is not None:
                ticket.expect(len(entries))
            if number == 0:
                results = self._write(self._index[0], entries)
                top = {entry.slot.record.name: outcome for entry, outcome in zip(entries, results, strict=True)}
            else:
                for entry in entries:
                    self._enqueue(self._index[number], entry)
        return top

    def _from(self, number: int, source: int) -> str:
        """The edge's begin: where the block was loaded from, or for a new block the nearest tier above in use."""
        if source >= 0:
            return self._index[source].name
        above = next((tier for tier in reversed(self._index[:number]) if tier.enabled), None)
        return CALLER if above is None else above.name

    def _enqueue(self, tier: TierIndex, entry: QueuedStore) -> None:
        """Queues a write, or waits for room, or drops it; a load never waits for the copies that it would leave."""
        lane = self._lanes[tier.number]
        num_bytes = entry.slot.num_bytes
        deadline = time.monotonic() + self._store_wait_s
        while True:
            with self._lock:
                if not lane.closed and lane.schedule.has_room(num_bytes):
                    lane.schedule.add_store(entry, num_bytes)
                    lane.wake()
                    return
                left = deadline - time.monotonic()
                by_a_load = entry.ticket is None and entry.event != "evict" and self._workers > 0
                late = lane.closed or left <= 0 or (self._closed and entry.ticket is not None)
                if self._when_full == "drop" or by_a_load or late:
                    self._settle_store(tier, entry, "dropped", reserved=False)
                    break
                if self._workers:
                    self._changed.wait(left)
                    continue
            if not lane.step():
                with self._lock:
                    self._settle_store(tier, entry, "dropped", reserved=False)
                break
        self._span("drop", entry.from_tier, tier.name, [entry.slot], 0.0, "dropped", entry.request)

    def _run_stores(self, tier: TierIndex, batch: StoreBatch[QueuedStore]) -> None:
        try:
            self._write(tier, batch.items)
        finally:
            with self._lock:
                lane = self._lanes[tier.number]
                lane.schedule.end_stores(batch)
                self._changed.notify_all()
        self._tidy([tier])  # evictions above would queue writes for this very thread

    def _write(self, tier: TierIndex, entries: Sequence[QueuedStore]) -> list[Outcome]:
        """Makes room, stores a batch, and settles it: pending becomes ready or none."""
        began = self._clock()
        outcomes: dict[int, Outcome] = {}
        accepted: list[int] = []
        victims: list[Slot] = []
        with self._lock:
            for i, entry in enumerate(entries):
                if entry.slot.cancelled or not tier.writable:
                    result = "cancelled" if entry.slot.cancelled else "disabled"
                    outcomes[i] = Outcome("failed", result)
                    self._settle_store(tier, entry, result, reserved=False)
                elif (leaving := tier.room_for(entry.slot.record)) is None:
                    outcomes[i] = Outcome("full", "nothing may leave for it")
                    self._settle_store(tier, entry, "full", reserved=False)
                else:
                    accepted.append(i)
                    victims += leaving
        try:
            self._evict(tier, victims, "evict")
            outcomes |= self._put(tier, entries, accepted)
        finally:
            self._finish(tier, entries, accepted, outcomes, began)
        return [outcomes[i] for i in range(len(entries))]

    def _put(self, tier: TierIndex, entries: Sequence[QueuedStore], accepted: list[int]) -> dict[int, Outcome]:
        """Stores in the tier; what it calls full although there was room is tried again after more have left."""
        outcomes: dict[int, Outcome] = {}
        todo = accepted
        for attempt in range(_FULL_RETRIES + 1):
            if not todo:
                break
            blocks = [Block(entries[i].slot.record.key, entries[i].data, entries[i].crc32c) for i in todo]
            outcomes |= dict(zip(todo, tier.settings.tier.store(blocks), strict=True))
            todo = [i for i in todo if outcomes[i].result == "full"]
            if not todo or attempt == _FULL_RETRIES:
                break
            size = sum(entries[i].slot.num_bytes for i in todo) << attempt
            before = min(entries[i].slot.usage.sequence for i in todo)
            with self._lock:
                victims = tier.order.take(size, before=before)
                for slot in victims or ():
                    tier.leave(slot)
                if victims is None:
                    if not tier.leaving_blocks or not self._workers:
                        break
                    self._changed.wait_for(lambda: not tier.leaving_blocks, _LEAVING_WAIT_S)
            self._evict(tier, victims or [], "evict")
        return outcomes

    def _finish(
        self,
        tier: TierIndex,
        entries: Sequence[QueuedStore],
        accepted: list[int],
        outcomes: dict[int, Outcome],
        began_s: float,
    ) -> None:
        now = self._clock()
        seconds = now - began_s
        cancelled: list[Slot] = []
        with self._lock:
            self._figures[tier.number].stored_seconds += seconds if accepted else 0.0
            edges = {(entries[i].from_tier, tier.name) for i in accepted}
            for edge in edges:
                self._edges.setdefault(edge, EdgeFigures()).seconds += seconds
            for i in accepted:
                entry = entries[i]
                result = outcomes[i].result if i in outcomes else "failed"
                stored = result in ("ok", "exists")
                if stored and entry.slot.cancelled:
                    cancelled.append(entry.slot)
                    continue
                if stored:
                    # What was there already may be another's, whose bytes need not be these: a load will tell.
                    entry.slot.crc32c = entry.crc32c if result == "ok" else None
                    tier.make_ready(entry.slot, now, reserved=True)
                self._settle_store(tier, entry, result, reserved=True, given_up=not stored)
            self._changed.notify_all()
        if tier.settings.shared and self._metadata is not None:
            there = [
                entries[i].slot.record for i in accepted if i in outcomes and outcomes[i].result in ("ok", "exists")
            ]
            published = [record for record in there if not any(slot.record is record for slot in cancelled)]
            sizes = [record.num_bytes for record in published]
            self._metadata.put([record.key for record in published], Location(instance="", tier=tier.name), sizes)
        if cancelled:
            tier.settings.tier.evict([slot.record.key for slot in cancelled])
            with self._lock:
                for i in accepted:
                    if entries[i].slot in cancelled:
                        self._settle_store(tier, entries[i], "cancelled", reserved=True)
                self._changed.notify_all()
        if self._spans is not None:
            pairs = [(entries[i], outcomes.get(i, Outcome("failed"))) for i in accepted]
            for (request, from_tier, event, result), group in groupby(
                pairs, lambda pair: (pair[0].request, pair[0].from_tier, pair[0].event, pair[1].result)
            ):
                slots = [entry.slot for entry, _ in group]
                self._span(event, from_tier, tier.name, slots, seconds, result, request)

    def _settle_store(
        self, tier: TierIndex, entry: QueuedStore, result: str, *, reserved: bool, given_up: bool = True
    ) -> None:
        """Under the lock: counts how a write ended, and unless it succeeded forgets its slot."""
        figures = self._figures[tier.number]
        num_bytes = entry.slot.num_bytes
        self._count_edge(entry.from_tier, tier.name, num_bytes if result == "ok" else 0, result)
        if result == "ok":
            figures.stored_blocks += 1
            figures.stored_bytes += num_bytes
            figures.promoted_blocks += entry.event == "promote"
        elif result == "full":
            figures.full_blocks += 1
        elif result == "dropped":
            figures.dropped_blocks += 1
        elif result == "timeout":
            figures.timeouts += 1
        elif result == "failed":
            figures.failures += 1
        if given_up:
            if entry.event == "evict":
                self._figures[self.tiers.index(entry.from_tier)].lost_blocks += 1
            tier.give_up(entry.slot, reserved=reserved)
            self._remember(entry.slot.record)
        if entry.ticket is not None:
            entry.ticket.settle(tier.name, result)

    # Leaving

    def _evict(self, tier: TierIndex, slots: Sequence[Slot], event: SpanEvent) -> int:
        """Lets blocks that are leaving go; to make room (`evict`), those the tier below wants back are written there.

        Returns how many the tier really had.
        """
        if not slots:
            return 0
        removed = begin = 0
        while begin < len(slots):
            part = list(slots[begin : begin + _EVICT_BATCH])
            if event == "evict":  # whose blocks may be read first: no more at a time than a batch of stores has
                part = part[: _batch_length(part, self._batch_bytes)]
            removed += self._evict_batch(tier, part, event)
            begin += len(part)
        return removed

    def _evict_batch(self, tier: TierIndex, slots: list[Slot], event: SpanEvent) -> int:
        began = self._clock()
        writes = self._write_back(tier, slots) if event == "evict" else []
        self._withdraw(tier, slots)
        had = tier.settings.tier.evict([slot.record.key for slot in slots])
        seconds = self._clock() - began
        with self._lock:
            figures = self._figures[tier.number]
            if event == "evict":
                figures.evicted_blocks += len(slots)
                figures.evicted_bytes += sum(slot.num_bytes for slot in slots)
                figures.dirty_evicted_blocks += len(writes)
            elif event == "expire":
                figures.expired_blocks += len(slots)
            self._gone(tier, slots)
        self._span(event, tier.name, "", slots, seconds, "ok", NO_REQUEST)
        for below, entry in writes:
            self._enqueue(below, entry)
        return sum(had)

    def _write_back(self, tier: TierIndex, slots: list[Slot]) -> list[tuple[TierIndex, QueuedStore]]:
        """Reads the blocks that the next tier below lacks and wants at eviction."""
        with self._lock:
            below = next((each for each in self._index[tier.number + 1 :] if each.writable), None)
            if below is None or below.settings.write != "write-back":
                return []
            dirty = [slot for slot in slots if slot.record.slots[below.number] is None]
            pending = [below.pend(slot.record, slot.crc32c) for slot in dirty]
        if not dirty:
            return []
        views = [memoryview(bytearray(slot.num_bytes)) for slot in dirty]
        outcomes = tier.settings.tier.load(
            [Wanted(slot.record.key, view) for slot, view in zip(dirty, views, strict=True)]
        )
        outcomes = self._checked(tier, dirty, views, outcomes)
        writes = []
        for slot, new, view, outcome in zip(dirty, pending, views, outcomes, strict=True):
            if outcome.result == "ok":
                writes.append((below, QueuedStore(new, view, slot.crc32c or 0, NO_REQUEST, tier.name, "evict")))
                continue
            with self._lock:
                below.give_up(new, reserved=False)
                self._figures[tier.number].lost_blocks += 1
        return writes

    def _tidy(self, tiers: Sequence[TierIndex] | None = None) -> None:
        """Physically removes what expired, and what cooled above the watermark; of all tiers, or of some."""
        for tier in tiers or self._index:
            with self._lock:
                expired = [slot for slot in self._leaving if slot.tier == tier.number]
                if expired:
                    self._leaving = deque(slot for slot in self._leaving if slot.tier != tier.number)
                cooled = tier.candidates(self._clock())
            self._evict(tier, expired, "expire")
            self._evict(tier, cooled, "evict")

    def _clear(self, tier: TierIndex, timeout_s: float) -> Cleared:
        lane = self._lanes[tier.number]
        with self._lock:
            for entry in lane.schedule.take_back_stores():
                self._settle_store(tier, entry, "cancelled", reserved=False)
            self._expire()
            slots = [slot for slot in self._leaving if slot.tier == tier.number]
            self._leaving = deque(slot for slot in self._leaving if slot.tier != tier.number)
            running: list[Slot] = []
            for record in self._records.values():
                slot = record.slots[tier.number]
                if slot is not None and slot.state == "pending":
                    slot.cancelled = True
                    running.append(slot)
                elif slot is not None and slot.state == "ready":
                    tier.leave(slot)
                    slots.append(slot)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(slot.readers for slot in slots), timeout_s)
        blocks = num_bytes = 0
        sizes = {slot.record.key: slot.num_bytes for slot in slots}
        for begin in range(0, len(slots), _EVICT_BATCH):
            part = slots[begin : begin + _EVICT_BATCH]
            self._withdraw(tier, part)
            had = tier.settings.tier.evict([slot.record.key for slot in part])
            blocks += sum(had)
            num_bytes += sum(slot.num_bytes for slot, was in zip(part, had, strict=True) if was)
            with self._lock:
                self._gone(tier, part)
            self._span("clear", tier.name, "", part, 0.0, "ok", NO_REQUEST)
        with self._lock:
            if self._workers:
                self._changed.wait_for(
                    lambda: all(slot.record.slots[tier.number] is not slot for slot in running), timeout_s
                )
        if tier.settings.recover and not tier.settings.shared:
            unknown = [entry for entry in tier.settings.tier.entries() if self._unknown(tier, entry.key)]
            had = tier.settings.tier.evict([entry.key for entry in unknown]) if unknown else []
            blocks += sum(had)
            num_bytes += sum(e.num_bytes for e, was in zip(unknown, had, strict=True) if was and e.key not in sizes)
        return Cleared(blocks, num_bytes)

    def _withdraw(self, tier: TierIndex, slots: Sequence[Slot]) -> None:
        """Tells the metadata that a shared tier no longer has these blocks, before it lets go of them."""
        if tier.settings.shared and self._metadata is not None:
            self._metadata.remove([slot.record.key for slot in slots], Location(instance="", tier=tier.name))

    def _unknown(self, tier: TierIndex, key: BlockKey) -> bool:
        with self._lock:
            return _slot(self._records.get(key.identity + key.prefix), tier.number) is None

    def _drain_batch(
        self, records: list[Record], target: Tier, own: TierIndex | None
    ) -> tuple[list[Record], list[str]]:
        """Copies blocks from the nearest tiers into the target; returns those copied, and why others were not."""
        if not records:
            return [], []
        began = self._clock()
        request = Request("drain")
        views = [memoryview(bytearray(record.num_bytes)) for record in records]
        read, served, crcs = self._fetch(records, views, request)
        sources = ["" if tier is None else tier.name for tier in served]
        good = [i for i, outcome in enumerate(read) if outcome.result == "ok"]
        failures = [
            f"{record.key}: {outcome.result} {outcome.reason}".rstrip()
            for record, outcome in zip(records, read, strict=True)
            if outcome.result != "ok"
        ]
        if own is not None:
            with self._lock:
                for i in good:
                    self._forget_lost(own, records[i])
                pending = {i: own.pend(records[i], None) for i in good if records[i].slots[own.number] is None}
                failures += [f"{records[i].key}: on its way in or out of {own.name}" for i in good if i not in pending]
            entries = [
                QueuedStore(slot, views[i], crcs[i] or 0, request, sources[i], "drain") for i, slot in pending.items()
            ]
            outcomes = dict(zip(pending, self._write(own, entries), strict=True))
            good = [i for i in good if i in pending]
        else:
            blocks = [Block(records[i].key, views[i], crcs[i]) for i in good]
            outcomes = dict(zip(good, target.store(blocks), strict=True))
            with self._lock:
                for i, outcome in outcomes.items():
                    size = records[i].num_bytes if outcome.result == "ok" else 0
                    self._count_edge(sources[i], target.name, size, outcome.result)
            seconds = self._clock() - began
            for i, outcome in outcomes.items():
                self._span_record("drain", sources[i], target.name, [records[i]], seconds, outcome.result, request)
        done = [records[i] for i in good if outcomes[i].result in ("ok", "exists")]
        failures += [
            f"{records[i].key}: {outcomes[i].result} {outcomes[i].reason}".rstrip()
            for i in good
            if outcomes[i].result not in ("ok", "exists")
        ]
        return done, failures

    def _forget_lost(self, tier: TierIndex, record: Record) -> None:
        """Under the lock: a block that is ready by the index, and that its tier says it has not."""
        slot = record.slots[tier.number]
        if slot is not None and slot.state == "ready" and not slot.readers:
            tier.leave(slot)
            tier.gone(slot)
            self._figures[tier.number].vanished += 1

    # Bookkeeping, under the lock

    def _access(self, records: Sequence[Record], request: Request) -> None:
        """Counts an access of each block, last to first, so that the head of a prefix is the most recent."""
        with self._lock:
            now = self._clock()
            if self._hot is not None and (not request.id or request.id != self._last_request):
                self._shares.add_request(now)
            self._last_request = request.id
            for record in reversed(records):
                self._sequence += 1
                if request.id and record.last_request == request.id:
                    record.usage.touch(self._sequence)
                    continue
                record.last_request = request.id
                record.usage.access(self._sequence, now)
                if self._hot is not None:
                    self._shares.add(record.name, now)
                    self._set_hot(record, now)

    def _set_hot(self, record: Record, now_s: float) -> None:
        hot = self._hot
        if hot is None:
            return
        enough = self._shares.requests(now_s) >= hot.min_requests
        if enough and self._shares.share_ratio(record.name, now_s) >= hot.share_ratio:
            record.hot = self._hot_mask
            self._hot_records[record.name] = record
        elif record.hot:
            record.hot = 0
            self._hot_records.pop(record.name, None)

    def _expire(self) -> None:
        """Makes blocks whose TTL is over invisible, and cools prefixes that are no longer hot."""
        now = self._clock()
        for tier in self._index:
            self._leaving.extend(tier.expired(now))
        if self._hot is not None and now - self._hot_checked_s > self._hot.window_s / 20:
            self._hot_checked_s = now
            for record in list(self._hot_records.values()):
                self._set_hot(record, now)

    def _record(self, key: BlockKey, num_bytes: int | None) -> Record:
        name = key.identity + key.prefix
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = Record(key, name, num_bytes or 0, len(self._index))
            self._remember(record)
        elif num_bytes is not None and not any(record.slots):
            record.num_bytes = num_bytes
        return record

    def _remember(self, record: Record) -> None:
        """Keeps the accesses of a block that is in no tier, for a while."""
        if any(record.slots) or record.pinned or self._records.get(record.name) is not record:
            return
        self._remembered[record.name] = record
        self._remembered.move_to_end(record.name)
        while len(self._remembered) > self._remembered_limit:
            name, oldest = self._remembered.popitem(last=False)
            if not any(oldest.slots):
                del self._records[name]

    def _gone(self, tier: TierIndex, slots: Sequence[Slot]) -> None:
        for slot in slots:
            tier.gone(slot)
            self._remember(slot.record)
        self._changed.notify_all()

    def _count_edge(self, from_tier: str, to_tier: str, num_bytes: int, result: str) -> None:
        edge = self._edges.setdefault((from_tier, to_tier), EdgeFigures())
        edge.blocks += result == "ok"
        edge.bytes += num_bytes
        edge.results[result] = edge.results.get(result, 0) + 1

    def _set_nearest(self) -> None:
        self._nearest = [
            next((tier.name for tier in self._index if tier.enabled and mask >> tier.number & 1), None)
            for mask in range(1 << len(self._index))
        ]

    # Opening

    def _lane(self, tier: TierIndex, queue_bytes: int, patience_s: float) -> Lane:
        return Lane(
            tier.name,
            self._lock,
            IoSchedule(
                queue_bytes=queue_bytes,
                batch_bytes=self._batch_bytes,
                max_store_batches=max(1, self._workers - 1),
                patience_s=patience_s,
            ),
            workers=self._workers,
            clock=self._clock,
            run_load=lambda load: self._run_load(tier, load),
            run_stores=lambda batch: self._run_stores(tier, batch),
        )

    def _recover(self) -> None:
        now = self._clock()
        for tier in self._index:
            if not tier.settings.recover:
                continue
            for entry in tier.settings.tier.entries():
                with self._lock:
                    record = self._record(entry.key, entry.num_bytes)
                    if record.num_bytes != entry.num_bytes or record.slots[tier.number] is not None:
                        continue
                    self._adopt(tier, record, now)
                    self._figures[tier.number].recovered_blocks += 1

    def _adopt(self, tier: TierIndex, record: Record, now_s: float) -> None:
        """Takes up a block that is in a tier already, the most recent of all for want of better knowledge."""
        self._remembered.pop(record.name, None)
        self._sequence += 1
        record.usage.touch(self._sequence)
        tier.make_ready(tier.pend(record, None), now_s, reserved=False)

    def _number(self, tier: str) -> int:
        if tier not in self.tiers:
            raise UsageError(f"the store has no tier {tier!r}; its tiers are {', '.join(self.tiers)}")
        return self.tiers.index(tier)

    # Spans

    def _span(
        self,
        event: SpanEvent,
        from_tier: str,
        to_tier: str,
        slots: Sequence[Slot],
        seconds: float,
        result: str,
        request: Request,
    ) -> None:
        if self._spans is not None and slots:
            records = [slot.record for slot in slots]
            self._span_record(event, from_tier, to_tier, records, seconds, result, request)

    def _span_record(
        self,
        event: SpanEvent,
        from_tier: str,
        to_tier: str,
        records: Sequence[Record],
        seconds: float,
        result: str,
        request: Request,
    ) -> None:
        if self._spans is None:
            return
        now = self._clock()
        unix_s = time.time()
        groups = [[record] for record in records] if self._spans.per_block else [list(records)]
        for group in groups:
            self._spans.add(
                Span(
                    event=event,
                    from_tier=from_tier,
                    to_tier=to_tier,
                    request=request.id,
                    num_blocks=len(group),
                    num_bytes=sum(record.num_bytes for record in group),
                    latency_s=seconds,
                    start_s=now - seconds,
                    unix_s=unix_s,
                    prefix_hash=group[-1].key.prefix.hex(),
                    identity=group[-1].key.identity.hex(),
                    result=result,
                    layers=request.layers,
                    token_range=request.token_range,
                )
            )


def _flat(keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[memoryview]:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers; give one per key")
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in buffers]


def _slot(record: Record | None, number: int) -> Slot | None:
    return None if record is None else record.slots[number]


def _batch_length(slots: Sequence[Slot], batch_bytes: int) -> int:
    size = 0
    for count, slot in enumerate(slots):
        size += slot.num_bytes
        if size > batch_bytes:
            return max(1, count)
    return len(slots)


def _batches(records: Sequence[Record], batch_bytes: int) -> list[list[Record]]:
    batches: list[list[Record]] = []
    size = 0
    for record in records:
        if not batches or size + record.num_bytes > batch_bytes:
            batches.append([])
            size = 0
        batches[-1].append(record)
        size += record.num_bytes
    return batches


def _grouped(slots: Sequence[Slot], outcomes: Sequence[Outcome]) -> list[tuple[str, list[Slot]]]:
    groups: dict[str, list[Slot]] = {}
    for slot, outcome in zip(slots, outcomes, strict=True):
        groups.setdefault(outcome.result, []).append(slot)
    return list(groups.items())


def _copy_tier(figures: TierFigures) -> TierFigures:
    from dataclasses import replace

    return replace(figures)


def _copy_edge(figures: EdgeFigures) -> EdgeFigures:
    return EdgeFigures(figures.blocks, figures.bytes, figures.seconds, dict(figures.results))
