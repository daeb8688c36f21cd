"""The one table style. A table is text that is already formatted; the terminal and the page draw the same one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.results.document import Document

Tone = Literal["good", "bad", "unsure", "neutral"]

TONE_STYLES: dict[Tone, str] = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow", "neutral": "bold"}

_LONG_CELL = 24
_NARROWEST = 12  # to which a column of texts may shrink
_GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A titled table of finished strings. The first column and those named in `left` align left, numbers right.

    `highlight` holds the indexes of rows that matter most; `note` is one line under the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset()
    highlight: frozenset[int] = frozenset()
    note: str = ""

    def is_left(self, column: int) -> bool:
        return column == 0 or self.columns[column] in self.left


def rich_table(table: TextTable, *, fold_names: bool = False) -> Table:
    """The table for a terminal; cells are literal text, so a `[` in a path stays a `[`.

    With `fold_names` every text may take several lines, so that no number is cut.
    """
    drawn = Table(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        caption=Text(table.note, style="dim") if table.note else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="",
    )
    for index, column in enumerate(table.columns):
        # Only long texts give way on a narrow terminal; a number or a name in two halves cannot be read.
        long = table.is_left(index) and (fold_names or any(len(row[index]) > _LONG_CELL for row in table.rows))
        drawn.add_column(
            Text(column, style="bold"),
            justify="left" if table.is_left(index) else "right",
            no_wrap=not long,
            overflow="fold",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*(Text(cell) for cell in row), style="bold" if index in table.highlight else None)
    return drawn


def print_tables(tables: Sequence[TextTable], console: Console) -> None:
    """Prints each table that has rows."""
    for table in tables:
        for part in fitting(table, console.width) if table.rows else ():
            console.print(rich_table(part, fold_names=sum(_widths(part)) > console.width))
            console.print()


def fitting(table: TextTable, width: int) -> tuple[TextTable, ...]:
    """The table, or parts of it side by side that fit: a number that is cut at the edge is another number.

    Each part begins with the leading columns of texts, which name its rows.
    """
    names = next((index for index in range(len(table.columns)) if not table.is_left(index)), len(table.columns))
    least = [
        min(wide, _NARROWEST + _GAP) if table.is_left(index) else wide for index, wide in enumerate(_widths(table))
    ]
    if sum(least) <= width or names == len(table.columns):
        return (table,)
    groups: list[list[int]] = [[]]
    room = width - sum(least[:names])
    for index in range(names, len(table.columns)):
        if groups[-1] and sum(least[one] for one in groups[-1]) + least[index] > room:
            groups.append([])
        groups[-1].append(index)
    return tuple(
        replace(
            table,
            title=table.title if not number else f"{table.title} (continued)",
            columns=tuple(table.columns[index] for index in (*range(names), *group)),
            rows=tuple(tuple(row[index] for index in (*range(names), *group)) for row in table.rows),
            note=table.note if number == len(groups) - 1 else "",
        )
        for number, group in enumerate(groups)
    )


def _widths(table: TextTable) -> list[int]:
    """The room of each column, with the gap behind it."""
    return [
        max(map(len, (column, *(row[index] for row in table.rows)))) + _GAP
        for index, column in enumerate(table.columns)
    ]


def print_verdict(verdict: str, console: Console, *, tone: Tone = "neutral", details: Sequence[str] = ()) -> None:
    """Prints the answer first, in its colour, then one line per detail."""
    console.print(Text(verdict, style=TONE_STYLES[tone]))
    for line in details:
        console.print(Text(line))


def print_notes(document: Document[Any], console: Console) -> None:
    """Prints what a reader must know beside the tables: an interruption, the warnings, where the numbers come from."""
    if document.interrupted:
        console.print(Text("Interrupted: this holds only what was measured until then.", style="bold yellow"))
    for warning in document.warnings:
        console.print(Text.assemble((f"warning {warning.code}: ", "yellow"), f"{warning.message}; {warning.remedy}"))


def provenance_table(document: Document[Any]) -> TextTable:
    """Where each number of the document comes from, one row per field."""
    return TextTable(
        title="Where the numbers come from",
        columns=("number", "provenance", "source", "formula"),
        left=frozenset({"provenance", "source", "formula"}),
        rows=tuple(
            (name, origin.provenance, origin.source, origin.formula or "")
            for name, origin in sorted(document.provenance.items())
        ),
    )


def host_rows(document: Document[Any]) -> tuple[tuple[str, str], ...]:
    """The header of a document as name and value: kind, time, command line, machine."""
    from kvbench.core.units import format_bytes

    host = document.host
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)}, driver {gpu.driver})" for gpu in host.gpus)
    memory = format_bytes(host.memory_bytes) if host.memory_bytes is not None else "memory unknown"
    return (
        ("result", f"{document.kind}, schema {document.schema_version}, kvbench {document.kvbench_version}"),
        ("made", document.created_at),
        ("command", shell_line(document.command_line)),
        ("host", f"{host.cpu}, {host.num_cpus} CPUs, {memory}"),
        ("GPU", gpus or host.no_gpu_reason or "none"),
        ("system", f"{host.os}, Python {host.python}"),
    )


def shell_line(command_line: Sequence[str]) -> str:
    """The command line as one can paste it into a shell."""
    import shlex

    return shlex.join(command_line)
