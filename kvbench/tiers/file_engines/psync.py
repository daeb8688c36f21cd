"""Threads that each read or write one block at a time: preadv and pwritev."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvbench.tiers.file_engines.base import Blocks, EngineSettings, ended_early, refused


class PsyncEngine:
    """As many threads as blocks in flight; one thread is the caller's own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        starts = [slot * settings.slot_bytes for slot in range(settings.depth)]
        self._slots = [settings.buffer[start : start + settings.slot_bytes] for start in starts]
        self._pool = ThreadPoolExecutor(settings.depth) if settings.depth > 1 else None
        if self._pool is not None:  # threads begin with their first task: let none of them begin under the clock
            list(self._pool.map(_nothing, range(settings.depth)))

    def transfer(self, blocks: Blocks) -> None:
        """Every thread takes the next block that nobody has taken; `next` on a range is atomic."""
        indexes = iter(range(len(blocks.offsets)))
        if self._pool is None:
            self._move(self._slots[0], blocks, indexes)
            return
        for task in [self._pool.submit(self._move, slot, blocks, indexes) for slot in self._slots]:
            task.result()

    def _move(self, slot: memoryview, blocks: Blocks, indexes: Iterator[int]) -> None:
        descriptor, whole = self._settings.descriptor, self._settings.buffer
        move = os.preadv if blocks.direction == "load" else os.pwritev
        for index in indexes:
            size, offset = blocks.sizes[index], blocks.offsets[index]
            place = None if blocks.places is None else blocks.places[index]
            view = slot[:size] if place is None else whole[place : place + size]
            done = 0
            while done < size:
                try:
                    moved = move(descriptor, [view], offset + done)
                except OSError as error:
                    raise refused(self._settings, blocks, index, error.errno or 0) from error
                if moved == 0:
                    raise ended_early(blocks, index, done)
                done += moved
                view = view[moved:]  # the kernel may move less than was asked for
            if blocks.sync_each:
                os.fdatasync(descriptor)

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _nothing(_: int) -> None:
    return
