"""Runs the file tier between the samples of `kvbench probe file`: the same engine, block, depth and O_DIRECT.

    python tests/live/bench_file_tier.py DIRECTORY [PAIRS] [huge] [ENGINE, DIRECTION or BLOCK such as 128KiB…]

The case is the one that the command's child runs. Its samples and the tier's alternate as A B B A, so that the two of a
pair are a moment apart and a drift disturbs both alike. Both move 64 MiB per sample: blocks in random order between a
file of 256 MiB and the same page-aligned memory. The tier also computes or checks the CRC32C of every block and writes
headers. With `huge`, that memory lies in huge pages, as `huge_pages: [1]` of a plan has it; without, as it comes.
Loads are cold: mincore looks at the tier's file after each (O_DIRECT) or before (mmap, whose pages are dropped).

The configurations take three turns, each time with new files and new memory, and a third of the pairs in each.

Exit code 1: a median of paired ratios is under 0.90.
"""

import contextlib
import gc
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.core.block_key import BlockKey
from kvbench.core.units import MIB, format_bytes, parse_bytes
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.file_case import FileCase, measure
from kvbench.tiers.base import Block, Tier, Wanted
from kvbench.tiers.file.directory import FILE_NAME
from kvbench.tiers.file_engines.base import aligned_buffer
from kvbench.tiers.page_cache import PageCache
from kvbench.tiers.registry import open_tier

ENGINES = ("psync", "aio", "io_uring", "mmap")
DIRECTIONS = ("load", "store")
BLOCKS = ("128KiB", "1MiB", "4MiB")
FILE_BYTES, SAMPLE_BYTES = 256 * MIB, 64 * MIB
LEAST_RATIO = 0.90
TURNS = 3


class TierSide:
    """A full tier, of which a sample loads or stores a part."""

    def __init__(self, folder: Path, *, engine: str, block_bytes: int, depth: int, huge_pages: bool) -> None:
        self._spec = f"file:{folder}?size={FILE_BYTES}B&io={engine}&depth={depth}"
        self._engine, self._block_bytes, self._folder, self._depth = engine, block_bytes, folder, depth
        self._tier: Tier = open_tier(self._spec, block_bytes=block_bytes)
        self._buffer = aligned_buffer(SAMPLE_BYTES, huge_pages=huge_pages)
        random_bytes_into(self._buffer, seed=3)
        self._places = [
            self._buffer[start : start + block_bytes] for start in range(0, SAMPLE_BYTES - block_bytes + 1, block_bytes)
        ]
        chance = random.Random(1)
        self._keys = [BlockKey(chance.randbytes(16), chance.randbytes(32)) for _ in range(FILE_BYTES // block_bytes)]
        for start in range(0, len(self._keys), len(self._places)):
            self._store(self._keys[start : start + len(self._places)])
        chance.shuffle(self._keys)
        self._next = self._ring_start = 0
        self.most_resident = 0.0

    def _store(self, keys: Sequence[BlockKey]) -> None:
        outcomes = self._tier.store([Block(key, data) for key, data in zip(keys, self._places, strict=False)])
        assert {outcome.result for outcome in outcomes} == {"ok"}, outcomes
        self._sync()

    @contextlib.contextmanager
    def _file(self) -> Iterator[int]:
        descriptor = os.open(self._folder / FILE_NAME, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _sync(self) -> None:
        with self._file() as descriptor:
            os.fdatasync(descriptor)

    def sample(self, direction: str) -> float:
        """Bytes per second of the next part."""
        keys = [self._keys[(self._next + at) % len(self._keys)] for at in range(len(self._places))]
        self._next += len(keys)
        return self._load_sample(keys) if direction == "load" else self._store_sample(keys)

    def _load_sample(self, keys: Sequence[BlockKey]) -> float:
        self._cool()
        wanted = [Wanted(key, into) for key, into in zip(keys, self._places, strict=True)]
        begin = time.perf_counter()
        outcomes = self._tier.load(wanted)
        seconds = time.perf_counter() - begin
        assert {outcome.result for outcome in outcomes} == {"ok"}, outcomes
        if self._engine != "mmap":
            self._look(drop=False)
        return len(keys) * self._block_bytes / seconds

    def _cool(self) -> None:
        if self._engine != "mmap":
            return
        self._tier.close()  # a mapping keeps its pages
        gc.collect()
        self._tier = open_tier(self._spec, block_bytes=self._block_bytes)
        self._look(drop=True)

    def _look(self, *, drop: bool) -> None:
        with self._file() as descriptor:
            size = os.fstat(descriptor).st_size
            cache = PageCache(descriptor, size)
            if drop:
                cache.drop_and_note(0, size)
            else:
                cache.note(0, size)
            self.most_resident = max(self.most_resident, cache.most_resident_ratio or 0.0)

    def _store_sample(self, keys: Sequence[BlockKey]) -> float:
        self._tier.evict(keys)
        self._sync()
        self._cool()
        ring = self._next_ring()
        blocks = [Block(key, ring[at % len(ring)]) for at, key in enumerate(keys)]
        begin = time.perf_counter()
        outcomes = self._tier.store(blocks)
        seconds = time.perf_counter() - begin
        assert {outcome.result for outcome in outcomes} == {"ok"}, outcomes
        self._sync()
        return len(keys) * self._block_bytes / seconds

    def _next_ring(self) -> Sequence[memoryview]:
        """As in the probe: a ring that the CPU's cache may hold, each time in another part of the buffer."""
        if self._ring_start + self._depth > len(self._places):
            self._ring_start = 0
        ring = self._places[self._ring_start : self._ring_start + self._depth]
        self._ring_start += self._depth
        return ring

    def memory(self, num_bytes: int, *, huge_pages: bool) -> memoryview:
        """The buffer that the engine is to use too: how its pages lie decides as much as who moves the bytes."""
        del huge_pages
        return self._buffer[:num_bytes]

    def close(self) -> None:
        self._tier.close()


def paired_ratios(
    folder: Path, *, engine: str, direction: Any, block_bytes: int, depth: int, pairs: int, huge_pages: bool
) -> tuple[list[float], list[float], float]:
    """The tier's bandwidth over the engine's of every pair, the engine's bandwidths, and the share seen cached."""
    tier = TierSide(folder / "tier", engine=engine, block_bytes=block_bytes, depth=depth, huge_pages=huge_pages)
    engine_rates: list[float] = []
    tier_rates: list[float] = []
    refusals: list[str] = []

    def emit(record: dict[str, Any]) -> None:
        if record["record"] == "sample":
            engine_rates.append(record["bytes"] / record["seconds"])
            if len(engine_rates) % 2:  # A B B A
                tier_rates.extend(tier.sample(direction) for _ in range(2))
        elif record["record"] in ("skipped", "warning"):
            refusals.append(str(record))

    tier.sample(direction)
    case = FileCase(
        file=str(folder / "engine.dat"),
        engine=engine,
        direction=direction,
        direct=engine != "mmap",
        fsync="none",
        depth=depth,
        huge_pages=huge_pages,
        points=[(SAMPLE_BYTES, block_bytes)],
        repeats=pairs,
        warmups=1,
        file_bytes=FILE_BYTES,
        time_s=600.0,
    )
    try:
        measure(asdict(case), emit, allocate=tier.memory)
    finally:
        tier.close()
    if refusals:
        raise SystemExit("; ".join(refusals))
    ratios = [mine / theirs for mine, theirs in zip(tier_rates, engine_rates, strict=False)]
    return ratios, engine_rates, tier.most_resident


def print_row(engine: str, direction: str, block: str, parts: Sequence[tuple[list[float], list[float], float]]) -> bool:
    """One line of a configuration; True where it is low."""
    ranked = sorted(ratio for ratios, _, _ in parts for ratio in ratios)
    rates = [rate for _, engine_rates, _ in parts for rate in engine_rates]
    middle, turns = median(ranked), ", ".join(f"{median(ratios):.2f}" for ratios, _, _ in parts)
    cached = f", {max(seen for _, _, seen in parts):.1%} of the file seen cached" if direction == "load" else ""
    low = middle < LEAST_RATIO
    print(
        f"{engine:9} {direction:6} {format_bytes(parse_bytes(block)):>8}  {middle:.2f} "
        f"({ranked[len(ranked) // 4]:.2f} to {ranked[-1 - len(ranked) // 4]:.2f}; by turn {turns}) "
        f"engine {median(rates) / 1e9:.2f} GB/s{cached}{'  LOW' if low else ''}",
        flush=True,
    )
    return low


def main(arguments: Sequence[str]) -> int:
    """Prints one line per configuration."""
    directory = Path(arguments[0] if arguments else ".")
    pairs = int(arguments[1]) if len(arguments) > 1 else 21
    words = arguments[2:]
    engines = [name for name in ENGINES if name in words] or list(ENGINES)
    directions = [name for name in DIRECTIONS if name in words] or list(DIRECTIONS)
    blocks = [name for name in BLOCKS if name in words] or list(BLOCKS)
    print(f"bandwidth of tier / engine, median of {pairs} paired ratios (middle half), checksums included")
    low = 0
    configurations = list(itertools.product(engines, directions, blocks))
    found: dict[tuple[str, str, str], list[tuple[list[float], list[float], float]]] = {}
    for turn in range(TURNS):
        for engine, direction, block in configurations:
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                part = paired_ratios(
                    Path(folder),
                    engine=engine,
                    direction=direction,
                    block_bytes=parse_bytes(block),
                    depth=16,
                    pairs=-(-pairs // TURNS),
                    huge_pages="huge" in words,
                )
            found.setdefault((engine, direction, block), []).append(part)
            if turn == TURNS - 1:
                low += print_row(engine, direction, block, found[engine, direction, block])
    total = len(configurations)
    print(f"{total - low} of {total} at {LEAST_RATIO:.2f} or more")
    return int(low > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
