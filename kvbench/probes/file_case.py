"""Case "file-io": time an engine that loads from or stores to a real file; runs in the child."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB, format_bytes, seconds_from_ns
from kvbench.probes.affinity import disk_numa_node, stay_on_node
from kvbench.probes.device_memory import PAGE_BYTES, random_bytes_into
from kvbench.probes.load_sources import warn_direct_refused
from kvbench.probes.machine import filesystem_kind, huge_page_bytes, runs_in_a_virtual_machine
from kvbench.probes.scratch_file import MEMORY_FILESYSTEMS, ScratchFile, scratch_file, usable_file_bytes
from kvbench.probes.turns import monotonic, turns
from kvbench.tiers.file_engines.base import (
    Blocks,
    EngineSettings,
    EngineUnavailableError,
    FileEngine,
    aligned_buffer,
    slot_bytes_for,
)
from kvbench.tiers.file_engines.registry import open_engine
from kvbench.tiers.page_cache import PageCache

Emit = Callable[[dict[str, Any]], None]
_CHECKED_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCase:
    """What to move to or from `file`, which is made here and removed. A point is (bytes, bytes of a block).

    `fsync`: `none`, `fdatasync` after every block, or `batch`: once after the last block, under the clock.
    """

    file: str
    engine: str
    direction: Literal["load", "store"]
    direct: bool
    fsync: Literal["none", "fdatasync", "batch"]
    depth: int
    huge_pages: bool
    points: Sequence[Sequence[int]]
    repeats: int
    warmups: int
    file_bytes: int
    time_s: float


def measure(case: dict[str, Any], emit: Emit, *, allocate: Callable[..., memoryview] = aligned_buffer) -> None:
    """Times the transfers of a `FileCase` and emits one sample per transfer."""
    plan = FileCase(**case)

    def warn(code: str, message: str, remedy: str) -> None:
        emit({"record": "warning", "code": code, "message": message, "remedy": remedy})

    path = Path(plan.file)
    file_bytes = usable_file_bytes(path.parent, plan.file_bytes)
    points = _fitting(plan, file_bytes, warn)
    placement = stay_on_node(disk_numa_node(path.parent))
    emit({"record": "stage", "text": f"writing a file of {format_bytes(file_bytes)}"})
    with scratch_file(path, file_bytes, direct=plan.direct) as file:
        direct = file.direct_descriptor is not None
        if plan.direct and not direct:
            warn_direct_refused(path.parent, warn)
        kind = filesystem_kind(path.parent)
        if kind in MEMORY_FILESYSTEMS:
            warn(
                "file-in-memory",
                f"{path.parent} is {kind}: these bytes come from memory, not from a disk",
                "name a directory on the disk that the cache will use",
            )
        try:
            moves = _Moves(plan, file, points, allocate)
        except EngineUnavailableError as error:
            emit({"record": "skipped", "reason": str(error)})
            return
        with moves:
            emit({"record": "facts", "placement": placement, **moves.facts(kind)})
            emit({"record": "stage", "text": f"checking that bytes arrive by {plan.engine}"})
            moves.check()
            emit({"record": "stage", "text": f"timing {plan.engine} over {len(points)} sizes"})
            for seconds, size, blocks in moves.timed():
                emit({"record": "sample", "bytes": size, "segments": blocks, "seconds": seconds, "wire_s": None})
            moves.check()
            emit({"record": "facts", "placement": placement, **moves.facts(kind)})


def _fitting(plan: FileCase, file_bytes: int, warn: Callable[[str, str, str], None]) -> list[tuple[int, int]]:
    points = [(int(total), int(block)) for total, block in plan.points if total <= file_bytes]
    if not points:
        raise KvbenchError(
            f"no transfer of the plan fits a file of {format_bytes(file_bytes)}; free disk space, or give smaller sizes"
        )
    dropped = sorted({int(total) for total, _ in plan.points} - {total for total, _ in points})
    if dropped:
        warn(
            "sizes-dropped",
            f"transfers of {', '.join(map(format_bytes, dropped))} do not fit a file of {format_bytes(file_bytes)}",
            "free disk space, or read the bandwidth as that of smaller transfers",
        )
    return points


class _Moves:
    """One engine per block size over one ring of buffers, and the page cache of the file."""

    def __init__(
        self,
        plan: FileCase,
        file: ScratchFile,
        points: Sequence[tuple[int, int]],
        allocate: Callable[..., memoryview],
    ) -> None:
        self._plan, self._file, self._points = plan, file, points
        self._direct = file.direct_descriptor is not None and plan.engine != "mmap"
        self._descriptor = file.direct_descriptor if self._direct else file.descriptor
        self._cache = PageCache(file.descriptor, file.num_bytes)
        self._cache.drop()  # writing the file left it in the cache
        blocks = sorted({block for _, block in points})
        room = max(plan.depth * slot_bytes_for(blocks[-1]), min(_CHECKED_BYTES, file.num_bytes))
        self._buffer = allocate(room, huge_pages=plan.huge_pages)
        self._huge_ratio = min(huge_page_bytes() / room, 1.0) if plan.huge_pages else 0.0
        random_bytes_into(self._buffer, seed=2)
        self._ring_start = 0
        self._engine: FileEngine = self._opened(blocks[-1], self._buffer)  # here, so that a host without it is told so
        self._cursors = {block: _shuffled_blocks(file.num_bytes, block) for block in blocks}

    def _opened(self, block: int, buffer: memoryview) -> FileEngine:
        assert self._descriptor is not None
        return open_engine(
            self._plan.engine,
            EngineSettings(
                descriptor=self._descriptor,
                file_bytes=self._file.num_bytes,
                buffer=buffer,
                depth=self._plan.depth,
                slot_bytes=slot_bytes_for(block),
                direct=self._direct,
            ),
        )

    def _reopened(self, block: int) -> memoryview:
        """Opens the engine on the next part of the buffer and returns that part.

        Direct transfers depend on how a block's pages lie in physical memory, by up to a factor of two here. The ring
        walks through the buffer, so that a case does not stand or fall with the luck of one place.
        """
        ring_bytes = self._plan.depth * slot_bytes_for(block)
        if self._ring_start + ring_bytes > len(self._buffer):
            self._ring_start = 0
        ring = self._buffer[self._ring_start : self._ring_start + ring_bytes]
        self._ring_start += ring_bytes
        self._replace_engine(self._opened(block, ring))
        return ring

    def _replace_engine(self, engine: FileEngine) -> None:
        self._engine.close()
        self._engine = engine

    def __enter__(self) -> "_Moves":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._engine.close()

    def timed(self) -> Iterator[tuple[float, int, int]]:
        """Seconds, bytes and blocks of each transfer; the points take turns."""
        plan = self._plan
        for _ in range(plan.warmups):
            for point in self._points:
                self._transfer(*point)
        for point in turns(self._points, repeats=plan.repeats, time_s=plan.time_s, clock=monotonic):
            yield self._transfer(*point)

    def _transfer(self, total: int, block: int) -> tuple[float, int, int]:
        """One transfer over the blocks that were touched longest ago, with a cold cache."""
        plan, ring = self._plan, self._reopened(block)
        engine = self._engine
        offsets = [next(self._cursors[block]) for _ in range(total // block)]
        blocks = Blocks(
            direction=plan.direction,
            offsets=offsets,
            sizes=[block] * len(offsets),
            sync_each=plan.fsync == "fdatasync",
        )
        self._cool(engine, note=plan.direction == "load" and not self._direct)
        begin_ns = time.perf_counter_ns()
        engine.transfer(blocks)
        if plan.fsync == "batch":
            os.fdatasync(self._file.descriptor)
        seconds = seconds_from_ns(time.perf_counter_ns() - begin_ns)
        if plan.direction == "load" and self._direct:
            self._cache.note(0, self._file.num_bytes)
        if plan.direction == "store":
            self._check_stored(ring, offsets, block)
        return seconds, block * len(offsets), len(offsets)

    def _cool(self, engine: FileEngine, *, note: bool) -> None:
        if self._direct:
            return
        if self._plan.direction == "store":  # dirty pages cannot be dropped, and would be written under the clock
            os.fdatasync(self._file.descriptor)
        engine.cool()
        if note:
            self._cache.drop_and_note(0, self._file.num_bytes)
        else:
            self._cache.drop()

    def check(self) -> None:
        """Loads a part of the file by every engine to known places, and compares page by page."""
        if self._plan.direction == "store":  # every transfer is checked: see `_check_stored`
            return
        from crc32c import crc32c

        part = min(_CHECKED_BYTES, self._file.num_bytes, len(self._buffer))
        for block in self._cursors:
            self._replace_engine(self._opened(block, self._buffer))
            engine = self._engine
            cuts = [*range(0, part, block), part] if part % block and not self._direct else range(0, part + 1, block)
            spans = [(start, end - start) for start, end in pairwise(cuts)]
            random.Random(block).shuffle(spans)
            self._cool(engine, note=False)
            offsets, sizes = [start for start, _ in spans], [size for _, size in spans]
            engine.transfer(Blocks(direction="load", offsets=offsets, sizes=sizes, places=offsets))
            engine.show()
            covered = sum(sizes) // PAGE_BYTES
            for page in range(covered):
                found = crc32c(self._buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
                if found != self._file.checksums[page]:
                    raise KvbenchError(
                        f"page {page} of the file arrived in memory with other bytes by {self._plan.engine}; "
                        "do not trust this path, and check memory and disk for errors"
                    )

    def _check_stored(self, ring: memoryview, offsets: Sequence[int], block: int) -> None:
        """What was stored must be what some slot of the ring holds; at most 64 MiB are read back."""
        from crc32c import crc32c

        os.fdatasync(self._file.descriptor)
        self._engine.cool()
        self._cache.drop()
        slot = slot_bytes_for(block)
        known = {crc32c(ring[at * slot : at * slot + block]) for at in range(self._plan.depth)}
        for offset in offsets[: max(_CHECKED_BYTES // block, 1)]:
            if crc32c(os.pread(self._file.descriptor, block, offset)) not in known:
                raise KvbenchError(
                    f"{format_bytes(block)} stored at offset {offset} by {self._plan.engine} read back as other bytes; "
                    "do not trust this path, and check memory and disk for errors"
                )
        self._cache.drop()

    def facts(self, kind: str) -> dict[str, Any]:
        """Both ends, and whether loads were cold: how, and how that was seen."""
        plan, directory = self._plan, self._file.directory
        file = f"{directory} ({kind}, {'O_DIRECT' if self._direct else 'buffered'})"
        memory = "host memory" if plan.engine != "gds" else "cuda:0"
        if plan.huge_pages:
            memory += f", {self._huge_ratio:.0%} of it in huge pages"
        ran = [self._engine.what_ran()] if hasattr(self._engine, "what_ran") else []
        source, destination = (file, memory) if plan.direction == "load" else (memory, file)
        return {"source": source, "destination": destination, **self._coldness(kind, ran)}

    def _coldness(self, kind: str, ran: Sequence[str]) -> dict[str, Any]:
        how = "O_DIRECT bypasses the page cache" if self._direct else "the page cache was dropped before every transfer"
        evidence = "; ".join([how, *ran[-1:]])
        if kind in MEMORY_FILESYSTEMS:
            return {"cold": False, "cold_evidence": f"{kind} keeps its files in memory"}
        if self._plan.direction == "store":
            if not self._direct and self._plan.fsync == "none":
                return {"cold": False, "cold_evidence": "buffered stores without fsync end in the page cache"}
            return {"cold": None, "cold_evidence": f"{evidence}; a store has no cold state"}
        ratio = self._cache.most_resident_ratio
        if ratio is None:
            return {"cold": None, "cold_evidence": f"{evidence}; not seen yet, or this system cannot tell (no mincore)"}
        when = "after" if self._direct else "before"
        evidence += f"; mincore saw at most {ratio:.1%} of the file cached {when} a transfer"
        if runs_in_a_virtual_machine():
            evidence += "; caches of the hypervisor below cannot be seen"
        return {"cold": ratio < 0.01, "cold_evidence": evidence}


def _shuffled_blocks(file_bytes: int, block: int) -> Iterator[int]:
    """Offsets of all whole blocks in random order, again and again: pages of a KV cache lie scattered."""
    offsets = [start * block for start in range(file_bytes // block)]
    random.Random(block).shuffle(offsets)
    while True:
        yield from offsets
