"""Load, recompute or split: the comparison, its margin, and the input whose change would flip it."""

from dataclasses import dataclass
from typing import Any, Literal

from kvbench.core.overlap import TokenSplit, split_point, token_split

Verdict = Literal["load", "recompute", "split", "too_close", "no_verdict"]

CLOSE_RATIO = 1.15  # two times within 15 % of each other are too close to call on modelled inputs
SPLIT_GAIN = 1.2  # a split needs engine support, so it must beat the better whole option by a fifth
MAX_UTILISATION = 0.8  # beyond it waiting time grows faster than any model of the load is good
_SEARCH_DECADES, _SEARCH_STEP, _SEARCH_HALVINGS = 2.0, 0.25, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One cached prefix on the busiest rank, in closed form.

    Loading `x` of `tokens` fewer costs `fixed_s + (const_bytes + bytes_per_token·(tokens - x)) / bytes_per_s`.
    Recomputing the first x costs `linear_s·x + quadratic_s·x²`; attention priors η = η_max·N/(N+N_half) keep that form.
    `hidden_s` is load time that other compute hides. Waiting behind other loads is inside `fixed_s`.
    """

    tokens: int
    bytes_per_token: float
    const_bytes: float
    bytes_per_s: float
    fixed_s: float
    linear_s: float
    quadratic_s: float
    hidden_s: float = 0.0
    utilisation_ratio: float = 0.0

    @property
    def wire_s(self) -> float:
        """Bytes over bandwidth, nothing else."""
        return (self.const_bytes + self.bytes_per_token * self.tokens) / self.bytes_per_s

    @property
    def t_load_s(self) -> float:
        """Load time the request waits for."""
        return max(0.0, self.fixed_s + self.wire_s - self.hidden_s)

    @property
    def t_recompute_s(self) -> float:
        """Time to compute the prefix instead."""
        return self.linear_s * self.tokens + self.quadratic_s * self.tokens**2

    @property
    def ratio(self) -> float:
        """T_recompute / T_load: above 1 loading is faster."""
        return self.t_recompute_s / self.t_load_s if self.t_load_s > 0 else float("inf")

    def split(self) -> TokenSplit:
        """Best token split: compute the front, load the back and the constant part."""
        return token_split(**self._split_terms())

    def split_gain(self) -> float:
        """Time of the better whole option over the split's; 1 where a split does not help.

        Not rounded to a token, so that the verdict does not jump with tokens on short prefixes.
        """
        x = split_point(**self._split_terms())
        split_s = self.linear_s * x + self.quadratic_s * x * x
        best = min(self.t_load_s, self.t_recompute_s)
        return max(1.0, best / split_s) if split_s > 0 else 1.0

    def _split_terms(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "linear_flop_per_token": self.linear_s,
            "attention_flop_per_pair": self.quadratic_s,
            "bytes_per_token": self.bytes_per_token,
            "flop_per_s": 1.0,
            "bytes_per_s": self.bytes_per_s,
            "fixed_s": self.fixed_s + self.const_bytes / self.bytes_per_s,
        }

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
        """B*: bandwidth at which loading takes as long as recomputing; None if fixed costs alone take longer."""
        budget = self.t_recompute_s - self.fixed_s + self.hidden_s
        return (self.const_bytes + self.bytes_per_token * self.tokens) / budget if budget > 0 else None

    def smallest_useful_tokens(self) -> float | None:
        """N_min = T_fixed' / (t_rec - κ/B) at N → 0; None if a token loads slower than it computes.

        T_fixed' holds the constant bytes (recurrent state, full windows) too.
        """
        gain_s = self.linear_s - self.bytes_per_token / self.bytes_per_s
        return (self.fixed_s + self.const_bytes / self.bytes_per_s) / gain_s if gain_s > 0 else None

    def with_factors(self, *, bandwidth: float = 1.0, compute: float = 1.0) -> "Comparison":
        """The same prefix at other speeds."""
        # Written out: `dataclasses.replace` takes three times as long, and a search for flips makes dozens.
        return Comparison(
            tokens=self.tokens,
            bytes_per_token=self.bytes_per_token,
            const_bytes=self.const_bytes,
            bytes_per_s=self.bytes_per_s * bandwidth,
            fixed_s=self.fixed_s,
            linear_s=self.linear_s / compute,
            quadratic_s=self.quadratic_s / compute,
            hidden_s=self.hidden_s,
            utilisation_ratio=self.utilisation_ratio,
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
    found: list[Flip | None] = []
    for direction in (1, -1):
        bandwidth = _flip(comparison, "bandwidth", direction)
        # Without fixed or hidden time only the ratio of the two speeds counts: compute flips at the inverse factor.
        if comparison.fixed_s == comparison.hidden_s == 0 and bandwidth is not None:
            found += [bandwidth, Flip(input="compute", factor=1 / bandwidth.factor, becomes=bandwidth.becomes)]
        elif comparison.fixed_s == comparison.hidden_s == 0:
            found.append(None)
        else:
            found += [bandwidth, _flip(comparison, "compute", direction)]
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
