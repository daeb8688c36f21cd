"""Faults in front of any tier, the same ones in every run: failures, damage, delays, hangs and outages."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import UsageError
from kvbench.core.units import parse_duration
from kvbench.tiers.base import Block, Entry, Outcome, Tier, TierStats, Wanted
from kvbench.tiers.counters import TierCounters
from kvbench.tiers.spec import TierSpec

_HANG_S = 3600.0
_DOWN = Outcome("failed", "injected: the place is down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Shares of blocks that a fault befalls, and when faults happen.

    `slow` is (share, seconds). `after` and `until` count the blocks of loads and stores from 0 on: faults befall only
    those from `after` on and before `until`. `down` is (start, end) in seconds since opening.
    """

    load_fail: float = 0.0
    store_fail: float = 0.0
    corrupt: float = 0.0
    torn: float = 0.0
    slow: tuple[float, float] = (0.0, 0.0)
    hang: float = 0.0
    after: int = 0
    until: int | None = None
    down: tuple[float, float] | None = None
    seed: int = 0


def open_faulty(spec: TierSpec, *, block_bytes: int, name: str) -> "FaultyTier":
    """The tier that `faulty(TIER, load_fail=0.1, …)` spells."""
    from kvbench.tiers.registry import open_tier

    if spec.inner is None:
        raise UsageError(f"tier {spec} wraps nothing; write it like faulty(dram:64GiB, load_fail=0.1)")
    return FaultyTier(open_tier(spec.inner, block_bytes=block_bytes, name=name), faults_of(spec))


def faults_of(spec: TierSpec) -> Faults:
    """The faults that a checked spec spells."""
    options = dict(spec.options)
    share, _, duration = options.get("slow", "0:0s").partition(":")
    start, _, end = options.get("down", "").partition("-")
    return Faults(
        load_fail=float(options.get("load_fail", 0)),
        store_fail=float(options.get("store_fail", 0)),
        corrupt=float(options.get("corrupt", 0)),
        torn=float(options.get("torn", 0)),
        slow=(float(share), parse_duration(duration)),
        hang=float(options.get("hang", 0)),
        after=int(options.get("after", 0)),
        until=int(options["until"]) if "until" in options else None,
        down=(parse_duration(start), parse_duration(end)) if end else None,
        seed=int(options.get("seed", 0)),
    )


class FaultyTier:
    """Decides by seed, block and how often that block was asked for, so the order of threads changes nothing.

    Damage is as a checking tier reports it: `corrupt` flips a bit of a loaded block, and a `torn` store is acknowledged
    but only half there; either load says corrupt, and the block is dropped. A hang ends with `close`.
    """

    def __init__(
        self,
        inner: Tier,
        faults: Faults,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner, self.name, self._faults = inner, inner.name, faults
        self.description = f"faulty: {getattr(inner, 'description', inner.name)}"
        self._clock, self._sleep, self._opened_at = clock, sleep, clock()
        self._lock = threading.Lock()
        self._asked: Counter[tuple[str, BlockKey]] = Counter()
        self._blocks = 0
        self._torn: set[BlockKey] = set()
        self._damaged_blocks = self._damaged_bytes = self._dropped_blocks = 0  # which the tier inside counts as loaded and evicted
        self._closed = threading.Event()
        self._counters = TierCounters()

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Stores what no fault befalls."""
        outcomes: dict[int, Outcome] = {}
        torn: list[int] = []
        for at, block in enumerate(blocks):
            draw = self._draws("store", block.key)
            if self._down():
                outcomes[at] = _DOWN
            elif draw is None:
                continue
            elif not self._in_time(draw):
                outcomes[at] = Outcome("timeout", "injected: the place hung")
            elif draw("store_fail") < self._faults.store_fail:
                outcomes[at] = Outcome("failed", "injected: the store failed")
            elif draw("torn") < self._faults.torn:
                torn.append(at)
        passed = [at for at in range(len(blocks)) if at not in outcomes]
        self._counters.stored([blocks[at] for at in outcomes], list(outcomes.values()))
        outcomes.update(zip(passed, self.inner.store([blocks[at] for at in passed]), strict=True))
        with self._lock:
            self._torn.update(blocks[at].key for at in torn if outcomes[at].result == "ok")
        return [outcomes[at] for at in range(len(blocks))]

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Loads what no fault befalls."""
        outcomes: dict[int, Outcome] = {}
        flipped: list[int] = []
        for at, want in enumerate(wanted):
            draw = self._draws("load", want.key)
            if self._down():
                outcomes[at] = _DOWN
            elif draw is None:
                continue
            elif not self._in_time(draw):
                outcomes[at] = Outcome("timeout", "injected: the place hung")
            elif draw("load_fail") < self._faults.load_fail:
                outcomes[at] = Outcome("failed", "injected: the load failed")
            elif draw("corrupt") < self._faults.corrupt:
                flipped.append(at)
        passed = [at for at in range(len(wanted)) if at not in outcomes]
        outcomes.update(zip(passed, self.inner.load([wanted[at] for at in passed]), strict=True))
        damaged = {at: self._damage(wanted[at], flip=at in flipped) for at in passed if outcomes[at].result == "ok"}
        outcomes.update({at: outcome for at, outcome in damaged.items() if outcome is not None})
        injected = [at for at in range(len(wanted)) if at not in passed or damaged.get(at) is not None]
        self._counters.loaded([wanted[at] for at in injected], [outcomes[at] for at in injected])
        return [outcomes[at] for at in range(len(wanted))]

    def _damage(self, want: Wanted, *, flip: bool) -> Outcome | None:
        """Damages a loaded block as its fault does; None where it has none."""
        with self._lock:
            torn = want.key in self._torn
            self._torn.discard(want.key)
        if not torn and not flip:
            return None
        into = want.into.cast("B")
        if torn:
            into[len(into) // 2 :] = bytes(len(into) - len(into) // 2)
        else:
            into[len(into) // 2] ^= 1
        dropped = sum(self.inner.evict([want.key]))
        with self._lock:
            self._damaged_blocks += 1
            self._damaged_bytes += want.into.nbytes
            self._dropped_blocks += dropped
        return Outcome("corrupt", f"injected: {'torn when it was stored' if torn else 'a bit flipped'}")

    def _draws(self, kind: str, key: BlockKey) -> Callable[[str], float] | None:
        """Numbers in [0, 1) by fault, or None while no fault happens."""
        with self._lock:
            number = self._blocks
            self._blocks += 1
            self._asked[kind, key] += 1
            times = self._asked[kind, key]
        until = self._faults.until
        if number < self._faults.after or (until is not None and number >= until):
            return None

        def draw(fault: str) -> float:
            text = f"{self._faults.seed} {kind} {fault} {key} {times}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            return int.from_bytes(digest, "big") / 2**64

        return draw

    def _in_time(self, draw: Callable[[str], float]) -> bool:
        """Passes the time that a slow or hanging block takes; False where it hung."""
        share, seconds = self._faults.slow
        if draw("slow") < share:
            self._sleep(seconds)
        if draw("hang") < self._faults.hang:
            self._closed.wait(_HANG_S)
            return False
        return True

    def _down(self) -> bool:
        if self._faults.down is None:
            return False
        start, end = self._faults.down
        return start <= self._clock() - self._opened_at < end

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As the tier inside; nothing while the place is down."""
        return [False] * len(keys) if self._down() else self.inner.contains(keys)

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As the tier inside; nothing while the place is down."""
        if self._down():
            return [False] * len(keys)
        with self._lock:
            self._torn.difference_update(keys)
        return self.inner.evict(keys)

    def entries(self) -> Iterator[Entry]:
        """As the tier inside."""
        return self.inner.entries()

    def stats(self) -> TierStats:
        """As the tier inside, with the injected faults counted too."""
        inner = self.inner.stats()
        mine = self._counters.stats(blocks=0, used_bytes=0, capacity_bytes=None)
        return TierStats(
            blocks=inner.blocks,
            used_bytes=inner.used_bytes,
            capacity_bytes=inner.capacity_bytes,
            stored_blocks=inner.stored_blocks,
            stored_bytes=inner.stored_bytes,
            loaded_blocks=inner.loaded_blocks - self._damaged_blocks,
            loaded_bytes=inner.loaded_bytes - self._damaged_bytes,
            evicted_blocks=inner.evicted_blocks - self._dropped_blocks,
            misses=inner.misses,
            corrupt=inner.corrupt + mine.corrupt,
            timeouts=inner.timeouts + mine.timeouts,
            failures=inner.failures + mine.failures,
        )

    def close(self) -> None:
        """Ends hangs and closes the tier inside."""
        self._closed.set()
        self.inner.close()
