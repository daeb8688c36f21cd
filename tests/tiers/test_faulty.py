import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import Block, Outcome, Tier, Wanted
from kvbench.tiers.faulty import Faults, FaultyTier, faults_of
from kvbench.tiers.registry import open_tier
from kvbench.tiers.spec import parse_tier_spec
from tests.tiers.storing_child import content_of, key_of

SIZE = 3000
COUNT = 400
NAMES = {number: key_of(number) for number in range(COUNT)}
BYTES = {number: content_of(number, SIZE) for number in range(COUNT)}


def opened(faults: str) -> Tier:
    return open_tier(f"faulty(dram:16MiB, {faults})", block_bytes=SIZE)


def store(tier: Tier, numbers: range = range(COUNT)) -> list[Outcome]:
    return tier.store([Block(NAMES[number], memoryview(BYTES[number])) for number in numbers])


def load(tier: Tier, numbers: range = range(COUNT)) -> list[Outcome]:
    buffers = {number: bytearray(len(BYTES[number])) for number in numbers}
    outcomes = tier.load([Wanted(NAMES[number], memoryview(buffer)) for number, buffer in buffers.items()])
    for number, outcome in zip(numbers, outcomes, strict=True):
        assert outcome.result != "ok" or buffers[number] == BYTES[number]
    return outcomes


def results(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(outcome.result for outcome in outcomes)


def test_the_spelling_says_every_fault() -> None:
    spec = "faulty(null:, load_fail=.1, slow=0.2:5ms, hang=0.01, after=3, until=9, down=1s-2s, seed=7)"
    assert faults_of(parse_tier_spec(spec)) == Faults(
        load_fail=0.1, slow=(0.2, 0.005), hang=0.01, after=3, until=9, down=(1.0, 2.0), seed=7
    )


def test_faults_befall_their_share_of_blocks_and_are_counted() -> None:
    tier = opened("store_fail=0.25, load_fail=0.25, seed=3")
    stored = results(store(tier))
    assert 60 < stored["failed"] < 140  # 100 ± 4 standard deviations
    loaded = results(load(tier))
    # what was not stored is a miss, unless asking for it failed first
    assert 60 < loaded["failed"] < 140
    assert loaded["ok"] + loaded["miss"] + loaded["failed"] == COUNT
    stats = tier.stats()
    assert stats.failures == stored["failed"] + loaded["failed"]
    assert (stats.loaded_blocks, stats.misses) == (loaded["ok"], loaded["miss"])


def test_the_same_seed_makes_the_same_faults_whatever_the_threads_do() -> None:
    def run(workers: int, seed: int) -> dict[int, str]:
        tier = opened(f"store_fail=0.3, load_fail=0.2, corrupt=0.1, seed={seed}")
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda number: store(tier, range(number, number + 1)), range(COUNT)))
            found = pool.map(lambda number: load(tier, range(number, number + 1))[0].result, range(COUNT))
            return dict(enumerate(found))

    assert run(1, 5) == run(8, 5)
    assert run(1, 5) != run(1, 6)


def test_damage_is_reported_dropped_and_then_a_miss() -> None:
    for fault in ("corrupt=1", "torn=1"):
        tier = opened(fault)
        assert results(store(tier, range(10))) == {"ok": 10}
        assert results(load(tier, range(10))) == {"corrupt": 10}
        assert results(load(tier, range(10))) == {"miss": 10}
        stats = tier.stats()
        assert (stats.blocks, stats.corrupt, stats.loaded_blocks, stats.loaded_bytes) == (0, 10, 0, 0)


def test_faults_begin_and_end_by_count() -> None:
    tier = opened("store_fail=1, after=10, until=15")
    assert [outcome.result for outcome in store(tier, range(20))] == ["ok"] * 10 + ["failed"] * 5 + ["ok"] * 5


def test_a_place_that_is_down_fails_and_comes_back() -> None:
    now_s = [0.0]
    inner = open_tier("dram:1MiB", block_bytes=SIZE)
    tier = FaultyTier(inner, Faults(down=(10.0, 20.0)), clock=lambda: now_s[0])
    key: BlockKey = NAMES[0]
    assert results(store(tier, range(2))) == {"ok": 2}
    now_s[0] = 10.0
    assert results(load(tier, range(2))) == {"failed": 2}
    assert (tier.contains([key]), tier.evict([key])) == ([False], [False])
    now_s[0] = 20.0
    assert results(load(tier, range(2))) == {"ok": 2}


def test_slow_blocks_sleep_and_hanging_ones_end_with_close() -> None:
    slept: list[float] = []
    inner = open_tier("dram:1MiB", block_bytes=SIZE)
    tier = FaultyTier(inner, Faults(slow=(1.0, 0.25)), sleep=slept.append)
    store(tier, range(3))
    assert slept == [0.25] * 3
    hanging = opened("hang=1")
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(store(hanging, range(1))))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    hanging.close()
    thread.join(10)
    assert results(outcomes) == {"timeout": 1}
