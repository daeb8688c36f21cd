"""Moves batches of blocks between slots and buffers: engines that take turns, so that checksums hide behind I/O."""

import ctypes
import errno
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB
from kvbench.tiers.base import OK, Outcome
from kvbench.tiers.copying import address_and_length, copy_bytes
from kvbench.tiers.file.layout import PAGE_BYTES
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, FileEngine, aligned_buffer

_LOAD_LANES = 4  # while one checks what arrived, three keep the disk busy
_STORE_LANES = 2  # while one stages blocks, the other moves
_BATCH_BYTES = 4 * MIB
_BATCHES = 8
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

    A load is cut into batches that lanes take in turn, each with its share of the depth. A store whose buffers can be
    moved as they lie is one call of one engine, while another thread computes the checksums.
    """

    def __init__(self, direction: Literal["load", "store"], settings: LaneSettings) -> None:
        self._direction, self._settings = direction, settings
        self._idle: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        if direction == "load":
            count = min(_LOAD_LANES, settings.depth + 1)
            settings = replace(settings, depth=-(-settings.depth // 2))
        else:
            count = _STORE_LANES
        self._lane_depth = settings.depth
        self._lanes = [_Lane(direction, settings) for _ in range(count)]
        for lane in self._lanes:
            self._idle.put(lane)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"kvbench-{direction}")

    def load(self, moves: Sequence[Move], file_bytes: int, deliver: Deliver) -> list[Outcome]:
        """Loads every block. `deliver` runs a copy into a caller's buffer, or refuses to."""
        return self._batched(moves, file_bytes, deliver, _ignored)

    def store(self, moves: Sequence[Move], file_bytes: int, checksummed: Checksummed) -> list[Outcome]:
        """Stores every block. `checksummed` is told each one's checksum, in any order, by several threads."""
        if len(moves) == 1 or not all(map(self._as_it_lies, moves)):
            return self._batched(moves, file_bytes, _always, checksummed)
        task = self._pool.submit(_checksum_all, moves, checksummed)  # while the engine moves the same bytes
        try:
            return self._run(moves, file_bytes, _always, _ignored)
        finally:
            task.result()

    def _batched(
        self, moves: Sequence[Move], file_bytes: int, deliver: Deliver, checksummed: Checksummed
    ) -> list[Outcome]:
        per_batch = self._per_batch(moves)
        batches = [moves[at : at + per_batch] for at in range(0, len(moves), per_batch)]
        if len(batches) == 1:
            return self._run(batches[0], file_bytes, deliver, checksummed)
        tasks: list[Future[list[Outcome]]] = [
            self._pool.submit(self._run, batch, file_bytes, deliver, checksummed) for batch in batches
        ]
        wait(tasks)  # all of them: none may touch the callers' buffers after this call
        return [outcome for task in tasks for outcome in task.result()]

    def _as_it_lies(self, move: Move) -> bool:
        return moves_as_it_lies(self._settings, *address_and_length(move.data))

    def _per_batch(self, moves: Sequence[Move]) -> int:
        """Together the lanes keep about `depth` requests in flight; the last batch to be checked is a small part."""
        largest = max((move.data.nbytes for move in moves), default=1)
        fitting = max(self._lane_depth, _BATCH_BYTES // largest)
        at_once = -(-min(len(moves), self._settings.depth) // len(self._lanes))
        return max(min(fitting, -(-len(moves) // _BATCHES)), at_once, 1)

    def _run(self, moves: Sequence[Move], file_bytes: int, deliver: Deliver, checksummed: Checksummed) -> list[Outcome]:
        lane = self._idle.get()
        try:
            return lane.move(moves, file_bytes, deliver, checksummed)
        finally:
            self._idle.put(lane)

    def close(self) -> None:
        """Closes the engines; nobody may be moving."""
        self._pool.shutdown()
        for lane in self._lanes:
            lane.close()


class _Place(NamedTuple):
    """Where in memory the engine moves a block; `staging` unless that is the caller's own buffer."""

    address: int
    size: int
    staging: memoryview | None


class _Lane:
    """An engine over all memory of the process, and a staging buffer for what an engine cannot take as it lies."""

    def __init__(self, direction: Literal["load", "store"], settings: LaneSettings) -> None:
        self._load, self._direction, self._settings = direction == "load", direction, settings
        self._staging: memoryview | None = None
        self._engine: FileEngine | None = None
        self._engine_bytes = 0
        self._own_memory = settings.io == "gds"  # cuFile moves to and from one registered buffer

    def move(self, moves: Sequence[Move], file_bytes: int, deliver: Deliver, checksummed: Checksummed) -> list[Outcome]:
        """One batch, in rounds of what the staging buffer holds."""
        done: list[Outcome] = []
        while len(done) < len(moves):
            left = moves[len(done) :] if done else moves
            places = self._placed(left)
            done += self._round(left[: len(places)], places, file_bytes, deliver, checksummed)
        return done

    def _placed(self, moves: Sequence[Move]) -> list[_Place]:
        """Places for as many moves as there is staging room for."""
        places: list[_Place] = []
        staged = 0
        for move in moves:
            address, size = address_and_length(move.data)
            if moves_as_it_lies(self._settings, address, size) and not (self._load and self._settings.staged_loads):
                places.append(_Place(address, size, None))
                continue
            if staged == self._settings.depth:
                break
            room = self._room(staged)
            padded = -(-size // PAGE_BYTES) * PAGE_BYTES if self._settings.direct else size
            places.append(_Place(address_and_length(room)[0], padded, room))
            staged += 1
        return places

    def _room(self, number: int) -> memoryview:
        start = number * self._settings.slot_bytes
        return self._whole_staging()[start : start + self._settings.slot_bytes]

    def _whole_staging(self) -> memoryview:
        if self._staging is None:
            self._staging = aligned_buffer(self._settings.depth * self._settings.slot_bytes, huge_pages=True)
        return self._staging

    def _round(
        self,
        moves: Sequence[Move],
        places: Sequence[_Place],
        file_bytes: int,
        deliver: Deliver,
        checksummed: Checksummed,
    ) -> list[Outcome]:
        if not self._load and checksummed is not _ignored:
            for move, place in zip(moves, places, strict=True):
                _stage(move, place)
                checksummed(move, crc32c_of(move))
        first = self._first_address()
        blocks = Blocks(
            direction=self._direction,
            offsets=[move.offset for move in moves],
            sizes=[place.size for place in places],
            places=[place.address - first for place in places],
        )
        outcomes = self._transfer(blocks, places, file_bytes)
        if not self._load:
            return outcomes
        return [
            _arrived(move, place, deliver) if outcome is OK else outcome
            for move, place, outcome in zip(moves, places, outcomes, strict=True)
        ]

    def _transfer(self, blocks: Blocks, places: Sequence[_Place], file_bytes: int) -> list[Outcome]:
        """All blocks by the engine; if that fails, each by itself, so that one failure is not everybody's."""
        try:
            if self._settings.io != "mmap" or self._mapping_is_backed(file_bytes):
                self._engine_transfer(self._opened(file_bytes), blocks)
                return [OK] * len(places)
        except KvbenchError:  # a block was refused, and all others have landed
            pass
        except OSError:  # the engine itself has failed: what it may still say is about this call, and not the next
            self.close()
        return [self._alone_moved(blocks.offsets[at], place) for at, place in enumerate(places)]

    def _engine_transfer(self, engine: FileEngine, blocks: Blocks) -> None:
        if self._own_memory and not self._load:
            fill: Callable[[], None] = getattr(engine, "fill")  # noqa: B009 - only an engine with memory of its own
            fill()
        engine.transfer(blocks)
        if self._own_memory and self._load:
            engine.show()

    def _first_address(self) -> int:
        return address_and_length(self._room(0))[0] if self._own_memory else _FIRST_ADDRESS

    def _mapping_is_backed(self, file_bytes: int) -> bool:
        """Touching a page that the file no longer has would end the process."""
        return file_bytes <= os.fstat(self._settings.descriptor).st_size

    def _alone_moved(self, offset: int, place: _Place) -> Outcome:
        descriptor, done = self._settings.descriptor, 0
        view = _memory(place.address, place.size)
        try:
            while done < place.size:
                moved = (os.preadv if self._load else os.pwritev)(descriptor, [view[done:]], offset + done)
                if moved == 0 or (self._settings.direct and moved % PAGE_BYTES):
                    return Outcome("corrupt" if self._load else "failed", f"the file ends at {offset + done + moved}")
                done += moved
        except OSError as error:
            return refusal_of(error)
        return OK

    def _opened(self, file_bytes: int) -> FileEngine:
        settings = self._settings
        if self._engine is not None and settings.io == "mmap" and self._engine_bytes < file_bytes:
            self._engine.close()  # a mapping is as long as the file was
            self._engine = None
        if self._engine is None:
            self._engine_bytes = file_bytes
            self._engine = settings.open_engine(
                settings.io,
                EngineSettings(
                    descriptor=settings.descriptor,
                    file_bytes=file_bytes,
                    buffer=self._whole_staging() if self._own_memory else all_memory(),
                    depth=settings.depth,
                    slot_bytes=settings.slot_bytes if self._own_memory else PAGE_BYTES,
                    direct=settings.direct,
                ),
            )
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def moves_as_it_lies(settings: LaneSettings, address: int, size: int) -> bool:
    """Whether the engine can take a caller's buffer itself. cuFile moves to and from one registered buffer only."""
    return settings.io != "gds" and not (settings.direct and (address | size) % PAGE_BYTES)


def refusal_of(error: OSError) -> Outcome:
    """What a system call's error means for a block."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome("full", f"the disk has no room ({error.strerror})")
    return Outcome("failed", error.strerror or str(error))


def crc32c_of(move: Move) -> int:
    """The checksum that comes with a block, or its own."""
    return _crc32c(move.data) if move.crc32c is None else move.crc32c


def _checksum_all(moves: Sequence[Move], checksummed: Checksummed) -> None:
    for move in moves:
        checksummed(move, crc32c_of(move))


def _stage(move: Move, place: _Place) -> None:
    if place.staging is not None:
        size = move.data.nbytes
        copy_bytes(place.staging[:size], move.data)
        if place.size > size:
            place.staging[size : place.size] = bytes(place.size - size)


def _arrived(move: Move, place: _Place, deliver: Deliver) -> Outcome:
    """Checks what arrived, and only then lets the caller's buffer have it."""
    arrived = move.data if place.staging is None else place.staging[: move.data.nbytes]
    found = _crc32c(arrived)
    if found != move.crc32c:
        return Outcome("corrupt", f"CRC32C is {found:08x}, stored was {move.crc32c:08x}")
    if place.staging is not None and not deliver(lambda: copy_bytes(move.data, arrived)):
        return Outcome("timeout", "arrived too late")
    return OK


def _ignored(move: Move, crc32c: int) -> None:
    del move, crc32c


def _always(copy: Callable[[], None]) -> bool:
    copy()
    return True


def _crc32c(data: memoryview) -> int:
    from crc32c import crc32c

    return int(crc32c(data, 0, 1))  # 1: without the GIL, else threads that return from the disk wait for a time slice


def _memory(address: int, num_bytes: int) -> memoryview:
    """Memory by address; whoever calls keeps its owner alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def all_memory() -> memoryview:
    """Everything this process can address, as the one buffer that engines are opened on.

    Their places are then addresses, so that any caller's buffer can be moved to and from without a copy.
    """
    return _memory(_FIRST_ADDRESS, (1 << _ADDRESS_BITS) - 2 * _FIRST_ADDRESS)
