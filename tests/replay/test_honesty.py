"""Whatever a server does wrong is reported as what it is, and never makes an arm look better."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.engines.arms import parse_arms
from kvbench.engines.base import Arm, Endpoint, EngineOptions
from kvbench.engines.registry import open_engine
from kvbench.engines.url import UrlAdapter
from kvbench.replay.cold import check_after
from kvbench.replay.experiment import replay, with_conclusions
from kvbench.replay.load.plan import Limits
from kvbench.replay.settings import ReplaySettings, ServerMode, parse_slo
from kvbench.results.replay import CacheCheck, ReplayResult, RequestSample
from kvbench.results.tier_counters import TierCounters
from kvbench.workloads.base import RequestPlan
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.workload import load_workload
from tests.replay.made_up import arm, experiment, request, run
from tests.replay.serving import null_server


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that is refused is tried as often, and waited for less."""
    monkeypatch.setattr("kvbench.engines.url._RETRY_S", 0.01)
    monkeypatch.setattr("kvbench.replay.cold._PAUSE_S", 0.01)


def small_plan(vocab_size: int, limit: int = 14) -> RequestPlan:
    return plan_requests(load_workload("demo"), vocab_size=vocab_size, limit=limit, scale=0.25, concurrency=1)


def measured(*arms: str, pairs: int = 2, limit: int = 14, adapter: UrlAdapter | None = None) -> ReplayResult:
    engine = adapter or open_engine("url", EngineOptions())
    parsed = parse_arms(arms)
    limits = Limits(connect_s=2, read_s=1.0, total_s=5)
    settings = ReplaySettings(pairs=pairs, limits=limits, scrape_every_s=0.0, warm_up_requests=0)
    return replay(lambda vocab: small_plan(vocab, limit), parsed, {one.name: engine for one in parsed}, settings)


ALL_TRAPS = [
    # dialect, trap, part of the reason of the second run
    ("native", "reset-lies", "still cached"),
    ("vllm", "reset-refused", "the server still held blocks"),
    ("vllm", "no-dev-mode", "VLLM_SERVER_DEV_MODE=1"),
    ("vllm", "connector-without-reset", "still cached"),
    ("sglang", "reset-missing", "404"),
    ("sglang", "clear-fails", "still cached"),
    ("sglang", "flush-noop", "still cached"),
    ("vllm", "reset-lies", "still cached"),
    ("sglang", "reset-lies", "still cached"),
    ("native", "reset-refused", "the reset failed (POST /cache/clear: 409"),
    ("sglang", "reset-refused", "the reset failed (POST /flush_cache: 400"),
    ("native", "reset-missing", "404"),
    ("vllm", "reset-missing", "404"),
]
TRAPS = ALL_TRAPS if os.environ.get("KVBENCH_ALL_TRAPS") else ALL_TRAPS[:7]  # the first have every trap once


@pytest.mark.parametrize(("dialect", "trap", "reason"), TRAPS)
def test_a_reset_that_does_not_work_contaminates_the_runs_after_it(
    tmp_path: Path, dialect: str, trap: str, reason: str
) -> None:
    tiers = ("--l1", "1MiB", "--tier", "dram:64MiB", "--tier", f"file:{tmp_path}/kv")
    with null_server(tmp_path, *tiers, "--dialect", dialect, "--trap", trap) as served:
        found = measured(f"a={served.url}", limit=5)
    # The first run's own probes may or may not show it; the second run must never pass as cold.
    assert found.runs[-1].cache.state == "contaminated", found.runs[-1].cache
    assert reason in found.runs[-1].cache.reason
    assert "contaminated" in {warning.code for warning in found.warnings}


@pytest.mark.parametrize(
    ("dialect", "trap", "warning"),
    [
        ("vllm", "no-prompt-tokens-details", "cached-tokens-null"),
        ("sglang", "no-cache-report", "cached-tokens-null"),
        ("sglang", "two-tokens", "tokens-per-chunk"),
        ("vllm", "hidden-tiers", None),
        ("sglang", "underscore-names", None),
    ],
)
def test_what_a_server_hides_is_said_and_its_metrics_still_verify_a_cold_start(
    tmp_path: Path, dialect: str, trap: str, warning: str | None
) -> None:
    tiers = ("--l1", "16KiB", "--tier", "dram:64MiB")
    with null_server(tmp_path, *tiers, "--dialect", dialect, "--trap", trap) as served:
        found = measured(f"a={served.url}", pairs=1, limit=12)
    assert {one.cache.state for one in found.runs} == {"verified cold"}, [one.cache for one in found.runs]
    codes = {one.code for one in found.warnings} & {"cached-tokens-null", "tokens-per-chunk", "no-usage"}
    assert codes == ({warning} if warning else set())
    summary = found.summaries[0]
    assert ("external" in summary.tokens_by_source) == (trap == "hidden-tiers")
    if warning == "cached-tokens-null":
        assert summary.cached_tokens is None
        assert all(one.cached_tokens is None for one in found.runs[0].finished)
        # SGLang sends the split by tier that replay asks for even where it reports no sum.
        tiers_told = {one.hit_tier for one in found.runs[0].finished}
        assert tiers_told == ({None, "dram"} if dialect == "sglang" else {None})
        assert sum(count for name, count in summary.tokens_by_source.items() if name != "computed") > 0
    if trap == "two-tokens":
        assert all(one.output_tokens == one.max_tokens for one in found.runs[0].finished)


FAULTS = """
requests:
  - {fault: reset, at: 2, after_tokens: 2}
  - {fault: end-early, at: 3, after_tokens: 2}
  - {fault: stall, at: 4, after_tokens: 1, delay: 30s}
  - {fault: invalid-sse, at: 5, after_tokens: 1}
  - {fault: status, at: 6, status: 429, retry_after: 1s}
  - {fault: missing-usage, at: 7}
  - {fault: null-cached-tokens, at: 8}
  - {fault: two-tokens, at: 9}
  - {fault: slow-header, at: 10, delay: 300ms}
  - {fault: slow-body, at: 11, delay: 50ms}
"""


def test_every_fault_is_counted_and_an_arm_that_fails_is_not_compared(tmp_path: Path) -> None:
    with null_server(tmp_path / "a") as good, null_server(tmp_path / "b", "--ttft", "5ms", faults=FAULTS) as bad:
        found = measured(f"good={good.url}", f"bad={bad.url}", pairs=1)
    # Two probes come first, so request n of the server is request n - 2 of the run.
    samples = {one.index: one for one in found.runs_of("bad")[0].requests}
    assert [samples[index].status for index in range(5)] == ["cut", "cut", "read-timeout", "invalid", "http"]
    assert samples[5].output_tokens is None
    assert samples[6].cached_tokens is None
    assert len(samples[7].itls_s) + 1 < (samples[7].output_tokens or 0)
    assert (samples[8].ttft_s or 0) >= 0.3
    assert max(samples[9].itls_s) >= 0.05
    assert Counter(one.status for one in samples.values())["ok"] == 9
    for summary in found.summaries:
        assert summary.ok + sum(summary.failed.values()) + summary.not_sent == found.num_requests
    assert {"no-usage", "cached-tokens-null", "tokens-per-chunk", "failed-requests"} <= {
        warning.code for warning in found.warnings
    }
    assert found.verdict == "failed requests"
    assert all(one.verdict == "failed requests" for one in found.comparisons)
    assert not any(one.quantity == "output tokens/s" for one in found.comparisons)  # tokens of one are not known
    assert all(answer.tone == "unsure" for answer in found.answers)
    assert all(answer.text.startswith("Not an answer, failed requests: ") for answer in found.answers)


def as_run(plan: RequestPlan, cached: list[int | None]) -> list[RequestSample]:
    return [
        replace(request(one.index, 0.1, cached=count), planned_tokens=one.prompt_tokens)
        for one, count in zip(plan.requests, cached, strict=True)
    ]


COLD = CacheCheck(state="verified cold", reason="as made up")


def test_a_run_that_had_only_what_it_left_there_itself_stays_cold() -> None:
    plan = small_plan(8192, 6)
    ideal = [one.shared_prefix_tokens for one in plan.requests]
    assert check_after(COLD, plan, as_run(plan, [*ideal]), exact=True) == COLD
    assert check_after(COLD, plan, as_run(plan, [0] * 6), exact=True) == COLD
    assert check_after(COLD, plan, as_run(plan, [None] * 6), exact=True) == COLD


def test_the_first_prompt_of_its_kind_cannot_have_been_cached() -> None:
    plan = small_plan(8192, 6)
    cached = [0] * 6
    cached[0] = 64
    found = check_after(COLD, plan, as_run(plan, [*cached]), exact=False)
    assert found.state == "contaminated"
    assert "had 64 cached tokens" in found.reason


def test_more_hits_than_an_unlimited_cache_has_are_somebody_elses() -> None:
    plan = small_plan(8192, 6)
    ideal = [one.shared_prefix_tokens for one in plan.requests]
    more = [0 if not shared else one.prompt_tokens for one, shared in zip(plan.requests, ideal, strict=True)]
    assert any(ideal)
    found = check_after(COLD, plan, as_run(plan, [*more]), exact=True)
    assert (found.state, "share only" in found.reason) == ("contaminated", True)
    warm = CacheCheck(state="warm", reason="asked for")
    assert check_after(warm, plan, as_run(plan, [*more]), exact=True) == warm


def test_a_tier_that_no_counter_shows_is_not_called_exercised() -> None:
    names = ("off", "on")
    arms = (arm("off", "hbm"), arm("on", "hbm", "dram"))
    runs = [
        replace(run(name, number, [request(0, ttft, cached=None)]), counters=None)
        for number in range(5)
        for name, ttft in zip(names, (0.4, 0.1), strict=True)
    ]
    found = with_conclusions(replace(experiment(1, names=names), arms=arms, runs=tuple(runs), warnings=()))
    assert found.headline is not None
    assert (found.verdict, found.headline.measured) == ("tier not exercised", "better")
    assert "the server does not tell" in found.headline.doubts[0]


def test_two_addresses_that_show_no_lower_tier_leave_a_doubt() -> None:
    found = experiment(1, factor=0.3, base_tiers=(), tiers=())
    assert found.verdict == "better"
    assert found.headline is not None
    assert any("nothing ties their difference" in doubt for doubt in found.headline.doubts)


def test_an_arm_without_one_good_request_is_worse_and_not_left_out() -> None:
    names = ("a", "b")
    runs = [
        run(name, number, [request(index, ttft) for index in range(20)])
        for number in range(5)
        for name, ttft in zip(names, (0.1, 0.9), strict=True)
    ]
    found = with_conclusions(
        replace(experiment(1, names=names), runs=tuple(runs), slo=parse_slo("ttft=500ms"), warnings=())
    )
    goodput = next(one for one in found.comparisons if one.quantity == "good requests/s")
    assert (goodput.verdict, set(goodput.arm_values)) == ("worse", {0.0})


def test_hidden_hits_have_the_name_that_their_own_server_gives_them() -> None:
    counters = TierCounters(
        prompt_tokens={"computed": 100.0, "external": 900.0}, hit_tokens={"lmcache dram": 900.0, "lmcache file": 0.0}
    )
    one = replace(run("on", 0, [request(0, 0.1, cached=900)]), counters=counters)
    assert one.tier_of(one.requests[0]) == "lmcache dram"
    both = replace(one, counters=replace(counters, hit_tokens={"lmcache dram": 600.0, "lmcache file": 300.0}))
    assert both.tier_of(both.requests[0]) == "external"
    found = with_conclusions(replace(experiment(1), arms=(arm("on", "hbm", "lmcache"),), runs=(both,), warnings=()))
    use = next(use for use in found.summaries[0].tier_use if use.tier == "external")
    assert use.found == {"lmcache dram": 600.0, "lmcache file": 300.0}


class WithoutIds(UrlAdapter):
    """A server of which we act as if it took no token ids."""

    def start(self, arm: Arm) -> Endpoint:
        return replace(super().start(arm), takes_ids=arm.name != "words")


def test_where_one_server_takes_no_ids_all_get_the_same_words(tmp_path: Path) -> None:
    with null_server(tmp_path, "--l1", "8MiB") as served:
        arms = (f"ids={served.url}", f"words={served.url}")
        found = measured(*arms, pairs=1, limit=8, adapter=WithoutIds(EngineOptions()))
    ids, words = ([one.prompt_tokens for one in found.runs_of(name)[0].requests] for name in ("ids", "words"))
    assert ids == words
    assert all(one.ok for one in found.runs[1].requests)
    assert all((one.cached_tokens or 0) > 0 for one in found.runs[1].requests if one.shared_prefix_tokens > 100)
    (warning,) = [one for one in found.warnings if one.code == "words"]
    assert "tokens a word" in warning.message


def test_one_server_whose_tiers_are_switched_is_every_arm_in_turn(tmp_path: Path) -> None:
    options = EngineOptions(model="null", work_dir=tmp_path, arguments=("--ttft", "20ms"))
    adapter = open_engine("builtin", options)
    arms = parse_arms(["l1=16KiB", "l1=16KiB+l2=64MiB", "l1=16KiB+l2=64MiB+l3"])
    mode: ServerMode = "switch"
    settings = ReplaySettings(pairs=2, servers=mode, scrape_every_s=0.0, warm_up_requests=0)
    found = replay(lambda vocab: small_plan(vocab, 12), arms, {one.name: adapter for one in arms}, settings)
    assert len(list(tmp_path.glob("server-*.log"))) == 1
    assert {one.cache.state for one in found.runs} == {"verified cold"}, [one.cache for one in found.runs]
    assert [set(one.tokens_by_source) - {"computed", "hbm"} for one in found.summaries] == [set(), {"dram"}, {"dram"}]
    assert all("switched live" in (one.label or "") for one in found.arms)
