"""What Linux AIO and io_uring have in common: a queue of requests that one thread keeps full."""

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Protocol

from kvbench.core.errors import KvbenchError
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, address_of, ended_early, refused

_LANDING_S, _LOOK_S = 10.0, 0.001


class KernelQueue(Protocol):
    """A queue inside the kernel."""

    def aim(self, *, store: bool) -> None:
        """Makes every request from now on a store, or a load; nothing may be in flight."""
        ...

    def push(self, slot: int, address: int, size: int, offset: int) -> None:
        """Prepares a request; `slot` comes back with its completion."""
        ...

    def submit_and_wait(self) -> Sequence[tuple[int, int]]:
        """Hands over what was pushed, waits for at least one completion, and returns all: slot, bytes or -errno."""
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
        self._slot_addresses = [buffer + slot * settings.slot_bytes for slot in range(settings.depth)]

    def transfer(self, blocks: Blocks) -> None:
        """A failing block lets those in flight land first: the kernel still writes into their buffers."""
        sizes = blocks.sizes
        indexes: Sequence[int] = range(len(sizes))
        if not all(sizes):  # a block of nothing is no request
            indexes = [index for index in indexes if sizes[index]]
        self._queue.aim(store=blocks.direction == "store")
        if self._settings.depth == 1 and not blocks.sync_each:
            indexes = self._in_turn(blocks, indexes)
        self._in_flight(blocks, indexes)

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
            raise self._failure(blocks, indexes[at], moved, done=0)
        return indexes[at:]  # the kernel moved less than was asked for: move it again, and the rest of it

    def _in_flight(self, blocks: Blocks, indexes: Sequence[int]) -> None:
        """Keeps every slot of the ring busy."""
        sizes, offsets, places = blocks.sizes, blocks.offsets, blocks.places
        slot_addresses, push, submit_and_wait = self._slot_addresses, self._queue.push, self._queue.submit_and_wait
        depth, sync_each = self._settings.depth, blocks.sync_each
        free = list(range(depth))
        held = [0] * depth  # which block a slot holds
        done = [0] * depth  # bytes of it that have moved
        failure: Exception | None = None
        give_up_s = 0.0
        at, end = 0, len(indexes)
        while at < end or len(free) < depth:
            while free and at < end:
                slot, index = free.pop(), indexes[at]
                at += 1
                held[slot], done[slot] = index, 0
                address = slot_addresses[slot] if places is None else self._buffer + places[index]
                push(slot, address, sizes[index], offsets[index])
            try:
                completions = submit_and_wait()
            except OSError as error:  # such as no memory for a request: what is under way still has to land
                failure, end = failure or error, 0
                give_up_s = give_up_s or time.monotonic() + _LANDING_S
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(_LOOK_S)
                continue
            for slot, moved in completions:
                index = held[slot]
                left = sizes[index] - done[slot] - moved
                if left == 0:
                    if sync_each:
                        os.fdatasync(self._settings.descriptor)
                elif moved > 0:  # the kernel may move less than was asked for
                    done[slot] += moved
                    start = slot_addresses[slot] if places is None else self._buffer + places[index]
                    push(slot, start + done[slot], left, offsets[index] + done[slot])
                    continue
                else:
                    failure = failure or self._failure(blocks, index, moved, done=done[slot])
                    end = 0  # no more of them
                free.append(slot)
        if failure is not None:
            raise failure

    def _failure(self, blocks: Blocks, index: int, moved: int, *, done: int) -> KvbenchError:
        if moved < 0:
            return refused(self._settings, blocks, index, -moved)
        return ended_early(blocks, index, done)

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Closes the queue."""
        self._queue.close()
