"""Registered memory between a caller's buffers and a client that reads and writes memory by address."""

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence

from kvbench.core.errors import UsageError
from kvbench.core.units import KIB, format_bytes
from kvbench.tiers.base import OK, Block, Outcome, Wanted
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.counters import wrong_buffer
from kvbench.tiers.envelope import HEADER_BYTES, damage, header_of, stored_bytes

_PAGE_BYTES = 4 * KIB


class Staging:
    """Page-aligned slots of one envelope each. One batch at a time has them.

    A client whose call did not end in time may still write into them; then they are left to it, with the client. So a
    late answer never lands in a caller's buffer.
    """

    def __init__(self, buffer_bytes: int, block_bytes: int, what: str) -> None:
        self.slot_bytes = _rounded(HEADER_BYTES + block_bytes)
        self.num_slots = buffer_bytes // self.slot_bytes
        if self.num_slots == 0:
            raise UsageError(
                f"tier {what}: a buffer of {format_bytes(buffer_bytes)} holds no block of {format_bytes(block_bytes)} "
                f"with its header; give buffer={self.slot_bytes // KIB}KiB or more"
            )
        self.num_bytes = self.num_slots * self.slot_bytes
        self._memory = mmap.mmap(-1, self.num_bytes)
        self._view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, timeout_s: float) -> Iterator[bool]:
        """The slots for one batch; False where another batch has not ended in time."""
        taken = self._lock.acquire(timeout=max(0.0, timeout_s))
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def addresses(self, count: int) -> list[int]:
        """Where the first slots begin."""
        return [self.address + slot * self.slot_bytes for slot in range(count)]

    def put(self, blocks: Sequence[Block]) -> list[int]:
        """Copies blocks with their headers into the first slots; how many bytes of each slot that takes."""
        for slot, block in enumerate(blocks):
            begin = slot * self.slot_bytes
            crc32c = crc32c_of(block.data) if block.crc32c is None else block.crc32c
            self._view[begin : begin + HEADER_BYTES] = header_of(block.key, block.data.nbytes, crc32c)
            copy_bytes(self._view[begin + HEADER_BYTES :][: block.data.nbytes], block.data)
        return [HEADER_BYTES + block.data.nbytes for block in blocks]

    def header(self, slot: int) -> bytes:
        """The header in a slot."""
        begin = slot * self.slot_bytes
        return bytes(self._view[begin : begin + HEADER_BYTES])

    def take(self, slot: int, num_bytes: int, want: Wanted, place: str) -> Outcome:
        """Checks the `num_bytes` that were read into a slot, and copies the block to its caller."""
        begin = slot * self.slot_bytes
        stored = self._view[begin : begin + num_bytes]
        if reason := damage(stored, want.key):
            return Outcome("corrupt", f"{place}: {reason}")
        if refusal := wrong_buffer(want.into, stored_bytes(stored)):
            return refusal
        copy_bytes(want.into, stored[HEADER_BYTES:])
        return OK


def _rounded(num_bytes: int) -> int:
    return (num_bytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
