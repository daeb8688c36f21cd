import gzip
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.traces.base import TraceRequest
from kvbench.workloads.traces.formats import FORMATS, detected_format, open_trace, trace_format
from kvbench.workloads.traces.lines import LONGEST_LINE_BYTES
from kvbench.workloads.workload import load_workload

DATA = Path(__file__).parents[1] / "data" / "workloads"
TRACES = Path(os.environ.get("KVBENCH_TRACES", Path(__file__).parents[3] / "shared" / "data" / "traces"))
BY_FILE = {
    "mooncake.jsonl": "mooncake",
    "bailian.jsonl": "bailian",
    "weka.json": "weka",
    "azure.csv": "azure",
    "burstgpt.csv": "burstgpt",
    "ragpulse.jsonl": "ragpulse",
    "lmcache.jsonl": "lmcache",
    "otel.json": "otel",
    "otlp.json": "otel",
}


def read(name: str) -> list[TraceRequest]:
    return list(open_trace(DATA / name).requests())


@pytest.mark.parametrize(("file", "name"), BY_FILE.items())
def test_a_format_is_known_by_its_first_row_plain_or_compressed(file: str, name: str, tmp_path: Path) -> None:
    assert detected_format(DATA / file).name == name
    packed = tmp_path / "trace"
    packed.write_bytes(gzip.compress((DATA / file).read_bytes()))
    assert detected_format(packed).name == name
    assert list(open_trace(packed).requests()) == [
        one if name != "weka" else _renamed(one, packed) for one in read(file)
    ]


def _renamed(request: TraceRequest, path: Path) -> TraceRequest:
    name, _, line = (request.conversation or "").rsplit(":", 2)
    return replace(request, conversation=f"{name}:{path}:{line}")


def test_every_format_says_what_its_ids_mean() -> None:
    expected = {
        "mooncake": (512, "chained", "global", "hashed", "recorded"),
        "bailian": (16, "chained", "global", "either", "recorded"),
        "weka": (64, "chained", "file", "unhashed", "think"),
        "azure": (None, "none", "none", "none", "recorded"),
        "burstgpt": (None, "none", "none", "none", "recorded"),
        "ragpulse": (None, "content", "category", "none", "recorded"),
        "lmcache": (256, "chained", "global", "unhashed", "recorded"),
        "otel": (None, "content", "global", "none", "recorded"),
    }
    assert set(expected) == set(FORMATS)
    for name, (block, kind, scope, tail, timing) in expected.items():
        form = trace_format(name)
        assert (form.block_tokens, form.hash_kind, form.hash_scope, form.partial_tail, form.timing) == (
            block,
            kind,
            scope,
            tail,
            timing,
        )
        assert form.not_carried, f"{name} says nothing about what it cannot carry"


def test_mooncake_times_are_milliseconds_and_the_partial_tail_has_an_id() -> None:
    first, second, third = read("mooncake.jsonl")
    assert (first.at_s, second.at_s, third.at_s) == (0.0, 0.0, 3.0)
    assert first.ids == (0, 1, 2)
    assert (third.input_tokens, third.output_tokens, third.line) == (700, 0, 3)


def test_bailian_turns_of_one_chat_share_a_session_and_tails_may_lack_an_id() -> None:
    first, second, third = read("bailian.jsonl")
    assert (first.session, second.session, third.session) == ("159", "159", "170")
    assert (first.turn, second.turn) == (0, 1)
    assert len(first.ids) == 3  # 33 tokens: two full blocks and a hashed tail
    assert len(second.ids) == 4  # 70 tokens: four full blocks, six tokens without an id
    trace = open_trace(DATA / "bailian.jsonl")
    list(trace.requests())
    assert trace.notes.counts == {"turns whose parent chat is not in the file (taken as first turns)": 1}


def test_weka_steps_wait_for_the_answer_before_and_for_sub_agents_that_had_ended() -> None:
    main, sub_1, sub_2, after = read("weka.json")
    assert main.after == ()
    assert sub_1.after == (0,)
    assert sub_1.think_s == 1.0  # started at 5, the main agent's answer ended at 4
    assert (sub_2.after, sub_2.think_s) == ((1,), 1.0)  # recorded think_time
    assert after.after == (0, 2)
    assert after.think_s == 1.0  # at 12, the sub-agent ended at 5 + 6
    assert (sub_1.session, after.session) == ("trace_x/agent_001", "trace_x")
    assert {one.scope for one in (main, sub_1, sub_2, after)} == {"trace_x"}
    plan = plan_requests(load_workload(DATA / "weka.json"), vocab_size=32_000)
    assert [one.after for one in plan.requests] == [(), (0,), (1,), (0, 2)]
    assert [one.shared_prefix_tokens for one in plan.requests] == [0, 0, 64, 128]
    assert [one.prompt_tokens for one in plan.requests] == [140, 64, 128, 200]
    assert [one.root for one in plan.requests] == [0, 0, 0, 0]


def test_azure_times_keep_their_seventh_digit() -> None:
    first, second, third = read("azure.csv")
    assert first.at_s is not None
    assert second.at_s is not None
    assert second.at_s - first.at_s == pytest.approx(0.0520007, abs=2e-7)
    assert (third.input_tokens, third.output_tokens) == (11, 0)


def test_burstgpt_leaves_failed_requests_out_and_says_so() -> None:
    trace = open_trace(DATA / "burstgpt.csv")
    assert [(one.at_s, one.input_tokens, one.output_tokens, one.session) for one in trace.requests()] == [
        (5.0, 472, 18, "1"),
        (118.0, 417, 276, "2"),
    ]
    assert list(trace.notes.counts.values()) == [1]


def test_ragpulse_prompts_are_as_long_as_recorded_and_equal_parts_in_equal_places_are_shared() -> None:
    plan = plan_requests(load_workload(DATA / "ragpulse.jsonl"), vocab_size=32_000)
    by_line = {int(one.source.rsplit(":", 1)[1]): one for one in plan.requests}
    assert {line: one.prompt_tokens for line, one in by_line.items()} == {1: 1300, 3: 1400, 4: 300}
    # sorted by time: line 3 (80 s), line 1 (82 s), line 4; two system parts of 128 and one passage of 400 in common
    assert by_line[3].shared_prefix_tokens == 0
    assert by_line[1].shared_prefix_tokens == 128 + 128 + 400
    assert by_line[4].shared_prefix_tokens == 128  # then another part follows
    assert {one.code for one in plan.warnings} >= {"not-in-trace", "unsorted-times", "trace-notes"}


def test_lmcache_chunks_are_whole_and_answers_are_not_in_the_log() -> None:
    first, second = read("lmcache.jsonl")
    assert (first.ids, first.id_tokens) == (("a1b2", "c3d4"), (256, 256))
    assert (first.input_tokens, first.output_tokens) == (600, 32)
    plan = plan_requests(load_workload(DATA / "lmcache.jsonl"), vocab_size=32_000)
    assert [one.shared_prefix_tokens for one in plan.requests] == [0, 256]
    assert [one.at_s for one in plan.requests] == [0.0, 2.5]
    assert second.group is None


def test_otel_messages_that_repeat_from_the_start_are_shared() -> None:
    plan = plan_requests(load_workload(DATA / "otel.json"), vocab_size=32_000)
    first, second = plan.requests
    question = len('{"content": "What is the capital of France?", "role": "user"}') // 4
    assert (first.prompt_tokens, second.shared_prefix_tokens) == (question, question)
    assert (first.max_tokens, second.max_tokens) == (20, len("The Louvre, of course, and much more.") // 4)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert (first.session, second.session) == ("s", "s")
    (over_otlp,) = read("otlp.json")
    assert (over_otlp.at_s, over_otlp.output_tokens, over_otlp.input_tokens) == (1772013600.5, 20, question)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        text = (DATA / "weka.json").read_text().replace("trace_x", f"trace_{name}")
        (tmp_path / f"{name}.json").write_text(text)
    assert [one.session for one in open_trace(tmp_path).requests() if one.turn == 0] == [
        "trace_a",
        "trace_a/agent_001",
        "trace_b",
        "trace_b/agent_001",
    ]


def test_another_block_size_is_taken_when_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]}\n')
    with pytest.raises(KvbenchError, match=r"t\.jsonl:1: 2 block ids for 100 prompt tokens.*512.*give block_tokens"):
        list(open_trace(path).requests())
    assert [one.ids for one in open_trace(path, block_tokens=64).requests()] == [(1, 2)]
    (request,) = plan_requests(load_workload(path, block_tokens=64), vocab_size=32_000).requests
    assert list(request.recipe.lengths) == [64, 36]


GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (f'{GOOD}\n{{"timestamp": 1, "input_len', r":2: is not JSON .* cut off"),
        (f"{GOOD}\n[1]", r":2: \[1\] is not a JSON object"),
        (GOOD.replace("[1]", "[1.5]"), r":1: 'hash_ids' holds 1\.5"),
        (GOOD.replace("[1]", "7"), r":1: 'hash_ids' is 7, not a list"),
        (GOOD.replace(' "timestamp": 0,', "").replace('"timestamp": 0, ', ""), r":1: 'timestamp' is missing"),
        (GOOD.replace('"input_length": 5', '"input_length": "5"'), r":1: 'input_length' is '5', not a whole number"),
        (GOOD.replace('"input_length": 5', '"input_length": true'), r":1: 'input_length' is True"),
        (GOOD.replace('"input_length": 5', '"input_length": -5'), r":1: 'input_length' is -5, not from 0"),
        (GOOD.replace('"input_length": 5', f'"input_length": {10**30}'), r":1: .* a whole number of 100 bits"),
        (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), r":1: is not JSON \(NaN"),
        (GOOD.replace('"timestamp": 0', f'"timestamp": {10**400}'), r":1: 'timestamp' is a whole number of"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), r":1: 'timestamp' is -1, not a time"),
        (f"{GOOD}\n" + "[" * 100_000, r":2: the JSON is nested too deeply"),
        ('{"chat_id": 1, "parent_chat_id": -1, "hash_ids": []}', r":1: 'input_length' is missing"),
        ('{"requests": {}, "block_size": 64}', r":1: 'requests' is {}, not a list"),
        ('{"requests": [3], "block_size": 64}', r":1: requests\[0\] is 3, not an object"),
        ('{"requests": [], "block_size": 0}', r":1: 'block_size' is 0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1", r":2: has 2 columns where the header has 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n16.11.2023,1,1", r":2: 'TIMESTAMP' is '16\.11\.2023', not a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-30 00:00:00.1,1,1", r":2: .* no date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,٣,1", r":2: 'ContextTokens' is '٣'"),
        ("Timestamp,Request tokens,Response tokens\nx,1,1", r":2: 'Timestamp' is 'x', not a number of seconds"),
        ("Timestamp,Request tokens,Response tokens\ninf,1,1", r":2: 'Timestamp' is inf, not a time"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": {}}', r":1: 'timestamp' is 'x'"),
        (
            '{"timestamp": "1", "input_length": 1, "output_length": 1, "hash_ids": {"foo": []}}',
            r":1: .*unknown category 'foo'",
        ),
        ('{"spans": [7]}', r":1: a span is 7, not an object"),
        ('{"spans": [{"attributes": {"gen_ai.input.messages": "[1"}}]}', r":1: is not JSON"),
        ('{"spans": [{"attributes": {"gen_ai.input.messages": "hi"}}]}', r":1: 'startTimeUnixNano' is missing"),
        ("hello world", "is not one of the known traces .* --format"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line_and_value(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(KvbenchError, match=message) as refused:
        list(open_trace(path).requests())
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_damaged_files_are_refused_by_line(tmp_path: Path) -> None:
    packed = gzip.compress((DATA / "mooncake.jsonl").read_bytes() * 500)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(KvbenchError, match=r"cut\.gz:\d+: the file ends early or is damaged"):
        list(open_trace(tmp_path / "cut.gz", format_name="mooncake").requests())
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvbenchError, match=r"binary:1: is not UTF-8"):
        open_trace(tmp_path / "binary")
    (tmp_path / "long").write_bytes(b'{"a": "' + b"x" * (LONGEST_LINE_BYTES + 1))
    with pytest.raises(KvbenchError, match=r"long:1: the line is longer than 64\.00 MiB"):
        open_trace(tmp_path / "long")
    with pytest.raises(KvbenchError, match="cannot be read"):
        open_trace(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(KvbenchError, match=r"has no \.json or \.jsonl"):
        open_trace(tmp_path / "folder")


def test_a_wrong_name_of_a_format_gets_a_hint() -> None:
    with pytest.raises(UsageError, match="'moncake' is not known; did you mean mooncake"):
        open_trace(DATA / "mooncake.jsonl", format_name="moncake")
    with pytest.raises(UsageError, match="no blocks of fixed size"):
        open_trace(DATA / "azure.csv", block_tokens=16)


def test_reading_takes_the_memory_of_one_request(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    row = '{{"timestamp": {0}, "input_length": 51200, "output_length": 1, "hash_ids": {1}}}\n'
    with path.open("w") as file:
        for number in range(4000):
            file.write(row.format(number, list(range(number * 100, number * 100 + 100))))
    tracemalloc.start()
    count = sum(1 for _ in open_trace(path).requests())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak_bytes < 1 << 20 < path.stat().st_size


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not on this machine")
def test_every_real_trace_loads_and_plans_its_first_200_requests() -> None:
    paths = [*sorted(TRACES.glob("*.gz")), *sorted((TRACES / "otel").glob("*.json"))]
    assert len(paths) >= 9
    for path in paths:
        plan = plan_requests(load_workload(path), vocab_size=32_000, limit=200)
        assert len(plan.requests) == 200 or path.parent.name == "otel", path
        sample = plan.requests[:: max(1, len(plan.requests) // 10)]
        assert all(len(one.prompt) == one.prompt_tokens and max(one.prompt) < 32_000 for one in sample)
        assert all(other < one.index for one in plan.requests for other in one.after)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not on this machine")
def test_the_first_prompts_of_a_trace_are_exactly_as_long_as_recorded() -> None:
    for name in ("mooncake_fast25_conversation.jsonl.gz", "ragpulse_0_trace.jsonl.gz", "azure_llm_2023_conv.csv.gz"):
        recorded = {
            one.line: one.input_tokens for one, _ in zip(open_trace(TRACES / name).requests(), range(200), strict=False)
        }
        plan = plan_requests(load_workload(TRACES / name), vocab_size=32_000, limit=200)
        assert {int(one.source.rsplit(":", 1)[1]): len(one.prompt) for one in plan.requests} == recorded


def test_an_installed_copy_reads_its_excerpts(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "workloads", tmp_path / "workloads")
    plan = plan_requests(load_workload(tmp_path / "workloads" / "claude-code.yaml"), vocab_size=1000)
    assert len(plan.requests) == 62
