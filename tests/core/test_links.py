"""What one rank gets of shared links, and how long it waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.core.links import LinkLimits, TierSpeed, queue_time_s, rank_rate, shared_buffer_rate, utilisation

NODE = LinkLimits(
    pcie=50e9, uplink=60e9, ranks_per_uplink=2, host_total=320e9, home_socket=150e9, inter_socket=100e9, sockets=2
)


@given(st.integers(1, 64), st.integers(1, 64))
def test_more_ranks_never_get_more_each(few: int, more: int) -> None:
    few, more = min(few, more), max(few, more)
    assert rank_rate(NODE, concurrent_ranks=more).bytes_per_s <= rank_rate(NODE, concurrent_ranks=few).bytes_per_s
    assert shared_buffer_rate(NODE, ranks=more).bytes_per_s <= shared_buffer_rate(NODE, ranks=few).bytes_per_s


def test_the_limit_that_binds_is_named() -> None:
    assert rank_rate(NODE, concurrent_ranks=1).limited_by == "pcie"
    assert rank_rate(NODE, concurrent_ranks=8).limited_by == "uplink shared by 2"
    assert rank_rate(NODE, concurrent_ranks=16).limited_by == "host memory shared by 16"
    assert rank_rate(NODE, concurrent_ranks=8, tier=TierSpeed(bytes_per_s=1e9)).limited_by == "tier"
    assert shared_buffer_rate(NODE, ranks=8).limited_by == "home socket shared by 8"


def test_half_of_the_ranks_sit_on_the_other_of_two_sockets() -> None:
    narrow = LinkLimits(pcie=50e9, inter_socket=40e9, sockets=2)
    assert shared_buffer_rate(narrow, ranks=8).bytes_per_s == 40e9 / 4
    assert shared_buffer_rate(LinkLimits(pcie=50e9, inter_socket=40e9), ranks=8).bytes_per_s == 50e9


def test_without_any_rate_it_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="--tier"):
        rank_rate(LinkLimits(), concurrent_ranks=1)


def test_a_shared_tier_is_divided_by_all_that_load_at_once() -> None:
    drive = TierSpeed(bytes_per_s=8e9, shared=True)
    assert rank_rate(NODE, concurrent_ranks=8, tier=drive).bytes_per_s == 1e9
    assert rank_rate(NODE, concurrent_ranks=8, tier=drive).limited_by == "tier shared by 8"
    assert rank_rate(NODE, concurrent_ranks=1, tier=drive).limited_by == "tier"
    assert shared_buffer_rate(NODE, ranks=4, tier=drive).bytes_per_s == 2e9


@given(st.floats(0, 0.99), st.floats(1e-4, 1))
def test_the_wait_is_that_of_an_m_d_1_queue(rho: float, service_s: float) -> None:
    wait_s = queue_time_s(loads_per_s=rho / service_s, service_s=service_s)
    assert wait_s == pytest.approx(rho * service_s / (2 * (1 - rho)))


def test_a_path_that_is_always_busy_never_serves() -> None:
    assert queue_time_s(loads_per_s=10, service_s=0.1) == float("inf")
    assert utilisation(loads_per_s=10, service_s=0.1) == 1.0
