"""One run: a schedule against one server, with its counters before, during and after."""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from threading import Event, Thread

from kvbench.core.percentiles import percentile
from kvbench.core.provenance import Warning_
from kvbench.core.units import format_duration, seconds_from_ns
from kvbench.engines.base import Endpoint, EngineAdapter
from kvbench.replay.cold import check_after
from kvbench.replay.load.generator import Live, LoadResult, run_load
from kvbench.replay.load.plan import Finished
from kvbench.replay.requests import sample, worker_plan
from kvbench.replay.settings import ReplaySettings
from kvbench.results.replay import CacheCheck, ClientHealth, RequestSample, Run, TrafficPoint
from kvbench.results.tier_counters import TierCounters
from kvbench.workloads.base import RequestPlan

LATE_S = 0.005
BUSY_RATIO = 0.8
LAG_S = 0.05
_SETTLE_S, _SETTLE_POLL_S = 3.0, 0.2
_REFUSED_IN_A_ROW = 20
_TELL_S = 1.0

Tell = Callable[[str, float], None]


@dataclass(slots=True)
class _Tally:
    """What progress shows of a run that goes on."""

    total: int
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused_in_a_row: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    def add(self, fresh: tuple[Finished, ...]) -> None:
        for one in fresh:
            self.finished += 1
            self.failed += one.status != "ok"
            if one.cached_tokens is not None:  # null is not 0
                self.prompt_tokens += one.prompt_tokens or 0
                self.cached_tokens += one.cached_tokens
            self.refused_in_a_row = self.refused_in_a_row + 1 if one.status == "refused" else 0
            if one.first_choice_ns:
                self.ttfts_s.append(seconds_from_ns(one.first_choice_ns - one.due_ns))

    def line(self, in_flight: int) -> str:
        parts = [f"{self.finished}/{self.total} requests, {in_flight} in flight"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.prompt_tokens:
            parts.append(f"{self.cached_tokens / self.prompt_tokens:.0%} of prompt tokens cached")
        if self.ttfts_s:
            parts.append(f"TTFT p50 {format_duration(max(median(self.ttfts_s), 0.0))}")
        return ", ".join(parts)


def run_once(
    adapter: EngineAdapter,
    endpoint: Endpoint,
    plan: RequestPlan,
    settings: ReplaySettings,
    *,
    arm: str,
    round_: int,
    position: int,
    cache: CacheCheck,
    salt: str | None,
    tell: Tell = lambda _line, _ratio: None,
) -> Run:
    """Sends the plan once and returns everything that was seen."""
    tally = _Tally(total=len(plan.requests))
    started = time.monotonic()

    told_s = [started]

    def watch(live: Live) -> str | None:
        tally.add(live.fresh)
        if time.monotonic() - told_s[0] >= _TELL_S:
            told_s[0] = time.monotonic()
            tell(tally.line(live.in_flight), tally.finished / tally.total)
        if (death := adapter.death(endpoint)) is not None:
            return death
        if tally.refused_in_a_row >= _REFUSED_IN_A_ROW:
            return f"the server at {endpoint.url} accepts no connection any more"
        if settings.max_run_s is not None and time.monotonic() - started > settings.max_run_s:
            return f"the run was stopped after {settings.max_run_s:g} s (--max-run)"
        return None

    before = adapter.counters(endpoint)
    load_plan = worker_plan(plan, endpoint, limits=settings.limits, salt=salt)
    with _Traffic(adapter, endpoint, before, every_s=settings.scrape_every_s) as traffic:
        load = run_load(load_plan, workers=settings.workers, watch=watch)
    death = adapter.death(endpoint)
    after: TierCounters | None = None
    try:
        after = None if death else _settled(adapter, endpoint)
    except KeyboardInterrupt:  # the requests are done; they stay
        load = replace(load, stopped="interrupted")
    planned = {request.index: request for request in plan.requests}
    samples = tuple(sample(one, planned, load.anchor_ns) for one in load.finished)
    duration_s = max((one.end_s for one in samples), default=load.run_s)
    counters = after.since(before) if after is not None and before.prompt_tokens else None
    return Run(
        arm=arm,
        round=round_,
        position=position,
        cache=check_after(cache, plan, samples, exact=endpoint.takes_ids),
        requests=samples,
        not_sent=load.not_sent,
        duration_s=duration_s,
        counters=counters,
        traffic=traffic.points(load.anchor_ns, duration_s, counters),
        client=_health(load, samples),
        stopped=load.stopped or death,
        warnings=_warnings(load, samples, plan, endpoint.takes_ids),
    )


def _settled(adapter: EngineAdapter, endpoint: Endpoint) -> TierCounters:
    """The counters once stores that go on in the background no longer move them."""
    counters = adapter.counters(endpoint)
    deadline = time.monotonic() + _SETTLE_S
    while counters.store_bytes and time.monotonic() < deadline:
        time.sleep(_SETTLE_POLL_S)
        later = adapter.counters(endpoint)
        if later.store_bytes == counters.store_bytes:
            return later
        counters = later
    return counters


class _Traffic:
    """Reads the server's counters every so often while a run goes on, from a thread of its own."""

    def __init__(self, adapter: EngineAdapter, endpoint: Endpoint, before: TierCounters, *, every_s: float) -> None:
        self._adapter, self._endpoint, self._before, self._every_s = adapter, endpoint, before, every_s
        self._read: list[tuple[int, TierCounters]] = []
        self._stop = Event()
        self._thread = Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "_Traffic":
        if self._before.prompt_tokens and self._every_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            counters = self._adapter.counters(self._endpoint)
            if counters.prompt_tokens:
                self._read.append((time.monotonic_ns(), counters.since(self._before)))

    def points(self, anchor_ns: int, end_s: float, final: TierCounters | None) -> tuple[TrafficPoint, ...]:
        """The readings during the run, and the one after it as what there was at its end."""
        read = [(seconds_from_ns(clock_ns - anchor_ns), counters) for clock_ns, counters in self._read]
        read = [(at_s, counters) for at_s, counters in read if at_s < end_s]
        if final is not None and self._every_s > 0:
            read.append((end_s, final))
        return tuple(
            TrafficPoint(
                at_s=at_s,
                running=counters.gauges.get("running"),
                waiting=counters.gauges.get("waiting"),
                prompt_tokens=counters.prompt_tokens,
                load_bytes=counters.load_bytes,
                store_bytes=counters.store_bytes,
            )
            for at_s, counters in read
        )


def _health(load: LoadResult, samples: tuple[RequestSample, ...]) -> ClientHealth:
    lags = [one.send_lag_s for one in samples if one.send_lag_s is not None]
    loop_lags = load.loop_lag_s
    return ClientHealth(
        workers=load.workers,
        cpu_s=load.cpu_s,
        run_cpu_s=load.run_cpu_s,
        cpu_ratio=load.run_cpu_s / load.run_s / load.workers if load.run_s > 0 else 0.0,
        max_rss_bytes=load.max_rss_bytes,
        send_lag_p50_s=percentile(lags, 0.5) if lags else None,
        send_lag_p99_s=percentile(lags, 0.99) if lags else None,
        send_lag_max_s=max(lags) if lags else None,
        loop_lag_p99_s=percentile(loop_lags, 0.99) if loop_lags else None,
        loop_lag_max_s=max(loop_lags) if loop_lags else None,
        held_back=load.held_back,
        checked_chunks=load.checked_chunks,
        bad_chunks=load.bad_chunks,
    )


def _warnings(
    load: LoadResult, samples: tuple[RequestSample, ...], plan: RequestPlan, takes_ids: bool
) -> tuple[Warning_, ...]:
    found = []
    health = _health(load, samples)
    if plan.loop == "open" and (health.send_lag_p99_s or 0.0) > LATE_S:
        found.append(
            Warning_(
                code="client-late",
                message=f"1 % of the requests were sent over {health.send_lag_p99_s or 0:.3f} s late",
                remedy="latencies count from the intended time and so include this; use --workers or a quieter client",
            )
        )
    if health.cpu_ratio > BUSY_RATIO:
        found.append(
            Warning_(
                code="client-busy",
                message=f"the load generator used {health.cpu_ratio:.0%} of a CPU per worker",
                remedy="the client may be the bottleneck; raise --workers or move it to another machine",
            )
        )
    elif (health.loop_lag_p99_s or 0.0) > LAG_S:
        found.append(
            Warning_(
                code="client-delayed",
                message=f"the load generator waited for a CPU: 1 % of its beats were "
                f"{health.loop_lag_p99_s or 0:.3f} s late, while it used {health.cpu_ratio:.0%} of one",
                remedy="the machine is too busy for exact times; leave a CPU to the client, or move it elsewhere",
            )
        )
    if load.held_back:
        found.append(
            Warning_(
                code="held-back",
                message=f"{load.held_back} requests waited because --max-in-flight others were on their way",
                remedy="raise --max-in-flight, or offer less load",
            )
        )
    if load.bad_chunks:
        found.append(
            Warning_(
                code="invalid-chunks",
                message=f"{load.bad_chunks} of {load.checked_chunks} stream chunks read again were no JSON",
                remedy="the server or a proxy damages its stream; do not trust its token counts",
            )
        )
    if load.lost_workers:
        found.append(
            Warning_(
                code="worker-lost",
                message=f"a load worker ended early ({'; '.join(load.lost_workers)})",
                remedy="its requests are missing; run again",
            )
        )
    if plan.loop == "open" and saturated(samples):
        found.append(
            Warning_(
                code="saturated",
                message="requests in flight and TTFT both kept growing: more was offered than the server can do",
                remedy="the latencies measure how long the run was; lower --rate",
            )
        )
    if not takes_ids:
        told = [(one.prompt_tokens, one.planned_tokens) for one in samples if one.ok and one.prompt_tokens is not None]
        counted, planned = sum(count for count, _ in told), sum(count for _, count in told)
        ratio = f"; the server counted {counted / planned:.2f} tokens a word" if planned else ""
        found.append(
            Warning_(
                code="words",
                message=f"a server takes no token ids, so prompts were sent as common English words, one an id{ratio}",
                remedy="prefixes are shared as planned; prompts have as many tokens as its tokenizer makes of them",
            )
        )
    found += _usage_warnings(samples)
    exact = plan.history == "synthetic" and takes_ids
    mismatched = [
        one
        for one in samples
        if exact and one.ok and one.prompt_tokens is not None and one.prompt_tokens != one.planned_tokens
    ]
    if mismatched:
        one = mismatched[0]
        found.append(
            Warning_(
                code="prompt-tokens",
                message=f"the server counted other prompt lengths in {len(mismatched)} of {len(samples)} requests "
                f"(request {one.index}: {one.prompt_tokens} instead of {one.planned_tokens})",
                remedy="it adds tokens, cuts prompts, or takes no token ids; prefix sharing may differ from the plan",
            )
        )
    return tuple(found)


def _usage_warnings(samples: tuple[RequestSample, ...]) -> list[Warning_]:
    """What answers leave out, or say in another way than one token a chunk."""
    finished = [one for one in samples if one.ok]
    found = []
    silent = [one for one in finished if one.output_tokens is None or one.prompt_tokens is None]
    if silent:
        found.append(
            Warning_(
                code="no-usage",
                message=f"{len(silent)} of {len(finished)} answers have no usage, so their tokens are not known",
                remedy="they count as requests; token rates and TPOT leave them out, and rates are not compared",
            )
        )
    mute = [one for one in finished if one.cached_tokens is None and one.prompt_tokens is not None]
    if mute:
        found.append(
            Warning_(
                code="cached-tokens-null",
                message=f"{len(mute)} of {len(finished)} answers do not tell their cached tokens (null, not 0)",
                remedy="tiers of single requests are not known; vLLM needs --enable-prompt-tokens-details, SGLang "
                "--enable-cache-report",
            )
        )
    packed = [one for one in finished if one.itls_s and (one.output_tokens or 0) > len(one.itls_s) + 1]
    if packed:
        found.append(
            Warning_(
                code="tokens-per-chunk",
                message=f"{len(packed)} of {len(finished)} answers carried several tokens in a chunk",
                remedy="ITL is per chunk and so longer than per token; TPOT comes from usage and is not",
            )
        )
    short = [one for one in finished if one.output_tokens is not None and one.output_tokens < one.max_tokens]
    if short:
        one = short[0]
        found.append(
            Warning_(
                code="short-answers",
                message=f"{len(short)} of {len(finished)} answers were shorter than asked for (request {one.index}: "
                f"{one.output_tokens} of {one.max_tokens} tokens)",
                remedy="the server ignores ignore_eos or cuts answers; arms may have done different work",
            )
        )
    return found


def saturated(samples: tuple[RequestSample, ...]) -> bool:
    """Over-saturation of an open loop: requests in flight and median TTFT both keep growing over the thirds of the run.

    The last third has twice the requests of the first in flight (and four more), and half as much TTFT again.
    """
    ordered = sorted(samples, key=lambda one: one.due_s)
    if len(ordered) < 30:
        return False
    size = len(ordered) // 3
    thirds = [ordered[number * size : (number + 1) * size] for number in range(3)]
    ends = sorted(one.end_s for one in ordered)
    dues = [one.due_s for one in ordered]
    flights = [
        median(bisect_right(dues, one.due_s) - bisect_right(ends, one.due_s) for one in third) for third in thirds
    ]
    ttfts = [median([one.ttft_s or one.end_s - one.due_s for one in third]) for third in thirds]
    return (
        flights[0] < flights[1] < flights[2]
        and ttfts[0] < ttfts[1] < ttfts[2]
        and flights[2] >= 2 * flights[0] + 4
        and ttfts[2] >= 1.5 * ttfts[0]
    )
