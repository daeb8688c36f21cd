"""Many threads at once: no wrong byte, no pending block observed, nothing left over."""

import random
import threading
import time
from collections.abc import Sequence

from kvbench.tiers.base import Block, Wanted
from kvbench.tiers.tiered import Request, TieredStore, TierSettings
from tests.tiers.tiered.tiers import BLOCK_BYTES, DictTier, buffers, content, key_of, views

KEYS = [key_of(n) for n in range(48)]


class SlowlyVisible(DictTier):
    """Writes half a block, pauses, writes the rest: a reader in between would see a torn block."""

    def store(self, blocks: Sequence[Block]) -> list:  # type: ignore[type-arg]
        for block in blocks:
            with self._lock:
                if block.key in self.blocks:
                    continue
                self.blocks[block.key] = bytes(block.data[: BLOCK_BYTES // 2]) + bytes(BLOCK_BYTES // 2)
            time.sleep(0.0005)
            with self._lock:
                del self.blocks[block.key]
        return super().store(blocks)


def test_no_thread_ever_loads_a_wrong_byte_while_others_store_evict_clear_and_disable() -> None:
    tiers = [DictTier("hbm"), SlowlyVisible("dram"), SlowlyVisible("file")]
    store = TieredStore(
        [
            TierSettings(tier=tiers[0], capacity_bytes=8 * BLOCK_BYTES),
            TierSettings(tier=tiers[1], capacity_bytes=16 * BLOCK_BYTES, write="write-back", promote=False),
            TierSettings(tier=tiers[2], capacity_bytes=30 * BLOCK_BYTES, load_timeout_s=0.004),
        ],
        batch_bytes=3 * BLOCK_BYTES,
        store_queue_bytes=12 * BLOCK_BYTES,
        store_wait_s=2.0,
        workers=3,
    )
    wrong: list[str] = []
    results: dict[str, int] = {}
    until = time.monotonic() + 2.0

    def use(number: int) -> None:
        random_ = random.Random(number)
        while time.monotonic() < until and not wrong:
            start, length = random_.randrange(40), random_.randint(1, 8)
            keys = KEYS[start : start + length]
            if random_.random() < 0.4:
                store.store(keys, views(keys), request=Request(f"s{number}"))
                continue
            into = buffers(len(keys))
            result = store.load(keys, into)
            untouched = [bytes(view) for view in into]
            for key, view, outcome in zip(keys, into, result.outcomes, strict=True):
                results[outcome.result] = results.get(outcome.result, 0) + 1
                if outcome.result == "ok" and view != content(key):
                    wrong.append(f"{key}: {bytes(view).hex()}")
            if any(outcome.result == "timeout" for outcome in result.outcomes):
                time.sleep(0.002)
                if [bytes(view) for view in into] != untouched:
                    wrong.append("late data was written into the caller's buffers")

    def disturb() -> None:
        random_ = random.Random(99)
        while time.monotonic() < until and not wrong:
            time.sleep(0.05)
            if random_.random() < 0.3:
                store.clear(random_.choice(store.tiers), timeout_s=1)
            else:
                name = random_.choice(store.tiers)
                store.set_enabled(name, False)
                time.sleep(0.01)
                store.set_enabled(name, True)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)] + [threading.Thread(target=disturb)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong
    assert results["ok"] > 100
    assert store.flush(10)
    stats = store.stats()
    for figures, tier in zip(stats.tiers.values(), tiers, strict=True):
        assert figures.pending_blocks == 0
        assert figures.queued_bytes == 0
        assert figures.ready_blocks == len(tier.blocks)
        assert figures.ready_bytes <= (figures.capacity_bytes or 0)
    assert store.close()


def test_a_block_is_not_found_before_its_write_has_ended_and_a_load_in_between_is_a_miss() -> None:
    writing, go_on = threading.Event(), threading.Event()

    def pause(_: Sequence[Block]) -> None:
        writing.set()
        assert go_on.wait(10)

    slow = DictTier("dram", before_store=pause)
    store = TieredStore([TierSettings(tier=DictTier("hbm")), TierSettings(tier=slow)])
    ticket = store.store(KEYS[:1], views(KEYS[:1]))
    store.set_enabled("hbm", False)
    assert writing.wait(5)
    assert store.lookup(KEYS[:1]).tiers == (None,)
    assert store.load(KEYS[:1], buffers(1)).outcomes[0].result == "miss"
    assert not any(what == "load" for what, _ in slow.log)
    go_on.set()
    assert ticket.wait(5)
    assert store.lookup(KEYS[:1]).tiers == ("dram",)
    assert store.close()


def test_a_load_past_its_timeout_returns_at_once_and_its_late_data_never_reaches_the_caller() -> None:
    loading, go_on = threading.Event(), threading.Event()

    def pause(_: Sequence[Wanted]) -> None:
        loading.set()
        assert go_on.wait(10)

    slow = DictTier("file", blocks={KEYS[0]: content(KEYS[0])}, before_load=pause)
    store = TieredStore([TierSettings(tier=DictTier("hbm")), TierSettings(tier=slow, load_timeout_s=0.05)])
    into = buffers(1)
    began = time.monotonic()
    result = store.load(KEYS[:1], into)
    assert time.monotonic() - began < 2
    assert loading.is_set()
    assert result.outcomes[0].result == "timeout"
    go_on.set()
    deadline = time.monotonic() + 5
    while not store.stats().tiers["file"].late_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert store.stats().tiers["file"].late_blocks == 1
    assert into[0] == bytes(BLOCK_BYTES)
    assert store.stats().tiers["file"].timeouts == 1
    slow.before_load = None
    assert store.load(KEYS[:1], into).outcomes[0].result == "ok"
    assert store.close()


def test_a_full_queue_makes_store_wait_and_all_blocks_arrive() -> None:
    slow = DictTier("dram", before_store=lambda _: time.sleep(0.005))
    store = TieredStore(
        [TierSettings(tier=DictTier("hbm")), TierSettings(tier=slow)],
        store_queue_bytes=2 * BLOCK_BYTES,
        batch_bytes=BLOCK_BYTES,
    )
    for key in KEYS[:16]:
        store.store([key], views([key]))
        assert store.stats().tiers["dram"].queued_bytes <= 2 * BLOCK_BYTES
    assert store.flush(5)
    assert len(slow.blocks) == 16
    assert store.close()


def test_a_full_queue_drops_with_a_count_when_told_so() -> None:
    go_on = threading.Event()

    def pause(_: Sequence[Block]) -> None:
        assert go_on.wait(10)

    slow = DictTier("dram", before_store=pause)
    store = TieredStore(
        [TierSettings(tier=DictTier("hbm")), TierSettings(tier=slow)],
        store_queue_bytes=4 * BLOCK_BYTES,
        batch_bytes=BLOCK_BYTES,
        when_full="drop",
    )
    ticket = store.store(KEYS[:10], views(KEYS[:10]))
    assert store.stats().tiers["dram"].dropped_blocks == 6
    go_on.set()
    assert store.flush(5)
    assert ticket.results["dram"] == {"dropped": 6, "ok": 4}
    assert store.lookup(KEYS[:10]).ready_prefix == 10
    store.store(KEYS[:10], views(KEYS[:10]))  # what was dropped goes down at the next access
    assert store.flush(5)
    assert len(slow.blocks) == 8
    assert store.close()


def test_a_load_does_not_wait_for_a_full_queue_of_the_copies_it_would_leave() -> None:
    go_on = threading.Event()

    def pause(_: Sequence[Block]) -> None:
        assert go_on.wait(10)

    file = DictTier("file", before_store=pause)
    store = TieredStore(
        [TierSettings(tier=DictTier("hbm")), TierSettings(tier=file, write="write-through-selective")],
        store_queue_bytes=2 * BLOCK_BYTES,
        batch_bytes=BLOCK_BYTES,
        store_wait_s=5.0,
    )
    store.store(KEYS[:6], views(KEYS[:6]))
    store.store(KEYS[:2], views(KEYS[:2]))  # their second access fills the queue
    began = time.monotonic()
    assert store.load(KEYS[2:6], buffers(4)).loaded_prefix == 4  # the second access of these
    assert time.monotonic() - began < 2
    assert store.stats().tiers["file"].dropped_blocks == 4
    go_on.set()
    assert store.flush(5)
    store.load(KEYS[4:6], buffers(2))
    assert store.flush(5)
    assert set(file.blocks) == {KEYS[0], KEYS[1], KEYS[4], KEYS[5]}
    assert store.close()


def test_an_async_load_gives_the_same_result() -> None:
    store = TieredStore([TierSettings(tier=DictTier("hbm"))])
    store.store(KEYS[:3], views(KEYS[:3]))
    into = buffers(3)
    assert store.load_async(KEYS[:3], into).result(5).loaded_prefix == 3
    assert into[2] == content(KEYS[2])
    assert store.close()


def test_one_worker_per_tier_and_a_queue_of_one_block_never_wait_for_themselves() -> None:
    tiers = [DictTier("hbm"), DictTier("dram"), DictTier("file")]
    settings = [
        TierSettings(
            tier=tier, capacity_bytes=blocks * BLOCK_BYTES, write="write-back", high_watermark=0.7, low_watermark=0.4
        )
        for tier, blocks in zip(tiers, (6, 6, 60), strict=True)
    ]
    store = TieredStore(settings, workers=1, store_queue_bytes=BLOCK_BYTES, batch_bytes=BLOCK_BYTES)
    began = time.monotonic()
    for key in KEYS:
        store.store([key], views([key]))
    assert store.flush(10)
    assert time.monotonic() - began < 10
    assert all(figures.dropped_blocks == 0 for figures in store.stats().tiers.values())
    into = buffers(len(KEYS))
    assert store.load(KEYS, into).loaded_prefix == len(KEYS)
    assert store.close()
