"""The experiment: arms in turn, A B B A, on one schedule; each started, emptied, verified, measured; then compared."""

import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from kvbench.core.errors import KvbenchError
from kvbench.core.paired import CONFIDENCE
from kvbench.core.provenance import Origin, Warning_
from kvbench.engines.base import Arm, Endpoint, EngineAdapter, Setting
from kvbench.replay.answers import answers
from kvbench.replay.cold import ask, make_cold, make_salted, make_warm
from kvbench.replay.comparisons import bytes_doubts, compare, hit_rows
from kvbench.replay.requests import TEXT_FORM
from kvbench.replay.run import run_once
from kvbench.replay.settings import ReplaySettings
from kvbench.replay.summary import arm_summary
from kvbench.results.document import numeric_fields
from kvbench.results.replay import ArmRecord, CacheCheck, ReplayResult, Run, Verdict
from kvbench.workloads.base import RequestPlan

Progress = Callable[[str, float | None], None]
Adapters = Mapping[str, EngineAdapter]
"""The adapter of each arm, by the arm's name."""

FALLBACK_VOCABULARY = 8192
"""Ids below this exist in the tokenizers of nearly all models; for servers that do not tell their vocabulary's size."""


def order(arms: Sequence[Arm], pairs: int) -> list[tuple[int, Arm]]:
    """Round and arm of every run: each round has every arm once, and every second round goes backwards (ABBA)."""
    return [(number, arm) for number in range(pairs) for arm in (arms if number % 2 == 0 else tuple(reversed(arms)))]


def replay(
    make_plan: Callable[[int], RequestPlan],
    arms: Sequence[Arm],
    adapters: Adapters,
    settings: ReplaySettings,
    *,
    progress: Progress = lambda _step, _ratio: None,
    keep: Callable[[ReplayResult], None] | None = None,
) -> ReplayResult:
    """Runs the experiment. Whatever stops it, finished requests are in the result and started servers are stopped.

    `make_plan` takes the vocabulary size that the first server tells. `keep` is called with the result so far after
    each run.
    """
    started = time.monotonic()
    stage = _Stage(arms, adapters, settings, progress)
    runs: list[Run] = []
    plan: RequestPlan | None = None
    stopped: str | None = None
    with stage.servers():
        schedule = order(arms, settings.pairs if len(arms) > 1 else max(1, settings.pairs))
        try:
            for position, (round_, arm) in enumerate(schedule):
                endpoint = stage.endpoint(arm)
                if plan is None:
                    plan = stage.plan(make_plan, endpoint)
                    endpoint = stage.endpoint(arm)
                stage.warm_up(arm, endpoint, plan)
                run = stage.run(arm, endpoint, plan, round_=round_, position=position, runs=len(schedule))
                runs.append(run)
                if keep is not None:
                    keep(_result(plan, arms, stage, settings, runs, None, started))
                if run.stopped is not None:
                    stopped = run.stopped
                    break
        except KeyboardInterrupt:
            stopped = "interrupted"
        except KvbenchError as error:
            if plan is None or not runs:
                raise
            stopped = str(error)  # the requests of the runs before are worth more than a clean end
    if plan is None:
        raise KvbenchError("interrupted before the first request was sent; nothing was measured")
    return _result(plan, arms, stage, settings, runs, stopped, started)


class _Stage:
    """Servers by arm, what is known about them, and the one run at a time."""

    def __init__(self, arms: Sequence[Arm], adapters: Adapters, settings: ReplaySettings, progress: Progress) -> None:
        self._arms, self._adapters, self._settings, self._progress = arms, adapters, settings, progress
        self._endpoints: dict[str, Endpoint] = {}
        self._warmed: set[str] = set()
        self._served: set[str] = set()
        self._as_text = False
        self.records: dict[str, ArmRecord] = {}

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Stops every server at the end that an adapter started, also when the end is an error."""
        try:
            yield
        finally:
            for adapter in {id(one): one for one in self._adapters.values()}.values():
                adapter.stop()

    def plan(self, make_plan: Callable[[int], RequestPlan], endpoint: Endpoint) -> RequestPlan:
        """The plan for every arm alike; where one server takes no token ids, all get the same words instead."""
        up = [self.endpoint(arm) for arm in self._arms if arm.url is not None and self._settings.servers == "keep"]
        if all(one.takes_ids for one in (endpoint, *up)):
            return make_plan(endpoint.vocab_size or FALLBACK_VOCABULARY)
        self._as_text = True
        self._endpoints = {name: replace(one, takes_ids=False) for name, one in self._endpoints.items()}
        return make_plan(TEXT_FORM.vocab_size)

    def endpoint(self, arm: Arm) -> Endpoint:
        """The running server of the arm, started or switched to where needed."""
        adapter = self._adapters[arm.name]
        known = self._endpoints.get(arm.name)
        if known is not None:
            return known
        if self._settings.servers != "keep":
            switched = self._switched(arm)
            if switched is not None:
                return switched
        if self._settings.servers == "switch":
            widest = self._widest(adapter, arm)
            if widest is not arm:
                endpoint, start_s = self._started(adapter, widest)
                found = adapter.switch(endpoint, arm)
                if found is not None:
                    return self._known(arm, found, start_s)
                adapter.stop(endpoint)
        return self._known(arm, *self._started(adapter, arm))

    def _started(self, adapter: EngineAdapter, arm: Arm) -> tuple[Endpoint, float | None]:
        self._progress(f"starting {arm.name}", None)
        begun = time.monotonic()
        endpoint = adapter.start(arm)
        return endpoint, time.monotonic() - begun if endpoint.pid is not None else None

    def _switched(self, arm: Arm) -> Endpoint | None:
        """The server of another arm, changed to this one; servers that cannot be are stopped, so that one is up."""
        adapter = self._adapters[arm.name]
        for name in list(self._endpoints):
            other = self._endpoints.pop(name)
            found = adapter.switch(other, arm) if self._adapters[name] is adapter else None
            if found is not None:
                if name in self._warmed:
                    self._warmed.add(arm.name)  # the same process
                return self._known(arm, found, None)
            self._adapters[name].stop(other)
            self._warmed.clear()
        return None

    def _widest(self, adapter: EngineAdapter, arm: Arm) -> Arm:
        """The arm of the same engine and L1 with the most tiers: its server can be each of them in turn."""
        alike = [
            one
            for one in self._arms
            if self._adapters[one.name] is adapter
            and one.url is None
            and one.tier("hbm") == arm.tier("hbm")
            and all(tier in one.tiers for tier in arm.tiers)
        ]
        return max(alike, key=lambda one: len(one.tiers), default=arm)

    def _known(self, arm: Arm, endpoint: Endpoint, start_s: float | None) -> Endpoint:
        adapter = self._adapters[arm.name]
        if self._as_text:
            endpoint = replace(endpoint, takes_ids=False)
        self._endpoints[arm.name] = endpoint
        if arm.name not in self.records:
            settings = dict(adapter.settings(endpoint))
            commands = adapter.command(self._widest(adapter, arm) if self._settings.servers == "switch" else arm)
            self.records[arm.name] = ArmRecord(
                name=arm.name,
                tiers=tuple(tier.name for tier in arm.tiers),
                engine=adapter.name,
                url=endpoint.url,
                model=endpoint.model,
                dialect=endpoint.dialect,
                version=endpoint.version,
                page_tokens=endpoint.page_tokens,
                kv_bytes_per_token=endpoint.kv_bytes_per_token,
                commands=commands,
                settings=settings,
                start_s=start_s,
                label=_label(settings, switched=self._settings.servers == "switch" and bool(commands)),
            )
        return endpoint

    def warm_up(self, arm: Arm, endpoint: Endpoint, plan: RequestPlan) -> None:
        """Requests of the plan's length but of other tokens, after each start: the first long prompt is always slow."""
        if arm.name in self._warmed or self._settings.cache == "as-is":
            return
        self._warmed.add(arm.name)
        length = max(request.prompt_tokens for request in plan.requests)
        generator = random.Random(f"warm-up {self._settings.seed} {arm.name}")
        for number in range(self._settings.warm_up_requests):
            self._progress(f"warming up {arm.name} ({number + 1} of {self._settings.warm_up_requests})", None)
            prompt = array("I", [generator.randrange(plan.vocab_size) for _ in range(length)])
            ask(endpoint, prompt, salt=None, max_tokens=2)

    def run(self, arm: Arm, endpoint: Endpoint, plan: RequestPlan, *, round_: int, position: int, runs: int) -> Run:
        """One run from a known cache."""
        head = f"round {round_ + 1} of {self._settings.pairs}, {arm.name}"
        self._progress(f"{head}: emptying and checking its cache", position / runs)
        salt = f"kvbench-{self._settings.seed}-{time.time_ns()}-{position}" if self._settings.cache == "salt" else None
        cache = self._prepare(arm, endpoint, plan, salt)
        self._served.add(endpoint.url)
        return run_once(
            self._adapters[arm.name],
            endpoint,
            plan,
            self._settings,
            arm=arm.name,
            round_=round_,
            position=position,
            cache=cache,
            salt=salt,
            tell=lambda line, ratio: self._progress(f"{head}: {line}", (position + ratio) / runs),
        )

    def _prepare(self, arm: Arm, endpoint: Endpoint, plan: RequestPlan, salt: str | None) -> CacheCheck:
        if salt is not None:
            return make_salted(endpoint, plan, salt=salt)
        if self._settings.cache == "warm":
            return make_warm(endpoint, plan)
        if self._settings.cache == "as-is":
            return CacheCheck(state="as is", reason="nothing was emptied or checked (--cache as-is)")
        return make_cold(self._adapters[arm.name], endpoint, plan, served_before=endpoint.url in self._served)


_REPLACED = {"kernel_package": "SGLang with a {}", "page_mover": "page mover: {}"}


def _label(settings: Mapping[str, Setting], *, switched: bool) -> str | None:
    """What has to be said wherever the arm's numbers are shown: replaced parts of the engine, tiers switched live."""
    said = [text.format(settings[name]) for name, text in _REPLACED.items() if settings.get(name)]
    if switched:
        said.append("tiers of one running server switched live where it can")
    return "; ".join(said) or None


def _result(
    plan: RequestPlan,
    arms: Sequence[Arm],
    stage: _Stage,
    settings: ReplaySettings,
    runs: Sequence[Run],
    stopped: str | None,
    started: float,
) -> ReplayResult:
    records = [stage.records[arm.name] for arm in arms if arm.name in stage.records]
    base = ReplayResult(
        workload=plan.name,
        seed=plan.seed,
        loop=plan.loop,
        arrival=plan.arrival,
        concurrency=plan.concurrency,
        num_requests=len(plan.requests),
        planned_prompt_tokens=sum(request.prompt_tokens for request in plan.requests),
        planned_output_tokens=sum(request.max_tokens for request in plan.requests),
        ideal_hit_tokens=plan.reuse.hit_tokens,
        reuse_definition=plan.reuse.definition,
        rounds=settings.pairs,
        margin_ratio=settings.margin_ratio,
        confidence=CONFIDENCE,
        slo=settings.slo,
        arms=tuple(records),
        runs=tuple(runs),
        stopped=stopped,
        elapsed_s=time.monotonic() - started,
        warnings=tuple(plan.warnings),
    )
    return with_conclusions(base)


def with_conclusions(result: ReplayResult) -> ReplayResult:
    """The result with everything that follows from its runs: summaries, comparisons, answers, verdict, warnings."""
    records, runs = result.arms, result.runs
    summaries = tuple(arm_summary(record, result.runs_of(record.name), result.slo) for record in records)
    pairs = [(records[0], one) for one in records[1:]]
    pairs += list(pairwise(records[1:]))
    comparisons = tuple(
        found
        for base, arm in pairs
        for found in compare(base, arm, runs, summaries, slo=result.slo, margin_ratio=result.margin_ratio)
    )
    hits = hit_rows(records, runs, margin_ratio=result.margin_ratio)
    concluded = replace(
        result,
        summaries=summaries,
        comparisons=comparisons,
        hits=hits,
        answers=answers(
            records,
            summaries,
            comparisons,
            hits,
            ideal_hit_tokens=result.ideal_hit_tokens,
            planned_prompt_tokens=result.planned_prompt_tokens,
        ),
    )
    verdict: Verdict = "one arm" if len(records) < 2 else "inconclusive"
    if concluded.headline is not None:
        verdict = concluded.headline.verdict
    found = [doubt for summary in summaries for doubt in bytes_doubts(summary)]
    return replace(
        concluded,
        verdict=verdict,
        warnings=(*result.warnings, *_doubts(concluded), *(_bytes_warning(doubt) for doubt in found)),
    )


def _bytes_warning(doubt: str) -> Warning_:
    return Warning_(
        code="bytes-and-tokens",
        message=doubt,
        remedy="the engine moves whole blocks, also for requests that do not use them, or counts otherwise",
    )


def _doubts(result: ReplayResult) -> list[Warning_]:
    found: list[Warning_] = []
    seen: dict[tuple[str, str], list[str]] = {}
    for run in result.runs:
        for warning in run.warnings:
            where = f"{run.arm}, round {run.round + 1}"
            seen.setdefault((warning.code, warning.remedy), []).append(f"{where}: {warning.message}")
    for (code, remedy), messages in seen.items():
        more = f" (and in {len(messages) - 1} more runs)" if len(messages) > 1 else ""
        found.append(Warning_(code=code, message=messages[0] + more, remedy=remedy))
    for state, remedy in (
        ("contaminated", "its numbers are not those of a cold cache; restart the server or use --cache salt"),
        ("unverified", "start the server so that it can be reset and reports cached tokens; see docs/replay.md"),
    ):
        runs = [run for run in result.runs if run.cache.state == state]
        if runs:
            are = "is" if len(runs) == 1 else "are"
            of = f"{len(runs)} of {len(result.runs)} runs {are} {state}"
            message = f"{of}, first {runs[0].arm}: {runs[0].cache.reason}"
            found.append(Warning_(code=state, message=message, remedy=remedy))
    for summary in result.summaries:
        if summary.failed:
            told = ", ".join(f"{count} {status}" for status, count in summary.failed.items())
            example = next(request for run in result.runs_of(summary.arm) for request in run.requests if not request.ok)
            found.append(
                Warning_(
                    code="failed-requests",
                    message=f"{summary.arm}: {told} of {summary.requests} requests (first: {example.detail})",
                    remedy="they are counted and have no latency; an arm that fails fast looks fast",
                )
            )
        if summary.troubles:
            told = ", ".join(f"{name} {count:g}" for name, count in summary.troubles.items())
            found.append(
                Warning_(
                    code="engine-troubles",
                    message=f"{summary.arm}: the engine counted {told}",
                    remedy="see its log; a tier that drops or fails is not what was meant to be measured",
                )
            )
    if len(result.arms) > 1 and result.rounds < 5:
        found.append(
            Warning_(
                code="few-pairs",
                message=f"{result.rounds} {'pair' if result.rounds == 1 else 'pairs'} of runs "
                f"{'decides nothing' if result.rounds == 1 else 'give wide intervals'}",
                remedy="use at least --pairs 5 for a verdict",
            )
        )
    return found


def provenance(result: ReplayResult) -> dict[str, Origin]:
    """Where each number of a replay comes from, by the part of the result that it stands in."""
    client = Origin(provenance="measured", source="the load generator's clock (CLOCK_MONOTONIC) and process times")
    usage = Origin(provenance="measured", source="the usage object of each answer; null is kept apart from 0")
    counters = Origin(provenance="measured", source="differences of the server's metrics around each run")
    plan = Origin(provenance="spec", source="the workload and the options of this command")
    told = Origin(provenance="spec", source="what the server tells about itself")
    derived = Origin(
        provenance="measured",
        source="the requests and runs of this result",
        formula="percentiles with order-statistic intervals; ratios with Student's t on paired log-ratios",
    )
    weight = Origin(
        provenance="modelled", source="tokens that the tier served", formula="tokens · kv_bytes_per_token of the server"
    )
    # The first part that a name contains decides.
    parts: tuple[tuple[Origin, tuple[str, ...]], ...] = (
        (weight, ("expected_bytes",)),
        (counters, ("runs.counters", "runs.traffic.", "tier_use", "tokens_by_source", "summaries.troubles")),
        (told, ("arms.settings", "arms.page_tokens", "arms.kv_bytes_per_token")),
        (client, ("arms.start_s", "elapsed_s", "runs.client", "runs.duration_s", "runs.not_sent")),
        (plan, ("runs.requests.index", "runs.requests.turn", "planned_tokens", "runs.requests.shared_prefix_tokens",
                "runs.requests.max_tokens", "runs.round", "runs.position")),
        (usage, ("runs.requests.prompt_tokens", "runs.requests.output_tokens", "runs.requests.cached",
                 "runs.requests.loaded_bytes", "runs.cache.probes")),
        (client, ("runs.requests",)),
        (derived, ("summaries", "comparisons", "hits")),
        (plan, ("",)),
    )  # fmt: skip
    return {
        name: next(origin for origin, marks in parts if any(mark in name for mark in marks))
        for name in numeric_fields(result)
    }
