"""Figures of a replay as SVG: TTFT by serving tier, paired differences, and what went on during a run."""

import math
from collections.abc import Sequence
from html import escape

from kvbench.core.units import format_bytes, format_duration
from kvbench.results.replay import Comparison, ReplayResult, Run

# Okabe and Ito's colours: apart on white and on black, and for the common kinds of colour blindness.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a17c00", "#56b4e9", "#f0b849")
_WIDTH, _LEFT, _RIGHT, _TOP = 960, 190, 20, 30
_MOST_SERIES, _MOST_PANELS, _MOST_POINTS = 7, 4, 400
_SHOWN = ("TTFT p50", "E2E p50", "requests/s", "output tokens/s")


class _Drawing:
    """Elements of one picture, in the ink of the page."""

    def __init__(self, title: str, height: float) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", faint: bool = False) -> None:
        opacity = ' fill-opacity="0.65"' if faint else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor" text-anchor="{anchor}"{opacity}>{escape(words)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = "currentColor", *, width: float = 1,
        opacity: float = 1.0,
    ) -> None:  # fmt: skip
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-width="{width}" stroke-opacity="{opacity}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        data = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self._parts.append(f'<path d="{data}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, opacity: float) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}" '
            f'fill-opacity="{opacity}"/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" fill-opacity="0.8"/>')

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self._title, quote=True)}" '
            f'viewBox="0 0 {_WIDTH} {self._height:.0f}" width="{_WIDTH}" height="{self._height:.0f}" '
            'font-family="system-ui, sans-serif" font-size="12">'
            f'<text x="0" y="16" fill="currentColor" font-weight="600">{escape(self._title)}</text>'
            + "".join(self._parts)
            + "</svg>"
        )


def ttft_by_tier_svg(result: ReplayResult) -> str:
    """Cumulative distributions of TTFT on a logarithmic axis, one line per arm and serving tier."""
    groups: dict[str, list[float]] = {}
    for run in result.runs:
        for request in run.finished:
            if request.ttft_s is not None and request.ttft_s > 0:
                tier = run.tier_of(request)
                groups.setdefault(run.arm + ("" if tier is None else f", {tier}"), []).append(request.ttft_s)
    shown = sorted(groups.items(), key=lambda item: -len(item[1]))[:_MOST_SERIES]
    plot_height = 260.0
    drawing = _Drawing("TTFT by the tier that served the prompt", _TOP + plot_height + 54 + 18 * len(shown))
    if not shown:
        return drawing.svg()
    low = min(min(values) for _, values in shown)
    high = max(max(values) for _, values in shown)
    x_of = _log_scale(low, max(high, low * 1.1), _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + plot_height
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * plot_height
        drawing.line(_LEFT, y, _WIDTH - _RIGHT, y, opacity=0.15)
        drawing.text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end", faint=True)
    for tick in _log_ticks(low, high):
        drawing.line(x_of(tick), _TOP, x_of(tick), bottom, opacity=0.12)
        drawing.text(x_of(tick), bottom + 18, format_duration(tick), anchor="middle", faint=True)
    for number, (name, values) in enumerate(sorted(shown)):
        colour = _COLOURS[number % len(_COLOURS)]
        ordered = sorted(values)
        step = max(1, len(ordered) // _MOST_POINTS)
        points = [(x_of(ordered[0]), bottom)]
        for rank in range(0, len(ordered), step):
            y = bottom - (rank + 1) / len(ordered) * plot_height
            points += [(x_of(ordered[rank]), points[-1][1]), (x_of(ordered[rank]), y)]
        points.append((x_of(ordered[-1]), _TOP))
        drawing.path(points, colour)
        y = bottom + 60 + 18 * number
        drawing.line(_LEFT, y - 4, _LEFT + 18, y - 4, colour, width=3)
        drawing.text(_LEFT + 26, y, f"{name} ({len(values)} requests)")
    drawing.text((_LEFT + _WIDTH) / 2, bottom + 38, "time to first token, from the intended send time", anchor="middle")
    return drawing.svg()


def paired_differences_svg(result: ReplayResult) -> str:
    """A row per comparison: the ratio of each pair as a dot, the mean and its interval as a bar."""
    shown = [one for one in result.comparisons if one.quantity in _SHOWN]
    row = 26
    height = _TOP + row * len(shown) + 50
    drawing = _Drawing("Paired differences, arm over base", height)
    ratios = [value for one in shown for value in (*_pair_ratios(one), one.low or one.ratio, one.high or one.ratio)]
    low, high = min([*ratios, 1 / (1 + 2 * result.margin_ratio)]), max([*ratios, 1 + 2 * result.margin_ratio])
    low, high = max(low, 1e-3), min(high, 1e3)
    left = min(480.0, 40 + 7.2 * max((len(_label(one)) for one in shown), default=20))
    x_of = _log_scale(low, high, left, _WIDTH - _RIGHT)
    bottom = _TOP + row * len(shown) + 4
    drawing.box(
        x_of(1 / (1 + result.margin_ratio)), _TOP - 4,
        x_of(1 + result.margin_ratio) - x_of(1 / (1 + result.margin_ratio)), bottom - _TOP + 4, "#808080", 0.18,
    )  # fmt: skip
    drawing.line(x_of(1.0), _TOP - 4, x_of(1.0), bottom)
    for tick in _ratio_ticks(low, high):
        drawing.text(x_of(tick), bottom + 16, f"{tick:g}×", anchor="middle", faint=True)
    for number, one in enumerate(shown):
        y = _TOP + row * number + 12
        colour = _COLOURS[_SHOWN.index(one.quantity) % len(_COLOURS)]
        drawing.text(0, y + 4, _label(one))
        if one.low is not None and one.high is not None:
            drawing.line(x_of(one.low), y, x_of(one.high), y, colour, width=5, opacity=0.35)
        drawing.line(x_of(one.ratio), y - 7, x_of(one.ratio), y + 7, colour, width=2.5)
        for value in _pair_ratios(one):
            drawing.dot(x_of(value), y, colour)
    drawing.text(x_of(1.0), bottom + 34, "the same", anchor="middle", faint=True)
    return drawing.svg()


def _label(one: Comparison) -> str:
    names = f"{one.arm} / {one.base}"
    return f"{names if len(names) <= 50 else names[:49] + '…'}, {one.quantity}"


def _pair_ratios(one: Comparison) -> list[float]:
    return [arm / base for base, arm in zip(one.base_values, one.arm_values, strict=True)]


def timeline_svg(result: ReplayResult) -> str:
    """A panel per arm, from its last complete run: requests in flight, and bytes loaded per tier between readings."""
    chosen = [_shown_run(result, arm.name) for arm in result.arms]
    runs = [run for run in chosen if run is not None][:_MOST_PANELS]
    panel = 120
    title = "During a run: requests in flight (line) and bytes loaded from tiers (bars)"
    drawing = _Drawing(title, _TOP + panel * len(runs) + 40)
    longest = max((run.duration_s for run in runs), default=1.0) or 1.0
    tiers = sorted({tier for run in runs for point in run.traffic for tier, count in point.load_bytes.items() if count})
    for number, run in enumerate(runs):
        top = _TOP + panel * number + 24
        bottom = top + panel - 40
        x_of = _linear_scale(0.0, longest, _LEFT, _WIDTH - _RIGHT)
        drawing.line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, opacity=0.4)
        drawing.text(_LEFT, top - 6, f"{run.arm}, round {run.round + 1}")
        _bars(drawing, run, tiers, x_of, top, bottom)
        _flight(drawing, run, x_of, top, bottom)
    bottom = _TOP + panel * len(runs) + 10
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * (_WIDTH - _RIGHT - _LEFT)
        drawing.text(x, bottom, format_duration(share * longest), anchor="middle", faint=True)
    for number, tier in enumerate(tiers):
        drawing.box(_LEFT + 110 * number, bottom + 12, 12, 10, _COLOURS[(number + 1) % len(_COLOURS)], 0.6)
        drawing.text(_LEFT + 110 * number + 18, bottom + 22, tier)
    return drawing.svg()


def _shown_run(result: ReplayResult, arm: str) -> Run | None:
    runs = [run for run in result.runs_of(arm) if run.requests]
    complete = [run for run in runs if run.complete]
    return (complete or runs)[-1] if runs else None


def _bars(drawing: _Drawing, run: Run, tiers: Sequence[str], x_of: "_Scale", top: float, bottom: float) -> None:
    readings: list[tuple[float, float, dict[str, float]]] = []
    before_s = 0.0
    before: dict[str, float] = {}
    for point in run.traffic:
        moved = {tier: point.load_bytes.get(tier, 0.0) - before.get(tier, 0.0) for tier in tiers}
        readings.append((before_s, min(point.at_s, run.duration_s), moved))
        before_s, before = point.at_s, dict(point.load_bytes)
    most = max((sum(moved.values()) for _, _, moved in readings), default=0.0)
    if most <= 0:
        return
    drawing.text(_LEFT - 8, bottom - 2, f"bars up to {format_bytes(most)}", anchor="end", faint=True)
    for start_s, end_s, moved in readings:
        y = bottom
        for number, tier in enumerate(tiers):
            height = moved[tier] / most * (bottom - top) * 0.9
            if height > 0 and end_s > start_s:
                y -= height
                colour = _COLOURS[(number + 1) % len(_COLOURS)]
                drawing.box(x_of(start_s), y, x_of(end_s) - x_of(start_s) - 1, height, colour, 0.55)


def _flight(drawing: _Drawing, run: Run, x_of: "_Scale", top: float, bottom: float) -> None:
    moments = sorted(
        [(one.sent_s, 1) for one in run.requests if one.sent_s is not None]
        + [(one.end_s, -1) for one in run.requests if one.sent_s is not None]
    )
    levels: list[tuple[float, int]] = []
    now = 0
    for at_s, change in moments:
        now += change
        levels.append((at_s, now))
    most = max((level for _, level in levels), default=0)
    if not most:
        return
    drawing.text(_LEFT - 8, top + 12, f"up to {most} in flight", anchor="end", faint=True)
    step = max(1, len(levels) // _MOST_POINTS)
    points = [(x_of(0.0), bottom)]
    for at_s, level in levels[::step]:
        y = bottom - level / most * (bottom - top) * 0.9
        points += [(x_of(at_s), points[-1][1]), (x_of(at_s), y)]
    points.append((x_of(levels[-1][0]), bottom))
    drawing.path(points, _COLOURS[0])


class _Scale:
    """Values to positions, within the ends."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self._log = log
        self._low, self._high = (math.log(low), math.log(high)) if log else (low, high)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        at = math.log(max(value, 1e-12)) if self._log else value
        share = (at - self._low) / (self._high - self._low) if self._high > self._low else 0.5
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)


def _log_scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, high, start, end, log=True)


def _linear_scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, high, start, end, log=False)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    from kvbench.report.plots import log_ticks

    return log_ticks(low, high, most=8)


def _ratio_ticks(low: float, high: float) -> list[float]:
    wanted = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    wide = high / low > 4
    return [tick for tick in wanted if low <= tick <= high and not (wide and tick in (0.8, 0.9, 1.1, 1.25))]
