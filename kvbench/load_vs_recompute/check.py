"""Holds a replay against the prediction: what a hit saved per tier and hit length, and what it should have saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.core.provenance import Origin, Warning_
from kvbench.load_vs_recompute.sweep import Answer
from kvbench.results.load_vs_recompute import Check, LoadVsRecomputeResult
from kvbench.results.replay import HitRow, ReplayResult

_FAR_OFF = 2.0


def saved_replay(path: Path) -> ReplayResult:
    """The replay in a file, which must hold requests that one arm served from a tier and another computed."""
    from kvbench.results.codec import read_document

    document: Any = read_document(path)
    if document.kind != ReplayResult.KIND:
        raise UsageError(f"--check {path} holds a {document.kind}; name a file that kvbench replay --out wrote")
    result: ReplayResult = document.result
    if not _rows(result):
        raise UsageError(
            f"--check {path} has no request that one arm served from a tier and another computed; "
            "replay with an arm without tiers as base"
        )
    return result


def hit_lengths(replay: ReplayResult) -> str:
    """The mean hit length of each row, as `--tokens` takes it."""
    return ",".join(str(length) for length in sorted({_hit_tokens(row) for row in _rows(replay)}))


def checked(answer: Answer, replay: ReplayResult, path: Path) -> Answer:
    """The answer with a check per tier and hit length.

    TTFT of a computed request minus that of the same request served from a tier, against T_recompute - T_load: what
    else is in a TTFT (queueing, the rest of the prompt, the first decode step) is in both and cancels.
    """
    checks, doubts = [], list(answer.warnings)
    for row in _rows(replay):
        predicted_s = _predicted_s(answer.result, row)
        middle = row.ttft_s.at(0.5)
        if predicted_s is None or middle is None or row.computed_ttft_s is None:
            doubts.append(
                Warning_(
                    code="not-predicted",
                    message=f"{path} has hits in {row.tier}, for which nothing was predicted",
                    remedy=f"give its bandwidth: --tier {row.tier}=RATE, or --probe FILE",
                )
            )
            continue
        check = Check(
            what=f"saved by a hit in {row.tier} ({row.arm})",
            tokens=_hit_tokens(row),
            predicted_s=predicted_s,
            measured_s=row.computed_ttft_s - middle.value,
        )
        checks.append(check)
        if not _near(check):
            doubts.append(
                Warning_(
                    code="prediction-off",
                    message=f"{check.what}, {check.tokens:,} tokens: predicted {check.predicted_s:.4g} s, measured "
                    f"{check.measured_s:.4g} s",
                    remedy="the model, the GPU or the bandwidths given are not those of the replay; measure them here",
                )
            )
    result = replace(answer.result, checks=(*answer.result.checks, *checks))
    provenance = {
        **answer.provenance,
        "checks.tokens": Origin(provenance="measured", source=f"mean cached tokens per hit in {path}"),
        "checks.predicted_s": Origin(provenance="modelled", source="this result", formula="t_recompute_s - t_load_s"),
        "checks.measured_s": Origin(
            provenance="measured", source=f"{path}", formula="median TTFT computed - median TTFT of the hits"
        ),
    }
    return replace(answer, result=result, warnings=tuple(doubts), provenance=provenance)


def _rows(replay: ReplayResult) -> tuple[HitRow, ...]:
    return tuple(row for row in replay.hits if row.tier != "miss" and row.computed_ttft_s is not None)


def _hit_tokens(row: HitRow) -> int:
    return max(1, round(row.cached_tokens / row.requests))


def _predicted_s(result: LoadVsRecomputeResult, row: HitRow) -> float | None:
    """T_recompute - T_load of that many tokens; a hit in L1 loads nothing."""
    points = [point for point in result.points if point.tokens == _hit_tokens(row)]
    if row.tier == "hbm":
        return points[0].t_recompute_s if points else None
    point = next((point for point in points if point.tier == row.tier), None)
    return None if point is None or point.t_load_s is None else point.t_recompute_s - point.t_load_s


def _near(check: Check) -> bool:
    if check.predicted_s <= 0 or check.measured_s <= 0:
        return False
    return 1 / _FAR_OFF <= check.predicted_s / check.measured_s <= _FAR_OFF
