from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.results.codec import read_document, to_json, write_document
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths


@pytest.fixture
def saved(host_paths: Document[HostPaths], tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    write_document(host_paths, path)
    return path


def test_a_saved_result_prints_again(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved)]) == 0
    assert "8.00 GB/s" in capsys.readouterr().out


def test_the_json_that_goes_in_comes_out(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", str(saved)]) == 0
    assert capsys.readouterr().out == saved.read_text()
    assert main(["report", "--quiet", "--out", str(saved.with_name("copy.json")), str(saved)]) == 0
    assert read_document(saved.with_name("copy.json")) == read_document(saved)


def test_a_page_is_written(saved: Path) -> None:
    pytest.importorskip("matplotlib")
    page = saved.with_name("page.html")
    assert main(["report", str(saved), "--html", str(page), "-q"]) == 0
    assert "<svg" in page.read_text()


def test_several_results_print_one_after_another(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved), str(saved)]) == 0
    assert capsys.readouterr().out.count("The fastest measured path") == 2


@pytest.mark.parametrize("option", [["--json"], ["--html", "p.html"], ["--out", "o.json"]])
def test_several_results_do_not_fit_one_file(
    saved: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(saved), str(saved), *option]) == 2
    assert "take one result, not 2" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_file_without_a_folder_is_refused_before_any_work(
    saved: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = saved.parent / "missing" / "file"
    assert main(["report", str(saved), option, str(missing)]) == 2
    assert f"mkdir -p {missing.parent}" in capsys.readouterr().err
    assert main(["report", str(saved), option, str(saved.parent)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_an_unreadable_result_is_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved.write_text(saved.read_text()[:-40])
    assert main(["report", str(saved)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvbench: error: {saved}:")
    assert captured.err.count("\n") == 1


def test_markup_in_a_result_is_printed_literally(
    new_host_paths: Callable[..., Document[HostPaths]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    path.write_text(to_json(new_host_paths()).replace("buffers were touched before", "[/oops] [bold]x"))
    assert main(["report", str(path)]) == 0
    assert "[/oops] [bold]x" in capsys.readouterr().out
