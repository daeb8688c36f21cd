import threading
import time
from collections.abc import Callable

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.core.units import MIB
from kvbench.tiers.base import Block, Tier, Wanted
from kvbench.tiers.null import NullTier
from kvbench.tiers.registry import open_tier
from kvbench.tiers.throttled import SerialLink, ThrottledTier
from tests.tiers.storing_child import key_of

ZEROS = bytes(MIB)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def blocks(count: int) -> list[Block]:
    return [Block(key_of(number), memoryview(ZEROS)) for number in range(count)]


def wanted(count: int) -> list[Wanted]:
    return [Wanted(key_of(number), memoryview(bytearray(MIB))) for number in range(count)]


def taken_s(clock: Clock, call: Callable[[], object]) -> float:
    begin = clock()
    call()
    return clock() - begin


def test_a_call_takes_as_long_as_its_three_constants_say() -> None:
    clock = Clock()
    tier = ThrottledTier(
        NullTier(block_bytes=MIB),
        bytes_per_s=1e9,
        latency_s=0.01,
        segment_latency_s=0.002,
        clock=clock,
        sleep=clock.sleep,
    )
    assert taken_s(clock, lambda: tier.store(blocks(3))) == pytest.approx(0.01 + 3 * 0.002 + 3 * MIB / 1e9)
    assert taken_s(clock, lambda: tier.load(wanted(2))) == pytest.approx(0.01 + 2 * 0.002 + 2 * MIB / 1e9)
    missing = [Wanted(BlockKey(bytes(16), bytes(32)), memoryview(bytearray(MIB)))]
    assert taken_s(clock, lambda: tier.load(missing)) == pytest.approx(0.01)  # a miss moves nothing
    assert taken_s(clock, lambda: tier.store(blocks(3))) == pytest.approx(0.01)  # nor what is there already
    assert taken_s(clock, lambda: tier.contains([key_of(0)])) == pytest.approx(0.01)
    assert tier.stats().loaded_bytes == 2 * MIB


def test_the_link_keeps_its_own_time_when_sleepers_wake_up_late() -> None:
    now_s = [0.0]

    def oversleep(seconds: float) -> None:
        now_s[0] += seconds + 0.3

    link = SerialLink(lambda: now_s[0], oversleep)
    assert link.use(1.0, load=True, since=0.0) == pytest.approx(1.0)
    assert link.use(1.0, load=True, since=0.5) == pytest.approx(2.0)  # it was waiting since 0.5
    assert link.use(1.0, load=True, since=5.0) == pytest.approx(6.0)  # nobody used the link between


def test_loads_go_before_queued_stores() -> None:
    link = SerialLink()
    done: list[str] = []
    begun = threading.Event()

    def use(name: str, seconds: float, *, load: bool) -> None:
        begun.set()
        link.use(seconds, load=load, since=time.monotonic())
        done.append(name)

    stores = [threading.Thread(target=use, args=(f"store {n}", 0.15), kwargs={"load": False}) for n in range(3)]
    for thread in stores:
        thread.start()
    assert begun.wait(5)
    use("load", 0.01, load=True)
    assert done == ["load"]  # though 0.45 s of stores came first
    for thread in stores:
        thread.join(10)
    assert len(done) == 4


def test_two_transfers_share_the_bandwidth() -> None:
    tier = open_tier("throttled(null:, bandwidth=20MB/s)", block_bytes=MIB)
    begin = time.monotonic()
    threads = [
        threading.Thread(target=tier.store, args=([Block(key_of(number), memoryview(ZEROS))],)) for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - begin >= 2 * MIB / 20e6


def test_a_wrapper_is_called_as_what_it_wraps() -> None:
    tier: Tier = open_tier("throttled(faulty(dram:1MiB, seed=1), latency=1us)", block_bytes=1000)
    assert tier.name == "dram"
    assert open_tier("null:", block_bytes=10, name="l4").name == "l4"
    tier.close()
