import json
from pathlib import Path

import pytest

from kvbench.cli.main import main

QUICK = [
    "--set", "sizes=256KiB,1MiB", "--set", "segments=64KiB", "--set", "repeats=2", "--set", "pool=4MiB",
    "--set", "concurrency=1",
]  # fmt: skip


def test_a_plan_prints_its_answer_and_saves_paths_that_load_vs_recompute_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "probe.json"
    assert main(["probe", "dram", *QUICK, "--out", str(saved), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("Fastest h2h: ")
    code = main(["load-vs-recompute", "qwen3-0.6b", "--tokens", "4096", "--probe", str(saved), "--json", "--quiet"])
    out = capsys.readouterr().out
    assert code == 0, out
    origins = json.dumps(json.loads(out))
    assert "into host memory" in origins


def test_json_is_the_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "dram", *QUICK, "--set", "executions=host-block", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "probe"
    assert [case["status"] for case in document["result"]["cases"]] == ["ok"]


def test_list_names_every_plan_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--list"]) == 0
    out = capsys.readouterr().out
    assert "page-sweep" in out
    assert "From which page size on" in out


def test_no_plan_and_an_unknown_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 2
    assert "kvbench probe --list" in capsys.readouterr().err
    assert main(["probe", "dramm"]) == 2
    assert "did you mean dram?" in capsys.readouterr().err


def test_a_plan_of_which_every_case_fails_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    settings = ["--set", f"paths=file:{missing}", "--set", "engines=psync", "--set", "directions=load"]
    assert main(["probe", "file", *settings, "--set", "direct=1", "--set", "concurrency=1", "--quiet"]) == 1
    assert "every case of plan file failed" in capsys.readouterr().err


def test_a_plan_of_tiers_goes_the_same_way_and_feeds_load_vs_recompute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = tmp_path / "tiers.json", tmp_path / "tiers.html"
    settings = ["model=qwen3-0.6b", "page_tokens=1", "stacks=dram:4MiB", "blocks=64", "batch=1,16", "repeats=6"]
    options = [part for setting in (*settings, "time=200ms") for part in ("--set", setting)]
    assert main(["probe", "tiers", *options, "--out", str(saved), "--html", str(page), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Loads in calls of up to 16 blocks carry: dram ")
    assert json.loads(saved.read_text())["kind"] == "tier-probe"
    assert "<svg" in page.read_text()
    assert (
        main(["load-vs-recompute", "qwen3-0.6b", "--tokens", "4096", "--probe", str(saved), "--json", "--quiet"]) == 0
    )
    assert "dram:4MiB into host memory" in capsys.readouterr().out
    assert main(["probe", "tiers", *options, "--gpu", "H100"]) == 2
    assert "means nothing to a plan of tier stacks" in capsys.readouterr().err
