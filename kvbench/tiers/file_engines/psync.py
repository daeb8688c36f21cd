"""Threads that each read or write one block at a time: preadv and pwritev."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

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
        tasks = [self._pool.submit(self._move, slot, blocks, indexes) for slot in self._slots]
        wait(tasks)  # all of them: a thread that still moves would write into memory that is the caller's again
        for task in tasks:
            task.result()

    def _move(self, slot: memoryview, blocks: Blocks, indexes: Iterator[int]) -> None:
        descriptor, whole, move = self._settings.descriptor, self._settings.buffer, _move_of(blocks)
        sizes, offsets, places, sync_each = blocks.sizes, blocks.offsets, blocks.places, blocks.sync_each
        view, views = slot, [slot]  # one list for all requests: building one for each costs under the clock
        for index in indexes:
            size = sizes[index]
            if places is not None:
                place = places[index]
                views[0] = view = whole[place : place + size]
            elif size != len(view):
                views[0] = view = slot[:size]
            try:
                moved = move(descriptor, views, offsets[index]) if size else 0
                if moved != size:
                    self._move_rest(view, blocks, index, moved)
            except OSError as error:
                raise refused(self._settings, blocks, index, error.errno or 0) from error
            if sync_each:
                os.fdatasync(descriptor)

    def _move_rest(self, view: memoryview, blocks: Blocks, index: int, done: int) -> None:
        """The kernel may move less than was asked for."""
        move, size, offset = _move_of(blocks), blocks.sizes[index], blocks.offsets[index]
        moved = done
        while done < size:
            if moved == 0:
                raise ended_early(blocks, index, done)
            moved = move(self._settings.descriptor, [view[done:]], offset + done)
            done += moved

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _move_of(blocks: Blocks) -> Callable[[int, list[memoryview], int], int]:
    return os.preadv if blocks.direction == "load" else os.pwritev


def _nothing(_: int) -> None:
    return
