"""Let the points of a case take turns under the clock, until the repeats or the time are used up."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(points: Sequence[T], *, repeats: int, time_s: float, clock: Callable[[], float]) -> Iterator[T]:
    """Each point once per round: a disturbance touches all of them, and an early end loses none.

    The first round always ends, so that every point has a sample.
    """
    deadline = clock() + time_s
    for turn in range(repeats):
        for point in points:
            if turn and clock() >= deadline:
                return
            yield point


def monotonic() -> float:
    """The clock of `turns`; tests pass another one."""
    return time.monotonic()
