"""The way out of every command: a document to stdout, to files, or both; progress and notes to stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.exit_codes import ExitCode
from kvbench.core.errors import KvbenchError
from kvbench.results.document import Document

if TYPE_CHECKING:
    from rich.console import Console

PROGRESS_AFTER_S = 2.0
PIPED_COLUMNS = 120

Report = Callable[[str, float | None], None]
"""Tells what is being done, and which share (0 to 1) of the whole is behind; None where nobody knows."""


def command_line() -> tuple[str, ...]:
    """The command line of this process as a user would type it, for the document."""
    return ("kvbench", *sys.argv[1:])


def emit(
    document: Document[Any],
    *,
    as_json: bool = False,
    out: Path | None = None,
    html: Path | None = None,
    quiet: bool = False,
) -> ExitCode:
    """Saves what was asked for, then prints JSON or the table. The code is FAILED for an interrupted document, else OK.

    Files come first: a closed pipe on stdout must not lose a measurement.
    """
    from kvbench.report.registry import renderer
    from kvbench.results.codec import to_json, write_document, write_text

    if out is not None:
        write_document(document, out)
    if html is not None:
        write_text(renderer(document.kind).html(document), html)
    with _stdout():
        if as_json:
            sys.stdout.write(to_json(document))
        else:
            renderer(document.kind).terminal(document, _console())
    for path in (out, html):
        if path is not None:
            note(f"saved {path}", quiet=quiet)
    if document.interrupted:
        note("interrupted: the result holds what was measured until then", quiet=quiet)
        return ExitCode.FAILED
    return ExitCode.OK


def _console() -> "Console":
    from rich.console import Console

    # Rich takes 80 columns for a pipe, where nobody knows the width; tables need more before they have to fold.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=PIPED_COLUMNS if piped else None)


@contextmanager
def _stdout() -> Iterator[None]:
    """Flushes what was printed. On a full disk or a closed pipe it also keeps Python from complaining again at exit."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise KvbenchError(
            f"stdout: cannot be written ({error.strerror}); free some space or print elsewhere"
        ) from error


def note(text: str, *, quiet: bool) -> None:
    """One line on stderr."""
    if not quiet:
        sys.stderr.write(f"kvbench: {text}\n")


@contextmanager
def progress(*, quiet: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A function to call with each step: `report("file tier, 64 MiB", 0.4)`.

    On a terminal it draws one live line. In a log it prints a line per step once the work has taken over two seconds,
    so that short commands stay silent. With `quiet` it does nothing.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda _step, _done_ratio: None
    elif console.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as live:
            task = live.add_task("", total=None)
            yield lambda step, done_ratio: live.update(
                task, description=step, total=None if done_ratio is None else 1.0, completed=done_ratio or 0.0
            )
    else:
        started = clock()

        def line(step: str, _done_ratio: float | None) -> None:
            if clock() - started > PROGRESS_AFTER_S:
                note(f"{clock() - started:.0f} s: {step}", quiet=False)

        yield line
