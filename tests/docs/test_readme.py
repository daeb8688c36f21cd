import re
import shlex
from pathlib import Path

import pytest
import yaml

from kvbench.cli.main import COMMANDS, main
from kvbench.results.data import data_folder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def named_commands(text: str) -> set[str]:
    """Every `kvbench xyz` inside code, be it a block or a span."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    return set(re.findall(r"\bkvbench ([a-z][a-z-]+)", "\n".join(code)))


def test_every_command_in_the_readme_exists() -> None:
    assert named_commands(README) <= set(COMMANDS)


def test_every_command_that_exists_is_in_the_readme() -> None:
    assert set(COMMANDS) <= named_commands(README)


def command_lines(text: str) -> list[str]:
    """Every line of a code block that runs kvbench."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("kvbench ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_a_page_uses_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(page.read_text()):
        words = shlex.split(line, comments=True)
        assert main([words[1], "--help"]) == 0
        known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known, line


@pytest.mark.parametrize("target", ["demo", "test", "check", "samples", "gpu"])
def test_every_make_target_that_the_docs_name_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z]+)", page.read_text())}
    assert all(re.search(rf"^{name}:", makefile, flags=re.MULTILINE) for name in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("name", ["workloads", "probes"])
def test_every_yaml_of_the_data_folders_loads(name: str) -> None:
    for path in data_folder(name).rglob("*.yaml"):  # type: ignore[arg-type]
        assert yaml.safe_load(path.read_text()), path


def test_every_changelog_fragment_has_a_known_kind() -> None:
    for path in (ROOT / "changelog.d").iterdir():
        assert path.name == "README.md" or re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name)
