"""The options that every command has, spelled once."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.core.errors import UsageError


def _file_in_a_folder(path: Path | None) -> Path | None:
    """Refuses, before anything is measured, a file that could not be written afterwards."""
    if path is None:
        return None
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it, such as {path / 'result.json'}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it first: mkdir -p {path.parent}")
    return path


Json = Annotated[bool, typer.Option("--json", help="Print the result document as JSON on stdout, and nothing else.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Save the result document as JSON.", callback=_file_in_a_folder),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="PAGE",
        help="Write the report as one HTML page (needs the plot extra).",
        callback=_file_in_a_folder,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
