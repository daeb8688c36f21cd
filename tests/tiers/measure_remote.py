"""python -m tests.tiers.measure_remote: what each remote tier carries here, and what a look-up of metadata costs.

It starts the servers of the tests, so it needs what they need. Bandwidths are those of one caller with batches of 16
blocks, checksums included, best of three rounds; the first round of a server touches its memory for the first time.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvbench.core.units import KIB, MIB, format_bandwidth, format_bytes, format_duration
from kvbench.tiers.base import Tier, Wanted
from kvbench.tiers.metadata import Location, open_metadata
from kvbench.tiers.registry import open_tier
from tests.servers import shared
from tests.tiers.remote_places import new_blocks, new_keys, results, s3_prefix

_BATCH = 16
_ROUNDS = 3
_LOOKUPS = 1000


def main() -> None:
    folder = tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None)
    s3, store = shared.s3(), shared.mooncake()
    tiers = {
        "redis": f"redis://{shared.redis().address}/7?",
        "s3": f"s3://{s3_prefix(s3)}?endpoint=http://{s3.address}&",
        "mooncake": f"mooncake://{store.master.address}?",
        "nixl+posix": f"nixl+posix:{folder}/buffered?",
        "nixl+posix direct": f"nixl+posix:{folder}/direct?direct=1&io=uring&",
        "nixl+obj": f"nixl+obj://{s3_prefix(s3)}?endpoint=http://{s3.address}&",
    }
    for name, spelling in tiers.items():
        inside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if name == "mooncake":
            inside = store.inside
        for block_bytes in (256 * KIB, 4 * MIB):
            with inside():
                tier = open_tier(f"{spelling}timeout=60s", block_bytes=block_bytes)
            stored, read = _bandwidths(tier, block_bytes)
            tier.close()
            print(
                f"{name:20} {format_bytes(block_bytes):>10}  store {format_bandwidth(stored):>12}"
                f"  load {format_bandwidth(read):>12}"
            )
    services = {
        "sqlite": f"sqlite:{folder}/metadata.db",
        "redis": f"redis://{shared.redis().address}/6",
        "etcd": f"etcd://{shared.etcd().address}/measure",
    }
    for name, spelling in services.items():
        for keys_at_once in (1, 64):
            print(f"metadata {name:8} {keys_at_once:3} keys  {_lookups(spelling, keys_at_once)}")


def _bandwidths(tier: Tier, block_bytes: int) -> tuple[float, float]:
    best = [0.0, 0.0]
    for _ in range(_ROUNDS):
        blocks = new_blocks(_BATCH, block_bytes)
        buffers = [bytearray(block_bytes) for _ in blocks]
        wanted = [Wanted(block.key, memoryview(buffer)) for block, buffer in zip(blocks, buffers, strict=True)]
        begin_s = time.perf_counter()
        assert set(results(tier.store(blocks))) == {"ok"}
        stored_s = time.perf_counter()
        outcomes = tier.load(wanted)
        loaded_s = time.perf_counter()
        assert set(results(outcomes)) == {"ok"}
        assert all(buffer == block.data for block, buffer in zip(blocks, buffers, strict=True))
        best = [
            max(best[0], _BATCH * block_bytes / (stored_s - begin_s)),
            max(best[1], _BATCH * block_bytes / (loaded_s - stored_s)),
        ]
        tier.evict([block.key for block in blocks])
    return best[0], best[1]


def _lookups(spelling: str, keys_at_once: int) -> str:
    writer, reader = (open_metadata(f"{spelling}?timeout=5s") for _ in range(2))
    keys = new_keys(1000)
    writer.put(keys, Location(instance="measure", tier="dram"), MIB)
    for number in range(_LOOKUPS):
        start = number * 7 % (len(keys) - keys_at_once)
        assert None not in reader.find(keys[start : start + keys_at_once])
    stats = reader.stats()
    reader.close()
    writer.close()
    p50_s, p99_s = stats.lookup_p50_s or 0.0, stats.lookup_p99_s or 0.0
    kept = "kept" if stats.budget_kept else "not kept"
    return (
        f"p50 {format_duration(p50_s)}, p99 {format_duration(p99_s)}, budget {format_duration(stats.budget_s)} {kept}"
    )


if __name__ == "__main__":
    main()
