"""io_uring by system call. No binding from a package index takes page-aligned memory, which O_DIRECT needs."""

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Sequence

from kvbench.tiers.file_engines.base import EngineSettings, EngineUnavailableError, raise_unless_interrupted
from kvbench.tiers.file_engines.queued import QueuedEngine, longs

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_FEATURE_SINGLE_MMAP = 1
_ENTER_GETEVENTS = 1
_OP_READ, _OP_WRITE = 22, 23
_PARAMS_BYTES = 120
_SQE_BYTES, _CQE_BYTES = 64, 16
_QUADS_PER_SQE = 8
# struct io_uring_params: sq_entries, cq_entries, 3 more, features, 4 more; io_sqring_offsets; io_cqring_offsets
_SQ_TAIL, _SQ_MASK, _SQ_ARRAY = 44, 48, 64
_CQ_HEAD, _CQ_TAIL, _CQ_MASK, _CQ_CQES = 80, 84, 88, 100


def open_io_uring(settings: EngineSettings) -> QueuedEngine:
    """An engine with a ring for `depth` requests."""
    return QueuedEngine(settings, _Ring(settings))


class _Ring:
    """Submission and completion ring, shared with the kernel.

    The rings are plain memory here: Python has no barriers, and x86 keeps stores and loads in the order that io_uring
    relies on. Other architectures do not, so they are refused.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise EngineUnavailableError(
                f"io_uring from Python relies on x86 memory order, and this is {platform.machine()}; use engine aio"
            )
        libc = ctypes.CDLL(None, use_errno=True)
        syscall = libc.syscall
        syscall.restype = ctypes.c_long
        syscall.argtypes = [ctypes.c_long] * 7
        self._syscall = syscall
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        self._fd = syscall(_SETUP, settings.depth, ctypes.addressof(params), 0, 0, 0, 0)
        if self._fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise EngineUnavailableError(
                f"io_uring cannot be used here (io_uring_setup: {reason}); containers often block it: allow the system "
                "calls 425 to 427 in the seccomp profile, set kernel.io_uring_disabled=0, or use engine aio"
            )
        try:
            self._map(params.raw)
        except BaseException:
            os.close(self._fd)
            raise
        self._descriptor = settings.descriptor
        self._pushed = 0
        # Arguments that never change are made once: converting them costs as much as the call itself.
        self._call = libc["syscall"]
        self._call.restype = ctypes.c_long
        self._submit_one = longs(_ENTER, self._fd, 1, 0, 0)
        self._wait_for_one = longs(_ENTER, self._fd, 0, 1, _ENTER_GETEVENTS, 0)

    def _map(self, params: bytes) -> None:
        def word(at: int) -> int:
            value: int = struct.unpack_from("<I", params, at)[0]
            return value

        sq_entries, cq_entries, features = word(0), word(4), word(20)
        if not features & _FEATURE_SINGLE_MMAP:
            raise EngineUnavailableError("io_uring of this kernel is older than 5.4; use engine aio")
        length = max(word(_SQ_ARRAY) + sq_entries * 4, word(_CQ_CQES) + cq_entries * _CQE_BYTES)
        shared = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._rings = mmap.mmap(self._fd, length, flags=shared, offset=_OFF_SQ_RING)
        self._entries = mmap.mmap(self._fd, sq_entries * _SQE_BYTES, flags=shared, offset=_OFF_SQES)
        self._sqes = memoryview(self._entries).cast("Q")
        whole = memoryview(self._rings)
        self._words = whole[: length // 4 * 4].cast("I")
        self._signed = whole[: length // 4 * 4].cast("i")
        self._sq_tail, self._sq_mask = word(_SQ_TAIL) // 4, self._words[word(_SQ_MASK) // 4]
        self._cq_head, self._cq_tail = word(_CQ_HEAD) // 4, word(_CQ_TAIL) // 4
        self._cq_mask, self._cqes = self._words[word(_CQ_MASK) // 4], word(_CQ_CQES) // 4
        for index in range(sq_entries):  # entry i of the ring is always sqe i
            self._words[word(_SQ_ARRAY) // 4 + index] = index

    def aim(self, *, store: bool) -> None:
        operation = (_OP_WRITE if store else _OP_READ) | self._descriptor << 32
        for at in range(0, len(self._sqes), _QUADS_PER_SQE):
            self._sqes[at] = operation

    def push(self, request: int, address: int, size: int, offset: int) -> None:
        words, sqes, tail = self._words, self._sqes, self._sq_tail
        count = words[tail]
        at = (count & self._sq_mask) * _QUADS_PER_SQE
        sqes[at + 1] = offset
        sqes[at + 2] = address
        sqes[at + 3] = size
        sqes[at + 4] = request
        words[tail] = (count + 1) & 0xFFFFFFFF
        self._pushed += 1

    def submit_and_wait(self, at_least: int = 1) -> Sequence[tuple[int, int]]:
        words = self._words
        head, tail = words[self._cq_head], words[self._cq_tail]
        while self._pushed or head == tail:
            wait = at_least if head == tail else 0
            taken = self._syscall(_ENTER, self._fd, self._pushed, wait, _ENTER_GETEVENTS, 0, 0)
            tail = words[self._cq_tail]
            if taken >= 0:
                self._pushed -= taken
                break
            raise_unless_interrupted(ctypes.get_errno())
        found = []
        while head != tail:
            at = self._cqes + (head & self._cq_mask) * 4
            found.append((words[at], self._signed[at + 2]))
            head = (head + 1) & 0xFFFFFFFF
        words[self._cq_head] = head
        return found

    def in_turn(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> tuple[int, int] | None:
        words, signed, call, submit, wait = self._words, self._signed, self._call, self._submit_one, self._wait_for_one
        cq_head, cq_tail, cq_mask, cqes = self._cq_head, self._cq_tail, self._cq_mask, self._cqes
        last = len(offsets) - 1
        head = words[cq_head]
        if last >= 0:
            self.push(0, addresses[0], sizes[0], offsets[0])
        for index, size in enumerate(sizes):
            while call(*submit) != 1:
                raise_unless_interrupted(ctypes.get_errno())
            # everything that can be done while the device works is done here
            words[cq_head] = head
            self._pushed = 0
            if index < last:
                self.push(0, addresses[index + 1], sizes[index + 1], offsets[index + 1])
            result = cqes + (head & cq_mask) * 4 + 2
            while words[cq_tail] == head:
                if call(*wait) < 0:
                    raise_unless_interrupted(ctypes.get_errno())
            head = (head + 1) & 0xFFFFFFFF
            if signed[result] != size:
                words[cq_head] = head
                self._take_back()
                return index, signed[result]
        words[cq_head] = head
        return None

    def _take_back(self) -> None:
        """Forgets what was pushed and not submitted; the kernel has not seen it."""
        words = self._words
        words[self._sq_tail] = (words[self._sq_tail] - self._pushed) & 0xFFFFFFFF
        self._pushed = 0

    def close(self) -> None:
        os.close(self._fd)
