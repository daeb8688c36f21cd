"""Draws a probe: the fastest way and where it changes, a table of cases, the fits, and bandwidth over segment size."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console

from kvbench.core.units import format_bandwidth, format_bytes, format_duration
from kvbench.report.page import Figure, page
from kvbench.report.plots import LinePlot, MarkedPoint, Series, line_plot_svg, print_plot
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.probe import ProbeCase, ProbeResult, SizePoint

_MOST_LINES = 6
_MOST_TICKS = 6
_MOST_LINES_INSIDE = 4


def terminal(document: Document[ProbeResult], console: Console) -> None:
    """Prints the answer, the table of cases, the plots, the fits and the doubts."""
    result = document.result
    print_verdict(_verdict(result), console, tone=_tone(result), details=_details(result))
    console.print()
    first, *others = _tables(result)
    print_tables((first,), console)
    for plot in _plots(result):
        print_plot(plot, console)
        console.print()
    print_tables(others, console)
    print_notes(document, console)


def html(document: Document[ProbeResult]) -> str:
    """The probe as one page."""
    result = document.result
    caption = "Median of each size; the interval and every raw sample are in the JSON at the end of this page."
    return page(
        document,
        title=f"Probe {result.plan}",
        verdict=_verdict(result),
        tone=_tone(result),
        details=_details(result),
        figures=tuple(Figure(svg=line_plot_svg(plot), caption=caption) for plot in _plots(result)),
        tables=_tables(result),
    )


def _tone(result: ProbeResult) -> Tone:
    return "neutral" if any(case.samples for case in result.cases) else "unsure"


def _verdict(result: ProbeResult) -> str:
    measured = [case for case in result.cases if case.samples]
    if not measured:
        reasons = Counter(case.reason or "unknown" for case in result.cases)
        return f"Nothing was measured: {reasons.most_common(1)[0][0] if reasons else 'the plan has no case'}."
    nothing = [_harness(case) for case in measured if case.method == "null" and case.path == "null:"]
    moved = [case for case in measured if case.method != "null"]
    return " ".join([*nothing, *map(_fastest, _by_direction(moved))]) or "Only delays were measured; see the fits."


def _harness(case: ProbeCase) -> str:
    if case.fit is None or case.fit.fixed_s is None or case.fit.per_segment_s is None:
        return "Measuring itself was measured, but with too few sizes for a fit."
    return (
        f"Measuring itself costs {format_duration(case.fit.fixed_s)} per transfer and "
        f"{format_duration(case.fit.per_segment_s)} per segment, and {_duration(case.setup_s)} per case."
    )


def _by_direction(cases: Sequence[ProbeCase]) -> list[list[ProbeCase]]:
    groups: dict[str, list[ProbeCase]] = {}
    for case in cases:
        groups.setdefault(case.direction, []).append(case)
    return list(groups.values())


def _fastest(cases: Sequence[ProbeCase]) -> str:
    honest = [case for case in cases if case.cold is not False] or list(cases)
    best = max(honest, key=lambda case: _best(case).bytes_per_s)
    point = _best(best)
    pieces = f" in pieces of {_size(point.segment_bytes)}" if point.segments > best.concurrency else ""
    warm = " (not cold: a cache's speed)" if best.cold is False else ""
    return (
        f"Fastest {best.direction}: {best.name} with {format_bandwidth(point.bytes_per_s)} "
        f"for {_size(point.bytes)}{pieces}, {best.source} → {best.destination}{warm}."
    )


def _best(case: ProbeCase) -> SizePoint:
    point = case.best_point()
    assert point is not None
    return point


def _details(result: ProbeResult) -> tuple[str, ...]:
    lines = [
        f"From {_size(crossing.segment_bytes)} per segment on {crossing.faster_above} is faster, "
        f"below that {crossing.faster_below}."
        for crossing in result.crossovers
    ]
    swept = [case for case in result.cases if len(case.curve()) > 1 and case.method != "null"]
    if not lines and len({case.method for case in swept}) > 1:
        lines.append("No crossover: beyond the noise, no way of copying overtakes another as segments grow.")
    lines += [
        f"{case.name}: the arithmetic beside it went {case.beside_slowdown_ratio:.0%} slower."
        for case in result.cases
        if case.beside_slowdown_ratio is not None
    ]
    skipped = Counter(case.reason for case in result.cases if case.status == "skipped")
    lines += [f"{count} case{'' if count == 1 else 's'} skipped: {reason}" for reason, count in skipped.items()]
    return (f"Question: {result.question}", *lines)


def _tables(result: ProbeResult) -> tuple[TextTable, ...]:
    return (
        _case_table(result),
        _fit_table(result),
        _point_table(result),
        _evidence_table(result),
        _doubts_table(result),
    )


def _case_table(result: ProbeResult) -> TextTable:
    rows, highlight = [], set()
    fastest = {id(max(group, key=_rate)) for group in _by_direction([case for case in result.cases if case.samples])}
    for index, case in enumerate(result.cases):
        point = case.best_point()
        if id(case) in fastest:
            highlight.add(index)
        if point is None:
            rows.append((case.name, _status(case), "", "", "", "", "", ""))
            continue
        rows.append(
            (
                case.name,
                _status(case),
                format_bandwidth(point.bytes_per_s),
                "" if point.wire_bytes_per_s is None else format_bandwidth(point.wire_bytes_per_s),
                f"{_size(point.bytes)} / {_size(point.segment_bytes)}",
                format_duration(point.median_s),
                "" if point.cv_ratio is None else f"{point.cv_ratio:.0%}",
                {True: "cold", False: "warm", None: "-"}[case.cold],
            )
        )
    return TextTable(
        title="Cases, each at the size it was fastest at",
        columns=("case", "status", "call", "wire", "bytes / segment", "median", "cv", "cache"),
        left=frozenset({"status", "cache"}),
        rows=tuple(rows),
        highlight=frozenset(highlight),
        note="call: bytes over what a caller waits. wire: with launch cost hidden, where that exists.",
    )


def _rate(case: ProbeCase) -> float:
    return 0.0 if case.cold is False else _best(case).bytes_per_s


def _status(case: ProbeCase) -> str:
    if case.status == "skipped":
        reason = case.reason or ""
        return "skipped: no GPU" if reason.startswith("no GPU") else f"skipped: {reason}"
    if case.status == "failed":
        return f"failed: {case.reason}"
    return f"ok, for {case.stands_in_for}" if case.stands_in_for else "ok"


def _fit_table(result: ProbeResult) -> TextTable:
    rows = []
    for case in result.cases:
        fit = case.fit
        if fit is None:
            continue
        rows.append(
            (
                case.name,
                _duration(fit.fixed_s),
                _duration(fit.per_segment_s),
                "-" if fit.bytes_per_s is None else format_bandwidth(fit.bytes_per_s),
                f"{fit.residual_ratio:.1%}",
                _duration(case.setup_s),
                ", ".join(f"{load:.1f}" for load in case.load_average) or "-",
            )
        )
    return TextTable(
        title="Fits, t = fixed + n·per-segment + bytes / B",
        columns=("case", "fixed", "per segment", "B", "residual", "set-up", "load before, after"),
        rows=tuple(rows),
        note="-: the sizes of this case cannot tell it apart. set-up: the case's time that no sample holds.",
    )


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _point_table(result: ProbeResult) -> TextTable:
    rows = [
        (
            case.name,
            _size(point.bytes),
            _size(point.segment_bytes),
            format_duration(point.median_s),
            f"{format_duration(point.low_s)} to {format_duration(point.high_s)}",
            format_bandwidth(point.bytes_per_s),
            str(point.count),
        )
        for case in result.cases
        for point in case.points
    ]
    return TextTable(
        title="Every size",
        columns=("case", "bytes", "segment", "median", "95 % interval", "call", "samples"),
        rows=tuple(rows),
    )


def _evidence_table(result: ProbeResult) -> TextTable:
    return TextTable(
        title="How they were measured",
        columns=("case", "from", "to", "placement", "cold evidence"),
        left=frozenset({"from", "to", "placement", "cold evidence"}),
        rows=tuple(
            (case.name, case.source, case.destination, case.placement, case.cold_evidence)
            for case in result.cases
            if case.samples
        ),
    )


def _doubts_table(result: ProbeResult) -> TextTable:
    return TextTable(
        title="Doubts about single cases",
        columns=("case", "doubt", "what to do"),
        left=frozenset({"doubt", "what to do"}),
        rows=tuple((case.name, doubt.message, doubt.remedy) for case in result.cases for doubt in case.warnings),
    )


def _plots(result: ProbeResult) -> tuple[LinePlot, ...]:
    """One plot per direction of what was measured; where sizes were not cut into segments, the x is the transfer."""
    measured = [case for case in result.cases if len(case.curve()) > 1 or len(case.points) > 1]
    return tuple(_plot(result, group) for group in _by_direction(measured))


def _plot(result: ProbeResult, cases: Sequence[ProbeCase]) -> LinePlot:
    lines = sorted(cases, key=lambda case: -_best(case).bytes_per_s)[:_MOST_LINES]
    # in the order of the table, so that colours do not change places when one gets faster
    lines = [case for case in cases if case in lines]
    curves = {case.name: _curve(case) for case in lines}
    xs = sorted({x for points in curves.values() for x, _ in points})
    series = [Series(name=name, points=points) for name, points in curves.items()]
    series += [
        Series(
            name=f"{anchor.name} {format_bandwidth(anchor.bytes_per_s)}",
            points=((xs[0], anchor.bytes_per_s), (xs[-1], anchor.bytes_per_s)),
            dashed=True,
        )
        for anchor in result.anchors
        if anchor.direction in (None, cases[0].direction)
    ]
    marked = [
        MarkedPoint(
            x=crossing.segment_bytes,
            y=crossing.bytes_per_s,
            label=f"crossover at {_size(crossing.segment_bytes)}",
        )
        for crossing in result.crossovers
        if {crossing.faster_above, crossing.faster_below} <= curves.keys()
    ]
    whole = all(len(case.curve()) == 1 for case in lines)
    left_out = f", the fastest {_MOST_LINES} of {len(cases)} cases" if len(cases) > len(lines) else ""
    return LinePlot(
        title=f"Bandwidth of {cases[0].direction} over {'transfer' if whole else 'segment'} size{left_out}",
        x_label="bytes of a transfer" if whole else "bytes of a segment",
        y_label="bytes per second, as the caller waits",
        series=tuple(series),
        marked=tuple(marked),
        x_format=_size,
        y_format=format_bandwidth,
        x_ticks=tuple(xs[:: -(-len(xs) // _MOST_TICKS)]),
        legend_beside=len(series) + len(marked) > _MOST_LINES_INSIDE,
    )


def _curve(case: ProbeCase) -> tuple[tuple[float, float], ...]:
    curve = case.curve()
    if len(curve) == 1:  # not cut into segments: over the transfer's size instead
        return _points((point.bytes, point.bytes_per_s) for point in case.points)
    return _points((point.segment_bytes, point.bytes_per_s) for point in curve)


def _points(pairs: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in pairs)


def _size(size_bytes: float) -> str:
    """`128 KiB`: without digits that say nothing."""
    return format_bytes(size_bytes).replace(".00 ", " ")
