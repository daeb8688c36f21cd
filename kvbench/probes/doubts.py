"""Doubts about samples, whatever was timed: too few, too wide a spread, ended early, or what the child itself saw."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from kvbench.core.provenance import Warning_
from kvbench.probes.runner import ChildRun

FEW_SAMPLES = 5
WIDE_SPREAD_RATIO = 0.1
POOR_FIT_RATIO = 0.1


def grouped(points: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    """Values by key, keys in order."""
    groups: dict[int, list[float]] = {}
    for key, value in points:
        groups.setdefault(key, []).append(value)
    return dict(sorted(groups.items()))


def child_warnings(child: ChildRun) -> list[Warning_]:
    """What the child warned of while it measured, and that Ctrl-C ended it."""
    warnings = [
        Warning_(code=record["code"], message=record["message"], remedy=record["remedy"])
        for record in child.of_kind("warning")
    ]
    if child.interrupted:
        warnings.append(
            Warning_(
                code="interrupted",
                message="Ctrl-C ended this case early; the fit uses the samples up to then",
                remedy="let it run to its end for all repeats",
            )
        )
    return warnings


def sample_warnings(times: Mapping[str, Sequence[float]]) -> list[Warning_]:
    """Doubts about the samples of each size, labelled for people."""
    warnings = []
    few = [label for label, seconds in times.items() if len(seconds) < FEW_SAMPLES]
    if few:
        warnings.append(
            Warning_(
                code="few-samples",
                message=f"fewer than {FEW_SAMPLES} samples of {', '.join(few)}",
                remedy="give the plan more time or repeats",
            )
        )
    spreads = {label: _spread_ratio(seconds) for label, seconds in times.items() if len(seconds) >= 2}
    wide = [f"{label} ({spread:.0%})" for label, spread in spreads.items() if spread > WIDE_SPREAD_RATIO]
    if wide:
        warnings.append(
            Warning_(
                code="wide-spread",
                message=f"the middle half of the samples spans more than a tenth of the median: {', '.join(wide)}",
                remedy="measure again while nothing else runs on this host",
            )
        )
    return warnings


def _spread_ratio(seconds: Sequence[float]) -> float:
    """(75th - 25th percentile) / median."""
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    spread_ratio: float = (high - low) / median(seconds)
    return spread_ratio
