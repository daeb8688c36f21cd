from dataclasses import replace
from pathlib import Path

from kvbench.core.block_key import BlockKey
from kvbench.engines.builtin.tier_store import ServedTiers, open_tiers, tier_options
from tests.engines.builtin.serving import serving

SIZE = 4096
KEYS = [BlockKey(bytes(16), bytes([number]) * 32) for number in range(4)]


def opened(*specs: str, l1: str = "64KiB", policy: str = "write-through") -> ServedTiers:

    options = replace(tier_options(l1, specs, policy, "5s"), l1_in_host_memory=True)
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
            server.process.kill()  # stores are still on their way
            server.process.wait(10)
    assert cached[:3] == [0] * 3
    assert any(cached[-12:]), "nothing survived, so nothing was tried"
