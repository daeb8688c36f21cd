"""How an engine names its metrics, its usage and its resets: our own way, vLLM's and SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.core.errors import UsageError
from kvbench.engines.builtin.generation import Usage
from kvbench.engines.builtin.metrics import Family, labelled

if TYPE_CHECKING:
    from kvbench.engines.builtin.http import Exchange
    from kvbench.engines.builtin.server import Server

Routes = dict[str, dict[str, "Callable[[Exchange], None]"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The bounds of the histograms, in seconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]
    queue: tuple[float, ...]


class Dialect(Protocol):
    """What differs between engines on the outside."""

    name: str
    version: str | None
    buckets: Buckets
    null_usage: bool

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """The usage object."""
        ...

    def families(self, server: Server) -> Iterable[Family]:
        """The metrics."""
        ...

    def routes(self, server: Server) -> Routes:
        """Routes that only this engine has."""
        ...


_FINE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Native:
    """Our own metrics: everything by tier."""

    name = "native"
    version: str | None = None
    buckets = Buckets(ttft=_FINE, itl=_FINE, e2e=_FINE, queue=_FINE)
    null_usage = False

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """Usage with the split by tier."""
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cached_tokens_by_tier": dict(usage.cached_tokens_by_tier),
                "loaded_bytes": usage.loaded_bytes,
            },
        }

    def families(self, server: Server) -> Iterable[Family]:
        """The three levels: where tokens came from, what loading cost, and what the client noticed."""
        counters = server.counters
        sources = {
            "computed": 0,
            **{tier.name: 0 for tier in server.engine.tiers()},
            **counters.prompt_tokens_by_source,
        }
        yield Family("kvbench:prompt_tokens_total", "counter", "Prompt tokens.", (((), counters.prompt_tokens),))
        yield Family(
            "kvbench:prompt_tokens_by_source_total",
            "counter",
            "Prompt tokens by where their KV came from: computed, or loaded from a tier.",
            labelled(sources, "source"),
        )
        yield Family(
            "kvbench:completion_tokens_total", "counter", "Output tokens.", (((), counters.completion_tokens),)
        )
        results = {"stop": 0, "length": 0, "abort": 0, "error": 0, **counters.requests}
        yield Family("kvbench:requests_total", "counter", "Requests by how they ended.", labelled(results, "result"))
        for name, help_, attribute in _TIER_COUNTERS:
            values = {count.name: float(getattr(count, attribute)) for count in server.engine.counts()}
            yield Family(f"kvbench:tier_{name}_total", "counter", help_, labelled(values, "tier"))
        for name, help_, attribute in _TIER_GAUGES:
            values = {
                count.name: float(value)
                for count in server.engine.counts()
                if (value := getattr(count, attribute)) is not None
            }
            yield Family(f"kvbench:tier_{name}", "gauge", help_, labelled(values, "tier"))
        enabled = {tier.name: float(tier.enabled) for tier in server.engine.tiers()}
        yield Family("kvbench:tier_enabled", "gauge", "1 if the tier is read and written.", labelled(enabled, "tier"))
        yield Family("kvbench:requests_running", "gauge", "Requests running.", (((), server.engine.num_running),))
        yield Family("kvbench:requests_waiting", "gauge", "Requests waiting.", (((), server.engine.num_waiting),))
        for name, help_, histogram in (
            ("time_to_first_token", "From the whole request to its first token.", counters.ttft),
            ("inter_token_latency", "Between two tokens of a request.", counters.itl),
            ("e2e_request_latency", "From the whole request to the end of its answer.", counters.e2e),
            ("request_queue_time", "From the whole request to its first step.", counters.queue),
        ):
            yield Family(f"kvbench:{name}_seconds", "histogram", help_, (((), histogram),))

    def routes(self, server: Server) -> Routes:
        """None so far."""
        return {}


_TIER_COUNTERS = (
    ("queries", "Blocks that were looked for in the tier.", "queries"),
    ("hits", "Blocks that were found in the tier.", "hits"),
    ("load_blocks", "Blocks loaded from the tier.", "load_blocks"),
    ("load_bytes", "Bytes loaded from the tier.", "load_bytes"),
    ("load_seconds", "Seconds spent loading from the tier.", "load_s"),
    ("store_blocks", "Blocks stored in the tier.", "store_blocks"),
    ("store_bytes", "Bytes stored in the tier.", "store_bytes"),
    ("store_seconds", "Seconds spent storing in the tier.", "store_s"),
    ("evicted_blocks", "Blocks that had to leave the tier.", "evicted"),
    ("timeouts", "Loads and stores that took too long.", "timeouts"),
    ("corrupt_blocks", "Blocks whose bytes were not those stored.", "corrupt"),
    ("failures", "Loads and stores that failed.", "failures"),
)
_TIER_GAUGES = (
    ("blocks", "Blocks in the tier.", "blocks"),
    ("used_bytes", "Bytes in the tier.", "used_bytes"),
    ("capacity_bytes", "Room of the tier.", "capacity_bytes"),
)

DIALECTS: dict[str, Callable[[tuple[str, ...]], Dialect]] = {"native": lambda _traps: Native()}


def dialect_named(name: str, traps: tuple[str, ...]) -> Dialect:
    """The dialect of that name with those traps set."""
    if name not in DIALECTS:
        raise UsageError(f"there is no dialect {name!r}; choose one of {', '.join(DIALECTS)}")
    return DIALECTS[name](traps)
