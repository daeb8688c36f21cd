"""A slower place in front of any tier: one serial link with a bandwidth and latencies, on which loads go first."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import UsageError
from kvbench.core.units import parse_bandwidth, parse_duration
from kvbench.tiers.base import Block, Entry, Outcome, Tier, TierStats, Wanted
from kvbench.tiers.spec import TierSpec

_QUANTUM_S = 5e-4  # a store lets go of the link this often, so that a load waits no longer


def open_throttled(spec: TierSpec, *, block_bytes: int, name: str) -> "ThrottledTier":
    """The tier that `throttled(TIER, bandwidth=…, latency=…, segment_latency=…)` spells."""
    from kvbench.tiers.registry import open_tier

    if spec.inner is None:
        raise UsageError(f"tier {spec} wraps nothing; write it like throttled(dram:64GiB, bandwidth=7GB/s)")
    options = dict(spec.options)
    return ThrottledTier(
        open_tier(spec.inner, block_bytes=block_bytes, name=name),
        bytes_per_s=parse_bandwidth(options["bandwidth"]) if "bandwidth" in options else None,
        latency_s=parse_duration(options.get("latency", "0s")),
        segment_latency_s=parse_duration(options.get("segment_latency", "0s")),
    )


class SerialLink:
    """A link that one transfer uses at a time. Waiting loads go before waiting stores, in order of arrival.

    The link keeps its own time: a transfer that was already waiting begins when the one before it ended by the model,
    not when a sleeping thread woke up, so oversleeping does not add up.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._changed = threading.Condition()
        self._waiting: tuple[deque[object], deque[object]] = (deque(), deque())  # loads, stores
        self._busy = False
        self._free_at = 0.0

    def use(self, seconds: float, *, load: bool, since: float) -> float:
        """Returns when the link has been used for that long, at the earliest from `since` on: the model's time."""
        if load:
            return self._hold(seconds, self._waiting[0], since)
        end = since
        while seconds > 0:
            end = self._hold(min(seconds, _QUANTUM_S), self._waiting[1], since)
            seconds -= _QUANTUM_S
        return end

    def _hold(self, seconds: float, queue: deque[object], since: float) -> float:
        me = object()
        with self._changed:
            queue.append(me)
            while self._busy or next(item for line in self._waiting for item in line) is not me:
                self._changed.wait()
            queue.popleft()
            self._busy = True
            end = self._free_at = max(self._free_at, since) + seconds
        try:
            while (left := end - self._clock()) > 0:
                self._sleep(left)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return end


class ThrottledTier:
    """Takes at least `latency + n·segment_latency + bytes / bandwidth` per call, of which the latency overlaps.

    `n` and the bytes are those of the blocks that moved; looking up and evicting cost one latency.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        segment_latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner, self.name = inner, inner.name
        self.description = f"throttled: {getattr(inner, 'description', inner.name)}"
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._latency_s, self._segment_latency_s = latency_s, segment_latency_s
        self._clock, self._sleep = clock, sleep
        self._link = SerialLink(clock, sleep)

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Stores, and takes its time on the link."""
        begin = self._clock()
        outcomes = self.inner.store(blocks)
        sizes = [block.data.nbytes for block, outcome in zip(blocks, outcomes, strict=True) if outcome.result == "ok"]
        self._pass_time(begin, sizes, load=False)
        return outcomes

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Loads, and takes its time on the link, before any waiting store."""
        begin = self._clock()
        outcomes = self.inner.load(wanted)
        moved = ("ok", "corrupt")
        sizes = [want.into.nbytes for want, outcome in zip(wanted, outcomes, strict=True) if outcome.result in moved]
        self._pass_time(begin, sizes, load=True)
        return outcomes

    def _pass_time(self, begin: float, sizes: Sequence[int], *, load: bool) -> None:
        on_link = len(sizes) * self._segment_latency_s + sum(sizes) * self._s_per_byte
        end = self._latency_s + (self._link.use(on_link, load=load, since=begin) if on_link > 0 else begin)
        while (left := end - self._clock()) > 0:
            self._sleep(left)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As the tier inside, one latency later."""
        begin = self._clock()
        found = self.inner.contains(keys)
        self._pass_time(begin, (), load=True)
        return found

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As the tier inside, one latency later."""
        begin = self._clock()
        found = self.inner.evict(keys)
        self._pass_time(begin, (), load=True)
        return found

    def entries(self) -> Iterator[Entry]:
        """As the tier inside."""
        return self.inner.entries()

    def stats(self) -> TierStats:
        """As the tier inside."""
        return self.inner.stats()

    def close(self) -> None:
        """Closes the tier inside."""
        self.inner.close()
