"""Where a load comes from: a pool of host memory, or a file that really lies on the disk."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from kvbench.core.errors import KvbenchError
from kvbench.core.units import format_bytes
from kvbench.probes.device_memory import PAGE_BYTES, DeviceMemory, random_bytes_into
from kvbench.probes.machine import filesystem_kind, last_level_cache_bytes, runs_in_a_virtual_machine
from kvbench.probes.scratch_file import MEMORY_FILESYSTEMS, ScratchFile, scratch_file
from kvbench.tiers.page_cache import PageCache

Warn = Callable[[str, str, str], None]


class Source(Protocol):
    """Bytes to load; one call of `load` is what the clock sees, the rest happens before and after it."""

    num_bytes: int

    def next_offset(self, num_bytes: int) -> int:
        """The part that was touched longest ago, so that no load finds its bytes in the CPU's caches."""
        ...

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Makes the next load of these bytes cold."""
        ...

    def load(self, reader: int, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> None:
        """Brings the bytes into device memory and returns when they are there."""
        ...

    def arrived(self, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> bool:
        """True when the bytes in device memory are the source's."""
        ...

    def facts(self) -> dict[str, Any]:
        """Name of the source, whether its loads were cold, and how that was seen."""
        ...


class _Cursor:
    """Walks through a source from start to end, again and again."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._next = 0

    def take(self, num_bytes: int) -> int:
        if self._next + num_bytes > self._num_bytes:
            self._next = 0
        offset = self._next
        self._next += num_bytes
        return offset


class HostPool:
    """A pool of random bytes in host memory, pinned when the target is a GPU."""

    def __init__(self, target: DeviceMemory, pool_bytes: int, warn: Warn) -> None:
        self._buffer = target.host_buffer(pool_bytes)
        random_bytes_into(self._buffer.view, seed=1)
        self.num_bytes = pool_bytes
        self._cursor = _Cursor(pool_bytes)
        self._wants_pinned = target.wants_pinned
        _warn_when_pageable(target.wants_pinned, self._buffer.pinned, warn)

    def next_offset(self, num_bytes: int) -> int:
        return self._cursor.take(num_bytes)

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Nothing to do: the walk through the pool keeps loads cold."""

    def load(self, reader: int, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> None:
        target.copy_in(target_offset, self._buffer, offset, num_bytes)

    def arrived(self, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> bool:
        from crc32c import crc32c

        loaded = target.read_back(target_offset, num_bytes)
        return bool(crc32c(loaded) == crc32c(self._buffer.view[offset : offset + num_bytes]))

    def facts(self) -> dict[str, Any]:
        cache_bytes = last_level_cache_bytes()
        pool = f"loads walk through a pool of {format_bytes(self.num_bytes)}"
        pageable = "pageable host memory" if self._wants_pinned else "host memory"
        kind = "pinned host memory" if self._buffer.pinned else pageable
        if cache_bytes is None:
            evidence = f"{pool}; the size of the last-level cache is unknown here"
            return {"source": kind, "cold": None, "cold_evidence": evidence}
        cold = self.num_bytes >= 2 * cache_bytes
        evidence = f"{pool}; the last-level cache holds {format_bytes(cache_bytes)}"
        return {"source": kind, "cold": cold, "cold_evidence": evidence}


@contextlib.contextmanager
def source_file(
    path: Path,
    num_bytes: int,
    target: DeviceMemory,
    *,
    io: Literal["psync", "mmap"],
    direct: bool,
    readers: int,
    largest_load_bytes: int,
    warn: Warn,
) -> Iterator["SourceFile"]:
    """A file of random bytes on the disk. Its name is gone before the first load, so nothing can leave it behind."""
    with scratch_file(path, num_bytes, direct=direct and io == "psync") as file:
        if direct and io == "psync" and file.direct_descriptor is None:
            warn_direct_refused(path.parent, warn)
        yield SourceFile(file, target, io, readers, largest_load_bytes, warn)


def warn_direct_refused(directory: Path, warn: Warn) -> None:
    """The loud warning that goes with every fall-back to buffered transfers."""
    warn(
        "direct-refused",
        f"{filesystem_kind(directory)} at {directory} refuses O_DIRECT; "
        "loads went through the page cache, which was dropped before each",
        "measure on the filesystem the cache will live on, or write direct=0 if it is this one",
    )


class SourceFile:
    """An open file of random bytes with the checksum of each of its pages."""

    def __init__(
        self,
        file: ScratchFile,
        target: DeviceMemory,
        io: Literal["psync", "mmap"],
        readers: int,
        largest_load_bytes: int,
        warn: Warn,
    ) -> None:
        self.num_bytes = file.num_bytes
        self._directory, self._io, self._direct = file.directory, io, file.direct_descriptor is not None
        self._reads_from = file.descriptor if file.direct_descriptor is None else file.direct_descriptor
        self._checksums = file.checksums
        self._cursor = _Cursor(self.num_bytes)
        self._cache = PageCache(file.descriptor, self.num_bytes)
        if io == "mmap" and hasattr(mmap, "MADV_SEQUENTIAL"):
            # a load reads one contiguous range: without this the kernel gives up on reading ahead and faults page by
            # page, and reads pages before the range that the next load then finds cached
            self._cache.mapping.madvise(mmap.MADV_SEQUENTIAL)
        self._mapped = target.adopt(memoryview(self._cache.mapping))
        self._staging = [] if io == "mmap" else [target.host_buffer(largest_load_bytes) for _ in range(readers)]
        self._kind = filesystem_kind(file.directory)
        pinned = bool(self._staging) and self._staging[0].pinned
        _warn_when_pageable(target.wants_pinned, pinned, warn)
        if self._kind in MEMORY_FILESYSTEMS:
            warn(
                "file-in-memory",
                f"{file.directory} is {self._kind}: these loads come from memory, not from a disk",
                "name a directory on the disk that the cache will use",
            )
        self._cache.drop()

    def next_offset(self, num_bytes: int) -> int:
        return self._cursor.take(num_bytes)

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Drops the file from the page cache; a load through it is cold only if that worked."""
        if not self._direct:
            self._cache.drop_and_note(offset, num_bytes)

    def load(self, reader: int, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> None:
        if self._io == "mmap":
            target.copy_in(target_offset, self._mapped, offset, num_bytes)
            return
        staging = self._staging[reader]
        done = 0
        while done < num_bytes:  # the kernel may return less than was asked for
            got = os.preadv(self._reads_from, [staging.view[done:num_bytes]], offset + done)
            if got == 0:
                raise KvbenchError(f"{self._directory}: the file ended at byte {offset + done}; check the disk")
            done += got
        target.copy_in(target_offset, staging, 0, num_bytes)

    def arrived(self, offset: int, num_bytes: int, target: DeviceMemory, target_offset: int) -> bool:
        from crc32c import crc32c

        if self._direct:  # what a direct read leaves in the page cache shows whether it bypassed it
            self._cache.note(offset, num_bytes)
        loaded = target.read_back(target_offset, num_bytes)
        expected = self._checksums[offset // PAGE_BYTES : (offset + num_bytes) // PAGE_BYTES]
        return all(
            crc32c(loaded[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]) == checksum
            for page, checksum in enumerate(expected)
        )

    def facts(self) -> dict[str, Any]:
        how = "io=mmap" if self._io == "mmap" else f"io=psync, {'O_DIRECT' if self._direct else 'buffered'}"
        source = f"{self._directory} ({self._kind}, {how})"
        action = "O_DIRECT bypasses the page cache" if self._direct else "posix_fadvise(DONTNEED) before every load"
        if self._kind in MEMORY_FILESYSTEMS:
            return {"source": source, "cold": False, "cold_evidence": f"{self._kind} keeps its files in memory"}
        most_resident_ratio = self._cache.most_resident_ratio
        if most_resident_ratio is None:
            return {"source": source, "cold": None, "cold_evidence": f"{action}; this system cannot tell (no mincore)"}
        when = "after" if self._direct else "before"
        evidence = f"{action}; mincore saw at most {most_resident_ratio:.1%} of a load's pages cached {when} it"
        if runs_in_a_virtual_machine():
            evidence += "; caches of the hypervisor below cannot be seen"
        return {"source": source, "cold": most_resident_ratio < 0.01, "cold_evidence": evidence}


def _warn_when_pageable(wants_pinned: bool, pinned: bool, warn: Warn) -> None:
    if wants_pinned and not pinned:
        warn(
            "pageable-memory",
            "the host buffer is pageable: the driver copies it twice and the call blocks",
            "raise the limit on locked memory (ulimit -l), or read the bandwidth as a lower bound",
        )
