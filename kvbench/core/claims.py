"""Checks of what somebody claims about a tiered cache against what the model and the machine allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.core.provenance import Warning_
from kvbench.core.units import format_bytes, format_duration

SHARE_TOLERANCE = 1e-6
SIZE_TOLERANCE = 0.01
TAIL_SHARE, TAIL_COST = 0.05, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MixShare:
    """One outcome of a look-up: how often it happens, what it costs, and its part of the expected time."""

    tier: str
    probability_ratio: float
    t_s: float
    expected_ratio: float


def expected_time_s(hit_shares: Mapping[str, float], times_s: Mapping[str, float]) -> float:
    """E[T] = Σ_i p_i·T_i over disjoint outcomes, the miss among them; per request, not per token."""
    return sum(share * times_s[name] for name, share in hit_shares.items())


def mix(hit_shares: Mapping[str, float], times_s: Mapping[str, float]) -> tuple[MixShare, ...]:
    """Each outcome's part of E[T]."""
    expected = expected_time_s(hit_shares, times_s)
    return tuple(
        MixShare(
            tier=name,
            probability_ratio=share,
            t_s=times_s[name],
            expected_ratio=share * times_s[name] / expected if expected else 0.0,
        )
        for name, share in hit_shares.items()
    )


def check_shares(hit_shares: Mapping[str, float]) -> tuple[Warning_, ...]:
    """Hit shares with the miss must sum to 1: they are probabilities of disjoint outcomes."""
    total = sum(hit_shares.values())
    if abs(total - 1) <= SHARE_TOLERANCE:
        return ()
    shares = " + ".join(f"{name} {share:g}" for name, share in hit_shares.items())
    return (
        Warning_(
            code="impossible-hit-shares",
            message=f"hit shares {shares} sum to {total:g}, not 1; outcomes of one look-up are disjoint",
            remedy="give the share of every tier and of `miss` so that they sum to 1",
        ),
    )


def check_tail(shares: tuple[MixShare, ...]) -> tuple[Warning_, ...]:
    """A rare outcome that carries most of the expected time decides the result."""
    return tuple(
        Warning_(
            code="tail-dominates",
            message=f"{share.tier} is {share.probability_ratio:.1%} of look-ups but {share.expected_ratio:.0%} of E[T]",
            remedy=f"lower the cost or the share of {share.tier} before adding capacity elsewhere",
        )
        for share in shares
        if 0 < share.probability_ratio < TAIL_SHARE and share.expected_ratio > TAIL_COST
    )


def check_slow_hits(shares: tuple[MixShare, ...]) -> tuple[Warning_, ...]:
    """A hit that takes longer than a miss is one the engine should not take."""
    miss_s = next((share.t_s for share in shares if share.tier == "miss"), None)
    return tuple(
        Warning_(
            code="hit-slower-than-miss",
            message=(
                f"a hit in {share.tier} takes {format_duration(share.t_s)}, recomputing takes "
                f"{format_duration(miss_s)}; E[T] charges the hit"
            ),
            remedy=f"recompute instead of loading from {share.tier} at this length, or count its share as a miss",
        )
        for share in shares
        if miss_s is not None and share.probability_ratio > 0 and share.t_s > miss_s
    )


def check_bytes_per_token(claimed_bytes: int, exact_bytes: Sequence[int], model: str) -> tuple[Warning_, ...]:
    """A claimed cache size per token against those the config gives: averages, and what one more token adds."""
    if any(abs(claimed_bytes - exact) <= SIZE_TOLERANCE * exact for exact in exact_bytes):
        return ()
    nearest = min(exact_bytes, key=lambda exact: abs(claimed_bytes - exact))
    return (
        Warning_(
            code="impossible-bytes-per-token",
            message=(
                f"claimed {claimed_bytes} B per token ({format_bytes(claimed_bytes)}), "
                f"but {model} stores {nearest} B ({format_bytes(nearest)}): {claimed_bytes / nearest:.2f} times"
            ),
            remedy="check layers, KV heads, element bytes and K+V (factor 2) of the claim",
        ),
    )


def check_request_rate(*, claimed_per_s: float, miss_ratio: float, prefill_floor_s: float) -> tuple[Warning_, ...]:
    """A claimed request rate against the prefill roofline: rate ≤ 1 / (miss share · F/(ranks·P))."""
    busy_s = miss_ratio * prefill_floor_s
    if claimed_per_s * busy_s <= 1:
        return ()
    return (
        Warning_(
            code="impossible-request-rate",
            message=(
                f"{claimed_per_s:g} requests/s with {miss_ratio:.0%} misses needs {claimed_per_s * busy_s:.1f} times "
                f"the machine: one miss keeps all ranks busy for {format_duration(prefill_floor_s)} at peak FLOP/s, "
                f"so at most {1 / busy_s:.3g}/s"
            ),
            remedy="check prefix length, GPU count and hit share of the claim",
        ),
    )
