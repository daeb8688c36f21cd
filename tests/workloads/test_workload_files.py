from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.traffic import SharedPrefix
from kvbench.workloads.workload import load_workload, with_arrival, workload_names

FOLDER = Path(__file__).parents[2] / "workloads"
GOOD = """\
version: 1
why: a test
shape: made up
requests: 10
arrival: {process: poisson, rate: 2/s}
shared_prefix:
  groups: 2
  prefix_tokens: 64
  unique_tokens: {uniform: [8, 16]}
  output_tokens: 4
"""


def loaded(tmp_path: Path, text: str) -> object:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    return load_workload(path)


def test_every_shipped_workload_loads_plans_and_says_why_it_exists() -> None:
    assert set(workload_names()) == {path.stem for path in FOLDER.glob("*.yaml")}
    assert {"demo", "shared-prefix-1024"} <= set(workload_names())
    for name in workload_names():
        workload = load_workload(name)
        assert len(workload.why) > 80, name
        assert len(workload.shape) > 80, name
        plan = plan_requests(workload, vocab_size=32_000, limit=100)
        assert plan.requests
        assert plan.requests[-1].prompt_tokens == len(plan.requests[-1].prompt)


def test_the_table_in_the_readme_names_every_workload_and_has_its_figures() -> None:
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    rows = {cells[1].strip("`"): cells for cells in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert sorted(rows) == list(workload_names())
    for name, cells in rows.items():
        plan = plan_requests(load_workload(name), vocab_size=32_000)
        assert int(cells[4].replace(",", "")) == len(plan.requests), name
        assert plan.reuse.hit_ratio is not None
        assert float(cells[5].removesuffix(" %")) == pytest.approx(100 * plan.reuse.hit_ratio, abs=0.051), name


def test_the_comparison_with_other_tools_is_fifty_requests_of_1124_tokens_four_at_a_time() -> None:
    plan = plan_requests(load_workload("shared-prefix-1024"), vocab_size=32_000)
    assert (len(plan.requests), plan.loop, plan.concurrency) == (50, "closed", 4)
    assert {one.prompt_tokens for one in plan.requests} == {1124}
    assert {one.max_tokens for one in plan.requests} == {32}
    assert [one.shared_prefix_tokens for one in plan.requests] == [0] + [1024] * 49
    assert all(one.at_s is None and one.root == one.index for one in plan.requests)


def test_the_demo_asks_for_more_than_a_third_of_its_distinct_tokens_can_hold() -> None:
    plan = plan_requests(load_workload("demo"), vocab_size=256)
    assert 10_000 < plan.reuse.working_set_tokens < 12_000
    assert plan.reuse.hit_ratio is not None
    assert plan.reuse.hit_ratio > 0.7
    assert len({one.group for one in plan.requests}) >= 5


def test_a_file_becomes_plain_dataclasses(tmp_path: Path) -> None:
    workload = loaded(tmp_path, GOOD)
    traffic = workload.traffic  # type: ignore[attr-defined]
    assert isinstance(traffic, SharedPrefix)
    assert (traffic.groups, traffic.alpha) == (2, 0.0)
    assert workload.arrival.rate_per_s == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("requests: 10", "request: 10", r"unknown key 'request' .did you mean 'requests'"),
        ("groups: 2", "group: 2", r"unknown key 'shared_prefix.group' .did you mean 'groups'"),
        ("rate: 2/s", "rat: 2/s", r"unknown key 'arrival.rat' .did you mean 'rate'"),
        ("rate: 2/s", "rate: 2", r"'arrival.rate' is 2: has no unit; write it like 2/s"),
        ("rate: 2/s", "rate: 2Hz", r"rate '2Hz' has unit 'Hz'"),
        ("version: 1", "version: 2", r"version 2 is not known; this kvbench reads version 1"),
        ("version: 1\n", "", r"key 'version' is missing"),
        ("why: a test\n", "", r"key 'why' is missing"),
        ("process: poisson", "process: poison", r"'arrival.process' is 'poison'"),
        ("process: poisson, rate: 2/s", "process: closed", r"closed loop needs a concurrency"),
        ("rate: 2/s", "rate: 2/s, concurrency: 3", r"process 'poisson' takes ramp, rate, not 'concurrency'"),
        ("process: poisson, rate: 2/s", "process: gamma, rate: 2/s, cv: 2, burstiness: 1", r"not both"),
        ("process: poisson, rate: 2/s", "process: trace", r"only a trace has recorded times"),
        ("requests: 10\n", "", r"give requests .how many. or duration"),
        ("requests: 10", "requests: 0", r"'requests' is 0"),
        ("requests: 10", "requests: ten", r"'requests' is 'ten'"),
        ("uniform: [8, 16]", "unifrm: [8, 16]", r"unknown distribution 'unifrm' .did you mean 'uniform'"),
        ("prefix_tokens: 64", "prefix_tokens: 64.5", r"64.5 is not a number of tokens"),
        ("prefix_tokens: 64", "prefix_tokens: 64 KiB", r"'64 KiB' is not a number of tokens"),
        ("groups: 2", "groups: 2\n  popularity: zipf", r"'zipf' is neither uniform nor"),
        ("shared_prefix:", "rag:", r"unknown key 'rag\.groups'"),
        ("groups: 2", "groups: [", r"w\.yaml:\d+: is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_a_hint(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(UsageError, match=message) as refused:
        loaded(tmp_path, GOOD.replace(old, new, 1))
    assert "\n" not in str(refused.value)
    assert "w.yaml" in str(refused.value)


def test_two_kinds_of_traffic_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give exactly one of shared_prefix, .* .found none"):
        loaded(tmp_path, GOOD.split("shared_prefix:", maxsplit=1)[0])
    with pytest.raises(UsageError, match="found shared_prefix, trace"):
        loaded(tmp_path, GOOD + "trace: {path: x.jsonl}\n")


def test_a_mixed_file_names_the_part_that_is_wrong(tmp_path: Path) -> None:
    text = GOOD.split("shared_prefix:", maxsplit=1)[0] + "mixed:\n  - {weight: 1}\n"
    with pytest.raises(UsageError, match=r"'mixed\.0'.*exactly one of shared_prefix"):
        loaded(tmp_path, text)
    text = text.replace("{weight: 1}", "{weight: 1, shard_prefix: {}}")
    with pytest.raises(UsageError, match=r"unknown key 'mixed\.0\.shard_prefix' .did you mean 'shared_prefix'"):
        loaded(tmp_path, text)


def test_an_unknown_name_gets_a_hint_and_a_missing_path_the_names() -> None:
    with pytest.raises(UsageError, match="'deno' is not known; did you mean demo"):
        load_workload("deno")
    with pytest.raises(KvbenchError, match="there is no such file"):
        load_workload("traces/nothing.jsonl")
    with pytest.raises(KvbenchError, match="cannot be read"):
        load_workload("nothing.yaml")
    with pytest.raises(UsageError, match="for a trace file"):
        load_workload("demo", trace_format="mooncake")


def test_a_rate_a_concurrency_and_a_speedup_replace_what_the_file_says() -> None:
    demo, trace = load_workload("demo"), load_workload("mooncake-conversation")
    assert with_arrival(demo, rate_per_s=3.0).arrival.process == "poisson"
    assert with_arrival(demo, concurrency=9).arrival.concurrency == 9
    mixed = load_workload("mixed")
    assert with_arrival(mixed, rate_per_s=9.0).arrival == replace(mixed.arrival, rate_per_s=9.0)
    assert with_arrival(trace, speedup=2.0, spread_ties=False).arrival.speedup == 2.0
    with pytest.raises(UsageError, match="not both"):
        with_arrival(demo, rate_per_s=3.0, concurrency=2)
    with pytest.raises(UsageError, match="for recorded times"):
        with_arrival(demo, speedup=2.0)
