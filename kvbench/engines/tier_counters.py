"""Turns the metrics of each engine into the same counters, in our tier names."""

from kvbench.engines.base import Dialect, TierCounters
from kvbench.engines.metrics_text import MetricsPage

_VLLM_SOURCES = {
    "device": "hbm", "host": "dram", "disk": "file", "p2p": "peer", "external_unspecified": "external",
}  # fmt: skip
_SGLANG_SOURCES = {"device": "hbm", "host": "dram", "storage": "file", "total": "external"}
_MOONCAKE = "vllm:mooncake_store_operation_bytes_total"


def dialect_of(page: MetricsPage) -> Dialect:
    """Whose metrics a page holds."""
    dialects: tuple[Dialect, ...] = ("kvbench", "vllm", "sglang")
    return next((dialect for dialect in dialects if page.has_prefix(f"{dialect}:")), "unknown")


def read_counters(page: MetricsPage) -> TierCounters:
    """The counters of a page, whichever engine wrote it; empty for a page of another program."""
    readers = {"kvbench": _kvbench, "vllm": _vllm, "sglang": _sglang}
    reader = readers.get(dialect_of(page))
    return TierCounters() if reader is None else reader(page)


def _kvbench(page: MetricsPage) -> TierCounters:
    troubles = {
        f"{tier} {what}": count
        for what in ("timeouts", "corrupt", "failures")
        for tier, count in page.by_label(f"kvbench:tier_{what}_total", "tier").items()
    }
    return TierCounters(
        prompt_tokens=page.by_label("kvbench:prompt_tokens_by_source_total", "source"),
        load_bytes=page.by_label("kvbench:tier_load_bytes_total", "tier"),
        store_bytes=page.by_label("kvbench:tier_store_bytes_total", "tier"),
        load_s=page.by_label("kvbench:tier_load_seconds_total", "tier"),
        hit_tokens=page.by_label("kvbench:tier_hits_total", "tier"),
        query_tokens=page.by_label("kvbench:tier_queries_total", "tier"),
        troubles=troubles,
        gauges=_present(
            running=page.total("kvbench:num_requests_running"), waiting=page.total("kvbench:num_requests_waiting")
        ),
    )


def _vllm(page: MetricsPage) -> TierCounters:
    # `kv_offload_total_*{transfer_type}` are deprecated twins of `kv_offload_{load,store}_*`: either, never both.
    load = _either(page, "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_total_bytes_total", "CPU_to_GPU")
    store = _either(page, "vllm:kv_offload_store_bytes_total", "vllm:kv_offload_total_bytes_total", "GPU_to_CPU")
    load_s = _either(page, "vllm:kv_offload_load_time_total", "vllm:kv_offload_total_time_total", "CPU_to_GPU")
    return TierCounters(
        prompt_tokens=_vllm_tokens(page),
        load_bytes=_present(dram=load, external=page.total(_MOONCAKE, operation="load_get"))
        | _secondary(page, "read_bytes"),
        store_bytes=_present(dram=store, external=page.total(_MOONCAKE, operation="save_put"))
        | _secondary(page, "write_bytes"),
        load_s=_present(dram=load_s) | _secondary(page, "read_time"),
        hit_tokens=_present(
            hbm=page.total("vllm:prefix_cache_hits_total"), external=page.total("vllm:external_prefix_cache_hits_total")
        ),
        query_tokens=_present(
            hbm=page.total("vllm:prefix_cache_queries_total"),
            external=page.total("vllm:external_prefix_cache_queries_total"),
        ),
        troubles=_present(
            preemptions=page.total("vllm:num_preemptions_total"),
            allocation_failures=page.total("vllm:kv_offload_allocation_failure_total"),
            promotion_failures=page.total("vllm:kv_offload_tiering_promotion_job_failures_total"),
            cascade_failures=page.total("vllm:kv_offload_tiering_cascade_job_failures_total"),
            stores_dropped=page.total("vllm:kv_offload_tiering_backpressure_stores_dropped_total"),
            mooncake_failed_keys=page.total("vllm:mooncake_store_operation_failed_keys_total"),
        ),
        gauges=_present(
            running=page.total("vllm:num_requests_running"), waiting=page.total("vllm:num_requests_waiting")
        ),
    )


def _vllm_tokens(page: MetricsPage) -> dict[str, float]:
    by_source = page.by_label("vllm:prompt_tokens_by_source_total", "source")
    cached = page.by_label("vllm:prompt_tokens_cached_by_source_total", "source")
    tokens = {_VLLM_SOURCES.get(source, "external"): 0.0 for source in cached}
    for source, count in cached.items():
        tokens[_VLLM_SOURCES.get(source, "external")] += count
    if not cached:  # before 0.32
        tokens = _present(hbm=by_source.get("local_cache_hit"), external=by_source.get("external_kv_transfer"))
    if "local_compute" in by_source:
        tokens["computed"] = by_source["local_compute"]
    elif (prompt := page.total("vllm:prompt_tokens_total")) is not None:
        hits = page.total("vllm:prefix_cache_hits_total")
        if hits is not None:
            tokens.setdefault("hbm", hits)
            tokens["computed"] = prompt - sum(tokens.values())
    return tokens


def _secondary(page: MetricsPage, what: str) -> dict[str, float]:
    """Bytes of vLLM's secondary tiers, whose label is a number and a type: `1:fs`, `2:obj`."""
    kinds = {"fs": "file", "obj": "remote", "p2p": "peer"}
    sums: dict[str, float] = {}
    for label, count in page.by_label(f"vllm:kv_offload_tiering_{what}_total", "tier").items():
        name = kinds.get(label.partition(":")[2], "external")
        sums[name] = sums.get(name, 0.0) + count
    return sums


def _sglang(page: MetricsPage) -> TierCounters:
    tokens: dict[str, float] = {}
    for source, count in page.by_label("sglang:cached_tokens_total", "cache_source").items():
        # A storage hit carries its backend since some versions (`storage_file`).
        name = _SGLANG_SOURCES.get(source.partition("_")[0], "external")
        tokens[name] = tokens.get(name, 0.0) + count
    prompt = page.total("sglang:prompt_tokens_total")
    if prompt is not None:
        tokens["computed"] = prompt - sum(tokens.values())
    return TierCounters(
        prompt_tokens=tokens,
        load_bytes=_present(dram=page.total("sglang:load_back_bytes_total")),
        store_bytes=_present(dram=page.total("sglang:hicache_backup_bytes_total")),
        load_s=_present(dram=page.total("sglang:load_back_duration_seconds_sum")),
        hit_tokens=_present(file=page.total("sglang:storage_prefetch_hit_tokens_total")),
        troubles=_present(
            retractions=page.total("sglang:num_retracted_reqs"),
            backup_dropped_tokens=page.total("sglang:hicache_backup_dropped_tokens_total"),
        )
        | {
            f"prefetch unfulfilled: {reason}": count
            for reason, count in page.by_label("sglang:storage_prefetch_unfulfilled_tokens_total", "reason").items()
        },
        gauges=_present(running=page.total("sglang:num_running_reqs"), waiting=page.total("sglang:num_queue_reqs")),
    )


def lmcache_tokens(page: MetricsPage) -> dict[str, float]:
    """Tokens that an LMCache server found by its own tiers; its L1 is DRAM and its L2 storage, one below our names."""
    return _present(
        dram=page.total("lmcache_mp_lookup_hit_l1_tokens_total"),
        file=page.total("lmcache_mp_lookup_hit_l2_tokens_total"),
    )


def _either(page: MetricsPage, name: str, deprecated: str, transfer: str) -> float | None:
    value = page.total(name)
    return page.total(deprecated, transfer_type=transfer) if value is None else value


def _present(**values: float | None) -> dict[str, float]:
    return {key: value for key, value in values.items() if value is not None}
