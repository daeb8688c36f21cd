"""What every remote tier promises, against real servers: the bytes come back, or a counted refusal does."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.tiers.base import Block, Tier, Wanted
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.envelope import HEADER_BYTES, damage, header_of
from kvbench.tiers.registry import open_tier
from kvbench.tiers.spec import parse_tier_spec
from tests.tiers.remote_places import (
    BLOCK_BYTES,
    assert_loads,
    loaded,
    new_blocks,
    new_keys,
    results,
    s3_prefix,
)

KINDS = ["redis", "s3", "mooncake", "nixl+posix", "nixl+obj"]


@dataclass
class Place:
    """A tier's spelling, how to open it, and a way around the tier to what it has stored."""

    spec: str
    open: Callable[..., Tier]
    raw_get: Callable[[Tier, BlockKey], bytes]
    raw_put: Callable[[Tier, BlockKey, bytes], None]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind: str = request.param
    opened: list[Tier] = []

    def open_(more: str = "", block_bytes: int = BLOCK_BYTES) -> Tier:
        join = "&" if "?" in spec else "?"
        with inside():
            opened.append(open_tier(f"{spec}{join}timeout=20s{more}", block_bytes=block_bytes))
        return opened[-1]

    import contextlib

    inside: Callable[[], Any] = contextlib.nullcontext
    get, put = _around_client()
    if kind == "redis":
        spec = f"redis://{request.getfixturevalue('redis_server').address}/1?prefix={tmp_path.name}"
    elif kind == "mooncake":
        store = request.getfixturevalue("mooncake_store")
        inside = store.inside
        spec = f"mooncake://{store.master.address}?buffer=8MiB"
        get, put = _around_mooncake()
    elif kind == "nixl+posix":
        spec = f"nixl+posix:{tmp_path}/blocks?buffer=1MiB"
        get, put = _around_files()
    else:
        server = request.getfixturevalue("s3_server")
        spec = f"{'s3' if kind == 's3' else 'nixl+obj'}://{s3_prefix(server)}?endpoint=http://{server.address}"
        if kind == "nixl+obj":
            get, put = _around_objects()
    yield Place(spec, open_, get, put)
    for tier in opened:
        tier.close()


def _around_client() -> tuple[Any, Any]:
    """Through the tier's own connection."""
    import asyncio

    def run(tier: Any, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, tier._loop).result(20)

    def get(tier: Any, key: BlockKey) -> bytes:
        value: bytes = run(tier, tier._client.get(str(key)))
        return value

    def put(tier: Any, key: BlockKey, value: bytes) -> None:
        run(tier, tier._client.put(str(key), value))

    return get, put


def _around_mooncake() -> tuple[Any, Any]:
    def run(tier: Any, work: Any) -> Any:
        return tier._session.calls.run(lambda: work(tier._session.client._client), 20)

    def get(tier: Any, key: BlockKey) -> bytes:
        value: bytes = run(tier, lambda client: client.get(str(key)))
        return value

    def put(tier: Any, key: BlockKey, value: bytes) -> None:
        run(tier, lambda client: client.remove(str(key), True))
        assert run(tier, lambda client: client.put(str(key), value)) == 0

    return get, put


def _around_files() -> tuple[Any, Any]:
    def path(tier: Any, key: BlockKey) -> Path:
        found: Path = tier._session.client._places._path(key)
        return found

    def put(tier: Any, key: BlockKey, value: bytes) -> None:
        path(tier, key).parent.mkdir(parents=True, exist_ok=True)
        path(tier, key).write_bytes(value)

    return lambda tier, key: path(tier, key).read_bytes(), put


def _around_objects() -> tuple[Any, Any]:
    def run(tier: Any, work: Any) -> Any:
        return tier._session.calls.run(lambda: tier._session.client._places._run(work), 20)

    def get(tier: Any, key: BlockKey) -> bytes:
        value: bytes = run(tier, tier._session.client._places._client.get(str(key)))
        return value

    def put(tier: Any, key: BlockKey, value: bytes) -> None:
        run(tier, tier._session.client._places._client.put(str(key), value))

    return get, put


def test_blocks_of_several_sizes_go_in_and_come_out_and_are_counted(place: Place) -> None:
    tier = place.open()
    blocks = [one for size in (1, 4095, 4096, 65_537, BLOCK_BYTES) for one in new_blocks(2, size)]
    keys, total = [block.key for block in blocks], sum(block.data.nbytes for block in blocks)
    outcomes, _ = loaded(tier, blocks)
    assert results(outcomes) == ["miss"] * 10, outcomes
    assert results(tier.store(blocks)) == ["ok"] * 10
    assert results(tier.store(blocks)) == ["exists"] * 10
    assert_loads(tier, blocks)
    assert tier.contains([*keys, *new_keys(1)]) == [True] * 10 + [False]
    assert tier.evict(keys[:4]) == [True] * 4
    assert tier.evict(keys[:5]) == [False] * 4 + [True]
    assert tier.contains(keys) == [False] * 5 + [True] * 5
    listed = {entry.key: entry.num_bytes for entry in tier.entries()}
    wanted = {block.key: block.data.nbytes for block in blocks[5:]}
    assert {key: listed.get(key) for key in wanted} == wanted
    stats = tier.stats()
    assert (stats.stored_blocks, stats.stored_bytes, stats.loaded_blocks, stats.loaded_bytes) == (10, total, 10, total)
    assert (stats.misses, stats.evicted_blocks, stats.corrupt, stats.timeouts, stats.failures) == (10, 5, 0, 0, 0)
    assert (stats.blocks, stats.used_bytes) == (5, sum(wanted.values()))


def test_another_client_finds_the_blocks(place: Place) -> None:
    one, blocks = place.open(), new_blocks(3)
    assert results(one.store(blocks)) == ["ok"] * 3
    one.close()
    assert results(one.store(blocks)) == ["failed"] * 3, "closed"
    other = place.open()
    assert other.contains([block.key for block in blocks]) == [True] * 3
    assert_loads(other, blocks)
    assert results(other.store(blocks)) == ["exists"] * 3


def test_a_batch_larger_than_the_staging_memory_or_the_concurrency_is_whole(place: Place) -> None:
    tier, blocks = place.open(), new_blocks(120, 30_000)
    assert results(tier.store(blocks)) == ["ok"] * 120
    assert_loads(tier, blocks)
    assert tier.evict([block.key for block in blocks]) == [True] * 120


def _flip(stored: bytes, at: int) -> bytes:
    return stored[:at] + bytes([stored[at] ^ 0x10]) + stored[at + 1 :]


def test_whatever_else_is_stored_is_corrupt_dropped_and_counted(place: Place) -> None:
    tier = place.open()
    draw = random.Random(3)
    damages: list[Callable[[bytes], bytes]] = [
        lambda stored: _flip(stored, HEADER_BYTES + draw.randrange(BLOCK_BYTES)),
        lambda stored: _flip(stored, draw.randrange(HEADER_BYTES)),
        lambda stored: _flip(stored, len(stored) - 1),
        lambda stored: stored[:-1],
        lambda stored: stored[: len(stored) // 2],
        lambda stored: stored[: HEADER_BYTES - 1],
        lambda stored: stored[:HEADER_BYTES],
        lambda stored: stored + b"x" if len(stored) % 4096 else stored[:-7],
        lambda stored: b"somebody else's object, of any length whatsoever" * 9,
        lambda stored: bytes(len(stored)),
    ]
    blocks = new_blocks(len(damages) + 2)
    assert results(tier.store(blocks)) == ["ok"] * len(blocks)
    for block, damage_of in zip(blocks, damages, strict=False):
        place.raw_put(tier, block.key, damage_of(place.raw_get(tier, block.key)))
    first, second = blocks[-2:]  # swapped: each is whole, under the other's name
    one, other = place.raw_get(tier, first.key), place.raw_get(tier, second.key)
    place.raw_put(tier, first.key, other)
    place.raw_put(tier, second.key, one)
    outcomes, _ = loaded(tier, blocks)
    assert results(outcomes) == ["corrupt"] * len(blocks), outcomes
    assert all(outcome.reason for outcome in outcomes)
    assert tier.stats().corrupt == len(blocks)
    assert results(loaded(tier, blocks)[0]) == ["miss"] * len(blocks), "dropped"
    assert results(tier.store(blocks)) == ["ok"] * len(blocks)
    assert_loads(tier, blocks)


def test_damage_in_one_block_of_a_batch_leaves_the_others(place: Place) -> None:
    tier, blocks = place.open(), new_blocks(5)
    tier.store(blocks)
    place.raw_put(tier, blocks[2].key, place.raw_get(tier, blocks[2].key)[:-100])
    outcomes, buffers = loaded(tier, blocks)
    assert results(outcomes) == ["ok", "ok", "corrupt", "ok", "ok"]
    assert [bytes(block.data) for block in blocks[3:]] == buffers[3:]


def test_a_wrong_checksum_of_the_caller_is_never_served(place: Place) -> None:
    tier, (block,) = place.open(), new_blocks(1)
    lying = Block(block.key, block.data, crc32c_of(block.data) ^ 1)
    tier.store([lying])
    assert results(loaded(tier, [block])[0]) == ["corrupt"]


def test_a_buffer_of_another_length_is_refused_and_the_block_kept(place: Place) -> None:
    tier, blocks = place.open(), new_blocks(2, 5000)
    tier.store(blocks)
    outcomes = tier.load(
        [Wanted(blocks[0].key, memoryview(bytearray(4999))), Wanted(blocks[1].key, memoryview(bytearray(5001)))]
    )
    assert results(outcomes) == ["failed", "failed"]
    assert_loads(tier, blocks)


def test_blocks_that_do_not_fit_are_refused_and_a_full_tier_says_so(place: Place) -> None:
    tier = place.open("&size=250KiB")
    (large,), (empty,) = new_blocks(1, BLOCK_BYTES + 1), new_blocks(1, 0)
    assert results(tier.store([large, empty])) == ["failed", "failed"]
    blocks = new_blocks(3)
    assert results(tier.store(blocks)) == ["ok", "ok", "full"]
    assert tier.stats().capacity_bytes == 250 * 1024
    assert tier.evict([blocks[0].key]) == [True]
    assert results(tier.store(blocks[2:])) == ["ok"]
    assert_loads(tier, blocks[1:])


def test_threads_that_share_a_tier_get_their_own_bytes(place: Place) -> None:
    tier, wrong = place.open(), []
    sets = [new_blocks(6, 20_000 + 1000 * number) for number in range(4)]

    def work(blocks: list[Block]) -> None:
        for _ in range(3):
            tier.store(blocks)
            outcomes, buffers = loaded(tier, blocks)
            if results(outcomes) != ["ok"] * 6 or buffers != [bytes(block.data) for block in blocks]:
                wrong.append(outcomes)

    threads = [threading.Thread(target=work, args=(blocks,)) for blocks in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_a_replica_count_is_passed_to_mooncake(mooncake_store: Any) -> None:
    for wanted in (1, 2):
        with mooncake_store.inside():
            tier: Any = open_tier(
                f"mooncake://{mooncake_store.master.address}?replicas={wanted}&buffer=1MiB&timeout=20s",
                block_bytes=BLOCK_BYTES,
            )
        (block,) = new_blocks(1)
        assert results(tier.store([block])) == ["ok"]
        session = tier._session
        assert session.client.replicas(block.key, tier._call_of(session)) == wanted
        tier.close()


def test_a_new_mooncake_client_lists_the_store_through_the_port_of_its_master(mooncake_store: Any) -> None:
    blocks = new_blocks(3)
    for number in (1, 2):
        with mooncake_store.inside():
            tier = open_tier(
                f"mooncake://{mooncake_store.master.address}?buffer=1MiB&timeout=20s"
                f"&metrics=http://127.0.0.1:{mooncake_store.metrics_port}",
                block_bytes=BLOCK_BYTES,
            )
        if number == 1:
            tier.store(blocks)
        else:
            listed = {entry.key: entry.num_bytes for entry in tier.entries()}
            assert {block.key: listed.get(block.key) for block in blocks} == {
                block.key: BLOCK_BYTES for block in blocks
            }
        tier.close()


@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("io", ["aio", "uring", "posix_aio"])
def test_nixl_moves_files_in_each_of_its_ways(io: str, direct: int, tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12", reason="needs the nixl extra")
    spec = f"nixl+posix:{tmp_path}/{io}?io={io}&direct={direct}&buffer=1MiB"
    for _ in range(2):
        tier, blocks = open_tier(spec, block_bytes=BLOCK_BYTES), new_blocks(5)
        assert results(tier.store(blocks)) == ["ok"] * 5
        assert_loads(tier, blocks)
        tier.close()


@pytest.mark.parametrize(
    ("spec", "module", "extra"),
    [
        ("s3://bucket", "aiobotocore.session", "s3"),
        ("redis://127.0.0.1:1/0", "redis", "redis"),
        ("mooncake://127.0.0.1:1", "mooncake.store", "mooncake"),
        ("nixl+posix:/nowhere", "nixl_cu12", "nixl"),
    ],
)
def test_a_missing_client_names_the_extra(spec: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvbenchError, match=rf"pip install 'kvbench\[{extra}\]'"):
        open_tier(spec, block_bytes=1)


def test_a_password_is_in_no_message() -> None:
    pytest.importorskip("redis", reason="needs the redis extra")
    tier = open_tier("redis://user:secret@127.0.0.1:9/0?timeout=1s", block_bytes=BLOCK_BYTES)
    outcomes, _ = loaded(tier, new_blocks(1))
    tier.close()
    assert "127.0.0.1:9" in outcomes[0].reason
    assert "secret" not in outcomes[0].reason


def test_a_staging_buffer_without_room_for_one_block_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12", reason="needs the nixl extra")
    with pytest.raises(UsageError, match=r"holds no block of 1.00 MiB .* give buffer=1028KiB"):
        open_tier(f"nixl+posix:{tmp_path}?buffer=1MiB", block_bytes=2**20)
    with pytest.raises(UsageError, match=r"HOST:PORT"):
        open_tier(parse_tier_spec("mooncake://somewhere"), block_bytes=1)


def test_every_field_of_an_envelope_is_checked() -> None:
    (block,), (key,) = new_blocks(1, 1000), new_keys(1)
    stored = header_of(block.key, 1000, crc32c_of(block.data)) + block.data
    assert damage(stored, block.key) == ""
    assert "is block" in damage(stored, key)
    for at in range(len(stored)):
        assert damage(_flip(stored, at), block.key) != "", at
    for length in range(len(stored)):
        assert damage(stored[:length], block.key) != "", length
