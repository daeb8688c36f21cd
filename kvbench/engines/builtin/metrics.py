"""What a server counts, and the Prometheus text that says it."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvbench.engines.builtin.generation import ApiError, FinishReason, Listener, PromptUse, Usage

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values up to each bound."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as printed, values up to it), the last one `+Inf`."""
        result, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            result.append((bound, total))
        return result


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples: numbers, or histograms."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[Labels, float | Histogram], ...]


def exposition(families: Iterable[Family]) -> str:
    """Families in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            if isinstance(value, Histogram):
                for bound, count in value.cumulative():
                    lines.append(f"{family.name}_bucket{_braces((*labels, ('le', bound)))} {float(count)!r}")
                lines.append(f"{family.name}_count{_braces(labels)} {float(value.count)!r}")
                lines.append(f"{family.name}_sum{_braces(labels)} {value.sum!r}")
            else:
                lines.append(f"{family.name}{_braces(labels)} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in sorted(labels)) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The bounds of the histograms, in seconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]
    queue: tuple[float, ...]


class Counters:
    """Everything the server counts about requests.

    A prompt counts when its first token is there. Its source is the tier, or `computed`; a request's source is the
    farthest tier that it needed.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.ttft = Histogram(buckets.ttft)
        self.itl = Histogram(buckets.itl)
        self.e2e = Histogram(buckets.e2e)
        self.queue = Histogram(buckets.queue)
        self.ttft_by_source: dict[str, Histogram] = {}
        self.prompts = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.loaded_bytes = 0
        self.prompt_tokens_by_source: dict[str, int] = {}
        self.prefill_s_by_source: dict[str, float] = {}
        self.prefill_computed_by_source: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.rejected = 0

    def request_ended(self, result: str) -> None:
        """Counts a request as stop, length, abort or error."""
        self.requests[result] = self.requests.get(result, 0) + 1

    def prompt_done(self, prompt: PromptUse, ttft_s: float) -> None:
        """Counts the tokens of a prompt and what they cost."""
        computed = prompt.prompt_tokens - prompt.cached_tokens
        self.prompts += 1
        self.prompt_tokens += prompt.prompt_tokens
        self.cached_tokens += prompt.cached_tokens
        self.loaded_bytes += prompt.loaded_bytes
        self.ttft.observe(ttft_s)
        self.queue.observe(prompt.queue_s)
        _add(self.prompt_tokens_by_source, "computed", computed)
        farthest = "computed"
        for tier, tokens in prompt.cached_tokens_by_tier.items():
            _add(self.prompt_tokens_by_source, tier, tokens)
            farthest = tier if tokens else farthest
        if farthest not in self.ttft_by_source:
            self.ttft_by_source[farthest] = Histogram(self.ttft.bounds)
        self.ttft_by_source[farthest].observe(ttft_s)
        _add(self.prefill_s_by_source, farthest, prompt.prefill_s)
        _add(self.prefill_computed_by_source, farthest, computed)


_Number = TypeVar("_Number", int, float)


def _add(sums: dict[str, _Number], key: str, value: _Number) -> None:
    sums[key] = sums[key] + value if key in sums else value


class Observed:
    """A listener that counts and times what passes through it."""

    __slots__ = ("_counters", "_inner", "_last", "_prompt", "_reason", "_start", "on_over", "over")

    def __init__(self, inner: Listener, counters: Counters) -> None:
        self._inner = inner
        self._counters = counters
        self._start = time.monotonic()
        self._last = 0.0
        self._prompt: PromptUse | None = None
        self._reason = "stop"
        self.over = False
        self.on_over: Callable[[], None] | None = None

    def prompt_ready(self, prompt: PromptUse) -> None:
        """Kept until the first token, which times it."""
        if self.over:
            return
        self._prompt = prompt
        self._inner.prompt_ready(prompt)

    def tokens(self, ids: Sequence[int], texts: Sequence[str], reason: FinishReason | None) -> None:
        """Times the tokens: those that come together share their time."""
        if self.over:
            return
        now = time.monotonic()
        count, counters = len(ids), self._counters
        counters.completion_tokens += count
        if not self._last:
            if self._prompt is not None:
                counters.prompt_done(self._prompt, now - self._start)
            if count > 1:
                counters.itl.observe(0.0, count - 1)
        elif count:
            counters.itl.observe((now - self._last) / count, count)
        self._last = now
        if reason is not None:
            self._reason = reason
        self._inner.tokens(ids, texts, reason)

    def finished(self, usage: Usage) -> None:
        """Counts the request as done."""
        if self.over:
            return
        self._counters.e2e.observe(time.monotonic() - self._start)
        self._inner.finished(usage)
        self._end(self._reason)

    def failed(self, error: ApiError) -> None:
        """Counts the request as failed."""
        if self.over:
            return
        self._inner.failed(error)
        self._end("error")

    def aborted(self) -> None:
        """The client has gone."""
        if not self.over:
            self._end("abort")

    def _end(self, result: str) -> None:
        self.over = True
        self._counters.request_ended(result)
        if self.on_over is not None:
            self.on_over()


def tier_tokens(counters: Counters, tiers: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Per tier, nearest first: prompt tokens that no nearer tier had, and those that it had."""
    queries: dict[str, int] = {}
    hits = {tier: counters.prompt_tokens_by_source.get(tier, 0) for tier in tiers}
    left = counters.prompt_tokens
    for tier in tiers:
        queries[tier] = left
        left -= hits[tier]
    return queries, hits


def labelled(values: Mapping[str, float], name: str) -> tuple[tuple[Labels, float], ...]:
    """One sample per value of a label."""
    return tuple((((name, label),), value) for label, value in values.items())
