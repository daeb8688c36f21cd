"""Timed stores and loads of a tiered store, each block checked outside the clock."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.core.units import seconds_from_ns
from kvbench.probes.tier_work import Callers, ProbeBlocks, TierWork
from kvbench.tiers.tiered import LoadResult, TieredStore

Emit = Callable[[dict[str, Any]], None]


class StoreDriver:
    """What both cases share: timed stores and loads of blocks, checked outside the clock."""

    def __init__(self, work: TierWork, store: TieredStore, blocks: ProbeBlocks, callers: Callers, emit: Emit) -> None:
        self._work, self._store, self._blocks, self._callers, self._emit = work, store, blocks, callers, emit
        self.verified = self.failed = 0
        self._last_failure = ""
        self._random = random.Random(5)
        self._into: dict[int, list[list[memoryview]]] = {}

    def _stage(self, text: str) -> None:
        self._emit({"record": "stage", "text": text})

    def _warn(self, code: str, message: str, remedy: str) -> None:
        self._emit({"record": "warning", "code": code, "message": message, "remedy": remedy})

    def warn_zeros(self) -> None:
        """null: keeps only blocks of zeros."""
        if self._blocks.zeros:
            self._warn(
                "zeros", "blocks are all zeros, since null: keeps nothing else", "read it as a model, not as a medium"
            )

    def _store_from(self, first: int, batch: int, waited_for: Sequence[str]) -> bool:
        """Stores the next blocks, one batch per caller; emits the sample if all of them arrived."""
        ranges = [range(first + at * batch, first + (at + 1) * batch) for at in range(self._callers.count)]
        seconds, calls, results = self._callers.together([self._storing(one) for one in ranges])
        bad: dict[str, int] = {}
        for _, counts in results:
            for tier in waited_for:
                for result, count in counts.get(tier, {}).items():
                    if result not in ("ok", "exists"):
                        bad[result] = bad.get(result, 0) + count
        if bad:
            self.failed += sum(bad.values())
            self._last_failure = ", ".join(f"{count} {result}" for result, count in bad.items())
            return False
        blocks = batch * len(ranges)
        self._sample("store", blocks, seconds, calls, call_s=median([call for call, _ in results]))
        return True

    def _storing(self, indexes: range) -> Callable[[], tuple[float, Mapping[str, Mapping[str, int]]]]:
        keys, data = [self._blocks.keys[i] for i in indexes], [self._blocks.data[i] for i in indexes]

        def call() -> tuple[float, Mapping[str, Mapping[str, int]]]:
            begin_ns = time.perf_counter_ns()
            ticket = self._store.store(keys, data)
            call_s = seconds_from_ns(time.perf_counter_ns() - begin_ns)
            if not ticket.wait(self._work.wait_s):
                raise KvbenchError(f"a store was not ready within {self._work.wait_s:g} s; give the case more timeout")
            return call_s, ticket.results

        return call

    def _sample(
        self,
        phase: str,
        blocks: int,
        seconds: float,
        calls: Sequence[float],
        *,
        call_s: float | None = None,
        queue_ratio: float | None = None,
        tier: str = "",
    ) -> None:
        self._emit(
            {
                "record": "sample",
                "phase": phase,
                "tier": tier,
                "bytes": blocks * self._work.block_bytes,
                "blocks": blocks,
                "seconds": seconds,
                "call_s": call_s,
                "calls_s": list(calls) if len(calls) > 1 else [],
                "queue_ratio": queue_ratio,
            }
        )

    def _load(self, batch: int, among: Sequence[int], tier: str) -> tuple[float, list[float]] | None:
        """Loads random blocks, one batch per caller, and checks them after the clock; None when any was missing."""
        count = self._callers.count
        if batch not in self._into:
            self._into[batch] = [self._blocks.buffers(batch) for _ in range(count)]
        chosen = [self._random.sample(among, batch) for _ in range(count)]
        seconds, calls, results = self._callers.together(
            [self._loading(indexes, into) for indexes, into in zip(chosen, self._into[batch], strict=True)]
        )
        missing = [outcome for result in results for outcome in result.outcomes if outcome.result != "ok"]
        strayed = [name for result in results for name in result.tiers if name not in (None, tier)]
        if strayed:
            raise KvbenchError(f"a load meant for {tier} came from {strayed[0]}; please report this")
        for indexes, into, result in zip(chosen, self._into[batch], results, strict=True):
            for index, view, outcome in zip(indexes, into, result.outcomes, strict=True):
                if outcome.result == "ok":
                    self._blocks.check(index, view, tier)
                    self.verified += 1
        if missing:
            self.failed += len(missing)
            self._last_failure = f"{missing[0].result}: {missing[0].reason}".rstrip(": ")
            return None
        return seconds, calls

    def _loading(self, indexes: Sequence[int], into: Sequence[memoryview]) -> Callable[[], LoadResult]:
        keys = [self._blocks.keys[i] for i in indexes]
        return lambda: self._store.load(keys, into)

    def _flush(self) -> None:
        if not self._store.flush(self._work.wait_s):
            raise KvbenchError(f"queued stores were not done within {self._work.wait_s:g} s; give more timeout")
