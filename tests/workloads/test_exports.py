import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.core.errors import UsageError
from kvbench.workloads.exports import TOOLS, Export, export_workload, trace_rows
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.traces.formats import open_trace
from kvbench.workloads.workload import Workload, load_workload, with_arrival, workload_names


def exported(workload: Workload | str, tool: str, *, limit: int | None = None, **settings: Any) -> Export:
    known = load_workload(workload) if isinstance(workload, str) else workload
    plan = plan_requests(known, vocab_size=32_000, limit=limit)
    return export_workload(known, plan, tool, url="http://127.0.0.1:8000/", model="m", **settings)


def value(export: Export, flag: str) -> str:
    return export.command[export.command.index(flag) + 1]


def test_the_comparison_run_in_every_tools_own_words() -> None:
    vllm = exported("shared-prefix-1024", "vllm")
    assert vllm.command[:3] == ("vllm", "bench", "serve")
    assert (value(vllm, "--prefix-repetition-prefix-len"), value(vllm, "--prefix-repetition-suffix-len")) == (
        "1024",
        "100",
    )
    assert (value(vllm, "--max-concurrency"), value(vllm, "--num-prompts")) == ("4", "50")
    assert value(vllm, "--base-url") == "http://127.0.0.1:8000"
    guide = exported("shared-prefix-1024", "guidellm")
    assert value(guide, "--profile") == "kind=concurrent,streams=4"
    assert value(guide, "--data") == (
        "kind=synthetic_text,prompt_tokens=100,output_tokens=32,prefix_tokens=1024,prefix_count=1"
    )
    aiperf = exported("shared-prefix-1024", "aiperf")
    assert (value(aiperf, "--prefix-prompt-length"), value(aiperf, "--isl"), value(aiperf, "--concurrency")) == (
        "1024",
        "100",
        "4",
    )
    perf = exported("shared-prefix-1024", "inference-perf")
    document = yaml.safe_load(perf.files[0].text)
    assert document["load"]["stages"] == [{"num_requests": 50, "concurrency_level": 4}]
    assert document["data"]["shared_prefix"]["system_prompt_len"] == 1024
    assert perf.command == ("inference-perf", "--config_file", perf.files[0].name)


@pytest.mark.parametrize("name", workload_names())
@pytest.mark.parametrize("tool", TOOLS)
def test_every_workload_is_either_exported_or_refused_with_a_way_out(name: str, tool: str) -> None:
    try:
        export = exported(name, tool, limit=12, block_tokens=64)
    except UsageError as refused:
        assert tool == "inference-perf"
        assert "export to" in str(refused) or "has no arrivals" in str(refused)
        return
    assert export.notes
    assert all("None" not in word for word in export.command)
    assert all(any(file.name in word for word in export.command) for file in export.files)


@pytest.mark.parametrize(
    ("tool", "setting"),
    [("vllm", "--timed-trace-chunk-hash-size"), ("aiperf", "--isl-block-size"), ("guidellm", "hash_id_block_size=512")],
)
def test_the_block_size_is_always_given_and_its_trap_named(tool: str, setting: str) -> None:
    export = exported("mooncake-conversation", tool, limit=20)
    spelled = " ".join(export.command)
    assert setting in spelled
    assert "512" in spelled
    assert any("512" in note and ("unless given" in note or "default" in note) for note in export.notes)


def test_vllm_is_told_to_hash_strings_the_same_way_each_time() -> None:
    export = exported("mooncake-conversation", "vllm", limit=20)
    assert export.environment == (("PYTHONHASHSEED", "0"),)
    assert "--self-timed" not in export.command
    closed = exported(with_arrival(load_workload("mooncake-conversation"), concurrency=3), "vllm", limit=20)
    assert "--no-self-timed" in closed.command
    assert value(closed, "--max-concurrency") == "3"


def test_an_exported_trace_has_the_ids_structure_of_the_original(tmp_path: Path) -> None:
    workload = load_workload("mooncake-conversation")
    plan = plan_requests(workload, vocab_size=32_000)
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in trace_rows(plan, 512)))
    original = open_trace(Path(workload.source).parent / "traces" / "mooncake-conversation-500.jsonl.gz")
    renamed: dict[object, object] = {}
    for ours, theirs in zip(open_trace(path).requests(), original.requests(), strict=True):
        assert (ours.input_tokens, ours.output_tokens) == (theirs.input_tokens, theirs.output_tokens)
        assert [renamed.setdefault(one, other) for one, other in zip(ours.ids, theirs.ids, strict=True)] == list(
            theirs.ids
        )
    assert len(set(renamed.values())) == len(renamed)
    again = plan_requests(load_workload(path), vocab_size=32_000)
    assert again.reuse.hit_tokens == plan.reuse.hit_tokens


@pytest.mark.parametrize("block_tokens", [16, 64, 100])
def test_a_file_of_blocks_rounds_sharing_down_to_them_and_says_so(block_tokens: int, tmp_path: Path) -> None:
    export = exported("demo-chat", "aiperf", block_tokens=block_tokens)
    path = tmp_path / export.files[0].name
    path.write_text("".join(f'{line[:1]}"timestamp": 0, {line[1:]}\n' for line in export.files[0].text.splitlines()))
    plan = plan_requests(load_workload("demo-chat"), vocab_size=32_000)
    wanted = [one.shared_prefix_tokens // block_tokens * block_tokens for one in plan.requests]
    from kvbench.workloads.traces.base import TraceRequest

    seen: set[object] = set()

    def hits(row: TraceRequest) -> int:
        run = next((at for at, one in enumerate(row.ids) if one not in seen), len(row.ids))
        seen.update(row.ids)
        return run * block_tokens

    got = [hits(row) for row in open_trace(path, block_tokens=block_tokens).requests()]
    assert got == wanted
    assert any(f"{sum(wanted):,} prompt tokens are hits there" in note for note in export.notes)


def test_later_turns_get_the_time_at_which_they_would_start_with_instant_answers() -> None:
    plan = plan_requests(load_workload("chat"), vocab_size=32_000, limit=60)
    rows = list(trace_rows(plan, 16))
    for one, row in zip(plan.requests, rows, strict=True):
        if one.after:
            before = rows[one.after[0]]["timestamp"]
            assert row["timestamp"] == pytest.approx(before + 1000 * one.think_s, abs=2)
    export = exported("chat", "vllm", limit=60)
    assert any("wait for an earlier answer" in note for note in export.notes)


def test_arrivals_are_spelled_as_the_tool_spells_them() -> None:
    even = replace(load_workload("shared-prefix-1024"), num_requests=40)
    gamma = replace(even, arrival=replace(load_workload("mixed").arrival, rate_per_s=3.0))
    assert value(exported(gamma, "vllm"), "--burstiness") == "0.25"
    assert value(exported(gamma, "aiperf"), "--arrival-smoothness") == "0.25"
    assert value(exported(gamma, "guidellm"), "--profile") == "kind=replay,time_scale=1.0"
    with pytest.raises(UsageError, match="has no arrivals like gamma"):
        exported(gamma, "inference-perf")
    poisson = with_arrival(even, rate_per_s=4.0)
    assert value(exported(poisson, "guidellm"), "--profile") == "kind=poisson,rate=4"
    assert "duration: 10" in exported(poisson, "inference-perf").files[0].text


def test_what_the_plan_was_asked_for_counts_and_not_what_the_workload_says() -> None:
    workload = load_workload("shared-prefix-1024")
    plan = plan_requests(workload, vocab_size=32_000, concurrency=7, seed=5, limit=9)
    export = export_workload(workload, plan, "vllm", url="http://a", model="m")
    assert (value(export, "--max-concurrency"), value(export, "--num-prompts")) == ("7", "9")
    small = plan_requests(workload, vocab_size=32_000, scale=0.5)
    assert "timed_trace" in export_workload(workload, small, "vllm", url="http://a", model="m").command
    trace = load_workload("mooncake-conversation")
    scaled = plan_requests(trace, vocab_size=32_000, scale=0.1, limit=10)
    assert value(export_workload(trace, scaled, "aiperf", url="http://a", model="m"), "--isl-block-size") == "16"


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(UsageError, match="'genai-perf' is not known"):
        exported("demo", "genai-perf")
