"""Metadata that never raises and never makes a caller wait: a backend behind a deadline and a circuit breaker."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbench.core.block_key import BlockKey
from kvbench.tiers.blocking_calls import BlockingCalls
from kvbench.tiers.breaker import Breaker
from kvbench.tiers.metadata.base import (
    LOOKUP_BUDGET_S,
    Location,
    MetadataBackend,
    MetadataStats,
    MetadataUnavailableError,
)

_KEPT_LATENCIES = 10_000
_T = TypeVar("_T")


class GuardedMetadata:
    """A `MetadataBackend` as `Metadata`: calls run in one thread, `timeout_s` each; leases are renewed every `renew_s`.

    A call past its time counts as a failure for the breaker, and its late answer is dropped.
    """

    def __init__(
        self,
        backend: MetadataBackend,
        *,
        timeout_s: float,
        renew_s: float,
        budget_s: float = LOOKUP_BUDGET_S,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend, self._timeout_s, self._budget_s, self._clock = backend, timeout_s, budget_s, clock
        self._breaker = breaker or Breaker()
        self._calls = BlockingCalls(f"metadata-{backend.name}")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=_KEPT_LATENCIES)
        self._last_error = ""
        self._closing = threading.Event()
        threading.Thread(target=self._renew, args=(renew_s,), name="metadata-leases", daemon=True).start()

    def put(self, keys: Sequence[BlockKey], location: Location, num_bytes: int | Sequence[int]) -> bool:
        sizes = [num_bytes] * len(keys) if isinstance(num_bytes, int) else list(num_bytes)
        if len(sizes) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(sizes)} sizes")
        names = tuple(keys)
        return self._changed("published", len(names), lambda: self._backend.put(names, location, sizes))

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        names = tuple(keys)
        if not names:
            return []
        begin_s = self._clock()
        found = self._call(lambda: self._backend.find(names))
        elapsed_s = self._clock() - begin_s
        with self._lock:
            self._counts["lookups"] += 1
            self._counts["keys"] += len(names)
            if isinstance(found, _Refused):
                return [None] * len(names)
            self._latencies_s.append(elapsed_s)
            if found is None:
                return [None] * len(names)
            self._counts["hits"] += sum(one is not None for one in found)
        return found

    def remove(self, keys: Sequence[BlockKey], location: Location) -> bool:
        names = tuple(keys)
        return self._changed("withdrawn", len(names), lambda: self._backend.remove(names, location))

    def drain(self, instance: str) -> bool:
        return self._changed("drained", 1, lambda: self._backend.drain(instance))

    def stats(self) -> MetadataStats:
        with self._lock:
            counts, latencies_s = Counter(self._counts), sorted(self._latencies_s)
        return MetadataStats(
            backend=self._backend.name,
            breaker=self._breaker.state,
            lookups=counts["lookups"],
            keys_looked_up=counts["keys"],
            hits=counts["hits"],
            published=counts["published"],
            withdrawn=counts["withdrawn"],
            skipped=counts["skipped"],
            timeouts=counts["timeouts"],
            failures=counts["failures"],
            breaker_opened=self._breaker.opened,
            lookup_p50_s=_percentile(latencies_s, 0.50),
            lookup_p99_s=_percentile(latencies_s, 0.99),
            lookup_max_s=latencies_s[-1] if latencies_s else None,
            budget_s=self._budget_s,
            last_error=self._last_error,
        )

    def close(self) -> None:
        self._closing.set()
        self._calls.close(self._backend.close, timeout_s=max(self._timeout_s, 1.0))

    def _changed(self, count: str, num_keys: int, call: Callable[[], None]) -> bool:
        if num_keys == 0:
            return True

        def change() -> bool:
            call()
            return True

        done = self._call(change)
        if done is not True:
            return False
        with self._lock:
            self._counts[count] += num_keys
        return True

    def _call(self, call: Callable[[], _T]) -> "_T | _Refused | None":
        """What `call` returns; None where it failed or ran out of time; `_REFUSED` where the breaker is open."""
        if not self._breaker.allows():
            with self._lock:
                self._counts["skipped"] += 1
            return _REFUSED
        try:
            result = self._calls.run(call, self._timeout_s)
        except TimeoutError:
            self._note("timeouts", f"no answer within {self._timeout_s:g} s")
            return None
        except MetadataUnavailableError as error:
            self._note("failures", str(error))
            return None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._note("failures", f"an answer that cannot be read ({type(error).__name__}: {error})")
            return None
        self._breaker.succeeded()
        return result

    def _note(self, count: str, reason: str) -> None:
        self._breaker.failed()
        with self._lock:
            self._counts[count] += 1
            self._last_error = reason

    def _renew(self, renew_s: float) -> None:
        while not self._closing.wait(renew_s):
            self._call(self._backend.renew)


class _Refused:
    """The breaker is open: the service was not asked."""


_REFUSED = _Refused()


def _percentile(ordered: Sequence[float], ratio: float) -> float | None:
    """The nearest-rank percentile of values in ascending order; None of none."""
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)] if ordered else None
