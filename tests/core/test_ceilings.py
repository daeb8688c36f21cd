import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.ceilings import fair_shares
from kvbench.core.errors import KvbenchError

NAMES = ("a", "b", "c", "d")
CAPACITIES = st.dictionaries(st.sampled_from(NAMES), st.floats(0.1, 1000), min_size=1)
USES = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1.0, 2.0]), min_size=1), min_size=1, max_size=8
)


def test_two_flows_share_a_link_equally() -> None:
    assert fair_shares({"uplink": 10.0}, [{"uplink": 1}, {"uplink": 1}]) == ((5.0, "uplink"), (5.0, "uplink"))


def test_a_flow_that_is_stopped_early_leaves_its_share_to_the_others() -> None:
    # Both cross the uplink of 10; the first is stopped at 2 by its own link, so the second gets 8.
    shares = fair_shares({"own": 2.0, "uplink": 10.0}, [{"own": 1, "uplink": 1}, {"uplink": 1}])
    assert shares == ((2.0, "own"), (8.0, "uplink"))


def test_three_levels_by_hand() -> None:
    # Links: x 6 for flows 1 and 2, y 10 for flows 2 and 3. All grow to 3, where x is full; flow 3 gets 10 - 3 = 7.
    shares = fair_shares({"x": 6.0, "y": 10.0}, [{"x": 1}, {"x": 1, "y": 1}, {"y": 1}])
    assert shares == ((3.0, "x"), (3.0, "x"), (7.0, "y"))


def test_crossing_a_link_twice_costs_twice() -> None:
    assert fair_shares({"dram": 12.0}, [{"dram": 2}, {"dram": 1}]) == ((4.0, "dram"), (4.0, "dram"))


def test_a_flow_over_no_known_link_has_no_rate() -> None:
    assert fair_shares({"x": 1.0}, [{"unknown": 1}, {"x": 1}]) == ((0.0, ""), (1.0, "x"))


def test_a_link_without_capacity_is_refused() -> None:
    with pytest.raises(KvbenchError, match="capacity 0"):
        fair_shares({"x": 0.0}, [{"x": 1}])


@given(CAPACITIES, USES)
def test_no_link_carries_more_than_it_can(capacities: dict[str, float], uses: list[dict[str, float]]) -> None:
    shares = fair_shares(capacities, uses)
    for name, capacity in capacities.items():
        carried = sum(rate * use.get(name, 0.0) for (rate, _), use in zip(shares, uses, strict=True))
        assert carried <= capacity * (1 + 1e-6)


@given(CAPACITIES, USES)
def test_every_flow_is_stopped_by_a_full_link_on_which_nobody_gets_more(
    capacities: dict[str, float], uses: list[dict[str, float]]
) -> None:
    """The definition of max-min fairness."""
    shares = fair_shares(capacities, uses)
    for (rate, name), use in zip(shares, uses, strict=True):
        if not set(use) & set(capacities):
            assert (rate, name) == (0.0, "")
            continue
        carried = sum(other * using.get(name, 0.0) for (other, _), using in zip(shares, uses, strict=True))
        assert carried == pytest.approx(capacities[name], rel=1e-6)
        others = [other for (other, _), using in zip(shares, uses, strict=True) if name in using]
        assert rate >= max(others) * (1 - 1e-6)


@given(CAPACITIES, USES, st.sampled_from(NAMES))
def test_more_capacity_never_lowers_the_smallest_share(
    capacities: dict[str, float], uses: list[dict[str, float]], name: str
) -> None:
    def smallest(using: dict[str, float]) -> float:
        return min((rate for rate, by in fair_shares(using, uses) if by), default=0.0)

    if name in capacities:
        wider = {**capacities, name: capacities[name] * 2}
        assert smallest(wider) >= smallest(capacities) * (1 - 1e-9)
