import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import UsageError
from kvbench.engines.builtin.tier_store import ServedTiers, open_tiers, tier_options, tier_rules
from kvbench.tiers.registry import open_tier
from kvbench.tiers.spec import parse_tier_spec
from kvbench.tiers.tiered import TierSettings
from tests.engines.builtin.serving import serving

SIZE = 4096
KEYS = [BlockKey(bytes(16), bytes([number]) * 32) for number in range(4)]


def opened(*specs: str, l1: str = "64KiB", policy: str = "write-through", **more: Any) -> ServedTiers:
    options = replace(tier_options(l1, specs, policy, "5s", **more), l1_in_host_memory=True)
    return open_tiers(options, block_bytes=SIZE)


def blocks(tiers: ServedTiers) -> dict[str, int]:
    assert tiers.flush(10)
    return {count.name: count.blocks for count in tiers.counts()}


def store(tiers: ServedTiers) -> None:
    assert tiers.store is not None
    tiers.store.store(KEYS, [memoryview(bytes([number]) * SIZE) for number in range(4)])


def test_two_tiers_of_one_kind_get_two_names_in_the_order_given() -> None:
    tiers = opened("dram:1MiB", "dram:2MiB", "throttled(dram:3MiB, latency=1us)")
    assert [(tier.name, tier.capacity_bytes) for tier in tiers.settings()] == [
        ("hbm", 65536),
        ("dram", 2**20),
        ("dram2", 2 * 2**20),
        ("dram3", 3 * 2**20),
    ]
    tiers.close(5)


def test_the_policy_is_that_of_the_tiers_below_l1() -> None:
    for policy, below in (("write-through", 4), ("write-through-selective", 0), ("write-back", 0)):
        tiers = opened("dram:1MiB", policy=policy)
        store(tiers)
        assert blocks(tiers) == {"hbm": 4, "dram": below}, policy
        assert [tier.policy for tier in tiers.settings()] == ["write-through", policy]
        tiers.close(5)


def test_without_l1_the_first_tier_takes_every_block_and_without_any_there_is_no_store() -> None:
    tiers = opened("dram:1MiB", l1="0")
    store(tiers)
    assert blocks(tiers) == {"dram": 4}
    assert {name: what.blocks for name, what in tiers.clear(None).items()} == {"dram": 4}
    tiers.close(5)
    none = opened(l1="off")
    assert (none.store, none.settings(), none.counts(), none.clear(None), none.flush(0)) == (None, (), (), {}, True)


def test_a_load_that_takes_too_long_is_computed_instead() -> None:
    prompt = list(range(100))
    slow = "throttled(dram:1MiB, latency=1s)"
    with serving("--null", "--l1", "0", "--tier", slow, "--load-timeout", "100ms") as server:
        first = server.complete(prompt=prompt, max_tokens=5).json()
        assert server.call("/drain", {}).status == 200
        again = server.complete(prompt=prompt, max_tokens=5).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["choices"] == first["choices"]
        assert server.metrics()['kvbench:tier_timeouts_total{tier="dram"}'] > 0


def test_a_server_killed_while_it_stores_never_gives_a_wrong_token_afterwards(tmp_path: Path) -> None:
    prompts = [[1000 * number + token for token in range(16 * 40 + 3)] for number in range(12)]
    with serving("--null", "--l1", "0") as plain:
        expected = [plain.complete(prompt=prompt, max_tokens=8).json()["choices"] for prompt in prompts]
    options = ("--null", "--l1", "0", "--tier", f"file:{tmp_path / 'kv'}?size=16MiB")
    cached = []
    for asked in (3, 7, 12, 12):
        with serving(*options) as server:
            for prompt, choices in zip(prompts[:asked], expected, strict=False):
                reply = server.complete(prompt=prompt, max_tokens=8).json()
                assert reply["choices"] == choices
                cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
                if prompt is prompts[0]:
                    server.call("/drain", {})
            server.process.kill()  # stores are still on their way
            server.process.wait(10)
    assert cached[:3] == [0] * 3
    assert any(cached[-12:]), "nothing survived, so nothing was tried"


def rules(spelling: str, **more: Any) -> TierSettings:
    spec = parse_tier_spec(spelling)
    options = tier_options("0", (spelling,), "write-through", "5s", **more)
    with closing(open_tier("null:", block_bytes=SIZE)) as tier:
        return tier_rules(tier, spec, "write-back", options)


@pytest.mark.parametrize(
    ("spelling", "timeout_s"),
    [("hbm:1MiB", None), ("dram:1MiB", None), ("throttled(dram:1MiB, latency=1us)", 5.0), ("file:/nowhere", 5.0)],
)
def test_memory_is_not_timed_and_what_may_be_slow_is(spelling: str, timeout_s: float | None) -> None:
    assert rules(spelling).load_timeout_s == timeout_s


@pytest.mark.parametrize(
    ("spelling", "shared"),
    [("dram:1MiB?shared=x", True), ("faulty(s3://b/p?endpoint=http://127.0.0.1:1)", True), ("redis://h:1/0", True)],
)
def test_a_tier_is_shared_where_metadata_says_what_others_put_there(spelling: str, shared: bool) -> None:
    assert rules(spelling, metadata="sqlite:/nowhere/m.db").shared is shared
    assert not rules(spelling).shared


def test_every_rule_of_the_command_line_reaches_the_store() -> None:
    found = rules("dram:1MiB", eviction="lfu", cooldown="2s", ttl="1min")
    assert (found.eviction, found.cooldown_s, found.ttl_s, found.write) == ("lfu", 2.0, 60.0, "write-back")


def test_a_block_that_the_tier_below_did_not_keep_is_counted_in_one_place() -> None:
    failing = "faulty(dram:1MiB, store_fail=1)"
    tiers = opened("dram:16KiB", failing, l1="0", policy="write-back")
    more = [BlockKey(bytes(16), bytes([100 + number]) * 32) for number in range(4)]
    assert tiers.store is not None
    for keys in (KEYS, more):
        tiers.store.store(keys, [memoryview(bytes(SIZE))] * 4)
        assert tiers.flush(10)
    upper, lower = tiers.counts()
    assert upper.evicted == upper.lost >= 4
    assert (upper.dropped, lower.dropped, lower.lost) == (0, 0, 0)
    assert lower.failures == upper.lost
    tiers.close(5)


def test_spans_say_what_the_tiers_did(tmp_path: Path) -> None:
    tiers = opened("dram:1MiB", spans=tmp_path / "spans.jsonl")
    store(tiers)
    tiers.close(5)
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    blocks_into = {
        name: sum(line["num_blocks"] for line in lines if line["to_tier"] == name) for name in ("hbm", "dram")
    }
    assert blocks_into == {"hbm": 4, "dram": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": "fifo"}, "there is no eviction 'fifo'; choose one of lru, lfu, score"),
        ({"ttl": "0s"}, "--ttl '0s' must be above zero"),
        ({"cooldown": "5"}, "duration '5'"),
        ({"metadata": "sqlite:/tmp/m.db"}, "no tier is one that several servers use"),
        ({"metadata": "zookeeper:x"}, "metadata 'zookeeper:x' has no known scheme"),
        ({"spans": Path("/nowhere/spans")}, "--spans /nowhere/spans: No such file or directory"),
    ],
)
def test_a_rule_that_makes_no_sense_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened("dram:1MiB", **options)
