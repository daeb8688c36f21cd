"""Host memory as a tier: a pool that grows and shrinks by chunks, pinned where there is a GPU."""

import time
from collections.abc import Callable

from kvbench.core.errors import KvbenchError, MissingDependencyError, UsageError
from kvbench.core.units import MIB, format_bytes, parse_duration
from kvbench.tiers.base import Tier
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.cuda_runtime import checked, cuda_runtime, no_gpu_reason
from kvbench.tiers.file_engines.base import BUFFER_ALIGNMENT, address_of
from kvbench.tiers.memory import MemoryTier
from kvbench.tiers.shared_dram import SharedDramTier
from kvbench.tiers.slots import Parts, SlotAllocator
from kvbench.tiers.spec import TierSpec

_CHUNK_BYTES = 64 * MIB
_DEFAULT_IDLE_S = 30.0


def open_dram(spec: TierSpec, *, block_bytes: int, name: str) -> Tier:
    """The tier that `dram:SIZE?shared=…&headroom=…&idle=…` spells."""
    if spec.size_bytes is None:
        raise UsageError(f"tier {spec} has no size; write it like dram:64GiB")
    if spec.size_bytes < block_bytes:
        raise UsageError(
            f"tier {spec} is smaller than one block of {format_bytes(block_bytes)}; give it room for several"
        )
    options = dict(spec.options)
    if "shared" in options:
        for key in ("idle", "headroom"):
            if key in options:
                raise UsageError(f"tier {spec}: a shared pool has one fixed size and no {key}=; drop it")
        return SharedDramTier(options["shared"], name=name, block_bytes=block_bytes, capacity_bytes=spec.size_bytes)
    pool = HostPool(
        pool_bytes=int(spec.size_bytes * float(options.get("headroom", "1"))),
        block_bytes=block_bytes,
        idle_s=parse_duration(options["idle"]) if "idle" in options else _DEFAULT_IDLE_S,
    )
    return MemoryTier(pool, name=name, block_bytes=block_bytes, capacity_bytes=spec.size_bytes)


class HostPool:
    """Page-aligned memory in chunks. A chunk that nothing has lain in for `idle_s` goes back to the system."""

    def __init__(
        self,
        *,
        pool_bytes: int,
        block_bytes: int,
        idle_s: float = _DEFAULT_IDLE_S,
        chunk_bytes: int = _CHUNK_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = SlotAllocator(block_bytes, align_bytes=BUFFER_ALIGNMENT)
        slot_bytes = self._slots.slot_bytes
        self._per_chunk = max(min(chunk_bytes, pool_bytes) // slot_bytes, 1)
        self._most_slots = max(pool_bytes // slot_bytes, 1)
        self._idle_s, self._clock = idle_s, clock
        self._chunks: dict[int, memoryview] = {}
        self._used_bytes: dict[int, int] = {}
        self._empty_since: dict[int, float] = {}
        self._pin, self.description = _pinning()

    @property
    def pool_bytes(self) -> int:
        """Memory taken from the system now."""
        return sum(len(chunk) for chunk in self._chunks.values())

    def allocate(self, num_bytes: int) -> Parts | None:
        """Room for a block, in a new chunk if it takes one."""
        while (parts := self._slots.allocate(num_bytes)) is None:
            if not self._grow():
                return None
        for offset, size in parts:
            chunk = self._chunk_of(offset)
            self._used_bytes[chunk] += size
            self._empty_since.pop(chunk, None)
        return parts

    def free(self, parts: Parts) -> None:
        """Gives room back, and chunks that have been empty for long."""
        self._slots.free(parts)
        for offset, size in parts:
            chunk = self._chunk_of(offset)
            self._used_bytes[chunk] -= size
            if not self._used_bytes[chunk]:
                self._empty_since[chunk] = self._clock()
        self.shrink_idle()

    def write(self, parts: Parts, data: memoryview) -> None:
        """Copies a block in."""
        self._copy(parts, data, store=True)

    def read(self, parts: Parts, into: memoryview) -> None:
        """Copies a block out."""
        self._copy(parts, into, store=False)

    def _copy(self, parts: Parts, data: memoryview, *, store: bool) -> None:
        flat, done = data.cast("B"), 0
        for offset, size in parts:
            inside = offset - self._chunk_of(offset) * self._per_chunk * self._slots.slot_bytes
            room = self._chunks[self._chunk_of(offset)][inside : inside + size]
            piece = flat[done : done + size]
            copy_bytes(room if store else piece, piece if store else room)
            done += size

    def shrink(self) -> int:
        """Gives back every empty chunk."""
        return self._give_back(list(self._empty_since))

    def shrink_idle(self) -> int:
        """Gives back the chunks that have been empty for `idle_s`."""
        latest = self._clock() - self._idle_s
        return self._give_back([chunk for chunk, since in self._empty_since.items() if since <= latest])

    def close(self) -> None:
        """Gives back everything."""
        self._give_back(list(self._chunks), closing=True)

    def _chunk_of(self, offset: int) -> int:
        return offset // (self._per_chunk * self._slots.slot_bytes)

    def _slots_of(self, chunk: int) -> range:
        first = chunk * self._per_chunk
        return range(first, min(first + self._per_chunk, self._most_slots))

    def _grow(self) -> bool:
        chunk = next(number for number in range(len(self._chunks) + 1) if number not in self._chunks)
        slots = self._slots_of(chunk)
        if not slots:
            return False
        try:
            self._chunks[chunk] = self._pin.new(len(slots) * self._slots.slot_bytes)
        except (OSError, KvbenchError):  # the system gives no more memory, or pins no more: the pool is full
            return False
        self._used_bytes[chunk] = 0
        self._empty_since[chunk] = self._clock()
        self._slots.add(slots)
        return True

    def _give_back(self, chunks: list[int], *, closing: bool = False) -> int:
        returned = 0
        for chunk in chunks:
            if self._slots.take(self._slots_of(chunk)) or closing:
                memory = self._chunks.pop(chunk)
                returned += len(memory)
                self._pin.release(memory)
                del self._used_bytes[chunk]
                self._empty_since.pop(chunk, None)
        return returned


class _Pageable:
    def new(self, num_bytes: int) -> memoryview:
        return host_memory(num_bytes)

    def release(self, memory: memoryview) -> None:
        """The memory goes with its last view."""


class _Pinned:
    """Memory that a GPU reads and writes by itself. Pinning touches every page."""

    def new(self, num_bytes: int) -> memoryview:
        memory = host_memory(num_bytes)
        pin(memory)
        return memory

    def release(self, memory: memoryview) -> None:
        unpin(memory)


def _pinning() -> tuple[_Pageable | _Pinned, str]:
    reason = no_gpu_reason()
    if reason is not None:
        return _Pageable(), f"pageable host memory ({reason})"
    try:
        checked(cuda_runtime().cudaFree(0), "context of GPU 0")
    except (MissingDependencyError, KvbenchError) as error:
        return _Pageable(), f"pageable host memory ({error})"
    return _Pinned(), "pinned host memory"


def host_memory(num_bytes: int) -> memoryview:
    """Page-aligned private memory; its pages come with the first write."""
    import mmap

    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def pin(memory: memoryview) -> None:
    """Locks the pages for copies by a GPU."""
    checked(cuda_runtime().cudaHostRegister(address_of(memory), len(memory), 0), "pinning host memory")


def unpin(memory: memoryview) -> None:
    """Ends `pin`."""
    checked(cuda_runtime().cudaHostUnregister(address_of(memory)), "unpinning host memory")
