import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.cli.emit import command_line, emit, progress
from kvbench.cli.exit_codes import ExitCode
from kvbench.results.codec import from_json, read_document, to_json, write_document
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths

KVBENCH = Path(sys.executable).with_name("kvbench")


def test_json_is_all_that_stdout_gets(host_paths: Document[HostPaths], capsys: pytest.CaptureFixture[str]) -> None:
    assert emit(host_paths, as_json=True) == ExitCode.OK
    captured = capsys.readouterr()
    assert captured.out == to_json(host_paths)
    assert from_json(captured.out, source="stdout") == host_paths
    assert captured.err == ""


def test_the_table_is_the_default(host_paths: Document[HostPaths], capsys: pytest.CaptureFixture[str]) -> None:
    assert emit(host_paths) == ExitCode.OK
    assert capsys.readouterr().out.startswith("The fastest measured path")


def test_out_saves_and_says_so_unless_quiet(
    host_paths: Document[HostPaths], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    emit(host_paths, out=path)
    assert read_document(path) == host_paths
    assert capsys.readouterr().err == f"kvbench: saved {path}\n"
    emit(host_paths, out=path, quiet=True)
    assert capsys.readouterr().err == ""


def test_html_is_written(host_paths: Document[HostPaths], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    emit(host_paths, html=tmp_path / "r.html", quiet=True)
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_an_interrupted_document_is_saved_and_fails(
    host_paths: Document[HostPaths], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    assert emit(replace(host_paths, interrupted=True), out=path) == ExitCode.FAILED
    assert json.loads(path.read_text())["interrupted"] is True
    assert "interrupted: the result holds" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_one_line(
    host_paths: Document[HostPaths], tmp_path: Path, options: list[str]
) -> None:
    write_document(host_paths, tmp_path / "r.json")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [KVBENCH, "report", tmp_path / "r.json", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith("kvbench: error: stdout: cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error(
    new_host_paths: Callable[..., Document[HostPaths]], tmp_path: Path
) -> None:
    document = new_host_paths(command_line=("kvbench", "x" * 1_000_000))  # more than a pipe holds
    write_document(document, tmp_path / "r.json")
    with subprocess.Popen(
        [KVBENCH, "report", tmp_path / "r.json", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_command_line_names_the_command_and_not_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/someone/.venv/bin/kvbench", "report", "x"])
    assert command_line() == ("kvbench", "report", "x")


def ticking(*readings: float) -> Callable[[], float]:
    clock: Iterator[float] = iter(readings)
    return lambda: next(clock)


def test_progress_is_silent_until_it_took_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=False, clock=ticking(0.0, 1.0, 3.0, 3.0)) as report:
        report("first", 0.1)
        report("second", None)
    assert capsys.readouterr().err == "kvbench: 3 s: second\n"


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True, clock=ticking()) as report:
        report("step", 0.5)
    assert capsys.readouterr() == ("", "")
