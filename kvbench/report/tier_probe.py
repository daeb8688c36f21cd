"""Draws a probe of tiers: each by itself, loads beside stores per policy, bytes per edge, and the tails of loads."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from kvbench.core.percentiles import Percentile, least_samples
from kvbench.core.units import format_bandwidth, format_bytes, format_duration
from kvbench.report.page import Figure, page
from kvbench.report.plots import LinePlot, Series, line_plot_svg, log_ticks, print_plot
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.tier_probe import (
    LatencyPoint,
    MixedLoads,
    PolicyCase,
    TierCase,
    TierPhase,
    TierProbeResult,
    call_times,
)

_MOST_POINTS = 200
_MOST_TICKS = 6
_QUANTILES = (0.5, 0.9, 0.99)


def terminal(document: Document[TierProbeResult], console: Console) -> None:
    """Prints the answer, each tier, loads beside stores, bytes per edge, the plots, and the doubts."""
    result = document.result
    print_verdict(_verdict(result), console, tone=_tone(result), details=_details(result))
    console.print()
    first = _first_tables(result)
    print_tables(first, console)
    for plot in _plots(result):
        print_plot(plot, console)
        console.print()
    print_tables(_other_tables(result), console)
    print_notes(document, console)


def html(document: Document[TierProbeResult]) -> str:
    """The probe as one page."""
    result = document.result
    caption = (
        "How many loads took longer than the time on the x axis. A line that lies further right is slower; where the "
        "dashed line (no stores) and the solid one (beside stores) part, stores cost loads time."
    )
    return page(
        document,
        title=f"Probe {result.plan}",
        verdict=_verdict(result),
        tone=_tone(result),
        details=_details(result),
        figures=tuple(Figure(svg=line_plot_svg(plot), caption=caption) for plot in _plots(result)),
        tables=(*_first_tables(result), *_other_tables(result)),
    )


def _tone(result: TierProbeResult) -> Tone:
    if any(not edge.agrees for case in result.policies for edge in case.edges):
        return "bad"
    return "neutral" if any(case.samples for case in result.tiers) else "unsure"


def _cases(result: TierProbeResult) -> list[TierCase | PolicyCase]:
    return [*result.tiers, *result.policies]


def _verdict(result: TierProbeResult) -> str:
    measured = [case for case in result.tiers if case.loads]
    if not measured:
        reasons = Counter(case.reason or "unknown" for case in _cases(result))
        return f"Nothing was measured: {reasons.most_common(1)[0][0] if reasons else 'the plan has no case'}."
    rates = ", ".join(f"{_tier(case)} {format_bandwidth(case.loads[-1].bytes_per_s)}" for case in measured)
    most = max(case.loads[-1].blocks for case in measured)
    return " ".join([f"Loads in calls of up to {most} blocks carry: {rates}.", *_worst(result)])


def _tier(case: TierCase) -> str:
    return case.name.replace(" alone", "") + (" (not cold)" if case.cold is False else "")


def _worst(result: TierProbeResult) -> list[str]:
    """Where queued stores slow loads down most, at the highest percentile that both sides have."""
    found = [
        (ratio, quantile, case, mixed)
        for case in result.policies
        for mixed in case.mixed
        for quantile, ratio in [_tail_ratio(mixed)]
        if ratio is not None
    ]
    if not found:
        return []
    ratio, quantile, case, mixed = max(found, key=lambda one: one[0])
    where = f"p{quantile * 100:g}, from {mixed.tier}, {case.name}"
    return [f"Beside stores, loads take at most {ratio:.2f} times as long ({where})."]


def _tail_ratio(mixed: MixedLoads) -> tuple[float, float | None]:
    for quantile in reversed(_QUANTILES):
        if (ratio := mixed.slowdown_ratio(quantile)) is not None:
            return quantile, ratio
    return 0.5, None


def _details(result: TierProbeResult) -> tuple[str, ...]:
    wrong = [edge for case in result.policies for edge in case.edges if not edge.agrees]
    edges = sum(len(case.edges) for case in result.policies)
    lines = [
        f"Question: {result.question}",
        f"Blocks: {result.model}, rank 1 of {result.tp}: {result.block_shape} ({format_bytes(result.block_bytes)}).",
    ]
    if edges:
        counted = "all are blocks × bytes, as many as the policy moves" if not wrong else f"{len(wrong)} DIFFER"
        lines.append(f"Bytes of {edges} edges were counted: {counted}.")
    lines += [
        f"{case.name} {case.status}: {case.reason}" for case in _cases(result) if case.status != "ok" and case.reason
    ]
    return tuple(lines)


def _first_tables(result: TierProbeResult) -> tuple[TextTable, ...]:
    return (_tier_table(result), _mixed_table(result), _edge_table(result))


def _other_tables(result: TierProbeResult) -> tuple[TextTable, ...]:
    return (
        _store_table(result),
        *map(_interval_table, result.policies),
        _fit_table(result),
        _checksum_table(result),
        _evidence_table(result),
        _doubts_table(result),
    )


def _tier_table(result: TierProbeResult) -> TextTable:
    rows: list[tuple[str, ...]] = []
    highlight = set()
    for case in result.tiers:
        sizes = sorted({point.blocks for point in (*case.stores, *case.loads)})
        if not sizes:
            rows.append((_tier(case), case.status, *[""] * 7))
        for size in sizes:
            store = next((point for point in case.stores if point.blocks == size), None)
            load = next((point for point in case.loads if point.blocks == size), None)
            if size == sizes[-1]:
                highlight.add(len(rows))
            rows.append(
                (
                    _tier(case),
                    f"{size} block{'' if size == 1 else 's'}",
                    _rate(store),
                    "-" if store is None or store.median_call_s is None else format_duration(store.median_call_s),
                    _latency(store, 0.5),
                    _rate(load),
                    *(_latency(load, quantile) for quantile in _QUANTILES),
                )
            )
    return TextTable(
        title="Each tier by itself",
        columns=("tier", "call of", "store", "caller", "ready", "load", "p50", "p90", "p99"),
        rows=tuple(rows),
        highlight=frozenset(highlight),
        note=f"store, load: bytes over the median time of a call. caller, ready: how long a store holds its caller, "
        f"and until the tier has the blocks (medians). p50, p90, p99: of loads; max where fewer than "
        f"{least_samples(0.99)} calls are too few for a p99.",
    )


def _rate(point: LatencyPoint | None) -> str:
    return "-" if point is None else format_bandwidth(point.bytes_per_s)


def _latency(point: LatencyPoint | None, quantile: float) -> str:
    if point is None:
        return "-"
    found = point.at(quantile)
    if found is not None:
        return format_duration(found.value)
    return f"max {format_duration(point.maximum_s)}" if quantile == _QUANTILES[-1] else "-"


def _with_interval(point: LatencyPoint, quantile: float) -> str:
    found = point.at(quantile)
    if found is None:
        return _latency(point, quantile)
    return f"{format_duration(found.value)} {_interval(found)}"


def _interval(found: Percentile) -> str:
    """`(489 … 562 µs)`: the unit once, where both ends have the same."""
    low = "-" if found.low is None else format_duration(found.low)
    high = "-" if found.high is None else format_duration(found.high)
    value, _, unit = low.partition(" ")
    return f"({value if high.endswith(f' {unit}') else low} … {high})"


def _mixed_table(result: TierProbeResult) -> TextTable:
    rows: list[tuple[str, ...]] = []
    highlight = set()
    for case in result.policies:
        if not case.mixed:
            rows.append((case.name, case.status, *[""] * 6))
        for mixed in case.mixed:
            rows.append((case.name, mixed.tier, "idle", *_quantiles(mixed.idle), "", ""))
            highlight.add(len(rows))
            ratios = [mixed.slowdown_ratio(quantile) for quantile in _QUANTILES]
            rows.append(
                (
                    case.name,
                    mixed.tier,
                    "storing",
                    *_quantiles(mixed.saturated),
                    " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                    "-" if mixed.queue_ratio is None else f"{mixed.queue_ratio:.0%}",
                )
            )
    return TextTable(
        title="Loads beside stores, per policy",
        columns=("policy", "from", "store is", "p50", "p90", "p99", "× idle", "queue"),
        left=frozenset({"from", "store is"}),
        rows=tuple(rows),
        highlight=frozenset(highlight),
        note=f"Each caller loads {result.load_share_ratio:.0%} of the time; queue: median fill of the fullest of "
        f"{format_bytes(result.queue_bytes)}. × idle: at p50 / p90 / p99. Intervals are below.",
    )


def _quantiles(point: LatencyPoint | None) -> tuple[str, ...]:
    return tuple(_latency(point, quantile) for quantile in _QUANTILES)


def _edge_table(result: TierProbeResult) -> TextTable:
    rows: list[tuple[str, ...]] = []
    highlight = set()
    for case in result.policies:
        for edge in case.edges:
            if not edge.agrees:
                highlight.add(len(rows))
            rows.append(
                (
                    case.name,
                    f"{edge.source} → {edge.target}",
                    str(edge.blocks),
                    format_bytes(edge.bytes),
                    format_bytes(edge.expected_bytes),
                    "yes" if edge.agrees else "NO",
                    format_bandwidth(edge.bytes / edge.seconds) if edge.bytes and edge.seconds > 0 else "-",
                )
            )
    repeated = next((case.repeated_blocks for case in result.policies if case.edges), 0)
    blocks = next((case.blocks for case in result.policies if case.edges), 0)
    return TextTable(
        title="Bytes per edge while storing",
        columns=("policy", "edge", "blocks", "counted", "due", "agree", "while moving"),
        left=frozenset({"edge"}),
        rows=tuple(rows),
        highlight=frozenset(highlight),
        note=f"{blocks} distinct blocks are stored once, the last {repeated} of them twice. due: blocks × "
        f"{result.block_bytes} bytes that the policy moves; write-back: what the tier above did not keep.",
    )


def _store_table(result: TierProbeResult) -> TextTable:
    rows = tuple(
        (
            case.name,
            f"{point.blocks} blocks",
            "-" if point.median_call_s is None else format_duration(point.median_call_s),
            _with_interval(point, 0.5),
            _latency(point, 0.9),
            str(point.count),
        )
        for case in result.policies
        if (point := case.store) is not None
    )
    return TextTable(
        title="Stores of new blocks, per policy",
        columns=("policy", "call of", "caller p50", "ready p50", "ready p90", "calls"),
        rows=rows,
        note="caller: how long a store holds its caller. ready: until every tier that takes the blocks has them.",
    )


def _interval_table(case: PolicyCase) -> TextTable:
    return TextTable(
        title=f"Loads beside stores, {case.name}, with intervals of 95 %",
        columns=("from", "p50", "p90", "p99", "loads"),
        rows=tuple(
            (
                f"{mixed.tier}, {state}",
                *(_with_interval(point, quantile) for quantile in _QUANTILES),
                str(point.count),
            )
            for mixed in case.mixed
            for state, point in (("idle", mixed.idle), ("storing", mixed.saturated))
            if point is not None
        ),
    )


def _fit_table(result: TierProbeResult) -> TextTable:
    rows = []
    for case in result.tiers:
        for phase, fit in (("store", case.store_fit), ("load", case.load_fit)):
            if fit is not None:
                rows.append(
                    (
                        f"{_tier(case)} {phase}",
                        "-" if fit.fixed_s is None else format_duration(fit.fixed_s),
                        "-" if fit.bytes_per_s is None else format_bandwidth(fit.bytes_per_s),
                        f"{fit.residual_ratio:.1%}",
                    )
                )
    return TextTable(
        title="Fits, t = fixed + bytes / B",
        columns=("tier", "fixed", "B", "residual"),
        rows=tuple(rows),
        note="fixed: what a call costs besides its bytes. Loads are paths that load-vs-recompute --probe reads.",
    )


def _checksum_table(result: TierProbeResult) -> TextTable:
    rows = []
    for case in result.tiers:
        load = case.loads[-1] if case.loads else None
        if case.checksum_bytes_per_s is None or load is None:
            continue
        share = load.bytes_per_s / case.checksum_bytes_per_s
        rows.append(
            (
                _tier(case),
                format_bandwidth(case.checksum_bytes_per_s),
                format_duration(load.blocks * result.block_bytes / case.checksum_bytes_per_s),
                f"{share:.0%}" if case.checked_on_load else "none: not computed",
                str(case.verified_blocks),
                str(case.failed_blocks),
            )
        )
    return TextTable(
        title="Checksums",
        columns=("tier", "CRC32C alone", "of the largest call", "of its load", "blocks verified", "failed"),
        rows=tuple(rows),
        note="of its load: its share if nothing hid it; a file tier computes it while other blocks are on their way. "
        "Every store computes it once. Verified: compared with what was stored, outside the clock.",
    )


def _evidence_table(result: TierProbeResult) -> TextTable:
    return TextTable(
        title="What was measured",
        columns=("tier", "place", "written", "cold evidence", "load before, after"),
        left=frozenset({"place", "written", "cold evidence"}),
        rows=tuple(
            (
                _tier(case),
                case.description or case.spec,
                "before the call returns" if case.synchronous else "from a queue",
                case.cold_evidence,
                ", ".join(f"{load:.1f}" for load in case.load_average) or "-",
            )
            for case in result.tiers
            if case.samples
        ),
    )


def _doubts_table(result: TierProbeResult) -> TextTable:
    return TextTable(
        title="Doubts about single cases",
        columns=("case", "doubt", "what to do"),
        left=frozenset({"doubt", "what to do"}),
        rows=tuple((case.name, doubt.message, doubt.remedy) for case in _cases(result) for doubt in case.warnings),
    )


def _plots(result: TierProbeResult) -> tuple[LinePlot, ...]:
    return tuple(_plot(case) for case in result.policies if any(len(mixed.samples) > 1 for mixed in case.mixed))


def _plot(case: PolicyCase) -> LinePlot:
    """The share of loads that took longer, per tier: without stores, and beside them."""
    series: list[Series] = []
    phases: tuple[tuple[TierPhase, str], ...] = (("idle", "no stores"), ("saturated", "beside stores"))
    for mixed in case.mixed:
        for phase, label in phases:
            calls = call_times(sample for sample in mixed.samples if sample.phase == phase)
            if calls:
                points = _longer(sorted(calls))
                series.append(Series(name=f"{mixed.tier}, {label}", points=points, dashed=phase == "idle"))
    times = [seconds for one in series for seconds, _ in one.points]
    return LinePlot(
        title=f"Loads that take longer, {case.name}",
        x_label="time of a load",
        y_label="share of loads that take longer",
        series=tuple(series),
        x_format=format_duration,
        y_format=_share,
        x_ticks=log_ticks(min(times), max(times), most=_MOST_TICKS),
        legend_beside=True,
    )


def _longer(calls: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """(time, share of calls of at least that time), the slowest ones all kept."""
    count = len(calls)
    points = [(seconds, (count - at) / count) for at, seconds in enumerate(calls)]
    step = max(count // _MOST_POINTS, 1)
    return tuple(point for at, point in enumerate(points) if at % step == 0 or at >= count - 20)


def _share(ratio: float) -> str:
    return f"{ratio:.0%}" if ratio >= 0.01 else f"{ratio:.1%}"
