from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.bootstrap import median_interval

samples = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30)


@given(samples)
def test_the_interval_lies_inside_the_samples_and_around_their_median(values: list[float]) -> None:
    low, high = median_interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)


@given(samples, st.floats(0.01, 100))
def test_scaled_samples_have_a_scaled_interval(values: list[float], factor: float) -> None:
    scaled = median_interval([value * factor for value in values])
    assert scaled == pytest.approx(tuple(end * factor for end in median_interval(values)))


def test_more_confidence_is_wider_and_equal_samples_have_no_width() -> None:
    values = [1.0, 1.1, 0.9, 1.5, 0.7, 1.2, 1.05]
    narrow, wide = median_interval(values, confidence=0.5), median_interval(values, confidence=0.99)
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]
    assert median_interval([2.0] * 9) == (2.0, 2.0)


def test_no_samples_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
