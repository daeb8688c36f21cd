"""Our own dialect: everything by tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.engines.builtin.generation import Usage
from kvbench.engines.builtin.metrics import Buckets, Family, labelled, tier_tokens

if TYPE_CHECKING:
    from kvbench.engines.builtin.http import Exchange
    from kvbench.engines.builtin.server import Server

_FINE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Native:
    """Metrics `kvbench:…`, usage with a split by tier, resets that say what they have cleared."""

    name = "native"
    version: str | None = None
    owner = "kvbench"
    buckets = Buckets(ttft=_FINE, itl=_FINE, e2e=_FINE, queue=_FINE)
    null_usage = False
    echo_request_id = True
    tokens_per_event = 1
    extension = None
    own_routes = True
    traps: ClassVar[dict[str, str]] = {}

    def __init__(self, traps: frozenset[str] = frozenset()) -> None: ...

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """Usage with the split by tier."""
        return {
            **plain_usage(usage),
            "prompt_tokens_details": {
                "cached_tokens": usage.prompt.cached_tokens,
                "cached_tokens_by_tier": dict(usage.prompt.cached_tokens_by_tier),
                "loaded_bytes": usage.prompt.loaded_bytes,
            },
        }

    def families(self, server: Server) -> Iterable[Family]:
        """Three levels: where tokens came from, what loading and computing cost, and what clients notice."""
        yield from _reuse(server)
        yield from _cost(server)
        yield from _latency(server)

    def routes(self, server: Server) -> dict[str, dict[str, Callable[[Exchange], None]]]:
        """vLLM's reset in our words: L1 alone, or every tier with `reset_external=true`."""  # noqa: D403
        return {"/reset_prefix_cache": {"POST": server.reset_in_our_words}}


def plain_usage(usage: Usage) -> dict[str, Any]:
    """The three numbers that every engine has."""
    return {
        "prompt_tokens": usage.prompt.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt.prompt_tokens + usage.completion_tokens,
    }


def _reuse(server: Server) -> Iterable[Family]:
    counters, tiers = server.counters, server.engine.tiers()
    names = [tier.name for tier in tiers]
    sources = {"computed": 0, **dict.fromkeys(names, 0), **counters.prompt_tokens_by_source}
    yield _counter("prompt_tokens", "Prompt tokens whose first output token has come.", counters.prompt_tokens)
    yield _by("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", sources, "source")
    yield _counter("completion_tokens", "Output tokens.", counters.completion_tokens)
    results = {"stop": 0, "length": 0, "abort": 0, "error": 0, **counters.requests}
    yield _by("requests", "Requests by how they ended.", results, "result")
    queries, hits = tier_tokens(counters, names)
    yield _by("tier_queries", "Prompt tokens that no nearer tier had.", queries, "tier")
    yield _by("tier_hits", "Prompt tokens that came from the tier.", hits, "tier")
    enabled = {tier.name: float(tier.enabled) for tier in tiers}
    yield Family("kvbench:tier_enabled", "gauge", "1 if the tier is read and written.", labelled(enabled, "tier"))


def _cost(server: Server) -> Iterable[Family]:
    counters, counts = server.counters, server.engine.counts()
    for name, help_, attribute in _TIER_COUNTERS:
        yield _by(f"tier_{name}", help_, {count.name: float(getattr(count, attribute)) for count in counts}, "tier")
    for name, help_, attribute in _TIER_GAUGES:
        known = {count.name: getattr(count, attribute) for count in counts}
        values = {tier: float(value) for tier, value in known.items() if value is not None}
        yield Family(f"kvbench:tier_{name}", "gauge", help_, labelled(values, "tier"))
    yield _counter("loaded_bytes", "Bytes loaded into requests that used them.", counters.loaded_bytes)
    yield _by(
        "prefill_seconds",
        "Time in prefill steps, waiting for loads included, by the farthest tier that a request needed.",
        {"computed": 0.0, **counters.prefill_s_by_source},
        "source",
    )
    yield _by(
        "prefill_computed_tokens",
        "Prompt tokens computed in these seconds; source=computed alone gives the cost of recomputing.",
        {"computed": 0, **counters.prefill_computed_by_source},
        "source",
    )


def _latency(server: Server) -> Iterable[Family]:
    counters, engine = server.counters, server.engine
    yield _gauge("num_requests_running", "Requests running.", engine.num_running)
    yield _gauge("num_requests_waiting", "Requests waiting.", engine.num_waiting)
    yield _counter("requests_rejected", "Requests that got a 429.", counters.rejected)
    for name, help_, histogram in (
        ("time_to_first_token", "From the whole request to its first token.", counters.ttft),
        ("inter_token_latency", "Between two tokens of a request.", counters.itl),
        ("e2e_request_latency", "From the whole request to the end of its answer.", counters.e2e),
        ("request_queue_time", "From the whole request to its first step.", counters.queue),
    ):
        yield Family(f"kvbench:{name}_seconds", "histogram", help_, (((), histogram),))
    by_source = tuple(((("source", source),), histogram) for source, histogram in counters.ttft_by_source.items())
    yield Family(
        "kvbench:time_to_first_token_by_source_seconds",
        "histogram",
        "Time to first token by the farthest tier that the request needed.",
        by_source,
    )


def _counter(name: str, help_: str, value: float) -> Family:
    return Family(f"kvbench:{name}_total", "counter", help_, (((), value),))


def _gauge(name: str, help_: str, value: float) -> Family:
    return Family(f"kvbench:{name}", "gauge", help_, (((), value),))


def _by(name: str, help_: str, values: dict[str, Any], label: str) -> Family:
    return Family(f"kvbench:{name}_total", "counter", help_, labelled(values, label))


_TIER_COUNTERS = (
    ("query_blocks", "Blocks that were looked for in the tier.", "query_blocks"),
    ("hit_blocks", "Blocks that were found in the tier.", "hit_blocks"),
    ("load_blocks", "Blocks loaded from the tier.", "load_blocks"),
    ("load_bytes", "Bytes loaded from the tier.", "load_bytes"),
    ("load_seconds", "Seconds spent loading from the tier.", "load_s"),
    ("store_blocks", "Blocks stored in the tier.", "store_blocks"),
    ("store_bytes", "Bytes stored in the tier.", "store_bytes"),
    ("store_seconds", "Seconds spent storing in the tier.", "store_s"),
    ("evicted_blocks", "Blocks that had to leave the tier.", "evicted"),
    ("dropped_blocks", "Blocks that were to come into the tier and did not.", "dropped"),
    ("lost_blocks", "Evicted blocks that the tier below was to keep and did not.", "lost"),
    ("timeouts", "Blocks that took too long.", "timeouts"),
    ("corrupt", "Blocks whose bytes were not those stored.", "corrupt"),
    ("failures", "Blocks that the tier failed to load or store.", "failures"),
)
_TIER_GAUGES = (
    ("pending_blocks", "Blocks on their way into the tier.", "pending"),
    ("blocks", "Blocks in the tier.", "blocks"),
    ("used_bytes", "Bytes in the tier.", "used_bytes"),
    ("capacity_bytes", "Room of the tier.", "capacity_bytes"),
)
