"""Servers that are up: any OpenAI-compatible address. vLLM, SGLang and kvbench serve are known by their pages."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.engines.base import (
    Arm,
    Dialect,
    Endpoint,
    EngineOptions,
    ResetReport,
    ResetStep,
    Setting,
)
from kvbench.engines.http_calls import Reply, call, required_json
from kvbench.engines.metrics_text import MetricsPage, read_metrics
from kvbench.engines.tier_counters import dialect_of, lmcache_tokens, read_counters
from kvbench.results.tier_counters import TierCounters

_NO_SETTINGS = ("system_env.", "vllm_env.", "internal_states.")  # the machine's state, not what the engine was told

_RESET_RETRIES, _RETRY_S = 20, 0.25  # blocks of a load or store in flight are held for moments after the last request


def open_url_adapter(options: EngineOptions) -> "UrlAdapter":
    """The adapter of servers that are up."""
    return UrlAdapter(options)


class UrlAdapter:
    """An engine adapter that starts nothing."""

    name = "url"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def command(self, arm: Arm) -> tuple[tuple[str, ...], ...]:
        """No command: the server is up."""
        return ()

    def start(self, arm: Arm) -> Endpoint:
        """What answers at the arm's address."""
        if arm.url is None:
            raise UsageError(f"arm {arm.name!r} names no address; write --arm NAME=http://HOST:PORT")
        return detect(arm.url, model=self._options.model, timeout_s=self._options.call_timeout_s)

    def switch(self, endpoint: Endpoint, arm: Arm) -> Endpoint | None:
        """The same server where the arm has the same address."""
        return endpoint if arm.url is not None and arm.url == endpoint.url else None

    def stop(self, endpoint: Endpoint | None = None) -> None:
        """Leaves servers alone that it did not start."""

    def death(self, endpoint: Endpoint) -> str | None:
        """None: a server of somebody else is not watched."""
        return None

    def reset(self, endpoint: Endpoint) -> ResetReport:
        """The reset of the server's own dialect."""
        return reset_caches(endpoint, timeout_s=self._options.call_timeout_s)

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        """What the server tells about itself."""
        return server_settings(endpoint, timeout_s=self._options.call_timeout_s)

    def counters(self, endpoint: Endpoint) -> TierCounters:
        """The counters of the server's metrics page, and of further pages of the arm."""
        return server_counters(endpoint, timeout_s=self._options.call_timeout_s)


def detect(url: str, *, model: str | None = None, pid: int | None = None, timeout_s: float = 30.0) -> Endpoint:
    """Who answers at the address: its model, its dialect, and what it tells about pages and bytes per token."""
    models = required_json(url, "/v1/models", what="its models", timeout_s=timeout_s)
    listed = [entry for entry in models.get("data", []) if isinstance(entry, dict)] if isinstance(models, dict) else []
    names = [str(entry.get("id")) for entry in listed]
    if model is not None and names and model not in names:
        raise UsageError(f"{url} serves {', '.join(names)}, not {model!r}; pass --model with one of these")
    chosen = model or (names[0] if names else "")
    entry = listed[names.index(chosen)] if chosen in names else {}
    page = read_metrics(call(url, "/metrics", timeout_s=timeout_s).text)
    info = server_info(url, timeout_s=timeout_s)
    version = call(url, "/version", timeout_s=timeout_s).json()
    dialect = _dialect(page, info, entry)
    settings = flat(info)
    return Endpoint(
        url=url.rstrip("/"),
        model=chosen,
        dialect=dialect,
        version=_text(version.get("version") if isinstance(version, dict) else None) or _text(settings.get("version")),
        vocab_size=_integer(settings.get("vocab_size"))
        or _vocab_of_folder(entry.get("root"), settings.get("model_path")),
        page_tokens=_page_tokens(settings, page),
        kv_bytes_per_token=_number(settings.get("kv_bytes_per_token")),
        max_model_tokens=_integer(entry.get("max_model_len") or settings.get("max_context_tokens")),
        takes_ids=dialect != "unknown" or _takes_ids(url, chosen, timeout_s),
        pid=pid,
    )


def _takes_ids(url: str, model: str, timeout_s: float) -> bool:
    """Whether a server of unknown make accepts token ids as a prompt; where it does not, words are sent instead."""
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
    return call(url, "/v1/completions", method="POST", body=body, timeout_s=timeout_s).ok


def _vocab_of_folder(*folders: object) -> int | None:
    """The vocabulary size of a model folder that the server names, where this machine has it."""
    for folder in folders:
        if isinstance(folder, str) and folder:
            try:
                body = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            size = _integer(body.get("vocab_size")) if isinstance(body, dict) else None
            if size:
                return size
    return None


def server_info(url: str, *, timeout_s: float) -> Mapping[str, Any]:
    """The page of resolved settings; empty where the server has none (vLLM shows it in developer mode only)."""
    for path in ("/server_info", "/get_server_info"):
        reply = call(url, path, timeout_s=timeout_s)
        body = reply.json() if reply.ok else None
        if isinstance(body, dict):
            return body
    return {}


def _dialect(page: MetricsPage, info: Mapping[str, Any], entry: Mapping[str, Any]) -> Dialect:
    spoken: dict[str, Dialect] = {"native": "kvbench", "vllm": "vllm", "sglang": "sglang"}
    if info.get("engine") == "kvbench":  # it can speak another engine's language
        return spoken.get(str(info.get("dialect")), "kvbench")
    found = dialect_of(page)
    if found != "unknown":
        return found
    owner = str(entry.get("owned_by", ""))
    owners: tuple[Dialect, ...] = ("kvbench", "vllm", "sglang")
    return next((dialect for dialect in owners if owner == dialect), "unknown")


def _page_tokens(settings: Mapping[str, Setting], page: MetricsPage) -> int | None:
    for value in (
        settings.get("page_tokens"),
        settings.get("page_size"),
        page.label("vllm:cache_config_info", "block_size"),
        page.label("sglang:cache_config_info", "page_size"),
    ):
        found = _integer(value)
        if found:
            return found
    return None


def flat(value: Any, prefix: str = "") -> dict[str, Setting]:
    """A nested answer as flat settings: `tiers.0.spec`; what is neither text nor number is left out."""
    found: dict[str, Setting] = {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping | list):
            found |= flat(item, name)
        elif item is None or isinstance(item, str | int | float | bool):
            found[name] = item
    return found


def server_settings(endpoint: Endpoint, *, timeout_s: float) -> Mapping[str, Setting]:
    """Resolved settings, flat, with what the metrics page says about the cache where there is no page of settings."""
    told = flat(server_info(endpoint.url, timeout_s=timeout_s))
    settings = {name: value for name, value in told.items() if not name.startswith(_NO_SETTINGS)}
    page = read_metrics(call(endpoint.url, "/metrics", timeout_s=timeout_s).text)
    for name in ("vllm:cache_config_info", "sglang:cache_config_info"):
        for label in ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "page_size", "num_pages"):
            value = page.label(name, label)
            if value is not None:
                settings.setdefault(label, value)
    settings["dialect"] = endpoint.dialect
    settings["version"] = endpoint.version
    return settings


def server_counters(endpoint: Endpoint, *, timeout_s: float) -> TierCounters:
    """The counters; the hidden lower tier of vLLM is told apart by LMCache's own page where the arm has one."""
    reply = call(endpoint.url, "/metrics", timeout_s=timeout_s)
    counters = read_counters(read_metrics(reply.text)) if reply.ok else TierCounters()
    inner: dict[str, float] = {}
    for url in endpoint.metrics_urls:
        page = call(url, "/metrics", timeout_s=timeout_s)
        if page.ok:
            inner |= {f"lmcache {tier}": count for tier, count in lmcache_tokens(read_metrics(page.text)).items()}
    if not inner:
        return counters
    return TierCounters(
        prompt_tokens=counters.prompt_tokens,
        load_bytes=counters.load_bytes,
        store_bytes=counters.store_bytes,
        load_s=counters.load_s,
        hit_tokens={**counters.hit_tokens, **inner},
        query_tokens=counters.query_tokens,
        troubles=counters.troubles,
        gauges=counters.gauges,
    )


def reset_caches(
    endpoint: Endpoint, *, timeout_s: float, key: str | None = None, sleep: Callable[[float], None] = time.sleep
) -> ResetReport:
    """Calls what the dialect has for it, and reads the answers: a status of 200 alone proves nothing."""
    steps = {"kvbench": _reset_kvbench, "vllm": _reset_vllm, "sglang": _reset_sglang}.get(endpoint.dialect)
    if steps is None:
        detail = "the server is none of vLLM, SGLang and kvbench serve; no reset is known for it"
        return ResetReport(steps=(ResetStep(what="no reset", ok=False, detail=detail),))
    return ResetReport(steps=steps(endpoint.url, timeout_s, key, sleep))


def _retried(attempt: Callable[[], Reply], done: Callable[[Reply], bool], sleep: Callable[[float], None]) -> Reply:
    for _ in range(_RESET_RETRIES):
        reply = attempt()
        if done(reply) or reply.status in (0, 401, 403, 404, 405):
            break
        sleep(_RETRY_S)
    return reply


def _reset_kvbench(
    url: str, timeout_s: float, key: str | None, sleep: Callable[[float], None]
) -> tuple[ResetStep, ...]:
    reply = _retried(
        lambda: call(url, "/cache/clear", method="POST", body={}, key=key, timeout_s=timeout_s),
        lambda reply: reply.ok and isinstance(reply.json(), dict) and "cleared" in reply.json(),
        sleep,
    )
    body = reply.json()
    ok = reply.ok and isinstance(body, dict) and "cleared" in body
    return (ResetStep(what="POST /cache/clear", ok=ok, detail=_said(reply)),)


def _reset_vllm(url: str, timeout_s: float, key: str | None, sleep: Callable[[float], None]) -> tuple[ResetStep, ...]:
    path = "/reset_prefix_cache?reset_external=true"
    reply = _retried(
        lambda: call(url, path, method="POST", key=key, timeout_s=timeout_s),
        lambda reply: reply.ok and _success(reply) is not False,
        sleep,
    )
    detail = _said(reply)
    if reply.status == 404:
        detail = "404: the server has no reset; start it with VLLM_SERVER_DEV_MODE=1"
    elif _success(reply) is False:
        detail = "the server still held blocks: " + detail
    return (ResetStep(what=f"POST {path}", ok=reply.ok and _success(reply) is not False, detail=detail),)


def _reset_sglang(url: str, timeout_s: float, key: str | None, sleep: Callable[[float], None]) -> tuple[ResetStep, ...]:
    flush = _retried(
        lambda: call(url, "/flush_cache", method="POST", key=key, timeout_s=timeout_s), lambda reply: reply.ok, sleep
    )
    steps = [ResetStep(what="POST /flush_cache", ok=flush.ok, detail=_said(flush))]
    path = "/hicache/storage-backend/clear"
    storage = call(url, path, method="POST", key=key, timeout_s=timeout_s)
    # Without a storage backend the call is refused, and there is nothing to clear; its text says "cleared" either way.
    if storage.ok:
        steps.append(ResetStep(what=f"POST {path}", ok=True, detail=_said(storage)))
    elif storage.status in (401, 403):
        steps.append(ResetStep(what=f"POST {path}", ok=False, detail=_said(storage)))
    return tuple(steps)


def _success(reply: Reply) -> bool | None:
    body = reply.json()
    return body.get("success") if isinstance(body, dict) and isinstance(body.get("success"), bool) else None


def _said(reply: Reply) -> str:
    return f"{reply.status or 'no answer'}: {' '.join(reply.text.split())[:160]}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _integer(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
