"""Batches that name a block more than once, for tiers that work on the blocks of a batch side by side."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import EXISTS, MISS, Block, Outcome

_T = TypeVar("_T")


def store_once(blocks: Sequence[Block], store: Callable[[Sequence[Block]], list[Outcome]]) -> list[Outcome]:
    """Outcomes of `store` with each block once; where the first was stored, the others exist."""
    outcomes = _once(blocks, [block.key for block in blocks], store)
    return [EXISTS if repeated and one.result == "ok" else one for one, repeated in outcomes]


def evict_once(keys: Sequence[BlockKey], evict: Callable[[Sequence[BlockKey]], list[Outcome]]) -> list[Outcome]:
    """Outcomes of `evict` with each block once; the others are gone then."""
    return [MISS if repeated and one.result == "ok" else one for one, repeated in _once(keys, keys, evict)]


def _once(
    items: Sequence[_T], keys: Sequence[BlockKey], work: Callable[[Sequence[_T]], list[Outcome]]
) -> list[tuple[Outcome, bool]]:
    first: dict[BlockKey, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    done = dict(zip(first, work([items[index] for index in first.values()]), strict=True))
    return [(done[key], first[key] != index) for index, key in enumerate(keys)]
