"""Compares arms over pairs of runs, says why that may not be fair, and breaks TTFT down by tier and prompt length."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

from kvbench.core.paired import PairedRatio, paired_ratio, paired_verdict
from kvbench.core.percentiles import least_samples, percentile
from kvbench.replay.summary import distribution, output_rate, rate, shown_as
from kvbench.results.replay import ArmRecord, ArmSummary, Comparison, HitRow, RequestSample, Run, Slo, Verdict

_LENGTHS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_MOST_BYTES_OFF = 0.1
_LEAST_MATCHED = 0.5  # of a prompt cached, for a request to count as served by its tier
MOST_FAILED_RATIO = 0.01  # of an arm's requests; with more the others are a selection, and fast failures look fast

GOODPUT = "good requests/s"

Quantity = tuple[str, Literal["lower", "higher"], Callable[[Run], float | None]]


def quantities(slo: Slo | None) -> tuple[Quantity, ...]:
    """What is compared: one number of each run. TTFT p50 decides the verdict."""
    found: list[Quantity] = [
        ("TTFT p50", "lower", lambda run: _at(run, lambda one: one.ttft_s, 0.5)),
        ("TTFT p99", "lower", lambda run: _at(run, lambda one: one.ttft_s, 0.99)),
        ("TTFT max", "lower", lambda run: _at(run, lambda one: one.ttft_s, 1.0)),
        ("E2E p50", "lower", lambda run: _at(run, lambda one: one.e2e_s, 0.5)),
        ("TPOT p50", "lower", lambda run: _at(run, lambda one: one.tpot_s, 0.5)),
        ("ITL p99", "lower", _itl_p99),
        ("requests/s", "higher", lambda run: rate(run, lambda _: 1)),
        ("output tokens/s", "higher", output_rate),
    ]
    if slo is not None:
        found.append((GOODPUT, "higher", lambda run: rate(run, lambda one: int(slo.kept_by(one)))))
    return tuple(found)


def _at(run: Run, of: Callable[[RequestSample], float | None], quantile: float) -> float | None:
    values = [value for request in run.finished if (value := of(request)) is not None]
    if not values or (0.5 < quantile < 1 and len(values) < least_samples(quantile)):
        return None
    return percentile(values, quantile)


def _itl_p99(run: Run) -> float | None:
    gaps = [gap for request in run.finished for gap in request.itls_s]
    return percentile(gaps, 0.99) if len(gaps) >= least_samples(0.99) else None


def pairs(base: Sequence[Run], arm: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Complete runs of the same round."""
    by_round = {run.round: run for run in base if run.complete}
    return [(by_round[run.round], run) for run in arm if run.complete and run.round in by_round]


def compare(
    base: ArmRecord,
    arm: ArmRecord,
    runs: Sequence[Run],
    summaries: Sequence[ArmSummary],
    *,
    slo: Slo | None,
    margin_ratio: float,
) -> tuple[Comparison, ...]:
    """Every quantity that both arms have in at least one pair."""
    matched = pairs([run for run in runs if run.arm == base.name], [run for run in runs if run.arm == arm.name])
    verdict, doubts = doubts_about(base, arm, matched, summaries)
    found = []
    for name, better, of in quantities(slo):
        values = [
            (first, second, one, other)
            for first, second in matched
            if (one := of(first)) is not None and (other := of(second)) is not None
        ]
        if name == GOODPUT:  # a run without one good request is the strongest of all, and has no logarithm
            ratio_of = [
                (one or _half_a_request(first), other or _half_a_request(second))
                for first, second, one, other in values
            ]
        else:
            ratio_of = [(one, other) for _, _, one, other in values]
            kept = [one > 0 and other > 0 for one, other in ratio_of]
            values = [value for value, keep in zip(values, kept, strict=True) if keep]
            ratio_of = [value for value, keep in zip(ratio_of, kept, strict=True) if keep]
        if not ratio_of or not any(one or other for _, _, one, other in values):
            continue
        ratio = paired_ratio([one for one, _ in ratio_of], [other for _, other in ratio_of])
        measured = paired_verdict(ratio, better=better, margin_ratio=margin_ratio)
        found.append(
            Comparison(
                base=base.name,
                arm=arm.name,
                quantity=name,
                better=better,
                base_values=tuple(one for _, _, one, _ in values),
                arm_values=tuple(other for _, _, _, other in values),
                ratio=ratio.ratio,
                low=ratio.low,
                high=ratio.high,
                measured=measured,
                verdict=verdict or measured,
                doubts=doubts,
            )
        )
    return tuple(found)


def _half_a_request(run: Run) -> float:
    return 0.5 / run.duration_s if run.duration_s > 0 else 0.5


def doubts_about(
    base: ArmRecord, arm: ArmRecord, matched: Sequence[tuple[Run, Run]], summaries: Sequence[ArmSummary]
) -> tuple[Verdict | None, tuple[str, ...]]:
    """A verdict that overrules the interval, and the reasons: a warm start, an idle tier, a queue that only grew."""
    both = [run for pair in matched for run in pair]
    verdict: Verdict | None = None
    doubts: list[str] = []

    def decide(found: Verdict, reason: str) -> None:
        nonlocal verdict
        if verdict is None:  # its reason stands first
            verdict = found
            doubts.insert(0, reason)
        else:
            doubts.append(reason)

    dirty = [run for run in both if run.cache.state == "contaminated"]
    if dirty:
        names = ", ".join(sorted({run.arm for run in dirty}))
        decide(
            "contaminated",
            f"{len(dirty)} {_runs(len(dirty))} of {names} started with a cache that was not empty: "
            f"{dirty[0].cache.reason}",
        )
    failed = {
        name: (sum(not one.ok for run in both if run.arm == name for one in run.requests),
               sum(len(run.requests) for run in both if run.arm == name))
        for name in (base.name, arm.name)
    }  # fmt: skip
    told = ", ".join(f"{count} of {total} of {name}" for name, (count, total) in failed.items() if count)
    if any(count > MOST_FAILED_RATIO * total for count, total in failed.values()):
        decide("failed requests", f"requests failed and have no latency: {told}")
    idle, decisive = _not_exercised(base, arm, summaries)
    for reason in idle:
        if decisive:
            decide("tier not exercised", reason)
        else:
            doubts.append(reason)
    swamped = sorted({run.arm for run in both if any(warning.code == "saturated" for warning in run.warnings)})
    if swamped:
        decide("saturated", f"more was offered than {', '.join(swamped)} could do, so its latencies grew with the run")
    unproved = [run for run in both if run.cache.state == "unverified"]
    if unproved:
        doubts.append(
            f"nothing shows that {len(unproved)} {_runs(len(unproved))} started cold: {unproved[0].cache.reason}"
        )
    if told and verdict != "failed requests" and not any(told in doubt for doubt in doubts):
        doubts.append(f"requests failed and have no latency: {told}")
    return verdict, tuple(doubts)


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


def _not_exercised(base: ArmRecord, arm: ArmRecord, summaries: Sequence[ArmSummary]) -> tuple[list[str], bool]:
    """Tiers that did not do what the arms differ in, and whether that leaves no tier that could make the difference."""
    by_arm = {one.arm: one for one in summaries}
    if base.name not in by_arm or arm.name not in by_arm:
        return [], False
    added = [tier for tier in arm.tiers if tier not in base.tiers]
    reasons = []
    unknown = []
    use = {one.tier: one for one in by_arm[arm.name].tier_use}
    for tier in added:
        found = [use[name] for name in shown_as(tier) if name in use]
        if any(one.exercised for one in found):
            continue
        if all(one.exercised is None for one in found):
            unknown.append(
                f"nothing shows that {arm.name} served a token from its {tier} tier: the server does not tell"
            )
        else:
            reasons.append(f"{arm.name} served no token from its {tier} tier")
    none_at_work = bool(added) and len(reasons) + len(unknown) == len(added)
    wanted = {name for tier in added for name in shown_as(tier)}
    both = [
        f"{base.name} was served by {one.tier} too, which it should not have"
        for one in by_arm[base.name].tier_use
        if one.tier in wanted and one.tier not in base.tiers and one.exercised
    ]
    if not arm.tiers and not base.tiers and not _any_lower(by_arm[base.name]) and not _any_lower(by_arm[arm.name]):
        unknown.append(
            f"neither {base.name} nor {arm.name} shows a tier below L1 at work, so nothing ties their difference to one"
        )
    return [*reasons, *unknown, *both], none_at_work or bool(both)


def _any_lower(summary: ArmSummary) -> bool:
    return any(one.exercised for one in summary.tier_use if one.tier not in ("hbm",))


def bytes_doubts(summary: ArmSummary) -> list[str]:
    """Tiers whose moved bytes are not what their tokens weigh."""
    doubts = []
    for use in summary.tier_use:
        if use.expected_bytes and use.load_bytes is not None:
            off = use.load_bytes / use.expected_bytes - 1
            if abs(off) > _MOST_BYTES_OFF:
                doubts.append(
                    f"{summary.arm}: {use.tier} moved {use.load_bytes:,.0f} bytes for tokens that weigh "
                    f"{use.expected_bytes:,.0f} ({off:+.0%})"
                )
    return doubts


def hit_rows(arms: Sequence[ArmRecord], runs: Sequence[Run], *, margin_ratio: float) -> tuple[HitRow, ...]:
    """TTFT by serving tier and prompt length, each against the same requests of an arm that computed them.

    Same requests in the same round: the pair's difference is the median over its requests of ln(TTFT served/computed).
    """
    rows: list[HitRow] = []
    for arm in arms:
        mine = [run for run in runs if run.arm == arm.name and run.complete]
        groups: dict[tuple[str, int], list[tuple[Run, RequestSample]]] = {}
        for run in mine:
            for request in run.finished:
                tier = served_by(request, run)
                if tier is not None and request.ttft_s is not None:
                    groups.setdefault((tier, _length_bin(request)), []).append((run, request))
        for tier, length in sorted(groups):
            row = _hit_row(arm.name, tier, length, groups[tier, length], arms, runs, margin_ratio)
            if row is not None:
                rows.append(row)
    return tuple(rows)


def served_by(request: RequestSample, run: Run) -> str | None:
    """The tier that served most of a prompt: `miss` below half of it, None where the server does not say."""
    if request.cached_tokens is None:
        return None
    if request.cached_tokens < _LEAST_MATCHED * (request.prompt_tokens or request.planned_tokens):
        return "miss"
    return run.tier_of(request)


def fair(run: Run) -> bool:
    """Whether requests of the run may be held against those of another: no foreign cache, no growing queue, no loss."""
    failed = len(run.requests) - len(run.finished)
    return (
        run.cache.state != "contaminated"
        and failed <= MOST_FAILED_RATIO * len(run.requests)
        and not any(warning.code == "saturated" for warning in run.warnings)
    )


def _length_bin(request: RequestSample) -> int:
    tokens = request.prompt_tokens or request.planned_tokens
    return max(length for length in _LENGTHS if length <= tokens)


def _hit_row(
    arm: str,
    tier: str,
    length: int,
    found: Sequence[tuple[Run, RequestSample]],
    arms: Sequence[ArmRecord],
    runs: Sequence[Run],
    margin_ratio: float,
) -> HitRow | None:
    spread = distribution(request.ttft_s for _, request in found)
    if spread is None:
        return None
    best: tuple[str, PairedRatio, float] | None = None
    for other in arms:
        against = _against(other.name, found, runs) if other.name != arm and tier != "miss" else None
        if against is not None and (best is None or against[0].pairs > best[1].pairs):
            best = (other.name, *against)
    index = _LENGTHS.index(length)
    return HitRow(
        arm=arm,
        tier=tier,
        least_tokens=length,
        most_tokens=_LENGTHS[index + 1] - 1 if index + 1 < len(_LENGTHS) else 1 << 30,
        requests=len(found),
        cached_tokens=sum(request.cached_tokens or 0 for _, request in found),
        ttft_s=spread,
        computed_arm=best[0] if best else None,
        computed_ttft_s=best[2] if best else None,
        ratio=best[1].ratio if best else None,
        low=best[1].low if best else None,
        high=best[1].high if best else None,
        pairs=best[1].pairs if best else 0,
        verdict=paired_verdict(best[1], better="lower", margin_ratio=margin_ratio) if best else None,
    )


def _against(
    other: str, found: Sequence[tuple[Run, RequestSample]], runs: Sequence[Run]
) -> tuple[PairedRatio, float] | None:
    """The paired ratio to the same requests where the other arm computed them, and their median TTFT there."""
    computed = {
        (run.round, request.index): request.ttft_s
        for run in runs
        if run.arm == other and run.complete and fair(run)
        for request in run.finished
        if served_by(request, run) == "miss" and request.ttft_s
    }
    by_round: dict[int, list[tuple[float, float]]] = {}
    for run, request in found:
        if not fair(run):
            continue
        theirs = computed.get((run.round, request.index))
        if theirs is not None and theirs > 0 and request.ttft_s is not None and request.ttft_s > 0:
            by_round.setdefault(run.round, []).append((theirs, request.ttft_s))
    if not by_round:
        return None
    # The median ratio of a pair, written as one pair of values so that it takes the same road as every comparison.
    ratios = [median([mine / theirs for theirs, mine in values]) for values in by_round.values()]
    everything = [theirs for values in by_round.values() for theirs, _ in values]
    return paired_ratio([1.0] * len(ratios), ratios), median(everything)
