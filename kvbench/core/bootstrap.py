"""How sure a median is: percentile bootstrap."""

import random
from collections.abc import Sequence
from statistics import median

_RESAMPLES = 500


def median_interval(values: Sequence[float], *, confidence: float = 0.95, seed: int = 1) -> tuple[float, float]:
    """Low and high end of the interval that holds the median of `confidence` of all resamples (Efron 1979).

    Resampling is seeded: the same samples give the same interval. With few samples it is too narrow; five is the least
    that is worth reading.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    generator = random.Random(seed)
    size = len(values)
    medians = sorted(median(generator.choices(values, k=size)) for _ in range(_RESAMPLES))
    tail = round((1 - confidence) / 2 * (_RESAMPLES - 1))
    return medians[tail], medians[_RESAMPLES - 1 - tail]
