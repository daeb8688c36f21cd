"""The lemmas on overlap and split, as properties; the split against brute force."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.overlap import (
    exposed_s,
    layer_split_s,
    layerwise_finish_s,
    suffix_break_even_tokens,
    token_split,
)

rates = st.floats(1e-3, 1e3)
seconds = st.floats(1e-6, 10.0)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, float]:
    return {
        "tokens": draw(st.integers(1, 5000)),
        "linear_flop_per_token": draw(st.floats(0.01, 100)),
        "attention_flop_per_pair": draw(st.floats(0, 1)),
        "bytes_per_token": draw(st.floats(0.01, 100)),
        "flop_per_s": draw(rates),
        "bytes_per_s": draw(rates),
    }


def times(p: dict[str, float], x: int, fixed_s: float = 0.0) -> tuple[float, float]:
    compute = (p["linear_flop_per_token"] * x + p["attention_flop_per_pair"] * x * x) / p["flop_per_s"]
    load = fixed_s + p["bytes_per_token"] * (p["tokens"] - x) / p["bytes_per_s"] if x < p["tokens"] else 0.0
    return compute, load


@given(problems(), st.floats(0, 1))
def test_the_token_split_is_as_good_as_trying_every_point(problem: dict[str, float], fixed_s: float) -> None:
    found = token_split(**problem, fixed_s=fixed_s)  # type: ignore[arg-type]
    best = min(max(times(problem, x, fixed_s)) for x in range(int(problem["tokens"]) + 1))
    one_token = max(times(problem, 1)[0], problem["bytes_per_token"] / problem["bytes_per_s"])
    steepest = max(
        one_token,
        (problem["linear_flop_per_token"] + 2 * problem["attention_flop_per_pair"] * problem["tokens"])
        / problem["flop_per_s"],
    )
    # x* is rounded to a whole token, so it may lose one token's time; loading nothing saves the fixed cost as well.
    assert best <= found.t_s * (1 + 1e-9)
    assert found.t_s <= best + steepest + fixed_s + 1e-9


@given(problems())
def test_a_token_split_is_never_worse_than_a_layer_split_which_gains_at_most_two(problem: dict[str, float]) -> None:
    tokens = int(problem["tokens"])
    recompute_s, load_s = times(problem, tokens)[0], times(problem, 0)[1]
    layer_s = layer_split_s(wire_s=load_s, recompute_s=recompute_s)
    assert layer_s == pytest.approx(load_s * recompute_s / (load_s + recompute_s))
    assert min(load_s, recompute_s) / layer_s <= 2 + 1e-9
    slack = (problem["linear_flop_per_token"] + 2 * problem["attention_flop_per_pair"] * tokens) / problem["flop_per_s"]
    slack += problem["bytes_per_token"] / problem["bytes_per_s"]
    assert token_split(**problem).t_s <= layer_s + slack  # type: ignore[arg-type]


@given(problems())
def test_no_split_gains_more_than_the_golden_bound(problem: dict[str, float]) -> None:
    tokens = int(problem["tokens"])
    best_whole = min(times(problem, tokens)[0], times(problem, 0)[1])
    assert best_whole / token_split(**problem).t_s <= (3 + sqrt(5)) / 2 + 1e-9  # type: ignore[arg-type]


@given(st.floats(0, 1))
def test_at_equal_times_the_gain_lies_between_two_and_the_golden_bound(share: float) -> None:
    tokens = 1_000_000
    split = token_split(
        tokens=tokens,
        linear_flop_per_token=(1 - share) / tokens,
        attention_flop_per_pair=share / tokens**2,
        bytes_per_token=1 / tokens,
        flop_per_s=1,
        bytes_per_s=1,
    )
    assert 2 - 1e-4 <= 1 / split.t_s <= (3 + sqrt(5)) / 2 + 1e-4


@given(problems(), st.floats(1, 100))
def test_more_bandwidth_moves_the_split_towards_loading(problem: dict[str, float], factor: float) -> None:
    faster = problem | {"bytes_per_s": problem["bytes_per_s"] * factor}
    assert token_split(**faster).x_star <= token_split(**problem).x_star + 1  # type: ignore[arg-type]


def test_the_split_goes_to_its_ends_with_bandwidth() -> None:
    def x_star(bytes_per_s: float) -> int:
        return token_split(
            tokens=1000, linear_flop_per_token=1, attention_flop_per_pair=0.01, bytes_per_token=1, flop_per_s=1000,
            bytes_per_s=bytes_per_s,
        ).x_star  # fmt: skip

    assert x_star(1e12) == 0
    assert x_star(1e-9) == 1000


@given(problems(), st.integers(1, 512))
def test_chunks_lose_at_most_one_chunk_of_time(problem: dict[str, float], grain: int) -> None:
    tokens = int(problem["tokens"])
    edges = [*range(0, tokens, grain), tokens]
    in_chunks = min(max(times(problem, x)) for x in edges)
    chunk_s = max(
        times(problem, tokens)[0] - times(problem, max(0, tokens - grain))[0],
        problem["bytes_per_token"] * grain / problem["bytes_per_s"],
    )
    assert in_chunks <= token_split(**problem).t_s + chunk_s + 1e-9  # type: ignore[arg-type]


@given(seconds, seconds, seconds, st.integers(2, 200))
def test_a_layer_split_is_as_good_as_trying_every_layer(wire: float, recompute: float, fixed: float, n: int) -> None:
    best = min(max(fixed + k / n * wire if k else 0.0, (n - k) / n * recompute) for k in range(n + 1))
    found = layer_split_s(wire_s=wire, recompute_s=recompute, fixed_s=fixed)
    assert found <= best + 1e-9
    assert best <= found + (wire + recompute) / n + 1e-9


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=40), seconds)
def test_layerwise_time_lies_between_the_longer_part_and_the_sum(
    layers: list[tuple[float, float]], fixed: float
) -> None:
    loads, computes = [load for load, _ in layers], [compute for _, compute in layers]
    finish = layerwise_finish_s(loads, computes, fixed_s=fixed)
    assert finish <= fixed + sum(loads) + sum(computes) + 1e-9
    assert finish >= max(fixed + sum(loads) + computes[-1], fixed + loads[0] + sum(computes)) - 1e-9
    assert exposed_s(loads, computes, fixed_s=fixed) == pytest.approx(finish - sum(computes))


@given(seconds, seconds, st.integers(1, 100), seconds)
def test_uniform_layers_follow_the_closed_form(load: float, compute: float, layers: int, fixed: float) -> None:
    finish = layerwise_finish_s([load] * layers, [compute] * layers, fixed_s=fixed)
    assert finish == pytest.approx(fixed + load + (layers - 1) * max(load, compute) + compute)


@given(st.floats(1e-9, 1e-3), st.floats(1e-9, 1e-3))
def test_the_suffix_break_even_is_the_smallest_that_hides_a_layer(load_s: float, per_token_s: float) -> None:
    tokens = suffix_break_even_tokens(layer_load_s=load_s, layer_compute_s=lambda n: n * per_token_s)
    assert tokens is not None
    assert tokens * per_token_s >= load_s
    assert tokens == 1 or (tokens - 1) * per_token_s < load_s


def test_a_suffix_that_can_never_hide_the_load_has_no_break_even() -> None:
    assert suffix_break_even_tokens(layer_load_s=1.0, layer_compute_s=lambda _: 0.5) is None
