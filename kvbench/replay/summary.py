"""Adds up the runs of an arm: distributions, rates, tokens by tier, and the check of bytes against tokens."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from kvbench.core.percentiles import least_samples, percentile_with_interval
from kvbench.results.replay import ArmRecord, ArmSummary, Distribution, RequestSample, Run, Slo, TierUse
from kvbench.results.tier_counters import SOURCES

CountOf = Callable[[RequestSample], int]

QUANTILES = (0.5, 0.9, 0.95, 0.99)
_LOWER = ("dram", "file", "remote", "peer", "external")
_PRODUCTS = {"lmcache": ("external",), "mooncake": ("external",)}


def shown_as(tier: str) -> tuple[str, ...]:
    """Names under which an engine's counters show a tier of an arm."""
    return _PRODUCTS.get(tier, (tier,))


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The values that exist, with those percentiles for which there are enough of them; the median always."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return Distribution(
        count=len(present),
        mean=fmean(present),
        maximum=max(present),
        percentiles=tuple(
            percentile_with_interval(present, quantile)
            for quantile in QUANTILES
            if quantile == 0.5 or len(present) >= least_samples(quantile)
        ),
    )


def arm_summary(record: ArmRecord, runs: Sequence[Run], slo: Slo | None) -> ArmSummary:
    """What all runs of one arm say together; stopped runs count for requests, and only complete ones for rates."""
    requests = [request for run in runs for request in run.requests]
    finished = [request for request in requests if request.ok]
    complete = [run for run in runs if run.complete]
    cached = [request.cached_tokens for request in finished if request.cached_tokens is not None]
    good = sum(slo.kept_by(request) for request in requests) if slo else None
    sent = len(requests)
    return ArmSummary(
        arm=record.name,
        runs=len(complete),
        requests=sent,
        ok=len(finished),
        failed=dict(Counter(request.status for request in requests if not request.ok)),
        not_sent=sum(run.not_sent for run in runs),
        prompt_tokens=sum(request.prompt_tokens or 0 for request in finished),
        output_tokens=sum(request.output_tokens or 0 for request in finished),
        cached_tokens=sum(cached) if cached else None,
        tokens_by_source=tokens_by_source(runs),
        ttft_s=distribution(request.ttft_s for request in finished),
        ttft_cold_s=distribution(request.ttft_s for request in finished if request.shared_prefix_tokens == 0),
        ttft_warm_s=distribution(request.ttft_s for request in finished if request.shared_prefix_tokens > 0),
        first_text_ttft_s=distribution(request.first_text_ttft_s for request in finished),
        itl_s=distribution(gap for request in finished for gap in request.itls_s),
        tpot_s=distribution(request.tpot_s for request in finished),
        e2e_s=distribution(request.e2e_s for request in finished),
        send_lag_s=distribution(request.send_lag_s for request in requests),
        duration_s=sum(run.duration_s for run in complete),
        requests_per_s=_median_rate(complete, lambda request: 1),
        output_tokens_per_s=_median_rate(complete, lambda request: request.output_tokens or 0),
        total_tokens_per_s=_median_rate(
            complete, lambda request: (request.prompt_tokens or 0) + (request.output_tokens or 0)
        ),
        good_requests_per_s=None if slo is None else _median_rate(complete, lambda request: int(slo.kept_by(request))),
        good_ratio=None if good is None else good / sent if sent else 0.0,
        most_in_flight=max((most_in_flight(run.requests) for run in runs), default=0),
        tier_use=tier_use(record, runs),
        cache_states=tuple(run.cache.state for run in runs),
        troubles=_troubles(runs),
    )


def _median_rate(runs: Sequence[Run], count: CountOf) -> float:
    return median([rate(run, count) for run in runs]) if runs else 0.0


def rate(run: Run, count: CountOf) -> float:
    """What `count` adds up to over the finished requests of a run, per second of the run."""
    return sum(count(request) for request in run.finished) / run.duration_s if run.duration_s > 0 else 0.0


def output_rate(run: Run) -> float | None:
    """Output tokens per second; None where an answer has no usage, since no token is not what it means."""
    if any(request.output_tokens is None for request in run.finished):
        return None
    return rate(run, lambda request: request.output_tokens or 0)


def tokens_by_source(runs: Sequence[Run]) -> dict[str, float]:
    """Prompt tokens by where they came from: the server's counters, or where it has none, its usage."""
    sums: Counter[str] = Counter()
    for run in runs:
        if run.counters is not None and run.counters.prompt_tokens:
            sums.update({source: count for source, count in run.counters.prompt_tokens.items() if count > 0})
            continue
        for request in run.finished:
            if request.cached_tokens is None or request.prompt_tokens is None:
                continue
            sums["computed"] += request.prompt_tokens - request.cached_tokens
            if request.cached_by_tier:
                sums.update(request.cached_by_tier)
            elif request.cached_tokens:
                sums["cached"] += request.cached_tokens
    order = [*SOURCES, "cached"]
    return {source: sums[source] for source in sorted(sums, key=lambda one: _rank(order, one)) if sums[source] > 0}


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def most_in_flight(requests: Sequence[RequestSample]) -> int:
    """The highest number of requests on their way at one time."""
    moments = sorted(
        [(request.sent_s, 1) for request in requests if request.sent_s is not None]
        + [(request.end_s, -1) for request in requests if request.sent_s is not None]
    )
    highest = now = 0
    for _, change in moments:
        now += change
        highest = max(highest, now)
    return highest


def tier_use(record: ArmRecord, runs: Sequence[Run]) -> tuple[TierUse, ...]:
    """Each tier of the arm, and each that the counters show beside them: what it served and moved."""
    counted = [run.counters for run in runs if run.counters is not None]
    tokens = tokens_by_source(runs)
    load: Counter[str] = Counter()
    store: Counter[str] = Counter()
    for counters in counted:
        load.update(dict(counters.load_bytes))
        store.update(dict(counters.store_bytes))
    told = bool(counted) or bool(tokens)
    hidden: Counter[str] = Counter()
    for run in runs:
        hidden.update(dict(run.hidden_tokens))
    names = [name for tier in record.tiers for name in shown_as(tier)]
    names += [name for name in ("hbm", *_LOWER) if name not in names and (tokens.get(name) or load.get(name))]
    return tuple(
        TierUse(
            tier=name,
            tokens=tokens.get(name, 0.0) if told else None,
            load_bytes=load.get(name),
            store_bytes=store.get(name),
            expected_bytes=_expected_bytes(name, tokens, load.get(name), record.kv_bytes_per_token),
            found=dict(hidden) if name == "external" else {},
            exercised=(tokens.get(name, 0.0) > 0 or load.get(name, 0) > 0) if told else None,
        )
        for name in names
    )


def _expected_bytes(
    tier: str, tokens: dict[str, float], loaded: float | None, kv_bytes_per_token: float | None
) -> float | None:
    """Tokens × bytes per token; what came from below DRAM passed through it in some engines and is counted twice."""
    if kv_bytes_per_token is None or loaded is None or tier == "hbm":
        return None
    own = tokens.get(tier, 0.0) * kv_bytes_per_token
    if tier != "dram":
        return own
    through = sum(tokens.get(name, 0.0) for name in ("dram", "file", "remote", "peer")) * kv_bytes_per_token
    return min((own, through), key=lambda candidate: abs(candidate - loaded))


def _troubles(runs: Sequence[Run]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for run in runs:
        if run.counters is not None:
            sums.update({name: count for name, count in run.counters.troubles.items() if count > 0})
    return dict(sums)
