import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from kvbench.core.provenance import Origin, Warning_
from kvbench.core.units import KIB, MIB
from kvbench.probes.probe import provenance
from kvbench.report import probe as drawn
from kvbench.results.codec import from_json, to_json
from kvbench.results.document import Document, new_document
from kvbench.results.host import Host
from kvbench.results.probe import Anchor, Crossover, ProbeCase, ProbeFit, ProbeResult, ProbeSample

NO_GPU = "no GPU on this host (NVML: NVML Shared Library Not Found)"


def case(name: str, rates: dict[int, float], **changes: Any) -> ProbeCase:
    samples = tuple(
        ProbeSample(bytes=16 * MIB, segments=16 * MIB // segment, seconds=16 * MIB / rate * factor)
        for segment, rate in rates.items()
        for factor in (0.98, 1.0, 1.02)
    )
    settings: dict[str, Any] = {
        "name": f"{name} h2h", "path": "dram:", "direction": "h2h", "method": name, "layout": "scattered",
        "concurrency": 1, "status": "ok" if samples else "skipped", "reason": None if samples else NO_GPU,
        "elapsed_s": 1.0, "source": "host memory", "destination": "host memory", "cold": True,
        "cold_evidence": "made up", "placement": "not bound: one NUMA node", "setup_s": 0.3, "samples": samples,
        "fit": ProbeFit(fixed_s=1e-5, per_segment_s=None, s_per_byte=1e-10, residual_ratio=0.02) if samples else None,
    }  # fmt: skip
    return ProbeCase(**(settings | changes))


@pytest.fixture
def document(host: Host) -> Callable[..., Document[ProbeResult]]:
    def new(*cases: ProbeCase, **changes: Any) -> Document[ProbeResult]:
        result = ProbeResult(plan="page-sweep", question="Which is faster?", cases=cases, **changes)
        return new_document(result, command_line=("kvbench", "probe", "page-sweep"), provenance=provenance(), host=host)

    return new


LOOP = {4 * KIB: 2e9, 64 * KIB: 8e9, MIB: 12e9}
GATHER = {4 * KIB: 6e9, 64 * KIB: 9e9, MIB: 9e9}


def printed(document: Document[ProbeResult]) -> str:
    out = io.StringIO()
    drawn.terminal(document, Console(file=out, width=140))
    return out.getvalue()


def test_the_answer_comes_first_then_the_crossover_and_the_skipped(document: Any) -> None:
    crossing = Crossover(
        segment_bytes=200 * KIB, bytes_per_s=9e9, faster_below="host-gather h2h", faster_above="host-loop h2h"
    )
    anchor = Anchor(name="H200-SXM H2D", bytes_per_s=55e9, origin=Origin(provenance="spec", source="a data sheet"))
    text = printed(
        document(
            case("cuda-batch", {}),
            case("host-loop", LOOP),
            case("host-gather", GATHER),
            crossovers=(crossing,),
            anchors=(anchor,),
        )
    )
    first, question, crossed, skipped = text.splitlines()[:4]
    assert first.startswith("Fastest h2h: host-loop h2h with 12.00 GB/s for 16 MiB in pieces of 1 MiB, host memory →")
    assert question == "Question: Which is faster?"
    assert crossed == "From 200 KiB per segment on host-loop h2h is faster, below that host-gather h2h."
    assert skipped == f"1 case skipped: {NO_GPU}"
    assert "skipped: no GPU" in text
    assert "H200-SXM H2D 55.00 GB/s" in text
    assert "X crossover at 200 KiB" in text
    assert "1.40 ms" in text


def test_a_warm_case_is_never_the_fastest_while_a_cold_one_exists(document: Any) -> None:
    text = printed(document(case("host-loop", LOOP), case("host-gather", {4 * KIB: 99e9}, cold=False)))
    assert "Fastest h2h: host-loop" in text
    alone = printed(document(case("host-gather", {4 * KIB: 99e9}, cold=False)))
    assert "not cold: a cache's speed" in alone


def test_nothing_measured_says_why(document: Any) -> None:
    assert printed(document(case("cuda-batch", {}))).startswith(f"Nothing was measured: {NO_GPU}.")


def test_the_harness_says_what_measuring_costs(document: Any) -> None:
    fit = ProbeFit(fixed_s=1e-6, per_segment_s=1e-7, s_per_byte=None, residual_ratio=0.1)
    text = printed(document(case("null", LOOP, path="null:", fit=fit)))
    assert text.startswith("Measuring itself costs 1.00 µs per transfer and 100 ns per segment, and 300 ms per case.")


def test_the_page_has_a_figure_the_cases_and_their_doubts(document: Any) -> None:
    pytest.importorskip("matplotlib")
    doubt = Warning_(code="few-samples", message="fewer than <5> samples", remedy="measure more")
    page = drawn.html(document(case("host-loop", LOOP, warnings=(doubt,)), case("host-gather", GATHER)))
    assert page.count("<svg") == 1
    assert "fewer than &lt;5&gt; samples" in page
    assert "host-gather h2h" in page


def test_a_saved_probe_reads_back_the_same(document: Any) -> None:
    made = document(case("cuda-batch", {}), case("host-loop", LOOP))
    assert from_json(to_json(made), source="test") == made


def test_points_keep_raw_samples_apart_and_their_interval_around_the_median() -> None:
    points = case("host-loop", LOOP).points
    assert [point.segment_bytes for point in points] == [4 * KIB, 64 * KIB, MIB]
    for point in points:
        assert point.count == 3
        assert point.low_s <= point.median_s <= point.high_s
        assert point.cv_ratio == pytest.approx(0.02)
