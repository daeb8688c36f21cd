"""Draws calls in lanes as SVG: one lane per rank and stream, calls in host order, what waits for what."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

State = Literal["ran", "waits", "queued", "conflict"]

_LANE, _CALL, _GAP, _LEFT, _TOP = 68, 168, 10, 190, 34
_CHARACTERS = 24
# Okabe and Ito's colours by communicator: apart on white and on black. The state is told by stroke and by a word.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a17c00", "#56b4e9")
_STROKES: dict[State, str] = {
    "ran": 'stroke-opacity=".35"',
    "waits": 'stroke-width="3"',
    "queued": 'stroke-dasharray="4 3"',
    "conflict": 'stroke-width="3" stroke-dasharray="2 2"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One call: its lane, its column, what it is, which colour group it belongs to, and an id for arrows."""

    lane: str
    column: int
    title: str
    subtitle: str
    colour_group: str
    state: State
    key: str
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """From a waiting call to the call that holds up the other rank."""

    source: str
    target: str


def swim_lanes_svg(boxes: Sequence[Box], arrows: Sequence[Arrow], *, title: str) -> str:
    """An `<svg>` element; it follows the page's light or dark theme."""
    lanes = list(dict.fromkeys(box.lane for box in boxes))
    groups = list(dict.fromkeys(box.colour_group for box in boxes))
    first = min((box.column for box in boxes), default=0)
    columns = max((box.column for box in boxes), default=0) - first + 1
    width, height = _LEFT + columns * (_CALL + _GAP), _TOP + len(lanes) * _LANE + 34
    centres: dict[str, tuple[float, float]] = {}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title, quote=True)}" ',
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" ',
        'font-family="system-ui, sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0 0 L8 4 L0 8 z" fill="currentColor"/></marker></defs>',
        f'<text x="0" y="14" fill="currentColor" font-weight="600">{escape(title)}</text>',
    ]
    for number, lane in enumerate(lanes):
        y = _TOP + number * _LANE
        parts.append(
            f'<line x1="0" x2="{width}" y1="{y - 4}" y2="{y - 4}" stroke="currentColor" stroke-opacity=".15"/>'
        )
        parts.append(f'<text x="0" y="{y + 21}" fill="currentColor">{escape(_short(lane, 32))}</text>')
    for box in boxes:
        x = _LEFT + (box.column - first) * (_CALL + _GAP)
        y = _TOP + lanes.index(box.lane) * _LANE
        colour = _COLOURS[groups.index(box.colour_group) % len(_COLOURS)]
        centres.setdefault(box.key, (x + _CALL / 2, y + 18))
        parts.append(
            f"<g><title>{escape(f'{box.title} {box.subtitle}')}</title><rect "
            f'x="{x}" y="{y}" width="{_CALL}" height="36" rx="4" '
            f'fill="{colour}" fill-opacity="{".22" if box.state == "ran" else ".42"}" '
            f'stroke="{colour}" {_STROKES[box.state]}/>'
            f'<text x="{x + 6}" y="{y + 15}" fill="currentColor" font-weight="{600 if box.marked else 400}">'
            f"{escape(_short(box.title, _CHARACTERS))}</text>"
            f'<text x="{x + 6}" y="{y + 29}" fill="currentColor" '
            f'fill-opacity=".75">{escape(_short(box.subtitle, _CHARACTERS + 2))}</text></g>'
        )
    known = [arrow for arrow in arrows if arrow.source in centres and arrow.target in centres]
    parts += [_arrow(centres[arrow.source], centres[arrow.target]) for arrow in known]
    parts.append(_legend(groups, height - 12))
    return "".join(parts) + "</svg>"


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    """From box edge to box edge; those that go down keep left and those that go up keep right, so a ring shows."""
    (x1, y1), (x2, y2) = source, target
    down = 1 if y2 > y1 else -1
    side = -28 * down
    start, end = y1 + 19 * down, y2 - 20 * down
    middle = (start + end) / 2
    return (
        f'<path d="M{x1 + side} {start} C{x1 + side} {middle}, {x2 + side} {middle}, {x2 + side} {end}" fill="none" '
        'stroke="currentColor" stroke-width="1.8" marker-end="url(#tip)"/>'
    )


def _legend(groups: Sequence[str], y: int) -> str:
    parts, x = [], 0
    for number, group in enumerate(groups):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}" fill-opacity=".42" stroke="{colour}"/>'
        )
        parts.append(f'<text x="{x + 17}" y="{y}" fill="currentColor">{escape(_short(group, 24))}</text>')
        x += 36 + 7 * min(len(group), 24)
    return "".join(parts)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
