"""`kvbench probe remote` against real servers, through the clients of the tiers."""

from collections.abc import Callable
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.units import KIB
from kvbench.probes import remote_case
from tests.servers.processes import Server
from tests.tiers.remote_places import s3_bucket, s3_prefix


def records_of(spec: str, direction: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    remote_case.measure(
        {
            "spec": spec, "direction": direction, "depth": 2, "points": [(64 * KIB, 16 * KIB), (256 * KIB, 64 * KIB)],
            "repeats": 2, "warmups": 1, "time_s": 5.0,
        },
        records.append,
    )  # fmt: skip
    return records


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_real_servers_are_timed_and_left_empty(kind: str, direction: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(f"{kind}_server")
    spec = (
        f"redis://{server.address}/5"
        if kind == "redis"
        else f"s3://{s3_prefix(server)}?endpoint=http://{server.address}"
    )
    records = records_of(spec, direction)
    samples = [(record["bytes"], record["segments"]) for record in records if record["record"] == "sample"]
    assert samples == [(64 * KIB, 4), (256 * KIB, 4)] * 2
    assert all(record["seconds"] > 0 for record in records if record["record"] == "sample")
    left: Callable[[Server], int] = _keys_in_redis if kind == "redis" else _objects_in_bucket
    assert left(server) == 0


def _keys_in_redis(server: Server) -> int:
    import redis

    client: Any = redis.Redis.from_url(f"redis://{server.address}/5")
    return int(client.dbsize())


def _objects_in_bucket(server: Server) -> int:
    import asyncio

    from aiobotocore.session import get_session

    async def listed() -> list[str]:
        async with get_session().create_client(
            "s3", endpoint_url=f"http://{server.address}", region_name="us-east-1"
        ) as client:
            page = await client.list_objects_v2(Bucket=s3_bucket(server))
        return [one["Key"] for one in page.get("Contents", ())]

    return sum("kvbench-probe-" in name for name in asyncio.run(listed()))


def test_a_bucket_that_is_not_there_is_a_reason(s3_server: Server) -> None:
    with pytest.raises(KvbenchError, match=r"s3://nowhere-at-all cannot be used .* make the bucket"):
        records_of(f"s3://nowhere-at-all?endpoint=http://{s3_server.address}", "load")
