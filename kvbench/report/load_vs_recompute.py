"""Draws the answer of `load-vs-recompute`: the verdict first, then the comparison, its curves, and the evidence."""

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console

from kvbench.core.compare import CLOSE_RATIO, Verdict
from kvbench.core.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flop,
    format_flop_rate,
)
from kvbench.report.page import Figure, page
from kvbench.report.plots import LinePlot, MarkedPoint, Series, line_plot_svg, print_plot
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.load_vs_recompute import Curve, Input, LoadVsRecomputeResult, ModelSummary, Point

_WORDS: dict[Verdict, str] = {
    "load": "Load",
    "recompute": "Recompute",
    "split": "Split",
    "too_close": "Too close to call",
    "no_verdict": "No verdict",
}
_TONES: dict[Verdict, Tone] = {
    "load": "good",
    "recompute": "bad",
    "split": "good",
    "too_close": "unsure",
    "no_verdict": "unsure",
}
_STRATEGY_NAMES = {
    "per_rank_host_copies": "a per-rank copies",
    "shared_memory_direct": "b shared buffer",
    "fixed_source_broadcast_serial": "c broadcast, serial",
    "fixed_source_broadcast_pipelined": "c broadcast, pipelined",
    "hashed_source_broadcast_pipelined": "d hashed broadcast",
    "sharded_h2d_allgather_pipelined": "e shard + all-gather",
    "native_sequence_sharding": "f native sharding",
    "layer_split": "g layer split",
}
_MOST_ROWS, _MOST_FIGURES, _DETAIL_POINTS = 40, 8, 4


def terminal(document: Document[LoadVsRecomputeResult], console: Console) -> None:
    """Prints verdict, comparison, curve and evidence."""
    result = document.result
    text, tone, details = _verdict(result)
    print_verdict(text, console, tone=tone, details=details)
    console.print()
    print_tables([_comparison(result, _MOST_ROWS)], console)
    if result.curves:
        print_plot(_plots(result)[0], console)
        console.print()
    print_tables(_evidence(result), console)
    print_notes(document, console)


def html(document: Document[LoadVsRecomputeResult]) -> str:
    """The same as one page, with a figure per model and layout."""
    result = document.result
    text, tone, details = _verdict(result)
    figures = [Figure(svg=line_plot_svg(plot), caption=_caption(plot)) for plot in _plots(result)[:_MOST_FIGURES]]
    return page(
        document,
        title="Load or recompute: " + ", ".join(dict.fromkeys(point.model for point in result.points)),
        verdict=text,
        tone=tone,
        details=details,
        figures=figures,
        tables=[_comparison(result, len(result.points)), *_evidence(result)],
    )


def _caption(plot: LinePlot) -> str:
    if plot.marked:
        return "Where lines cross, loading and recomputing take equally long: " + ", ".join(
            m.label for m in plot.marked
        )
    return "The lines do not cross in this range: one side is faster at every prefix length shown."


def _verdict(result: LoadVsRecomputeResult) -> tuple[str, Tone, list[str]]:
    points = result.points
    if not points:
        return "No point was compared.", "unsure", [skip.reason for skip in result.skipped]
    if len(points) == 1:
        return _point_sentence(points[0]), _TONES[points[0].verdict], _point_details(points[0], result)
    details = [_point_sentence(point) for point in points] if len(points) <= _DETAIL_POINTS else _crossings(result)
    verdicts = {point.verdict for point in points}
    if len(verdicts) == 1:
        return _common_verdict(points), _TONES[points[0].verdict], details
    counts = Counter(point.verdict for point in points)
    parts = ", ".join(f"{_WORDS[verdict].lower()} at {count}" for verdict, count in counts.most_common())
    return f"It depends: {parts} of {len(points)} points.", "neutral", details


def _common_verdict(points: Sequence[Point]) -> str:
    ratios = [point.ratio for point in points if point.ratio]
    low, high = (min(ratios), max(ratios)) if ratios else (0.0, 0.0)
    match points[0].verdict:
        case "load":
            return f"Load, at all {len(points)} points: {_times(low)} to {_times(high)} faster than recomputing."
        case "recompute":
            return (
                f"Recompute, at all {len(points)} points: {_times(1 / high)} to {_times(1 / low)} faster than loading."
            )
        case "split":
            gains = [point.split_gain for point in points]
            span = f"{_times(min(gains))} to {_times(max(gains))}"
            return f"Split, at all {len(points)} points: {span} faster than the better whole option."
        case "too_close":
            return f"Too close to call at all {len(points)} points."
        case "no_verdict":
            return f"No verdict: the path is too busy at all {len(points)} points."


def _where(point: Point) -> str:
    return f"{point.model}, {point.tokens:,} tokens, {_layout(point)}, {point.tier}"


def _layout(point: Point) -> str:
    return f"{point.layout} {point.kv_dtype}"


def _point_sentence(point: Point) -> str:
    load, recompute = format_duration(point.t_load_s), format_duration(point.t_recompute_s)
    where = _where(point)
    match point.verdict:
        case "load":
            return f"Load: {load} against {recompute} to recompute, {_times(point.ratio)} faster ({where})."
        case "recompute":
            faster = _times(1 / point.ratio if point.ratio else None)
            return f"Recompute: {recompute} against {load} to load, {faster} faster ({where})."
        case "split":
            return (
                f"Split: compute the first {point.split_tokens:,} tokens while the rest loads, "
                f"{format_duration(point.split_t_s)} against {load} to load and {recompute} to recompute ({where})."
            )
        case "too_close":
            return f"Too close to call: {load} to load, {recompute} to recompute ({where})."
        case "no_verdict":
            return f"No verdict: the path would be {point.utilisation_ratio:.0%} busy ({where})."


def _times(ratio: float | None) -> str:
    return "∞×" if ratio is None else f"{ratio:.1f}×"


def _point_details(point: Point, result: LoadVsRecomputeResult) -> list[str]:
    least = point.smallest_useful_tokens
    from_tokens = f" and from {least:,.0f} tokens on" if least is not None and least >= 1 else ""
    size = (
        f"{format_bytes(point.rank_bytes)} per rank, {format_bytes(point.node_bytes)} on all ranks, "
        f"{format_bytes(point.unique_bytes)} unique ({point.replicas:.2g} copies of each byte)"
    )
    rate = (
        f"{format_bandwidth(point.rank_bytes_per_s)} per rank, limited by {point.limited_by}; "
        f"loading pays above B* = {_bandwidth(point.break_even_bytes_per_s)}{from_tokens}"
    )
    work = f"{format_flop(point.flops_per_rank)} per rank; {_intensity(point)}"
    details = [size, work, rate, _faster_strategy(point), _flip_sentence(point), _sure_sentence(point, result)]
    if point.verdict == "split":
        details.append(f"without a split: {_WORDS[point.verdict_without_split].lower()}")
    return [detail for detail in details if detail]


def _faster_strategy(point: Point) -> str:
    """The best other way to restore, where it would save more than the doubt."""
    timed = [option for option in point.strategies if option.t_s is not None and option.name != point.strategy]
    best = min(timed, key=lambda option: option.t_s or 0.0, default=None)
    if best is None or best.t_s is None or best.t_s * CLOSE_RATIO > point.t_load_s:
        return ""
    return f"{_STRATEGY_NAMES[best.name]} would load in {format_duration(best.t_s)} (see the restore table)"


def _intensity(point: Point) -> str:
    if point.i_cache is None:
        return "no bytes to load"
    if point.i_hardware is None:
        return f"I_cache {_power(point.i_cache)} FLOP/B"
    relation = ">" if point.i_cache > point.i_hardware else "<"
    return f"I_cache {_power(point.i_cache)} {relation} I_hardware {_power(point.i_hardware)} FLOP/B"


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _bandwidth(bytes_per_s: float | None) -> str:
    return "none: fixed costs alone take longer" if bytes_per_s is None else format_bandwidth(bytes_per_s)


def _flip_sentence(point: Point) -> str:
    if point.verdict == "no_verdict":
        return ""
    if point.flip_input is None or point.flip_value is None or point.flip_factor is None or point.flip_verdict is None:
        return "no change of bandwidth or compute speed up to 100× would flip this verdict"
    word = _WORDS[point.flip_verdict].lower()
    if point.flip_input == "bandwidth":
        return f"flips to {word} at {format_bandwidth(point.flip_value)} per rank (×{point.flip_factor:.2g})"
    return f"flips to {word} if recomputing took {format_duration(point.flip_value)} (×{1 / point.flip_factor:.2g})"


def _sure_sentence(point: Point, result: LoadVsRecomputeResult) -> str:
    if point.ratio_low is None or point.ratio_high is None:
        return ""
    span = f"T_recompute/T_load is between {point.ratio_low:.3g} and {point.ratio_high:.3g}"
    if result.measured_prefill is not None:
        basis = "loads end to end up to 1.36 times the wire time, and the fit off by its residual"
    else:
        basis = "compute between peak FLOP/s and 25 % MFU, loads end to end up to 1.36 times the wire time"
    return f"{'sure' if point.sure else 'not sure'}: {span} ({basis})"


def _crossings(result: LoadVsRecomputeResult) -> list[str]:
    lines = []
    for curve in result.curves[:_MOST_FIGURES]:
        name = f"{curve.model} {curve.layout} {curve.kv_dtype} {curve.tier}"
        if curve.crossover_tokens:
            lines.append(
                f"{name}: load and recompute cross at {', '.join(f'{n:,}' for n in curve.crossover_tokens)} tokens"
            )
        else:
            faster = "loading" if curve.t_load_s[0] < curve.t_recompute_s[0] else "recomputing"
            lines.append(f"{name}: {faster} is faster from {curve.tokens[0]:,} to {curve.tokens[-1]:,} tokens")
    if len(result.curves) > _MOST_FIGURES:
        lines.append(f"and {len(result.curves) - _MOST_FIGURES} more curves in --json")
    return lines


def _comparison(result: LoadVsRecomputeResult, most_rows: int) -> TextTable:
    """One row per point; what all points share stands in the title."""
    shown = result.points[:most_rows]
    hidden = len(result.points) - len(shown)
    names = ("model", "tokens", "layout", "tier", "bytes/rank", "load", "recompute", "ratio", "split", "verdict")
    rows = [_comparison_row(point) for point in shown]
    shared = [i for i in (0, 2, 3) if len({row[i] for row in rows}) == 1]
    common = ", ".join([*(rows[0][i] for i in shared if rows), f"{result.gpu}, efficiency {result.efficiency}"])
    kept = [i for i in range(len(names)) if i not in shared]
    return TextTable(
        title=common,
        columns=tuple(names[i] for i in kept),
        left=frozenset({"model", "layout", "tier", "verdict"}),
        rows=tuple(tuple(row[i] for i in kept) for row in rows),
        note=f"{hidden} more rows in --json and --html" if hidden else "ratio = recompute / load; ? = may be otherwise",
    )


def _comparison_row(point: Point) -> tuple[str, ...]:
    suffix = f"+{point.suffix_tokens:,}" if point.suffix_tokens else ""
    return (
        point.model,
        f"{point.tokens:,}{suffix}",
        _layout(point),
        point.tier,
        format_bytes(point.rank_bytes),
        format_duration(point.t_load_s),
        format_duration(point.t_recompute_s),
        _times(point.ratio),
        format_duration(point.split_t_s),
        _WORDS[point.verdict].lower() + ("" if point.sure or point.verdict == "no_verdict" else " ?"),
    )


def _plots(result: LoadVsRecomputeResult) -> list[LinePlot]:
    groups: dict[str, list[Curve]] = {}
    for curve in result.curves:
        groups.setdefault(f"{curve.model}, {curve.layout}, {curve.kv_dtype}", []).append(curve)
    return [_plot(name, curves) for name, curves in groups.items()]


def _plot(name: str, curves: Sequence[Curve]) -> LinePlot:
    series, marked = [], []
    first = curves[0]
    series.append(Series(name="recompute", points=_xy(first.tokens, first.t_recompute_s), dashed=True))
    for curve in curves:
        series.append(Series(name=f"load {curve.tier}", points=_xy(curve.tokens, curve.t_load_s)))
        marked += [
            MarkedPoint(x=float(n), y=_between(curve, n), label=f"{curve.tier} crosses at {n:,} tokens")
            for n in curve.crossover_tokens
        ]
    if len(curves) == 1:
        series.append(Series(name="split", points=_xy(first.tokens, first.split_t_s), dashed=True))
    return LinePlot(
        title=f"{name}: time to have the prefix in device memory",
        x_label="prefix tokens",
        y_label="time",
        series=tuple(series),
        marked=tuple(marked),
        x_format=format_count,
        x_ticks=tuple(float(n) for n in first.tokens[:: max(1, len(first.tokens) // 8)]),
    )


def _xy(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple((float(n), s) for n, s in zip(tokens, seconds, strict=True))


def _between(curve: Curve, tokens: int) -> float:
    """Load time at a crossover, between the curve's points."""
    pairs = zip(curve.tokens, curve.t_load_s, curve.tokens[1:], curve.t_load_s[1:], strict=False)
    for low, low_s, high, high_s in pairs:
        if low <= tokens <= high:
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
    return curve.t_load_s[0]


def _evidence(result: LoadVsRecomputeResult) -> list[TextTable]:
    tables = []
    if 0 < len(result.points) <= _DETAIL_POINTS:
        tables = [_levels(result), _details(result.points), *_strategies(result.points)]
    tables += [_mix(result), _measured_layers(result), _paths(result), _checks(result)]
    tables += [_models(result.models), _inputs(result.inputs), _skipped(result)]
    return [table for table in tables if table.rows]


def _labels(points: Sequence[Point]) -> tuple[str, ...]:
    """A short heading per point: only what tells it from the others."""
    parts = [(p.model, f"{p.tokens:,}", _layout(p), p.tier, f"+{p.suffix_tokens:,}") for p in points]
    differing = [i for i in range(5) if len({part[i] for part in parts}) > 1] or [1]
    return tuple(" ".join(part[i] for i in differing) for part in parts)


def _levels(result: LoadVsRecomputeResult) -> TextTable:
    """The three ways to estimate T_recompute, one under the other: rule of thumb, exact work, exact at real speed."""
    rows = []
    for label, p in zip(_labels(result.points), result.points, strict=True):
        if p.t_recompute_active_params_s is not None and p.flops_per_rank_active_params is not None:
            rows.append(
                _level(label, "active params, peak", p, p.flops_per_rank_active_params, p.t_recompute_active_params_s)
            )
        if p.t_recompute_floor_s is not None and p.flops_mode == "exact":
            rows.append(_level(label, "exact FLOPs, peak", p, p.flops_per_rank, p.t_recompute_floor_s))
        if result.efficiency != "1.0":
            name = "measured" if result.measured_prefill else f"{p.flops_mode} FLOPs, efficiency {result.efficiency}"
            rows.append(_level(label, name, p, p.flops_per_rank, p.t_recompute_s))
    return TextTable(
        title="What each level of detail changes",
        columns=("prefix", "estimate", "FLOP/rank", "recompute", "load", "ratio"),
        left=frozenset({"estimate"}),
        rows=tuple(rows),
        note="active params: the rule of thumb 2·Ψ_active·N + 4·N²·h_q·d·L/2, divided by the ranks",
    )


def _level(label: str, name: str, point: Point, flop: int, seconds: float) -> tuple[str, ...]:
    ratio = _times(seconds / point.t_load_s if point.t_load_s else None)
    return (label, name, format_flop(flop), format_duration(seconds), format_duration(point.t_load_s), ratio)


def _details(points: Sequence[Point]) -> TextTable:
    """Every figure behind the comparison, one column per point."""
    columns = [_detail_column(point) for point in points]
    names = list(columns[0])
    return TextTable(
        title="The figures behind it",
        columns=("", *_labels(points)),
        rows=tuple((name, *(column[name] for column in columns)) for name in names if any(c[name] for c in columns)),
        note="rank: the busiest; repeated: router, MLA down-projections, indexer, K/V of shared heads",
    )


def _detail_column(p: Point) -> dict[str, str]:
    return {
        "bytes per token and rank": format_bytes(p.bytes_per_token),
        "bytes per rank": format_bytes(p.rank_bytes),
        "bytes on all ranks": format_bytes(p.node_bytes),
        "unique bytes": format_bytes(p.unique_bytes),
        "copies of each byte": f"{p.replicas:.3g}",
        "  of a rank: index key": format_bytes(p.index_bytes) if p.index_bytes else "",
        "  of a rank: recurrent state": format_bytes(p.state_bytes) if p.state_bytes else "",
        "FLOP linear": format_flop(p.flops_linear),
        "FLOP attention": format_flop(p.flops_attention),
        "FLOP attention, absorbed": _or_empty(p.flops_attention_absorbed, format_flop),
        "FLOP index scores": format_flop(p.flops_index) if p.flops_index else "",
        "FLOP total": format_flop(p.flops_total),
        "FLOP per rank, repeated counted": format_flop(p.flops_per_rank),
        "FLOP per rank, plain division": format_flop(p.flops_per_rank_div_tp),
        "I_cache": _or_empty(p.i_cache, "{:.3g} FLOP/B".format),
        "I_hardware": _or_empty(p.i_hardware, "{:.3g} FLOP/B".format),
        "load: rate per rank": format_bandwidth(p.rank_bytes_per_s),
        "load: limited by": p.limited_by,
        "load: queue": _queue(p),
        "load: fixed": format_duration(p.t_load_fixed_s) if p.t_load_fixed_s else "",
        "load: wire": format_duration(p.t_load_wire_s),
        "load: hidden by the suffix": format_duration(p.t_load_overlap_s) if p.t_load_overlap_s else "",
        "recompute: dense": _or_empty(p.t_recompute_dense_s, format_duration),
        "recompute: experts": _or_empty(p.t_recompute_moe_s, format_duration),
        "recompute: attention": _or_empty(p.t_recompute_attention_s, format_duration),
        "recompute: index": _or_empty(p.t_recompute_index_s, format_duration),
        "recompute: collectives": _or_empty(p.t_recompute_comm_s, format_duration),
        "recompute: pipeline bubbles": _or_empty(p.t_recompute_bubble_s, format_duration),
        "recompute: MFU": _or_empty(p.mfu_ratio, "{:.0%}".format),
        "B*, break-even bandwidth": _or_empty(p.break_even_bytes_per_s, format_bandwidth),
        "N_min, smallest useful prefix": _tokens(p.smallest_useful_tokens),
        "S*, suffix that hides the load": _tokens(p.suffix_break_even_tokens),
        "x*, front to compute": f"{p.split_tokens:,}",
        "token split": f"{format_duration(p.split_t_s)} ({p.split_gain:.2f}×)",
        "layer split": format_duration(p.layer_split_t_s),
    }


def _or_empty(value: float | None, form: Callable[[float], str]) -> str:
    return form(value) if value else ""


def _tokens(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def _queue(p: Point) -> str:
    if not p.utilisation_ratio:
        return ""
    wait = "∞" if p.t_load_queue_s is None else format_duration(p.t_load_queue_s)
    return f"{wait} (ρ {p.utilisation_ratio:.0%})"


def _strategies(points: Sequence[Point]) -> list[TextTable]:
    return [
        TextTable(
            title=f"Restoring to ranks that need the same bytes: {_where(point)}",
            columns=("strategy", "time", "copies", "H2D", "GPU-GPU", "L1/rank", "limited by"),
            left=frozenset({"limited by"}),
            rows=tuple(
                (
                    _STRATEGY_NAMES.get(option.name, option.name),
                    "?" if option.t_s is None else format_duration(option.t_s),
                    str(option.host_copies),
                    format_bytes(option.node_h2d_bytes),
                    format_bytes(option.gpu_gpu_bytes),
                    f"{option.l1_rank_ratio:.0%}",
                    option.limited_by or option.reason or "",
                )
                for option in point.strategies
            ),
            highlight=frozenset(i for i, option in enumerate(point.strategies) if option.name == point.strategy),
            note="bytes per group of ranks with equal content; c, d, e, g need ordered collectives on the load stream",
        )
        for point in points
        if point.strategies
    ]


def _mix(result: LoadVsRecomputeResult) -> TextTable:
    return TextTable(
        title="Expected time of a look-up, E[T] = Σ p·T",
        columns=("prefix", "E[T]", "outcome", "share", "time", "part of E[T]"),
        left=frozenset({"outcome"}),
        rows=tuple(
            (
                f"{e.model}, {e.tokens:,}",
                format_duration(e.expected_s),
                share.tier,
                f"{share.probability_ratio:.1%}",
                format_duration(share.t_s),
                f"{share.expected_ratio:.0%}",
            )
            for e in result.expected_times
            for share in e.shares
        ),
    )


def _measured_layers(result: LoadVsRecomputeResult) -> TextTable:
    prefill = result.measured_prefill
    if prefill is None:
        return TextTable(title="", columns=("",), rows=())
    return TextTable(
        title=f"Measured prefill on {prefill.device} ({prefill.device_name}, {prefill.dtype}), t = c0 + c1·N + c2·N²",
        columns=("layers", "count", "c0", "c1 per token", "c2 per token²", "residual", "samples"),
        rows=tuple(
            (
                kind.kind,
                str(kind.num_layers),
                format_duration(kind.cost.c0_s),
                format_duration(kind.cost.c1_s),
                format_duration(kind.cost.c2_s),
                f"{kind.cost.residual_ratio:.1%}",
                str(len(kind.cost.samples)),
            )
            for kind in prefill.layers
        ),
        note=f"torch {prefill.torch_version}, transformers {prefill.transformers_version}, {prefill.threads} threads, "
        f"random weights and tokens, up to {prefill.max_measured_tokens:,} tokens, extrapolated to all layers",
    )


def _paths(result: LoadVsRecomputeResult) -> TextTable:
    return TextTable(
        title="Measured load paths, t = fixed + bytes / bandwidth",
        columns=("tier", "to", "bandwidth", "fixed", "residual", "samples", "cold"),
        left=frozenset({"to", "cold"}),
        rows=tuple(
            (
                path.spec,
                path.destination,
                format_bandwidth(path.bytes_per_s),
                format_duration(path.fixed_s),
                f"{path.residual_ratio:.1%}",
                str(len(path.samples)),
                {True: "cold", False: "warm", None: "not checked"}[path.cold],
            )
            for path in result.measured_paths
        ),
    )


def _checks(result: LoadVsRecomputeResult) -> TextTable:
    return TextTable(
        title="Predicted against measured, at a length the fit has not seen",
        columns=("what", "tokens", "predicted", "measured", "predicted / measured"),
        rows=tuple(
            (
                check.what,
                f"{check.tokens:,}",
                format_duration(check.predicted_s),
                format_duration(check.measured_s),
                f"{check.predicted_s / check.measured_s:.2f}",
            )
            for check in result.checks
        ),
    )


def _models(models: Sequence[ModelSummary]) -> TextTable:
    return TextTable(
        title="Models",
        columns=("model", "parameters", "published", "layers", "source"),
        left=frozenset({"layers", "source"}),
        rows=tuple(
            (
                model.model,
                format_count(model.params_total),
                "" if model.published_total_params is None else format_count(model.published_total_params),
                ", ".join(f"{count} {kind}" for kind, count in model.layers.items()),
                model.source + (f"; {model.params_note}" if model.params_note else ""),
            )
            for model in models
        ),
    )


def _inputs(inputs: Sequence[Input]) -> TextTable:
    return TextTable(
        title="What went in",
        columns=("input", "value", "provenance", "source"),
        left=frozenset({"provenance", "source"}),
        rows=tuple((i.name, _input_value(i), i.origin.provenance, i.origin.source) for i in inputs),
    )


def _input_value(item: Input) -> str:
    forms: dict[str, Callable[[float], str]] = {
        "B/s": format_bandwidth,
        "FLOP/s": format_flop_rate,
        "s": format_duration,
        "tokens": "{:,.0f} tokens".format,
    }
    return forms.get(item.unit, "{:.3g}".format)(item.value)


def _skipped(result: LoadVsRecomputeResult) -> TextTable:
    return TextTable(
        title="Skipped",
        columns=("model", "layout", "reason"),
        left=frozenset({"layout", "reason"}),
        rows=tuple((skip.model, skip.layout, skip.reason) for skip in result.skipped),
    )
