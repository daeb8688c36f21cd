"""The `kvbench` command: the list of subcommands, and the one place where failures become exit codes."""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from kvbench import __version__
from kvbench.cli.exit_codes import ExitCode
from kvbench.core.errors import KvbenchError

# Each of these modules imports only Typer and option types; what a command needs is imported when it runs.
COMMANDS = {
    "deadlock-diagnose": "kvbench.cli.deadlock_diagnose:deadlock_diagnose",
    "load-vs-recompute": "kvbench.cli.load_vs_recompute:load_vs_recompute",
    "probe": "kvbench.cli.probe:probe",
    "replay": "kvbench.cli.replay:replay",
    "report": "kvbench.cli.report:report",
    "serve": "kvbench.cli.serve:serve",
    "topo": "kvbench.cli.topo:topo",
}

_INTERRUPTED = 130  # what Typer returns after Ctrl-C


def build_app() -> typer.Typer:
    """The Typer application with every command of `COMMANDS`."""
    app = typer.Typer(
        name="kvbench",
        help="Benchmarks and diagnostics for multi-tier KV caches.",
        pretty_exceptions_enable=False,  # a bug keeps its plain traceback
        rich_markup_mode=None,  # plain help is instant, and a [torch] in it stays literal
    )

    @app.callback()
    def options(
        _version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None: ...

    for name, target in COMMANDS.items():
        module, _, function = target.partition(":")
        app.command(name)(getattr(import_module(module), function))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; expected failures become one line on stderr."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} Try --help.", error.exit_code)
    except KvbenchError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has what it wanted (`| head`)
        return ExitCode.FAILED
    if code == _INTERRUPTED:
        sys.stderr.write("kvbench: interrupted\n")
        return ExitCode.FAILED
    return code


def _run(arguments: list[str]) -> int:
    code = build_app()(args=arguments or ["--help"], prog_name="kvbench", standalone_mode=False)
    return int(code or ExitCode.OK)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"kvbench {__version__}\n")
        raise typer.Exit()


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"kvbench: error: {one_line(message)}\n")
    return code


def one_line(message: str) -> str:
    """The message without line breaks and control characters, whatever a file or a user put into it."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", " ".join(message.split()))
