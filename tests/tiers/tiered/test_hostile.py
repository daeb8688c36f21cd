"""The tiered store when calls meet a close, bytes differ between writers, disks are full, and blocks come and go."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvbench.core.eviction import EvictionOrder, Usage
from kvbench.core.heat import HotPrefixes
from kvbench.tiers.tiered import TieredStore, TierSettings
from kvbench.tiers.tiered.spans import JsonlSpans, MemorySpans, OtlpJsonSpans, TeeSpans
from tests.tiers.tiered.tiers import BLOCK_BYTES, DictTier, HandClock, buffers, key_of, views

WAIT_S = 20.0


def keys_of(*numbers: int) -> list[Any]:
    return [key_of(number) for number in numbers]


def test_a_store_that_meets_a_close_leaves_no_ticket_open() -> None:
    # The second tier gets its copy only after the first was written: the store is closed just in between.
    first, reached, go_on = DictTier("dram"), threading.Event(), threading.Event()

    def hold(_: object) -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    first.before_store = hold
    store = TieredStore([TierSettings(tier=first), TierSettings(tier=DictTier("file"))])
    keys = keys_of(1)
    with ThreadPoolExecutor(1) as threads:
        storing = threads.submit(store.store, keys, views(keys))
        assert reached.wait(WAIT_S)
        assert store.close(timeout_s=1)
        go_on.set()
        ticket = storing.result(WAIT_S)
    assert ticket.wait(5)
    assert ticket.results["file"] == {"dropped": 1}
    assert store.stats().tiers["file"].pending_blocks == 0


def test_an_async_load_after_a_close_has_a_result() -> None:
    store = TieredStore([TierSettings(tier=DictTier("dram"))])
    keys = keys_of(1)
    store.store(keys, views(keys))
    running = [store.load_async(keys, buffers(1)) for _ in range(8)]  # so that every thread has begun
    assert all(one.result(WAIT_S).outcomes[0].result == "ok" for one in running)
    store.close()
    for _ in range(8):
        assert len(store.load_async(keys, buffers(1)).result(5).outcomes) == 1


def test_one_tier_that_cannot_be_closed_leaves_no_other_open(tmp_path: Path) -> None:
    class Stuck(DictTier):
        def close(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    below, spans = DictTier("file"), JsonlSpans(tmp_path / "spans.jsonl")
    store = TieredStore([TierSettings(tier=Stuck("dram")), TierSettings(tier=below)], spans=spans)
    with pytest.raises(OSError, match="Input/output"):
        store.close()
    assert below.closed
    assert spans._lines.file.closed


def test_a_block_that_another_wrote_with_other_bytes_is_served_as_it_is_and_copied_with_its_own_checksum() -> None:
    # Two engines compute the KV of one prefix to other bits: what a tier has under the key is what it will deliver.
    other = bytes(BLOCK_BYTES)
    (key,) = keys_of(1)
    top, below = DictTier("dram", capacity_bytes=BLOCK_BYTES), DictTier("s3", blocks={key: other})
    store = TieredStore(
        [TierSettings(tier=top), TierSettings(tier=below, recover=False, verify=True)], workers=0, clock=HandClock()
    )
    store.store([key], views([key]))
    store.flush(5)
    assert store.stats().edges["dram", "s3"].results == {"exists": 1}
    store.clear("dram")
    into = buffers(1)
    assert store.load([key], into).outcomes[0].result == "ok"
    assert bytes(into[0]) == other
    assert top.crcs[key] == crc32c(other)
    assert store.stats().tiers["s3"].corrupt == 0
    store.close()


def test_a_drain_counts_and_copies_what_its_target_has_lost() -> None:
    first, last = DictTier("dram"), DictTier("file")
    store = TieredStore([TierSettings(tier=first), TierSettings(tier=last)], workers=0, clock=HandClock())
    keys = keys_of(1, 2, 3)
    store.store(keys, views(keys))
    store.flush(5)
    del last.blocks[keys[1]]
    result = store.drain()
    assert (result.present_blocks, result.copied_blocks, result.failed_blocks) == (2, 1, 0)
    assert set(last.blocks) == set(keys)
    assert store.stats().tiers["file"].vanished == 1
    store.close()


def test_a_clear_takes_what_has_expired_and_was_not_yet_removed() -> None:
    clock, tier = HandClock(), DictTier("dram")
    store = TieredStore([TierSettings(tier=tier, ttl_s=10)], workers=0, clock=clock)
    keys = keys_of(1, 2)
    store.store(keys, views(keys))
    clock.now_s += 11
    assert store.lookup(keys).ready_prefix == 0
    store.clear()
    assert tier.blocks == {}
    store.close()


def test_pins_outlive_a_clear_and_the_limit_of_what_is_remembered_and_end_with_unpin() -> None:
    store = TieredStore([TierSettings(tier=DictTier("dram"))], workers=0, remembered_blocks=4, clock=HandClock())
    (pinned,) = keys_of(1)
    store.pin([pinned], ["dram"])
    store.clear()
    for number in range(10, 30):
        keys = keys_of(number)
        store.store(keys, views(keys))
        store.clear("dram")
    assert store._records[pinned.identity + pinned.prefix].pinned == 1
    store.unpin([pinned])
    for number in range(40, 60):
        keys = keys_of(number)
        store.store(keys, views(keys))
        store.clear("dram")
    assert len(store._records) <= 4
    store.close()


def test_blocks_that_come_and_go_leave_nothing_in_memory() -> None:
    clock = HandClock()
    store = TieredStore([TierSettings(tier=DictTier("dram"), ttl_s=1e6)], workers=0, remembered_blocks=16, clock=clock)
    for number in range(6000):
        keys = keys_of(number)
        store.store(keys, views(keys))
        if number % 50 == 49:
            store.clear("dram")
    index = store._index[0]
    assert len(store._records) < 100
    assert len(index._expiring) < 3000
    assert len(index.order._heap) < 3000
    store.close()


class Gone:
    """A block that has left its tier."""

    usage, num_bytes, busy, kept, resident = Usage(), 1, False, False, False


def test_an_order_forgets_blocks_that_left_by_other_ways_and_no_others() -> None:
    class Here(Gone):
        resident = True

    order: EvictionOrder[Any] = EvictionOrder("lru")
    here = [Here() for _ in range(10)]
    for block in here:
        order.add(block)
    for _ in range(20_000):
        order.add(Gone())
    assert len(order._heap) < 10_000
    taken = order.take(10)
    assert taken is not None
    assert set(taken) == set(here)


@pytest.mark.parametrize("sink", [JsonlSpans, OtlpJsonSpans])
def test_a_full_disk_costs_spans_and_no_block(sink: Any) -> None:
    spans, kept = sink("/dev/full"), MemorySpans()
    store = TieredStore(
        [TierSettings(tier=DictTier("dram")), TierSettings(tier=DictTier("file"))], spans=TeeSpans(spans, kept)
    )
    for number in range(400):
        keys = keys_of(number)
        assert store.store(keys, views(keys)).outcomes[0].result == "ok"
        assert store.load(keys, buffers(1)).outcomes[0].result == "ok"
    assert store.flush(WAIT_S)
    assert store.stats().tiers["file"].stored_blocks == 400
    assert spans.lost_spans > 0
    assert len(spans._waiting) < 100
    assert store.close()
    assert spans.lost_spans == len(kept.spans)


def test_a_worker_that_died_leaves_its_queue_to_another() -> None:
    class Breaks(DictTier):
        def store(self, blocks: Any) -> Any:
            if self.blocks:
                return super().store(blocks)
            self.blocks[key_of(999)] = b""
            raise RuntimeError("a bug of this tier")

    below = Breaks("file")
    store = TieredStore(
        [TierSettings(tier=DictTier("dram")), TierSettings(tier=below, recover=False)],
        batch_bytes=BLOCK_BYTES,
        workers=1,
    )
    threading.excepthook, before = lambda _: None, threading.excepthook
    try:
        keys = keys_of(*range(20))
        store.store(keys, views(keys))
        assert store.flush(5)
    finally:
        threading.excepthook = before
    assert store.stats().tiers["file"].stored_blocks == 19
    assert store.stats().tiers["file"].failures == 1
    store.close()


def test_close_says_whether_every_write_was_finished() -> None:
    below, go_on = DictTier("file"), threading.Event()

    def hold(_: object) -> None:
        go_on.wait(WAIT_S)

    below.before_store = hold
    store = TieredStore(
        [TierSettings(tier=DictTier("dram")), TierSettings(tier=below)], batch_bytes=BLOCK_BYTES, workers=1
    )
    keys = keys_of(*range(5))
    ticket = store.store(keys, views(keys))
    began_s = time.monotonic()
    assert not store.close(timeout_s=0.2)
    assert time.monotonic() - began_s < 5
    go_on.set()
    assert ticket.wait(5)
    assert ticket.results["file"]["dropped"] == 4


def test_hot_settings_keep_their_meaning_after_a_clear() -> None:
    store = TieredStore(
        [TierSettings(tier=DictTier("dram"))],
        workers=0,
        clock=HandClock(),
        hot=HotPrefixes(tiers=("dram",), min_requests=1),
    )
    keys = keys_of(1)
    store.store(keys, views(keys))
    store.clear()
    assert store._hot_records == {}
    assert not store._records
    store.close()


def test_evicted_blocks_are_read_for_the_tier_below_a_batch_at_a_time() -> None:
    top, below = DictTier("dram"), DictTier("file")
    store = TieredStore(
        [
            TierSettings(tier=top, capacity_bytes=32 * BLOCK_BYTES, high_watermark=1, low_watermark=1),
            TierSettings(tier=below, write="write-back"),
        ],
        batch_bytes=4 * BLOCK_BYTES,
        workers=0,
        clock=HandClock(),
    )
    keys = keys_of(*range(64))
    store.store(keys[:32], views(keys[:32]))
    store.store(keys[32:], views(keys[32:]))
    store.flush(5)
    assert [len(blocks) for what, blocks in top.log if what == "load"] == [4] * 8
    assert set(below.blocks) == set(keys[:32])
    store.close()
