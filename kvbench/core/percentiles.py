"""Percentiles of a sample, and how sure they are: one definition for every latency that kvbench prints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

_EXACT_BELOW = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """A quantile with its distribution-free interval; `low` or `high` is None where the sample is too small for it."""

    quantile: float
    value: float
    low: float | None
    high: float | None


def percentile(values: Sequence[float], quantile: float) -> float:
    """The quantile (0 to 1) by linear interpolation between order statistics: position (n-1)·q, as numpy's default."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    return ordered_percentile(ordered, quantile)


def ordered_percentile(ordered: Sequence[float], quantile: float) -> float:
    """`percentile` of values that are in order already."""
    position = (len(ordered) - 1) * quantile
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentile_with_interval(values: Sequence[float], quantile: float, *, confidence: float = 0.95) -> Percentile:
    """The quantile and the order statistics around it that cover it with at least `confidence`, whatever the shape."""
    ordered = sorted(values)
    low, high = interval_ranks(len(ordered), quantile, confidence=confidence)
    return Percentile(
        quantile=quantile,
        value=ordered_percentile(ordered, quantile),
        low=None if low is None else ordered[low],
        high=None if high is None else ordered[high],
    )


@lru_cache(maxsize=1024)
def interval_ranks(size: int, quantile: float, *, confidence: float = 0.95) -> tuple[int | None, int | None]:
    """Zero-based ranks (l, u) with P(X_(l) ≤ ξ_q ≤ X_(u)) ≥ confidence; None for an end that no observation gives.

    The number of observations below ξ_q is Binomial(n, q) (David and Nagaraja, Order Statistics, 7.1). Each tail gets
    (1 - confidence)/2. Above 20,000 observations the normal approximation is used.
    """
    tail = (1 - confidence) / 2
    if size >= _EXACT_BELOW:
        spread = NormalDist().inv_cdf(1 - tail) * math.sqrt(size * quantile * (1 - quantile))
        low, high = math.floor(size * quantile - spread) - 1, math.ceil(size * quantile + spread)
        return max(low, 0), min(high, size - 1)
    below = 0.0  # P(B < k)
    low_rank: int | None = None
    high_rank: int | None = None
    # What lies so far below the mean weighs less than a float can add to 1.
    first = max(0, math.floor(size * quantile - 12 * math.sqrt(size * quantile * (1 - quantile)) - 50))
    for count in range(first, size + 1):
        if below <= tail and count > 0:  # P(B < count) ≤ tail: X_(count) in one-based order is a lower end
            low_rank = count - 1
        below += _binomial(size, count, quantile)
        if below >= 1 - tail and count < size:  # P(B ≤ count) ≥ 1 - tail: X_(count+1) is an upper end
            high_rank = count
            break
    return low_rank, high_rank


def _binomial(size: int, count: int, share: float) -> float:
    if share in (0.0, 1.0):
        return float(count == (size if share == 1.0 else 0))
    log = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return math.exp(log + count * math.log(share) + (size - count) * math.log1p(-share))


def least_samples(quantile: float, *, confidence: float = 0.95) -> int:
    """Samples below which an upper quantile has no finite upper end: the least n with q^n ≤ (1-confidence)/2.

    72 for P95, 368 for P99, 3,688 for P99.9: with fewer, no P99 is printed, but the maximum.
    """
    if quantile <= 0.5:
        quantile = 1 - quantile
    return math.ceil(math.log((1 - confidence) / 2) / math.log(quantile))
