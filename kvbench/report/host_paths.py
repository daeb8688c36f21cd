"""Draws measured load paths: what each carries, the ceilings, and time over size with the fit and its samples."""

from collections import Counter

from rich.console import Console

from kvbench.core.units import format_bandwidth, format_bytes, format_duration
from kvbench.report.page import Figure, page
from kvbench.report.plots import LinePlot, Series, line_plot_svg, print_plot
from kvbench.report.tables import TextTable, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths, Limit, MeasuredPath

_MOST_SIZE_TICKS = 8


def terminal(document: Document[HostPaths], console: Console) -> None:
    """Prints the fastest path of each direction, all paths, the ceilings and the plot."""
    print_verdict(_verdict(document.result), console)
    print_tables(_tables(document.result), console)
    if document.result.paths:
        print_plot(_plot(document.result), console)
    print_notes(document, console)


def html(document: Document[HostPaths]) -> str:
    """The paths as one page."""
    figures = (Figure(svg=line_plot_svg(_plot(document.result))),) if document.result.paths else ()
    return page(
        document,
        title="Load paths of this host",
        verdict=_verdict(document.result),
        figures=figures,
        tables=_tables(document.result),
    )


def _verdict(result: HostPaths) -> str:
    if not result.paths:
        return "No path was measured."
    best = max(result.paths, key=lambda path: path.bytes_per_s)
    return (
        f"The fastest measured path is {best.direction} {best.tier}: {format_bandwidth(best.bytes_per_s)} into "
        f"{best.destination}, {format_duration(best.fixed_s)} fixed, {_in_flight(best)}."
    )


def _in_flight(path: MeasuredPath) -> str:
    return f"{path.concurrency} transfer{'' if path.concurrency == 1 else 's'} in flight"


def _tables(result: HostPaths) -> tuple[TextTable, ...]:
    paths = TextTable(
        title="Measured paths, t = fixed + bytes / bandwidth",
        columns=("path", "to", "fixed", "bandwidth", "in flight", "residual", "cold"),
        left=frozenset({"to", "cold"}),
        rows=tuple(_path_row(path) for path in result.paths),
    )
    evidence = TextTable(
        title="How they were measured",
        columns=("path", "tier", "from", "samples", "cold evidence"),
        left=frozenset({"tier", "from", "cold evidence"}),
        rows=tuple(
            (_name(path), path.spec, path.source, str(len(path.samples)), path.cold_evidence) for path in result.paths
        ),
    )
    limits = TextTable(
        title="Ceilings",
        columns=("limit", "value", "provenance", "source"),
        left=frozenset({"provenance", "source"}),
        rows=tuple(
            (limit.name, _limit_value(limit), limit.origin.provenance, limit.origin.source) for limit in result.limits
        ),
    )
    doubts = TextTable(
        title="Doubts about single paths",
        columns=("path", "doubt", "what to do"),
        left=frozenset({"doubt", "what to do"}),
        rows=tuple((_name(path), doubt.message, doubt.remedy) for path in result.paths for doubt in path.warnings),
    )
    return paths, evidence, limits, doubts


def _name(path: MeasuredPath) -> str:
    return f"{path.direction} {path.tier}"


def _path_row(path: MeasuredPath) -> tuple[str, ...]:
    return (
        _name(path),
        path.destination,
        format_duration(path.fixed_s),
        format_bandwidth(path.bytes_per_s),
        str(path.concurrency),
        f"{path.residual_ratio:.1%}",
        {True: "cold", False: "warm", None: "not checked"}[path.cold],
    )


def _limit_value(limit: Limit) -> str:
    if limit.name.startswith("alpha_"):
        return format_duration(limit.value)
    if limit.name in {"ranks_per_uplink", "sockets"}:
        return f"{limit.value:g}"
    return format_bandwidth(limit.value)


def _plot(result: HostPaths) -> LinePlot:
    series: list[Series] = []
    names = Counter(_name(path) for path in result.paths)
    all_sizes = sorted({sample.bytes for path in result.paths for sample in path.samples})
    for path in result.paths:
        label = _name(path) if names[_name(path)] == 1 else f"{_name(path)} ×{path.concurrency}"
        sizes = sorted({sample.bytes for sample in path.samples})
        fit = tuple((float(size), path.fixed_s + size / path.bytes_per_s) for size in sizes)
        dots = tuple((float(sample.bytes), sample.seconds) for sample in path.samples)
        series += [
            Series(name=f"{label}, fit", points=fit),
            Series(name=f"{label}, samples", points=dots, dots=True),
        ]
    return LinePlot(
        title="Transfer time over size",
        x_label="bytes",
        y_label="time",
        x_format=format_bytes,
        x_ticks=tuple(float(size) for size in all_sizes) if len(all_sizes) <= _MOST_SIZE_TICKS else (),
        series=tuple(series),
    )
