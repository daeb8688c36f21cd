"""The tiered store step by step: what is written where, what is found, and what goes wrong."""

from crc32c import crc32c

from kvbench.tiers.tiered import Request, TieredStore, TierSettings
from tests.tiers.tiered.tiers import BLOCK_BYTES, DictTier, HandClock, buffers, content, key_of, views


def make(*settings: TierSettings, **more: object) -> TieredStore:
    return TieredStore(settings, workers=0, **{"clock": HandClock(), **more})  # type: ignore[arg-type]


KEYS = [key_of(n) for n in range(6)]


def test_a_stored_block_is_ready_in_the_first_tier_at_once_and_below_after_the_queue_has_run() -> None:
    hbm, dram = DictTier("hbm"), DictTier("dram")
    store = make(TierSettings(tier=hbm), TierSettings(tier=dram))
    ticket = store.store(KEYS[:3], views(KEYS[:3]))
    assert [outcome.result for outcome in ticket.outcomes] == ["ok"] * 3
    assert store.lookup(KEYS[:4]).tiers == ("hbm", "hbm", "hbm", None)
    assert store.lookup(KEYS[:4]).ready_prefix == 3
    store.set_enabled("hbm", False)
    assert store.lookup(KEYS[:3]).ready_prefix == 0  # pending in dram
    assert not ticket.wait(0)
    assert store.flush(1)
    assert ticket.wait(0)
    assert ticket.results == {"hbm": {"ok": 3}, "dram": {"ok": 3}}
    assert store.lookup(KEYS[:3]).tiers == ("dram",) * 3
    assert dram.crcs[KEYS[0]] == crc32c(content(KEYS[0]))


def test_the_caller_may_reuse_its_memory_as_soon_as_store_returns() -> None:
    dram = DictTier("dram")
    store = make(TierSettings(tier=DictTier("hbm")), TierSettings(tier=dram))
    mine = bytearray(content(KEYS[0]))
    store.store(KEYS[:1], [memoryview(mine)])
    mine[:] = bytes(BLOCK_BYTES)
    store.flush(1)
    assert dram.blocks[KEYS[0]] == content(KEYS[0])


def test_a_load_takes_each_block_from_the_nearest_tier_and_promotes_what_came_from_below() -> None:
    hbm, dram, file = DictTier("hbm"), DictTier("dram"), DictTier("file")
    for tier, key in ((hbm, KEYS[0]), (dram, KEYS[1]), (file, KEYS[2])):
        tier.blocks[key] = content(key)
    store = make(TierSettings(tier=hbm), TierSettings(tier=dram), TierSettings(tier=file, promote=False))
    into = buffers(4)
    result = store.load(KEYS[:4], into)
    assert result.tiers == ("hbm", "dram", "file", None)
    assert [outcome.result for outcome in result.outcomes] == ["ok", "ok", "ok", "miss"]
    assert result.loaded_prefix == 3
    assert [bytes(view) for view in into[:3]] == [content(key) for key in KEYS[:3]]
    assert result.bytes_by_tier == {"hbm": BLOCK_BYTES, "dram": BLOCK_BYTES, "file": BLOCK_BYTES}
    assert set(hbm.blocks) == set(KEYS[:3])
    store.flush(1)
    assert set(dram.blocks) == set(KEYS[:3])
    assert set(file.blocks) == {KEYS[2]} | set(KEYS[:2])  # write-through also repairs what is missing below
    assert store.lookup(KEYS[:3]).tiers == ("hbm",) * 3


def test_lru_eviction_keeps_the_head_of_a_prefix_longest() -> None:
    hbm = DictTier("hbm")
    store = make(TierSettings(tier=hbm, capacity_bytes=3 * BLOCK_BYTES, high_watermark=1, low_watermark=1))
    store.store(KEYS[:3], views(KEYS[:3]))
    store.store(KEYS[3:4], views(KEYS[3:4]))
    assert set(hbm.blocks) == {KEYS[0], KEYS[1], KEYS[3]}
    ticket = store.store(KEYS[:5], views(KEYS[:5]))
    assert [outcome.result for outcome in ticket.outcomes] == ["exists", "exists", "ok", "exists", "full"]
    assert set(hbm.blocks) == set(KEYS[:3])


def test_clear_says_what_it_removed_and_nothing_is_found_afterwards() -> None:
    hbm, dram = DictTier("hbm"), DictTier("dram")
    store = make(TierSettings(tier=hbm), TierSettings(tier=dram))
    store.store(KEYS[:3], views(KEYS[:3]))
    store.step("dram")
    store.store(KEYS[3:], views(KEYS[3:]))
    cleared = store.clear()
    assert {name: (each.blocks, each.bytes) for name, each in cleared.items()} == {
        "hbm": (6, 6 * BLOCK_BYTES),
        "dram": (3, 3 * BLOCK_BYTES),
    }
    store.flush(1)
    assert store.lookup(KEYS).ready_prefix == 0
    assert not hbm.blocks
    assert not dram.blocks
    assert store.store(KEYS, views(KEYS)).outcomes[0].result == "ok"


def test_threads_move_blocks_down_and_flush_waits_for_them() -> None:
    hbm, dram, file = DictTier("hbm"), DictTier("dram"), DictTier("file")
    store = TieredStore([TierSettings(tier=hbm), TierSettings(tier=dram), TierSettings(tier=file)])
    for n in range(20):
        keys = [key_of(n * 10 + i) for i in range(10)]
        store.store(keys, views(keys), request=Request(f"r{n}"))
    assert store.flush(5)
    assert len(dram.blocks) == len(file.blocks) == 200
    assert store.close()
    assert hbm.closed
    assert file.closed
