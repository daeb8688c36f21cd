"""The machine as Mermaid or Graphviz DOT text, for wikis and for other layout programs."""

import re

from kvbench.core.graph import Graph, Link, Node
from kvbench.core.units import format_bandwidth
from kvbench.results.topology import TopologyResult

_SHAPES = {"gpu": "box", "nic": "component", "disk": "cylinder", "switch": "trapezium", "nvswitch": "trapezium"}


def mermaid(result: TopologyResult) -> str:
    """A `flowchart TD` with one edge per link, labelled with its rate."""
    graph = Graph(result.machine)
    lines = ["flowchart TD"]
    lines += [f'    {_id(node.id)}["{_escaped(node.name)}"]' for node in result.machine.nodes]
    for link in result.machine.links:
        low, high = (link.b, link.a) if graph.nodes[link.a].parent == link.b else (link.a, link.b)
        label = _label(link)
        arrow = f' ---|"{_escaped(label)}"| ' if label else " --- "
        lines.append(f"    {_id(low)}{arrow}{_id(high)}")
    bad = _bottlenecks(result)
    marked = [str(at) for at, link in enumerate(result.machine.links) if link.id in bad]
    if marked:
        lines.append(f"    linkStyle {','.join(marked)} stroke:#b3261e,stroke-width:4px")
    return "\n".join(lines) + "\n"


def dot(result: TopologyResult) -> str:
    """An undirected DOT graph; pen width follows the rate."""
    graph = Graph(result.machine)
    bad = _bottlenecks(result)
    lines = ["graph machine {", "    rankdir=TB;", '    node [fontname="sans-serif"];']
    lines += [
        f"    {_quoted(node.id)} [label={_quoted(node.name)}, shape={_shape(node)}];" for node in result.machine.nodes
    ]
    fastest = max((_bytes(link) for link in result.machine.links), default=0.0)
    for link in result.machine.links:
        low, high = (link.b, link.a) if graph.nodes[link.a].parent == link.b else (link.a, link.b)
        width = 1 + 6 * (_bytes(link) / fastest) ** 0.5 if fastest else 1
        colour = ', color="#b3261e"' if link.id in bad else ""
        style = "" if _bytes(link) or link.kind == "internal" else ", style=dashed"
        lines.append(
            f"    {_quoted(low)} -- {_quoted(high)} [label={_quoted(_label(link))}, "
            f"penwidth={width:.1f}{colour}{style}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _bottlenecks(result: TopologyResult) -> frozenset[str]:
    return frozenset(
        link
        for ceiling in result.ceilings
        if ceiling.scenario == "all-near" and ceiling.basis == "expected"
        for link in ceiling.limits
    )


def _bytes(link: Link) -> float:
    rate = link.backward.expected or link.forward.expected
    return rate.bytes_per_s if rate is not None else 0.0


def _label(link: Link) -> str:
    name = "" if link.kind == "internal" else link.kind
    count = f" x{link.count}" if link.count > 1 else ""
    rate = f" {format_bandwidth(_bytes(link))}" if _bytes(link) else ""
    return f"{name}{count}{rate}".strip()


def _shape(node: Node) -> str:
    return _SHAPES.get(node.kind, "ellipse")


def _id(name: str) -> str:
    """A Mermaid id: letters, digits and underscores; every other character as its code, so that ids stay apart."""
    return "n_" + re.sub(r"[^A-Za-z0-9]", lambda match: f"_{ord(match[0]):x}_", name)


def _escaped(text: str) -> str:
    return re.sub(r"[^ -~]", "?", text).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _quoted(text: str) -> str:
    return '"' + re.sub(r"[\x00-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"') + '"'
