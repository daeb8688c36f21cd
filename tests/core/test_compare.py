"""The verdict: monotone, equal at the break-even, and flipped by what it says flips it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbench.core.compare import CLOSE_RATIO, MAX_UTILISATION, SPLIT_GAIN, Comparison, flips
from kvbench.core.overlap import TokenSplit


@st.composite
def comparisons(draw: st.DrawFn, *, fixed: bool = True) -> Comparison:
    return Comparison(
        tokens=draw(st.integers(1, 200_000)),
        bytes_per_token=draw(st.floats(1, 1e6)),
        const_bytes=draw(st.floats(0, 1e8)) if fixed else 0.0,
        bytes_per_s=draw(st.floats(1e8, 1e12)),
        latency_s=draw(st.floats(0, 1e-2)) if fixed else 0.0,
        linear_s=draw(st.floats(1e-8, 1e-3)),
        quadratic_s=draw(st.floats(0, 1e-9)),
    )


@given(comparisons(), st.floats(1.01, 100))
def test_load_time_falls_with_bandwidth_and_recompute_time_with_compute(c: Comparison, factor: float) -> None:
    faster = c.with_factors(bandwidth=factor)
    assert faster.t_load_s < c.t_load_s
    assert faster.t_recompute_s == c.t_recompute_s
    assert c.with_factors(compute=factor).t_recompute_s < c.t_recompute_s


@given(comparisons())
def test_load_and_recompute_are_equal_at_the_break_even_bandwidth(c: Comparison) -> None:
    bytes_per_s = c.break_even_bytes_per_s()
    if bytes_per_s is None:
        assert c.latency_s >= c.t_recompute_s
        return
    assume(bytes_per_s < 1e18)
    at = replace(c, bytes_per_s=bytes_per_s)
    assert at.t_load_s == pytest.approx(at.t_recompute_s, rel=1e-6)


@given(comparisons())
def test_every_flip_it_names_changes_the_verdict_and_nothing_nearer_on_that_side_does(c: Comparison) -> None:
    for flip in flips(c):
        beyond = flip.factor * (1.001 if flip.factor > 1 else 0.999)
        assert c.with_factors(**{flip.input: beyond}).verdict() == flip.becomes != c.verdict()
        for share in (0.2, 0.5, 0.9) if flip.distance > 1.02 else ():  # nearer than the search resolves
            assert c.with_factors(**{flip.input: flip.factor**share}).verdict() == c.verdict()


@given(comparisons())
def test_the_verdict_follows_the_times(c: Comparison) -> None:
    verdict = c.verdict()
    if verdict == "load":
        assert c.t_recompute_s >= CLOSE_RATIO * c.t_load_s
    elif verdict == "recompute":
        assert c.t_load_s >= CLOSE_RATIO * c.t_recompute_s
    elif verdict == "split":
        token_s = c.linear_s + 2 * c.quadratic_s * c.tokens + c.bytes_per_token / c.bytes_per_s
        assert (c.split().t_s - token_s) * SPLIT_GAIN <= min(c.t_load_s, c.t_recompute_s) * (1 + 1e-9)


@given(comparisons(), st.floats(MAX_UTILISATION, 5))
def test_a_saturated_path_gets_no_verdict(c: Comparison, rho: float) -> None:
    saturated = replace(c, loads_per_s=1.001 * rho / (c.latency_s + c.wire_s))
    assert saturated.verdict() == saturated.whole_verdict() == "no_verdict"
    assert flips(saturated) == ()


def test_a_clear_case_and_a_close_one() -> None:
    clear = Comparison(
        tokens=1000, bytes_per_token=1e3, const_bytes=0, bytes_per_s=1e12, latency_s=0, linear_s=1e-3, quadratic_s=0
    )
    assert clear.verdict() == "load"
    # Fixed costs cannot be split away, so equal times with a load of mostly fixed cost are too close, not a split.
    close = replace(clear, latency_s=1.0)
    assert close.verdict() == close.whole_verdict() == "too_close"


@given(comparisons(), st.floats(0, 0.7))
def test_at_the_break_even_both_sides_are_equal_with_a_queue_too(c: Comparison, rho: float) -> None:
    waiting = replace(c, loads_per_s=rho / (c.latency_s + c.wire_s))
    assert waiting.t_load_s == pytest.approx(waiting.queue_s + waiting.latency_s + waiting.wire_s)
    bytes_per_s = waiting.break_even_bytes_per_s()
    assume(bytes_per_s is not None and 1e-5 < bytes_per_s / waiting.bytes_per_s < 1e5)
    assert bytes_per_s is not None
    at = replace(waiting, bytes_per_s=bytes_per_s)
    # A path that would be too busy at equality needs more bandwidth than equality does.
    assert at.utilisation_ratio <= MAX_UTILISATION * (1 + 1e-9)
    if at.utilisation_ratio < MAX_UTILISATION * (1 - 1e-6):
        assert at.ratio == pytest.approx(1, rel=1e-6)
    else:
        assert at.ratio >= 1 - 1e-6
    assert replace(waiting, loads_per_s=waiting.most_loads_per_s()).utilisation_ratio == pytest.approx(MAX_UTILISATION)


@given(comparisons(), st.integers(2, 80), st.floats(1e-6, 1e-2))
def test_a_suffix_hides_load_but_never_more_than_all_but_the_first_layer(
    c: Comparison, layers: int, compute_s: float
) -> None:
    hiding = replace(c, layer_bytes=(c.load_bytes / layers,) * layers, suffix_layer_s=compute_s)
    assert 0 <= hiding.hidden_s <= c.wire_s * (layers - 1) / layers + 1e-9
    assert hiding.t_load_s <= c.t_load_s + 1e-9
    assert hiding.split().t_s <= hiding.t_load_s + 1e-9
    bytes_per_s = hiding.break_even_bytes_per_s()
    if bytes_per_s is not None and 1e-5 < bytes_per_s / hiding.bytes_per_s < 1e5:
        assert replace(hiding, bytes_per_s=bytes_per_s).ratio == pytest.approx(1, rel=1e-6)


def test_more_load_on_a_path_never_makes_loading_look_better() -> None:
    idle = Comparison(
        tokens=1024, bytes_per_token=131072, const_bytes=0, bytes_per_s=50e9, latency_s=10e-3, linear_s=2.2e-5,
        quadratic_s=0,
    )  # fmt: skip
    loads = [replace(idle, loads_per_s=rate) for rate in (0, 20, 50, 70, 90, 200)]
    times = [one.t_load_s for one in loads]
    assert times == sorted(times)
    assert times[-1] == float("inf")
    assert [one.verdict() for one in loads][-2:] == ["no_verdict", "no_verdict"]
    assert loads[-1].split().t_s == float("inf")


def test_a_constant_state_cannot_be_split() -> None:
    state = Comparison(
        tokens=10**6, bytes_per_token=0, const_bytes=1e9, bytes_per_s=1e9, latency_s=0, linear_s=1e-6, quadratic_s=0
    )
    assert state.split() == TokenSplit(x_star=0, t_s=1.0)
    assert state.verdict() == "too_close"


def test_a_start_up_time_of_compute_is_paid_by_every_split() -> None:
    c = Comparison(
        tokens=1000, bytes_per_token=1e6, const_bytes=0, bytes_per_s=1e9, latency_s=0, linear_s=1e-3, quadratic_s=0,
        start_s=0.4,
    )  # fmt: skip
    best = min(max(0.4 + x * 1e-3, (1000 - x) * 1e-3) for x in range(1, 1000))
    assert c.split().t_s == pytest.approx(best, abs=1e-3)


def test_where_starting_to_compute_takes_longer_than_the_load_nothing_is_computed() -> None:
    c = Comparison(
        tokens=1000, bytes_per_token=1e3, const_bytes=0, bytes_per_s=1e9, latency_s=0, linear_s=1e-3, quadratic_s=0,
        start_s=5.0,
    )  # fmt: skip
    assert c.split() == TokenSplit(x_star=0, t_s=c.t_load_s)
    assert c.verdict() == "load"
