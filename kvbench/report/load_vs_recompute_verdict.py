"""The answer of `load-vs-recompute` in words: the verdict, what it rests on, what would flip it."""

from collections import Counter
from collections.abc import Sequence

from kvbench.core.compare import CLOSE_RATIO, Verdict
from kvbench.core.units import format_bandwidth, format_bytes, format_duration, format_flop
from kvbench.report.tables import Tone
from kvbench.results.load_vs_recompute import Curve, LoadVsRecomputeResult, Point

WORDS: dict[Verdict, str] = {
    "load": "Load",
    "recompute": "Recompute",
    "split": "Split",
    "too_close": "Too close to call",
    "no_verdict": "No verdict",
}
TONES: dict[Verdict, Tone] = {
    "load": "good",
    "recompute": "bad",
    "split": "good",
    "too_close": "unsure",
    "no_verdict": "unsure",
}
STRATEGY_NAMES = {
    "per_rank_host_copies": "a per-rank copies",
    "shared_memory_direct": "b shared buffer",
    "fixed_source_broadcast_serial": "c broadcast, serial",
    "fixed_source_broadcast_pipelined": "c broadcast, pipelined",
    "hashed_source_broadcast_pipelined": "d hashed broadcast",
    "sharded_h2d_allgather_pipelined": "e shard + all-gather",
    "native_sequence_sharding": "f native sharding",
    "layer_split": "g layer split",
}
DETAIL_POINTS = 4
_MOST_CURVES, _MOST_SKIPPED = 8, 3


def verdict(result: LoadVsRecomputeResult) -> tuple[str, Tone, list[str]]:
    """The answer in one sentence, its tone, and the sentences under it."""
    points = result.points
    skipped = _skipped(result)
    if not points:
        return "No point was compared.", "unsure", skipped
    if len(points) == 1:
        return _point_sentence(points[0]), TONES[points[0].verdict], [*_point_details(points[0], result), *skipped]
    details = [*(_sentences(points) if len(points) <= DETAIL_POINTS else _crossings(result)), *skipped]
    verdicts = {point.verdict for point in points}
    if len(verdicts) == 1:
        return _common_verdict(points), TONES[points[0].verdict], details
    parts = _counted([point.verdict for point in points])
    if "split" in verdicts:
        details.append(f"without a split: {_counted([point.verdict_without_split for point in points])}")
    return f"It depends: {parts} of {len(points)} points.", "neutral", details


def _counted(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(f"{WORDS[verdict].lower()} at {count}" for verdict, count in Counter(verdicts).most_common())


def _skipped(result: LoadVsRecomputeResult) -> list[str]:
    lines = [f"skipped {skip.what}: {skip.reason}" for skip in result.skipped[:_MOST_SKIPPED]]
    more = len(result.skipped) - len(lines)
    return [*lines, f"and {more} more skipped, see the table"] if more else lines


def _sentences(points: Sequence[Point]) -> list[str]:
    """One sentence per point, and under it the other way to restore that would beat even the split."""
    lines = []
    for point in points:
        lines.append(_point_sentence(point))
        best = _fastest_other(point)
        if best is not None and point.split_t_s is not None and best[1] * CLOSE_RATIO < point.split_t_s:
            lines.append(f"  {point.tier}: {best[0]} would load in {format_duration(best[1])} (see the restore table)")
    return lines


def _common_verdict(points: Sequence[Point]) -> str:
    ratios = [point.ratio for point in points if point.ratio]
    low, high = (min(ratios), max(ratios)) if ratios else (0.0, 0.0)
    match points[0].verdict:
        case "load":
            return (
                f"Load, at all {len(points)} points: {times_text(low)} to {times_text(high)} faster than recomputing."
            )
        case "recompute":
            span = f"{times_text(1 / high)} to {times_text(1 / low)}"
            return f"Recompute, at all {len(points)} points: {span} faster than loading."
        case "split":
            gains = [point.split_gain for point in points]
            span = f"{times_text(min(gains))} to {times_text(max(gains))}"
            return f"Split, at all {len(points)} points: {span} faster than the better whole option."
        case "too_close":
            return f"Too close to call at all {len(points)} points."
        case "no_verdict":
            return f"No verdict: the path is too busy at all {len(points)} points."


def point_place(point: Point) -> str:
    """Which prefix, where: `qwen3-8b, 4,096 tokens, TP 1 bf16, dram`."""
    return f"{point.model}, {point.tokens:,} tokens, {layout_text(point)}, {point.tier}"


def layout_text(point: Point) -> str:
    """Ranks and cache format: `TP 8 bf16`."""
    return f"{point.layout} {point.kv_dtype}"


def _point_sentence(point: Point) -> str:
    text = _point_clause(point)
    return text[0].upper() + text[1:]


def _point_clause(point: Point) -> str:
    load, recompute = duration_text(point.t_load_s), format_duration(point.t_recompute_s)
    if point.suffix_tokens:
        load += f" of load that {point.suffix_tokens:,} new tokens do not hide"
    where, probably = point_place(point), "" if point.sure else "probably "
    match point.verdict:
        case "load":
            return (
                f"{probably}load: {load} against {recompute} to recompute, {times_text(point.ratio)} faster ({where})."
            )
        case "recompute":
            faster = times_text(1 / point.ratio if point.ratio else None)
            return f"{probably}recompute: {recompute} against {load} to load, {faster} faster ({where})."
        case "split":
            return (
                f"{probably}split: compute the first {point.split_tokens:,} tokens while the rest loads, "
                f"{duration_text(point.split_t_s)} against {load} to load and {recompute} to recompute ({where})."
            )
        case "too_close":
            return f"too close to call: {load} to load, {recompute} to recompute ({where})."
        case "no_verdict":
            return f"no verdict: the path would be {point.utilisation_ratio:.0%} busy ({where})."


def duration_text(value: float | None) -> str:
    """A duration; ∞ for a load that a path which is always busy never serves."""
    return "∞" if value is None else format_duration(value)


def times_text(ratio: float | None) -> str:
    """A factor: `27.4×`."""
    if ratio is None:
        return "∞×"
    return f"{ratio:.1f}×" if ratio >= 1 else f"{ratio:.2g}×"


def _point_details(point: Point, result: LoadVsRecomputeResult) -> list[str]:
    least = point.smallest_useful_tokens
    from_tokens = f" and from {least:,} tokens on" if least is not None and least > 1 else ""
    size = (
        f"{format_bytes(point.rank_bytes)} per rank, {format_bytes(point.node_bytes)} on all ranks, "
        f"{format_bytes(point.unique_bytes)} unique ({_copies(point.replicas)} of each byte)"
    )
    effective = "" if point.strategy == "per_rank_host_copies" else f" ({STRATEGY_NAMES[point.strategy]})"
    rate = f"{format_bandwidth(point.rank_bytes_per_s)} per rank{effective}, limited by {point.limited_by}"
    if point.verdict != "no_verdict":
        rate += f"; loading pays above B* = {_bandwidth(point.break_even_bytes_per_s)}{from_tokens}"
    work = f"{format_flop(point.flops_per_rank)} per rank; {_intensity(point)}"
    details = [size, _host_memory(point), work, rate, _suffix_sentence(point), _faster_strategy(point)]
    details += [_flip_sentence(point), _most_loads(point), _sure_sentence(point, result)]
    if point.verdict == "split":
        details.append(f"without a split: {WORDS[point.verdict_without_split].lower()}")
    return [detail for detail in details if detail]


def _host_memory(point: Point) -> str:
    """What a cached token costs below the GPU, where copies make it more than once."""
    if point.host_bytes_per_token <= point.shared_host_bytes_per_token:
        return ""
    copies, shared = format_bytes(point.host_bytes_per_token), format_bytes(point.shared_host_bytes_per_token)
    return f"a cached token takes {copies} of host memory with a copy per rank, {shared} with one shared copy"


def _suffix_sentence(point: Point) -> str:
    """The whole wait for the first token, where new tokens follow the prefix."""
    if not point.suffix_tokens or point.t_load_s is None:
        return ""
    load_s, recompute_s = point.t_load_s + point.t_suffix_s, point.t_recompute_s + point.t_suffix_s
    return (
        f"with {point.suffix_tokens:,} new tokens the first token comes after {format_duration(load_s)} instead of "
        f"{format_duration(recompute_s)}; their prefill hides {format_duration(point.t_load_overlap_s)} of the load"
    )


def _most_loads(point: Point) -> str:
    if not point.utilisation_ratio:
        return ""
    most = f"{point.most_loads_per_s:.3g} loads/s per rank"
    return f"the path is {point.utilisation_ratio:.0%} busy; no verdict above {most}"


def _faster_strategy(point: Point) -> str:
    best = _fastest_other(point)
    return "" if best is None else f"{best[0]} would load in {format_duration(best[1])} (see the restore table)"


def _fastest_other(point: Point) -> tuple[str, float] | None:
    """The best other way to restore with its time, where it would save more than the doubt.

    Sharding the cache itself (f, g) needs another attention backend, so it is in the table but not proposed.
    """
    kept = [option for option in point.strategies if option.l1_rank_ratio == 1 and option.name != point.strategy]
    timed = [(option.t_s, option.name) for option in kept if option.t_s]
    t_s, name = min(timed, default=(0.0, ""))
    if not timed or point.t_load_s is None or t_s * CLOSE_RATIO > point.t_load_s:
        return None
    return STRATEGY_NAMES[name], t_s


def _copies(replicas: float) -> str:
    return "1 copy" if replicas == 1 else f"{replicas:.2g} copies"


def _intensity(point: Point) -> str:
    if point.i_cache is None:
        return "no bytes to load"
    if point.i_hardware is None:
        return f"I_cache {_power(point.i_cache)} FLOP/B"
    relation = ">" if point.i_cache > point.i_hardware else "<"
    return f"I_cache {_power(point.i_cache)} {relation} I_hardware {_power(point.i_hardware)} FLOP/B at peak"


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
    word = WORDS[point.flip_verdict].lower()
    if point.flip_input == "bandwidth":
        return f"flips to {word} at {format_bandwidth(point.flip_value)} per rank (×{point.flip_factor:.3g})"
    return f"flips to {word} if recomputing took {format_duration(point.flip_value)} (×{1 / point.flip_factor:.3g})"


def _sure_sentence(point: Point, result: LoadVsRecomputeResult) -> str:
    if point.verdict == "no_verdict" or point.ratio_low is None or point.ratio_high is None:
        return ""
    low = f"{point.ratio_low:.3g}" if point.ratio_low else "0 (the path would be saturated)"
    span = f"T_recompute/T_load is between {low} and {point.ratio_high:.3g}"
    if result.measured_prefill is not None:
        basis = "loads end to end up to 1.36 times the wire time, and the fit off by its residual"
    else:
        basis = "compute between peak FLOP/s and 25 % MFU, loads end to end up to 1.36 times the wire time"
    return f"{'sure' if point.sure else 'not sure'}: {span} ({basis})"


def _crossings(result: LoadVsRecomputeResult) -> list[str]:
    lines = []
    for curve in result.curves[:_MOST_CURVES]:
        name = f"{curve.model} {curve.layout} {curve.kv_dtype} {curve.tier}"
        if not curve.tokens:
            lines.append(f"{name}: the path is always busy")
        elif curve.crossover_tokens:
            lines.append(
                f"{name}: load and recompute cross at {', '.join(f'{n:,}' for n in curve.crossover_tokens)} tokens"
            )
        else:
            faster = "loading" if curve.t_load_s[0] < curve.t_recompute_s[0] else "recomputing"
            lines.append(f"{name}: {faster} is faster from {curve.tokens[0]:,} to {curve.tokens[-1]:,} tokens")
        lines += _faster_at_some_length(result.points, curve)
    if len(result.curves) > _MOST_CURVES:
        lines.append(f"and {len(result.curves) - _MOST_CURVES} more curves in --json")
    return lines


def _faster_at_some_length(points: Sequence[Point], curve: Curve) -> list[str]:
    """The other way to restore that would change most, at the longest prefix of this curve's points."""
    key = (curve.model, curve.layout, curve.kv_dtype, curve.tier, curve.suffix_tokens)
    own = [p for p in points if (p.model, p.layout, p.kv_dtype, p.tier, p.suffix_tokens) == key]
    best = _fastest_other(own[-1]) if own else None
    if best is None:
        return []
    shown = duration_text(own[-1].t_load_s)
    return [f"  at {own[-1].tokens:,} tokens {best[0]} would load in {format_duration(best[1])} instead of {shown}"]
