"""The worked example that a reader can check by hand: Qwen3-235B-A22B on 8 ranks, 32,768 tokens, 50 GB/s per rank."""

import re
from pathlib import Path

import pytest

from kvbench.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "load-vs-recompute.md"
QUESTION = ("qwen3-235b-a22b", "--tokens", "32768", "--tp", "8", "--tier", "dram=50GB/s")
RULE_OF_THUMB = (
    *("--flops-mode", "active-params", "--active-params", "22e9"),
    *("--efficiency", "1.0", "--peak-flops", "989e12"),
)


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["load-vs-recompute", *QUESTION, *request.param]) == 0
    return capsys.readouterr().out


def row(screen: str, estimate: str) -> list[str]:
    """The cells of one row of `What each level of detail changes`."""
    table = screen.partition("What each level of detail changes")[2].partition("\n\n")[0]
    (line,) = [line for line in table.splitlines() if estimate in line]
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("screen", [RULE_OF_THUMB], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        "Load: 31.5 ms against 391 ms to recompute, 12.4× faster",
        "1.47 GiB per rank, 11.75 GiB on all ranks, 5.88 GiB unique (2 copies of each byte)",
        "0.39 PFLOP per rank; I_cache 2.5e5 > I_hardware 2.0e4 FLOP/B",
        "loading pays above B* = 4.03 GB/s",
    ],
)
def test_the_rule_of_thumb_prints_the_worked_example_digit_for_digit(screen: str, text: str) -> None:
    assert text in screen


@pytest.mark.parametrize("screen", [RULE_OF_THUMB], indirect=True)
def test_the_rule_of_thumb_is_one_level_of_detail(screen: str) -> None:
    assert row(screen, "active params, peak") == [
        *("32,768", "active params, peak", "0.39 PFLOP", "391 ms", "31.5 ms", "12.4×")
    ]
    assert "exact FLOPs" not in screen


@pytest.mark.parametrize("screen", [()], indirect=True)
@pytest.mark.parametrize(
    ("estimate", "cells"),
    [
        ("active params, peak", ["0.39 PFLOP", "391 ms", "31.5 ms", "12.4×"]),
        ("exact FLOPs, peak", ["0.38 PFLOP", "389 ms", "31.5 ms", "12.3×"]),
        ("exact FLOPs, efficiency auto", ["0.38 PFLOP", "863 ms", "31.5 ms", "27.4×"]),
    ],
)
def test_without_those_modes_each_level_of_detail_stands_below_the_other(
    screen: str, estimate: str, cells: list[str]
) -> None:
    assert row(screen, estimate) == ["32,768", estimate, *cells]


@pytest.mark.parametrize("screen", [()], indirect=True)
def test_exact_work_at_measured_efficiencies_makes_the_same_load_27_times_faster(screen: str) -> None:
    assert "Load: 31.5 ms against 863 ms to recompute, 27.4× faster" in screen
    assert "loading pays above B* = 1.83 GB/s" in screen


@pytest.mark.parametrize(("screen", "heading"), [(RULE_OF_THUMB, "rule"), ((), "exact")], indirect=["screen"])
def test_the_page_shows_what_the_command_prints(screen: str, heading: str) -> None:
    block = re.search(rf"<!-- worked example: {heading} -->\n```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert block is not None
    printed = {line.rstrip() for line in screen.splitlines()}
    assert [line for line in block[1].splitlines() if line not in printed] == []
