"""SGLang 0.5.23 with HiCache from outside: `dram` is its host pool, everything below is its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.engines.builtin.api import parse_object
from kvbench.engines.builtin.dialect_native import plain_usage
from kvbench.engines.builtin.generation import ApiError, TierSetting, Usage
from kvbench.engines.builtin.metrics import Buckets, Family, Histogram, Labels, tier_tokens

if TYPE_CHECKING:
    from kvbench.engines.builtin.http import Exchange
    from kvbench.engines.builtin.server import Server

_TTFT = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
)  # fmt: skip
_ITL = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0,
    2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
_E2E = (*_TTFT, 600.0, 1200.0, 1800.0, 2400.0)
_QUEUE = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0, 1400.0, 1600.0,
    1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip
_UNFULFILLED = (
    "below_threshold", "host_capacity", "device_capacity", "device_covered", "storage_transfer", "deadline",
    "anchor_lost", "aux_window_trim", "device_overlap", "cache_admission_shortfall", "dropped",
)  # fmt: skip


class Sglang:
    """SGLang with `--enable-metrics --enable-cache-report` and a hierarchical cache, unless a trap is set."""

    name = "sglang"
    version: str | None = "0.5.23"
    owner = "sglang"
    buckets = Buckets(ttft=_TTFT, itl=_ITL, e2e=_E2E, queue=_QUEUE)
    null_usage = True
    echo_request_id = False
    own_routes = False
    traps: ClassVar[dict[str, str]] = {
        "no-cache-report": "without --enable-cache-report: prompt_tokens_details is null, which is not 0",
        "clear-fails": "clearing the storage fails with 400 and a body that says cleared",
        "flush-noop": "/flush_cache succeeds and clears nothing, as without a radix cache",
        "two-tokens": "a chunk carries two tokens",
        "underscore-names": "metrics begin with sglang_ instead of sglang:",
    }

    def __init__(self, traps: frozenset[str] = frozenset()) -> None:
        self._traps = traps
        self.tokens_per_event = 2 if "two-tokens" in traps else 1

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """No split by tier on this API."""
        silent = "no-cache-report" in self._traps
        details = None if silent else {"cached_tokens": usage.prompt.cached_tokens}
        return {**plain_usage(usage), "prompt_tokens_details": details}

    def extension(self, usage: Usage) -> dict[str, Any]:
        """The split by tier that a request may ask for: an event of its own before the usage."""
        by_tier = usage.prompt.cached_tokens_by_tier
        near = {"device": by_tier.get("hbm", 0), "host": by_tier.get("dram", 0)}
        return {
            "sglext": {"cached_tokens_details": {**near, "storage": usage.prompt.cached_tokens - sum(near.values())}}
        }

    def routes(self, server: Server) -> dict[str, dict[str, Callable[[Exchange], None]]]:
        """Control endpoints."""

        def flush(exchange: Exchange) -> None:
            self._flush(server, exchange)

        def info(exchange: Exchange) -> None:
            server.send_json(exchange, self._info(server))

        def model(exchange: Exchange) -> None:
            server.send_json(exchange, {"model_path": server.engine.model.name, "is_generation": True})

        return {
            "/flush_cache": {"GET": flush, "POST": flush},
            "/hicache/storage-backend/clear": {"POST": lambda exchange: self._clear(server, exchange)},
            "/hicache/storage-backend": {
                "GET": lambda exchange: self._storage_state(server, exchange),
                "PUT": lambda exchange: self._attach(server, exchange, attached=True),
                "DELETE": lambda exchange: self._attach(server, exchange, attached=False),
            },
            "/server_info": {"GET": info},
            "/get_server_info": {"GET": info},
            "/model_info": {"GET": model},
            "/get_model_info": {"GET": model},
        }

    def _flush(self, server: Server, exchange: Exchange) -> None:
        """Empties L1 and the host pool and keeps the storage; refused while anything runs, or after `timeout`."""
        _guard(server, exchange)
        try:
            timeout_s = min(60.0, max(0.0, float(exchange.request.query().get("timeout", "0"))))
        except ValueError:
            timeout_s = 0.0

        def flush(idle: bool) -> None:
            if not idle:
                text = b"Not flushed: requests are running or waiting.\n"
                exchange.send(400, text, content_type="text/plain; charset=utf-8")
                return
            flushed = [tier.name for tier in server.engine.tiers() if tier.name in ("hbm", "dram")]
            names = [] if "flush-noop" in self._traps else flushed
            text = b"Cache flushed.\n"
            server.clear_then(exchange, names, lambda _cleared: exchange.send(200, text, content_type="text/plain"))

        server.when_idle(timeout_s, flush)

    def _clear(self, server: Server, exchange: Exchange) -> None:
        """Empties the storage. The body says that it did even where the status says that it did not."""
        _guard(server, exchange)
        text = b"Hierarchical cache storage cleared.\n"
        storage = [tier.name for tier in _storage(server) if tier.enabled]
        if not storage or server.busy or "clear-fails" in self._traps:
            exchange.send(400, text, content_type="text/plain; charset=utf-8")
        else:
            server.clear_then(exchange, storage, lambda _cleared: exchange.send(200, text, content_type="text/plain"))

    def _attach(self, server: Server, exchange: Exchange, *, attached: bool) -> None:
        """Turns the storage on or off without a restart; detaching keeps what is stored. Only while nothing runs."""
        _guard(server, exchange, always=True)
        storage = _storage(server)
        if attached and not isinstance(parse_object(exchange.request.body).get("hicache_storage_backend"), str):
            raise ApiError("hicache_storage_backend is missing: the name of a storage backend")
        if not storage or server.busy:
            why = "requests are running" if storage else "this server was started without a tier below dram"
            raise ApiError(f"the storage stays as it is: {why}")
        for tier in storage:
            server.engine.set_enabled(tier.name, attached)
        self._storage_state(server, exchange)

    def _storage_state(self, server: Server, exchange: Exchange) -> None:
        _guard(server, exchange, always=True)
        attached = next((tier.name for tier in _storage(server) if tier.enabled), None)
        server.send_json(exchange, {"hicache_storage_backend": attached})

    def _info(self, server: Server) -> dict[str, Any]:
        tiers = server.engine.tiers()
        names = [tier.name for tier in tiers]
        return {
            "model_path": server.engine.model.name,
            "served_model_name": server.engine.model.name,
            "page_size": server.engine.model.page_tokens,
            "context_length": server.engine.model.max_context_tokens,
            "disable_radix_cache": "hbm" not in names,
            "enable_hierarchical_cache": "dram" in names,
            "hicache_write_policy": next((tier.policy.replace("-", "_") for tier in tiers[1:]), "write_through"),
            "hicache_storage_backend": next((tier.name for tier in _storage(server) if tier.enabled), None),
            "enable_metrics": True,
            "enable_cache_report": "no-cache-report" not in self._traps,
            "version": self.version,
        }

    def families(self, server: Server) -> Iterable[Family]:
        """The families that tell which tier served a prompt, and the usual latencies."""
        prefix = "sglang_" if "underscore-names" in self._traps else "sglang:"
        engine, counters = server.engine, server.counters
        base: Labels = (("engine_type", "unified"), ("model_name", engine.model.name))
        ranks: Labels = (*base, ("moe_ep_rank", "0"), ("pp_rank", "0"), ("tp_rank", "0"))
        cache: Labels = (("cache_type", "UnifiedRadixCache"), ("dp_rank", "0"), ("pp_rank", "0"), ("tp_rank", "0"))
        kv: Labels = (*cache, ("pool", "kv"))

        def family(name: str, kind: str, *samples: tuple[Labels, float | Histogram]) -> Family:
            return Family(prefix + name, kind, name.replace("_", " ") + ".", samples)  # type: ignore[arg-type]

        streaming: Labels = (*base, ("is_streaming", "true"))
        yield family("prompt_tokens_total", "counter", (streaming, counters.prompt_tokens))
        yield family("generation_tokens_total", "counter", (streaming, counters.completion_tokens))
        yield family("num_requests_total", "counter", (streaming, counters.prompts))
        _queries, hits = tier_tokens(counters, [tier.name for tier in engine.tiers()])
        sources = {"device": hits.get("hbm", 0), "host": hits.get("dram", 0)}
        sources["storage"] = counters.cached_tokens - sum(sources.values())
        cached = [((*base, ("cache_source", source)), float(value)) for source, value in sources.items()]
        yield family("cached_tokens_total", "counter", *cached)
        yield from self._hicache(server, family, cache, kv, sources["storage"])
        counts = {count.name: count for count in engine.counts()}
        tokens_per_block = engine.model.page_tokens
        hbm, dram = counts.get("hbm"), counts.get("dram")
        used = hbm.used_bytes / hbm.capacity_bytes if hbm is not None and hbm.capacity_bytes else 0.0
        hit_rate = counters.cached_tokens / counters.prompt_tokens if counters.prompt_tokens else 0.0
        block = engine.model.block_bytes or 1
        room = hbm.capacity_bytes // block * tokens_per_block if hbm is not None and hbm.capacity_bytes else 0
        for name, value in (
            ("num_running_reqs", engine.num_running),
            ("num_queue_reqs", engine.num_waiting),
            ("token_usage", used),
            ("cache_hit_rate", hit_rate),
            ("page_size", tokens_per_block),
            ("max_total_num_tokens", room),
            ("hicache_host_used_tokens", 0 if dram is None else dram.used_bytes // block * tokens_per_block),
            (
                "hicache_host_total_tokens",
                0 if dram is None else (dram.capacity_bytes or 0) // block * tokens_per_block,
            ),
        ):
            yield family(name, "gauge", (ranks, float(value)))
        yield family("time_to_first_token_seconds", "histogram", (streaming, counters.ttft))
        yield family("inter_token_latency_seconds", "histogram", (base, counters.itl))
        yield family("e2e_request_latency_seconds", "histogram", (streaming, counters.e2e))
        yield family("queue_time_seconds", "histogram", (ranks, counters.queue))

    def _hicache(
        self, server: Server, family: Callable[..., Family], cache: Labels, kv: Labels, storage_tokens: int
    ) -> Iterable[Family]:
        engine = server.engine
        lower = [count for count in engine.counts() if count.name != "hbm"]
        storage = [count for count in lower if count.name != "dram"]
        block, page = engine.model.block_bytes or 1, engine.model.page_tokens
        evicted = sum(count.evicted for count in engine.counts() if count.name == "hbm")
        yield family("evicted_tokens_total", "counter", (cache, float(evicted * page)))
        if not lower:
            return
        load_bytes = sum(count.load_bytes for count in lower)
        yield family("load_back_bytes_total", "counter", (cache, float(load_bytes)))
        yield family("load_back_tokens_total", "counter", (kv, float(load_bytes // block * page)))
        backup = lower[0].store_bytes
        yield family("hicache_backup_bytes_total", "counter", (cache, float(backup)))
        yield family("hicache_backup_tokens_total", "counter", (kv, float(backup // block * page)))
        reasons = ("host_pressure", "write_through_unbacked_eviction")
        yield family(
            "hicache_dropped_tokens_total", "counter", *(((*kv, ("reason", reason)), 0.0) for reason in reasons)
        )
        if not storage:
            return
        place: Labels = (
            ("attn_cp_rank", "0"),
            ("attn_cp_size", "1"),
            ("dp_rank", "0"),
            ("pp_rank", "0"),
            ("pp_size", "1"),
            ("storage_backend", storage[0].name),
            ("tp_rank", "0"),
        )
        stored = sum(count.store_bytes for count in storage)
        yield family("backuped_tokens_total", "counter", (place, float(stored // block * page)))
        yield family("storage_prefetch_hit_tokens_total", "counter", (place, float(storage_tokens)))
        fetched = sum(count.load_bytes for count in storage)
        yield family("prefetched_tokens_total", "counter", (place, float(fetched // block * page)))
        late = {"deadline": sum(count.timeouts for count in storage) * page}
        late["storage_transfer"] = sum(count.failures + count.corrupt for count in storage) * page
        samples = [((*place, ("reason", reason)), float(late.get(reason, 0))) for reason in _UNFULFILLED]
        yield family("storage_prefetch_unfulfilled_tokens_total", "counter", *samples)


def _storage(server: Server) -> list[TierSetting]:
    return [tier for tier in server.engine.tiers() if tier.name not in ("hbm", "dram")]


def _guard(server: Server, exchange: Exchange, *, always: bool = False) -> None:
    """Asks for the admin key where the server has one; a call that is `always` guarded is refused without one."""
    key = server.admin_key
    if key is None:
        if always:
            raise ApiError("this call needs a server that was started with an admin key", status=403, kind="forbidden")
    elif not compare_digest(exchange.request.headers.get(b"authorization", b""), f"Bearer {key}".encode()):
        raise ApiError("this call needs the admin key", status=401, kind="unauthorized")
