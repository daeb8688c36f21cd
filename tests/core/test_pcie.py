import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.pcie import GENERATIONS, generation, pcie_bytes_per_s


@pytest.mark.parametrize(
    ("lane_gt_per_s", "gb_per_s"),
    [(2.5, 4.0), (5.0, 8.0), (8.0, 15.754), (16.0, 31.508), (32.0, 63.015), (64.0, 121.0)],
)
def test_sixteen_lanes_carry_what_the_standard_says(lane_gt_per_s: float, gb_per_s: float) -> None:
    assert pcie_bytes_per_s(lane_gt_per_s, 16) == pytest.approx(gb_per_s * 1e9, rel=1e-4)


@given(st.sampled_from(sorted(GENERATIONS)), st.integers(1, 32))
def test_twice_the_lanes_carry_twice_the_bytes(lane_gt_per_s: float, width: int) -> None:
    assert pcie_bytes_per_s(lane_gt_per_s, 2 * width) == pytest.approx(2 * pcie_bytes_per_s(lane_gt_per_s, width))


def test_an_unknown_lane_rate_has_no_generation() -> None:
    assert generation(16.0) == 4
    assert generation(12.0) is None
