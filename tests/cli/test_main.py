import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench import __version__
from kvbench.cli import main as main_module
from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.main import COMMANDS, main, one_line
from kvbench.core.errors import KvbenchError, MissingDependencyError, UsageError

KVBENCH = Path(sys.executable).with_name("kvbench")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"kvbench {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.OK
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)


# `serve` has no result: it runs until it is stopped.
@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"serve"}))
def test_every_command_with_a_result_has_help_and_the_common_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    for option in ("--json", "--out", "--quiet", "--html"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reprot"], "No such command 'reprot'. Did you mean 'report'? Try --help."),
        (["report"], "Missing argument 'FILE'. Try --help."),
        (["report", "--nonsense", "x"], "No such option: --nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvbench: error: {message}")
    assert captured.err.count("\n") == 1


def with_command(monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    """Replaces the run of the application by a function that does what a command might do."""

    def app() -> object:
        def run(**_settings: object) -> object:
            if isinstance(body, BaseException):
                raise body
            return body

        return run

    monkeypatch.setattr(main_module, "build_app", app)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KvbenchError("trace.jsonl:8: block hash\nis missing [bold]x[/bold]\x1b[31m"), 1),
        (UsageError("tp 3 does not divide"), 2),
        (MissingDependencyError("torch", "torch", "--measure"), 1),
    ],
)
def test_an_expected_failure_is_one_line_on_stderr(
    error: KvbenchError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command(monkeypatch, error)
    assert main(["anything"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvbench: error: {one_line(str(error))}\n"
    assert "\x1b" not in captured.err


@pytest.mark.parametrize("result", [KeyboardInterrupt(), 130])  # raised before Typer runs, or turned into 130 by Typer
def test_ctrl_c_says_interrupted(
    result: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command(monkeypatch, result)
    assert main(["anything"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "kvbench: interrupted\n"


def test_a_closed_pipe_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_command(monkeypatch, BrokenPipeError())
    assert main(["anything"]) == ExitCode.FAILED
    assert capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        main(["anything"])


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FOUND_PROBLEM, None])
def test_a_command_returns_its_exit_code(code: ExitCode | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, code)
    assert main(["anything"]) == (code or ExitCode.OK)


@given(st.text())
def test_a_message_is_one_printable_line(message: str) -> None:
    line = one_line(message)
    assert line.splitlines() in ([], [line])
    assert "\x1b" not in line


def test_shell_completion_is_on() -> None:
    words = {"_KVBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "kvbench repo", "COMP_CWORD": "1"}
    done = subprocess.run([KVBENCH], capture_output=True, text=True, check=False, env=words)
    assert done.stdout.split() == ["report"]
