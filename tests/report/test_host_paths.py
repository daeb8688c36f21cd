from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from kvbench.report.host_paths import html, terminal
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths


def printed(document: Document[HostPaths]) -> str:
    file = StringIO()
    terminal(document, Console(file=file, width=120))
    return file.getvalue()


def test_direction_and_concurrency_stand_beside_every_bandwidth(host_paths: Document[HostPaths]) -> None:
    text = printed(host_paths)
    assert text.startswith(
        "The fastest measured path is load dram: 8.00 GB/s into torch cpu tensor, 20.0 µs fixed, 1 transfer in flight."
    )
    row = next(line for line in text.splitlines() if line.startswith("load dram"))
    assert row.split("  ")[0] == "load dram"
    for cell in ("torch cpu tensor", "20.0 µs", "8.00 GB/s", " 1 ", "3.0%", "cold"):
        assert cell in row


def test_ceilings_print_in_their_own_units(host_paths: Document[HostPaths]) -> None:
    text = printed(host_paths)
    for name, value in (("host_total", "12.00 GB/s"), ("alpha_h2d", "10.0 µs"), ("sockets", "2")):
        assert any(line.split()[0] == name and value in line for line in text.splitlines() if line.strip())


def test_two_paths_of_one_name_are_told_apart_by_concurrency(host_paths: Document[HostPaths]) -> None:
    (path,) = host_paths.result.paths
    two = replace(host_paths, result=replace(host_paths.result, paths=(path, replace(path, concurrency=4))))
    assert "load dram ×4, fit" in printed(two)


def test_a_result_without_paths_is_drawn_too(host_paths: Document[HostPaths]) -> None:
    nothing = replace(host_paths, result=HostPaths(paths=()))
    assert printed(nothing).startswith("No path was measured.")
    assert "No path was measured." in html(nothing)


def test_the_page_has_the_plot_and_the_doubts(host_paths: Document[HostPaths]) -> None:
    pytest.importorskip("matplotlib")
    page = html(host_paths)
    assert "<svg" in page
    assert "only three samples" in page
