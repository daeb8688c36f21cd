import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvbench.report.plots import (
    LinePlot,
    MarkedPoint,
    Series,
    VerticalMark,
    line_plot_svg,
    line_plot_text,
    log_ticks,
    print_plot,
)

TOKENS = (256.0, 1024.0, 4096.0, 16384.0)
PLOT = LinePlot(
    title="Load & recompute $5",
    x_label="tokens",
    y_label="time",
    series=(
        Series(name="load <dram>", points=tuple((tokens, tokens * 1e-5) for tokens in TOKENS)),
        Series(name="recompute", points=tuple((tokens, tokens**2 * 1e-8) for tokens in TOKENS), dashed=True),
        Series(name="samples", points=((300.0, 0.003),), dots=True),
    ),
    marked=(MarkedPoint(x=1000.0, y=0.01, label="equal at 1,000 tokens"),),
    verticals=(VerticalMark(x=8192.0, label="capacity"),),
    x_ticks=TOKENS,
)
LABELS = ("load <dram>", "recompute", "samples", "equal at 1,000 tokens", "capacity")


def test_the_svg_is_one_element_with_all_labels_as_text() -> None:
    pytest.importorskip("matplotlib")
    svg = line_plot_svg(PLOT)
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    text = "".join(root.itertext())
    for label in (*LABELS, "Load & recompute $5", "tokens", "16,384"):
        assert label in text
    assert "http" not in svg.replace("http://www.w3.org/", "")


def test_the_svg_is_the_same_on_every_run() -> None:
    pytest.importorskip("matplotlib")
    assert line_plot_svg(PLOT) == line_plot_svg(PLOT)


def test_ink_follows_the_theme_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    svg = line_plot_svg(PLOT)
    assert "currentColor" in svg
    assert "#010203" not in svg


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_text_plot_keeps_its_width_and_has_all_labels(width: int) -> None:
    text = line_plot_text(PLOT, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    for label in (*LABELS, "tokens", "time", "256"):
        assert label in text


def test_colour_is_for_terminals_only() -> None:
    assert "\x1b[" in line_plot_text(PLOT, width=80, colour=True)
    piped = StringIO()
    print_plot(PLOT, Console(file=piped, width=80))
    assert "\x1b" not in piped.getvalue()
    shown = StringIO()
    print_plot(PLOT, Console(file=shown, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[" in shown.getvalue()


def test_a_plot_with_nothing_above_zero_says_so() -> None:
    empty = replace(PLOT, series=(Series(name="none", points=((0.0, 1.0), (1.0, float("inf")))),), marked=())
    assert line_plot_text(empty, width=80) == "Load & recompute $5: nothing to draw"


def test_a_plot_of_one_point_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    one = replace(PLOT, series=(Series(name="one", points=((5.0, 5.0),)),), marked=(), verticals=(), x_ticks=())
    assert "one" in line_plot_text(one, width=80)
    assert "one" in line_plot_svg(one)


def test_a_single_marked_point_beyond_one_does_not_stretch_the_axis() -> None:
    line = Series(name="line", points=((64.0, 0.1), (65536.0, 100.0)))
    plain = line_plot_text(replace(PLOT, series=(line,), marked=(), verticals=()), width=80)
    marked = (MarkedPoint(x=4096.0, y=10.0, label="here"),)
    with_mark = line_plot_text(replace(PLOT, series=(line,), marked=marked, verticals=()), width=80)
    axis = [next(row for row in text.splitlines() if "└" in row) for text in (plain, with_mark)]
    assert axis[0] == axis[1]


positive = st.floats(min_value=1e-9, max_value=1e15)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=5), st.integers(min_value=40, max_value=120))
def test_any_points_fit_the_width(points: list[tuple[float, float]], width: int) -> None:
    plot = LinePlot(title="t", x_label="x", y_label="y", series=(Series(name="s", points=tuple(sorted(points))),))
    assert max(len(line) for line in line_plot_text(plot, width=width).splitlines()) <= width


@settings(max_examples=100)
@given(st.floats(min_value=1e-12, max_value=1e18), st.floats(min_value=1.0, max_value=1e12))
def test_ticks_are_few_sorted_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 8
    assert list(ticks) == sorted(set(ticks))
    assert all(low * 0.99 <= tick <= low * ratio * 1.01 for tick in ticks)
