"""Linux AIO by system call: io_setup, io_submit, io_getevents. Only O_DIRECT files make it asynchronous."""

import ctypes
import os
import platform
from collections.abc import Sequence

from kvbench.tiers.file_engines.base import EngineSettings, EngineUnavailableError, raise_unless_interrupted
from kvbench.tiers.file_engines.queued import QueuedEngine, longs

# io_setup, io_destroy, io_submit, io_getevents; include/uapi/asm of each architecture
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_PREAD, _PWRITE = 0, 1
_QUADS_PER_IOCB, _QUADS_PER_EVENT = 8, 4


def open_aio(settings: EngineSettings) -> QueuedEngine:
    """An engine with a context for `depth` requests."""
    return QueuedEngine(settings, _AioQueue(settings))


class _AioQueue:
    """`struct iocb` is 64 bytes, `struct io_event` 32; both are written and read as 64-bit words."""

    def __init__(self, settings: EngineSettings) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise EngineUnavailableError(f"Linux AIO is not known here for {platform.machine()}; use engine psync")
        self._setup, self._destroy, self._submit, self._getevents = numbers
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [ctypes.c_long] * 6  # without types, every argument would need an object of its own
        self._depth = settings.depth
        context = ctypes.c_ulong(0)
        if self._syscall(self._setup, settings.depth, ctypes.addressof(context), 0, 0, 0):
            reason = os.strerror(ctypes.get_errno())
            raise EngineUnavailableError(
                f"Linux AIO cannot be used here (io_setup: {reason}); use engine psync, or raise fs.aio-max-nr"
            )
        self._context = context.value
        self._iocbs = (ctypes.c_uint64 * (_QUADS_PER_IOCB * settings.depth))()
        self._words = memoryview(self._iocbs).cast("B").cast("Q")
        self._descriptor = settings.descriptor
        base = ctypes.addressof(self._iocbs)
        self._iocb_addresses = [base + 64 * slot for slot in range(settings.depth)]
        self._pointers = (ctypes.c_uint64 * settings.depth)()
        self._events = (ctypes.c_int64 * (_QUADS_PER_EVENT * settings.depth))()
        self._results = memoryview(self._events).cast("B").cast("q")
        self._pointers_address = ctypes.addressof(self._pointers)
        self._events_address = ctypes.addressof(self._events)
        self._pushed = 0
        for slot in range(settings.depth):
            self._words[slot * _QUADS_PER_IOCB] = slot
        # Arguments that never change are made once: converting them costs as much as the call itself.
        self._call = libc["syscall"]
        self._call.restype = ctypes.c_long
        self._submit_one = longs(self._submit, self._context, 1, self._pointers_address)
        self._get_one = longs(self._getevents, self._context, 1, 1, self._events_address, 0)

    def aim(self, *, store: bool) -> None:
        operation = (_PWRITE if store else _PREAD) | self._descriptor << 32
        for slot in range(self._depth):
            self._words[slot * _QUADS_PER_IOCB + 2] = operation

    def push(self, request: int, address: int, size: int, offset: int) -> None:
        words, at = self._words, request * _QUADS_PER_IOCB
        words[at + 3] = address
        words[at + 4] = size
        words[at + 5] = offset
        self._pointers[self._pushed] = self._iocb_addresses[request]
        self._pushed += 1

    def submit_and_wait(self, at_least: int = 1) -> Sequence[tuple[int, int]]:
        failed = self._submit_pushed() if self._pushed else None
        if failed:
            return failed
        count = -1
        while count < 0:
            count = self._syscall(self._getevents, self._context, at_least, self._depth, self._events_address, 0)
            if count < 0:
                raise_unless_interrupted(ctypes.get_errno())
        results = self._results
        return [(results[at], results[at + 2]) for at in range(0, count * _QUADS_PER_EVENT, _QUADS_PER_EVENT)]

    def in_turn(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> tuple[int, int] | None:
        words, results, call = self._words, self._results, self._call
        submit, get = self._submit_one, self._get_one
        self._pointers[0] = self._iocb_addresses[0]
        last = len(offsets) - 1
        if last >= 0:
            words[3], words[4], words[5] = addresses[0], sizes[0], offsets[0]
        for index, size in enumerate(sizes):
            if call(*submit) != 1:
                return index, -ctypes.get_errno()
            if index < last:  # the kernel has its own copy of what was submitted
                after = index + 1
                words[3], words[4], words[5] = addresses[after], sizes[after], offsets[after]
            while call(*get) != 1:
                raise_unless_interrupted(ctypes.get_errno())
            if results[2] != size:
                return index, results[2]
        return None

    def _submit_pushed(self) -> list[tuple[int, int]]:
        """Submits everything pushed. The kernel refuses a bad request here already, by itself at the front."""
        failed: list[tuple[int, int]] = []
        start, width = 0, ctypes.sizeof(ctypes.c_uint64)
        while start < self._pushed:
            address = self._pointers_address + start * width
            taken = self._syscall(self._submit, self._context, self._pushed - start, address, 0, 0)
            if taken > 0:
                start += taken
                continue
            slot = (self._pointers[start] - self._iocb_addresses[0]) // 64
            failed.append((slot, -ctypes.get_errno()))
            start += 1
        self._pushed = 0
        return failed

    def close(self) -> None:
        self._syscall(self._destroy, self._context, 0, 0, 0, 0)
