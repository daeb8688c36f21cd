"""Hiding a load behind compute: layer by layer under a suffix, or by computing the front while the back loads.

Both splits start compute and load together. Ignored: SM and DRAM contention between them (an SM copy kernel slows
compute by its share of SMs). Source: derivations in docs/load-vs-recompute.md; token split after Cake (2410.03065).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt


def layerwise_finish_s(
    layer_load_s: Sequence[float], layer_compute_s: Sequence[float], *, fixed_s: float = 0.0
) -> float:
    """When the last layer's compute ends: E_i = max(E_{i-1}, A_i) + c_i, A_i the arrival of layer i.

    Uniform layers: T_fixed + ℓ + (L-1)·max(ℓ, c) + c.
    """
    arrival, finish = fixed_s, 0.0
    for load_s, compute_s in zip(layer_load_s, layer_compute_s, strict=True):
        arrival += load_s
        finish = max(finish, arrival) + compute_s
    return finish


def exposed_s(layer_load_s: Sequence[float], layer_compute_s: Sequence[float], *, fixed_s: float = 0.0) -> float:
    """Load time that compute does not hide: finish minus all compute."""
    return layerwise_finish_s(layer_load_s, layer_compute_s, fixed_s=fixed_s) - sum(layer_compute_s)


def smallest(holds: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """Smallest integer in [low, high] for which a monotone condition holds; None if it never does."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """Compute tokens [0, x), load [x, N) at the same time; both end together at `t_s`."""

    x_star: int
    t_s: float


def split_point(
    *,
    tokens: int,
    linear_flop_per_token: float,
    attention_flop_per_pair: float,
    bytes_per_token: float,
    flop_per_s: float,
    bytes_per_s: float,
    fixed_s: float = 0.0,
) -> float:
    """Where compute from the front and load from the back end together, not rounded to a token.

    Per rank: compute C(x) = (a·x + b·x²)/P with a FLOP per token and b FLOP per token² (half the work of a causal
    pair); load T0 + κ(N-x)/B. Equal at x* = [-(a+κρ) + sqrt((a+κρ)² + 4b(κNρ + T0·P))]/(2b), ρ = P/B, clamped to
    [0, N]. The front is computed because a token needs only tokens before it, and early tokens attend to fewest.
    """
    rho = flop_per_s / bytes_per_s
    target = bytes_per_token * tokens * rho + fixed_s * flop_per_s
    slope = linear_flop_per_token + bytes_per_token * rho
    if target <= 0:
        return 0.0
    if slope <= 0 and attention_flop_per_pair <= 0:
        return float(tokens)
    # The root without subtraction, so that b → 0 loses no digits.
    return min(2 * target / (slope + sqrt(slope * slope + 4 * attention_flop_per_pair * target)), float(tokens))


def token_split(
    *,
    tokens: int,
    linear_flop_per_token: float,
    attention_flop_per_pair: float,
    bytes_per_token: float,
    flop_per_s: float,
    bytes_per_s: float,
    fixed_s: float = 0.0,
) -> TokenSplit:
    """The split at the whole token next to `split_point`, with the time it takes."""
    x = round(
        split_point(
            tokens=tokens,
            linear_flop_per_token=linear_flop_per_token,
            attention_flop_per_pair=attention_flop_per_pair,
            bytes_per_token=bytes_per_token,
            flop_per_s=flop_per_s,
            bytes_per_s=bytes_per_s,
            fixed_s=fixed_s,
        )
    )
    compute_s = (linear_flop_per_token * x + attention_flop_per_pair * x * x) / flop_per_s
    load_s = fixed_s + bytes_per_token * (tokens - x) / bytes_per_s if x < tokens else 0.0
    return TokenSplit(x_star=x, t_s=max(compute_s, load_s))


def layer_split_s(*, wire_s: float, recompute_s: float, fixed_s: float = 0.0) -> float:
    """Load the top layers while the rest is recomputed bottom-up; uniform layers, both ending together.

    T_r·(T0 + w)/(w + T_r): the share f of layers that are loaded costs T0 + f·w, the others (1-f)·T_r.
    """
    if recompute_s <= fixed_s:
        return recompute_s
    return recompute_s * (fixed_s + wire_s) / (wire_s + recompute_s)


def suffix_break_even_tokens(
    *, layer_load_s: float, layer_compute_s: Callable[[int], float], limit_tokens: int = 1 << 24
) -> int | None:
    """Smallest suffix S whose compute per layer hides the load of a layer: c(S) ≥ ℓ; None above `limit_tokens`.

    Compute is smooth, so every other step interpolates instead of halving the bracket.
    """
    if layer_load_s <= 0:
        return 0
    low, low_s = 0, 0.0
    high, high_s = 64, layer_compute_s(64)
    while high_s < layer_load_s:
        if high >= limit_tokens:
            return None
        low, low_s = high, high_s
        high = min(2 * high, limit_tokens)
        high_s = layer_compute_s(high)
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        if interpolate:
            middle = low + ceil((high - low) * (layer_load_s - low_s) / (high_s - low_s))
            middle = min(max(middle, low + 1), high - 1)
        middle_s = layer_compute_s(middle)
        if middle_s >= layer_load_s:
            high, high_s = middle, middle_s
        else:
            low, low_s = middle, middle_s
        interpolate = not interpolate
    return high
