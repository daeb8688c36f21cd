"""`kvbench deadlock-diagnose`: names the first diverging collective, with proof."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet


def deadlock_diagnose(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH", help="Files, folders or archives that the ranks wrote; formats are found by content."
        ),
    ],
    tail_bytes: Annotated[
        str | None,
        typer.Option("--tail-bytes", metavar="SIZE", help="Read only the end of each text log, such as 64MiB."),
    ] = None,
    order_window: Annotated[
        int,
        typer.Option(
            "--order-window", min=100, help="Calls per rank over which the order across communicators is checked."
        ),
    ] = 50_000,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Worker processes; all CPUs by default.")] = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Say which collective diverged first when ranks hang, who waits for whom, and what to do.

    Reads NCCL and RCCL logs, PyTorch watchdog text, flight-recorder dumps, nsys sqlite exports, torch profiler traces
    and RAS JSON. Exit code 3: a divergence. 0: none. 4: the input cannot answer. 1: nothing readable.
    """
    import sys

    from kvbench.cli.emit import emit, progress
    from kvbench.core.units import parse_bytes
    from kvbench.deadlock_diagnose.diagnose import PROVENANCE, diagnose
    from kvbench.results.document import new_document

    size = parse_bytes(tail_bytes) if tail_bytes is not None else None
    with progress(quiet=quiet) as report:
        found = diagnose(paths, jobs=jobs, tail_bytes=size, order_window=order_window, report=report)
    document = new_document(
        found.diagnosis,
        command_line=("kvbench", *sys.argv[1:]),
        provenance=PROVENANCE,
        warnings=found.warnings,
        interrupted=found.interrupted,
    )
    code = emit(document, as_json=as_json, out=out, html=html, quiet=quiet)
    codes = {"divergence": ExitCode.FOUND_PROBLEM, "insufficient-input": ExitCode.INSUFFICIENT}
    return codes.get(found.diagnosis.status, ExitCode.OK) if code == ExitCode.OK else code
