"""Orders of eviction against sorting, and the rules of cooling."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.eviction import SCORE_HALF_LIFE_S, Eviction, EvictionOrder, Usage


@dataclass(eq=False)
class Block:
    name: int
    num_bytes: int = 1
    usage: Usage = field(default_factory=Usage)
    resident: bool = True
    busy: bool = False
    kept: bool = False


def decayed(times: list[float], now: float) -> float:
    """Accesses, each halved for every half-life since."""
    return sum(2 ** ((at - now) / SCORE_HALF_LIFE_S) for at in times)


@given(
    eviction=st.sampled_from(["lru", "lfu", "score"]),
    accesses=st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 40)), max_size=40),
)
def test_blocks_leave_in_the_order_that_sorting_by_the_definition_gives(
    eviction: Eviction, accesses: list[tuple[int, float]]
) -> None:
    blocks = [Block(n) for n in range(6)]
    order: EvictionOrder[Block] = EvictionOrder(eviction)
    history: list[list[float]] = [[] for _ in blocks]
    last = [0] * 6
    now = 0.0
    for n, block in enumerate(blocks):
        last[n] = n + 1
        block.usage.access(n + 1, now)
        history[n].append(now)
        order.add(block)
    for step, (n, gap) in enumerate(accesses, 7):
        now += gap
        blocks[n].usage.access(step, now)
        history[n].append(now)
        last[n] = step
    expected = {
        "lru": sorted(range(6), key=lambda n: last[n]),
        "lfu": sorted(range(6), key=lambda n: (len(history[n]), last[n])),
        "score": sorted(range(6), key=lambda n: (round(decayed(history[n], now), 9), last[n])),
    }[eviction]
    left = []
    for _ in blocks:
        (block,) = order.take(1) or []
        left.append(block.name)
        block.resident = False
    if eviction == "score":  # equal scores may differ in the last bits
        scores = [decayed(history[n], now) for n in left]
        assert all(a <= b * (1 + 1e-6) for a, b in pairwise(scores))
    else:
        assert left == expected


def test_a_take_that_cannot_be_met_changes_nothing() -> None:
    order: EvictionOrder[Block] = EvictionOrder("lru")
    for n in range(3):
        block = Block(n)
        block.usage.access(n, 0.0)
        order.add(block)
    assert order.take(4) is None
    assert [block.name for block in order.take(3) or []] == [0, 1, 2]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "score"])
def test_blocks_being_read_stay_and_kept_ones_leave_last(eviction: Eviction) -> None:
    order: EvictionOrder[Block] = EvictionOrder(eviction)
    blocks = [Block(0, busy=True), Block(1, kept=True), Block(2), Block(3)]
    for n, block in enumerate(blocks, 1):
        block.usage.access(n, 0.0)
        order.add(block)
    assert [block.name for block in order.take(3) or []] == [2, 3, 1]
    assert order.take(1) is None


def test_nothing_leaves_for_a_block_that_was_accessed_before_it() -> None:
    order: EvictionOrder[Block] = EvictionOrder("lru")
    for n in (5, 7):
        block = Block(n)
        block.usage.access(n, 0.0)
        order.add(block)
    assert order.take(2, before=6) is None
    assert [block.name for block in order.take(1, before=6) or []] == [5]


def test_a_candidate_leaves_after_its_cooldown_unless_it_was_accessed() -> None:
    order: EvictionOrder[Block] = EvictionOrder("lru", cooldown_s=5)
    blocks = [Block(n) for n in range(4)]
    for n, block in enumerate(blocks, 1):
        block.usage.access(n, 0.0)
        order.add(block)
    order.mark(2, 100.0)
    assert order.cooling_bytes == 2
    assert order.cooled(104.9) == []
    blocks[0].usage.access(9, 103.0)
    assert [block.name for block in order.cooled(105.0)] == [1]
    assert order.cooling_bytes == 0
    assert [block.name for block in order.take(3) or []] == [2, 3, 0]


def test_space_needed_at_once_is_taken_from_cooling_blocks_first() -> None:
    order: EvictionOrder[Block] = EvictionOrder("lfu", cooldown_s=5)
    blocks = [Block(n) for n in range(3)]
    for n, block in enumerate(blocks, 1):
        block.usage.access(n, 0.0)
        order.add(block)
    order.mark(1, 0.0)
    blocks[0].kept = False
    assert [block.name for block in order.take(2) or []] == [0, 1]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "score"])
def test_a_kept_block_does_not_leave_where_only_later_ones_could_stay(eviction: Eviction) -> None:
    # A write that waited long is older than most of the tier: it finds no room, and pushes out nothing that is pinned.
    pinned, pinned_and_read, later = Block(0, kept=True), Block(1, kept=True), Block(2)
    order: EvictionOrder[Block] = EvictionOrder(eviction)
    for sequence, block in ((1, pinned), (8, pinned_and_read), (9, later)):
        block.usage.access(sequence, float(sequence))
        order.add(block)
    assert order.take(1, before=5) is None
    assert order.take(1, before=10) == [later]
    later.resident = False
    assert order.take(1, before=5) == [pinned]
