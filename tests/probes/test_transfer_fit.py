from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.units import KIB, MIB
from kvbench.probes.transfer_fit import crossovers, fitted, measured_path
from kvbench.results.probe import ProbeCase, ProbeSample

GRID = [(size, size // segment) for size in (MIB, 4 * MIB, 16 * MIB) for segment in (16 * KIB, 64 * KIB, 256 * KIB)]


def times(fixed: float, per_segment: float, rate: float) -> list[ProbeSample]:
    return [
        ProbeSample(bytes=size, segments=count, seconds=fixed + count * per_segment + size / rate)
        for size, count in GRID
    ]


@given(fixed=st.floats(1e-6, 1e-2), per_segment=st.floats(1e-7, 1e-4), rate=st.floats(1e8, 1e11))
def test_the_fit_finds_the_constants_that_made_the_times(fixed: float, per_segment: float, rate: float) -> None:
    samples = times(fixed, per_segment, rate)
    fit = fitted(samples)
    assert fit is not None
    assert fit.residual_ratio < 1e-6
    predicted = [
        (fit.fixed_s or 0) + sample.segments * (fit.per_segment_s or 0) + sample.bytes * (fit.s_per_byte or 0)
        for sample in samples
    ]
    assert predicted == pytest.approx([sample.seconds for sample in samples], rel=1e-4)


def test_what_the_points_cannot_tell_apart_is_none_and_not_zero() -> None:
    whole = [ProbeSample(bytes=size, segments=1, seconds=1e-3 + size / 1e9) for size in (MIB, 2 * MIB, 4 * MIB)]
    fit = fitted(whole)
    assert fit is not None
    assert fit.per_segment_s is None
    assert fit.fixed_s == pytest.approx(1e-3)
    assert fit.bytes_per_s == pytest.approx(1e9)
    assert fitted(whole[:1]) is None


def case(name: str, curve: dict[int, float], **changes: Any) -> ProbeCase:
    samples = tuple(
        ProbeSample(bytes=16 * MIB, segments=16 * MIB // segment, seconds=16 * MIB / rate)
        for segment, rate in curve.items()
        for _ in range(3)
    )
    settings: dict[str, Any] = {
        "name": name, "path": "dram:", "direction": "h2h", "method": name, "layout": "scattered", "concurrency": 1,
        "status": "ok", "reason": None, "elapsed_s": 1.0, "source": "host memory", "destination": "host memory",
        "cold": True, "cold_evidence": "made up", "placement": "", "samples": samples,
    }  # fmt: skip
    return ProbeCase(**(settings | changes))


def test_a_crossover_lies_where_the_lines_meet_and_ties_do_not_count() -> None:
    gather = case("gather", {4 * KIB: 4e9, 64 * KIB: 4e9, 128 * KIB: 4e9, MIB: 4e9})
    batch = case("batch", {4 * KIB: 1e9, 64 * KIB: 4.1e9, 128 * KIB: 3.9e9, MIB: 16e9})
    (crossing,) = crossovers([gather, batch])
    assert (crossing.faster_below, crossing.faster_above) == ("gather", "batch")
    # four times slower at 4 KiB, four times faster at 1 MiB: on two logarithmic axes they meet in the middle
    assert crossing.segment_bytes == pytest.approx((4 * KIB * MIB) ** 0.5)
    assert crossing.bytes_per_s == pytest.approx(4e9)


def test_lines_that_never_cross_have_no_crossover() -> None:
    slow, fast = case("slow", {4 * KIB: 1e9, MIB: 2e9}), case("fast", {4 * KIB: 2e9, MIB: 4e9})
    assert crossovers([slow, fast]) == ()
    assert crossovers([slow]) == ()


def test_a_path_takes_the_segments_that_carried_most() -> None:
    samples = tuple(
        ProbeSample(bytes=size, segments=size // segment, seconds=1e-4 + size / rate)
        for size in (MIB, 16 * MIB)
        for segment, rate in ((4 * KIB, 1e9), (64 * KIB, 5e9))
    )
    path = measured_path(case("gather", {}, samples=samples), "dram", "h2h")
    assert path is not None
    assert path.bytes_per_s == pytest.approx(5e9)
    assert path.fixed_s == pytest.approx(1e-4)
    assert {sample.bytes for sample in path.samples} == {MIB, 16 * MIB}
    assert measured_path(case("gather", {4 * KIB: 1e9}), "dram", "h2h") is None


def test_a_lead_inside_the_noise_is_no_crossover() -> None:
    def noisy(name: str, curve: dict[int, float]) -> ProbeCase:
        samples = tuple(
            ProbeSample(bytes=16 * MIB, segments=16 * MIB // segment, seconds=16 * MIB / rate * factor)
            for segment, rate in curve.items()
            for factor in (0.5, 0.8, 1.0, 1.3, 2.0)
        )
        return case(name, {}, samples=samples)

    assert crossovers([noisy("a", {4 * KIB: 1e9, MIB: 2e9}), noisy("b", {4 * KIB: 1.2e9, MIB: 1.7e9})]) == ()
