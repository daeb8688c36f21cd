"""A mapped file: the CPU copies, and the kernel pages the file in. Always through the page cache."""

import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from kvbench.tiers.file_engines.base import Blocks, EngineSettings, address_of


class MappedEngine:
    """Copies between the mapping and the buffer, one thread per block in flight."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._mapping = mmap.mmap(settings.descriptor, settings.file_bytes)
        self._file = address_of(memoryview(self._mapping))
        self._buffer = address_of(settings.buffer)
        self._pool = ThreadPoolExecutor(settings.depth) if settings.depth > 1 else None
        if hasattr(mmap, "MADV_RANDOM"):
            self._mapping.madvise(mmap.MADV_RANDOM)  # blocks come in any order: reading around one is waste

    def transfer(self, blocks: Blocks) -> None:
        """A page that the file no longer has ends the process with SIGBUS, as mapped files do."""
        indexes = iter(range(len(blocks.offsets)))
        if self._pool is None or len(blocks.offsets) < 2:
            self._move(0, blocks, indexes)
            return
        threads = min(self._settings.depth, len(blocks.offsets))
        tasks = [self._pool.submit(self._move, slot, blocks, indexes) for slot in range(threads)]
        wait(tasks)  # all of them: a thread that still moves would write into memory that is the caller's again
        for task in tasks:
            task.result()

    def _move(self, slot: int, blocks: Blocks, indexes: Iterator[int]) -> None:
        load = blocks.direction == "load"
        before, after = blocks.before, blocks.after
        for index in indexes:
            size, offset = blocks.sizes[index], blocks.offsets[index]
            if before is not None and size:
                before(index, slot)
            place = slot * self._settings.slot_bytes if blocks.places is None else blocks.places[index]
            if load and size and hasattr(mmap, "MADV_WILLNEED"):
                page = offset - offset % mmap.PAGESIZE
                # one large read for the block, instead of one per page that the copy touches
                self._mapping.madvise(mmap.MADV_WILLNEED, page, offset + size - page)
            target, source = self._buffer + place, self._file + offset
            ctypes.memmove(target if load else source, source if load else target, size)
            if blocks.sync_each and size:
                page = offset - offset % mmap.PAGESIZE
                self._mapping.flush(page, offset + size - page)
            if after is not None and size:
                after(index, slot)

    def cool(self) -> None:
        """Unmaps what was touched; the next access reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Ends the threads; the mapping goes when nothing points into it any more."""
        if self._pool is not None:
            self._pool.shutdown()
