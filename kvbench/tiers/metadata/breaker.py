"""A circuit breaker: stop asking a service that is slow or dead, and ask again after a while."""

import threading
import time
from collections.abc import Callable

from kvbench.tiers.metadata.base import BreakerState


class Breaker:
    """Closed: calls pass. `failures` of them in a row open it: none passes for `cooldown_s`. Then half-open: one call
    passes, and its result closes the breaker or opens it for twice as long, up to `max_cooldown_s`.
    """

    def __init__(
        self,
        *,
        failures: int = 3,
        cooldown_s: float = 0.5,
        max_cooldown_s: float = 8.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._first_cooldown_s, self._max_cooldown_s, self._clock = (
            failures, cooldown_s, max_cooldown_s, clock,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._failures = 0
        self._cooldown_s = cooldown_s
        self._closed = True
        self._retry_at_s = 0.0
        self._trying = False
        self.opened = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._closed:
                return "closed"
            return "half-open" if self._trying or self._clock() >= self._retry_at_s else "open"

    def allows(self) -> bool:
        """Whether a call may be made now; every call that was allowed is followed by `succeeded` or `failed`."""
        with self._lock:
            if self._closed:
                return True
            if self._trying or self._clock() < self._retry_at_s:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """An allowed call has answered in time. One that was made before the breaker opened changes nothing."""
        with self._lock:
            if self._closed or self._trying:
                self._closed, self._trying, self._failures = True, False, 0
                self._cooldown_s = self._first_cooldown_s

    def failed(self) -> None:
        """An allowed call has failed, or took too long."""
        with self._lock:
            self._failures += 1
            if self._trying:
                self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
            elif not self._closed or self._failures < self._limit:
                return
            self._closed, self._trying = False, False
            self._retry_at_s = self._clock() + self._cooldown_s
            self.opened += 1
