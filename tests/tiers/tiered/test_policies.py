"""Bytes that the write policies move on a real trace, against counts taken from the trace alone."""

import gzip
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.tiers.tiered import Request, StoreStats, TieredStore, TierSettings, WritePolicy
from tests.tiers.tiered.tiers import IDENTITY, DictTier, HandClock

TRACE = Path(__file__).parents[2] / "data" / "tiered_store" / "mooncake_conversation_1500.jsonl.gz"
REQUESTS = int(os.environ.get("KVBENCH_TRACE_REQUESTS", "800"))  # of 1,500
B = 8


@cache
def requests() -> list[list[int]]:
    with gzip.open(TRACE, "rt") as lines:
        return [json.loads(line) for line in islice(lines, REQUESTS)]


def key(block: int) -> BlockKey:
    return BlockKey(IDENTITY.fingerprint, block.to_bytes(32, "little"))


def exact(name: str, blocks: int | None, policy: WritePolicy = "write-through") -> TierSettings:
    """A tier that evicts one block when it needs the room of one."""
    capacity = None if blocks is None else blocks * B
    return TierSettings(tier=DictTier(name), capacity_bytes=capacity, write=policy, high_watermark=1, low_watermark=1)


@cache
def replay(policy: WritePolicy, l1_blocks: int | None, l2_blocks: int | None = None) -> tuple[StoreStats, Counter[str]]:
    """What an engine does: look up, load the ready prefix, compute the rest, store the pages of the prompt."""
    store = TieredStore(
        [
            exact("hbm", l1_blocks),
            exact("dram", l2_blocks, policy),
        ],
        workers=0,
        remembered_blocks=10**6,
        clock=HandClock(),
    )
    hits: Counter[str] = Counter()
    for number, blocks in enumerate(requests()):
        keys = [key(block) for block in blocks]
        request = Request(str(number))
        ready = store.lookup(keys).ready_prefix
        loaded = store.load(keys[:ready], [memoryview(bytearray(B)) for _ in range(ready)], request=request)
        assert loaded.loaded_prefix == ready
        hits.update(tier for tier in loaded.tiers if tier)
        store.store(keys, [memoryview(block.to_bytes(B, "little")) for block in blocks], request=request)
        store.flush(60)
    return store.stats(), hits


def lru(capacity: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Per request the leading hits, the misses and the evictions of one LRU whose blocks are used last to first."""
    held: OrderedDict[int, None] = OrderedDict()
    for blocks in requests():
        hits = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
        missing = [block for block in blocks if block not in held]
        evicted = []
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            evicted.append(held.popitem(last=False)[0])
        yield hits, missing, evicted


def test_write_through_moves_every_distinct_block_once() -> None:
    stats, _ = replay("write-through", 2000)
    unique = {block for blocks in requests() for block in blocks}
    assert stats.edges["hbm", "dram"].bytes == len(unique) * B
    assert stats.tiers["dram"].ready_blocks == len(unique)


@pytest.mark.parametrize("l1_blocks", [None, 2000])
def test_selective_moves_the_blocks_of_at_least_two_requests(l1_blocks: int | None) -> None:
    stats, _ = replay("write-through-selective", l1_blocks)
    times = Counter(block for blocks in requests() for block in set(blocks))
    assert stats.edges["hbm", "dram"].bytes == sum(count >= 2 for count in times.values()) * B


def test_write_back_moves_what_the_first_tier_evicts_and_the_second_lacks() -> None:
    capacity = 2000
    stats, _ = replay("write-back", capacity)
    evictions = [block for _, _, evicted in lru(capacity) for block in evicted]
    assert stats.tiers["hbm"].evicted_blocks == len(evictions)
    assert stats.edges["hbm", "dram"].bytes == len(set(evictions)) * B
    assert stats.tiers["hbm"].dirty_evicted_blocks == len(set(evictions))
    assert stats.tiers["hbm"].lost_blocks == 0


def test_the_policies_order_by_bytes_as_the_trace_reuses_little() -> None:
    moved = {
        policy: replay(policy, 2000)[0].edges["hbm", "dram"].bytes
        for policy in ("write-through", "write-through-selective", "write-back")
    }
    assert moved["write-through-selective"] < moved["write-back"] < moved["write-through"]


def test_inclusive_tiers_hit_as_two_caches_that_see_the_same_requests() -> None:
    """With write-through, the second tier holds what one LRU of its size would: hits split at the two capacities."""
    small, large = 2000, 5000
    _, hits = replay("write-through", l1_blocks=small, l2_blocks=large)
    expected_small = sum(count for count, _, _ in lru(small))
    expected_large = sum(count for count, _, _ in lru(large))
    assert hits["hbm"] == expected_small
    assert hits["hbm"] + hits["dram"] == expected_large
