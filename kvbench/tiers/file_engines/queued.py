"""What Linux AIO and io_uring have in common: a queue of requests that one thread keeps full."""

import os
from collections.abc import Sequence
from typing import Protocol

from kvbench.tiers.file_engines.base import Blocks, EngineSettings, address_of, ended_early, refused


class KernelQueue(Protocol):
    """A queue inside the kernel."""

    def push(self, slot: int, store: bool, address: int, size: int, offset: int) -> None:
        """Prepares a request; `slot` comes back with its completion."""
        ...

    def submit_and_wait(self) -> Sequence[tuple[int, int]]:
        """Hands over what was pushed, waits for at least one completion, and returns all: slot, bytes or -errno."""
        ...

    def close(self) -> None:
        """Gives the queue back to the kernel."""
        ...


class QueuedEngine:
    """Keeps `depth` requests in flight until every block has moved."""

    def __init__(self, settings: EngineSettings, queue: KernelQueue) -> None:
        self._settings, self._queue = settings, queue
        buffer = address_of(settings.buffer)
        self._buffer = buffer
        self._slot_addresses = [buffer + slot * settings.slot_bytes for slot in range(settings.depth)]

    def transfer(self, blocks: Blocks) -> None:
        """A failing block lets those in flight land first: the kernel still writes into their buffers."""
        queue, sizes, offsets, places = self._queue, blocks.sizes, blocks.offsets, blocks.places
        store = blocks.direction == "store"
        free = list(range(self._settings.depth))
        held = [0] * self._settings.depth  # which block a slot holds
        done = [0] * self._settings.depth  # bytes of it that have moved
        pending = iter(index for index in range(len(offsets)) if sizes[index])
        index = next(pending, None)
        failure: Exception | None = None
        while index is not None or len(free) < self._settings.depth:
            while free and index is not None and failure is None:
                slot = free.pop()
                held[slot], done[slot] = index, 0
                address = self._slot_addresses[slot] if places is None else self._buffer + places[index]
                queue.push(slot, store, address, sizes[index], offsets[index])
                index = next(pending, None)
            if failure is not None and len(free) == self._settings.depth:
                break
            for slot, moved in queue.submit_and_wait():
                block = held[slot]
                left = sizes[block] - done[slot] - moved
                if moved > 0 and left > 0:  # the kernel may move less than was asked for
                    done[slot] += moved
                    start = self._slot_addresses[slot] if places is None else self._buffer + places[block]
                    queue.push(slot, store, start + done[slot], left, offsets[block] + done[slot])
                    continue
                if moved < 0:
                    failure = failure or refused(self._settings, blocks, block, -moved)
                elif left > 0:
                    failure = failure or ended_early(blocks, block, done[slot])
                elif blocks.sync_each:
                    os.fdatasync(self._settings.descriptor)
                free.append(slot)
        if failure is not None:
            raise failure

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Blocks were loaded into the buffer itself."""

    def close(self) -> None:
        """Closes the queue."""
        self._queue.close()
