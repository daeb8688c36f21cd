"""Case "remote": time values put into and got from a key-value or object store; runs in the child."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvbench.core.errors import KvbenchError
from kvbench.core.units import seconds_from_ns
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.turns import monotonic, turns
from kvbench.tiers.redis import open_redis_client, place_of
from kvbench.tiers.remote import StoreClient, StoreError
from kvbench.tiers.s3 import open_s3_client
from kvbench.tiers.spec import TierSpec, parse_tier_spec

Emit = Callable[[dict[str, Any]], None]
_TIMEOUT_S = 30.0


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


async def _open_redis(spec: TierSpec, depth: int) -> Store:
    client = await open_redis_client(spec, depth, timeout_s=_TIMEOUT_S)
    try:
        await client.check()
    except (StoreError, TimeoutError) as error:
        await client.close()
        raise KvbenchError(
            f"{place_of(spec)} does not answer ({error}); start it, or name another with "
            "--set paths=redis://HOST:PORT/0"
        ) from error
    return _Values(client)


async def _open_s3(spec: TierSpec, depth: int) -> Store:
    client = await open_s3_client(spec, depth, timeout_s=_TIMEOUT_S)
    try:
        await client.check()
    except (StoreError, TimeoutError) as error:
        await client.close()
        raise KvbenchError(
            f"s3://{spec.location} cannot be used ({error}); make the bucket, "
            "and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return _Values(client)


class _Values:
    """The values of a tier's client, which all have to be there."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key, value)

    async def get(self, key: str) -> bytes:
        value = await self._client.get(key)
        if value is None:
            raise KvbenchError(f"key {key} is gone; did the store evict it? give it more memory")
        return value

    async def delete(self, keys: Sequence[str]) -> None:
        await self._client.delete(keys)

    async def close(self) -> None:
        await self._client.close()


_STORES: dict[str, Callable[[TierSpec, int], Coroutine[Any, Any, Store]]] = {"redis": _open_redis, "s3": _open_s3}
