"""Tier stacks driven for real: bytes per edge, constants recovered, faults that cost one case, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import UsageError
from kvbench.core.percentiles import percentile
from kvbench.core.units import KIB, MIB
from kvbench.probes import tier_alone_case
from kvbench.probes.plan_file import list_text, plan_names
from kvbench.probes.tier_plan import is_tier_plan, load_tier_plan, parse_stack, planned_tier_cases, tier_names
from kvbench.probes.tier_probe import probe_tiers, tier_provenance
from kvbench.results.codec import from_json, to_json
from kvbench.results.document import new_document, numbers_without_origin
from kvbench.results.host import Host
from kvbench.results.tier_probe import PolicyCase, TierCase, TierProbeResult
from tests.servers.processes import Server

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 28 * 2 * 256  # qwen3-0.6b on one of 8 ranks: 28 layers, K and V, one head of 128 bf16, one token
QUICK = (
    "model=qwen3-0.6b", "page_tokens=1", "blocks=96", "batch=1,8", "mixed_batch=2", "repeats=8", "time=200ms",
    "queue=256KiB", "timeout=60s",
)  # fmt: skip


def run_plan(stack: str, *settings: str, run: Any = None) -> TierProbeResult:
    plan = load_tier_plan("tiers", (f"stacks={stack}", *QUICK, *settings))
    return probe_tiers(plan) if run is None else probe_tiers(plan, run=run)


def tiers(result: TierProbeResult) -> dict[str, TierCase]:
    return {case.tier: case for case in result.tiers}


def policies(result: TierProbeResult) -> dict[str, PolicyCase]:
    return {case.policy: case for case in result.policies}


def every(result: TierProbeResult) -> list[TierCase | PolicyCase]:
    return [*result.tiers, *result.policies]


def moved(case: PolicyCase) -> dict[str, int]:
    return {f"{edge.source}>{edge.target}": edge.blocks for edge in case.edges}


def test_the_plan_ships_and_is_listed_and_is_no_plan_of_transfers() -> None:
    assert "tiers" in plan_names()
    assert "what becomes of that" in " ".join(list_text().split())
    assert is_tier_plan("tiers")
    assert not is_tier_plan("file")
    plan = load_tier_plan("tiers")
    assert len(planned_tier_cases(plan)) == 6
    assert plan.shape().page_bytes == 94 * 2 * 256 * 16


def test_a_stack_is_spelled_with_plus_signs_and_wrapped_tiers_keep_their_commas() -> None:
    plan = load_tier_plan(
        "tiers", ["stacks=dram:1GiB + throttled(dram:2GiB, latency=1ms) + nixl+posix:/mnt/x", "policies=write-back"]
    )
    (stack,) = plan.stacks
    assert tier_names(stack) == ("dram", "dram-2", "nixl")
    assert parse_stack(" hbm:1GiB ")[0].size_bytes == 1024 * MIB
    with pytest.raises(UsageError, match="known scheme"):
        load_tier_plan("tiers", ["stacks=drum:1GiB"])
    with pytest.raises(UsageError, match="policies"):
        load_tier_plan("tiers", ["policies=write-around"])
    with pytest.raises(UsageError, match="at most 8"):
        parse_stack(" + ".join(["dram:1GiB"] * 9))


def test_a_stack_of_one_tier_has_one_policy_and_a_tier_of_two_stacks_is_measured_once() -> None:
    plan = load_tier_plan("tiers", ["stacks=[dram:1GiB, 'dram:1GiB + file:/x', 'hbm:1GiB + file:/x']"])
    names = [case.name for case in planned_tier_cases(plan)]
    assert names[:3] == ["dram alone", "file alone", "hbm alone"]
    assert len(names) == 3 + 1 + 3 + 3


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[TierProbeResult, Path]:
    directory = tmp_path_factory.mktemp("disk")
    stack = f"hbm:{48 * BLOCK_BYTES}B + dram:{80 * BLOCK_BYTES}B + file:{directory}?size=8MiB"
    return run_plan(stack, "concurrency=1"), directory


def test_a_stack_runs_for_real_and_every_edge_moves_what_its_policy_says(
    stacked: tuple[TierProbeResult, Path],
) -> None:
    result, directory = stacked
    assert result.block_bytes == BLOCK_BYTES
    assert [(case.name, case.status, case.reason) for case in every(result)] == [
        (name, "ok", None)
        for name in ("hbm alone", "dram alone", "file alone", "write-through", "write-through-selective", "write-back")
    ]
    # 96 blocks through 48 places; half of the smallest tier is stored twice
    assert {policy: moved(case) for policy, case in policies(result).items()} == {
        "write-through": {"request>hbm": 96, "hbm>dram": 96, "dram>file": 96},
        "write-through-selective": {"request>hbm": 96, "hbm>dram": 24, "dram>file": 24},
        "write-back": {"request>hbm": 96, "hbm>dram": 48, "dram>file": 0},
    }
    for case in result.policies:
        assert all(edge.agrees and edge.bytes == edge.blocks * BLOCK_BYTES for edge in case.edges)
        assert [mixed.tier for mixed in case.mixed] == ["hbm", "dram", "file"]
        assert all(mixed.idle and mixed.saturated and not mixed.failed_blocks for mixed in case.mixed)
    assert list(directory.iterdir()) == []


def test_each_tier_is_measured_by_call_size_verified_and_a_file_is_cold(
    stacked: tuple[TierProbeResult, Path],
) -> None:
    result, _ = stacked
    for case in result.tiers:
        assert [point.blocks for point in case.loads] == [1, 8]
        assert [point.blocks for point in case.stores] == [1, 8]
        assert case.verified_blocks >= sum(sample.blocks for sample in case.samples if sample.phase == "load")
        assert case.checksum_bytes_per_s is not None
        one = case.loads[0]
        assert one.percentiles[0].value == percentile(
            [sample.seconds for sample in case.samples if sample.phase == "load" and sample.blocks == 1], 0.5
        )
        assert one.at(0.99) is None, "8 calls are no P99"
        assert any(doubt.code == "no-p99" for doubt in case.warnings)
    file = tiers(result)["file"]
    assert (file.checked_on_load, tiers(result)["dram"].checked_on_load) == (True, False)
    assert file.cold_evidence
    assert file.cold or "keeps its files in memory" in file.cold_evidence
    assert {path.tier for path in result.paths} == {"dram", "file"}, "hbm is no tier that a GPU loads from"


def test_every_number_has_an_origin_and_the_document_survives_its_file(
    stacked: tuple[TierProbeResult, Path], host: Host
) -> None:
    result, _ = stacked
    document = new_document(result, command_line=("kvbench",), provenance=tier_provenance(result), host=host)
    assert numbers_without_origin(document) == ()
    assert from_json(to_json(document), source="here").result == result


def test_the_fit_of_loads_recovers_the_constants_of_a_throttled_tier() -> None:
    result = run_plan(
        "dram:4MiB + throttled(null:, bandwidth=100MB/s, latency=3ms)",
        "batch=1,16,64", "repeats=9", "time=1s", "policies=write-through",
    )  # fmt: skip
    fit = tiers(result)["null"].load_fit
    assert fit is not None
    assert fit.fixed_s == pytest.approx(3e-3, rel=0.15)
    assert fit.bytes_per_s == pytest.approx(1e8, rel=0.15)
    assert any(doubt.code == "zeros" for doubt in tiers(result)["null"].warnings)
    assert [path.tier for path in result.paths] == ["dram"], "a path of nothing must not become a rate of this host"
    (mixed,) = [mixed for mixed in result.policies[0].mixed if mixed.tier == "null"]
    assert mixed.idle is not None
    assert mixed.idle.percentiles[0].value >= 3e-3


def test_a_tier_that_fails_costs_its_cases_and_others_go_on() -> None:
    result = run_plan("dram:4MiB + faulty(dram:4MiB, load_fail=1)", "policies=write-through")
    assert tiers(result)["dram"].status == "ok"
    broken = tiers(result)["dram-2"]
    assert broken.status == "failed"
    assert "no load from dram-2 succeeded" in (broken.reason or "")
    assert "injected: the load failed" in (broken.reason or "")
    assert broken.stores, "what was measured before is kept"
    (policy,) = result.policies
    assert policy.status == "ok"
    assert policy.mixed[0].idle is not None


def test_blocks_that_a_tier_refuses_are_counted_and_the_edge_is_said_to_differ() -> None:
    result = run_plan("dram:4MiB + faulty(dram:4MiB, store_fail=0.3)", "policies=write-through")
    flaky = tiers(result)["dram-2"]
    assert flaky.status == "ok"
    assert flaky.failed_blocks > 0
    (policy,) = result.policies
    top, edge = policy.edges
    assert top.agrees
    assert not edge.agrees
    assert edge.blocks < edge.expected_blocks == 96
    assert {"bytes-differ", "failed-blocks"} <= {doubt.code for doubt in policy.warnings}


def test_a_tier_that_hangs_ends_at_the_timeout_of_its_case() -> None:
    result = run_plan("dram:4MiB + faulty(dram:4MiB, hang=1)", "policies=write-back", "timeout=4s")
    assert tiers(result)["dram"].status == "ok"
    assert "no end after 4 s, while storing into dram-2" in (tiers(result)["dram-2"].reason or "")


def test_a_place_that_is_not_there_is_named_and_loads_from_the_others_go_on() -> None:
    place = "redis://127.0.0.1:9/0?deadline=1s"
    result = run_plan(f"dram:1MiB + dram:2MiB + {place}", "policies=write-back", "blocks=64")
    assert "no store into redis succeeded" in (tiers(result)["redis"].reason or "")
    assert "127.0.0.1:9" in (tiers(result)["redis"].reason or "")
    (policy,) = result.policies
    assert [(mixed.tier, mixed.failed_blocks) for mixed in policy.mixed] == [("dram", 0), ("dram-2", 0)]
    assert all(mixed.idle and mixed.saturated for mixed in policy.mixed)
    assert "no-mixed-loads" in {doubt.code for doubt in policy.warnings}


def test_a_directory_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "mnt"
    result = run_plan(f"dram:4MiB + file:{missing}", "policies=write-through")
    assert str(missing) in (tiers(result)["file"].reason or "")
    assert tiers(result)["dram"].status == "ok"
    assert not missing.exists()


def test_changed_bytes_end_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.tiers.memory import MemoryTier

    real = MemoryTier.load

    def flipped(self: MemoryTier, wanted: Any) -> Any:
        outcomes = real(self, wanted)
        wanted[0].into[0] ^= 1
        return outcomes

    monkeypatch.setattr(MemoryTier, "load", flipped)
    with pytest.raises(Exception, match="came back from dram with other bytes"):
        tier_alone_case.measure(work(specs=["dram:4MiB"], names=["dram"]), lambda record: None)


def work(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "specs": ["dram:1MiB"], "names": ["dram"], "tier": 0, "policy": "write-through", "model": "made-up",
        "page_tokens": 1, "block_bytes": 4 * KIB, "blocks": 16, "batches": [1, 4], "mixed_batch": 2, "concurrency": 1,
        "load_share_ratio": 1.0, "queue_bytes": MIB, "threshold": 2, "repeats": 3, "warmups": 1, "pool_bytes": MIB,
        "file_bytes": MIB, "time_s": 0.5, "wait_s": 20.0,
    }  # fmt: skip
    return settings | changes


def test_several_callers_begin_together_and_their_bytes_are_counted_together() -> None:
    records: list[dict[str, Any]] = []
    tier_alone_case.measure(work(concurrency=3), records.append)
    loads = [record for record in records if record["record"] == "sample" and record["phase"] == "load"]
    assert {(record["blocks"], len(record["calls_s"])) for record in loads} == {(3, 3), (12, 3)}
    assert all(record["seconds"] >= max(record["calls_s"]) for record in loads)
    assert all(record["bytes"] == record["blocks"] * 4 * KIB for record in loads)


def test_a_tier_too_small_for_a_call_says_so() -> None:
    with pytest.raises(Exception, match="holds 2 blocks, fewer than one call of 4"):
        tier_alone_case.measure(work(specs=["dram:12KiB"], batches=[4]), lambda record: None)


def test_ctrl_c_saves_what_was_measured_and_leaves_no_directory(tmp_path: Path) -> None:
    out, disk = tmp_path / "result.json", tmp_path / "disk"
    disk.mkdir()
    settings = ("stacks=file:" + str(disk), *QUICK, "repeats=1000000", "time=60s", "total=100s", "timeout=90s")
    command = [sys.executable, "-m", "kvbench", "probe", "tiers", "--out", str(out)]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 30
    while not list(disk.glob(".kvbench-tier-*/blocks.kv")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1, complaints
    saved = json.loads(out.read_text())
    assert saved["interrupted"] is True
    (first,), (second,) = saved["result"]["tiers"], saved["result"]["policies"]
    assert first["reason"] == "interrupted"
    assert len(first["samples"]) > 2
    assert (second["status"], second["reason"]) == ("skipped", "interrupted before it began")
    assert list(disk.iterdir()) == []


def test_a_store_on_the_network_is_driven_and_left_empty(redis_server: Server) -> None:
    import redis

    result = run_plan(f"dram:4MiB + redis://{redis_server.address}/6", "policies=write-through", "concurrency=2")
    assert [(case.name, case.status, case.reason) for case in every(result)] == [
        ("dram alone, ×2", "ok", None), ("redis alone, ×2", "ok", None), ("write-through, ×2", "ok", None),
    ]  # fmt: skip
    assert all(edge.agrees for edge in result.policies[0].edges)
    client: Any = redis.Redis.from_url(f"redis://{redis_server.address}/6")
    assert client.dbsize() == 0


def test_the_total_time_bounds_which_cases_begin() -> None:
    result = run_plan("dram:4MiB", "total=1ms")
    reasons = {case.reason or "" for case in every(result)}
    assert any("was used up before it began" in reason for reason in reasons)
