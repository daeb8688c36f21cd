"""Moves batches of blocks between slots and buffers, and computes checksums while other blocks are under way."""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB
from kvbench.tiers.base import OK, Outcome
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.copying import SHORT_BYTES, address_and_length, copy_bytes
from kvbench.tiers.file.layout import PAGE_BYTES
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, FileEngine, Handler, aligned_buffer

_CALLS_AT_ONCE = 4  # that find engines of their own; a fifth waits for one
_THREADS_OF_A_CALL = {"aio": 2, "io_uring": 2}  # the others have a thread per block in flight
_MAPPED_BYTES = 16 * MIB  # read ahead at once; with more, large blocks all end together and none is checked meanwhile
_RING_BYTES, _RING_SLOTS = 16 * MIB, 8  # a ring that has left the CPU's caches when its turn comes again
_FIRST_ADDRESS = 4096
_ADDRESS_BITS = 47  # of a process on x86-64; aarch64 maps below this unless asked otherwise

Deliver = Callable[[Callable[[], None]], bool]
Checksummed = Callable[["Move", int], None]
OpenEngine = Callable[[str, EngineSettings], FileEngine]


class Move(NamedTuple):
    """One block between a file offset and memory. A store knows its checksum or None; a load knows what it must be."""

    number: int  # the caller's own
    offset: int
    data: memoryview
    crc32c: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """How lanes move. `staged_loads`: a load never writes into the caller's buffer except through `deliver`."""

    io: str
    open_engine: OpenEngine
    descriptor: int
    direct: bool
    depth: int
    slot_bytes: int
    staged_loads: bool


class Lanes:
    """The engines of one direction. Loads have lanes of their own, and so never queue behind stores.

    A call takes as many lanes as it has use for, and each of them its share of the blocks and of the depth.
    """

    def __init__(self, direction: Literal["load", "store"], settings: LaneSettings) -> None:
        threads = 1 if settings.slot_bytes <= SHORT_BYTES else _THREADS_OF_A_CALL.get(settings.io, 1)
        self._share = min(threads, settings.depth)
        depth = -(-settings.depth // self._share)
        if settings.io == "mmap" and direction == "load":
            depth = min(depth, max(_MAPPED_BYTES // settings.slot_bytes, 2))
        self._lanes = [_Lane(direction, settings, depth) for _ in range(_CALLS_AT_ONCE * self._share)]
        self._idle = list(self._lanes)
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(len(self._lanes), thread_name_prefix=f"kvbench-{direction}")

    def open(self, file_bytes: int) -> None:
        """Opens ahead what one call needs; what cannot be opened now is tried again by the call."""
        for lane in self._idle[-self._share :]:
            with contextlib.suppress(OSError, KvbenchError):
                lane.open(file_bytes)

    def load(self, moves: Sequence[Move], file_bytes: int, deliver: Deliver) -> list[Outcome]:
        """Loads every block. `deliver` runs a copy into a caller's buffer, or refuses to."""
        return self._move(moves, lambda lane, share: lane.load(share, file_bytes, deliver))

    def store(self, moves: Sequence[Move], file_bytes: int, checksummed: Checksummed) -> list[Outcome]:
        """Stores every block. `checksummed` is told the checksum of each before it moves, and again when it is retried.

        It is called in any order, by several threads.
        """
        return self._move(moves, lambda lane, share: lane.store(share, file_bytes, checksummed))

    def _move(self, moves: Sequence[Move], work: Callable[["_Lane", Sequence[Move]], list[Outcome]]) -> list[Outcome]:
        with self._taken(min(self._share, len(moves))) as lanes:
            shares = [moves[at :: len(lanes)] for at in range(len(lanes))]
            tasks: list[Future[list[Outcome]]] = []
            try:
                for share in shares[1:]:
                    tasks.append(self._pool.submit(self._lent, lanes, work, share))  # noqa: PERF401 - those that began are waited for
                parts = [work(lanes[0], shares[0])]
            finally:
                wait(tasks)  # all of them: none may touch the callers' buffers after this call
            parts += [task.result() for task in tasks]
        outcomes: list[Outcome] = [OK] * len(moves)
        for at, part in enumerate(parts):
            outcomes[at :: len(parts)] = part
        return outcomes

    def _lent(
        self, lanes: list["_Lane"], work: Callable[["_Lane", Sequence[Move]], list[Outcome]], share: Sequence[Move]
    ) -> list[Outcome]:
        """Works in a lane of a call, and gives it back itself: a call that was interrupted does not wait for it."""
        lane = lanes.pop()
        try:
            return work(lane, share)
        finally:
            self._give_back([lane])

    @contextlib.contextmanager
    def _taken(self, at_most: int) -> Iterator[list["_Lane"]]:
        """The lanes that were used last, whose buffers the CPU's cache may still hold; at least one."""
        with self._changed:
            while not self._idle:
                self._changed.wait()
            lanes, self._idle[-at_most:] = self._idle[-at_most:], []
        try:
            yield lanes
        finally:
            self._give_back(lanes)

    def _give_back(self, lanes: list["_Lane"]) -> None:
        """Each lane once, also where a task that comes late wants one of them."""
        with self._changed:
            while lanes:
                self._idle.append(lanes.pop())
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the engines; nobody may be moving."""
        self._pool.shutdown()
        for lane in self._lanes:
            lane.close()


class _Lane:
    """An engine over all memory, another over a ring of buffers, and which of the two a call's blocks take.

    A direct transfer needs aligned memory, and a large one is twice as fast or more where that memory lies in huge
    pages, as a caller's seldom does. So blocks pass through a ring of huge pages, and are copied while others are under
    way. What goes through the page cache is copied by the kernel anyway, and moves to and from callers' buffers.
    """

    def __init__(self, direction: Literal["load", "store"], settings: LaneSettings, depth: int) -> None:
        self._direction, self._settings, self._depth = direction, settings, depth
        self._staged_loads = settings.direct or settings.io == "gds" or settings.staged_loads
        self._engines: dict[bool, FileEngine] = {}  # by whether it is the ring's
        self._ring_slots = min(max(depth, _RING_BYTES // settings.slot_bytes), _RING_SLOTS * depth)
        self._mapped_bytes = 0
        self._ring: list[memoryview] = []

    def open(self, file_bytes: int) -> None:
        """Opens what loads need."""
        self._opened(file_bytes, staged=self._staged_loads)

    def load(self, moves: Sequence[Move], file_bytes: int, deliver: Deliver) -> list[Outcome]:
        """Loads blocks, and checks each before the caller's buffer has it."""
        staged = self._staged_loads
        outcomes: list[Outcome | None] = [None] * len(moves)

        def arrived(index: int, slot: int) -> None:
            outcomes[index] = self._arrived(moves[index], slot if staged else None, deliver)

        self._transfer(moves, file_bytes, None if staged else [_address(move) for move in moves], after=arrived)
        for index, move in enumerate(moves):
            if outcomes[index] is None:
                outcomes[index] = self._alone(move, staged)
                if outcomes[index] is OK:
                    arrived(index, 0)
        return [outcome for outcome in outcomes if outcome is not None]

    def store(self, moves: Sequence[Move], file_bytes: int, checksummed: Checksummed) -> list[Outcome]:
        """Stores blocks, and computes the checksum of each before it leaves memory."""
        addresses = self._addresses_as_they_lie(moves)
        staged = addresses is None

        def leaving(index: int, slot: int) -> None:
            move = moves[index]
            checksummed(move, crc32c_of(move.data) if move.crc32c is None else move.crc32c)
            if staged:
                self._stage(move, slot)

        if self._transfer(moves, file_bytes, addresses, before=leaving):
            return [OK] * len(moves)
        outcomes = []
        for index, move in enumerate(moves):
            leaving(index, 0)
            outcomes.append(self._alone(move, staged))
        return outcomes

    def _addresses_as_they_lie(self, moves: Sequence[Move]) -> list[int] | None:
        """Where blocks to be stored lie, or None if they have to pass through the ring."""
        settings = self._settings
        if settings.io == "gds" or (settings.direct and settings.slot_bytes > SHORT_BYTES):
            return None
        addresses = [_address(move) for move in moves]
        if settings.direct and any(
            (address | move.data.nbytes) % PAGE_BYTES for address, move in zip(addresses, moves, strict=True)
        ):
            return None
        return addresses

    def _transfer(
        self,
        moves: Sequence[Move],
        file_bytes: int,
        addresses: Sequence[int] | None,
        *,
        before: Handler | None = None,
        after: Handler | None = None,
    ) -> bool:
        """All blocks by the engine, to or from addresses or through the ring.

        False if the engine failed, and then no block is under way any more.
        """
        try:
            if self._settings.io == "mmap" and not self._mapping_is_backed(file_bytes):
                return False
            sizes = [move.data.nbytes for move in moves]
            blocks = Blocks(
                direction=self._direction,
                offsets=[move.offset for move in moves],
                sizes=[_whole_pages(size) for size in sizes] if self._settings.direct else sizes,
                places=None if addresses is None else [address - _FIRST_ADDRESS for address in addresses],
                before=before,
                after=after,
            )
            self._opened(file_bytes, staged=addresses is None).transfer(blocks)
        except KvbenchError:  # a block was refused, and all others have landed
            return False
        except OSError:  # the engine itself has failed: what it may still say is about this call, and not the next
            self.close()
            return False
        except BaseException:  # an interrupt, say: threads may still move blocks of this call
            self._let_go()
            raise
        return True

    def _moved_bytes(self, move: Move) -> int:
        return _whole_pages(move.data.nbytes) if self._settings.direct else move.data.nbytes

    def _stage(self, move: Move, slot: int) -> None:
        size, room = move.data.nbytes, self._slots()[slot]
        copy_bytes(room[:size], move.data)
        padded = self._moved_bytes(move)
        if padded > size:
            room[size:padded] = bytes(padded - size)

    def _arrived(self, move: Move, slot: int | None, deliver: Deliver) -> Outcome:
        """Checks what arrived, and only then lets the caller's buffer have it."""
        arrived = move.data if slot is None else self._slots()[slot][: move.data.nbytes]
        found = crc32c_of(arrived)
        if found != move.crc32c:
            return Outcome("corrupt", f"CRC32C is {found:08x}, stored was {move.crc32c:08x}")
        if slot is not None and not deliver(lambda: copy_bytes(move.data, arrived)):
            return Outcome("timeout", "arrived too late")
        return OK

    def _alone(self, move: Move, staged: bool) -> Outcome:
        """One block by plain system calls, so that its failure is not everybody's; staged in the first slot."""
        load, descriptor, done = self._direction == "load", self._settings.descriptor, 0
        view = self._slots()[0][: self._moved_bytes(move)] if staged else move.data
        try:
            while done < view.nbytes:
                at = move.offset + done
                moved = (os.preadv if load else os.pwritev)(descriptor, [view[done:]], at)
                if moved == 0 or (self._settings.direct and moved % PAGE_BYTES):
                    return Outcome("corrupt" if load else "failed", f"the file ends at {at + moved}")
                done += moved
        except OSError as error:
            return refusal_of(error)
        return OK

    def _mapping_is_backed(self, file_bytes: int) -> bool:
        """Touching a page that the file no longer has would end the process."""
        return file_bytes <= os.fstat(self._settings.descriptor).st_size

    def _slots(self) -> list[memoryview]:
        if not self._ring:
            size = self._settings.slot_bytes
            whole = aligned_buffer(self._ring_slots * size, huge_pages=True)
            self._ring = [whole[start : start + size] for start in range(0, len(whole), size)]
        return self._ring

    def _opened(self, file_bytes: int, *, staged: bool) -> FileEngine:
        settings = self._settings
        if settings.io == "mmap" and self._mapped_bytes < file_bytes:
            self.close()  # a mapping is as long as the file was
            self._mapped_bytes = file_bytes
        if staged not in self._engines:
            self._engines[staged] = settings.open_engine(
                settings.io,
                EngineSettings(
                    descriptor=settings.descriptor,
                    file_bytes=file_bytes,
                    buffer=_whole(self._slots()) if staged else all_memory(),
                    depth=self._depth,
                    slot_bytes=settings.slot_bytes if staged else PAGE_BYTES,
                    slots=self._ring_slots if staged else None,
                    direct=settings.direct,
                ),
            )
        return self._engines[staged]

    def close(self) -> None:
        for engine in self._let_go():
            engine.close()

    def _let_go(self) -> list[FileEngine]:
        """The engines, which with their ring are nobody's from now on: what still comes is not for the next call."""
        engines, self._engines, self._ring = list(self._engines.values()), {}, []
        return engines


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _address(move: Move) -> int:
    return address_and_length(move.data)[0]


def _whole(slots: Sequence[memoryview]) -> memoryview:
    """The buffer that slots were cut from."""
    return memoryview(slots[0].obj)


def refusal_of(error: OSError) -> Outcome:
    """What a system call's error means for a block."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome("full", f"the disk has no room ({error.strerror})")
    return Outcome("failed", error.strerror or str(error))


def _memory(address: int, num_bytes: int) -> memoryview:
    """Memory by address; whoever calls keeps its owner alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def all_memory() -> memoryview:
    """Everything this process can address, as the one buffer that engines are opened on.

    Their places are then addresses, so that any caller's buffer can be moved to and from without a copy.
    """
    return _memory(_FIRST_ADDRESS, (1 << _ADDRESS_BITS) - 2 * _FIRST_ADDRESS)
