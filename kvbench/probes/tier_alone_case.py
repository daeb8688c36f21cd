"""Case "tier-alone": one tier of a tiered store, all others out of use; runs in the child."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.probes.affinity import disk_numa_node, stay_on_node
from kvbench.probes.tier_cache import TierCache
from kvbench.probes.tier_driver import Emit, StoreDriver
from kvbench.probes.tier_work import (
    DIRECTORIES,
    Callers,
    ProbeBlocks,
    TierWork,
    capacity_blocks,
    innermost_spec,
    opened_store,
    sized_spec,
    tier_settings,
)
from kvbench.probes.turns import monotonic, turns
from kvbench.tiers.base import Block, Tier
from kvbench.tiers.registry import default_name, open_tier
from kvbench.tiers.spec import parse_tier_spec
from kvbench.tiers.tiered import TieredStore, TierSettings

_CHECKSUMMING = ("file", "s3", "redis", "mooncake", "nixl")


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Stores into one tier and loads from it; a lower tier stands behind a disabled one, so that its queue is used."""
    work = TierWork(**case)
    spec = sized_spec(parse_tier_spec(work.specs[work.tier]), work)
    name = work.names[work.tier]
    innermost = innermost_spec(spec)
    placement = stay_on_node(
        disk_numa_node(Path(innermost.location).parent) if innermost.scheme in DIRECTORIES else None
    )
    emit({"record": "stage", "text": f"opening {name}"})
    tier = open_tier(spec, block_bytes=work.block_bytes, name=name)
    above = [TierSettings(tier=open_tier("null:", block_bytes=work.block_bytes, name="disabled above"), enabled=False)]
    settings = [*(above if work.tier else []), tier_settings(tier, spec, work)]
    store = opened_store(settings, work)
    capacity = capacity_blocks(store.stats(), name, work)
    blocks = ProbeBlocks(work, min(work.blocks, capacity), zeros=innermost.scheme == "null")
    with ExitStack() as stack:
        callers = stack.enter_context(Callers(work.concurrency, work.wait_s))
        alone = _Alone(work, store, tier, name, blocks, callers, emit)
        alone.warn_zeros()
        alone.store()
        cache = stack.enter_context(TierCache(tier, innermost))
        alone.load(cache, placement)
    store.clear()
    store.close(timeout_s=work.wait_s)


class _Alone(StoreDriver):
    """One tier: stores in turns of batch sizes, then loads."""

    def __init__(
        self,
        work: TierWork,
        store: TieredStore,
        tier: Tier,
        name: str,
        blocks: ProbeBlocks,
        callers: Callers,
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
            raise KvbenchError(f"no store into {self._name} succeeded ({self._refusal()}); see what its place says")
        self._flush()
        self._store.clear(self._name)

    def _refusal(self) -> str:
        """Why the tier takes no block, in its own words; a ticket only counts."""
        (outcome,) = self._tier.store([Block(self._blocks.keys[0], self._blocks.data[0])])
        return outcome.reason or self._last_failure

    def _fill(self) -> None:
        step = max(self._batches)
        for first in range(0, self._blocks.count, step):
            indexes = range(first, min(first + step, self._blocks.count))
            self._storing(indexes)()
        self._flush()

    def load(self, cache: TierCache, placement: str) -> None:
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
