"""Draws the answer of `load-vs-recompute`: the verdict first, then the comparison, its curves, and the evidence."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from kvbench.core.compare import Verdict
from kvbench.core.units import format_bandwidth, format_bytes, format_count, format_duration, format_flop
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
    "per_rank_host_copies": "a  per-rank host copies",
    "shared_memory_direct": "b  shared memory, direct",
    "fixed_source_broadcast_serial": "c  fixed source + broadcast, serial",
    "fixed_source_broadcast_pipelined": "c  fixed source + broadcast, pipelined",
    "hashed_source_broadcast_pipelined": "d  hashed source + broadcast",
    "sharded_h2d_allgather_pipelined": "e  sharded H2D + all-gather",
    "native_sequence_sharding": "f  native sequence sharding",
    "layer_split": "g  layer split",
}
_MOST_ROWS, _MOST_FIGURES, _DETAIL_POINTS = 40, 8, 6


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
        return "Where lines cross, loading and recomputing take equally long: " + ", ".join(m.label for m in plot.marked)
    return "The lines do not cross in this range: one side is faster at every prefix length shown."


def _verdict(result: LoadVsRecomputeResult) -> tuple[str, Tone, list[str]]:
    points = result.points
    if not points:
        return "No point was compared.", "unsure", [skip.reason for skip in result.skipped]
    if len(points) == 1:
        return _point_sentence(points[0]), _TONES[points[0].verdict], _point_details(points[0], result)
    if len(points) <= _DETAIL_POINTS:
        return f"{_counts(points)}.", _common_tone(points), [_point_sentence(point) for point in points]
    return f"{_counts(points)}, of {len(points)} points.", _common_tone(points), _crossings(result)


def _counts(points: Sequence[Point]) -> str:
    counts = Counter(point.verdict for point in points)
    return ", ".join(f"{_WORDS[verdict]}: {count}" for verdict, count in counts.most_common())


def _common_tone(points: Sequence[Point]) -> Tone:
    tones = {_TONES[point.verdict] for point in points}
    return tones.pop() if len(tones) == 1 else "neutral"


def _where(point: Point) -> str:
    return f"{point.model}, {point.tokens:,} tokens, {_layout(point)}, {point.tier}"


def _layout(point: Point) -> str:
    parts = [f"TP {point.tp}"]
    parts += [f"PP {point.pp}"] if point.pp > 1 else []
    parts += [f"CP {point.cp} {point.cp_mode}"] if point.cp > 1 else []
    parts += [f"DP attention {point.dp_attention}"] if point.dp_attention > 1 else []
    parts += [f"EP {point.ep}"] if point.ep > 1 else []
    return " ".join(parts)


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
    details = [
        f"{format_bytes(point.rank_bytes)} per rank, {format_bytes(point.node_bytes)} on all ranks, "
        f"{format_bytes(point.unique_bytes)} unique ({point.replicas:.2g} copies of each byte); "
        f"{format_flop(point.flops_per_rank)} per rank",
        _intensity(point),
        f"{format_bandwidth(point.rank_bytes_per_s)} per rank, limited by {point.limited_by}; "
        f"loading pays above B* = {_bandwidth(point.break_even_bytes_per_s)}"
        + (
            f" and from {point.smallest_useful_tokens:,.0f} tokens on"
            if point.smallest_useful_tokens is not None
            else ""
        ),
        _flip_sentence(point),
        _sure_sentence(point, result),
    ]
    if point.verdict == "split":
        details.append(f"without a split: {_WORDS[point.verdict_without_split].lower()}")
    return [detail for detail in details if detail]


def _intensity(point: Point) -> str:
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
        name = f"{curve.model} TP {curve.tp} {curve.tier}"
        if curve.crossover_tokens:
            lines.append(f"{name}: load and recompute cross at {', '.join(f'{n:,}' for n in curve.crossover_tokens)} tokens")
        else:
            faster = "loading" if curve.t_load_s[0] < curve.t_recompute_s[0] else "recomputing"
            lines.append(f"{name}: {faster} is faster from {curve.tokens[0]:,} to {curve.tokens[-1]:,} tokens")
    if len(result.curves) > _MOST_FIGURES:
        lines.append(f"and {len(result.curves) - _MOST_FIGURES} more curves in --json")
    return lines


def _comparison(result: LoadVsRecomputeResult, most_rows: int) -> TextTable:
    shown = result.points[:most_rows]
    hidden = len(result.points) - len(shown)
    return TextTable(
        title=f"On {result.gpu}, efficiency {result.efficiency}",
        columns=("model", "tokens", "layout", "tier", "per rank", "load", "recompute", "ratio", "split", "verdict"),
        left=frozenset({"layout", "tier", "verdict"}),
        rows=tuple(_comparison_row(point) for point in shown),
        note=f"{hidden} more rows in --json and --html" if hidden else "ratio: recompute / load; split: best token split",
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
    groups: dict[tuple[str, int], list[Curve]] = {}
    for curve in result.curves:
        groups.setdefault((curve.model, curve.tp), []).append(curve)
    return [_plot(model, tp, curves) for (model, tp), curves in groups.items()]


def _plot(model: str, tp: int, curves: Sequence[Curve]) -> LinePlot:
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
        title=f"{model}, TP {tp}: time to have the prefix in GPU memory",
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
        per_layout = list({(p.model, p.tokens, p.tp): p for p in result.points}.values())
        tables += [_levels(result, per_layout), _bytes(per_layout), _work(per_layout), _recompute(per_layout)]
        tables += [_load(result.points), _break_evens(result.points), *_strategies(result.points)]
    tables += [_mix(result), _measured_layers(result), _paths(result), _checks(result)]
    tables += [_models(result.models), _inputs(result.inputs), _skipped(result)]
    return [table for table in tables if table.rows]


def _levels(result: LoadVsRecomputeResult, points: Sequence[Point]) -> TextTable:
    """The three ways to estimate T_recompute, side by side: rule of thumb, exact work, exact work at real speed."""
    rows = []
    for p in points:
        if p.t_recompute_active_params_s is not None and p.flops_per_rank_active_params is not None:
            rows.append(_level("active params, peak", p, p.flops_per_rank_active_params, p.t_recompute_active_params_s))
        if p.t_recompute_floor_s is not None and p.flops_mode == "exact":
            rows.append(_level("exact FLOPs, peak", p, p.flops_per_rank, p.t_recompute_floor_s))
        if result.efficiency != "1.0":
            name = f"{p.flops_mode} FLOPs, efficiency {result.efficiency}"
            rows.append(_level(name, p, p.flops_per_rank, p.t_recompute_s))
    return TextTable(
        title="What each level of detail changes",
        columns=("estimate", "prefix", "FLOP per rank", "recompute", "load", "ratio"),
        rows=tuple(rows),
        note="the first line is the usual rule of thumb 2·Ψ_active·N + 4·N²·h_q·d·L/2",
    )


def _level(name: str, point: Point, flop: int, seconds: float) -> tuple[str, ...]:
    ratio = _times(seconds / point.t_load_s if point.t_load_s else None)
    prefix = f"{point.model}, {point.tokens:,}"
    return (name, prefix, format_flop(flop), format_duration(seconds), format_duration(point.t_load_s), ratio)


def _bytes(points: Sequence[Point]) -> TextTable:
    return TextTable(
        title="Bytes to move",
        columns=("prefix", "layout", "KV dtype", "per token", "per rank", "all ranks", "unique", "copies", "index", "state"),
        left=frozenset({"layout", "KV dtype"}),
        rows=tuple(
            (
                f"{p.model}, {p.tokens:,}",
                _layout(p),
                p.kv_dtype,
                format_bytes(p.bytes_per_token),
                format_bytes(p.rank_bytes),
                format_bytes(p.node_bytes),
                format_bytes(p.unique_bytes),
                f"{p.replicas:.3g}",
                format_bytes(p.index_bytes),
                format_bytes(p.state_bytes),
            )
            for p in points
        ),
        note="per rank is the fullest rank; per token is what one more token adds there, windows full",
    )


def _work(points: Sequence[Point]) -> TextTable:
    return TextTable(
        title="Work to recompute",
        columns=("prefix", "linear", "attention", "index", "total", "per rank", "plain /ranks"),
        rows=tuple(
            (
                f"{p.model}, {p.tokens:,}",
                format_flop(p.flops_linear),
                format_flop(p.flops_attention),
                format_flop(p.flops_index),
                format_flop(p.flops_total),
                format_flop(p.flops_per_rank),
                format_flop(p.flops_per_rank_div_tp),
            )
            for p in points
        ),
        note="per rank counts what every rank repeats: router, MLA down-projections, indexer, shared K/V heads",
    )


def _recompute(points: Sequence[Point]) -> TextTable:
    return TextTable(
        title="Where the recompute time goes",
        columns=("prefix", "dense", "experts", "attention", "index", "collectives", "bubbles", "total", "MFU"),
        rows=tuple(
            (
                f"{p.model}, {p.tokens:,}",
                *(
                    "" if part is None else format_duration(part)
                    for part in (
                        p.t_recompute_dense_s,
                        p.t_recompute_moe_s,
                        p.t_recompute_attention_s,
                        p.t_recompute_index_s,
                        p.t_recompute_comm_s,
                        p.t_recompute_bubble_s,
                    )
                ),
                format_duration(p.t_recompute_s),
                "" if p.mfu_ratio is None else f"{p.mfu_ratio:.0%}",
            )
            for p in points
            if p.t_recompute_dense_s is not None
        ),
    )


def _load(points: Sequence[Point]) -> TextTable:
    return TextTable(
        title="Where the load time goes",
        columns=("prefix", "tier", "rate per rank", "limited by", "queue", "fixed", "wire", "hidden", "total", "ρ"),
        left=frozenset({"tier", "limited by"}),
        rows=tuple(
            (
                f"{p.model}, {p.tokens:,}",
                p.tier,
                format_bandwidth(p.rank_bytes_per_s),
                p.limited_by,
                "∞" if p.t_load_queue_s is None else format_duration(p.t_load_queue_s),
                format_duration(p.t_load_fixed_s),
                format_duration(p.t_load_wire_s),
                format_duration(p.t_load_overlap_s),
                format_duration(p.t_load_s),
                f"{p.utilisation_ratio:.0%}",
            )
            for p in points
        ),
    )


def _break_evens(points: Sequence[Point]) -> TextTable:
    return TextTable(
        title="Break-evens",
        columns=("prefix", "tier", "B* per rank", "N_min", "S* hides the load", "x* tokens", "split", "gain", "layer split"),
        left=frozenset({"tier"}),
        rows=tuple(
            (
                f"{p.model}, {p.tokens:,}",
                p.tier,
                "" if p.break_even_bytes_per_s is None else format_bandwidth(p.break_even_bytes_per_s),
                "never" if p.smallest_useful_tokens is None else f"{p.smallest_useful_tokens:,.0f}",
                "never" if p.suffix_break_even_tokens is None else f"{p.suffix_break_even_tokens:,}",
                f"{p.split_tokens:,}",
                format_duration(p.split_t_s),
                f"{p.split_gain:.2f}×",
                format_duration(p.layer_split_t_s),
            )
            for p in points
        ),
        note="B*: bandwidth at which load = recompute; S*: new tokens whose layers hide a layer's load; x*: computed front",
    )


def _strategies(points: Sequence[Point]) -> list[TextTable]:
    return [
        TextTable(
            title=f"Ways to restore to the ranks that need the same bytes ({_where(point)})",
            columns=("strategy", "time", "host copies", "H2D", "over GPU fabric", "L1 per rank", "limited by"),
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
            note="bytes per group of ranks with equal content; c to e and g need ordered collectives on the load stream",
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
        columns=("input", "value", "unit", "provenance", "source"),
        left=frozenset({"unit", "provenance", "source"}),
        rows=tuple((i.name, f"{i.value:.4g}", i.unit, i.origin.provenance, i.origin.source) for i in inputs),
    )


def _skipped(result: LoadVsRecomputeResult) -> TextTable:
    return TextTable(
        title="Skipped",
        columns=("model", "TP", "reason"),
        left=frozenset({"reason"}),
        rows=tuple((skip.model, str(skip.tp), skip.reason) for skip in result.skipped),
    )
