"""Every tier must return exactly the bytes that were stored, or say that it does not have them."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.tiers.base import Block, Result, Tier, Wanted
from tests.conformance.tier_openers import OPENERS, TierOpener, remove_shared

BLOCK_BYTES = 40_000  # neither whole pages nor whole sectors
SIZES = (1, 2, 511, 512, 513, 4095, 4096, 4097, 8192, 12_345, 32_768, 32_769, 39_999, BLOCK_BYTES)
ROOM = 64

Open = Callable[..., Tier]


@pytest.fixture(params=OPENERS, ids=lambda opener: opener.name)
def opener(request: pytest.FixtureRequest) -> TierOpener:
    found: TierOpener = request.param
    return found


@pytest.fixture
def opened(opener: TierOpener, tmp_path: Path) -> Iterator[Open]:
    """Opens the tier, as often as a test asks, and closes all of them."""
    tiers: list[Tier] = []

    def open_it(*, blocks: int = ROOM) -> Tier:
        tiers.append(opener.open(tmp_path, BLOCK_BYTES, blocks))
        return tiers[-1]

    yield open_it
    for tier in tiers:
        tier.close()
    remove_shared(tmp_path)


@pytest.fixture
def keeping(opener: TierOpener, opened: Open) -> Tier:
    if not opener.keeps:
        pytest.skip(f"{opener.name} keeps nothing")
    return opened()


def key(number: int) -> BlockKey:
    chance = random.Random(number)
    return BlockKey(chance.randbytes(16), chance.randbytes(32))


def content(number: int, size: int = BLOCK_BYTES) -> bytes:
    return random.Random(number + 10**6).randbytes(size)


def store(tier: Tier, blocks: dict[BlockKey, bytes]) -> list[Result]:
    return [outcome.result for outcome in tier.store([Block(key, memoryview(data)) for key, data in blocks.items()])]


def load(tier: Tier, wanted: Sequence[tuple[BlockKey, int]]) -> list[tuple[Result, bytes]]:
    buffers = [bytearray(size) for _, size in wanted]
    outcomes = tier.load([Wanted(key, memoryview(buffer)) for (key, _), buffer in zip(wanted, buffers, strict=True)])
    return [(outcome.result, bytes(buffer)) for outcome, buffer in zip(outcomes, buffers, strict=True)]


def test_blocks_of_every_size_come_back_exactly(keeping: Tier) -> None:
    blocks = {key(size): content(size, size) for size in SIZES}
    assert store(keeping, blocks) == ["ok"] * len(SIZES)
    assert keeping.contains(list(blocks)) == [True] * len(SIZES)
    found = load(keeping, [(key, len(data)) for key, data in blocks.items()])
    assert found == [("ok", data) for data in blocks.values()]


def test_aligned_buffers_and_slices_of_larger_ones_are_as_good_as_any(keeping: Tier) -> None:
    import mmap

    memory = memoryview(mmap.mmap(-1, 20 * 4096))
    memory[: 5 * 4096] = content(1, 5 * 4096)
    parts = {key(0): memory[: 8 * 1024], key(1): memory[100 : 100 + 4096], key(2): memory[4096:8192].toreadonly()}
    kept = {name: bytes(part) for name, part in parts.items()}
    assert [outcome.result for outcome in keeping.store([Block(name, part) for name, part in parts.items()])] == [
        "ok"
    ] * 3
    into = {
        key(0): memory[8 * 4096 : 10 * 4096],
        key(1): memory[41_001 : 41_001 + 4096],
        key(2): memory[12 * 4096 :][:4096],
    }
    assert [outcome.result for outcome in keeping.load([Wanted(name, part) for name, part in into.items()])] == [
        "ok"
    ] * 3
    assert {name: bytes(part) for name, part in into.items()} == kept


def test_buffers_of_other_types_are_read_as_bytes(keeping: Tier) -> None:
    from array import array

    words = array("I", range(5000))
    assert [outcome.result for outcome in keeping.store([Block(key(0), memoryview(words))])] == ["ok"]
    into = array("I", bytes(20_000))
    assert [outcome.result for outcome in keeping.load([Wanted(key(0), memoryview(into))])] == ["ok"]
    assert into == words


def test_a_block_that_is_there_is_not_stored_again(keeping: Tier) -> None:
    assert store(keeping, {key(1): content(1)}) == ["ok"]
    assert store(keeping, {key(1): content(1), key(2): content(2)}) == ["exists", "ok"]
    assert load(keeping, [(key(1), BLOCK_BYTES)]) == [("ok", content(1))]


def test_a_batch_may_name_a_block_twice(keeping: Tier) -> None:
    data = memoryview(content(1))
    assert [outcome.result for outcome in keeping.store([Block(key(1), data), Block(key(1), data)])] == ["ok", "exists"]
    assert load(keeping, [(key(1), BLOCK_BYTES)] * 2) == [("ok", content(1))] * 2
    assert keeping.evict([key(1), key(1)]) == [True, False]


def test_an_empty_batch_is_nothing(opened: Open) -> None:
    tier = opened()
    assert (tier.store([]), tier.load([]), tier.contains([]), tier.evict([])) == ([], [], [], [])
    assert list(tier.entries()) == []


def test_what_was_not_stored_is_a_miss(opened: Open) -> None:
    tier = opened()
    assert [result for result, _ in load(tier, [(key(1), 10), (key(2), BLOCK_BYTES)])] == ["miss", "miss"]
    assert tier.contains([key(1)]) == [False]
    assert tier.evict([key(1)]) == [False]
    assert tier.stats().misses == 2


def test_what_was_evicted_is_a_miss_and_may_be_stored_again(keeping: Tier) -> None:
    store(keeping, {key(1): content(1), key(2): content(2)})
    assert keeping.evict([key(1)]) == [True]
    assert keeping.contains([key(1), key(2)]) == [False, True]
    assert load(keeping, [(key(1), BLOCK_BYTES), (key(2), BLOCK_BYTES)])[0][0] == "miss"
    assert load(keeping, [(key(2), BLOCK_BYTES)]) == [("ok", content(2))]
    assert store(keeping, {key(1): content(3)}) == ["ok"]
    assert load(keeping, [(key(1), BLOCK_BYTES)]) == [("ok", content(3))]


def test_a_full_tier_says_so_and_has_room_again_after_evicting(opener: TierOpener, opened: Open) -> None:
    if not opener.bounded:
        pytest.skip(f"{opener.name} has no bound")
    tier = opened(blocks=4)
    results = store(tier, {key(number): content(number) for number in range(6)})
    assert results == ["ok"] * 4 + ["full"] * 2
    stats = tier.stats()
    assert stats.capacity_bytes is not None
    assert stats.used_bytes <= stats.capacity_bytes
    assert tier.evict([key(0), key(3)]) == [True, True]
    assert store(tier, {key(number): content(number) for number in (4, 5, 6)}) == ["ok", "ok", "full"]
    found = load(tier, [(key(number), BLOCK_BYTES) for number in (1, 2, 4, 5)])
    assert found == [("ok", content(number)) for number in (1, 2, 4, 5)]


def test_a_buffer_of_the_wrong_length_gets_nothing(keeping: Tier) -> None:
    store(keeping, {key(1): content(1, 5000)})
    for size in (1, 4999, 5001, BLOCK_BYTES):
        ((result, _),) = load(keeping, [(key(1), size)])
        assert result not in ("ok", "miss"), size
    assert load(keeping, [(key(1), 5000)]) == [("ok", content(1, 5000))]


def test_blocks_that_do_not_fit_the_tier_fail_by_themselves(keeping: Tier) -> None:
    blocks = {key(1): b"", key(2): content(2, BLOCK_BYTES + 1), key(3): content(3)}
    assert store(keeping, blocks) == ["failed", "failed", "ok"]
    assert keeping.contains(list(blocks)) == [False, False, True]


def test_entries_are_what_is_held(keeping: Tier) -> None:
    store(keeping, {key(size): content(size, size) for size in SIZES})
    keeping.evict([key(SIZES[3])])
    expected = {key(size): size for size in SIZES if size != SIZES[3]}
    assert {entry.key: entry.num_bytes for entry in keeping.entries()} == expected


def test_a_persistent_tier_has_its_blocks_when_it_is_opened_again(opener: TierOpener, opened: Open) -> None:
    if not opener.persistent:
        pytest.skip(f"{opener.name} ends with its process")
    blocks = {key(size): content(size, size) for size in SIZES}
    tier = opened()
    store(tier, blocks)
    tier.evict([key(SIZES[0])])
    tier.close()
    again = opened()
    expected = {key(size): size for size in SIZES[1:]}
    assert {entry.key: entry.num_bytes for entry in again.entries()} == expected
    assert load(again, [(name, len(blocks[name])) for name in expected]) == [("ok", blocks[name]) for name in expected]
    assert again.stats().stored_blocks == 0


def test_counters_add_up(keeping: Tier) -> None:
    before = keeping.stats()
    assert (before.blocks, before.used_bytes) == (0, 0)
    sizes = {number: 1000 + 7 * number for number in range(20)}
    store(keeping, {key(number): content(number, size) for number, size in sizes.items()})
    load(keeping, [(key(number), size) for number, size in sizes.items()])
    load(keeping, [(key(100), 5), (key(0), 3)])
    keeping.evict([key(number) for number in range(5)])
    stats = keeping.stats()
    assert (stats.stored_blocks, stats.stored_bytes) == (20, sum(sizes.values()))
    assert (stats.loaded_blocks, stats.loaded_bytes) == (20, sum(sizes.values()))
    assert (stats.blocks, stats.evicted_blocks, stats.misses, stats.failures) == (15, 5, 1, 1)
    held_bytes = sum(size for number, size in sizes.items() if number >= 5)
    assert held_bytes <= stats.used_bytes <= 15 * 10 * 4096
    keeping.evict([key(number) for number in range(20)])
    assert (keeping.stats().blocks, keeping.stats().used_bytes) == (0, 0)


def test_threads_may_store_load_and_evict_at_once(keeping: Tier) -> None:
    def worker(number: int) -> Counter[str]:
        chance = random.Random(number)
        seen: Counter[str] = Counter()
        for _ in range(12):
            names = chance.sample(range(24), 4)
            action = chance.choice(["store", "load", "load", "evict"])
            if action == "store":
                seen.update(store(keeping, {key(name): content(name, 1000 + name) for name in names}))
            elif action == "evict":
                keeping.evict([key(name) for name in names[:2]])
            else:
                found = load(keeping, [(key(name), 1000 + name) for name in names])
                assert all(
                    data == content(name, 1000 + name)
                    for name, (result, data) in zip(names, found, strict=True)
                    if result == "ok"
                )
                seen.update(result for result, _ in found)
        return seen

    with ThreadPoolExecutor(6) as pool:
        seen = sum(pool.map(worker, range(6)), Counter())
    assert set(seen) <= {"ok", "exists", "miss"}
    assert seen["ok"] > 0
    held = list(keeping.entries())
    assert len(held) == keeping.stats().blocks
    assert load(keeping, [(entry.key, entry.num_bytes) for entry in held]) == [
        ("ok", content(name, entry.num_bytes)) for entry in held for name in (entry.num_bytes - 1000,)
    ]


IDENTITY = {
    "model": "qwen3-0.6b",
    "model_version": "a1",
    "tokenizer_version": "t1",
    "dtype": "bfloat16",
    "page_tokens": 16,
    "layers": (0, 28),
    "attention": "gqa",
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "qwen3-4b"},
        {"model_version": "a2"},
        {"tokenizer_version": "t2"},
        {"dtype": "float16"},
        {"page_tokens": 32},
        {"layers": (0, 14)},
        {"attention": "mla-latent"},
        {"rank": 1, "world": 2},
        {"world": 2},
        {"extra": "lora-7"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_kv_of_another_identity_is_always_a_miss(keeping: Tier, change: dict[str, object]) -> None:
    tokens = range(64)
    mine = block_keys(tokens, KvIdentity(**IDENTITY))  # type: ignore[arg-type]
    other = block_keys(tokens, KvIdentity(**IDENTITY | change))  # type: ignore[arg-type]
    store(keeping, {name: content(1, 100) for name in mine})
    assert [result for result, _ in load(keeping, [(name, 100) for name in other])] == ["miss"] * len(other)
    assert keeping.contains(list(other)) == [False] * len(other)


def test_a_tier_closes_twice_and_then_has_nothing(opened: Open) -> None:
    tier = opened()
    store(tier, {key(1): content(1)})
    tier.close()
    tier.close()


def test_null_returns_blocks_of_zeros_and_no_others(tmp_path: Path) -> None:
    tier = next(opener for opener in OPENERS if opener.name == "null").open(tmp_path, BLOCK_BYTES, ROOM)
    zeros, nearly = bytes(BLOCK_BYTES), bytes(BLOCK_BYTES - 1) + b"\1"
    assert store(tier, {key(1): zeros, key(2): nearly}) == ["ok", "ok"]
    assert tier.contains([key(1), key(2)]) == [True, False]
    buffer = bytearray(content(9))
    assert [outcome.result for outcome in tier.load([Wanted(key(1), memoryview(buffer))])] == ["ok"]
    assert buffer == zeros
    assert load(tier, [(key(2), BLOCK_BYTES)])[0][0] == "miss"
