from collections.abc import Mapping
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.engines.arms import parse_arms
from kvbench.engines.base import EngineAdapter, EngineOptions
from kvbench.engines.registry import open_engine
from kvbench.replay.cold import make_cold, probe_requests
from kvbench.replay.experiment import order, provenance, replay
from kvbench.replay.load.plan import Limits
from kvbench.replay.settings import CacheMode, ReplaySettings, parse_slo
from kvbench.results.codec import from_json, read_document, to_json, write_document
from kvbench.results.document import new_document, numbers_without_origin
from kvbench.results.replay import ReplayResult
from kvbench.workloads.base import RequestPlan
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.workload import load_workload
from tests.replay.serving import null_server

KV_BYTES_PER_TOKEN = 256  # of `serve --null` with tiers
PAGE = 16


def small_plan(vocab_size: int, limit: int = 14) -> RequestPlan:
    """Prefixes of 384 tokens from the demo workload, a quarter of its length."""
    return plan_requests(load_workload("demo"), vocab_size=vocab_size, limit=limit, scale=0.25, concurrency=2)


def run(arms: list[str], *arguments: str, pairs: int = 2, cache: CacheMode = "cold", limit: int = 14) -> ReplayResult:
    options = EngineOptions(model="null", arguments=("--ttft", "40ms", "--itl", "1ms", *arguments))
    parsed = parse_arms(arms)
    engines = {"url": open_engine("url", EngineOptions()), "builtin": open_engine("builtin", options)}
    adapters: Mapping[str, EngineAdapter] = {arm.name: engines["url" if arm.url else "builtin"] for arm in parsed}
    settings = ReplaySettings(
        pairs=pairs, cache=cache, limits=Limits(read_s=20, total_s=40), scrape_every_s=0.2, warm_up_requests=1,
        slo=parse_slo("ttft=10s"),
    )  # fmt: skip
    return replay(lambda vocab: small_plan(vocab, limit), parsed, adapters, settings)


@pytest.fixture(scope="module")
def tiered() -> ReplayResult:
    """No reuse against a small L1 over DRAM: real blocks through the real tiered store."""
    return run(["recompute", "l1=32KiB+l2=64MiB"])


def test_arms_take_turns_and_every_second_round_goes_backwards() -> None:
    arms = parse_arms(["off", "l1", "l1+l2=1GiB"])
    assert [(number, arm.name) for number, arm in order(arms, 2)] == [
        (0, "off"), (0, "l1"), (0, "l1+l2=1GiB"), (1, "l1+l2=1GiB"), (1, "l1"), (1, "off"),
    ]  # fmt: skip


def test_every_run_starts_from_a_cache_that_was_shown_to_be_empty(tiered: ReplayResult) -> None:
    assert [run.cache.state for run in tiered.runs] == ["verified cold"] * 4
    assert all(probe.cached_tokens == 0 for run in tiered.runs for probe in run.cache.probes)


def test_hit_tokens_are_those_of_the_plan_and_bytes_are_tokens_times_their_weight(tiered: ReplayResult) -> None:
    plan = small_plan(2**31)
    pages = sum(request.shared_prefix_tokens // PAGE * PAGE for request in plan.requests)
    served = tiered.runs_of("l1=32KiB+l2=64MiB")
    # Two requests in flight may miss what an unlimited cache in plan order would have had, but never hit more.
    for one in served:
        assert one.cached_tokens is not None
        assert 0.8 * pages <= one.cached_tokens <= pages
        assert one.counters is not None
        assert one.counters.cached_tokens == one.cached_tokens
    summary = tiered.summary("l1=32KiB+l2=64MiB")
    assert summary is not None
    dram = next(use for use in summary.tier_use if use.tier == "dram")
    assert dram.exercised
    assert dram.expected_bytes == pytest.approx((dram.tokens or 0) * KV_BYTES_PER_TOKEN)
    assert dram.load_bytes == pytest.approx(dram.expected_bytes, rel=0.1)


def test_the_arm_without_tiers_computes_everything(tiered: ReplayResult) -> None:
    summary = tiered.summary("recompute")
    assert summary is not None
    assert set(summary.tokens_by_source) == {"computed"}
    assert all(request.hit_tier == "miss" for one in tiered.runs_of("recompute") for request in one.finished)


def test_hits_are_held_against_the_same_requests_computed(tiered: ReplayResult) -> None:
    rows = [row for row in tiered.hits if row.arm != "recompute" and row.tier == "dram"]
    assert rows
    assert rows[0].computed_arm == "recompute"
    assert rows[0].ratio is not None
    assert rows[0].ratio < 0.8  # 40 ms of prefill against a load of a few blocks
    assert {answer.question for answer in tiered.answers} == {
        "What reuse did the tier add?", "Is a hit faster than recompute?",
        "Did concurrency lose throughput or tail latency?",
    }  # fmt: skip
    assert "dram" in tiered.answers[0].text


def test_totals_add_up(tiered: ReplayResult) -> None:
    for summary in tiered.summaries:
        assert summary.ok + sum(summary.failed.values()) + summary.not_sent == 2 * tiered.num_requests
        assert sum(summary.tokens_by_source.values()) == summary.prompt_tokens
        assert summary.good_ratio == 1.0


def test_a_replay_survives_saving_and_every_number_has_an_origin(tiered: ReplayResult) -> None:
    document = new_document(tiered, command_line=("kvbench", "replay"), provenance=provenance(tiered))
    assert numbers_without_origin(document) == ()
    assert from_json(to_json(document), source="test") == document


def test_a_replay_is_held_against_the_prediction(
    tiered: ReplayResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, answer = tmp_path / "replay.json", tmp_path / "answer.json"
    write_document(new_document(tiered, command_line=(), provenance=provenance(tiered)), saved)
    arguments = ["qwen3-0.6b", "--check", str(saved), "--tier", "dram=50GB/s", "--out", str(answer)]
    assert main(["load-vs-recompute", *arguments]) == 0
    assert "saved by a hit in dram" in capsys.readouterr().out
    row = next(row for row in tiered.hits if row.tier == "dram")
    middle = row.ttft_s.at(0.5)
    assert middle is not None
    checks = read_document(answer).result.checks
    check = next(one for one in checks if "dram" in one.what)
    assert check.tokens == round(row.cached_tokens / row.requests)
    assert check.measured_s == pytest.approx((row.computed_ttft_s or 0) - middle.value)


def test_a_tier_that_served_nothing_is_said_to_be_idle() -> None:
    found = run(["l1=64MiB", "l1=64MiB+l2=64MiB"], pairs=2, limit=8)
    assert found.verdict == "tier not exercised"
    assert "served no token from its dram tier" in (found.headline.doubts[0] if found.headline else "")


@pytest.mark.parametrize(
    ("dialect", "options", "state", "reason"),
    [
        ("vllm", [], "verified cold", "0 cached tokens"),
        ("sglang", [], "verified cold", "0 cached tokens"),
        ("native", ["--faults", "reset: lies"], "contaminated", "still cached"),
        ("native", ["--faults", "reset: refused"], "unverified", "the reset failed"),
    ],
)
def test_a_reset_is_believed_only_when_prompts_that_were_cached_no_longer_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, options: list[str], state: str, reason: str
) -> None:
    monkeypatch.setattr("kvbench.engines.url._RETRY_S", 0.01)
    faults = options.pop() if "--faults" in options else None
    options = [option for option in options if option != "--faults"]
    tier = ["--l1", "1MiB", "--tier", "dram:64MiB", "--dialect", dialect]
    with null_server(tmp_path, *tier, *options, faults=faults) as served:
        adapter = open_engine("url", EngineOptions())
        endpoint = adapter.start(parse_arms([f"a={served.url}"])[0])
        plan = small_plan(endpoint.vocab_size or 8192)
        for request in probe_requests(plan):  # as after an earlier run
            adapter_ask(served.url, request.prompt.tolist())
        check = make_cold(adapter, endpoint, plan, sleep=lambda _s: None)
    assert check.state == state, check
    assert reason in check.reason


def adapter_ask(url: str, prompt: list[int]) -> None:
    from kvbench.engines.http_calls import call

    assert call(url, "/v1/completions", method="POST", body={"model": "null", "prompt": prompt, "max_tokens": 1}).ok


def test_a_server_that_dies_mid_run_ends_the_experiment_and_keeps_what_was_finished(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text("requests: [{fault: die, at: 9, after_tokens: 1}]")
    found = run(["l1=1MiB+l2=64MiB"], "--faults", str(tmp_path / "faults.yaml"), pairs=1)
    assert found.stopped is not None
    assert 1 <= len(found.runs[0].finished) < 14
    assert found.summaries[0].ok + sum(found.summaries[0].failed.values()) + found.summaries[0].not_sent == 14


def test_servers_can_take_turns_so_that_only_one_is_up(tmp_path: Path) -> None:
    options = EngineOptions(model="null", work_dir=tmp_path, arguments=("--itl", "1ms"))
    adapter = open_engine("builtin", options)
    arms = parse_arms(["off", "l1=1MiB+l2=64MiB"])
    settings = ReplaySettings(pairs=2, servers="one-at-a-time", scrape_every_s=0.0, warm_up_requests=1)
    found = replay(lambda vocab: small_plan(vocab, 6), arms, {arm.name: adapter for arm in arms}, settings)
    assert [run.arm for run in found.runs] == ["off", "l1=1MiB+l2=64MiB", "l1=1MiB+l2=64MiB", "off"]
    assert len(list(tmp_path.glob("server-*.log"))) == 3  # the second run of an arm in a row needs no new server
    assert all(len(run.finished) == 6 for run in found.runs)


def test_a_hit_of_an_engine_that_tells_no_tier_is_of_the_only_tier_that_served(tmp_path: Path) -> None:
    tier = ("--l1", "0", "--tier", "dram:64MiB", "--dialect", "vllm")
    with null_server(tmp_path, *tier) as one:
        found = run([f"a={one.url}"], pairs=1)
    assert {request.hit_tier for request in found.runs[0].finished} == {"hit", "miss"}
    assert {found.runs[0].tier_of(request) for request in found.runs[0].finished} == {"dram", "miss"}


def test_a_salt_makes_runs_cold_where_nothing_can_be_reset(tmp_path: Path) -> None:
    with null_server(
        tmp_path, "--l1", "8MiB", "--tier", "dram:64MiB", "--dialect", "vllm", "--trap", "no-dev-mode"
    ) as one:
        found = run([f"a={one.url}"], pairs=2, cache="salt")
    assert [run.cache.state for run in found.runs] == ["cold by salt", "cold by salt"]
    first, second = (run.cached_tokens for run in found.runs)
    assert first is not None
    assert second is not None
    assert first > 0
    assert second <= small_plan(8192).reuse.hit_tokens
