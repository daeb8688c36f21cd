"""Case "remote": time values put into and got from a key-value or object store; runs in the child."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvbench.core.errors import KvbenchError, MissingDependencyError
from kvbench.core.units import seconds_from_ns
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.turns import monotonic, turns
from kvbench.tiers.spec import TierSpec, parse_tier_spec

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCase:
    """Which store, and what to move. A point is (bytes, bytes of a value); `depth` requests are in flight."""

    spec: str
    direction: Literal["load", "store"]
    depth: int
    points: Sequence[Sequence[int]]
    repeats: int
    warmups: int
    time_s: float


class Store(Protocol):
    """A store of values by name."""

    async def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        ...

    async def get(self, key: str) -> bytes:
        """Loads a value."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Removes values, whether they exist or not."""
        ...

    async def close(self) -> None:
        """Ends the connections."""
        ...


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Times the transfers of a `RemoteCase` and emits one sample per transfer; its keys are removed at the end."""
    plan = RemoteCase(**case)
    asyncio.run(_measure(plan, emit))


async def _measure(plan: RemoteCase, emit: Emit) -> None:
    spec = parse_tier_spec(plan.spec)
    emit({"record": "stage", "text": f"connecting to {spec.location}"})
    store = await _STORES[spec.scheme](spec, plan.depth)
    prefix = f"kvbench-probe-{os.getpid()}"
    values = {int(segment): _value(int(segment)) for _, segment in plan.points}
    counts = dict.fromkeys(values, 0)
    for total, segment in plan.points:
        counts[int(segment)] = max(counts[int(segment)], int(total) // int(segment))
    keys = {segment: [f"{prefix}-{segment}-{index}" for index in range(count)] for segment, count in counts.items()}
    place = f"{spec.scheme}://{spec.location}"
    source, destination = (place, "host memory") if plan.direction == "load" else ("host memory", place)
    emit(
        {
            "record": "facts",
            "source": source,
            "destination": destination,
            "placement": "the store decides where its data lies",
            "cold": None,
            "cold_evidence": "what the store keeps in memory cannot be seen from here",
        }
    )
    try:
        emit({"record": "stage", "text": "storing the values to load, and checking them"})
        for segment, names in keys.items():
            await _all(plan.depth, [store.put(name, values[segment]) for name in names])
            for name in names[:1]:
                if await store.get(name) != values[segment]:
                    raise KvbenchError(f"{place}: a value of {segment} bytes came back changed; do not trust this path")
        emit({"record": "stage", "text": f"timing {len(plan.points)} sizes"})
        points = [(int(total), int(segment)) for total, segment in plan.points]
        for _ in range(plan.warmups):
            for point in points:
                await _transfer(plan, store, keys, values, point)
        for point in turns(points, repeats=plan.repeats, time_s=plan.time_s, clock=monotonic):
            seconds, count = await _transfer(plan, store, keys, values, point)
            emit(
                {
                    "record": "sample",
                    "bytes": count * point[1],
                    "segments": count,
                    "seconds": seconds,
                    "wire_s": None,
                }
            )
    finally:
        for names in keys.values():
            await store.delete(names)
        await store.close()


async def _transfer(
    plan: RemoteCase, store: Store, keys: dict[int, list[str]], values: dict[int, bytes], point: tuple[int, int]
) -> tuple[float, int]:
    total, segment = point
    names = random.sample(keys[segment], total // segment)
    value = values[segment]
    begin_ns = time.perf_counter_ns()
    if plan.direction == "store":
        await _all(plan.depth, [store.put(name, value) for name in names])
        return seconds_from_ns(time.perf_counter_ns() - begin_ns), len(names)
    loaded = await _all(plan.depth, [store.get(name) for name in names])
    seconds = seconds_from_ns(time.perf_counter_ns() - begin_ns)
    if any(got != value for got in loaded):
        raise KvbenchError(f"a value of {segment} bytes came back changed; do not trust this path")
    return seconds, len(names)


async def _all(depth: int, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of all coroutines, at most `depth` of them at the same time; the first failure ends them."""
    results: list[Any] = [None] * len(work)
    waiting = iter(enumerate(work))

    async def take() -> None:
        for index, one in waiting:
            results[index] = await one

    try:
        await asyncio.gather(*(take() for _ in range(min(depth, len(work)))))
    finally:
        for _, one in waiting:
            one.close()
    return results


def _value(num_bytes: int) -> bytes:
    value = bytearray(num_bytes)
    random_bytes_into(memoryview(value), seed=num_bytes)
    return bytes(value)


class _Redis:
    """Valkey and Redis, one connection per request in flight."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.set(key, value)

    async def get(self, key: str) -> bytes:
        value: bytes | None = await self._client.get(key)
        if value is None:
            raise KvbenchError(f"key {key} is gone; did the store evict it? give it more memory")
        return value

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), 1000):
            await self._client.delete(*keys[start : start + 1000])

    async def close(self) -> None:
        await self._client.aclose()


async def _open_redis(spec: TierSpec, depth: int) -> Store:
    try:
        from redis import asyncio as redis
        from redis.exceptions import RedisError
    except ImportError as error:
        raise MissingDependencyError("redis", "redis", f"a probe of {spec}") from error
    pool = redis.BlockingConnectionPool.from_url(f"redis://{spec.location}", max_connections=depth, timeout=30)
    client = redis.Redis(connection_pool=pool)
    try:
        await client.ping()
    except (RedisError, OSError) as error:
        raise KvbenchError(
            f"redis://{spec.location} does not answer ({error}); start it, or name another with "
            "--set paths=redis://HOST:PORT/0"
        ) from error
    return _Redis(client)


class _S3:
    """Any store that speaks S3; credentials come from the environment, as for every S3 client."""

    def __init__(self, context: Any, client: Any, bucket: str, prefix: str) -> None:
        self._context, self._client, self._bucket, self._prefix = context, client, bucket, prefix

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=value)

    async def get(self, key: str) -> bytes:
        answer = await self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
        async with answer["Body"] as body:
            value: bytes = await body.read()
        return value

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)


async def _open_s3(spec: TierSpec, depth: int) -> Store:
    try:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise MissingDependencyError("aiobotocore", "s3", f"a probe of {spec}") from error
    options = dict(spec.options)
    bucket, _, prefix = spec.location.partition("/")
    context = get_session().create_client(
        "s3",
        endpoint_url=options.get("endpoint"),
        region_name=options.get("region"),
        config=AioConfig(max_pool_connections=depth),
    )
    client = await context.__aenter__()
    try:
        await client.head_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        await context.__aexit__(None, None, None)
        raise KvbenchError(
            f"s3://{bucket} cannot be used ({error}); make the bucket, and set AWS_ACCESS_KEY_ID and the secret key"
        ) from error
    return _S3(context, client, bucket, f"{prefix.rstrip('/')}/" if prefix else "")


_STORES: dict[str, Callable[[TierSpec, int], Coroutine[Any, Any, Store]]] = {"redis": _open_redis, "s3": _open_s3}
