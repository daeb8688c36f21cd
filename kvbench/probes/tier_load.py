"""Case "tier load into device memory": time real loads from host memory or a real file; runs in the child."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any, Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.units import format_bytes, seconds_from_ns
from kvbench.probes.device_memory import PAGE_BYTES, DeviceMemory, open_device_memory
from kvbench.probes.load_sources import HostPool, Source, Warn, source_file
from kvbench.probes.machine import available_memory_bytes, last_level_cache_bytes
from kvbench.probes.scratch_file import usable_file_bytes

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoadCase:
    """What to load, how often, and the bounds: `pool_bytes` of memory per pool, `file_bytes` of disk, `time_s`.

    `file` is the path of the file to make and remove; it is empty for `dram`.
    """

    tier: Literal["dram", "file"]
    file: str
    io: Literal["psync", "mmap"]
    direct: bool
    device: str
    sizes_bytes: Sequence[int]
    warmups: int
    repeats: int
    concurrency: int
    pool_bytes: int
    file_bytes: int
    time_s: float


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Times the loads that a `TierLoadCase` describes and emits one sample per load."""
    plan = TierLoadCase(**case)

    def warn(code: str, message: str, remedy: str) -> None:
        emit({"record": "warning", "code": code, "message": message, "remedy": remedy})

    pool_bytes = _pool_bytes(plan)
    file_bytes = usable_file_bytes(Path(plan.file).parent, plan.file_bytes) if plan.tier == "file" else pool_bytes
    sizes = _fitting_sizes(plan, min(pool_bytes, file_bytes), warn)
    with contextlib.ExitStack() as stack:
        emit({"record": "stage", "text": "preparing memory"})
        memory = open_device_memory(plan.device, pool_bytes)
        source: Source
        if plan.tier == "dram":
            source = HostPool(memory, pool_bytes, warn)
        else:
            emit({"record": "stage", "text": f"writing a file of {format_bytes(file_bytes)}"})
            source = stack.enter_context(
                source_file(
                    Path(plan.file),
                    file_bytes,
                    memory,
                    io=plan.io,
                    direct=plan.direct,
                    readers=plan.concurrency,
                    largest_load_bytes=sizes[-1],
                    warn=warn,
                )
            )
        emit({"record": "facts", "destination": memory.name, **source.facts()})
        emit({"record": "stage", "text": f"timing loads of {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"})
        for size, seconds in _timed_loads(plan, source, memory, sizes, pool_bytes):
            emit({"record": "sample", "bytes": size * plan.concurrency, "seconds": seconds})
        emit({"record": "facts", "destination": memory.name, **source.facts()})


def _pool_bytes(plan: TierLoadCase) -> int:
    """Room for two of the largest loads and for four last-level caches, within the plan and the free memory."""
    wanted = max(4 * (last_level_cache_bytes() or 0), 2 * plan.concurrency * max(plan.sizes_bytes))
    free = available_memory_bytes()
    pool_bytes = min(wanted, plan.pool_bytes) if free is None else min(wanted, plan.pool_bytes, free // 4)
    return pool_bytes - pool_bytes % PAGE_BYTES


def _fitting_sizes(plan: TierLoadCase, room_bytes: int, warn: Warn) -> list[int]:
    """The sizes of which every reader can take two in turn; the others are named in a warning."""
    sizes = sorted(size for size in plan.sizes_bytes if 2 * size * plan.concurrency <= room_bytes)
    dropped = sorted(set(plan.sizes_bytes) - set(sizes))
    if len(sizes) < 2:
        raise KvbenchError(
            f"fewer than two sizes of the plan fit twice into {format_bytes(room_bytes)} with {plan.concurrency} "
            "reader(s); free memory or disk space, or give smaller sizes"
        )
    if dropped:
        warn(
            "sizes-dropped",
            f"loads of {', '.join(map(format_bytes, dropped))} do not fit twice into {format_bytes(room_bytes)}",
            "free memory or disk space, or read the bandwidth as that of smaller loads",
        )
    return sizes


def _timed_loads(
    plan: TierLoadCase, source: Source, memory: DeviceMemory, sizes: Sequence[int], pool_bytes: int
) -> Iterator[tuple[int, float]]:
    """Seconds of each load. Sizes take turns, so that a disturbance touches all of them and an early end loses none."""
    deadline = time.monotonic() + plan.time_s
    cursor = 0
    with ThreadPoolExecutor(plan.concurrency) as readers:
        for repeat in range(-plan.warmups, plan.repeats):
            for size in sizes:
                if repeat > 0 and time.monotonic() > deadline:
                    return
                if cursor + plan.concurrency * size > pool_bytes:
                    cursor = 0
                targets = [cursor + reader * size for reader in range(plan.concurrency)]
                cursor += plan.concurrency * size
                seconds = _load_seconds(readers, source, memory, size, targets, pool_bytes)
                if repeat >= 0:
                    yield size, seconds


def _load_seconds(
    readers: ThreadPoolExecutor,
    source: Source,
    memory: DeviceMemory,
    size: int,
    targets: Sequence[int],
    pool_bytes: int,
) -> float:
    """Seconds from the first reader's start to the last one's end; the bytes are compared after the clock stops.

    Each reader first loads one page elsewhere: comparing the load before has pushed the code that loads out of the
    CPU's caches, which made a load of 64 KiB five times slower here.
    """
    offsets = [source.next_offset(size) for _ in targets]
    for offset in offsets:
        source.prepare(offset, size)
    barrier = Barrier(len(targets))

    def load(reader: int) -> tuple[int, int]:
        source.load(reader, source.num_bytes - PAGE_BYTES, PAGE_BYTES, memory, pool_bytes - PAGE_BYTES)
        barrier.wait()
        begin_ns = time.perf_counter_ns()
        source.load(reader, offsets[reader], size, memory, targets[reader])
        return begin_ns, time.perf_counter_ns()

    spans = [load(0)] if len(targets) == 1 else list(readers.map(load, range(len(targets))))
    for offset, target in zip(offsets, targets, strict=True):
        if not source.arrived(offset, size, memory, target):
            raise KvbenchError(
                f"{format_bytes(size)} loaded from offset {offset} arrived in device memory with other bytes; "
                "do not trust this path, and check memory and disk for errors"
            )
    return seconds_from_ns(max(end for _, end in spans) - min(begin for begin, _ in spans))
