"""What the tests of remote tiers share: blocks, and the spellings of places on real servers."""

import functools
import itertools
import os
import random
from collections.abc import Sequence

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.tiers.base import Block, Outcome, Tier, Wanted
from tests.servers.processes import Server

IDENTITY = KvIdentity(
    model="demo", model_version="1", tokenizer_version="1", dtype="bf16", page_tokens=4, layers=(0, 2), attention="gqa"
)
BLOCK_BYTES = 100_001
_numbers = itertools.count(1)


def new_keys(count: int) -> tuple[BlockKey, ...]:
    """Keys that nothing else uses."""
    return block_keys([next(_numbers), os.getpid(), *range(4 * count - 2)], IDENTITY)


def new_blocks(count: int, num_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Blocks of random bytes under new keys."""
    draw = random.Random(next(_numbers))
    return [Block(key, memoryview(draw.randbytes(num_bytes))) for key in new_keys(count)]


def loaded(tier: Tier, blocks: Sequence[Block]) -> tuple[list[Outcome], list[bytes]]:
    """Outcomes and buffers of a load of these blocks."""
    buffers = [bytearray(block.data.nbytes) for block in blocks]
    outcomes = tier.load([Wanted(block.key, memoryview(buffer)) for block, buffer in zip(blocks, buffers, strict=True)])
    return outcomes, [bytes(buffer) for buffer in buffers]


def results(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.result for outcome in outcomes]


def assert_loads(tier: Tier, blocks: Sequence[Block]) -> None:
    """Every block comes back as it was stored."""
    outcomes, buffers = loaded(tier, blocks)
    assert results(outcomes) == ["ok"] * len(blocks), outcomes
    assert buffers == [bytes(block.data) for block in blocks]


def s3_prefix(server: Server) -> str:
    """BUCKET/PREFIX that nothing else uses; credentials are in the environment."""
    return f"{s3_bucket(server)}/{os.getpid()}/{next(_numbers)}"


@functools.cache
def s3_bucket(server: Server) -> str:
    """One bucket for all tests, since SeaweedFS makes seven volumes for each."""
    import asyncio

    from aiobotocore.session import get_session

    bucket = "kvbench-tests"

    async def make() -> None:
        async with get_session().create_client(
            "s3", endpoint_url=f"http://{server.address}", region_name="us-east-1"
        ) as client:
            await client.create_bucket(Bucket=bucket)

    asyncio.run(make())
    return bucket
