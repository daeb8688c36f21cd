"""vLLM 0.32 from outside: names as a real server prints them, and the resets that do less than one thinks.

With one lower tier it looks like a CPU offload; with several, like tiered offload, whose first tier is `0:primary`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.engines.builtin.dialect_native import plain_usage
from kvbench.engines.builtin.generation import Usage
from kvbench.engines.builtin.metrics import Buckets, Family, Histogram, Labels, tier_tokens

if TYPE_CHECKING:
    from kvbench.engines.builtin.http import Exchange
    from kvbench.engines.builtin.server import Server

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_KINDS = {"hbm": "device", "dram": "host", "file": "disk"}
_SECONDARY = {"file": "fs", "s3": "obj", "nixl": "obj"}


def kind_of(tier: str) -> str:
    """A tier's kind in vLLM's words; a number behind the name of a second one does not count."""
    return _KINDS.get(tier.rstrip("0123456789") if tier not in _KINDS else tier, "external_unspecified")


class Vllm:
    """vLLM with prefix caching, developer endpoints and `--enable-prompt-tokens-details`, unless a trap is set."""

    name = "vllm"
    version: str | None = "0.32.0"
    owner = "vllm"
    buckets = Buckets(ttft=_TTFT, itl=_ITL, e2e=_E2E, queue=_E2E)
    null_usage = False
    echo_request_id = False
    tokens_per_event = 1
    extension = None
    own_routes = False
    traps: ClassVar[dict[str, str]] = {
        "no-dev-mode": "without VLLM_SERVER_DEV_MODE=1: /reset_prefix_cache is a 404",
        "no-prompt-tokens-details": "without the flag: prompt_tokens_details is null, which is not 0",
        "connector-without-reset": "reset_external=true succeeds and keeps the lower tiers",
        "hidden-tiers": "every lower tier reads external_unspecified, as with LMCache and Mooncake",
    }

    def __init__(self, traps: frozenset[str] = frozenset()) -> None:
        self._traps = traps

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """No split by tier: vLLM has none."""
        silent = "no-prompt-tokens-details" in self._traps
        details = None if silent else {"cached_tokens": usage.prompt.cached_tokens}
        return {**plain_usage(usage), "prompt_tokens_details": details}

    def routes(self, server: Server) -> dict[str, dict[str, Callable[[Exchange], None]]]:
        """The developer endpoints."""
        if "no-dev-mode" in self._traps:
            return {}
        return {
            "/reset_prefix_cache": {"POST": lambda exchange: self._reset(server, exchange)},
            "/server_info": {"GET": lambda exchange: self._info(server, exchange)},
        }

    def _info(self, server: Server, exchange: Exchange) -> None:
        """The configuration as text, or as an object with `config_format=json`."""
        model = server.engine.model
        cache = {
            "block_size": model.page_tokens,
            "enable_prefix_caching": any(tier.name == "hbm" for tier in server.engine.tiers()),
        }
        config = {
            "model_config": {"model": model.name, "max_model_len": model.max_context_tokens},
            "cache_config": cache,
        }
        as_object = exchange.request.query().get("config_format") == "json"
        server.send_json(exchange, {"vllm_config": config if as_object else repr(config)})

    def _reset(self, server: Server, exchange: Exchange) -> None:
        """L1; with reset_external the first lower tier too, and never those below it. 200 whatever comes of it."""
        if server.busy:
            server.send_json(exchange, {"success": False})
            return
        tiers = [tier.name for tier in server.engine.tiers()]
        external = exchange.request.query().get("reset_external", "").lower() in ("true", "1")
        cleared = [name for name in tiers if name == "hbm"]
        if external and "connector-without-reset" not in self._traps:
            cleared += [name for name in tiers if name != "hbm"][:1]
        server.clear_then(exchange, cleared, lambda _cleared: server.send_json(exchange, {"success": True}))

    def families(self, server: Server) -> Iterable[Family]:
        """The families that tell which tier served a prompt, and the usual latencies."""
        base: Labels = (("engine", "0"), ("model_name", server.engine.model.name))

        def family(name: str, kind: str, help_: str, *samples: tuple[Labels, float | Histogram]) -> Family:
            labelled = tuple(((*base, *labels), value) for labels, value in samples)
            return Family(f"vllm:{name}", kind, help_, labelled)  # type: ignore[arg-type]

        yield from self._tokens(server, family)
        yield from self._offload(server, family)
        counters, engine = server.counters, server.engine
        yield family("num_requests_running", "gauge", "Requests in execution batches.", ((), engine.num_running))
        yield family("num_requests_waiting", "gauge", "Requests waiting.", ((), engine.num_waiting))
        counts = {count.name: count for count in engine.counts()}
        hbm = counts.get("hbm")
        used = hbm.used_bytes / hbm.capacity_bytes if hbm is not None and hbm.capacity_bytes else 0.0
        yield family("kv_cache_usage_perc", "gauge", "Share of the KV cache in use.", ((), used))
        yield family("num_preemptions_total", "counter", "Preemptions.", ((), 0))
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0, **counters.requests}
        yield family(
            "request_success_total",
            "counter",
            "Finished requests.",
            *(((("finished_reason", reason),), value) for reason, value in reasons.items()),
        )
        for name, histogram in (
            ("time_to_first_token_seconds", counters.ttft),
            ("inter_token_latency_seconds", counters.itl),
            ("e2e_request_latency_seconds", counters.e2e),
            ("request_queue_time_seconds", counters.queue),
        ):
            yield family(name, "histogram", f"Histogram of {name.replace('_', ' ')}.", ((), histogram))
        blocks = hbm.capacity_bytes // engine.model.block_bytes if hbm is not None and hbm.capacity_bytes else 0
        config: Labels = (
            ("block_size", str(engine.model.page_tokens)),
            ("cache_dtype", "auto"),
            ("enable_prefix_caching", str(hbm is not None)),
            ("num_gpu_blocks", str(blocks)),
        )
        info = ((("engine", "0"), *config), 1.0)
        yield Family("vllm:cache_config_info", "gauge", "Configuration of the KV cache.", (info,))

    def _tokens(self, server: Server, family: Callable[..., Family]) -> Iterable[Family]:
        counters = server.counters
        names = [tier.name for tier in server.engine.tiers()]
        _queries, hits = tier_tokens(counters, names)
        local = hits.get("hbm", 0)
        external = counters.cached_tokens - local
        yield family("prefix_cache_queries_total", "counter", "Tokens looked for.", ((), counters.prompt_tokens))
        yield family("prefix_cache_hits_total", "counter", "Tokens found.", ((), local))
        if len(names) > ("hbm" in names):
            queries = counters.prompt_tokens - local
            yield family("external_prefix_cache_queries_total", "counter", "Tokens looked for.", ((), queries))
            yield family("external_prefix_cache_hits_total", "counter", "Tokens found.", ((), external))
        yield family("prompt_tokens_total", "counter", "Prefill tokens.", ((), counters.prompt_tokens))
        yield family("prompt_tokens_cached_total", "counter", "Cached prompt tokens.", ((), counters.cached_tokens))
        yield family("generation_tokens_total", "counter", "Generated tokens.", ((), counters.completion_tokens))
        by_source = {
            "local_compute": counters.prompt_tokens - counters.cached_tokens,
            "local_cache_hit": local,
            "external_kv_transfer": external,
        }
        yield family(
            "prompt_tokens_by_source_total",
            "counter",
            "Prompt tokens by source.",
            *(((("source", source),), value) for source, value in by_source.items()),
        )
        cached = dict.fromkeys(_SOURCES, 0)
        for name, tokens in hits.items():
            hidden = "hidden-tiers" in self._traps and name != "hbm"
            cached["external_unspecified" if hidden else kind_of(name)] += tokens
        yield family(
            "prompt_tokens_cached_by_source_total",
            "counter",
            "Cached prompt tokens by source.",
            *(((("source", source),), value) for source, value in cached.items()),
        )

    def _offload(self, server: Server, family: Callable[..., Family]) -> Iterable[Family]:
        """What moved to and from the primary tier: bytes of those below it pass through it and count in both."""
        lower = [count for count in server.engine.counts() if count.name != "hbm"]
        if not lower or "hidden-tiers" in self._traps:
            return
        primary, secondary = lower[0], lower[1:]
        load_bytes, load_s = sum(count.load_bytes for count in lower), sum(count.load_s for count in lower)
        yield family("kv_offload_load_bytes_total", "counter", "Bytes loaded.", ((), load_bytes))
        yield family("kv_offload_load_time_total", "counter", "Seconds of loading.", ((), load_s))
        yield family("kv_offload_store_bytes_total", "counter", "Bytes stored.", ((), primary.store_bytes))
        yield family("kv_offload_store_time_total", "counter", "Seconds of storing.", ((), primary.store_s))
        to_gpu, to_cpu = (("transfer_type", "CPU_to_GPU"),), (("transfer_type", "GPU_to_CPU"),)
        moved = ((to_gpu, load_bytes), (to_cpu, primary.store_bytes))
        yield family("kv_offload_total_bytes_total", "counter", "Bytes moved.", *moved)
        spent = ((to_gpu, load_s), (to_cpu, primary.store_s))
        yield family("kv_offload_total_time_total", "counter", "Seconds of moving.", *spent)
        yield family("kv_offload_allocation_failure_total", "counter", "Failed allocations.", ((), primary.dropped))
        if not secondary:
            return
        labels: list[Labels] = [
            (("tier", f"{place}:{_SECONDARY.get(count.name.rstrip('0123456789'), 'obj')}"),)
            for place, count in enumerate(secondary, 1)
        ]
        for name, attribute in (
            ("read_bytes", "load_bytes"),
            ("read_time", "load_s"),
            ("write_bytes", "store_bytes"),
            ("write_time", "store_s"),
            ("promotion_job_failures", "failures"),
            ("backpressure_blocks_dropped", "dropped"),
        ):
            samples = [(label, getattr(count, attribute)) for label, count in zip(labels, secondary, strict=True)]
            yield family(f"kv_offload_tiering_{name}_total", "counter", f"{name} by tier.", *samples)
        first: Labels = (("tier", "0:primary"),)
        for name, attribute in (("chunk_queries", "query_blocks"), ("chunk_hits", "hit_blocks")):
            rows = zip((first, *labels), lower, strict=True)
            samples = [(label, getattr(count, attribute)) for label, count in rows]
            yield family(f"kv_offload_tiering_{name}_total", "counter", f"{name} by tier.", *samples)
