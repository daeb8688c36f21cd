"""Claims that cannot be: shares, rates and sizes of the second seed among them."""

import pytest

from kvbench.core.claims import (
    check_bytes_per_token,
    check_request_rate,
    check_shares,
    check_slow_hits,
    check_tail,
    expected_time_s,
    mix,
)


def test_shares_that_do_not_sum_to_one_are_named_with_their_sum() -> None:
    seed = {"hbm": 0.78, "dram": 0.14, "file": 0.06, "remote": 0.02, "miss": 0.02}
    (warning,) = check_shares(seed)
    assert warning.code == "impossible-hit-shares"
    assert "sum to 1.02" in warning.message
    assert check_shares({"hbm": 0.8, "miss": 0.2}) == ()


def test_expected_time_is_a_weighted_sum_and_each_part_is_attributed() -> None:
    # The seed's own hits and costs: the 2 % remote hits are 91 % of the expected time.
    shares = {"hbm": 0.78, "dram": 0.14, "file": 0.06, "remote": 0.02}
    times = {"hbm": 100e-9, "dram": 100e-6, "file": 750e-6, "remote": 30e-3}
    assert expected_time_s(shares, times) == pytest.approx(659.078e-6)
    parts = mix(shares, times)
    assert sum(part.expected_ratio for part in parts) == pytest.approx(1)
    (warning,) = check_tail(parts)
    assert warning.code == "tail-dominates"
    assert "remote is 2.0% of look-ups but 91% of E[T]" in warning.message


def test_a_size_per_token_that_contradicts_the_config_is_named_with_the_factor() -> None:
    (warning,) = check_bytes_per_token(500_000, [262_144], "a 64-layer model")
    assert "1.91 times" in warning.message
    assert check_bytes_per_token(262_144, [100_000, 262_144], "a 64-layer model") == ()


def test_a_rate_above_the_roofline_is_named_with_what_is_possible() -> None:
    # 200K tokens of a 70B model take 63.9 s on four A100 at peak: 2.6/s per card with 70 % misses cannot be.
    (warning,) = check_request_rate(claimed_per_s=4 * 2.6, miss_ratio=0.7, prefill_floor_s=63.9)
    assert warning.code == "impossible-request-rate"
    assert "465.2 times" in warning.message
    assert check_request_rate(claimed_per_s=0.02, miss_ratio=0.7, prefill_floor_s=63.9) == ()


def test_a_hit_slower_than_a_miss_is_doubted() -> None:
    shares = mix({"dram": 0.3, "file": 0.2, "miss": 0.5}, {"dram": 1e-3, "file": 48e-3, "miss": 36e-3})
    (warning,) = check_slow_hits(shares)
    assert warning.code == "hit-slower-than-miss"
    assert "a hit in file takes 48.0 ms, recomputing takes 36.0 ms" in warning.message
