import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.tiers.base import Block, Tier, Wanted
from kvbench.tiers.dram import HostPool
from kvbench.tiers.memory import MemoryTier
from kvbench.tiers.registry import open_tier
from kvbench.tiers.shared_dram import SharedDramTier, stale_segments
from kvbench.tiers.slots import SlotAllocator
from tests.tiers.storing_child import content_of, key_of

BLOCK = 100_000
SLOT = 25 * 4096


def store(tier: Tier, number: int, data: bytes) -> str:
    return tier.store([Block(key_of(number), memoryview(data))])[0].result


def load(tier: Tier, number: int, size: int) -> tuple[str, bytes]:
    buffer = bytearray(size)
    return tier.load([Wanted(key_of(number), memoryview(buffer))])[0].result, bytes(buffer)


@given(st.integers(1, 40_000), st.lists(st.tuples(st.booleans(), st.integers(1, 10**6)), max_size=60))
def test_no_mixture_of_sizes_strands_room(slot_bytes: int, steps: list[tuple[bool, int]]) -> None:
    slots = SlotAllocator(slot_bytes, align_bytes=64)
    slots.add(range(6))
    units = 6 * slots.slot_bytes // slots.unit_bytes
    held: list[tuple[tuple[int, int], ...]] = []
    for is_store, number in steps:
        used = sum(-(-size // slots.unit_bytes) for parts in held for _, size in parts)
        if is_store:
            size = number % slot_bytes + 1
            parts = slots.allocate(size)
            assert (parts is not None) == (-(-size // slots.unit_bytes) <= units - used)
            if parts is not None:
                assert sum(part for _, part in parts) == size
                held.append(parts)
        elif held:
            slots.free(held.pop(number % len(held)))
        spans = sorted(
            (offset, -(-size // slots.unit_bytes) * slots.unit_bytes) for parts in held for offset, size in parts
        )
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))


def test_a_pool_grows_with_its_blocks_and_shrinks_when_it_has_been_idle() -> None:
    now_s = [0.0]
    pool = HostPool(pool_bytes=40 * SLOT, block_bytes=BLOCK, idle_s=30, chunk_bytes=10 * SLOT, clock=lambda: now_s[0])
    tier = MemoryTier(pool, name="dram", block_bytes=BLOCK, capacity_bytes=40 * SLOT)
    assert pool.pool_bytes == 0
    for number in range(25):
        assert store(tier, number, content_of(number, BLOCK)[:1] * BLOCK) == "ok"
    assert pool.pool_bytes == 30 * SLOT
    tier.evict([key_of(number) for number in range(24)])
    assert pool.pool_bytes == 30 * SLOT
    now_s[0] = 29.0
    tier.stats()
    assert pool.pool_bytes == 30 * SLOT
    now_s[0] = 30.0
    tier.stats()
    assert pool.pool_bytes == 10 * SLOT  # the chunk with the last block stays
    assert load(tier, 24, BLOCK)[0] == "ok"
    tier.evict([key_of(24)])
    assert tier.shrink() == 10 * SLOT
    assert store(tier, 1, b"again") == "ok"
    assert load(tier, 1, 5) == ("ok", b"again")


def test_headroom_is_room_for_rounding_and_not_for_more_blocks() -> None:
    tight = open_tier(f"dram:{10 * BLOCK}B", block_bytes=BLOCK)
    roomy = open_tier(f"dram:{10 * BLOCK}B?headroom=1.5", block_bytes=BLOCK)
    for tier, expected in ((tight, 9), (roomy, 10)):  # 10 blocks of 100,000 bytes are 9.7 slots of whole pages
        assert sum(store(tier, number, bytes(BLOCK)) == "ok" for number in range(20)) == expected


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    subprocess.run(["rm", "-rf", f"/dev/shm/kvbench-{name}"], check=True)


CHILD = """
import os, signal, sys
from kvbench.tiers import shared_dram
from kvbench.tiers.base import Block
from kvbench.tiers.registry import open_tier
from tests.tiers.storing_child import content_of, key_of
tier = open_tier(f"dram:1000000B?shared={sys.argv[1]}", block_bytes=100_000)
for number in range(3):
    tier.store([Block(key_of(number), memoryview(content_of(number, 100_000)))])
if sys.argv[2] == "close":
    tier.close()
else:  # killed in the middle of copying block 3
    shared_dram.copy_bytes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    tier.store([Block(key_of(3), memoryview(content_of(3, 100_000)))])
"""


def run_child(segment: str, end: str) -> int:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CHILD, segment, end]
    return subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False, timeout=60
    ).returncode


def test_processes_share_blocks_and_what_a_killed_writer_left_is_free_again(segment: str) -> None:
    tier = open_tier(f"dram:1000000B?shared={segment}", block_bytes=BLOCK)
    assert run_child(segment, "kill") == -signal.SIGKILL
    for number in range(3):
        data = content_of(number, BLOCK)
        assert load(tier, number, len(data)) == ("ok", data)
    assert load(tier, 3, 5)[0] == "miss"  # it was pending, and stays unseen
    assert tier.contains([key_of(2), key_of(3)]) == [True, False]
    assert store(tier, 3, b"three") == "ok"
    assert load(tier, 3, 5) == ("ok", b"three")
    assert [store(tier, number, b"fill") for number in range(4, 10)] == ["ok"] * 5 + ["full"]  # 9 slots, none lost
    tier.close()
    assert not Path(f"/dev/shm/kvbench-{segment}").exists()


def test_a_stale_segment_is_detected_and_used_again_or_replaced(segment: str) -> None:
    assert run_child(segment, "kill") == -signal.SIGKILL
    assert segment in stale_segments()
    tier = open_tier(f"dram:1000000B?shared={segment}", block_bytes=BLOCK)
    assert segment not in stale_segments()
    assert len(list(tier.entries())) == 3
    assert load(tier, 0, len(content_of(0, BLOCK))) == ("ok", content_of(0, BLOCK))
    with pytest.raises(UsageError, match="is in use with 9 slots"):
        open_tier(f"dram:2000000B?shared={segment}", block_bytes=BLOCK)
    tier.close()
    assert run_child(segment, "kill") == -signal.SIGKILL
    other = open_tier(f"dram:2000000B?shared={segment}", block_bytes=BLOCK)
    assert list(other.entries()) == []
    other.close()


def test_the_last_to_close_gives_the_memory_back(segment: str) -> None:
    first = open_tier(f"dram:1000000B?shared={segment}", block_bytes=BLOCK)
    assert run_child(segment, "close") == 0
    assert len(list(first.entries())) == 3
    second = open_tier(f"dram:1000000B?shared={segment}", block_bytes=BLOCK)
    first.close()
    assert load(second, 1, len(content_of(1, BLOCK))) == ("ok", content_of(1, BLOCK))
    second.close()
    assert not Path(f"/dev/shm/kvbench-{segment}").exists()


def test_a_shared_pool_larger_than_shared_memory_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvbench-test", tmp_path], check=False)
    if done.returncode:
        pytest.skip("cannot mount a filesystem")
    try:
        with pytest.raises(KvbenchError, match="has no"):
            SharedDramTier("big", name="dram", block_bytes=BLOCK, capacity_bytes=1 << 22, root=tmp_path)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=False)


@pytest.mark.parametrize(
    ("spelling", "part"),
    [
        ("dram:", "has no size"),
        ("hbm:", "has no size"),
        ("dram:1KiB", "smaller than one block"),
        ("hbm:1KiB", "smaller than one block"),
        ("file:/tmp/never-made?size=1KiB", "smaller than one block"),
        ("dram:1MiB?shared=a&idle=3s", "no idle="),
        ("dram:1MiB?shared=a&headroom=2", "no headroom="),
    ],
)
def test_a_tier_that_cannot_hold_a_block_is_refused(spelling: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        open_tier(spelling, block_bytes=BLOCK)
