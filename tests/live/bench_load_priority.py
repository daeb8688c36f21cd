"""How long loads take while the store queue is saturated: python tests/live/bench_load_priority.py [SECONDS]

Two tiers, dram over throttled(null:, bandwidth=200MB/s, latency=200us). Blocks of 64 KiB, loads of 8 blocks, stores in
batches of at most 256 KiB, a queue of 8 MiB that two threads keep full. Idle and saturated rounds alternate, so that a
change of the machine meets both. Prints the percentiles and the ratio of the 99th; exit status 1 above 2.
"""

import argparse
import sys
import threading
import time
from statistics import quantiles

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.core.units import KIB, MIB
from kvbench.tiers.registry import open_tier
from kvbench.tiers.tiered import TieredStore, TierSettings

BLOCK = 64 * KIB
BLOCKS_PER_LOAD = 8
SPEC = "throttled(null:, bandwidth=200MB/s, latency=200us)"
IDENTITY = KvIdentity(
    model="bench", model_version="", tokenizer_version="", dtype="bf16", page_tokens=1, layers=(0, 1), attention="gqa"
)


def keys(first: int, count: int) -> tuple[BlockKey, ...]:
    return tuple(block_keys([first + n], IDENTITY)[0] for n in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    top = open_tier("dram:1MiB", block_bytes=BLOCK)
    slow = open_tier(SPEC, block_bytes=BLOCK, name="slow")
    store = TieredStore(
        [TierSettings(tier=top, promote=False, enabled=False), TierSettings(tier=slow)],
        store_queue_bytes=8 * MIB,
        batch_bytes=4 * BLOCK,
        store_patience_s=0.25,
    )
    zeros = memoryview(bytes(BLOCK))
    wanted = keys(0, BLOCKS_PER_LOAD)
    store.store(wanted, [zeros] * BLOCKS_PER_LOAD)
    assert store.flush(10)
    into = [memoryview(bytearray(BLOCK)) for _ in range(BLOCKS_PER_LOAD)]
    saturate, stop = threading.Event(), threading.Event()
    numbers = iter(range(1_000_000, 10**9, 16))
    lock = threading.Lock()

    def feed() -> None:
        while not stop.is_set():
            if not saturate.wait(0.05):
                continue
            with lock:
                first = next(numbers)
            store.store(keys(first, 16), [zeros] * 16)

    feeders = [threading.Thread(target=feed) for _ in range(2)]
    for feeder in feeders:
        feeder.start()
    times: dict[str, list[float]] = {"idle": [], "saturated": []}
    queued: list[int] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, samples in times.items():
            if name == "saturated":
                saturate.set()
                while store.stats().tiers["slow"].queued_bytes < 7 * MIB:
                    time.sleep(0.005)
            else:
                saturate.clear()
                assert store.flush(10)
            round_end = time.monotonic() + min(1.0, seconds / 4)
            while time.monotonic() < round_end:
                begin = time.perf_counter()
                result = store.load(wanted, into)
                samples.append(time.perf_counter() - begin)
                assert result.loaded_prefix == BLOCKS_PER_LOAD
                if name == "saturated":
                    queued.append(store.stats().tiers["slow"].queued_bytes)
                time.sleep(0.002)
    stop.set()
    for feeder in feeders:
        feeder.join(10)
    stored = store.stats().tiers["slow"].stored_bytes
    store.close()
    p99 = {}
    for name, samples in times.items():
        cuts = quantiles(samples, n=100, method="inclusive")
        p99[name] = cuts[98]
        print(
            f"{name:9}  {len(samples):5} loads  p50 {cuts[49] * 1e3:6.2f} ms  p90 {cuts[89] * 1e3:6.2f} ms  "
            f"p99 {cuts[98] * 1e3:6.2f} ms  max {max(samples) * 1e3:6.2f} ms"
        )
    ratio = p99["saturated"] / p99["idle"]
    full = sum(size >= 7 * MIB for size in queued) / len(queued)
    print(f"queue at least 7 of 8 MiB at {full:.0%} of the saturated loads; {stored / MIB:.0f} MiB stored meanwhile")
    print(f"p99 saturated / idle: {ratio:.2f} (must stay below 2)")
    return int(ratio > 2)


if __name__ == "__main__":
    sys.exit(main())
