"""What docs/deadlock-diagnose.md and the README show is what the command prints."""

import re
from pathlib import Path

import pytest

from kvbench.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deadlock-diagnose.md").read_text()
README = (ROOT / "README.md").read_text()


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["deadlock-diagnose", "tests/data/deadlock/cache-broadcast-cycle-coll", "--quiet"]) == 3
    return capsys.readouterr().out.splitlines()


def test_the_three_lines_of_the_page_are_those_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"```text\n(DIVERGENCE.*?)```", PAGE, flags=re.DOTALL)
    assert block is not None
    assert printed(capsys, monkeypatch)[:3] == block[1].splitlines()


def test_the_line_of_the_readme_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(capsys, monkeypatch)[0] in README


def test_the_capture_recipe_names_what_the_command_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["deadlock-diagnose", str(ROOT / "tests" / "data" / "deadlock" / "creation-only"), "--quiet"])
    asked = capsys.readouterr().out
    recipe = (ROOT / "probes" / "capture" / "README.md").read_text()
    environment = (ROOT / "probes" / "capture" / "collectives.env").read_text()
    for setting in ("NCCL_DEBUG=TRACE", "NCCL_DEBUG_SUBSYS=INIT,CALL", "NCCL_DEBUG_FILE=nccl.%h.%p.log"):
        assert setting in asked.replace("\n", " ")
        assert setting in recipe
        assert setting in environment
