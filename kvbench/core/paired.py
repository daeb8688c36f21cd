"""Whether B differs from A, from pairs of runs: the interval of a paired log-ratio, and a verdict in four words.

A pair is two runs of one schedule, next to each other in time. Its difference is d = ln(b/a), so that what slows both
by the same factor (a busy machine, a warm CPU) cancels, and a ratio and its inverse weigh the same. Runs are the units:
requests inside a run share its queue and its caches, and would make an interval far too narrow.

The interval is Student's t on the d of n pairs, at 98 %. A sign-flip test cannot say anything with five pairs at that
level (its smallest p is 2/32), and a bootstrap over five values is too narrow; t is exact for normal d, and logarithms
of medians of many requests are close to that. A difference has to pass two gates: the interval excludes 1, and the
ratio is beyond the margin. So identical servers are called different in at most 2 of 100 experiments, and a difference
too small to act on is not a finding however exactly it is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

PairedVerdict = Literal["better", "worse", "no difference", "inconclusive"]
Better = Literal["lower", "higher"]

CONFIDENCE = 0.98
MARGIN_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """b/a over pairs: the geometric mean with its interval; no interval from one pair."""

    ratio: float
    low: float | None
    high: float | None
    pairs: int
    confidence: float


def paired_ratio(a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE) -> PairedRatio:
    """The ratio of b to a over pairs of positive values; the interval is exp(mean d ± t·s/√n)."""
    if len(a) != len(b) or not a:
        raise ValueError("pairs need as many values of b as of a, and at least one")
    differences = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    middle = fmean(differences)
    if len(differences) < 2:
        return PairedRatio(ratio=math.exp(middle), low=None, high=None, pairs=1, confidence=confidence)
    half = t_quantile(1 - (1 - confidence) / 2, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return PairedRatio(
        ratio=math.exp(middle),
        low=_bounded_exp(middle - half),
        high=_bounded_exp(middle + half),
        pairs=len(differences),
        confidence=confidence,
    )


def _bounded_exp(exponent: float) -> float:
    """e^x, kept where a float can hold it: two wildly different pairs have an interval of hundreds of decades."""
    return math.exp(min(max(exponent, -700.0), 700.0))


def paired_verdict(ratio: PairedRatio, *, better: Better, margin_ratio: float = MARGIN_RATIO) -> PairedVerdict:
    """Better or worse where the interval excludes 1 and the ratio is beyond the margin; no difference where the whole
    interval lies within the margin; inconclusive otherwise.
    """
    if ratio.low is None or ratio.high is None:
        return "inconclusive"
    margin = 1 + margin_ratio
    if 1 / margin <= ratio.low and ratio.high <= margin:
        return "no difference"
    excludes_one = ratio.low > 1 or ratio.high < 1
    if not excludes_one or 1 / margin < ratio.ratio < margin:
        return "inconclusive"
    return "better" if (ratio.ratio < 1) == (better == "lower") else "worse"


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection of its distribution function."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError("a t quantile needs a probability from 0.5 to below 1 and at least one degree of freedom")
    low, high = 0.0, 1.0
    while t_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, degrees) < probability else (low, middle)
    return high


def t_distribution(value: float, degrees: int) -> float:
    """P(T ≤ value) for value ≥ 0: 1 - I_x(ν/2, 1/2)/2 with x = ν/(ν + t²) (Abramowitz and Stegun 26.7)."""
    return 1 - _incomplete_beta(degrees / (degrees + value * value), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(300):
        m = step // 2
        if step == 0:
            numerator = 1.0
        elif step % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        change = c * d
        fraction *= change
        if abs(1 - change) < 1e-13:
            break
    return front * (fraction - 1.0)
