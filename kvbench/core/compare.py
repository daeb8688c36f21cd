"""Load, recompute or split: the comparison, its margin, and the input whose change would flip it."""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

from kvbench.core.links import queue_time_s, utilisation
from kvbench.core.overlap import TokenSplit, exposed_s, layer_split_s, split_point, token_split

Verdict = Literal["load", "recompute", "split", "too_close", "no_verdict"]

CLOSE_RATIO = 1.15  # two times within 15 % of each other are too close to call on modelled inputs
SPLIT_GAIN = 1.2  # a split needs engine support, so it must beat the better whole option by a fifth
MAX_UTILISATION = 0.8  # beyond it waiting time grows faster than any model of the load is good
_SEARCH_DECADES, _SEARCH_STEP, _SEARCH_HALVINGS = 2.0, 0.25, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cached prefix on the busiest rank, in closed form.

    Loading all but the first x tokens takes `latency_s + (const_bytes + bytes_per_token·(tokens - x)) / bytes_per_s`,
    after a wait behind `loads_per_s` equal loads on the same path. Computing the first x takes
    `start_s + linear_s·x + quadratic_s·x²`; attention priors η = η_max·N/(N+N_half) keep that form.
    `layer_bytes` with `suffix_layer_s` > 0: the compute of a suffix hides later layers' loads.
    """

    tokens: int
    bytes_per_token: float
    const_bytes: float
    bytes_per_s: float
    latency_s: float
    linear_s: float
    quadratic_s: float
    start_s: float = 0.0
    loads_per_s: float = 0.0
    layer_bytes: tuple[float, ...] = ()
    suffix_layer_s: float = 0.0

    @property
    def load_bytes(self) -> float:
        """All bytes of the prefix on this rank."""
        return self.const_bytes + self.bytes_per_token * self.tokens

    @property
    def wire_s(self) -> float:
        """Bytes over bandwidth, nothing else."""
        return self.load_bytes / self.bytes_per_s

    @property
    def utilisation_ratio(self) -> float:
        """ρ: the share of time that loads keep this rank's path busy."""
        return utilisation(loads_per_s=self.loads_per_s, service_s=self.latency_s + self.wire_s)

    @property
    def queue_s(self) -> float:
        """Wait behind other loads; infinite on a path that is always busy."""
        if self.loads_per_s == 0:
            return 0.0
        return queue_time_s(loads_per_s=self.loads_per_s, service_s=self.latency_s + self.wire_s)

    @property
    def hidden_s(self) -> float:
        """Load time that the suffix's compute hides, layer by layer."""
        if self.suffix_layer_s == 0 or not self.layer_bytes:
            return 0.0
        loads = [size / self.bytes_per_s for size in self.layer_bytes]
        return sum(loads) - exposed_s(loads, [self.suffix_layer_s] * len(loads))

    @property
    def t_load_s(self) -> float:
        """Load time the request waits for: queue + latency + wire - hidden."""
        return max(0.0, self.queue_s + self.latency_s + self.wire_s - self.hidden_s)

    @property
    def t_recompute_s(self) -> float:
        """Time to compute the prefix instead."""
        return self.start_s + self.linear_s * self.tokens + self.quadratic_s * self.tokens**2

    @property
    def ratio(self) -> float:
        """T_recompute / T_load: above 1 loading is faster."""
        return self.t_recompute_s / self.t_load_s if self.t_load_s > 0 else inf

    @property
    def best_whole_s(self) -> float:
        """The better of loading everything and computing everything."""
        return min(self.t_load_s, self.t_recompute_s)

    def split(self) -> TokenSplit:
        """Best token split, or loading everything where that is no slower.

        Constant bytes (recurrent state, full windows) and the wait are paid by any split. The split itself hides
        nothing under a suffix, because compute is busy with the front.
        """
        if self.bytes_per_token == 0 or not isfinite(self.queue_s):
            return TokenSplit(x_star=0, t_s=self.t_load_s)
        split = token_split(**self._split_terms())
        split_s = split.t_s + self.start_s
        if split.x_star == 0 or split_s >= self.t_load_s:
            return TokenSplit(x_star=0, t_s=self.t_load_s)
        return TokenSplit(x_star=split.x_star, t_s=split_s)

    def split_gain(self) -> float:
        """Time of the better whole option over the split's; 1 where a split does not help.

        Not rounded to a token, so that the verdict does not jump with tokens on short prefixes.
        """
        if self.bytes_per_token == 0 or not isfinite(self.queue_s):
            return 1.0
        x = split_point(**self._split_terms())
        split_s = self.start_s + self.linear_s * x + self.quadratic_s * x * x
        return max(1.0, self.best_whole_s / split_s) if x > 0 and split_s > 0 else 1.0

    def _split_terms(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "linear_flop_per_token": self.linear_s,
            "attention_flop_per_pair": self.quadratic_s,
            "bytes_per_token": self.bytes_per_token,
            "flop_per_s": 1.0,
            "bytes_per_s": self.bytes_per_s,
            "fixed_s": self.queue_s + self.latency_s + self.const_bytes / self.bytes_per_s - self.start_s,
        }

    def layer_split_s(self) -> float | None:
        """Time of a layer split of uniform layers; None on a path that is always busy."""
        if not isfinite(self.queue_s):
            return None
        fixed_s = self.queue_s + self.latency_s
        return layer_split_s(wire_s=self.wire_s, recompute_s=self.t_recompute_s, fixed_s=fixed_s)

    def whole_verdict(self) -> Verdict:
        """Load or recompute, no split: what an engine without split restore can do."""
        if self.utilisation_ratio >= MAX_UTILISATION:
            return "no_verdict"
        if self.ratio >= CLOSE_RATIO:
            return "load"
        return "recompute" if self.ratio <= 1 / CLOSE_RATIO else "too_close"

    def verdict(self) -> Verdict:
        """The best of the three, where it is better by more than the doubt."""
        if self.utilisation_ratio >= MAX_UTILISATION:
            return "no_verdict"
        return "split" if self.split_gain() >= SPLIT_GAIN else self.whole_verdict()

    def break_even_bytes_per_s(self) -> float | None:
        """B*: bandwidth at which loading takes as long as recomputing; None if the rest alone takes longer.

        D/(T_recompute - latency); by bisection where queue or overlap change with the bandwidth too, and never below
        the bandwidth at which `loads_per_s` keep the path too busy for a verdict.
        """
        budget_s = self.t_recompute_s - self.latency_s
        if budget_s <= 0 and self.suffix_layer_s == 0:
            return None
        if self.loads_per_s == 0 and self.suffix_layer_s == 0:
            return self.load_bytes / budget_s
        low, high = self.bytes_per_s * 1e-6, self.bytes_per_s * 1e6
        if self._at_bandwidth(high).ratio < 1:
            return None
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._at_bandwidth(middle).ratio >= 1 else (middle, high)
        if self.loads_per_s == 0:
            return high
        wire_budget_s = MAX_UTILISATION / self.loads_per_s - self.latency_s
        return max(high, self.load_bytes / wire_budget_s) if wire_budget_s > 0 else None

    def _at_bandwidth(self, bytes_per_s: float) -> "Comparison":
        return self.with_factors(bandwidth=bytes_per_s / self.bytes_per_s)

    def most_loads_per_s(self) -> float:
        """λ at which the path is as busy as a verdict allows: MAX_UTILISATION / (latency + wire)."""
        service_s = self.latency_s + self.wire_s
        return MAX_UTILISATION / service_s if service_s > 0 else inf

    def with_factors(self, *, bandwidth: float = 1.0, compute: float = 1.0) -> "Comparison":
        """The same prefix at other speeds."""
        # Written out: `dataclasses.replace` takes three times as long, and a search for flips makes dozens.
        return Comparison(
            tokens=self.tokens,
            bytes_per_token=self.bytes_per_token,
            const_bytes=self.const_bytes,
            bytes_per_s=self.bytes_per_s * bandwidth,
            latency_s=self.latency_s,
            linear_s=self.linear_s / compute,
            quadratic_s=self.quadratic_s / compute,
            start_s=self.start_s / compute,
            loads_per_s=self.loads_per_s,
            layer_bytes=self.layer_bytes,
            suffix_layer_s=self.suffix_layer_s / compute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """The smallest change of one input that changes the verdict: its factor, and the verdict beyond it."""

    input: Literal["bandwidth", "compute"]
    factor: float
    becomes: Verdict

    @property
    def distance(self) -> float:
        """The factor as a change away from 1, whichever the direction."""
        return max(self.factor, 1 / self.factor)


def flips(comparison: Comparison) -> tuple[Flip, ...]:
    """Nearest verdict changes along bandwidth and compute speed, nearest first; searched over two decades each way."""
    if comparison.verdict() == "no_verdict":
        return ()
    # Without latency and waiting only the ratio of the two speeds counts: compute flips at the inverse factor.
    proportional = comparison.latency_s == comparison.loads_per_s == 0
    found: list[Flip | None] = []
    for direction in (1, -1):
        bandwidth = _flip(comparison, "bandwidth", direction)
        found.append(bandwidth)
        if not proportional:
            found.append(_flip(comparison, "compute", direction))
        elif bandwidth is not None:
            found.append(Flip(input="compute", factor=1 / bandwidth.factor, becomes=bandwidth.becomes))
    return tuple(sorted((flip for flip in found if flip is not None), key=lambda flip: flip.distance))


def _flip(comparison: Comparison, name: Literal["bandwidth", "compute"], direction: int) -> Flip | None:
    now = comparison.verdict()

    def at(exponent: float) -> Verdict:
        factor = 10 ** (direction * exponent)
        return comparison.with_factors(**{name: factor}).verdict()

    low, high = 0.0, _SEARCH_STEP
    while high < _SEARCH_DECADES and at(high) == now:
        low, high = high, high + _SEARCH_STEP
    if at(high) == now:
        return None
    for _ in range(_SEARCH_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) == now else (low, middle)
    return Flip(input=name, factor=10 ** (direction * high), becomes=at(high))
