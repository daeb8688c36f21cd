"""Shares of a sliding window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.heat import SlidingShares


def test_a_prefix_in_half_of_the_requests_has_a_share_of_one_half() -> None:
    shares: SlidingShares[str] = SlidingShares(100.0)
    for n in range(10):
        shares.add_request(float(n))
        if n % 2:
            shares.add("p", float(n))
    assert shares.share_ratio("p", 10.0) == pytest.approx(0.5)
    assert shares.share_ratio("q", 10.0) == 0
    assert shares.requests(10.0) == 10


def test_what_was_hot_fades_as_the_window_slides_over_it() -> None:
    shares: SlidingShares[str] = SlidingShares(100.0)
    for _ in range(10):
        shares.add_request(50.0)
        shares.add("p", 50.0)
    for n in range(10):
        shares.add_request(150.0 + n)
    assert shares.share_ratio("p", 160.0) == pytest.approx(10 * 0.4 / (10 + 10 * 0.4))
    assert shares.share_ratio("p", 210.0) == 0
    assert shares.requests(500.0) == 0


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), min_size=1, max_size=50))
def test_a_share_is_between_zero_and_one(accesses: list[tuple[float, bool]]) -> None:
    shares: SlidingShares[str] = SlidingShares(70.0)
    for at, named in sorted(accesses):
        shares.add_request(at)
        if named:
            shares.add("p", at)
        assert -1e-9 <= shares.share_ratio("p", at) <= 1 + 1e-9
