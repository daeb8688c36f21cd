import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.percentiles import interval_ranks, least_samples, percentile, percentile_with_interval

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(FLOATS, st.floats(0, 1))
def test_a_percentile_is_numpys(values: list[float], quantile: float) -> None:
    assert percentile(values, quantile) == pytest.approx(float(np.percentile(values, quantile * 100)), abs=1e-6)


@pytest.mark.parametrize(("quantile", "least"), [(0.95, 72), (0.99, 368), (0.999, 3688), (0.5, 6)])
def test_the_least_sample_of_a_percentile_is_what_the_tables_of_order_statistics_say(
    quantile: float, least: int
) -> None:
    assert least_samples(quantile) == least
    assert interval_ranks(least, quantile)[1] is not None
    assert interval_ranks(least - 1, quantile)[1] is None


def test_ranks_of_a_median_are_those_of_the_sign_test() -> None:
    # Table of the sign test at 95 %: for n = 10 the 2nd and 9th values, for n = 20 the 6th and 15th.
    assert interval_ranks(10, 0.5) == (1, 8)
    assert interval_ranks(20, 0.5) == (5, 14)


def test_the_interval_covers_the_true_percentile_as_often_as_promised() -> None:
    generator = random.Random(7)
    covered = 0
    for _ in range(400):
        found = percentile_with_interval([generator.random() for _ in range(400)], 0.99)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.99 <= found.high
    assert covered >= 380


def test_large_samples_have_the_ranks_of_the_normal_approximation() -> None:
    low, high = interval_ranks(100_000, 0.99)
    # 99,000 ± 1.96·√990 = 99,000 ± 61.7
    assert low == pytest.approx(98_938, abs=2)
    assert high == pytest.approx(99_062, abs=2)
