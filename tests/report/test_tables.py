from dataclasses import replace
from io import StringIO

from rich.console import Console

from kvbench.report.tables import TextTable, host_rows, print_notes, print_tables, print_verdict, provenance_table
from kvbench.results.document import Document
from kvbench.results.host import Gpu
from kvbench.results.host_paths import HostPaths


def printed(console: Console) -> str:
    return console.export_text()


def new_console(width: int = 80) -> Console:
    return Console(width=width, record=True, file=StringIO())


def test_markup_in_a_cell_is_printed_as_it_is() -> None:
    console = new_console()
    table = TextTable(title="[b]T[/b]", columns=("[red]a", "b"), rows=(("[/nothing]", "1"),), note="[x]")
    print_tables([table], console)
    text = printed(console)
    for literal in ("[b]T[/b]", "[red]a", "[/nothing]", "[x]"):
        assert literal in text


def test_numbers_align_right_and_are_never_cut() -> None:
    console = new_console(width=30)
    rows = (("a name that is far too long for this console", "1,234,567 tokens"), ("b", "8 tokens"))
    print_tables([TextTable(title="", columns=("name", "size"), rows=rows)], console)
    lines = [line.rstrip() for line in printed(console).splitlines()]
    assert any(line.endswith("1,234,567 tokens") for line in lines)
    assert any(line.endswith("        8 tokens") for line in lines)


def test_a_table_without_rows_is_not_printed() -> None:
    console = new_console()
    print_tables([TextTable(title="empty", columns=("a",), rows=())], console)
    assert printed(console) == ""


def test_the_verdict_comes_with_its_details() -> None:
    console = new_console()
    print_verdict("load [it]", console, tone="good", details=["because"])
    assert printed(console) == "load [it]\nbecause\n"


def test_notes_name_an_interruption_and_every_warning(host_paths: Document[HostPaths]) -> None:
    console = new_console(width=200)
    print_notes(replace(host_paths, interrupted=True), console)
    assert printed(console) == (
        "Interrupted: this holds only what was measured until then.\n"
        "warning pageable: host memory is pageable; pin it\n"
    )


def test_every_origin_is_a_row(host_paths: Document[HostPaths]) -> None:
    table = provenance_table(host_paths)
    assert [row[0] for row in table.rows] == sorted(host_paths.provenance)


def test_the_host_rows_say_why_there_is_no_gpu(host_paths: Document[HostPaths]) -> None:
    assert dict(host_rows(host_paths))["GPU"] == "no GPU on this host"
    gpu = Gpu(name="H200", memory_bytes=2**37, driver="570")
    with_gpu = replace(host_paths, host=replace(host_paths.host, gpus=(gpu,), memory_bytes=None))
    assert dict(host_rows(with_gpu))["GPU"] == "H200 (128.00 GiB, driver 570)"
    assert "memory unknown" in dict(host_rows(with_gpu))["host"]
