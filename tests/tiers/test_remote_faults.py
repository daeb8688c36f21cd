"""Servers that hang, reset, stop half-way, refuse, answer 503 or start late cost counted refusals and no block."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.tiers.base import Block, Tier
from kvbench.tiers.registry import open_tier
from tests.servers import start
from tests.servers.processes import free_ports
from tests.servers.proxy import Fault, Proxy, proxied
from tests.servers.start import MooncakeStore
from tests.tiers.remote_places import BLOCK_BYTES, assert_loads, loaded, new_blocks, results, s3_prefix

TIMEOUT_S = 1.0
DEADLINE_S = 3.0
# How much longer than the deadline a batch may take on a machine that others use as well.
SLACK_S = 8.0
RECOVERY_S = 60.0
EVERY_FAULT = os.environ.get("KVBENCH_EVERY_FAULT") == "1"
FAULTS = {
    "hang": Fault("hang"),
    "hang in the body": Fault("hang", after_bytes=50_000),
    "reset at once": Fault("reset"),
    "reset at byte 400": Fault("reset", after_bytes=400),
    "half a body": Fault("end", after_bytes=BLOCK_BYTES // 2),
    "slower than the timeout": Fault("delay", seconds=3 * TIMEOUT_S),
    "503": Fault("503"),
}


@pytest.fixture(params=["redis", "s3", "nixl+obj"])
def proxy_and_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Proxy, Tier]]:
    kind: str = request.param
    server = request.getfixturevalue("redis_server" if kind == "redis" else "s3_server")
    with proxied(server) as proxy:
        keys = f"timeout={TIMEOUT_S:g}s&deadline={DEADLINE_S:g}s"
        if kind == "redis":
            spec = f"redis://{proxy.address}/2?prefix={tmp_path.name}&{keys}"
        else:
            spec = f"{kind}://{s3_prefix(server)}?endpoint=http://{proxy.address}&{keys}"
        tier = open_tier(spec, block_bytes=BLOCK_BYTES)
        yield proxy, tier
        tier.close()


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    begin_s = time.monotonic()
    result = call()
    assert time.monotonic() - begin_s < limit_s
    return result


def until_stored(tier: Tier, blocks: Sequence[Block]) -> None:
    """Stores what an owner would store again after a refusal."""
    until_s = time.monotonic() + RECOVERY_S
    while left := [
        block
        for block, outcome in zip(blocks, tier.store(blocks), strict=True)
        if outcome.result not in ("ok", "exists")
    ]:
        assert time.monotonic() < until_s, tier.store(left)
        time.sleep(0.1)


def until_loaded(tier: Tier, blocks: Sequence[Block]) -> None:
    """Every block comes back once the server does."""
    until_s = time.monotonic() + RECOVERY_S
    while "ok" not in results(outcomes := loaded(tier, blocks[:1])[0]):
        assert results(outcomes)[0] in ("timeout", "failed"), "a block that was stored is lost"
        assert time.monotonic() < until_s, outcomes
        time.sleep(0.1)
    until_s = time.monotonic() + RECOVERY_S
    while min(results(outcomes := loaded(tier, blocks)[0])) != "ok":
        assert not {"miss", "corrupt"} & set(results(outcomes)), outcomes
        assert time.monotonic() < until_s, outcomes


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_costs_refusals_and_no_block(proxy_and_tier: tuple[Proxy, Tier], fault: str) -> None:
    proxy, tier = proxy_and_tier
    if tier.name == "nixl" and fault not in ("hang", "half a body") and not EVERY_FAULT:
        pytest.skip("its look-ups are those of s3; KVBENCH_EVERY_FAULT=1 runs it")
    blocks, more = new_blocks(6), new_blocks(3)
    until_stored(tier, blocks)
    until_loaded(tier, blocks)
    before = tier.stats()
    proxy.fault = FAULTS[fault]
    outcomes = within(DEADLINE_S + SLACK_S, lambda: loaded(tier, blocks)[0])
    stored = within(DEADLINE_S + SLACK_S, lambda: tier.store(more))
    held = within(DEADLINE_S + SLACK_S, lambda: tier.contains([block.key for block in blocks]))
    entries = list(within(20 * DEADLINE_S + SLACK_S, tier.entries)) if fault == "reset at once" else []
    after = tier.stats()
    if fault not in ("hang in the body", "half a body"):  # what is shorter than that goes through
        assert set(results(outcomes)) <= {"timeout", "failed"}, outcomes
        assert set(results(stored)) <= {"timeout", "failed"}, stored
        assert held == [False] * 6
        assert entries == []
    else:
        assert set(results(outcomes)) <= {"timeout", "failed"}, outcomes
    assert all(outcome.reason for outcome in [*outcomes, *stored] if outcome.result in ("timeout", "failed"))
    refused = sum(result in ("timeout", "failed") for result in results([*outcomes, *stored])) + held.count(False)
    refused += fault == "reset at once"
    assert after.timeouts + after.failures - before.timeouts - before.failures == refused
    assert (after.misses, after.corrupt) == (before.misses, before.corrupt)
    assert after.loaded_blocks == before.loaded_blocks
    proxy.fault = Fault()
    proxy.break_all()
    until_loaded(tier, blocks)
    until_stored(tier, more)
    assert_loads(tier, more)


def test_a_server_that_refuses_and_comes_back_is_picked_up(proxy_and_tier: tuple[Proxy, Tier]) -> None:
    proxy, tier = proxy_and_tier
    proxy.refuse()
    blocks = new_blocks(4)
    assert results(within(DEADLINE_S + SLACK_S, lambda: tier.store(blocks))) == ["failed"] * 4
    begin_s = time.monotonic()
    rounds = [tier.load([]) or loaded(tier, blocks)[0] for _ in range(20)]
    assert time.monotonic() - begin_s < 20, "a dead server is not asked every time"
    assert all(set(results(outcomes)) <= {"failed", "timeout"} for outcomes in rounds)
    proxy.accept()
    until_stored(tier, blocks)
    until_loaded(tier, blocks)
    proxy.refuse()
    assert set(results(loaded(tier, blocks)[0])) <= {"failed", "timeout"}
    proxy.accept()
    until_loaded(tier, blocks)


def test_a_delay_within_the_timeout_changes_nothing(proxy_and_tier: tuple[Proxy, Tier]) -> None:
    proxy, tier = proxy_and_tier
    blocks = new_blocks(2)
    proxy.fault = Fault("delay", seconds=0.01)
    until_stored(tier, blocks)
    until_loaded(tier, blocks)


def test_a_redis_that_is_started_late_is_picked_up(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tier, blocks = open_tier(f"redis://127.0.0.1:{port}/0?timeout=2s", block_bytes=BLOCK_BYTES), new_blocks(3)
    assert results(tier.store(blocks)) == ["failed"] * 3
    assert list(tier.entries()) == []
    with start.redis(tmp_path, port=port):
        until_stored(tier, blocks)
        assert_loads(tier, blocks)
    assert set(results(loaded(tier, blocks)[0])) <= {"failed", "timeout"}
    tier.close()


def test_a_redis_without_room_says_full_and_keeps_what_it_has(tmp_path: Path) -> None:
    with start.redis(tmp_path, max_memory="4mb") as server:
        tier = open_tier(f"redis://{server.address}/0", block_bytes=2**20)
        blocks = new_blocks(8, 2**20)
        found = [results(tier.store([block]))[0] for block in blocks]
        assert found[0] == "ok"
        assert found[-1] == "full"
        assert set(found) == {"ok", "full"}
        assert_loads(tier, [block for block, result in zip(blocks, found, strict=True) if result == "ok"])
        tier.close()


def test_a_missing_bucket_and_missing_credentials_are_reasons(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = open_tier(f"s3://nowhere-at-all/x?endpoint=http://{s3_server.address}", block_bytes=BLOCK_BYTES)
    (block,) = new_blocks(1)
    (outcome,), _ = loaded(tier, [block])
    assert (outcome.result, "make the bucket" in outcome.reason) == ("failed", True)
    tier.close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tier = open_tier(f"s3://nowhere-at-all/x?endpoint=http://{s3_server.address}", block_bytes=BLOCK_BYTES)
    (outcome,), _ = loaded(tier, [block])
    assert (outcome.result, "AWS_ACCESS_KEY_ID" in outcome.reason) == ("failed", True)
    tier.close()


def test_a_mooncake_master_that_hangs_is_left_alone_and_picked_up_again(mooncake_store: MooncakeStore) -> None:
    store = mooncake_store
    with store.inside():
        tier = open_tier(
            f"mooncake://{store.master.address}?timeout=2s&deadline=6s&buffer=1MiB", block_bytes=BLOCK_BYTES
        )
        blocks = new_blocks(3)
        until_stored(tier, blocks)
        os.kill(store.master.process.pid, signal.SIGSTOP)
        try:
            before = tier.stats()
            outcomes = within(6 + SLACK_S, lambda: loaded(tier, blocks)[0])
            again = within(6 + SLACK_S, lambda: loaded(tier, blocks)[0])
            assert set(results([*outcomes, *again])) <= {"timeout", "failed"}
            after = tier.stats()
            assert after.timeouts + after.failures - before.timeouts - before.failures == 6
        finally:
            os.kill(store.master.process.pid, signal.SIGCONT)
        until_loaded(tier, blocks)
        tier.close()


def test_a_mooncake_store_that_is_not_there_is_a_refusal_and_quick() -> None:
    pytest.importorskip("mooncake.store", reason="needs the mooncake extra")
    (port,) = free_ports(1)
    tier = open_tier(f"mooncake://127.0.0.1:{port}?buffer=1MiB", block_bytes=BLOCK_BYTES)
    begin_s = time.monotonic()
    for _ in range(5):
        assert results(loaded(tier, new_blocks(1))[0]) == ["failed"]
    assert time.monotonic() - begin_s < 5
    assert tier.stats().failures == 5
    tier.close()


def test_a_directory_that_vanishes_under_nixl_is_misses_and_refusals(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12", reason="needs the nixl extra")
    home = tmp_path / "blocks"
    tier, blocks = open_tier(f"nixl+posix:{home}?buffer=1MiB", block_bytes=BLOCK_BYTES), new_blocks(3)
    until_stored(tier, blocks)
    home.rename(tmp_path / "away")
    home.write_text("a file where a directory was")
    assert results(loaded(tier, blocks)[0]) == ["miss"] * 3
    assert set(results(tier.store(new_blocks(1)))) == {"failed"}
    home.unlink()
    (tmp_path / "away").rename(home)
    until_loaded(tier, blocks)
    tier.close()
