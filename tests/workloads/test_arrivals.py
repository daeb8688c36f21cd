import math
from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.workloads.arrivals import Arrival, checked_arrival, spread, start_times, ties
from kvbench.workloads.distributions import Popularity, parse_distribution

TIMED = st.sampled_from(["constant", "poisson", "gamma"])


def times(arrival: Arrival, count: int, seed: int = 7) -> list[float]:
    return list(islice(start_times(arrival, Random(seed)), count))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_spread_that_burstiness_says(burstiness: float) -> None:
    arrival = Arrival(process="gamma", rate_per_s=5.0, burstiness=burstiness)
    gaps = [later - earlier for earlier, later in pairwise(times(arrival, 40_001))]
    mean, cv = fmean(gaps), pstdev(gaps) / fmean(gaps)
    wanted = 1 / math.sqrt(burstiness)
    assert mean == pytest.approx(0.2, rel=5 * wanted / math.sqrt(40_000))
    assert cv == pytest.approx(wanted, rel=0.06)


def test_poisson_counts_in_equal_spans_have_a_variance_like_their_mean() -> None:
    arrival = Arrival(process="poisson", rate_per_s=20.0)
    starts = times(arrival, 40_000)
    counts = [0] * 1900
    for start in starts:
        if start < 1900:
            counts[int(start)] += 1
    assert fmean(counts) == pytest.approx(20, rel=0.03)
    assert pstdev(counts) ** 2 == pytest.approx(20, rel=0.12)


def test_constant_gaps_are_constant() -> None:
    assert times(Arrival(process="constant", rate_per_s=4.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


@given(TIMED, st.floats(0.01, 1000), st.floats(0.01, 100), st.floats(0, 100), st.integers(0, 10))
def test_times_never_fall_and_one_seed_gives_one_pattern_at_every_rate(
    process: str, rate: float, faster: float, ramp_s: float, seed: int
) -> None:
    arrival = Arrival(process=process, rate_per_s=rate, ramp_s=ramp_s, burstiness=0.5)  # type: ignore[arg-type]
    starts = times(arrival, 50, seed)
    assert starts == sorted(starts) == times(arrival, 50, seed)
    assert starts[0] == (0.0 if ramp_s == 0 else pytest.approx(0.0))
    plain = times(Arrival(process=process, rate_per_s=rate, burstiness=0.5), 50, seed)  # type: ignore[arg-type]
    quick = times(Arrival(process=process, rate_per_s=rate * faster, burstiness=0.5), 50, seed)  # type: ignore[arg-type]
    assert quick == pytest.approx([one / faster for one in plain])


def test_a_ramp_brings_half_as_many_requests_in_its_time_and_all_of_them_later() -> None:
    starts = times(Arrival(process="constant", rate_per_s=10.0, ramp_s=20.0), 400)
    # the integral of 10·t/20 over 20 s is 100; afterwards 10 a second
    assert sum(start < 20.0 - 1e-9 for start in starts) == 100
    assert sum(start < 10.0 - 1e-9 for start in starts) == 25
    assert sum(20.0 - 1e-9 <= start < 30.0 - 1e-9 for start in starts) == 100


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).map(sorted))
def test_spreading_keeps_the_order_the_span_and_the_first_of_each_time(raw: list[int]) -> None:
    recorded = [float(one) for one in raw]
    moved = spread(recorded)
    assert moved == sorted(moved)
    assert len(moved) == len(recorded)
    assert all(now >= before for now, before in zip(moved, recorded, strict=True))
    for place, time in enumerate(recorded):
        later = next((one for one in recorded if one > time), math.inf)
        assert moved[place] < later
        if place == 0 or recorded[place - 1] != time:
            assert moved[place] == time
    distinct, tied, most = ties(recorded)
    assert distinct == len(set(recorded))
    assert tied == sum(recorded.count(one) > 1 for one in recorded)
    assert most == max(recorded.count(one) for one in recorded)
    if distinct > 1:
        assert ties(moved)[0] == len(moved)


def test_spreading_is_even() -> None:
    assert spread([0.0, 0.0, 0.0, 3.0, 3.0]) == [0.0, 1.0, 2.0, 3.0, 4.5]


@pytest.mark.parametrize(
    ("arrival", "message"),
    [
        (Arrival(process="poisson"), "needs a rate"),
        (Arrival(process="poisson", rate_per_s=-1.0), "needs a rate"),
        (Arrival(process="closed"), "needs a concurrency"),
        (Arrival(process="gamma", rate_per_s=1.0, burstiness=0.0), "must be above zero"),
        (Arrival(process="trace", speedup=0.0), "must be above zero"),
        (Arrival(process="trace", ramp_s=3.0), "leave the ramp out"),
    ],
)
def test_numbers_that_do_not_fit_the_process_are_refused(arrival: Arrival, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_arrival(arrival)


def number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


@pytest.mark.parametrize(
    ("written", "mean", "low", "high"),
    [
        (7, 7, 7, 7),
        ({"uniform": [2, 10]}, 6, 2, 10),
        ({"exponential": {"mean": 5}}, 5, 0, math.inf),
        ({"lognormal": {"mean": 100, "cv": 0.5}}, 100, 0, math.inf),
        ({"choice": {1: 3, 5: 1}}, 2, 1, 5),
        ({"mixture": [{"weight": 1, "of": 0}, {"weight": 3, "of": {"uniform": [0, 8]}}]}, 3, 0, 8),
    ],
)
def test_a_distribution_has_the_mean_it_says_and_stays_within_its_bounds(
    written: object, mean: float, low: float, high: float
) -> None:
    distribution = parse_distribution(written, number)
    random = Random(3)
    draws = [distribution.draw(random) for _ in range(20_000)]
    assert fmean(draws) == pytest.approx(mean, rel=0.05)
    assert low <= min(draws) <= max(draws) <= high
    assert distribution.most == high


def test_bounds_of_a_lognormal_cut_it() -> None:
    cut = parse_distribution({"lognormal": {"mean": 100, "cv": 3, "min": 20, "max": 200}}, number)
    random = Random(3)
    draws = [cut.draw(random) for _ in range(2000)]
    assert (min(draws), max(draws)) == (20, 200)


def test_nothing_is_drawn_above_what_can_be_planned() -> None:
    open_ended = parse_distribution({"mixture": [{"weight": 1, "of": {"exponential": {"mean": 900}}}]}, number, 1000)
    random = Random(3)
    assert max(open_ended.draw(random) for _ in range(1000)) == open_ended.most == 1000
    for written in (
        1001,
        {"uniform": [1, 1001]},
        {"exponential": {"mean": 5, "max": 2000}},
        {"choice": {5: 1, 1002: 1}},
    ):
        with pytest.raises(ValueError, match="1000 is the most that can be planned"):
            parse_distribution(written, number, 1000)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"lognorml": {"mean": 1, "cv": 1}}, "unknown distribution 'lognorml' .did you mean 'lognormal'"),
        ({"lognormal": {"mean": 1, "cv": 1, "maxx": 3}}, "unknown key 'maxx' in lognormal .did you mean 'max'"),
        ({"lognormal": {"mean": 1}}, "needs mean and cv"),
        ({"uniform": [5, 1]}, "give the lower one first"),
        ({"uniform": 5}, "lowest and the highest"),
        ({"choice": {}}, "choice maps"),
        ({"choice": {1: -1}}, "-1 is not a number above zero"),
        ({"mixture": [{"of": 1}]}, "weight and of"),
        ({"uniform": [1, 2], "choice": {1: 1}}, "has one name"),
        ({"exponential": {"mean": 0}}, "mean above zero"),
    ],
)
def test_a_misspelt_distribution_is_refused_with_a_hint(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_distribution(written, number)


def test_popularity_follows_its_law() -> None:
    random = Random(1)
    popularity = Popularity(10, 1.0)
    draws = [popularity.draw(random) for _ in range(50_000)]
    whole = sum(1 / rank for rank in range(1, 11))
    for rank in (1, 2, 5, 10):
        assert draws.count(rank - 1) / 50_000 == pytest.approx(1 / rank / whole, rel=0.08)
    even = Popularity(4, 0.0)
    assert {even.draw(random) for _ in range(200)} == {0, 1, 2, 3}
