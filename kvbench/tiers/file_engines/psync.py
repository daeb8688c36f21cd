"""Threads that each read or write one block at a time: preadv and pwritev."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

from kvbench.tiers.file_engines.base import Blocks, EngineSettings, ended_early, refused

_AHEAD = 2  # blocks that are ready when a thread comes for the next


class PsyncEngine:
    """As many threads as blocks in flight."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        starts = [slot * settings.slot_bytes for slot in range(settings.ring_slots)]
        self._slots = [settings.buffer[start : start + settings.slot_bytes] for start in starts]
        self._pool = ThreadPoolExecutor(settings.depth) if settings.depth > 1 else None
        if self._pool is not None:  # threads begin with their first task: let none of them begin under the clock
            list(self._pool.map(_nothing, range(settings.depth)))

    def transfer(self, blocks: Blocks) -> None:
        """Every thread takes the next block that nobody has taken; `next` on a range is atomic.

        What has to be done before a store or after a load is done in the caller's thread: handing each block over costs
        less than many threads that want the GIL for longer than a system call takes.
        """
        indexes = iter(range(len(blocks.offsets)))
        if self._pool is None or len(blocks.offsets) < 2:
            self._move(0, blocks, indexes)
        elif _is_light(blocks):
            _end([self._pool.submit(self._move, slot, blocks, indexes) for slot in self._threads_for(blocks)])
        elif blocks.direction == "load":
            self._load_and_handle(self._pool, blocks)
        else:
            self._handle_and_store(self._pool, blocks)

    def _threads_for(self, blocks: Blocks) -> range:
        return range(min(self._settings.depth, len(blocks.offsets)))

    def _move(self, number: int, blocks: Blocks, indexes: Iterator[int]) -> None:
        before, after = blocks.before, blocks.after
        move = self._mover(blocks)
        for index in indexes:
            if before is not None and blocks.sizes[index]:
                before(index, number)
            move(index, number)
            if after is not None and blocks.sizes[index]:
                after(index, number)

    def _load_and_handle(self, pool: ThreadPoolExecutor, blocks: Blocks) -> None:
        """Threads load into free slots; this one handles what has arrived and frees its slot."""
        free: SimpleQueue[int | None] = SimpleQueue()
        arrived: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        for slot in range(len(self._slots)):
            free.put(slot)
        indexes = iter([index for index, size in enumerate(blocks.sizes) if size])

        def load() -> None:
            move = self._mover(blocks)
            try:
                for index in indexes:
                    slot = free.get()
                    if slot is None:
                        return
                    if blocks.before is not None:
                        blocks.before(index, slot)
                    move(index, slot)
                    arrived.put((index, slot))
            finally:
                arrived.put(None)  # one thread less

        threads, tasks = self._threads_for(blocks), list[Future[None]]()
        try:
            for _ in threads:
                tasks.append(pool.submit(load))
            left = len(threads)
            while left:
                item = arrived.get()
                if item is None:
                    left -= 1
                    continue
                if blocks.after is not None:
                    blocks.after(*item)
                free.put(item[1])
        finally:
            for _ in threads:  # also when an interrupt came between: a thread that waits for ever never ends
                free.put(None)
            wait(tasks)
        _end(tasks)

    def _handle_and_store(self, pool: ThreadPoolExecutor, blocks: Blocks) -> None:
        """This thread handles blocks in free slots, and others store them."""
        free = deque(range(len(self._slots)))
        ready: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        turns: SimpleQueue[None] = SimpleQueue()  # not far ahead of the disk: a slot is to rest after it was read
        for _ in range(min(self._settings.depth + _AHEAD, len(free))):
            turns.put(None)
        failed: list[BaseException] = []

        def store() -> None:
            move = self._mover(blocks)
            while (item := ready.get()) is not None:
                try:
                    if not failed:
                        move(*item)
                        if blocks.after is not None:
                            blocks.after(*item)
                except BaseException as error:
                    failed.append(error)
                    raise
                finally:
                    free.append(item[1])
                    turns.put(None)

        threads, tasks = self._threads_for(blocks), list[Future[None]]()
        try:
            for _ in threads:
                tasks.append(pool.submit(store))
            for index, size in enumerate(blocks.sizes):
                if failed:
                    break
                if size:
                    turns.get()
                    slot = free.popleft()
                    if blocks.before is not None:
                        blocks.before(index, slot)
                    ready.put((index, slot))
        finally:
            for _ in threads:
                ready.put(None)
            wait(tasks)
        _end(tasks)

    def _mover(self, blocks: Blocks) -> Callable[[int, int], None]:
        """Moves the block of an index through a slot, or to and from its own place."""
        descriptor, whole, slots, call = self._settings.descriptor, self._settings.buffer, self._slots, _move_of(blocks)
        sizes, offsets, places, sync_each = blocks.sizes, blocks.offsets, blocks.places, blocks.sync_each
        views = [slots[0]]  # one list for all requests: building one for each costs under the clock

        def move(index: int, slot: int) -> None:
            size = sizes[index]
            if places is not None:
                place = places[index]
                views[0] = view = whole[place : place + size]
            else:
                view = slots[slot]
                views[0] = view = view if size == len(view) else view[:size]
            try:
                moved = call(descriptor, views, offsets[index]) if size else 0
                if moved != size:
                    self._move_rest(view, blocks, index, moved)
            except OSError as error:
                raise refused(self._settings, blocks, index, error.errno or 0) from error
            if sync_each:
                os.fdatasync(descriptor)

        return move

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


def _is_light(blocks: Blocks) -> bool:
    """Whether the threads do it all: there is nothing to handle, or only a look at what is stored as it lies."""
    return (blocks.before is None or blocks.places is not None) and blocks.after is None


def _end(tasks: Sequence[Future[None]]) -> None:
    """Waits for all of them: a thread that still moves would write into memory that is the caller's again."""
    wait(tasks)
    for task in tasks:
        task.result()


def _move_of(blocks: Blocks) -> Callable[[int, list[memoryview], int], int]:
    return os.preadv if blocks.direction == "load" else os.pwritev


def _nothing(_: int) -> None:
    return
