"""Draws a topology: the ceilings and findings first, then the tree, the matrix, the links and what is not known."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from kvbench.core.graph import DEVICE_KINDS, Graph, Link, LinkRates, Node, Rate
from kvbench.core.load_ceilings import Ceiling
from kvbench.core.pcie import generation
from kvbench.core.units import GIGA, format_bandwidth, format_bytes
from kvbench.report.page import Figure, page
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.topology import InputRead, LinkMeasurement, TopologyResult

_CELL_COLUMNS = 9
_MOST_SQUARE = 16
_MOST_LINK_ROWS = 60


def terminal(document: Document[TopologyResult], console: Console) -> None:
    """Prints the ceilings and findings, then tree, matrix, links, measurements and gaps."""
    result, graph = document.result, Graph(document.result.machine)
    print_verdict(_verdict(result, graph), console, tone=_tone(result), details=_inputs(result))
    console.print()
    print_tables((_findings_table(result), _ceiling_table(result, graph)), console)
    console.print(Text("The machine", style="bold"))
    _print_lines(_tree(graph), console)
    console.print()
    _print_matrix(result, graph, console)
    print_tables((_link_table(graph), _measured_table(result, graph), _absent_table(result)), console)
    print_notes(document, console)


def html(document: Document[TopologyResult]) -> str:
    """The topology as one page with the picture of the machine."""
    from kvbench.report.topology_picture import machine_svg

    result, graph = document.result, Graph(document.result.machine)
    verdict = _verdict(result, graph)
    picture = Figure(
        svg=machine_svg(graph, _bottlenecks(result), verdict),
        caption="Lines are as wide as the links are fast (square root), in the direction of a load; point at one "
        "for its rates.",
    )
    return page(
        document,
        title="Links of this machine",
        verdict=verdict,
        tone=_tone(result),
        details=_inputs(result),
        figures=(picture,),
        tables=(
            _findings_table(result),
            _ceiling_table(result, graph),
            _whole_matrix(result, graph),
            _link_table(graph),
            _limit_table(result),
            _measured_table(result, graph),
            _absent_table(result),
        ),
    )


def _expected(result: TopologyResult, scenario: str) -> Ceiling | None:
    return next((c for c in result.ceilings if c.scenario == scenario and c.basis == "expected"), None)


def _bottlenecks(result: TopologyResult) -> tuple[str, ...]:
    every = _expected(result, "all-near")
    return every.limits if every is not None else ()


def _verdict(result: TopologyResult, graph: Graph) -> str:
    gpus = graph.of_kind("gpu")
    if not gpus:
        reason = next((absent.reason for absent in result.absent if absent.what == "GPUs"), "no GPU in the input")
        return f"No GPU ceilings: {reason}. {_host_sentence(result, graph)}"
    singles = [c for c in result.ceilings if c.scenario.startswith("one:") and c.basis == "expected"]
    known = [c for c in singles if c.total_bytes_per_s is not None]
    if not known:
        return f"{_count(len(gpus), 'GPU')}, but no ceiling: {_why_no_ceiling(singles, graph)}"
    slowest = min(known, key=lambda c: c.total_bytes_per_s or 0.0)
    fastest = max(c.total_bytes_per_s or 0.0 for c in known)
    equal = (slowest.total_bytes_per_s or 0.0) >= 0.98 * fastest
    who = "One GPU" if equal else f"{slowest.scenario.removeprefix('one:').upper()}, the slowest alone,"
    one = (
        f"{who} loads {_quality(slowest, graph)}{format_bandwidth(slowest.total_bytes_per_s or 0.0)} from its near "
        f"DRAM ({_named(slowest.limits, graph)})"
    )
    every = _expected(result, "all-near")
    share = every.slowest if every is not None else None
    if every is None or every.total_bytes_per_s is None or share is None or len(gpus) == 1:
        return f"{one}."
    even = (share.bytes_per_s or 0.0) * len(every.shares) >= 0.98 * every.total_bytes_per_s
    rate = f"{_quality(every, graph)}{format_bandwidth(share.bytes_per_s or 0.0)}"
    each = f"get {rate} each" if even else f"get {rate} at the slowest"
    return (
        f"{one}; {len(every.shares)} GPUs at once {each}, "
        f"{format_bandwidth(every.total_bytes_per_s)} together ({_named(every.limits, graph)})."
    )


def _quality(ceiling: Ceiling, graph: Graph) -> str:
    """`at most` for an upper bound, nothing for measured links, `about` for what is typical of such links."""
    if ceiling.is_bound:
        return "at most "
    links = [graph.links[link] for link in ceiling.limits]
    measured = all(_kind(rate, link) == "measured" for link in links if (rate := link.backward.expected) is not None)
    return "" if measured else "about "


def _why_no_ceiling(singles: Sequence[Ceiling], graph: Graph) -> str:
    if not singles:
        return "the input does not tell on which NUMA node any GPU is; add nvidia-smi topo -m."
    if not any(node.gpu and node.gpu.hbm for node in graph.of_kind("gpu")):
        return "neither link speed nor GPU model is in the input; name the model with --gpu, such as --gpu 'H100 SXM'."
    return f"{singles[0].reason}."


def _host_sentence(result: TopologyResult, graph: Graph) -> str:
    total = next((limit for limit in result.limits if limit.name == "host_total"), None)
    memory = sum(node.memory_bytes or 0 for node in graph.of_kind("numa"))
    nodes = _count(len(graph.of_kind("numa")), "NUMA node")
    held = f" with {format_bytes(memory)} DRAM" if memory else ""
    carried = f", which carries {format_bandwidth(total.value)}" if total is not None else ""
    others = ", ".join(
        _count(len(found), name)
        for found, name in (
            (graph.of_kind("nic"), "NIC"),
            (graph.of_kind("disk"), "disk"),
            (graph.of_kind("device"), "PCIe device"),
        )
        if found
    )
    return f"{nodes}{held}{carried}; {others or 'no other device'}."


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _named(links: Sequence[str], graph: Graph) -> str:
    if not links:
        return "no limiting link"
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return f"limited by {graph.links[links[0]].label}{more}"


def _tone(result: TopologyResult) -> Tone:
    worst = {finding.severity for finding in result.findings}
    return "bad" if "problem" in worst else "unsure" if "warning" in worst else "neutral"


def _inputs(result: TopologyResult) -> tuple[str, ...]:
    counts = [
        _count(number, name)
        for name in ("problem", "warning", "info")
        if (number := sum(1 for finding in result.findings if finding.severity == name))
    ]
    found = f"Findings: {', '.join(counts).replace('infos', 'info')}." if counts else "Findings: none."
    read = [_input(read) for read in result.inputs]
    return (found, f"Read: {'; '.join(read)}.")


def _input(read: InputRead) -> str:
    source = f" ({read.source})" if read.source != "/" and not read.source.startswith("driver") else ""
    return f"{read.format}{source}{', cut short' if read.truncated else ''}"


def _findings_table(result: TopologyResult) -> TextTable:
    return TextTable(
        title="Findings",
        columns=("severity", "rule", "evidence", "what to do"),
        left=frozenset({"rule", "evidence", "what to do"}),
        rows=tuple((f.severity, f.rule, f.evidence, f.remedy) for f in result.findings),
        highlight=frozenset(at for at, f in enumerate(result.findings) if f.severity == "problem"),
    )


def _ceiling_table(result: TopologyResult, graph: Graph) -> TextTable:
    rows = []
    theory = {c.scenario: c for c in result.ceilings if c.basis == "theory"}
    for titles, ceiling in _merged_singles([c for c in result.ceilings if c.basis == "expected"]):
        wire = theory[ceiling.scenario]
        share = ceiling.slowest
        bound = "≤ " if ceiling.is_bound and ceiling.total_bytes_per_s is not None else ""
        rows.append(
            (
                titles,
                "?" if share is None else bound + format_bandwidth(share.bytes_per_s or 0.0),
                _known(ceiling.total_bytes_per_s, bound),
                _known(wire.total_bytes_per_s, "≤ " if wire.is_bound and wire.total_bytes_per_s is not None else ""),
                _named(ceiling.limits, graph).removeprefix("limited by ") if ceiling.limits else ceiling.reason,
            )
        )
    known = any(ceiling.total_bytes_per_s is not None for ceiling in result.ceilings)
    if rows and not known:
        reason = _why_no_ceiling([c for c in result.ceilings if c.scenario.startswith("one:")], graph)
        rows = [("every load", "?", "?", "?", reason)]
    return TextTable(
        title="Ceilings",
        columns=("load", "slowest GPU", "together", "wire rates", "limited by"),
        left=frozenset({"limited by"}),
        rows=tuple(rows),
        highlight=frozenset(at for at, row in enumerate(rows) if row[0].endswith("from its near DRAM")),
        note="Expected rates: measured, else typical, else the wire rate. ≤: a link on the way has no known rate, or "
        "of the limiting link only a bound is known (its wire rate, or one direction's while both are in use)."
        if known
        else "",
    )


def _merged_singles(ceilings: Sequence[Ceiling]) -> Iterator[tuple[str, Ceiling]]:
    """Single-GPU rows of equal rate as one row."""
    groups: dict[tuple[float | None, bool, str], list[Ceiling]] = {}
    for ceiling in ceilings:
        if ceiling.scenario.startswith("one:"):
            key = (ceiling.total_bytes_per_s, ceiling.is_bound, ceiling.reason.partition(" for ")[0])
            groups.setdefault(key, []).append(ceiling)
    for same in groups.values():
        names = [ceiling.scenario.removeprefix("one:").upper() for ceiling in same]
        shown = ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)} GPUs)"
        yield f"{shown} alone, from near DRAM", same[0]
    for ceiling in ceilings:
        if not ceiling.scenario.startswith("one:"):
            yield ceiling.title, ceiling


def _known(bytes_per_s: float | None, bound: str = "") -> str:
    return "?" if bytes_per_s is None else bound + format_bandwidth(bytes_per_s)


def _tree(graph: Graph) -> Iterator[str]:
    """The machine as an indented tree, each node with what it has and the link above it."""
    root = next((node for node in graph.machine.nodes if node.kind == "machine"), None)
    if root is not None:
        yield _tree_line(graph, root)
        yield from _branches(graph, root, "")


def _branches(graph: Graph, node: Node, indent: str) -> Iterator[str]:
    children = [child for child in graph.children(node.id) if child.kind != "dram"]
    groups = _equal_neighbours(graph, children)
    for at, group in enumerate(groups):
        last = at == len(groups) - 1
        line = _tree_line(graph, group[0])
        if len(group) > 1:
            kind = "NICs" if group[0].kind == "nic" else "disks"
            line = line.replace(group[0].name, f"{group[0].name} … {group[-1].name} ({len(group)} {kind})", 1)
        yield f"{indent}{'└─ ' if last else '├─ '}{line}"
        if len(group) == 1:
            yield from _branches(graph, group[0], indent + ("   " if last else "│  "))


def _equal_neighbours(graph: Graph, nodes: Sequence[Node]) -> list[list[Node]]:
    """NICs or disks that differ only in their names, four or more of them, in one group; every other node alone."""
    same: dict[str, list[Node]] = {}
    for node in nodes:
        leaf = node.kind in {"nic", "disk"} and not graph.children(node.id) and node.bus_id is None
        key = f"{node.kind} {_tree_line(graph, node).removeprefix(node.name)}" if leaf else node.id
        same.setdefault(key, []).append(node)
    return [part for group in same.values() for part in ([group] if len(group) >= 4 else [[node] for node in group])]


def _tree_line(graph: Graph, node: Node) -> str:
    parts = [node.name]
    if node.kind == "numa":
        memory = next((child for child in graph.children(node.id) if child.kind == "dram"), None)
        link = graph.uplink(memory.id) if memory is not None else None
        parts += [f"CPUs {node.cpus}"] if node.cpus else ["no CPUs"] if node.memory_bytes else []
        parts += [f"DRAM {format_bytes(node.memory_bytes)}"] if node.memory_bytes else []
        parts += [_speed(link)] if link is not None and _speed(link) else []
    elif node.kind == "disk":
        parts += [
            part for part in (node.medium, format_bytes(node.memory_bytes) if node.memory_bytes else None) if part
        ]
    elif node.line_rate is not None:
        parts.append(f"{node.line_rate.bytes_per_s * 8 / 1e9:g} Gbit/s")
    if node.kind in (*DEVICE_KINDS, "switch"):
        bus, link = (node.bus_id or "").removeprefix("0000:"), graph.uplink(node.id)
        parts += [text for text in (_width(link), _speed(link)) if text]
        parts += _peer_parts(graph, node)
        parts += [bus] if bus and bus not in node.name else []
    if node.gpu is not None:
        parts += [format_bytes(node.gpu.memory_bytes)] if node.gpu.memory_bytes else []
        parts += [f"HBM {format_bandwidth(node.gpu.hbm.bytes_per_s)}"] if node.gpu.hbm else []
        parts += [f"{node.gpu.copy_engines} copy engines"] if node.gpu.copy_engines else []
    return ", ".join(parts)


def _speed(link: Link | None) -> str:
    rate = None if link is None else (link.backward.expected or link.forward.expected)
    return "" if rate is None else f"{format_bandwidth(rate.bytes_per_s)} {_kind(rate, link)}"


def _kind(rate: Rate, link: Link | None) -> str:
    if link is not None and rate in {link.backward.measured, link.forward.measured}:
        return "measured"
    if link is not None and rate in {link.backward.typical, link.forward.typical}:
        return "typical"
    return "wire rate"


def _width(link: Link | None) -> str:
    state = link.pcie if link is not None else None
    if state is None:
        return ""
    number = generation(state.lane_gt_per_s) if state.lane_gt_per_s else None
    return f"Gen{number or '?'} x{state.width or '?'}"


def _peer_parts(graph: Graph, node: Node) -> list[str]:
    if node.kind != "gpu":
        return []
    nvlinks = sum(link.count for link in graph.across(node.id, "nvlink"))
    found = [f"{nvlinks} NVLink{'s' if nvlinks > 1 else ''}"] if nvlinks else []
    xgmi = len(graph.across(node.id, "xgmi"))
    found += [f"{xgmi} xGMI"] if xgmi else []
    found += [f"C2C {_speed(link)}".strip() for link in graph.across(node.id, "c2c")]
    return found


def _print_matrix(result: TopologyResult, graph: Graph, console: Console) -> None:
    """The familiar matrix, in blocks of columns that fit the console."""
    nodes = result.matrix.nodes
    if len(nodes) < 2:
        return
    rows = [at for at, node in enumerate(nodes) if len(nodes) <= _MOST_SQUARE or graph.nodes[node].kind == "gpu"]
    labels = [_label(graph.nodes[node]) for node in nodes]
    wide = max(len(label) for label in labels) + 1
    fit = max((console.width - wide) // _CELL_COLUMNS, 1)
    left_out = "" if len(rows) == len(nodes) else "; rows of NICs are in --json and --html"
    console.print(Text(f"Who is how far from whom, with GB/s of the narrowest link one way{left_out}", style="bold"))
    for start in range(0, len(nodes), fit):
        columns = range(start, min(start + fit, len(nodes)))
        head = "".join(_fitted(labels[at]) for at in columns)
        console.print(Text(" " * wide + head, style="bold"), no_wrap=True)
        _print_lines(
            (labels[row].ljust(wide) + "".join(_fitted(_cell(result, row, at)) for at in columns) for row in rows),
            console,
        )
        console.print()


def _print_lines(lines: Iterable[str], console: Console) -> None:
    """Prints lines in one go, each cut to the console's width: a large machine has hundreds."""
    width = console.width
    cut = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
    console.print(Text("\n".join(cut)), no_wrap=True, overflow="ignore", crop=False)


def _fitted(text: str) -> str:
    return f"{text[: _CELL_COLUMNS - 1]:<{_CELL_COLUMNS}}"


def _label(node: Node) -> str:
    return node.name.split(" ")[0][:14] if node.kind == "gpu" else node.name[:14]


def _cell(result: TopologyResult, row: int, column: int) -> str:
    cell = result.matrix.rows[row][column]
    if cell.bytes_per_s is None:
        return cell.cell
    rate = cell.bytes_per_s / GIGA
    return (
        f"{cell.cell} {'≤' if cell.at_most else ''}{rate:.0f}"
        if rate >= 9.5
        else f"{cell.cell} {'≤' if cell.at_most else ''}{rate:.1f}"
    )


def _whole_matrix(result: TopologyResult, graph: Graph) -> TextTable:
    labels = tuple(_label(graph.nodes[node]) for node in result.matrix.nodes)
    many = len(labels) > 1
    return TextTable(
        title="Who is how far from whom, with GB/s of the narrowest link one way",
        columns=("", *labels),
        left=frozenset(labels),
        rows=tuple(
            (label, *(_cell(result, row, column) for column in range(len(labels)))) for row, label in enumerate(labels)
        )
        if many
        else (),
    )


def _link_table(graph: Graph) -> TextTable:
    """Every link with a figure or a reason, equal ones together."""
    groups: dict[tuple[str, ...], list[Link]] = {}
    for link in graph.machine.links:
        if link.kind != "internal":
            groups.setdefault(_link_cells(graph, link), []).append(link)
    rows = []
    for cells, links in groups.items():
        name = links[0].label if len(links) == 1 else f"{links[0].label} and {len(links) - 1} more"
        rows.append((name, *cells))
    shown = tuple(rows[:_MOST_LINK_ROWS])
    return TextTable(
        title="Links, one direction",
        columns=("link", "kind", "shared by", "theory", "typical", "measured", "source or reason"),
        left=frozenset({"kind", "shared by", "source or reason"}),
        rows=shown,
        note="up / down where the directions differ; up is towards the CPU."
        + (f" {len(rows) - len(shown)} more rows are in --json." if len(rows) > len(shown) else ""),
    )


def _sharers(graph: Graph, link: Link) -> str:
    """Who draws on the same bandwidth: the GPUs below an uplink, or those next to a DRAM."""
    at = link.b if link.kind == "dram" else link.a if graph.nodes[link.a].parent == link.b else None
    gpus = [node for _, node in graph.walk(at) if node.kind == "gpu"] if at is not None else []
    return f"{len(gpus)} GPUs" if len(gpus) > 1 else ""


def _link_cells(graph: Graph, link: Link) -> tuple[str, ...]:
    state = _width(link)
    kind = " ".join(part for part in (link.kind, state, f"x{link.count}" if link.count > 1 else "") if part)
    known = link.backward.expected or link.forward.expected
    measured = link.backward.measured or link.forward.measured
    source = known.origin.source if known is not None else (link.backward.absent or link.forward.absent)
    if known is not None and measured is None and link.forward.absent != "not measured":
        source = f"{source}; {link.forward.absent}" if link.forward.absent else source
    return (
        kind,
        _sharers(graph, link),
        _both(link, lambda rates: rates.theory),
        _both(link, lambda rates: rates.typical),
        _both(link, lambda rates: rates.measured),
        source,
    )


def _both(link: Link, pick: Callable[[LinkRates], Rate | None]) -> str:
    chosen = [pick(rates) for rates in (link.forward, link.backward)]
    texts = ["-" if rate is None else format_bandwidth(rate.bytes_per_s) for rate in chosen]
    return texts[0] if texts[0] == texts[1] else " / ".join(texts)


def _limit_table(result: TopologyResult) -> TextTable:
    return TextTable(
        title="What load-vs-recompute --topo takes from here",
        columns=("limit", "value", "provenance", "source"),
        left=frozenset({"provenance", "source"}),
        rows=tuple(
            (
                limit.name,
                f"{limit.value:g}" if limit.name in {"ranks_per_uplink", "sockets"} else format_bandwidth(limit.value),
                limit.origin.provenance,
                limit.origin.source,
            )
            for limit in result.limits
        ),
    )


def _measured_table(result: TopologyResult, graph: Graph) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (graph.links[m.link].label, _way(graph, m), format_bandwidth(m.rate.bytes_per_s), m.rate.origin.source)
        for m in result.measurements
    ]
    rows += [(group.what, "", format_bandwidth(group.bytes_per_s), group.origin.source) for group in result.groups]
    return TextTable(
        title="Measured",
        columns=("link or group", "direction", "rate", "how"),
        left=frozenset({"direction", "how"}),
        rows=tuple(rows),
    )


def _way(graph: Graph, measured: LinkMeasurement) -> str:
    link = graph.links[measured.link]
    ends = (link.a, link.b) if measured.direction == "forward" else (link.b, link.a)
    return " to ".join(_label(graph.nodes[end]) for end in ends)


def _absent_table(result: TopologyResult) -> TextTable:
    return TextTable(
        title="Not known, and why",
        columns=("what", "reason"),
        left=frozenset({"reason"}),
        rows=tuple((absent.what, absent.reason) for absent in result.absent),
    )
