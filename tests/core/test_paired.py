import math
import os
import random
from collections import Counter
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.paired import paired_ratio, paired_verdict, t_distribution, t_quantile

SEEDS = int(os.environ.get("KVBENCH_STATISTICS_EXPERIMENTS", "100"))


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [  # printed tables of Student's t
        (0.975, 1, 12.706), (0.975, 4, 2.776), (0.99, 4, 3.747), (0.995, 4, 4.604), (0.99, 1, 31.821), (0.99, 9, 2.821),
        (0.975, 30, 2.042), (0.95, 120, 1.658),
    ],
)  # fmt: skip
def test_quantiles_of_t_are_those_of_the_tables(probability: float, degrees: int, quantile: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(quantile, abs=6e-4)
    assert t_distribution(t_quantile(probability, degrees), degrees) == pytest.approx(probability)


def experiment(generator: random.Random, *, pairs: int, spread: float, factor: float) -> str:
    """Run medians that scatter by `spread`, on a machine whose speed drifts from pair to pair."""
    a, b = [], []
    for _ in range(pairs):
        drift = generator.lognormvariate(0, 0.2)
        a.append(drift * generator.lognormvariate(0, spread))
        b.append(drift * factor * generator.lognormvariate(0, spread))
    return paired_verdict(paired_ratio(a, b), better="lower")


@pytest.mark.parametrize("spread", [0.01, 0.04, 0.1, 0.3])
@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_identical_servers_are_called_different_in_at_most_five_of_a_hundred(spread: float, pairs: int) -> None:
    generator = random.Random(11)
    counts = Counter(experiment(generator, pairs=pairs, spread=spread, factor=1.0) for _ in range(SEEDS))
    assert counts["better"] + counts["worse"] <= 0.05 * SEEDS, counts


@pytest.mark.parametrize(("factor", "expected"), [(1.2, "worse"), (1 / 1.2, "better")])
def test_a_shift_of_a_fifth_at_four_percent_spread_is_found_with_five_pairs(factor: float, expected: str) -> None:
    generator = random.Random(12)
    counts = Counter(experiment(generator, pairs=5, spread=0.04, factor=factor) for _ in range(SEEDS))
    assert counts[expected] >= 0.9 * SEEDS, counts


def test_runs_of_skewed_correlated_requests_keep_the_promise_too() -> None:
    """Requests of one run share its queue: a run's level and a slow drift inside it, with a heavy tail."""
    generator = random.Random(13)

    def run_median(factor: float) -> float:
        level, waves = generator.lognormvariate(0, 0.04), 0.0
        ttfts = []
        for _ in range(60):
            waves = 0.9 * waves + generator.gauss(0, 0.05)
            ttfts.append(factor * level * math.exp(waves + generator.expovariate(3)))
        return median(ttfts)

    different = Counter(
        paired_verdict(
            paired_ratio([run_median(1) for _ in range(5)], [run_median(1) for _ in range(5)]), better="lower"
        )
        for _ in range(SEEDS)
    )
    assert different["better"] + different["worse"] <= 0.05 * SEEDS, different


def test_a_difference_that_is_sure_but_small_is_no_difference() -> None:
    a = [1.0, 1.001, 0.999, 1.0, 1.0005]
    b = [value * 1.01 for value in a]
    assert paired_verdict(paired_ratio(a, b), better="lower") == "no difference"


def test_one_pair_has_no_interval_and_decides_nothing() -> None:
    found = paired_ratio([1.0], [10.0])
    assert found.ratio == pytest.approx(10)
    assert found.low is None
    assert found.high is None
    assert paired_verdict(found, better="lower") == "inconclusive"


@given(st.lists(st.tuples(st.floats(1e-4, 1e4), st.floats(1e-4, 1e4)), min_size=2, max_size=8))
def test_swapping_the_sides_inverts_the_ratio_and_the_verdict(pairs: list[tuple[float, float]]) -> None:
    a, b = [one for one, _ in pairs], [other for _, other in pairs]
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.ratio == pytest.approx(1 / back.ratio)
    opposite = {"better": "worse", "worse": "better"}
    verdict = paired_verdict(there, better="lower")
    assert paired_verdict(back, better="lower") == opposite.get(verdict, verdict)
    assert paired_verdict(there, better="higher") == opposite.get(verdict, verdict)
