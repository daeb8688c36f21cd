"""Fit the samples of a tier load: t = fixed + bytes / B."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from kvbench.core.fit import median_residual_ratio, relative_fit
from kvbench.core.provenance import Warning_
from kvbench.core.units import format_bytes
from kvbench.probes.doubts import POOR_FIT_RATIO, child_warnings, grouped, sample_warnings
from kvbench.probes.runner import ChildRun
from kvbench.results.host_measurement import CaseOutcome
from kvbench.results.host_paths import MeasuredPath, TransferSample
from kvbench.tiers.spec import TierSpec


def tier_load_result(
    case: str, spec: TierSpec, concurrency: int, child: ChildRun
) -> tuple[MeasuredPath | None, CaseOutcome]:
    """The measured path, and what became of the case; a case that failed half-way has samples but no path."""
    samples = tuple(
        TransferSample(bytes=record["bytes"], seconds=record["seconds"]) for record in child.of_kind("sample")
    )
    usable = child.status == "ok" or child.interrupted
    path = _fitted_path(spec, concurrency, child, samples) if usable else None
    status, reason = child.status, child.reason
    if status == "ok" and path is None:
        status = "failed"
        reason = "the times do not grow with the size, so they hold no bandwidth; measure again on a quieter host"
    kept = () if path else samples
    outcome = CaseOutcome(case=case, status=status, reason=reason, elapsed_s=child.elapsed_s, transfer_samples=kept)
    return path, outcome


def _fitted_path(
    spec: TierSpec, concurrency: int, child: ChildRun, samples: tuple[TransferSample, ...]
) -> MeasuredPath | None:
    """T = fixed + bytes / B over the medians of each size, or None where the samples hold no bandwidth."""
    by_size = grouped((sample.bytes, sample.seconds) for sample in samples)
    if len(by_size) < 2 or not child.of_kind("facts"):
        return None
    fixed_s, s_per_byte = relative_fit([(1.0, size) for size in by_size], [median(times) for times in by_size.values()])
    if s_per_byte <= 0:
        return None
    fitted = [fixed_s + sample.bytes * s_per_byte for sample in samples]
    facts = child.of_kind("facts")[-1]
    residual_ratio = median_residual_ratio(fitted, [sample.seconds for sample in samples])
    return MeasuredPath(
        tier=spec.scheme,
        spec=str(spec),
        direction="load",
        source=facts["source"],
        destination=facts["destination"],
        fixed_s=fixed_s,
        bytes_per_s=1 / s_per_byte,
        residual_ratio=residual_ratio,
        concurrency=concurrency,
        samples=samples,
        cold=facts["cold"],
        cold_evidence=facts["cold_evidence"],
        warnings=(
            *child_warnings(child),
            *sample_warnings({format_bytes(size): times for size, times in by_size.items()}),
            *_path_warnings(facts, residual_ratio),
        ),
    )


def _path_warnings(facts: Mapping[str, Any], residual_ratio: float) -> list[Warning_]:
    warnings = []
    if facts["cold"] is False:
        warnings.append(
            Warning_(
                code="cache-warm",
                message=f"the loads were not cold: {facts['cold_evidence']}",
                remedy="read the bandwidth as that of a cache, or give a larger pool or another directory",
            )
        )
    if residual_ratio > POOR_FIT_RATIO:
        warnings.append(
            Warning_(
                code="poor-fit",
                message=f"t = fixed + bytes/B misses half of the samples by more than {residual_ratio:.0%}",
                remedy="compare with the samples near the size you load before trusting a prediction",
            )
        )
    return warnings
