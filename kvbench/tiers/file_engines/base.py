"""The protocol of file engines: blocks between an open file and a buffer, a given number of them in flight."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbench.core.errors import KvbenchError
from kvbench.core.units import format_bytes

BUFFER_ALIGNMENT = 4096


class EngineUnavailableError(KvbenchError):
    """This host has no such engine; the case is skipped with the message as its reason."""


Handler = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of a file, by offset and size.

    `places` says where in the buffer each block lies. None means a ring: every request in flight has a slot of its own
    and blocks take turns in it, as a staging buffer does. `sync_each` makes every stored block durable (fdatasync)
    before the next one takes its slot. `before` and `after` are called with the index and the slot of every
    block that is not empty, by any thread, while the slot is the block's own: before it moves, and when it has moved.
    Others move meanwhile; what they raise ends the transfer when nothing is under way any more.
    """

    direction: Literal["load", "store"]
    offsets: Sequence[int]
    sizes: Sequence[int]
    places: Sequence[int] | None = None
    sync_each: bool = False
    before: Handler | None = None
    after: Handler | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is opened on. `buffer` is pre-faulted and page-aligned; `depth` blocks are in flight.

    `slot_bytes` is the distance between two slots of the ring, a multiple of `BUFFER_ALIGNMENT`. The ring has `depth`
    slots, or `slots` for an engine that keeps `depth` blocks in flight while others are with their handler.
    """

    descriptor: int
    file_bytes: int
    buffer: memoryview
    depth: int
    slot_bytes: int
    direct: bool = False
    slots: int | None = None

    @property
    def ring_slots(self) -> int:
        return self.depth if self.slots is None else self.slots

    def __post_init__(self) -> None:
        """Refuses a ring that the buffer cannot hold."""
        slots = self.ring_slots
        if (
            not 1 <= self.depth <= slots
            or self.slot_bytes % BUFFER_ALIGNMENT
            or slots * self.slot_bytes > len(self.buffer)
        ):
            raise KvbenchError(
                f"{slots} slots of {self.slot_bytes} bytes do not fit a buffer of {len(self.buffer)} bytes; "
                "give a larger buffer, fewer requests in flight or smaller blocks"
            )


class FileEngine(Protocol):
    """One open engine; `transfer` is what the clock sees."""

    def transfer(self, blocks: Blocks) -> None:
        """Moves every block and returns when the last one has arrived (a store: has been handed to the file)."""
        ...

    def cool(self) -> None:
        """Lets go of pages that would survive dropping the page cache; only a mapping holds any."""
        ...

    def show(self) -> None:
        """Makes the buffer hold what was loaded; only an engine that loads into other memory has to copy it."""
        ...

    def close(self) -> None:
        """Gives back what the engine holds; the file and the buffer stay open."""
        ...


def slot_bytes_for(block_bytes: int) -> int:
    """The room one block takes in a ring."""
    return max(-(-block_bytes // BUFFER_ALIGNMENT), 1) * BUFFER_ALIGNMENT


def aligned_buffer(num_bytes: int, *, huge_pages: bool = False) -> memoryview:
    """Page-aligned private memory, as an allocator gives it, of which every page has been touched.

    With huge pages a large block is a few pieces for the disk's driver instead of one per 4 KiB, which doubled direct
    loads here. Shared anonymous memory (Python's default) is slower still.
    """
    import mmap

    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them; `in_huge_pages` tells
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for start in range(0, len(view), BUFFER_ALIGNMENT):
        view[start] = 0
    return view


def address_of(buffer: memoryview) -> int:
    """Where the buffer begins, for system calls that take an address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def raise_unless_interrupted(errno_: int) -> None:
    """Raises what a system call failed with, unless a signal cut its wait short and it may be repeated."""
    import errno

    if errno_ != errno.EINTR:
        raise OSError(errno_, os.strerror(errno_))


def refused(settings: EngineSettings, blocks: Blocks, index: int, errno_: int) -> KvbenchError:
    """Why one block could not be moved, in one line."""
    import errno

    size, offset = blocks.sizes[index], blocks.offsets[index]
    what = f"{blocks.direction} of {format_bytes(size)} at offset {offset}"
    if errno_ == errno.EINVAL and settings.direct:
        return KvbenchError(
            f"{what}: O_DIRECT refused it (Invalid argument): size and offset must be multiples of the disk's sectors, "
            f"usually 512 B or 4 KiB; use such blocks, or direct: [0]"
        )
    if errno_ == errno.ENOSPC:
        return KvbenchError(f"{what}: no space left on the device; free some, or give a smaller file")
    return KvbenchError(f"{what}: {os.strerror(errno_)}; check the disk and the kernel's log")


def ended_early(blocks: Blocks, index: int, done: int) -> KvbenchError:
    """The file is shorter than the block."""
    return KvbenchError(
        f"{blocks.direction} of {format_bytes(blocks.sizes[index])} at offset {blocks.offsets[index]}: the file ended "
        f"after {done} bytes of it; did something shorten it under way?"
    )
