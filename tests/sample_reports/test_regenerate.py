import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.results.codec import write_document
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths

ROOT = Path(__file__).parents[2] / "sample_reports"


@pytest.fixture(scope="module")
def regenerate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regenerate", ROOT / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(host_paths: Document[HostPaths], tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    write_document(host_paths, tmp_path / "input.json.recorded")
    folder = tmp_path / "sample"
    folder.mkdir()
    (folder / "commands.txt").write_text(f"# made up\nagain: kvbench report '{tmp_path / 'input.json.recorded'}'\n")
    return folder


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_first_run_makes_all_files_and_the_second_changes_nothing(regenerate: ModuleType, folder: Path) -> None:
    assert names(regenerate.regenerate(folder)) == ["again.json", "again.txt", "again.html"]
    assert (folder / "again.txt").read_text().startswith("The fastest measured path")
    assert regenerate.regenerate(folder) == []


def test_another_time_host_and_version_change_nothing(
    regenerate: ModuleType, folder: Path, host_paths: Document[HostPaths]
) -> None:
    regenerate.regenerate(folder)
    made = folder.parent / "input.json.recorded"
    body = json.loads(made.read_text()) | {"created_at": "2030-01-01T00:00:00Z", "kvbench_version": "9.9"}
    body["host"]["cpu"] = "Another CPU"
    made.write_text(json.dumps(body))
    assert regenerate.regenerate(folder) == []


def test_another_number_fails_the_run_and_is_named(
    regenerate: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regenerate.regenerate(folder)
    made = folder.parent / "input.json.recorded"
    made.write_text(made.read_text().replace("8000000000.0", "7000000000.0"))
    assert regenerate.main([folder]) == 1
    assert f"changed: {folder / 'again.txt'}" in capsys.readouterr().out
    assert "7.00 GB/s" in (folder / "again.txt").read_text()
    assert regenerate.main([folder]) == 0


def test_a_recorded_result_is_drawn_and_kept(
    regenerate: ModuleType, folder: Path, host_paths: Document[HostPaths]
) -> None:
    write_document(host_paths, folder / "measured.json")
    before = (folder / "measured.json").read_bytes()
    (folder / "commands.txt").write_text("recorded measured: kvbench probe --live\n")
    assert names(regenerate.regenerate(folder)) == ["measured.txt", "measured.html"]
    assert (folder / "measured.json").read_bytes() == before


def test_a_file_that_no_command_makes_is_named(regenerate: ModuleType, folder: Path) -> None:
    regenerate.regenerate(folder)
    (folder / "orphan.txt").touch()
    assert names(regenerate.regenerate(folder)) == ["orphan.txt"]


def test_a_command_that_fails_is_named_with_its_error(
    regenerate: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "commands.txt").write_text("x: kvbench report nothing.json\n")
    assert regenerate.main([folder]) == 1
    assert "report nothing.json --json ended with 1: kvbench: error: nothing.json" in capsys.readouterr().err


def test_a_line_that_is_no_sample_is_refused(regenerate: ModuleType, folder: Path) -> None:
    (folder / "commands.txt").write_text("\nrm -rf x\n")
    with pytest.raises(KvbenchError, match=r"commands\.txt:2: write `NAME: kvbench"):
        regenerate.regenerate(folder)


@pytest.mark.parametrize("commands", sorted(ROOT.glob("*/commands.txt")), ids=lambda path: path.parent.name)
def test_every_sample_folder_is_complete(regenerate: ModuleType, commands: Path) -> None:
    for sample in regenerate.samples(commands):
        for suffix in ("json", "txt", "html"):
            assert (commands.parent / f"{sample.name}.{suffix}").exists()
