"""Draws the answer of `load-vs-recompute`: the verdict first, then the comparison, its curves, and the evidence."""

from collections.abc import Sequence

from rich.console import Console

from kvbench.core.units import format_count
from kvbench.report.load_vs_recompute_tables import comparison, evidence
from kvbench.report.load_vs_recompute_verdict import verdict
from kvbench.report.page import Figure, page
from kvbench.report.plots import LinePlot, MarkedPoint, Series, line_plot_svg, print_plot
from kvbench.report.tables import print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.load_vs_recompute import Curve, LoadVsRecomputeResult

_MOST_ROWS, _MOST_FIGURES, _WIDE = 40, 8, 100


def terminal(document: Document[LoadVsRecomputeResult], console: Console) -> None:
    """Prints verdict, comparison, curve and evidence."""
    result = document.result
    text, tone, details = verdict(result)
    print_verdict(text, console, tone=tone, details=details)
    console.print()
    print_tables([comparison(result, _MOST_ROWS, wide=console.width >= _WIDE)], console)
    for plot in _plots(result)[:1]:
        print_plot(plot, console)
        console.print()
    print_tables(evidence(result), console)
    print_notes(document, console)


def html(document: Document[LoadVsRecomputeResult]) -> str:
    """The same as one page, with a figure per model and layout."""
    result = document.result
    text, tone, details = verdict(result)
    figures = [Figure(svg=line_plot_svg(plot), caption=_caption(plot)) for plot in _plots(result)[:_MOST_FIGURES]]
    return page(
        document,
        title="Load or recompute: " + ", ".join(dict.fromkeys(point.model for point in result.points)),
        verdict=text,
        tone=tone,
        details=details,
        figures=figures,
        tables=[comparison(result, len(result.points)), *evidence(result)],
    )


def _caption(plot: LinePlot) -> str:
    if plot.marked:
        return "Where lines cross, loading and recomputing take equally long: " + ", ".join(
            m.label for m in plot.marked
        )
    return "The lines do not cross in this range: one side is faster at every prefix length shown."


def _plots(result: LoadVsRecomputeResult) -> list[LinePlot]:
    groups: dict[str, list[Curve]] = {}
    for curve in (curve for curve in result.curves if curve.tokens):
        suffix = f" +{curve.suffix_tokens:,} tokens" if curve.suffix_tokens else ""
        groups.setdefault(f"{curve.model}, {curve.layout}, {curve.kv_dtype}{suffix}", []).append(curve)
    return [_plot(name, curves) for name, curves in groups.items()]


def _plot(name: str, curves: Sequence[Curve]) -> LinePlot:
    series, marked = [], []
    goal = "before the first token" if curves[0].suffix_tokens else "to have the prefix in device memory"
    first = curves[0]
    series.append(Series(name="recompute", points=_xy(first.tokens, first.t_recompute_s), dashed=True))
    for curve in curves:
        series.append(Series(name=f"load {curve.tier}", points=_xy(curve.tokens, curve.t_load_s)))
        marked += [
            MarkedPoint(x=float(n), y=_between(curve, n), label=f"{curve.tier} crosses at {n:,} tokens")
            for n in curve.crossover_tokens
        ]
    if len(curves) == 1 and first.split_t_s != first.t_load_s:
        series.append(Series(name="split", points=_xy(first.tokens, first.split_t_s), dashed=True))
    return LinePlot(
        title=f"{name}: time {goal}",
        x_label="prefix tokens",
        y_label="time",
        series=tuple(series),
        marked=tuple(marked),
        x_format=format_count,
        x_ticks=_ticks(first.tokens),
    )


def _ticks(tokens: Sequence[int]) -> tuple[float, ...]:
    """Every length, or every n-th of many; one whose label would run into the last one's is left out."""
    shown = tokens[:: max(1, len(tokens) // 8)]
    return tuple(float(n) for n in shown if n == shown[-1] or shown[-1] >= 1.75 * n)


def _xy(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple((float(n), s) for n, s in zip(tokens, seconds, strict=True))


def _between(curve: Curve, tokens: int) -> float:
    """Load time at a crossover, between the curve's points."""
    pairs = zip(curve.tokens, curve.t_load_s, curve.tokens[1:], curve.t_load_s[1:], strict=False)
    for low, low_s, high, high_s in pairs:
        if low <= tokens <= high:
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
    return curve.t_load_s[0]
