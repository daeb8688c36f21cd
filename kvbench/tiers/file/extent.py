"""Open files of slots: what lies in which, in what order bytes and headers are written, and what is checked."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.core.block_key import BlockKey
from kvbench.core.units import MIB
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, Wanted
from kvbench.tiers.counters import unfit, wrong_buffer
from kvbench.tiers.deadline import Deadline
from kvbench.tiers.file.directory import OpenFile
from kvbench.tiers.file.lanes import Lanes, LaneSettings, Move, OpenEngine, refusal_of
from kvbench.tiers.file.layout import (
    FREE_HEADER,
    HEADER_BYTES,
    PAGE_BYTES,
    SLOTS_PER_GROUP,
    Geometry,
    Header,
    header_bytes,
    read_header,
)
from kvbench.tiers.file.sync import Sync

_GROWTH_BYTES = 64 * MIB
_FULL = Outcome("full", "no room; evict blocks and try again")
_LATE = Outcome("timeout", "the disk was too slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentSettings:
    """How a file is used. `capacity_slots=None`: as many as the disk has room for."""

    io: str
    open_engine: OpenEngine
    depth: int
    block_bytes: int
    capacity_slots: int | None
    sync: Sync
    staged_loads: bool


class _Held:
    """A block of the index. Its slot is free again once it is gone from the index and nobody uses it."""

    __slots__ = ("crc32c", "gone", "num_bytes", "slot", "users")

    def __init__(self, slot: int, num_bytes: int, crc32c: int) -> None:
        self.slot, self.num_bytes, self.crc32c, self.users, self.gone = slot, num_bytes, crc32c, 0, False


class _Batch:
    """The blocks of one store on their way: what the index and the file will know of each."""

    def __init__(
        self, blocks: Sequence[Block], slots: Mapping[int, int], sequence: "itertools.count[int]", tier_id: bytes
    ) -> None:
        self._blocks, self._slots, self._sequence, self._tier_id = blocks, slots, sequence, tier_id
        self.held: dict[int, _Held] = {}
        self.headers: dict[int, bytes] = {}

    def checksummed(self, move: Move, crc32c: int) -> None:
        """Makes the header of a block; again if the block is tried again."""
        at = move.number
        slot, block, size = self._slots[at], self._blocks[at], move.data.nbytes
        self.held[at] = _Held(slot, size, crc32c)
        self.headers[at] = header_bytes(slot, next(self._sequence), block.key, size, crc32c, self._tier_id)


class Extent:
    """The blocks of one file, from opening to losing or closing it.

    A store writes the bytes, then the header, then syncs if it must, then acknowledges: a header never names bytes that
    are not there yet. A slot is free for other blocks only after its header was cleared, and with durability on that is
    synced first. Whatever goes wrong between, a load checks the bytes against the checksum in the header.
    """

    def __init__(self, file: OpenFile, settings: ExtentSettings) -> None:
        self.file, self._settings = file, settings
        self._geometry = Geometry(file.superblock.slot_bytes)
        self._lock = threading.Lock()  # the index and the free slots
        self._pages_lock = threading.Lock()  # pages of headers, in memory and in the file
        self._pages: dict[int, bytearray] = {}
        self._index: dict[BlockKey, _Held] = {}
        self._free: list[int] = []
        self._num_slots = self.damaged = 0
        self._sequence = itertools.count(1)
        self._cleared_unsynced = False
        self._cleared_lock = threading.Lock()
        self._lanes: dict[str, Lanes] = {}
        self._recover()
        if self._index:  # the first load is one that somebody waits for
            self._lanes_for("load").open(self._file_bytes())

    @property
    def slot_bytes(self) -> int:
        return self._geometry.slot_bytes

    @property
    def blocks(self) -> int:
        return len(self._index)

    def _recover(self) -> None:
        """Reads every header. Those that cannot be right are cleared and counted as damaged."""
        self._num_slots = self._geometry.slots_in(os.fstat(self.file.descriptor).st_size)
        latest: dict[BlockKey, Header] = {}
        unusable: list[int] = []
        for group in range(-(-self._num_slots // SLOTS_PER_GROUP)):
            page = self._read_page(group)
            self._pages[group] = page
            for slot in range(group * SLOTS_PER_GROUP, (group + 1) * SLOTS_PER_GROUP):
                at = slot % SLOTS_PER_GROUP * HEADER_BYTES
                data = bytes(page[at : at + HEADER_BYTES])
                if slot >= self._num_slots:
                    if data != FREE_HEADER:  # the slot is gone, and may be back, empty, when the file has grown
                        unusable.append(slot)
                    continue
                found = read_header(
                    data,
                    slot=slot,
                    tier_id=self.file.superblock.tier_id,
                    slot_bytes=self.slot_bytes,
                )
                if isinstance(found, Header):
                    other = latest.get(found.key)
                    if other is None or other.sequence < found.sequence:
                        latest[found.key] = found
                        found = other
                    if found is not None:
                        unusable.append(found.slot)
                elif found is not None:
                    self.damaged += 1
                    unusable.append(slot)
        with contextlib.suppress(OSError):  # what stood for slots that are gone
            os.ftruncate(self.file.headers_descriptor, self._geometry.page_offset(len(self._pages)))
        for header in latest.values():
            self._index[header.key] = _Held(header.slot, header.num_bytes, header.crc32c)
        self._sequence = itertools.count(1 + max((header.sequence for header in latest.values()), default=0))
        self._clear(unusable)
        taken = {held.slot for held in self._index.values()}
        self._free = [slot for slot in reversed(range(self._num_slots)) if slot not in taken]

    def _read_page(self, group: int) -> bytearray:
        try:
            page = os.pread(self.file.headers_descriptor, PAGE_BYTES, self._geometry.page_offset(group))
        except OSError:  # its blocks are lost; those of other groups are not
            self.damaged += 1
            page = b""
        return bytearray(page.ljust(PAGE_BYTES, b"\0"))

    def store(self, blocks: Sequence[Block], deadline: Deadline) -> list[Outcome]:
        """Bytes, headers, sync, and only then the index."""
        outcomes, slots, twins = self._reserve(blocks)
        batch = _Batch(blocks, slots, self._sequence, self._tier_id)
        kept: Mapping[int, _Held] = {}
        since = self._settings.sync.mark()
        try:
            self._sync_cleared()
            if slots:
                self._move(blocks, slots, batch, outcomes)
            if not deadline.still_wanted():
                for at in slots:
                    outcomes[at] = _LATE
            kept = {at: held for at, held in batch.held.items() if outcomes[at] is OK}
            if kept:
                self._write_headers([(slots[at], batch.headers[at]) for at in kept])
                self._settings.sync.wait(self.file.descriptors, since)
        except OSError as error:
            refusal = refusal_of(error)
            for at in slots:
                outcomes[at] = refusal
            self._clear([slots[at] for at in kept])
            kept = {}
        self._publish(blocks, slots, kept, outcomes)
        for at, first in twins.items():
            outcomes[at] = EXISTS if outcomes[first].result in ("ok", "exists") else outcomes[first]
        return outcomes

    def _move(self, blocks: Sequence[Block], slots: Mapping[int, int], batch: _Batch, outcomes: list[Outcome]) -> None:
        """The bytes, each to its slot; what was refused is noted."""
        offset = self._geometry.data_offset
        moves = [Move(at, offset(slot), blocks[at].data, blocks[at].crc32c) for at, slot in slots.items()]
        moved = self._lanes_for("store").store(moves, self._file_bytes(), batch.checksummed)
        for move, outcome in zip(moves, moved, strict=True):
            if outcome is not OK:
                outcomes[move.number] = outcome

    def _reserve(self, blocks: Sequence[Block]) -> tuple[list[Outcome], dict[int, int], dict[int, int]]:
        """A slot for each block that needs one; a second block of the same key shares the fate of the first."""
        outcomes = [OK] * len(blocks)
        slots: dict[int, int] = {}
        twins: dict[int, int] = {}
        first: dict[BlockKey, int] = {}
        with self._lock:
            index, largest = self._index, self._settings.block_bytes
            for at, block in enumerate(blocks):
                refusal = unfit(block, largest)
                if refusal is not None:
                    outcomes[at] = refusal
                elif block.key in index:
                    outcomes[at] = EXISTS
                elif (earlier := first.setdefault(block.key, at)) != at:
                    twins[at] = earlier
                else:
                    slot = self._take_slot()
                    if isinstance(slot, int):
                        slots[at] = slot
                    else:
                        outcomes[at] = slot
        return outcomes, slots, twins

    def _take_slot(self) -> int | Outcome:
        limit = self._settings.capacity_slots
        if limit is not None and self._num_slots - len(self._free) >= limit:
            return _FULL
        if not self._free:
            try:
                if not self._grow():
                    return _FULL
            except OSError as error:
                return refusal_of(error)
        return self._free.pop()

    def _grow(self) -> bool:
        """More slots at the end of the file, as many as there is room for; False if not even one."""
        before = self._geometry.end_of(self._num_slots)
        step = max(_GROWTH_BYTES // self.slot_bytes, 1)
        if self._settings.capacity_slots is not None:
            step = min(step, self._settings.capacity_slots - self._num_slots)
        while step > 0:
            end = self._geometry.end_of(self._num_slots + step)
            try:
                os.posix_fallocate(self.file.descriptor, before, end - before)
                self._grow_headers(self._num_slots + step)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                os.ftruncate(self.file.descriptor, max(before, PAGE_BYTES))  # what it had got of it
                step //= 2
                continue
            fresh = range(self._num_slots, self._num_slots + step)
            self._num_slots += step
            for group in range(-(-self._num_slots // SLOTS_PER_GROUP)):
                self._pages.setdefault(group, bytearray(PAGE_BYTES))
            self._free[:0] = reversed(fresh)
            return True
        return False

    def _grow_headers(self, num_slots: int) -> None:
        """Room for headers of so many slots, after the pages that others may be writing.

        Where the filesystem cannot allocate, the C library writes a zero to the end of every page that has one there.
        """
        first, end = (-(-slots // SLOTS_PER_GROUP) for slots in (self._num_slots, num_slots))
        if first < end:
            start = self._geometry.page_offset(first)
            os.posix_fallocate(self.file.headers_descriptor, start, self._geometry.page_offset(end) - start)

    def _publish(
        self,
        blocks: Sequence[Block],
        slots: Mapping[int, int],
        kept: Mapping[int, _Held],
        outcomes: list[Outcome],
    ) -> None:
        doubles: list[int] = []
        with self._lock:
            for at, held in kept.items():
                if self._index.setdefault(blocks[at].key, held) is not held:  # another thread was first
                    outcomes[at] = EXISTS
                    doubles.append(held.slot)
            if len(kept) < len(slots):
                self._free.extend(slot for at, slot in slots.items() if at not in kept)
        if doubles:
            self._clear(doubles)
            with self._lock:
                self._free.extend(doubles)

    def load(self, wanted: Sequence[Wanted], deadline: Deadline) -> list[Outcome]:
        """Every block is checked; a damaged one is dropped from the index and the file."""
        outcomes: dict[int, Outcome] = {}
        held: dict[int, _Held] = {}
        with self._lock:
            for at, want in enumerate(wanted):
                found = self._index.get(want.key)
                refusal = MISS if found is None else wrong_buffer(want.into, found.num_bytes)
                if found is not None and refusal is None:
                    found.users += 1
                    held[at] = found
                elif refusal is not None:
                    outcomes[at] = refusal
        try:
            offset = self._geometry.data_offset
            moves = [Move(at, offset(block.slot), wanted[at].into, block.crc32c) for at, block in held.items()]
            moved = self._lanes_for("load").load(moves, self._file_bytes(), deadline.deliver) if moves else []
            for (at, block), done in zip(held.items(), moved, strict=True):
                outcomes[at] = done
                if done.result == "corrupt":
                    self._drop(wanted[at].key, block)
        except OSError as error:
            outcomes.update(dict.fromkeys(held, refusal_of(error)))
        finally:
            self._let_go(held.values())
        return [outcomes[at] for at in range(len(wanted))]

    def _drop(self, key: BlockKey, block: _Held) -> None:
        with self._lock:
            if self._index.get(key) is not block:
                return
            del self._index[key]
            block.gone = True
        self._clear([block.slot])

    def _let_go(self, blocks: Iterable[_Held]) -> None:
        with self._lock:
            for block in blocks:
                block.users -= 1
                if block.gone and not block.users:
                    self._free.append(block.slot)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """By the index."""
        with self._lock:
            return [key in self._index for key in keys]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Clears headers first, and frees slots after that."""
        gone: list[_Held] = []
        found = []
        with self._lock:
            for key in keys:
                block = self._index.pop(key, None)
                found.append(block is not None)
                if block is not None:
                    block.gone = True
                    block.users += 1  # this call's own use, until the header is cleared
                    gone.append(block)
        self._clear([block.slot for block in gone])
        self._let_go(gone)
        return found

    def entries(self) -> list[Entry]:
        """What the index has now."""
        with self._lock:
            return [Entry(key, block.num_bytes) for key, block in self._index.items()]

    @property
    def _tier_id(self) -> bytes:
        return self.file.superblock.tier_id

    def _file_bytes(self) -> int:
        return self._geometry.end_of(self._num_slots)

    def _lanes_for(self, direction: Literal["load", "store"]) -> Lanes:
        with self._lock:
            if direction not in self._lanes:
                settings = self._settings
                self._lanes[direction] = Lanes(
                    direction,
                    LaneSettings(
                        io=settings.io,
                        open_engine=settings.open_engine,
                        descriptor=self.file.data_descriptor,
                        direct=self.file.direct,
                        depth=settings.depth,
                        slot_bytes=self.slot_bytes,
                        staged_loads=settings.staged_loads,
                    ),
                )
            return self._lanes[direction]

    def _write_headers(self, headers: Iterable[tuple[int, bytes]]) -> None:
        """Sets headers in their pages, and writes pages that lie together at once. A header lies within one sector."""
        pages, touched = self._pages, set()
        with self._pages_lock:
            for slot, header in headers:
                group, inside = divmod(slot, SLOTS_PER_GROUP)
                at = inside * HEADER_BYTES
                pages[group][at : at + HEADER_BYTES] = header
                touched.add(group)
            for first, count in _runs(sorted(touched)):
                data = b"".join([pages[group] for group in range(first, first + count)])
                if os.pwrite(self.file.headers_descriptor, data, self._geometry.page_offset(first)) != len(data):
                    raise OSError(errno.EIO, "the file of headers took only a part")

    def _clear(self, slots: Sequence[int]) -> None:
        """Clears headers. Where the disk refuses, a later write of the page does it, and until then checksums tell."""
        if not slots:
            return
        with contextlib.suppress(OSError):
            self._write_headers((slot, FREE_HEADER) for slot in slots)
        self._cleared_unsynced = True

    def _sync_cleared(self) -> None:
        """Before slots are written again: what they held must not come back after a power failure."""
        if not self._settings.sync.durable:
            return
        with self._cleared_lock:  # whoever comes meanwhile may have got a slot that this sync is about
            if not self._cleared_unsynced:
                return
            self._cleared_unsynced = False
            try:
                self._settings.sync.wait(self.file.descriptors[1:], self._settings.sync.mark())
            except OSError:
                self._cleared_unsynced = True
                raise

    def close(self) -> None:
        """Ends the use of the file; nobody may be using it."""
        for lanes in self._lanes.values():
            lanes.close()
        self.file.close()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and length of every run of consecutive numbers, of which there is at least one."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last - first + 1
            first = number
        last = number
    yield first, last - first + 1
