"""The tables of `load-vs-recompute`: the comparison, and the evidence behind it."""

from collections.abc import Callable, Sequence

from kvbench.core.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flop,
    format_flop_rate,
)
from kvbench.report.load_vs_recompute_verdict import (
    DETAIL_POINTS,
    STRATEGY_NAMES,
    WORDS,
    duration_text,
    layout_text,
    point_place,
    times_text,
)
from kvbench.report.tables import TextTable
from kvbench.results.load_vs_recompute import Input, LoadVsRecomputeResult, ModelSummary, Point


def comparison(result: LoadVsRecomputeResult, most_rows: int, *, wide: bool = True) -> TextTable:
    """One row per point; what all points share stands in the title, and B* only where there is room."""
    shown = result.points[:most_rows]
    hidden = len(result.points) - len(shown)
    names = ("model", "tokens", "layout", "tier", "bytes/rank", "load", "recompute", "ratio", "split", "B*", "verdict")
    rows = [_comparison_row(point) for point in shown]
    shared = [i for i in (0, 2, 3) if len({row[i] for row in rows}) == 1]
    common = ", ".join([*(rows[0][i] for i in shared if rows), f"{result.gpu}, efficiency {result.efficiency}"])
    kept = [i for i, name in enumerate(names) if i not in shared and (wide or name != "B*")]
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
        layout_text(point),
        point.tier,
        format_bytes(point.rank_bytes),
        duration_text(point.t_load_s),
        format_duration(point.t_recompute_s),
        "–" if point.t_load_s is None else times_text(point.ratio),
        duration_text(point.split_t_s),
        "–" if point.break_even_bytes_per_s is None else format_bandwidth(point.break_even_bytes_per_s),
        WORDS[point.verdict].lower() + ("" if point.sure or point.verdict in ("no_verdict", "too_close") else " ?"),
    )


def evidence(result: LoadVsRecomputeResult) -> list[TextTable]:
    """Every figure the verdict rests on; a sweep shows what its points share."""
    tables = []
    if 0 < len(result.points) <= DETAIL_POINTS:
        tables = [_levels(result), _details(result.points), *_strategies(result.points)]
    tables += [_mix(result), _measured_layers(result), _paths(result), _checks(result)]
    tables += [_models(result.models), _inputs(result.inputs), _skipped(result)]
    return [table for table in tables if table.rows]


def _labels(points: Sequence[Point]) -> tuple[str, ...]:
    """A short heading per point: only what tells it from the others."""
    parts = [(p.model, f"{p.tokens:,}", layout_text(p), p.tier, f"+{p.suffix_tokens:,}") for p in points]
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


def _level(label: str, name: str, point: Point, flop: int, recompute_s: float) -> tuple[str, ...]:
    ratio = "–" if point.t_load_s is None else times_text(recompute_s / point.t_load_s if point.t_load_s else None)
    return (label, name, format_flop(flop), format_duration(recompute_s), duration_text(point.t_load_s), ratio)


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
        "host memory per token, per-rank": format_bytes(p.host_bytes_per_token),
        "host memory per token, shared": format_bytes(p.shared_host_bytes_per_token),
        "  of a rank: index key": format_bytes(p.index_bytes) if p.index_bytes else "",
        "  of a rank: recurrent state": format_bytes(p.state_bytes) if p.state_bytes else "",
        "FLOP linear": format_flop(p.flops_linear),
        "FLOP attention": format_flop(p.flops_attention),
        "FLOP attention, absorbed": _or_empty(p.flops_attention_absorbed, format_flop),
        "FLOP index scores": format_flop(p.flops_index) if p.flops_index else "",
        "FLOP total": format_flop(p.flops_total),
        "FLOP per rank, repeated counted": format_flop(p.flops_per_rank),
        "FLOP per rank, plain division": format_flop(p.flops_per_rank_div_tp),
        "I_cache, FLOP/B": _or_empty(p.i_cache, "{:.3g}".format),
        "I_hardware, FLOP/B": _or_empty(p.i_hardware, "{:.3g}".format),
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
        "token split": f"{duration_text(p.split_t_s)} ({p.split_gain:.2f}×)",
        "layer split": duration_text(p.layer_split_t_s),
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
            title=f"Restoring to ranks that need the same bytes: {point_place(point)}",
            columns=("strategy", "time", "copies", "H2D", "GPU-GPU", "L1/rank", "limited by"),
            left=frozenset({"limited by"}),
            rows=tuple(
                (
                    STRATEGY_NAMES.get(option.name, option.name),
                    "?" if option.t_s is None else format_duration(option.t_s),
                    str(option.host_copies),
                    format_bytes(option.node_h2d_bytes),
                    format_bytes(option.gpu_gpu_bytes),
                    f"{100 * option.l1_rank_ratio:.3g}%",
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
    title = "Predicted against measured"
    replayed = any(check.what.startswith("saved") for check in result.checks)
    return TextTable(
        title=f"{title}, in a replay" if replayed else f"{title}, at a length the fit has not seen",
        columns=("what", "tokens", "predicted", "measured", "predicted / measured"),
        rows=tuple(
            (
                check.what,
                f"{check.tokens:,}",
                format_duration(check.predicted_s),
                format_duration(check.measured_s),
                f"{check.predicted_s / check.measured_s:.2f}" if check.measured_s else "-",
            )
            for check in result.checks
        ),
        note="saved by a hit: median TTFT computed minus median TTFT served" if replayed else "",
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
        columns=("what", "reason"),
        left=frozenset({"reason"}),
        rows=tuple((skip.what, skip.reason) for skip in result.skipped),
    )
