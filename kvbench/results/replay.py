"""What `kvbench replay` measured: every request of every run, what was verified about each arm, and the comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from kvbench.core.paired import PairedVerdict
from kvbench.core.percentiles import Percentile
from kvbench.core.provenance import Warning_
from kvbench.results.tier_counters import TierCounters

Status = Literal[
    "ok", "http", "refused", "connect-timeout", "read-timeout", "total-timeout", "cut", "invalid", "error", "cancelled"
]
CacheState = Literal["verified cold", "cold by salt", "contaminated", "unverified", "warm", "as is"]
Verdict = Literal[
    "better", "worse", "no difference", "inconclusive", "contaminated", "tier not exercised", "saturated",
    "failed requests", "one arm",
]  # fmt: skip
Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """One request as it went. Times count from the start of its run; None where the moment never came.

    `due_s` is when the plan wanted it sent; latencies count from there (open loop), so that a late client or a queue in
    front of the server is not lost. Tokens come from `usage`, never from chunks. `cached_tokens` None means that the
    server does not say; it is not 0. `itls_s` are gaps between stream chunks, which may carry several tokens.
    """

    index: int
    group: str | None
    turn: int
    planned_tokens: int
    shared_prefix_tokens: int
    max_tokens: int
    status: Status
    detail: str | None
    due_s: float
    sent_s: float | None
    first_choice_s: float | None
    first_text_s: float | None
    last_choice_s: float | None
    end_s: float
    itls_s: tuple[float, ...]
    invalid_events: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    cached_by_tier: Mapping[str, int] | None
    loaded_bytes: int | None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def ttft_s(self) -> float | None:
        """From the intended send time to the first chunk with choices, whose text may be empty."""
        return None if self.first_choice_s is None else self.first_choice_s - self.due_s

    @property
    def first_text_ttft_s(self) -> float | None:
        """From the intended send time to the first chunk with text."""
        return None if self.first_text_s is None else self.first_text_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        """From the intended send time to the last chunk with choices."""
        return None if self.last_choice_s is None else self.last_choice_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None below two tokens."""
        if self.output_tokens is None or self.output_tokens < 2 or self.ttft_s is None or self.e2e_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def send_lag_s(self) -> float | None:
        """How long after its due time it was written to the connection."""
        return None if self.sent_s is None else self.sent_s - self.due_s

    @property
    def hit_tier(self) -> str | None:
        """The tier that most of its cached tokens came from; `miss`, or `hit` where the engine does not say which."""
        if self.cached_by_tier:
            return max(self.cached_by_tier, key=lambda tier: self.cached_by_tier[tier] if self.cached_by_tier else 0)
        if self.cached_tokens is None:
            return None
        return "hit" if self.cached_tokens else "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetProbe:
    """A prompt of the plan, sent after a reset: how many of its tokens the server still had."""

    prompt_tokens: int
    cached_tokens: int | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCheck:
    """What was done to start a run with a known cache, and what showed that it worked."""

    state: CacheState
    reason: str
    steps: tuple[str, ...] = ()
    probes: tuple[ResetProbe, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """What the load generator cost, and how late it was. `cpu_ratio` is CPU time per worker and second of the run."""

    workers: int
    cpu_s: float
    run_cpu_s: float
    cpu_ratio: float
    max_rss_bytes: int
    send_lag_p50_s: float | None
    send_lag_p99_s: float | None
    send_lag_max_s: float | None
    loop_lag_p99_s: float | None
    loop_lag_max_s: float | None
    held_back: int
    checked_chunks: int
    bad_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPoint:
    """The server's counters in the middle of a run, since its start."""

    at_s: float
    running: float | None
    waiting: float | None
    prompt_tokens: Mapping[str, float]
    load_bytes: Mapping[str, float]
    store_bytes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass of the schedule over one arm. `position` is its place in the order in which runs were made."""

    arm: str
    round: int
    position: int
    cache: CacheCheck
    requests: tuple[RequestSample, ...]
    not_sent: int
    duration_s: float
    counters: TierCounters | None
    traffic: tuple[TrafficPoint, ...]
    client: ClientHealth
    stopped: str | None = None
    warnings: tuple[Warning_, ...] = ()

    @cached_property
    def finished(self) -> tuple[RequestSample, ...]:
        """The requests that ended well."""
        return tuple(request for request in self.requests if request.ok)

    def tier_of(self, request: RequestSample) -> str | None:
        """The tier that served a request of this run.

        Where the engine does not say it per request (vLLM), but its counters name a single tier for the whole run, that
        one served every hit.
        """
        tier = request.hit_tier
        return self.only_tier or tier if tier == "hit" else tier

    @cached_property
    def only_tier(self) -> str | None:
        """The one tier that all cached tokens of the run came from; None for none or several.

        A tier that the engine hides (`external`) has the name that its own server gives it, such as `lmcache dram`.
        """
        tokens = {} if self.counters is None else self.counters.prompt_tokens
        tiers = [source for source, count in tokens.items() if source != "computed" and count > 0]
        if tiers == ["external"] and len(self.hidden_tokens) == 1:
            return next(iter(self.hidden_tokens))
        return tiers[0] if len(tiers) == 1 else None

    @property
    def hidden_tokens(self) -> Mapping[str, float]:
        """Tokens that the server of a hidden tier says it found in this run, by that server's own tiers."""
        found = {} if self.counters is None else self.counters.hit_tokens
        return {name: count for name, count in found.items() if name.startswith("lmcache ") and count > 0}

    @property
    def complete(self) -> bool:
        """Nothing stopped it, and at least one request ended well."""
        return self.stopped is None and bool(self.finished)

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of all answers; None where no answer says."""
        told = [request.cached_tokens for request in self.finished if request.cached_tokens is not None]
        return sum(told) if told else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """An arm as it ran: the commands that started it, and the settings that the server itself told."""

    name: str
    tiers: tuple[str, ...]
    engine: str
    url: str
    model: str
    dialect: str
    version: str | None
    page_tokens: int | None
    kv_bytes_per_token: float | None
    commands: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Setting]
    start_s: float | None
    label: str | None = None
    """What has to be said wherever its numbers are shown, such as a replaced part of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Values of one quantity: percentiles with 95 % intervals, only those that so many values can carry."""

    count: int
    mean: float
    maximum: float
    percentiles: tuple[Percentile, ...]

    def at(self, quantile: float) -> Percentile | None:
        """That percentile, or None where there are too few values for it."""
        return next((one for one in self.percentiles if one.quantile == quantile), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """One tier of an arm: tokens it served, bytes it gave and took, and the check of these against each other.

    `expected_bytes` is tokens × KV bytes per token, for what had to pass through the tier. `exercised` is None where
    the server tells neither tokens nor bytes.
    """

    tier: str
    tokens: float | None
    load_bytes: float | None
    store_bytes: float | None
    expected_bytes: float | None
    exercised: bool | None
    found: Mapping[str, float] = field(default_factory=dict)
    """Where the tier's own server says that it found tokens, also those that the engine then had nearer by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """All complete runs of one arm. Rates are medians over runs. `failed` counts requests by status, none dropped."""

    arm: str
    runs: int
    requests: int
    ok: int
    failed: Mapping[str, int]
    not_sent: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    tokens_by_source: Mapping[str, float]
    ttft_s: Distribution | None
    ttft_cold_s: Distribution | None
    ttft_warm_s: Distribution | None
    first_text_ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    send_lag_s: Distribution | None
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests_per_s: float | None
    good_ratio: float | None
    most_in_flight: int
    tier_use: tuple[TierUse, ...]
    cache_states: tuple[CacheState, ...]
    troubles: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity of two arms over pairs of runs; `ratio` is arm over base, and below 1 is better unless it is a rate.

    `doubts` are the reasons why the arms cannot be compared, whatever the interval says.
    """

    base: str
    arm: str
    quantity: str
    better: Literal["lower", "higher"]
    base_values: tuple[float, ...]
    arm_values: tuple[float, ...]
    ratio: float
    low: float | None
    high: float | None
    measured: PairedVerdict
    verdict: Verdict
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRow:
    """TTFT of the requests of one arm that one tier served, by prompt length, against the same requests computed."""

    arm: str
    tier: str
    least_tokens: int
    most_tokens: int
    requests: int
    cached_tokens: int
    ttft_s: Distribution
    computed_arm: str | None
    computed_ttft_s: float | None
    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    verdict: PairedVerdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the three questions, answered in words; `tone` says how it looks for tiering."""

    question: str
    text: str
    tone: Literal["good", "bad", "unsure", "neutral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good request keeps within; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def kept_by(self, request: RequestSample) -> bool:
        """Whether the request ended well and within every bound; one token has no TPOT and keeps it."""
        if not request.ok:
            return False
        bounds = ((self.ttft_s, request.ttft_s), (self.tpot_s, request.tpot_s or 0.0), (self.e2e_s, request.e2e_s))
        return all(bound is None or (value is not None and value <= bound) for bound, value in bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The experiment: one schedule, sent to each arm in each round, and what follows from it."""

    KIND: ClassVar[str] = "replay"
    SCHEMA_VERSION: ClassVar[int] = 1

    workload: str
    seed: int
    loop: Literal["open", "closed"]
    arrival: str
    concurrency: int | None
    num_requests: int
    planned_prompt_tokens: int
    planned_output_tokens: int
    ideal_hit_tokens: int
    reuse_definition: str
    rounds: int
    margin_ratio: float
    confidence: float
    slo: Slo | None
    arms: tuple[ArmRecord, ...]
    runs: tuple[Run, ...]
    summaries: tuple[ArmSummary, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    hits: tuple[HitRow, ...] = ()
    answers: tuple[Answer, ...] = ()
    verdict: Verdict = "one arm"
    stopped: str | None = None
    elapsed_s: float = 0.0
    warnings: tuple[Warning_, ...] = field(default=())

    def summary(self, arm: str) -> ArmSummary | None:
        """The summary of that arm."""
        return next((one for one in self.summaries if one.arm == arm), None)

    def runs_of(self, arm: str) -> tuple[Run, ...]:
        """The runs of that arm in order."""
        return tuple(run for run in self.runs if run.arm == arm)

    @property
    def headline(self) -> Comparison | None:
        """TTFT of the last arm against the first."""
        if len(self.arms) < 2:
            return None
        first, last = self.arms[0].name, self.arms[-1].name
        return next(
            (one for one in self.comparisons if (one.base, one.arm) == (first, last) and one.quantity == "TTFT p50"),
            None,
        )
