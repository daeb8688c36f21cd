"""What the samples of a case say: the fit t = fixed + n·per-segment + bytes/B, crossovers, and measured paths."""

import math
from collections.abc import Sequence
from statistics import median

from kvbench.core.fit import median_residual_ratio, relative_fit
from kvbench.core.provenance import Warning_
from kvbench.core.units import format_bytes
from kvbench.probes.doubts import POOR_FIT_RATIO, grouped, sample_warnings
from kvbench.results.host_paths import MeasuredPath, TransferSample
from kvbench.results.probe import Crossover, ProbeCase, ProbeFit, ProbeSample, SizePoint

_TIE_RATIO = 1.05
_LEAST_SAMPLES = 3


def fitted(samples: Sequence[ProbeSample]) -> ProbeFit | None:
    """Least squares over the median of each point, each coefficient at least zero; None for fewer than two points.

    A column that the points cannot tell apart from the ones before it is left out: its coefficient is None. With one
    segment per transfer, for example, the time per segment is part of the fixed time.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.segments, sample.bytes), []).append(sample.seconds)
    if len(groups) < 2:
        return None
    points = list(groups)
    columns = _independent(
        {
            "fixed": [1.0] * len(points),
            "bytes": [float(size) for _, size in points],
            "segments": [float(count) for count, _ in points],
        }
    )
    if len(columns) > len(points):
        return None
    rows = [[column[index] for column in columns.values()] for index in range(len(points))]
    solution = dict(zip(columns, relative_fit(rows, [median(groups[point]) for point in points]), strict=True))
    predicted = [
        solution.get("fixed", 0.0)
        + solution.get("segments", 0.0) * sample.segments
        + solution.get("bytes", 0.0) * sample.bytes
        for sample in samples
    ]
    return ProbeFit(
        fixed_s=solution.get("fixed"),
        per_segment_s=solution.get("segments"),
        s_per_byte=solution.get("bytes"),
        residual_ratio=median_residual_ratio(predicted, [sample.seconds for sample in samples]),
    )


def _independent(columns: dict[str, list[float]]) -> dict[str, list[float]]:
    """The columns that no combination of those before explains (Gram-Schmidt on unit columns)."""
    kept: dict[str, list[float]] = {}
    basis: list[list[float]] = []
    for name, column in columns.items():
        norm = math.sqrt(math.fsum(value * value for value in column))
        if norm == 0:
            continue
        rest = [value / norm for value in column]
        for unit in basis:
            overlap = math.fsum(a * b for a, b in zip(rest, unit, strict=True))
            rest = [a - overlap * b for a, b in zip(rest, unit, strict=True)]
        left = math.sqrt(math.fsum(value * value for value in rest))
        if left > 1e-6:
            kept[name] = column
            basis.append([value / left for value in rest])
    return kept


def case_warnings(samples: Sequence[ProbeSample], fit: ProbeFit | None) -> list[Warning_]:
    """Doubts about the samples of each point and about the fit."""
    times: dict[str, list[float]] = {}
    for sample in samples:
        size = sample.bytes // sample.segments if sample.segments else sample.bytes
        label = f"{format_bytes(sample.bytes)} in {format_bytes(size)}"
        times.setdefault(label, []).append(sample.seconds)
    warnings = list(sample_warnings(times))
    if fit is not None and fit.residual_ratio > POOR_FIT_RATIO:
        warnings.append(
            Warning_(
                code="poor-fit",
                message=f"t = fixed + n·per-segment + bytes/B misses half the samples by over {fit.residual_ratio:.0%}",
                remedy="read the points near the sizes you move instead of the coefficients",
            )
        )
    return warnings


def crossovers(cases: Sequence[ProbeCase]) -> tuple[Crossover, ...]:
    """Segment sizes where the fastest of the cases changes.

    A lead counts from 5 % on, and only where the intervals of the two medians do not touch; anything else is a tie.
    """
    curves = {case.name: {point.segment_bytes: point for point in case.curve()} for case in cases}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    sizes = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if len(curves) > 1 else []
    found: list[Crossover] = []
    leader: str | None = None
    led_at = 0
    for size in sizes:
        ranked = sorted(curves, key=lambda name: curves[name][size].median_s)
        first, second = curves[ranked[0]][size], curves[ranked[1]][size]
        few = min(first.count, second.count) < _LEAST_SAMPLES
        if few or second.median_s / first.median_s < _TIE_RATIO or first.high_s >= second.low_s:
            continue
        if leader is not None and ranked[0] != leader:
            found.append(_crossing(curves[leader], curves[ranked[0]], led_at, size, leader, ranked[0]))
        leader, led_at = ranked[0], size
    return tuple(found)


def _crossing(
    below: dict[int, SizePoint], above: dict[int, SizePoint], low: int, high: int, faster_below: str, faster_above: str
) -> Crossover:
    """Where two curves meet between two sizes, both axes logarithmic."""
    lead = math.log(above[low].median_s / below[low].median_s)
    lag = math.log(below[high].median_s / above[high].median_s)
    share = lead / (lead + lag)
    size = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    ends = math.log(below[low].bytes_per_s), math.log(below[high].bytes_per_s)
    return Crossover(
        segment_bytes=size,
        bytes_per_s=math.exp(ends[0] + share * (ends[1] - ends[0])),
        faster_below=faster_below,
        faster_above=faster_above,
    )


def measured_path(case: ProbeCase, tier: str, direction: str) -> MeasuredPath | None:
    """The case as a path t = fixed + bytes/B, at the segment size that carried most; None where no bandwidth fits."""
    best: dict[int, SizePoint] = {}
    for point in case.points:
        if point.bytes not in best or point.median_s < best[point.bytes].median_s:
            best[point.bytes] = point
    if len(best) < 2:
        return None
    samples = tuple(
        TransferSample(bytes=sample.bytes, seconds=sample.seconds)
        for sample in case.samples
        if sample.segments == best[sample.bytes].segments
    )
    by_size = grouped((sample.bytes, sample.seconds) for sample in samples)
    fixed_s, s_per_byte = relative_fit([(1.0, size) for size in by_size], [median(times) for times in by_size.values()])
    if s_per_byte <= 0:
        return None
    predicted = [fixed_s + sample.bytes * s_per_byte for sample in samples]
    return MeasuredPath(
        tier=tier,
        spec=case.path,
        direction="store" if direction in ("store", "d2h") else "load",
        source=case.source,
        destination=case.destination,
        fixed_s=fixed_s,
        bytes_per_s=1 / s_per_byte,
        residual_ratio=median_residual_ratio(predicted, [sample.seconds for sample in samples]),
        concurrency=max(case.concurrency, 1),
        samples=samples,
        cold=case.cold,
        cold_evidence=f"by {case.name}: {case.cold_evidence}",
        warnings=case.warnings,
    )
