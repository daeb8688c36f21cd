"""Moves batches of blocks between slots and buffers: engines that take turns, so that checksums hide behind I/O."""

import ctypes
import errno
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB
from kvbench.tiers.base import OK, Outcome
from kvbench.tiers.copying import address_and_length, copy_bytes
from kvbench.tiers.file.layout import PAGE_BYTES
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, FileEngine, aligned_buffer

_LANES = 2  # one moves while the other checks
_BATCH_BYTES = 8 * MIB
_FIRST_ADDRESS = 4096
_ADDRESS_BITS = 47  # of a process on x86-64; aarch64 maps below this unless asked otherwise

OpenEngine = Callable[[str, EngineSettings], FileEngine]


@dataclass(frozen=True, slots=True)
class Move:
    """One block between a file offset and memory. A store knows its checksum or None; a load knows what it must be."""

    offset: int
    data: memoryview
    crc32c: int | None


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a move; `crc32c` is that of the bytes moved."""

    outcome: Outcome
    crc32c: int = 0


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
    """Two engines for one direction. Loads have lanes of their own, and so never queue behind stores."""

    def __init__(self, direction: Literal["load", "store"], settings: LaneSettings) -> None:
        self._direction, self._settings = direction, settings
        self._idle: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._opened: list[_Lane] = []
        for _ in range(_LANES):
            self._idle.put(_Lane(direction, settings))
        self._pool = ThreadPoolExecutor(_LANES, thread_name_prefix=f"kvbench-{direction}")

    def move(
        self, moves: Sequence[Move], file_bytes: int, deliver: Callable[[Callable[[], None]], bool]
    ) -> list[Moved]:
        """Moves every block and returns what became of each. `deliver` runs a copy into a caller's buffer, or not."""
        per_batch = self._per_batch(moves)
        batches = [moves[at : at + per_batch] for at in range(0, len(moves), per_batch)]
        if len(batches) == 1:
            return self._run(batches[0], file_bytes, deliver)
        tasks: list[Future[list[Moved]]] = [
            self._pool.submit(self._run, batch, file_bytes, deliver) for batch in batches
        ]
        return [moved for task in tasks for moved in task.result()]

    def _per_batch(self, moves: Sequence[Move]) -> int:
        """Large enough that filling and draining the queue is a small part, small enough that both lanes have work."""
        largest = max((move.data.nbytes for move in moves), default=1)
        fitting = max(_BATCH_BYTES // largest, 2 * self._settings.depth)
        return max(min(fitting, -(-len(moves) // _LANES)), 1)

    def _run(
        self, moves: Sequence[Move], file_bytes: int, deliver: Callable[[Callable[[], None]], bool]
    ) -> list[Moved]:
        lane = self._idle.get()
        try:
            return lane.move(moves, file_bytes, deliver)
        finally:
            self._idle.put(lane)

    def close(self) -> None:
        """Closes the engines; nobody may be moving."""
        self._pool.shutdown()
        for _ in range(_LANES):
            self._idle.get().close()


@dataclass(frozen=True, slots=True)
class _Place:
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

    def move(
        self, moves: Sequence[Move], file_bytes: int, deliver: Callable[[Callable[[], None]], bool]
    ) -> list[Moved]:
        """One batch, in rounds of what the staging buffer holds."""
        done: list[Moved] = []
        at = 0
        while at < len(moves):
            count, places = self._placed(moves[at:])
            done += self._round(moves[at : at + count], places, file_bytes, deliver)
            at += count
        return done

    def _placed(self, moves: Sequence[Move]) -> tuple[int, list[_Place]]:
        """Places for as many moves as there is staging room for."""
        places: list[_Place] = []
        staged = 0
        for move in moves:
            address, size = address_and_length(move.data)
            aligned = not self._settings.direct or (address % PAGE_BYTES == 0 and size % PAGE_BYTES == 0)
            if aligned and not self._own_memory and not (self._load and self._settings.staged_loads):
                places.append(_Place(address, size, None))
                continue
            if staged == self._settings.depth:
                break
            room = self._room(staged)
            padded = -(-size // PAGE_BYTES) * PAGE_BYTES if self._settings.direct else size
            places.append(_Place(address_and_length(room)[0], padded, room))
            staged += 1
        return len(places), places

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
        deliver: Callable[[Callable[[], None]], bool],
    ) -> list[Moved]:
        checksums = [0] * len(moves) if self._load else [_outgoing(*pair) for pair in zip(moves, places, strict=True)]
        blocks = Blocks(
            direction=self._direction,
            offsets=[move.offset for move in moves],
            sizes=[place.size for place in places],
            places=[place.address - self._first_address() for place in places],
        )
        outcomes = self._transfer(blocks, places, file_bytes)
        if not self._load:
            return [Moved(outcome, crc) for outcome, crc in zip(outcomes, checksums, strict=True)]
        return [
            _incoming(move, place, deliver) if outcome is OK else Moved(outcome)
            for move, place, outcome in zip(moves, places, outcomes, strict=True)
        ]

    def _transfer(self, blocks: Blocks, places: Sequence[_Place], file_bytes: int) -> list[Outcome]:
        """All blocks by the engine; if that fails, each by itself, so that one failure is not everybody's."""
        try:
            if self._settings.io != "mmap" or self._mapping_is_backed(blocks):
                self._engine_transfer(self._opened(file_bytes), blocks)
                return [OK] * len(places)
        except (KvbenchError, OSError):
            pass
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

    def _mapping_is_backed(self, blocks: Blocks) -> bool:
        """Touching a page that the file no longer has would end the process."""
        ends = (offset + size for offset, size in zip(blocks.offsets, blocks.sizes, strict=True))
        return max(ends, default=0) <= os.fstat(self._settings.descriptor).st_size

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


def refusal_of(error: OSError) -> Outcome:
    """What a system call's error means for a block."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome("full", f"the disk has no room ({error.strerror})")
    return Outcome("failed", error.strerror or str(error))


def _outgoing(move: Move, place: _Place) -> int:
    """Stages a block where that is needed, and returns its checksum."""
    if place.staging is not None:
        size = move.data.nbytes
        copy_bytes(place.staging[:size], move.data)
        if place.size > size:
            place.staging[size : place.size] = bytes(place.size - size)
    return _crc32c(move.data) if move.crc32c is None else move.crc32c


def _incoming(move: Move, place: _Place, deliver: Callable[[Callable[[], None]], bool]) -> Moved:
    """Checks what arrived, and only then lets the caller's buffer have it."""
    size = move.data.nbytes
    arrived = move.data if place.staging is None else place.staging[:size]
    found = _crc32c(arrived)
    if found != move.crc32c:
        return Moved(Outcome("corrupt", f"CRC32C is {found:08x}, stored was {move.crc32c:08x}"), found)
    if place.staging is not None and not deliver(lambda: copy_bytes(move.data, arrived)):
        return Moved(Outcome("timeout", "arrived too late"), found)
    return Moved(OK, found)


def _crc32c(data: memoryview) -> int:
    from crc32c import crc32c

    return int(crc32c(data))


def _memory(address: int, num_bytes: int) -> memoryview:
    """Memory by address; whoever calls keeps its owner alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def all_memory() -> memoryview:
    """Everything this process can address, as the one buffer that engines are opened on.

    Their places are then addresses, so that any caller's buffer can be moved to and from without a copy.
    """
    return _memory(_FIRST_ADDRESS, (1 << _ADDRESS_BITS) - 2 * _FIRST_ADDRESS)
