"""One plot description, drawn as SVG for a page and as text for a terminal. Both axes are logarithmic."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from kvbench.core.errors import MissingDependencyError
from kvbench.core.units import format_count, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

# Colours that stay apart on white and on black, and for the common kinds of colour blindness (Okabe and Ito, 2008).
_SVG_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a17c00", "#56b4e9")
_TEXT_COLOURS = ("blue+", "green+", "magenta+", "cyan+", "orange+")  # red is for marked points
_MARKS = "●□▲◇■○△◆"
_LEGEND_GAP = "   "
# Drawn in these and then replaced, so that text and grid follow the page's light or dark theme.
_INK, _FAINT_INK = "#010203", "#010204"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named line. `dashed` sets a modelled or comparison line apart; `dots` marks its points (raw samples)."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedPoint:
    """One point to look at, such as a crossover, with its label."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerticalMark:
    """A vertical line at one x, such as a capacity, with its label."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlot:
    """Several series over one x, all values above zero; points that are not are left out of the drawing."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marked: tuple[MarkedPoint, ...] = ()
    verticals: tuple[VerticalMark, ...] = ()
    x_format: Callable[[float], str] = format_count
    y_format: Callable[[float], str] = format_duration
    x_ticks: tuple[float, ...] = ()
    legend_beside: bool = False
    """On a page, draw the legend beside the plot instead of inside: for many lines."""


def line_plot_svg(plot: LinePlot, *, width_inches: float = 8.0, height_inches: float = 4.5) -> str:
    """The plot as one `<svg>` element, without external resources; needs the `plot` extra."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot", "a page with figures") from error
    from io import StringIO

    # The salt makes ids, and so the file, the same on every run; `none` keeps text as text.
    with rc_context({"svg.hashsalt": plot.title, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw(plot, axes)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _embeddable(text.getvalue(), plot.title)


def line_plot_text(plot: LinePlot, *, width: int, height: int = 18, colour: bool = False) -> str:
    """The plot as lines of at most `width` characters; with `colour`, ANSI colours tell the series apart too.

    The legend stands under the plot: inside, it would cover the lines as soon as there are a few of them.
    """
    import plotext

    xs, ys = _values(plot)
    if not xs:
        return f"{plot.title}: nothing to draw"
    figure = plotext.figure
    figure.clear()
    figure.theme("simple" if colour else "colorless")
    figure.canvas("default").legend(False).plot_size(max(width, 40), height)
    legend: list[tuple[str, str]] = []
    for index, series in enumerate(plot.series):
        mark, ink = _MARKS[index % len(_MARKS)], _TEXT_COLOURS[index % len(_TEXT_COLOURS)]
        _signal(figure, _drawable(series.points), plotext.marker(mark, ink), lines=not series.dots)
        legend.append((f"{mark} {series.name}", ink))
    for vertical in plot.verticals:
        if vertical.x > 0:
            figure.line(math.log10(vertical.x), "vertical")
            legend.append((f"│ {vertical.label}", "default"))
    for marked in _drawable_marks(plot):
        _signal(figure, [(marked.x, marked.y)], plotext.marker("X", "red+"), lines=False)
        legend.append((f"X {marked.label}", "red+"))
    for axis, side, values, ticks, form in (
        ("x", "lower", xs, plot.x_ticks or log_ticks(min(xs), max(xs)), plot.x_format),
        ("y", "left", ys, log_ticks(min(ys), max(ys)), plot.y_format),
    ):
        # Without limits, plotext starts the axis at 10^0 as soon as a series has a single point beyond it.
        low, high = math.log10(min(values)), math.log10(max(values))
        ruler = figure.ruler(axis, side)
        ruler.lim(low, high if high > low else low + 1)
        inside = [tick for tick in ticks if min(values) * 0.999 <= tick <= max(values) * 1.001]
        ruler.ticks([math.log10(tick) for tick in inside], [form(tick) for tick in inside])
    figure.title(plot.title).label(plot.x_label, "x").label(plot.y_label, "y")
    text = str(figure.build().string(not colour))
    figure.clear()
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join([*lines, *_legend_lines(legend, width, colour=colour)]).strip("\n")


def _legend_lines(entries: Sequence[tuple[str, str]], width: int, *, colour: bool) -> list[str]:
    """Entries of text and colour side by side, as many as fit a line."""
    import plotext

    lines: list[str] = []
    used = width
    for text, ink in entries:
        drawn = str(plotext.colorize(text, ink).string()) if colour else text
        if used + len(_LEGEND_GAP) + len(text) <= width:
            lines[-1] += _LEGEND_GAP + drawn
            used += len(_LEGEND_GAP) + len(text)
        else:
            lines.append(drawn)
            used = len(text)
    return lines


def print_plot(plot: LinePlot, console: Console) -> None:
    """Prints the plot as wide as the console, in colour only where the console shows colour."""
    text = line_plot_text(plot, width=min(console.width, 120), colour=console.color_system is not None)
    console.print(Text.from_ansi(text), no_wrap=True, crop=False)


def log_ticks(low: float, high: float, most: int = 8) -> tuple[float, ...]:
    """Round positions between two positive values: 1, 2, 5 per decade while at most `most` fit, else fewer."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: tuple[float, ...] = ()
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = (float(f"{step}e{decade}") for decade in decades for step in steps)
        inside = tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)
        if len(inside) <= most:
            break
    return inside[:: math.ceil(len(inside) / most)] if inside else (low,)


def _signal(figure: Any, points: Sequence[Point], marker: Any, *, lines: bool) -> None:
    if points:
        xs, ys = [math.log10(x) for x, _ in points], [math.log10(y) for _, y in points]
        figure.draw(figure.signal(xs, ys, marker=marker).lines(lines))


def _draw(plot: LinePlot, axes: "Axes") -> None:
    for index, series in enumerate(plot.series):
        points = _drawable(series.points)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=_SVG_COLOURS[index % len(_SVG_COLOURS)],
            linestyle="none" if series.dots else "--" if series.dashed else "-",
            marker="o" if series.dots or len(points) <= 40 else None,
            markersize=4,
            label=_literal(series.name),
        )
    for vertical in plot.verticals:
        axes.axvline(vertical.x, color=_FAINT_INK, linestyle=":", label=_literal(vertical.label))
    for marked in _drawable_marks(plot):
        axes.plot([marked.x], [marked.y], "X", color=_INK, markersize=9, label=_literal(marked.label))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(_literal(plot.title), color=_INK)
    axes.set_xlabel(_literal(plot.x_label), color=_INK)
    axes.set_ylabel(_literal(plot.y_label), color=_INK)
    axes.grid(visible=True, which="major", color=_FAINT_INK, alpha=0.2)
    axes.tick_params(which="both", colors=_INK)
    axes.minorticks_off()
    for spine in axes.spines.values():
        spine.set_color(_FAINT_INK)
    xs, ys = _values(plot)
    if xs:
        x_ticks, y_ticks = plot.x_ticks or log_ticks(min(xs), max(xs)), log_ticks(min(ys), max(ys))
        axes.set_xticks(x_ticks, [_literal(plot.x_format(tick)) for tick in x_ticks])
        axes.set_yticks(y_ticks, [_literal(plot.y_format(tick)) for tick in y_ticks])
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if plot.legend_beside else {}
        axes.legend(frameon=False, labelcolor=_INK, **beside)


def _embeddable(svg: str, title: str) -> str:
    body = svg[svg.index("<svg") :].replace(_INK, "currentColor").replace(_FAINT_INK, "currentColor")
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    return body.replace("<svg ", f'<svg role="img" aria-label="{escape(title, quote=True)}" ', 1).strip()


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib reads $…$ as a formula


def _drawable(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if x > 0 and y > 0 and math.isfinite(x) and math.isfinite(y)]


def _drawable_marks(plot: LinePlot) -> list[MarkedPoint]:
    return [marked for marked in plot.marked if _drawable([(marked.x, marked.y)])]


def _values(plot: LinePlot) -> tuple[list[float], list[float]]:
    points = [point for series in plot.series for point in _drawable(series.points)]
    points += [(marked.x, marked.y) for marked in _drawable_marks(plot)]
    return [x for x, _ in points] + [mark.x for mark in plot.verticals if mark.x > 0 and points], [y for _, y in points]
