from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import KIB, MIB
from kvbench.probes.executions.registry import EXECUTIONS
from kvbench.probes.plan_file import list_text, plan_names
from kvbench.probes.transfer_plan import PlannedCase, load_transfer_plan, planned_cases

NAMED = {"h2d", "d2h", "duplex", "page-sweep", "overlap", "dram", "file", "gds", "remote", "contention", "tiers"}


def cases(name: str, *settings: str, has_gpu: bool = True) -> list[PlannedCase]:
    return list(planned_cases(load_transfer_plan(name, settings), has_gpu=has_gpu))


@pytest.mark.parametrize("name", [name for name in plan_names() if name != "tiers"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_every_plan_that_ships_loads_asks_a_question_and_has_cases(name: str, has_gpu: bool) -> None:
    plan = load_transfer_plan(name)
    assert plan.question.endswith(("?", ".", ")"))
    assert "?" in plan.question
    found = list(planned_cases(plan, has_gpu=has_gpu))
    assert found
    assert len({case.name for case in found}) == len(found)
    assert all(case.points for case in found)


def test_the_plans_that_were_promised_are_there_and_listed() -> None:
    assert set(plan_names()) >= NAMED
    assert all(name in list_text() for name in NAMED)
    assert "measure" not in plan_names()


def test_stand_ins_appear_only_without_a_gpu_and_say_for_what() -> None:
    assert all(EXECUTIONS[case.method].runs_on == "cuda" for case in cases("h2d"))
    without = cases("h2d", has_gpu=False)
    assert {case.stands_in_for for case in without if EXECUTIONS[case.method].runs_on == "host"} == {"h2d"}
    (duplex,) = [case for case in cases("duplex", has_gpu=False) if case.stands_in_for == "duplex"]
    assert duplex.concurrency == 2


def test_settings_replace_keys_and_know_lists() -> None:
    plan = load_transfer_plan("dram", ["segments=4KiB,1MiB", "repeats=3", "concurrency=[1, 4]", "question=Why?"])
    assert plan.segments_bytes == (4 * KIB, MIB)
    assert (plan.repeats, plan.concurrency, plan.question) == (3, (1, 4), "Why?")


def test_a_model_brings_its_pages_and_every_layout() -> None:
    plan = load_transfer_plan("h2d", ["model=Qwen3-235B-A22B", "tp=8", "page_tokens=64"])
    shape = plan.shape()
    assert shape is not None
    assert shape.page_bytes == 94 * 2 * 256 * 64
    assert {case.layout for case in planned_cases(plan, has_gpu=True)} == {
        "layer-first", "page-first", "page-first-direct",
    }  # fmt: skip


def test_a_mapping_is_never_direct_and_loads_are_never_synced() -> None:
    found = cases("file")
    assert not any(case.direct for case in found if case.method == "mmap")
    assert {case.fsync for case in found if case.direction == "load"} == {"none"}
    assert {case.fsync for case in found if case.direction == "store"} == {"none", "batch"}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["repeat=5"], "did you mean 'repeats'"),
        (["repeats"], "is not key=value"),
        (["repeats=0"], "greater than or equal to 1"),
        (["sizes=64"], "has no unit"),
        (["sizes=64M"], "did you mean 64MiB"),
        (["executions=host-lop"], "did you mean host-loop"),
        (["directions=load"], "path dram: has no direction load"),
        (["directions=up"], "key 'directions.0' is 'up'"),
        (["paths=ftp://x"], "no known scheme"),
        (["paths=mooncake://x"], "cannot be probed"),
        (["paths=throttled(file:/tmp, latency=1ms)"], "only throttled"),
        (["paths=throttled(null:, latency=soon)"], "duration 'soon'"),
        (["concurrency=0"], "not between 1 and 1024"),
        (["direct=2"], "each is 1"),
        (["executions=[]"], "needs executions"),
        (["sizes=[1MiB"], "is no value"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings: list[str], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases("dram", *settings)
    assert part in str(caught.value)


def test_a_plan_of_ones_own_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: Mine?\npaths: ['null:']\ndirections: [h2h]\nsizes: [1MiB]\npool: 4MiB\ntime: 1s\ntimeout: 9s\n"
        "total: 9s\n"
    )
    plan = load_transfer_plan(str(path))
    assert (plan.name, plan.question) == ("mine", "Mine?")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("question: [", ":1: is not YAML"),
        ("- a\n", "holds no keys"),
        ("question: Mine?\n", "key 'paths' is missing"),
        ("qestion: Mine?\n", "did you mean 'question'"),
    ],
)
def test_a_broken_plan_names_file_and_key(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_transfer_plan(str(path))
    assert str(caught.value).startswith(str(path))
    assert part in str(caught.value)


def test_an_unknown_plan_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean page-sweep"):
        load_transfer_plan("pagesweep")
    with pytest.raises(KvbenchError, match="cannot be read"):
        load_transfer_plan("./nowhere.yaml")


def test_a_path_that_yaml_would_take_for_a_key_is_a_path() -> None:
    assert [str(spec) for spec in load_transfer_plan("dram", ["paths=dram:"]).paths] == ["dram:"]
    assert len(load_transfer_plan("harness", ["paths=['null:', 'dram:1GiB']", "executions=host-block"]).paths) == 2
