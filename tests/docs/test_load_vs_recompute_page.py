"""What docs/load-vs-recompute.md claims is what the command does."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvbench.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "load-vs-recompute.md").read_text()
README = (ROOT / "README.md").read_text()
EXCERPTS = re.findall(r"```\n(kvbench load-vs-recompute [^\n]*)\n```\n\n```text\n(.*?)```", README, re.DOTALL)


def screen_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    code = main(shlex.split(command)[1:])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("start", "code", "printed"),
    [
        ("qwen3-32b --tokens 200000 --tp 4", 3, ["stores 262144 B (256.00 KiB): 2.00 times", "48.83 GiB unique"]),
        ("llama-3.1-70b --tokens 200000 --tp 4 --tier", 0, ["80 full", "61.04 GiB unique"]),
        ("qwen3-235b-a22b --tokens 32768 --tp 16", 0, ["23.50 GiB on all ranks, 5.88 GiB unique (4 copies"]),
        ("llama-3.1-70b --tokens 200000 --tp 4 --gpu A100", 3, ["116.4 times", "at most 0.0223/s"]),
        ("qwen3-32b --tokens 16 ", 0, ["4.00 MiB per rank", "131 µs"]),
        ("qwen3-32b --tokens 32768 --gpu H200-SXM", 3, ["above its link, 63.02 GB/s"]),
        ("qwen3-32b --tokens 1024 --hit", 3, ["sum to 1.02, not 1"]),
        ("llama-3.1-8b --tokens 32768 --kv-dtype bf16,nvfp4", 0, ["4.00 GiB", "1.12 GiB"]),
        ("deepseek-v3.2 --tokens 131072", 0, ["10.78 PFLOP", "2.84 PFLOP"]),
    ],
)
def test_each_common_mistake_is_answered_as_the_page_says(
    start: str, code: int, printed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = PAGE.partition("## What is often wrong")[2].partition("\n## ")[0]
    (command,) = re.findall(rf"`(kvbench load-vs-recompute {re.escape(start)}[^`]*)`", table)
    found, out = screen_of(command, capsys, monkeypatch)
    assert found == code
    assert [text for text in printed if text not in out] == []


def test_the_host_paths_file_that_the_page_writes_by_hand_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert block is not None
    (tmp_path / "node.json").write_text(json.dumps(json.loads(block[1])))
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^(kvbench .* --probe node\.json .*)$", PAGE, flags=re.MULTILINE)
    code, out = screen_of(command, capsys, monkeypatch)
    assert code == 0
    assert "oad: 70.1 ms against 863 ms to recompute" in out
    assert "22.50 GB/s per rank, limited by host memory shared by 8" in out


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^(kvbench load-vs-recompute (?!.*(?:--measure|node\.json)).*)$", PAGE, re.M)))
)
def test_every_example_of_the_page_runs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = screen_of(command.partition(" | ")[0], capsys, monkeypatch)
    assert code == 0
    assert out


def test_the_restore_example_takes_the_times_that_the_page_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"^(kvbench load-vs-recompute glm-5 .*)$", PAGE, re.M)
    _, out = screen_of(command, capsys, monkeypatch)
    rows = out.partition("Restoring to ranks")[2]
    times = re.findall(r"^[a-g] .*? {2,}([\d.]+) ms", rows, re.M)
    assert times == ["57.3", "82.0", "35.0", "28.7", "7.25", "7.24", "7.17", "7.23"]


def test_the_readme_has_excerpts() -> None:
    assert len(EXCERPTS) == 2


@pytest.mark.parametrize(("command", "excerpt"), EXCERPTS)
def test_the_readme_shows_what_its_commands_print(
    command: str, excerpt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = screen_of(command, capsys, monkeypatch)
    assert code == 0
    printed = {line.rstrip() for line in out.splitlines()}
    assert [line for line in excerpt.splitlines() if line not in printed] == []
