"""Open shared metadata from its spelling."""

import difflib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvbench.core.errors import UsageError
from kvbench.core.units import parse_duration
from kvbench.tiers.metadata.base import Metadata, MetadataBackend
from kvbench.tiers.metadata.breaker import Breaker
from kvbench.tiers.metadata.guarded import GuardedMetadata

# A service is asked in the time of a request, so it gets little; a lease is renewed three times in its life.
_DEFAULTS_S = {"timeout": 0.05, "lease": 30.0, "ttl": 86400.0}
_EXAMPLES = "sqlite:/var/lib/kvbench/metadata.db, etcd://127.0.0.1:2379/kvbench, redis://127.0.0.1:6379/0"


def open_metadata(spec: str, *, breaker: Breaker | None = None) -> Metadata:
    """Metadata as `spec` spells it: `sqlite:PATH`, `etcd://HOST:PORT/PREFIX` or `redis://HOST:PORT/DATABASE`, each with
    `?timeout=50ms&lease=30s&ttl=86400s` where others than these are wanted. Connects when it is first used.
    """
    scheme, colon, rest = spec.strip().partition(":")
    opener = _BACKENDS.get(scheme)
    if opener is None or not colon:
        near = difflib.get_close_matches(scheme, _BACKENDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"metadata {spec!r} has no known scheme{hint}; it is spelled like {_EXAMPLES}")
    address, _, query = rest.partition("?")
    seconds = _settings(query, spec)
    return GuardedMetadata(
        opener(address, spec, seconds), timeout_s=seconds["timeout"], renew_s=seconds["lease"] / 3, breaker=breaker
    )


def _settings(query: str, spec: str) -> dict[str, float]:
    seconds = dict(_DEFAULTS_S)
    seen: set[str] = set()
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _DEFAULTS_S:
            near = difflib.get_close_matches(key, _DEFAULTS_S, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UsageError(f"metadata {spec!r} has the unknown key {key!r}{hint}; its keys are timeout, lease, ttl")
        if key in seen:
            raise UsageError(f"metadata {spec!r} has the key {key!r} twice; keep one")
        seen.add(key)
        seconds[key] = parse_duration(value)
        if seconds[key] <= 0:
            raise UsageError(f"metadata {spec!r}: {key} is a duration above zero, got {value!r}")
    return seconds


def _sqlite(address: str, spec: str, seconds: dict[str, float]) -> MetadataBackend:
    from kvbench.tiers.metadata.sqlite import SqliteBackend

    path = unquote(address)
    if path.startswith("//"):  # sqlite:///var/lib/x.db, as a URL
        path = "/" + path.lstrip("/")
    if not path or path.endswith("/") or "\0" in path:
        raise UsageError(f"metadata {spec!r} names no file; write it like sqlite:/var/lib/kvbench/metadata.db")
    return SqliteBackend(Path(path), lease_s=seconds["lease"], ttl_s=seconds["ttl"], busy_s=seconds["timeout"])


def _etcd(address: str, spec: str, seconds: dict[str, float]) -> MetadataBackend:
    from kvbench.tiers.metadata.etcd import EtcdBackend

    host, port, path = _address(address, spec, 2379)
    return EtcdBackend(
        host,
        port,
        prefix=path or "kvbench",
        lease_s=seconds["lease"],
        ttl_s=seconds["ttl"],
        timeout_s=seconds["timeout"],
    )


def _redis(address: str, spec: str, seconds: dict[str, float]) -> MetadataBackend:
    from kvbench.tiers.metadata.redis import RedisBackend

    _, _, path = _address(address, spec, 6379)
    if path and not path.isdecimal():
        raise UsageError(f"metadata {spec!r}: what follows the address is a database number, got {path!r}")
    return RedisBackend(
        f"redis:{address}",
        prefix="kvbench-metadata",
        lease_s=seconds["lease"],
        ttl_s=seconds["ttl"],
        timeout_s=seconds["timeout"],
    )


def _address(address: str, spec: str, port: int) -> tuple[str, int, str]:
    try:
        parts = urlsplit(address)
        found = parts.port
    except ValueError as error:
        raise UsageError(f"metadata {spec!r}: {error}; it is spelled like {_EXAMPLES}") from error
    if not parts.hostname:
        raise UsageError(f"metadata {spec!r} names no host; it is spelled like {_EXAMPLES}")
    return parts.hostname, found or port, unquote(parts.path).strip("/")


_BACKENDS: dict[str, Callable[[str, str, dict[str, float]], MetadataBackend]] = {
    "sqlite": _sqlite,
    "etcd": _etcd,
    "redis": _redis,
}
