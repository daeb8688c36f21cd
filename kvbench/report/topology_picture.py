"""Draws a machine as one SVG: a panel per NUMA node, devices below their switches, links as wide as they are fast.

The layout is computed here, from the tree alone: leaves side by side, every parent centred over what is below it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from kvbench.core.graph import Graph, Link, LinkRates, Node
from kvbench.core.units import format_bandwidth

_LEAF, _GAP, _LEVEL, _BOX, _TOP = 104.0, 14.0, 92.0, 46.0, 58.0
_PAD, _ROW_GAP, _MOST_WIDTH, _FABRIC = 16.0, 46.0, 1180.0, 34.0
_KEPT_APART = 2  # more equal NICs or disks than this below one parent become one box
_DRAWN = frozenset({"switch", "gpu", "nic", "disk", "device", "nvswitch"})
_FILL = {
    "gpu": "#009e73",
    "nic": "#0072b2",
    "disk": "#a17c00",
    "switch": "#8a94a0",
    "device": "#8a94a0",
    "nvswitch": "#cc79a7",
}
_LEGEND = (("gpu", "GPU"), ("nic", "NIC"), ("disk", "disk"), ("switch", "PCIe switch"), ("nvswitch", "NVLink"))
_BAD = "var(--bad, #b3261e)"


@dataclass(slots=True)
class _Item:
    """A drawn box; `nodes` are the nodes it stands for, `link` the link above it."""

    nodes: tuple[Node, ...]
    children: list["_Item"]
    link: Link | None
    depth: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def node(self) -> Node:
        return self.nodes[0]

    @property
    def width(self) -> float:
        below = sum(child.width for child in self.children) + _GAP * max(len(self.children) - 1, 0)
        return max(_LEAF, below)


@dataclass(slots=True)
class _Panel:
    """One NUMA node (or what no node is known for) with its items, placed at x, y."""

    node: Node
    items: list[_Item]
    x: float = 0.0
    y: float = 0.0

    @property
    def inner(self) -> float:
        return max(sum(item.width for item in self.items) + _GAP * max(len(self.items) - 1, 0), 2.4 * _LEAF)

    @property
    def width(self) -> float:
        return self.inner + 2 * _PAD


def machine_svg(graph: Graph, bottlenecks: Sequence[str], title: str) -> str:
    """The machine as one `<svg>` element; `bottlenecks` are links to mark."""
    panels = [_Panel(node, items) for node, items in _panels(graph)]
    deepest = max((_depth(item) for panel in panels for item in panel.items), default=1)
    fabric = any(node.kind == "nvswitch" for node in graph.machine.nodes) and any(
        link.kind == "nvlink" for link in graph.machine.links
    )
    direct = any(link.kind in {"nvlink", "xgmi"} for link in graph.machine.links)
    foot = _FABRIC + 30 if fabric else 70.0 if direct else 0.0
    height = _TOP + deepest * _LEVEL + _BOX / 2 + foot + 1.5 * _PAD
    width, total = _place(panels, height)
    fastest = max((_bytes(link) for link in graph.machine.links), default=0.0)
    draw = _Drawing(graph, frozenset(bottlenecks), fastest, deepest)
    parts = [*draw.socket_links(panels), *draw.direct_links(panels)]
    parts += [part for panel in panels for part in draw.panel(panel, height)]
    parts += draw.legend(total + 6)
    return _tag(
        "svg",
        "".join(parts),
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {total + 40:.0f}",
        width=width,
        font_family="system-ui, sans-serif",
        font_size=12,
    )


def _place(panels: Sequence[_Panel], height: float) -> tuple[float, float]:
    """Panels left to right, a new row where the next would not fit; returns the size of the picture."""
    x = y = 0.0
    widest = 0.0
    for panel in panels:
        if x and x + panel.width > _MOST_WIDTH:
            x, y = 0.0, y + height + _ROW_GAP / 2
        panel.x, panel.y = x, y
        x += panel.width + _ROW_GAP
        widest = max(widest, panel.x + panel.width)
        left = (
            panel.x + _PAD + (panel.inner - sum(i.width for i in panel.items) - _GAP * max(len(panel.items) - 1, 0)) / 2
        )
        for item in panel.items:
            _place_item(item, left, panel.y + _TOP, 1)
            left += item.width + _GAP
    stacked = any(panel.y > 0 for panel in panels)
    return max(widest + (70.0 if stacked else 0.0), 920.0), y + height


def _place_item(item: _Item, left: float, top: float, depth: int) -> None:
    item.depth = depth
    item.x, item.y = left + item.width / 2, top + depth * _LEVEL - _BOX / 2
    at = left + (item.width - sum(c.width for c in item.children) - _GAP * max(len(item.children) - 1, 0)) / 2
    for child in item.children:
        _place_item(child, at, top, depth + 1)
        at += child.width + _GAP


def _depth(item: _Item) -> int:
    return 1 + max((_depth(child) for child in item.children), default=0)


def _panels(graph: Graph) -> Iterator[tuple[Node, list[_Item]]]:
    """NUMA nodes and groups with devices or memory; what hangs on neither comes last, under the machine."""
    inside: set[str] = set()
    for node in (*graph.of_kind("group"), *graph.of_kind("numa")):
        if any(above.kind == "group" and above.id != node.id for above in graph.ancestors(node.id)):
            inside.add(node.id)
            continue
        items = _items(graph, node)
        if items or node.cpus or node.memory_bytes:
            yield node, items
        inside.add(node.id)
    for root in graph.of_kind("machine"):
        loose = [
            child for child in graph.children(root.id) if child.kind not in {"group", "numa", "socket", "nvswitch"}
        ]
        items = [item for child in loose for item in _below(graph, child)]
        if items:
            yield root, _grouped(items)


def _items(graph: Graph, top: Node) -> list[_Item]:
    children = [child for child in graph.children(top.id) if child.kind not in {"dram", "socket", "numa"}]
    return _grouped([item for child in children for item in _below(graph, child)])


def _below(graph: Graph, node: Node) -> list[_Item]:
    """The drawn items at or below a node; bridges inside the CPU are passed over."""
    below = [item for child in graph.children(node.id) for item in _below(graph, child)]
    if node.kind == "nvswitch" and node.bus_id is not None:
        return []
    if node.kind not in _DRAWN:
        return _grouped(below)
    if node.kind == "switch" and not below:
        return []
    return [_Item((node,), _grouped(below), graph.host_link(node.id))]


def _grouped(items: list[_Item]) -> list[_Item]:
    """Many equal NICs or disks below one parent as one box."""
    kept: list[_Item] = []
    for kind in ("switch", "gpu", "nvswitch", "nic", "disk", "device"):
        same = [item for item in items if item.node.kind == kind]
        leaves = [item for item in same if not item.children]
        if kind in {"nic", "disk"} and len(leaves) > _KEPT_APART:
            kept.append(_Item(tuple(node for item in leaves for node in item.nodes), [], leaves[0].link))
            same = [item for item in same if item.children]
        kept += same
    return kept


def _bytes(link: Link | None) -> float:
    if link is None:
        return 0.0
    rate = link.backward.expected or link.forward.expected
    return rate.bytes_per_s if rate is not None else 0.0


class _Drawing:
    """Turns placed items into SVG elements."""

    def __init__(self, graph: Graph, bottlenecks: frozenset[str], fastest: float, deepest: int) -> None:
        self.graph = graph
        self.bottlenecks = bottlenecks
        self.fastest = fastest
        self.deepest = deepest

    def stroke(self, link: Link | None) -> float:
        rate = _bytes(link)
        return 1.5 if rate <= 0 or self.fastest <= 0 else 1.5 + 8.5 * math.sqrt(rate / self.fastest)

    def line(self, link: Link | None, x1: float, y1: float, x2: float, y2: float) -> Iterator[str]:
        bad = link is not None and link.id in self.bottlenecks
        colour = _BAD if bad else "currentColor"
        dash = None if _bytes(link) > 0 else "4 4"
        opacity = 1.0 if bad else 0.55
        bend = (y1 + y2) / 2
        yield _tag(
            "path",
            _title(_describe(link)),
            d=f"M{x1:.1f} {y1:.1f} C{x1:.1f} {bend:.1f} {x2:.1f} {bend:.1f} {x2:.1f} {y2:.1f}",
            fill="none",
            stroke=colour,
            stroke_opacity=opacity,
            stroke_width=self.stroke(link),
            stroke_dasharray=dash,
        )

    def panel(self, panel: _Panel, height: float) -> Iterator[str]:
        yield _tag(
            "rect",
            x=panel.x,
            y=panel.y,
            width=panel.width,
            height=height - 8,
            rx=8,
            fill="currentColor",
            fill_opacity=0.035,
            stroke="currentColor",
            stroke_opacity=0.25,
        )
        yield from self.header(panel)
        for item in panel.items:
            yield from self.lines(item, panel.x + panel.width / 2, panel.y + _TOP - 6, panel)
        for item in panel.items:
            yield from self.boxes(item)
        yield from self.fabric(panel, height)

    def header(self, panel: _Panel) -> Iterator[str]:
        node, width = panel.node, panel.width - 2 * _PAD
        x, y = panel.x + _PAD, panel.y + 10
        drams = [child for child in self.graph.children(node.id) if child.kind == "dram"]
        link = self.graph.uplink(drams[0].id) if drams else None
        bad = link is not None and link.id in self.bottlenecks
        colour = _BAD if bad else "currentColor"
        name = "no NUMA node known" if node.kind == "machine" else node.name + (" (inferred)" if node.inferred else "")
        rate = format_bandwidth(_bytes(link)) if _bytes(link) else "rate not known"
        yield _tag(
            "rect",
            x=x,
            y=y,
            width=width,
            height=_TOP - 16,
            rx=5,
            fill="#56b4e9",
            fill_opacity=0.25,
            stroke=colour,
            stroke_width=2.5 if bad else 1,
        )
        memory = f"DRAM {rate}" if drams else "no memory listed"
        cpus = f"CPUs {_cut(node.cpus, 22)}" if node.cpus else ""
        yield _text(x + 8, y + 17, name, anchor="start", bold=True)
        yield _text(x + 8, y + 34, memory, anchor="start", colour=_BAD if bad else "currentColor")
        yield _text(x + width - 8, y + 17, cpus, anchor="end", size=11)

    def lines(self, item: _Item, from_x: float, from_y: float, panel: _Panel) -> Iterator[str]:
        at_top = item.depth == 1
        start = min(max(item.x, panel.x + _PAD + 10), panel.x + panel.width - _PAD - 10) if at_top else from_x
        yield from self.line(item.link, start, from_y, item.x, item.y)
        middle = (from_y + item.y) / 2
        if _bytes(item.link) > 0:
            bad = item.link is not None and item.link.id in self.bottlenecks
            label = format_bandwidth(_bytes(item.link)).replace(".00", "")
            yield _text(
                item.x + self.stroke(item.link) / 2 + 4,
                max(middle + 8, item.y - 10),
                label,
                anchor="start",
                size=10,
                colour=_BAD if bad else "currentColor",
            )
        for child in item.children:
            yield from self.lines(child, item.x, item.y + _BOX, panel)

    def boxes(self, item: _Item) -> Iterator[str]:
        node, many = item.node, len(item.nodes)
        width = max(_LEAF - 8, item.width - 24) if node.kind == "switch" else _LEAF - 8
        x, y = item.x - width / 2, item.y
        colour = _FILL.get(node.kind, "#888")
        yield _tag(
            "rect",
            _title(", ".join(each.name for each in item.nodes)),
            x=x,
            y=y,
            width=width,
            height=_BOX,
            rx=6,
            fill=colour,
            fill_opacity=0.28,
            stroke=colour,
            stroke_width=1.5,
            stroke_dasharray="5 3" if node.inferred else None,
        )
        first, second = _labels(item, many)
        yield _text(item.x, y + 19, _cut(first, int(width / 7.2)), bold=True)
        yield _text(item.x, y + 35, _cut(second, int(width / 6.0)), size=10)
        for child in item.children:
            yield from self.boxes(child)

    def fabric(self, panel: _Panel, height: float) -> Iterator[str]:
        """A bar at the foot of the panel for NVSwitches; each GPU's links go down to it."""
        gpus = [item for item in _walk(panel.items) if item.node.kind == "gpu"]
        joined = [item.node.id for item in gpus if self.graph.switched(item.node.id)]
        if not joined:
            return
        y = panel.y + height - 8 - _FABRIC
        switches = len([node for node in self.graph.of_kind("nvswitch") if node.bus_id]) or None
        for item in gpus:
            links = self.graph.across(item.node.id, "nvlink")
            if not links:
                yield _text(item.x, y - 6, "no NVLink", size=10, colour=_BAD)
                continue
            total = sum(_bytes(link) for link in links)
            wide = 1.5 if not total or not self.fastest else min(1.5 + 8.5 * math.sqrt(total / self.fastest), 14)
            yield _tag(
                "path",
                _title(_describe(links[0])),
                d=f"M{item.x:.1f} {item.y + _BOX:.1f} V{y:.1f}",
                fill="none",
                stroke=_FILL["nvswitch"],
                stroke_opacity=0.8,
                stroke_width=wide,
            )
        yield _tag(
            "rect",
            x=panel.x + _PAD,
            y=y,
            width=panel.width - 2 * _PAD,
            height=24,
            rx=5,
            fill=_FILL["nvswitch"],
            fill_opacity=0.28,
            stroke=_FILL["nvswitch"],
        )
        count = sum(link.count for link in self.graph.across(joined[0], "nvlink"))
        rate = sum(_bytes(link) for link in self.graph.across(joined[0], "nvlink"))
        shown = f", {format_bandwidth(rate)}" if rate else ""
        name = f"{switches} NVSwitches" if switches else "NVSwitch fabric"
        whole = f"{name}: {count} NVLinks per GPU{shown}{' each way' if shown else ''}"
        texts = (whole, f"{count} NVLinks{shown}", f"{count} NVLinks")
        text = next((text for text in texts if 6.2 * len(text) < panel.width - 2 * _PAD), texts[-1])
        yield _text(panel.x + panel.width / 2, y + 16, text, size=11)

    def direct_links(self, panels: Sequence[_Panel]) -> Iterator[str]:
        """NVLink and xGMI from GPU to GPU, as arcs below the boxes."""
        place = {item.node.id: item for panel in panels for item in _walk(panel.items) if item.node.kind == "gpu"}
        for link in self.graph.machine.links:
            if link.kind not in {"nvlink", "xgmi"} or link.a not in place or link.b not in place:
                continue
            a, b = place[link.a], place[link.b]
            y1, y2 = a.y + _BOX, b.y + _BOX
            low = max(y1, y2) + min(16 + abs(a.x - b.x) / 9, 78)
            yield _tag(
                "path",
                _title(_describe(link)),
                d=f"M{a.x:.1f} {y1:.1f} C{a.x:.1f} {low:.1f} {b.x:.1f} {low:.1f} {b.x:.1f} {y2:.1f}",
                fill="none",
                stroke=_FILL["nvswitch"],
                stroke_opacity=0.75 if y1 == y2 else 0.4,
                stroke_width=max(self.stroke(link), 1.5 * link.count),
                stroke_dasharray=None if _bytes(link) else "4 4",
            )

    def socket_links(self, panels: Sequence[_Panel]) -> Iterator[str]:
        """The link between neighbours in one row; the others are listed in the tables."""
        for left, right in pairwise(panels):
            if "machine" in {left.node.kind, right.node.kind}:
                continue
            link = self.between(left.node, right.node)
            y = left.y + 10 + (_TOP - 16) / 2
            bad = link is not None and link.id in self.bottlenecks
            out = max(left.x + left.width, right.x + right.width) + 20
            there = right.y + 10 + (_TOP - 16) / 2
            way = f"H{right.x + _PAD:.1f}"
            if left.y != right.y:
                way = f"H{out:.1f} V{there:.1f} H{right.x + right.width - _PAD:.1f}"
            yield _tag(
                "path",
                _title(_describe(link)),
                d=f"M{left.x + left.width - _PAD:.1f} {y:.1f} {way}",
                fill="none",
                stroke=_BAD if bad else "currentColor",
                stroke_opacity=0.6,
                stroke_width=self.stroke(link),
                stroke_dasharray=None if _bytes(link) else "4 4",
            )
            shown = format_bandwidth(_bytes(link)).replace(".00", "") if _bytes(link) else "?"
            if left.y == right.y:
                yield _text((left.x + left.width + right.x) / 2, y - 9, shown, size=10)
            else:
                yield _text(out + 6, (y + there) / 2, shown, size=10, anchor="start")

    def between(self, a: Node, b: Node) -> Link | None:
        for high in self.graph.ancestors(a.id):
            for low in self.graph.ancestors(b.id):
                for link in self.graph.between(high.id, low.id, "socket"):
                    return link
        return None

    def legend(self, y: float) -> Iterator[str]:
        x = 4.0
        for kind, name in _LEGEND:
            yield _tag("rect", x=x, y=y + 4, width=14, height=14, rx=3, fill=_FILL[kind], fill_opacity=0.5)
            yield _text(x + 19, y + 15, name, anchor="start", size=11)
            x += 46 + 6.4 * len(name)
        yield _tag("path", d=f"M{x:.1f} {y + 11:.1f} h26", stroke=_BAD, stroke_width=5)
        yield _text(x + 32, y + 15, "limits when all GPUs load at once", anchor="start", size=11)
        x += 232
        yield _tag("path", d=f"M{x:.1f} {y + 11:.1f} h26", stroke="currentColor", stroke_dasharray="4 4")
        yield _text(x + 32, y + 15, "rate not known; dashed box: inferred", anchor="start", size=11)


def _walk(items: Sequence[_Item]) -> Iterator[_Item]:
    for item in items:
        yield item
        yield from _walk(item.children)


def _labels(item: _Item, many: int) -> tuple[str, str]:
    node = item.node
    if many > 1:
        return f"{many} {'NICs' if node.kind == 'nic' else 'disks'}", f"{item.nodes[0].name} … {item.nodes[-1].name}"
    if node.kind == "gpu":
        head, _, product = node.name.partition(" ")
        return head, product.removeprefix("NVIDIA ") or (node.bus_id or "").removeprefix("0000:")
    if node.kind == "nic":
        rate = f"{node.line_rate.bytes_per_s * 8 / 1e9:g} Gbit/s" if node.line_rate else ""
        return node.name, rate or (node.bus_id or "").removeprefix("0000:")
    if node.kind == "disk":
        return node.name, node.medium or ""
    return node.name.removesuffix(" (inferred)"), "inferred" if node.inferred else ""


def _describe(link: Link | None) -> str:
    if link is None:
        return ""
    parts = [f"{link.label}: {link.kind}"]
    if link.count > 1:
        parts.append(f"{link.count} links")
    for way, rates in (("up", link.forward), ("down", link.backward)):
        if (text := _rates(rates)) is not None:
            parts.append(f"{way} {text}")
    return ", ".join(parts)


def _rates(rates: LinkRates) -> str | None:
    rate = rates.expected
    return None if rate is None else f"{format_bandwidth(rate.bytes_per_s)} ({rate.origin.provenance})"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "middle",
    size: int = 12,
    bold: bool = False,
    colour: str = "currentColor",
) -> str:
    """A line of text with a halo in the colour of the page, so that it stays readable over lines."""
    if not text:
        return ""
    return _tag(
        "text",
        escape(text),
        x=x,
        y=y,
        text_anchor=anchor,
        font_size=size,
        font_weight=600 if bold else None,
        fill=colour,
        stroke="var(--paper, #fff)",
        stroke_width=3,
        stroke_opacity=0.85,
        paint_order="stroke",
    )


def _tag(element: str, inside: str = "", **attributes: str | float | None) -> str:
    """One SVG element; `stroke_width` becomes `stroke-width`, None leaves the attribute out."""
    written = "".join(
        f' {name.replace("_", "-")}="{_number(value) if not isinstance(value, str) else escape(value, quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{element}{written}>{inside}</{element}>"


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _cut(text: str | None, most: int) -> str:
    text = text or ""
    return text if len(text) <= most else f"{text[: max(most - 1, 1)]}…"
