import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.fit import median_residual_ratio, nonnegative_least_squares, relative_fit

SIZES = [2**power for power in range(16, 30, 2)]
TOKENS = [128, 256, 512, 1024, 2048, 4096]
costs = st.floats(1e-9, 1e3)


@given(fixed_s=st.floats(1e-7, 1e-1), bytes_per_s=st.floats(1e6, 1e12))
def test_a_load_fit_recovers_the_constants_it_was_made_from(fixed_s: float, bytes_per_s: float) -> None:
    targets = [fixed_s + size / bytes_per_s for size in SIZES]
    fixed, s_per_byte = relative_fit([(1.0, size) for size in SIZES], targets)
    fitted = [fixed + s_per_byte * size for size in SIZES]
    assert median_residual_ratio(fitted, targets) < 1e-6
    if 1e-3 < fixed_s * bytes_per_s / SIZES[0] < 1e3:  # outside of that one of the two cannot be seen in the times
        assert fixed == pytest.approx(fixed_s, rel=1e-3)
        assert 1 / s_per_byte == pytest.approx(bytes_per_s, rel=1e-3)


@given(c0=st.floats(1e-6, 1e-1), c1=st.floats(1e-7, 1e-3), c2=st.floats(1e-11, 1e-6))
def test_a_prefill_fit_predicts_token_counts_it_never_saw(c0: float, c1: float, c2: float) -> None:
    def seconds(tokens: int) -> float:
        return c0 + c1 * tokens + c2 * tokens**2

    fitted = relative_fit([(1.0, n, n**2) for n in TOKENS], [seconds(n) for n in TOKENS])
    predicted = sum(c * f for c, f in zip(fitted, (1.0, 16384, 16384**2), strict=True))
    assert predicted == pytest.approx(seconds(16384), rel=1e-3)


@given(
    rows=st.lists(st.tuples(costs, costs, costs), min_size=3, max_size=8),
    targets=st.lists(costs, min_size=8, max_size=8),
)
def test_no_coefficient_is_negative_and_none_of_a_grid_is_better(
    rows: list[tuple[float, float, float]], targets: list[float]
) -> None:
    targets = targets[: len(rows)]
    found = nonnegative_least_squares(rows, targets)

    def error(candidate: tuple[float, ...]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, candidate, strict=True)) - t) ** 2
            for row, t in zip(rows, targets, strict=True)
        )

    assert min(found) >= 0
    best = error(found)
    for factors in itertools.product((0.0, 0.9, 1.0, 1.1), repeat=3):
        assert best <= error(tuple(c * f for c, f in zip(found, factors, strict=True))) * (1 + 1e-6) + 1e-12


def test_a_time_that_falls_with_size_gets_no_bandwidth_rather_than_a_negative_one() -> None:
    assert relative_fit([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)], [4.0, 2.0, 1.0])[1] == 0.0


def test_small_and_large_sizes_weigh_the_same() -> None:
    generator = random.Random(7)
    targets = [(1e-4 + size / 1e10) * generator.uniform(0.95, 1.05) for size in SIZES]
    fixed, _ = relative_fit([(1.0, size) for size in SIZES], targets)
    assert fixed == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("targets", [[], [0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0]])
def test_a_fit_without_positive_times_is_a_mistake_of_the_caller(targets: list[float]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        relative_fit([(1.0, 2.0)] * len(targets), targets)
