"""`kvbench report`: draws any saved result again."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet
from kvbench.core.errors import UsageError


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Results that --out saved.")],
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Draw saved results again: as a table, or as an HTML page.

    Needs nothing of what made the result: any machine with kvbench reads any result.
    """
    from kvbench.cli.emit import emit
    from kvbench.results.codec import read_document

    if len(files) > 1 and (as_json or out or html):
        raise UsageError(
            f"--json, --out and --html take one result, not {len(files)}; run kvbench report once per file"
        )
    documents = [read_document(file) for file in files]
    return max(emit(document, as_json=as_json, out=out, html=html, quiet=quiet) for document in documents)
