"""When requests are sent: processes with a rate, recorded times, or a free slot (closed loop)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from random import Random
from statistics import median
from typing import Literal

from kvbench.core.errors import UsageError
from kvbench.workloads.base import Loop

Process = Literal["constant", "poisson", "gamma", "at-once", "trace", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How sessions start; a request without a session counts as one.

    `burstiness` is the shape of gamma-distributed gaps: 1 is Poisson, below 1 is burstier; their coefficient of
    variation is 1 / sqrt(burstiness). `ramp_s`: the rate rises evenly from zero to `rate_per_s` in that time. `speedup`
    and `spread_ties` are for recorded times, `concurrency` for the closed loop.
    """

    process: Process
    rate_per_s: float | None = None
    burstiness: float = 1.0
    ramp_s: float = 0.0
    speedup: float = 1.0
    spread_ties: bool = False
    concurrency: int | None = None

    @property
    def loop(self) -> Loop:
        return "closed" if self.process == "closed" else "open"

    def __str__(self) -> str:
        ramp = f", rising from zero over {self.ramp_s:g} s" if self.ramp_s else ""
        if self.process != "trace" and self.speedup != 1:
            ramp += f", pauses {self.speedup:g} times as fast"
        return {
            "constant": f"constant gaps, {self.rate_per_s or 0:g}/s{ramp}",
            "poisson": f"Poisson, {self.rate_per_s or 0:g}/s{ramp}",
            "gamma": f"gamma gaps of shape {self.burstiness:g}, {self.rate_per_s or 0:g}/s{ramp}",
            "at-once": "all at once",
            "trace": "recorded times" + (f", {self.speedup:g} times as fast" if self.speedup != 1 else ""),
            "closed": f"closed loop, {self.concurrency} at a time{ramp}",
        }[self.process]


def checked_arrival(arrival: Arrival) -> Arrival:
    """The arrival, if its numbers fit its process; UsageError otherwise."""
    timed = arrival.process in ("constant", "poisson", "gamma")
    if timed and not (arrival.rate_per_s and 0 < arrival.rate_per_s < math.inf):
        raise UsageError(f"arrival {arrival.process!r} needs a rate above zero, such as 2/s")
    if arrival.process == "closed" and not (arrival.concurrency and 1 <= arrival.concurrency <= 1 << 20):
        raise UsageError(f"a closed loop needs a concurrency from 1 on (got {arrival.concurrency})")
    if not 0 < arrival.burstiness < math.inf or not 0 < arrival.speedup < math.inf or not 0 <= arrival.ramp_s < 1e9:
        raise UsageError(
            f"burstiness {arrival.burstiness:g} and speedup {arrival.speedup:g} must be above zero, "
            f"and the ramp ({arrival.ramp_s:g} s) not below"
        )
    if arrival.ramp_s and not timed:
        raise UsageError(f"arrival {arrival.process!r} has no rate that a ramp could raise; leave the ramp out")
    return arrival


def start_times(arrival: Arrival, random: Random) -> Iterator[float]:
    """Seconds after the start, without end, never falling; for the processes that have a rate, and for `at-once`.

    Gaps are drawn for a rate of one and then stretched, so one seed gives the same pattern at every rate.
    """
    if arrival.process == "at-once":
        while True:
            yield 0.0
    rate = arrival.rate_per_s or 0.0
    expected = 0.0  # arrivals that the rate makes one expect until now
    while True:
        yield _time_of(expected, rate, arrival.ramp_s)
        expected += _gap(arrival, random)


def _gap(arrival: Arrival, random: Random) -> float:
    if arrival.process == "constant":
        return 1.0
    if arrival.process == "poisson":
        return random.expovariate(1.0)
    return random.gammavariate(arrival.burstiness, 1 / arrival.burstiness)


def _time_of(expected: float, rate: float, ramp_s: float) -> float:
    """When that many arrivals are expected: rate·t²/(2·ramp) until t in the ramp, rate·(t - ramp/2) after it."""
    if expected < rate * ramp_s / 2:
        return math.sqrt(2 * ramp_s * expected / rate)
    return expected / rate + ramp_s / 2


def ties(times_s: Sequence[float]) -> tuple[int, int, int]:
    """Of sorted times: distinct ones, requests that share theirs with another, and the most that share one."""
    sizes = [sum(1 for _ in same) for _, same in groupby(times_s)]
    return len(sizes), sum(size for size in sizes if size > 1), max(sizes, default=0)


def spread(times_s: Sequence[float]) -> list[float]:
    """Sorted times, with those that are equal spread evenly up to the next; after the last by the usual gap."""
    groups = [(time, sum(1 for _ in same)) for time, same in groupby(times_s)]
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(groups)]
    usual = median(gaps) if gaps else 0.0
    moved: list[float] = []
    for (time, size), gap in zip(groups, [*gaps, usual], strict=True):
        moved.extend(time + gap * place / size for place in range(size))
    return moved
