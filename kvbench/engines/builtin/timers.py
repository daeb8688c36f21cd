"""Calls at a point in time, exact to tens of microseconds: the event loop's own timers count milliseconds."""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable

from kvbench.core.units import ns_from_seconds

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_NS_PER_S = ns_from_seconds(1)


class _Spec(ctypes.Structure):
    """struct itimerspec: an interval, which we never use, and the first expiry."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timers:
    """Calls back on `loop` at readings of `time.monotonic_ns()`, through one timerfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._armed_ns = 0
        loop.add_reader(self._fd, self._fire)

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        """Calls once `when_ns` is reached; what has become pointless by then must find out itself."""
        self._count += 1
        heapq.heappush(self._heap, (when_ns, self._count, call))
        if not self._armed_ns or when_ns < self._armed_ns:
            self._arm(when_ns)

    def _arm(self, when_ns: int) -> None:
        self._armed_ns = max(1, when_ns)
        spec = _Spec(0, 0, self._armed_ns // _NS_PER_S, self._armed_ns % _NS_PER_S)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._armed_ns = 0
        heap = self._heap
        while heap and heap[0][0] <= time.monotonic_ns():
            heapq.heappop(heap)[2]()
        if heap and (not self._armed_ns or heap[0][0] < self._armed_ns):
            self._arm(heap[0][0])

    def close(self) -> None:
        """Forgets every call."""
        self._heap.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
