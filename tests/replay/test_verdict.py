import io
import os
from collections import Counter

import pytest
from rich.console import Console

from kvbench.core.provenance import Origin
from kvbench.replay.experiment import provenance, with_conclusions
from kvbench.replay.run import saturated
from kvbench.report import replay as report
from kvbench.report.replay_vllm_json import vllm_result
from kvbench.results.document import Document, new_document
from kvbench.results.replay import ReplayResult
from tests.replay.made_up import arm, experiment, request, run

EXPERIMENTS = int(os.environ.get("KVBENCH_STATISTICS_EXPERIMENTS", "100"))


def document(result: ReplayResult) -> Document[ReplayResult]:
    return new_document(result, command_line=("kvbench", "replay"), provenance=provenance(result))


def printed(result: ReplayResult) -> str:
    console = Console(file=io.StringIO(), width=120)
    report.terminal(document(result), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_whole_experiments_on_identical_servers_are_hardly_ever_called_different() -> None:
    verdicts = Counter(experiment(seed).verdict for seed in range(EXPERIMENTS))
    assert verdicts["better"] + verdicts["worse"] <= 0.05 * EXPERIMENTS, verdicts


def test_whole_experiments_find_a_fifth() -> None:
    # With what the median of twenty requests scatters by itself, 2.6 % make run medians scatter by 4 %.
    verdicts = Counter(experiment(seed, factor=1.2, spread=0.026).verdict for seed in range(EXPERIMENTS))
    assert verdicts["worse"] >= 0.9 * EXPERIMENTS, verdicts


def test_a_warm_start_overrules_the_interval() -> None:
    found = experiment(1, factor=0.3, state="contaminated")
    assert (found.verdict, found.headline and found.headline.measured) == ("contaminated", "better")
    assert "No verdict, contaminated: 5 runs of b started with a cache that was not empty" in printed(found)


def test_a_comparison_stands_where_one_of_two_added_tiers_served() -> None:
    tokens = {"computed": 2000.0, "hbm": 0.0, "dram": 18000.0}
    one_idle = experiment(1, factor=0.3, tiers=("hbm", "dram", "file"), tokens=tokens, loaded=18000 * 100)
    assert one_idle.verdict == "better"
    assert any("file tier" in doubt for doubt in (one_idle.headline.doubts if one_idle.headline else ()))
    assert experiment(1, factor=0.3, tiers=("hbm", "file"), tokens=tokens).verdict == "tier not exercised"


def test_bytes_that_do_not_fit_their_tokens_are_a_doubt() -> None:
    tokens = {"computed": 2000.0, "dram": 18000.0}
    fitting = experiment(1, tiers=("hbm", "dram"), tokens=tokens, loaded=18000 * 100.0)
    half = experiment(1, tiers=("hbm", "dram"), tokens=tokens, loaded=9000 * 100.0)
    assert "bytes-and-tokens" not in {warning.code for warning in fitting.warnings}
    assert "bytes-and-tokens" in {warning.code for warning in half.warnings}


def test_hits_are_compared_with_the_same_requests_of_the_same_round() -> None:
    lengths = [0.1, 0.2, 0.4]  # requests differ far more than a hit does from a miss
    runs = []
    for number in range(4):
        runs.append(run("off", number, [request(index, ttft) for index, ttft in enumerate(lengths)]))
        served = [request(index, ttft * 0.8, cached=900, tier="dram") for index, ttft in enumerate(lengths)]
        runs.append(run("on", number, served, tokens={"computed": 300.0, "dram": 2700.0}))
    found = with_conclusions(
        ReplayResult(
            workload="w", seed=1, loop="open", arrival="x", concurrency=None, num_requests=3,
            planned_prompt_tokens=3000, planned_output_tokens=12, ideal_hit_tokens=2700, reuse_definition="d", rounds=4,
            margin_ratio=0.05, confidence=0.98, slo=None, arms=(arm("off"), arm("on", "dram")), runs=tuple(runs),
        )
    )  # fmt: skip
    row = next(row for row in found.hits if row.arm == "on")
    assert (row.tier, row.requests, row.verdict, row.pairs) == ("dram", 12, "better", 4)
    assert row.ratio == pytest.approx(0.8)
    assert row.computed_ttft_s == pytest.approx(0.2)
    assert "faster, 1.2× as fast" in found.answers[1].text


def test_there_is_no_p99_below_368_requests() -> None:
    found = experiment(1)
    assert all(one.ttft_s is not None and one.ttft_s.at(0.99) is None for one in found.summaries)
    assert found.summaries[0].ttft_s is not None
    assert found.summaries[0].ttft_s.at(0.95) is not None  # 100 requests are enough for a P95


def test_a_page_escapes_what_servers_and_users_say_and_holds_three_figures() -> None:
    found = experiment(1, names=("<script>alert(1)</script>", "b & c"))
    page = report.html(document(found))
    assert "<script>" not in page
    assert page.count("<svg") == 3


def test_a_replay_that_was_stopped_before_any_request_still_renders() -> None:
    empty = with_conclusions(
        ReplayResult(
            workload="w", seed=1, loop="closed", arrival="x", concurrency=2, num_requests=1, planned_prompt_tokens=10,
            planned_output_tokens=1, ideal_hit_tokens=0, reuse_definition="d", rounds=1, margin_ratio=0.05,
            confidence=0.98, slo=None, arms=(arm("a"), arm("b")), runs=(), stopped="interrupted",
        )
    )  # fmt: skip
    assert "No verdict: interrupted" in printed(empty)
    assert report.html(document(empty))
    assert isinstance(provenance(empty).get("seed"), Origin)


def test_the_export_has_vllms_own_numbers() -> None:
    found = experiment(1)
    exported = vllm_result(document(found), "a")
    ttfts = sorted(request.ttft_s or 0 for one in found.runs_of("a") for request in one.requests)
    assert exported["completed"] == 100
    assert exported["median_ttft_ms"] == pytest.approx((ttfts[49] + ttfts[50]) / 2 * 1000)
    assert exported["mean_tpot_ms"] == pytest.approx(10.0)
    assert exported["output_throughput"] == pytest.approx(400 / exported["duration"])


def test_a_queue_that_only_grows_is_saturation_and_a_steady_one_is_not() -> None:
    assert saturated(tuple(request(index, 0.1 + 0.5 * index) for index in range(60)))
    assert not saturated(tuple(request(index, 0.1 + 0.05 * (index % 7)) for index in range(60)))
