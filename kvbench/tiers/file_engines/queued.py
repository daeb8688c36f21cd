"""What Linux AIO and io_uring have in common: a queue of requests that one thread keeps full."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvbench.core.errors import KvbenchError
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, Handler, address_of, ended_early, refused

_LANDING_S, _LOOK_S = 10.0, 0.001


class KernelQueue(Protocol):
    """A queue inside the kernel."""

    def aim(self, *, store: bool) -> None:
        """Makes every request from now on a store, or a load; nothing may be in flight."""
        ...

    def push(self, request: int, address: int, size: int, offset: int) -> None:
        """Prepares a request; its number comes back with its completion."""
        ...

    def submit_and_wait(self, at_least: int = 1) -> Sequence[tuple[int, int]]:
        """Hands over what was pushed, waits for a completion unless `at_least` is 0, and returns all that there are.

        Of each the request's number, and bytes or -errno.
        """
        ...

    def in_turn(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> tuple[int, int] | None:
        """Moves one request after the other, and prepares each while the one before it is under way.

        Ends at the first that did not move whole and returns its index and what came back: bytes or -errno.
        """
        ...

    def close(self) -> None:
        """Gives the queue back to the kernel."""
        ...


def longs(*values: int) -> tuple[ctypes.c_long, ...]:
    """Arguments of a system call, ready to be passed as they are."""
    return tuple(ctypes.c_long(value) for value in values)


class QueuedEngine:
    """Keeps `depth` requests in flight until every block has moved."""

    def __init__(self, settings: EngineSettings, queue: KernelQueue) -> None:
        self._settings, self._queue = settings, queue
        buffer = address_of(settings.buffer)
        self._buffer = buffer
        self._slot_addresses = [buffer + slot * settings.slot_bytes for slot in range(settings.ring_slots)]

    def transfer(self, blocks: Blocks) -> None:
        """A failing block lets those in flight land first: the kernel still writes into their buffers."""
        sizes = blocks.sizes
        indexes: Sequence[int] = range(len(sizes))
        if not all(sizes):  # a block of nothing is no request
            indexes = [index for index in indexes if sizes[index]]
        self._queue.aim(store=blocks.direction == "store")
        if self._settings.depth == 1 and not (blocks.sync_each or blocks.before or blocks.after):
            indexes = self._in_turn(blocks, indexes)
        _Flight(self._settings, self._queue, blocks, indexes, address=self._addresses(blocks)).run()

    def _in_turn(self, blocks: Blocks, indexes: Sequence[int]) -> Sequence[int]:
        """Moves blocks one at a time and returns those that are left: from the first that did not move whole."""
        sizes, offsets, places = blocks.sizes, blocks.offsets, blocks.places
        if len(indexes) < len(sizes):
            sizes, offsets = [sizes[index] for index in indexes], [offsets[index] for index in indexes]
        if places is None:
            addresses = self._slot_addresses * len(indexes)
        else:
            addresses = [self._buffer + places[index] for index in indexes]
        stopped = self._queue.in_turn(addresses, sizes, offsets)
        if stopped is None:
            return ()
        at, moved = stopped
        if moved <= 0:
            raise _failure(self._settings, blocks, indexes[at], moved, done=0)
        return indexes[at:]  # the kernel moved less than was asked for: move it again, and the rest of it

    def _addresses(self, blocks: Blocks) -> Callable[[int, int], int]:
        """Where a block lies, by its slot and index."""
        slots, places, buffer = self._slot_addresses, blocks.places, self._buffer
        if places is None:
            return lambda slot, _: slots[slot]
        return lambda _, index: buffer + places[index]

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Closes the queue."""
        self._queue.close()


class _Flight:
    """One transfer: which block each request in flight moves, and through which slot of the ring.

    Keeps `depth` requests in flight. With a handler, what can go or come does so before the next block is handled.
    After a failure no more blocks go, and what is under way still lands: the kernel writes into its buffers.
    """

    def __init__(
        self,
        settings: EngineSettings,
        queue: KernelQueue,
        blocks: Blocks,
        indexes: Sequence[int],
        *,
        address: Callable[[int, int], int],
    ) -> None:
        self._settings, self._queue, self._blocks, self._address = settings, queue, blocks, address
        self._before, self._after = blocks.before, blocks.after
        self._indexes, self._next, self._end = indexes, 0, len(indexes)
        self._idle = list(range(settings.depth))
        self._index = [0] * settings.depth
        self._slot = [0] * settings.depth
        self._done = [0] * settings.depth
        # In turn, so that a slot is the disk's again when the CPU's caches have long let go of it: a hypervisor, or a
        # disk that writes through the cache, is slow to write what a core has just read.
        self._free = deque(range(settings.ring_slots))
        self._arrived: deque[tuple[int, int]] = deque()
        self._failure: BaseException | None = None
        self._give_up_s = 0.0

    def run(self) -> None:
        """Returns when every block has moved; raises the first failure when nothing is under way any more."""
        idle, arrived, depth = self._idle, self._arrived, self._settings.depth
        while self._next < self._end or arrived or len(idle) < depth:
            self._push()
            if len(idle) < depth:
                self._collect()
            if arrived:
                self._handle()
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        self._end = 0

    def _push(self) -> None:
        """As many blocks as can go, or one where a handler prepares them."""
        sizes, offsets, before = self._blocks.sizes, self._blocks.offsets, self._before
        idle, free = self._idle, self._free
        while idle and free and self._next < self._end:
            index, slot = self._indexes[self._next], free.popleft()
            self._next += 1
            if before is not None and (raised := _raised_by(before, index, slot)):
                free.append(slot)
                self._fail(raised)
                return
            request = idle.pop()
            self._index[request], self._slot[request], self._done[request] = index, slot, 0
            self._queue.push(request, self._address(slot, index), sizes[index], offsets[index])
            if before is not None:
                return

    def _collect(self) -> None:
        """What has completed; waits for it only if there is nothing else to do."""
        try:
            more = self._arrived or (self._next < self._end and self._idle and self._free)
            completed = self._queue.submit_and_wait(0 if more else 1)
        except OSError as error:  # such as no memory for a request
            self._fail(error)
            self._give_up_s = self._give_up_s or time.monotonic() + _LANDING_S
            if time.monotonic() > self._give_up_s:
                raise
            time.sleep(_LOOK_S)
            return
        for request, moved in completed:
            self._landed(request, moved)

    def _landed(self, request: int, moved: int) -> None:
        blocks, index, slot = self._blocks, self._index[request], self._slot[request]
        left = blocks.sizes[index] - self._done[request] - moved
        if left > 0 and moved > 0:  # the kernel may move less than was asked for
            self._done[request] += moved
            done = self._done[request]
            self._queue.push(request, self._address(slot, index) + done, left, blocks.offsets[index] + done)
            return
        self._idle.append(request)
        if left:
            self._fail(_failure(self._settings, blocks, index, moved, done=self._done[request]))
            self._free.append(slot)
            return
        if blocks.sync_each:
            os.fdatasync(self._settings.descriptor)
        if self._after is None:
            self._free.append(slot)
        else:
            self._arrived.append((index, slot))

    def _handle(self) -> None:
        """One block that has moved."""
        index, slot = self._arrived.popleft()
        if self._after is not None and (raised := _raised_by(self._after, index, slot)):
            self._fail(raised)
        self._free.append(slot)


def _raised_by(handle: Handler, index: int, slot: int) -> BaseException | None:
    """What a handler raised: it is raised again when nothing is under way any more."""
    try:
        handle(index, slot)
    except BaseException as error:  # noqa: BLE001 - also an interrupt
        return error
    return None


def _failure(settings: EngineSettings, blocks: Blocks, index: int, moved: int, *, done: int) -> KvbenchError:
    if moved < 0:
        return refused(settings, blocks, index, -moved)
    return ended_early(blocks, index, done)
