"""Fit the samples of a prefill: t = c0 + c1·N + c2·N² for each kind of layer, and check it at a held-out N."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from kvbench.core.fit import median_residual_ratio, relative_fit
from kvbench.core.provenance import Warning_
from kvbench.probes.doubts import POOR_FIT_RATIO, child_warnings, grouped, sample_warnings
from kvbench.probes.runner import ChildRun
from kvbench.results.host_measurement import CaseOutcome
from kvbench.results.prefill import HeldOutForward, LayerKindTiming, PrefillCost, PrefillMeasurement, PrefillSample

_FITTED_COEFFICIENTS = 3
_SEEN_RATIO = 0.01


def prefill_result(case: str, child: ChildRun) -> tuple[PrefillMeasurement | None, CaseOutcome]:
    """The measured prefill, and what became of the case; a case that failed half-way has samples but no fit."""
    samples = tuple(
        PrefillSample(tokens=record["tokens"], seconds=record["seconds"]) for record in child.of_kind("sample")
    )
    usable = child.status == "ok" or child.interrupted
    measurement = _fitted_prefill(child) if usable else None
    status, reason = child.status, child.reason
    if status == "ok" and measurement is None:
        counts = len({sample.tokens for sample in samples})
        status = "failed"
        reason = (
            f"{counts} token count(s) were done in time, and a fit needs {_FITTED_COEFFICIENTS}; "
            "give the plan more time or smaller token counts"
        )
    kept = () if measurement else samples
    outcome = CaseOutcome(case=case, status=status, reason=reason, elapsed_s=child.elapsed_s, prefill_samples=kept)
    return measurement, outcome


def _fitted_prefill(child: ChildRun) -> PrefillMeasurement | None:
    """The fit of every layer kind, with the largest token count held out to check it where enough others remain."""
    counts = sorted({record["tokens"] for record in child.of_kind("sample")})
    if len(counts) < _FITTED_COEFFICIENTS:
        return None
    held_out_tokens = counts[-1] if len(counts) > _FITTED_COEFFICIENTS else None
    forwards = [record for record in child.of_kind("sample") if record["tokens"] != held_out_tokens]
    checks = [record for record in child.of_kind("sample") if record["tokens"] == held_out_tokens]
    facts = child.of_kind("facts")[-1]
    kept = sorted(index for kind in facts["kinds"] for index in kind["measured_layers"])
    layers = tuple(
        LayerKindTiming(
            kind=kind["kind"],
            layer_indices=tuple(kind["layer_indices"]),
            measured_layers=tuple(kind["measured_layers"]),
            cost=_prefill_cost(
                (record["tokens"], record["layers"][kept.index(layer)])
                for record in forwards
                for layer in kind["measured_layers"]
            ),
        )
        for kind in facts["kinds"]
    )
    overhead = _prefill_cost((record["tokens"], _outside_layers(record)) for record in forwards)
    held_out = None
    if held_out_tokens is not None:
        predicted_s = overhead.seconds(held_out_tokens) + sum(
            len(kind.measured_layers) * kind.cost.seconds(held_out_tokens) for kind in layers
        )
        held_out = HeldOutForward(
            predicted_s=predicted_s,
            samples=tuple(PrefillSample(tokens=held_out_tokens, seconds=record["seconds"]) for record in checks),
        )
    times = grouped((record["tokens"], record["seconds"]) for record in forwards)
    return PrefillMeasurement(
        model_type=facts["model_type"],
        device=facts["device"],
        device_name=facts["device_name"],
        dtype=facts["dtype"],
        threads=facts["threads"],
        attention=facts["attention"],
        torch_version=facts["torch_version"],
        transformers_version=facts["transformers_version"],
        layers=layers,
        overhead=overhead,
        held_out=held_out,
        warnings=(
            *child_warnings(child),
            *sample_warnings({f"{tokens} tokens": seconds for tokens, seconds in times.items()}),
            *_prefill_warnings(facts, layers, held_out),
        ),
    )


def _prefill_cost(points: Iterable[tuple[int, float]]) -> PrefillCost:
    samples = tuple(PrefillSample(tokens=tokens, seconds=seconds) for tokens, seconds in points)
    times = grouped((sample.tokens, sample.seconds) for sample in samples)
    c0, c1, c2 = relative_fit([(1.0, n, float(n) ** 2) for n in times], [median(seconds) for seconds in times.values()])
    cost = PrefillCost(c0_s=c0, c1_s=c1, c2_s=c2, residual_ratio=0.0, samples=samples)
    fitted = [cost.seconds(sample.tokens) for sample in samples]
    return replace(cost, residual_ratio=median_residual_ratio(fitted, [sample.seconds for sample in samples]))


def _outside_layers(record: Mapping[str, Any]) -> float:
    """Seconds of a forward outside its layers; never zero, which no fit can weigh."""
    seconds: float = record["seconds"] - sum(record["layers"])
    return max(seconds, 1e-9)


def _prefill_warnings(
    facts: Mapping[str, Any], layers: Sequence[LayerKindTiming], held_out: HeldOutForward | None
) -> list[Warning_]:
    warnings = []
    windowed = [kind["kind"] for kind in facts["kinds"] if kind["is_windowed"]]
    if windowed:
        warnings.append(
            Warning_(
                code="window-computed-in-full",
                message=f"{', '.join(windowed)}: transformers also computes the positions outside the window",
                remedy="expect an engine whose kernels skip them to be faster on long prefixes",
            )
        )
    worst = max(layers, key=lambda kind: kind.cost.residual_ratio)
    if worst.cost.residual_ratio > POOR_FIT_RATIO:
        warnings.append(
            Warning_(
                code="poor-fit",
                message=f"the fit misses half of the samples of {worst.kind} by over {worst.cost.residual_ratio:.0%}",
                remedy="measure again while nothing else runs on this host",
            )
        )
    longest = max(sample.tokens for sample in worst.cost.samples)
    if all(kind.cost.c2_s * longest**2 < _SEEN_RATIO * kind.cost.seconds(longest) for kind in layers):
        warnings.append(
            Warning_(
                code="attention-not-seen",
                message="no layer's time grows with the square of the tokens in this range, as attention's must",
                remedy="read predictions for longer prefixes as lower bounds, or measure with larger token counts",
            )
        )
    if held_out is None:
        warnings.append(
            Warning_(
                code="fit-not-checked",
                message="too few token counts were done in time to hold one out, so nothing checks the fit",
                remedy="give the plan more time or smaller token counts",
            )
        )
    elif abs(held_out.predicted_over_measured - 1) > 2 * POOR_FIT_RATIO:
        warnings.append(
            Warning_(
                code="held-out-missed",
                message=f"at {held_out.tokens} tokens the fit predicts {held_out.predicted_over_measured:.2f} "
                "times what was measured",
                remedy="measure with larger token counts before trusting longer prefixes",
            )
        )
    return warnings
