"""Case "tier-policy": a whole stack under one write policy; runs in the child."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.probes.tier_cache import file_tier
from kvbench.probes.tier_driver import Emit, StoreDriver
from kvbench.probes.tier_work import (
    Callers,
    ProbeBlocks,
    TierWork,
    capacity_blocks,
    innermost_spec,
    opened_store,
    sized_spec,
    tier_settings,
)
from kvbench.tiers.registry import open_tier
from kvbench.tiers.spec import parse_tier_spec
from kvbench.tiers.tiered import CALLER, StoreStats, TieredStore

_FEEDERS = 2
_ROUNDS = 4
_FULL_RATIO = 0.75
_FILL_S = 3.0


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Stores new blocks into the whole stack, checks the bytes of every edge, then loads beside queued stores."""
    work = TierWork(**case)
    specs = [sized_spec(parse_tier_spec(text), work) for text in work.specs]
    emit({"record": "stage", "text": "opening the stack"})
    settings = [
        tier_settings(open_tier(spec, block_bytes=work.block_bytes, name=name), spec, work)
        for spec, name in zip(specs, work.names, strict=True)
    ]
    store = opened_store(settings, work)
    blocks = ProbeBlocks(work, work.blocks, zeros=any(innermost_spec(spec).scheme == "null" for spec in specs))
    with Callers(work.concurrency, work.wait_s) as callers:
        stack = _Stack(work, store, blocks, callers, emit)
        for each in settings:
            file = file_tier(each.tier)
            if file is not None and not file.direct:
                stack.warn_warm(each.tier.name)
        stack.store_phase()
        for number, name in enumerate(work.names):
            stack.mixed_phase(number, name)
    store.clear()
    store.close(timeout_s=work.wait_s)


class _Stack(StoreDriver):
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
        capacity = capacity_blocks(store.stats(), name, work)
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

    def __init__(self, work: TierWork, store: TieredStore, blocks: ProbeBlocks) -> None:
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
