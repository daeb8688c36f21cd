"""What a server counts, and the Prometheus text that says it."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.engines.builtin.generation import ApiError, FinishReason, Listener, Usage

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


@dataclass(slots=True, kw_only=True)
class Counters:
    """Everything the server counts about requests. Which tier gave a prompt token is counted when a request ends."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_by_source: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    loaded_bytes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    responses: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def request_ended(self, result: str) -> None:
        """Counts a request as stop, length, abort or error."""
        self.requests[result] = self.requests.get(result, 0) + 1

    def used(self, usage: Usage) -> None:
        """Counts the tokens of a request."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens
        self.loaded_bytes += usage.loaded_bytes
        sources = self.prompt_tokens_by_source
        sources["computed"] = sources.get("computed", 0) + usage.prompt_tokens - usage.cached_tokens
        for tier, tokens in usage.cached_tokens_by_tier.items():
            sources[tier] = sources.get(tier, 0) + tokens


class Observed:
    """A listener that counts and times what passes through it."""

    __slots__ = ("_counters", "_inner", "_last", "_reason", "_start", "on_over", "over")

    def __init__(self, inner: Listener, counters: Counters) -> None:
        self._inner = inner
        self._counters = counters
        self._start = time.monotonic()
        self._last = 0.0
        self._reason = "stop"
        self.over = False
        self.on_over: Callable[[], None] | None = None

    def tokens(self, ids: Sequence[int], texts: Sequence[str], reason: FinishReason | None) -> None:
        """Times the tokens: those that come together share their time."""
        now = time.monotonic()
        if not self._last:
            self._counters.ttft.observe(now - self._start)
            if len(ids) > 1:
                self._counters.itl.observe(0.0, len(ids) - 1)
        elif ids:
            self._counters.itl.observe((now - self._last) / len(ids), len(ids))
        self._last = now
        if reason is not None:
            self._reason = reason
        self._inner.tokens(ids, texts, reason)

    def finished(self, usage: Usage) -> None:
        """Counts the request as done."""
        self.over = True
        self._counters.e2e.observe(time.monotonic() - self._start)
        self._counters.request_ended(self._reason)
        self._counters.used(usage)
        self._inner.finished(usage)
        if self.on_over is not None:
            self.on_over()

    def failed(self, error: ApiError) -> None:
        """Counts the request as failed."""
        if self.over:
            return
        self.over = True
        self._counters.request_ended("error")
        self._inner.failed(error)
        if self.on_over is not None:
            self.on_over()

    def aborted(self) -> None:
        """The client has gone."""
        if not self.over:
            self.over = True
            self._counters.request_ended("abort")


def labelled(values: Mapping[str, float], name: str) -> tuple[tuple[Labels, float], ...]:
    """One sample per value of a label."""
    return tuple((((name, label),), value) for label, value in values.items())
