"""An execution that takes as long as three known constants say: to prove the fit, and to try out a slower tier."""

import time
from collections.abc import Callable
from typing import Any

from kvbench.core.units import ns_from_seconds, seconds_from_ns
from kvbench.probes.executions.base import Execution
from kvbench.probes.segments import Segments

_SPIN_NS = 200_000  # a sleeping thread wakes up late by about this much


class Throttled:
    """Waits until `fixed_s + n·per_segment_s + bytes / bytes_per_s` have passed since the copy began."""

    def __init__(
        self,
        inner: Execution,
        *,
        fixed_s: float = 0.0,
        per_segment_s: float = 0.0,
        bytes_per_s: float | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner, self._fixed_s, self._per_segment_s = inner, fixed_s, per_segment_s
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._clock_ns, self._sleep = clock_ns, sleep
        self.source, self.target = inner.source, inner.target

    def prepare(self, segments: Segments) -> Any:
        least_s = self._fixed_s + len(segments) * self._per_segment_s + segments.total_bytes * self._s_per_byte
        return self._inner.prepare(segments), ns_from_seconds(least_s)

    def copy(self, prepared: Any) -> None:
        """Copies, then waits for the rest: asleep for most of it, and awake at the end to be on time."""
        inner, least_ns = prepared
        deadline_ns = self._clock_ns() + least_ns
        self._inner.copy(inner)
        while (left_ns := deadline_ns - self._clock_ns()) > 0:
            if left_ns > 2 * _SPIN_NS:
                self._sleep(seconds_from_ns(left_ns - _SPIN_NS))

    def wire_s(self, prepared: Any) -> float | None:
        """None: the delay is part of the call."""
        del prepared
        return None

    def clear_target(self) -> None:
        self._inner.clear_target()

    def differs(self, segments: Segments) -> int | None:
        """As the execution inside."""
        return self._inner.differs(segments)

    def close(self) -> None:
        self._inner.close()
