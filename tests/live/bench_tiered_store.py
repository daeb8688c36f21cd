"""What the tiered store itself costs: python tests/live/bench_tiered_store.py

Looks up 500 keys over three tiers (fresh key objects, as an engine has them), and stores and loads blocks of 4 KiB in
host memory in calls of 50, with spans off and on. Prints medians; exit status 1 when the look-up takes 1 ms or more.
"""

import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.core.units import KIB
from kvbench.tiers.registry import open_tier
from kvbench.tiers.tiered import MemorySpans, TieredStore, TierSettings

BLOCK = 4 * KIB
IDENTITY = KvIdentity(
    model="bench", model_version="", tokenizer_version="", dtype="bf16", page_tokens=16, layers=(0, 1), attention="gqa"
)


def open_store(spans: MemorySpans | None) -> TieredStore:
    tiers = [open_tier("dram:64MiB", block_bytes=BLOCK, name=name) for name in ("hbm", "dram", "file")]
    return TieredStore([TierSettings(tier=tier) for tier in tiers], workers=0, spans=spans)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def lookup_s(store: TieredStore, keys: tuple[BlockKey, ...]) -> float:
    fresh = [BlockKey(bytes(bytearray(key.identity)), bytes(bytearray(key.prefix))) for key in keys]
    return seconds(lambda: store.lookup(fresh))


def costs_s(store: TieredStore, keys: tuple[BlockKey, ...]) -> tuple[float, float, float]:
    """Seconds per block: store in the first tier, write to a lower one, load. The first round touches the memory."""
    data = [memoryview(bytes(BLOCK))] * 50
    into = [memoryview(bytearray(BLOCK)) for _ in range(50)]
    parts = [keys[begin : begin + 50] for begin in range(0, 500, 50)]
    stores: list[float] = []
    writes: list[float] = []
    loads: list[float] = []
    for _ in range(6):
        store.clear()
        for part in parts:
            stores.append(seconds(lambda: store.store(part, data)) / 50)  # noqa: B023 - called at once
            writes.append(seconds(lambda: store.flush(60)) / 100)
        loads += [seconds(lambda: store.load(part, into)) / 50 for part in parts]  # noqa: B023
    return median(stores[10:]), median(writes[20:]), median(loads[10:])


def main() -> int:
    keys = block_keys(range(500 * 16), IDENTITY)
    for name, spans in (("spans off", None), ("spans on", MemorySpans())):
        new, write, load = (cost * 1e6 for cost in costs_s(open_store(spans), keys))
        print(f"{name:9}  per block: store {new:5.1f} µs, each lower tier {write:5.1f} µs, load {load:5.1f} µs")
    store = open_store(None)
    store.store(keys, [memoryview(bytes(BLOCK))] * len(keys))
    lookups = [lookup_s(store, keys) for _ in range(300)]
    print(
        f"look-up of 500 keys over 3 tiers: median {median(lookups) * 1e6:.0f} µs, "
        f"p99 {quantiles(lookups, n=100)[98] * 1e6:.0f} µs (the median must stay below 1000)"
    )
    return int(median(lookups) >= 1e-3)


if __name__ == "__main__":
    sys.exit(main())
