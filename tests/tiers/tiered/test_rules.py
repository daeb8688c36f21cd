"""Timeouts, TTL, cooling, heat, drain, identity, spans: one rule per test, time set by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvbench.core.block_key import KvIdentity, block_keys
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.tiers.base import Wanted
from kvbench.tiers.tiered import (
    HotPrefixes,
    JsonlSpans,
    MemorySpans,
    OtlpJsonSpans,
    Request,
    TieredStore,
    TierSettings,
    seed_fields,
    span_totals,
)
from kvbench.tiers.tiered.spans import SEED_FIELDS
from tests.tiers.tiered.tiers import BLOCK_BYTES, IDENTITY, DictTier, HandClock, buffers, content, key_of, views

KEYS = [key_of(n) for n in range(10)]


def make(*settings: TierSettings, clock: HandClock | None = None, **more: Any) -> TieredStore:
    return TieredStore(settings, workers=0, clock=clock or HandClock(), **more)


def exact(tier: DictTier, blocks: int, **more: Any) -> TierSettings:
    """A tier that evicts only for a block that needs the room."""
    return TierSettings(tier=tier, capacity_bytes=blocks * BLOCK_BYTES, high_watermark=1, low_watermark=1, **more)


def put(store: TieredStore, *numbers: int, request: str = "") -> None:
    keys = [KEYS[n] for n in numbers]
    store.store(keys, views(keys), request=Request(request))


def held(tier: DictTier) -> set[int]:
    return {KEYS.index(key) for key in tier.blocks}


def test_a_tier_slower_than_its_timeout_gives_what_came_in_time_and_timeout_for_the_rest() -> None:
    clock = HandClock()

    def slow(wanted: Sequence[Wanted]) -> None:
        clock.now_s += 0.4 * len(wanted)

    file = DictTier("file", blocks={key: content(key) for key in KEYS[:4]}, before_load=slow)
    store = make(
        TierSettings(tier=DictTier("hbm")),
        TierSettings(tier=file, load_timeout_s=1.0),
        clock=clock,
        batch_bytes=BLOCK_BYTES,
    )
    into = buffers(4)
    result = store.load(KEYS[:4], into)
    assert [outcome.result for outcome in result.outcomes] == ["ok", "ok", "timeout", "timeout"]
    assert result.loaded_prefix == 2
    assert [bytes(view) for view in into] == [
        content(KEYS[0]),
        content(KEYS[1]),
        bytes(BLOCK_BYTES),
        bytes(BLOCK_BYTES),
    ]
    figures = store.stats().tiers["file"]
    assert (figures.timeouts, figures.late_blocks, figures.loaded_blocks) == (2, 1, 2)
    assert store.lookup(KEYS[:4]).tiers[2] == "file"  # slow is not gone


@pytest.mark.parametrize("result", ["corrupt", "failed", "miss"])
def test_a_block_that_a_tier_cannot_deliver_comes_from_the_next(result: str) -> None:
    dram, file = DictTier("dram"), DictTier("file")
    store = make(TierSettings(tier=dram), TierSettings(tier=file))
    put(store, 0, 1)
    store.flush(1)
    dram.load_result = result  # type: ignore[assignment]
    into = buffers(2)
    loaded = store.load(KEYS[:2], into)
    assert loaded.tiers == ("file", "file")
    assert into[1] == content(KEYS[1])
    figures = store.stats().tiers["dram"]
    assert (figures.corrupt, figures.failures, figures.vanished) == (
        2 * (result == "corrupt"),
        2 * (result == "failed"),
        2 * (result == "miss"),
    )
    file.load_result = "corrupt"
    dram.load_result = "failed"
    loaded = store.load(KEYS[:1], buffers(1))
    assert loaded.outcomes[0].result == "miss"
    assert loaded.tiers == (None,)


def test_a_silent_bit_flip_is_found_where_the_store_verifies_and_the_block_is_let_go() -> None:
    dram, file = DictTier("dram"), DictTier("file")
    store = make(TierSettings(tier=dram, verify=True), TierSettings(tier=file))
    put(store, 0)
    store.flush(1)
    dram.blocks[KEYS[0]] = bytes(BLOCK_BYTES)
    into = buffers(1)
    assert store.load(KEYS[:1], into).tiers == ("file",)
    assert into[0] == content(KEYS[0])
    assert store.stats().tiers["dram"].corrupt == 1
    assert dram.blocks[KEYS[0]] == content(KEYS[0])  # promoted again


def test_the_checksum_of_the_first_write_goes_down_with_the_block() -> None:
    hbm, dram, file = DictTier("hbm"), DictTier("dram"), DictTier("file")
    store = make(
        exact(hbm, 1),
        exact(dram, 1, write="write-back"),
        TierSettings(tier=file, write="write-back"),
    )
    put(store, 0)
    hbm.blocks[KEYS[0]] = bytes(BLOCK_BYTES)  # damaged in memory: the checksum must not follow the damage
    put(store, 1)
    store.flush(1)
    put(store, 2)
    store.flush(1)
    assert held(file) == {0}
    assert file.crcs[KEYS[0]] == crc32c(content(KEYS[0]))
    assert dram.crcs[KEYS[1]] == crc32c(content(KEYS[1]))


def test_a_block_ends_with_its_time_to_live() -> None:
    clock = HandClock()
    dram = DictTier("dram")
    store = make(TierSettings(tier=dram, ttl_s=60), clock=clock)
    put(store, 0)
    clock.now_s += 30
    put(store, 1)
    assert store.load(KEYS[:1], buffers(1)).tiers == ("dram",)  # an access does not prolong it
    clock.now_s += 30
    assert store.lookup(KEYS[:2]).tiers == (None, "dram")
    store.maintain()
    assert held(dram) == {1}
    assert store.stats().tiers["dram"].expired_blocks == 1


def test_above_the_watermark_blocks_cool_and_an_access_saves_them() -> None:
    clock = HandClock()
    hbm = DictTier("hbm")
    store = make(
        TierSettings(tier=hbm, capacity_bytes=10 * BLOCK_BYTES, high_watermark=0.6, low_watermark=0.4, cooldown_s=5.0),
        clock=clock,
    )
    for n in range(7):
        put(store, n)
        clock.now_s += 0.1
    assert store.stats().tiers["hbm"].cooling_bytes == 3 * BLOCK_BYTES  # 7 held, down to 4
    store.load(KEYS[1:2], buffers(1))
    clock.now_s += 4
    store.maintain()
    assert held(hbm) == set(range(7))
    clock.now_s += 1
    store.maintain()
    assert held(hbm) == {1, 3, 4, 5, 6}
    assert store.stats().tiers["hbm"].evicted_blocks == 2


def test_without_cooldown_the_watermark_evicts_at_once() -> None:
    hbm = DictTier("hbm")
    store = make(TierSettings(tier=hbm, capacity_bytes=10 * BLOCK_BYTES, high_watermark=0.6, low_watermark=0.4))
    for n in range(7):
        put(store, n)
    assert held(hbm) == {3, 4, 5, 6}


def test_space_needed_at_once_does_not_wait_for_the_cooldown() -> None:
    hbm = DictTier("hbm")
    store = make(TierSettings(tier=hbm, capacity_bytes=3 * BLOCK_BYTES, cooldown_s=3600))
    for n in range(6):
        put(store, n)
    assert held(hbm) == {3, 4, 5}


def test_a_block_being_read_is_not_evicted() -> None:
    hbm = DictTier("hbm")
    store = make(exact(hbm, 1))
    put(store, 0)
    seen = []

    def meanwhile(_: Sequence[Wanted]) -> None:
        hbm.before_load = None
        seen.append(store.store(KEYS[1:2], views(KEYS[1:2])).outcomes[0].result)

    hbm.before_load = meanwhile
    into = buffers(1)
    assert store.load(KEYS[:1], into).outcomes[0].result == "ok"
    assert into[0] == content(KEYS[0])
    assert seen == ["full"]


def test_a_hot_prefix_stays_and_is_placed_where_it_belongs() -> None:
    clock = HandClock()
    hbm, dram = DictTier("hbm"), DictTier("dram")
    store = make(
        exact(hbm, 3),
        TierSettings(tier=dram, write="write-back", capacity_bytes=20 * BLOCK_BYTES),
        clock=clock,
        hot=HotPrefixes(tiers=("hbm", "dram"), share_ratio=0.5, window_s=100, min_requests=4),
    )
    for n in range(4):
        put(store, 0, request=f"hot{n}")
    store.flush(1)
    assert held(dram) == {0}  # placed, though the policy writes only at eviction
    for n in range(1, 5):
        put(store, n, request=f"cold{n}")
    assert held(hbm) == {0, 3, 4}
    clock.now_s += 250
    store.lookup(KEYS[:1])
    for n in range(5, 8):
        put(store, n, request=f"later{n}")
    assert 0 not in held(hbm)


def test_a_pinned_block_leaves_last() -> None:
    hbm = DictTier("hbm")
    store = make(exact(hbm, 3))
    store.pin(KEYS[:1], ["hbm"])
    for n in range(5):
        put(store, n)
    assert held(hbm) == {0, 3, 4}
    store.unpin(KEYS[:1])
    put(store, 5)
    assert held(hbm) == {3, 4, 5}


def test_a_disabled_tier_is_neither_read_nor_written_and_keeps_its_blocks() -> None:
    hbm, dram = DictTier("hbm"), DictTier("dram")
    store = make(TierSettings(tier=hbm), TierSettings(tier=dram))
    put(store, 0)
    store.flush(1)
    put(store, 1)
    store.set_enabled("dram", False)
    store.flush(1)
    before = len(dram.log)
    store.set_enabled("hbm", False)
    assert store.load(KEYS[:1], buffers(1)).outcomes[0].result == "miss"
    assert store.store(KEYS[2:3], views(KEYS[2:3])).outcomes[0].result == "failed"
    assert len(dram.log) == before
    assert held(dram) == {0}
    store.set_enabled("dram", True)
    assert store.lookup(KEYS[:2]).tiers == ("dram", None)
    assert store.stats().edges["hbm", "dram"].results == {"ok": 1, "disabled": 1}


def test_a_tier_that_says_full_too_early_gets_more_room_and_a_hopeless_one_is_left_alone() -> None:
    dram = DictTier("dram", capacity_bytes=4 * BLOCK_BYTES)
    store = make(TierSettings(tier=dram, high_watermark=1, low_watermark=1))
    put(store, 0, 1, 2, 3)
    stray = key_of(99)
    dram.blocks[stray] = content(stray)  # takes room that the store does not know of
    put(store, 4)
    assert 4 in {KEYS.index(key) for key in dram.blocks if key in KEYS}
    dram.store_result = "full"
    assert store.store(KEYS[5:6], views(KEYS[5:6])).outcomes[0].result == "full"
    assert store.stats().tiers["dram"].full_blocks == 1


def test_a_drain_refuses_new_blocks_serves_old_ones_and_copies_each_unique_block_once() -> None:
    hbm, dram, fresh = DictTier("hbm"), DictTier("dram"), DictTier("pool")
    store = make(TierSettings(tier=hbm, capacity_bytes=2 * BLOCK_BYTES), TierSettings(tier=dram))
    for n in range(5):
        put(store, n)
    fresh.blocks[KEYS[3]] = content(KEYS[3])
    result = store.drain(fresh)
    assert (result.copied_blocks, result.copied_bytes, result.present_blocks) == (4, 4 * BLOCK_BYTES, 1)
    assert (result.failed_blocks, result.flushed, result.to) == (0, True, "pool")
    assert held(fresh) == set(range(5))
    assert fresh.crcs[KEYS[0]] == crc32c(content(KEYS[0]))
    refused = store.store(KEYS[6:7], views(KEYS[6:7]))
    assert refused.outcomes[0].result == "failed"
    assert refused.wait(0)
    assert store.load(KEYS[:5], buffers(5)).loaded_prefix == 5
    store.resume()
    assert store.store(KEYS[6:7], views(KEYS[6:7])).outcomes[0].result == "ok"


def test_a_drain_into_the_last_tier_says_what_could_not_be_copied() -> None:
    hbm, file = DictTier("hbm"), DictTier("file")
    store = make(TierSettings(tier=hbm), TierSettings(tier=file, write="write-back"))
    put(store, 0, 1, 2)
    hbm.corrupt.add(KEYS[1])
    result = store.drain()
    assert (result.to, result.copied_blocks, result.failed_blocks) == ("file", 2, 1)
    assert str(KEYS[1]) in result.failures[0]
    assert held(file) == {0, 2}


@pytest.mark.parametrize(
    "difference",
    [
        {"model": "other"},
        {"model_version": "2"},
        {"dtype": "fp8"},
        {"rank": 1, "world": 2},
        {"world": 2},
        {"tokenizer_version": "2"},
        {"layers": (2, 4)},
        {"attention": "mla-latent"},
        {"extra": "lora-7"},
    ],
    ids=str,
)
def test_a_block_of_another_model_dtype_rank_or_tokenizer_is_always_a_miss(difference: dict[str, Any]) -> None:
    other = replace(IDENTITY, **difference)
    tokens = list(range(64))
    mine, theirs = block_keys(tokens, IDENTITY), block_keys(tokens, other)
    store = make(*(TierSettings(tier=DictTier(name)) for name in ("hbm", "dram", "file")))
    store.store(mine, views(mine))
    store.flush(1)
    assert store.lookup(mine).ready_prefix == 4
    assert store.lookup(theirs).tiers == (None,) * 4
    assert {outcome.result for outcome in store.load(theirs, buffers(4)).outcomes} == {"miss"}


def test_pages_of_another_size_never_meet() -> None:
    tokens = list(range(64))
    other = KvIdentity(**{**vars_of(IDENTITY), "page_tokens": 32})
    assert not set(block_keys(tokens, IDENTITY)) & set(block_keys(tokens, other))


def vars_of(identity: KvIdentity) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in identity.__dataclass_fields__}


def test_a_buffer_of_the_wrong_length_is_a_miss_and_nothing_is_read() -> None:
    hbm = DictTier("hbm")
    store = make(TierSettings(tier=hbm))
    put(store, 0)
    outcome = store.load(KEYS[:1], buffers(1, BLOCK_BYTES - 1)).outcomes[0]
    assert outcome.result == "miss"
    assert "64" in outcome.reason
    assert "63" in outcome.reason
    assert not any(what == "load" for what, _ in hbm.log)
    assert store.store(KEYS[:1], views(KEYS[:1], 32)).outcomes[0].result == "failed"


def test_lfu_and_score_keep_what_is_used_often() -> None:
    for eviction in ("lfu", "score"):
        hbm = DictTier("hbm")
        store = make(exact(hbm, 3, eviction=eviction))
        for _ in range(3):
            put(store, 0)
        for n in range(1, 5):
            put(store, n)
        assert held(hbm) == {0, 3, 4}, eviction


def test_a_threshold_counts_each_request_once() -> None:
    dram = DictTier("dram")
    store = make(TierSettings(tier=DictTier("hbm")), TierSettings(tier=dram, write="write-through-selective"))
    for _ in range(3):
        put(store, 0, request="one")
    store.load(KEYS[:1], buffers(1), request=Request("one"))
    store.flush(1)
    assert not dram.blocks
    store.load(KEYS[:1], buffers(1), request=Request("two"))
    store.flush(1)
    assert held(dram) == {0}


def test_blocks_of_a_persistent_tier_are_ready_at_start() -> None:
    blocks = {key: content(key) for key in KEYS[:4]}
    store = make(TierSettings(tier=DictTier("hbm")), TierSettings(tier=DictTier("file", blocks=blocks)))
    assert store.lookup(KEYS[:5]).ready_prefix == 4
    assert store.stats().tiers["file"].recovered_blocks == 4
    into = buffers(4)
    assert store.load(KEYS[:4], into).loaded_prefix == 4
    assert store.lookup(KEYS[:4]).tiers == ("hbm",) * 4
    fresh = make(TierSettings(tier=DictTier("file", blocks=blocks), recover=False))
    assert fresh.lookup(KEYS[:1]).ready_prefix == 0


def test_a_clear_also_removes_what_a_tier_holds_without_the_stores_knowledge() -> None:
    file = DictTier("file")
    store = make(TierSettings(tier=file))
    put(store, 0)
    file.blocks[KEYS[5]] = content(KEYS[5])
    cleared = store.clear()["file"]
    assert (cleared.blocks, cleared.bytes) == (2, 2 * BLOCK_BYTES)
    assert not file.blocks


def test_a_closed_store_refuses_blocks_by_name_and_bad_settings_are_refused() -> None:
    store = make(TierSettings(tier=DictTier("hbm")))
    store.close()
    with pytest.raises(KvbenchError, match="closed"):
        put(store, 0)
    with pytest.raises(UsageError, match="watermarks"):
        TierSettings(tier=DictTier("x"), low_watermark=0.9, high_watermark=0.5)
    with pytest.raises(UsageError, match="named 'x'"):
        make(TierSettings(tier=DictTier("x")), TierSettings(tier=DictTier("x")))
    with pytest.raises(UsageError, match="no tier 'y'"):
        make(TierSettings(tier=DictTier("x"))).set_enabled("y", False)
    with pytest.raises(UsageError, match="'z'"):
        make(TierSettings(tier=DictTier("x")), hot=HotPrefixes(tiers=("z",)))


def test_every_event_leaves_a_span_with_the_fields_of_the_template(tmp_path: Path) -> None:
    clock = HandClock()
    spans = MemorySpans()
    hbm, dram = DictTier("hbm"), DictTier("dram")
    store = make(
        TierSettings(tier=hbm, capacity_bytes=2 * BLOCK_BYTES),
        TierSettings(tier=dram, write="write-back", ttl_s=10),
        clock=clock,
        spans=spans,
    )
    keys = KEYS[:3]
    request = Request("r1", token_range=(0, 48), layers=(0, 2))
    store.store(keys[:2], views(keys[:2]), request=request)
    store.store(keys[2:], views(keys[2:]), request=request)
    store.flush(1)
    store.load(KEYS[1:2], buffers(1), request=request)
    dram.corrupt.update(dram.blocks)
    store.load(KEYS[:2], buffers(2), request=Request("r2"))
    clock.now_s += 20
    store.maintain()
    events = {(span.event, span.from_tier, span.to_tier, span.result) for span in spans.spans}
    assert ("store", "request", "hbm", "ok") in events
    assert ("evict", "hbm", "", "ok") in events
    assert ("evict", "hbm", "dram", "ok") in events
    assert ("load", "dram", "request", "ok") in events
    assert ("promote", "dram", "hbm", "ok") in events
    assert ("mismatch", "dram", "request", "corrupt") in events
    first = spans.spans[0]
    assert (first.num_blocks, first.num_bytes, first.prefix_hash) == (2, 2 * BLOCK_BYTES, KEYS[1].prefix.hex())
    assert (first.layers, first.token_range, first.request) == ((0, 2), (0, 48), "r1")
    template = seed_fields(first)
    assert tuple(template) == SEED_FIELDS
    assert (template["from_layer"], template["to_layer"], template["hit_or_miss"]) == ("request", "hbm", "hit")
    assert template["size_bytes"] == 2 * BLOCK_BYTES
    mismatch = next(span for span in spans.spans if span.event == "mismatch")
    assert seed_fields(mismatch)["hit_or_miss"] == "miss"

    lines = JsonlSpans(tmp_path / "spans.jsonl", seed_names=True)
    otlp = OtlpJsonSpans(tmp_path / "otlp.jsonl", batch=4)
    for span in spans.spans:
        lines.add(span)
        otlp.add(span)
    lines.close()
    otlp.close()
    written = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert len(written) == len(spans.spans)
    assert set(SEED_FIELDS) <= set(written[0])
    exported = [json.loads(line) for line in (tmp_path / "otlp.jsonl").read_text().splitlines()]
    found = [one for line in exported for one in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert len(found) == len(spans.spans)
    assert {len(one["traceId"]) for one in found} == {32}
    assert {len(one["spanId"]) for one in found} == {16}
    assert len({one["traceId"] for one, span in zip(found, spans.spans, strict=True) if span.request == "r1"}) == 1
    assert all(int(one["endTimeUnixNano"]) >= int(one["startTimeUnixNano"]) for one in found)


def test_spans_can_be_of_single_blocks() -> None:
    spans = MemorySpans(per_block=True)
    store = make(TierSettings(tier=DictTier("hbm")), spans=spans)
    put(store, 0, 1, 2)
    assert [span.prefix_hash for span in spans.spans] == [key.prefix.hex() for key in KEYS[:3]]


def test_what_expires_is_not_written_back() -> None:
    clock = HandClock()
    dram, file = DictTier("dram"), DictTier("file")
    store = make(TierSettings(tier=dram, ttl_s=10), TierSettings(tier=file, write="write-back"), clock=clock)
    put(store, 0)
    clock.now_s += 10
    store.maintain()
    store.flush(1)
    assert not dram.blocks
    assert not file.blocks


def test_spans_add_up_to_the_counters_of_the_edges() -> None:
    spans = MemorySpans()
    store = make(exact(DictTier("hbm"), 3), TierSettings(tier=DictTier("dram"), write="write-back"), spans=spans)
    for n in range(0, 9, 3):
        put(store, n, n + 1, n + 2, request=f"r{n}")
        store.flush(1)
    store.load(KEYS[:4], buffers(4), request=Request("reader"))
    store.flush(1)
    totals = span_totals(spans.spans)
    edges = store.stats().edges
    for edge in (("request", "hbm"), ("hbm", "dram"), ("dram", "request"), ("dram", "hbm")):
        assert sum(total.bytes for key, total in totals.items() if key[2:] == edge) == edges[edge].bytes
        assert edges[edge].bytes > 0
    assert totals["reader", "load", "dram", "request"].blocks == 4
    assert totals["reader", "promote", "dram", "hbm"].bytes == edges["dram", "hbm"].bytes
