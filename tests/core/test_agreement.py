"""Parts of communicators are put together by their calls, whatever the order they come in."""

import random

import pytest

from kvbench.core.agreement import Part, blocks, score


def part(rank: int, order: int, call: str, *, count: int = 4, place: int | None = None) -> Part:
    return Part(
        owner=rank,
        rank=rank,
        order=order,
        place=place,
        calls={call: count},
        ops={call[0]: count},
        first=(call,) * count,
    )


def owners(found: list[tuple[int, ...]] | None, parts: list[Part]) -> set[tuple[tuple[int, ...], str]]:
    assert found is not None
    return {
        (tuple(sorted(parts[number].rank for number in block)), str(next(iter(parts[block[0]].calls))))
        for block in found
    }


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_any_stride_of_ranks_is_found(stride: int) -> None:
    parts = [part(rank, 0, f"R{rank // (2 * stride)}.{rank % stride}") for rank in range(8)]
    expected = {((rank, rank + stride), f"R{rank // (2 * stride)}.{rank % stride}") for rank in range(8 - stride)}
    assert owners(blocks(parts, 2), parts) <= expected
    assert len(blocks(parts, 2) or []) == 4


@pytest.mark.parametrize("seed", range(5))
def test_the_blocks_do_not_depend_on_the_order_of_the_parts(seed: int) -> None:
    parts = [part(rank, order, f"{'AB'[(order + rank) % 2]}") for rank in range(4) for order in range(2)]
    shuffled = list(parts)
    random.Random(seed).shuffle(shuffled)
    assert owners(blocks(parts, 4), parts) == owners(blocks(shuffled, 4), shuffled)
    assert owners(blocks(parts, 4), parts) == {((0, 1, 2, 3), "A"), ((0, 1, 2, 3), "B")}


def test_full_agreement_scores_one_and_a_lone_member_nothing() -> None:
    parts = [part(0, 0, "A"), part(1, 0, "A"), part(2, 0, "B")]
    assert score([(0, 1)], parts[:2], 2)[0] == 1.0
    assert score([(0, 1), (2,)], parts, 2)[0] == pytest.approx(2 / 3)


def test_places_that_contradict_every_partition_give_none() -> None:
    parts = [part(rank, 0, "A", place=0) for rank in range(2)]
    assert blocks(parts, 2) is None


def test_many_communicators_are_assigned_by_the_best_pairs() -> None:
    parts = [part(rank, (order + rank) % 9, f"C{order}") for rank in range(3) for order in range(9)]
    assert owners(blocks(parts, 3), parts) == {((0, 1, 2), f"C{order}") for order in range(9)}
