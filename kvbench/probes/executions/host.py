"""Copies from host memory to host memory: what a host without a GPU can measure, and never a GPU number."""

import ctypes
from typing import TYPE_CHECKING, Any

from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.executions.base import Direction
from kvbench.probes.segments import Segments
from kvbench.tiers.file_engines.base import address_of, aligned_buffer

if TYPE_CHECKING:
    import numpy as np


class _HostPools:
    """Two page-aligned, pre-faulted pools."""

    source = "host memory"
    target = "host memory"

    def __init__(self, *, direction: Direction = "h2h", pool_bytes: int, device: int = 0) -> None:
        del direction, device  # there is one kind of memory here
        self.from_pool, self.to_pool = aligned_buffer(pool_bytes), aligned_buffer(pool_bytes)
        random_bytes_into(self.from_pool, seed=1)
        self.from_address, self.to_address = address_of(self.from_pool), address_of(self.to_pool)

    def wire_s(self, prepared: Any) -> float | None:
        """None: a host copy runs inside the call, so no launch can be hidden."""
        del prepared
        return None

    def clear_target(self) -> None:
        ctypes.memset(self.to_address, 0, len(self.to_pool))

    def differs(self, segments: Segments) -> int | None:
        """Compares every segment, the later of two that overlap at their target."""
        return first_difference(segments, self.from_pool, self.to_pool)

    def close(self) -> None:
        """The pools go with the object."""


def first_difference(segments: Segments, source: memoryview, target: memoryview) -> int | None:
    """Index of the first segment whose bytes are not at its target; a target named twice holds the last of them."""
    size = segments.segment_bytes
    last = dict(zip(segments.targets, segments.sources, strict=True))
    for index, (origin, place) in enumerate(zip(segments.sources, segments.targets, strict=True)):
        if last[place] == origin and source[origin : origin + size] != target[place : place + size]:
            return index
    return None


class BlockCopy(_HostPools):
    """One memcpy of all bytes; segments only say how many."""

    def prepare(self, segments: Segments) -> int:
        return segments.total_bytes

    def copy(self, prepared: int) -> None:
        """One call of the C library."""
        ctypes.memmove(self.to_address, self.from_address, prepared)

    def differs(self, segments: Segments) -> int | None:
        """Compares the block."""
        size = segments.total_bytes
        return None if self.from_pool[:size] == self.to_pool[:size] else 0


class SegmentLoop(_HostPools):
    """One memcpy per segment, called from Python: the interpreter's share is part of the cost."""

    def prepare(self, segments: Segments) -> list[tuple[int, int, int]]:
        size = segments.segment_bytes
        return [
            (self.to_address + target, self.from_address + source, size)
            for source, target in zip(segments.sources, segments.targets, strict=True)
        ]

    def copy(self, prepared: list[tuple[int, int, int]]) -> None:
        """One call of the C library per segment."""
        memmove = ctypes.memmove
        for target, source, size in prepared:
            memmove(target, source, size)


class Gather(_HostPools):
    """One native call over all segments: `take` into a contiguous target, else an indexed assignment."""

    def prepare(self, segments: Segments) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Any, Any] | None":
        """Rows of one word type over both pools, and the index of each segment; None for no segments."""
        import math

        import numpy as np

        if not len(segments):
            return None
        size = segments.segment_bytes
        step = math.gcd(size, *segments.sources, *segments.targets)
        if step == size:
            rows = [np.frombuffer(pool, dtype=np.uint8) for pool in (self.from_pool, self.to_pool)]
            source, target = (pool[: len(pool) // size * size].reshape(-1, size) for pool in rows)
            origins = np.asarray(segments.sources) // size
            places = np.asarray(segments.targets) // size
        else:  # segments that do not lie on multiples of their size: a window per byte position
            windows = np.lib.stride_tricks.sliding_window_view
            source = windows(np.frombuffer(self.from_pool, dtype=np.uint8), size)
            target = windows(np.frombuffer(self.to_pool, dtype=np.uint8), size, writeable=True)
            origins, places = np.asarray(segments.sources), np.asarray(segments.targets)
        consecutive = step == size and bool((np.diff(places) == 1).all())
        if consecutive:
            return source, target[places[0] : places[0] + len(places)], origins, None
        return source, target, origins, places

    def copy(self, prepared: "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Any, Any] | None") -> None:
        """`mode="clip"` because the checking mode copies through a buffer; indexes were checked when prepared."""
        import numpy as np

        if prepared is None:
            return
        source, target, origins, places = prepared
        if places is None:
            np.take(source, origins, axis=0, out=target, mode="clip")
        else:
            target[places] = source[origins]


class Null(_HostPools):
    """Walks the segments as `host-loop` does and copies nothing."""

    source = "nothing"
    target = "nothing"

    def __init__(self, *, direction: Direction = "h2h", pool_bytes: int, device: int = 0) -> None:
        del direction, pool_bytes, device  # there is nothing to hold

    def prepare(self, segments: Segments) -> list[tuple[int, int, int]]:
        return [
            (target, source, segments.segment_bytes)
            for source, target in zip(segments.sources, segments.targets, strict=True)
        ]

    def copy(self, prepared: list[tuple[int, int, int]]) -> None:
        """One call per segment that does nothing."""
        for target, source, size in prepared:
            _nothing(target, source, size)

    def clear_target(self) -> None:
        """There is no target."""

    def differs(self, segments: Segments) -> int | None:
        """Nothing was to arrive."""
        del segments
        return None


def _nothing(_target: int, _source: int, _size: int) -> None:
    return
